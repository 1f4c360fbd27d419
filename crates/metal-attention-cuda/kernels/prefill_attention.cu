// Attention of several consecutive tokens of a sequence, on the tensor cores in F16 with F32 sums and online softmax
// (FlashAttention-2, arXiv 2307.08691). The cache already has the tokens' keys and values, and the queries are ready. The result is
// packed F16, as the output product reads it.
//
// prefill_attention_*: a block takes 64 queries of one head (a query tile) through the KV pages of their sequence.
// verify_attention_*: for a few tokens, as where drafts are verified. A block takes up to 16 tokens and four heads of one KV head, a head for
// each warp, through some of the pages (split-KV). The last block of a tile and a group of heads merges the partial results.
#include "heads.cuh"
#include "masks.cuh"

// Consecutive tokens of one sequence, which are consecutive in the micro-batch, too. Either none sees later tokens, or all have the same `Token::last`.
struct QueryTile {
    u32 token, n, seq, pos; // the first token in the micro-batch, tokens, sequence, the first token's index in it
    u32 last;               // `Token::last` of all; under a causal mask at most `pos` where they see no later tokens
};
ASSERT_LAYOUT(QueryTile);

struct PrefillArgs {
    const QueryTile* tiles;                       // [gridDim.x]
    Pages pages;                                  // page tables of the layer's cache group
    const half* k_cache;                          // [page][KV head][64][D]
    const half* v_cache;                          // the same for values
    const float* qkv;                             // [n_tokens][stride]
    half* packed;                                 // packed [n_tokens][n_head * D]
    const float* sinks;                           // [n_head], or null
    u32 n_head, n_head_kv, stride, n_token_tiles; // query heads, KV heads, elements of a row of qkv, tiles of `packed`
    u32 mask, reach;                              // Mask (masks.cuh), and its number of positions
    float soft_cap;                               // 0: none
    u32 n_splits;                                 // verify_attention: most blocks that share the pages, at most 32
    float* partial;                               // [n_tokens][n_head][n_splits][D + 2]: weighted sum, largest score, sum of weights
    u32* tickets;                                 // counters [gridDim.x][gridDim.y], zero between launches
    ResultGate gate;
};
ASSERT_LAYOUT(PrefillArgs);

SHARED_MEMORY(16, half, prefill_memory);

// Not inlined, so that it takes no registers in models without a soft cap.
__device__ __noinline__ float capped(float v, float cap) { return cap * tanhf(v / cap); }
__device__ __forceinline__ void cap_scores(float (&score)[8][4], float cap) {
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) score[j][i] = capped(score[j][i], cap);
}

// Tokens and heads of a block of verify_attention.
constexpr u32 VERIFIED_HEADS = 4;
// Up to this many pages are not split, since merging costs more.
constexpr u32 WHOLE_PAGES = 2;

// Merges the splits' partial results of a warp's head, in the last block to finish; the others return.
template <int D> __device__ __forceinline__ void merge_splits(const PrefillArgs& a, const QueryTile& tile, u32 head, bool exists, u32 n_splits) {
    __shared__ bool is_last;
    const int lane = threadIdx.x % 32;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* ticket = a.tickets + blockIdx.x * gridDim.y + blockIdx.y;
        is_last = atomicAdd(ticket, 1u) == n_splits - 1;
        if (is_last) *ticket = 0;
    }
    __syncthreads();
    if (!is_last || !exists) return;
    __threadfence();
    const float sink = a.sinks ? a.sinks[head] : -INFINITY;
    for (u32 token = tile.token; token < tile.token + tile.n; token++) {
        const float* from = a.partial + (size_t)(token * a.n_head + head) * a.n_splits * (D + 2);
        // A lane for each split.
        float2 of_split = make_float2(-INFINITY, 0.0f);
        if (lane < (int)n_splits) of_split = __ldcg((const float2*)(from + lane * (D + 2) + D));
        const float max_score = fmaxf(sink, warp_max(of_split.x));
        float factor = __expf(of_split.x - max_score);
        factor /= warp_sum(factor * of_split.y) + (a.sinks ? __expf(sink - max_score) : 0.0f);
        float2 sums[(D + 63) / 64] = {};
#pragma unroll 8
        for (u32 split = 0; split < n_splits; split++) {
            const float w = __shfl_sync(~0u, factor, split);
#pragma unroll
            for (int i = 0; i < (D + 63) / 64; i++) {
                const int d = 64 * i + 2 * lane;
                if (d >= D) continue;
                const float2 part = __ldcg((const float2*)(from + split * (D + 2) + d));
                sums[i].x += w * part.x, sums[i].y += w * part.y;
            }
        }
#pragma unroll
        for (int i = 0; i < (D + 63) / 64; i++) {
            const u32 d = 64 * i + 2 * lane;
            if (d >= D) continue;
            if (a.gate.gates) sums[i].x = apply_gate(a.gate, token, head, d, sums[i].x), sums[i].y = apply_gate(a.gate, token, head, d + 1, sums[i].y);
            *(half2*)(a.packed + packed_input(token, head * D + d, a.n_token_tiles)) = __floats2half2_rn(sums[i].x, sums[i].y);
        }
    }
}

// One block: a query tile and a head of D elements, where each warp has 16 of the queries; VERIFY: up to 16 queries of some heads, one for each warp.
template <int D, bool VERIFY> __device__ __forceinline__ void attend(const PrefillArgs& a) {
    constexpr int ROW = D + 8; // of a page's row in shared memory, so that rows begin in different banks
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    wait_for_input();
    let_next_start();
    const QueryTile tile = a.tiles[blockIdx.x];
    const u32 heads_per_kv = a.n_head / a.n_head_kv, n_chunks = (heads_per_kv + VERIFIED_HEADS - 1) / VERIFIED_HEADS;
    const u32 of_kv = VERIFY ? blockIdx.y % n_chunks * VERIFIED_HEADS + warp : 0, kv = blockIdx.y / (VERIFY ? n_chunks : heads_per_kv);
    const u32 head = VERIFY ? kv * heads_per_kv + of_kv : blockIdx.y;
    const bool exists = !VERIFY || of_kv < heads_per_kv;
    const u32* pages = a.pages.pages + (size_t)tile.seq * a.pages.n_pages;
    u32 first_page = first_seen(a.mask, a.reach, tile.pos) / PAGE;
    const u32 last_pos = tile.pos + tile.n - 1;
    u32 end_page = (end_seen(a.mask, a.reach, last_pos, tile.last) - 1) / PAGE + 1, n_splits = 1;
    if (VERIFY) {
        const u32 n_pages = end_page - first_page, of_split = n_pages <= WHOLE_PAGES ? n_pages : (n_pages + a.n_splits - 1) / a.n_splits;
        n_splits = (n_pages + of_split - 1) / of_split;
        if (blockIdx.z >= n_splits) return;
        first_page += blockIdx.z * of_split;
        end_page = min(first_page + of_split, end_page);
    }
    // Pages that all queries of the tile, and those that would fill it up, see entirely.
    const u32 first_full = (first_seen(a.mask, a.reach, tile.pos + 63) + PAGE - 1) / PAGE;
    const u32 end_full = end_seen(a.mask, a.reach, tile.pos, tile.last) / PAGE;

    auto stage = [&](u32 page) {
        if (page < end_page) {
            const size_t base = ((size_t)pages[page] * a.n_head_kv + kv) * PAGE * D;
            half* to = prefill_memory + (page % 2) * 2 * PAGE * ROW;
            for (int i = tid; i < 2 * PAGE * D / 8; i += 128) {
                const int kv_half = i / (PAGE * D / 8), row = i % (PAGE * D / 8) / (D / 8), column = i % (D / 8) * 8;
                const half* from = (kv_half == 0 ? a.k_cache : a.v_cache) + base + row * D + column;
                copy16(to + (kv_half * PAGE + row) * ROW + column, from);
            }
        }
        commit_copies();
    };
    stage(first_page);

    u32 q[D / 16][4];
    const u32 row0 = (VERIFY ? 0 : warp * 16) + g;
#pragma unroll
    for (int s = 0; s < D / 16; s++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 row = row0 + 8 * (i % 2);
            const float* from = a.qkv + (size_t)(tile.token + row) * a.stride + head * D + 16 * s + 8 * (i / 2) + 2 * t;
            const float2 v = exists && row < tile.n ? *(const float2*)from : make_float2(0.0f, 0.0f);
            q[s][i] = bits(__floats2half2_rn(v.x, v.y));
        }
    float out[D / 8][4] = {};
    float max_score[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    for (u32 page = first_page; page < end_page; page++) {
        stage(page + 1);
        wait_for_copies<1>();
        __syncthreads();
        const half* keys = prefill_memory + (page % 2) * 2 * PAGE * ROW;
        const half* values = keys + PAGE * ROW;
        float score[8][4] = {};
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int s = 0; s < D / 16; s += 2) {
                u32 b[4];
                load_matrices(b, keys + (8 * j + lane % 8) * ROW + 16 * s + 8 * (lane / 8));
                mma(score[j], q[s][0], q[s][1], q[s][2], q[s][3], b[0], b[1]);
                mma(score[j], q[s + 1][0], q[s + 1][1], q[s + 1][2], q[s + 1][3], b[2], b[3]);
            }
        if (a.soft_cap != 0.0f) cap_scores(score, a.soft_cap);
        const bool seen_by_all = page >= first_full && page < end_full;
        if (!seen_by_all) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                // Position `at + 8 * j` of the page belongs to score[j][i].
                const u32 pos = tile.pos + row0 + 8 * (i / 2), at = page * PAGE + 2 * t + i % 2;
                const u32 begin = first_seen(a.mask, a.reach, pos), end = end_seen(a.mask, a.reach, pos, tile.last);
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (at + 8 * j >= end || at + 8 * j < begin) score[j][i] = -INFINITY;
            }
        }
        float larger[2] = {max_score[0], max_score[1]};
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) larger[i / 2] = fmaxf(larger[i / 2], score[j][i]);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            larger[r] = fmaxf(larger[r], __shfl_xor_sync(~0u, larger[r], 1));
            larger[r] = fmaxf(larger[r], __shfl_xor_sync(~0u, larger[r], 2));
            // A page in which a row sees nothing adds nothing to it.
            const float base = larger[r] == -INFINITY ? 0.0f : larger[r];
            const float factor = __expf(max_score[r] - base);
            max_score[r] = larger[r];
            sum[r] *= factor;
#pragma unroll
            for (int n = 0; n < D / 8; n++) out[n][2 * r] *= factor, out[n][2 * r + 1] *= factor;
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; i++) {
                    score[j][i] = __expf(score[j][i] - base);
                    sum[r] += score[j][i];
                }
        }
#pragma unroll
        for (int s = 0; s < 4; s++) {
            u32 p[4];
#pragma unroll
            for (int i = 0; i < 4; i++) p[i] = bits(__floats2half2_rn(score[2 * s + i / 2][2 * (i % 2)], score[2 * s + i / 2][2 * (i % 2) + 1]));
#pragma unroll
            for (int n = 0; n < D / 8; n += 2) {
                u32 b[4];
                load_matrices_transposed(b, values + (16 * s + lane % 8 + lane / 8 % 2 * 8) * ROW + 8 * n + lane / 16 * 8);
                mma(out[n], p[0], p[1], p[2], p[3], b[0], b[1]);
                mma(out[n + 1], p[0], p[1], p[2], p[3], b[2], b[3]);
            }
        }
        __syncthreads();
    }
    wait_for_copies<0>();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        const u32 row = row0 + 8 * r;
        if (VERIFY && n_splits > 1) {
            if (!exists || row >= tile.n) continue;
            float* to = a.partial + ((size_t)((tile.token + row) * a.n_head + head) * a.n_splits + blockIdx.z) * (D + 2);
#pragma unroll
            for (int n = 0; n < D / 8; n++) *(float2*)(to + 8 * n + 2 * t) = make_float2(out[n][2 * r], out[n][2 * r + 1]);
            if (t == 0) *(float2*)(to + D) = make_float2(max_score[r], sum[r]);
            continue;
        }
        float factor = 1.0f;
        if (a.sinks && exists) {
            const float larger = fmaxf(max_score[r], a.sinks[head]);
            factor = __expf(max_score[r] - larger);
            sum[r] = sum[r] * factor + __expf(a.sinks[head] - larger);
        }
        factor /= sum[r];
        if (!exists || row >= tile.n) continue;
        if (a.gate.gates) {
            // A loop of its own: inside the next one, code that is mostly skipped would be fetched for each element.
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                const u32 d = 8 * n + 2 * t, token = tile.token + row;
                out[n][2 * r] = apply_gate(a.gate, token, head, d, out[n][2 * r] * factor);
                out[n][2 * r + 1] = apply_gate(a.gate, token, head, d + 1, out[n][2 * r + 1] * factor);
            }
            factor = 1.0f;
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            const u32 k = head * D + 8 * n + 2 * t;
            *(half2*)(a.packed + packed_input(tile.token + row, k, a.n_token_tiles)) =
                __floats2half2_rn(out[n][2 * r] * factor, out[n][2 * r + 1] * factor);
        }
    }
    if (VERIFY && n_splits > 1) merge_splits<D>(a, tile, head, exists, n_splits);
}

#define ATTENTION(D)                                                                                                                              \
    extern "C" __global__ void __launch_bounds__(128) prefill_attention_##D(const __grid_constant__ PrefillArgs a) { attend<D, false>(a); }       \
    extern "C" __global__ void __launch_bounds__(128) verify_attention_##D(const __grid_constant__ PrefillArgs a) { attend<D, true>(a); }
ATTENTION(32)
ATTENTION(64)
ATTENTION(96)
ATTENTION(128)
ATTENTION(256)
