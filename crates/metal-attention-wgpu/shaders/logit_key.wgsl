// Logits are compared by their bits, since drivers may assume that no float is NaN: a higher key is a higher logit, both
// zeros have one key, and NaN has the lowest key, 0.
// Bounds: none are needed.
fn logit_key(bits: u32) -> u32 {
    let magnitude = bits & 0x7fffffffu;
    let ordered = select(bits | 0x80000000u, ~bits, magnitude != bits && magnitude != 0u);
    return select(ordered, 0u, magnitude > 0x7f800000u);
}
