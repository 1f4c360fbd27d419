{% extends "recurrent/heads.wgsl" %}
// The recurrence of RWKV-6: out = r (S + diag(u) k^T v); S = diag(w) S + k^T v.
{% if mixed %}
// With everything around it: w = exp(-exp(w + w0)){% if linear %}, k = k (1 - w), r divided by the square root of a head's elements and S taken after
// the token, without u: gated linear attention, its result times the sigmoid of a gate; {{ share }} head(s) share k and v{% else %}, then a norm of the head and SiLU of a gate{% endif %}.
{% endif %}
// Bounds: those of heads.wgsl; channels of weights are those of a head.
{% block functions %}
{% if mixed and not linear %}
{% include "reduce.wgsl" %}

{% endif %}
{% if mixed %}
fn kept(token: u32, channel: u32) -> f32 { return exp(-exp(min(w(token, channel) + w_bias[channel], 80.0))); }

{% endif %}
fn element(run: Run, t: u32, head: u32, vector: u32, i: u32) -> f32 {
    let token = run.token + t;
    if vector == 3u { return v(token, head / {{ share }}u * VALUE_DIM + i); }
    let channel = head * KEY_DIM + i;
{% if linear %}
    if vector == 0u { return r(token, channel) * inverseSqrt({{ key_dim }}.0); }
    if vector == 1u { return k(token, head / {{ share }}u * KEY_DIM + i) * (1.0 - kept(token, channel)); }
{% else %}
    if vector == 0u { return r(token, channel); }
    if vector == 1u { return k(token, channel); }
{% endif %}
{% if mixed %}
    return kept(token, channel);
{% else %}
    return w(token, channel);
{% endif %}
}
{% endblock %}
{% block constants %}
{% for i in range(0 if linear else units) %}
    var bonus_{{ i }} = vec4<f32>();
{% for j in range(4) %}
    if 4u * (split + {{ i * splits }}u) + {{ j }}u < KEY_DIM {
        bonus_{{ i }}[{{ j }}] = bonus[head * KEY_DIM + 4u * (split + {{ i * splits }}u) + {{ j }}u];
    }
{% endfor %}
{% endfor %}
{% if mixed %}
    let own_channel = head * VALUE_DIM + min(column, VALUE_DIM - 1u);
{% endif %}
{% endblock %}
{% block token %}
{% if mixed %}
            let opened = gate(run.token + t, own_channel);
{% endif %}
            let value = value_of(at, 0u, tid);
            var rs = 0.0;
            var own = 0.0;
{% for i in range(units) %}
            let r_{{ i }} = staged[at + {{ i * splits }}u + split];
            let k_{{ i }} = staged[at + {{ key_units + i * splits }}u + split];
{% if not linear %}
            rs += dot(r_{{ i }}, state_{{ i }});
            own += dot(r_{{ i }} * bonus_{{ i }}, k_{{ i }});
{% endif %}
            state_{{ i }} = staged[at + {{ 2 * key_units + i * splits }}u + split] * state_{{ i }} + k_{{ i }} * value;
{% if linear %}
            rs += dot(r_{{ i }}, state_{{ i }});
{% endif %}
{% endfor %}
{{ over_splits(["rs", "own"]) }}
            let out = rs + own * value;
            let owns = split == 0u && column < VALUE_DIM;
{% if linear %}
            if owns { set_out(run.token + t, own_channel, out * sigmoid(opened)); }
{% elif mixed %}
            let mean = workgroup_sum(select(0.0, out, owns), tid) / f32(VALUE_DIM);
            let squares = workgroup_sum(select(0.0, (out - mean) * (out - mean), owns), tid);
            let factor = inverseSqrt(squares / f32(VALUE_DIM) + {{ norm_eps }});
            let result = (out - mean) * factor * norm_weight[own_channel] + norm_bias[own_channel];
            if owns { set_out(run.token + t, own_channel, result * opened * sigmoid(opened)); }
{% else %}
            if owns { set_out(run.token + t, head * VALUE_DIM + column, out); }
{% endif %}
{% endblock %}
