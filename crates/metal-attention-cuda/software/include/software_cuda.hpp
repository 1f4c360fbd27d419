// The part of CUDA's keywords, types and functions that the kernels use, for a C++ compiler.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "software_block.hpp"

#ifndef SOFTWARE_LIST_KERNELS
#define __global__
#endif
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(N) __attribute__((aligned(N)))
// One variable for each block, because all threads of a block run on one operating system thread.
#define __shared__ static thread_local

#define threadIdx (software::fiber()->thread)
#define blockIdx (software::fiber()->place->block_index)
#define blockDim (software::fiber()->place->block_size)
#define gridDim (software::fiber()->place->grid_size)
constexpr int warpSize = 32;

typedef software::Index dim3;
struct uchar4 { unsigned char x, y, z, w; } __align__(4);
struct char4 { signed char x, y, z, w; } __align__(4);
struct ushort2 { unsigned short x, y; } __align__(4);
struct ushort4 { unsigned short x, y, z, w; } __align__(8);
struct uint2 { unsigned x, y; } __align__(8);
struct uint3 { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; } __align__(16);
struct int2 { int x, y; } __align__(8);
struct int4 { int x, y, z, w; } __align__(16);
struct float2 { float x, y; } __align__(8);
struct float3 { float x, y, z; };
struct float4 { float x, y, z, w; } __align__(16);
struct double2 { double x, y; } __align__(16);
struct ulonglong2 { unsigned long long x, y; } __align__(16);
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((unsigned long long)x * y >> 32); }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

namespace software {
template <typename To, typename From> inline To as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// The dynamic shared memory of a launch, which converts to an array of any type.
template <typename T> struct SharedMemory {
    operator T*() const { return (T*)fiber()->place->shared_memory; }
    template <typename U> explicit operator U*() const { return (U*)fiber()->place->shared_memory; }
};

// The value that a lane passes to other lanes of its warp, and the one that it receives from `lane`.
struct Exchange {
    uint64_t given, taken;
    unsigned lane;
};
inline void exchange(void* const (&given)[32], uint32_t arrived) {
    if (arrived == ~0u) {
        for (void* const lane_exchange : given) {
            Exchange& mine = *(Exchange*)lane_exchange;
            mine.taken = ((const Exchange*)given[mine.lane % 32])->given;
        }
        return;
    }
    for (uint32_t rest = arrived; rest; rest &= rest - 1) {
        Exchange& mine = *(Exchange*)given[__builtin_ctz(rest)];
        if (!(arrived >> mine.lane & 1)) fail("a lane asks for the value of one that gives none");
        mine.taken = ((const Exchange*)given[mine.lane])->given;
    }
}
template <typename T> inline T shuffle(unsigned mask, T value, unsigned lane) {
    static_assert(sizeof(T) <= 8);
    Exchange e = {0, 0, lane};
    memcpy(&e.given, &value, sizeof value);
    meet(mask, "a shuffle", exchange, &e);
    memcpy(&value, &e.taken, sizeof value);
    return value;
}
inline void vote(void* const (&given)[32], uint32_t arrived) {
    uint32_t yes = 0;
    for (uint32_t rest = arrived; rest; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        if (((const Exchange*)given[lane])->given) yes |= 1u << lane;
    }
    for (uint32_t rest = arrived; rest; rest &= rest - 1) {
        Exchange& mine = *(Exchange*)given[__builtin_ctz(rest)];
        mine.taken = yes, mine.lane = arrived;
    }
}
}  // namespace software

inline void __syncthreads() { software::block_barrier(0, 0); }
// The number of threads for which the condition is true.
inline int __syncthreads_count(int yes) {
    static thread_local int n_yes, n_left;
    n_yes += yes != 0;
    n_left++;
    __syncthreads();
    const int n = n_yes;
    if (--n_left == 0) n_yes = 0;
    __syncthreads();
    return n;
}
inline void __syncwarp(unsigned mask = ~0u) { software::meet(mask, "its warp", nullptr, nullptr); }
template <typename T> inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    return software::shuffle(mask, value, software::fiber()->lane / width * width + lane % width);
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    const unsigned mine = software::fiber()->lane, of = mine ^ lanes;
    return software::shuffle(mask, value, of / width <= mine / width ? of : mine);
}
template <typename T> inline T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    const unsigned mine = software::fiber()->lane;
    return software::shuffle(mask, value, mine % width + lanes < (unsigned)width ? mine + lanes : mine);
}
template <typename T> inline T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    const unsigned mine = software::fiber()->lane;
    return software::shuffle(mask, value, mine % width >= lanes ? mine - lanes : mine);
}
inline unsigned __ballot_sync(unsigned mask, int yes) {
    software::Exchange e = {(uint64_t)(yes != 0), 0, 0};
    software::meet(mask, "a vote", software::vote, &e);
    return (unsigned)e.taken;
}
inline int __any_sync(unsigned mask, int yes) { return __ballot_sync(mask, yes) != 0; }
inline int __all_sync(unsigned mask, int yes) { return __ballot_sync(mask, !yes) == 0; }
[[noreturn]] inline void __trap() { software::fail("the kernel ended itself"); }

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) { software::pause(); }

// Loads and stores with cache hints, which have no effect.
template <typename T> inline T __ldg(const T* p) { return *p; }
template <typename T> inline T __ldcg(const T* p) { return *(const volatile T*)p; }
template <> inline float2 __ldcg(const float2* p) { return software::as<float2>(__atomic_load_n((const uint64_t*)p, __ATOMIC_RELAXED)); }
template <> inline uint2 __ldcg(const uint2* p) { return software::as<uint2>(__atomic_load_n((const uint64_t*)p, __ATOMIC_RELAXED)); }
template <> inline float4 __ldcg(const float4* p) { return *p; }
template <> inline uint4 __ldcg(const uint4* p) { return *p; }
template <typename T> inline T __ldcs(const T* p) { return *p; }
template <typename T> inline void __stcg(T* p, T v) { *p = v; }
template <typename T> inline void __stcs(T* p, T v) { *p = v; }

template <typename T, typename U> inline T atomicAdd(T* p, U v) {
    if constexpr (sizeof(T) == 4 && T(0.5) != T(0)) {
        uint32_t before = __atomic_load_n((uint32_t*)p, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n((uint32_t*)p, &before, software::as<uint32_t>(software::as<T>(before) + (T)v), true,
                                            __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
        }
        return software::as<T>(before);
    } else {
        return __atomic_fetch_add(p, (T)v, __ATOMIC_SEQ_CST);
    }
}
template <typename T, typename U> inline T atomicSub(T* p, U v) { return __atomic_fetch_sub(p, (T)v, __ATOMIC_SEQ_CST); }
template <typename T, typename U> inline T atomicOr(T* p, U v) { return __atomic_fetch_or(p, (T)v, __ATOMIC_SEQ_CST); }
template <typename T, typename U> inline T atomicAnd(T* p, U v) { return __atomic_fetch_and(p, (T)v, __ATOMIC_SEQ_CST); }
template <typename T, typename U> inline T atomicExch(T* p, U v) {
    T of = (T)v, before;
    __atomic_exchange(p, &of, &before, __ATOMIC_SEQ_CST);
    return before;
}
template <typename T, typename U, typename V> inline T atomicCAS(T* p, U compare, V v) {
    T before = (T)compare;
    __atomic_compare_exchange_n(p, &before, (T)v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return before;
}
template <typename T, typename U> inline T atomicMax(T* p, U v) {
    T before = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (before < (T)v && !__atomic_compare_exchange_n(p, &before, (T)v, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
    }
    return before;
}
template <typename T, typename U> inline T atomicMin(T* p, U v) {
    T before = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (before > (T)v && !__atomic_compare_exchange_n(p, &before, (T)v, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
    }
    return before;
}

inline unsigned __float_as_uint(float v) { return software::as<unsigned>(v); }
inline float __uint_as_float(unsigned v) { return software::as<float>(v); }
inline int __float_as_int(float v) { return software::as<int>(v); }
inline float __int_as_float(int v) { return software::as<float>(v); }
// Each byte of the result is one of the eight bytes of b and a. A selector with its highest bit set repeats that byte's sign
// bit.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned of = selector >> (4 * i) & 15;
        unsigned byte = (unsigned)(bytes >> (8 * (of & 7))) & 0xff;
        if (of & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << (8 * i);
    }
    return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int)(int8_t)(a >> i) * (int8_t)(b >> i);
    return sum;
}

inline float __expf(float v) { return expf(v); }
inline float __logf(float v) { return logf(v); }
inline float __log2f(float v) { return log2f(v); }
inline float __powf(float v, float of) { return powf(v, of); }
inline float __sinf(float v) { return sinf(v); }
inline float __cosf(float v) { return cosf(v); }
inline float __fdividef(float v, float by) { return v / by; }
inline float __frcp_rn(float v) { return 1.0f / v; }
inline float __fsqrt_rn(float v) { return sqrtf(v); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float v) { return fminf(fmaxf(v, 0.0f), 1.0f); }
inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
inline int __float2int_rn(float v) { return (int)rintf(v); }
inline unsigned __float2uint_rn(float v) { return (unsigned)rintf(v); }
inline float __int2float_rn(int v) { return (float)v; }
inline float __uint2float_rn(unsigned v) { return (float)v; }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline unsigned long min(unsigned long a, unsigned long b) { return a < b ? a : b; }
inline unsigned long max(unsigned long a, unsigned long b) { return a > b ? a : b; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
