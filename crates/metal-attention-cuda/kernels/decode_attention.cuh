// Attention of one token by all blocks of decode.cu: softmax with running maxima (arXiv 2205.14135), all in F32.
#pragma once
#include "decode.cuh"
#include "masks.cuh"

// Positions that a token sees, whose pages are split among units.
struct Span {
    u32 begin, first_page, n_pages, pages_each, n_splits;
};
__device__ __forceinline__ u32 most_splits(const Layer& l, u32 n_blocks) {
    const u32 a_split = l.n_kv_head * ((l.n_head / l.n_kv_head + GROUP - 1) / GROUP);
    return min(max(n_blocks / a_split, 1u), 32u);
}
__device__ __forceinline__ Span span_of(const Layer& l, u32 pos, u32 n_blocks) {
    Span s;
    s.begin = first_seen(l.mask, l.reach, pos);
    s.first_page = s.begin / PAGE;
    s.n_pages = pos / PAGE + 1 - s.first_page;
    // What a page takes grows with the pages of a split, what it takes to join them with the splits.
    const u32 want = (u32)ceilf(sqrtf((float)s.n_pages * 24576.0f / (float)(l.n_head * l.head_dim)));
    const u32 n = min(min(want, s.n_pages), most_splits(l, n_blocks));
    s.pages_each = (s.n_pages + n - 1) / n;
    s.n_splits = (s.n_pages + s.pages_each - 1) / s.pages_each;
    return s;
}

// Eight elements of a key, two of a value, as they lie in the cache.
__device__ __forceinline__ void unpack(const uint4& w, float (&v)[8]) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 f = __half22float2(halves(words[i]));
        v[2 * i] = f.x, v[2 * i + 1] = f.y;
    }
}
__device__ __forceinline__ float2 unpack(u32 w) { return __half22float2(halves(w)); }

// Attention of a token: units of a split of positions and up to GROUP query heads of a KV head. Positions are taken in chunks, four for each
// warp, eight lanes a position; each warp has its own running maxima and sums, which are joined at the end. C: times 64
// elements of a head.
constexpr int CHUNK_OF = 4 * WARPS, CHUNKS = PAGE / CHUNK_OF;
template <int C>
__device__ __forceinline__ void attention(const DecodeArgs& a, const Layer& l, u32 of_pos, u32 seq, u32 tag, float* memory) {
    u64_t *att = a.att, *sums = a.sums;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, dim = l.head_dim, of_page = lane / 8, of_row = lane % 8 * 8;
    const u32 of_kv = l.n_head / l.n_kv_head, n_chunks = (of_kv + GROUP - 1) / GROUP, a_split = l.n_kv_head * n_chunks;
    const Span span = span_of(l, of_pos, gridDim.x);
    float* q = memory;                       // [GROUP][dim]
    float* own = q + GROUP * dim;            // the token's key, then its value
    float* joined = own + 2 * dim;           // [warp][GROUP][dim]
    float* states = joined + WARPS * GROUP * dim; // [warp][GROUP] of maximum and sum
    float* norms = states + 2 * WARPS * GROUP;    // of queries, of keys
    float2* turns = (float2*)(norms + 2 * dim);   // [dim / 2]
    const u32* pages = l.pages.pages + (size_t)seq * l.pages.n_pages;
    const half *keys = (const half*)l.k_cache, *values = (const half*)l.v_cache;

    for (u32 unit = blockIdx.x; unit < a_split * most_splits(l, gridDim.x); unit += gridDim.x) {
        const u32 split = unit / a_split, kv = unit % a_split / n_chunks, chunk = unit % n_chunks;
        const u32 head = kv * of_kv + chunk * GROUP, n_heads = min((u32)GROUP, of_kv - chunk * GROUP);
        u64_t* out = att + ((size_t)split * l.n_head + head) * (dim / 2);
        if (split >= span.n_splits) {
            // Nobody reads them, and nobody shall ever take them for words of a later step.
            for (u32 c = 0; c < COPIES; c++) {
                for (int i = tid; i < (int)n_heads * (dim / 2); i += THREADS) store_exchanged(out + c * a.att_words + i, tag);
                if (tid < (int)n_heads) store_exchanged(sums + c * a.sums_words + split * l.n_head + head + tid, tag);
            }
            continue;
        }
        const u32 first = span.first_page + split * span.pages_each, end = min(first + span.pages_each, span.first_page + span.n_pages);
        const bool has_own = end == span.first_page + span.n_pages;
        uint4 k_raw[C];
        u32 v_raw[4][C];
        u32 ids = 0; // of 32 pages, a lane each
        auto row_of_chunk = [&](u32 chunk) {
            const u32 of_ids = (chunk / CHUNKS - first) % 32;
            if (of_ids == 0 && chunk % CHUNKS == 0) ids = pages[min(chunk / CHUNKS + lane, end - 1)];
            return ((size_t)__shfl_sync(~0u, ids, of_ids) * l.n_kv_head + kv) * PAGE + chunk % CHUNKS * CHUNK_OF + 4 * warp;
        };
        auto load_keys = [&](u32 chunk, size_t row) {
            const u32 p = chunk * CHUNK_OF + 4 * warp + of_page;
#pragma unroll
            for (int c = 0; c < C; c++) {
                const int d = of_row + 64 * c;
                if (d < dim && p < of_pos && p >= span.begin) k_raw[c] = *(const uint4*)(keys + (row + of_page) * dim + d);
            }
        };
        auto load_values = [&](u32 chunk, size_t row) {
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int c = 0; c < C; c++) {
                    const int d = 2 * lane + 64 * c;
                    const u32 p = chunk * CHUNK_OF + 4 * warp + i;
                    if (d < dim && p < of_pos && p >= span.begin) v_raw[i][c] = *(const u32*)(values + (row + i) * dim + d);
                }
        };
        // Of steps before: they are on their way before the query is there, as is what turns it.
        size_t row = row_of_chunk(first * CHUNKS);
        load_keys(first * CHUNKS, row);
        load_values(first * CHUNKS, row);
        const HeadInputs& in = l.inputs;
        const u32 own_page = pages[of_pos / PAGE];
        if (in.rotation != NO_ROPE)
            for (int i = tid; i < (int)in.n_rot / 2; i += THREADS) turns[i] = in.rope[(size_t)of_pos * (in.n_rot / 2) + i];
        if (in.norm == NORM_OF_HEAD)
            for (int i = tid; i < dim; i += THREADS) norms[i] = in.q_norm[i], norms[dim + i] = in.k_norm[i];
        all_meet();
        for (u32 h = warp; h < n_heads + (has_own ? 2 : 0); h += WARPS) {
            float* v = h < n_heads ? q + h * dim : own + (h - n_heads) * dim;
            const u32 from = h < n_heads ? head + h : h == n_heads ? l.n_head + kv : l.n_head + l.n_kv_head + kv;
            const u64_t* words = a.qkv + (size_t)from * (dim / 2);
            for (int i = lane; i < dim / 2; i += 32) {
                u64_t word = load_exchanged(words + i);
                wait_for_tag(word, words + i, tag);
                *(float2*)(v + 2 * i) = unpack_pair(word);
            }
            __syncwarp();
            if (h <= n_heads) {
                const float* of_heads = h < n_heads ? in.q_norm + (size_t)(head + h) * dim : in.k_norm + (size_t)kv * dim;
                const float* weight = in.norm == NORM_OF_HEAD ? norms + (h < n_heads ? 0 : dim) : in.norm == NORM_OF_EACH_HEAD ? of_heads : nullptr;
                make_head(v, in, weight, turns, dim, h < n_heads ? in.scale : 1.0f, lane);
            }
            if (h < n_heads) continue;
            half* at = (half*)(h == n_heads ? l.k_cache : l.v_cache) + (((size_t)own_page * l.n_kv_head + kv) * PAGE + of_pos % PAGE) * dim;
            for (int i = lane; i < dim; i += 32) {
                // As all later tokens see it.
                half rounded_value;
                store(&rounded_value, v[i]);
                v[i] = to_float(rounded_value);
                if (chunk == 0) at[i] = rounded_value;
            }
        }
        all_meet();

        float most[GROUP], sum[GROUP], acc[GROUP][2 * C] = {};
#pragma unroll
        for (int h = 0; h < GROUP; h++) most[h] = -INFINITY, sum[h] = 0.0f;
        const u32 end_chunk = min(end * CHUNKS, of_pos / CHUNK_OF + 1);
        for (u32 at = first * CHUNKS; at < end_chunk; at++) {
            const u32 base = at * CHUNK_OF + 4 * warp, pos = base + of_page;
            const bool seen = pos >= span.begin && pos <= of_pos, is_own = pos == of_pos;
            float dots[GROUP] = {};
            if (seen) {
#pragma unroll
                for (int c = 0; c < C; c++) {
                    const int d = of_row + 64 * c;
                    if (d >= dim) break;
                    float k[8];
                    if (is_own) {
#pragma unroll
                        for (int i = 0; i < 8; i++) k[i] = own[d + i];
                    } else {
                        unpack(k_raw[c], k);
                    }
#pragma unroll
                    for (int h = 0; h < GROUP; h++) {
                        if (h >= (int)n_heads) break;
                        const float4 a = *(const float4*)(q + h * dim + d), b = *(const float4*)(q + h * dim + d + 4);
                        dots[h] += a.x * k[0] + a.y * k[1] + a.z * k[2] + a.w * k[3] + b.x * k[4] + b.y * k[5] + b.z * k[6] + b.w * k[7];
                    }
                }
            }
            // The next chunk's take their place.
            if (at + 1 < end_chunk) {
                row = row_of_chunk(at + 1);
                load_keys(at + 1, row);
            }
            float weight[GROUP];
#pragma unroll
            for (int h = 0; h < GROUP; h++) {
                float s = dots[h];
                s += __shfl_xor_sync(~0u, s, 1);
                s += __shfl_xor_sync(~0u, s, 2);
                s += __shfl_xor_sync(~0u, s, 4);
                if (l.soft_cap != 0.0f) s = l.soft_cap * tanhf(s / l.soft_cap);
                if (!seen) s = -INFINITY;
                float high = fmaxf(s, __shfl_xor_sync(~0u, s, 8));
                high = fmaxf(high, __shfl_xor_sync(~0u, high, 16));
                const float now = fmaxf(most[h], high);
                // A warp that has seen nothing leaves all as it was.
                const float factor = now == -INFINITY ? 1.0f : __expf(most[h] - now);
                weight[h] = seen ? __expf(s - now) : 0.0f;
                sum[h] = sum[h] * factor + weight[h];
                most[h] = now;
#pragma unroll
                for (int c = 0; c < 2 * C; c++) acc[h][c] *= factor;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 p = base + i;
                if (p < span.begin || p > of_pos) continue;
                float2 v[C];
#pragma unroll
                for (int c = 0; c < C; c++) {
                    const int d = 2 * lane + 64 * c;
                    v[c] = d >= dim ? make_float2(0.0f, 0.0f) : p == of_pos ? *(const float2*)(own + dim + d) : unpack(v_raw[i][c]);
                }
#pragma unroll
                for (int h = 0; h < GROUP; h++) {
                    const float w = __shfl_sync(~0u, weight[h], 8 * i);
#pragma unroll
                    for (int c = 0; c < C; c++) acc[h][2 * c] += w * v[c].x, acc[h][2 * c + 1] += w * v[c].y;
                }
            }
            if (at + 1 < end_chunk) load_values(at + 1, row);
        }
#pragma unroll
        for (int h = 0; h < GROUP; h++) {
            if (h >= (int)n_heads) break;
            float s = sum[h] + __shfl_xor_sync(~0u, sum[h], 8);
            s += __shfl_xor_sync(~0u, s, 16);
            if (lane == 0) *(float2*)(states + 2 * (warp * GROUP + h)) = make_float2(most[h], s);
#pragma unroll
            for (int c = 0; c < C; c++) {
                const int d = 2 * lane + 64 * c;
                if (d < dim) *(float2*)(joined + (warp * GROUP + h) * dim + d) = make_float2(acc[h][2 * c], acc[h][2 * c + 1]);
            }
        }
        all_meet();
        for (int i = tid; i < (int)n_heads * (dim / 2); i += THREADS) {
            const int h = i / (dim / 2), d = i % (dim / 2) * 2;
            float high = -INFINITY;
#pragma unroll
            for (int w = 0; w < WARPS; w++) high = fmaxf(high, states[2 * (w * GROUP + h)]);
            // As it will be read.
            high = __uint_as_float(rounded(high));
            float2 v = make_float2(0.0f, 0.0f);
            float s = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float2 state = *(const float2*)(states + 2 * (w * GROUP + h));
                const float factor = state.x == -INFINITY ? 0.0f : __expf(state.x - high);
                const float2 part = *(const float2*)(joined + (w * GROUP + h) * dim + d);
                v.x += factor * part.x, v.y += factor * part.y, s += factor * state.y;
            }
#pragma unroll
            for (u32 c = 0; c < COPIES; c++) {
                store_exchanged(out + c * a.att_words + i, pack_pair(v.x, v.y, tag));
                if (d == 0) store_exchanged(sums + c * a.sums_words + split * l.n_head + head + h, pack_pair(high, s, tag));
            }
        }
        // The memory is the next unit's, or the next product's.
        all_meet();
    }
}

// Quads i and i + 4 of attention's result, its splits joined; zeros from quad `n` on.
__device__ __forceinline__ void joined_splits(const Layer& l, u32 n_splits, const u64_t* att, const u64_t* sums, u32 i, u32 n, u32 tag, float4 (&v)[2]) {
    const u32 n_words = l.n_head * l.head_dim / 2;
    float most[2], sum[2];
    u32 head[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        head[h] = 4 * (i + 4 * h) / l.head_dim;
        const bool has_sink = l.sinks && i + 4 * h < n;
        most[h] = has_sink ? l.sinks[head[h]] : -INFINITY, sum[h] = l.sinks ? 1.0f : 0.0f;
        v[h] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    constexpr int SPLITS = 2; // at once
#pragma unroll 1
    for (u32 first = 0; first < n_splits; first += SPLITS) {
        ulonglong2 words[SPLITS][2];
        u64_t states[SPLITS][2];
        const ulonglong2* from = (const ulonglong2*)att + first * (n_words / 2) + i;
        const u64_t* from_sums = sums + first * l.n_head;
#pragma unroll
        for (int s = 0; s < SPLITS; s++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (first + s < n_splits && i + 4 * h < n)
                    words[s][h] = load_exchanged(from + s * (n_words / 2) + 4 * h), states[s][h] = load_exchanged(from_sums + s * l.n_head + head[h]);
#pragma unroll
        for (int s = 0; s < SPLITS; s++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (first + s >= n_splits || i + 4 * h >= n) continue;
                wait_for_tag(words[s][h], from + s * (n_words / 2) + 4 * h, tag);
                wait_for_tag(states[s][h], from_sums + s * l.n_head + head[h], tag);
                const float2 state = unpack_pair(states[s][h]);
                const float4 part = unpack(words[s][h]);
                const float now = fmaxf(most[h], state.x), before = __expf(most[h] - now), factor = __expf(state.x - now);
                v[h].x = v[h].x * before + factor * part.x, v[h].y = v[h].y * before + factor * part.y;
                v[h].z = v[h].z * before + factor * part.z, v[h].w = v[h].w * before + factor * part.w;
                sum[h] = sum[h] * before + factor * state.y;
                most[h] = now;
            }
    }
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float scale = i + 4 * h < n ? 1.0f / sum[h] : 0.0f;
        v[h].x *= scale, v[h].y *= scale, v[h].z *= scale, v[h].w *= scale;
    }
}
