{% include "types/unit.wgsl" %}

{% set scales = 1 %}
{% include "types/packed.wgsl" %}

// For each super-block of 256: 8 pairs of bytes (scale, minimum), each for 4 units; then (d, dmin).
const SCALES: u32 = {{ n_rows }}u * UNITS;
const BLOCKS: u32 = SCALES + {{ n_rows * (n_in // 64) }}u;
struct Raw8 { q: u32, scale: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(
        w[row * UNITS + unit],
        w[SCALES + row * {{ n_in // 64 }}u + unit / 8u] >> (16u * (unit / 4u % 2u)),
        w[BLOCKS + row * {{ n_in // 256 }}u + unit / 32u],
    );
}
fn packed8(raw: Raw8) -> vec2<u32> { return nibbles(raw.q); }
fn affine8(raw: Raw8) -> vec2<f32> {
    return unpack2x16float(raw.d) * vec2(byte_at(raw.scale, 0u), -byte_at(raw.scale, 1u));
}
fn codes8(raw: Raw8) -> W8 {
    let q = by_turns(packed8(raw), 0.0);
    let dm = affine8(raw);
    return W8(q.lo * dm.x + dm.y, q.hi * dm.x + dm.y);
}
fn scale8(raw: Raw8) -> f32 { return 1.0; }
{% if in_blocks %}

struct Raw32 { q: vec4<u32>, scale: u32, d: u32 }
fn load32(row: u32, block: u32) -> Raw32 {
    return Raw32(
        w4[row * (UNITS / 4u) + block],
        w[SCALES + row * {{ n_in // 64 }}u + block / 2u],
        w[BLOCKS + row * {{ n_in // 256 }}u + block / 8u],
    );
}
fn codes32(raw: Raw32, _block: u32) -> Codes32 { return nibbles32(raw.q); }
fn affine32(raw: Raw32, block: u32, _i: u32) -> vec2<f32> {
    return affine8(Raw8(0u, raw.scale >> (16u * (block % 2u)), raw.d));
}
{% endif %}
