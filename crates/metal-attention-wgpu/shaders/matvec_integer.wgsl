// GEMV with integer dot products: y[t] = W x[t] for one token for each workgroup, and many rows; see types/inputs32.wgsl.
//
// A workgroup quantises its input to bytes once, and multiplies {{ turns }} x {{ threads // lanes * row_tile }} rows by it.
// {{ lanes }} lanes, neighbours in a subgroup, share {{ row_tile }} rows; lane l reads blocks l, l + {{ lanes }}, ... of 32 columns each,
// and requests the weights of the next {{ unroll }} before it needs them, those of the first before it reads the input.
{% if pieces > 1 %}
// The input is too long for the workgroup's memory, and is quantised in {{ pieces }} pieces.
{% endif %}
// Bounds: rows of `w` and blocks are clamped to the last, units to the row's; `y` is written below n_rows, for tokens
// that it holds (`Dispatch`). Loops count to constants.
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
{% if rows == "outputs" %}
{% set batch_binding = next %}
{% include "batch.wgsl" %}

{% set next = next + 1 %}
{% endif %}
{% if vectors %}
@group(0) @binding({{ next }}) var<storage, read> w4: array<vec4<u32>>; // the same as `w`
{% endif %}
{% include "types/" ~ type ~ ".wgsl" %}
{% include "types/inputs32.wgsl" %}
{% set blocks = n_in // 32 %}
{% set held = (blocks + pieces - 1) // pieces %}
{% set steps = (held + lanes * unroll - 1) // (lanes * unroll) %}
{% set rows_of_turn = threads // lanes * row_tile %}

{% if output == "gated" %}
// Below -80 the result is 0 in f32, but exp(-v) would overflow.
fn silu(v: f32) -> f32 { return v / (1.0 + exp(-max(v, -80.0))); }

{% endif %}
// {{ "A piece of the" if pieces > 1 else "The" }} input. Units beyond the end are zero.
var<workgroup> even: array<vec4<u32>, {{ 3 * held }}>;
var<workgroup> odd: array<vec4<u32>, {{ 3 * held }}>;
var<workgroup> sums: array<vec4<f32>, {{ held }}>;
var<workgroup> worths: array<f32, {{ held }}>;
{% if input == "rmsnorm" %}
var<workgroup> squares: array<f32, {{ threads // together }}>;
{% endif %}

{# Block u of the lane at a step, of those that the workgroup holds. #}
{% macro block_at(step, u) %}lane + {{ u * lanes }}u + ({{ step }}) * {{ lanes * unroll }}u{% endmacro %}
{% macro load(turn, step) %}
        {
            let row = first + ({{ turn }}) * {{ rows_of_turn }}u;
{% for u in range(unroll) %}
            let block_{{ u }} = min({{ "base + " if pieces > 1 }}{{ block_at(step, u) }}, {{ blocks - 1 }}u);
{% for r in range(row_tile) %}
            raw_{{ r }}_{{ u }} = load32(min(row + {{ r }}u, {{ n_rows - 1 }}u), block_{{ u }});
{% endfor %}
{% endfor %}
        }
{% endmacro %}
@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let lane = tid % {{ lanes }}u;
    let first = (group.z * {{ groups_x }}u + group.x) * {{ turns * rows_of_turn }}u + tid / {{ lanes }}u * {{ row_tile }}u;
{% for r in range(row_tile) %}
    var acc_{{ r }} = 0.0;
{% for u in range(unroll) %}
    var raw_{{ r }}_{{ u }}: Raw32;
{% endfor %}
{% endfor %}
    let token = group.y;
    let source = {{ "output_token(token)" if rows == "outputs" else "token" }} * {{ n_in // 4 }}u;
{% if input == "rmsnorm" %}
    var sum_of_squares = 0.0;
{% endif %}
{% if pieces > 1 %}
    for (var base = 0u; base < {{ pieces * held }}u; base += {{ held }}u) {
{% endif %}
{{ load("0u", "0u") }}
{# Each round reads a unit of the input. All are requested at once: the rounds of a loop would wait for each other. #}
{% set rounds = (4 * held + threads - 1) // threads %}
{% for k in range(rounds) %}
    let at_{{ k }} = tid + {{ k * threads }}u;
    let unit_{{ k }} = {{ "4u * base + " if pieces > 1 }}at_{{ k }};
    let quad_{{ k }} = 2u * min(unit_{{ k }}, {{ n_in // 8 - 1 }}u);
    var a_{{ k }} = x[source + quad_{{ k }}];
    var b_{{ k }} = x[source + quad_{{ k }} + 1u];
{% if input == "rmsnorm" %}
    let gain_a_{{ k }} = norm_weight[quad_{{ k }}];
    let gain_b_{{ k }} = norm_weight[quad_{{ k }} + 1u];
{% endif %}
{% endfor %}
{% for k in range(rounds) %}
    if at_{{ k }} < {{ 4 * held }}u {
        let at = at_{{ k }};
        if unit_{{ k }} >= {{ n_in // 8 }}u { a_{{ k }} = vec4<f32>(); b_{{ k }} = vec4<f32>(); }
{% if input == "rmsnorm" %}
        sum_of_squares += dot(a_{{ k }}, a_{{ k }}) + dot(b_{{ k }}, b_{{ k }});
        a_{{ k }} *= gain_a_{{ k }};
        b_{{ k }} *= gain_b_{{ k }};
{% endif %}
        let digits = digits8(a_{{ k }}, b_{{ k }});
{% for byte in range(3) %}
        even[at / 4u + {{ byte * held }}u][at % 4u] = digits.even[{{ byte }}];
        odd[at / 4u + {{ byte * held }}u][at % 4u] = digits.odd[{{ byte }}];
{% endfor %}
        sums[at / 4u][at % 4u] = digits.sum;
        if at % 4u == 0u { worths[at / 4u] = digits.worth; }
    }
{% endfor %}
{% macro share_squares() %}
{% if input == "rmsnorm" %}
{% for mask in [16, 8, 4, 2, 1] if mask < together %}
    sum_of_squares += subgroupShuffleXor(sum_of_squares, {{ mask }}u);
{% endfor %}
    if tid % {{ together }}u == 0u { squares[tid / {{ together }}u] = sum_of_squares; }
{% endif %}
{% endmacro %}
{% macro factor() %}
{% if input == "rmsnorm" %}
    sum_of_squares = {% for i in range(threads // together) %}squares[{{ i }}]{{ " + " if not loop.last }}{% endfor %};
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

    for (var step = 0u; step < {{ turns * steps }}u; step++) {
{% for u in range(unroll) %}
        {
            let block = {{ block_at("step %% %du" | format(steps), u) }};
{% if held < steps * unroll * lanes %}
            if block < {{ held }}u {
{% else %}
            {
{% endif %}
                let input = X32(
{% for half in ["even", "odd"] %}
                    array<vec4<u32>, 3>({% for byte in range(3) %}{{ half }}[block + {{ byte * held }}u]{{ ", " if not loop.last }}{% endfor %}),
{% endfor %}
                    worths[block],
                    sums[block],
                );
{% for r in range(row_tile) %}
                acc_{{ r }} += dots32(raw_{{ r }}_{{ u }}, {{ "base + " if pieces > 1 }}block, input);
{% endfor %}
            }
        }
{% endfor %}
        if step < {{ turns * steps - 1 }}u {
{{ load("(step + 1u) / %du" | format(steps), "(step + 1u) %% %du" | format(steps)) }}
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
        if step % {{ steps }}u == {{ steps - 1 }}u {
{{ finish("first + step / %du * %du" | format(steps, rows_of_turn)) }}
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
