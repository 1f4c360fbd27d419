{% include "types/unit.wgsl" %}

const SCALES: u32 = {{ n_rows }}u * (2u * UNITS);
struct Raw8 { lo: u32, hi: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    let at = row * (2u * UNITS) + unit;
    return Raw8(
        w[at],
        w[at + UNITS],
        w[SCALES + row * {{ (n_in + 63) // 64 }}u + unit / 8u] >> (16u * (unit / 4u % 2u)),
    );
}
fn codes8(raw: Raw8) -> W8 { return W8(bytes(raw.lo, 128.0), bytes(raw.hi, 128.0)); }
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d); }
