// y[r] = {{ "the mean" if mean else "the sum" }} of N rows of x{% if weighted %}, each times its row of `weights`, element by element{% endif %}: {% if listed %}those with the indices rows[r N..]{% else %}rows r N and those behind it{% endif %}. One invocation for each
// element of y.
// Bounds: elements are compared with the length of `y`{% if listed %}, which `rows` has N indices for each row of{% endif %}; a row that `x` does not have counts as zeros{% if weighted %};
// `weights` has N rows{% endif %} (`Dispatch`). The loop counts to N, a constant.
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
{% if listed %}
@group(0) @binding(2) var<storage, read> rows: array<u32>;
{% endif %}
{% if weighted %}
@group(0) @binding(3) var<storage, read> weights: array<f32>; // [N, WIDTH]
{% endif %}
{% include "element.wgsl" %}
const WIDTH: u32 = {{ width }}u;
const N: u32 = {{ n }}u;

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) tid: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let i = element(tid, group, groups);
    if i >= arrayLength(&y) { return; }
    let column = i % WIDTH;
    let first = i / WIDTH * N;
    let n_rows = arrayLength(&x) / WIDTH;
    var sum = 0.0;
    for (var j = 0u; j < N; j++) {
        let row = {{ "rows[first + j]" if listed else "first + j" }};
        if row < n_rows { sum += x[row * WIDTH + column]{% if weighted %} * weights[j * WIDTH + column]{% endif %}; }
    }
    y[i] = sum{% if mean %} / f32(N){% endif %};
}
