// Bounds: rows, tokens and units beyond the last are clamped to it where they are read, and dropped where they are
// written (put4); `x` and `scales` have a padded row for each result (`Dispatch`). Indices of workgroup memory follow from
// the tile, a constant, and the subgroup, which is below the workgroup's number. Loops count to constants.
{% set on_units = cooperative_f16 or cooperative_f32 %}
{% set scalar = "f16" if cooperative_f16 else "f32" %}
{% set side = 8 if cooperative_f32 and not cooperative_f16 else 16 %}
// Y = X W^T for many tokens on matrix units, which multiply {{ side }}x{{ side }} matrices of {{ scalar }} and accumulate in f32. A workgroup computes
// a tile of {{ tile_rows }} rows of the part by {{ tile_tokens }} tokens: it steps through the inner dimension {{ depth }} at a time, which it first copies
// to workgroup memory. Its subgroups, {{ subgroups_rows }} by {{ subgroups_tokens }}, divide the tile.
{% if on_units %}
enable wgpu_cooperative_matrix;
{% else %}
// This device has no such units; plain loops stand in for them, for tests.
{% endif %}
{% if scalar == "f16" %}
enable f16;
{% endif %}
{% set subgroup_size = subgroup_size if subgroup_size >= 8 else 32 %}
{% set threads = subgroups_rows * subgroups_tokens * subgroup_size %}
{% set along_rows = tile_rows // subgroups_rows // side %}
{% set along_tokens = tile_tokens // subgroups_tokens // side %}
{% set steps = (n_in + depth - 1) // depth %}
@group(0) @binding(0) var<storage, read> w: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<{{ scalar }}>>;
@group(0) @binding(2) var<storage, read> scales: array<f32>;
{% set y_binding = 3 %}
{% set batch_binding = 4 %}
{% set bias_binding = 5 %}
{% set experts = rows == "experts" %}
{% if not experts %}
{% include "batch.wgsl" %}
{% endif %}
{% include "types/" ~ type ~ ".wgsl" %}
{% include "experts_output.wgsl" if experts else "matmul_output.wgsl" %}

// The tiles, [row][input] and [token][input], with 16 bytes between rows, so that a matrix unit reads 16 bytes of each of
// eight rows without bank conflicts.
{% if scalar == "f16" or not on_units %}
{% set element = "vec4<" ~ scalar ~ ">" %}
{% set elements = 4 %}
{% set pitch = (depth + 8) // 4 %}
{% else %}
{# Metal reads matrices from arrays of scalars only. #}
{% set element = "f32" %}
{% set elements = 1 %}
{% set pitch = depth + 4 %}
{% endif %}
const PITCH: u32 = {{ pitch }}u;
var<workgroup> tile_w: array<{{ element }}, {{ tile_rows * pitch }}>;
var<workgroup> tile_x: array<{{ element }}, {{ tile_tokens * pitch }}>;
// One result matrix of each subgroup.
const RESULT_PITCH: u32 = {{ side + 4 }}u;
var<workgroup> results: array<f32, {{ subgroups_rows * subgroups_tokens * side * (side + 4) }}>;

{% set shape = side ~ "x" ~ side ~ "<" ~ scalar %}
{% if on_units %}
{# Orders in memory: coopLoadT and coopStoreT access matrices row by row, coopLoad and coopStore column by column. #}
{% set zero = "coop_mat" ~ side ~ "x" ~ side ~ "<f32, C>()" %}
{% macro load_x(at) %}coopLoadT<coop_mat{{ shape }}, A>>(&tile_x[{{ at }}], PITCH){% endmacro %}
{% macro load_w(at) %}coopLoad<coop_mat{{ shape }}, B>>(&tile_w[{{ at }}], PITCH){% endmacro %}
{% macro multiply_add(x, w, c) %}coopMultiplyAdd({{ x }}, {{ w }}, {{ c }}){% endmacro %}
{% macro store_y(c, at) %}coopStoreT({{ c }}, &results[{{ at }}], RESULT_PITCH){% endmacro %}
{% else %}
{% include "matrix_loops.wgsl" %}
{% set zero = "Sum()" %}
{% macro load_x(at) %}{{ at }}{% endmacro %}
{% macro load_w(at) %}{{ at }}{% endmacro %}
{% macro multiply_add(x, w, c) %}multiply_add({{ x }}, {{ w }}, {{ c }}, lane){% endmacro %}
{% macro store_y(c, at) %}store({{ c }}, {{ at }}, lane){% endmacro %}
{% endif %}

@compute @workgroup_size({{ threads }})
fn main(
    @builtin(local_invocation_index) tid: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let first_row = {{ tile_rows }}u * group.x;
{% if experts %}
    let taken = tiles[group.y];
    if taken.y == taken.z { return; }
    tile = taken;
{% endif %}
    let first_token = {{ "taken.y" if experts else "%du * group.y"|format(tile_tokens) }};
    let n = n_results();
    // The subgroup's part of the tile.
    let my_row = subgroup % {{ subgroups_rows }}u * {{ side * along_rows }}u;
    let my_token = subgroup / {{ subgroups_rows }}u * {{ side * along_tokens }}u;

    // The data that this invocation fetches: units of eight weights and vectors of four inputs, {{ stages }} step(s) ahead, in the form in
    // which they are stored. Beyond the last row, token or unit it fetches that one again: inputs are padded with zeros, results dropped.
{% set units = tile_rows * depth // 8 // threads %}
{% set vectors = tile_tokens * depth // 4 // threads %}
{% for i in range(units) %}
    let w_row{{ i }} = (tid + {{ i * threads }}u) / {{ depth // 8 }}u;
    let w_unit{{ i }} = (tid + {{ i * threads }}u) % {{ depth // 8 }}u;
    let w_from{{ i }} = part_row(first_row + w_row{{ i }});
    let w_to{{ i }} = w_row{{ i }} * PITCH + w_unit{{ i }} * {{ 8 // elements }}u;
{% endfor %}
{% for i in range(vectors) %}
    let x_row{{ i }} = (tid + {{ i * threads }}u) / {{ depth // 4 }}u;
    let x_vector{{ i }} = (tid + {{ i * threads }}u) % {{ depth // 4 }}u;
    let x_from{{ i }} = {{ "input_row(first_token + x_row%d)"|format(i) if experts else "min(first_token + x_row%d, max(n, 1u) - 1u)"|format(i) }} * {{ padded // 4 }}u + x_vector{{ i }};
    let x_to{{ i }} = x_row{{ i }} * PITCH + x_vector{{ i }} * {{ 4 // elements }}u;
{% endfor %}
{% macro fetch(stage, step) %}
{% for i in range(units) %}
        raw{{ stage }}_{{ i }} = load8(w_from{{ i }}, min({{ step }} * {{ depth // 8 }}u + w_unit{{ i }}, UNITS - 1u));
{% endfor %}
{% for i in range(vectors) %}
        in{{ stage }}_{{ i }} = x[x_from{{ i }} + {{ step }} * {{ depth // 4 }}u];
{% endfor %}
{% endmacro %}
{% macro put(tile, at, v) %}
{% if elements == 4 %}
        {{ tile }}[{{ at }}] = {{ v }};
{% else %}
{% for e in range(4) %}
        {{ tile }}[{{ at }} + {{ e }}u] = {{ v }}[{{ e }}];
{% endfor %}
{% endif %}
{% endmacro %}
{% for stage in range(stages) %}
{% for i in range(units) %}
    var raw{{ stage }}_{{ i }}: Raw8;
{% endfor %}
{% for i in range(vectors) %}
    var in{{ stage }}_{{ i }}: vec4<{{ scalar }}>;
{% endfor %}
{{ fetch(stage, [stage, steps - 1] | min ~ "u") }}
{% endfor %}
{% for i in range(along_tokens) %}
{% for j in range(along_rows) %}
    var sum{{ i }}_{{ j }} = {{ zero }};
{% endfor %}
{% endfor %}
    for (var first = 0u; first < {{ steps }}u; first += {{ stages }}u) {
{% for stage in range(stages) %}
{% if stage > 0 and steps % stages != 0 %}
        if first + {{ stage }}u >= {{ steps }}u { break; }
{% endif %}
        {
{% for i in range(units) %}
        let codes_{{ i }} = codes8(raw{{ stage }}_{{ i }});
        let scale_{{ i }} = scale8(raw{{ stage }}_{{ i }});
        let lo{{ i }} = vec4<{{ scalar }}>(codes_{{ i }}.lo * scale_{{ i }});
        let hi{{ i }} = vec4<{{ scalar }}>(codes_{{ i }}.hi * scale_{{ i }});
{% endfor %}
        workgroupBarrier();
{% for i in range(units) %}
{{ put("tile_w", "w_to" ~ i, "lo" ~ i) }}
{{ put("tile_w", "w_to" ~ i ~ " + " ~ (4 // elements) ~ "u", "hi" ~ i) }}
{% endfor %}
{% for i in range(vectors) %}
{{ put("tile_x", "x_to" ~ i, "in" ~ stage ~ "_" ~ i) }}
{% endfor %}
        workgroupBarrier();
        let next = min(first + {{ stage + stages }}u, {{ steps - 1 }}u);
{{ fetch(stage, "next") }}
{% for k in range(0, depth, side) %}
{% for i in range(along_tokens) %}
        let x{{ k }}_{{ i }} = {{ load_x("(my_token + " ~ (i * side) ~ "u) * PITCH + " ~ (k // elements) ~ "u") }};
{% endfor %}
{% for j in range(along_rows) %}
        let w{{ k }}_{{ j }} = {{ load_w("(my_row + " ~ (j * side) ~ "u) * PITCH + " ~ (k // elements) ~ "u") }};
{% endfor %}
{% for i in range(along_tokens) %}
{% for j in range(along_rows) %}
        sum{{ i }}_{{ j }} = {{ multiply_add("x" ~ k ~ "_" ~ i, "w" ~ k ~ "_" ~ j, "sum" ~ i ~ "_" ~ j) }};
{% endfor %}
{% endfor %}
{% endfor %}
        }
{% endfor %}
    }

    // The order of a matrix's elements in registers is unspecified: each result passes through workgroup memory.
    let my_results = subgroup * {{ side }}u * RESULT_PITCH;
{% for i in range(along_tokens) %}
{% for j in range(along_rows) %}
    {{ store_y("sum" ~ i ~ "_" ~ j, "my_results") }};
    workgroupBarrier();
    for (var q = lane; q < {{ side * side // 4 }}u; q += {{ subgroup_size }}u) {
        let row = q % {{ side // 4 }}u * 4u;
        let token = q / {{ side // 4 }}u;
        let t = first_token + my_token + {{ i * side }}u + token;
        let at = my_results + token * RESULT_PITCH + row;
        let v = vec4(results[at], results[at + 1u], results[at + 2u], results[at + 3u]);
        let to = first_row + my_row + {{ j * side }}u + row;
        if t < n { put4(t, to, v * scales[{{ "input_row(t)" if experts else "t" }}], n{{ ", before4(t, to)" if output == "accumulate" }}); }
    }
    workgroupBarrier();
{% endfor %}
{% endfor %}
}
