{% extends "recurrent/heads.wgsl" %}
// The selective scan of Mamba: h[s] = exp(dt A[s]) h[s] + dt B[s] x; out = sum over s of C[s] h[s] + D x{% if gated %}, times SiLU of a gate{% endif %}. Channels are
// the columns of one head, elements of their states its rows, each with a decay of its own.
// Bounds: those of heads.wgsl.
{% block functions %}
fn element(run: Run, t: u32, head: u32, vector: u32, i: u32) -> f32 {
    let token = run.token + t;
    if vector == 0u { return b(token, i); }
    if vector == 1u { return c(token, i); }
    if vector == 2u { return x(token, i); }
    return softplus(dt(token, i) + dt_bias[i]);
}
{% endblock %}
{% block constants %}
{% for i in range(units) %}
    var a_{{ i }} = vec4<f32>();
{% for j in range(4) %}
    if 4u * (split + {{ i * splits }}u) + {{ j }}u < KEY_DIM && column < VALUE_DIM {
        a_{{ i }}[{{ j }}] = a[(4u * (split + {{ i * splits }}u) + {{ j }}u) * VALUE_DIM + column];
    }
{% endfor %}
{% endfor %}
    var d_of_column = 0.0;
    if column < VALUE_DIM { d_of_column = d[column]; }
{% endblock %}
{% block token %}
{% if gated %}
            var gate_of_out = 0.0;
            if column < VALUE_DIM { gate_of_out = gate(run.token + t, column); }
{% endif %}
            let value = value_of(at, 0u, tid);
            let step = value_of(at, 1u, tid);
            var ch = 0.0;
{% for i in range(units) %}
            state_{{ i }} = exp(step * a_{{ i }}) * state_{{ i }} + staged[at + {{ i * splits }}u + split] * (step * value);
            ch += dot(staged[at + {{ key_units + i * splits }}u + split], state_{{ i }});
{% endfor %}
{{ over_splits(["ch"]) }}
            var out = ch + d_of_column * value;
{% if gated %}
            out *= gate_of_out * sigmoid(gate_of_out);
{% endif %}
            if split == 0u && column < VALUE_DIM { set_out(run.token + t, column, out); }
{% endblock %}
