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
// d = a b over 16 rows of a, bytes with a sign or SIGNED not, 8 columns of b, bytes with a sign, 32 elements each: of a the elements
// 4 t.. of rows g and g + 8, then those from 16 on; of b the elements 4 t.. of column g, then those from 16 on; of d as above.
template <bool SIGNED> __device__ __forceinline__ void mma_codes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}
// The same, added to d.
template <bool SIGNED> __device__ __forceinline__ void add_mma_codes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// (v & mask) ^ flip as one instruction, of which the compiler would make two, as only one of its operands can be a constant.
__device__ __forceinline__ u32 and_xor(u32 v, u32 mask, u32 flip) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(v), "r"(mask), "r"(flip));
    return r;
}
// The larger of two; one that is no number, and whose exponent is the largest, where one of them is none.
__device__ __forceinline__ float larger(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
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
// The same of 8 bytes, which may be at hand.
__device__ __forceinline__ void copy8(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from));
}
// Of 16, or zeros.
__device__ __forceinline__ void copy16_or_zero(void* to, const void* from, bool there) {
    const u32 at = (u32)__cvta_generic_to_shared(to);
    const int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
// Waits for all groups of the thread but the last N.
template <int N> __device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

// THREADS of a block, whole warps, meet at barrier ID, 1 to 15.
template <int ID, int THREADS> __device__ __forceinline__ void threads_meet() { asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory"); }
// Arrives there without waiting for the others.
template <int ID, int THREADS> __device__ __forceinline__ void threads_arrive() { asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(THREADS) : "memory"); }

// The same, where both are known at run time.
__device__ __forceinline__ void threads_meet(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// A barrier in workgroup memory: a phase ends when `count` threads have arrived and all bytes that were announced are there. Its
// phases are 0 and 1 by turns. After it is made ready the block has to meet once.
__device__ __forceinline__ void barrier_init(u64_t* barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(barrier)), "r"(count) : "memory");
}
// After the last one that a thread makes ready, for `copy_bulk`.
__device__ __forceinline__ void barriers_are_ready() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
#if __CUDA_ARCH__ >= 900
// Arrives, and announces bytes that `copy_bulk` brings.
__device__ __forceinline__ void barrier_arrive_expecting(u64_t* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64_t* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"((u32)__cvta_generic_to_shared(barrier)) : "memory");
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
// The same without waiting.
__device__ __forceinline__ bool barrier_has_ended(u64_t* barrier, u32 phase) {
    u32 ended;
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
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
// For the L2 cache: what is copied will not be read again soon.
__device__ __forceinline__ u64_t read_once() {
    u64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void copy_bulk(void* to, const void* from, u32 bytes, u64_t* barrier, u64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            (u32)__cvta_generic_to_shared(to)),
        "l"(from), "r"(bytes), "r"((u32)__cvta_generic_to_shared(barrier)), "l"(policy)
        : "memory");
}
#endif

// Products of four warps together (`wgmma`, which the H100 and H200 have): c += a b over 16 rows of a for each warp, N columns of b,
// 16 elements each. Lanes have of a and c what `mma` says, of 8 columns of b after the other. Column n of b lies in workgroup
// memory at 64 n halves of what begins at a multiple of 1024 bytes, its elements 16 `step` on, pieces of 8 halves as `packed_input`
// says. Products run on their own between `wide_begin`, after which nobody changes what they read, and `wide_wait`.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Sums are where they are said to be at this point.
template <int TILES> __device__ __forceinline__ void stay(float (&c)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[n][i])::"memory");
}
__device__ __forceinline__ void wide_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends what belongs together; `wide_wait` waits for all of these but the last N.
__device__ __forceinline__ void wide_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wide_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Registers of each thread of four warps from here on: fewer, or more of what others gave.
template <int N> __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
#define C4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define C16(i) C4(i), C4(i + 1), C4(i + 2), C4(i + 3)
#define C64(i) C16(i), C16(i + 4), C16(i + 8), C16(i + 12)
#define REGS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGS_16 REGS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGS_32 REGS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGS_64 \
    REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGS_128 \
    REGS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
            "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// Where columns of b begin, as the instruction takes it.
typedef u64_t WideColumns;
__device__ __forceinline__ WideColumns wide_columns(const half* b) {
    return ((u32)__cvta_generic_to_shared(b) & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
#define WIDE_MMA(N, REGS, A0, A1, A2, A3, B, ...)                                                                             \
    __device__ __forceinline__ void wide_mma(float (&c)[N / 8][4], const u32 (&a)[4], WideColumns b, int step) {              \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" REGS "}, {" A0 ", " A1 ", " A2 ", " A3 "}, "  \
                     B ", 1, 1, 1, 0;"                                                                                        \
                     : __VA_ARGS__                                                                                            \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b + 2 * step));                                        \
    }
WIDE_MMA(16, REGS_8, "%8", "%9", "%10", "%11", "%12", C4(0), C4(1))
WIDE_MMA(32, REGS_16, "%16", "%17", "%18", "%19", "%20", C16(0))
WIDE_MMA(64, REGS_32, "%32", "%33", "%34", "%35", "%36", C16(0), C16(4))
WIDE_MMA(128, REGS_64, "%64", "%65", "%66", "%67", "%68", C64(0))
WIDE_MMA(256, REGS_128, "%128", "%129", "%130", "%131", "%132", C64(0), C64(16))
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
// Reads a word anew, where it is `wanted`: no branch, which would part the lanes of a warp.
__device__ __forceinline__ void load_exchanged_if(bool wanted, ulonglong2& v, const ulonglong2* p) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2]; }"
                 : "+l"(v.x), "+l"(v.y)
                 : "l"(p), "r"((u32)wanted)
                 : "memory");
}
__device__ __forceinline__ void load_exchanged_if(bool wanted, u64_t& v, const u64_t* p) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.relaxed.gpu.global.u64 %0, [%1]; }" : "+l"(v) : "l"(p), "r"((u32)wanted) : "memory");
}
__device__ __forceinline__ void store_exchanged(u64_t* p, u64_t v) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// What kernels of several cards, and the host, tell each other: each word arrives as a whole.
__device__ __forceinline__ u64_t load_from_peer(const u64_t* p) {
    u64_t v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u32 load_from_peer(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_for_peer(u64_t* p, u64_t v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void store_for_peer(u32* p, u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// To be called between two looks at what another thread is to write: the look takes long enough.
__device__ __forceinline__ void spin_pause() {}
// The same where a moment does not count.
__device__ __forceinline__ void rest_shortly() { __nanosleep(20); }

#endif
