{% include "types/unit.wgsl" %}

{% set scales = 1 %}
{% include "types/packed.wgsl" %}

{% include "types/nibbles.wgsl" %}

fn packed8(raw: Raw8) -> vec2<u32> { return nibbles(raw.q); }
fn affine8(raw: Raw8) -> vec2<f32> { return scale8(raw) * vec2(1.0, -8.0); }
fn codes8(raw: Raw8) -> W8 { return by_turns(packed8(raw), 8.0); }
{% if in_blocks %}

struct Raw32 { q: vec4<u32>, d: u32 }
fn load32(row: u32, block: u32) -> Raw32 {
    return Raw32(w4[row * (UNITS / 4u) + block], w[SCALES + row * {{ (n_in + 63) // 64 }}u + block / 2u]);
}
fn codes32(raw: Raw32, _block: u32) -> Codes32 { return nibbles32(raw.q); }
fn affine32(raw: Raw32, block: u32, _i: u32) -> vec2<f32> { return affine8(Raw8(0u, raw.d >> (16u * (block % 2u)))); }
{% endif %}
