// y[t][i] *= factor(gate of i in row t of `projected`); one invocation for each element.
// Bounds: tokens are those for which the buffers are long enough (`Dispatch`); elements are compared with N.
@group(0) @binding(0) var<storage, read> projected: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
const N: u32 = {{ n }}u;

fn factor(g: f32) -> f32 {
{% if softplus %}
    // ln(1 + exp(g)), without an overflow of the power; ln(1 + e) by its series where 1 + e would round off most of e.
    let e = exp(-min(abs(g), 80.0));
    let log = select(log(1.0 + e), e * (1.0 - e * (0.5 - e / 3.0)), e < 0.01);
    return max(g, 0.0) + log;
{% else %}
    // The bound avoids infinities: drivers may assume that there are none.
    return 1.0 / (1.0 + exp(min(-g, 80.0)));
{% endif %}
}

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x >= N { return; }
    y[id.y * N + id.x] *= factor(projected[id.y * {{ stride }}u + {{ first }}u + id.x / {{ elements_per_gate }}u]);
}
