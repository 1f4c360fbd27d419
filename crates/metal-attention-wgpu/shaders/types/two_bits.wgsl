{% include "types/unit.wgsl" %}

{% include "types/packed.wgsl" %}

// A plane of 2-bit codes, and a scale for every {{ block_units }} units.
const SCALES: u32 = {{ n_rows * (n_in // 16) }}u;
struct Raw8 { q: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(
        w[row * {{ n_in // 16 }}u + unit / 2u] >> (4u * (unit % 2u)),
        w[SCALES + row * {{ (n_in + 16 * block_units - 1) // (16 * block_units) }}u + unit / {{ 2 * block_units }}u] >> (16u * (unit / {{ block_units }}u % 2u)),
    );
}
fn packed8(raw: Raw8) -> vec2<u32> { return pairs(raw.q, 0u); }
fn affine8(raw: Raw8) -> vec2<f32> { return scale8(raw) * vec2(1.0, -1.0); }
fn codes8(raw: Raw8) -> W8 { return by_turns(packed8(raw), 1.0); }
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d); }
