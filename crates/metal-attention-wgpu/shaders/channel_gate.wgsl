// y[t] {{ "+=" if accumulate else "=" }} sigmoid(gate[t]) * x[t]; one invocation for each element.
// Bounds: tokens are those for which the buffers are long enough (`Dispatch`); elements are compared with N.
@group(0) @binding(0) var<storage, read> gate: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
const N: u32 = {{ n }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x >= N { return; }
    let at = id.y * N + id.x;
    // The bound avoids infinities: drivers may assume that there are none.
    let opened = x[at] / (1.0 + exp(min(-gate[at], 80.0)));
    y[at] {{ "+=" if accumulate else "=" }} opened;
}
