{% include "types/unit.wgsl" %}

{% set scales = 2 %}
{% include "types/packed.wgsl" %}

// For each super-block of 256: 16 bytes of (scale, minimum) nibbles, each for 2 units; then (d, dmin).
const SCALES: u32 = {{ n_rows * (n_in // 16) }}u;
const BLOCKS: u32 = SCALES + {{ n_rows * (n_in // 64) }}u;
struct Raw8 { q: u32, scale: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(
        w[row * {{ n_in // 16 }}u + unit / 2u] >> (4u * (unit % 2u)),
        w[SCALES + row * {{ n_in // 64 }}u + unit / 8u] >> (8u * (unit / 2u % 4u)),
        w[BLOCKS + row * {{ n_in // 256 }}u + unit / 32u],
    );
}
fn packed8(raw: Raw8) -> vec2<u32> { return pairs(raw.q, 0u); }
fn affine8(raw: Raw8) -> vec2<f32> {
    return unpack2x16float(raw.d) * vec2(f32(raw.scale & 15u), -f32((raw.scale >> 4u) & 15u));
}
fn codes8(raw: Raw8) -> W8 {
    let q = by_turns(packed8(raw), 0.0);
    let dm = affine8(raw);
    return W8(q.lo * dm.x + dm.y, q.hi * dm.x + dm.y);
}
fn scale8(raw: Raw8) -> f32 { return 1.0; }
{% if in_blocks %}

struct Raw32 { pairs: vec4<u32>, scale: u32, d: u32 }
fn load32(row: u32, block: u32) -> Raw32 {
    return Raw32(
        w4[row * {{ n_in // 64 }}u + block / 2u],
        w[SCALES + row * {{ n_in // 64 }}u + block / 2u],
        w[BLOCKS + row * {{ n_in // 256 }}u + block / 8u],
    );
}
fn codes32(raw: Raw32, block: u32) -> Codes32 { return pairs32(raw.pairs, block, 0u); }
fn affine32(raw: Raw32, block: u32, i: u32) -> vec2<f32> {
    return affine8(Raw8(0u, raw.scale >> (8u * (2u * (block % 2u) + i)), raw.d));
}
{% endif %}
