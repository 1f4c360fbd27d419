// x[t] += y[t]; one invocation for each element.
// Bounds: tokens are those for which both buffers are long enough (`Dispatch`); elements are compared with N.
@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read> y: array<f32>;
const N: u32 = {{ n }}u;

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x >= N { return; }
    x[id.y * N + id.x] += y[id.y * N + id.x];
}
