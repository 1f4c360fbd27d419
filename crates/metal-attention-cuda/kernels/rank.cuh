// The order of logits by which the largest is chosen.
#pragma once
#include "common.cuh"

// Larger values, and of equal ones lower places, are larger; a NaN is smaller than all.
__device__ __forceinline__ u64_t rank_of(float v, u32 i) {
    if (v != v) return 0;
    const u32 b = __float_as_uint(v == 0.0f ? 0.0f : v);
    const u32 ordered = b & 0x80000000u ? ~b : b | 0x80000000u;
    return (u64_t)ordered << 32 | (0xffffffffu - i);
}
