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

// Inputs of products of many tokens, F16 in the order of the fragments: [panel of 64 elements][8 tokens][block of 32][lane][8].
__device__ __forceinline__ size_t packed_input(int token, int k, int n_token_tiles) {
    const int panel = k / 64, block = k % 64 / 32, p = place_in_block(k % 32);
    const int lane = token % 8 * 4 + p / 8;
    return ((((size_t)panel * n_token_tiles + token / 8) * 2 + block) * 32 + lane) * 8 + p % 8;
}

// Turned by what the feed-forward's gate goes through.
enum Activation : u32 { SILU = 0, GELU = 1, RELU_SQUARED = 2 };
__device__ __forceinline__ float activate(u32 activation, float v) {
    if (activation == SILU) return v / (1.0f + __expf(-v));
    if (activation == GELU) return 0.5f * v * (1.0f + tanhf(0.79788456080286535588f * (v + 0.044715f * v * v * v)));
    const float r = fmaxf(v, 0.0f);
    return r * r;
}
