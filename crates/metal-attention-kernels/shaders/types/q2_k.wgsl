{% include "types/unit.wgsl" %}

// Per block of 256: 16 bytes of (scale, minimum) nibbles, each for 2 units; then (d, dmin).
const SCALES: u32 = {{ n_rows * (n_in // 16) }}u;
const BLOCKS: u32 = SCALES + {{ n_rows * (n_in // 64) }}u;
struct Raw8 { q: u32, scale: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(
        w[row * {{ n_in // 16 }}u + unit / 2u] >> (16u * (unit % 2u)),
        w[SCALES + row * {{ n_in // 64 }}u + unit / 8u] >> (8u * (unit / 2u % 4u)),
        w[BLOCKS + row * {{ n_in // 256 }}u + unit / 32u],
    );
}
fn codes8(raw: Raw8) -> W8 {
    let q = pairs(raw.q, 0.0);
    let d = unpack2x16float(raw.d);
    let scale = d.x * f32(raw.scale & 15u);
    let minimum = d.y * f32((raw.scale >> 4u) & 15u);
    return W8(q.lo * scale - minimum, q.hi * scale - minimum);
}
fn scale8(raw: Raw8) -> f32 { return 1.0; }
