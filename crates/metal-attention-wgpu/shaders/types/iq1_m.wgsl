{% include "types/unit.wgsl" %}

{% include "types/packed.wgsl" %}

// The lower 8 bits of a unit's code; a nibble of the upper 3 bits and a sign; half a word for 8 units, with four scales of 3
// bits; then d for 32 units.
const HIGH: u32 = {{ n_rows * (n_in // 32) }}u;
const SCALES: u32 = HIGH + {{ n_rows * (n_in // 64) }}u;
const BLOCKS: u32 = SCALES + {{ n_rows * (n_in // 128) }}u;
const GRID: u32 = BLOCKS + {{ n_rows * ((n_in + 511) // 512) }}u;
struct Raw8 { low: u32, high: u32, scale: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(
        w[row * {{ n_in // 32 }}u + unit / 4u] >> (8u * (unit % 4u)),
        w[HIGH + row * {{ n_in // 64 }}u + unit / 8u] >> (4u * (unit % 8u)),
        w[SCALES + row * {{ n_in // 128 }}u + unit / 16u] >> (16u * (unit / 8u % 2u) + 3u * (unit / 2u % 4u)),
        w[BLOCKS + row * {{ (n_in + 511) // 512 }}u + unit / 64u] >> (16u * (unit / 32u % 2u)),
    );
}
{% include "types/iq1.wgsl" %}

fn code(raw: Raw8) -> u32 { return (raw.low & 255u) | ((raw.high & 7u) << 8u); }
fn is_down(raw: Raw8) -> bool { return (raw.high & 8u) != 0u; }
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d) * f32(2u * (raw.scale & 7u) + 1u); }
