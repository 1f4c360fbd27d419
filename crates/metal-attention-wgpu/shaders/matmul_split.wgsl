// Bounds: rows of `w` and units are clamped to the last; rows of `x` to those that the buffer holds, or to output tokens
// of the batch; results that do not exist are dropped (put4). Indices of workgroup memory follow from the tile, a constant,
// and the subgroup. Loops count to constants.
{% set scalar = "f16" if cooperative_f16 else "f32" %}
{% set side = 16 %}
// Split-K: Y = X W^T for a few tokens on matrix units, which multiply {{ side }}x{{ side }} matrices of {{ scalar }} and accumulate in f32{% if norm %}, where X is
// normed first{% endif %}. A workgroup computes {{ tile_rows }} rows of the part for {{ side }} tokens. Its {{ shares }} subgroups divide the inner dimension,
// {{ depth }} at a time, and add up their sums in the end: so a small matrix keeps a large GPU busy.
//
// Each subgroup divides each token's inputs by a power of two that brings the largest one of its share near 2^14.
{% if norm %}
// W (x g / rms(x)) = (W (x g)) / rms(x): the norm is one more sum, of squares.
{% endif %}
{% if not cooperative_f16 %}
// This device has no such units; plain loops stand in for them, for tests.
{% else %}
enable wgpu_cooperative_matrix;
enable f16;
{% endif %}
{#
  turns     how many times a subgroup multiplies {{ depth }} inputs
  at_once   tokens that a subgroup reads at once: 8 lanes share a token
  tokens    tokens of which a lane reads a part
  vectors   vectors of four inputs that a lane reads of each token in a turn
  units     units of eight weights that a lane reads in a turn
#}
{% set subgroup_size = subgroup_size if subgroup_size >= 8 else 32 %}
{% set threads = shares * subgroup_size %}
{% set steps = (n_in + depth - 1) // depth %}
{% set turns = (steps + shares - 1) // shares %}
{% set at_once = subgroup_size // 8 %}
{% set tokens = side // at_once %}
{% set vectors = depth // 32 %}
{% set units = tile_rows * depth // 8 // subgroup_size %}
{% set accumulate = output == "accumulate" %}
{% set early = accumulate and threads >= side * side // 4 %}
{% set padded = turns * shares * depth > n_in %}
{# Whether a lane can hold all its inputs in registers, and so request them at once. #}
{% set held = turns * vectors * tokens <= held_vectors %}
@group(0) @binding(0) var<storage, read> w: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
{% set y_binding = 2 %}
{% set batch_binding = 3 %}
{% set bias_binding = 5 if norm else 4 %}
{% if norm %}
@group(0) @binding(4) var<storage, read> norm_weight: array<vec4<f32>>;
{% endif %}
{% include "batch.wgsl" %}
{% include "types/" ~ type ~ ".wgsl" %}
{% include "matmul_output.wgsl" %}
const TURNS: u32 = {{ turns }}u;
const VECTORS: u32 = {{ n_in // 4 }}u; // of a row of x

// The operands of each subgroup, [row][input] and [token][input], with 16 bytes between rows, so that a matrix unit reads
// 16 bytes of each of eight rows without bank conflicts.
const PITCH: u32 = {{ (depth + 8) // 4 }}u;
var<workgroup> tile_w: array<vec4<{{ scalar }}>, {{ shares * tile_rows * (depth + 8) // 4 }}>;
var<workgroup> tile_x: array<vec4<{{ scalar }}>, {{ shares * side * (depth + 8) // 4 }}>;
// The sums of each subgroup, [token][row], and their factors, with the sum of the token's squares.
const RESULT_PITCH: u32 = {{ side + 4 }}u;
const RESULTS: u32 = {{ side * (side + 4) }}u;
var<workgroup> results: array<f32, {{ shares * side * (side + 4) }}>;
var<workgroup> factors: array<vec2<f32>, {{ shares * side }}>;

{% if not cooperative_f16 %}
{% include "matrix_loops.wgsl" %}

{% endif %}
{# Orders in memory: coopLoadT and coopStoreT access matrices row by row, coopLoad column by column. #}
{% macro multiply(k) %}
{% if cooperative_f16 %}
            let x_{{ k }} = coopLoadT<coop_mat16x16<f16, A>>(&tile_x[my_x + {{ k // 4 }}u], PITCH);
{% for r in range(tile_rows // side) %}
            let w_{{ k }}_{{ r }} = coopLoad<coop_mat16x16<f16, B>>(&tile_w[my_w + {{ r * side }}u * PITCH + {{ k // 4 }}u], PITCH);
            sum_{{ r }} = coopMultiplyAdd(x_{{ k }}, w_{{ k }}_{{ r }}, sum_{{ r }});
{% endfor %}
{% else %}
{% for r in range(tile_rows // side) %}
            sum_{{ r }} = multiply_add(my_x + {{ k // 4 }}u, my_w + {{ r * side }}u * PITCH + {{ k // 4 }}u, sum_{{ r }}, lane);
{% endfor %}
{% endif %}
{% endmacro %}
// The index of vector `i` of a row; that of the last one beyond the end.
fn vector_index(i: u32) -> u32 { return {{ "min(i, VECTORS - 1u)" if padded else "i" }}; }
{% macro inside(v, i) %}{% if padded %}select(vec4<f32>(), {{ v }}, {{ i }} < VECTORS){% else %}{{ v }}{% endif %}{% endmacro %}

@compute @workgroup_size({{ threads }})
fn main(
    @builtin(local_invocation_index) tid: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let first_row = {{ tile_rows }}u * group.x;
    let first_token = {{ side }}u * group.y;
    let my_w = subgroup * {{ tile_rows }}u * PITCH;
    let my_x = subgroup * {{ side }}u * PITCH;
    let first_step = subgroup * TURNS;
    let n = n_results();
    // Rows beyond the batch's are read if the buffer has them, so that no read waits for the size of the batch.
    let room = arrayLength(&x) / VECTORS;

{% macro load_w(tag, step) %}
{% for i in range(units) %}
    raw_{{ tag }}_{{ i }} = load8(w_from_{{ i }}, min(({{ step }}) * {{ depth // 8 }}u + w_unit_{{ i }}, UNITS - 1u));
{% endfor %}
{% endmacro %}
{% macro load_x(tag, step) %}
{% for h in range(vectors) %}
    let i_{{ tag }}_{{ h }} = ({{ step }}) * {{ depth // 4 }}u + {{ 8 * h }}u + lane % 8u;
    let at_{{ tag }}_{{ h }} = vector_index(i_{{ tag }}_{{ h }});
{% if norm %}
    let gain_{{ tag }}_{{ h }} = norm_weight[at_{{ tag }}_{{ h }}];
{% endif %}
{% for j in range(tokens) %}
    let v_{{ tag }}_{{ h }}_{{ j }} = {{ inside("x[from_%d + at_%s_%d]"|format(j, tag, h), "i_%s_%d"|format(tag, h)) }};
{% endfor %}
{% endfor %}
{% endmacro %}
{% macro gained(tag, h, j) %}v_{{ tag }}_{{ h }}_{{ j }}{% if norm %} * gain_{{ tag }}_{{ h }}{% endif %}{% endmacro %}
{% macro measure(tag) %}
{% for h in range(vectors) %}
{% for j in range(tokens) %}
    {
{% if norm %}
        squares_{{ j }} += dot(v_{{ tag }}_{{ h }}_{{ j }}, v_{{ tag }}_{{ h }}_{{ j }});
{% endif %}
        let size = abs({{ gained(tag, h, j) }});
        largest_{{ j }} = max(largest_{{ j }}, max(max(size.x, size.y), max(size.z, size.w)));
    }
{% endfor %}
{% endfor %}
{% endmacro %}
{# One turn with the loaded data; `again`: the tiles are still in use. #}
{% macro take(tag, w_tag, again) %}
{% for i in range(units) %}
        let codes_{{ i }} = codes8(raw_{{ w_tag }}_{{ i }});
        let scale_{{ i }} = scale8(raw_{{ w_tag }}_{{ i }});
        let lo_{{ i }} = vec4<{{ scalar }}>(codes_{{ i }}.lo * scale_{{ i }});
        let hi_{{ i }} = vec4<{{ scalar }}>(codes_{{ i }}.hi * scale_{{ i }});
{% endfor %}
{% if again %}
        workgroupBarrier();
{% endif %}
{% for i in range(units) %}
        tile_w[w_to_{{ i }}] = lo_{{ i }};
        tile_w[w_to_{{ i }} + 1u] = hi_{{ i }};
{% endfor %}
{% for h in range(vectors) %}
{% for j in range(tokens) %}
        tile_x[my_x + token_{{ j }} * PITCH + {{ 8 * h }}u + lane % 8u] = vec4<{{ scalar }}>({{ gained(tag, h, j) }} * factor_{{ j }});
{% endfor %}
{% endfor %}
        workgroupBarrier();
{% endmacro %}
    // Units of weights. Beyond the last row or unit that one is read again, and multiplied by zero or its results dropped.
{% for i in range(units) %}
    let w_row_{{ i }} = (lane + {{ i * subgroup_size }}u) / {{ depth // 8 }}u;
    let w_unit_{{ i }} = (lane + {{ i * subgroup_size }}u) % {{ depth // 8 }}u;
    let w_from_{{ i }} = min(first_row + w_row_{{ i }}, {{ n_rows - 1 }}u);
    let w_to_{{ i }} = my_w + w_row_{{ i }} * PITCH + w_unit_{{ i }} * 2u;
{% endfor %}
{% for j in range(tokens) %}
    let token_{{ j }} = lane / 8u + {{ j * at_once }}u;
{% if rows == "outputs" %}
    let from_{{ j }} = input_row(first_token + token_{{ j }}) * VECTORS;
{% else %}
    let from_{{ j }} = min(first_token + token_{{ j }}, room - 1u) * VECTORS;
{% endif %}
    var largest_{{ j }} = 0.0;
{% if norm %}
    var squares_{{ j }} = 0.0;
{% endif %}
{% endfor %}
{% for t in range(turns if held else 1) %}
{% for i in range(units) %}
    var raw_{{ t }}_{{ i }}: Raw8;
{% endfor %}
{{ load_w(t, "first_step + %du"|format(t)) }}
{%- endfor %}
    // The largest magnitude of each token{% if norm %}, and its sum of squares{% endif %}.
{% if held %}
{% for t in range(turns) %}
{{ load_x(t, "first_step + %du"|format(t)) }}
{%- endfor %}
{% for t in range(turns) %}
{{ measure(t) }}
{%- endfor %}
{% else %}
    for (var turn = 0u; turn < TURNS; turn++) {
{{ load_x(0, "first_step + turn") }}
{{- measure(0) }}
    }
{% endif %}
{% for mask in [1, 2, 4] %}
{% for j in range(tokens) %}
    largest_{{ j }} = max(largest_{{ j }}, subgroupShuffleXor(largest_{{ j }}, {{ mask }}u));
{% if norm %}
    squares_{{ j }} += subgroupShuffleXor(squares_{{ j }}, {{ mask }}u);
{% endif %}
{% endfor %}
{% endfor %}
    // The exponent e of the largest magnitude m, 2^e <= m < 2^(e + 1), limited so that 2^(14 - e) and its inverse are normal.
{% for j in range(tokens) %}
    let e_{{ j }} = max(i32(bitcast<u32>(largest_{{ j }}) >> 23u) - 127, -100);
    let factor_{{ j }} = bitcast<f32>(u32(127 + 14 - e_{{ j }}) << 23u);
    if lane % 8u == 0u {
        factors[subgroup * {{ side }}u + token_{{ j }}] = vec2(bitcast<f32>(u32(127 - 14 + e_{{ j }}) << 23u), {{ "squares_%d"|format(j) if norm else "0.0" }});
    }
{% endfor %}

{% if early %}
    // The values that the results are added to, requested by now: one invocation computes each.
{% for r in range(tile_rows // side) %}
    var before_{{ r }} = vec4<f32>();
    if tid < {{ side * side // 4 }}u {
        before_{{ r }} = before4(first_token + tid / {{ side // 4 }}u, first_row + {{ r * side }}u + tid % {{ side // 4 }}u * 4u);
    }
{% endfor %}
{% endif %}
{% for r in range(tile_rows // side) %}
    var sum_{{ r }} = {{ "coop_mat16x16<f32, C>" if cooperative_f16 else "Sum" }}();
{% endfor %}
{% if held %}
{% for t in range(turns) %}
    {
{{ take(t, t, t > 0) }}
{%- for k in range(0, depth, side) %}
{{ multiply(k) }}
{%- endfor %}
    }
{% endfor %}
{% else %}
    for (var turn = 0u; turn < TURNS; turn++) {
{{ load_x(0, "first_step + turn") }}
{{- take(0, 0, true) }}
{{- load_w(0, "first_step + turn + 1u") }}
{%- for k in range(0, depth, side) %}
{{ multiply(k) }}
{%- endfor %}
    }
{% endif %}

{% for r in range(tile_rows // side) %}
{% if cooperative_f16 %}
    // The order of a matrix's elements in registers is unspecified: it passes through workgroup memory.
    coopStoreT(sum_{{ r }}, &results[subgroup * RESULTS], RESULT_PITCH);
{% else %}
    store(sum_{{ r }}, subgroup * RESULTS, lane);
{% endif %}
    workgroupBarrier();
    for (var q = tid; q < {{ side * side // 4 }}u; q += {{ threads }}u) {
        let token = q / {{ side // 4 }}u;
        let row = q % {{ side // 4 }}u * 4u;
        var v = vec4<f32>();
{% if norm %}
        var squares = 0.0;
{% endif %}
{% for s in range(shares) %}
        {
            let at = {{ s }}u * RESULTS + token * RESULT_PITCH + row;
            let factor = factors[{{ s * side }}u + token];
            v += vec4(results[at], results[at + 1u], results[at + 2u], results[at + 3u]) * factor.x;
{% if norm %}
            squares += factor.y;
{% endif %}
        }
{% endfor %}
{% if norm %}
        v *= inverseSqrt(squares / {{ n_in }}.0 + {{ eps }});
{% endif %}
        let t = first_token + token;
        let to = first_row + {{ r * side }}u + row;
        put4(t, to, v, n{% if accumulate %}, {{ "before_%d"|format(r) if early else "before4(t, to)" }}{% endif %});
    }
{% if not loop.last %}
    workgroupBarrier();
{% endif %}
{% endfor %}
}
