// Attention of one token in the persistent decode kernel: split-KV, with an online softmax (arXiv 2205.14135) in two F16 parts, as exact as
// in F32. Inputs: words of q/k/v of the layer, the KV cache. Outputs: words of each split's weighted sum of values (`attention`) and of its
// maximum score and sum of weights (`attention_max_sums`); blocks with rows of the attention output merge the splits as they read them
// (`merge_splits`).
//
// An attention task is one split of the positions, one KV head, and a head group: up to HEADS_PER_TASK of its query heads. Task u = split *
// tasks_per_split + (kv head, head group) belongs to block u % gridDim.x.
#pragma once
#include "decode_exchange.cuh"
#include "masks.cuh"

__device__ __forceinline__ u32 max_splits(const LayerArgs& layer, u32 n_blocks) { return min(max(n_blocks / layer.tasks_per_split, 1u), 32u); }

// The positions that a token sees in a layer, divided into splits of whole KV pages, and the block's first task. Computed for all layers
// before a token begins; [n_layer] in shared memory.
struct __align__(16) AttentionSpan {
    u32 begin;                 // first position that the token sees
    u32 first_page;            // index of its page in the page table
    u32 n_pages;               // pages from there to the token's own
    u32 pages_per_split;       // pages of each split; the last one may have fewer
    u32 n_splits;              // splits in use
    u32 max_splits;            // splits that words exist for
    unsigned short split;      // of the block's first task
    unsigned short kv;         // its KV head
    unsigned short head_group; // its head group
    unsigned short unused;
};
__device__ __forceinline__ AttentionSpan* spans_of(const DecodeArgs& a) { return (AttentionSpan*)(decode_memory + a.spans_at); }
// `page_to_merge_time`: as in DecodeArgs.
__device__ __forceinline__ AttentionSpan span_of(const LayerArgs& layer, u32 pos, float page_to_merge_time) {
    AttentionSpan s;
    s.begin = first_seen(layer.mask, layer.mask_positions, pos);
    s.first_page = s.begin / PAGE;
    s.n_pages = pos / PAGE + 1 - s.first_page;
    s.max_splits = max_splits(layer, gridDim.x);
    // The time of a split grows with its pages, the time to merge with the number of splits; their sum is least at this square root.
    const u32 want = (u32)ceilf(sqrtf((float)s.n_pages * page_to_merge_time / (float)(layer.n_head * layer.head_dim)));
    const u32 n = min(min(want, s.n_pages), s.max_splits);
    s.pages_per_split = (s.n_pages + n - 1) / n;
    s.n_splits = (s.n_pages + s.pages_per_split - 1) / s.pages_per_split;
    const u32 task_in_split = blockIdx.x % layer.tasks_per_split;
    s.split = blockIdx.x / layer.tasks_per_split, s.kv = task_in_split / layer.head_groups_per_kv_head;
    s.head_group = task_in_split % layer.head_groups_per_kv_head, s.unused = 0;
    return s;
}

// The spans of attention of all layers for a token at `pos`, by `n_threads` threads, of which this is number `tid`.
__device__ __forceinline__ void find_spans(const DecodeArgs& a, u32 pos, int tid, int n_threads) {
    for (u32 i = tid; i < a.n_layer; i += n_threads) spans_of(a)[i] = span_of(a.layers[i], pos, a.page_to_merge_time);
}

constexpr int POSITIONS = 16; // positions of one step of a warp's loop

// Keys and values of POSITIONS positions of a KV head, in registers, straight from the cache in the order of mma operands. Lane l has g = l /
// 4 and t = l % 4. `keys[j]`: elements 16 t.. of each 64 of position 4 (g / 2) + g % 2 + 2 j. `values[i]`: elements 8 g.. of each 64 of
// position 4 t + i. Keys are columns of the first product; its results, scores of positions 4 t.. of head g, are rows of the second one.
// Positions that the token does not see repeat visible ones; their scores are masked later.
template <int HEAD_CHUNKS, int VALUES> struct KvFragments {
    uint4 keys[2][2 * HEAD_CHUNKS], values[4][VALUES];
    // `pos`: the first of the positions; `row`: its row in the cache. Positions from `begin` to `end` - 1 are visible and cached. The loads have no
    // branches of their own, which would make the compiler issue them one by one.
    __device__ __forceinline__ void load(const half* k, const half* v, size_t row, u32 pos, u32 begin, u32 end, int first_value, int dim, int lane) {
        const int g = lane / 4, t = lane % 4;
        if (pos >= end) {
#pragma unroll
            for (int c = 0; c < 2 * HEAD_CHUNKS; c++) keys[0][c] = keys[1][c] = make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int c = 0; c < VALUES; c++) values[0][c] = values[1][c] = values[2][c] = values[3][c] = make_uint4(0, 0, 0, 0);
            return;
        }
        k += row * dim, v += row * dim;
        auto offset = [&](int i) { return (int)(min(max(pos + i, begin), end - 1) - pos) * dim; };
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const half* from = k + offset(4 * (g / 2) + g % 2 + 2 * j);
#pragma unroll
            for (int c = 0; c < 2 * HEAD_CHUNKS; c++) keys[j][c] = *(const uint4*)(from + min(64 * (c / 2) + 16 * t + 8 * (c % 2), dim - 8));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const half* from = v + offset(4 * t + i);
#pragma unroll
            for (int c = 0; c < VALUES; c++) values[i][c] = *(const uint4*)(from + min(first_value + 64 * c + 8 * g, dim - 8));
        }
    }
    // Replaces position `token_pos`, the token's own, by `key` and `value` in shared memory: the cache may not have it yet.
    __device__ __forceinline__ void insert_own(const half* key, const half* value, u32 pos, u32 token_pos, int first_value, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (pos + 4 * (g / 2) + g % 2 + 2 * j == token_pos)
#pragma unroll
                for (int c = 0; c < 2 * HEAD_CHUNKS; c++) keys[j][c] = *(const uint4*)(key + 64 * (c / 2) + 16 * t + 8 * (c % 2));
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (pos + 4 * t + i == token_pos)
#pragma unroll
                for (int c = 0; c < VALUES; c++) values[i][c] = *(const uint4*)(value + first_value + 64 * c + 8 * g);
    }
};

// Moves the first element to the end.
__device__ __forceinline__ void rotate_left(float (&v)[4]) {
    const float first = v[0];
    v[0] = v[1], v[1] = v[2], v[2] = v[3], v[3] = first;
}
__device__ __forceinline__ u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Data for attention that does not depend on words, loaded one op earlier (during q/k/v).
struct HeadPrefetch {
    u32 ids;      // a KV page of the block's first task: page lane % 32 of the split
    u32 own_page; // the page of the token's position
};
// Constants of the layer's heads in shared memory, filled with asynchronous copies (Lemma 12).
struct HeadConstants {
    float2* cos_sin; // [n_rot / 2] of the token's position
    float* norms;    // [2][head_dim] weights of the norms of queries and keys
    __device__ __forceinline__ HeadConstants(const DecodeArgs& a, int dim)
        : cos_sin((float2*)(decode_memory + a.head_constants_at)), norms((float*)(cos_sin + dim / 2)) {}
};
// Starts these loads, in all consumer threads; blocks without a task load nothing.
__device__ __forceinline__ HeadPrefetch prefetch_heads(const DecodeArgs& a, const LayerArgs& layer, const AttentionSpan& span,
                                                       const Token& token, int tid) {
    HeadPrefetch prefetch = {0, 0};
    if (span.split >= span.n_splits) return prefetch;
    const u32* pages = layer.pages.pages + (size_t)token.seq * layer.pages.n_pages;
    const u32 first = span.first_page + span.split * span.pages_per_split;
    prefetch.ids = pages[min(min(first + span.pages_per_split, span.first_page + span.n_pages) - 1, first + tid % 32)];
    prefetch.own_page = pages[token.pos / PAGE];
    const HeadInputs& in = layer.head_inputs;
    const HeadConstants memory(a, layer.head_dim);
    if (in.rotation != NO_ROPE)
        for (int i = tid; i < (int)in.n_rot / 2; i += CONSUMER_THREADS) copy8(memory.cos_sin + i, in.rope + (size_t)token.rope_row * (in.n_rot / 2) + i);
    if (in.norm == NORM_OF_HEAD)
        for (int i = tid; i < (int)layer.head_dim; i += CONSUMER_THREADS) {
            const int pair = i % (layer.head_dim / 2) * 2;
            copy8(memory.norms + 2 * i, (i < (int)layer.head_dim / 2 ? in.q_norm : in.k_norm) + pair);
        }
    commit_copies();
    return prefetch;
}

// One head in the registers of a warp, from its words to attention's operand: lane l has pairs l, l + 32, ... of elements that RoPE rotates
// together. The constructor computes what does not depend on the words.
template <int HEAD_CHUNKS> struct HeadValues {
    int at[HEAD_CHUNKS][2];        // indices of the pair's elements; >= dim: none
    float2 cos_sin[HEAD_CHUNKS];   // of the pair
    float weights[HEAD_CHUNKS][2]; // of the norm
    bool normed;                   // whether there is a norm before the rotation
    bool normed_after;             // whether there is one after it
    float eps, scale;
    float v[HEAD_CHUNKS][2];
    // `norms`: whether there is a norm; `weight`: its weights, or null for ones; `rotates`: whether RoPE applies.
    __device__ __forceinline__ HeadValues(const HeadInputs& in, bool norms, const float* weight, bool rotates, const float2* cos_sin_of_pos,
                                          int dim, float scale, int lane)
        : normed(norms && !in.norm_after_rope), normed_after(norms && in.norm_after_rope), eps(in.eps), scale(scale) {
        const int n_pairs = rotates && in.rotation != NO_ROPE ? in.n_rot / 2 : 0, halves = in.rotation == HALVES ? in.n_rot / 2 : 0;
#pragma unroll
        for (int k = 0; k < HEAD_CHUNKS; k++) {
            const int pair = lane + 32 * k;
            at[k][0] = pair < halves ? pair : 2 * pair, at[k][1] = pair < halves ? pair + halves : 2 * pair + 1;
            cos_sin[k] = pair < n_pairs ? cos_sin_of_pos[pair] : make_float2(1.0f, 0.0f);
#pragma unroll
            for (int h = 0; h < 2; h++) weights[k][h] = norms && weight && at[k][h] < dim ? weight[at[k][h]] : 1.0f;
        }
    }
    __device__ __forceinline__ void take(const u64_t* from, int dim, u32 tag, int lane) {
        u64_t words[2 * HEAD_CHUNKS];
        bool there[2 * HEAD_CHUNKS];
#pragma unroll
        for (int k = 0; k < 2 * HEAD_CHUNKS; k++) there[k] = lane + 32 * (k / 2) < dim / 2;
        auto of = [&](int k) { return from + at[k / 2][k % 2] / 2; };
        load_words(words, there, of);
        wait_for_words(words, there, tag, of);
#pragma unroll
        for (int k = 0; k < 2 * HEAD_CHUNKS; k++) {
            const float2 two = unpack_pair(words[k]);
            v[k / 2][k % 2] = at[k / 2][k % 2] % 2 ? two.y : two.x;
        }
    }
    __device__ __forceinline__ void norm(int dim) {
        float squares = 0.0f;
#pragma unroll
        for (int k = 0; k < HEAD_CHUNKS; k++) squares += v[k][0] * v[k][0] + v[k][1] * v[k][1];
        const float inv_rms = rsqrtf(warp_sum(squares) / dim + eps);
#pragma unroll
        for (int k = 0; k < HEAD_CHUNKS; k++)
#pragma unroll
            for (int h = 0; h < 2; h++) v[k][h] *= inv_rms * weights[k][h];
    }
    // Norm, rotation and scale, like `make_head` of heads.cuh.
    __device__ __forceinline__ void make(int dim) {
        if (normed) norm(dim);
#pragma unroll
        for (int k = 0; k < HEAD_CHUNKS; k++) {
            const float2 rotation = cos_sin[k];
            const float x = v[k][0], y = v[k][1];
            v[k][0] = x * rotation.x - y * rotation.y, v[k][1] = x * rotation.y + y * rotation.x;
        }
        if (normed_after) norm(dim);
#pragma unroll
        for (int k = 0; k < HEAD_CHUNKS; k++) v[k][0] *= scale, v[k][1] *= scale;
    }
    // Stores a query as two F16 parts, `hi` and 2048 times the remainder in `lo`; elements from `dim` on are zeros. A query with values that F16 does
    // not have is divided by a power of two first, which is returned; otherwise returns 1.
    __device__ __forceinline__ float put_query(half* hi, half* lo, int dim) const {
        float largest = 0.0f, factor = 1.0f;
#pragma unroll
        for (int k = 0; k < HEAD_CHUNKS; k++) largest = fmaxf(largest, fmaxf(fabsf(v[k][0]), fabsf(v[k][1])));
        if (__any_sync(~0u, largest > 32768.0f)) {
            const u32 exponent = __float_as_uint(warp_max(largest)) >> 23;
            factor = exponent < 255 ? __uint_as_float((exponent - 13) << 23) : 1.0f;
        }
        const float down = __uint_as_float(0x7f000000u - __float_as_uint(factor));
#pragma unroll
        for (int k = 0; k < HEAD_CHUNKS; k++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int i = at[k][h];
                const float x = i < dim ? v[k][h] * down : 0.0f;
                const half high = __float2half_rn(x);
                hi[i] = high, lo[i] = __float2half_rn((x - __half2float(high)) * 2048.0f);
            }
        return factor;
    }
    // Stores a key or a value as F16, as later tokens see it: to `own` in shared memory, with zeros from `dim` on, and to the KV cache if `cached`.
    __device__ __forceinline__ void put(half* own, half* cached, int dim) const {
#pragma unroll
        for (int k = 0; k < HEAD_CHUNKS; k++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int i = at[k][h];
                half rounded_value;
                store(&rounded_value, i < dim ? v[k][h] : 0.0f);
                own[i] = rounded_value;
                if (cached && i < dim) cached[i] = rounded_value;
            }
    }
};

// Attention of one token in one layer: all consumer warps of the block evaluate its tasks, one after the other. Teams of PAIRED warps
// take POSITIONS positions alternately, with tensor-core products: rows g of an operand are the high F16 parts of head g, rows g + 8 the
// low ones. Each team has running maxima and sums of its own, which are merged at the end of the task. The task with the token's own position
// takes its key and value from words, and its first head group stores them to the KV cache.
//   HEAD_CHUNKS      elements of a head / 64, rounded up; for 4 a team has four warps, each with a quarter of the values
//   is_first_layer   whether it is the token's first layer, which also stores words of value 0 for the splits that are not in use (Lemma 2)
//   memory           scratch in shared memory, which is also that of the warps' inputs (Lemma 10)
template <int HEAD_CHUNKS>
__device__ __forceinline__ void attention(const DecodeArgs& a, const LayerArgs& layer, const AttentionSpan& span, const HeadPrefetch& prefetched,
                                          bool is_first_layer, u32 token_pos, u32 seq, u32 tag, float* memory) {
    // VALUES: groups of 64 elements of values that a warp has. PAIRED: warps of a team. AHEAD: steps of POSITIONS positions that are loaded ahead.
    // PADDED: elements of a head, padded. ROW: halves from one query to the next; 8 of padding keep them in different banks.
    constexpr int VALUES = HEAD_CHUNKS < 4 ? HEAD_CHUNKS : 1, PAIRED = HEAD_CHUNKS / VALUES, TEAMS = CONSUMER_WARPS / PAIRED;
    constexpr int AHEAD = HEAD_CHUNKS == 1 ? 2 : 1, PADDED = 64 * HEAD_CHUNKS, ROW = PADDED + 8;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4, dim = layer.head_dim;
    const int team = warp / PAIRED, first_value = warp % PAIRED * VALUES * 64;
    const u32 heads_per_kv = layer.heads_per_kv_head, n_tasks = layer.tasks_per_split * span.max_splits;
    half* high = (half*)memory;              // [HEADS_PER_TASK][ROW] high parts of queries
    half* low = high + HEADS_PER_TASK * ROW;
    half* own = low + HEADS_PER_TASK * ROW;  // [2][PADDED] the token's key and value
    float* factors = (float*)(own + 2 * PADDED); // [HEADS_PER_TASK] factors of queries
    float* partial = factors + HEADS_PER_TASK; // [team][HEADS_PER_TASK][dim] weighted sums of values
    float* states = partial + TEAMS * HEADS_PER_TASK * dim; // [team][HEADS_PER_TASK][2] maximum score and sum of weights
    const HeadConstants heads(a, dim);
    const u32* pages = layer.pages.pages + (size_t)seq * layer.pages.n_pages;
    const half *keys = (const half*)layer.k_cache, *values = (const half*)layer.v_cache;

    u32 split = span.split, kv = span.kv, head_group = span.head_group;
#pragma unroll 1
    for (u32 task = blockIdx.x; task < n_tasks; task += gridDim.x) {
        // Only devices with few multiprocessors have more than one task for a block.
        if (task != blockIdx.x) {
            const u32 task_in_split = task % layer.tasks_per_split;
            split = task / layer.tasks_per_split, kv = task_in_split / layer.head_groups_per_kv_head;
            head_group = task_in_split % layer.head_groups_per_kv_head;
        }
        const u32 head = kv * heads_per_kv + head_group * HEADS_PER_TASK;
        const u32 n_heads = min((u32)HEADS_PER_TASK, heads_per_kv - head_group * HEADS_PER_TASK);
        u64_t* out = a.attention + ((size_t)split * layer.n_head + head) * (dim / 2);
        if (split >= span.n_splits) {
            // The split is not in use, and no block reads its words for this token. The token's first layer still rewrites them: a word that is never
            // rewritten would some day have the tag that a longer sequence waits for (Lemma 2).
            if (!is_first_layer) continue;
            for (int i = tid; i < (int)n_heads * (dim / 2); i += CONSUMER_THREADS)
                store_words(out + i, tag, COPIES, a.attention_copy_words);
            if (tid < (int)n_heads) store_words(a.attention_max_sums + split * layer.n_head + head + tid, tag, COPIES, a.max_sums_copy_words);
            continue;
        }
        const u32 first = span.first_page + split * span.pages_per_split, last = min(first + span.pages_per_split, span.first_page + span.n_pages);
        const bool has_own = last == span.first_page + span.n_pages;
        const u32 end = min(last * (PAGE / POSITIONS), token_pos / POSITIONS + 1);
        u32 ids = prefetched.ids, ids_group = task == blockIdx.x ? 0 : ~0u; // 32 pages of the split, one a lane; which 32
        KvFragments<HEAD_CHUNKS, VALUES> ahead[AHEAD];
        auto load = [&](KvFragments<HEAD_CHUNKS, VALUES>& to, u32 at) {
            const u32 page = at / (PAGE / POSITIONS) - first;
            if (page / 32 != ids_group) ids_group = page / 32, ids = pages[min(first + ids_group * 32 + lane, last - 1)];
            const size_t row = ((size_t)__shfl_sync(~0u, ids, page % 32) * layer.n_head_kv + kv) * PAGE + at % (PAGE / POSITIONS) * POSITIONS;
            to.load(keys, values, row, at * POSITIONS, span.begin, at < end ? token_pos : 0, first_value, dim, lane);
        };
        // Keys and values of earlier tokens do not depend on this token's words: their loads start before the query has arrived.
        const u32 mine = first * (PAGE / POSITIONS) + team;
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            load(ahead[i], mine + i * TEAMS);
        const HeadInputs& in = layer.head_inputs;
        wait_for_copies<0>();
        consumer_barrier();
#pragma unroll 1
        for (u32 h = warp; h < n_heads + (has_own ? 2 : 0); h += CONSUMER_WARPS) {
            const bool is_query = h < n_heads;
            const u32 from = is_query ? head + h : h == n_heads ? layer.n_head + kv : layer.n_head + layer.n_head_kv + kv;
            const float* norm_weights = is_query ? in.q_norm + (size_t)(head + h) * dim : in.k_norm + (size_t)kv * dim;
            const float* weight = in.norm == NORM_OF_HEAD ? heads.norms + (is_query ? 0 : dim)
                                  : in.norm == NORM_OF_EACH_HEAD ? norm_weights : nullptr;
            const bool is_value = h > n_heads;
            HeadValues<HEAD_CHUNKS> values_of_head(in, in.norm != NO_NORM && !is_value, weight, !is_value, heads.cos_sin, dim,
                                         is_query ? in.scale : 1.0f, lane);
            half* cached = nullptr;
            if (!is_query && head_group == 0) {
                const u32 own_page = task == blockIdx.x ? prefetched.own_page : pages[token_pos / PAGE];
                half* cache = (half*)(is_value ? layer.v_cache : layer.k_cache);
                cached = cache + (((size_t)own_page * layer.n_head_kv + kv) * PAGE + token_pos % PAGE) * dim;
            }
            pin_register(cached);
            values_of_head.take(a.qkv + (size_t)from * (dim / 2), dim, tag, lane);
            if (!is_value) values_of_head.make(dim);
            if (is_query) {
                const float factor = values_of_head.put_query(high + h * ROW, low + h * ROW, dim);
                if (lane == 0) factors[h] = factor;
            } else {
                values_of_head.put(own + (h - n_heads) * PADDED, cached, dim);
            }
        }
        consumer_barrier();

        // The operand has eight rows of heads; rows beyond `n_heads` repeat the last head and are not stored.
        const u32 head_row = min((u32)g, n_heads - 1);
        const half *hi = high + head_row * ROW + 16 * t, *lo = low + head_row * ROW + 16 * t;
        const float factor_of_head = factors[head_row];
        float running_max = -INFINITY, sum = 0.0f, acc[VALUES][8][4] = {};
        for (u32 base = mine; base < end; base += AHEAD * TEAMS) {
#pragma unroll
            for (int n = 0; n < AHEAD; n++) {
                const u32 at = base + n * TEAMS, pos = at * POSITIONS + 4 * t;
                if (at >= end) break;
                KvFragments<HEAD_CHUNKS, VALUES>& here = ahead[n];
                if (at == token_pos / POSITIONS) here.insert_own(own, own + PADDED, at * POSITIONS, token_pos, first_value, lane);
                float scores[2][4] = {};
#pragma unroll
                for (int c = 0; c < 2 * HEAD_CHUNKS; c++) {
                    const uint4 x = *(const uint4*)(hi + 64 * (c / 2) + 8 * (c % 2)), y = *(const uint4*)(lo + 64 * (c / 2) + 8 * (c % 2));
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const uint4 k = here.keys[j][c];
                        mma(scores[j], x.x, y.x, x.y, y.y, k.x, k.y);
                        mma(scores[j], x.z, y.z, x.w, y.w, k.z, k.w);
                    }
                }
                float s[4], high_here = -INFINITY;
#pragma unroll
                for (int i = 0; i < 4; i++) s[i] = (scores[i / 2][i % 2] + scores[i / 2][i % 2 + 2] * (1.0f / 2048.0f)) * factor_of_head;
                // The cap is code that is used rarely: a loop keeps it short.
                if (layer.soft_cap != 0.0f)
#pragma unroll 1
                    for (int i = 0; i < 4; i++) s[0] = layer.soft_cap * tanhf(s[0] / layer.soft_cap), rotate_left(s);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (pos + i - span.begin > token_pos - span.begin) s[i] = -INFINITY;
                    high_here = fmaxf(high_here, s[i]);
                }
                high_here = fmaxf(high_here, __shfl_xor_sync(~0u, high_here, 1));
                high_here = fmaxf(high_here, __shfl_xor_sync(~0u, high_here, 2));
                const float now = fmaxf(running_max, high_here);
                // Where everything so far is masked the maximum is -infinity; 0 in its place makes all weights zero.
                const float from = now == -INFINITY ? 0.0f : now, before = __expf(running_max - from);
                half weights_high[4], weights_low[4];
                sum *= before;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float weight = __expf(s[i] - from);
                    sum += weight;
                    weights_high[i] = __float2half_rn(weight);
                    weights_low[i] = __float2half_rn((weight - __half2float(weights_high[i])) * 2048.0f);
                }
                running_max = now;
                if (base != mine || n > 0) // the accumulators are zero before the first positions
#pragma unroll
                    for (int c = 0; c < VALUES; c++)
#pragma unroll
                        for (int i = 0; i < 8; i++)
#pragma unroll
                            for (int r = 0; r < 4; r++) acc[c][i][r] *= before;
                const u32 a0 = bits(__halves2half2(weights_high[0], weights_high[1])), a2 = bits(__halves2half2(weights_high[2], weights_high[3]));
                const u32 a1 = bits(__halves2half2(weights_low[0], weights_low[1])), a3 = bits(__halves2half2(weights_low[2], weights_low[3]));
#pragma unroll
                for (int c = 0; c < VALUES; c++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        u32 v[4];
#pragma unroll
                        for (int k = 0; k < 4; k++) v[k] = word_of(here.values[k][c], i);
#pragma unroll
                        for (int k = 0; k < 2; k++) {
                            float(&to)[4] = acc[c][2 * i + k];
                            const u32 half_of = k == 0 ? 0x5410 : 0x7632;
                            mma(to, a0, a1, a2, a3, __byte_perm(v[0], v[1], half_of), __byte_perm(v[2], v[3], half_of));
                        }
                    }
                if (at + AHEAD * TEAMS < end) load(here, at + AHEAD * TEAMS);
            }
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (g < (int)n_heads) {
            if (t == 0 && first_value == 0) *(float2*)(states + 2 * (team * HEADS_PER_TASK + g)) = make_float2(running_max, sum);
#pragma unroll
            for (int c = 0; c < VALUES; c++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int d = first_value + 64 * c + 16 * t + 4 * i;
                    float v[4];
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        const float(&of)[4] = acc[c][4 * (i % 2) + k];
                        v[k] = of[i / 2] + of[i / 2 + 2] * (1.0f / 2048.0f);
                    }
                    if (d < dim) *(float4*)(partial + (team * HEADS_PER_TASK + g) * dim + d) = make_float4(v[0], v[1], v[2], v[3]);
                }
        }
        consumer_barrier();
        // Teams that had no positions have sums of zero and maxima of -infinity.
        const int n_teams = min(end - first * (PAGE / POSITIONS), (u32)TEAMS);
#pragma unroll 1
        for (int i = tid; i < (int)n_heads * (PADDED / 2); i += CONSUMER_THREADS) {
            const int h = i / (PADDED / 2), d = i % (PADDED / 2) * 2;
            if (d >= dim) continue;
            const float *first_state = states + 2 * h, *first_part = partial + h * dim + d;
            float high_of_all = -INFINITY, s = 0.0f;
            float2 v = make_float2(0.0f, 0.0f);
            auto join = [&](auto n_teams_max) {
                constexpr int N = decltype(n_teams_max)::value;
                float2 state[N], part[N];
#pragma unroll
                for (int w = 0; w < N; w++) {
                    state[w] = *(const float2*)(first_state + 2 * HEADS_PER_TASK * w);
                    part[w] = *(const float2*)(first_part + w * HEADS_PER_TASK * dim);
                    high_of_all = fmaxf(high_of_all, state[w].x);
                }
                // Rounded as readers will see it, so that sums and maximum agree.
                high_of_all = __uint_as_float(round_to_26_bits(high_of_all));
#pragma unroll
                for (int w = 0; w < N; w++) {
                    const float factor = __expf(state[w].x - high_of_all);
                    v.x += factor * part[w].x, v.y += factor * part[w].y, s += factor * state[w].y;
                }
            };
            if (n_teams <= 2) join(Constant<2>());
            else if (n_teams <= 4) join(Constant<4>());
            else join(Constant<TEAMS>());
            // The task has read its queries, and so may overwrite the words of the layer before (Lemma 6).
            store_words(out + h * (dim / 2) + d / 2, pack_pair(v.x, v.y, tag), COPIES, a.attention_copy_words);
            if (d == 0)
                store_words(a.attention_max_sums + split * layer.n_head + head + h, pack_pair(high_of_all, s, tag), COPIES, a.max_sums_copy_words);
        }
        // The scratch is reused by the next task, or by the warps' inputs of the next op (Lemma 10).
        consumer_barrier();
    }
}

// Loads QUADS quads of attention's result, quads i and i + 4 of the vector, merging their splits; zeros from quad `end` on. Waits for the
// words of all `n_splits` splits: `values` and `max_sums` are one copy of `DecodeArgs::attention` and `attention_max_sums`. ONE_HEAD: the quads
// always belong to the same head (head_dim is a multiple of 32).
template <int QUADS, bool ONE_HEAD>
__device__ __forceinline__ void merge_splits(const LayerArgs& layer, u32 n_splits, const u64_t* values, const u64_t* max_sums, u32 i, u32 end,
                                             u32 tag, float4 (&v)[QUADS]) {
    const u32 n_words = layer.n_head * layer.head_dim / 2;
    constexpr int HEADS = ONE_HEAD ? 1 : QUADS, SPLITS = 2; // heads of the quads; splits loaded at once
    float running_max[HEADS], sum[HEADS];
    u32 head[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        head[h] = __umulhi(4 * (i + 4 * h), layer.inverse_head_dim);
        const bool has_sink = layer.sinks && i + 4 * h < end;
        running_max[h] = has_sink ? layer.sinks[head[h]] : -INFINITY, sum[h] = layer.sinks ? 1.0f : 0.0f;
    }
#pragma unroll
    for (int q = 0; q < QUADS; q++) v[q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (u32 first = 0; first < n_splits; first += SPLITS) {
        constexpr int N = QUADS * SPLITS, M = HEADS * SPLITS;
        ulonglong2 words[N];
        u64_t states[M];
        bool there[N], is_seen[M];
        const ulonglong2* first_words = (const ulonglong2*)values + first * (n_words / 2) + i;
        const u64_t* first_states = max_sums + first * layer.n_head;
        auto from = [&](int k) { return first_words + k / QUADS * (n_words / 2) + 4 * (k % QUADS); };
        auto state_from = [&](int k) { return first_states + k / HEADS * layer.n_head + head[k % HEADS]; };
        // With ONE_HEAD both quads are inside the vector, or neither is.
#pragma unroll
        for (int k = 0; k < N; k++) there[k] = first + k / QUADS < n_splits && i + 4 * (k % QUADS % HEADS) < end;
#pragma unroll
        for (int k = 0; k < M; k++) is_seen[k] = there[k / HEADS * QUADS + k % HEADS];
        load_words(states, is_seen, state_from);
        load_words(words, there, from);
        wait_for_words(words, there, from, states, is_seen, state_from, tag);
        // Factors that bring both splits to the larger maximum; words that were not wanted are zeros.
        float factors[M], before[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float highs[SPLITS], now = running_max[h];
#pragma unroll
            for (int k = 0; k < SPLITS; k++) {
                highs[k] = is_seen[k * HEADS + h] ? unpack_pair(states[k * HEADS + h]).x : -INFINITY;
                now = fmaxf(now, highs[k]);
            }
            const float high = now == -INFINITY ? 0.0f : now;
            before[h] = __expf(running_max[h] - high);
            sum[h] *= before[h];
#pragma unroll
            for (int k = 0; k < SPLITS; k++) {
                factors[k * HEADS + h] = __expf(highs[k] - high);
                sum[h] += factors[k * HEADS + h] * unpack_pair(states[k * HEADS + h]).y;
            }
            running_max[h] = now;
        }
        if (first > 0)
#pragma unroll
            for (int q = 0; q < QUADS; q++) {
                const float by = before[q % HEADS];
                multiply_by(v[q], make_float4(by, by, by, by));
            }
#pragma unroll
        for (int k = 0; k < N; k++) {
            const float4 part = unpack_quad(words[k]);
            const float by = factors[k / QUADS * HEADS + k % QUADS % HEADS];
            float4& to = v[k % QUADS];
            to.x += by * part.x, to.y += by * part.y, to.z += by * part.z, to.w += by * part.w;
        }
    }
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        const float scale = i + 4 * (q % HEADS) < end ? 1.0f / sum[q % HEADS] : 0.0f;
        multiply_by(v[q], make_float4(scale, scale, scale, scale));
    }
}
