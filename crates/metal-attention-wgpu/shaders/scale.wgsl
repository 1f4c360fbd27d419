// x[r] = {{ "CAP * tanh(SCALE * x[r] / CAP)" if cap else "SCALE * x[r]" }}, in place; one invocation for each element.
// Bounds: rows are those for which `x` is long enough (`Dispatch`); elements are compared with N.
@group(0) @binding(0) var<storage, read_write> x: array<f32>;
const N: u32 = {{ n }}u;

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x >= N { return; }
    let at = id.y * N + id.x;
{% if cap %}
    // Beyond 15 tanh is 1 to the last bit, and some devices overflow.
    x[at] = {{ soft_cap }} * tanh(clamp(x[at] * {{ scale }} / {{ soft_cap }}, -15.0, 15.0));
{% else %}
    x[at] *= {{ scale }};
{% endif %}
}
