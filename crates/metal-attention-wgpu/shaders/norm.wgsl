// y[r] {{ "+=" if accumulate else "=" }} SCALE * norm(x[r]) for each of the ROWS rows of N elements of a token; one workgroup for each row.
// The rows of a token lie in its row of y, of Y_WIDTH elements, from element Y_AT on.
// Bounds: rows are those of the batch, which `x` and `y` hold (`Dispatch`); Y_AT + ROWS * N is at most Y_WIDTH; the loops count to
// N, a constant.
{% set y_binding = 0 if in_place else 1 %}
{% set batch_binding = y_binding + 1 + (1 if weight or bias else 0) %}
{% if in_place %}
{% set x = "y" %}
{% else %}
{% set x = "x" %}
@group(0) @binding(0) var<storage, read> x: array<f32>;
{% endif %}
@group(0) @binding({{ y_binding }}) var<storage, read_write> y: array<f32>;
{% if weight or bias %}
@group(0) @binding({{ y_binding + 1 }}) var<storage, read> weights: array<f32>; // {% if weight %}weight{% endif %}{% if bias %}, then bias{% endif %}

{% endif %}
{% if outputs_only %}
{% include "batch.wgsl" %}
{% endif %}
{% include "reduce.wgsl" %}
const N: u32 = {{ n }}u;
const ROWS: u32 = {{ rows }}u;
const Y_AT: u32 = {{ y_at }}u;
const Y_WIDTH: u32 = {{ y_width }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let to = group.y * Y_WIDTH + Y_AT + group.x * N;
{% if outputs_only %}
    let row = (output_token(group.y) * ROWS + group.x) * N;
{% else %}
    let row = (group.y * ROWS + group.x) * N;
{% endif %}
{% if kind == "layer" %}
    var sum = 0.0;
    for (var i = tid; i < N; i += {{ threads }}u) { sum += {{ x }}[row + i]; }
    let mean = workgroup_sum(sum, tid) / f32(N);
{% else %}
    let mean = 0.0;
{% endif %}
{% if kind == "none" %}
    let factor = {{ scale }};
{% else %}
    var squares = 0.0;
    for (var i = tid; i < N; i += {{ threads }}u) {
        let v = {{ x }}[row + i] - mean;
        squares += v * v;
    }
    let factor = inverseSqrt(workgroup_sum(squares, tid) / f32(N) + {{ eps }}){% if not bias %} * {{ scale }}{% endif %};
{% endif %}
    for (var i = tid; i < N; i += {{ threads }}u) {
        var v = ({{ x }}[row + i] - mean) * factor;
{% if weight %}
        v *= weights[i];
{% endif %}
{% if bias %}
        v = (v + weights[{{ "N + " if weight }}i]) * {{ scale }};
{% endif %}
        y[to + i] {{ "+=" if accumulate else "=" }} v;
    }
}
