{% include "types/unit.wgsl" %}

{% include "types/packed.wgsl" %}

// Nibbles, and a byte of scale for 2 units.
const SCALES: u32 = {{ n_rows }}u * UNITS;
struct Raw8 { q: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(w[row * UNITS + unit], w[SCALES + row * {{ n_in // 64 }}u + unit / 8u] >> (8u * (unit / 2u % 4u)));
}
{% include "types/fp4.wgsl" %}

// Half the value of 4 bits of exponent and 3 of mantissa; 127 is 0.
fn scale8(raw: Raw8) -> f32 {
    let mantissa = raw.d & 7u;
    let exponent = (raw.d >> 3u) & 15u;
    let normal = bitcast<f32>((exponent + 119u) << 23u | mantissa << 20u);
    let scale = select(normal, f32(mantissa) / 1024.0, exponent == 0u);
    return select(scale, 0.0, (raw.d & 255u) == 127u);
}
