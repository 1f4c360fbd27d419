// The order of logits by which the largest is chosen, and what becomes of it.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

// Larger values, and of equal ones lower places, are larger; a NaN is smaller than all.
__device__ __forceinline__ u64_t rank_of(float v, u32 i) {
    if (v != v) return 0;
    const u32 b = __float_as_uint(v == 0.0f ? 0.0f : v);
    const u32 ordered = b & 0x80000000u ? ~b : b | 0x80000000u;
    return (u64_t)ordered << 32 | (0xffffffffu - i);
}
// The highest of a warp's lanes.
__device__ __forceinline__ u64_t highest_of_lanes(u64_t best) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        const u64_t other = __shfl_xor_sync(~0u, best, d);
        best = other > best ? other : best;
    }
    return best;
}

// Steps whose ids have a place: as `STEPS` of src/ids.rs.
constexpr u32 IDS = 16;
// Tells the host what step `number` has chosen for `row`. `ids`: [n_rows][IDS].
__device__ __forceinline__ void tell_id(u64_t* ids, u32 row, u32 number, u32 id) {
    store_for_peer(ids + row * IDS + number % IDS, (u64_t)number << 32 | id);
}
