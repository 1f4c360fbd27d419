// Sum and maximum over all {{ threads }} invocations of a workgroup. Every invocation has to call it and gets the result.
// Bounds: `reduce_scratch` has an element for every invocation of the workgroup. Its loops count to constants.
{% set together = [neighbours, threads] | min %}
var<workgroup> reduce_scratch: array<f32, {{ threads }}>;
{% for name, op in [("sum", "a + b"), ("max", "max(a, b)")] %}
fn combine_{{ name }}(a: f32, b: f32) -> f32 { return {{ op }}; }
{% if together > 1 %}
fn workgroup_{{ name }}(v: f32, tid: u32) -> f32 {
    var part = v;
{% for mask in [64, 32, 16, 8, 4, 2, 1] if mask < together %}
    part = combine_{{ name }}(part, subgroupShuffleXor(part, {{ mask }}u));
{% endfor %}
    if tid % {{ together }}u == 0u { reduce_scratch[tid / {{ together }}u] = part; }
    workgroupBarrier();
    var total = reduce_scratch[0];
    for (var i = 1u; i < {{ threads // together }}u; i++) { total = combine_{{ name }}(total, reduce_scratch[i]); }
    workgroupBarrier();
    return total;
}
{% else %}
fn workgroup_{{ name }}(v: f32, tid: u32) -> f32 {
    reduce_scratch[tid] = v;
    workgroupBarrier();
    for (var half = {{ threads // 2 }}u; half > 0u; half /= 2u) {
        if tid < half { reduce_scratch[tid] = combine_{{ name }}(reduce_scratch[tid], reduce_scratch[tid + half]); }
        workgroupBarrier();
    }
    let total = reduce_scratch[0];
    workgroupBarrier();
    return total;
}
{% endif %}
{% endfor %}

