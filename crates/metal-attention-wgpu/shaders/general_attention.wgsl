// General attention over the KV cache: any mask, caps on scores, sinks, scores that fall with the distance (ALiBi), keys and
// values of different lengths. One workgroup for each head of a token{% if split > 0 %} and each split of the positions{% endif %}.
//
{% set looks_ahead = split == 0 and mask not in ["full", "near"] %}
// It processes the positions attended to in tiles of as many as there are threads: each thread computes the score of one
// position, then sets of LANES threads add up the values of every PARTS-th position, a unit of four elements each.
// Bounds: tokens are those of the batch, which `queries`, {% if looks_ahead %}`last_seen` {% endif %}and `attention_out` hold{% if split > 0 %}, as `partial` holds their splits{% endif %} (`Dispatch`); positions are clamped
// below N_CTX, pages come from the page table (kv_cache.wgsl), units are compared with their number. Loops end with the
// tokens of the batch or the positions attended to, or count to constants.
{% set threads = 128 %}
{% set key_units = (key_dim + 3) // 4 %}
{% set value_units = (value_dim + 3) // 4 %}
@group(0) @binding(0) var<storage, read> queries: array<f32>; // [n_tokens, N_HEAD, KEY_DIM]
@group(0) @binding(1) var<storage, read> keys: array<Unit>; // rows of KEY_UNITS units
@group(0) @binding(2) var<storage, read> values: array<Unit>; // rows of VALUE_UNITS units
@group(0) @binding(3) var<storage, read_write> attention_out: array<f32>; // [n_tokens, N_HEAD, VALUE_DIM]
{% set batch_binding = 4 %}
{% include "batch.wgsl" %}
{% set head_dim = 4 %}
{% include "kv_cache.wgsl" %}
{% set next = 5 %}
{% if split > 0 %}
@group(0) @binding(5) var<storage, read_write> partial: array<f32>; // [n_splits, n_tokens, N_HEAD, VALUE_DIM + 2]
{% set next = 6 %}
{% endif %}
{% if looks_ahead %}
// The index of the last token that each token attends to, if that is behind its own.
@group(0) @binding(5) var<storage, read> last_seen: array<u32>; // [n_tokens]
{% set next = 6 %}
{% endif %}
{% if per_head %}
@group(0) @binding({{ next }}) var<storage, read> of_heads: array<vec2<f32>>; // the score of the sink and the slope of each head
{% endif %}
{% include "reduce.wgsl" %}
const N_HEAD: u32 = {{ n_head }}u;
const KEY_DIM: u32 = {{ key_dim }}u;
const KEY_UNITS: u32 = {{ key_units }}u;
const VALUE_DIM: u32 = {{ value_dim }}u;
const VALUE_UNITS: u32 = {{ value_units }}u;
const THREADS: u32 = {{ threads }}u;
const LANES: u32 = {{ lanes }}u; // threads that share a position's value
const PARTS: u32 = THREADS / LANES;
const NEVER: f32 = -3.4e38; // the score of a position that is not attended to

var<workgroup> query: array<vec4<f32>, {{ key_units }}>;
var<workgroup> weights: array<f32, {{ threads }}>;
var<workgroup> sums: array<vec4<f32>, {{ threads }}>;
{% if mask in ["full", "near"] %}
var<workgroup> end_of_text: atomic<u32>;
{% endif %}

// The row of a position in the KV cache; with KV_UNITS of 1.
fn row_of(seq: u32, head: u32, pos: u32) -> u32 { return cache_row(page_of(seq, pos), head, pos); }

@compute @workgroup_size({{ threads }})
fn main(
    @builtin(local_invocation_index) tid: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let head = group.x;
    let kv_head = head / {{ n_head // n_head_kv }}u;
    let token = group.y;
    let seq = token_seq(token);
    let pos = min(token_pos(token), N_CTX - 1u);

    // Positions low..=high are attended to.
{% if mask in ["full", "near"] %}
    if tid == 0u { atomicStore(&end_of_text, 0u); }
    workgroupBarrier();
    for (var t = tid; t < n_tokens(); t += THREADS) {
        if token_seq(t) == seq { atomicMax(&end_of_text, token_pos(t)); }
    }
    workgroupBarrier();
    let last = min(atomicLoad(&end_of_text), N_CTX - 1u);
{% endif %}
{% if mask == "causal" %}
    var low = 0u;
    var high = pos;
{% elif mask == "window" %}
    var low = max(pos + 1u, {{ reach }}u) - {{ reach }}u;
    var high = pos;
{% elif mask == "chunk" %}
    var low = pos / {{ reach }}u * {{ reach }}u;
    var high = pos;
{% elif mask == "full" %}
    var low = 0u;
    var high = last;
{% else %}
    var low = max(pos, {{ reach }}u) - {{ reach }}u;
    var high = min(pos + {{ reach }}u, last);
{% endif %}
{% if looks_ahead %}
    high = min(max(high, last_seen[token]), N_CTX - 1u);
{% endif %}
{% if split > 0 %}
{% if sinks %}
    let has_last = pos / {{ split }}u == group.z;
{% endif %}
    low = max(low, group.z * {{ split }}u);
    high = min(high, group.z * {{ split }}u + {{ split - 1 }}u);
{% endif %}

{% if temperature %}
    // A factor on queries that grows with their position.
    let growth = 1.0 + {{ growth }} * log(1.0 + f32((token_position(token) + {{ growth_offset }}u) / {{ growth_length }}u));
    let scale = {{ scale }} * growth;
{% else %}
    let scale = {{ scale }};
{% endif %}
    for (var unit = tid; unit < KEY_UNITS; unit += THREADS) {
        var q = vec4<f32>();
        for (var e = 0u; e < 4u; e++) {
            if 4u * unit + e < KEY_DIM { q[e] = queries[(token * N_HEAD + head) * KEY_DIM + 4u * unit + e] * scale; }
        }
        query[unit] = q;
    }
    workgroupBarrier();

    let lane = tid % LANES;
    let part = tid / LANES;
    var largest = NEVER;
    var total = 0.0; // of this thread's positions
    var sum = vec4<f32>();
    for (var at = low; at <= high; at += THREADS) {
        let mine = at + tid;
        var score = NEVER;
        if mine <= high {
            let row = row_of(seq, kv_head, mine) * KEY_UNITS;
            var products = vec4<f32>();
            for (var unit = 0u; unit < KEY_UNITS; unit++) { products += query[unit] * unpack_unit(keys[row + unit]); }
            score = products.x + products.y + products.z + products.w;
{% if cap %}
            // Beyond 15 tanh is 1 to the last bit, and some devices overflow.
            score = {{ soft_cap }} * tanh(clamp(score / {{ soft_cap }}, -15.0, 15.0));
{% endif %}
{% if slopes %}
            score -= of_heads[head].y * f32(max(mine, pos) - min(mine, pos));
{% endif %}
        }
        let larger = max(largest, workgroup_max(score, tid));
        let shrink = exp(largest - larger);
        largest = larger;
        let weight = select(0.0, exp(score - largest), mine <= high);
        total = total * shrink + weight;
        weights[tid] = weight;
        workgroupBarrier();
        sum *= shrink;
        if lane < VALUE_UNITS {
            for (var k = part; k < THREADS; k += PARTS) {
                if at + k > high { break; }
                sum += weights[k] * unpack_unit(values[row_of(seq, kv_head, at + k) * VALUE_UNITS + lane]);
            }
        }
        workgroupBarrier();
    }
    total = workgroup_sum(total, tid);
    sums[tid] = sum;
    workgroupBarrier();
{% if sinks %}
    // The sink takes part in the softmax without a value{% if split > 0 %}; only with the last split{% endif %}.
    let sink = {% if split > 0 %}select(NEVER, of_heads[head].x, has_last){% else %}of_heads[head].x{% endif %};
    let larger = max(largest, sink);
    let shrink = exp(largest - larger);
    total = total * shrink + exp(sink - larger);
    largest = larger;
{% else %}
    let shrink = 1.0;
{% endif %}
    if tid < VALUE_UNITS {
        var all = sums[tid];
        for (var i = 1u; i < PARTS; i++) { all += sums[i * LANES + tid]; }
        all *= shrink;
{% if split > 0 %}
        if groups.z > 1u {
            let own = ((group.z * n_tokens() + token) * N_HEAD + head) * (VALUE_DIM + 2u);
            for (var e = 0u; e < 4u; e++) {
                if 4u * tid + e < VALUE_DIM { partial[own + 4u * tid + e] = all[e]; }
            }
            if tid == 0u {
                partial[own + VALUE_DIM] = largest;
                partial[own + VALUE_DIM + 1u] = total;
            }
            return;
        }
{% endif %}
        for (var e = 0u; e < 4u; e++) {
            if 4u * tid + e < VALUE_DIM { attention_out[(token * N_HEAD + head) * VALUE_DIM + 4u * tid + e] = all[e] / total; }
        }
    }
}
