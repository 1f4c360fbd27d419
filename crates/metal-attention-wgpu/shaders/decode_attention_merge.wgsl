// Merges the splits of decode_attention; one workgroup for each head of a token.
// `partial` is [n_splits, n_tokens, N_HEAD, HEAD_DIM + 2]: weighted values, the largest score, the sum of the weights.
// Bounds: there is a workgroup for each head of a token of the batch; `partial` holds the splits of the batch
// (`Dispatch`), and a position below N_CTX needs no more.
@group(0) @binding(0) var<storage, read> partial: array<f32>;
@group(0) @binding(1) var<storage, read_write> attention_out: array<f32>; // [n_tokens, N_HEAD, HEAD_DIM]
{% set batch_binding = 2 %}
{% include "batch.wgsl" %}
{% if gated %}
@group(0) @binding(3) var<storage, read> qkv: array<f32>; // [n_tokens, 2 N_HEAD + 2 N_HEAD_KV, HEAD_DIM], gates first
{% endif %}
const N_HEAD: u32 = {{ n_head }}u;
const HEAD_DIM: u32 = {{ head_dim }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let row = group.y * N_HEAD + group.x;
    let stride = n_tokens() * N_HEAD * (HEAD_DIM + 2u);
    let own = row * (HEAD_DIM + 2u);
    let pos = token_pos(group.y);
    if pos >= {{ n_ctx }}u { return; }
{% if window > 0 %}
    let first = (max(pos + 1u, {{ window }}u) - {{ window }}u) / {{ split }}u;
{% else %}
    let first = 0u;
{% endif %}
    let last = pos / {{ split }}u;
    var largest = partial[first * stride + own + HEAD_DIM];
    for (var s = first + 1u; s <= last; s++) { largest = max(largest, partial[s * stride + own + HEAD_DIM]); }
    for (var e = tid; e < HEAD_DIM; e += {{ threads }}u) {
        var sum = 0.0;
        var total = 0.0;
        for (var s = first; s <= last; s++) {
            let part = s * stride + own;
            let weight = exp(partial[part + HEAD_DIM] - largest);
            sum += weight * partial[part + e];
            total += weight * partial[part + HEAD_DIM + 1u];
        }
{% if gated %}
        let gate = qkv[(group.y * {{ 2 * n_head + 2 * n_head_kv }}u + group.x) * HEAD_DIM + e];
        total *= 1.0 + exp(min(-gate, 80.0));
{% endif %}
        attention_out[row * HEAD_DIM + e] = sum / total;
    }
}
