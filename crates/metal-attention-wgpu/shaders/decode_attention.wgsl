// Decode attention: the newest token of each sequence attends to all positions of its KV cache.
// Includes {% if qk_norm %}the RMSNorm of each head, {% endif %}RoPE, and appending the token's key and value to the cache.
//
// One workgroup for HEADS query heads of one KV head, one split of the positions, and one token:
//   1. every thread looks up the pages of the split and starts its reads of keys and values, which depend only on them
//   2. the queries are rotated (RoPE) into workgroup memory, and so are the new key and value
//   3. scores: LANES threads for each key
//   4. softmax over the split
//   5. weighted values: each group of threads adds up its share of the positions, each thread of it four elements; then
//      the groups' sums are added.
// Bounds: tokens are those of the batch (`Dispatch`), indices are compared with N_CTX, pages come from the page table
// (kv_cache.wgsl). Within a split, rows are clamped to the first and last one that is cached and attended to, units to
// KV_UNITS, heads to those of the KV head; indices of workgroup memory follow from these. There are no more splits than
// `partial` holds (`Dispatch`). Loops end with the split, at most SPLIT positions, or count to constants.
{#
  lanes    threads that share a key: neighbours in a subgroup, else 1
  units    units of four elements of a key that each of them reads
  at_once  units of keys, and likewise of values, that a thread keeps in registers
  rows     the number of keys that these are
  turns    rounds until all keys of the split are read
  pages    pages of a split; as many keys in a row are on the same one
#}
{% set threads = 256 %}
{% set kv_units = (head_dim + 3) // 4 %}
{% set lanes = 4 if neighbours >= 4 else 1 %}
{% set together = [neighbours, threads] | min %}
{% set units = (kv_units + lanes - 1) // lanes %}
{% set keys_at_once = threads // lanes %}
{% set at_once = 16 if cache_f16 else 8 %}
{% set rows = [[at_once // units // 2 * 2, 1] | max, split // keys_at_once] | min %}
{% set turns = (split + rows * keys_at_once - 1) // (rows * keys_at_once) %}
{#
  groups   threads that share a unit of the values, an even number
  values   values that a thread keeps in registers
  chunks   rounds until all values of the split are read
#}
{% set groups = threads // kv_units // 2 * 2 %}
{% set values = [(split + groups - 1) // groups, at_once] | min %}
{% set chunks = (split + groups * values - 1) // (groups * values) %}
{% set turn = "turn * " ~ rows * keys_at_once ~ "u + " if turns > 1 else "" %}
{% set chunk = "chunk * " ~ values * groups ~ "u + " if chunks > 1 else "" %}
{% set pages = split // page %}
{% set part = "xyzw" %}
@group(0) @binding(0) var<storage, read> qkv: array<f32>; // [n_tokens, {{ qkv_row }}], of which [{% if gated %}2 {% endif %}N_HEAD + 2 N_HEAD_KV, HEAD_DIM]{% if gated %}, gates first{% endif %}
{% set rope_binding = 1 %}
{% include "rope.wgsl" %}
{% set batch_binding = 2 %}
{% include "batch.wgsl" %}
{% include "kv_cache.wgsl" %}
@group(0) @binding(3) var<storage, read_write> keys: array<Unit>;
@group(0) @binding(4) var<storage, read_write> values: array<Unit>;
@group(0) @binding(5) var<storage, read_write> attention_out: array<f32>; // [n_tokens, N_HEAD, HEAD_DIM]
// [n_splits, n_tokens, N_HEAD, HEAD_DIM + 2]: weighted values, the largest score, the sum of the weights
@group(0) @binding(6) var<storage, read_write> partial: array<f32>;
{% if qk_norm %}
@group(0) @binding(7) var<storage, read> norm: array<f32>; // weights of a query head, then of a key head
{% endif %}
{% if sinks %}
@group(0) @binding(7) var<storage, read> of_heads: array<vec2<f32>>; // [N_HEAD]: the sink's score first
{% endif %}
const N_HEAD: u32 = {{ n_head }}u;
const GROUP: u32 = {{ n_head // n_head_kv }}u; // query heads of a KV head
const HEADS: u32 = {{ heads }}u; // query heads of a workgroup
const BLOCKS: u32 = {{ blocks }}u; // workgroups of a KV head
const SPLIT: u32 = {{ split }}u;
const LANES: u32 = {{ lanes }}u;
const NEVER: f32 = -3.4e38; // the score of a position that is not attended to

{% macro heads_type() %}{{ "f32" if heads == 1 else "vec" ~ heads ~ "<f32>" }}{% endmacro %}
// A number for each head of the workgroup.
alias Heads = {{ heads_type() }};

{% macro of(name, h) %}{{ name }}{{ "" if heads == 1 else "." ~ part[h] }}{% endmacro %}

var<workgroup> queries: array<vec4<f32>, {{ heads * units * lanes }}>;
var<workgroup> new_key: array<Unit, KV_UNITS>;
var<workgroup> new_value: array<Unit, KV_UNITS>;
var<workgroup> weights: array<Heads, SPLIT>; // scores, then weights
var<workgroup> sums: array<vec4<f32>, {{ groups // 2 * kv_units * heads }}>; // weighted values of half of the groups
{% if qk_norm %}
var<workgroup> squares: array<f32, {{ (heads + 1) * kv_units }}>;
{% endif %}
{% if together > 1 %}
{% set reduced = threads // together %}
{% else %}
{% set reduced = threads %}
{% endif %}
var<workgroup> scratch: array<Heads, {{ reduced }}>;
var<workgroup> scratch_sum: array<Heads, {{ reduced }}>;

// Element `e` of the head that starts at `head` of `qkv`, rotated by row `row` of the RoPE table.
fn turned(head: u32, weight: u32, e: u32, row: u32) -> f32 {
{% if n_rot < head_dim %}
    if e >= 2u * HALF_ROT { return qkv[head + e]{% if qk_norm %} * norm[weight + e]{% endif %}; }
{% endif %}
    let i = pair_of(e);
    let at = pair_elements(i);
    let pair = vec2(qkv[head + at.x], qkv[head + at.y]){% if qk_norm %} * vec2(norm[weight + at.x], norm[weight + at.y]){% endif %};
    let both = rotate(pair, i, row);
    return select(both.y, both.x, e == at.x);
}

{% set n_gate = n_head if gated else 0 %}
// Index in `qkv` of the head of item `item` of a workgroup: its query heads, its key head, its value head.
fn head_start(token: u32, kv_head: u32, block: u32, item: u32) -> u32 {
    var head = kv_head * GROUP + min(block * HEADS + item, GROUP - 1u);
    if item >= HEADS { head = N_HEAD + kv_head + (item - HEADS) * N_HEAD_KV; }
    return token * {{ qkv_row }}u + ({{ n_gate }}u + head) * HEAD_DIM;
}

@compute @workgroup_size({{ threads }})
fn main(
    @builtin(local_invocation_index) tid: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
) {
    let kv_head = group.x / BLOCKS;
    let block = group.x % BLOCKS;
    let token = group.z;
    let pos = token_pos(token);
    let seq = token_seq(token);
    let rope_row = token_rope_row(token);
    // Positions of the split that the token attends to: first..=last of start..start + SPLIT.
    let start = group.y * SPLIT;
{% if window > 0 %}
    let first = max(start, max(pos + 1u, {{ window }}u) - {{ window }}u);
{% else %}
    let first = start;
{% endif %}
    let last = min(pos, start + (SPLIT - 1u));
    if first > last || pos >= N_CTX { return; }
    // The token's own row is being written by some workgroup, and rows after it are undefined: the new key and value are
    // used for all of them, with weight zero where they are not attended to.
    let last_cached = max(min(last, max(pos, 1u) - 1u), start);
{% if window > 0 %}
    // There may be no pages before the first position attended to.
    let first_cached = min(first, last_cached);
{% endif %}
{% macro within(row) %}
{%- if window > 0 %}clamp({{ row }}, first_cached, last_cached){% else %}min({{ row }}, last_cached){% endif -%}
{% endmacro %}
    let own = cache_row(page_of(seq, pos), kv_head, pos);
    let cached = vec{{ pages }}<u32>(
{% for i in range(pages) %}
        cache_rows(seq, kv_head, {{ within("start + %du" | format(i * page)) }}),
{% endfor %}
    );

    let lane = tid % LANES;
    let key_row = start + tid / LANES;
    var key: array<Unit, {{ rows * units }}>;
{% set key_unit = "min(lane + {}u, KV_UNITS - 1u)" if units * lanes > kv_units else "lane + {}u" %}
{% macro read_keys(turn) %}
{% for r in range(rows) %}
    if {{ turn }}{{ r * keys_at_once }}u <= last - start {
        let at = {{ within("key_row + %s%du" | format(turn, r * keys_at_once)) }};
{% if keys_at_once == page %}
        let row = cached[{{ "turn * %du + " | format(rows) if turn }}{{ r }}u] + at * KV_UNITS;
{% else %}
        let row = cached[(at - start) / PAGE] + at * KV_UNITS;
{% endif %}
{% for u in range(units) %}
        key[{{ r * units + u }}] = keys[row + {{ key_unit | replace("{}", u * lanes) }}];
{% endfor %}
    }
{% endfor %}
{% endmacro %}
{{ read_keys("") }}
    let value_unit = tid % KV_UNITS;
    let value_group = tid / KV_UNITS;
    let value_row = start + value_group;
    var value: array<Unit, {{ values }}>;
{% macro read_values(chunk) %}
{% for first in range(0, values, 4) %}
    if {{ chunk }}{{ first * groups }}u <= last - start {
{% for i in range(first, [first + 4, values] | min) %}
        {
            let at = {{ within("value_row + %s%du" | format(chunk, i * groups)) }};
{% if groups * kv_units == threads and page % groups == 0 %}
            let rows = cached[{{ "(%s%du) / PAGE" | format(chunk, i * groups) if chunk else "%du" | format(i * groups // page) }}];
{% else %}
            let rows = cached[(at - start) / PAGE];
{% endif %}
            value[{{ i }}] = values[rows + at * KV_UNITS + value_unit];
        }
{% endfor %}
    }
{% endfor %}
{% endmacro %}
{{ read_values("") }}

{% if qk_norm %}
    for (var item = tid; item < {{ (heads + 1) * kv_units }}u; item += {{ threads }}u) {
        let head = head_start(token, kv_head, block, item / KV_UNITS);
        var total = 0.0;
        for (var e = item % KV_UNITS * 4u; e < min(item % KV_UNITS * 4u + 4u, HEAD_DIM); e++) { total += qkv[head + e] * qkv[head + e]; }
        squares[item] = total;
    }
    workgroupBarrier();
{% endif %}
    for (var item = tid; item < {{ (heads + 2) * kv_units }}u; item += {{ threads }}u) {
        let which = item / KV_UNITS;
        let unit = item % KV_UNITS;
        let head = head_start(token, kv_head, block, which);
        var x = vec4<f32>();
{% for e in range(4) %}
{% if head_dim % 4 != 0 %}
        if 4u * unit + {{ e }}u < HEAD_DIM {
{% else %}
        {
{% endif %}
            let e = 4u * unit + {{ e }}u;
            if which <= HEADS { x.{{ part[e] }} = turned(head, select(HEAD_DIM, 0u, which < HEADS), e, rope_row); } else { x.{{ part[e] }} = qkv[head + e]; }
        }
{% endfor %}
{% if qk_norm %}
        if which <= HEADS {
            var total = 0.0;
            for (var u = 0u; u < KV_UNITS; u++) { total += squares[which * KV_UNITS + u]; }
            x *= inverseSqrt(total / f32(HEAD_DIM) + {{ eps }});
        }
{% endif %}
        if which < HEADS {
            queries[which * {{ units * lanes }}u + unit] = x * {{ scale }};
        } else if which == HEADS {
            new_key[unit] = pack_unit(x);
        } else {
            new_value[unit] = pack_unit(x);
        }
    }
{% if units * lanes > kv_units %}
    if tid < {{ (units * lanes - kv_units) * heads }}u {
        queries[tid / {{ units * lanes - kv_units }}u * {{ units * lanes }}u + KV_UNITS + tid % {{ units * lanes - kv_units }}u] = vec4<f32>();
    }
{% endif %}
    workgroupBarrier();

    if last == pos && block == 0u {
        for (var unit = tid; unit < 2u * KV_UNITS; unit += {{ threads }}u) {
            if unit < KV_UNITS {
                keys[own + unit] = new_key[unit];
            } else {
                values[own + unit - KV_UNITS] = new_value[unit - KV_UNITS];
            }
        }
    }

{% set held = heads * units <= 16 %}
{% if held %}
{% for h in range(heads) %}
{% for u in range(units) %}
    let query_{{ h }}_{{ u }} = queries[lane + {{ (h * units + u) * lanes }}u];
{% endfor %}
{% endfor %}
{% endif %}
{% macro query(h, u) %}
{% if held %}query_{{ h }}_{{ u }}{% else %}queries[lane + {{ (h * units + u) * lanes }}u]{% endif %}
{% endmacro %}
    var largest = Heads(NEVER);
{% if turns > 1 %}
    for (var turn = 0u; turn * {{ rows * keys_at_once }}u <= last - start; turn++) {
        if turn > 0u {
{{ read_keys(turn) }}
        }
{% else %}
    {
{% endif %}
{% for r in range(rows) %}
        if {{ turn }}{{ r * keys_at_once }}u <= last - start {
            let row = key_row + {{ turn }}{{ r * keys_at_once }}u;
            if row >= pos {
{% for u in range(units) %}
                key[{{ r * units + u }}] = new_key[{{ key_unit | replace("{}", u * lanes) }}];
{% endfor %}
            }
            var score = Heads();
{% for u in range(units) %}
            let k_{{ u }} = unpack_unit(key[{{ r * units + u }}]);
{% for h in range(heads) %}
            {{ of("score", h) }} += dot(k_{{ u }}, {{ query(h, u) }});
{% endfor %}
{% endfor %}
{% if lanes == 4 %}
            score += subgroupShuffleXor(score, 1u);
            score += subgroupShuffleXor(score, 2u);
{% endif %}
{% if cap %}
            // Beyond 15 tanh is 1; the bound avoids a division of infinities.
            score = {{ soft_cap }} * tanh(clamp(score / {{ soft_cap }}, Heads(-15.0), Heads(15.0)));
{% endif %}
            if row >= first && row <= last { largest = max(largest, score); }
            if lane == 0u && row - start < SPLIT { weights[row - start] = score; }
        }
{% endfor %}
    }
{% if together > 1 %}
{% for mask in [64, 32, 16, 8, 4, 2, 1] if mask < together %}
    largest = max(largest, subgroupShuffleXor(largest, {{ mask }}u));
{% endfor %}
    if tid % {{ together }}u == 0u { scratch[tid / {{ together }}u] = largest; }
    workgroupBarrier();
    largest = scratch[0];
    for (var i = 1u; i < {{ reduced }}u; i++) { largest = max(largest, scratch[i]); }
{% else %}
    scratch[tid] = largest;
    for (var half = {{ threads // 2 }}u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if tid < half { scratch[tid] = max(scratch[tid], scratch[tid + half]); }
    }
    workgroupBarrier();
    largest = scratch[0];
{% endif %}

{% if sinks %}
    // The sink: a score without a value, which only the split of the token itself counts.
    let head = kv_head * GROUP + block * HEADS;
    let sink = Heads({% for h in range(heads) %}of_heads[min(head + {{ h }}u, N_HEAD - 1u)].x{{ ", " if not loop.last }}{% endfor %});
    if last == pos { largest = max(largest, sink); }
{% endif %}
    var total = Heads();
    for (var row = tid; row < SPLIT; row += {{ threads }}u) {
        var weight = Heads();
        if start + row >= first && start + row <= last { weight = exp(weights[row] - largest); }
        weights[row] = weight;
        total += weight;
    }
{% if together > 1 %}
{% for mask in [64, 32, 16, 8, 4, 2, 1] if mask < together %}
    total += subgroupShuffleXor(total, {{ mask }}u);
{% endfor %}
    if tid % {{ together }}u == 0u { scratch_sum[tid / {{ together }}u] = total; }
    workgroupBarrier();
    total = scratch_sum[0];
    for (var i = 1u; i < {{ reduced }}u; i++) { total += scratch_sum[i]; }
{% else %}
    scratch_sum[tid] = total;
    for (var half = {{ threads // 2 }}u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if tid < half { scratch_sum[tid] += scratch_sum[tid + half]; }
    }
    workgroupBarrier();
    total = scratch_sum[0];
{% endif %}

{% if sinks %}
    if last == pos { total += exp(sink - largest); }
{% endif %}
{% for h in range(heads) %}
    var sum_{{ h }} = vec4<f32>();
{% endfor %}
{% if chunks > 1 %}
    for (var chunk = 0u; chunk * {{ values * groups }}u <= last - start; chunk++) {
        if chunk > 0u {
{{ read_values(chunk) }}
        }
{% else %}
    {
{% endif %}
{% for first in range(0, values, 4) %}
        if {{ chunk }}{{ first * groups }}u <= last - start {
{% for i in range(first, [first + 4, values] | min) %}
            {
                let row = value_group + {{ chunk }}{{ i * groups }}u;
                if start + row >= pos { value[{{ i }}] = new_value[value_unit]; }
                let v = unpack_unit(value[{{ i }}]);
{% if chunks * values * groups > split or groups * kv_units < threads %}
                let weight = select(Heads(), weights[min(row, SPLIT - 1u)], row < SPLIT);
{% else %}
                let weight = weights[row];
{% endif %}
{% for h in range(heads) %}
                sum_{{ h }} += {{ of("weight", h) }} * v;
{% endfor %}
            }
{% endfor %}
        }
{% endfor %}
    }
    // The upper half of the groups passes its sums to the lower half, which stores the sums of both.
    let slot = tid % {{ groups // 2 * kv_units }}u;
    if tid >= {{ groups // 2 * kv_units }}u && tid < {{ groups * kv_units }}u {
{% for h in range(heads) %}
        sums[{{ h * (groups // 2) * kv_units }}u + slot] = sum_{{ h }};
{% endfor %}
    }
    workgroupBarrier();
    if tid < {{ groups // 2 * kv_units }}u {
{% for h in range(heads) %}
        sums[{{ h * (groups // 2) * kv_units }}u + slot] += sum_{{ h }};
{% endfor %}
    }
    workgroupBarrier();

    for (var i = tid; i < HEADS * HEAD_DIM; i += {{ threads }}u) {
        let h = i / HEAD_DIM;
        let e = i % HEAD_DIM;
        if block * HEADS + h >= GROUP { break; }
        let head = kv_head * GROUP + block * HEADS + h;
        var sum = 0.0;
        for (var g = 0u; g < {{ groups // 2 }}u; g++) { sum += sums[(h * {{ groups // 2 }}u + g) * KV_UNITS + e / 4u][e % 4u]; }
        let head_total = {% if heads == 1 %}total{% else %}total[h]{% endif %};
        if grid.y == 1u {
{% if gated %}
            let gate = qkv[(token * (2u * N_HEAD + 2u * N_HEAD_KV) + head) * HEAD_DIM + e];
            attention_out[(token * N_HEAD + head) * HEAD_DIM + e] = sum / (head_total * (1.0 + exp(min(-gate, 80.0))));
{% else %}
            attention_out[(token * N_HEAD + head) * HEAD_DIM + e] = sum / head_total;
{% endif %}
        } else {
            let to = ((group.y * n_tokens() + token) * N_HEAD + head) * (HEAD_DIM + 2u);
            partial[to + e] = sum;
            if e == 0u {
                partial[to + HEAD_DIM] = {% if heads == 1 %}largest{% else %}largest[h]{% endif %};
                partial[to + HEAD_DIM + 1u] = head_total;
            }
        }
    }
}
