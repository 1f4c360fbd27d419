{% include "types/unit.wgsl" %}

{% include "types/packed.wgsl" %}

// Nibbles, and a byte of scale for 4 units.
const SCALES: u32 = {{ n_rows }}u * UNITS;
struct Raw8 { q: u32, e: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(
        w[row * UNITS + unit],
        w[SCALES + row * {{ (n_in + 127) // 128 }}u + unit / 16u] >> (8u * (unit / 4u % 4u)),
    );
}
{% include "types/fp4.wgsl" %}

// 2^(e - 128); where that is too small for an exponent, a bit of the mantissa.
fn scale8(raw: Raw8) -> f32 {
    let e = raw.e & 255u;
    return bitcast<f32>(select((e - 1u) << 23u, 0x00200000u << e, e < 2u));
}
