// One token through all layers in one launch: decoders of attention and dense, gated feed-forwards.
//
// A block runs on every multiprocessor until the token is done, and has the same share of the rows of every matrix in all steps. What
// a token takes is its weights, which depend on nothing: each warp asks for its part of them in the order in which it will need
// them, as far ahead as it has room, across layers. What blocks wait for is each other's results: they are exchanged through global memory in
// words of two values and a tag that tells the step and layer they are of, so that a word is its own flag (`pack_pair`), and whoever reads it
// looks until the tag is right. No other barrier is needed: a block writes the words of a vector anew only after it has read all of another
// vector whose writers had read this one.
//
// The blocks have to run all at once: the launch is cooperative.
#include "code_products.cuh"
#include "decode_attention.cuh"
#include "element.cuh"
#include "products.cuh"
#include "rank.cuh"

// A block's part of a matrix, whose records lie one after the other.
struct __align__(16) Part {
    const unsigned char* from;
    u32 n_records;
    unsigned short first_tile, n_tiles; // of the matrix
    unsigned short record_bytes, records_a_slot, records_a_tile, format;
};

// What comes before item `i` where `n` items are shared out.
__device__ __forceinline__ u32 share(u32 i, u32 n, u32 parts) { return i * n / parts; }
__device__ __forceinline__ u32 tiles_of(const Matrix& m) { return (m.n_rows + 15) / 16; }

template <u32 F> __device__ __forceinline__ u32 panels_and_bytes() { return (u32)Record<F>::PANELS << 16 | Record<F>::BYTES; }
__device__ __forceinline__ u32 record_of(u32 format) {
    switch (format) {
        case F16: return panels_and_bytes<F16>();
        case Q8_0: return panels_and_bytes<Q8_0>();
        case Q4_0: return panels_and_bytes<Q4_0>();
        case Q4_K: return panels_and_bytes<Q4_K>();
        case Q5_K: return panels_and_bytes<Q5_K>();
        case Q6_K: return panels_and_bytes<Q6_K>();
        case F32: return panels_and_bytes<F32>();
        default: __trap();
    }
    return 0;
}
// The block's part of `m`, whose rows are those from tile `first` on of a product of `n_tiles`.
__device__ __forceinline__ Part part_of(const Matrix& m, u32 first, u32 n_tiles, u32 slot_bytes) {
    const u32 begin = share(blockIdx.x, n_tiles, gridDim.x), end = share(blockIdx.x + 1, n_tiles, gridDim.x), of = tiles_of(m);
    const u32 t0 = min(max(begin, first) - first, of), t1 = min(max(end, first) - first, of);
    const u32 record = record_of(m.format), bytes = record & 0xffff, a_tile = m.n_panels / (record >> 16);
    Part part;
    part.from = m.records + (size_t)t0 * a_tile * bytes;
    part.n_records = (t1 - t0) * a_tile;
    part.first_tile = t0;
    part.n_tiles = t1 - t0;
    part.record_bytes = bytes;
    part.records_a_slot = slot_bytes / bytes;
    part.records_a_tile = a_tile;
    part.format = m.format;
    return part;
}

// The warp's records of a part: of fewer than there are warps, each has one.
__device__ __forceinline__ u32 n_warps_of(u32 n_records) { return min(n_records, (u32)WARPS); }
__device__ __forceinline__ uint2 range_of(u32 n_records, u32 warp) {
    if (n_records < WARPS) return warp < n_records ? make_uint2(warp, warp + 1) : make_uint2(0, 0);
    return make_uint2(warp * n_records / WARPS, (warp + 1) * n_records / WARPS);
}

__device__ __forceinline__ Part* parts_of(const DecodeArgs& a) { return (Part*)(decode_memory + a.parts_at); }
__device__ __forceinline__ unsigned char* slot_of(const DecodeArgs& a, u32 warp, u32 slot) {
    return decode_memory + (warp * a.n_slots + slot) * a.slot_bytes;
}
__device__ __forceinline__ u64_t* barrier_of(const DecodeArgs& a, u32 warp, u32 slot) {
    return (u64_t*)(decode_memory + a.barriers_at) + warp * a.n_slots + slot;
}
// Of products with codes as `CodeInput` has them; of others each block of 32 has hi and lo.
__device__ __forceinline__ unsigned char* input_of(const DecodeArgs& a) { return decode_memory + a.input_at; }

// The weights of a warp that are asked for next, and where they go.
struct Next {
    const unsigned char* from;
    u32 part, n_left, bytes, a_slot, slot;
};
// Goes on to the next part of which the warp has records.
__device__ __forceinline__ void find_records(const DecodeArgs& a, Next& n, u32 warp) {
    for (; n.n_left == 0 && n.part < a.n_parts; n.part++) {
        const Part& p = parts_of(a)[n.part];
        const uint2 r = range_of(p.n_records, warp);
        n.n_left = r.y - r.x, n.bytes = p.record_bytes, n.a_slot = p.records_a_slot;
        n.from = p.from + (size_t)r.x * n.bytes;
    }
}
// One lane asks.
__device__ __forceinline__ void ask(const DecodeArgs& a, Next& n, u32 warp, int lane) {
    if (n.n_left == 0) return;
    const u32 count = min(n.a_slot, n.n_left), bytes = count * n.bytes;
    if (lane == 0) {
        u64_t* barrier = barrier_of(a, warp, n.slot);
        barrier_arrive_expecting(barrier, bytes);
        copy_bulk(slot_of(a, warp, n.slot), n.from, bytes, barrier);
    }
    n.slot = n.slot + 1 == a.n_slots ? 0 : n.slot + 1;
    n.from += bytes, n.n_left -= count;
    find_records(a, n, warp);
}

// a / b of numbers below 2^23, b's reciprocal being known.
__device__ __forceinline__ u32 quotient(u32 a, u32 b, float reciprocal) {
    const u32 q = (u32)((float)a * reciprocal);
    return q * b > a ? q - 1 : (q + 1) * b <= a ? q + 1 : q;
}

// Which of a warp's slots comes next, and the parity of its barrier.
struct Turn {
    u32 slot, parity;
};

// What a warp adds up of a tile: products of codes, or of floats.
template <u32 FORMAT> struct Tile {
    typedef Codes<FORMAT> P;
    const float *factors, *sums;
    Digits digits;
    float acc[2] = {}, mins[2] = {};
    __device__ __forceinline__ Tile(const DecodeArgs& a, u32 n_panels, const unsigned char* zeros, int lane) {
        const CodeInput input(input_of(a), n_panels);
        digits = digits_of<P::SUBS>(input.digits, nullptr, zeros, lane), factors = input.factors, sums = input.sums;
    }
    __device__ __forceinline__ void add(const P& p, u32 panel, int lane) {
        code_products(p, panel, digits, factors, lane, acc);
        if (P::MINS) take_mins(p, panel, sums, mins);
    }
    __device__ __forceinline__ void finish(float* to, int lane) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const float y = row_sum<P>(acc[row], lane) - mins[row];
            if (lane % 4 == 0) to[lane / 4 + 8 * row] = y;
            acc[row] = 0.0f, mins[row] = 0.0f;
        }
    }
};
template <u32 FORMAT> struct FloatTile {
    typedef Staged<FORMAT> P;
    const unsigned char* input;
    u32 n_blocks;
    float acc[4] = {};
    __device__ __forceinline__ FloatTile(const DecodeArgs& a, u32 n_panels, const unsigned char*, int) : input(input_of(a)), n_blocks(2 * n_panels) {}
    __device__ __forceinline__ void add(const P& p, u32 panel, int lane) { panel_products<P, 1>(p, panel, n_blocks, input, nullptr, lane, acc); }
    __device__ __forceinline__ void finish(float* to, int lane) {
        if (lane % 4 == 0) to[lane / 4] = acc[0] + acc[1] * (1.0f / 2048.0f), to[lane / 4 + 8] = acc[2] + acc[3] * (1.0f / 2048.0f);
#pragma unroll
        for (int k = 0; k < 4; k++) acc[k] = 0.0f;
    }
};
template <> struct Tile<F16> : FloatTile<F16> {
    using FloatTile<F16>::FloatTile;
};
template <> struct Tile<F32> : FloatTile<F32> {
    using FloatTile<F32>::FloatTile;
};

// The warp's sums over its records of a part.
template <u32 FORMAT>
__device__ __forceinline__ void products(const DecodeArgs& a, const Part& part, u32 n_panels, const unsigned char* zeros, float* to, Next& next,
                                         Turn& turn, u32 warp, int lane) {
    typedef Record<FORMAT> R;
    typedef typename Tile<FORMAT>::P P;
    const uint2 range = range_of(part.n_records, warp);
    if (range.x == range.y) return;
    const u32 a_tile = part.records_a_tile, a_slot = part.records_a_slot;
    u32 of_tile = range.x - quotient(range.x, a_tile, __frcp_rn((float)a_tile)) * a_tile;
    Tile<FORMAT> tile(a, n_panels, zeros, lane);
#pragma unroll 1
    for (u32 r = range.x; r < range.y;) {
        const u32 n = min(a_slot, range.y - r);
        while (!barrier_try_wait(barrier_of(a, warp, turn.slot), turn.parity)) spin_pause();
        const unsigned char* record = slot_of(a, warp, turn.slot);
#pragma unroll 1
        for (u32 j = 0; j < n;) {
            const u32 run = min(n - j, a_tile - of_tile);
            u32 i = 0;
            constexpr int RECORDS = R::PANELS == 1 ? 2 : 1; // of a pair of panels, or of two
#pragma unroll 1
            for (; i + RECORDS <= run; i += RECORDS) {
#pragma unroll
                for (int q = 0; q < R::PANELS * RECORDS; q += 2) {
                    P x, y;
                    x.read(Place<FORMAT>(record + (i + q / R::PANELS) * R::BYTES, q % R::PANELS), lane);
                    y.read(Place<FORMAT>(record + (i + (q + 1) / R::PANELS) * R::BYTES, (q + 1) % R::PANELS), lane);
                    const u32 panel = (of_tile + i) * R::PANELS + q;
                    tile.add(x, panel, lane);
                    tile.add(y, panel + 1, lane);
                }
            }
            if (RECORDS == 2 && i < run) {
                P x;
                x.read(Place<FORMAT>(record + i * R::BYTES, 0), lane);
                tile.add(x, of_tile + i, lane);
            }
            record += run * R::BYTES, j += run, of_tile += run;
            if (of_tile == a_tile || r + j == range.y) {
                tile.finish(to, lane);
                to += 16, of_tile = 0;
            }
        }
        r += n;
        // Into the place of what all lanes have read.
        __syncwarp();
        ask(a, next, warp, lane);
        if (++turn.slot == a.n_slots) turn.slot = 0, turn.parity ^= 1;
    }
}

// Where the sums of a row of a part lie: that of the first warp that had a share of its tile, and those of all `n` that had, `stride`
// from each other, of whom the others had no tile before.
struct Shares {
    const float *first, *all;
    u32 n;
};
__device__ __forceinline__ Shares shares_of(const float* region, u32 stride, const Part& part, u32 row) {
    const u32 n_records = part.n_records, a_tile = part.records_a_tile, n = n_warps_of(n_records), tile = row / 16, first = tile * a_tile;
    const float reciprocal = __frcp_rn((float)n_records);
    const u32 w = quotient(n * (first + 1) - 1, n_records, reciprocal), end = quotient(n * (first + a_tile) - 1, n_records, reciprocal) + 1;
    const u32 at = tile - quotient(n_records < WARPS ? w : w * n_records / WARPS, a_tile, __frcp_rn((float)a_tile));
    const float* all = region + w * stride + row % 16;
    return {all + at * 16, all, end - w};
}
__device__ __forceinline__ float sum_of(const Shares& s, u32 stride) {
    float v[WARPS];
#pragma unroll
    for (u32 k = 0; k < WARPS; k++) v[k] = k == 0 ? *s.first : k < s.n ? s.all[k * stride] : 0.0f;
#pragma unroll
    for (int d = 1; d < WARPS; d *= 2)
#pragma unroll
        for (int k = 0; k < WARPS; k += 2 * d) v[k] += v[k + d];
    return v[0];
}

__device__ __forceinline__ float power_of_two(int e) { return __uint_as_float((u32)(e + 127) << 23); }

// Inputs of products with floats: quads that `put` has put in place go to where they are as halves, hi and lo, with a norm.
struct FloatInput {
    float4* inputs;
    float squares = 0.0f, most = 0.0f;
    __device__ __forceinline__ FloatInput(const DecodeArgs& a) : inputs((float4*)input_of(a)) {}
    // `v`: times the norm's weight already.
    __device__ __forceinline__ void put(u32 k, const float4& v) {
        most = fmaxf(most, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
        inputs[k] = v;
    }
    // What products are to be multiplied by.
    __device__ __forceinline__ float finish(u32 n_in, float2* scratch) {
        const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
        const u32 n4 = n_in / 4, n_padded4 = (n_in + 63) / 64 * 16;
        most = warp_max(most);
        if (lane == 0) scratch[warp].y = most;
        __syncthreads();
        most = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) most = fmaxf(most, scratch[i].y);
        // Of numbers too small to have one, and of infinity, none is needed.
        const int bits_of = (__float_as_uint(most) >> 23) - 127, exponent = bits_of > -100 && bits_of < 100 ? bits_of : 0;
        const float up = power_of_two(13 - exponent);
        // Eight lanes have the 32 elements of a block, which take as much room before and after.
        for (u32 i = tid; i < (n_padded4 + 31) / 32 * 32; i += THREADS) {
            const float4 v = i < n4 ? inputs[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            const float e[4] = {v.x * up, v.y * up, v.z * up, v.w * up};
            half hi[4], lo[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                hi[k] = __float2half_rn(e[k]);
                lo[k] = __float2half_rn((e[k] - __half2float(hi[k])) * 2048.0f);
            }
            __syncwarp();
            if (i >= n_padded4) continue;
            unsigned char* to = (unsigned char*)inputs + i / 8 * 128 + 2 * place_in_block(i % 8 * 4);
            *(uint2*)to = make_uint2(bits(__halves2half2(hi[0], hi[1])), bits(__halves2half2(hi[2], hi[3])));
            *(uint2*)(to + 64) = make_uint2(bits(__halves2half2(lo[0], lo[1])), bits(__halves2half2(lo[2], lo[3])));
        }
        return power_of_two(exponent - 13);
    }
};

// The quad of a block that a thread has of its half `h`.
__device__ __forceinline__ u32 quad_of(u32 block, int h) { return block * 8 + threadIdx.x % 4 + 4 * h; }
__device__ __forceinline__ float squares_of(const float4& v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
__device__ __forceinline__ void multiply(float4& v, const float4& by) { v.x *= by.x, v.y *= by.y, v.z *= by.z, v.w *= by.w; }

// The row of a step's results that the block's row `j` is, or none; which of the step's parts has it, and where there.
struct Row {
    u32 row, part, of_part;
};
__device__ __forceinline__ Row row_at(const Step& step, const Part* parts, u32 j) {
    u32 part = 0, before = 0;
    if (step.kind == QKV) {
        while (part < 2 && j >= parts[part].n_tiles * 16u) j -= parts[part].n_tiles * 16u, before += step.n_rows[part++];
    }
    const u32 r = parts[part].first_tile * 16u + j;
    return {r < step.n_rows[part] && j < parts[part].n_tiles * 16u ? before + r : ~0u, part, j};
}

template <int C> __device__ __forceinline__ void decode(const DecodeArgs& a) {
    __shared__ __align__(16) Layer layers[2];
    __shared__ float2 scratch[2][WARPS]; // squares and maxima of inputs, of steps by turns
    __shared__ __align__(16) unsigned char zeros[16];
    __shared__ u64_t best_of_warps[WARPS];
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    constexpr int LAYER_WORDS = sizeof(Layer) / 16;
    float* residual = (float*)(decode_memory + a.residual_at);

    if (tid < 16) zeros[tid] = 0;
    for (u32 i = tid; i < WARPS * a.n_slots; i += THREADS) barrier_init(barrier_of(a, 0, i), 1);
    barriers_are_ready();
    for (u32 i = tid; i < a.n_parts; i += THREADS) {
        const u32 which = i % MATRICES;
        u32 first = 0, n_tiles = tiles_of(a.matrices[i]);
        // Queries, keys and values are one below the other.
        if (which < 3 && i + 1 < a.n_parts) {
            const Matrix* m = a.matrices + (i - which);
            n_tiles = tiles_of(m[0]) + tiles_of(m[1]) + tiles_of(m[2]);
            for (u32 j = 0; j < which; j++) first += tiles_of(m[j]);
        }
        parts_of(a)[i] = part_of(a.matrices[i], first, n_tiles, a.slot_bytes);
    }
    for (u32 i = tid; i < LAYER_WORDS; i += THREADS) ((uint4*)&layers[0])[i] = ((const uint4*)a.layers)[i];
    const u32 pos = a.token->pos, seq = a.token->seq;
    __syncthreads();
    Next next = {nullptr, 0, 0, 0, 0, 0};
    find_records(a, next, warp);
    for (u32 i = 0; i < a.n_slots; i++) ask(a, next, warp, lane);
    // The embedding.
    float* embedding = (float*)(decode_memory + a.embedding_at);
    {
        const u32 x_tiles = (a.n_embd + 15) / 16, first = share(blockIdx.x, x_tiles, gridDim.x), end = share(blockIdx.x + 1, x_tiles, gridDim.x);
        for (u32 k = tid; k < a.n_embd; k += THREADS) {
            float v;
            WITH_PANEL(a.table.format, (v = a.embedding_scale * element_of<P>(a.table, a.token->id, k)));
            embedding[k] = v;
            if (k / 16 >= first && k / 16 < end) residual[k - first * 16] = v;
        }
    }
    __syncthreads();

    u64_t best = 0;
    u32 tag = a.tag;
    const u32 copy = blockIdx.x % COPIES;
    u32 which = 0; // of `scratch`
    Turn turn = {0, 0};
#pragma unroll 1
    for (u32 i = 0; i <= a.n_layer; i++) {
        const Layer& l = layers[i % 2];
#pragma unroll 1
        for (u32 s = 0; s < l.n_steps; s++) {
            const Step& step = l.steps[s];
            const Part* parts = parts_of(a) + step.first_part;
            if (step.kind == ATTENTION_OUTPUT) {
                attention<C>(a, l, pos, seq, tag, (float*)input_of(a));
                // The next layer's description comes meanwhile.
                for (u32 j = tid; j < LAYER_WORDS; j += THREADS) copy16((uint4*)&layers[(i + 1) % 2] + j, (const uint4*)(a.layers + i + 1) + j);
                commit_copies();
            }
            if (step.kind == DOWN) wait_for_copies<0>();
            // Whoever has no rows need not wait, but for the residual stream: see `attention`.
            if (parts[0].n_tiles == 0 && (step.kind == ATTENTION_OUTPUT || step.kind == DOWN)) {
                if (step.kind == DOWN) __syncthreads();
                continue;
            }
            // What is added to the thread's row is on its way before the input is there, as is the norm.
            const Row first_row = row_at(step, parts, tid);
            const float first_bias = step.bias && first_row.row != ~0u ? step.bias[first_row.row] : 0.0f;
            const u32 n4 = step.n_in / 4, n_panels = (step.n_in + 63) / 64;
            const float4* norm = (const float4*)step.norm;
            const bool is_first = i == 0 && step.kind == QKV;
            const ulonglong2* from = step.from + copy * (step.n_in / 4);
            const u32 wanted = (tag + step.tag_in) & TAG;
            const CodeInput codes(input_of(a), n_panels);
            FloatInput floats(a);
            float squares = 0.0f;
            // Four threads take a block of 32 inputs, of whose halves each has a quad.
            auto put = [&](u32 block, float4 (&v)[2], const float4* weights) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    squares += squares_of(v[h]);
                    if (norm) multiply(v[h], weights[h]);
                    const u32 k = quad_of(block, h);
                    if (!step.has_codes && k < n4) floats.put(k, v[h]);
                }
                if (step.has_codes) put_digits(codes, block, tid % 4, v[0], v[1], block < 2 * n_panels);
            };
            const u32 first_block = tid / 4, end_block = (2 * n_panels + 7) / 8 * 8; // of all lanes of a warp
            constexpr u32 BLOCKS = THREADS / 4;
            if (step.kind == ATTENTION_OUTPUT) {
                const u32 n_splits = span_of(l, pos, gridDim.x).n_splits;
#pragma unroll 1
                for (u32 block = first_block; block < end_block; block += BLOCKS) {
                    float4 v[2];
                    joined_splits(l, n_splits, a.att + copy * a.att_words, a.sums + copy * a.sums_words, quad_of(block, 0), n4, tag, v);
                    put(block, v, nullptr);
                }
            } else {
                // So many blocks at once.
                constexpr int AT_ONCE = 2;
#pragma unroll 1
                for (u32 first = first_block; first < end_block; first += AT_ONCE * BLOCKS) {
                    ulonglong2 words[AT_ONCE][2];
                    float4 weights[AT_ONCE][2];
#pragma unroll
                    for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            const u32 k = quad_of(first + j * BLOCKS, h);
                            if (k < n4 && norm) weights[j][h] = norm[k];
                            if (k < n4 && !is_first) words[j][h] = load_exchanged(from + k);
                        }
#pragma unroll
                    for (int j = 0; j < AT_ONCE; j++) {
                        const u32 block = first + j * BLOCKS;
                        if (block >= end_block) break;
                        float4 v[2];
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            const u32 k = quad_of(block, h);
                            v[h] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                            if (k >= n4) continue;
                            if (is_first) {
                                v[h] = ((const float4*)embedding)[k];
                            } else {
                                wait_for_tag(words[j][h], from + k, wanted);
                                v[h] = unpack(words[j][h]);
                            }
                        }
                        __syncwarp();
                        put(block, v, weights[j]);
                    }
                }
            }
            which ^= 1;
            float2* of_warps = scratch[which];
            squares = warp_sum(squares);
            if (lane == 0) of_warps[warp].x = squares;
            float factor = step.has_codes ? 1.0f : floats.finish(step.n_in, of_warps);
            __syncthreads();

            const u32 stride = (step.kind == HEAD ? a.head_tiles : a.max_tiles) * 16;
            float* regions = (float*)(decode_memory + a.regions_at);
#pragma unroll 1
            for (u32 p = 0; p < step.n_parts; p++) {
                float* to = regions + p * a.region_floats + warp * stride;
                switch (parts[p].format) {
                    case F16: products<F16>(a, parts[p], n_panels, zeros, to, next, turn, warp, lane); break;
                    case Q8_0: products<Q8_0>(a, parts[p], n_panels, zeros, to, next, turn, warp, lane); break;
                    case Q4_0: products<Q4_0>(a, parts[p], n_panels, zeros, to, next, turn, warp, lane); break;
                    case Q4_K: products<Q4_K>(a, parts[p], n_panels, zeros, to, next, turn, warp, lane); break;
                    case Q5_K: products<Q5_K>(a, parts[p], n_panels, zeros, to, next, turn, warp, lane); break;
                    case Q6_K: products<Q6_K>(a, parts[p], n_panels, zeros, to, next, turn, warp, lane); break;
                    case F32: products<F32>(a, parts[p], n_panels, zeros, to, next, turn, warp, lane); break;
                    default: __trap();
                }
            }
            __syncthreads();

            if (norm) {
                squares = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; w++) squares += of_warps[w].x;
                factor *= rsqrtf(squares / step.n_in + step.eps);
            }
            // Every thread of a warp takes part, for the sake of pairs.
            const u32 n_rows = (parts[0].n_tiles + (step.kind == QKV ? parts[1].n_tiles + parts[2].n_tiles : 0)) * 16;
#pragma unroll 1
            for (u32 j = tid; j < (n_rows + 31) / 32 * 32; j += THREADS) {
                const Row row = j == (u32)tid ? first_row : row_at(step, parts, j);
                float y = 0.0f;
                if (row.row != ~0u) {
                    auto result = [&](u32 p) {
                        const Part& part = parts[p];
                        return sum_of(shares_of(regions + p * a.region_floats, stride, part, row.of_part), stride) *
                               (part.format == F32 ? factor * UNIT : factor);
                    };
                    y = result(row.part);
                    if (step.kind == GATE_AND_UP) y = activate(l.activation, y) * result(1);
                    if (step.bias) y += j == (u32)tid ? first_bias : step.bias[row.row];
                    if (step.kind == ATTENTION_OUTPUT || step.kind == DOWN) {
                        y = residual[j] + l.scale * y;
                        residual[j] = y;
                    }
                    if (step.kind == HEAD) {
                        y *= a.logit_scale;
                        if (a.logit_cap != 0.0f) y = a.logit_cap * tanhf(y / a.logit_cap);
                        if (a.logits) a.logits[row.row] = y;
                        const u64_t rank = rank_of(y, row.row);
                        best = rank > best ? rank : best;
                    }
                }
                if (step.kind == HEAD) continue;
                const float next_row = __shfl_down_sync(~0u, y, 1);
                if (row.row != ~0u && row.row % 2 == 0) {
                    const u64_t word = pack_pair(y, next_row, (tag + step.tag_out) & TAG);
                    for (u32 c = 0; c < step.copies; c++) store_exchanged(step.to + c * (step.n_out / 2) + row.row / 2, word);
                }
            }
        }
        tag = (tag + 2) & TAG;
    }

    // The highest logit.
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        const u64_t other = __shfl_xor_sync(~0u, best, d);
        best = other > best ? other : best;
    }
    if (lane == 0) best_of_warps[warp] = best;
    __syncthreads();
    if (tid != 0) return;
    for (int w = 0; w < WARPS; w++) best = best_of_warps[w] > best ? best_of_warps[w] : best;
    atomicMax(a.best, best);
    __threadfence();
    if (atomicAdd(a.n_done, 1) != gridDim.x - 1) return;
    __threadfence();
    best = atomicExch(a.best, 0ull);
    *a.n_done = 0;
    // All NaN: the first.
    const u32 id = best == 0 ? 0 : 0xffffffffu - (u32)best;
    *a.ids = id;
    if (a.advance) {
        a.token->id = id;
        a.token->pos = pos + 1;
    }
}

// Of heads of up to 64, 128, 256 elements.
extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_64(const __grid_constant__ DecodeArgs a) { decode<1>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_128(const __grid_constant__ DecodeArgs a) { decode<2>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_256(const __grid_constant__ DecodeArgs a) { decode<4>(a); }
