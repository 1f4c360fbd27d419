// The output of a matrix product with part of a matrix: row r of the part is row first_row + r * row_step of the matrix.
// Bounds: put4 and the bias skip rows and results that do not exist; before4, which is read before that is known, is
// clamped to the end of `y`.
{% set gated = output == "gated" %}
{% set accumulate = output == "accumulate" %}
{% set out_stride = n_out // 2 if gated else n_out %}
{% set width = 2 if gated else 4 %}
// Whether the results of four rows are one aligned vector.
{% set aligned = row_step == 1 and n_rows % 4 == 0 and first_row % 4 == 0 and out_stride % width == 0 %}
@group(0) @binding({{ y_binding }}) var<storage, read_write> y: array<{{ "vec" ~ width ~ "<f32>" if aligned else "f32" }}>;
{% if bias %}
@group(0) @binding({{ bias_binding }}) var<storage, read> bias: array<f32>;
{% endif %}

fn n_results() -> u32 { return {{ "n_tokens()" if rows == "tokens" else "n_outputs()" }}; }

// The input row of result `t`; that of the last one for results beyond it.
fn input_row(t: u32) -> u32 {
    let row = min(t, max(n_results(), 1u) - 1u);
    return {{ "output_token(row)" if rows == "outputs" else "row" }};
}

// The row of the part that is read for row `r`.
fn part_row(r: u32) -> u32 { return min(r, {{ n_rows - 1 }}u); }

{% if accumulate %}
// The values that the product of rows [r, r + 4) for result `t` is added to; arbitrary where these do not exist.
fn before4(t: u32, r: u32) -> vec4<f32> {
{% if aligned %}
    return y[min(t * {{ out_stride // width }}u + ({{ first_row }}u + r) / 4u, arrayLength(&y) - 1u)];
{% else %}
    let at = t * {{ out_stride }}u + {{ first_row }}u + r * {{ row_step }}u;
    let last = arrayLength(&y) - 1u;
    return vec4(y[min(at, last)], y[min(at + {{ row_step }}u, last)], y[min(at + {{ 2 * row_step }}u, last)], y[min(at + {{ 3 * row_step }}u, last)]);
{% endif %}
}
{% endif %}

// Stores `v`, rows [r, r + 4) of the part for result `t`, as far as these exist. r is a multiple of four, n is n_results(){% if accumulate %},
// `before` is before4(t, r){% endif %}.
fn put4(t: u32, r: u32, v: vec4<f32>, n: u32{% if accumulate %}, before: vec4<f32>{% endif %}) {
    if t >= n || r >= {{ n_rows }}u { return; }
    var out = v;
{% if bias %}
{% for i in range(4) %}
    out[{{ i }}] += bias[{{ first_row }}u + min(r + {{ i }}u, {{ n_rows - 1 }}u) * {{ row_step }}u];
{% endfor %}
{% endif %}
{% if gated %}
    let gate = out.xz;
    let result = gate / (1.0 + exp(-max(gate, vec2(-80.0)))) * out.yw;
{% else %}
    let result = out{% if accumulate %} + before{% endif %};
{% endif %}
{% if aligned %}
    let at = t * {{ out_stride // width }}u + ({{ first_row }}u + r) / 4u;
    y[at] = result;
{% elif gated %}
    let at = t * {{ out_stride }}u + ({{ first_row }}u + r) / 2u;
    y[at] = result[0];
    if r + 2u < {{ n_rows }}u { y[at + 1u] = result[1]; }
{% else %}
    let at = t * {{ out_stride }}u + {{ first_row }}u + r * {{ row_step }}u;
{% for i in range(4) %}
    if r + {{ i }}u < {{ n_rows }}u { y[at + {{ i * row_step }}u] = result[{{ i }}]; }
{% endfor %}
{% endif %}
}
