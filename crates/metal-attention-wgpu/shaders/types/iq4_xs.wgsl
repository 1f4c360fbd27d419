{% include "types/unit.wgsl" %}

{% include "types/iq4.wgsl" %}

// For each super-block of 256: nibbles, 8 scales plus 32, each for 4 units; then d.
const SCALES: u32 = {{ n_rows }}u * UNITS;
const BLOCKS: u32 = SCALES + {{ n_rows * (n_in // 128) }}u;
struct Raw8 { q: u32, scale: u32, d: u32 }
fn load8(row: u32, unit: u32) -> Raw8 {
    return Raw8(
        w[row * UNITS + unit],
        w[SCALES + row * {{ n_in // 128 }}u + unit / 16u] >> (8u * (unit / 4u % 4u)),
        w[BLOCKS + row * {{ (n_in + 511) // 512 }}u + unit / 64u] >> (16u * (unit / 32u % 2u)),
    );
}
fn codes8(raw: Raw8) -> W8 { return iq4_values(raw.q); }
fn scale8(raw: Raw8) -> f32 { return half_of(raw.d) * (byte_at(raw.scale, 0u) - 32.0); }
