// Norms of rows, on their way to products, into the residual stream or into rows of their own; also rows that are packed, copied
// or added as they are.
#include "common.cuh"

enum NormKind : u32 { NONE = 0, RMS = 1, LAYER = 2 };

struct NormArgs {
    const float* x;      // rows of n_in elements
    const float* weight; // [n_in]
    const float* bias;   // [n_in]; null: none
    half* packed;        // as products of many tokens take it; null: none
    float* out;          // [n][n_in], which may be x; null: none
    const u32* rows;     // rows of x to be taken; null: in order
    u32 n_in;
    u32 n_token_tiles;
    u32 kind;            // NormKind
    float eps;
    float scale;         // of the result
    u32 accumulate;      // added to what `out` is
};

// A block a row.
extern "C" __global__ void __launch_bounds__(256) norm_rows(const __grid_constant__ NormArgs a) {
    __shared__ float scratch[16];
    wait_for_input();
    let_next_start();
    const u32 token = blockIdx.x;
    const float* x = a.x + (size_t)(a.rows ? a.rows[token] : token) * a.n_in;
    float* out = a.out ? a.out + (size_t)token * a.n_in : nullptr;
    float mean = 0.0f, factor = 1.0f;
    if (a.kind == LAYER) {
        float sum = 0.0f;
        for (u32 i = threadIdx.x; i < a.n_in; i += blockDim.x) sum += x[i];
        mean = block_sum_max(sum, 0.0f, scratch).x / a.n_in;
    }
    if (a.kind != NONE) {
        float squares = 0.0f;
        for (u32 i = threadIdx.x; i < a.n_in; i += blockDim.x) {
            const float v = x[i] - mean;
            squares += v * v;
        }
        factor = rsqrtf(block_sum_max(squares, 0.0f, scratch).x / a.n_in + a.eps);
    }
    for (u32 i = threadIdx.x; i < (a.n_in + 63) / 64 * 64; i += blockDim.x) {
        float v = 0.0f;
        if (i < a.n_in) {
            v = x[i];
            if (a.kind != NONE) v = (v - mean) * factor * a.weight[i] + (a.bias ? a.bias[i] : 0.0f);
            v *= a.scale;
            if (a.accumulate) v += out[i];
            if (out) out[i] = v;
        }
        if (a.packed) a.packed[packed_input(token, i, a.n_token_tiles)] = __float2half_rn(v);
    }
}
