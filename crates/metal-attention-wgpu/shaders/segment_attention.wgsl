// Attention of rows to rows without a mask, with a running softmax: a tile is up to QUERIES rows of queries that attend to the same
// rows of keys and values. One workgroup for each tile and head of queries.
//
// It processes the keys in tiles of KEYS, which it copies to workgroup memory. LANES neighbouring threads share a query, each with
// UNITS units of four elements of the query and of the result; PARTS such sets of threads divide the keys of a tile, four each. So a
// thread needs its neighbours for the scores only, and the other sets at the end, when their sums are merged.
// Bounds: rows come from `tiles`, which `segment_attention` makes of segments within the rows of `queries`, `keys`, `values` and
// `result` (`Dispatch`); there is a workgroup for each tile. Units are compared with their number where there are more lanes. Indices
// of workgroup memory follow from the thread and constants. Loops end with the keys of the tile.
{% set threads = 256 %}
{% set kv_units = (head_dim + 3) // 4 %}
{% set lanes = 1 if kv_units <= 8 else (2 if kv_units <= 16 else (4 if kv_units <= 32 else 8)) %}
{% set units = (kv_units + lanes - 1) // lanes %}
{% set stride = units * lanes %}
{% set team = queries * lanes %}
{% set parts = threads // team %}
{% set keys_of_tile = 4 * parts %}
{% set loads = (keys_of_tile * kv_units + threads - 1) // threads %}
{% set whole = head_dim % 4 == 0 %}
{% set element = "vec4<f32>" if whole else "f32" %}
{% set part = "xyzw" %}
@group(0) @binding(0) var<storage, read> queries: array<{{ element }}>; // [n_queries, N_HEAD, HEAD_DIM]
@group(0) @binding(1) var<storage, read> keys: array<{{ element }}>; // [n_keys, N_HEAD_KV, HEAD_DIM]
@group(0) @binding(2) var<storage, read> values: array<{{ element }}>; // [n_keys, N_HEAD_KV, HEAD_DIM]
@group(0) @binding(3) var<storage, read_write> result: array<{{ element }}>; // [n_queries, N_HEAD, HEAD_DIM]
@group(0) @binding(4) var<storage, read> tiles: array<vec4<u32>>; // first query, end of the queries, first key, end of the keys
const HEAD_DIM: u32 = {{ head_dim }}u;
const N_HEAD: u32 = {{ n_head }}u;
const N_HEAD_KV: u32 = {{ n_head_kv }}u;
const KV_UNITS: u32 = {{ kv_units }}u;
const QUERIES: u32 = {{ queries }}u;
const LANES: u32 = {{ lanes }}u;
const TEAM: u32 = QUERIES * LANES; // threads of a part
const PARTS: u32 = {{ parts }}u;
const KEYS: u32 = {{ keys_of_tile }}u;
const STRIDE: u32 = {{ stride }}u; // units of a key in a tile
const NEVER: f32 = -3.4e38; // the score of a key beyond the end

// Keys of the tile, then its values; in the end sums to be merged.
var<workgroup> tile: array<vec4<f32>, {{ [2 * keys_of_tile * stride, parts // 2 * team * units] | max }}>;
var<workgroup> softmax: array<vec2<f32>, {{ [parts // 2 * team, 1] | max }}>; // largest score and sum of the weights, of sums in `tile`
{% if lanes > 1 and neighbours < lanes %}
var<workgroup> scratch: array<vec4<f32>, {{ threads }}>;
{% endif %}

{% for array in ["queries", "keys", "values"] %}
// Unit `u` of the head at `row`, a number of heads.
fn unit_of_{{ array }}(row: u32, u: u32) -> vec4<f32> {
{% if whole %}
    return {{ array }}[row * KV_UNITS + u];
{% else %}
    var v = vec4<f32>();
{% for e in range(4) %}
    if 4u * u + {{ e }}u < HEAD_DIM { v.{{ part[e] }} = {{ array }}[row * HEAD_DIM + 4u * u + {{ e }}u]; }
{% endfor %}
    return v;
{% endif %}
}
{% endfor %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let head = group.x;
    let kv_head = head / {{ n_head // n_head_kv }}u;
    let rows = tiles[group.y];
    let lane = tid % LANES;
    let query = rows.x + tid / LANES % QUERIES;
    let part = tid / TEAM;
    // Threads beyond the queries compute the last one once more.
    let query_head = min(query, rows.y - 1u) * N_HEAD + head;
{% for u in range(units) %}
    var q_{{ u }} = vec4<f32>();
    var sum_{{ u }} = vec4<f32>();
{% if stride > kv_units %}
    if lane + {{ u * lanes }}u < KV_UNITS { q_{{ u }} = {{ scale }} * unit_of_queries(query_head, lane + {{ u * lanes }}u); }
{% else %}
    q_{{ u }} = {{ scale }} * unit_of_queries(query_head, lane + {{ u * lanes }}u);
{% endif %}
{% endfor %}
    var largest = NEVER;
    var total = 0.0;
{% if stride > kv_units %}
    // Keys and values are zero beyond their end.
    for (var i = tid; i < 2u * KEYS * STRIDE; i += {{ threads }}u) { tile[i] = vec4<f32>(); }
    workgroupBarrier();
{% endif %}

    // Units of the next tile, in flight while this one is processed. The last key stands in for those beyond the end.
{% macro read(at) %}
{% for i in range(loads) %}
    if tid + {{ i * threads }}u < KEYS * KV_UNITS {
        let i = tid + {{ i * threads }}u;
        let row = min({{ at }} + i / KV_UNITS, rows.w - 1u) * N_HEAD_KV + kv_head;
        key_{{ i }} = unit_of_keys(row, i % KV_UNITS);
        value_{{ i }} = unit_of_values(row, i % KV_UNITS);
    }
{% endfor %}
{% endmacro %}
{% for i in range(loads) %}
    var key_{{ i }} = vec4<f32>();
    var value_{{ i }} = vec4<f32>();
{% endfor %}
{{ read("rows.z") }}
    for (var at = rows.z; at < rows.w; at += KEYS) {
{% for i in range(loads) %}
        if tid + {{ i * threads }}u < KEYS * KV_UNITS {
            let i = tid + {{ i * threads }}u;
            let place = i / KV_UNITS * STRIDE + i % KV_UNITS;
            tile[place] = key_{{ i }};
            tile[KEYS * STRIDE + place] = value_{{ i }};
        }
{% endfor %}
        workgroupBarrier();
{{ read("at + KEYS") }}
        let row = part * 4u * STRIDE + lane;
        var score = vec4<f32>();
{% for u in range(units) %}
{% for k in range(4) %}
        score.{{ part[k] }} += dot(q_{{ u }}, tile[row + {{ k * stride + u * lanes }}u]);
{% endfor %}
{% endfor %}
{% if lanes > 1 and neighbours >= lanes %}
{% for mask in [1, 2, 4] if mask < lanes %}
        score += subgroupShuffleXor(score, {{ mask }}u);
{% endfor %}
{% elif lanes > 1 %}
        scratch[tid] = score;
        workgroupBarrier();
        score = vec4<f32>();
        for (var i = 0u; i < LANES; i++) { score += scratch[tid - lane + i]; }
{% endif %}
        let seen = vec4(at + part * 4u) + vec4(0u, 1u, 2u, 3u) < vec4(rows.w);
        score = select(vec4(NEVER), score, seen);
        let larger = max(max(max(score.x, score.y), max(score.z, score.w)), largest);
        if larger > largest {
            let shrink = exp(largest - larger);
            largest = larger;
            total *= shrink;
{% for u in range(units) %}
            sum_{{ u }} *= shrink;
{% endfor %}
        }
        let weight = select(vec4<f32>(), exp(score - largest), seen);
        total += weight.x + weight.y + weight.z + weight.w;
{% for u in range(units) %}
{% for k in range(4) %}
        sum_{{ u }} += weight.{{ part[k] }} * tile[row + {{ (keys_of_tile + k) * stride + u * lanes }}u];
{% endfor %}
{% endfor %}
        workgroupBarrier();
    }

    for (var half = PARTS / 2u; half > 0u; half /= 2u) {
        let n = half * TEAM;
        if part >= half && part < 2u * half {
{% for u in range(units) %}
            tile[{{ u }}u * n + tid - n] = sum_{{ u }};
{% endfor %}
            softmax[tid - n] = vec2(largest, total);
        }
        workgroupBarrier();
        if part < half {
            let other = softmax[tid];
            let larger = max(largest, other.x);
            let shrink = exp(largest - larger);
            let other_shrink = exp(other.x - larger);
            largest = larger;
            total = total * shrink + other.y * other_shrink;
{% for u in range(units) %}
            sum_{{ u }} = sum_{{ u }} * shrink + tile[{{ u }}u * n + tid] * other_shrink;
{% endfor %}
        }
        workgroupBarrier();
    }

    if part == 0u && query < rows.y {
{% for u in range(units) %}
{% if whole %}
{% if stride > kv_units %}
        if lane + {{ u * lanes }}u < KV_UNITS { result[query_head * KV_UNITS + lane + {{ u * lanes }}u] = sum_{{ u }} / total; }
{% else %}
        result[query_head * KV_UNITS + lane + {{ u * lanes }}u] = sum_{{ u }} / total;
{% endif %}
{% else %}
{% for e in range(4) %}
        if (lane + {{ u * lanes }}u) * 4u + {{ e }}u < HEAD_DIM { result[query_head * HEAD_DIM + (lane + {{ u * lanes }}u) * 4u + {{ e }}u] = sum_{{ u }}.{{ part[e] }} / total; }
{% endfor %}
{% endif %}
{% endfor %}
    }
}
