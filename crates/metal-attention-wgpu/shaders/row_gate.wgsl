// y[t] *= sigmoid(dot(x[t], gate)); one workgroup for each token.
// Bounds: tokens are those for which `x` and `y` are long enough (`Dispatch`); the loops count to N, a constant.
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> gate: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
{% set threads = 256 %}
{% include "reduce.wgsl" %}
const N: u32 = {{ n }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let row = group.x * N;
    var products = 0.0;
    for (var i = tid; i < N; i += {{ threads }}u) { products += x[row + i] * gate[i]; }
    // The bound avoids infinities: drivers may assume that there are none.
    let factor = 1.0 / (1.0 + exp(min(-workgroup_sum(products, tid), 80.0)));
    for (var i = tid; i < N; i += {{ threads }}u) { y[row + i] *= factor; }
}
