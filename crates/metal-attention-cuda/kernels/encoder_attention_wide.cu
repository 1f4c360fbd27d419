// Attention of encoders of pictures with warpgroup instructions (`wgmma`), for compute capability 9.0: without a mask, in F16 with F32
// sums and online softmax (FlashAttention-3, arXiv 2407.08608, without its overlap within a warpgroup).
#include "encoder_units.cuh"

// Keys that a pipeline stage holds, and of a panel of keys or of elements.
constexpr u32 KEYS = 128, PANEL = 64;
// Consumer warpgroups, of 64 queries each, beside the producer.
constexpr int GROUPS = 3, CONSUMERS = 128 * GROUPS;

SHARED_MEMORY(1024, unsigned char, attention_memory);

// Keys in memory: a stage may begin at any panel, and reach KEYS behind it.
__device__ __forceinline__ u32 padded_keys(u32 n_keys) { return (n_keys + KEYS + PANEL - 1) / PANEL * PANEL; }
// Panels of the elements of a key.
template <u32 D> constexpr u32 ELEMENT_PANELS = (D + PANEL - 1) / PANEL;

// Converts keys and values to F16, as `wide_mma` reads columns: pieces of 8 halves are permuted by XOR with the row % 8.
// Keys: [head][panel of elements][padded keys][64]. Values, transposed: [head][panel of keys][D][64]. A block takes 64 keys of a head.
template <u32 D> __device__ __forceinline__ void heads_wide(const EncoderHeadsArgs& a) {
    constexpr u32 ROW = PANEL + 8;
    __shared__ uint4 memory[D * ROW / 8];
    half* values = (half*)memory;
    wait_for_input();
    let_next_start();
    const u32 first = blockIdx.x * PANEL, head = blockIdx.y, n_padded = padded_keys(a.n_keys);
    half* k = a.k_heads + (size_t)head * ELEMENT_PANELS<D> * n_padded * PANEL;
    half* v = a.v_heads + ((size_t)head * n_padded + first) * D;
    for (u32 i = threadIdx.x; i < PANEL * D / 2; i += blockDim.x) {
        const u32 key = i / (D / 2), element = 2 * (i % (D / 2));
        const bool there = first + key < a.n_keys && element < a.head_dim;
        const size_t from = (size_t)(first + key) * a.width + head * a.head_dim + element;
        const float2 of_k = there ? *(const float2*)(a.k + from) : make_float2(0.0f, 0.0f);
        const float2 of_v = there ? *(const float2*)(a.v + from) : make_float2(0.0f, 0.0f);
        const size_t to = ((size_t)(element / PANEL) * n_padded + first + key) * PANEL + (element % PANEL / 8 ^ key % 8) * 8 + element % 8;
        *(half2*)(k + to) = __floats2half2_rn(of_k.x, of_k.y);
        values[element * ROW + key] = __float2half_rn(of_v.x);
        values[(element + 1) * ROW + key] = __float2half_rn(of_v.y);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < D * PANEL / 8; i += blockDim.x) {
        const u32 element = i / 8, piece = i % 8;
        *(uint4*)(v + element * PANEL + (piece ^ element % 8) * 8) = *(const uint4*)(values + element * ROW + piece * 8);
    }
}

// Shared memory: barriers, and the ring of pipeline stages: keys [panel of elements][KEYS][64], values [2 panels of keys][D][64].
template <u32 D> struct Ring {
    static constexpr u32 K_BYTES = KEYS * PANEL * 2, V_BYTES = 2 * D * PANEL * 2, STAGE = ELEMENT_PANELS<D> * K_BYTES + V_BYTES, STAGES = 4;
    static __device__ __forceinline__ u64_t* full(u32 stage) { return (u64_t*)attention_memory + stage; }
    static __device__ __forceinline__ u64_t* empty(u32 stage) { return (u64_t*)attention_memory + STAGES + stage; }
    static __device__ __forceinline__ half* keys(u32 stage, u32 panel) { return (half*)(attention_memory + 1024 + stage * STAGE + panel * K_BYTES); }
    static __device__ __forceinline__ half* values(u32 stage, u32 panel) {
        return (half*)(attention_memory + 1024 + stage * STAGE + ELEMENT_PANELS<D> * K_BYTES + panel * D * PANEL * 2);
    }
};

__device__ __forceinline__ void wait_at(u64_t* barrier, u32 phase) {
    while (!barrier_try_wait(barrier, phase)) spin_pause();
}

// The producer, one thread: copies the keys and values of each stage.
template <u32 D> __device__ __forceinline__ void fill(const EncoderUnitsArgs& a, const EncoderTile& tile) {
    typedef Ring<D> R;
    const u32 n_padded = padded_keys(a.n_keys), base = tile.key / PANEL * PANEL, end = tile.key + tile.n_keys;
    const half* k = a.k_heads + (size_t)kv_head(a) * ELEMENT_PANELS<D> * n_padded * PANEL;
    const half* v = a.v_heads + (size_t)kv_head(a) * n_padded * D;
    u32 stage = 0, phase = 0;
    for (u32 key = base; key < end; key += KEYS) {
        wait_at(R::empty(stage), phase ^ 1);
        barrier_arrive_expecting(R::full(stage), R::STAGE);
#pragma unroll
        for (u32 panel = 0; panel < ELEMENT_PANELS<D>; panel++) copy_bulk(R::keys(stage, panel), k + ((size_t)panel * n_padded + key) * PANEL, R::K_BYTES, R::full(stage));
        copy_bulk(R::values(stage, 0), v + (size_t)key * D, R::V_BYTES, R::full(stage));
        if (++stage == R::STAGES) stage = 0, phase ^= 1;
    }
}

// A consumer: 64 queries of the tile, of which each warp has 16.
template <u32 D> __device__ __forceinline__ void attend(const EncoderUnitsArgs& a, const EncoderTile& tile) {
    typedef Ring<D> R;
    const u32 lane = threadIdx.x % 32, t = lane % 4, row = threadIdx.x / 32 * 16 + lane / 4;
    u32 q[D / 16][4];
    load_queries<D>(a, tile.query, row, tile.n, t, q);
    float out[D / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    const u32 base = tile.key / PANEL * PANEL, end = tile.key + tile.n_keys;
    u32 stage = 0, phase = 0;
    for (u32 key = base; key < end; key += KEYS) {
        float score[KEYS / 8][4] = {};
        wait_at(R::full(stage), phase);
        stay(score);
        wide_begin();
#pragma unroll
        for (u32 s = 0; s < D / 16; s++) wide_mma(score, q[s], wide_columns(R::keys(stage, s / 4)), s % 4);
        wide_commit();
        wide_wait<0>();
        stay(score);
        // Keys before and behind those of the tile.
        if (key < tile.key || key + KEYS > end) {
#pragma unroll
            for (u32 j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 at = key + 8 * j + 2 * t + i % 2;
                    if (at < tile.key || at >= end) score[j][i] = -INFINITY;
                }
        }
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            float now = largest[r];
#pragma unroll
            for (u32 j = 0; j < KEYS / 8; j++) now = fmaxf(now, fmaxf(score[j][2 * r], score[j][2 * r + 1]));
            now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
            now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
            const float factor = power_of_two(largest[r] - now);
            largest[r] = now;
            sum[r] *= factor;
#pragma unroll
            for (u32 j = 0; j < D / 8; j++) out[j][2 * r] *= factor, out[j][2 * r + 1] *= factor;
#pragma unroll
            for (u32 j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (u32 i = 2 * r; i < 2 * r + 2; i++) {
                    score[j][i] = power_of_two(score[j][i] - now);
                    sum[r] += score[j][i];
                }
        }
        u32 p[KEYS / 16][4];
#pragma unroll
        for (u32 s = 0; s < KEYS / 16; s++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) p[s][i] = bits(__floats2half2_rn(score[2 * s + i / 2][2 * (i % 2)], score[2 * s + i / 2][2 * (i % 2) + 1]));
        stay(out);
        wide_begin();
#pragma unroll
        for (u32 s = 0; s < KEYS / 16; s++) wide_mma(out, p[s], wide_columns(R::values(stage, s / 4)), s % 4);
        wide_commit();
        wide_wait<0>();
        stay(out);
        __syncwarp();
        if (lane == 0) barrier_arrive(R::empty(stage));
        if (++stage == R::STAGES) stage = 0, phase ^= 1;
    }
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        if (row + 8 * r < tile.n) store_result<D>(a, tile.query + row + 8 * r, t, out, 2 * r, 1.0f / sum[r]);
    }
}

// A block: a tile of up to 192 queries, and a head of up to D elements.
template <u32 D> __device__ __forceinline__ void attention_wide(const EncoderUnitsArgs& a) {
    typedef Ring<D> R;
    static_assert(2 * R::STAGES * 8 <= 1024, "barriers");
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < R::STAGES; stage++) barrier_init(R::full(stage), 1), barrier_init(R::empty(stage), CONSUMERS / 32);
        fence_barrier_init();
    }
    __syncthreads();
    wait_for_input();
    let_next_start();
    const EncoderTile tile = a.tiles[blockIdx.x];
    if (threadIdx.x >= CONSUMERS) {
        release_registers<24>();
        if (threadIdx.x == CONSUMERS) fill<D>(a, tile);
        return;
    }
    take_registers<160>();
    attend<D>(a, tile);
}

#define ATTENTION_WIDE(D)                                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) encoder_heads_wide_##D(const __grid_constant__ EncoderHeadsArgs a) { heads_wide<D>(a); } \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) encoder_attention_wide_##D(const __grid_constant__ EncoderUnitsArgs a) { attention_wide<D>(a); }
ATTENTION_WIDE(64)
ATTENTION_WIDE(80)
