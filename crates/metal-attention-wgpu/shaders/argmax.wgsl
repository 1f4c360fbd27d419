// Second stage of argmax: ids[i] = the best of the chunks of row i; one workgroup for each row.
// Bounds: there is a workgroup for each output row, at most as many as `chunks` and `ids` hold (`Dispatch`); chunks are
// counted by a constant. The token to be advanced is one of the batch (batch.wgsl).
{% set threads = 256 %}
@group(0) @binding(0) var<storage, read> chunks: array<vec2<u32>>;
@group(0) @binding(1) var<storage, read_write> ids: array<u32>;
{% if advance %}
// The batch as single words, in the layout of batch.wgsl.
@group(0) @binding(2) var<storage, read_write> batch: array<u32>;
{% endif %}
{% include "argmax_reduce.wgsl" %}
const N_CHUNKS: u32 = {{ n_chunks }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    var best = vec2(0u, 0u);
    for (var i = tid; i < N_CHUNKS; i += {{ threads }}u) { best = better(best, chunks[group.x * N_CHUNKS + i]); }
    best = workgroup_best(best, tid);
    if tid == 0u {
        ids[group.x] = best.y;
{% if advance %}
        // The chosen id, with the next index and position, replaces the token whose logits these are.
        let token = 4u + 8u * batch[4u + 8u * group.x + 3u];
        batch[token] = best.y;
        batch[token + 1u] += 1u;
        batch[token + 4u] += 1u;
        batch[token + 5u] += 1u;
{% endif %}
    }
}
