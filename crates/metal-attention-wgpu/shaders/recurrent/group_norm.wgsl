// y[t][g] = norm(x[t][g]) * weight{{ "[g]" if of_groups }}{{ " + bias[g]" if bias }}{% if gate == "silu" %} * SiLU(gate[t][g]){% elif gate != "none" %} * {{ gate }}(gate[t][g]){% endif %}: the norm of a recurrence's results, by heads or groups of them. One workgroup for each row.
// Bounds: tokens are those that the rows hold (`Dispatch`), groups those of the grid; the loops count to N, a constant.
{{ declarations }}
{% include "recurrent/gates.wgsl" %}

{% include "reduce.wgsl" %}

const N: u32 = {{ n }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let token = group.y;
    let first = group.x * N;
{% if layer %}
    var sum = 0.0;
    for (var i = tid; i < N; i += {{ threads }}u) { sum += x(token, first + i); }
    let mean = workgroup_sum(sum, tid) / f32(N);
{% else %}
    let mean = 0.0;
{% endif %}
    var squares = 0.0;
    for (var i = tid; i < N; i += {{ threads }}u) {
        let v = x(token, first + i) - mean;
        squares += v * v;
    }
    let factor = inverseSqrt(workgroup_sum(squares, tid) / f32(N) + {{ eps }});
    for (var i = tid; i < N; i += {{ threads }}u) {
        var v = (x(token, first + i) - mean) * factor * weight[{{ "first + " if of_groups }}i];
{% if bias %}
        v += bias[{{ "first + " if of_groups }}i];
{% endif %}
{% if gate == "silu" %}
        v *= gate(token, first + i) * sigmoid(gate(token, first + i));
{% elif gate == "sigmoid" %}
        v *= sigmoid(gate(token, first + i));
{% endif %}
        set_out(token, first + i, v);
    }
}
