{% include "types/unit.wgsl" %}

{% include "types/packed.wgsl" %}

// The lower 8 bits of a unit's code, a plane of signs, the upper 2 bits of the code, a nibble of scale for 2 units, and
// d for 32.
const SIGNS: u32 = {{ n_rows * (n_in // 32) }}u;
const HIGH: u32 = SIGNS + {{ n_rows * (n_in // 32) }}u;
const SCALES: u32 = HIGH + {{ n_rows * (n_in // 128) }}u;
const BLOCKS: u32 = SCALES + {{ n_rows * (n_in // 128) }}u;
const GRID: u32 = BLOCKS + {{ n_rows * ((n_in + 511) // 512) }}u;
struct Raw8 { low: u32, high: u32, signs: u32, scale: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    let four = row * {{ n_in // 32 }}u + unit / 4u;
    let sixteen = row * {{ n_in // 128 }}u + unit / 16u;
    return Raw8(
        w[four] >> (8u * (unit % 4u)),
        w[HIGH + sixteen] >> (2u * (unit % 16u)),
        w[SIGNS + four] >> (2u * (unit % 4u)),
        w[SCALES + sixteen] >> (4u * (unit / 2u % 8u)),
        w[BLOCKS + row * {{ (n_in + 511) // 512 }}u + unit / 64u] >> (16u * (unit / 32u % 2u)),
    );
}
{% include "types/iq2.wgsl" %}

fn packed8(raw: Raw8) -> vec2<u32> {
    return negated(sizes8((raw.low & 255u) | ((raw.high & 3u) << 8u)), bits(raw.signs, 0u));
}
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d) * (0.5 + f32(raw.scale & 15u)) * 0.25; }
