// The same as attention.cu on the tensor cores, where the cache is in F16: rows of a product are up to eight queries of a KV head in
// two F16 parts each, as exact as in F32, its columns positions. Each warp of a block has sixteen positions of every page, a maximum
// and sums of its own, and nobody to wait for until all of them meet at the end.
#define TEMPLATES_ALONE
#include "attention.cu"

constexpr int POSITIONS = 16, WARPS = THREADS / 32, HEADS = 8, STAGES = 2;
static_assert(WARPS * POSITIONS == PAGE, "a page a turn");

// hi, and lo * 2048, of two numbers that F16 has room for.
__device__ __forceinline__ void in_two_parts(float x, float y, u32& hi, u32& lo) {
    const half2 of = __floats2half2_rn(x, y);
    hi = bits(of), lo = bits(__floats2half2_rn((x - __low2float(of)) * 2048.0f, (y - __high2float(of)) * 2048.0f));
}

// Heads of up to 64 C elements.
template <int C, bool APPENDED> __device__ __forceinline__ void attend_on_units(const AttentionArgs& a, half* memory) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4, dim = a.head_dim, row = dim + 8;
    const u32 kv = blockIdx.x / a.n_chunks, chunk = blockIdx.x % a.n_chunks, split = blockIdx.y, token = blockIdx.z;
    const u32 of_kv = a.n_head / a.n_kv_head, each = (of_kv + a.n_chunks - 1) / a.n_chunks;
    if (chunk * each >= of_kv) return;
    const u32 head = kv * of_kv + chunk * each, n_heads = min(each, of_kv - chunk * each);
    // Of a step before, as are all tokens of the cache but the last.
    if (APPENDED) wait_for_input();
    const Token of = a.tokens[token];
    const Share share = share_of<2>(a, of.pos, split);
    if (split >= share.n_splits) return;
    const bool has_own = !APPENDED && split == share.n_splits - 1;

    half* mine = memory + warp * STAGES * 2 * POSITIONS * row;                // [STAGES][keys, values][POSITIONS][row]
    float* q = (float*)(memory + WARPS * STAGES * 2 * POSITIONS * row);       // [HEADS][dim]
    float* own = q + HEADS * dim;                                             // the token's key, then its value
    float* factors = own + 2 * dim;                                           // [HEADS][32]
    __shared__ float norms[2][MAX_DIM];
    __shared__ float2 turns[MAX_DIM / 2];
    __shared__ float downs[HEADS], most_of[WARPS][HEADS], sum_of[WARPS][HEADS];

    const u32* pages = a.pages.pages + (size_t)of.seq * a.pages.n_pages;
    const u32 first = warp * POSITIONS; // of each page
    // Nobody has written the positions from here on.
    const u32 end = of.pos + (has_own ? 0 : 1);
    auto ask = [&](u32 p) {
        if (p < share.end_page) {
            half* to = mine + p % STAGES * 2 * POSITIONS * row;
            const size_t at = (((size_t)pages[p] * a.n_kv_head + kv) * PAGE + first) * dim;
            const int pieces = dim / 8;
            for (int i = lane; i < POSITIONS * pieces; i += 32) {
                const int of_row = i / pieces, piece = i % pieces * 8;
                const bool there = p * PAGE + first + of_row < end;
                copy16_or_zero(to + of_row * row + piece, (const half*)a.k_cache + at + of_row * dim + piece, there);
                copy16_or_zero(to + (POSITIONS + of_row) * row + piece, (const half*)a.v_cache + at + of_row * dim + piece, there);
            }
        }
        commit_copies();
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) ask(share.first_page + i);
    if (!APPENDED) {
        if (a.inputs.norm == NORM_OF_HEAD)
            for (int i = tid; i < dim; i += THREADS) norms[0][i] = a.inputs.q_norm[i], norms[1][i] = a.inputs.k_norm[i];
        if (a.inputs.rotation != NO_ROPE)
            for (int i = tid; i < (int)a.inputs.n_rot / 2; i += THREADS) turns[i] = a.inputs.rope[(size_t)of.pos * (a.inputs.n_rot / 2) + i];
        wait_for_input();
    }
    let_next_start();
    make_heads<half, APPENDED>(a, of, pages, kv, chunk == 0, head, n_heads, has_own, q, own, norms, turns);
    // Queries are multiplied by a power of two that brings the largest element near 2^13; what is below 2^-100 is nothing.
    for (u32 h = warp; h < n_heads; h += WARPS) {
        __syncwarp();
        float most = 0.0f;
        for (int i = lane; i < dim; i += 32) most = fmaxf(most, fabsf(q[h * dim + i]));
        const u32 biased = __float_as_uint(warp_max(most)) >> 23, exponent = biased == 255 ? 140u : max(biased, 27u);
        const float up = __uint_as_float((267u - exponent) << 23);
        for (int i = lane; i < dim; i += 32) q[h * dim + i] *= up;
        if (lane == 0) downs[h] = __uint_as_float((exponent - 13u) << 23);
    }
    __syncthreads();
    // Rows g and g + 8 of a product: both parts of head g.
    u32 query[4 * C][4];
#pragma unroll
    for (int s = 0; s < 4 * C; s++) {
        const bool there = g < (int)n_heads && 16 * s < dim;
        const float* from = q + g * dim + 16 * s + 2 * t;
        const float2 x = there ? *(const float2*)from : make_float2(0.0f, 0.0f), y = there ? *(const float2*)(from + 8) : make_float2(0.0f, 0.0f);
        in_two_parts(x.x, x.y, query[s][0], query[s][1]);
        in_two_parts(y.x, y.y, query[s][2], query[s][3]);
    }
    const float down = g < (int)n_heads ? downs[g] : 0.0f;

    float most = -INFINITY, sum = 0.0f; // of head g; the sum of the lane's own positions
    float acc[8 * C][4] = {};           // elements 8 i + 2 t and on of head g, both parts
    for (u32 p = share.first_page; p < share.end_page; p++) {
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        half *keys = mine + p % STAGES * 2 * POSITIONS * row, *values = keys + POSITIONS * row;
        const u32 pos = p * PAGE + first;
        if (pos <= of.pos && pos + POSITIONS > share.begin) {
            if (has_own && of.pos - pos < POSITIONS) {
                const int at = (of.pos - pos) * row;
                for (int i = 2 * lane; i < dim; i += 64) {
                    *(half2*)(keys + at + i) = __floats2half2_rn(own[i], own[i + 1]);
                    *(half2*)(values + at + i) = __floats2half2_rn(own[dim + i], own[dim + i + 1]);
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
            // Positions 8 n + 2 t + j.
            float x[2][2], above = most;
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float v = (scores[n][j] + scores[n][2 + j] * (1.0f / 2048.0f)) * down;
                    if (a.soft_cap != 0.0f) v = a.soft_cap * tanhf(v / a.soft_cap);
                    const u32 at = pos + 8 * n + 2 * t + j;
                    x[n][j] = at >= share.begin && at <= of.pos ? v : -INFINITY;
                    above = fmaxf(above, x[n][j]);
                }
#pragma unroll
            for (int d = 1; d < 4; d *= 2) above = fmaxf(above, __shfl_xor_sync(~0u, above, d));
            const float base = above == -INFINITY ? 0.0f : above, factor = __expf(most - base);
            most = above, sum *= factor;
            u32 weights[4];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float w0 = __expf(x[n][0] - base), w1 = __expf(x[n][1] - base);
                sum += w0 + w1;
                in_two_parts(w0, w1, weights[2 * n], weights[2 * n + 1]);
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
        ask(p + STAGES);
    }
    wait_for_copies<0>();
    __syncthreads();

    // Warps meet: [warp][head][dim], in the place of keys and values.
    float* joined = (float*)memory;
#pragma unroll
    for (int d = 1; d < 4; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (g < (int)n_heads) {
        if (t == 0) most_of[warp][g] = most, sum_of[warp][g] = sum;
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
        for (int w = 0; w < WARPS; w++) above = fmaxf(above, most_of[w][h]);
        float2 v = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float factor = above == -INFINITY ? 0.0f : __expf(most_of[w][h] - above);
            const float2 more = *(const float2*)(joined + (w * HEADS + h) * dim + d);
            v.x += factor * more.x, v.y += factor * more.y, all += factor * sum_of[w][h];
        }
        write_split(a, token, head + h, split, share.n_splits, d, v, above, all);
    }
    join_splits(a, token, head, n_heads, share.n_splits, factors);
}

#define ON_UNITS(NAME, C, APPENDED)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ AttentionArgs a) {                \
        attend_on_units<C, APPENDED>(a, (half*)attention_memory);                                                        \
    }
ON_UNITS(attention_on_units_64, 1, false)
ON_UNITS(attention_on_units_128, 2, false)
ON_UNITS(attention_appended_on_units_64, 1, true)
ON_UNITS(attention_appended_on_units_128, 2, true)
