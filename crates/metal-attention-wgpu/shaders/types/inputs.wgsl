// Inputs of a product as integers of three bytes, as exact as floats: then a unit of eight takes six dot products of four
// bytes, instead of eight conversions of codes and eight products.
//
// `even` holds the even elements' high, middle and low bytes, all signed, and the value of one step; `odd` those of the odd
// elements, and the sum of all eight inputs.
// Bounds: none are needed; neighbouring lanes have neighbouring quads.
struct X8 { even: vec4<u32>, odd: vec4<u32> }

// One half of an X8: `even` for even quads, `odd` for odd ones. Quads 2 i and 2 i + 1 of a vector make up a unit, and
// neighbouring lanes compute them.
fn input_bytes(quad: u32, v: vec4<f32>) -> vec4<u32> {
    let size = abs(v);
    var most = max(max(size.x, size.y), max(size.z, size.w));
    most = max(most, subgroupShuffleXor(most, 1u));
    var sum = v.x + v.y + v.z + v.w;
    sum += subgroupShuffleXor(sum, 1u);
    // At most 127 * 65536 + 127 * 256 + 127 = 8355711. If all eight are tiny they count as zero.
    let factor = min(8355000.0 / most, 1e37);
    // Elements 0 and 2 go to the lower half, 1 and 3 to the upper.
    let low = vec4<i32>(round(v * factor)).xzyw;
    let middle = (low + vec4(128)) >> vec4(8u);
    let high = (middle + vec4(128)) >> vec4(8u);
    let own = vec3(pack4xI8(high), pack4xI8(middle), pack4xI8(low));
    let other = subgroupShuffleXor(own, 1u);
    if quad % 2u == 0u {
        return vec4((own & vec3(0xffffu)) | (other << vec3(16u)), bitcast<u32>(1.0 / factor));
    }
    return vec4((other >> vec3(16u)) | (own & vec3(0xffff0000u)), bitcast<u32>(sum));
}
