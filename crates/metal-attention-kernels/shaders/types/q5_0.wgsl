{% include "types/unit.wgsl" %}

const HIGH: u32 = {{ n_rows }}u * UNITS;
const SCALES: u32 = HIGH + {{ n_rows * (n_in // 32) }}u;
struct Raw8 { q: u32, high: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(
        w[row * UNITS + unit],
        w[HIGH + row * {{ n_in // 32 }}u + unit / 4u] >> (8u * (unit % 4u)),
        w[SCALES + row * {{ (n_in + 63) // 64 }}u + unit / 8u] >> (16u * (unit / 4u % 2u)),
    );
}
fn codes8(raw: Raw8) -> W8 {
    let low = nibbles(raw.q, 16.0);
    let high = bits(raw.high);
    return W8(16.0 * high.lo + low.lo, 16.0 * high.hi + low.hi);
}
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d); }
