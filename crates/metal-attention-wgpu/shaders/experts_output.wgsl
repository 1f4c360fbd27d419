// The output of matrix products with experts, in place of matmul_output.wgsl: a tile holds visits of one expert
// (experts_sort.wgsl), whose rows are {{ expert_rows }} from expert * {{ expert_rows }} on. Results `t` are positions in the sorted order.
// Bounds: results are clamped to the tile's last, rows to the expert's; rows in another part of the matrix read the part's
// first and are not written. `order` and `tiles` come from experts_sort.wgsl: visits of the batch, which all buffers hold
// (`Dispatch`), and experts below n_expert.
{% set activated = output == "activated" %}
{% set paired = activated and gated %}
{% set width = 2 if paired else 4 %}
{% set out_stride = expert_rows // 2 if paired else expert_rows %}
// Whether the results of four rows are one aligned vector.
{% set aligned = whole and expert_rows % 4 == 0 %}
@group(0) @binding({{ y_binding }}) var<storage, read_write> y: array<{{ "vec" ~ width ~ "<f32>" if aligned else "f32" }}>;
@group(0) @binding({{ y_binding + 1 }}) var<storage, read> order: array<u32>;
@group(0) @binding({{ y_binding + 2 }}) var<storage, read> tiles: array<vec4<u32>>;
{% set next = y_binding + 3 %}
{% if weights_inputs %}
@group(0) @binding({{ next }}) var<storage, read> expert_weights: array<f32>;
{% set next = next + 1 %}
{% endif %}
{% if bias %}
@group(0) @binding({{ next }}) var<storage, read> bias: array<f32>;
{% endif %}
{% if activated %}
{% include "experts_activation.wgsl" %}
{% endif %}

// (expert, first result, one past the last) of this workgroup's tile.
var<private> tile: vec4<u32>;

fn n_results() -> u32 { return tile.z; }

// The input row of result `t`; that of the last one for results beyond it.
fn input_row(t: u32) -> u32 { return order[min(t, tile.z - 1u)]{{ " / %du"|format(n_used) if activated }}; }

// Row `r` of the expert as a row of this part: n_rows or more if it is in another part.
fn row_of(r: u32) -> u32 { return tile.x * {{ expert_rows }}u + r - {{ first_row }}u; }

// The row of the part that is read for row `r` of the expert.
fn part_row(r: u32) -> u32 {
    let row = row_of(min(r, {{ expert_rows - 1 }}u));
    return {% if whole %}row{% else %}select(0u, row, row < {{ n_rows }}u){% endif %};
}

// Stores `v`, rows [r, r + 4) of the expert for result `t`, as far as these exist. r is a multiple of four, n is n_results().
fn put4(t: u32, r: u32, v: vec4<f32>, n: u32) {
    if t >= n || r >= {{ expert_rows }}u { return; }
    let visit = order[t];
    var out = v{{ " * expert_weights[visit]" if weights_inputs }};
{% if bias %}
{% for i in range(4) %}
    out[{{ i }}] += bias[tile.x * {{ expert_rows }}u + min(r + {{ i }}u, {{ expert_rows - 1 }}u)];
{% endfor %}
{% endif %}
{% if paired %}
    let result = vec2(activated(out.x, out.y), activated(out.z, out.w));
{% elif activated %}
    let result = vec4(activated(out.x), activated(out.y), activated(out.z), activated(out.w));
{% else %}
    let result = out;
{% endif %}
{% if aligned %}
    y[visit * {{ out_stride // width }}u + r / 4u] = result;
{% else %}
    let at = visit * {{ out_stride }}u + r{{ " / 2u" if paired }};
{% for i in range(width) %}
{% set row = "r + %du"|format(i * 4 // width) %}
    if {{ row }} < {{ expert_rows }}u{% if not whole %} && row_of({{ row }}) < {{ n_rows }}u{% endif %} { y[at + {{ i }}u] = result[{{ i }}]; }
{% endfor %}
{% endif %}
}
