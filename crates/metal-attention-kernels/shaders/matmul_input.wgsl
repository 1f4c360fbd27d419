{% set scalar = "f16" if cooperative_f16 else "f32" %}
// The inputs of a matrix product as matrix units take them: rows padded with zeros to {{ padded }} elements{% if cooperative_f16 %}, in 16 bits,
// each row first divided by a power of two that brings its largest magnitude near 2^14: nothing overflows, and what is
// lost to denormals is 2^-28 of the largest magnitude and less{% endif %}. One workgroup a row.
{% if cooperative_f16 %}
enable f16;
{% endif %}
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> padded: array<vec4<{{ scalar }}>>;
@group(0) @binding(2) var<storage, read_write> scales: array<f32>;
{% set batch_binding = 3 %}
{% include "batch.wgsl" %}
{% set threads = 256 %}
{% include "reduce.wgsl" %}
const N: u32 = {{ n_in }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
{% if rows == "wanted" %}
    let row = wanted(group.x) * N;
{% else %}
    let row = min(group.x, {{ "n_tokens()" if rows == "tokens" else "n_wanted()" }} - 1u) * N;
{% endif %}
{% if cooperative_f16 %}
    var largest = 0.0;
    for (var i = tid; i < N; i += {{ threads }}u) { largest = max(largest, abs(x[row + i])); }
    largest = workgroup_max(largest, tid);
    // The exponent e of the largest magnitude m, 2^e <= m < 2^(e + 1), kept where 2^(14 - e) and its inverse are normal.
    let e = max(i32(bitcast<u32>(largest) >> 23u) - 127, -100);
    let factor = bitcast<f32>(u32(127 + 14 - e) << 23u);
    let scale = bitcast<f32>(u32(127 - 14 + e) << 23u);
{% else %}
    let factor = 1.0;
    let scale = 1.0;
{% endif %}
    if tid == 0u { scales[group.x] = scale; }
    for (var i = tid; i < {{ padded // 4 }}u; i += {{ threads }}u) {
        var v = vec4<f32>();
{% for e in range(4) %}
        if 4u * i + {{ e }}u < N { v[{{ e }}] = x[row + 4u * i + {{ e }}u] * factor; }
{% endfor %}
        padded[group.x * {{ padded // 4 }}u + i] = vec4<{{ scalar }}>(v);
    }
}
