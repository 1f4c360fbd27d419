// Attention masks: which positions a token sees.
#pragma once
#include "common.cuh"

// Mirrored by `mask_code` of src/parts/attention.rs.
enum Mask : u32 { CAUSAL = 0, WINDOW = 1, CHUNK = 2, FULL = 3, NEAR = 4 };

// The first index that a token at index `pos` of its sequence sees, and the index after the last one. `reach`: the length of the window or chunk;
// `last`: `Token::last`. A causal mask ends at the token itself, or at `last` where that is later, as in a bidirectional span.
__device__ __forceinline__ u32 first_seen(u32 mask, u32 reach, u32 pos) {
    if (mask == WINDOW) return pos + 1 > reach ? pos + 1 - reach : 0;
    if (mask == CHUNK) return pos / reach * reach;
    if (mask == NEAR) return pos > reach ? pos - reach : 0;
    return 0;
}
__device__ __forceinline__ u32 end_seen(u32 mask, u32 reach, u32 pos, u32 last) {
    if (mask == FULL) return last + 1;
    if (mask == NEAR) return reach < last && pos + reach < last ? pos + reach + 1 : last + 1;
    return max(pos, last) + 1;
}
