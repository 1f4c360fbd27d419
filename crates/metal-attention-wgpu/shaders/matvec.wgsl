// GEMV: y[t] = W x[t] for one part of W, in tiles of {{ row_tile }} x {{ token_tile }} (rows of W x tokens).
//
// {{ lanes }} lanes, neighbours in a subgroup, share a tile; lane l reads units l, l + {{ lanes }}, ... of 8 columns each.
// Every word of weights is read once for all tokens of a tile, and neighbours read neighbouring words. A lane requests
// the weights of {{ unroll }} unit(s) before it uses any of them, so that they cost one round trip to memory. The lanes
// then add up by exchanging values, without a barrier.
//
// The norm needs no pass of its own: W (x g / rms(x)) = (W (x g)) / rms(x), and the lanes that share a row together read
// all of x, so that the sum of its squares is one more value to add up.
{% if n_inputs > 1 %}
//
// The rows have {{ n_inputs }} different inputs; all rows of a tile have the same.
{% endif %}
// Bounds: rows of `w` are clamped to the part's last, units to the row's, tokens to the batch's, which `x` and `y` hold
// (`Dispatch`); results beyond them are not written. The number of a lane's units is a constant.
@group(0) @binding(0) var<storage, read> w: array<u32>;
{% set vectors = n_in % 8 == 0 %}
@group(0) @binding(1) var<storage, read> x: array<{{ "vec4<f32>" if vectors else "f32" }}>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
{% set next = 3 %}
{% if input == "rmsnorm" %}
@group(0) @binding({{ next }}) var<storage, read> norm_weight: array<{{ "vec4<f32>" if vectors else "f32" }}>;
{% set next = next + 1 %}
{% endif %}
{% if bias %}
@group(0) @binding({{ next }}) var<storage, read> bias: array<f32>;
{% set next = next + 1 %}
{% endif %}
{% if token_tile > 1 or rows == "outputs" %}
{% set batch_binding = next %}
{% include "batch.wgsl" %}

{% set next = next + 1 %}
{% endif %}
{% for i in range(1, n_inputs) %}
@group(0) @binding({{ next + i - 1 }}) var<storage, read> x_{{ i }}: array<{{ "vec4<f32>" if vectors else "f32" }}>;
{% endfor %}
{% include "types/" ~ type ~ ".wgsl" %}
{% set units = (n_in + 7) // 8 %}
{% set steps = (units + lanes - 1) // lanes %}
{% set stretches = (steps + unroll - 1) // unroll %}
{# Units that a lane reads without running beyond the end of the row; there it reads the last unit again, times zero. #}
{% set inner = units // lanes - (stretches - 1) * unroll %}

{% if input == "silu" or output == "gated" %}
// Below -80 the result is 0 in f32, but exp(-v) would overflow.
fn silu(v: f32) -> f32 { return v / (1.0 + exp(-max(v, -80.0))); }

{% endif %}
{% macro read8(name, buffer, stride, with_row) %}
fn {{ name }}({{ "row: u32, " if with_row else "" }}unit: u32) -> W8 {
{% if vectors %}
    let at = {% if with_row %}row * {{ stride // 4 }}u + {% endif %}2u * unit;
    return W8({{ buffer }}[at], {{ buffer }}[at + 1u]);
{% else %}
    var v = array<f32, 8>();
    for (var k = 0u; k < min(8u, {{ n_in }}u - 8u * unit); k++) {
        v[k] = {{ buffer }}[{% if with_row %}row * {{ stride }}u + {% endif %}8u * unit + k];
    }
    return W8(vec4<f32>(v[0], v[1], v[2], v[3]), vec4<f32>(v[4], v[5], v[6], v[7]));
{% endif %}
}
{% endmacro %}

// Eight columns of a token's input.
{% if input == "silu" %}
fn input8(row: u32, unit: u32) -> W8 {
{% if vectors %}
    let at = row * {{ n_in // 2 }}u + 4u * unit;
    let a = x[at];
    let b = x[at + 1u];
    let c = x[at + 2u];
    let d = x[at + 3u];
    return W8(
        vec4<f32>(silu(a.x) * a.y, silu(a.z) * a.w, silu(b.x) * b.y, silu(b.z) * b.w),
        vec4<f32>(silu(c.x) * c.y, silu(c.z) * c.w, silu(d.x) * d.y, silu(d.z) * d.w),
    );
{% else %}
    var v = array<f32, 8>();
    for (var k = 0u; k < min(8u, {{ n_in }}u - 8u * unit); k++) {
        let at = row * {{ 2 * n_in }}u + 2u * (8u * unit + k);
        v[k] = silu(x[at]) * x[at + 1u];
    }
    return W8(vec4<f32>(v[0], v[1], v[2], v[3]), vec4<f32>(v[4], v[5], v[6], v[7]));
{% endif %}
}
{% elif n_inputs > 1 %}
{% for i in range(n_inputs) %}
{{ read8("input8_%d"|format(i), "x_%d"|format(i) if i > 0 else "x", n_in, true) }}
{% endfor %}
// The input that the rows of the tile are multiplied by.
var<private> source: u32;
fn input8(row: u32, unit: u32) -> W8 {
{% for i in range(n_inputs - 1) %}
    if source == {{ i }}u { return input8_{{ i }}(row, unit); }
{% endfor %}
    return input8_{{ n_inputs - 1 }}(row, unit);
}
{% else %}
{{ read8("input8", "x", n_in, true) }}
{% endif %}
{% if input == "rmsnorm" %}
{{ read8("norm_weight8", "norm_weight", n_in, false) }}
{% endif %}
{# Lanes that exchange values without a barrier; if more share a row, each such bunch leaves its sum in workgroup memory. #}
{% set bunch = [neighbours, lanes, 32] | min if neighbours > 1 else 1 %}
{% set n_sums = row_tile * token_tile + (token_tile if input == "rmsnorm" else 0) %}
{% set bunches = threads // bunch %}
{% if bunch < lanes %}
var<workgroup> scratch: array<f32, {{ n_sums * bunches }}>;
{% endif %}
{# Elements of a token's result, and the index of the result of row r of the part. #}
{% set y_row = n_out // 2 if output == "gated" else n_out %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let lane = tid % {{ lanes }}u;
    let first = ((group.z * {{ groups_x }}u + group.x) * {{ threads // lanes }}u + tid / {{ lanes }}u) * {{ row_tile }}u;
{% for r in range(row_tile) %}
    let row_{{ r }} = min(first + {{ r }}u, {{ n_rows - 1 }}u);
{% endfor %}
{% if n_inputs > 1 %}
    let row = {{ first_row }}u + row_0;
    source = {% for end in [end_0, end_1, end_2, end_3, end_4][:n_inputs - 1] %}u32(row >= {{ end }}u){{ " + " if not loop.last }}{% endfor %};
{% endif %}
{% if token_tile == 1 %}
    let token_0 = group.y;
    let in_0 = {{ "output_token(token_0)" if rows == "outputs" else "token_0" }};
{% else %}
    let count = {{ "n_tokens()" if rows == "tokens" else "n_outputs()" }};
{% for t in range(token_tile) %}
    let token_{{ t }} = min(group.y * {{ token_tile }}u + {{ t }}u, count - 1u);
    let in_{{ t }} = {{ "output_token(token_%d)"|format(t) if rows == "outputs" else "token_%d"|format(t) }};
{% endfor %}
{% endif %}
{% if output == "accumulate" %}
{% for r in range(row_tile) %}
{% for t in range(token_tile) %}
    let before_{{ r }}_{{ t }} = y[token_{{ t }} * {{ y_row }}u + {{ first_row }}u + row_{{ r }} * {{ row_step }}u];
{% endfor %}
{% endfor %}
{% endif %}
{% for r in range(row_tile) %}
{% for t in range(token_tile) %}
    var acc_{{ r }}_{{ t }} = {{ "vec4<f32>()" if token_tile == 1 else "0.0" }};
{% endfor %}
{% endfor %}
{% if input == "rmsnorm" %}
{% for t in range(token_tile) %}
    var squares_{{ t }} = 0.0;
{% endfor %}
{% endif %}
{% if stretches > 1 %}
    for (var start = lane; start < {{ lanes * unroll * stretches }}u; start += {{ lanes * unroll }}u) {
{% else %}
    {
        let start = lane;
{% endif %}
{% for u in range(unroll) %}
        let unit_{{ u }} = {% if u >= inner %}min(start + {{ u * lanes }}u, {{ units - 1 }}u){% else %}start + {{ u * lanes }}u{% endif %};
{% for r in range(row_tile) %}
        let raw_{{ r }}_{{ u }} = load8(row_{{ r }}, unit_{{ u }});
{% endfor %}
{% endfor %}
{# One token's input is requested at once as well; that of several would take too many registers. #}
{% macro inputs(u) %}
{% for t in range(token_tile) %}
        {{ "var" if input == "rmsnorm" else "let" }} x_{{ t }}_{{ u }} = input8(in_{{ t }}, unit_{{ u }});
{% endfor %}
{% endmacro %}
{% if token_tile == 1 %}
{% for u in range(unroll) %}
{{ inputs(u) }}
{%- endfor %}
{% endif %}
{% for u in range(unroll) %}
{% if token_tile > 1 %}
{{ inputs(u) }}
{%- endif %}
{% if u >= inner %}
        let inside_{{ u }} = select(0.0, 1.0, start + {{ u * lanes }}u < {{ units }}u);
{% endif %}
{% set inside = " * inside_%d"|format(u) if u >= inner else "" %}
{% if input == "rmsnorm" %}
        let gain_{{ u }} = norm_weight8(unit_{{ u }});
{% for t in range(token_tile) %}
{% set v = "x_%d_%d"|format(t, u) %}
        squares_{{ t }} += (dot({{ v }}.lo, {{ v }}.lo) + dot({{ v }}.hi, {{ v }}.hi)){{ inside }};
        {{ v }} = W8({{ v }}.lo * gain_{{ u }}.lo, {{ v }}.hi * gain_{{ u }}.hi);
{% endfor %}
{% endif %}
{% for r in range(row_tile) %}
{% set raw = "raw_%d_%d"|format(r, u) %}
        {
            let codes = codes8({{ raw }});
            let scale = scale8({{ raw }}){{ inside }};
{% if token_tile == 1 %}
            acc_{{ r }}_0 += scale * (codes.lo * x_0_{{ u }}.lo + codes.hi * x_0_{{ u }}.hi);
{% else %}
            let lo = codes.lo * scale;
            let hi = codes.hi * scale;
{% for t in range(token_tile) %}
            acc_{{ r }}_{{ t }} += dot(lo, x_{{ t }}_{{ u }}.lo) + dot(hi, x_{{ t }}_{{ u }}.hi);
{% endfor %}
{% endif %}
        }
{% endfor %}
{% endfor %}
    }

    // Sums over the lanes of a row.
{% for r in range(row_tile) %}
{% for t in range(token_tile) %}
    var sum_{{ r * token_tile + t }} = {% if token_tile == 1 %}dot(acc_{{ r }}_0, vec4<f32>(1.0)){% else %}acc_{{ r }}_{{ t }}{% endif %};
{% endfor %}
{% endfor %}
{% if input == "rmsnorm" %}
{% for t in range(token_tile) %}
    var sum_{{ row_tile * token_tile + t }} = squares_{{ t }};
{% endfor %}
{% endif %}
{% for half in [16, 8, 4, 2, 1] if half < bunch %}
{% for s in range(n_sums) %}
    sum_{{ s }} += subgroupShuffleXor(sum_{{ s }}, {{ half }}u);
{% endfor %}
{% endfor %}
{% if bunch > 1 and bunch < lanes %}
    if tid % {{ bunch }}u == 0u {
{% for s in range(n_sums) %}
        scratch[{{ s * bunches }}u + tid / {{ bunch }}u] = sum_{{ s }};
{% endfor %}
    }
    workgroupBarrier();
    let bunch_0 = tid / {{ lanes }}u * {{ lanes // bunch }}u;
{% for s in range(n_sums) %}
    sum_{{ s }} = {% for i in range(lanes // bunch) %}scratch[{{ s * bunches + i }}u + bunch_0]{{ " + " if not loop.last }}{% endfor %};
{% endfor %}
{% elif bunch < lanes %}
{% for s in range(n_sums) %}
    scratch[{{ s * threads }}u + tid] = sum_{{ s }};
{% endfor %}
    workgroupBarrier();
    for (var half = {{ lanes // 2 }}u; half > 0u; half /= 2u) {
        if lane < half {
            for (var at = tid; at < {{ n_sums * threads }}u; at += {{ threads }}u) { scratch[at] += scratch[at + half]; }
        }
        workgroupBarrier();
    }
{% for s in range(n_sums) %}
    sum_{{ s }} = scratch[{{ s * threads }}u + tid];
{% endfor %}
{% endif %}

    if lane != 0u { return; }
{% macro value(r, t) %}
sum_{{ r * token_tile + t }}
{%- if input == "rmsnorm" %} * norm_{{ t }}{% endif %}
{%- if bias %} + bias[{{ first_row }}u + row_{{ r }} * {{ row_step }}u]{% endif %}
{%- if output == "accumulate" %} + before_{{ r }}_{{ t }}{% endif %}
{% endmacro %}
{% for t in range(token_tile) %}
{% if input == "rmsnorm" %}
    let norm_{{ t }} = inverseSqrt(sum_{{ row_tile * token_tile + t }} / {{ n_in }}.0 + {{ eps }});
{% endif %}
{% for r in range(0, row_tile, 2 if output == "gated" else 1) %}
    if first + {{ r }}u < {{ n_rows }}u{% if token_tile > 1 %} && group.y * {{ token_tile }}u + {{ t }}u < count{% endif %} {
{% if output == "gated" %}
        y[token_{{ t }} * {{ y_row }}u + {{ first_row // 2 }}u + row_{{ r }} / 2u] = silu({{ value(r, t) }}) * ({{ value(r + 1, t) }});
{% else %}
        y[token_{{ t }} * {{ y_row }}u + {{ first_row }}u + row_{{ r }} * {{ row_step }}u] = {{ value(r, t) }};
{% endif %}
    }
{% endfor %}
{% endfor %}
}
