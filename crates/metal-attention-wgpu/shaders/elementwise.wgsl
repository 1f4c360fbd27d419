// x[i] = {{ "clamp(x[i], y[0], y[1])" if operand == "range" else ("x[i]" if activation == "none" else activation ~ "(x[i])") ~ ("" if operand == "none" else " " ~ operator ~ (" y[i]" if period == 0 else " y[i % PERIOD]")) }}, in place; one invocation for each element.
// Bounds: elements are compared with the length of `x`. `y` has as many elements, or PERIOD, or the two of a range (`Dispatch`).
@group(0) @binding(0) var<storage, read_write> x: array<f32>;
{% if operand != "none" %}
@group(0) @binding(1) var<storage, read> y: array<f32>;
{% endif %}
{% include "element.wgsl" %}
{% if period > 0 %}
const PERIOD: u32 = {{ period }}u;
{% endif %}

// The bound avoids infinities: drivers may assume that there are none.
fn sigmoid(v: f32) -> f32 { return 1.0 / (1.0 + exp(min(-v, 80.0))); }

{% if activation == "gelu_erf" %}
// GELU: v Phi(v). Phi(-z), z >= 0, is half of erfc(z / sqrt(2)), whose approximation (Abramowitz and Stegun, 7.1.26) has an error of
// at most 1.5e-7.
fn gelu_erf(v: f32) -> f32 {
    let z = min(abs(v) * 0.70710678, 9.0);
    let t = 1.0 / (1.0 + 0.3275911 * z);
    let series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
    let below = 0.5 * series * exp(-z * z);
    return v * select(1.0 - below, below, v < 0.0);
}
{% elif activation == "gelu" %}
// GELU in the tanh form: v / 2 (1 + tanh(z)) = v sigmoid(2 z).
fn gelu(v: f32) -> f32 { return v * sigmoid(1.5957691216 * (v + 0.044715 * v * v * v)); }
{% elif activation == "quick_gelu" %}
fn quick_gelu(v: f32) -> f32 { return v * sigmoid(1.702 * v); }
{% elif activation == "silu" %}
fn silu(v: f32) -> f32 { return v * sigmoid(v); }
{% elif activation == "squared_relu" %}
fn squared_relu(v: f32) -> f32 { return v * max(v, 0.0); }
{% endif %}

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) tid: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let i = element(tid, group, groups);
    if i >= arrayLength(&x) { return; }
{% if operand == "range" %}
    x[i] = min(max(x[i], y[0]), y[1]);
{% else %}
    x[i] = {% if activation == "none" %}x[i]{% else %}{{ activation }}(x[i]){% endif %}{% if operand != "none" %} {{ operator }} y[i{% if period > 0 %} % PERIOD{% endif %}]{% endif %};
{% endif %}
}
