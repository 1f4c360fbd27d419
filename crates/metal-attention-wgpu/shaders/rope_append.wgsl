// {% if qk_norm %}RMSNorm of each query and key head, {% endif %}RoPE of queries, in place, and of keys, and the append of keys and values to the KV cache.
// One workgroup for each head.
// Bounds: heads are those of tokens of the batch, which `qkv` holds (`Dispatch`); indices are compared with N_CTX, the last
// element of an odd head is clamped, pages come from the page table (kv_cache.wgsl). Loops count to constants.
@group(0) @binding(0) var<storage, read_write> qkv: array<f32>; // [n_tokens, {{ qkv_row }}], of which [HEADS, HEAD_DIM]: {% if gated %}gates, {% endif %}queries, keys, values
{% set rope_binding = 1 %}
{% include "rope.wgsl" %}
@group(0) @binding(2) var<storage, read_write> keys: array<Unit>;
@group(0) @binding(3) var<storage, read_write> values: array<Unit>;
{% set batch_binding = 4 %}
{% include "batch.wgsl" %}
{% include "kv_cache.wgsl" %}
{% if qk_norm %}
@group(0) @binding(5) var<storage, read> norm: array<f32>; // weights of a query head, then of a key head
{% include "reduce.wgsl" %}
{% endif %}
const N_HEAD: u32 = {{ n_head }}u;
const N_GATE: u32 = {{ n_head if gated else 0 }}u;
const HEADS: u32 = N_GATE + N_HEAD + 2u * N_HEAD_KV;

// The finished head, padded with zeros to whole units of four.
var<workgroup> head: array<f32, {{ (head_dim + 3) // 4 * 4 }}>;

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let token = group.y;
    let pos = token_pos(token);
    let rope_row = token_rope_row(token);
    let is_query = group.x < N_HEAD;
    let is_value = group.x >= N_HEAD + N_HEAD_KV;
    let start = token * {{ qkv_row }}u + (N_GATE + group.x) * HEAD_DIM;
{% if qk_norm %}
    var squares = 0.0;
    for (var e = tid; e < HEAD_DIM; e += {{ threads }}u) { squares += qkv[start + e] * qkv[start + e]; }
    let scale = inverseSqrt(workgroup_sum(squares, tid) / f32(HEAD_DIM) + {{ eps }});
    let weights = select(HEAD_DIM, 0u, is_query);
{% endif %}
    if pos < N_CTX {
        for (var i = tid; i < (HEAD_DIM + 1u) / 2u; i += {{ threads }}u) {
            // Values are copied in the order of the pairs, without rotation.
            let e = pair_elements(i);
            let last = min(e.y, HEAD_DIM - 1u);
            var pair = vec2(qkv[start + e.x], qkv[start + last]);
            if !is_value {
{% if qk_norm %}
                pair *= scale * vec2(norm[weights + e.x], norm[weights + last]);
{% endif %}
                pair = rotate(pair, i, rope_row);
            }
            head[e.x] = pair.x;
{% if head_dim % 2 == 1 %}
            if e.y < HEAD_DIM { head[e.y] = pair.y; }
{% else %}
            head[e.y] = pair.y;
{% endif %}
        }
{% if head_dim % 4 != 0 %}
        if tid < {{ 4 - head_dim % 4 }}u { head[HEAD_DIM + tid] = 0.0; }
{% endif %}
    }
    workgroupBarrier();
    if pos >= N_CTX { return; }
    if is_query {
        for (var e = tid; e < HEAD_DIM; e += {{ threads }}u) { qkv[start + e] = head[e]; }
        return;
    }
    let row = cache_row(page_of(token_seq(token), pos), (group.x - N_HEAD) % N_HEAD_KV, pos);
    for (var unit = tid; unit < KV_UNITS; unit += {{ threads }}u) {
        let packed = pack_unit(vec4(head[4u * unit], head[4u * unit + 1u], head[4u * unit + 2u], head[4u * unit + 3u]));
        if is_value { values[row + unit] = packed; } else { keys[row + unit] = packed; }
    }
}
