{% include "types/unit.wgsl" %}

{% set scales = 2 %}
{% include "types/packed.wgsl" %}

// For each super-block of 256: nibbles, a plane of the upper two bits, 16 scales plus 128, each for 2 units; then d.
const HIGH: u32 = {{ n_rows }}u * UNITS;
const SCALES: u32 = HIGH + {{ n_rows * (n_in // 16) }}u;
const BLOCKS: u32 = SCALES + {{ n_rows * (n_in // 64) }}u;
struct Raw8 { q: u32, high: u32, scale: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(
        w[row * UNITS + unit],
        w[HIGH + row * {{ n_in // 16 }}u + unit / 2u] >> (4u * (unit % 2u)),
        w[SCALES + row * {{ n_in // 64 }}u + unit / 8u] >> (8u * (unit / 2u % 4u)),
        w[BLOCKS + row * {{ (n_in + 511) // 512 }}u + unit / 64u] >> (16u * (unit / 32u % 2u)),
    );
}
fn packed8(raw: Raw8) -> vec2<u32> { return nibbles(raw.q) | pairs(raw.high, 4u); }
fn affine8(raw: Raw8) -> vec2<f32> { return scale8(raw) * vec2(1.0, -32.0); }
fn codes8(raw: Raw8) -> W8 { return by_turns(packed8(raw), 32.0); }
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d) * (byte_at(raw.scale, 0u) - 128.0); }
{% if in_blocks %}

struct Raw32 { q: vec4<u32>, high: vec4<u32>, scale: u32, d: u32 }
fn load32(row: u32, block: u32) -> Raw32 {
    return Raw32(
        w4[row * (UNITS / 4u) + block],
        w4[HIGH / 4u + row * {{ n_in // 64 }}u + block / 2u],
        w[SCALES + row * {{ n_in // 64 }}u + block / 2u],
        w[BLOCKS + row * {{ (n_in + 511) // 512 }}u + block / 16u],
    );
}
fn codes32(raw: Raw32, block: u32) -> Codes32 { return both32(nibbles32(raw.q), pairs32(raw.high, block, 4u)); }
fn affine32(raw: Raw32, block: u32, i: u32) -> vec2<f32> {
    return affine8(Raw8(0u, 0u, raw.scale >> (8u * (2u * (block % 2u) + i)), raw.d >> (16u * (block / 8u % 2u))));
}
{% endif %}
