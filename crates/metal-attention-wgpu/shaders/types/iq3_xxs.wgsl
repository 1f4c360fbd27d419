{% include "types/unit.wgsl" %}

{% include "types/packed.wgsl" %}

// Half a word for a unit, two codes; for each 4 units a word of four times 7 signs and a scale; then d for 32 units. The
// codebook behind the rows has a word for an entry: its elements 0, 2, 1, 3.
const SIGNS: u32 = {{ n_rows * (n_in // 16) }}u;
const BLOCKS: u32 = SIGNS + {{ n_rows * (n_in // 32) }}u;
const GRID: u32 = BLOCKS + {{ n_rows * ((n_in + 511) // 512) }}u;
struct Raw8 { codes: u32, signs: u32, scale: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    let signs = w[SIGNS + row * {{ n_in // 32 }}u + unit / 4u];
    return Raw8(
        w[row * {{ n_in // 16 }}u + unit / 2u] >> (16u * (unit % 2u)),
        signs >> (7u * (unit % 4u)),
        signs >> 28u,
        w[BLOCKS + row * {{ (n_in + 511) // 512 }}u + unit / 64u] >> (16u * (unit / 32u % 2u)),
    );
}
{% include "types/signs.wgsl" %}

fn packed8(raw: Raw8) -> vec2<u32> {
    let a = w[GRID + (raw.codes & 255u)];
    let b = w[GRID + ((raw.codes >> 8u) & 255u)];
    let sizes = vec2((a & 0xffffu) | (b << 16u), (a >> 16u) | (b & 0xffff0000u));
    return negated(sizes, sign_bytes(even_signs(raw.signs)));
}
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d) * (0.5 + f32(raw.scale)) * 0.5; }
