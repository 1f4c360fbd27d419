{% include "types/unit.wgsl" %}

{% include "types/packed.wgsl" %}

// For each 4 units 4 codes of a byte, and a word of four times 7 signs and a scale; then d for 32 units.
const SIGNS: u32 = {{ n_rows * (n_in // 32) }}u;
const BLOCKS: u32 = SIGNS + {{ n_rows * (n_in // 32) }}u;
const GRID: u32 = BLOCKS + {{ n_rows * ((n_in + 511) // 512) }}u;
struct Raw8 { code: u32, signs: u32, scale: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    let four = row * {{ n_in // 32 }}u + unit / 4u;
    let signs = w[SIGNS + four];
    return Raw8(
        w[four] >> (8u * (unit % 4u)),
        signs >> (7u * (unit % 4u)),
        signs >> 28u,
        w[BLOCKS + row * {{ (n_in + 511) // 512 }}u + unit / 64u] >> (16u * (unit / 32u % 2u)),
    );
}
{% include "types/iq2.wgsl" %}

fn packed8(raw: Raw8) -> vec2<u32> { return negated(sizes8(raw.code & 255u), sign_bytes(even_signs(raw.signs))); }
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d) * (0.5 + f32(raw.scale)) * 0.25; }
