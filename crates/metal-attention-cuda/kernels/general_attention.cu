// Attention for everything that the faster kernels do not support: any mask, ALiBi, any head size, keys and values of different
// sizes. The cache already has the tokens' keys and values, and the queries are ready. One token at a time, all in F32: a block
// for each head of a token and split of its positions (split-KV); the last block of a head merges the partial results.
#include "heads.cuh"
#include "masks.cuh"

struct GeneralAttentionArgs {
    const Token* tokens;                       // [n_tokens]
    Pages pages;                               // page tables of the layer's cache group
    const void* k_cache;                       // [page][KV head][64][key_dim]
    const void* v_cache;                       // [page][KV head][64][value_dim]
    const float* queries;                      // [n_tokens][n_head * key_dim]
    float* out;                                // [n_tokens][n_head * value_dim]
    half* packed;                              // the same as packed F16, or null
    float* partial;                            // [n_tokens][n_head][n_splits][value_dim + 2]: weighted sum, largest score, sum of weights
    u32* tickets;                              // counters [n_tokens][n_head], zero between launches
    const float* sinks;                        // [n_head], or null
    const float* slopes;                       // ALiBi slopes, [n_head], or null
    u32 n_head, n_head_kv, key_dim, value_dim; // query heads, KV heads, elements of a key and of a value
    u32 n_splits;                              // most splits of a token
    u32 n_token_tiles;                         // of `packed`
    u32 mask, reach;                           // Mask (masks.cuh), and its number of positions
    float soft_cap;                            // 0: none
    u32 unused;
    ResultGate gate;
};
ASSERT_LAYOUT(GeneralAttentionArgs);

constexpr int THREADS = 128;
constexpr int LANES = 8;      // threads that share the score of a position
constexpr int COLUMNS = 4;    // most columns of the values of a thread
constexpr u32 TILE = THREADS; // positions that are processed at a time

// One block: a head of a token, and a split of its positions.
template <typename T> __device__ __forceinline__ void general_attention(const GeneralAttentionArgs& a, float* memory) {
    const u32 tid = threadIdx.x;
    const u32 head = blockIdx.x, split = blockIdx.y, token = blockIdx.z, kv = head / (a.n_head / a.n_head_kv);
    wait_for_input();
    let_next_start();
    const Token info = a.tokens[token];
    const u32 begin = first_seen(a.mask, a.reach, info.pos), end = end_seen(a.mask, a.reach, info.pos, info.last);
    // Splits are whole tiles of positions.
    const u32 n_tiles = (end - begin + TILE - 1) / TILE, tiles_each = (n_tiles + a.n_splits - 1) / a.n_splits;
    const u32 n_splits = (n_tiles + tiles_each - 1) / tiles_each;
    if (split >= n_splits) return;
    const u32 first = begin + split * tiles_each * TILE, last = min(end, first + tiles_each * TILE);

    float* q = memory;              // [key_dim]
    float* weights = q + a.key_dim; // [TILE]
    __shared__ float scratch[2 * THREADS / 32];
    __shared__ bool is_last;
    const float* query = a.queries + ((size_t)token * a.n_head + head) * a.key_dim;
    for (u32 i = tid; i < a.key_dim; i += THREADS) q[i] = query[i];
    const u32* pages = a.pages.pages + (size_t)info.seq * a.pages.n_pages;
    auto row_of = [&](u32 pos) { return ((size_t)pages[pos / PAGE] * a.n_head_kv + kv) * PAGE + pos % PAGE; };
    const float slope = a.slopes ? a.slopes[head] : 0.0f;
    float acc[COLUMNS] = {}, max_score = -INFINITY, sum = 0.0f;
    __syncthreads();
    for (u32 tile = first; tile < last; tile += TILE) {
        const u32 n = min(TILE, last - tile);
        for (u32 i = tid / LANES; i < TILE; i += THREADS / LANES) {
            float dot = 0.0f;
            if (i < n) {
                const T* key = (const T*)a.k_cache + row_of(tile + i) * a.key_dim;
                for (u32 d = tid % LANES; d < a.key_dim; d += LANES) dot += q[d] * to_float(key[d]);
            }
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
            if (a.soft_cap != 0.0f) dot = a.soft_cap * tanhf(dot / a.soft_cap);
            const u32 pos = tile + i;
            dot -= slope * (pos > info.pos ? pos - info.pos : info.pos - pos);
            if (tid % LANES == 0) weights[i] = i < n ? dot : -INFINITY;
        }
        __syncthreads();
        const float score = weights[tid];
        float larger = warp_max(score);
        if (tid % 32 == 0) scratch[tid / 32] = larger;
        __syncthreads();
        larger = max_score;
#pragma unroll
        for (int i = 0; i < THREADS / 32; i++) larger = fmaxf(larger, scratch[i]);
        const float shrink = __expf(max_score - larger), weight = __expf(score - larger);
        max_score = larger;
        weights[tid] = weight;
        sum = sum * shrink + weight;
        __syncthreads();
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) acc[c] *= shrink;
        for (u32 i = 0; i < n; i++) {
            const T* value = (const T*)a.v_cache + row_of(tile + i) * a.value_dim;
            const float w = weights[i];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
                if (tid + c * THREADS < a.value_dim) acc[c] += w * to_float(value[tid + c * THREADS]);
        }
        __syncthreads();
    }
    sum = warp_sum(sum);
    if (tid % 32 == 0) scratch[tid / 32] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) sum += scratch[i];

    auto write = [&](u32 d, float v) {
        if (a.gate.gates) v = apply_gate(a.gate, token, head, d, v);
        const u32 i = head * a.value_dim + d;
        a.out[(size_t)token * a.n_head * a.value_dim + i] = v;
        if (a.packed) a.packed[packed_input(token, i, a.n_token_tiles)] = __float2half_rn(v);
    };
    const float sink = a.sinks ? a.sinks[head] : -INFINITY;
    if (n_splits == 1) {
        const float larger = fmaxf(max_score, sink), factor = __expf(max_score - larger);
        sum = sum * factor + (a.sinks ? __expf(sink - larger) : 0.0f);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            if (tid + c * THREADS < a.value_dim) write(tid + c * THREADS, acc[c] * factor / sum);
        return;
    }
    const u32 width = a.value_dim + 2;
    float* splits = a.partial + ((size_t)token * a.n_head + head) * a.n_splits * width;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
        if (tid + c * THREADS < a.value_dim) splits[split * width + tid + c * THREADS] = acc[c];
    if (tid == 0) splits[split * width + a.value_dim] = max_score, splits[split * width + a.value_dim + 1] = sum;
    __threadfence();
    __syncthreads();
    if (tid == 0) {
        u32* ticket = a.tickets + (size_t)token * a.n_head + head;
        is_last = atomicAdd(ticket, 1) == n_splits - 1;
        if (is_last) *ticket = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    max_score = sink, sum = 0.0f;
    for (u32 s = 0; s < n_splits; s++) max_score = fmaxf(max_score, __ldcg(splits + s * width + a.value_dim));
    for (u32 s = 0; s < n_splits; s++)
        sum += __expf(__ldcg(splits + s * width + a.value_dim) - max_score) * __ldcg(splits + s * width + a.value_dim + 1);
    if (a.sinks) sum += __expf(sink - max_score);
    for (u32 d = tid; d < a.value_dim; d += THREADS) {
        float v = 0.0f;
        for (u32 s = 0; s < n_splits; s++) v += __expf(__ldcg(splits + s * width + a.value_dim) - max_score) * __ldcg(splits + s * width + d);
        write(d, v / sum);
    }
}

SHARED_MEMORY(16, float, general_memory);

#define GENERAL(NAME, T)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) general_attention_##NAME(const __grid_constant__ GeneralAttentionArgs a) { \
        general_attention<T>(a, general_memory);                                                                         \
    }
GENERAL(f16, half)
GENERAL(f32, float)
