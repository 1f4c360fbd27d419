// One convolution of a part's input or result within blocks: y[t][c] = sum over k of (base[k][c] + taps[t][k][c / GROUP]) * x[t - k][c].
// One invocation for each element. The tokens of a sequence are a block; those before it count as zeros.
// Bounds: tokens are compared with `n_tokens`, for which `x`, `taps` and `y` are long enough (`Dispatch`), as is every earlier token;
// channels are compared with N.
@group(0) @binding(0) var<storage, read> x: array<f32>; // [n_tokens, N]
@group(0) @binding(1) var<storage, read> base: array<f32>; // [2, N_TAP, N]
@group(0) @binding(2) var<storage, read> taps: array<f32>; // [n_tokens, 2, N_TAP, N / GROUP]
@group(0) @binding(3) var<storage, read_write> y: array<f32>; // [n_tokens, N]
{% set batch_binding = 4 %}
{% include "batch.wgsl" %}
const N: u32 = {{ n }}u;
const N_TAP: u32 = {{ n_tap }}u;
const GROUP: u32 = {{ group_size }}u;
const SIDE: u32 = {{ side }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let token = id.y;
    let channel = id.x;
    if token >= n_tokens() || channel >= N { return; }
    let first_tap = (2u * token + SIDE) * (N_TAP * (N / GROUP)) + channel / GROUP;
    var sum = 0.0;
    for (var k = 0u; k < N_TAP; k++) {
        if k > token || token_seq(token - k) != token_seq(token) { break; }
        let tap = base[(SIDE * N_TAP + k) * N + channel] + taps[first_tap + k * (N / GROUP)];
        sum += tap * x[(token - k) * N + channel];
    }
    y[token * N + channel] = sum;
}
