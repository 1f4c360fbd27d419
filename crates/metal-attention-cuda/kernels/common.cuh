// What all kernels share: reductions, the order of inputs, activations.
#pragma once
#include "ptx.cuh"

__device__ __forceinline__ u32 bits(half2 v) { return *reinterpret_cast<u32*>(&v); }
__device__ __forceinline__ half2 halves(u32 v) { return *reinterpret_cast<half2*>(&v); }
__device__ __forceinline__ half half_at(const void* p, size_t i) { return reinterpret_cast<const half*>(p)[i]; }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    return v;
}
// What all threads of a warp have the same of, told to the compiler, which then knows that they stay together.
__device__ __forceinline__ u32 uniform(u32 v) { return __shfl_sync(~0u, v, 0); }
// Sum and maximum over the block; `scratch` has 2 floats for each warp.
__device__ __forceinline__ float2 block_sum_max(float sum, float most, float* scratch) {
    sum = warp_sum(sum);
    most = warp_max(most);
    const int warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) {
        scratch[2 * warp] = sum;
        scratch[2 * warp + 1] = most;
    }
    __syncthreads();
    sum = 0.0f;
    most = 0.0f;
    for (int i = 0; i < n_warps; i++) {
        sum += scratch[2 * i];
        most = fmaxf(most, scratch[2 * i + 1]);
    }
    __syncthreads();
    return make_float2(sum, most);
}

// Where element k of a row lies among the 32 that a block of 32 has: lane t of four has 8 of them, 4 for each of two products.
__device__ __forceinline__ int place_in_block(int k) { return (k % 16 / 4) * 8 + (k / 16) * 4 + k % 4; }

// How packed rows lie: tiles of 8 tokens there is room for, and this bit where a group of four warps multiplies them.
constexpr u32 WIDE = 1u << 31;

// Where element k of a token's row lies among packed rows, F16. In the order of the fragments of a warp: [panel of 64 elements]
// [8 tokens][block of 32][lane][8]. WIDE: [panel][token][64], where 16 elements lie as lanes take them, pairs 0 and 1 of lane t at
// 2 t and 8 + 2 t, and pieces of 8 halves of a token change places with those whose number differs in the bits of its own.
__device__ __forceinline__ size_t packed_input(u32 token, u32 k, u32 order) {
    const u32 panel = k / 64;
    if (order & WIDE) {
        const u32 pair = k % 4 / 2, in_16 = 8 * pair + k % 16 / 4 * 2 + k % 2, piece = k % 64 / 16 * 2 + in_16 / 8;
        return ((size_t)panel * (order & ~WIDE) * 8 + token) * 64 + (piece ^ token % 8) * 8 + in_16 % 8;
    }
    const u32 block = k % 64 / 32, p = place_in_block(k % 32), lane = token % 8 * 4 + p / 8;
    return ((((size_t)panel * order + token / 8) * 2 + block) * 32 + lane) * 8 + p % 8;
}

// Turned by what the feed-forward's gate goes through.
enum Activation : u32 { SILU = 0, GELU = 1, RELU_SQUARED = 2, CLAMPED_SWIGLU = 3, SPARSE_GELU = 4 };
__device__ __forceinline__ float activate(u32 activation, float v) {
    if (activation == SILU) return __fdividef(v, 1.0f + __expf(-v));
    if (activation == GELU) return 0.5f * v * (1.0f + tanhf(0.79788456080286535588f * (v + 0.044715f * v * v * v)));
    const float r = fmaxf(v, 0.0f);
    return r * r;
}
// What a gate makes of up, but for SPARSE_GELU. `limit`: of CLAMPED_SWIGLU.
__device__ __forceinline__ float gated(u32 activation, float limit, float gate, float up) {
    if (activation != CLAMPED_SWIGLU) return activate(activation, gate) * up;
    gate = fminf(gate, limit), up = fminf(fmaxf(up, -limit), limit);
    return gate / (1.0f + expf(-1.702f * gate)) * (1.0f + up);
}
