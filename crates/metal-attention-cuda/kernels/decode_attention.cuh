// Attention of one token by all blocks of decode.cu: softmax with running maxima (arXiv 2205.14135), as exact as in F32.
#pragma once
#include "decode.cuh"
#include "masks.cuh"

__device__ __forceinline__ u32 most_splits(const Layer& l, u32 n_blocks) { return min(max(n_blocks / l.units_a_split, 1u), 32u); }

// What a token sees of a layer: positions, whose pages are split among units; and the block's first unit. The same for all steps of a token,
// found before the first.
struct __align__(16) Span {
    u32 begin, first_page, n_pages, pages_each;
    u32 n_splits, most_splits;
    unsigned short split, kv, chunk, unused;
};
__device__ __forceinline__ Span* spans_of(const DecodeArgs& a) { return (Span*)(decode_memory + a.spans_at); }
// `gain`: of a split, beside what it takes to join it.
__device__ __forceinline__ Span span_of(const Layer& l, u32 pos, float gain) {
    Span s;
    s.begin = first_seen(l.mask, l.reach, pos);
    s.first_page = s.begin / PAGE;
    s.n_pages = pos / PAGE + 1 - s.first_page;
    s.most_splits = most_splits(l, gridDim.x);
    // What a page takes grows with the pages of a split, what it takes to join them with the splits.
    const u32 want = (u32)ceilf(sqrtf((float)s.n_pages * gain / (float)(l.n_head * l.head_dim)));
    const u32 n = min(min(want, s.n_pages), s.most_splits);
    s.pages_each = (s.n_pages + n - 1) / n;
    s.n_splits = (s.n_pages + s.pages_each - 1) / s.pages_each;
    const u32 of_split = blockIdx.x % l.units_a_split;
    s.split = blockIdx.x / l.units_a_split, s.kv = of_split / l.chunks_a_kv_head, s.chunk = of_split % l.chunks_a_kv_head, s.unused = 0;
    return s;
}

constexpr int POSITIONS = 16; // positions that a warp takes at once

// Keys and values of a chunk of a KV head; of positions that are not seen those of others that are. Lane l has g = l / 4, t = l % 4: of keys elements
// 16 t.. of each 64 of positions 4 (g / 2) + g % 2, and of those two on; of values elements 8 g.. of each 64 of the warp's of positions 4 t and on.
// They are the columns of products as they are, and scores of positions 4 t and on of head g become rows of the next.
template <int C, int VALUES> struct Chunk {
    uint4 keys[2][2 * C], values[4][VALUES];
    // Of 16 positions from `pos` on, whose first lies in row `row`; `begin` and `end` of the positions before the token that are seen. No load
    // is in a branch of its own, or they would be made one after the other.
    __device__ __forceinline__ void load(const half* k, const half* v, size_t row, u32 pos, u32 begin, u32 end, int first_value, int dim, int lane) {
        const int g = lane / 4, t = lane % 4;
        if (pos >= end) {
#pragma unroll
            for (int c = 0; c < 2 * C; c++) keys[0][c] = keys[1][c] = make_uint4(0, 0, 0, 0);
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
            for (int c = 0; c < 2 * C; c++) keys[j][c] = *(const uint4*)(from + min(64 * (c / 2) + 16 * t + 8 * (c % 2), dim - 8));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const half* from = v + offset(4 * t + i);
#pragma unroll
            for (int c = 0; c < VALUES; c++) values[i][c] = *(const uint4*)(from + min(first_value + 64 * c + 8 * g, dim - 8));
        }
    }
    // The token's own, which may be nowhere else yet.
    __device__ __forceinline__ void put_own(const half* key, const half* value, u32 pos, u32 of_pos, int first_value, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (pos + 4 * (g / 2) + g % 2 + 2 * j == of_pos)
#pragma unroll
                for (int c = 0; c < 2 * C; c++) keys[j][c] = *(const uint4*)(key + 64 * (c / 2) + 16 * t + 8 * (c % 2));
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (pos + 4 * t + i == of_pos)
#pragma unroll
                for (int c = 0; c < VALUES; c++) values[i][c] = *(const uint4*)(value + first_value + 64 * c + 8 * g);
    }
};

// The first comes last.
__device__ __forceinline__ void turn(float (&v)[4]) {
    const float first = v[0];
    v[0] = v[1], v[1] = v[2], v[2] = v[3], v[3] = first;
}
__device__ __forceinline__ u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// What attention needs besides words of exchanges, asked for a step before: what turns heads at the token's position, and weights of their norms, in
// the block's memory; pages of the first unit, of which a lane has one, and the token's own.
struct Ahead {
    u32 ids, own_page;
};
struct HeadsMemory {
    float2* turns;  // [n_rot / 2]
    float* norms;   // of queries, of keys
    __device__ __forceinline__ HeadsMemory(const DecodeArgs& a, int dim) : turns((float2*)(decode_memory + a.heads_at)), norms((float*)(turns + dim / 2)) {}
};
__device__ __forceinline__ Ahead ask_for_heads(const DecodeArgs& a, const Layer& l, const Span& span, u32 pos, u32 seq, int tid) {
    Ahead ahead = {0, 0};
    if (span.split >= span.n_splits) return ahead;
    const u32* pages = l.pages.pages + (size_t)seq * l.pages.n_pages;
    const u32 first = span.first_page + span.split * span.pages_each;
    ahead.ids = pages[min(min(first + span.pages_each, span.first_page + span.n_pages) - 1, first + tid % 32)];
    ahead.own_page = pages[pos / PAGE];
    const HeadInputs& in = l.inputs;
    const HeadsMemory memory(a, l.head_dim);
    if (in.rotation != NO_ROPE)
        for (int i = tid; i < (int)in.n_rot / 2; i += THREADS) copy8(memory.turns + i, in.rope + (size_t)pos * (in.n_rot / 2) + i);
    if (in.norm == NORM_OF_HEAD)
        for (int i = tid; i < (int)l.head_dim; i += THREADS) {
            const int pair = i % (l.head_dim / 2) * 2;
            copy8(memory.norms + 2 * i, (i < (int)l.head_dim / 2 ? in.q_norm : in.k_norm) + pair);
        }
    commit_copies();
    return ahead;
}

// A head of a warp, from its words to what attention takes: lane l has pairs l, l + 32.. of elements that are turned together. What can be known before its
// words are there is found before.
template <int C> struct Head {
    int at[C][2];  // of the pair's elements, beyond the head where there is none
    float2 turns[C];
    float weights[C][2]; // of its norm
    bool normed, normed_after; // before it is turned, or after
    float eps, scale;
    float v[C][2];
    // `norms`: whether it has one, of which `weight` may be; `turn`: whether it is turned, by `turns_of_pos`.
    __device__ __forceinline__ Head(const HeadInputs& in, bool norms, const float* weight, bool turn, const float2* turns_of_pos, int dim, float scale, int lane)
        : normed(norms && !in.norm_after_rope), normed_after(norms && in.norm_after_rope), eps(in.eps), scale(scale) {
        const int n_pairs = turn && in.rotation != NO_ROPE ? in.n_rot / 2 : 0, halves = in.rotation == HALVES ? in.n_rot / 2 : 0;
#pragma unroll
        for (int k = 0; k < C; k++) {
            const int pair = lane + 32 * k;
            at[k][0] = pair < halves ? pair : 2 * pair, at[k][1] = pair < halves ? pair + halves : 2 * pair + 1;
            turns[k] = pair < n_pairs ? turns_of_pos[pair] : make_float2(1.0f, 0.0f);
#pragma unroll
            for (int h = 0; h < 2; h++) weights[k][h] = norms && weight && at[k][h] < dim ? weight[at[k][h]] : 1.0f;
        }
    }
    __device__ __forceinline__ void take(const u64_t* from, int dim, u32 tag, int lane) {
        u64_t words[2 * C];
        bool there[2 * C];
#pragma unroll
        for (int k = 0; k < 2 * C; k++) there[k] = lane + 32 * (k / 2) < dim / 2;
        auto of = [&](int k) { return from + at[k / 2][k % 2] / 2; };
        ask_for_words(words, there, of);
        wait_for_words(words, there, tag, of);
#pragma unroll
        for (int k = 0; k < 2 * C; k++) {
            const float2 two = unpack_pair(words[k]);
            v[k / 2][k % 2] = at[k / 2][k % 2] % 2 ? two.y : two.x;
        }
    }
    __device__ __forceinline__ void norm(int dim) {
        float squares = 0.0f;
#pragma unroll
        for (int k = 0; k < C; k++) squares += v[k][0] * v[k][0] + v[k][1] * v[k][1];
        const float rms = rsqrtf(warp_sum(squares) / dim + eps);
#pragma unroll
        for (int k = 0; k < C; k++)
#pragma unroll
            for (int h = 0; h < 2; h++) v[k][h] *= rms * weights[k][h];
    }
    // As `make_head` makes it of one in memory.
    __device__ __forceinline__ void make(int dim) {
        if (normed) norm(dim);
#pragma unroll
        for (int k = 0; k < C; k++) {
            const float2 turn = turns[k];
            const float x = v[k][0], y = v[k][1];
            v[k][0] = x * turn.x - y * turn.y, v[k][1] = x * turn.y + y * turn.x;
        }
        if (normed_after) norm(dim);
#pragma unroll
        for (int k = 0; k < C; k++) v[k][0] *= scale, v[k][1] *= scale;
    }
    // As halves, hi and what is left of it times 2048, times the power of two that is returned where it is too large for that. Zeros from `dim` on.
    __device__ __forceinline__ float put_query(half* hi, half* lo, int dim) const {
        float most = 0.0f, factor = 1.0f;
#pragma unroll
        for (int k = 0; k < C; k++) most = fmaxf(most, fmaxf(fabsf(v[k][0]), fabsf(v[k][1])));
        if (__any_sync(~0u, most > 32768.0f)) {
            const u32 exponent = __float_as_uint(warp_max(most)) >> 23;
            factor = exponent < 255 ? __uint_as_float((exponent - 13) << 23) : 1.0f;
        }
        const float down = __uint_as_float(0x7f000000u - __float_as_uint(factor));
#pragma unroll
        for (int k = 0; k < C; k++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int i = at[k][h];
                const float x = i < dim ? v[k][h] * down : 0.0f;
                const half high = __float2half_rn(x);
                hi[i] = high, lo[i] = __float2half_rn((x - __half2float(high)) * 2048.0f);
            }
        return factor;
    }
    // A key or a value, as all later tokens see it: in the block's memory, zeros from `dim` on, and, `cached`, where these find it.
    __device__ __forceinline__ void put(half* own, half* cached, int dim) const {
#pragma unroll
        for (int k = 0; k < C; k++)
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

// Attention of a token: units of a split of positions and up to GROUP query heads of a KV head. Warps take chunks of positions by turns, on the
// tensor cores: rows g of a product are high halves of what heads have, rows g + 8 low ones. Each has its own running maxima and sums, which are
// joined at the end. C: times 64 elements of a head; of four, four warps have a chunk, each a quarter of the values.
template <int C>
__device__ __forceinline__ void attention(const DecodeArgs& a, const Layer& l, const Span& span, const Ahead& asked, bool is_first, u32 of_pos, u32 seq, u32 tag,
                                          float* memory) {
    constexpr int VALUES = C < 4 ? C : 1, PAIRED = C / VALUES, TEAMS = WARPS / PAIRED, AHEAD = C == 1 ? 2 : 1, PADDED = 64 * C, ROW = PADDED + 8;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4, dim = l.head_dim;
    const int team = warp / PAIRED, first_value = warp % PAIRED * VALUES * 64;
    const u32 of_kv = l.heads_a_kv_head, n_units = l.units_a_split * span.most_splits;
    half* high = (half*)memory;              // [GROUP][ROW], then as much of low ones
    half* low = high + GROUP * ROW;
    half* own = low + GROUP * ROW;           // the token's key, then its value
    float* factors = (float*)(own + 2 * PADDED); // [GROUP]
    float* joined = factors + GROUP;         // [team][GROUP][dim]
    float* states = joined + TEAMS * GROUP * dim; // [team][GROUP] of maximum and sum
    const HeadsMemory heads(a, dim);
    const u32* pages = l.pages.pages + (size_t)seq * l.pages.n_pages;
    const half *keys = (const half*)l.k_cache, *values = (const half*)l.v_cache;

    u32 split = span.split, kv = span.kv, chunk = span.chunk;
#pragma unroll 1
    for (u32 unit = blockIdx.x; unit < n_units; unit += gridDim.x) {
        // More than one unit are those of devices with few multiprocessors.
        if (unit != blockIdx.x) {
            const u32 of_split = unit % l.units_a_split;
            split = unit / l.units_a_split, kv = of_split / l.chunks_a_kv_head, chunk = of_split % l.chunks_a_kv_head;
        }
        const u32 head = kv * of_kv + chunk * GROUP, n_heads = min((u32)GROUP, of_kv - chunk * GROUP);
        u64_t* out = a.att + ((size_t)split * l.n_head + head) * (dim / 2);
        if (split >= span.n_splits) {
            // Nobody reads them, and nobody shall ever take them for words of a later step, for which words of the same token will do.
            if (!is_first) continue;
            for (int i = tid; i < (int)n_heads * (dim / 2); i += THREADS)
                store_words(out + i, tag, COPIES, a.att_words);
            if (tid < (int)n_heads) store_words(a.sums + split * l.n_head + head + tid, tag, COPIES, a.sums_words);
            continue;
        }
        const u32 first = span.first_page + split * span.pages_each, last = min(first + span.pages_each, span.first_page + span.n_pages);
        const bool has_own = last == span.first_page + span.n_pages;
        const u32 end = min(last * (PAGE / POSITIONS), of_pos / POSITIONS + 1);
        u32 ids = asked.ids, ids_of = unit == blockIdx.x ? 0 : ~0u; // of 32 pages, a lane each
        Chunk<C, VALUES> ahead[AHEAD];
        auto load = [&](Chunk<C, VALUES>& to, u32 at) {
            const u32 page = at / (PAGE / POSITIONS) - first;
            if (page / 32 != ids_of) ids_of = page / 32, ids = pages[min(first + ids_of * 32 + lane, last - 1)];
            const size_t row = ((size_t)__shfl_sync(~0u, ids, page % 32) * l.n_kv_head + kv) * PAGE + at % (PAGE / POSITIONS) * POSITIONS;
            to.load(keys, values, row, at * POSITIONS, span.begin, at < end ? of_pos : 0, first_value, dim, lane);
        };
        // Of steps before: they are on their way before the query is there, as is what turns it.
        const u32 mine = first * (PAGE / POSITIONS) + team;
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            load(ahead[i], mine + i * TEAMS);
        const HeadInputs& in = l.inputs;
        wait_for_copies<0>();
        all_meet();
#pragma unroll 1
        for (u32 h = warp; h < n_heads + (has_own ? 2 : 0); h += WARPS) {
            const bool is_query = h < n_heads;
            const u32 from = is_query ? head + h : h == n_heads ? l.n_head + kv : l.n_head + l.n_kv_head + kv;
            const float* of_heads = is_query ? in.q_norm + (size_t)(head + h) * dim : in.k_norm + (size_t)kv * dim;
            const float* weight = in.norm == NORM_OF_HEAD ? heads.norms + (is_query ? 0 : dim) : in.norm == NORM_OF_EACH_HEAD ? of_heads : nullptr;
            const bool is_value = h > n_heads;
            Head<C> made(in, in.norm != NO_NORM && !is_value, weight, !is_value, heads.turns, dim, is_query ? in.scale : 1.0f, lane);
            half* cached = nullptr;
            if (!is_query && chunk == 0) {
                const u32 own_page = unit == blockIdx.x ? asked.own_page : pages[of_pos / PAGE];
                cached = (half*)(is_value ? l.v_cache : l.k_cache) + (((size_t)own_page * l.n_kv_head + kv) * PAGE + of_pos % PAGE) * dim;
            }
            settle(cached);
            made.take(a.qkv + (size_t)from * (dim / 2), dim, tag, lane);
            if (!is_value) made.make(dim);
            if (is_query) {
                const float factor = made.put_query(high + h * ROW, low + h * ROW, dim);
                if (lane == 0) factors[h] = factor;
            } else {
                made.put(own + (h - n_heads) * PADDED, cached, dim);
            }
        }
        all_meet();

        // Lanes of rows beyond the heads have those of others.
        const u32 of_head = min((u32)g, n_heads - 1);
        const half *hi = high + of_head * ROW + 16 * t, *lo = low + of_head * ROW + 16 * t;
        const float factor_of_head = factors[of_head];
        float most = -INFINITY, sum = 0.0f, acc[VALUES][8][4] = {};
        for (u32 base = mine; base < end; base += AHEAD * TEAMS) {
#pragma unroll
            for (int n = 0; n < AHEAD; n++) {
                const u32 at = base + n * TEAMS, pos = at * POSITIONS + 4 * t;
                if (at >= end) break;
                Chunk<C, VALUES>& here = ahead[n];
                if (at == of_pos / POSITIONS) here.put_own(own, own + PADDED, at * POSITIONS, of_pos, first_value, lane);
                float scores[2][4] = {};
#pragma unroll
                for (int c = 0; c < 2 * C; c++) {
                    const uint4 x = *(const uint4*)(hi + 64 * (c / 2) + 8 * (c % 2)), y = *(const uint4*)(lo + 64 * (c / 2) + 8 * (c % 2));
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const uint4 k = here.keys[j][c];
                        mma(scores[j], x.x, y.x, x.y, y.y, k.x, k.y);
                        mma(scores[j], x.z, y.z, x.w, y.w, k.z, k.w);
                    }
                }
                float s[4], high_of_chunk = -INFINITY;
#pragma unroll
                for (int i = 0; i < 4; i++) s[i] = (scores[i / 2][i % 2] + scores[i / 2][i % 2 + 2] * (1.0f / 2048.0f)) * factor_of_head;
                // One piece of code for all four, in nobody's way who has no cap.
                if (l.soft_cap != 0.0f)
#pragma unroll 1
                    for (int i = 0; i < 4; i++) s[0] = l.soft_cap * tanhf(s[0] / l.soft_cap), turn(s);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (pos + i - span.begin > of_pos - span.begin) s[i] = -INFINITY;
                    high_of_chunk = fmaxf(high_of_chunk, s[i]);
                }
                high_of_chunk = fmaxf(high_of_chunk, __shfl_xor_sync(~0u, high_of_chunk, 1));
                high_of_chunk = fmaxf(high_of_chunk, __shfl_xor_sync(~0u, high_of_chunk, 2));
                const float now = fmaxf(most, high_of_chunk);
                // Who has seen nothing has weights of zero all the same.
                const float from = now == -INFINITY ? 0.0f : now, before = __expf(most - from);
                half of_high[4], of_low[4];
                sum *= before;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float weight = __expf(s[i] - from);
                    sum += weight;
                    of_high[i] = __float2half_rn(weight);
                    of_low[i] = __float2half_rn((weight - __half2float(of_high[i])) * 2048.0f);
                }
                most = now;
                if (base != mine || n > 0) // else there is nothing yet
#pragma unroll
                    for (int c = 0; c < VALUES; c++)
#pragma unroll
                        for (int i = 0; i < 8; i++)
#pragma unroll
                            for (int r = 0; r < 4; r++) acc[c][i][r] *= before;
                const u32 a0 = bits(__halves2half2(of_high[0], of_high[1])), a2 = bits(__halves2half2(of_high[2], of_high[3]));
                const u32 a1 = bits(__halves2half2(of_low[0], of_low[1])), a3 = bits(__halves2half2(of_low[2], of_low[3]));
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
            if (t == 0 && first_value == 0) *(float2*)(states + 2 * (team * GROUP + g)) = make_float2(most, sum);
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
                    if (d < dim) *(float4*)(joined + (team * GROUP + g) * dim + d) = make_float4(v[0], v[1], v[2], v[3]);
                }
        }
        all_meet();
        // Teams beyond have taken no chunk: their sums are zeros, and their maxima below all others.
        const int n_teams = min(end - first * (PAGE / POSITIONS), (u32)TEAMS);
#pragma unroll 1
        for (int i = tid; i < (int)n_heads * (PADDED / 2); i += THREADS) {
            const int h = i / (PADDED / 2), d = i % (PADDED / 2) * 2;
            if (d >= dim) continue;
            const float *state_of = states + 2 * h, *part_of = joined + h * dim + d;
            float high_of_all = -INFINITY, s = 0.0f;
            float2 v = make_float2(0.0f, 0.0f);
            auto join = [&](auto most_teams) {
                constexpr int N = decltype(most_teams)::value;
                float2 state[N], part[N];
#pragma unroll
                for (int w = 0; w < N; w++) {
                    state[w] = *(const float2*)(state_of + 2 * GROUP * w), part[w] = *(const float2*)(part_of + w * GROUP * dim);
                    high_of_all = fmaxf(high_of_all, state[w].x);
                }
                // As it will be read.
                high_of_all = __uint_as_float(rounded(high_of_all));
#pragma unroll
                for (int w = 0; w < N; w++) {
                    const float factor = __expf(state[w].x - high_of_all);
                    v.x += factor * part[w].x, v.y += factor * part[w].y, s += factor * state[w].y;
                }
            };
            if (n_teams <= 2) join(Count<2>());
            else if (n_teams <= 4) join(Count<4>());
            else join(Count<TEAMS>());
            store_words(out + h * (dim / 2) + d / 2, pack_pair(v.x, v.y, tag), COPIES, a.att_words);
            if (d == 0) store_words(a.sums + split * l.n_head + head + h, pack_pair(high_of_all, s, tag), COPIES, a.sums_words);
        }
        // The memory is the next unit's, or the next product's.
        all_meet();
    }
}

// QUADS of 4 elements of attention's result, i and i + 4, its splits joined; zeros from quad `n` on. ONE_HEAD: whether they are always of one head.
template <int QUADS, bool ONE_HEAD>
__device__ __forceinline__ void joined_splits(const Layer& l, u32 n_splits, const u64_t* att, const u64_t* sums, u32 i, u32 n, u32 tag, float4 (&v)[QUADS]) {
    const u32 n_words = l.n_head * l.head_dim / 2;
    constexpr int HEADS = ONE_HEAD ? 1 : QUADS, SPLITS = 2; // at once
    float most[HEADS], sum[HEADS];
    u32 head[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        head[h] = __umulhi(4 * (i + 4 * h), l.reciprocal_of_dim);
        const bool has_sink = l.sinks && i + 4 * h < n;
        most[h] = has_sink ? l.sinks[head[h]] : -INFINITY, sum[h] = l.sinks ? 1.0f : 0.0f;
    }
#pragma unroll
    for (int q = 0; q < QUADS; q++) v[q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (u32 first = 0; first < n_splits; first += SPLITS) {
        constexpr int N = QUADS * SPLITS, M = HEADS * SPLITS;
        ulonglong2 words[N];
        u64_t states[M];
        bool there[N], is_seen[M];
        const ulonglong2* of_words = (const ulonglong2*)att + first * (n_words / 2) + i;
        const u64_t* of_sums = sums + first * l.n_head;
        auto from = [&](int k) { return of_words + k / QUADS * (n_words / 2) + 4 * (k % QUADS); };
        auto state_from = [&](int k) { return of_sums + k / HEADS * l.n_head + head[k % HEADS]; };
        // Heads that are whole blocks of 32 are there with both quads, or with none.
#pragma unroll
        for (int k = 0; k < N; k++) there[k] = first + k / QUADS < n_splits && i + 4 * (k % QUADS % HEADS) < n;
#pragma unroll
        for (int k = 0; k < M; k++) is_seen[k] = there[k / HEADS * QUADS + k % HEADS];
        ask_for_words(states, is_seen, state_from);
        ask_for_words(words, there, from);
        wait_for_words(words, there, from, states, is_seen, state_from, tag);
        // What they are multiplied by, on the highest scale of all: words that are not there are zeros.
        float factors[M], before[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float highs[SPLITS], now = most[h];
#pragma unroll
            for (int k = 0; k < SPLITS; k++) {
                highs[k] = is_seen[k * HEADS + h] ? unpack_pair(states[k * HEADS + h]).x : -INFINITY;
                now = fmaxf(now, highs[k]);
            }
            const float high = now == -INFINITY ? 0.0f : now;
            before[h] = __expf(most[h] - high);
            sum[h] *= before[h];
#pragma unroll
            for (int k = 0; k < SPLITS; k++) {
                factors[k * HEADS + h] = __expf(highs[k] - high);
                sum[h] += factors[k * HEADS + h] * unpack_pair(states[k * HEADS + h]).y;
            }
            most[h] = now;
        }
        if (first > 0)
#pragma unroll
            for (int q = 0; q < QUADS; q++) {
                const float by = before[q % HEADS];
                multiply(v[q], make_float4(by, by, by, by));
            }
#pragma unroll
        for (int k = 0; k < N; k++) {
            const float4 part = unpack(words[k]);
            const float by = factors[k / QUADS * HEADS + k % QUADS % HEADS];
            float4& to = v[k % QUADS];
            to.x += by * part.x, to.y += by * part.y, to.z += by * part.z, to.w += by * part.w;
        }
    }
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        const float scale = i + 4 * (q % HEADS) < n ? 1.0f / sum[q % HEADS] : 0.0f;
        multiply(v[q], make_float4(scale, scale, scale, scale));
    }
}
