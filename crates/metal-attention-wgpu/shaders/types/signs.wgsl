// Bytes that are 1 where a bit of `signs` is set: those of even bits, and those of odd ones.
fn sign_bytes(signs: u32) -> vec2<u32> {
    return ((vec2(signs, signs >> 1u) & vec2(0x55u)) * 0x41041u) & vec2(0x01010101u);
}
// Eight signs from seven: an even number of them is set.
fn even_signs(seven: u32) -> u32 { return (seven & 127u) | ((countOneBits(seven & 127u) & 1u) << 7u); }
// Bytes from 1 to 127, negated where the byte of `minus` is 1.
fn negated(size: vec2<u32>, minus: vec2<u32>) -> vec2<u32> { return (size ^ (minus * 255u)) + minus; }

fn affine8(raw: Raw8) -> vec2<f32> { return vec2(scale8(raw), 0.0); }
fn codes8(raw: Raw8) -> W8 { return signed_by_turns(packed8(raw)); }
