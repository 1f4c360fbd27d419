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
// Each block of 32 has hi and lo, then each block has two sums.
__device__ __forceinline__ unsigned char* input_of(const DecodeArgs& a) { return decode_memory + a.input_at; }
__device__ __forceinline__ float* input_sums_of(const DecodeArgs& a, u32 n_blocks) { return (float*)(decode_memory + a.input_at + n_blocks * 128); }

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

// The warp's sums over its records of a part.
template <u32 FORMAT>
__device__ __forceinline__ void products(const DecodeArgs& a, const Part& part, u32 n_blocks, float* to, Next& next, Turn& turn, u32 warp, int lane) {
    typedef Record<FORMAT> R;
    const uint2 range = range_of(part.n_records, warp);
    if (range.x == range.y) return;
    const u32 a_tile = part.records_a_tile, a_slot = part.records_a_slot;
    u32 of_tile = range.x - quotient(range.x, a_tile, __frcp_rn((float)a_tile)) * a_tile;
    const unsigned char* input = input_of(a);
    const float* sums = input_sums_of(a, n_blocks);
    // Two panels at once, each with sums of its own.
    float acc[2][4] = {};
    typedef Staged<FORMAT> S;
#pragma unroll 1
    for (u32 r = range.x; r < range.y;) {
        const u32 n = min(a_slot, range.y - r);
        while (!barrier_try_wait(barrier_of(a, warp, turn.slot), turn.parity)) spin_pause();
        const unsigned char* record = slot_of(a, warp, turn.slot);
#pragma unroll 1
        for (u32 j = 0; j < n;) {
            const u32 run = min(n - j, a_tile - of_tile);
            u32 i = 0;
            constexpr int RECORDS = R::PANELS == 1 ? 2 : 1; // of a pair, or of two
#pragma unroll 1
            for (; i + RECORDS <= run; i += RECORDS) {
#pragma unroll
                for (int q = 0; q < R::PANELS * RECORDS; q += 2) {
                    S x, y;
                    x.read(Place<FORMAT>(record + (i + q / R::PANELS) * R::BYTES, q % R::PANELS), lane);
                    y.read(Place<FORMAT>(record + (i + (q + 1) / R::PANELS) * R::BYTES, (q + 1) % R::PANELS), lane);
                    const u32 panel = (of_tile + i) * R::PANELS + q;
                    panel_products<S, 1>(x, panel, n_blocks, input, sums, lane, acc[0]);
                    panel_products<S, 1>(y, panel + 1, n_blocks, input, sums, lane, acc[1]);
                }
            }
            if (RECORDS == 2 && i < run) {
                S x;
                x.read(Place<FORMAT>(record + i * R::BYTES, 0), lane);
                panel_products<S, 1>(x, of_tile + i, n_blocks, input, sums, lane, acc[0]);
            }
            record += run * R::BYTES, j += run, of_tile += run;
            if (of_tile == a_tile || r + j == range.y) {
                if (lane % 4 == 0) {
                    to[lane / 4] = acc[0][0] + acc[1][0] + (acc[0][1] + acc[1][1]) * (1.0f / 2048.0f);
                    to[lane / 4 + 8] = acc[0][2] + acc[1][2] + (acc[0][3] + acc[1][3]) * (1.0f / 2048.0f);
                }
                to += 16, of_tile = 0;
#pragma unroll
                for (int k = 0; k < 4; k++) acc[0][k] = 0.0f, acc[1][k] = 0.0f;
            }
        }
        r += n;
        // Into the place of what all lanes have read.
        __syncwarp();
        ask(a, next, warp, lane);
        if (++turn.slot == a.n_slots) turn.slot = 0, turn.parity ^= 1;
    }
}

// Row `row` of a part's tile `tile`, summed over the warps that had a share of it.
__device__ __forceinline__ float row_of(const float* region, u32 max_tiles, const Part& part, u32 tile, u32 row) {
    const u32 n_records = part.n_records, a_tile = part.records_a_tile, n = n_warps_of(n_records), first = tile * a_tile;
    const float reciprocal = __frcp_rn((float)n_records);
    const u32 w = quotient(n * (first + 1) - 1, n_records, reciprocal), end = quotient(n * (first + a_tile) - 1, n_records, reciprocal) + 1;
    // The first of them may have had tiles before.
    const u32 at = tile - quotient(n_records < WARPS ? w : w * n_records / WARPS, a_tile, __frcp_rn((float)a_tile));
    const float* from = region + w * max_tiles * 16 + row;
    float y = from[at * 16];
    for (u32 k = 1; w + k < end; k += 4) {
        float v[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) v[i] = w + k + i < end ? from[(k + i) * max_tiles * 16] : 0.0f;
#pragma unroll
        for (u32 i = 0; i < 4; i++) y += v[i];
    }
    return y;
}

__device__ __forceinline__ float power_of_two(int e) { return __uint_as_float((u32)(e + 127) << 23); }

constexpr int AT_ONCE = 4; // quads of inputs that a thread asks for at once

// What a thread has seen of the inputs: four at a time go through `put`, as they are, to where `finish` makes of them what the tensor cores
// take: hi and lo, and sums of 16.
struct Input {
    float4* inputs;
    float squares, most;
    __device__ __forceinline__ Input(const DecodeArgs& a) : inputs((float4*)input_of(a)), squares(0.0f), most(0.0f) {}
    // `k`: the place of the four among fours; `weight`: of the norm.
    __device__ __forceinline__ void put(u32 k, float4 v, const float4* weight) {
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        if (weight) v.x *= weight->x, v.y *= weight->y, v.z *= weight->z, v.w *= weight->w;
        most = fmaxf(most, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
        inputs[k] = v;
    }
    // The power of two that inputs were multiplied by is 2^(13 - the result).
    __device__ __forceinline__ int finish(bool has_norm, float eps, u32 n_in, bool odd_sixteenth, float2* scratch) {
        const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
        const u32 n4 = n_in / 4, n_padded4 = (n_in + 63) / 64 * 16;
        squares = warp_sum(squares);
        most = warp_max(most);
        if (lane == 0) scratch[warp] = make_float2(squares, most);
        __syncthreads();
        squares = 0.0f, most = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) squares += scratch[i].x, most = fmaxf(most, scratch[i].y);
        const float rms = has_norm ? rsqrtf(squares / n_in + eps) : 1.0f;
        const float largest = most * rms;
        // Of numbers too small to have one, and of infinity, none is needed.
        const int bits_of = (__float_as_uint(largest) >> 23) - 127, exponent = bits_of > -100 && bits_of < 120 ? bits_of : 0;
        const float up = power_of_two(13 - exponent) * rms;
        // Eight lanes have the 32 elements of a block, which take as much room before and after.
        for (u32 i = tid; i < (n_padded4 + 31) / 32 * 32; i += THREADS) {
            const float4 v = i < n4 ? inputs[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            const float e[4] = {v.x * up, v.y * up, v.z * up, v.w * up};
            half hi[4], lo[4];
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float w = odd_sixteenth && k >= 2 ? e[k] * 0.0625f : e[k];
                hi[k] = __float2half_rn(w);
                lo[k] = __float2half_rn((w - __half2float(hi[k])) * 2048.0f);
                sum += e[k];
            }
            // Four threads have the 16 columns of a product.
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            __syncwarp();
            if (i >= n_padded4) continue;
            const u32 of = i / 8, k = i % 8 * 4;
            if (i % 4 == 0) ((float*)((unsigned char*)inputs + n_padded4 * 16))[of * 2 + k / 16] = sum;
            unsigned char* to = (unsigned char*)inputs + of * 128 + 2 * place_in_block(k);
            *(uint2*)to = make_uint2(bits(__halves2half2(hi[0], hi[1])), bits(__halves2half2(hi[2], hi[3])));
            *(uint2*)(to + 64) = make_uint2(bits(__halves2half2(lo[0], lo[1])), bits(__halves2half2(lo[2], lo[3])));
        }
        __syncthreads();
        return exponent;
    }
};

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
    __shared__ float2 scratch[WARPS];
    __shared__ u64_t best_of_warps[WARPS];
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    constexpr int LAYER_WORDS = sizeof(Layer) / 16;
    float* residual = (float*)(decode_memory + a.residual_at);

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
    // The embedding, to where the first step's inputs will be.
    {
        const u32 x_tiles = (a.n_embd + 15) / 16, first = share(blockIdx.x, x_tiles, gridDim.x), end = share(blockIdx.x + 1, x_tiles, gridDim.x);
        for (u32 k = tid; k < a.n_embd; k += THREADS) {
            float v;
            WITH_PANEL(a.table.format, (v = a.embedding_scale * element_of<P>(a.table, a.token->id, k)));
            ((float*)input_of(a))[k] = v;
            if (k / 16 >= first && k / 16 < end) residual[k - first * 16] = v;
        }
    }
    __syncthreads();

    u64_t best = 0;
    u32 tag = a.tag;
    const u32 copy = blockIdx.x % COPIES;
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
            Input input(a);
            const u32 n4 = step.n_in / 4;
            const float4* norm = (const float4*)step.norm;
            if (i == 0 && step.kind == QKV) {
                for (u32 k = tid; k < n4; k += THREADS) input.put(k, input.inputs[k], norm + k);
            } else if (step.kind == ATTENTION_OUTPUT) {
                const u32 n_splits = span_of(l, pos, gridDim.x).n_splits;
#pragma unroll 1
                for (u32 k = tid; k < n4; k += THREADS) input.put(k, joined_splits(l, n_splits, a.att + copy * a.att_words, a.sums + copy * a.sums_words, k, tag), nullptr);
            } else {
                const ulonglong2* from = step.from + copy * (step.n_in / 4);
                const u32 wanted = (tag + step.tag_in) & TAG;
#pragma unroll 1
                for (u32 first = tid; first < n4; first += AT_ONCE * THREADS) {
                    ulonglong2 words[AT_ONCE];
                    float4 weights[AT_ONCE];
#pragma unroll
                    for (int j = 0; j < AT_ONCE; j++) {
                        const u32 k = first + j * THREADS;
                        if (k < n4 && norm) weights[j] = norm[k];
                        if (k < n4) words[j] = load_exchanged(from + k);
                    }
#pragma unroll
                    for (int j = 0; j < AT_ONCE; j++) {
                        const u32 k = first + j * THREADS;
                        if (k >= n4) break;
                        wait_for_tag(words[j], from + k, wanted);
                        input.put(k, unpack(words[j]), norm ? &weights[j] : nullptr);
                    }
                }
            }
            const int exponent = input.finish(norm != nullptr, step.eps, step.n_in, step.odd_sixteenth, scratch);

            const u32 max_tiles = step.kind == HEAD ? a.head_tiles : a.max_tiles, n_blocks = (step.n_in + 63) / 64 * 2;
            float* regions = (float*)(decode_memory + a.regions_at);
#pragma unroll 1
            for (u32 p = 0; p < step.n_parts; p++) {
                float* to = regions + p * a.region_floats + warp * max_tiles * 16;
                switch (parts[p].format) {
                    case F16: products<F16>(a, parts[p], n_blocks, to, next, turn, warp, lane); break;
                    case Q8_0: products<Q8_0>(a, parts[p], n_blocks, to, next, turn, warp, lane); break;
                    case Q4_0: products<Q4_0>(a, parts[p], n_blocks, to, next, turn, warp, lane); break;
                    case Q4_K: products<Q4_K>(a, parts[p], n_blocks, to, next, turn, warp, lane); break;
                    case Q5_K: products<Q5_K>(a, parts[p], n_blocks, to, next, turn, warp, lane); break;
                    case Q6_K: products<Q6_K>(a, parts[p], n_blocks, to, next, turn, warp, lane); break;
                    case F32: products<F32>(a, parts[p], n_blocks, to, next, turn, warp, lane); break;
                    default: __trap();
                }
            }
            __syncthreads();

            // Every thread of a warp takes part, for the sake of pairs.
            const u32 n_rows = (parts[0].n_tiles + (step.kind == QKV ? parts[1].n_tiles + parts[2].n_tiles : 0)) * 16;
#pragma unroll 1
            for (u32 j = tid; j < (n_rows + 31) / 32 * 32; j += THREADS) {
                const Row row = j == (u32)tid ? first_row : row_at(step, parts, j);
                float y = 0.0f;
                if (row.row != ~0u) {
                    auto sum_of = [&](u32 p) {
                        const Part& part = parts[p];
                        return row_of(regions + p * a.region_floats, max_tiles, part, row.of_part / 16, row.of_part % 16) *
                               power_of_two(exponent - (part.format == F16 ? 13 : 13 - 24));
                    };
                    y = sum_of(row.part);
                    if (step.kind == GATE_AND_UP) y = activate(l.activation, y) * sum_of(1);
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
