// y[t] = activation(gate[t]) {{ "* up[t]" if gating != "none" }} with {{ kind }}{% if kind == "sparse_gelu" %}; one workgroup for each token{% else %}; one invocation for each element{% endif %}.
// Bounds: tokens are those for which the buffers are long enough (`Dispatch`); elements are compared with N. The loops count to N.
{% set gate = "x[token * 2u * N + 2u * i]" if gating == "pairs" else "x[token * N + i]" %}
{% set up = "x[token * 2u * N + 2u * i + 1u]" if gating == "pairs" else "up[token * " ~ up_stride ~ "u + " ~ up_at ~ "u + i]" %}
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
{% if gating == "rows" %}
@group(0) @binding(2) var<storage, read> up: array<f32>;
{% endif %}
const N: u32 = {{ n }}u;
{% if kind == "sparse_gelu" %}
{% include "reduce.wgsl" %}
{% endif %}

// The bound avoids infinities: drivers may assume that there are none.
fn sigmoid(v: f32) -> f32 { return 1.0 / (1.0 + exp(min(-v, 80.0))); }

// GELU in the tanh form: v / 2 (1 + tanh(z)) = v sigmoid(2 z).
fn gelu(v: f32) -> f32 { return v * sigmoid(1.5957691216 * (v + 0.044715 * v * v * v)); }

fn gated(token: u32, i: u32, cutoff: f32) {
    let g = {{ gate }};
{% if kind == "silu" %}
    var v = g * sigmoid(g);
{% elif kind == "gelu" %}
    var v = gelu(g);
{% elif kind == "sparse_gelu" %}
    var v = gelu(max(g - cutoff, 0.0));
{% elif kind == "relu_squared" %}
    var v = max(g, 0.0) * max(g, 0.0);
{% elif kind == "clamped_swiglu" %}
    let low = min(g, {{ parameter }});
    var v = low * sigmoid(1.702 * low);
{% elif kind == "clamped_silu" %}
    var v = min(g * sigmoid(g), {{ parameter }});
{% endif %}
{% if gating != "none" %}
{% if kind == "clamped_swiglu" %}
    v *= 1.0 + clamp({{ up }}, -{{ parameter }}, {{ parameter }});
{% elif kind == "clamped_silu" %}
    v *= clamp({{ up }}, -{{ parameter }}, {{ parameter }});
{% else %}
    v *= {{ up }};
{% endif %}
{% endif %}
    y[token * N + i] = v;
}

{% if kind == "sparse_gelu" %}
@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let token = group.y;
    var sum = 0.0;
    for (var i = tid; i < N; i += {{ threads }}u) { sum += {{ gate }}; }
    let mean = workgroup_sum(sum, tid) / f32(N);
    var squares = 0.0;
    for (var i = tid; i < N; i += {{ threads }}u) { squares += ({{ gate }} - mean) * ({{ gate }} - mean); }
    let cutoff = mean + {{ parameter }} * sqrt(workgroup_sum(squares, tid) / f32(max(N - 1u, 1u)));
    for (var i = tid; i < N; i += {{ threads }}u) { gated(token, i, cutoff); }
}
{% else %}
@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x < N { gated(id.y, id.x, 0.0); }
}
{% endif %}
