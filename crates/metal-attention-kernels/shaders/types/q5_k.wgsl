{% include "types/unit.wgsl" %}

// Per block of 256: nibbles, a plane of fifth bits, 8 pairs of bytes (scale, minimum), each for 4 units; then (d, dmin).
const HIGH: u32 = {{ n_rows }}u * UNITS;
const SCALES: u32 = HIGH + {{ n_rows * (n_in // 32) }}u;
const BLOCKS: u32 = SCALES + {{ n_rows * (n_in // 64) }}u;
struct Raw8 { q: u32, high: u32, scale: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(
        w[row * UNITS + unit],
        w[HIGH + row * {{ n_in // 32 }}u + unit / 4u] >> (8u * (unit % 4u)),
        w[SCALES + row * {{ n_in // 64 }}u + unit / 8u] >> (16u * (unit / 4u % 2u)),
        w[BLOCKS + row * {{ n_in // 256 }}u + unit / 32u],
    );
}
fn codes8(raw: Raw8) -> W8 {
    let low = nibbles(raw.q, 0.0);
    let high = bits(raw.high);
    let d = unpack2x16float(raw.d);
    let scale = d.x * byte_at(raw.scale, 0u);
    let minimum = d.y * byte_at(raw.scale, 1u);
    return W8((16.0 * high.lo + low.lo) * scale - minimum, (16.0 * high.hi + low.hi) * scale - minimum);
}
fn scale8(raw: Raw8) -> f32 { return 1.0; }
