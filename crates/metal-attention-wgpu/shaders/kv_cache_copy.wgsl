// Appends the keys and values of every token to the KV cache, at the token's position in its sequence.
// Bounds: tokens are those of the batch (`Dispatch`); units and positions are compared with their numbers.
@group(0) @binding(0) var<storage, read> qkv: array<f32>; // [n_tokens, {{ qkv_row }}], of which [N_HEAD + 2 N_HEAD_KV, HEAD_DIM]
@group(0) @binding(1) var<storage, read_write> keys: array<Unit>;
@group(0) @binding(2) var<storage, read_write> values: array<Unit>;
{% set batch_binding = 3 %}
{% include "batch.wgsl" %}
{% include "kv_cache.wgsl" %}
const HEAD_DIM: u32 = {{ head_dim }}u;
const N_HEAD: u32 = {{ n_head }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    // Units of the token's keys, then of its values.
    let unit = group.x * {{ threads }}u + tid;
    let token = group.y;
    let pos = token_pos(token);
    if unit >= 2u * N_HEAD_KV * KV_UNITS || pos >= N_CTX { return; }
    let head = unit / KV_UNITS;
    let first = unit % KV_UNITS * 4u;
    let source = token * {{ qkv_row }}u + (N_HEAD + head) * HEAD_DIM + first;
    var v = vec4<f32>();
    for (var e = 0u; e < 4u; e++) {
{% if head_dim % 4 != 0 %}
        if first + e >= HEAD_DIM { break; }
{% endif %}
        v[e] = qkv[source + e];
    }
    let place = cache_row(page_of(token_seq(token), pos), head % N_HEAD_KV, pos) + first / 4u;
    if head < N_HEAD_KV { keys[place] = pack_unit(v); } else { values[place] = pack_unit(v); }
}
