// Logits are compared by their bits, since drivers may take it that no float is NaN: a greater key is a greater logit,
// both zeros have one key, NaN has the lowest, 0.
// Bounds: none are needed.
fn logit_key(bits: u32) -> u32 {
    let magnitude = bits & 0x7fffffffu;
    let ordered = select(bits | 0x80000000u, ~bits, magnitude != bits && magnitude != 0u);
    return select(ordered, 0u, magnitude > 0x7f800000u);
}
