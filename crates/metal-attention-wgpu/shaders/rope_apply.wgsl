// RoPE in place on the first N_HEADS heads of every token's row{% if qk_norm %}, after an RMSNorm of each head{% endif %}; one workgroup for each head.
// Bounds: heads are those of tokens of the batch, which `x` holds (`Dispatch`); indices are compared with the context,
// elements with HEAD_DIM if it is odd. The loop counts to a constant.
@group(0) @binding(0) var<storage, read_write> x: array<f32>; // [n_tokens, ROW]
{% set rope_binding = 1 %}
{% include "rope.wgsl" %}
{% set batch_binding = 2 %}
{% include "batch.wgsl" %}
const ROW: u32 = {{ row }}u;
const PAIRS: u32 = {{ (head_dim + 1) // 2 if qk_norm else n_rot // 2 }}u;
{% if qk_norm %}
@group(0) @binding(3) var<storage, read> norm: array<f32>; // weights of a query head, then of a key head
{% include "reduce.wgsl" %}
{% endif %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let token = group.y;
    let pos = token_pos(token);
    let rope_row = token_rope_row(token);
    let head = token * ROW + group.x * HEAD_DIM;
{% if qk_norm %}
    var squares = 0.0;
    for (var e = tid; e < HEAD_DIM; e += {{ threads }}u) { squares += x[head + e] * x[head + e]; }
    let scale = inverseSqrt(workgroup_sum(squares, tid) / f32(HEAD_DIM) + {{ eps }});
    let weights = select(HEAD_DIM, 0u, group.x < {{ n_head }}u);
{% endif %}
    if pos >= {{ n_ctx }}u { return; }
    for (var i = tid; i < PAIRS; i += {{ threads }}u) {
        let e = pair_elements(i);
{% if head_dim % 2 == 1 %}
        if e.y >= HEAD_DIM {
{% if qk_norm %}
            x[head + e.x] *= scale * norm[weights + e.x];
{% endif %}
            continue;
        }
{% endif %}
        var pair = vec2(x[head + e.x], x[head + e.y]);
{% if qk_norm %}
        pair *= scale * vec2(norm[weights + e.x], norm[weights + e.y]);
{% endif %}
        let turned = rotate(pair, i, rope_row);
        x[head + e.x] = turned.x;
        x[head + e.y] = turned.y;
    }
}
