// PTX instructions that CUDA's headers have no names for, one function each. When the kernels are compiled for a CPU, for tests without a GPU,
// `software/include/software_ptx.hpp` takes the place of this part.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

typedef uint32_t u32;
typedef unsigned long long u64_t;

#ifndef __CUDACC__
#include <software_ptx.hpp>
#else

// Dynamic shared memory of the block, as `T name[]`.
#define SHARED_MEMORY(ALIGNMENT, T, name) extern __shared__ __align__(ALIGNMENT) T name[]

// Waits until all writes of the previous kernel in the stream are visible (programmatic dependent launch). Before it a kernel may read only what no
// kernel in flight writes, such as weights. Every kernel calls it, so that "the previous kernel" implies all earlier ones.
__device__ __forceinline__ void wait_for_input() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Allows the next kernel of the stream to start as soon as multiprocessors have capacity for it; it waits with wait_for_input.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Loads weights, which are read once a step, without keeping them in L1.
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

// c += a b with F16 operands: a has 16 rows, b 8 columns, 16 elements each. Lane l has g = l / 4 and t = l % 4. Its fragment of a: elements 2 t, 2 t + 1
// of rows g (a0) and g + 8 (a1), then elements 2 t + 8, 2 t + 9 of both (a2, a3). Of b: elements 2 t, 2 t + 1 (b0) and 2 t + 8, 2 t + 9 (b1) of column
// g. Of c: columns 2 t and 2 t + 1 of row g, then of row g + 8.
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// d = a b, otherwise the same.
__device__ __forceinline__ void mma_new(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}
// d = a b with 8-bit integers: a has 16 rows (signed or unsigned), b 8 columns (signed), 32 elements each. Fragment of a: elements 4 t to 4 t + 3 of
// rows g and g + 8, then elements 4 t + 16 to 4 t + 19 of both. Of b: elements 4 t.. and 4 t + 16.. of column g. Of d: like c above.
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
// d += a b, otherwise the same.
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
// (v & mask) ^ flip in one instruction. The compiler would use two, since it allows only one constant operand.
__device__ __forceinline__ u32 and_xor(u32 v, u32 mask, u32 flip) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(v), "r"(mask), "r"(flip));
    return r;
}
// v & mask | flags, likewise.
__device__ __forceinline__ u32 and_or(u32 v, u32 mask, u32 flags) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(v), "r"(mask), "r"(flags));
    return r;
}
// The larger of two values; NaN if either is NaN. That NaN has the largest exponent, like infinity.
__device__ __forceinline__ float larger(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
// 2^v, with a relative error of 2^-22; results below 2^-126 are 0.
__device__ __forceinline__ float power_of_two(float v) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
    return power;
}
// Loads four matrices of 8 x 8 halves from shared memory. Lane l passes the address of row l % 8 of matrix l / 8, and gets the elements 2 (l % 4)
// and 2 (l % 4) + 1 of row l / 4 of each matrix; transposed: rows 2 (l % 4) and 2 (l % 4) + 1 of column l / 4.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], const half* row) {
    const u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], const half* row) {
    const u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

// Starts an asynchronous copy of 16 bytes to shared memory, past L1. It is complete when the thread has waited for the group that it commits it in.
__device__ __forceinline__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from));
}
// Starts a copy of 8 bytes, through L1.
__device__ __forceinline__ void copy8(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from));
}
// Starts a copy of 16 bytes, or of zeros where not `there`.
__device__ __forceinline__ void copy16_or_zero(void* to, const void* from, bool there) {
    const u32 at = (u32)__cvta_generic_to_shared(to);
    const int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
// Waits until all of the thread's groups but the last N are complete.
template <int N> __device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

// Named barrier ID (1 to 15; 0 is __syncthreads): the block's threads that call it, THREADS in number and in whole warps, wait for each other.
template <int ID, int THREADS> __device__ __forceinline__ void named_barrier_sync() { asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory"); }
// Arrives at such a barrier without waiting.
template <int ID, int THREADS> __device__ __forceinline__ void named_barrier_arrive() { asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(THREADS) : "memory"); }

// `named_barrier_sync` with values known at run time.
__device__ __forceinline__ void named_barrier_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// mbarrier in shared memory: a phase completes when `count` threads have arrived and all announced bytes are there. The parity of phases is 0
// and 1 alternately. All threads of the block have to meet after it is initialised.
__device__ __forceinline__ void barrier_init(u64_t* barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(barrier)), "r"(count) : "memory");
}
// Makes initialised mbarriers visible to asynchronous copies; called after the last one.
__device__ __forceinline__ void fence_barrier_init() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
#if __CUDA_ARCH__ >= 900
// Arrives, and announces bytes that a `copy_bulk` will bring.
__device__ __forceinline__ void barrier_arrive_expecting(u64_t* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64_t* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"((u32)__cvta_generic_to_shared(barrier)) : "memory");
}
// Whether the phase of parity `phase` is complete; waits for a short time that the hardware chooses.
__device__ __forceinline__ bool barrier_try_wait(u64_t* barrier, u32 phase) {
    u32 ended;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(ended)
        : "r"((u32)__cvta_generic_to_shared(barrier)), "r"(phase)
        : "memory");
    return ended;
}
// Whether the phase is complete, without waiting. The phase before the first one counts as complete, and has parity 1.
__device__ __forceinline__ bool barrier_has_ended(u64_t* barrier, u32 phase) {
    u32 ended;
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(ended)
        : "r"((u32)__cvta_generic_to_shared(barrier)), "r"(phase)
        : "memory");
    return ended;
}
// Starts a bulk copy from global to shared memory. Both addresses and `bytes` are multiples of 16; the bytes count towards `barrier`.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, u32 bytes, u64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"((u32)__cvta_generic_to_shared(to)),
        "l"(from), "r"(bytes), "r"((u32)__cvta_generic_to_shared(barrier))
        : "memory");
}
// The L2 policy for data that is not read again soon; and the bulk copy with a policy.
__device__ __forceinline__ u64_t evict_first_policy() {
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

// Products of four warps together (`wgmma`, H100 and H200): c += a b with 16 rows of a for each warp and N columns of b, 16 elements each. Fragments of
// a and c are those of `mma`, for each 8 columns of b. Column n of b lies in shared memory, 64 n halves after an address that is a multiple of 1024
// bytes; its elements begin at 16 `step`, in pieces of 8 halves that are permuted as in `packed_input`. Products run asynchronously from
// `wide_begin`, after which their operands must not change, to `wide_wait`.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Keeps the compiler from moving accesses of the accumulators across this point.
template <int TILES> __device__ __forceinline__ void stay(float (&c)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[n][i])::"memory");
}
__device__ __forceinline__ void wide_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of products; `wide_wait` waits for all groups but the last N.
__device__ __forceinline__ void wide_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wide_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Changes the number of registers of each thread of a warpgroup (four warps): to fewer, or to more out of those that others released.
template <int N> __device__ __forceinline__ void release_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
#define C4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define C16(i) C4(i), C4(i + 1), C4(i + 2), C4(i + 3)
#define C64(i) C16(i), C16(i + 4), C16(i + 8), C16(i + 12)
#define REGS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGS_16 REGS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGS_32 REGS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGS_40 REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define REGS_64 \
    REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGS_128 \
    REGS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
            "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// The descriptor of the columns of b that begin at `b`.
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
WIDE_MMA(80, REGS_40, "%40", "%41", "%42", "%43", "%44", C16(0), C16(4), C4(8), C4(9))
WIDE_MMA(128, REGS_64, "%64", "%65", "%66", "%67", "%68", C64(0))
WIDE_MMA(256, REGS_128, "%128", "%129", "%130", "%131", "%132", C64(0), C64(16))
#endif

// Words that blocks of a running kernel exchange: relaxed accesses of gpu scope. Each 8 bytes are read and written as a whole.
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
// Loads `v` again if `wanted`; a predicate instead of a branch, so that the warp does not diverge.
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
// Words that kernels of several ranks and the host exchange: relaxed accesses of system scope.
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
// Called between two polls of a word that another thread will write. Empty: the load takes long enough.
__device__ __forceinline__ void spin_pause() {}
// A pause of some 20 ns, where a delay does not matter.
__device__ __forceinline__ void sleep_briefly() { __nanosleep(20); }

#endif
