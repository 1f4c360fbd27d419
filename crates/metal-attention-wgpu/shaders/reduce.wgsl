// Sum and maximum over all {{ threads }} invocations of a workgroup: every invocation takes part and gets the result.
// Bounds: `reduce_scratch` has a place for every subgroup, or invocation, of the workgroup. Its loops count to
// constants.
var<workgroup> reduce_scratch: array<f32, {{ threads }}>;
{% for name, op, subgroup_op in [("sum", "a + b", "subgroupAdd"), ("max", "max(a, b)", "subgroupMax")] %}
fn combine_{{ name }}(a: f32, b: f32) -> f32 { return {{ op }}; }
{% if subgroup_size > 1 %}
fn workgroup_{{ name }}(v: f32, tid: u32) -> f32 {
    let part = {{ subgroup_op }}(v);
    if tid % {{ subgroup_size }}u == 0u { reduce_scratch[tid / {{ subgroup_size }}u] = part; }
    workgroupBarrier();
    var total = reduce_scratch[0];
    for (var i = 1u; i < {{ threads // subgroup_size }}u; i++) { total = combine_{{ name }}(total, reduce_scratch[i]); }
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

