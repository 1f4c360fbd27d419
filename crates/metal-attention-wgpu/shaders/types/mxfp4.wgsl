{% include "types/unit.wgsl" %}

{% set scales = 1 %}
{% include "types/packed.wgsl" %}

// Nibbles, and a byte of scale for 4 units.
const SCALES: u32 = {{ n_rows }}u * UNITS;
struct Raw8 { q: u32, e: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(
        w[row * UNITS + unit],
        w[SCALES + row * {{ (n_in + 127) // 128 }}u + unit / 16u] >> (8u * (unit / 4u % 4u)),
    );
}
{% include "types/fp4.wgsl" %}

// 2^(e - 128), as codes are twice the values. The smallest 2^(e - 127) is denormal: a bit of the mantissa, not an exponent.
fn scale8(raw: Raw8) -> f32 {
    return 0.5 * bitcast<f32>(max((raw.e << 23u) & 0x7f800000u, 0x00400000u));
}
{% if in_blocks %}

struct Raw32 { q: vec4<u32>, e: u32 }
fn load32(row: u32, block: u32) -> Raw32 {
    return Raw32(w4[row * (UNITS / 4u) + block], w[SCALES + row * {{ (n_in + 127) // 128 }}u + block / 4u]);
}
fn affine32(raw: Raw32, block: u32, _i: u32) -> vec2<f32> { return affine8(Raw8(0u, raw.e >> (8u * (block % 4u)))); }
{% endif %}
