// Argmax of logits: keys whose order is that of the logits, and the ids that the host reads.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

// The key of logit `v` of token `i`: larger for larger logits, for equal logits larger for lower ids, and 0 for NaN. High word: the logit; low word:
// 2^32 - 1 - i.
__device__ __forceinline__ u64_t argmax_key(float v, u32 i) {
    if (v != v) return 0;
    const u32 b = __float_as_uint(v == 0.0f ? 0.0f : v);
    const u32 ordered = b & 0x80000000u ? ~b : b | 0x80000000u;
    return (u64_t)ordered << 32 | (0xffffffffu - i);
}
// The largest key of a warp's lanes.
__device__ __forceinline__ u64_t highest_of_lanes(u64_t best) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        const u64_t other = __shfl_xor_sync(~0u, best, d);
        best = other > best ? other : best;
    }
    return best;
}

// Decode steps whose ids the host memory holds. Mirrored by `STEPS` of src/ids.rs.
constexpr u32 IDS = 16;
// Writes the id that decode step `number` has chosen for `row` to host memory. `ids`: [n_rows][IDS] words of number and id.
__device__ __forceinline__ void publish_id(u64_t* ids, u32 row, u32 number, u32 id) {
    store_for_peer(ids + row * IDS + number % IDS, (u64_t)number << 32 | id);
}
