{% include "types/unit.wgsl" %}

// Per block of 256: a plane of low pairs of bits, a plane of third bits, 16 scales plus 32, each for 2 units; then d.
const HIGH: u32 = {{ n_rows * (n_in // 16) }}u;
const SCALES: u32 = HIGH + {{ n_rows * (n_in // 32) }}u;
const BLOCKS: u32 = SCALES + {{ n_rows * (n_in // 64) }}u;
struct Raw8 { q: u32, high: u32, scale: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(
        w[row * {{ n_in // 16 }}u + unit / 2u] >> (16u * (unit % 2u)),
        w[HIGH + row * {{ n_in // 32 }}u + unit / 4u] >> (8u * (unit % 4u)),
        w[SCALES + row * {{ n_in // 64 }}u + unit / 8u] >> (8u * (unit / 2u % 4u)),
        w[BLOCKS + row * {{ (n_in + 511) // 512 }}u + unit / 64u] >> (16u * (unit / 32u % 2u)),
    );
}
fn codes8(raw: Raw8) -> W8 {
    let low = pairs(raw.q, 4.0);
    let high = bits(raw.high);
    return W8(4.0 * high.lo + low.lo, 4.0 * high.hi + low.hi);
}
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d) * (byte_at(raw.scale, 0u) - 32.0); }
