{% include "types/unit.wgsl" %}

{% set scales = 2 %}
{% include "types/packed.wgsl" %}

// Nibbles, and a byte of scale for 2 units.
const SCALES: u32 = {{ n_rows }}u * UNITS;
struct Raw8 { q: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(w[row * UNITS + unit], w[SCALES + row * {{ n_in // 64 }}u + unit / 8u] >> (8u * (unit / 2u % 4u)));
}
{% include "types/fp4.wgsl" %}

// Half the value of a float with 4 bits of exponent and 3 of mantissa; 127 is 0.
fn scale8(raw: Raw8) -> f32 {
    let mantissa = raw.d & 7u;
    let exponent = (raw.d >> 3u) & 15u;
    let normal = bitcast<f32>((exponent + 119u) << 23u | mantissa << 20u);
    let scale = select(normal, f32(mantissa) / 1024.0, exponent == 0u);
    return select(scale, 0.0, (raw.d & 255u) == 127u);
}
{% if in_blocks %}

struct Raw32 { q: vec4<u32>, d: u32 }
fn load32(row: u32, block: u32) -> Raw32 {
    return Raw32(w4[row * (UNITS / 4u) + block], w[SCALES + row * {{ n_in // 64 }}u + block / 2u]);
}
fn affine32(raw: Raw32, block: u32, i: u32) -> vec2<f32> {
    return affine8(Raw8(0u, raw.d >> (8u * (2u * (block % 2u) + i))));
}
{% endif %}
