// y[t] = W x[t] for one token a workgroup and many rows, with inputs as whole numbers: see types/inputs.wgsl.
//
// A workgroup turns its input into bytes once, and multiplies {{ turns }} x {{ threads // lanes * row_tile }} rows with it.
// {{ lanes }} lanes, neighbours in a subgroup, share {{ row_tile }} rows; lane l takes units l, l + {{ lanes }}, ... of 8 columns each,
// and asks for the weights of {{ unroll }} unit(s) before it uses any, the first ones before it looks at the input.
{% if pieces > 1 %}
// The input is too long for the workgroup's memory, and comes in {{ pieces }} pieces.
{% endif %}
// Bounds: rows of `w` and units are cut off at the last, quads at the row's; `y` is written below n_rows, for tokens
// that it has (`Dispatch`). Loops count to constants.
@group(0) @binding(0) var<storage, read> w: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
{% set next = 3 %}
{% if input == "rmsnorm" %}
@group(0) @binding({{ next }}) var<storage, read> norm_weight: array<vec4<f32>>;
{% set next = next + 1 %}
{% endif %}
{% if bias %}
@group(0) @binding({{ next }}) var<storage, read> bias: array<f32>;
{% set next = next + 1 %}
{% endif %}
{% if rows == "wanted" %}
{% set batch_binding = next %}
{% include "batch.wgsl" %}

{% endif %}
{% include "types/" ~ type ~ ".wgsl" %}
{% include "types/inputs.wgsl" %}
{% set units = n_in // 8 %}
{% set quads = n_in // 4 %}
{% set steps = (units + lanes * pieces - 1) // (lanes * pieces) %}
{% set stretches = (steps + unroll - 1) // unroll %}
{% set held = stretches * unroll * lanes %}
{% set warps = threads // subgroup %}

{% if output == "gated" %}
// Below -80 the result is 0 as far as f32 goes, but exp(-v) is too large for it.
fn silu(v: f32) -> f32 { return v / (1.0 + exp(-max(v, -80.0))); }

{% endif %}
// {{ "A piece of the" if pieces > 1 else "The" }} input: even halves of units, then odd ones. Units past the end are zero.
var<workgroup> input: array<vec4<u32>, {{ 2 * held }}>;
{% if input == "rmsnorm" %}
var<workgroup> squares: array<f32, {{ warps }}>;
{% endif %}

{% macro load(turn, stretch) %}
        {
            let row = first + ({{ turn }}) * {{ threads // lanes * row_tile }}u;
{% for u in range(unroll) %}
            let unit_{{ u }} = min({{ "base + " if pieces > 1 }}lane + {{ u * lanes }}u + ({{ stretch }}) * {{ unroll * lanes }}u, {{ units - 1 }}u);
{% for r in range(row_tile) %}
            raw_{{ r }}_{{ u }} = load8(min(row + {{ r }}u, {{ n_rows - 1 }}u), unit_{{ u }});
{% endfor %}
{% endfor %}
        }
{% endmacro %}
@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let lane = tid % {{ lanes }}u;
    let first = (group.z * {{ groups_x }}u + group.x) * {{ turns * threads // lanes * row_tile }}u + tid / {{ lanes }}u * {{ row_tile }}u;
{% for r in range(row_tile) %}
    var acc_{{ r }} = 0.0;
{% for u in range(unroll) %}
    var raw_{{ r }}_{{ u }}: Raw8;
{% endfor %}
{% endfor %}
    let token = group.y;
    let source = {{ "wanted(token)" if rows == "wanted" else "token" }} * {{ quads }}u;
{% if input == "rmsnorm" %}
    var sum_of_squares = 0.0;
{% endif %}
{% if pieces > 1 %}
    for (var base = 0u; base < {{ pieces * held }}u; base += {{ held }}u) {
{% endif %}
{{ load("0u", "0u") }}
    for (var at = tid; at < {{ 2 * held }}u; at += {{ threads }}u) {
        let quad = {{ "2u * base + " if pieces > 1 }}at;
        var v = x[source + min(quad, {{ quads - 1 }}u)];
        if quad >= {{ quads }}u { v = vec4<f32>(); }
{% if input == "rmsnorm" %}
        sum_of_squares += dot(v, v);
        v *= norm_weight[min(quad, {{ quads - 1 }}u)];
{% endif %}
        input[at / 2u + at % 2u * {{ held }}u] = input_bytes(at, v);
    }
{% macro share_squares() %}
{% if input == "rmsnorm" %}
    sum_of_squares = subgroupAdd(sum_of_squares);
    if tid % {{ subgroup }}u == 0u { squares[tid / {{ subgroup }}u] = sum_of_squares; }
{% endif %}
{% endmacro %}
{% macro factor() %}
{% if input == "rmsnorm" %}
    sum_of_squares = {% for i in range(warps) %}squares[{{ i }}]{{ " + " if not loop.last }}{% endfor %};
    let factor = inverseSqrt(sum_of_squares / {{ n_in }}.0 + {{ eps }});
{% endif %}
{% endmacro %}
{% if pieces == 1 %}
{{ share_squares() }}
{%- endif %}
    workgroupBarrier();
{% if pieces == 1 %}
{{ factor() }}
{%- endif %}

    for (var step = 0u; step < {{ turns * stretches }}u; step++) {
{% for u in range(unroll) %}
        {
            let at = lane + {{ u * lanes }}u + step % {{ stretches }}u * {{ unroll * lanes }}u;
            let x8 = X8(input[at], input[at + {{ held }}u]);
{% for r in range(row_tile) %}
            acc_{{ r }} += dots8(raw_{{ r }}_{{ u }}, x8);
{% endfor %}
        }
{% endfor %}
        if step < {{ turns * stretches - 1 }}u {
{{ load("(step + 1u) / %du" | format(stretches), "(step + 1u) %% %du" | format(stretches)) }}
        }
{% macro finish(first_row_of_turn) %}
            let row = {{ first_row_of_turn }};
{% for half in [16, 8, 4, 2, 1] if half < lanes %}
{% for r in range(row_tile) %}
            acc_{{ r }} += subgroupShuffleXor(acc_{{ r }}, {{ half }}u);
{% endfor %}
{% endfor %}
{% macro value(r) %}
acc_{{ r }}{{ " * factor" if input == "rmsnorm" }}
{%- if bias %} + bias[{{ first_row }}u + (row + {{ r }}u) * {{ row_step }}u]{% endif %}
{% endmacro %}
{% for r in range(0, row_tile, 2 if output == "gated" else 1) %}
            if lane == 0u && row + {{ r }}u < {{ n_rows }}u {
{% if output == "gated" %}
                y[token * {{ n_out // 2 }}u + {{ first_row // 2 }}u + row / 2u + {{ r // 2 }}u] = silu({{ value(r) }}) * ({{ value(r + 1) }});
{% else %}
                y[token * {{ n_out }}u + {{ first_row }}u + (row + {{ r }}u) * {{ row_step }}u] {{ "+=" if output == "accumulate" else "=" }} {{ value(r) }};
{% endif %}
            }
{% endfor %}
{% endmacro %}
{% if pieces == 1 %}
        if step % {{ stretches }}u == {{ stretches - 1 }}u {
{{ finish("first + step / %du * %du" | format(stretches, threads // lanes * row_tile)) }}
{% for r in range(row_tile) %}
            acc_{{ r }} = 0.0;
{% endfor %}
        }
{% endif %}
    }
{% if pieces > 1 %}
    workgroupBarrier();
    }
{{ share_squares() }}
    workgroupBarrier();
{{ factor() }}
{{ finish("first") }}
{% endif %}
}
