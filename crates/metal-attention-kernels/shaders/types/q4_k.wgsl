{% include "types/unit.wgsl" %}

// Per block of 256: 8 pairs of bytes (scale, minimum), each for 4 units; then (d, dmin).
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
fn codes8(raw: Raw8) -> W8 {
    let q = nibbles(raw.q, 0.0);
    let d = unpack2x16float(raw.d);
    let scale = d.x * byte_at(raw.scale, 0u);
    let minimum = d.y * byte_at(raw.scale, 1u);
    return W8(q.lo * scale - minimum, q.hi * scale - minimum);
}
fn scale8(raw: Raw8) -> f32 { return 1.0; }
