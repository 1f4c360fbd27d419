// Shared by the files of this folder: what a unit becomes, and bit fields as numbers.
struct W8 { lo: vec4<f32>, hi: vec4<f32> }

// The half in the lower 16 bits.
fn half_of(word: u32) -> f32 { return unpack2x16float(word).x; }

// Bit fields as floats, less an offset. Plain conversions: the trick of placing a field in the mantissa of 2^23 and
// subtracting that again loses the field on drivers that reorder sums, as NVIDIA's does.

// The bytes of two words, one of each by turns.
fn by_turns(even: u32, odd: u32, offset: f32) -> W8 {
    let e = bytes(even, offset);
    let o = bytes(odd, offset);
    return W8(vec4<f32>(e.x, o.x, e.y, o.y), vec4<f32>(e.z, o.z, e.w, o.w));
}

// Eight fields of 4 bits. As bytes first: GPUs convert those where they lie, without shifting each to the bottom.
fn nibbles(q: u32, offset: f32) -> W8 {
    return by_turns(q & 0x0f0f0f0fu, (q >> 4u) & 0x0f0f0f0fu, offset);
}

// Eight fields of 2 bits.
fn pairs(q: u32, offset: f32) -> W8 {
    let fields = vec4<u32>(q, q >> 2u, q >> 4u, q >> 6u);
    return W8(vec4<f32>(fields & vec4<u32>(3u)) - offset, vec4<f32>((fields >> vec4<u32>(8u)) & vec4<u32>(3u)) - offset);
}

// Eight fields of 1 bit.
fn bits(q: u32) -> W8 {
    let fields = vec4<u32>(q, q >> 1u, q >> 2u, q >> 3u);
    return W8(vec4<f32>(fields & vec4<u32>(1u)), vec4<f32>((fields >> vec4<u32>(4u)) & vec4<u32>(1u)));
}

// Four fields of 8 bits.
fn bytes(q: u32, offset: f32) -> vec4<f32> {
    return vec4<f32>(vec4<u32>(q, q >> 8u, q >> 16u, q >> 24u) & vec4<u32>(255u)) - offset;
}

// Byte i of a word.
fn byte_at(word: u32, i: u32) -> f32 { return f32((word >> (8u * i)) & 0xffu); }
