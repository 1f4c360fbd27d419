// Queries, keys and values of every token from their projections: {% if clamp %}clamped, {% endif %}{% if norm != "none" %}norms of queries and keys, {% endif %}{% if n_rot > 0 %}RoPE, {% endif %}{% if value_norm %}an RMSNorm of values, {% endif %}and the
// append of keys and values to the KV cache. One workgroup for each head.
// Bounds: heads are those of tokens of the batch, which `qkv` and `queries` hold (`Dispatch`); elements are compared with
// HEAD_DIM, indices with N_CTX, pages come from the page table (kv_cache.wgsl). Loops count to constants.
{% set row_norm = norm_over == "row" %}
@group(0) @binding(0) var<storage, read> qkv: array<f32>; // [n_tokens, ROW]: queries, keys, values, as far as there are any
@group(0) @binding(1) var<storage, read_write> queries: array<f32>; // [n_tokens, N_HEAD, HEAD_DIM]
{% set batch_binding = 2 %}
{% include "batch.wgsl" %}
{% include "kv_cache.wgsl" %}
{% set next = 3 %}
{% if owns_cache %}
@group(0) @binding(3) var<storage, read_write> keys: array<Unit>;
@group(0) @binding(4) var<storage, read_write> values: array<Unit>;
{% set next = 5 %}
{% endif %}
{% if n_rot > 0 %}
{% set rope_binding = next %}
{% include "rope.wgsl" %}
{% set next = next + 1 %}
{% else %}
const HEAD_DIM: u32 = {{ head_dim }}u;
{% endif %}
{% if weights_of_norm > 0 %}
@group(0) @binding({{ next }}) var<storage, read> weights: array<f32>; // of the norms of queries and of keys; then their biases
{% endif %}
{% if norm != "none" or value_norm %}
{% include "reduce.wgsl" %}
{% endif %}
const N_HEAD: u32 = {{ n_head }}u;
const ROW: u32 = {{ row }}u;

// The finished head, padded with zeros to whole units of four.
var<workgroup> head: array<f32, {{ (head_dim + 3) // 4 * 4 }}>;

fn projected(at: u32) -> f32 {
{% if clamp %}
    return clamp(qkv[at], -{{ clamp_to }}, {{ clamp_to }});
{% else %}
    return qkv[at];
{% endif %}
}

{% macro normalise() %}
    {
{% if row_norm %}
        // A norm over the row: all heads together.
        let n = select(N_HEAD_KV, N_HEAD, is_query) * HEAD_DIM;
        let first = token * ROW + select(N_HEAD * HEAD_DIM, 0u, is_query);
{% set element = "projected(first + e)" %}
{% else %}
        let n = HEAD_DIM;
{% set element = "head[e]" %}
{% endif %}
{% if norm == "layer" %}
        var sum = 0.0;
        for (var e = tid; e < n; e += {{ threads }}u) { sum += {{ element }}; }
        let mean = workgroup_sum(sum, tid) / f32(n);
{% else %}
        let mean = 0.0;
{% endif %}
        var squares = 0.0;
        for (var e = tid; e < n; e += {{ threads }}u) {
            let v = {{ element }} - mean;
            squares += v * v;
        }
        let factor = inverseSqrt(workgroup_sum(squares, tid) / f32(n) + {{ eps }});
        if !is_value {
{% if norm_over == "head" %}
            let own = select(HEAD_DIM, 0u, is_query);
{% else %}
            let own = group.x * HEAD_DIM;
{% endif %}
            for (var e = tid; e < HEAD_DIM; e += {{ threads }}u) {
                var v = (head[e] - mean) * factor;
{% if weights_of_norm > 0 %}
                v *= weights[own + e];
{% endif %}
{% if bias %}
                v += weights[{{ weights_of_norm }}u + own + e];
{% endif %}
                head[e] = v;
            }
        }
        workgroupBarrier();
    }
{% endmacro %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let token = group.y;
    let pos = token_pos(token);
{% if n_rot > 0 %}
    let rope_row = token_rope_row(token);
{% endif %}
    let is_query = group.x < N_HEAD;
    let is_value = group.x >= N_HEAD + N_HEAD_KV;
{% if keys_as_values %}
    let source = select(group.x, group.x - N_HEAD_KV, is_value);
{% else %}
    let source = group.x;
{% endif %}
    let start = token * ROW + source * HEAD_DIM;
    for (var e = tid; e < {{ (head_dim + 3) // 4 * 4 }}u; e += {{ threads }}u) {
        if e < HEAD_DIM { head[e] = projected(start + e); } else { head[e] = 0.0; }
    }
    workgroupBarrier();
{% if norm != "none" and not after_rope %}
{{ normalise() }}
{% endif %}
{% if n_rot > 0 %}
    if !is_value && pos < N_CTX {
        for (var i = tid; i < HALF_ROT; i += {{ threads }}u) {
            let e = pair_elements(i);
            let turned = rotate(vec2(head[e.x], head[e.y]), i, rope_row);
            head[e.x] = turned.x;
            head[e.y] = turned.y;
        }
    }
    workgroupBarrier();
{% endif %}
{% if norm != "none" and after_rope %}
{{ normalise() }}
{% endif %}
{% if value_norm %}
    var value_squares = 0.0;
    for (var e = tid; e < HEAD_DIM; e += {{ threads }}u) { value_squares += head[e] * head[e]; }
    let value_factor = inverseSqrt(workgroup_sum(value_squares, tid) / f32(HEAD_DIM) + {{ value_eps }});
    if is_value {
        for (var e = tid; e < HEAD_DIM; e += {{ threads }}u) { head[e] *= value_factor; }
    }
    workgroupBarrier();
{% endif %}
    if pos >= N_CTX { return; }
    if is_query {
        for (var e = tid; e < HEAD_DIM; e += {{ threads }}u) { queries[(token * N_HEAD + group.x) * HEAD_DIM + e] = head[e]; }
        return;
    }
{% if owns_cache %}
    let row = cache_row(page_of(token_seq(token), pos), (group.x - N_HEAD) % N_HEAD_KV, pos);
    for (var unit = tid; unit < KV_UNITS; unit += {{ threads }}u) {
        let packed = pack_unit(vec4(head[4u * unit], head[4u * unit + 1u], head[4u * unit + 2u], head[4u * unit + 3u]));
        if is_value { values[row + unit] = packed; } else { keys[row + unit] = packed; }
    }
{% endif %}
}
