// y[t][h] = W[h] x[t][h] for each head, whose matrices of N_OUT rows are stacked; one invocation for each row.
// Bounds: tokens are those for which `x` and `y` are long enough (`Dispatch`); rows are compared with those of the part,
// elements of a row's last unit with N_IN. The loop counts to UNITS.
@group(0) @binding(0) var<storage, read> w: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<f32>; // [n_tokens, n_head, X_STRIDE], of which the first N_IN
@group(0) @binding(2) var<storage, read_write> y: array<f32>; // [n_tokens, n_head, Y_STRIDE], of which the first N_OUT
const N_IN: u32 = {{ n_in }}u;
const N_OUT: u32 = {{ n_out }}u;
const X_STRIDE: u32 = {{ x_stride }}u;
const Y_STRIDE: u32 = {{ y_stride }}u;
const N_HEAD: u32 = {{ n_head }}u;

{% include "types/" ~ type ~ ".wgsl" %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x >= {{ n_rows }}u { return; }
    let row = {{ first_row }}u + id.x;
    let head = id.y * N_HEAD + row / N_OUT;
    var sum = vec4<f32>();
    for (var unit = 0u; unit < UNITS; unit++) {
        let v = weights8(id.x, unit);
        let at = head * X_STRIDE + 8u * unit;
{% for k in range(8) %}
        {% if n_in % 8 %}if 8u * unit + {{ k }}u < N_IN { {% endif %}sum.{{ "xyzw"[k % 4] }} += v.{{ "lo" if k < 4 else "hi" }}.{{ "xyzw"[k % 4] }} * x[at + {{ k }}u];{% if n_in % 8 %} }{% endif %}

{% endfor %}
    }
    y[head * Y_STRIDE + row % N_OUT] = sum.x + sum.y + sum.z + sum.w;
}
