// Norms of rows: as input of products (packed F16, or F32 rows) or added to other rows. Without a norm it copies, scales, packs
// or adds rows.
#include "common.cuh"

enum NormKind : u32 { NONE = 0, RMS = 1, LAYER = 2 };

struct NormArgs {
    const float* x;      // rows of n_in elements
    const float* weight; // [n_in]
    const float* bias;   // [n_in]; null: none
    half* packed;        // as input of GEMMs; null: none
    float* out;          // [n_rows][n_in], may be x; null: none
    const u32* rows;     // [n_rows]: indices of the rows of x; null: in order
    u32 n_in;            // elements of a row
    u32 n_token_tiles;   // of `packed`, with the WIDE flag
    u32 kind;            // NormKind
    float eps;           // epsilon of the norm
    float scale;         // factor on the result
    u32 accumulate;      // whether the result is added to `out`
};
ASSERT_LAYOUT(NormArgs);

// Four elements from i on, or zeros.
__device__ __forceinline__ float4 four(const float* p, u32 i, bool in_range) {
    return in_range ? *(const float4*)(p + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}
__device__ __forceinline__ float sum_of(float4 v) { return (v.x + v.y) + (v.z + v.w); }

constexpr int THREADS = 256;

// The sum over the threads that share a row: a warp, or a block.
template <int SHARE> __device__ __forceinline__ float sum_of_row(float v, float* scratch) {
    return SHARE == 32 ? warp_sum(v) : block_sum_max(v, 0.0f, scratch).x;
}

// The fast path, for rows that can be read as vectors of four elements. SHARE threads share the row, of which `lane` is one; each holds
// KEPT vectors in registers.
template <int SHARE, int KEPT> __device__ __forceinline__ void norm_row(const NormArgs& a, const float* x, float* out, u32 token, u32 lane, float* scratch) {
    float4 kept[KEPT];
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const u32 i = 4 * (lane + j * SHARE);
        kept[j] = four(x, i, i < a.n_in);
        sum += sum_of(kept[j]);
    }
    const float mean = a.kind == LAYER ? sum_of_row<SHARE>(sum, scratch) / a.n_in : 0.0f;
    float factor = 1.0f;
    if (a.kind != NONE) {
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            if (4 * (lane + j * SHARE) >= a.n_in) break;
            float4& v = kept[j];
            v.x -= mean, v.y -= mean, v.z -= mean, v.w -= mean;
            squares += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
        }
        factor = rsqrtf(sum_of_row<SHARE>(squares, scratch) / a.n_in + a.eps);
    }
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const u32 i = 4 * (lane + j * SHARE);
        if (i >= (a.n_in + 63) / 64 * 64) break;
        const bool in_range = i < a.n_in;
        float4 v = kept[j];
        if (a.kind != NONE) {
            const float4 weight = four(a.weight, i, in_range);
            v.x *= factor * weight.x, v.y *= factor * weight.y, v.z *= factor * weight.z, v.w *= factor * weight.w;
            if (a.bias) {
                const float4 bias = four(a.bias, i, in_range);
                v.x += bias.x, v.y += bias.y, v.z += bias.z, v.w += bias.w;
            }
        }
        v.x *= a.scale, v.y *= a.scale, v.z *= a.scale, v.w *= a.scale;
        if (out && in_range) {
            if (a.accumulate) {
                const float4 old = *(const float4*)(out + i);
                v.x += old.x, v.y += old.y, v.z += old.z, v.w += old.w;
            }
            *(float4*)(out + i) = v;
        }
        if (a.packed) {
            *(half2*)(a.packed + packed_input(token, i, a.n_token_tiles)) = __floats2half2_rn(v.x, v.y);
            *(half2*)(a.packed + packed_input(token, i + 2, a.n_token_tiles)) = __floats2half2_rn(v.z, v.w);
        }
    }
}

// The result is scale * norm(row), stored to `out` (or added) and to `packed`. A block for each row.
extern "C" __global__ void __launch_bounds__(THREADS) norm_rows(const __grid_constant__ NormArgs a) {
    __shared__ float scratch[16];
    wait_for_input();
    let_next_start();
    const u32 token = blockIdx.x;
    const float* x = a.x + (size_t)(a.rows ? a.rows[token] : token) * a.n_in;
    float* out = a.out ? a.out + (size_t)token * a.n_in : nullptr;
    if (a.n_in % 4 == 0 && a.n_in <= 4 * THREADS * 8 && ((size_t)x | (size_t)out) % 16 == 0) return norm_row<THREADS, 8>(a, x, out, token, threadIdx.x, scratch);
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

// The same for rows of at most 2048 elements, a multiple of four, at addresses that are multiples of 16. A block of one warp for each
// row: of many rows more are in flight, and no warp waits for others.
extern "C" __global__ void __launch_bounds__(32) norm_many_rows(const __grid_constant__ NormArgs a) {
    wait_for_input();
    let_next_start();
    const u32 token = blockIdx.x;
    const float* x = a.x + (size_t)(a.rows ? a.rows[token] : token) * a.n_in;
    norm_row<32, 16>(a, x, a.out ? a.out + (size_t)token * a.n_in : nullptr, token, threadIdx.x, nullptr);
}
