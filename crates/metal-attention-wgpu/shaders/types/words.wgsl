// Numbers of 16 bits: the first words of all units, then the second ones, and so on.
struct Raw8 { q: vec4<u32> }
fn load8(row: u32, unit: u32) -> Raw8 {
    let at = row * (4u * UNITS) + unit;
    return Raw8(vec4<u32>(w[at], w[at + UNITS], w[at + 2u * UNITS], w[at + 3u * UNITS]));
}
fn scale8(raw: Raw8) -> f32 { return 1.0; }
