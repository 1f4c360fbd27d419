// Y = X W^T for many tokens, with features that every device has. A workgroup computes a tile of 64 rows of the part by 64
// tokens: it steps through the inner dimension 32 at a time, which it first copies to workgroup memory, dequantised and
// transposed, so that four rows, or four tokens, of one input are one vector. Each invocation computes four rows by eight tokens.
// Bounds: rows and units of `w` are clamped to the last (part_row), rows of `x` to the batch's (input_row), inputs beyond the
// end are zero without being read; results that do not exist are dropped (put4). Loops count to constants.
@group(0) @binding(0) var<storage, read> w: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<{{ "vec4<f32>" if n_in % 4 == 0 else "f32" }}>;
{% set y_binding = 2 %}
{% set batch_binding = 3 %}
{% set bias_binding = 4 %}
{% set experts = rows == "experts" %}
{% if not experts %}
{% include "batch.wgsl" %}
{% endif %}
{% include "types/" ~ type ~ ".wgsl" %}
{% include "experts_output.wgsl" if experts else "matmul_output.wgsl" %}
const STEPS: u32 = {{ (n_in + 31) // 32 }}u;

// [input][row / 4] and [input][token / 4].
var<workgroup> tile_w: array<vec4<f32>, 512>;
var<workgroup> tile_x: array<vec4<f32>, 512>;

// Beyond the end others stand in: inputs are zero there, and results of rows are dropped.
fn weights(row: u32, unit: u32) -> W8 { return weights8(part_row(row), min(unit, UNITS - 1u)); }

// Inputs [8 unit, 8 unit + 8) of token `t`, zeros beyond the end.
fn inputs(t: u32, unit: u32) -> W8 {
    let row = input_row(t);
{% if n_in % 8 == 0 %}
{% if n_in % 32 != 0 %}
    if unit >= UNITS { return W8(vec4(0.0), vec4(0.0)); }
{% endif %}
    let at = row * {{ n_in // 4 }}u + 2u * unit;
    return W8(x[at], x[at + 1u]);
{% else %}
    var v: array<f32, 8>;
    for (var i = 0u; i < 8u; i++) {
        let at = 8u * unit + i;
{% if n_in % 4 == 0 %}
        if at < {{ n_in }}u { v[i] = x[(row * {{ n_in }}u + at) / 4u][at % 4u]; }
{% else %}
        if at < {{ n_in }}u { v[i] = x[row * {{ n_in }}u + at]; }
{% endif %}
    }
    return W8(vec4(v[0], v[1], v[2], v[3]), vec4(v[4], v[5], v[6], v[7]));
{% endif %}
}

// The data that an invocation fetches at a time: eight inputs of four rows or tokens.
struct Fetched { a: W8, b: W8, c: W8, d: W8 }

fn fetch(is_input: bool, first: u32, unit: u32) -> Fetched {
    if is_input {
        return Fetched(inputs(first, unit), inputs(first + 1u, unit), inputs(first + 2u, unit), inputs(first + 3u, unit));
    }
    return Fetched(weights(first, unit), weights(first + 1u, unit), weights(first + 2u, unit), weights(first + 3u, unit));
}

@compute @workgroup_size(128)
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let first_row = 64u * group.x;
{% if experts %}
    let taken = tiles[group.y];
    if taken.y == taken.z { return; }
    tile = taken;
{% endif %}
    let first_token = {{ "taken.y" if experts else "64u * group.y" }};
    // The first half of the invocations fetches weights, the other half inputs.
    let is_input = tid >= 64u;
    let fetch_first = select(first_row, first_token, is_input) + tid % 16u * 4u;
    let fetch_unit = tid % 64u / 16u;
    let fetch_at = 128u * fetch_unit + tid % 16u;
    // Four rows and eight tokens of the tile.
    let at_w = tid % 16u;
    let at_x = tid / 16u * 2u;
{% for t in range(8) %}
    var sum{{ t }} = vec4<f32>();
{% endfor %}
    var next = fetch(is_input, fetch_first, fetch_unit);
    for (var step = 1u; step <= STEPS; step++) {
        workgroupBarrier();
{% for tile, condition in [("tile_x", "is_input"), ("tile_w", "!is_input")] %}
        if {{ condition }} {
{% for k in range(8) %}
{% set e = (".hi" if k > 3 else ".lo") ~ "[" ~ k % 4 ~ "]" %}
            {{ tile }}[fetch_at + {{ 16 * k }}u] = vec4(next.a{{ e }}, next.b{{ e }}, next.c{{ e }}, next.d{{ e }});
{% endfor %}
        }
{% endfor %}
        workgroupBarrier();
        // In flight while the tile is multiplied.
        if step < STEPS { next = fetch(is_input, fetch_first, 4u * step + fetch_unit); }
        for (var k = 0u; k < 512u; k += 16u) {
            let w4 = tile_w[k + at_w];
            let x0 = tile_x[k + at_x];
            let x1 = tile_x[k + at_x + 1u];
{% for t in range(8) %}
            sum{{ t }} += w4 * x{{ t // 4 }}[{{ t % 4 }}];
{% endfor %}
        }
    }
{% for t in range(8) %}
    {
        let to = first_token + 4u * at_x + {{ t }}u;
        let row = first_row + 4u * at_w;
        put4(to, row, sum{{ t }}, n_results(){{ ", before4(to, row)" if output == "accumulate" }});
    }
{% endfor %}
}
