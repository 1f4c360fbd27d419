{% include "types/unit.wgsl" %}

struct Raw8 { lo: vec4<u32>, hi: vec4<u32> }
fn load8(row: u32, unit: u32) -> Raw8 {
    let at = row * (8u * UNITS) + unit;
    return Raw8(
        vec4<u32>(w[at], w[at + UNITS], w[at + 2u * UNITS], w[at + 3u * UNITS]),
        vec4<u32>(w[at + 4u * UNITS], w[at + 5u * UNITS], w[at + 6u * UNITS], w[at + 7u * UNITS]),
    );
}
fn codes8(raw: Raw8) -> W8 { return W8(bitcast<vec4<f32>>(raw.lo), bitcast<vec4<f32>>(raw.hi)); }
fn scale8(raw: Raw8) -> f32 { return 1.0; }
