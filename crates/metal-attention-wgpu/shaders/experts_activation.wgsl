// The activation of an expert, from the products of gate and up{{ "" if gated else " (here up alone)" }}.
// Bounds: none are needed.
// The bound avoids infinities: drivers may assume that there are none.
fn sigmoid(v: f32) -> f32 { return 1.0 / (1.0 + exp(min(-v, 80.0))); }

{% if gated %}
fn activated(gate: f32, up: f32) -> f32 {
{% else %}
fn activated(gate: f32) -> f32 {
{% endif %}
{% if activation == "silu" %}
    let v = gate * sigmoid(gate);
{% elif activation == "gelu" %}
    // v / 2 (1 + tanh(z)) = v sigmoid(2 z)
    let v = gate * sigmoid(1.5957691216 * (gate + 0.044715 * gate * gate * gate));
{% elif activation == "relu_squared" %}
    let positive = max(gate, 0.0);
    let v = positive * positive;
{% elif activation == "clamped_swiglu" %}
    let low = min(gate, {{ limit }});
    let v = low * sigmoid(1.702 * low);
{% elif activation == "clamped_silu" %}
    let v = min(gate * sigmoid(gate), {{ limit }});
{% endif %}
{% if not gated %}
    return v;
{% elif activation == "clamped_swiglu" %}
    return v * (1.0 + clamp(up, -{{ limit }}, {{ limit }}));
{% elif activation == "clamped_silu" %}
    return v * clamp(up, -{{ limit }}, {{ limit }});
{% else %}
    return v * up;
{% endif %}
}
