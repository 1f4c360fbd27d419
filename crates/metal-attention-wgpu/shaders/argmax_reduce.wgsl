// The best (key, id) over all {{ threads }} invocations of a workgroup: the greatest key, the lowest id among equals.
// Bounds: `best_scratch` has an element for each group of neighbours, or each invocation, of the workgroup. Its loops count to constants.
{% set together = [neighbours, threads] | min %}
{% set n_parts = threads // together if together > 1 else threads %}
var<workgroup> best_scratch: array<vec2<u32>, {{ n_parts }}>;

fn better(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return select(b, a, a.x > b.x || (a.x == b.x && a.y < b.y));
}

// Every invocation has to call it; the first one gets the result.
fn workgroup_best(candidate: vec2<u32>, tid: u32) -> vec2<u32> {
{% if together > 1 %}
    var best = candidate;
{% for mask in [64, 32, 16, 8, 4, 2, 1] if mask < together %}
    best = better(best, subgroupShuffleXor(best, {{ mask }}u));
{% endfor %}
    if tid % {{ together }}u == 0u { best_scratch[tid / {{ together }}u] = best; }
    workgroupBarrier();
    best = best_scratch[0];
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
