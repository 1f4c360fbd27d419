// Exchange of results in the persistent decode kernel: between blocks, and between the warps of a block.
//
// Between blocks: tagged words in global memory, in the manner of NCCL's LL ("low latency") protocol. A word is 8 bytes, stored and
// loaded at once: two values of 26 bits (a float without its six lowest mantissa bits) and a tag of 12 bits (drawn in decode.cuh). The
// reader polls until the tag is the wanted one; then the values are there as well.
//
// Memory ordering between blocks. Words are stored and loaded with relaxed accesses of gpu scope (`store_exchanged`,
// `load_exchanged`). An aligned access of 8 bytes is not torn, so that the values need no fence. A load of 16 bytes is two words,
// each with its own tag. That a word is not overwritten before all blocks have read it rests on data flow, not on fences: see Lemmas 3
// to 7 of docs/design/decode-kernel.md. The only data that other blocks read and that is not in words is the KV cache; it is ordered by the
// fences around the exchange of best logits (Lemma 8).
//
// Budget of tags. A token uses 2 * n_layer + 2 consecutive tags modulo 2^12. Layer i, from 0 to the pseudo-layer n_layer of the output
// head, has the layer tag t = first + 2 i. Words of q/k/v, attention, router, gated rows and the residual stream after attention have t,
// the residual stream after the feed-forward has t + 1. Best logits have the next token's first tag. Tags continue from launch to launch
// (`self.args.tag` of src/decode.rs) and wrap every 4096 / (2 * n_layer + 2) tokens. The host only uses the kernel where
// 2 * n_layer + 2 < 2^11. Wrapping is safe because every word that is read was also written during the token before, so that its old tag
// differs from the wanted one by less than 2^11. Lemma 2 proves this and names the exceptions. Tag 0 is that of memory that was never
// written; the first token has tags from 2 on and does not reach it.
//
// Inside a block: named barriers, two counters in shared memory (`ExpertChoice::n_published` of decode_routing.cuh, `SmallOpSync::n_finished`),
// and the rings' mbarriers (decode_weights.cuh). Barrier 0 is __syncthreads, at the kernel's beginning only.
#pragma once
#include "decode.cuh"

enum NamedBarrier : int {
    CONSUMER_BARRIER = 1, // all consumer warps
    SUMS_BARRIER = 2,     // small ops: consumer warps arrive with partial sums, the epilogue warp waits
    TOKEN_BARRIER = 3,    // SMALL kernels, between two tokens: consumer warps and the epilogue warp
};

// All consumer threads wait for each other; shared memory that one wrote before is visible to all afterwards.
__device__ __forceinline__ void consumer_barrier() { named_barrier_sync<CONSUMER_BARRIER, CONSUMER_THREADS>(); }
// All consumer threads and the epilogue warp wait for each other, between two tokens of a SMALL kernel (Lemma 13).
__device__ __forceinline__ void token_barrier() { named_barrier_sync<TOKEN_BARRIER, CONSUMER_THREADS + 32>(); }

// The handshake of small ops between the consumer warps, which leave partial sums, and the epilogue warp, which finishes rows
// (Lemma 15). Small ops are numbered from 0 in the launch.
struct SmallOpSync {
    u32 n_finished;      // small ops whose rows the epilogue warp has finished
    u64_t sums, finished; // FOR_RACECHECK only: mbarriers whose phases are ops
    __device__ __forceinline__ void init() {
        n_finished = 0;
        if constexpr (FOR_RACECHECK) barrier_init(&sums, CONSUMER_THREADS), barrier_init(&finished, 32);
    }
    // Consumer warp: its partial sums are stored. Does not wait.
    __device__ __forceinline__ void arrive_with_sums() {
        if constexpr (FOR_RACECHECK) barrier_arrive(&sums);
        else named_barrier_arrive<SUMS_BARRIER, CONSUMER_THREADS + 32>();
    }
    // Epilogue warp: waits for the partial sums of all consumer warps of op `n`.
    __device__ __forceinline__ void wait_for_sums(u32 n) {
        if constexpr (FOR_RACECHECK)
            while (!barrier_try_wait(&sums, n & 1)) spin_pause();
        else
            named_barrier_sync<SUMS_BARRIER, CONSUMER_THREADS + 32>();
    }
    // Epilogue warp: one more op is finished. All lanes have read the sums, as they took part in a shuffle since.
    __device__ __forceinline__ void publish_finished(int lane) {
        if constexpr (FOR_RACECHECK) barrier_arrive(&finished);
        else if (lane == 0) *(volatile u32*)&n_finished = n_finished + 1;
    }
    // Consumer warp: waits until `n` ops are finished. It has to before it arrives at SUMS_BARRIER for op `n`: a warp whose inputs come
    // early, or that has no columns, could otherwise arrive twice before others have arrived once.
    __device__ __forceinline__ void wait_until_finished(u32 n) {
        if constexpr (FOR_RACECHECK)
            while (!barrier_try_wait(&finished, ~n & 1)) spin_pause();
        else
            while (*(const volatile u32*)&n_finished != n) spin_pause();
    }
};

// The tag's bits of a word: bits 0 to 11. The second value has bits 12 to 37, the first one bits 38 to 63.
constexpr u32 TAG_MASK = 0xfff;
// A layer's tag minus that of the layer before: a layer writes the residual stream twice, with different tags.
constexpr u32 TAGS_PER_LAYER = 2;
// A float without its six lowest mantissa bits, rounded. The product adds 0.375 to 0.75 of the last bit that is kept (for a mantissa from 1
// to 2) before the rest is cut off. Unlike an integer addition it leaves infinities and NaN as they are; and a rounded value stays the same
// when it is rounded again.
__device__ __forceinline__ u32 round_to_26_bits(float v) { return __float_as_uint(v * (1.0f + 0.75f / (1 << 18))) & ~63u; }
__device__ __forceinline__ u64_t pack_pair(float a, float b, u32 tag) {
    const u32 x = round_to_26_bits(a), y = round_to_26_bits(b);
    return (u64_t)(x | y >> 26) << 32 | (y << 6 | tag);
}
__device__ __forceinline__ float2 unpack_pair(u64_t word) {
    return make_float2(__uint_as_float((u32)(word >> 32) & ~63u), __uint_as_float((u32)(word >> 6) & ~63u));
}
// The four values of two words.
__device__ __forceinline__ float4 unpack_quad(const ulonglong2& words) {
    const float2 a = unpack_pair(words.x), b = unpack_pair(words.y);
    return make_float4(a.x, a.y, b.x, b.y);
}
__device__ __forceinline__ bool has_tag(u64_t word, u32 tag) { return ((u32)word & TAG_MASK) == tag; }
__device__ __forceinline__ bool has_tag(const ulonglong2& words, u32 tag) { return ((((u32)words.x ^ tag) | ((u32)words.y ^ tag)) & TAG_MASK) == 0; }
// Whether words have `tag` or a later one: less than half of all tags after it.
__device__ __forceinline__ bool is_at_or_after(u64_t word, u32 tag) { return (((u32)word - tag) & TAG_MASK) <= TAG_MASK / 2; }
__device__ __forceinline__ bool is_at_or_after(const ulonglong2& words, u32 tag) {
    return is_at_or_after(words.x, tag) && is_at_or_after(words.y, tag);
}

// Starts loading N words, or pairs of words, of each lane, without waiting for tags. Lane and k with `wanted[k]` load from `from(k)`;
// the others get zeros.
template <int N, typename W, typename P> __device__ __forceinline__ void load_words(W (&words)[N], const bool (&wanted)[N], P from) {
#pragma unroll
    for (int k = 0; k < N; k++) {
        words[k] = W();
        load_exchanged_if(wanted[k], words[k], from(k));
    }
}
// Waits until all wanted words of the warp's lanes have `tag`: loads again those that do not. All lanes of the warp call it.
template <int N, typename W, typename P> __device__ __forceinline__ void wait_for_words(W (&words)[N], const bool (&wanted)[N], u32 tag, P from) {
    while (true) {
        bool missing[N], any = false;
#pragma unroll
        for (int k = 0; k < N; k++) missing[k] = wanted[k] & !has_tag(words[k], tag), any |= missing[k];
        if (!__any_sync(~0u, any)) return;
        spin_pause();
#pragma unroll
        for (int k = 0; k < N; k++) load_exchanged_if(missing[k], words[k], from(k));
    }
}
// Waits for two sets of words with the same tag in one loop.
template <int N, typename W, typename P, int M, typename V, typename Q>
__device__ __forceinline__ void wait_for_words(W (&words)[N], const bool (&wanted)[N], P from, V (&more)[M], const bool (&more_wanted)[M],
                                               Q more_from, u32 tag) {
    while (true) {
        bool missing[N], more_missing[M], any = false;
#pragma unroll
        for (int k = 0; k < N; k++) missing[k] = wanted[k] & !has_tag(words[k], tag), any |= missing[k];
#pragma unroll
        for (int k = 0; k < M; k++) more_missing[k] = more_wanted[k] & !has_tag(more[k], tag), any |= more_missing[k];
        if (!__any_sync(~0u, any)) return;
        spin_pause();
#pragma unroll
        for (int k = 0; k < N; k++) load_exchanged_if(missing[k], words[k], from(k));
#pragma unroll
        for (int k = 0; k < M; k++) load_exchanged_if(more_missing[k], more[k], more_from(k));
    }
}
// Stores `word` to `n` copies, `stride` words apart; n is at most COPIES.
__device__ __forceinline__ void store_words(u64_t* to, u64_t word, u32 n, u32 stride) {
#pragma unroll
    for (u32 c = 0; c < COPIES; c++)
        if (c < n) store_exchanged(to + c * stride, word);
}
