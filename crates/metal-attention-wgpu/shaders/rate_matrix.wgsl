// Bounds: `sums` has an element for every thread, `operands` the four numbers (`Dispatch`). Loops count to constants.
{% if subgroup_size > 0 and (cooperative_f16 or cooperative_f32) %}
{% set scalar = "f16" if cooperative_f16 else "f32" %}
{% set side = 16 if cooperative_f16 else 8 %}
// Products of matrix units, {{ side }}x{{ side }} matrices of {{ scalar }} accumulated in f32: each subgroup computes {{ steps }} times those of two left and
// four right factors, as in the tiles of matrix products. sums[i]: a lane's share of all elements of the eight results.
enable wgpu_cooperative_matrix;
{% if scalar == "f16" %}
enable f16;
{% endif %}
@group(0) @binding(0) var<storage, read> operands: array<f32>;
@group(0) @binding(1) var<storage, read_write> sums: array<f32>;

// Six factors, each row by row. Metal reads matrices from arrays of scalars only.
{% set elements = 4 if scalar == "f16" else 1 %}
const PITCH: u32 = {{ side // elements }}u;
var<workgroup> tile: array<{{ "vec4<f16>" if scalar == "f16" else "f32" }}, {{ 6 * side * side // elements }}>;
const RESULT_PITCH: u32 = {{ side + 4 }}u;
var<workgroup> results: array<f32, {{ n_subgroups * side * (side + 4) }}>;

{% set threads = n_subgroups * subgroup_size %}
{% set shape = side ~ "x" ~ side ~ "<" ~ scalar %}
@compute @workgroup_size({{ threads }})
fn main(
    @builtin(local_invocation_index) tid: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    for (var i = tid; i < {{ 6 * side * side // elements }}u; i += {{ threads }}u) {
{% if scalar == "f16" %}
        tile[i] = vec4<f16>(vec4(operands[0], operands[1], operands[2], operands[3]));
{% else %}
        tile[i] = operands[i % 4u];
{% endif %}
    }
    workgroupBarrier();
{% for i in range(2) %}
    let left{{ i }} = coopLoadT<coop_mat{{ shape }}, A>>(&tile[{{ i * side * side // elements }}], PITCH);
{% endfor %}
{% for j in range(4) %}
    let right{{ j }} = coopLoad<coop_mat{{ shape }}, B>>(&tile[{{ (2 + j) * side * side // elements }}], PITCH);
{% endfor %}
{% for i in range(2) %}
{% for j in range(4) %}
    var sum{{ i }}_{{ j }} = coop_mat{{ side }}x{{ side }}<f32, C>();
{% endfor %}
{% endfor %}
    for (var step = 0u; step < {{ steps }}u; step += 4u) {
{% for _ in range(4) %}
{% for i in range(2) %}
{% for j in range(4) %}
        sum{{ i }}_{{ j }} = coopMultiplyAdd(left{{ i }}, right{{ j }}, sum{{ i }}_{{ j }});
{% endfor %}
{% endfor %}
{% endfor %}
    }
    // The order of a matrix's elements in registers is unspecified: each result passes through workgroup memory.
    let mine = subgroup * {{ side }}u * RESULT_PITCH;
    var total = 0.0;
{% for i in range(2) %}
{% for j in range(4) %}
    coopStoreT(sum{{ i }}_{{ j }}, &results[mine], RESULT_PITCH);
    workgroupBarrier();
    for (var q = lane; q < {{ side * side }}u; q += {{ subgroup_size }}u) {
        total += results[mine + q / {{ side }}u * RESULT_PITCH + q % {{ side }}u];
    }
    workgroupBarrier();
{% endfor %}
{% endfor %}
    sums[{{ threads }}u * group.x + tid] = total;
}
{% else %}
{% include "rate_floats.wgsl" %}
{% endif %}
