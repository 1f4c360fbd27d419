// x[t] = row id(t) of a table, dequantised; one lane for each unit of 8 elements. A part of the table writes the rows that
// it holds and leaves the others to the other parts.{% if spares_rows %} Rows of `x` that are given are left as they are.{% endif %}

// Bounds: tokens are those of the batch, and `x` holds their rows (`Dispatch`); rows are compared with those of the part,
// whatever the id, and units with UNITS.
@group(0) @binding(0) var<storage, read> w: array<u32>;
@group(0) @binding(1) var<storage, read_write> x: array<f32>;
{% set batch_binding = 2 %}
{% include "batch.wgsl" %}

{% include "types/" ~ type ~ ".wgsl" %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let id = token_id(group.x);
    let unit = group.y * {{ threads }}u + tid;
    if unit >= UNITS || id < {{ first_row }}u { return; }
{% if spares_rows %}
    if has_row(group.x) { return; }
{% endif %}
    let ahead = id - {{ first_row }}u;
    let row = ahead / {{ row_step }}u;
    if ahead % {{ row_step }}u != 0u || row >= {{ n_rows }}u { return; }
    let v = weights8(row, unit);
    let at = group.x * {{ n_in }}u + 8u * unit;
    let n = {{ n_in }}u - 8u * unit;
{% for k in range(8) %}
    {% if k and n_in % 8 %}if n > {{ k }}u { {% endif %}x[at + {{ k }}u] = v.{{ "lo" if k < 4 else "hi" }}[{{ k % 4 }}];{% if k and n_in % 8 %} }{% endif %}

{% endfor %}
}
