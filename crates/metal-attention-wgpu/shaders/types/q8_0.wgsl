{% include "types/unit.wgsl" %}

{% set scales = 1 %}
{% include "types/packed.wgsl" %}

const SCALES: u32 = {{ n_rows }}u * (2u * UNITS);
struct Raw8 { even: u32, odd: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    let at = row * (2u * UNITS) + unit;
    return Raw8(
        w[at],
        w[at + UNITS],
        w[SCALES + row * {{ (n_in + 63) // 64 }}u + unit / 8u] >> (16u * (unit / 4u % 2u)),
    );
}
fn packed8(raw: Raw8) -> vec2<u32> { return vec2(raw.even, raw.odd) ^ vec2(0x80808080u); }
fn affine8(raw: Raw8) -> vec2<f32> { return vec2(scale8(raw), 0.0); }
fn codes8(raw: Raw8) -> W8 { return by_turns(vec2(raw.even, raw.odd), 128.0); }
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d); }
{% if in_blocks %}

struct Raw32 { even: vec4<u32>, odd: vec4<u32>, d: u32 }
fn load32(row: u32, block: u32) -> Raw32 {
    return Raw32(
        w4[row * (UNITS / 2u) + block],
        w4[row * (UNITS / 2u) + UNITS / 4u + block],
        w[SCALES + row * {{ (n_in + 63) // 64 }}u + block / 2u],
    );
}
fn codes32(raw: Raw32, _block: u32) -> Codes32 { return Codes32(raw.even ^ vec4(0x80808080u), raw.odd ^ vec4(0x80808080u)); }
fn affine32(raw: Raw32, block: u32, _i: u32) -> vec2<f32> { return affine8(Raw8(0u, 0u, raw.d >> (16u * (block % 2u)))); }
{% endif %}
