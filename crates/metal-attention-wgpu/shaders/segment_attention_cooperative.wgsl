// Bounds: as in segment_attention.wgsl; units are clamped to KV_UNITS or compared with it, keys clamped to the last of the tile's rows.
// Indices of workgroup memory follow from the thread, the subgroup and constants. Loops end with the keys, or count to constants.
{% set scalar = "f16" if cooperative_f16 else "f32" %}
// Attention of rows to rows without a mask, like segment_attention.wgsl, on matrix units of {{ scalar }} that accumulate in f32.
//
// One workgroup for each tile of up to 16 queries and head of queries. It processes the keys in tiles of KEYS, 16 for each subgroup:
//   1. each subgroup multiplies the queries by 16 keys, which gives the scores
//   2. softmax: LANES neighbouring threads share a query, and write weights of at most 1
//   3. each subgroup multiplies the weights by every {{ subgroup_count }}th 16 elements of the values
//   4. the threads of a query add the result to their sums, which are scaled down when a larger score is found.
// Each query is divided by a power of two that brings its largest element near 2^8. Keys and values beyond the range of 16-bit floats
// become the largest of these. Heads are padded with zeros to whole matrices.
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
{% set padded = (head_dim + 15) // 16 * 16 %}
{% set kv_units = head_dim // 4 %}
{% set units = (kv_units + lanes - 1) // lanes %}
{% set quads = keys_of_tile // 4 // lanes %}
{% set loads = (keys_of_tile * kv_units + threads - 1) // threads %}
{% set columns = (padded // 16 + subgroup_count - 1) // subgroup_count %}
{% set wide = [keys_of_tile, padded] | max %}
@group(0) @binding(0) var<storage, read> rows_q: array<vec4<f32>>; // [n_queries, N_HEAD, HEAD_DIM]
@group(0) @binding(1) var<storage, read> rows_k: array<vec4<f32>>; // [n_keys, N_HEAD_KV, HEAD_DIM]
@group(0) @binding(2) var<storage, read> rows_v: array<vec4<f32>>; // [n_keys, N_HEAD_KV, HEAD_DIM]
@group(0) @binding(3) var<storage, read_write> result: array<vec4<f32>>; // [n_queries, N_HEAD, HEAD_DIM]
@group(0) @binding(4) var<storage, read> tiles: array<vec4<u32>>; // first query, end of the queries, first key, end of the keys
const N_HEAD: u32 = {{ n_head }}u;
const N_HEAD_KV: u32 = {{ n_head_kv }}u;
const KV_UNITS: u32 = {{ kv_units }}u;
const LANES: u32 = {{ lanes }}u;
const KEYS: u32 = {{ keys_of_tile }}u;
const NEVER: f32 = -3.4e38; // the score of a key beyond the end

// With 16 bytes between rows, so that a matrix unit reads 16 bytes of each of eight rows without bank conflicts.
const PITCH: u32 = {{ (padded + 8) // 4 }}u;
const WEIGHT_PITCH: u32 = {{ (keys_of_tile + 8) // 4 }}u;
const RESULT_PITCH: u32 = {{ wide + 4 }}u;
var<workgroup> queries: array<vec4<{{ scalar }}>, {{ 16 * (padded + 8) // 4 }}>;
var<workgroup> tile_k: array<vec4<{{ scalar }}>, {{ keys_of_tile * (padded + 8) // 4 }}>;
var<workgroup> tile_v: array<vec4<{{ scalar }}>, {{ keys_of_tile * (padded + 8) // 4 }}>;
var<workgroup> weights: array<vec4<{{ scalar }}>, {{ 16 * (keys_of_tile + 8) // 4 }}>;
// Scores [query][key], then weighted values [query][element].
var<workgroup> results: array<f32, {{ 16 * (wide + 4) }}>;

fn rounded(v: vec4<f32>) -> vec4<{{ scalar }}> { return vec4<{{ scalar }}>(clamp(v, vec4(-65504.0), vec4(65504.0))); }

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
    let rows = tiles[group.y];
    let lane = tid % LANES;
    let row = tid / LANES;
    let query = rows.x + row;
    // Threads beyond the queries compute the last one once more.
    let query_head = min(query, rows.y - 1u) * N_HEAD + head;

    var size = 0.0;
{% for u in range(units) %}
    let q_{{ u }} = rows_q[query_head * KV_UNITS + min(lane + {{ u * lanes }}u, KV_UNITS - 1u)] * {{ scale }};
    let size_{{ u }} = abs(q_{{ u }});
    size = max(size, max(max(size_{{ u }}.x, size_{{ u }}.y), max(size_{{ u }}.z, size_{{ u }}.w)));
    var sum_{{ u }} = vec4<f32>();
{% endfor %}
{% macro over_lanes(v, op) %}
{% for mask in [1, 2, 4, 8, 16, 32] if mask < lanes %}
    {{ v }} = {{ "max(%s, subgroupShuffleXor(%s, %du))"|format(v, v, mask) if op == "max" else "%s + subgroupShuffleXor(%s, %du)"|format(v, v, mask) }};
{% endfor %}
{% endmacro %}
{{ over_lanes("size", "max") }}
    // The exponent e of the largest magnitude m, 2^e <= m < 2^(e + 1), limited so that 2^(8 - e) and its inverse are normal.
    let e = max(i32(bitcast<u32>(size) >> 23u) - 127, -100);
    let factor = bitcast<f32>(u32(127 + 8 - e) << 23u);
    let unscaled = bitcast<f32>(u32(127 - 8 + e) << 23u);
{% if padded > head_dim %}
    // Heads are zero beyond their end.
    for (var i = tid; i < {{ 16 * (padded + 8) // 4 }}u; i += {{ threads }}u) { queries[i] = vec4<{{ scalar }}>(); }
    for (var i = tid; i < {{ keys_of_tile * (padded + 8) // 4 }}u; i += {{ threads }}u) {
        tile_k[i] = vec4<{{ scalar }}>();
        tile_v[i] = vec4<{{ scalar }}>();
    }
    workgroupBarrier();
{% endif %}
{% for u in range(units) %}
    if lane + {{ u * lanes }}u < KV_UNITS { queries[row * PITCH + lane + {{ u * lanes }}u] = vec4<{{ scalar }}>(q_{{ u }} * factor); }
{% endfor %}
    workgroupBarrier();
{% if cooperative_f16 %}
{% for k in range(0, padded, 16) %}
    let query_{{ k }} = coopLoadT<coop_mat16x16<f16, A>>(&queries[{{ k // 4 }}u], PITCH);
{% endfor %}
{% endif %}
    var largest = NEVER;
    var total = 0.0;

    // Units of the next tile, in flight while this one is processed; beyond the last key that one again.
{% macro read(at) %}
{% for i in range(loads) %}
    {
        let i = min(tid + {{ i * threads }}u, KEYS * KV_UNITS - 1u);
        let unit = (min({{ at }} + i / KV_UNITS, rows.w - 1u) * N_HEAD_KV + kv_head) * KV_UNITS + i % KV_UNITS;
        key_{{ i }} = rounded(rows_k[unit]);
        value_{{ i }} = rounded(rows_v[unit]);
    }
{% endfor %}
{% endmacro %}
{% for i in range(loads) %}
    var key_{{ i }} = vec4<{{ scalar }}>();
    var value_{{ i }} = vec4<{{ scalar }}>();
{% endfor %}
{{ read("rows.z") }}
    for (var at = rows.z; at < rows.w; at += KEYS) {
{% for i in range(loads) %}
        if tid + {{ i * threads }}u < KEYS * KV_UNITS {
            let i = tid + {{ i * threads }}u;
            let place = i / KV_UNITS * PITCH + i % KV_UNITS;
            tile_k[place] = key_{{ i }};
            tile_v[place] = value_{{ i }};
        }
{% endfor %}
        workgroupBarrier();
{{ read("at + KEYS") }}
{% if cooperative_f16 %}
        var scores = coop_mat16x16<f32, C>();
{% for k in range(0, padded, 16) %}
        let key_matrix_{{ k }} = coopLoad<coop_mat16x16<f16, B>>(&tile_k[subgroup * 16u * PITCH + {{ k // 4 }}u], PITCH);
        scores = coopMultiplyAdd(query_{{ k }}, key_matrix_{{ k }}, scores);
{% endfor %}
        coopStoreT(scores, &results[subgroup * 16u], RESULT_PITCH);
{% else %}
        var scores = Sum();
        for (var i = 0u; i < {{ each }}u; i++) {
            let e = sub_lane + i * {{ subgroup_size }}u;
            for (var k = 0u; k < {{ padded // 4 }}u; k++) {
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
        let seen_{{ q }} = vec4(at + quad_{{ q }}) + vec4(0u, 1u, 2u, 3u) < vec4(rows.w);
        let of_{{ q }} = vec4(results[from_{{ q }}], results[from_{{ q }} + 1u], results[from_{{ q }} + 2u], results[from_{{ q }} + 3u]) * unscaled;
        let score_{{ q }} = select(vec4(NEVER), of_{{ q }}, seen_{{ q }});
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
            // Subgroups beyond the last elements compute these as well, with the same result.
            let element = min(subgroup + {{ c * subgroup_count }}u, {{ padded // 16 - 1 }}u) * 16u;
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
{{ over_lanes("total", "sum") }}
    if query < rows.y {
{% for u in range(units) %}
        if lane + {{ u * lanes }}u < KV_UNITS { result[query_head * KV_UNITS + lane + {{ u * lanes }}u] = sum_{{ u }} / total; }
{% endfor %}
    }
}
