// A plane of nibbles, and a scale for every 32 of them.
const SCALES: u32 = {{ n_rows }}u * UNITS;
struct Raw8 { q: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(
        w[row * UNITS + unit],
        w[SCALES + row * {{ (n_in + 63) // 64 }}u + unit / 8u] >> (16u * (unit / 4u % 2u)),
    );
}
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d); }
