// Makes queries, keys and values of their projections where attention.cu cannot: clamps, norms of all kinds, RoPE, an RMSNorm
// of values, and a scale of queries that grows with the position. Appends keys and values to the cache. A warp for each head.
#include "heads.cuh"

enum RowKind : u32 { RMS = 1, LAYER = 2 };
// In addition to those of heads.cuh: one norm over all heads of a row.
constexpr u32 NORM_OF_ROW = 4;

struct AttentionInputsArgs {
    HeadInputs inputs;                // norm and RoPE of queries and keys
    const float* q_bias;              // bias of the norm, or null
    const float* k_bias;              // bias of the norm, or null
    const Token* tokens;              // [n_tokens]
    Pages pages;                      // page tables of the layer's cache group
    void* k_cache;                    // [page][KV head][64 positions][head_dim], F16 or F32
    void* v_cache;                    // the same for values
    const float* qkv;                 // [n_tokens][stride]
    float* queries;                   // [n_tokens][n_head * head_dim]
    u32 n_head, n_head_kv, head_dim;  // query heads, KV heads, elements of a head
    u32 stride;                       // elements of a row of qkv
    u32 q_step;                       // elements of qkv from one query head to the next
    u32 k_at, v_at;                   // the first key and value of a row of qkv
    u32 owns_cache;                   // whether keys and values are appended; false: the layer reads those of another layer
    u32 kind;                         // RowKind of the norm
    float clamp;                      // INFINITY: none
    float value_eps;                  // negative: no norm of values
    float growth;                     // queries are multiplied by 1 + growth ln(1 + floor((pos + offset) / length))
    u32 growth_length, growth_offset; // length and offset, in positions
};
ASSERT_LAYOUT(AttentionInputsArgs);

constexpr int THREADS = 128;

// v, clamped to [-limit, limit].
__device__ __forceinline__ float limited(float v, float limit) { return fminf(fmaxf(v, -limit), limit); }

// The norm of head `v`, in place. `row`: the n elements over which the norm is computed, if these are more than the head.
__device__ __forceinline__ void normalize(float* v, const AttentionInputsArgs& a, const float* row, u32 n, const float* weight,
                                          const float* bias, int lane) {
    const bool of_row = a.inputs.norm == NORM_OF_ROW;
    auto element = [&](u32 i) { return of_row ? limited(row[i], a.clamp) : v[i]; };
    float mean = 0.0f, squares = 0.0f;
    if (a.kind == LAYER) {
        for (u32 i = lane; i < n; i += 32) mean += element(i);
        mean = warp_sum(mean) / n;
    }
    for (u32 i = lane; i < n; i += 32) squares += (element(i) - mean) * (element(i) - mean);
    const float factor = rsqrtf(warp_sum(squares) / n + a.inputs.eps);
    __syncwarp();
    for (u32 i = lane; i < a.head_dim; i += 32) {
        const float x = (v[i] - mean) * factor;
        v[i] = (weight ? x * weight[i] : x) + (bias ? bias[i] : 0.0f);
    }
    __syncwarp();
}

// One warp: a query, key or value head of a token. `heads`: shared memory, head_dim floats for each warp.
template <typename T> __device__ __forceinline__ void attention_inputs(const AttentionInputsArgs& a, float* heads) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = a.head_dim;
    const u32 at = blockIdx.x * (THREADS / 32) + warp, token = blockIdx.y;
    if (at >= a.n_head + (a.owns_cache ? 2 * a.n_head_kv : 0)) return;
    const Token info = a.tokens[token];
    const bool is_query = at < a.n_head, is_value = at >= a.n_head + a.n_head_kv;
    const u32 head = is_query ? at : is_value ? at - a.n_head - a.n_head_kv : at - a.n_head;
    const float* first = a.qkv + (size_t)token * a.stride + (is_query ? 0 : is_value ? a.v_at : a.k_at);
    const float* from = first + (size_t)head * (is_query ? a.q_step : dim);
    float* v = heads + warp * dim;
    for (u32 i = lane; i < dim; i += 32) v[i] = limited(from[i], a.clamp);
    __syncwarp();
    if (is_value) {
        if (a.value_eps >= 0.0f) norm_head(v, nullptr, a.value_eps, dim, lane);
    } else {
        const HeadInputs& in = a.inputs;
        const bool of_row = in.norm == NORM_OF_ROW, per_head_weights = of_row || in.norm == NORM_OF_EACH_HEAD;
        auto part = [&](const float* p) { return p ? p + (per_head_weights ? (size_t)head * dim : 0) : nullptr; };
        const float* weight = in.norm == NORM_UNWEIGHTED ? nullptr : part(is_query ? in.q_norm : in.k_norm);
        const float* bias = part(is_query ? a.q_bias : a.k_bias);
        const u32 n = of_row ? (is_query ? a.n_head : a.n_head_kv) * dim : dim;
        if (in.norm != NO_NORM && !in.norm_after_rope) normalize(v, a, first, n, weight, bias, lane);
        rotate_head(v, in, in.rope + (size_t)info.rope_row * (in.n_rot / 2), lane);
        if (in.norm != NO_NORM && in.norm_after_rope) normalize(v, a, first, n, weight, bias, lane);
    }
    if (is_query) {
        float scale = a.inputs.scale;
        if (a.growth != 0.0f) scale *= 1.0f + a.growth * logf(1.0f + (info.position + a.growth_offset) / a.growth_length);
        float* to = a.queries + ((size_t)token * a.n_head + head) * dim;
        for (u32 i = lane; i < dim; i += 32) to[i] = v[i] * scale;
        return;
    }
    const u32 page = a.pages.pages[(size_t)info.seq * a.pages.n_pages + info.pos / PAGE];
    T* to = (T*)(is_value ? a.v_cache : a.k_cache) + (((size_t)page * a.n_head_kv + head) * PAGE + info.pos % PAGE) * dim;
    for (u32 i = lane; i < dim; i += 32) store(to + i, v[i]);
}

SHARED_MEMORY(16, float, inputs_memory);

#define INPUTS(NAME, T)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_inputs_##NAME(const __grid_constant__ AttentionInputsArgs a) { \
        wait_for_input();                                                                                                \
        let_next_start();                                                                                                \
        attention_inputs<T>(a, inputs_memory);                                                                           \
    }
INPUTS(f16, half)
INPUTS(f32, float)
