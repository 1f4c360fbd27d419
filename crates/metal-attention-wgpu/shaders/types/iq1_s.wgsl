{% include "types/unit.wgsl" %}

{% include "types/packed.wgsl" %}

// The lower 8 bits of a unit's code; half a word for 4 units, with the upper 3 bits of each, a scale of 3 bits and a sign;
// then d for 32 units.
const HIGH: u32 = {{ n_rows * (n_in // 32) }}u;
const BLOCKS: u32 = HIGH + {{ n_rows * (n_in // 64) }}u;
const GRID: u32 = BLOCKS + {{ n_rows * ((n_in + 511) // 512) }}u;
struct Raw8 { low: u32, code: u32, high: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    let high = w[HIGH + row * {{ n_in // 64 }}u + unit / 8u] >> (16u * (unit / 4u % 2u));
    return Raw8(
        w[row * {{ n_in // 32 }}u + unit / 4u] >> (8u * (unit % 4u)),
        high >> (3u * (unit % 4u)),
        high,
        w[BLOCKS + row * {{ (n_in + 511) // 512 }}u + unit / 64u] >> (16u * (unit / 32u % 2u)),
    );
}
{% include "types/iq1.wgsl" %}

fn code(raw: Raw8) -> u32 { return (raw.low & 255u) | ((raw.code & 7u) << 8u); }
fn is_down(raw: Raw8) -> bool { return (raw.high & 0x8000u) != 0u; }
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d) * f32(2u * ((raw.high >> 12u) & 7u) + 1u); }
