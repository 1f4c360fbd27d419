{% include "types/unit.wgsl" %}

{% include "types/packed.wgsl" %}

// A plane of single bits, and a scale for every 16 units.
const SCALES: u32 = {{ n_rows * (n_in // 32) }}u;
struct Raw8 { q: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(
        w[row * {{ n_in // 32 }}u + unit / 4u] >> (2u * (unit % 4u)),
        w[SCALES + row * {{ (n_in + 255) // 256 }}u + unit / 32u] >> (16u * (unit / 16u % 2u)),
    );
}
fn packed8(raw: Raw8) -> vec2<u32> { return bits(raw.q, 1u); }
fn affine8(raw: Raw8) -> vec2<f32> { return scale8(raw) * vec2(1.0, -1.0); }
fn codes8(raw: Raw8) -> W8 { return by_turns(packed8(raw), 1.0); }
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d); }
