{% set sum = output == "sum" %}
{% set terms = n_used if sum else 1 %}
{% set units = (n_in + 7) // 8 %}
{% set all_units = terms * units %}
{% set steps = (all_units + lanes - 1) // lanes %}
{% set stretches = (steps + unroll - 1) // unroll %}
{% if sum %}
// y[t] = sum over the experts of token t of {{ "weight * " if weighted }}(W x[visit] + bias): {{ row_tile }} rows of one token.
{% else %}
// y[visit] = activation of W x[t] with the W of the visit's expert: {{ row_tile }} rows of one visit.
{% endif %}
//
// Like in matvec.wgsl, {{ lanes }} lanes share the rows; lane l reads units l, l + {{ lanes }}, ... of 8 columns each{% if sum %}, those of the first expert,
// then those of the second, and so on{% endif %}, and requests the weights of {{ unroll }} unit(s) before it uses any of them.
// Bounds: experts are clamped to the last, rows to the expert's last; rows that are in another part of the matrix read the
// part's first and are multiplied by zero; units are clamped to the last. Tokens are those for which the buffers are long
// enough (`Dispatch`), choices are below {{ n_used }}. Loops count to constants.
@group(0) @binding(0) var<storage, read> w: array<u32>;
{% set vectors = n_in % 8 == 0 %}
{% set vector = "vec4<f32>" if vectors else "f32" %}
@group(0) @binding(1) var<storage, read> x: array<{{ vector }}>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
@group(0) @binding(3) var<storage, read> chosen: array<u32>;
{% set next = 4 %}
{% if weighted %}
@group(0) @binding({{ next }}) var<storage, read> expert_weights: array<f32>;
{% set next = next + 1 %}
{% endif %}
{% if norm %}
@group(0) @binding({{ next }}) var<storage, read> norm_weight: array<{{ vector }}>;
{% set next = next + 1 %}
{% endif %}
{% if bias %}
@group(0) @binding({{ next }}) var<storage, read> bias: array<f32>;
{% endif %}
{% include "types/" ~ type ~ ".wgsl" %}
{% if not sum %}
{% include "experts_activation.wgsl" %}
{% endif %}
{% set n_sums = row_tile + (1 if norm else 0) %}
{# Lanes that exchange values without a barrier; if more share a row, each such bunch leaves its sum in workgroup memory. #}
{% set bunch = [neighbours, lanes, 32] | min if neighbours > 1 else 1 %}
{% set bunches = threads // bunch %}
{% if bunch < lanes %}
var<workgroup> scratch: array<f32, {{ n_sums * bunches }}>;
{% endif %}
{% for name, buffer in [("input8", "x")] + ([("norm_weight8", "norm_weight")] if norm else []) %}

// Eight columns of row `row` of `{{ buffer }}`.
fn {{ name }}(row: u32, unit: u32) -> W8 {
{% if vectors %}
    let at = row * {{ n_in // 4 }}u + 2u * unit;
    return W8({{ buffer }}[at], {{ buffer }}[at + 1u]);
{% else %}
    var v = array<f32, 8>();
    for (var k = 0u; k < min(8u, {{ n_in }}u - 8u * unit); k++) { v[k] = {{ buffer }}[row * {{ n_in }}u + 8u * unit + k]; }
    return W8(vec4<f32>(v[0], v[1], v[2], v[3]), vec4<f32>(v[4], v[5], v[6], v[7]));
{% endif %}
}
{% endfor %}

fn expert_of(visit: u32) -> u32 { return min(chosen[visit], {{ n_expert - 1 }}u); }

// Row `r` of an expert as a row of this part: n_rows or more if it is in another part.
fn row_of(expert: u32, r: u32) -> u32 { return expert * {{ expert_rows }}u + r - {{ first_row }}u; }

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let lane = tid % {{ lanes }}u;
    let first = (group.x * {{ threads // lanes }}u + tid / {{ lanes }}u) * {{ row_tile }}u;
    let token = group.y;
    let first_visit = token * {{ n_used }}u{{ "" if sum else " + group.z" }};
{% for r in range(row_tile) %}
    let row_{{ r }} = min(first + {{ r }}u, {{ expert_rows - 1 }}u);
{% endfor %}
{% if sum and accumulate %}
{% for r in range(row_tile) %}
    let before_{{ r }} = y[token * {{ expert_rows }}u + row_{{ r }}];
{% endfor %}
{% endif %}
{% for r in range(row_tile) %}
    var acc_{{ r }} = vec4<f32>();
{% endfor %}
{% if norm %}
    var squares = 0.0;
{% endif %}
    for (var start = lane; start < {{ lanes * unroll * stretches }}u; start += {{ lanes * unroll }}u) {
{% for u in range(unroll) %}
        let at_{{ u }} = min(start + {{ u * lanes }}u, {{ all_units - 1 }}u);
{% if sum %}
        let visit_{{ u }} = first_visit + at_{{ u }} / {{ units }}u;
        let unit_{{ u }} = at_{{ u }} % {{ units }}u;
{% else %}
        let visit_{{ u }} = first_visit;
        let unit_{{ u }} = at_{{ u }};
{% endif %}
        let expert_{{ u }} = expert_of(visit_{{ u }});
{% for r in range(row_tile) %}
        let from_{{ r }}_{{ u }} = row_of(expert_{{ u }}, row_{{ r }});
        let raw_{{ r }}_{{ u }} = load8({% if whole %}from_{{ r }}_{{ u }}{% else %}select(0u, from_{{ r }}_{{ u }}, from_{{ r }}_{{ u }} < {{ n_rows }}u){% endif %}, unit_{{ u }});
{% endfor %}
{% endfor %}
{% for u in range(unroll) %}
        {{ "var" if norm else "let" }} x_{{ u }} = input8({{ "visit_%d"|format(u) if sum else "token" }}, unit_{{ u }});
{% endfor %}
{% for u in range(unroll) %}
        let factor_{{ u }} = select(0.0, {{ "expert_weights[visit_%d]"|format(u) if sum and weighted else "1.0" }}, start + {{ u * lanes }}u < {{ all_units }}u);
{% if norm %}
        let gain_{{ u }} = norm_weight8(0u, unit_{{ u }});
        squares += (dot(x_{{ u }}.lo, x_{{ u }}.lo) + dot(x_{{ u }}.hi, x_{{ u }}.hi)) * factor_{{ u }};
        x_{{ u }} = W8(x_{{ u }}.lo * gain_{{ u }}.lo, x_{{ u }}.hi * gain_{{ u }}.hi);
{% endif %}
{% for r in range(row_tile) %}
        {
            let codes = codes8(raw_{{ r }}_{{ u }});
            let scale = scale8(raw_{{ r }}_{{ u }}) * {% if whole %}factor_{{ u }}{% else %}select(0.0, factor_{{ u }}, from_{{ r }}_{{ u }} < {{ n_rows }}u){% endif %};
            acc_{{ r }} += scale * (codes.lo * x_{{ u }}.lo + codes.hi * x_{{ u }}.hi);
        }
{% endfor %}
{% endfor %}
    }

    // Sums over the lanes of a row.
{% for r in range(row_tile) %}
    var sum_{{ r }} = dot(acc_{{ r }}, vec4<f32>(1.0));
{% endfor %}
{% if norm %}
    var sum_{{ row_tile }} = squares;
{% endif %}
{% for half in [16, 8, 4, 2, 1] if half < bunch %}
{% for s in range(n_sums) %}
    sum_{{ s }} += subgroupShuffleXor(sum_{{ s }}, {{ half }}u);
{% endfor %}
{% endfor %}
{% if bunch < lanes %}
    if tid % {{ bunch }}u == 0u {
{% for s in range(n_sums) %}
        scratch[{{ s * bunches }}u + tid / {{ bunch }}u] = sum_{{ s }};
{% endfor %}
    }
    workgroupBarrier();
    if lane != 0u { return; }
{% for s in range(n_sums) %}
    sum_{{ s }} = 0.0;
{% endfor %}
    for (var i = 0u; i < {{ lanes // bunch }}u; i++) {
{% for s in range(n_sums) %}
        sum_{{ s }} += scratch[{{ s * bunches }}u + tid / {{ bunch }}u + i];
{% endfor %}
    }
{% else %}
    if lane != 0u { return; }
{% endif %}

{% if sum %}
{% for r in range(row_tile) %}
    if first + {{ r }}u < {{ expert_rows }}u {
{% if bias %}
        for (var visit = first_visit; visit < first_visit + {{ n_used }}u; visit++) {
            let row = row_of(expert_of(visit), row_{{ r }});
            if row < {{ n_rows }}u { sum_{{ r }} += {{ "expert_weights[visit] * " if weighted }}bias[row + {{ first_row }}u]; }
        }
{% endif %}
        y[token * {{ expert_rows }}u + row_{{ r }}] = sum_{{ r }}{{ " + before_%d"|format(r) if accumulate }};
    }
{% endfor %}
{% else %}
    let expert = expert_of(first_visit);
{% if weighted or norm %}
    // The factor on the input, and so on the product.
    let factor = {{ "expert_weights[first_visit]" if weighted else "1.0" }}{% if norm %} * inverseSqrt(sum_{{ row_tile }} / {{ n_in }}.0 + {{ eps }}){% endif %};
{% endif %}
{% macro value(r) %}
sum_{{ r }}
{%- if weighted or norm %} * factor{% endif %}
{%- if bias %} + bias[expert * {{ expert_rows }}u + row_{{ r }}]{% endif %}
{% endmacro %}
{% for r in range(0, row_tile, 2 if gated else 1) %}
    if first + {{ r }}u < {{ expert_rows }}u{% if not whole %} && row_of(expert, row_{{ r }}) < {{ n_rows }}u{% endif %} {
{% if gated %}
        y[first_visit * {{ expert_rows // 2 }}u + row_{{ r }} / 2u] = activated({{ value(r) }}, {{ value(r + 1) }});
{% else %}
        y[first_visit * {{ expert_rows }}u + row_{{ r }}] = activated({{ value(r) }});
{% endif %}
    }
{% endfor %}
{% endif %}
}
