// Attention in decode steps (and for prefill tokens that prefill_attention.cu does not support): one token at a time over the KV
// cache of its sequence. All in F32, by online softmax (FlashAttention, arXiv 2205.14135).
//
// A block takes up to GROUP query heads of one KV head, for one token and one split of its pages (split-KV). In a decode step
// (APPENDED = false) the block also applies norm and RoPE to the token's queries and key, and appends key and value to the
// cache. The last block of a token's KV head to finish merges the splits' partial results.
#include "heads.cuh"
#include "masks.cuh"

struct AttentionArgs {
    HeadInputs inputs;               // norm and RoPE of queries and keys
    const Token* tokens;             // [n_tokens]
    Pages pages;                     // page tables of the layer's cache group
    void* k_cache;                   // [page][KV head][64 positions][head_dim], F16 or F32
    void* v_cache;                   // the same for values
    float* qkv;                      // [n_tokens][stride]: queries, keys, values; queries may be ready already
    float* out;                      // [n_tokens][n_head * head_dim]
    half* packed;                    // the same as packed F16, or null
    float* partial;                  // [n_tokens][n_head][n_splits][head_dim + 2]: weighted sum, largest score, sum of weights
    u32* tickets;                    // counters [n_tokens][n_head_kv * n_chunks], zero between launches
    const float* sinks;              // [n_head], or null
    u32 n_head, n_head_kv, head_dim; // query heads, KV heads, elements of a head
    u32 stride;                      // elements of a row of qkv
    u32 n_splits;                    // most splits of a token
    u32 n_chunks;                    // blocks that share the query heads of a KV head
    u32 n_token_tiles;               // of `packed`
    u32 mask, reach;                 // Mask (masks.cuh), and its number of positions
    float soft_cap;                  // 0: none
    u32 q_step;                      // elements of qkv from one query head to the next
    u32 k_at, v_at;                  // the first key and value of a row of qkv
    u32 unused;
    ResultGate gate;
};
ASSERT_LAYOUT(AttentionArgs);

// Threads of a block, and the most elements of a head.
constexpr int THREADS = 128;
constexpr int MAX_DIM = 256;

// Applies the gate, if there is one, to elements d (even) and d + 1 of a head's result, and stores them.
__device__ __forceinline__ void write_out(const AttentionArgs& a, u32 token, u32 head, u32 d, float2 v) {
    if (a.gate.gates) {
        v.x = apply_gate(a.gate, token, head, d, v.x);
        v.y = apply_gate(a.gate, token, head, d + 1, v.y);
    }
    const u32 i = head * a.head_dim + d;
    *(float2*)(a.out + (size_t)token * a.n_head * a.head_dim + i) = v;
    if (a.packed) *(half2*)(a.packed + packed_input(token, i, a.n_token_tiles)) = __floats2half2_rn(v.x, v.y);
}

// For prefill: applies norm and RoPE to queries (in place) and keys, and appends keys and values of all tokens to the cache. A
// warp for each head.
template <typename T> __device__ __forceinline__ void append(const AttentionArgs& a, float* heads) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = a.head_dim;
    const u32 head = blockIdx.x * (THREADS / 32) + warp, token = blockIdx.y;
    if (head >= a.n_head + 2 * a.n_head_kv) return;
    const Token info = a.tokens[token];
    float* row = a.qkv + (size_t)token * a.stride + (size_t)head * dim;
    float* v = heads + warp * dim;
    for (int i = lane; i < dim; i += 32) v[i] = row[i];
    __syncwarp();
    if (head < a.n_head) {
        make_head(v, a.inputs, a.inputs.q_norm, head, info.rope_row, dim, a.inputs.scale, lane);
        for (int i = lane; i < dim; i += 32) row[i] = v[i];
        return;
    }
    const bool is_key = head < a.n_head + a.n_head_kv;
    const u32 kv = head - a.n_head - (is_key ? 0 : a.n_head_kv);
    if (is_key) make_head(v, a.inputs, a.inputs.k_norm, kv, info.rope_row, dim, 1.0f, lane);
    const u32 page = a.pages.pages[(size_t)info.seq * a.pages.n_pages + info.pos / PAGE];
    T* at = (T*)(is_key ? a.k_cache : a.v_cache) + (((size_t)page * a.n_head_kv + kv) * PAGE + info.pos % PAGE) * dim;
    for (int i = lane; i < dim; i += 32) store(at + i, v[i]);
}

// Copies a page's keys or values to shared memory, to rows `row` elements apart.
template <typename T> __device__ __forceinline__ void copy_page(T* to, const T* from, int dim, int row) {
    const int per_vector = 16 / sizeof(T), n = PAGE * dim / per_vector;
    for (int i = threadIdx.x; i < n; i += THREADS) {
        const int at = i * per_vector;
        copy16(to + at / dim * row + at % dim, from + at);
    }
    commit_copies();
}

// Four, or two, consecutive elements as F32.
template <typename T> __device__ __forceinline__ void load_four(float (&v)[4], const T* p);
template <> __device__ __forceinline__ void load_four<half>(float (&v)[4], const half* p) {
    const uint2 w = *(const uint2*)p;
    const float2 x = __half22float2(halves(w.x)), y = __half22float2(halves(w.y));
    v[0] = x.x, v[1] = x.y, v[2] = y.x, v[3] = y.y;
}
template <> __device__ __forceinline__ void load_four<float>(float (&v)[4], const float* p) {
    const float4 w = *(const float4*)p;
    v[0] = w.x, v[1] = w.y, v[2] = w.z, v[3] = w.w;
}
__device__ __forceinline__ float2 load_two(const half* p) { return __half22float2(*(const half2*)p); }
__device__ __forceinline__ float2 load_two(const float* p) { return *(const float2*)p; }

// The first index of the sequence that a token sees, and the pages of a split of those up to `last`.
struct SplitRange {
    u32 begin, first_page, end_page, n_splits; // n_splits: those that have pages
};
// Up to FEW pages are not split, since merging splits costs more.
template <u32 FEW> __device__ __forceinline__ SplitRange split_range(const AttentionArgs& a, u32 pos, u32 last, u32 split) {
    SplitRange s;
    s.begin = first_seen(a.mask, a.reach, pos);
    const u32 first_page = s.begin / PAGE, n_pages = last / PAGE + 1 - first_page;
    const u32 pages_per_split = FEW > 1 && n_pages <= FEW ? n_pages : (n_pages + a.n_splits - 1) / a.n_splits;
    s.n_splits = (n_pages + pages_per_split - 1) / pages_per_split;
    s.first_page = first_page + split * pages_per_split;
    s.end_page = min(s.first_page + pages_per_split, first_page + n_pages);
    return s;
}

// Loads the queries of heads `head`.. to `q` and, if `has_new`, the token's own new key and value to `new_kv`, and applies
// norm, RoPE and scale. The new key and value go to the cache if `writes_cache`: several blocks may compute them, but only one
// stores them.
template <typename T, bool APPENDED>
__device__ __forceinline__ void make_heads(const AttentionArgs& a, const Token& info, const u32* pages, u32 kv, bool writes_cache, u32 head, u32 n_heads,
                                           bool has_new, float* q, float* new_kv, const float (&norms)[2][MAX_DIM], const float2* cos_sin) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, dim = a.head_dim;
    const float* row = a.qkv + (size_t)blockIdx.z * a.stride;
    const u32 n_rows = n_heads + (has_new ? 2 : 0), quads = dim / 4;
    for (u32 i = tid; i < n_rows * quads; i += THREADS) {
        const u32 h = i / quads, at = i % quads * 4;
        const u32 from = h < n_heads ? (head + h) * a.q_step : (h == n_heads ? a.k_at : a.v_at) + kv * dim;
        *(float4*)((h < n_heads ? q + h * dim : new_kv + (h - n_heads) * dim) + at) = *(const float4*)(row + from + at);
    }
    __syncthreads();
    for (u32 h = warp; !APPENDED && h < n_rows; h += THREADS / 32) {
        float* v = h < n_heads ? q + h * dim : new_kv + (h - n_heads) * dim;
        if (h <= n_heads) {
            const bool is_query = h < n_heads;
            const float* own_norm = is_query ? a.inputs.q_norm + (size_t)(head + h) * dim : a.inputs.k_norm + (size_t)kv * dim;
            const float* weight = a.inputs.norm == NORM_OF_HEAD ? norms[is_query ? 0 : 1] : a.inputs.norm == NORM_OF_EACH_HEAD ? own_norm : nullptr;
            make_head(v, a.inputs, weight, cos_sin, dim, is_query ? a.inputs.scale : 1.0f, lane);
        }
        if (h >= n_heads) {
            T* at = (T*)(h == n_heads ? a.k_cache : a.v_cache) +
                    (((size_t)pages[info.pos / PAGE] * a.n_head_kv + kv) * PAGE + info.pos % PAGE) * dim;
            for (int i = lane; i < dim; i += 32) {
                // Rounded as later tokens will read it from the cache.
                T rounded;
                store(&rounded, v[i]);
                v[i] = to_float(rounded);
                if (writes_cache) at[i] = rounded;
            }
        }
    }
}

// Stores elements d and d + 1 of a split's weighted sum, with its largest score and sum of weights; without splits, the final
// result.
__device__ __forceinline__ void write_split(const AttentionArgs& a, u32 token, u32 head, u32 split, u32 n_splits, u32 d, float2 v, float max_score, float sum) {
    if (n_splits > 1) {
        float* to = a.partial + ((size_t)(token * a.n_head + head) * a.n_splits + split) * (a.head_dim + 2);
        *(float2*)(to + d) = v;
        if (d == 0) *(float2*)(to + a.head_dim) = make_float2(max_score, sum);
        return;
    }
    float factor = 1.0f;
    if (a.sinks) {
        const float sink = a.sinks[head], above = fmaxf(max_score, sink);
        factor = __expf(max_score - above);
        sum = sum * factor + __expf(sink - above);
    }
    write_out(a, token, head, d, make_float2(v.x * factor / sum, v.y * factor / sum));
}

// Merges the splits' partial results, in the last block of the splits to arrive here; the others return. `factors`:
// [n_heads][32] in shared memory.
__device__ __forceinline__ void join_splits(const AttentionArgs& a, u32 token, u32 head, u32 n_heads, u32 n_splits, float* factors) {
    __shared__ bool is_last;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, dim = a.head_dim, columns = dim / 2;
    const float* splits = a.partial + ((size_t)(token * a.n_head + head) * a.n_splits) * (dim + 2);
    if (n_splits == 1) return;
    __threadfence();
    __syncthreads();
    if (tid == 0) {
        u32* ticket = a.tickets + (size_t)token * a.n_head_kv * a.n_chunks + blockIdx.x;
        is_last = atomicAdd(ticket, 1) == n_splits - 1;
        if (is_last) *ticket = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    // Factors of the splits: a warp for each head, a lane for each split (at most 32).
    for (int h = warp; h < (int)n_heads; h += THREADS / 32) {
        const float sink = a.sinks ? a.sinks[head + h] : -INFINITY;
        float2 of_split = make_float2(-INFINITY, 0.0f);
        if (lane < (int)n_splits) of_split = __ldcg((const float2*)(splits + ((size_t)h * a.n_splits + lane) * (dim + 2) + dim));
        const float max_score = fmaxf(sink, warp_max(of_split.x));
        const float factor = __expf(of_split.x - max_score);
        const float sum = warp_sum(factor * of_split.y) + (a.sinks ? __expf(sink - max_score) : 0.0f);
        factors[h * 32 + lane] = factor / sum;
    }
    __syncthreads();
    for (int i = tid; i < (int)n_heads * columns; i += THREADS) {
        const int h = i / columns, d = i % columns * 2;
        const float* from = splits + (size_t)h * a.n_splits * (dim + 2) + d;
        float2 v = make_float2(0.0f, 0.0f);
#pragma unroll 8
        for (u32 s = 0; s < n_splits; s++) {
            const float2 part = __ldcg((const float2*)(from + s * (dim + 2)));
            const float w = factors[h * 32 + s];
            v.x += w * part.x, v.y += w * part.y;
        }
        write_out(a, token, head + h, d, v);
    }
}

// APPENDED: the cache already has the tokens' keys and values, and the queries are ready. Else each token is the only new one
// of its sequence; then cached pages do not depend on the previous launch, and their loads start before `wait_for_input`.
template <typename T, int GROUP, bool APPENDED> __device__ __forceinline__ void attend(const AttentionArgs& a, float* memory) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, dim = a.head_dim, page_row = dim + 32 / (int)sizeof(T);
    const u32 kv = blockIdx.x / a.n_chunks, chunk = blockIdx.x % a.n_chunks, split = blockIdx.y, token = blockIdx.z;
    const u32 heads_per_kv = a.n_head / a.n_head_kv;
    const u32 head = kv * heads_per_kv + chunk * GROUP, n_heads = min((u32)GROUP, heads_per_kv - chunk * GROUP);
    // Otherwise tokens and pages are from an earlier launch than the previous one, as are all keys and values but the token's
    // own.
    if (APPENDED) wait_for_input();
    const Token info = a.tokens[token];
    const u32 last = APPENDED ? max(info.pos, info.last) : info.pos; // the last index that the token sees
    const SplitRange range = split_range<1>(a, info.pos, last, split);
    const u32 begin = range.begin, n_splits = range.n_splits;
    if (split >= n_splits) return;

    T* keys = (T*)memory;                                    // [PAGE][page_row]
    T* values = keys + PAGE * page_row;                      // [PAGE][page_row]
    float* q = (float*)(values + PAGE * page_row);           // [GROUP][dim]
    float* new_kv = q + GROUP * dim;                            // the token's new key, then its new value
    float* scores = new_kv + 2 * dim;                           // [GROUP][PAGE]
    float* running = scores + GROUP * PAGE;                  // [3][GROUP]: largest scores, sums of weights, last factors
    // Norm weights, if all heads have the same, and the RoPE cosines and sines of the token's position.
    __shared__ float norms[2][MAX_DIM];
    __shared__ float2 cos_sin[MAX_DIM / 2];

    const u32* pages = a.pages.pages + (size_t)info.seq * a.pages.n_pages;
    u32 p = range.first_page;
    const u32 last_page = range.end_page;
    const size_t page_size = (size_t)PAGE * dim;
    auto page_at = [&](u32 p) { return ((size_t)pages[p] * a.n_head_kv + kv) * page_size; };
    size_t at_page = page_at(p);
    copy_page(keys, (const T*)a.k_cache + at_page, dim, page_row);
    copy_page(values, (const T*)a.v_cache + at_page, dim, page_row);
    if (tid < GROUP) running[tid] = -INFINITY, running[GROUP + tid] = 0.0f;
    const bool of_head = a.inputs.norm == NORM_OF_HEAD;
    if (!APPENDED) {
        if (of_head)
            for (int i = tid; i < dim; i += THREADS) norms[0][i] = a.inputs.q_norm[i], norms[1][i] = a.inputs.k_norm[i];
        if (a.inputs.rotation != NO_ROPE)
            for (int i = tid; i < (int)a.inputs.n_rot / 2; i += THREADS) cos_sin[i] = a.inputs.rope[(size_t)info.rope_row * (a.inputs.n_rot / 2) + i];
        wait_for_input();
    }
    let_next_start();
    const bool has_new = !APPENDED && split == n_splits - 1;
    make_heads<T, APPENDED>(a, info, pages, kv, chunk == 0, head, n_heads, has_new, q, new_kv, norms, cos_sin);
    // Each thread has two columns of the values and every `groups`-th position.
    const int columns = dim / 2, groups = THREADS / columns, group = tid / columns, column = tid % columns;
    float acc[GROUP][2] = {};

    for (; p < last_page; p++) {
        wait_for_copies<1>();
        __syncthreads();
        // Scores: two threads for each position, which take four elements each in turn.
        const u32 at = tid / 2, pos = p * PAGE + at;
        const bool seen = pos >= begin && pos <= last, is_new = has_new && pos == info.pos;
        float dots[GROUP] = {};
        if (seen) {
            for (int i = tid % 2 * 4; i < dim; i += 8) {
                float k[4];
                if (is_new) load_four(k, new_kv + i);
                else load_four(k, keys + at * page_row + i);
#pragma unroll
                for (int h = 0; h < GROUP; h++) {
                    const float4 v = *(const float4*)(q + h * dim + i);
                    dots[h] += v.x * k[0] + v.y * k[1] + v.z * k[2] + v.w * k[3];
                }
            }
        }
#pragma unroll
        for (int h = 0; h < GROUP; h++) {
            float dot = dots[h] + __shfl_xor_sync(~0u, dots[h], 1);
            if (a.soft_cap != 0.0f) dot = a.soft_cap * tanhf(dot / a.soft_cap);
            if (tid % 2 == 0) scores[h * PAGE + at] = seen ? dot : -INFINITY;
        }
        __syncthreads();
        // The keys of the next page overwrite these while the values are used.
        const size_t next_page = p + 1 < last_page ? page_at(p + 1) : at_page;
        if (p + 1 < last_page) copy_page(keys, (const T*)a.k_cache + next_page, dim, page_row);
        for (int h = warp; h < (int)n_heads; h += THREADS / 32) {
            const float x = scores[h * PAGE + lane], y = scores[h * PAGE + 32 + lane];
            const float previous_max = running[h], max_score = fmaxf(previous_max, warp_max(fmaxf(x, y)));
            // A page with no visible position changes nothing.
            const float px = max_score == -INFINITY ? 0.0f : __expf(x - max_score), py = max_score == -INFINITY ? 0.0f : __expf(y - max_score);
            const float factor = max_score == -INFINITY ? 1.0f : __expf(previous_max - max_score);
            const float sum = warp_sum(px + py);
            scores[h * PAGE + lane] = px;
            scores[h * PAGE + 32 + lane] = py;
            __syncwarp();
            if (lane == 0) {
                running[h] = max_score;
                running[GROUP + h] = running[GROUP + h] * factor + sum;
                running[2 * GROUP + h] = factor;
            }
        }
        if (p + 1 < last_page) wait_for_copies<1>();
        else wait_for_copies<0>();
        __syncthreads();
        if (group < groups) {
#pragma unroll
            for (int h = 0; h < GROUP; h++)
                if (h < (int)n_heads) acc[h][0] *= running[2 * GROUP + h], acc[h][1] *= running[2 * GROUP + h];
            const int low = p * PAGE < begin ? begin - p * PAGE : 0, high = min((u32)PAGE, last + (has_new ? 0 : 1) - p * PAGE);
            auto add = [&](int i, float2 v) {
#pragma unroll
                for (int h = 0; h < GROUP; h++) {
                    const float w = scores[h * PAGE + i];
                    acc[h][0] += w * v.x, acc[h][1] += w * v.y;
                }
            };
#pragma unroll 4
            for (int i = low + group; i < high; i += groups) add(i, load_two(values + i * page_row + 2 * column));
            if (has_new && p == info.pos / PAGE && group == 0) add(info.pos % PAGE, *(const float2*)(new_kv + dim + 2 * column));
        }
        __syncthreads();
        if (p + 1 < last_page) copy_page(values, (const T*)a.v_cache + next_page, dim, page_row);
        at_page = next_page;
    }

    // Adds up the groups of positions: [head][group][dim], in the memory of the pages. Stores the split's partial result, or
    // the final one.
    float* joined = memory;
#pragma unroll
    for (int h = 0; h < GROUP; h++)
        if (group < groups) *(float2*)(joined + (h * groups + group) * dim + 2 * column) = make_float2(acc[h][0], acc[h][1]);
    __syncthreads();
    for (int i = tid; i < (int)n_heads * columns; i += THREADS) {
        const int h = i / columns, d = i % columns * 2;
        float2 v = make_float2(0.0f, 0.0f);
        for (int of_group = 0; of_group < groups; of_group++) {
            const float2 partial = *(const float2*)(joined + (h * groups + of_group) * dim + d);
            v.x += partial.x, v.y += partial.y;
        }
        write_split(a, token, head + h, split, n_splits, d, v, running[h], running[GROUP + h]);
    }
    join_splits(a, token, head, n_heads, n_splits, scores);
}

SHARED_MEMORY(128, float, attention_memory);

#ifndef TEMPLATES_ALONE
#define ATTENTION(NAME, T, GROUP)                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_##NAME##_##GROUP(const __grid_constant__ AttentionArgs a) { \
        attend<T, GROUP, false>(a, attention_memory);                                                              \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_appended_##NAME##_##GROUP(const __grid_constant__ AttentionArgs a) { \
        attend<T, GROUP, true>(a, attention_memory);                                                               \
    }
#define ATTENTIONS(NAME, T)                                                                      \
    ATTENTION(NAME, T, 1)                                                                        \
    ATTENTION(NAME, T, 2)                                                                        \
    ATTENTION(NAME, T, 4)                                                                        \
    ATTENTION(NAME, T, 8)                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) append_##NAME(const __grid_constant__ AttentionArgs a) { \
        wait_for_input();                                                                        \
        let_next_start();                                                                        \
        append<T>(a, attention_memory);                                                          \
    }
ATTENTIONS(f16, half)
ATTENTIONS(f32, float)
#endif
