// What all kernels share: fragments of the tensor cores, reductions, waiting for the kernel before.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

typedef uint32_t u32;
typedef unsigned long long u64_t;

// Waits until everything that the kernel before in the stream wrote can be read. What does not depend on it (weights) may be
// asked for earlier. Every kernel calls it, so that "the kernel before" stands for all before it.
__device__ __forceinline__ void wait_for_input() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel in the stream start, as far as there is room; it waits for this one with wait_for_input.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Weights are read once a step: they go past L1.
__device__ __forceinline__ uint4 load_stream(const uint4* p) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 load_stream(const uint2* p) {
    uint2 v;
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ __forceinline__ u32 load_stream(const u32* p) {
    u32 v;
    asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// c += a b over 16 rows of a, 8 columns of b, 16 elements each. Lane l has g = l / 4, t = l % 4: of a the pairs of columns 2t of
// rows g and g + 8, then those of columns 2t + 8; of b the pairs of rows 2t and 2t + 8 of column g; of c columns 2t and 2t + 1 of
// row g, then those of row g + 8.
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

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
