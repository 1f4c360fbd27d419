{% include "types/signs.wgsl" %}

{% include "types/grid8.wgsl" %}

// Magnitudes 8, 25 and 43.
fn sizes8(code: u32) -> vec2<u32> {
    let c = point8(code);
    return vec2(0x08080808u) + 17u * c + ((c >> vec2(1u)) & vec2(0x01010101u));
}
