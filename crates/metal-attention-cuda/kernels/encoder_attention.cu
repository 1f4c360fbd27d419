// Attention of encoders of pictures: without a mask, over rows of segments.
#include "encoder_units.cuh"

struct EncoderAttentionArgs {
    const float* q;           // [n_queries][width]
    const float* k;           // [n_keys][kv_width]
    const float* v;           // the same for values
    float* out;               // [n_queries][width]
    const EncoderTile* tiles; // [gridDim.x]
    u32 n_queries, n_keys;    // the rows that tiles refer to
    u32 width, kv_width;      // a multiple of head_dim each
    u32 head_dim;             // even
    float scale;              // factor on the scores
};
ASSERT_LAYOUT(EncoderAttentionArgs);

// The first element of this block's head in a row of keys: neighbouring heads of queries share one.
__device__ __forceinline__ u32 kv_column(const EncoderAttentionArgs& a) {
    return blockIdx.y * (a.kv_width / a.head_dim) / (a.width / a.head_dim) * a.head_dim;
}

SHARED_MEMORY(16, float, encoder_memory);

// Attention in F32, for heads of up to 256 elements. A block takes a tile of up to 32 queries and a head. Each warp
// has four queries, whose scores of 32 keys are in its lanes. Shared memory: queries [32][head_dim + 2], keys or values of the same
// shape, weights [32][32].
extern "C" __global__ void __launch_bounds__(256) encoder_attention(const __grid_constant__ EncoderAttentionArgs a) {
    constexpr u32 ROWS = 32, OF_WARP = 4, PARTS = 8;
    wait_for_input();
    let_next_start();
    const EncoderTile tile = a.tiles[blockIdx.x];
    const u32 lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * OF_WARP;
    const u32 dim = a.head_dim, stride = dim + 2, column = blockIdx.y * dim, of_keys = kv_column(a);
    float* queries = encoder_memory;
    float* staged = queries + ROWS * stride;
    float* weights = staged + ROWS * stride;
    // Copies n rows of a head, and zeros behind them.
    auto stage = [&](float* to, const float* from, u32 width, u32 n) {
        for (u32 i = threadIdx.x; i < ROWS * dim / 2; i += blockDim.x) {
            const u32 row = i / (dim / 2), pair = 2 * (i % (dim / 2));
            *(float2*)(to + row * stride + pair) = row < n ? *(const float2*)(from + (size_t)row * width + pair) : make_float2(0.0f, 0.0f);
        }
    };
    stage(queries, a.q + (size_t)tile.query * a.width + column, a.width, tile.n);
    float largest[OF_WARP], sum[OF_WARP], out[OF_WARP][PARTS] = {};
#pragma unroll
    for (u32 j = 0; j < OF_WARP; j++) largest[j] = -INFINITY, sum[j] = 0.0f;
    for (u32 first = 0; first < tile.n_keys; first += ROWS) {
        const u32 n = min(tile.n_keys - first, ROWS);
        const size_t from = (size_t)(tile.key + first) * a.kv_width + of_keys;
        stage(staged, a.k + from, a.kv_width, n);
        __syncthreads();
        float score[OF_WARP] = {};
#pragma unroll 4
        for (u32 i = 0; i < dim; i += 2) {
            const float2 k = *(const float2*)(staged + lane * stride + i);
#pragma unroll
            for (u32 j = 0; j < OF_WARP; j++) {
                const float2 q = *(const float2*)(queries + (row0 + j) * stride + i);
                score[j] += q.x * k.x, score[j] += q.y * k.y;
            }
        }
#pragma unroll
        for (u32 j = 0; j < OF_WARP; j++) {
            const float scaled = lane < n ? a.scale * score[j] : -INFINITY, now = fmaxf(largest[j], warp_max(scaled));
            const float factor = expf(largest[j] - now), weight = expf(scaled - now);
            largest[j] = now;
            sum[j] = sum[j] * factor + weight;
#pragma unroll
            for (u32 part = 0; part < PARTS; part++) out[j][part] *= factor;
            weights[(row0 + j) * ROWS + lane] = weight;
        }
        __syncthreads();
        stage(staged, a.v + from, a.kv_width, n);
        __syncthreads();
#pragma unroll
        for (u32 part = 0; part < PARTS; part++) {
            const u32 element = 32 * part + lane;
            if (element >= dim) break;
#pragma unroll 2
            for (u32 key = 0; key < ROWS; key += 4) {
                float v[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++) v[i] = staged[(key + i) * stride + element];
#pragma unroll
                for (u32 j = 0; j < OF_WARP; j++) {
                    const float4 w = *(const float4*)(weights + (row0 + j) * ROWS + key);
                    out[j][part] += w.x * v[0], out[j][part] += w.y * v[1], out[j][part] += w.z * v[2], out[j][part] += w.w * v[3];
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 j = 0; j < OF_WARP; j++) {
        const float factor = 1.0f / warp_sum(sum[j]);
        if (row0 + j >= tile.n) continue;
        float* to = a.out + (size_t)(tile.query + row0 + j) * a.width + column;
#pragma unroll
        for (u32 part = 0; part < PARTS; part++)
            if (32 * part + lane < dim) to[32 * part + lane] = out[j][part] * factor;
    }
}

// Keys and values as F16, [head][n_keys][padded]. A thread: two elements of a row of keys and of values.
extern "C" __global__ void __launch_bounds__(256) encoder_heads(const __grid_constant__ EncoderHeadsArgs a) {
    wait_for_input();
    let_next_start();
    const u32 pairs = a.padded / 2, pair = blockIdx.x * blockDim.x + threadIdx.x, head = pair / pairs, element = 2 * (pair % pairs);
    if (head >= a.width / a.head_dim) return;
    const bool there = element < a.head_dim;
    for (u32 row = blockIdx.y; row < a.n_keys; row += gridDim.y) {
        const size_t from = (size_t)row * a.width + head * a.head_dim + element, to = ((size_t)head * a.n_keys + row) * a.padded + element;
        const float2 k = there ? *(const float2*)(a.k + from) : make_float2(0.0f, 0.0f);
        const float2 v = there ? *(const float2*)(a.v + from) : make_float2(0.0f, 0.0f);
        *(half2*)(a.k_heads + to) = __floats2half2_rn(k.x, k.y);
        *(half2*)(a.v_heads + to) = __floats2half2_rn(v.x, v.y);
    }
}

// Attention on the tensor cores in F16 with F32 sums and online softmax (FlashAttention-2, arXiv 2307.08691), for heads of up to D
// elements, which zeros fill up. A block takes a tile and a head, each of its four warps 16 M queries, so that a fragment of keys or values
// that is read from shared memory serves M products. Keys and values are copied in the background: [2 stages][keys, values][64][D + 8].
template <u32 D, u32 M> __device__ __forceinline__ void attention_on_units(const EncoderUnitsArgs& a) {
    constexpr u32 KEYS = 64, ROW = D + 8, PIECES = D / 8;
    wait_for_input();
    let_next_start();
    const EncoderTile tile = a.tiles[blockIdx.x];
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row0 = threadIdx.x / 32 * 16 * M + g;
    half* memory = (half*)encoder_memory;
    const size_t of_head = ((size_t)kv_head(a) * a.n_keys + tile.key) * D;

    auto stage = [&](u32 first, u32 stage_index) {
        if (first < tile.n_keys) {
            half* to = memory + stage_index * 2 * KEYS * ROW;
            const half* k = a.k_heads + of_head + (size_t)first * D;
            const half* v = a.v_heads + of_head + (size_t)first * D;
            const u32 n = tile.n_keys - first;
#pragma unroll 1
            for (u32 i = threadIdx.x; i < KEYS * PIECES; i += 128) {
                const u32 row = i / PIECES, piece = i % PIECES * 8, from = row < n ? row * D + piece : 0;
                copy16_or_zero(to + row * ROW + piece, k + from, row < n);
                copy16_or_zero(to + (KEYS + row) * ROW + piece, v + from, row < n);
            }
        }
        commit_copies();
    };
    stage(0, 0);

    u32 q[M][D / 16][4];
#pragma unroll
    for (u32 m = 0; m < M; m++) load_queries<D>(a, tile.query, row0 + 16 * m, tile.n, t, q[m]);
    const bool has_queries = row0 - g < tile.n;
    float out[M][D / 8][4] = {};
    float largest[M][2], sum[M][2] = {};
#pragma unroll
    for (u32 m = 0; m < M; m++) largest[m][0] = largest[m][1] = -INFINITY;
    for (u32 first = 0, i_stage = 0; first < tile.n_keys; first += KEYS, i_stage ^= 1) {
        stage(first + KEYS, i_stage ^ 1);
        wait_for_copies<1>();
        __syncthreads();
        const half* keys = memory + i_stage * 2 * KEYS * ROW;
        const half* values = keys + KEYS * ROW;
        if (has_queries) {
            float score[M][8][4] = {};
#pragma unroll
            for (u32 j = 0; j < 8; j += 2)
#pragma unroll
                for (u32 s = 0; s < D / 16; s++) {
                    u32 b[4];
                    load_matrices(b, keys + (8 * j + lane % 8 + lane / 16 * 8) * ROW + 16 * s + lane / 8 % 2 * 8);
#pragma unroll
                    for (u32 m = 0; m < M; m++) {
                        mma(score[m][j], q[m][s][0], q[m][s][1], q[m][s][2], q[m][s][3], b[0], b[1]);
                        mma(score[m][j + 1], q[m][s][0], q[m][s][1], q[m][s][2], q[m][s][3], b[2], b[3]);
                    }
                }
            const u32 n = tile.n_keys - first;
            if (n < KEYS) {
#pragma unroll
                for (u32 m = 0; m < M; m++)
#pragma unroll
                    for (u32 j = 0; j < 8; j++)
#pragma unroll
                        for (u32 i = 0; i < 4; i++)
                            if (8 * j + 2 * t + i % 2 >= n) score[m][j][i] = -INFINITY;
            }
#pragma unroll
            for (u32 m = 0; m < M; m++)
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    float now = largest[m][r];
#pragma unroll
                    for (u32 j = 0; j < 8; j++) now = fmaxf(now, fmaxf(score[m][j][2 * r], score[m][j][2 * r + 1]));
                    now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
                    now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
                    const float factor = power_of_two(largest[m][r] - now);
                    largest[m][r] = now;
                    sum[m][r] *= factor;
#pragma unroll
                    for (u32 j = 0; j < D / 8; j++) out[m][j][2 * r] *= factor, out[m][j][2 * r + 1] *= factor;
#pragma unroll
                    for (u32 j = 0; j < 8; j++)
#pragma unroll
                        for (u32 i = 2 * r; i < 2 * r + 2; i++) {
                            score[m][j][i] = power_of_two(score[m][j][i] - now);
                            sum[m][r] += score[m][j][i];
                        }
                }
#pragma unroll
            for (u32 s = 0; s < 4; s++) {
                u32 p[M][4];
#pragma unroll
                for (u32 m = 0; m < M; m++)
#pragma unroll
                    for (u32 i = 0; i < 4; i++)
                        p[m][i] = bits(__floats2half2_rn(score[m][2 * s + i / 2][2 * (i % 2)], score[m][2 * s + i / 2][2 * (i % 2) + 1]));
#pragma unroll
                for (u32 j = 0; j < D / 8; j += 2) {
                    u32 b[4];
                    load_matrices_transposed(b, values + (16 * s + lane % 8 + lane / 8 % 2 * 8) * ROW + 8 * j + lane / 16 * 8);
#pragma unroll
                    for (u32 m = 0; m < M; m++) {
                        mma(out[m][j], p[m][0], p[m][1], p[m][2], p[m][3], b[0], b[1]);
                        mma(out[m][j + 1], p[m][0], p[m][1], p[m][2], p[m][3], b[2], b[3]);
                    }
                }
            }
        }
        __syncthreads();
    }
    wait_for_copies<0>();
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            sum[m][r] += __shfl_xor_sync(~0u, sum[m][r], 1);
            sum[m][r] += __shfl_xor_sync(~0u, sum[m][r], 2);
            const float factor = 1.0f / sum[m][r];
            const u32 row = row0 + 16 * m + 8 * r;
            if (row < tile.n) store_result<D>(a, tile.query + row, t, out[m], 2 * r, factor);
        }
}

#define ATTENTION_ON_UNITS(D, M) \
    extern "C" __global__ void __launch_bounds__(128, 2) encoder_attention_on_units_##D(const __grid_constant__ EncoderUnitsArgs a) { attention_on_units<D, M>(a); }
ATTENTION_ON_UNITS(64, 2)
ATTENTION_ON_UNITS(80, 2)
ATTENTION_ON_UNITS(128, 1)
