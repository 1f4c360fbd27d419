// hidden[t][i] = silu(gate[t][i]) * up[t][i], with gate and up interleaved in gate_up; one invocation for each element.
// Bounds: tokens are those for which both buffers are long enough (`Dispatch`); elements are compared with N_FF.
@group(0) @binding(0) var<storage, read> gate_up: array<vec2<f32>>;
@group(0) @binding(1) var<storage, read_write> hidden: array<f32>;
const N_FF: u32 = {{ n_ff }}u;

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x >= N_FF { return; }
    let at = id.y * N_FF + id.x;
    let gate = gate_up[at].x;
    // The bound avoids infinities: drivers may assume that there are none.
    hidden[at] = gate / (1.0 + exp(min(-gate, 80.0))) * gate_up[at].y;
}
