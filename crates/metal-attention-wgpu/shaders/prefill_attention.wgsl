// Prefill attention: many query tokens attend to the KV cache, which already holds their own keys and values, with a running
// softmax.
//
// One workgroup for QUERIES tokens of one query head. It processes the positions that they attend to in tiles of KEYS, kept
// as 32-bit floats in workgroup memory. LANES neighbouring threads share a query, each with UNITS units of four elements of
// the query and of the result; PARTS such sets of threads divide the keys of a tile, four each. So a thread needs its
// neighbours for the scores only, and the other sets at the end, when their sums are merged.
// Tokens of several sequences in one workgroup are processed one sequence after the other.
// Bounds: tokens are those of the batch, which `qkv`, `last_seen` and `attention_out` hold (`Dispatch`); positions are clamped to `high`, below
// N_CTX, pages come from the page table (kv_cache.wgsl). Indices of workgroup memory follow from the thread and constants.
// Loops end with the tokens of the workgroup and the positions that they attend to.
{% set threads = 256 %}
{% set kv_units = (head_dim + 3) // 4 %}
{% set lanes = 1 if kv_units <= 8 else (2 if kv_units <= 16 else (4 if kv_units <= 32 else 8)) %}
{% set units = (kv_units + lanes - 1) // lanes %}
{% set stride = units * lanes %}
{% set team = queries * lanes %}
{% set parts = threads // team %}
{% set keys_of_tile = 4 * parts %}
{% set loads = (keys_of_tile * kv_units + threads - 1) // threads %}
{% set part = "xyzw" %}
@group(0) @binding(0) var<storage, read> qkv: array<f32>; // [n_tokens, {{ qkv_row }}], of which [N_GATE + N_HEAD + 2 N_HEAD_KV, HEAD_DIM], rotated
@group(0) @binding(1) var<storage, read> keys: array<Unit>;
@group(0) @binding(2) var<storage, read> values: array<Unit>;
@group(0) @binding(3) var<storage, read_write> attention_out: array<f32>; // [n_tokens, N_HEAD, HEAD_DIM]
{% set batch_binding = 4 %}
{% include "batch.wgsl" %}
{% include "kv_cache.wgsl" %}
// The index of the last token that each token attends to, if that is behind its own.
@group(0) @binding(5) var<storage, read> last_seen: array<u32>; // [n_tokens]
{% if sinks %}
@group(0) @binding(6) var<storage, read> of_heads: array<vec2<f32>>; // [N_HEAD]: the sink's score first
{% endif %}
const HEAD_DIM: u32 = {{ head_dim }}u;
const N_HEAD: u32 = {{ n_head }}u;
const N_GATE: u32 = {{ n_head if gated else 0 }}u;
const QUERIES: u32 = {{ queries }}u;
const LANES: u32 = {{ lanes }}u;
const TEAM: u32 = QUERIES * LANES; // threads of a part
const PARTS: u32 = {{ parts }}u;
const KEYS: u32 = {{ keys_of_tile }}u;
const STRIDE: u32 = {{ stride }}u; // units of a key in a tile
const NEVER: f32 = -3.4e38; // the score of a position that is not attended to

// Keys of the tile, then its values; in the end sums to be merged.
var<workgroup> tile: array<vec4<f32>, {{ [2 * keys_of_tile * stride, parts // 2 * team * units] | max }}>;
var<workgroup> softmax: array<vec2<f32>, {{ [parts // 2 * team, 1] | max }}>; // largest score and sum of the weights, of sums in `tile`
{% if lanes > 1 and neighbours < lanes %}
var<workgroup> scratch: array<vec4<f32>, {{ threads }}>;
{% endif %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let head = group.x;
    let kv_head = head / {{ n_head // n_head_kv }}u;
    // The last tokens attend to the most positions: their workgroups start first.
    let n_tiles = (n_tokens() + QUERIES - 1u) / QUERIES;
    if group.y >= n_tiles { return; }
    let begin = (n_tiles - 1u - group.y) * QUERIES;
    let end = min(begin + QUERIES, n_tokens());

    let lane = tid % LANES;
    let token = begin + tid / LANES % QUERIES;
    let part = tid / TEAM;
    let known = min(token, end - 1u); // threads beyond the batch compute its last token once more
    let pos = token_pos(known);
    let last = max(pos, last_seen[known]);
{% if window > 0 %}
    let first = max(pos + 1u, {{ window }}u) - {{ window }}u;
{% else %}
    let first = 0u;
{% endif %}

    let query = known * {{ qkv_row }}u + (N_GATE + head) * HEAD_DIM;
{% for u in range(units) %}
    var q_{{ u }} = vec4<f32>();
    var sum_{{ u }} = vec4<f32>();
{% for e in range(4) %}
{% if stride > kv_units or head_dim % 4 != 0 %}
    if (lane + {{ u * lanes }}u) * 4u + {{ e }}u < HEAD_DIM { q_{{ u }}.{{ part[e] }} = qkv[query + (lane + {{ u * lanes }}u) * 4u + {{ e }}u] * {{ scale }}; }
{% else %}
    q_{{ u }}.{{ part[e] }} = qkv[query + (lane + {{ u * lanes }}u) * 4u + {{ e }}u] * {{ scale }};
{% endif %}
{% endfor %}
{% endfor %}
    var largest = NEVER;
    var total = 0.0;

{% if stride > kv_units %}
    // Keys and values are zero beyond their end.
    for (var i = tid; i < 2u * KEYS * STRIDE; i += {{ threads }}u) { tile[i] = vec4<f32>(); }
    workgroupBarrier();
{% endif %}
    var run = begin;
    while run < end {
{% include "sequence_run.wgsl" %}

        // Units of the next tile, in flight while this one is processed.
{% macro read(at) %}
{% for i in range(loads) %}
{% if keys_of_tile * kv_units % threads != 0 %}
        if tid + {{ i * threads }}u < KEYS * KV_UNITS {
{% else %}
        {
{% endif %}
            let i = tid + {{ i * threads }}u;
            let unit = cached + min({{ at }} + i / KV_UNITS, high) * KV_UNITS + i % KV_UNITS;
            key_{{ i }} = keys[unit];
            value_{{ i }} = values[unit];
        }
{% endfor %}
{% endmacro %}
{% for i in range(loads) %}
        var key_{{ i }} = Unit();
        var value_{{ i }} = Unit();
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
                let place = i / KV_UNITS * STRIDE + i % KV_UNITS;
                tile[place] = unpack_unit(key_{{ i }});
                tile[KEYS * STRIDE + place] = unpack_unit(value_{{ i }});
            }
{% endfor %}
            workgroupBarrier();
{{ read("at + KEYS") }}
            cached = cache_rows(seq, kv_head, min(at + 2u * KEYS, high));
            let row = part * 4u * STRIDE + lane;
            var score = vec4<f32>();
{% for u in range(units) %}
{% for k in range(4) %}
            score.{{ part[k] }} += dot(q_{{ u }}, tile[row + {{ k * stride + u * lanes }}u]);
{% endfor %}
{% endfor %}
{% if lanes > 1 and neighbours >= lanes %}
{% for mask in [1, 2, 4] %}
{% if mask < lanes %}
            score += subgroupShuffleXor(score, {{ mask }}u);
{% endif %}
{% endfor %}
{% elif lanes > 1 %}
            scratch[tid] = score;
            workgroupBarrier();
            score = vec4<f32>();
            for (var i = 0u; i < LANES; i++) { score += scratch[tid - lane + i]; }
{% endif %}
{% if cap %}
            // Beyond 15 tanh is 1; the bound avoids a division of infinities.
            score = {{ soft_cap }} * tanh(clamp(score / {{ soft_cap }}, vec4(-15.0), vec4(15.0)));
{% endif %}
            let at_mine = vec4(at + part * 4u) + vec4(0u, 1u, 2u, 3u);
            let seen = vec4<bool>(mine) & (at_mine >= vec4(first)) & (at_mine <= vec4(last));
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
        run = next;
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

{% if sinks %}
    // The sink: a score without a value.
    let sink = of_heads[head].x;
    let with_sink = max(largest, sink);
    let factor = exp(largest - with_sink);
    total = total * factor + exp(sink - with_sink);
{% for u in range(units) %}
    sum_{{ u }} *= factor;
{% endfor %}
{% endif %}
    if part == 0u && token < end {
        let place = (token * N_HEAD + head) * HEAD_DIM;
{% if gated %}
        let gate = (token * (2u * N_HEAD + 2u * N_HEAD_KV) + head) * HEAD_DIM;
{% endif %}
{% for u in range(units) %}
{% for e in range(4) %}
{% if gated %}
        if (lane + {{ u * lanes }}u) * 4u + {{ e }}u < HEAD_DIM {
            let e = (lane + {{ u * lanes }}u) * 4u + {{ e }}u;
            sum_{{ u }}.{{ part[e] }} /= 1.0 + exp(min(-qkv[gate + e], 80.0));
        }
{% endif %}
{% if stride > kv_units or head_dim % 4 != 0 %}
        if (lane + {{ u * lanes }}u) * 4u + {{ e }}u < HEAD_DIM { attention_out[place + (lane + {{ u * lanes }}u) * 4u + {{ e }}u] = sum_{{ u }}.{{ part[e] }} / total; }
{% else %}
        attention_out[place + (lane + {{ u * lanes }}u) * 4u + {{ e }}u] = sum_{{ u }}.{{ part[e] }} / total;
{% endif %}
{% endfor %}
{% endfor %}
    }
}
