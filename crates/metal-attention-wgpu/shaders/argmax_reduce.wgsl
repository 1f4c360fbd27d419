// The best (key, id) over all {{ threads }} invocations of a workgroup: the greatest key, the lowest id among equals.
// Bounds: `best_scratch` has a place for every subgroup, or invocation, of the workgroup. Its loops count to constants.
{% set n_parts = threads // subgroup_size if subgroup_size > 1 else threads %}
var<workgroup> best_scratch: array<vec2<u32>, {{ n_parts }}>;

fn better(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return select(b, a, a.x > b.x || (a.x == b.x && a.y < b.y));
}

// Every invocation takes part; the first one gets the result.
fn workgroup_best(candidate: vec2<u32>, tid: u32) -> vec2<u32> {
{% if subgroup_size > 1 %}
    let key = subgroupMax(candidate.x);
    let id = subgroupMin(select(0xffffffffu, candidate.y, candidate.x == key));
    if tid % {{ subgroup_size }}u == 0u { best_scratch[tid / {{ subgroup_size }}u] = vec2(key, id); }
    workgroupBarrier();
    var best = best_scratch[0];
    if tid == 0u {
        for (var i = 1u; i < {{ n_parts }}u; i++) { best = better(best, best_scratch[i]); }
    }
    return best;
{% else %}
    best_scratch[tid] = candidate;
    workgroupBarrier();
    for (var half = {{ threads // 2 }}u; half > 0u; half /= 2u) {
        if tid < half { best_scratch[tid] = better(best_scratch[tid], best_scratch[tid + half]); }
        workgroupBarrier();
    }
    return best_scratch[0];
{% endif %}
}
