{% include "types/unit.wgsl" %}

const HIGH: u32 = {{ n_rows }}u * UNITS;
const SCALES: u32 = HIGH + {{ n_rows * (n_in // 32) }}u;
struct Raw8 { q: u32, high: u32, dm: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    let block = row * {{ n_in // 32 }}u + unit / 4u;
    return Raw8(w[row * UNITS + unit], w[HIGH + block] >> (8u * (unit % 4u)), w[SCALES + block]);
}
fn codes8(raw: Raw8) -> W8 {
    let low = nibbles(raw.q, 0.0);
    let high = bits(raw.high);
    let dm = unpack2x16float(raw.dm);
    return W8((16.0 * high.lo + low.lo) * dm.x + dm.y, (16.0 * high.hi + low.hi) * dm.x + dm.y);
}
fn scale8(raw: Raw8) -> f32 { return 1.0; }
