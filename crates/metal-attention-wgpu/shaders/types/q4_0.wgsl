{% include "types/unit.wgsl" %}

{% include "types/packed.wgsl" %}

{% include "types/nibbles.wgsl" %}

fn packed8(raw: Raw8) -> vec2<u32> { return nibbles(raw.q); }
fn affine8(raw: Raw8) -> vec2<f32> { return scale8(raw) * vec2(1.0, -8.0); }
fn codes8(raw: Raw8) -> W8 { return by_turns(packed8(raw), 8.0); }
