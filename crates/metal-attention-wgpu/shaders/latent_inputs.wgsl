// The rotated parts of latent attention{{ "" if turned else ", here without rotation" }}: the ends of queries, which are written to `queries`; and the compressed row
// with its norm and the shared key, which are appended to the KV cache. One workgroup for each query head, and one for the row.
// Bounds: tokens are those of the batch, which `q`, `kv` and `queries` hold (`Dispatch`); elements are compared with RANK
// and {{ "HALF_ROT" if turned else "N_ROT" }}, indices with N_CTX, pages come from the page table (kv_cache.wgsl). Loops count to constants.
{% set threads = 128 %}
{% set key_dim = rank + n_rot %}
@group(0) @binding(0) var<storage, read> q: array<f32>; // [n_tokens, N_HEAD, NOPE + N_ROT]
@group(0) @binding(1) var<storage, read> kv: array<f32>; // [n_tokens, RANK + N_ROT]
@group(0) @binding(2) var<storage, read> weight: array<f32>; // of the row's norm, [RANK]
@group(0) @binding(3) var<storage, read_write> queries: array<f32>; // [n_tokens, N_HEAD, RANK + N_ROT]
@group(0) @binding(4) var<storage, read_write> keys: array<Unit>;
@group(0) @binding(5) var<storage, read_write> values: array<Unit>;
{% set batch_binding = 6 %}
{% include "batch.wgsl" %}
{% if turned %}
{% set head_dim = n_rot %}
{% set rope_binding = 7 %}
{% include "rope.wgsl" %}
{% endif %}
{% set head_dim = 4 %}
{% include "kv_cache.wgsl" %}
{% include "reduce.wgsl" %}
const N_HEAD: u32 = {{ n_head }}u;
const NOPE: u32 = {{ n_nope }}u;
const N_ROT: u32 = {{ n_rot }}u;
const RANK: u32 = {{ rank }}u;
const KEY_DIM: u32 = RANK + N_ROT;
const KEY_UNITS: u32 = {{ (key_dim + 3) // 4 }}u;
const VALUE_UNITS: u32 = {{ (rank + 3) // 4 }}u;

// The finished key, padded with zeros to whole units of four.
var<workgroup> key: array<f32, {{ (key_dim + 3) // 4 * 4 }}>;

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let token = group.y;
    let pos = token_pos(token);
{% if turned %}
    let rope_row = token_rope_row(token);
{% endif %}
    if group.x < N_HEAD {
        let start = (token * N_HEAD + group.x) * (NOPE + N_ROT) + NOPE;
        let to = (token * N_HEAD + group.x) * KEY_DIM + RANK;
{% if turned %}
        for (var i = tid; i < HALF_ROT && pos < N_CTX; i += {{ threads }}u) {
            let e = pair_elements(i);
            let turned = rotate(vec2(q[start + e.x], q[start + e.y]), i, rope_row);
            queries[to + e.x] = turned.x;
            queries[to + e.y] = turned.y;
        }
{% else %}
        for (var e = tid; e < N_ROT; e += {{ threads }}u) { queries[to + e] = q[start + e]; }
{% endif %}
        return;
    }
    let row = token * KEY_DIM;
    var squares = 0.0;
    for (var e = tid; e < RANK; e += {{ threads }}u) { squares += kv[row + e] * kv[row + e]; }
    let factor = inverseSqrt(workgroup_sum(squares, tid) / f32(RANK) + {{ eps }});
    for (var e = tid; e < RANK; e += {{ threads }}u) { key[e] = kv[row + e] * factor * weight[e]; }
    if tid < {{ (key_dim + 3) // 4 * 4 - key_dim }}u { key[KEY_DIM + tid] = 0.0; }
{% if turned %}
    for (var i = tid; i < HALF_ROT && pos < N_CTX; i += {{ threads }}u) {
        let e = pair_elements(i);
        let turned = rotate(vec2(kv[row + RANK + e.x], kv[row + RANK + e.y]), i, rope_row);
        key[RANK + e.x] = turned.x;
        key[RANK + e.y] = turned.y;
    }
{% else %}
    for (var e = tid; e < N_ROT; e += {{ threads }}u) { key[RANK + e] = kv[row + RANK + e]; }
{% endif %}
    workgroupBarrier();
    if pos >= N_CTX { return; }
    // With KV_UNITS of 1.
    let cached = cache_row(page_of(token_seq(token), pos), 0u, pos);
    for (var unit = tid; unit < KEY_UNITS; unit += {{ threads }}u) {
        keys[cached * KEY_UNITS + unit] = pack_unit(vec4(key[4u * unit], key[4u * unit + 1u], key[4u * unit + 2u], key[4u * unit + 3u]));
    }
    for (var unit = tid; unit < VALUE_UNITS; unit += {{ threads }}u) {
        var v = vec4<f32>();
        for (var e = 0u; e < 4u; e++) {
            if 4u * unit + e < RANK { v[e] = key[4u * unit + e]; }
        }
        values[cached * VALUE_UNITS + unit] = pack_unit(v);
    }
}
