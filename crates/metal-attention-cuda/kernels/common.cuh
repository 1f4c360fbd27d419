// Helpers of all kernels: reductions, the order of a row's elements in packed inputs, activation functions.
#pragma once
#include "args_layout.cuh"
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
// A value that is the same in all threads of a warp, in a form in which the compiler can see that, so that branches on it do not diverge.
__device__ __forceinline__ u32 uniform(u32 v) { return __shfl_sync(~0u, v, 0); }
// Sum and maximum over the block; the maximum of nothing is 0. `scratch`: 2 floats for each warp, in shared memory.
__device__ __forceinline__ float2 block_sum_max(float sum, float largest, float* scratch) {
    sum = warp_sum(sum);
    largest = warp_max(largest);
    const int warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) {
        scratch[2 * warp] = sum;
        scratch[2 * warp + 1] = largest;
    }
    __syncthreads();
    sum = 0.0f;
    largest = 0.0f;
    for (int i = 0; i < n_warps; i++) {
        sum += scratch[2 * i];
        largest = fmaxf(largest, scratch[2 * i + 1]);
    }
    __syncthreads();
    return make_float2(sum, largest);
}

// The place of element k of a quantisation block of 32 columns in the order of mma operands: [t][8], where t of four lanes has 8 elements, 4 for each of
// two products.
__device__ __forceinline__ int place_in_quant_block(int k) { return (k % 16 / 4) * 8 + (k / 16) * 4 + k % 4; }

// Set in `order` of packed rows: they are for products of four warps (wgmma). The other bits are the tiles of 8 tokens that the buffer has.
constexpr u32 WIDE = 1u << 31;

// Index of element k of a token's row among packed rows, F16. Without WIDE, in the order of mma fragments: [panel of 64 elements][8 tokens][block of
// 32][lane][8]. With WIDE: [panel][token][64], where 16 elements have the order of fragments (pairs 0 and 1 of lane t at 2 t and 8 + 2 t), and the
// eight pieces of 8 halves of a token are permuted by XOR with token % 8 (wgmma's 128-byte swizzle).
__device__ __forceinline__ size_t packed_input(u32 token, u32 k, u32 order) {
    const u32 panel = k / 64;
    if (order & WIDE) {
        const u32 pair = k % 4 / 2, in_16 = 8 * pair + k % 16 / 4 * 2 + k % 2, piece = k % 64 / 16 * 2 + in_16 / 8;
        return ((size_t)panel * (order & ~WIDE) * 8 + token) * 64 + (piece ^ token % 8) * 8 + in_16 % 8;
    }
    const u32 block = k % 64 / 32, p = place_in_quant_block(k % 32), lane = token % 8 * 4 + p / 8;
    return ((((size_t)panel * order + token / 8) * 2 + block) * 32 + lane) * 8 + p % 8;
}

// Activations of the gate. Mirrored in src/parts/dense.rs.
enum Activation : u32 { SILU = 0, GELU = 1, RELU_SQUARED = 2, CLAMPED_SWIGLU = 3, SPARSE_GELU = 4, CLAMPED_SILU = 5 };
__device__ __forceinline__ float activate(u32 activation, float v) {
    if (activation == SILU) return __fdividef(v, 1.0f + __expf(-v));
    if (activation == GELU) return 0.5f * v * (1.0f + tanhf(0.79788456080286535588f * (v + 0.044715f * v * v * v)));
    const float r = fmaxf(v, 0.0f);
    return r * r;
}
// Activation of the gate times up; not for SPARSE_GELU, which needs the whole row. `limit`: of CLAMPED_SWIGLU and CLAMPED_SILU.
__device__ __forceinline__ float gated(u32 activation, float limit, float gate, float up) {
    if (activation != CLAMPED_SWIGLU && activation != CLAMPED_SILU) return activate(activation, gate) * up;
    up = fminf(fmaxf(up, -limit), limit);
    if (activation == CLAMPED_SILU) return fminf(activate(SILU, gate), limit) * up;
    gate = fminf(gate, limit);
    return gate / (1.0f + expf(-1.702f * gate)) * (1.0f + up);
}
