{% include "types/unit.wgsl" %}

{% set scales = 1 %}
{% include "types/packed.wgsl" %}

const HIGH: u32 = {{ n_rows }}u * UNITS;
const SCALES: u32 = HIGH + {{ n_rows * (n_in // 32) }}u;
struct Raw8 { q: u32, high: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(
        w[row * UNITS + unit],
        w[HIGH + row * {{ n_in // 32 }}u + unit / 4u] >> (2u * (unit % 4u)),
        w[SCALES + row * {{ (n_in + 63) // 64 }}u + unit / 8u] >> (16u * (unit / 4u % 2u)),
    );
}
fn packed8(raw: Raw8) -> vec2<u32> { return nibbles(raw.q) | bits(raw.high, 4u); }
fn affine8(raw: Raw8) -> vec2<f32> { return scale8(raw) * vec2(1.0, -16.0); }
fn codes8(raw: Raw8) -> W8 { return by_turns(packed8(raw), 16.0); }
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d); }
{% if in_blocks %}

struct Raw32 { q: vec4<u32>, high: u32, d: u32 }
fn load32(row: u32, block: u32) -> Raw32 {
    return Raw32(
        w4[row * (UNITS / 4u) + block],
        w[HIGH + row * {{ n_in // 32 }}u + block],
        w[SCALES + row * {{ (n_in + 63) // 64 }}u + block / 2u],
    );
}
fn codes32(raw: Raw32, _block: u32) -> Codes32 { return both32(nibbles32(raw.q), bits32(raw.high, 4u)); }
fn affine32(raw: Raw32, block: u32, _i: u32) -> vec2<f32> { return affine8(Raw8(0u, 0u, raw.d >> (16u * (block % 2u)))); }
{% endif %}
