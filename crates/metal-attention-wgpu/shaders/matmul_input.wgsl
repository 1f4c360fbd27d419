// Bounds: rows are those of the batch, and all buffers hold them (`Dispatch`); vectors beyond the end of a row are
// clamped or skipped.
{% set scalar = "f16" if cooperative_f16 else "f32" %}
// Converts the inputs of a matrix product to the format of matrix units: rows padded with zeros to {{ padded }} elements{% if cooperative_f16 %}, in 16 bits,
// each row first divided by a power of two that brings its largest magnitude near 2^14, so that nothing overflows and
// denormals lose at most 2^-28 of the largest magnitude{% endif %}. One workgroup for each row.
{% if norm %}
// With the norm x g / rms(x) the rows are x g, and 1 / rms(x) is part of their scales.
{% endif %}
{% if cooperative_f16 %}
enable f16;
{% endif %}
{# vectors: of four inputs, for each invocation #}
{% set threads = 256 %}
{% set vectors = (padded // 4 + threads - 1) // threads %}
{% set whole = n_in % 4 == 0 %}
{% set input = "vec4<f32>" if whole else "f32" %}
@group(0) @binding(0) var<storage, read> x: array<{{ input }}>;
@group(0) @binding(1) var<storage, read_write> padded: array<vec4<{{ scalar }}>>;
@group(0) @binding(2) var<storage, read_write> scales: array<f32>;
{% if rows != "visits" %}
{% set batch_binding = 3 %}
{% include "batch.wgsl" %}
{% endif %}
{% if norm %}
@group(0) @binding(4) var<storage, read> norm_weight: array<{{ input }}>;
{% endif %}
{% include "reduce.wgsl" %}
const N: u32 = {{ n_in }}u;

{% for array in ["x", "norm_weight"] if norm or array == "x" %}
// Vector `i` of the row that starts at element `row`, zero beyond its end.
fn {{ array }}_vector(row: u32, i: u32) -> vec4<f32> {
{% if whole %}
    return select(vec4<f32>(), {{ array }}[row / 4u + min(i, {{ n_in // 4 - 1 }}u)], i < {{ n_in // 4 }}u);
{% else %}
    var v = vec4<f32>();
{% for e in range(4) %}
    if 4u * i + {{ e }}u < N { v[{{ e }}] = {{ array }}[row + 4u * i + {{ e }}u]; }
{% endfor %}
    return v;
{% endif %}
}
{% endfor %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
{% if rows == "visits" %}
    // A token at one of its experts.
    let result = group.x * {{ n_used }}u + group.y;
    let row = result * N;
{% elif rows == "outputs" %}
    let row = output_token(group.x) * N;
{% else %}
    let row = min(group.x, {{ "n_tokens()" if rows == "tokens" else "n_outputs()" }} - 1u) * N;
{% endif %}
{% if rows != "visits" %}
    let result = group.x;
{% endif %}
    var largest = 0.0;
    var squares = 0.0;
{% for i in range(vectors) %}
    var v_{{ i }} = x_vector(row, tid + {{ i * threads }}u);
{% if norm %}
    squares += dot(v_{{ i }}, v_{{ i }});
    v_{{ i }} *= norm_weight_vector(0u, tid + {{ i * threads }}u);
{% endif %}
    let size_{{ i }} = abs(v_{{ i }});
    largest = max(largest, max(max(size_{{ i }}.x, size_{{ i }}.y), max(size_{{ i }}.z, size_{{ i }}.w)));
{% endfor %}
{% if cooperative_f16 %}
    largest = workgroup_max(largest, tid);
    // The exponent e of the largest magnitude m, 2^e <= m < 2^(e + 1), limited so that 2^(14 - e) and its inverse are normal.
    let e = max(i32(bitcast<u32>(largest) >> 23u) - 127, -100);
    let factor = bitcast<f32>(u32(127 + 14 - e) << 23u);
    var scale = bitcast<f32>(u32(127 - 14 + e) << 23u);
{% else %}
    let factor = 1.0;
    var scale = 1.0;
{% endif %}
{% if norm %}
    scale *= inverseSqrt(workgroup_sum(squares, tid) / f32(N) + {{ eps }});
{% endif %}
    if tid == 0u { scales[result] = scale; }
{% for i in range(vectors) %}
    if tid + {{ i * threads }}u < {{ padded // 4 }}u { padded[result * {{ padded // 4 }}u + tid + {{ i * threads }}u] = vec4<{{ scalar }}>(v_{{ i }} * factor); }
{% endfor %}
}
