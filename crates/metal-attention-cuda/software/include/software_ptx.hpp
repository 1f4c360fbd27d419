// Replaces `kernels/ptx.cuh`. A kernel starts after all earlier ones have ended, so that waiting for them does nothing.
#pragma once
#include "software_half.hpp"

typedef uint32_t u32;
typedef unsigned long long u64_t;

#define SHARED_MEMORY(ALIGNMENT, T, name) static constexpr software::SharedMemory<T> name {}

inline void wait_for_input() {}
inline void let_next_start() {}
inline void prefetch_l2(const void*) {}
inline uint4 load_stream(const uint4* p) { return *p; }
inline uint2 load_stream(const uint2* p) { return *p; }
inline u32 load_stream(const u32* p) { return *p; }

namespace software {
// A lane's fragments of an F16 matrix product.
struct Product {
    u32 a[4], b[2];
    float* c;
};
// Multiplies the fragments of all lanes. Sums are F32, in the order of the columns of a.
void multiply(void* const (&given)[32], u32 arrived);

// A lane's fragments of a product of 8-bit integers.
struct CodeProduct {
    u32 a[4], b[2];
    int* d;
    bool has_sign; // whether the bytes of a are signed
};
void multiply_codes(void* const (&given)[32], u32 arrived);

struct Rows {
    const half* row;
    u32* to;
};
// A product with N columns of b, as `wide_mma` of kernels/ptx.cuh computes it. Each warp of a warp group computes its rows.
struct WideProduct {
    const u32* a;
    const half* b;
    float (*c)[4];
    int columns, step;
};
void multiply_wide(void* const (&given)[32], u32 arrived);
void give_rows(void* const (&given)[32], u32 arrived);
void give_columns(void* const (&given)[32], u32 arrived);
}  // namespace software

inline void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    software::Product mine = {{a0, a1, a2, a3}, {b0, b1}, c};
    software::meet(~0u, "a product of matrices", software::multiply, &mine);
}
inline void mma_new(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    for (float& v : d) v = 0.0f;
    mma(d, a0, a1, a2, a3, b0, b1);
}
template <bool SIGNED> inline void mma_codes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    software::CodeProduct mine = {{a0, a1, a2, a3}, {b0, b1}, d, SIGNED};
    software::meet(~0u, "a product of bytes", software::multiply_codes, &mine);
}
template <bool SIGNED> inline void add_mma_codes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    int more[4];
    mma_codes<SIGNED>(more, a0, a1, a2, a3, b0, b1);
    for (int i = 0; i < 4; i++) d[i] += more[i];
}
inline u32 and_xor(u32 v, u32 mask, u32 flip) { return (v & mask) ^ flip; }
inline u32 and_or(u32 v, u32 mask, u32 flags) { return v & mask | flags; }
inline float power_of_two(float v) { return exp2f(v); }
inline float larger(float a, float b) { return a != a || b != b ? __uint_as_float(0x7fffffffu) : a > b ? a : b; }
template <int ID, int THREADS> inline void named_barrier_sync() { software::block_barrier(ID, THREADS); }
template <int ID, int THREADS> inline void named_barrier_arrive() { software::block_arrive(ID, THREADS); }
inline void named_barrier_sync(u32 id, u32 threads) { software::block_barrier(id, threads); }
template <int N> inline void release_registers() {}
template <int N> inline void take_registers() {}
template <int TILES> inline void stay(float (&)[TILES][4]) {}
inline void wide_begin() {}
inline void wide_commit() {}
template <int N> inline void wide_wait() {}
typedef const half* WideColumns;
inline WideColumns wide_columns(const half* b) { return b; }
template <int TILES> inline void wide_mma(float (&c)[TILES][4], const u32 (&a)[4], WideColumns b, int step) {
    software::WideProduct mine = {a, b, c, 8 * TILES, step};
    software::meet(~0u, "a product of a group of warps", software::multiply_wide, &mine);
}
inline void load_matrices(u32 (&r)[4], const half* row) {
    software::Rows mine = {row, r};
    software::meet(~0u, "matrices", software::give_rows, &mine);
}
inline void load_matrices_transposed(u32 (&r)[4], const half* row) {
    software::Rows mine = {row, r};
    software::meet(~0u, "turned matrices", software::give_columns, &mine);
}

inline void copy16(void* to, const void* from) { software::copy_later(to, from, 16, false); }
inline void copy8(void* to, const void* from) { software::copy_later(to, from, 8, false); }
inline void copy16_or_zero(void* to, const void* from, bool there) { software::copy_later(to, from, 16, !there); }
inline void commit_copies() { software::commit_copies(); }
template <int N> inline void wait_for_copies() { software::finish_copies(N); }

inline void barrier_init(u64_t* barrier, u32 count) { software::barrier_init((uint64_t*)barrier, count); }
inline void fence_barrier_init() {}
inline void barrier_arrive(u64_t* barrier) { software::barrier_arrive((uint64_t*)barrier, 0); }
inline void barrier_arrive_expecting(u64_t* barrier, u32 bytes) { software::barrier_arrive((uint64_t*)barrier, bytes); }
inline bool barrier_try_wait(u64_t* barrier, u32 phase) {
    if (software::barrier_ended((uint64_t*)barrier, phase)) return true;
    software::pause();
    return software::barrier_ended((uint64_t*)barrier, phase);
}
inline bool barrier_has_ended(u64_t* barrier, u32 phase) { return software::barrier_ended((uint64_t*)barrier, phase); }
inline void copy_bulk(void* to, const void* from, u32 bytes, u64_t* barrier) {
    software::copy_for_barrier(to, from, bytes, (uint64_t*)barrier);
}
inline u64_t evict_first_policy() { return 0; }
inline void copy_bulk(void* to, const void* from, u32 bytes, u64_t* barrier, u64_t) { copy_bulk(to, from, bytes, barrier); }

// 16 bytes are read and written as two words of 8.
inline u32 load_relaxed(const u32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline uint2 load_relaxed(const uint2* p) { return software::as<uint2>(__atomic_load_n((const uint64_t*)p, __ATOMIC_RELAXED)); }
inline uint4 load_relaxed(const uint4* p) {
    const uint2 low = load_relaxed((const uint2*)p), high = load_relaxed((const uint2*)p + 1);
    return {low.x, low.y, high.x, high.y};
}
inline u32 load_acquire(const u32* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void store_relaxed(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline void store_relaxed(uint2* p, uint2 v) { __atomic_store_n((uint64_t*)p, software::as<uint64_t>(v), __ATOMIC_RELAXED); }
inline void store_relaxed(uint4* p, uint4 v) {
    store_relaxed((uint2*)p, make_uint2(v.x, v.y));
    store_relaxed((uint2*)p + 1, make_uint2(v.z, v.w));
}
inline void store_release(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void add_relaxed(u32* p, u32 v) { __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline void add_release(u32* p, u32 v) { __atomic_fetch_add(p, v, __ATOMIC_RELEASE); }
inline u64_t load_exchanged(const u64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline ulonglong2 load_exchanged(const ulonglong2* p) { return {load_exchanged(&p->x), load_exchanged(&p->y)}; }
template <typename W> inline void load_exchanged_if(bool wanted, W& v, const W* p) {
    if (wanted) v = load_exchanged(p);
}
inline void store_exchanged(u64_t* p, u64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline u64_t load_from_peer(const u64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline u32 load_from_peer(const u32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline void store_for_peer(u64_t* p, u64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline void store_for_peer(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline void spin_pause() { software::pause(); }
inline void sleep_briefly() { software::pause(); }
