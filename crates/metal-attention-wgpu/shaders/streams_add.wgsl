// streams[i] += y for all residual streams but the first; one invocation for each element.
// Bounds: tokens are those for which both buffers are long enough (`Dispatch`); elements are compared with N. The loop counts to STREAMS.
@group(0) @binding(0) var<storage, read_write> streams: array<f32>; // [n_tokens, STREAMS, N]
@group(0) @binding(1) var<storage, read> y: array<f32>; // [n_tokens, N]
const STREAMS: u32 = {{ n_streams }}u;
const N: u32 = {{ n }}u;

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x >= N { return; }
    for (var i = 1u; i < STREAMS; i++) { streams[(id.y * STREAMS + i) * N + id.x] += y[id.y * N + id.x]; }
}
