{% include "types/grid8.wgsl" %}

// Indices 0, 1 and 2 are the values -1, 0 and 1, all shifted by an eighth.
fn packed8(raw: Raw8) -> vec2<u32> { return point8(code(raw)); }
fn affine8(raw: Raw8) -> vec2<f32> { return scale8(raw) * vec2(1.0, select(-0.875, -1.125, is_down(raw))); }
fn codes8(raw: Raw8) -> W8 { return by_turns(packed8(raw), select(0.875, 1.125, is_down(raw))); }
