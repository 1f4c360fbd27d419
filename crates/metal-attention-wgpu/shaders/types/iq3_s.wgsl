{% include "types/unit.wgsl" %}

{% include "types/packed.wgsl" %}

// Decoded when loaded: the values, odd numbers from -15 to 15, as nibbles. A nibble of scale for 4 units, and d for 32.
const SCALES: u32 = {{ n_rows }}u * UNITS;
const BLOCKS: u32 = SCALES + {{ n_rows * (n_in // 256) }}u;
struct Raw8 { q: u32, scale: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(
        w[row * UNITS + unit],
        w[SCALES + row * {{ n_in // 256 }}u + unit / 32u] >> (4u * (unit / 4u % 8u)),
        w[BLOCKS + row * {{ (n_in + 511) // 512 }}u + unit / 64u] >> (16u * (unit / 32u % 2u)),
    );
}
fn packed8(raw: Raw8) -> vec2<u32> { return nibbles(raw.q) << vec2(1u); }
fn affine8(raw: Raw8) -> vec2<f32> { return scale8(raw) * vec2(1.0, -15.0); }
fn codes8(raw: Raw8) -> W8 { return by_turns(packed8(raw), 15.0); }
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d) * f32(1u + 2u * (raw.scale & 15u)); }
