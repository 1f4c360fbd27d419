// Twice the values of a unit's 4-bit floats, plus 14, as bytes. src/matrix/layout.rs renumbers the codes for this: such a
// number is the code itself, or 13 more where two or three of these hold: bit 0 is set, bit 1 is not, bit 3 is not.
fn packed8(raw: Raw8) -> vec2<u32> {
    let a = raw.q; // of each code, at its bit 0
    let b = ~(raw.q >> 1u);
    let c = ~(raw.q >> 3u);
    let most = (a & b) | (a & c) | (b & c);
    return nibbles(raw.q) + 13u * (vec2(most, most >> 4u) & vec2(0x01010101u));
}
fn affine8(raw: Raw8) -> vec2<f32> { return scale8(raw) * vec2(1.0, -14.0); }
fn codes8(raw: Raw8) -> W8 { return by_turns(packed8(raw), 14.0); }
{% if in_blocks %}

fn codes32(raw: Raw32, _block: u32) -> Codes32 {
    let a = raw.q;
    let b = ~(raw.q >> vec4(1u));
    let c = ~(raw.q >> vec4(3u));
    let most = (a & b) | (a & c) | (b & c);
    let q = nibbles32(raw.q);
    return Codes32(q.even + 13u * (most & vec4(0x01010101u)), q.odd + 13u * ((most >> vec4(4u)) & vec4(0x01010101u)));
}
{% endif %}
