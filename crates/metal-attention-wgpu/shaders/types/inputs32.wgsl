// Inputs of a product as integers of three bytes, as exact as floats: then a block of 32 takes 24 dot products of four bytes,
// instead of 32 conversions of codes and 32 products.
//
// A unit's inputs are signed 24-bit integers times the value of one step, which depends on the largest of the block. `even`
// has the high, middle and low bytes, all signed, of the even elements, `odd` those of the odd ones.
// Bounds: none are needed; four neighbouring lanes have the four units of a block.
struct Digits8 { even: vec3<u32>, odd: vec3<u32>, worth: f32, sum: f32 }
fn digits8(a: vec4<f32>, b: vec4<f32>) -> Digits8 {
    // Compared as integers, NaN is above infinity, and infinity above all numbers. Values below 1e-38 count as zero.
    let sizes = max(bitcast<vec4<u32>>(abs(a)), bitcast<vec4<u32>>(abs(b)));
    var most = max(max(max(sizes.x, sizes.y), max(sizes.z, sizes.w)), bitcast<u32>(1e-31));
    most = max(most, subgroupShuffleXor(most, 1u));
    most = max(most, subgroupShuffleXor(most, 2u));
    // At most 127 * 65536 + 127 * 256 + 127 = 8355711.
    let factor = 8355000.0 / bitcast<f32>(most);
    let sums = a + b;
    return Digits8(
        bytes_of(vec4(a.xz, b.xz) * factor),
        bytes_of(vec4(a.yw, b.yw) * factor),
        1.0 / factor,
        (sums.x + sums.y) + (sums.z + sums.w),
    );
}

// The high, middle and low bytes of four numbers, a word each.
fn bytes_of(v: vec4<f32>) -> vec3<u32> {
    // Each byte is the signed one plus 128.
    let whole = bitcast<vec4<u32>>(vec4<i32>(round(v))) + vec4(0x00808080u);
    // Bytes 0 and 2, then 1 and 3, of two numbers, interleaved.
    let low = (whole.xz & vec2(0x00ff00ffu)) | ((whole.yw & vec2(0x00ff00ffu)) << vec2(8u));
    let high = ((whole.xz >> vec2(8u)) & vec2(0x00ff00ffu)) | (whole.yw & vec2(0xff00ff00u));
    return vec3(
        (low.x >> 16u) | (low.y & 0xffff0000u),
        (high.x & 0xffffu) | (high.y << 16u),
        (low.x & 0xffffu) | (low.y << 16u),
    ) ^ vec3(0x80808080u);
}

// A block's inputs: bytes of its four units, the value of one step, sums of the units.
struct X32 {
    even: array<vec4<u32>, 3>,
    odd: array<vec4<u32>, 3>,
    worth: f32,
    sums: vec4<f32>,
}

// The codes of a block, four units of eight, as signed bytes.
struct Codes32 { even: vec4<u32>, odd: vec4<u32> }
// The codes of a word of nibbles for each unit.
fn nibbles32(q: vec4<u32>) -> Codes32 {
    return Codes32(q & vec4(0x0f0f0f0fu), (q >> vec4(4u)) & vec4(0x0f0f0f0fu));
}
// Codes of two bits, of which a word holds two units', as bits `to` and `to + 1`. `four`: the words of two blocks, and which of them.
fn pairs32(four: vec4<u32>, block: u32, to: u32) -> Codes32 {
    let two = select(four.xy, four.zw, block % 2u == 1u);
    let q = vec4(two.x, two.x >> 4u, two.y, two.y >> 4u);
    return Codes32((q & vec4(0x03030303u)) << vec4(to), ((q >> vec4(2u)) & vec4(0x03030303u)) << vec4(to));
}
// Codes of one bit, of which a word holds four units', as bit `to`.
fn bits32(word: u32, to: u32) -> Codes32 {
    let q = vec4(word) >> vec4(0u, 2u, 4u, 6u);
    return Codes32((q & vec4(0x01010101u)) << vec4(to), ((q >> vec4(1u)) & vec4(0x01010101u)) << vec4(to));
}
fn both32(a: Codes32, b: Codes32) -> Codes32 { return Codes32(a.even | b.even, a.odd | b.odd); }
