{% extends "recurrent/heads.wgsl" %}
// The state space of Mamba-2: S = exp(dt A) S + dt B^T x; out = C S + D x{% if gated %}, times SiLU of a gate{% endif %}. Since C (g S + B^T y) = g (C S) + (C.B) y, one pass over
// the state before gives both products.
// Bounds: those of heads.wgsl; heads, groups and channels follow from constants.
{% block channels %}
fn shared_of(head: u32) -> u32 { return head / {{ n_head // n_group }}u; }
fn is_shared(local: u32) -> bool { return local < 2u * KEY_DIM; }
fn channel_of(head: u32, local: u32) -> u32 {
    if local >= 2u * KEY_DIM { return head * VALUE_DIM + local - 2u * KEY_DIM; }
    let is_c = u32(local >= KEY_DIM);
    return {{ n_head * value_dim }}u + is_c * {{ n_group * key_dim }}u + shared_of(head) * KEY_DIM + local - is_c * KEY_DIM;
}
{% endblock %}
{% block functions %}
fn element(run: Run, t: u32, head: u32, vector: u32, i: u32) -> f32 {
{% if own_bc %}
    if vector < 2u { return bc(run.token + t, vector * {{ n_group * key_dim }}u + shared_of(head) * KEY_DIM + i); }
    return x(run.token + t, head * VALUE_DIM + i);
{% else %}
    return input(run, t, head, vector * KEY_DIM + i);
{% endif %}
}

// The factor on the state, and dt.
fn gates_of(token: u32, head: u32) -> vec2<f32> {
    let step = softplus(dt(token, head) + dt_bias[head]);
    return vec2(exp(step * a[head]), step);
}
{% endblock %}
{% block token %}
{% if gated %}
            var gate_of_out = 0.0;
            if column < VALUE_DIM { gate_of_out = gate(run.token + t, head * VALUE_DIM + column); }
{% endif %}
            var cs = 0.0;
            var cb = 0.0;
{% for i in range(units) %}
            let b_{{ i }} = staged[at + {{ i * splits }}u + split];
            let c_{{ i }} = staged[at + {{ key_units + i * splits }}u + split];
            cs += dot(c_{{ i }}, state_{{ i }});
            cb += dot(c_{{ i }}, b_{{ i }});
{% endfor %}
{{ over_splits(["cs", "cb"]) }}
            let left = gates[t - first].x;
            let value = value_of(at, 0u, tid);
            let written = gates[t - first].y * value;
            var out = left * cs + cb * written + d[head] * value;
{% for i in range(units) %}
            state_{{ i }} = left * state_{{ i }} + b_{{ i }} * written;
{% endfor %}
{% if gated %}
            out *= gate_of_out * sigmoid(gate_of_out);
{% endif %}
            if split == 0u && column < VALUE_DIM { set_out(run.token + t, head * VALUE_DIM + column, out); }
{% endblock %}
