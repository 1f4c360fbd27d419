{% include "types/unit.wgsl" %}

{% include "types/packed.wgsl" %}

// Half a word for a unit: 9 bits of code, 7 signs. Then a nibble of scale for 2 units, and d for 32.
const SCALES: u32 = {{ n_rows * (n_in // 16) }}u;
const BLOCKS: u32 = SCALES + {{ n_rows * (n_in // 128) }}u;
const GRID: u32 = BLOCKS + {{ n_rows * ((n_in + 511) // 512) }}u;
struct Raw8 { code: u32, scale: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(
        w[row * {{ n_in // 16 }}u + unit / 2u] >> (16u * (unit % 2u)),
        w[SCALES + row * {{ n_in // 128 }}u + unit / 16u] >> (4u * (unit / 2u % 8u)),
        w[BLOCKS + row * {{ (n_in + 511) // 512 }}u + unit / 64u] >> (16u * (unit / 32u % 2u)),
    );
}
{% include "types/iq2.wgsl" %}

fn packed8(raw: Raw8) -> vec2<u32> { return negated(sizes8(raw.code & 511u), sign_bytes(even_signs(raw.code >> 9u))); }
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d) * (0.5 + f32(raw.scale & 15u)) * 0.25; }
