// Twice the values of a unit's 4-bit floats, as signed bytes: by magnitude 0 1 2 3, 4 6 8 12.
fn packed8(raw: Raw8) -> vec2<u32> {
    let q = nibbles(raw.q);
    let size = q & vec2(0x07070707u);
    // From 4 on codes c stand for c + (c mod 4), and the last one for 2 more.
    let more = size & (((q >> vec2(2u)) & vec2(0x01010101u)) * 3u);
    let last = more & (more >> vec2(1u)) & vec2(0x01010101u);
    let minus = (q >> vec2(3u)) & vec2(0x01010101u);
    // Negated above 128, where nothing is carried from byte to byte.
    let v = (size + more + 2u * last) | vec2(0x80808080u);
    return ((v ^ (minus * 255u)) + minus) ^ vec2(0x80808080u);
}
fn affine8(raw: Raw8) -> vec2<f32> { return vec2(scale8(raw), 0.0); }
fn codes8(raw: Raw8) -> W8 { return signed_by_turns(packed8(raw)); }
