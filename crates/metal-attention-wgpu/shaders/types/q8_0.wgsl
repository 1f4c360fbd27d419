{% include "types/unit.wgsl" %}

{% include "types/packed.wgsl" %}

const SCALES: u32 = {{ n_rows }}u * (2u * UNITS);
struct Raw8 { even: u32, odd: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    let at = row * (2u * UNITS) + unit;
    return Raw8(
        w[at],
        w[at + UNITS],
        w[SCALES + row * {{ (n_in + 63) // 64 }}u + unit / 8u] >> (16u * (unit / 4u % 2u)),
    );
}
fn packed8(raw: Raw8) -> vec2<u32> { return vec2(raw.even, raw.odd) ^ vec2(0x80808080u); }
fn affine8(raw: Raw8) -> vec2<f32> { return vec2(scale8(raw), 0.0); }
fn codes8(raw: Raw8) -> W8 { return by_turns(vec2(raw.even, raw.odd), 128.0); }
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d); }
