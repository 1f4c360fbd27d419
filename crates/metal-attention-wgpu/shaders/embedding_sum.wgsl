// x[t] = SCALE * x[t] + first row of the token types + row `token_position(t)` of the positions; one invocation for each
// element. Rows that are given have their scale already.
// Bounds: tokens are those of the batch, and `x` holds their rows (`Dispatch`); positions are clamped to N_POSITIONS,
// elements are compared with N.
@group(0) @binding(0) var<storage, read_write> x: array<f32>;
{% if types %}
@group(0) @binding(1) var<storage, read> token_type: array<f32>;
{% endif %}
{% set batch_binding = 2 if types else 1 %}
{% include "batch.wgsl" %}
{% if n_positions > 0 %}
@group(0) @binding({{ 3 if types else 2 }}) var<storage, read> positions: array<f32>;
{% endif %}
const N: u32 = {{ n }}u;

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x >= N { return; }
    let at = id.y * N + id.x;
    var v = x[at] * select({{ scale }}, 1.0, has_row(id.y));
{% if types %}
    v += token_type[id.x];
{% endif %}
{% if n_positions > 0 %}
    v += positions[min(token_position(id.y), {{ n_positions - 1 }}u) * N + id.x];
{% endif %}
    x[at] = v;
}
