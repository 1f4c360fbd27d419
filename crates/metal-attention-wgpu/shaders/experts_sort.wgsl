// Sorts visits (a token at one of its experts) by expert, and divides them into tiles of {{ tokens }}, each of one expert. One
// workgroup. The order within an expert varies; no result depends on it.
// Bounds: experts are clamped to the last; visits are those of the batch, which the buffers hold (`Dispatch`), and an
// expert's section of `order` is as long as the number of its visits. There are never more tiles than `tiles` holds
// (`ExpertTiles::max_tiles`). Loops count to constants, to the visits, or to the tiles.
@group(0) @binding(0) var<storage, read> chosen: array<u32>;
@group(0) @binding(1) var<storage, read_write> order: array<u32>;
@group(0) @binding(2) var<storage, read_write> tiles: array<vec4<u32>>;
{% set batch_binding = 3 %}
{% include "batch.wgsl" %}
const N_EXPERT: u32 = {{ n_expert }}u;
const TOKENS: u32 = {{ tokens }}u;

// Visits of each expert; later the position in `order` of its next one.
var<workgroup> visits: array<atomic<u32>, {{ n_expert }}>;
// A copy without atomics, for reading.
var<workgroup> counts: array<u32, {{ n_expert }}>;

fn expert_of(visit: u32) -> u32 { return min(chosen[visit], N_EXPERT - 1u); }

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32) {
    let n_visits = n_tokens() * {{ n_used }}u;
    let most = min(n_visits, (n_visits + N_EXPERT * (TOKENS - 1u)) / TOKENS);
    for (var e = tid; e < N_EXPERT; e += {{ threads }}u) { atomicStore(&visits[e], 0u); }
    workgroupBarrier();
    for (var v = tid; v < n_visits; v += {{ threads }}u) { atomicAdd(&visits[expert_of(v)], 1u); }
    workgroupBarrier();
    for (var e = tid; e < N_EXPERT; e += {{ threads }}u) { counts[e] = atomicLoad(&visits[e]); }
    workgroupBarrier();
    for (var e = tid; e < N_EXPERT; e += {{ threads }}u) {
        var first = 0u;
        var tile = 0u;
        for (var before = 0u; before < e; before++) {
            first += counts[before];
            tile += (counts[before] + TOKENS - 1u) / TOKENS;
        }
        atomicStore(&visits[e], first);
        let end = first + counts[e];
        for (; first < end; first += TOKENS) {
            tiles[tile] = vec4(e, first, min(first + TOKENS, end), 0u);
            tile++;
        }
        if e == N_EXPERT - 1u {
            for (; tile < most; tile++) { tiles[tile] = vec4<u32>(); }
        }
    }
    workgroupBarrier();
    for (var v = tid; v < n_visits; v += {{ threads }}u) { order[atomicAdd(&visits[expert_of(v)], 1u)] = v; }
}
