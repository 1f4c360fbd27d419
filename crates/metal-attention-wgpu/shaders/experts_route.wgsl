// The router: the experts of each token, best first, and their weights; one workgroup for each token.
//
// The rank of an expert is the number of experts before it: those with higher scores, and with equal scores and lower ids.
// Scores are compared by their bits, since drivers may assume that no float is NaN; NaN counts as minus infinity.
// Bounds: rows are those for which the buffers are long enough (`Dispatch`); experts are below N_EXPERT, a constant that
// the loops count to, groups below N_GROUPS. No two ranks are equal, so all those below N_USED are written.
{% set threads = 64 if n_expert <= 64 else (128 if n_expert <= 128 else 256) %}
@group(0) @binding(0) var<storage, read> products: array<f32>;
@group(0) @binding(1) var<storage, read_write> chosen: array<u32>;
@group(0) @binding(2) var<storage, read_write> weights: array<f32>;
{% set next = 3 %}
{% if choice_bias %}
@group(0) @binding({{ next }}) var<storage, read> choice_bias: array<f32>;
{% set next = next + 1 %}
{% endif %}
{% if expert_scale %}
@group(0) @binding({{ next }}) var<storage, read> expert_scale: array<f32>;
{% endif %}
{% if score == "softmax" %}
{% include "reduce.wgsl" %}
{% endif %}
const N_EXPERT: u32 = {{ n_expert }}u;
const N_USED: u32 = {{ n_used }}u;
const N_GROUPS: u32 = {{ n_groups }}u;
const LOWEST: f32 = -3.4e38;

// For every expert: its score, the value that it is chosen by, and that value as a key in the order of floats.
var<workgroup> scores: array<f32, {{ n_expert }}>;
var<workgroup> keys: array<u32, {{ n_expert }}>;
{% if n_groups > 1 %}
var<workgroup> choice: array<f32, {{ n_expert }}>;
var<workgroup> group_keys: array<u32, {{ n_groups }}>;
{% endif %}
// For every chosen expert: its score{% if expert_scale %}, and the factor on its result{% endif %}.
var<workgroup> best: array<f32, {{ n_used }}>;
{% if expert_scale %}
var<workgroup> scales: array<f32, {{ n_used }}>;
{% endif %}

// Higher for higher floats, -0 before 0; NaN has the key of minus infinity.
const KEY_OF_LEAST: u32 = 0x007fffffu;
fn key(v: f32) -> u32 {
    let bits = bitcast<u32>(v);
    let ordered = select(bits | 0x80000000u, ~bits, bits >= 0x80000000u);
    return select(ordered, KEY_OF_LEAST, (bits & 0x7fffffffu) > 0x7f800000u);
}

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let row = group.x * N_EXPERT;
{% if score == "softmax" %}
    var largest = LOWEST;
    for (var e = tid; e < N_EXPERT; e += {{ threads }}u) { largest = max(largest, products[row + e]); }
    largest = workgroup_max(largest, tid);
    var powers = 0.0;
    for (var e = tid; e < N_EXPERT; e += {{ threads }}u) {
        scores[e] = exp(products[row + e] - largest);
        powers += scores[e];
    }
    powers = workgroup_sum(powers, tid);
{% endif %}
    for (var e = tid; e < N_EXPERT; e += {{ threads }}u) {
{% if score == "softmax" %}
        let score = scores[e] / powers;
{% elif score == "sigmoid" %}
        // The bound avoids infinities.
        let score = 1.0 / (1.0 + exp(min(-products[row + e], 80.0)));
{% else %}
        let score = products[row + e];
{% endif %}
        scores[e] = score;
        let by = score{% if choice_bias %} + choice_bias[e]{% endif %};
        keys[e] = key(by);
{% if n_groups > 1 %}
        choice[e] = by;
{% endif %}
    }
    workgroupBarrier();
{% if n_groups > 1 %}
    // The score of a group is the sum of its two best experts.
    for (var g = tid; g < N_GROUPS; g += {{ threads }}u) {
        var first = g * {{ n_expert // n_groups }}u;
{% if n_expert // n_groups > 1 %}
        var second = first + 1u;
        if keys[second] > keys[first] {
            first = second;
            second = g * {{ n_expert // n_groups }}u;
        }
        for (var e = g * {{ n_expert // n_groups }}u + 2u; e < (g + 1u) * {{ n_expert // n_groups }}u; e++) {
            if keys[e] > keys[first] {
                second = first;
                first = e;
            } else if keys[e] > keys[second] {
                second = e;
            }
        }
        group_keys[g] = key(choice[first] + choice[second]);
{% else %}
        group_keys[g] = key(choice[first]);
{% endif %}
    }
    workgroupBarrier();
    for (var e = tid; e < N_EXPERT; e += {{ threads }}u) {
        let mine = e / {{ n_expert // n_groups }}u;
        var rank = 0u;
        for (var g = 0u; g < N_GROUPS; g++) {
            rank += select(0u, 1u, group_keys[g] > group_keys[mine] || (group_keys[g] == group_keys[mine] && g < mine));
        }
        if rank >= {{ n_groups_used }}u { keys[e] = KEY_OF_LEAST; }
    }
    workgroupBarrier();
{% endif %}
    for (var e = tid; e < N_EXPERT; e += {{ threads }}u) {
        let mine = keys[e];
        var rank = 0u;
        for (var other = 0u; other < N_EXPERT; other++) {
            rank += select(0u, 1u, keys[other] > mine || (keys[other] == mine && other < e));
        }
        if rank < N_USED {
            chosen[group.x * N_USED + rank] = e;
            best[rank] = scores[e];
{% if expert_scale %}
            scales[rank] = expert_scale[e];
{% endif %}
        }
    }
    workgroupBarrier();
    // Each of the chosen experts adds all of them up, in the same order.
    for (var rank = tid; rank < N_USED; rank += {{ threads }}u) {
{% if score == "softmax_of_chosen" %}
        var sum = 0.0;
        for (var i = 0u; i < N_USED; i++) { sum += exp(best[i] - best[0]); }
        var weight = exp(best[rank] - best[0]) / sum;
{% else %}
        var weight = best[rank];
{% endif %}
{% if renormalize %}
        // At least the smallest 16-bit number, as a divisor.
        var total = 0.0;
{% if score == "softmax_of_chosen" %}
        for (var i = 0u; i < N_USED; i++) { total += exp(best[i] - best[0]) / sum; }
{% else %}
        for (var i = 0u; i < N_USED; i++) { total += best[i]; }
{% endif %}
        weight /= max(total, 6.1035156e-5);
{% endif %}
        weight *= {{ scale }};
{% if expert_scale %}
        weight *= scales[rank];
{% endif %}
        weights[group.x * N_USED + rank] = weight;
    }
}
