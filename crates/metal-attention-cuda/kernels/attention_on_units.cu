// attention.cu on the tensor cores, for an F16 cache. The rows of a product are up to eight query heads of a KV head, each
// split into two F16 parts (high and low), so that the result is as exact as in F32; its columns are positions. Each warp has
// 16 positions of every page, with its own largest score and sums, and needs no barrier until all warps are merged at the end.
#define TEMPLATES_ALONE
#include "attention.cu"

// Positions of a warp in each page; warps and query heads of a block; pages in flight.
constexpr int POSITIONS = 16, WARPS = THREADS / 32, HEADS = 8, STAGES = 2;
static_assert(WARPS * POSITIONS == PAGE, "a page for all warps together");

// Splits two floats within the range of F16 into their F16 values `hi`, and the remainders times 2048 `lo`.
__device__ __forceinline__ void split_f32(float x, float y, u32& hi, u32& lo) {
    const half2 rounded = __floats2half2_rn(x, y);
    hi = bits(rounded), lo = bits(__floats2half2_rn((x - __low2float(rounded)) * 2048.0f, (y - __high2float(rounded)) * 2048.0f));
}

// Heads of up to 64 C elements.
template <int C, bool APPENDED> __device__ __forceinline__ void attend_on_units(const AttentionArgs& a, half* memory) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4, dim = a.head_dim, row = dim + 8;
    const u32 kv = blockIdx.x / a.n_chunks, chunk = blockIdx.x % a.n_chunks, split = blockIdx.y, token = blockIdx.z;
    const u32 heads_per_kv = a.n_head / a.n_head_kv, heads_per_block = (heads_per_kv + a.n_chunks - 1) / a.n_chunks;
    if (chunk * heads_per_block >= heads_per_kv) return;
    const u32 head = kv * heads_per_kv + chunk * heads_per_block, n_heads = min(heads_per_block, heads_per_kv - chunk * heads_per_block);
    // Otherwise tokens and pages are from an earlier launch than the previous one, as are all keys and values but the token's
    // own.
    if (APPENDED) wait_for_input();
    const Token info = a.tokens[token];
    const u32 last = APPENDED ? max(info.pos, info.last) : info.pos; // the last index that the token sees
    const SplitRange range = split_range<2>(a, info.pos, last, split);
    if (split >= range.n_splits) return;
    const bool has_new = !APPENDED && split == range.n_splits - 1;

    half* warp_memory = memory + warp * STAGES * 2 * POSITIONS * row;                // of this warp, [STAGES][keys, values][POSITIONS][row]
    float* q = (float*)(memory + WARPS * STAGES * 2 * POSITIONS * row);       // [HEADS][dim]
    float* new_kv = q + HEADS * dim;                                             // the token's new key, then its new value
    float* factors = new_kv + 2 * dim;                                           // [HEADS][32]
    __shared__ float norms[2][MAX_DIM];
    __shared__ float2 cos_sin[MAX_DIM / 2];
    __shared__ float downs[HEADS], warp_max_scores[WARPS][HEADS], warp_sums[WARPS][HEADS];

    const u32* pages = a.pages.pages + (size_t)info.seq * a.pages.n_pages;
    const u32 first = warp * POSITIONS; // the warp's first position in each page
    // The cache is undefined from this position on.
    const u32 end = last + (has_new ? 0 : 1);
    auto fetch = [&](u32 p) {
        if (p < range.end_page) {
            half* to = warp_memory + p % STAGES * 2 * POSITIONS * row;
            const size_t at = (((size_t)pages[p] * a.n_head_kv + kv) * PAGE + first) * dim;
            const int vectors = dim / 8;
            for (int i = lane; i < POSITIONS * vectors; i += 32) {
                const int of_row = i / vectors, vector = i % vectors * 8;
                const bool in_range = p * PAGE + first + of_row < end;
                copy16_or_zero(to + of_row * row + vector, (const half*)a.k_cache + at + of_row * dim + vector, in_range);
                copy16_or_zero(to + (POSITIONS + of_row) * row + vector, (const half*)a.v_cache + at + of_row * dim + vector, in_range);
            }
        }
        commit_copies();
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) fetch(range.first_page + i);
    if (!APPENDED) {
        if (a.inputs.norm == NORM_OF_HEAD)
            for (int i = tid; i < dim; i += THREADS) norms[0][i] = a.inputs.q_norm[i], norms[1][i] = a.inputs.k_norm[i];
        if (a.inputs.rotation != NO_ROPE)
            for (int i = tid; i < (int)a.inputs.n_rot / 2; i += THREADS) cos_sin[i] = a.inputs.rope[(size_t)info.rope_row * (a.inputs.n_rot / 2) + i];
        wait_for_input();
    }
    let_next_start();
    make_heads<half, APPENDED>(a, info, pages, kv, chunk == 0, head, n_heads, has_new, q, new_kv, norms, cos_sin);
    // Scales each query by a power of two that brings its largest element near 2^13. Elements below 2^-100 become zero.
    for (u32 h = warp; h < n_heads; h += WARPS) {
        __syncwarp();
        float largest = 0.0f;
        for (int i = lane; i < dim; i += 32) largest = fmaxf(largest, fabsf(q[h * dim + i]));
        const u32 biased = __float_as_uint(warp_max(largest)) >> 23, exponent = biased == 255 ? 140u : max(biased, 27u);
        const float up = __uint_as_float((267u - exponent) << 23);
        for (int i = lane; i < dim; i += 32) q[h * dim + i] *= up;
        if (lane == 0) downs[h] = __uint_as_float((exponent - 13u) << 23);
    }
    __syncthreads();
    // Rows g and g + 8 of the product: the high and the low part of head g.
    u32 query[4 * C][4];
#pragma unroll
    for (int s = 0; s < 4 * C; s++) {
        const bool in_range = g < (int)n_heads && 16 * s < dim;
        const float* from = q + g * dim + 16 * s + 2 * t;
        const float2 x = in_range ? *(const float2*)from : make_float2(0.0f, 0.0f), y = in_range ? *(const float2*)(from + 8) : make_float2(0.0f, 0.0f);
        split_f32(x.x, x.y, query[s][0], query[s][1]);
        split_f32(y.x, y.y, query[s][2], query[s][3]);
    }
    const float down = g < (int)n_heads ? downs[g] : 0.0f;

    float max_score = -INFINITY, sum = 0.0f; // of head g; `sum` is over the lane's own positions
    float acc[8 * C][4] = {};           // elements 8 i + 2 t and the next one of head g, high and low part
    for (u32 p = range.first_page; p < range.end_page; p++) {
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        half *keys = warp_memory + p % STAGES * 2 * POSITIONS * row, *values = keys + POSITIONS * row;
        const u32 pos = p * PAGE + first;
        if (pos <= last && pos + POSITIONS > range.begin) {
            if (has_new && info.pos - pos < POSITIONS) {
                const int at = (info.pos - pos) * row;
                for (int i = 2 * lane; i < dim; i += 64) {
                    *(half2*)(keys + at + i) = __floats2half2_rn(new_kv[i], new_kv[i + 1]);
                    *(half2*)(values + at + i) = __floats2half2_rn(new_kv[dim + i], new_kv[dim + i + 1]);
                }
                __syncwarp();
            }
            float scores[2][4] = {};
            const half* key = keys + (lane % 8 + lane / 16 * 8) * row + lane / 8 % 2 * 8;
#pragma unroll
            for (int s = 0; s < 4 * C; s++) {
                if (16 * s >= dim) break;
                u32 b[4];
                load_matrices(b, key + 16 * s);
#pragma unroll
                for (int n = 0; n < 2; n++) mma(scores[n], query[s][0], query[s][1], query[s][2], query[s][3], b[2 * n], b[2 * n + 1]);
            }
            // Scores of positions 8 n + 2 t + j.
            float x[2][2], above = max_score;
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float v = (scores[n][j] + scores[n][2 + j] * (1.0f / 2048.0f)) * down;
                    if (a.soft_cap != 0.0f) v = a.soft_cap * tanhf(v / a.soft_cap);
                    const u32 at = pos + 8 * n + 2 * t + j;
                    x[n][j] = at >= range.begin && at <= last ? v : -INFINITY;
                    above = fmaxf(above, x[n][j]);
                }
#pragma unroll
            for (int d = 1; d < 4; d *= 2) above = fmaxf(above, __shfl_xor_sync(~0u, above, d));
            const float base = above == -INFINITY ? 0.0f : above, factor = __expf(max_score - base);
            max_score = above, sum *= factor;
            u32 weights[4];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float w0 = __expf(x[n][0] - base), w1 = __expf(x[n][1] - base);
                sum += w0 + w1;
                split_f32(w0, w1, weights[2 * n], weights[2 * n + 1]);
            }
            const half* value = values + (lane % 8 + lane / 8 % 2 * 8) * row + lane / 16 * 8;
#pragma unroll
            for (int s = 0; s < 4 * C; s++) {
                if (16 * s >= dim) break;
                u32 b[4];
                load_matrices_transposed(b, value + 16 * s);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    float(&c)[4] = acc[2 * s + n];
#pragma unroll
                    for (int i = 0; i < 4; i++) c[i] *= factor;
                    mma(c, weights[0], weights[1], weights[2], weights[3], b[2 * n], b[2 * n + 1]);
                }
            }
            __syncwarp();
        }
        fetch(p + STAGES);
    }
    wait_for_copies<0>();
    __syncthreads();

    // Merges the warps: [warp][head][dim], in the memory of keys and values.
    float* joined = (float*)memory;
#pragma unroll
    for (int d = 1; d < 4; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (g < (int)n_heads) {
        if (t == 0) warp_max_scores[warp][g] = max_score, warp_sums[warp][g] = sum;
#pragma unroll
        for (int i = 0; i < 8 * C; i++)
            if (8 * i < dim)
                *(float2*)(joined + (warp * HEADS + g) * dim + 8 * i + 2 * t) =
                    make_float2(acc[i][0] + acc[i][2] * (1.0f / 2048.0f), acc[i][1] + acc[i][3] * (1.0f / 2048.0f));
    }
    __syncthreads();
    for (int i = tid; i < (int)n_heads * dim / 2; i += THREADS) {
        const int h = i / (dim / 2), d = i % (dim / 2) * 2;
        float above = -INFINITY, all = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) above = fmaxf(above, warp_max_scores[w][h]);
        float2 v = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float factor = above == -INFINITY ? 0.0f : __expf(warp_max_scores[w][h] - above);
            const float2 partial = *(const float2*)(joined + (w * HEADS + h) * dim + d);
            v.x += factor * partial.x, v.y += factor * partial.y, all += factor * warp_sums[w][h];
        }
        write_split(a, token, head + h, split, range.n_splits, d, v, above, all);
    }
    join_splits(a, token, head, n_heads, range.n_splits, factors);
}

#define ON_UNITS(NAME, C, APPENDED)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ AttentionArgs a) {                \
        attend_on_units<C, APPENDED>(a, (half*)attention_memory);                                                        \
    }
ON_UNITS(attention_on_units_64, 1, false)
ON_UNITS(attention_on_units_128, 2, false)
ON_UNITS(attention_appended_on_units_64, 1, true)
ON_UNITS(attention_appended_on_units_128, 2, true)
