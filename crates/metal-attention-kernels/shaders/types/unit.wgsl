// Shared by the files of this folder. They read `w`, the packed rows of a matrix part, as src/weights/layout.rs lays
// them out. A unit is 8 elements of a row: `load8` fetches what it takes, `codes8` and `scale8` turn that into numbers,
// where a weight is scale8 * code (the scale of types with a minimum or without scales is 1).
const UNITS: u32 = {{ (n_in + 7) // 8 }}u;

struct W8 { lo: vec4<f32>, hi: vec4<f32> }

// Elements 8 * unit to 8 * unit + 7 of a row of the part.
fn weights8(row: u32, unit: u32) -> W8 {
    let raw = load8(row, unit);
    let codes = codes8(raw);
    let scale = scale8(raw);
    return W8(codes.lo * scale, codes.hi * scale);
}

// The half in the lower 16 bits.
fn half_of(word: u32) -> f32 { return unpack2x16float(word).x; }

// Bit fields as floats, less an offset. Plain conversions: the trick of placing a field in the mantissa of 2^23 and
// subtracting that again loses the field on drivers that reorder sums, as NVIDIA's does.

// Eight fields of 4 bits.
fn nibbles(q: u32, offset: f32) -> W8 {
    let fields = vec4<u32>(q, q >> 4u, q >> 8u, q >> 12u);
    return W8(vec4<f32>(fields & vec4<u32>(15u)) - offset, vec4<f32>((fields >> vec4<u32>(16u)) & vec4<u32>(15u)) - offset);
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
