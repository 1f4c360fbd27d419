{% include "types/unit.wgsl" %}

{% include "types/words.wgsl" %}

fn codes8(raw: Raw8) -> W8 {
    let even = bitcast<vec4<f32>>(raw.q << vec4<u32>(16u));
    let odd = bitcast<vec4<f32>>(raw.q & vec4<u32>(0xffff0000u));
    return W8(vec4<f32>(even.x, odd.x, even.y, odd.y), vec4<f32>(even.z, odd.z, even.w, odd.w));
}
