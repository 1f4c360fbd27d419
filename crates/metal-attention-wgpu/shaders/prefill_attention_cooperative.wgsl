// Bounds: as in prefill_attention.wgsl; units are clamped to KV_UNITS, indices of workgroup memory follow from the thread,
// the subgroup and constants.
{% set scalar = "f16" if cooperative_f16 else "f32" %}
// Prefill attention on matrix units of {{ scalar }} that accumulate in f32, over a KV cache in 16 bits; otherwise like
// prefill_attention.wgsl.
//
// One workgroup for 16 tokens of one query head. It processes the positions that they attend to in tiles of KEYS, 16 for each
// subgroup:
//   1. each subgroup multiplies the queries by 16 keys, which gives the scores
//   2. softmax: LANES neighbouring threads share a query, and write weights of at most 1
//   3. each subgroup multiplies the weights by {{ head_dim }} / {{ subgroup_count }} elements of the values
//   4. the threads of a query add the result to their sums, which are scaled down when a larger score is found.
// Each query is divided by a power of two that brings its largest element near 2^8. Tokens of several sequences in one
// workgroup are processed one sequence after the other.
{% if not cooperative_f16 %}
// This device has no such units; plain loops stand in for them, for tests.
{% else %}
enable wgpu_cooperative_matrix;
enable f16;
{% endif %}
{% set subgroup_size = subgroup_size if subgroup_size >= 8 else 32 %}
{% set threads = subgroup_count * subgroup_size %}
{% set lanes = threads // 16 %}
{% set keys_of_tile = 16 * subgroup_count %}
{% set kv_units = head_dim // 4 %}
{% set units = (kv_units + lanes - 1) // lanes %}
{% set quads = keys_of_tile // 4 // lanes %}
{% set loads = (keys_of_tile * kv_units + threads - 1) // threads %}
{% set columns = head_dim // 16 // subgroup_count %}
{% set wide = [keys_of_tile, head_dim] | max %}
@group(0) @binding(0) var<storage, read> qkv: array<vec4<f32>>; // [n_tokens, {{ qkv_row }}], of which [N_GATE + N_HEAD + 2 N_HEAD_KV, HEAD_DIM], queries rotated
{% if cooperative_f16 %}
@group(0) @binding(1) var<storage, read> keys: array<vec4<f16>>;
@group(0) @binding(2) var<storage, read> values: array<vec4<f16>>;
{% else %}
@group(0) @binding(1) var<storage, read> keys: array<Unit>;
@group(0) @binding(2) var<storage, read> values: array<Unit>;
{% endif %}
@group(0) @binding(3) var<storage, read_write> attention_out: array<vec4<f32>>; // [n_tokens, N_HEAD, HEAD_DIM]
{% set batch_binding = 4 %}
{% include "batch.wgsl" %}
{% include "kv_cache.wgsl" %}
// The index of the last token that each token attends to, if that is behind its own.
@group(0) @binding(5) var<storage, read> last_seen: array<u32>; // [n_tokens]
{% if sinks %}
@group(0) @binding(6) var<storage, read> of_heads: array<vec2<f32>>; // [N_HEAD]: the sink's score first
{% endif %}
const N_HEAD: u32 = {{ n_head }}u;
const N_GATE: u32 = {{ n_head if gated else 0 }}u;
const LANES: u32 = {{ lanes }}u;
const KEYS: u32 = {{ keys_of_tile }}u;
const NEVER: f32 = -3.4e38; // the score of a position that is not attended to

// With 16 bytes between rows, so that a matrix unit reads 16 bytes of each of eight rows without bank conflicts.
const PITCH: u32 = {{ (head_dim + 8) // 4 }}u;
const WEIGHT_PITCH: u32 = {{ (keys_of_tile + 8) // 4 }}u;
const RESULT_PITCH: u32 = {{ wide + 4 }}u;
var<workgroup> queries: array<vec4<{{ scalar }}>, {{ 16 * (head_dim + 8) // 4 }}>;
var<workgroup> tile_k: array<vec4<{{ scalar }}>, {{ keys_of_tile * (head_dim + 8) // 4 }}>;
var<workgroup> tile_v: array<vec4<{{ scalar }}>, {{ keys_of_tile * (head_dim + 8) // 4 }}>;
var<workgroup> weights: array<vec4<{{ scalar }}>, {{ 16 * (keys_of_tile + 8) // 4 }}>;
// Scores [query][key], then weighted values [query][element].
var<workgroup> results: array<f32, {{ 16 * (wide + 4) }}>;

{% if not cooperative_f16 %}
{% set each = 256 // subgroup_size %}
// The elements of a matrix in one lane.
alias Sum = array<f32, {{ each }}>;

fn store(sum: Sum, at: u32, lane: u32) {
    for (var i = 0u; i < {{ each }}u; i++) {
        let e = lane + i * {{ subgroup_size }}u;
        results[at + e / 16u * RESULT_PITCH + e % 16u] = sum[i];
    }
}
{% endif %}

@compute @workgroup_size({{ threads }})
fn main(
    @builtin(local_invocation_index) tid: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) sub_lane: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let head = group.x;
    let kv_head = head / {{ n_head // n_head_kv }}u;
    // The last tokens attend to the most positions: their workgroups start first.
    let n_tiles = (n_tokens() + 15u) / 16u;
    if group.y >= n_tiles { return; }
    let begin = (n_tiles - 1u - group.y) * 16u;
    let end = min(begin + 16u, n_tokens());

    let lane = tid % LANES;
    let row = tid / LANES;
    let token = begin + row;
    let known = min(token, end - 1u); // threads beyond the batch compute its last token once more
    let pos = token_pos(known);
    let last = max(pos, last_seen[known]);
{% if window > 0 %}
    let first = max(pos + 1u, {{ window }}u) - {{ window }}u;
{% else %}
    let first = 0u;
{% endif %}

    let query = known * {{ qkv_row // 4 }}u + (N_GATE + head) * KV_UNITS;
    var size = 0.0;
{% for u in range(units) %}
    let q_{{ u }} = qkv[query + min(lane + {{ u * lanes }}u, KV_UNITS - 1u)] * {{ scale }};
    let size_{{ u }} = abs(q_{{ u }});
    size = max(size, max(max(size_{{ u }}.x, size_{{ u }}.y), max(size_{{ u }}.z, size_{{ u }}.w)));
    var sum_{{ u }} = vec4<f32>();
{% endfor %}
{% macro over_lanes(v, op, zero) %}
{% for mask in [1, 2, 4, 8, 16, 32] if mask < lanes %}
    {{ v }} = {{ "max(%s, subgroupShuffleXor(%s, %du))"|format(v, v, mask) if op == "max" else "%s + subgroupShuffleXor(%s, %du)"|format(v, v, mask) }};
{% endfor %}
{% endmacro %}
{{ over_lanes("size", "max") }}
    // The exponent e of the largest magnitude m, 2^e <= m < 2^(e + 1), limited so that 2^(8 - e) and its inverse are normal.
    let e = max(i32(bitcast<u32>(size) >> 23u) - 127, -100);
    let factor = bitcast<f32>(u32(127 + 8 - e) << 23u);
    let unscaled = bitcast<f32>(u32(127 - 8 + e) << 23u);
{% for u in range(units) %}
    if lane + {{ u * lanes }}u < KV_UNITS { queries[row * PITCH + lane + {{ u * lanes }}u] = vec4<{{ scalar }}>(q_{{ u }} * factor); }
{% endfor %}
    workgroupBarrier();
{% if cooperative_f16 %}
{% for k in range(0, head_dim, 16) %}
    let query_{{ k }} = coopLoadT<coop_mat16x16<f16, A>>(&queries[{{ k // 4 }}u], PITCH);
{% endfor %}
{% endif %}
    var largest = NEVER;
    var total = 0.0;

    var run = begin;
    while run < end {
{% include "sequence_run.wgsl" %}

        // Units of the next tile, in flight while this one is processed; beyond the last position that one again.
{% macro read(at) %}
{% for i in range(loads) %}
        {
            let i = min(tid + {{ i * threads }}u, KEYS * KV_UNITS - 1u);
            let unit = cached + min({{ at }} + i / KV_UNITS, high) * KV_UNITS + i % KV_UNITS;
            key_{{ i }} = keys[unit];
            value_{{ i }} = values[unit];
        }
{% endfor %}
{% endmacro %}
{% for i in range(loads) %}
        var key_{{ i }} = {{ "vec4<f16>" if cooperative_f16 else "Unit" }}();
        var value_{{ i }} = {{ "vec4<f16>" if cooperative_f16 else "Unit" }}();
{% endfor %}
        // The base of the rows of the next tile's page, looked up a tile ahead.
        var cached = cache_rows(seq, kv_head, low);
{{ read("low") }}
        cached = cache_rows(seq, kv_head, min(low + KEYS, high));
        for (var at = low; at <= high; at += KEYS) {
{% for i in range(loads) %}
{% if keys_of_tile * kv_units % threads != 0 %}
            if tid + {{ i * threads }}u < KEYS * KV_UNITS {
{% else %}
            {
{% endif %}
                let i = tid + {{ i * threads }}u;
                let place = i / KV_UNITS * PITCH + i % KV_UNITS;
                tile_k[place] = {{ "key_%d"|format(i) if cooperative_f16 else "unpack_unit(key_%d)"|format(i) }};
                tile_v[place] = {{ "value_%d"|format(i) if cooperative_f16 else "unpack_unit(value_%d)"|format(i) }};
            }
{% endfor %}
            workgroupBarrier();
{{ read("at + KEYS") }}
            cached = cache_rows(seq, kv_head, min(at + 2u * KEYS, high));
{% if cooperative_f16 %}
            var scores = coop_mat16x16<f32, C>();
{% for k in range(0, head_dim, 16) %}
            let key_matrix_{{ k }} = coopLoad<coop_mat16x16<f16, B>>(&tile_k[subgroup * 16u * PITCH + {{ k // 4 }}u], PITCH);
            scores = coopMultiplyAdd(query_{{ k }}, key_matrix_{{ k }}, scores);
{% endfor %}
            coopStoreT(scores, &results[subgroup * 16u], RESULT_PITCH);
{% else %}
            var scores = Sum();
            for (var i = 0u; i < {{ each }}u; i++) {
                let e = sub_lane + i * {{ subgroup_size }}u;
                for (var k = 0u; k < KV_UNITS; k++) {
                    scores[i] += dot(queries[e / 16u * PITCH + k], tile_k[(subgroup * 16u + e % 16u) * PITCH + k]);
                }
            }
            store(scores, subgroup * 16u, sub_lane);
{% endif %}
            workgroupBarrier();
            var larger = largest;
{% for q in range(quads) %}
            let quad_{{ q }} = (lane + {{ q * lanes }}u) * 4u;
            let from_{{ q }} = row * RESULT_PITCH + quad_{{ q }};
            let at_{{ q }} = vec4(at + quad_{{ q }}) + vec4(0u, 1u, 2u, 3u);
            let seen_{{ q }} = vec4<bool>(mine) & (at_{{ q }} >= vec4(first)) & (at_{{ q }} <= vec4(last));
            let of_{{ q }} = vec4(results[from_{{ q }}], results[from_{{ q }} + 1u], results[from_{{ q }} + 2u], results[from_{{ q }} + 3u]) * unscaled;
{% if cap %}
            // Beyond 15 tanh is 1; the bound avoids a division of infinities.
            let score_{{ q }} = select(vec4(NEVER), {{ soft_cap }} * tanh(clamp(of_{{ q }} / {{ soft_cap }}, vec4(-15.0), vec4(15.0))), seen_{{ q }});
{% else %}
            let score_{{ q }} = select(vec4(NEVER), of_{{ q }}, seen_{{ q }});
{% endif %}
            larger = max(larger, max(max(score_{{ q }}.x, score_{{ q }}.y), max(score_{{ q }}.z, score_{{ q }}.w)));
{% endfor %}
{{ over_lanes("larger", "max") }}
            let shrink = exp(largest - larger);
            largest = larger;
            total *= shrink;
{% for q in range(quads) %}
            let weight_{{ q }} = select(vec4<f32>(), exp(score_{{ q }} - largest), seen_{{ q }});
            total += dot(weight_{{ q }}, vec4(1.0));
            weights[row * WEIGHT_PITCH + lane + {{ q * lanes }}u] = vec4<{{ scalar }}>(weight_{{ q }});
{% endfor %}
            workgroupBarrier();
{% for c in range(columns) %}
            {
                let element = (subgroup + {{ c * subgroup_count }}u) * 16u;
{% if cooperative_f16 %}
                var product = coop_mat16x16<f32, C>();
{% for k in range(0, keys_of_tile, 16) %}
                let weight_matrix_{{ k }} = coopLoadT<coop_mat16x16<f16, A>>(&weights[{{ k // 4 }}u], WEIGHT_PITCH);
                let value_matrix_{{ k }} = coopLoadT<coop_mat16x16<f16, B>>(&tile_v[{{ k }}u * PITCH + element / 4u], PITCH);
                product = coopMultiplyAdd(weight_matrix_{{ k }}, value_matrix_{{ k }}, product);
{% endfor %}
                coopStoreT(product, &results[element], RESULT_PITCH);
{% else %}
                var product = Sum();
                for (var i = 0u; i < {{ each }}u; i++) {
                    let e = sub_lane + i * {{ subgroup_size }}u;
                    let column = element + e % 16u;
                    for (var k = 0u; k < KEYS; k++) {
                        product[i] += weights[e / 16u * WEIGHT_PITCH + k / 4u][k % 4u] * tile_v[k * PITCH + column / 4u][column % 4u];
                    }
                }
                store(product, element, sub_lane);
{% endif %}
            }
{% endfor %}
            workgroupBarrier();
{% for u in range(units) %}
            {
                let at = row * RESULT_PITCH + min(lane + {{ u * lanes }}u, KV_UNITS - 1u) * 4u;
                sum_{{ u }} = sum_{{ u }} * shrink + vec4(results[at], results[at + 1u], results[at + 2u], results[at + 3u]);
            }
{% endfor %}
        }
        run = next;
    }
{{ over_lanes("total", "sum") }}
{% if sinks %}
    // The sink: a score without a value.
    let sink = of_heads[head].x;
    let with_sink = max(largest, sink);
    let shrink = exp(largest - with_sink);
    total = total * shrink + exp(sink - with_sink);
{% for u in range(units) %}
    sum_{{ u }} *= shrink;
{% endfor %}
{% endif %}
    if token < end {
{% for u in range(units) %}
{% if gated %}
        if lane + {{ u * lanes }}u < KV_UNITS {
            let gate = qkv[(token * (2u * N_HEAD + 2u * N_HEAD_KV) + head) * KV_UNITS + lane + {{ u * lanes }}u];
            sum_{{ u }} /= 1.0 + exp(min(-gate, vec4(80.0)));
        }
{% endif %}
        if lane + {{ u * lanes }}u < KV_UNITS { attention_out[(token * N_HEAD + head) * KV_UNITS + lane + {{ u * lanes }}u] = sum_{{ u }} / total; }
{% endfor %}
    }
}
