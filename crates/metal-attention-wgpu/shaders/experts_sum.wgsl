// y[t] = sum over the experts of token t, in the order of its choice, of weight * (down[visit] + bias).
// Bounds: tokens are those for which the buffers are long enough (`Dispatch`), elements are compared with N; experts are clamped to the last.
@group(0) @binding(0) var<storage, read> down: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
{% set next = 2 %}
{% if not weights_inputs %}
@group(0) @binding({{ next }}) var<storage, read> expert_weights: array<f32>;
{% set next = next + 1 %}
{% endif %}
{% if bias %}
@group(0) @binding({{ next }}) var<storage, read> chosen: array<u32>;
@group(0) @binding({{ next + 1 }}) var<storage, read> bias: array<f32>;
{% endif %}
const N: u32 = {{ n }}u;

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x >= N { return; }
    var sum = {{ "y[id.y * N + id.x]" if accumulate else "0.0" }};
    for (var visit = id.y * {{ n_used }}u; visit < (id.y + 1u) * {{ n_used }}u; visit++) {
        var v = down[visit * N + id.x];
{% if bias %}
        v += bias[min(chosen[visit], {{ n_expert - 1 }}u) * N + id.x];
{% endif %}
        sum += {{ "v" if weights_inputs else "expert_weights[visit] * v" }};
    }
    y[id.y * N + id.x] = sum;
}
