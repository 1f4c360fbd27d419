// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) in the absorbed form. The cache has one compressed
// row for each position, [rank + n_shared], which is the key of all heads; its first `rank` elements are also their value.
// Queries have been expanded to compressed rows before; the results, [token][head][rank], are expanded to values afterwards.
// Split-KV: blocks share the positions of a token, and `latent_merge` merges their partial results.
#include "heads.cuh"

struct LatentInputsArgs {
    const Token* tokens;                // [n_tokens]
    Pages pages;                        // page tables of the layer's cache group
    void* cache;                        // [page][64 positions][rank + n_shared]
    const float* q;                     // [token][head][n_nope + n_shared]
    const float* kv;                    // [token][rank + n_shared]
    const float* norm;                  // weights of the norm of compressed rows, [rank]
    const float2* rope;                 // RoPE cos/sin table, [rows][n_shared / 2]
    float* queries;                     // [token][head][rank + n_shared]; in: the first `rank` of each head, without their scale
    u32 n_head, n_nope, rank, n_shared; // heads; elements of a query without RoPE; value part of a compressed row; part with RoPE
    u32 rotation;                       // Rotation
    float eps;                          // of the norm
    float scale;                        // of queries
    float temperature;                  // scale of the growth of scores with the position; 0: none
    u32 length, offset;                 // of that growth
};
ASSERT_LAYOUT(LatentInputsArgs);

// Pair `pair` of a vector, rotated by RoPE.
__device__ __forceinline__ float2 turned(const LatentInputsArgs& a, const float* v, u32 rope_row, u32 pair) {
    const u32 i = a.rotation == HALVES ? pair : 2 * pair, j = a.rotation == HALVES ? pair + a.n_shared / 2 : 2 * pair + 1;
    const float x = v[i], y = v[j];
    if (a.rotation == NO_ROPE) return make_float2(x, y);
    const float2 cos_sin = a.rope[(size_t)rope_row * (a.n_shared / 2) + pair];
    return make_float2(x * cos_sin.x - y * cos_sin.y, x * cos_sin.y + y * cos_sin.x);
}

// Norm and RoPE; appends to the cache. Block 0 of a token takes its compressed row, block 1 + h the query of head h.
template <typename T> __device__ __forceinline__ void latent_inputs(const LatentInputsArgs& a) {
    __shared__ float scratch[8];
    wait_for_input();
    let_next_start();
    const Token token = a.tokens[blockIdx.y];
    const u32 key_dim = a.rank + a.n_shared;
    auto write_turned = [&](const float* v, float scale, auto* out) {
        for (u32 pair = threadIdx.x; pair < a.n_shared / 2; pair += blockDim.x) {
            const float2 t = turned(a, v, token.rope_row, pair);
            store(out + (a.rotation == HALVES ? pair : 2 * pair), scale * t.x);
            store(out + (a.rotation == HALVES ? pair + a.n_shared / 2 : 2 * pair + 1), scale * t.y);
        }
    };
    if (blockIdx.x == 0) {
        const float* kv = a.kv + (size_t)blockIdx.y * key_dim;
        float squares = 0.0f;
        for (u32 i = threadIdx.x; i < a.rank; i += blockDim.x) squares += kv[i] * kv[i];
        const float rms = rsqrtf(block_sum_max(squares, 0.0f, scratch).x / a.rank + a.eps);
        const u32 page = a.pages.pages[(size_t)token.seq * a.pages.n_pages + token.pos / PAGE];
        T* out = (T*)a.cache + ((size_t)page * PAGE + token.pos % PAGE) * key_dim;
        for (u32 i = threadIdx.x; i < a.rank; i += blockDim.x) store(out + i, kv[i] * rms * a.norm[i]);
        write_turned(kv + a.rank, 1.0f, out + a.rank);
        return;
    }
    const u32 head = blockIdx.x - 1;
    const float growth =
        a.temperature == 0.0f ? 1.0f : 1.0f + a.temperature * logf(1.0f + (float)((token.position + a.offset) / a.length));
    const float scale = a.scale * growth;
    const size_t at = (size_t)blockIdx.y * a.n_head + head;
    float* out = a.queries + at * key_dim;
    for (u32 i = threadIdx.x; i < a.rank; i += blockDim.x) out[i] *= scale;
    write_turned(a.q + at * (a.n_nope + a.n_shared) + a.n_nope, scale, out + a.rank);
}
extern "C" __global__ void __launch_bounds__(128) latent_inputs_f16(const __grid_constant__ LatentInputsArgs a) { latent_inputs<half>(a); }
extern "C" __global__ void __launch_bounds__(128) latent_inputs_f32(const __grid_constant__ LatentInputsArgs a) { latent_inputs<float>(a); }

struct LatentAttentionArgs {
    const Token* tokens;                  // [n_tokens]
    Pages pages;                          // page tables of the layer's cache group
    const void* cache;                    // [page][64 positions][rank + n_shared]
    const float* queries;                 // [token][head][rank + n_shared]
    float* out;                           // [token][head][rank]
    float* partial;                       // [token][head][split][rank + 2]: weighted sum, largest score, sum of weights
    u32 n_head, rank, n_shared, n_splits; // heads, value part and rest of a compressed row, splits of the positions
};
ASSERT_LAYOUT(LatentAttentionArgs);
// Heads of a block, one for each warp; positions that it processes at a time, one for each lane; pairs of elements of a value
// for each lane.
constexpr int HEADS = 8;
constexpr int POSITIONS = 32;
constexpr int PAIRS = 8;

// Two consecutive elements as F32.
__device__ __forceinline__ float2 pair_at(const half* p) { return __half22float2(*(const half2*)p); }
__device__ __forceinline__ float2 pair_at(const float* p) { return *(const float2*)p; }

SHARED_MEMORY(16, unsigned char, latent_memory);

// A block computes some heads of a token over its split of the positions, by online softmax.
template <typename T> __device__ __forceinline__ void latent_attention(const LatentAttentionArgs& a) {
    constexpr u32 VECTOR = 16 / sizeof(T);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 key_dim = a.rank + a.n_shared, n_vectors = (key_dim + VECTOR - 1) / VECTOR;
    // An odd stride in vectors, so that lanes read different banks.
    const u32 stride = (n_vectors | 1) * VECTOR;
    T* keys = (T*)(unsigned char*)latent_memory;                       // [POSITIONS][stride]
    float* queries = (float*)(keys + POSITIONS * stride); // [HEADS][n_vectors * VECTOR]
    wait_for_input();
    let_next_start();
    const Token token = a.tokens[blockIdx.z];
    const u32 head = blockIdx.x * HEADS + warp;
    const bool in_range = head < a.n_head;
    const size_t row = (size_t)blockIdx.z * a.n_head + head;
    float* q = queries + warp * n_vectors * VECTOR;
    for (u32 i = lane; i < n_vectors * VECTOR; i += 32) q[i] = in_range && i < key_dim ? a.queries[row * key_dim + i] : 0.0f;

    const u32 last = max(token.pos, token.last);
    const u32 n_blocks = (last + POSITIONS) / POSITIONS; // of indices 0..=last
    const u32 blocks_per_split = (n_blocks + a.n_splits - 1) / a.n_splits;
    const u32 first = blockIdx.y * blocks_per_split, end = min(first + blocks_per_split, n_blocks);
    float max_score = -INFINITY, sum = 0.0f;
    float2 acc[PAIRS] = {};
    for (u32 block = first; block < end; block++) {
        const u32 start = block * POSITIONS;
        const u32 page = a.pages.pages[(size_t)token.seq * a.pages.n_pages + start / PAGE];
        const T* from = (const T*)a.cache + ((size_t)page * PAGE + start % PAGE) * key_dim;
        const u32 n = min((u32)POSITIONS, last + 1 - start);
        __syncthreads();
        if (key_dim % VECTOR == 0) {
            for (u32 i = threadIdx.x; i < POSITIONS * n_vectors; i += blockDim.x) {
                const u32 p = i / n_vectors, v = i % n_vectors;
                ((uint4*)(keys + p * stride))[v] = p < n ? ((const uint4*)(from + (size_t)p * key_dim))[v] : make_uint4(0, 0, 0, 0);
            }
        } else {
            for (u32 i = threadIdx.x; i < POSITIONS * stride; i += blockDim.x) {
                const u32 p = i / stride, e = i % stride;
                store(keys + i, p < n && e < key_dim ? to_float(from[(size_t)p * key_dim + e]) : 0.0f);
            }
        }
        __syncthreads();
        float score = 0.0f;
        for (u32 v = 0; v < n_vectors; v++) {
            const uint4 words = ((const uint4*)(keys + lane * stride))[v];
            const T* k = (const T*)&words;
#pragma unroll
            for (u32 i = 0; i < VECTOR; i++) score += q[v * VECTOR + i] * to_float(k[i]);
        }
        if (lane >= (int)n) score = -INFINITY;
        const float previous_max = max_score;
        max_score = fmaxf(max_score, warp_max(score));
        const float shrink = expf(previous_max - max_score), weight = expf(score - max_score);
        sum = sum * shrink + warp_sum(weight);
#pragma unroll
        for (int i = 0; i < PAIRS; i++) acc[i].x *= shrink, acc[i].y *= shrink;
        for (u32 p = 0; p < n; p++) {
            const float weight_of_p = __shfl_sync(~0u, weight, p);
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const u32 e = 2 * (lane + 32 * i);
                if (e >= a.rank) continue;
                const float2 value = pair_at(keys + p * stride + e);
                acc[i].x += weight_of_p * value.x, acc[i].y += weight_of_p * value.y;
            }
        }
    }
    if (!in_range) return;
    const bool whole = a.n_splits == 1;
    float* out = whole ? a.out + row * a.rank : a.partial + (row * a.n_splits + blockIdx.y) * (a.rank + 2);
    const float factor = whole ? 1.0f / sum : 1.0f;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const u32 e = 2 * (lane + 32 * i);
        if (e < a.rank) out[e] = factor * acc[i].x, out[e + 1] = factor * acc[i].y;
    }
    if (!whole && lane == 0) out[a.rank] = max_score, out[a.rank + 1] = sum;
}
extern "C" __global__ void __launch_bounds__(32 * HEADS) latent_attention_f16(const __grid_constant__ LatentAttentionArgs a) {
    latent_attention<half>(a);
}
extern "C" __global__ void __launch_bounds__(32 * HEADS) latent_attention_f32(const __grid_constant__ LatentAttentionArgs a) {
    latent_attention<float>(a);
}

// Merges the splits' partial results; a block for a head of a token.
extern "C" __global__ void __launch_bounds__(128) latent_merge(const __grid_constant__ LatentAttentionArgs a) {
    wait_for_input();
    let_next_start();
    const size_t row = (size_t)blockIdx.y * a.n_head + blockIdx.x;
    const u32 width = a.rank + 2;
    const float* partial = a.partial + row * a.n_splits * width;
    float max_score = -INFINITY, sum = 0.0f;
    for (u32 s = 0; s < a.n_splits; s++) max_score = fmaxf(max_score, partial[s * width + a.rank]);
    for (u32 s = 0; s < a.n_splits; s++) sum += partial[s * width + a.rank + 1] * expf(partial[s * width + a.rank] - max_score);
    for (u32 i = threadIdx.x; i < a.rank; i += blockDim.x) {
        float v = 0.0f;
        for (u32 s = 0; s < a.n_splits; s++) v += partial[s * width + i] * expf(partial[s * width + a.rank] - max_score);
        a.out[row * a.rank + i] = v / sum;
    }
}
