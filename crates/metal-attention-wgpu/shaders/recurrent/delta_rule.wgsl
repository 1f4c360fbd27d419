{% extends "recurrent/heads.wgsl" %}
// The gated delta rule: S = g S; u = beta (v - k S); S = S + k^T u; out = q S, where g is one number for each head or for each
// channel of the key. Since q (g S + k^T u) = q (g S) + (q.k) u, one pass over the state before gives all products.
// Bounds: those of heads.wgsl; heads and channels follow from constants.
{% block channels %}
fn key_head_of(head: u32) -> u32 { return head {{ "/" if grouped else "%" }} {{ n_head // n_key_head if grouped else n_key_head }}u; }
fn shared_of(head: u32) -> u32 { return key_head_of(head); }
fn is_shared(local: u32) -> bool { return local < 2u * KEY_DIM; }
fn channel_of(head: u32, local: u32) -> u32 {
    if local >= 2u * KEY_DIM { return {{ 2 * n_key_head * key_dim }}u + head * VALUE_DIM + local - 2u * KEY_DIM; }
    let is_key = u32(local >= KEY_DIM);
    return is_key * {{ n_key_head * key_dim }}u + key_head_of(head) * KEY_DIM + local - is_key * KEY_DIM;
}
{% endblock %}
{% block functions %}
{% if fused %}
{% include "reduce.wgsl" %}

{% endif %}
fn element(run: Run, t: u32, head: u32, vector: u32, i: u32) -> f32 {
{% if by_channel %}
    if vector == 2u {
        let channel = head * KEY_DIM + i;
        return exp(a[head] * softplus(decay(run.token + t, channel) + decay_bias[channel]));
    }
    return input(run, t, head, min(vector, 2u) * KEY_DIM + i);
{% else %}
    return input(run, t, head, vector * KEY_DIM + i);
{% endif %}
}

// The factor on the state, and the writing strength.
fn gates_of(token: u32, head: u32) -> vec2<f32> {
{% if by_channel %}
    return vec2(1.0, sigmoid(beta(token, head)));
{% else %}
    return vec2(exp(a[head] * softplus(decay(token, head) + decay_bias[head])), sigmoid(beta(token, head)));
{% endif %}
}
{% endblock %}
{% block token %}
{% if fused %}
            var gate_of_out = 0.0;
            if column < VALUE_DIM { gate_of_out = gate(run.token + t, head * VALUE_DIM + column); }
{% endif %}
            var ks = 0.0;
            var qs = 0.0;
            var qk = 0.0;
            var qq = 0.0;
            var kk = 0.0;
{% for i in range(units) %}
            let q_{{ i }} = staged[at + {{ i * splits }}u + split];
            let k_{{ i }} = staged[at + {{ key_units + i * splits }}u + split];
{% if by_channel %}
            state_{{ i }} *= staged[at + {{ 2 * key_units + i * splits }}u + split];
{% endif %}
            ks += dot(k_{{ i }}, state_{{ i }});
            qs += dot(q_{{ i }}, state_{{ i }});
            qk += dot(q_{{ i }}, k_{{ i }});
{% if normed %}
            qq += dot(q_{{ i }}, q_{{ i }});
            kk += dot(k_{{ i }}, k_{{ i }});
{% endif %}
{% endfor %}
{{ over_splits(["ks", "qs", "qk", "qq", "kk"] if normed else ["ks", "qs", "qk"]) }}
{% if normed %}
            let q_factor = {{ scale }} * inverseSqrt(qq + {{ eps }});
            let k_factor = inverseSqrt(kk + {{ eps }});
{% else %}
            let q_factor = {{ scale }};
            let k_factor = 1.0;
{% endif %}
            let left = gates[t - first].x;
            let u = gates[t - first].y * (value_of(at, 0u, tid) - left * k_factor * ks);
            let out = q_factor * (left * qs + k_factor * qk * u);
            let written = k_factor * u;
{% for i in range(units) %}
            state_{{ i }} = left * state_{{ i }} + k_{{ i }} * written;
{% endfor %}
{% if fused %}
            let squares = workgroup_sum(select(0.0, out * out, split == 0u && column < VALUE_DIM), tid);
            let factor = inverseSqrt(squares / f32(VALUE_DIM) + {{ norm_eps }});
            if split == 0u && column < VALUE_DIM {
                let opened = {{ "gate_of_out * " if silu_gate }}sigmoid(gate_of_out);
                set_out(run.token + t, head * VALUE_DIM + column, out * factor * norm_weight[column] * opened);
            }
{% else %}
            if split == 0u && column < VALUE_DIM { set_out(run.token + t, head * VALUE_DIM + column, out); }
{% endif %}
{% endblock %}
