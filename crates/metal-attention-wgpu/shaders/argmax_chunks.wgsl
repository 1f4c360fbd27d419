// First stage of argmax: the best (key, id) of each chunk of {{ chunk }} logits of a row, [n_outputs, n_chunks].
// Bounds: workgroups are the chunks of a row, rows those that `logits` and `chunks` hold (`Dispatch`); ids are compared
// with N_VOCAB before they are used as indices.
{% set threads = 256 %}
{% set vectors = n_vocab % 4 == 0 %}
@group(0) @binding(0) var<storage, read> logits: array<{{ "vec4<u32>" if vectors else "u32" }}>;
@group(0) @binding(1) var<storage, read_write> chunks: array<vec2<u32>>;
{% include "logit_key.wgsl" %}
{% include "argmax_reduce.wgsl" %}
const N_VOCAB: u32 = {{ n_vocab }}u;

@compute @workgroup_size({{ threads }})
fn main(
    @builtin(local_invocation_index) tid: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let row = group.y * N_VOCAB;
    let first = group.x * {{ chunk }}u;
    // The lowest key and id: the result if all logits are NaN.
    var best = vec2(0u, 0u);
{% if vectors %}
    let id = first + 4u * tid;
    if id < N_VOCAB {
        let bits = logits[(row + id) / 4u];
        for (var i = 0u; i < 4u; i++) { best = better(best, vec2(logit_key(bits[i]), id + i)); }
    }
{% else %}
    for (var id = first + tid; id < min(first + {{ chunk }}u, N_VOCAB); id += {{ threads }}u) {
        best = better(best, vec2(logit_key(logits[row + id]), id));
    }
{% endif %}
    best = workgroup_best(best, tid);
    if tid == 0u { chunks[group.y * groups.x + group.x] = best; }
}
