// Shared by the files of this folder: dequantised units, and bit fields as numbers.
// Bounds: none are needed.
struct W8 { lo: vec4<f32>, hi: vec4<f32> }

// The half in the lower 16 bits.
fn half_of(word: u32) -> f32 { return unpack2x16float(word).x; }

// Bit fields as floats, minus an offset. Plain conversions: the trick of putting a field into the mantissa of 2^23 and
// subtracting that again loses the field on drivers that reorder sums, such as NVIDIA's.

// The bytes of two words, interleaved.
fn by_turns(codes: vec2<u32>, offset: f32) -> W8 {
    let e = bytes(codes.x, offset);
    let o = bytes(codes.y, offset);
    return W8(vec4<f32>(e.x, o.x, e.y, o.y), vec4<f32>(e.z, o.z, e.w, o.w));
}

// The bytes of two words as signed numbers, interleaved.
fn signed_by_turns(codes: vec2<u32>) -> W8 { return by_turns(codes ^ vec2(0x80808080u), 128.0); }

// Eight fields of 4 bits as bytes, those of even elements and those of odd ones: GPUs convert bytes in place, without
// shifting each to the bottom.
fn nibbles(q: u32) -> vec2<u32> { return vec2(q, q >> 4u) & vec2(0x0f0f0f0fu); }

// Eight fields of 2 bits, of even elements at bits 0, 8, 16, 24, as bytes in which they are bits `to` and `to + 1`.
fn pairs(q: u32, to: u32) -> vec2<u32> { return (vec2(q, q >> 2u) & vec2(0x03030303u)) << vec2(to); }

// Eight fields of 1 bit, of even elements at bits 0, 8, 16, 24, as bytes in which they are bit `to`.
fn bits(q: u32, to: u32) -> vec2<u32> { return (vec2(q, q >> 1u) & vec2(0x01010101u)) << vec2(to); }

// Four fields of 8 bits.
fn bytes(q: u32, offset: f32) -> vec4<f32> {
    return vec4<f32>(vec4<u32>(q, q >> 8u, q >> 16u, q >> 24u) & vec4<u32>(255u)) - offset;
}

// Byte i of a word.
fn byte_at(word: u32, i: u32) -> f32 { return f32((word >> (8u * i)) & 0xffu); }
