// Attention of encoders of pictures on the tensor cores: the arguments of its kernels.
#pragma once
#include "common.cuh"

// Queries that attend to the same keys.
struct EncoderTile {
    u32 query, n;    // the first query's row and the number of queries
    u32 key, n_keys; // likewise of keys and values; at least one key
};
ASSERT_LAYOUT(EncoderTile);

struct EncoderHeadsArgs {
    const float* k; // [n_keys][width]
    const float* v; // the same for values
    half* k_heads;  // keys and values as the attention kernel reads them
    half* v_heads;
    u32 n_keys, width;
    u32 head_dim;   // even
    u32 padded;     // elements of a head with the zeros behind it
};
ASSERT_LAYOUT(EncoderHeadsArgs);

struct EncoderUnitsArgs {
    const float* q;           // [n_queries][width]
    const half* k_heads;      // as the kernel that converts them states
    const half* v_heads;
    float* out;               // [n_queries][width]
    half* packed;             // the same as input of GEMMs; null: none
    const EncoderTile* tiles; // [gridDim.x]
    u32 n_queries, n_keys;    // the rows that tiles refer to
    u32 width, kv_width;      // a multiple of head_dim each
    u32 head_dim;             // even, at most the kernel's number of elements
    u32 n_token_tiles;        // of `packed`, with the WIDE flag
    float scale;              // factor on the scores
    u32 unused;
};
ASSERT_LAYOUT(EncoderUnitsArgs);

// Scores are powers of two.
constexpr float LOG2_E = 1.44269504088896340736f;

// The head of keys of this block's head: neighbouring heads of queries share one.
__device__ __forceinline__ u32 kv_head(const EncoderUnitsArgs& a) { return blockIdx.y * (a.kv_width / a.head_dim) / (a.width / a.head_dim); }

// The fragments of 16 rows of queries, of which `row` is the first of this lane's two; zeros behind row n.
template <u32 D> __device__ __forceinline__ void load_queries(const EncoderUnitsArgs& a, u32 query, u32 row, u32 n, u32 t, u32 (&q)[D / 16][4]) {
    const float scale = a.scale * LOG2_E;
#pragma unroll
    for (u32 s = 0; s < D / 16; s++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 element = 16 * s + 8 * (i / 2) + 2 * t, at = row + 8 * (i % 2);
            const float* from = a.q + (size_t)(query + at) * a.width + blockIdx.y * a.head_dim + element;
            const float2 v = at < n && element < a.head_dim ? *(const float2*)from : make_float2(0.0f, 0.0f);
            q[s][i] = bits(__floats2half2_rn(v.x * scale, v.y * scale));
        }
}

// Stores the results of one row of this lane, `out[j][first]` and the next, times `factor`.
template <u32 D> __device__ __forceinline__ void store_result(const EncoderUnitsArgs& a, u32 row, u32 t, const float (&out)[D / 8][4], int first, float factor) {
    const u32 column = blockIdx.y * a.head_dim;
#pragma unroll
    for (u32 j = 0; j < D / 8; j++) {
        const u32 element = 8 * j + 2 * t;
        if (element >= a.head_dim) break;
        const float2 v = make_float2(out[j][first] * factor, out[j][first + 1] * factor);
        *(float2*)(a.out + (size_t)row * a.width + column + element) = v;
        if (a.packed) *(half2*)(a.packed + packed_input(row, column + element, a.n_token_tiles)) = __floats2half2_rn(v.x, v.y);
    }
    // Zeros fill the last panel up.
    if (!a.packed || blockIdx.y + 1 < gridDim.y) return;
    for (u32 k = a.width + 2 * t; k < (a.width + 63) / 64 * 64; k += 8)
        *(half2*)(a.packed + packed_input(row, k, a.n_token_tiles)) = __floats2half2_rn(0.0f, 0.0f);
}
