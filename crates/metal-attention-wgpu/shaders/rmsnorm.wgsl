// RMSNorm: y[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight; one workgroup for each token.
// Bounds: rows are those of the batch, which `x` and `y` hold (`Dispatch`); the loops count to N, a constant.
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
{% set batch_binding = 3 %}
{% include "batch.wgsl" %}
{% set threads = 256 %}
{% include "reduce.wgsl" %}
const N: u32 = {{ n }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    // Rows of the result: all tokens, or the output tokens.
{% if outputs_only %}
    let row = output_token(group.x);
{% else %}
    let row = min(group.x, n_tokens() - 1u);
{% endif %}
    var squares = 0.0;
    for (var i = tid; i < N; i += {{ threads }}u) {
        let v = x[row * N + i];
        squares += v * v;
    }
    let scale = inverseSqrt(workgroup_sum(squares, tid) / f32(N) + {{ eps }});
    for (var i = tid; i < N; i += {{ threads }}u) {
        y[group.x * N + i] = x[row * N + i] * scale * weight[i];
    }
}
