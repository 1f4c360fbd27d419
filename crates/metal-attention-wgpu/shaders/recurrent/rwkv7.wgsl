{% extends "recurrent/heads.wgsl" %}
// The recurrence of RWKV-7: S = diag(w) S + b^T (a S) + k^T v; out = r S. Since r S = (r w) S + (r.b) (a S) + (r.k) v, one pass over
// the state before gives all products.
{% if mixed %}
// With everything around it: w = exp(-0.606531 sigmoid(w + w0)), alpha = sigmoid(a + a0), the removed key kk = k k_k scaled to
// length 1, a = -kk, b = kk alpha, k = k (1 + (alpha - 1) k_a){% if residual %}, v = v + (first - v) sigmoid(mix + v0){% endif %}, and after it {% if normed %}a norm of the head, {% endif %}the bonus
// (r.k r_k) v{% if gated %} and a gate{% endif %}.
{% endif %}
// Bounds: those of heads.wgsl; channels of weights are those of a head.
{% block functions %}
{% if mixed %}
{% if normed %}
{% include "reduce.wgsl" %}
{% endif %}

// Element `channel` of row `i` of `weights`, [8, channels].
fn weight(i: u32, channel: u32) -> f32 { return weights[i * {{ n_head * key_dim }}u + channel]; }
{% endif %}

fn element(run: Run, t: u32, head: u32, vector: u32, i: u32) -> f32 {
    let token = run.token + t;
    if vector == 5u {
        let channel = head * VALUE_DIM + i;
{% if residual %}
        return mix(v(token, channel), first_v(token, channel), sigmoid(v_mix(token, channel) + weight(2u, channel)));
{% else %}
        return v(token, channel);
{% endif %}
    }
    let channel = head * KEY_DIM + i;
    if vector == 0u { return r(token, channel); }
{% if mixed %}
    if vector == 1u { return exp(-0.606531 * sigmoid(w(token, channel) + weight(0u, channel))); }
    let key = k(token, channel);
    if vector == 3u { return key * weight(3u, channel); }
    let alpha = sigmoid(a(token, channel) + weight(1u, channel));
    if vector == 4u { return key * weight(3u, channel) * alpha; }
    return key * (1.0 + (alpha - 1.0) * weight(4u, channel));
{% else %}
    if vector == 1u { return w(token, channel); }
    if vector == 2u { return k(token, channel); }
    if vector == 3u { return a(token, channel); }
    return b(token, channel);
{% endif %}
}
{% endblock %}
{% block constants %}
{% if mixed %}
    let own_channel = head * VALUE_DIM + min(column, VALUE_DIM - 1u);
{% if normed %}
    let norm_weight = weight(6u, own_channel);
    let norm_bias = weight(7u, own_channel);
{% endif %}
{% for i in range(units) %}
    var bonus_{{ i }} = vec4<f32>();
{% for j in range(4) %}
    if 4u * (split + {{ i * splits }}u) + {{ j }}u < KEY_DIM {
        bonus_{{ i }}[{{ j }}] = weight(5u, head * KEY_DIM + 4u * (split + {{ i * splits }}u) + {{ j }}u);
    }
{% endfor %}
{% endfor %}
{% endif %}
{% endblock %}
{% block token %}
{% if gated %}
            let opened = gate(run.token + t, own_channel);
{% endif %}
            let value = value_of(at, 0u, tid);
            var as_ = 0.0;
            var rs = 0.0;
            var rb = 0.0;
            var rk = 0.0;
{% if mixed %}
            var aa = 0.0;
            var bonus = 0.0;
{% endif %}
{% for i in range(units) %}
{% for name in ["r", "w", "k", "a", "b"] %}
            let {{ name }}_{{ i }} = staged[at + {{ loop.index0 * key_units + i * splits }}u + split];
{% endfor %}
            as_ += dot(a_{{ i }}, state_{{ i }});
            state_{{ i }} *= w_{{ i }};
            rs += dot(r_{{ i }}, state_{{ i }});
            rb += dot(r_{{ i }}, b_{{ i }});
            rk += dot(r_{{ i }}, k_{{ i }});
{% if mixed %}
            aa += dot(a_{{ i }}, a_{{ i }});
            bonus += dot(r_{{ i }} * k_{{ i }}, bonus_{{ i }});
{% endif %}
{% endfor %}
{{ over_splits(["as_", "rs", "rb", "rk", "aa", "bonus"] if mixed else ["as_", "rs", "rb", "rk"]) }}
{% if mixed %}
            // Both vectors get the direction of the removed key; the first one is negated.
            let length = max(sqrt(aa), 1e-12);
            let put = -as_ / length / length;
{% else %}
            let put = as_;
{% endif %}
            let out = rs + rb * put + rk * value;
{% for i in range(units) %}
            state_{{ i }} += b_{{ i }} * put + k_{{ i }} * value;
{% endfor %}
            let owns = split == 0u && column < VALUE_DIM;
{% if mixed %}
{% if normed %}
            let mean = workgroup_sum(select(0.0, out, owns), tid) / f32(VALUE_DIM);
            let squares = workgroup_sum(select(0.0, (out - mean) * (out - mean), owns), tid);
            let factor = inverseSqrt(squares / f32(VALUE_DIM) + {{ norm_eps }});
            let result = (out - mean) * factor * norm_weight + norm_bias + bonus * value;
{% else %}
            let result = out + bonus * value;
{% endif %}
            if owns { set_out(run.token + t, own_channel, result{{ " * opened" if gated }}); }
{% else %}
            if owns { set_out(run.token + t, head * VALUE_DIM + column, out); }
{% endif %}
{% endblock %}
