// What has no name in CUDA's headers: instructions, each in a function of its own. Compiled by anything but nvcc, they and the rest
// of CUDA are what `software/` makes of them, which runs kernels on a CPU.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

typedef uint32_t u32;
typedef unsigned long long u64_t;

#ifndef __CUDACC__
#include <software_ptx.hpp>
#else

// Workgroup memory that a launch gives, as `T name[]`.
#define SHARED_MEMORY(ALIGNMENT, T, name) extern __shared__ __align__(ALIGNMENT) T name[]

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
// d = a b
__device__ __forceinline__ void mma_new(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}
// Four matrices of 8 rows of 8 halves: lane l gives row l % 8 of matrix l / 8, and has of each the pair of columns 2 (l % 4) of
// row l / 4; turned: the pair of rows 2 (l % 4) of column l / 4.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], const half* row) {
    const u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void load_matrices_turned(u32 (&r)[4], const half* row) {
    const u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

// Copies 16 bytes to workgroup memory, which are there when the thread has waited for the group that it commits them in.
__device__ __forceinline__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from));
}
// The same, or zeros.
__device__ __forceinline__ void copy16_or_zero(void* to, const void* from, bool there) {
    const u32 at = (u32)__cvta_generic_to_shared(to);
    const int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
// Waits for all groups of the thread but the last N.
template <int N> __device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

// A barrier in workgroup memory: a phase ends when `count` threads have arrived and all bytes that were announced are there. Its
// phases are 0 and 1 by turns. After it is made ready the block has to meet once.
__device__ __forceinline__ void barrier_init(u64_t* barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(barrier)), "r"(count) : "memory");
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
#if __CUDA_ARCH__ >= 900
// Arrives, and announces bytes that `copy_bulk` brings.
__device__ __forceinline__ void barrier_arrive_expecting(u64_t* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(barrier)), "r"(bytes) : "memory");
}
// Whether the phase has ended; waits for a moment.
__device__ __forceinline__ bool barrier_try_wait(u64_t* barrier, u32 phase) {
    u32 ended;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(ended)
        : "r"((u32)__cvta_generic_to_shared(barrier)), "r"(phase)
        : "memory");
    return ended;
}
// Copies bytes, a multiple of 16 from and to multiples of 16, to workgroup memory; the barrier counts them as they come.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, u32 bytes, u64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"((u32)__cvta_generic_to_shared(to)),
        "l"(from), "r"(bytes), "r"((u32)__cvta_generic_to_shared(barrier))
        : "memory");
}
#endif

// What blocks of a running kernel tell each other: each word arrives as a whole.
__device__ __forceinline__ ulonglong2 load_exchanged(const ulonglong2* p) {
    ulonglong2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u64_t load_exchanged(const u64_t* p) {
    u64_t v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_exchanged(u64_t* p, u64_t v) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// To be called between two looks at what another thread is to write: the look takes long enough.
__device__ __forceinline__ void spin_pause() {}

#endif
