// y[t] {{ "+=" if accumulate else "=" }} a[t]{% if stretch %} * |b[t]| / |a[t]|{% endif %}, where rows of N elements may be parts of wider ones; one workgroup for each token.
// Bounds: tokens are those for which the buffers are long enough (`Dispatch`); their rows have N elements from the first one
// used (`stretch`). The loops count to N.
@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
{% if stretch %}
@group(0) @binding(2) var<storage, read> b: array<f32>;
{% set threads = 256 %}
{% include "reduce.wgsl" %}
{% endif %}
const N: u32 = {{ n }}u;

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let start = group.x * {{ a_stride }}u + {{ a_at }}u;
    let to = group.x * {{ y_stride }}u + {{ y_at }}u;
{% if stretch %}
    let goal = group.x * {{ b_stride }}u + {{ b_at }}u;
    var squares_a = 0.0;
    var squares_b = 0.0;
    for (var i = tid; i < N; i += 256u) {
        squares_a += a[start + i] * a[start + i];
        squares_b += b[goal + i] * b[goal + i];
    }
    let length_a = sqrt(workgroup_sum(squares_a, tid));
    let factor = sqrt(workgroup_sum(squares_b, tid)) / length_a;
{% else %}
    let factor = 1.0;
{% endif %}
    for (var i = tid; i < N; i += 256u) { y[to + i] {{ "+=" if accumulate else "=" }} a[start + i] * factor; }
}
