// The values of the codes of IQ4_NL and IQ4_XS, as bytes plus 128: -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38,
// 53 69 89 113.
fn iq4_value(codes: vec4<u32>) -> vec4<f32> {
    let low = select(vec4<u32>(0x3f2d1801u), vec4<u32>(0x766a5d4fu), (codes & vec4<u32>(4u)) != vec4<u32>(0u));
    let high = select(vec4<u32>(0xa6998d81u), vec4<u32>(0xf1d9c5b5u), (codes & vec4<u32>(4u)) != vec4<u32>(0u));
    let four = select(low, high, (codes & vec4<u32>(8u)) != vec4<u32>(0u));
    return vec4<f32>((four >> (8u * (codes & vec4<u32>(3u)))) & vec4<u32>(0xffu)) - 128.0;
}
fn iq4_values(q: u32) -> W8 {
    let shift = vec4<u32>(0u, 4u, 8u, 12u);
    return W8(iq4_value(vec4<u32>(q) >> shift), iq4_value(vec4<u32>(q >> 16u) >> shift));
}
