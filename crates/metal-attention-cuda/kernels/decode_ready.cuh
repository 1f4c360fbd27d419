// Steps of small products in decode.cu: what a block has of them is so little that a warp takes its weights to registers before the inputs are
// there, as the tensor cores want them, whatever their format. What is left to do when they come is short, and without a branch.
#pragma once
#include "code_products.cuh"
#include "decode_attention.cuh"
#include "decode_weights.cuh"

// Panels that a warp has at most: of one tile, or half as many of each of two.
constexpr int READY = 4, READY_HALF = READY / 2;
// Floats from one row's sums to those of the next: two of each warp, and some so that rows lie in banks of their own.
constexpr u32 READY_STRIDE = 2 * WARPS + 4;

// Eight codes of each of rows g and g + 8 of a panel's two blocks, as bytes that go with digits, what their products are to be multiplied by, and
// what sums of inputs are, which the lane takes off.
struct ReadyPanel {
    u32 codes[2][4];
    float scales[2][2], mins[2][2];
};
// Half of what a warp has: panels from `first` on of a tile, of which the warp has `n`, and where what goes with them will be.
struct ReadyHalf {
    ReadyPanel panels[READY_HALF];
    bool of_halves, has_mins; // whether the format has a scale for each half of a block, and offsets
    u32 digits[READY_HALF], mask, factors[READY_HALF], sums[READY_HALF]; // in the block's memory

    // Takes those that lie from `record` on.
    template <u32 FORMAT> __device__ __forceinline__ void read(const unsigned char* record, u32 first, u32 n, int lane) {
        static_assert(Record<FORMAT>::PANELS == 1, "records are single panels");
        typedef Codes<FORMAT> P;
        const int t = lane % 4, sub = P::SUBS == 2 ? t / 2 : 0;
        of_halves = P::SUBS == 2, has_mins = P::MINS;
#pragma unroll
        for (u32 k = 0; k < READY_HALF; k++) {
            if (first + k >= n) continue;
            P p;
            p.read(Place<FORMAT>(record + (first + k) * Record<FORMAT>::BYTES, 0), lane);
            ReadyPanel& to = panels[k];
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int row = 0; row < 2; row++) {
                    u32 of[2];
                    p.bytes(b, row, of);
                    // Those of both halves of a block by turns, as digits are.
                    to.codes[b][row] = P::TURNS ? of[0] : __byte_perm(of[0], of[1], 0x5140);
                    to.codes[b][2 + row] = P::TURNS ? of[1] : __byte_perm(of[0], of[1], 0x7362);
                    to.scales[b][row] = p.scale(0, b, row, sub) * (1.0f / P::MULTIPLE);
                    if (P::MINS) to.mins[b][row] = (P::SUBS == 2 ? t % 2 : t) == 0 ? p.min(b, row, sub) : 0.0f;
                }
        }
    }
    // Finds where digits, factors and sums of its inputs will be. `zeros`: where there are none.
    __device__ __forceinline__ void place(const CodeInput& input, u32 first, u32 n, const unsigned char* zeros, int lane) {
        const int g = lane / 4, t = lane % 4;
        // Columns 0 to 3 are those of whole blocks, or of their first halves, the others of the second.
        const bool none = g % 4 == 3 || (g >= 4 && !of_halves);
        mask = !of_halves ? ~0u : g < 4 ? 0x00ff00ffu : 0xff00ff00u;
#pragma unroll
        for (u32 k = 0; k < READY_HALF; k++) {
            const u32 i = first + k;
            const bool there = i < n;
            digits[k] = offset_of(there && !none ? input.digits + i * DIGITS_OF_PANEL + g % 4 * 64 + t * 16 : zeros);
            factors[k] = offset_of(there ? (const unsigned char*)(input.factors + 2 * i) : zeros);
            sums[k] = offset_of(there ? (const unsigned char*)(input.sums + 4 * i) : zeros);
            settle(digits[k]), settle(factors[k]), settle(sums[k]);
        }
    }
    // Begins products with the first K panels, and adds them: of rows g and g + 8 as far as the lane has them. Those with even t have the first two
    // digits, the others the third.
    template <int K> __device__ __forceinline__ void begin(int (&c)[K][2][4]) const {
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            const uint4 x = *at_offset<uint4>(digits[k]);
            const u32(&of)[2][4] = panels[k].codes;
            mma_codes<true>(c[k][0], of[0][0], of[0][1], of[0][2], of[0][3], x.x & mask, x.y & mask);
            mma_codes<true>(c[k][1], of[1][0], of[1][1], of[1][2], of[1][3], x.z & mask, x.w & mask);
        }
    }
    template <int K> __device__ __forceinline__ void add(const int (&c)[K][2][4], float (&y)[2]) const {
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            const float2 factor = *at_offset<float2>(factors[k]);
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int row = 0; row < 2; row++)
                    y[row] += panels[k].scales[b][row] * (b == 0 ? factor.x : factor.y) * (float)((c[k][b][2 * row] << 8) + c[k][b][2 * row + 1]);
        }
    }
    __device__ __forceinline__ void take_offsets(int t, float (&y)[2]) const {
#pragma unroll
        for (u32 k = 0; k < READY_HALF; k++) {
            const float4 of = *at_offset<float4>(sums[k]);
            const float of_blocks[2] = {!of_halves ? of.x + of.y : t < 2 ? of.x : of.y, !of_halves ? of.z + of.w : t < 2 ? of.z : of.w};
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int row = 0; row < 2; row++) y[row] -= panels[k].mins[b][row] * of_blocks[b];
        }
    }
};

// Products of the first K panels of H halves.
template <int H, int K> __device__ __forceinline__ void ready_products(const ReadyHalf (&ready)[2], float (&y)[2][2]) {
    int c[H][K][2][4];
#pragma unroll
    for (int h = 0; h < H; h++) ready[h].begin(c[h]);
#pragma unroll
    for (int h = 0; h < H; h++) ready[h].add(c[h], y[h]);
}

// Row `row`'s sum over all warps.
__device__ __forceinline__ float ready_sum(const float* sums, u32 row) {
    float v[2 * WARPS];
#pragma unroll
    for (int k = 0; k < 2 * WARPS; k += 4) *(float4*)(v + k) = *(const float4*)(sums + row * READY_STRIDE + k);
#pragma unroll
    for (int d = 1; d < 2 * WARPS; d *= 2)
#pragma unroll
        for (int k = 0; k < 2 * WARPS; k += 2 * d) v[k] += v[k + d];
    return v[0];
}

// How many steps of small products the block has ended. Before a warp says that its sums are there, those of the step before have to be known to be: of
// inputs of a few heads, or of no columns, it could have more before others have any.
__device__ __forceinline__ void wait_for_end(const u32& n_ended, u32 n) {
    while (*(const volatile u32*)&n_ended != n) spin_pause();
}

// A step of small products: a warp makes its weights ready before the inputs are there. `n_arrived`: steps before it, of which the block has ended
// `n_ended`.
__device__ __forceinline__ void ready_step(const DecodeArgs& a, const Layer& l, const Step& step, const Part* parts, u32 n_splits, u32 tag, u32 copy,
                                           const unsigned char* zeros, Ring& ring, const u32& n_ended, u32 n_arrived, int warp, int lane) {
    const u32 kind = step.kind, n4 = step.n_in / 4, n_tiles = tiles_of(step, parts), wanted = (tag + step.tag_in) & TAG;
    const Share mine = share_of(warp, step.n_units, LOG_WARPS);
    const u32 n_panels = mine.n * step.unit;
    const bool two = step.ready_tiles == 2;
    const CodeInput input(decode_memory + a.input_at + warp * a.input_stride, n_panels);
    // Four lanes take a block of 32 inputs, of whose halves each has a quad.
    const u32 block = lane / 4, quad = mine.first * step.unit * 16 + block * 8 + lane % 4;
    const bool in_row = block < 2 * n_panels, there[2] = {in_row && quad < n4, in_row && quad + 4 < n4};
    float4 v[2], weights[2];
#pragma unroll
    for (int h = 0; h < 2; h++) weights[h] = step.norm && there[h] ? ((const float4*)step.norm)[quad + 4 * h] : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    const ulonglong2* from = step.from + copy * n4 + quad;

    ReadyHalf ready[2] = {};
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        const u32 tile = two ? h : 0, first = two ? 0 : h * READY_HALF;
        if (tile < n_tiles && n_panels > 0) {
            u32 p = kind == GATE_AND_UP ? tile : 0;
            if (kind == QKV)
                while (p < 2 && tile >= (u32)parts[p].before + parts[p].n_tiles) p++;
            const Part& part = parts[p];
            // All that the warp has of a part is in one slot.
            if (two || h == 0) ring.wait(part.records_a_slot, part.n_tiles * n_panels);
            if (first < n_panels) WITH_CODES(part.format, (ready[h].read<FORMAT>(decode_memory + ring.record, first, n_panels, lane)));
            if (two || h == 1) ring.take(n_panels, part.record_bytes, lane);
        }
        ready[h].place(input, first, tile < n_tiles ? n_panels : 0, zeros, lane);
    }
    u32 sums = a.regions_at[step.region] + (lane / 4 * READY_STRIDE + 2 * warp + lane % 4) * 4;
    settle(sums);
    wait_for_end(n_ended, n_arrived);

    if (kind == ATTENTION_OUTPUT) {
        joined_splits(l, n_splits, a.att + copy * a.att_words, a.sums + copy * a.sums_words, quad, in_row ? n4 : 0, tag, v);
    } else {
        ulonglong2 words[2];
        auto of = [&](int h) { return from + 4 * h; };
        ask_for_words(words, there, of);
        wait_for_words(words, there, wanted, of);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            v[h] = there[h] ? unpack(words[h]) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            multiply(v[h], weights[h]);
        }
    }
    put_digits(input, block, lane % 4, v[0], v[1], in_row);
    __syncwarp();
    float y[2][2] = {};
    if (two || n_panels > READY_HALF) {
        if (n_panels > 1) ready_products<2, 2>(ready, y);
        else ready_products<2, 1>(ready, y);
    } else {
        if (n_panels > 1) ready_products<1, 2>(ready, y);
        else ready_products<1, 1>(ready, y);
    }
    const float of_digits = lane % 2 == 0 ? 256.0f : 1.0f / 256.0f;
#pragma unroll
    for (int h = 0; h < 2; h++) y[h][0] *= of_digits, y[h][1] *= of_digits;
    const bool of_halves = ready[0].of_halves || ready[1].of_halves;
    if (of_halves || ready[0].has_mins || ready[1].has_mins) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            ready[h].take_offsets(lane % 4, y[h]);
#pragma unroll
            for (int row = 0; row < 2; row++) y[h][row] += __shfl_xor_sync(~0u, y[h][row], 2);
        }
    }
    if (lane % 4 < 2) {
        float* const to = (float*)(decode_memory + sums);
        to[0] = two ? y[0][0] : y[0][0] + y[1][0], to[8 * READY_STRIDE] = two ? y[0][1] : y[0][1] + y[1][1];
        if (two) to[16 * READY_STRIDE] = y[1][0], to[24 * READY_STRIDE] = y[1][1];
    }
    sums_are_ready();
}

// What a warp of its own does meanwhile, and after it: rows of the results of all steps of small products.
__device__ __forceinline__ void finish_steps(const DecodeArgs& a, float* residual, u32& n_ended, int lane) {
    u32 tag = a.tag;
    const u32 copy = blockIdx.x % COPIES;
#pragma unroll 1
    for (u32 i = 0; i < a.n_layer; i++) {
        const Layer& l = a.layers[i];
#pragma unroll 1
        for (u32 s = 0; s < l.n_steps; s++) {
            const Step& step = l.steps[s];
            const Part* parts = parts_of(a) + step.first_part;
            // The first step is not among them.
            if (tiles_of(step, parts) == 0 || (i == 0 && s == 0)) continue;
            const u32 kind = step.kind, row = row_at(step, parts, lane), n4 = step.n_in / 4, wanted = (tag + step.tag_in) & TAG, activation = l.activation;
            const u32 n_copies = step.copies, of_copy = step.n_out / 2, tag_out = (tag + step.tag_out) & TAG;
            const bool is_there = row != ~0u, adds = kind == ATTENTION_OUTPUT || kind == DOWN, writes = is_there && row % 2 == 0;
            const float bias = step.bias && is_there ? step.bias[row] : 0.0f, scale = adds ? l.scale : 1.0f, limit = l.activation_limit;
            u64_t* const to = step.to + row / 2;
            const float* const sums = (const float*)(decode_memory + a.regions_at[step.region]);
            float rms = 1.0f;
            if (step.norm) {
                const float reciprocal = step.reciprocal, eps = step.eps;
                const ulonglong2* from = step.from + copy * n4;
                // One word is looked for, so as to be in nobody's way, until it is there: the others come with it.
                while (!is_since(load_exchanged(from + blockIdx.x % n4), wanted)) rest_shortly();
                float squares = 0.0f;
                constexpr int N = 5;
#pragma unroll 1
                for (u32 first = lane; first < n4 + lane; first += 32 * N) {
                    ulonglong2 words[N];
                    bool there[N];
#pragma unroll
                    for (int k = 0; k < N; k++) there[k] = first + 32 * k < n4;
                    auto of = [&](int k) { return from + first + 32 * k; };
                    ask_for_words(words, there, of);
                    wait_for_words(words, there, wanted, of);
#pragma unroll
                    for (int k = 0; k < N; k++)
                        if (there[k]) squares += squares_of(unpack(words[k]));
                }
                rms = rsqrtf(warp_sum(squares) * reciprocal + eps);
            }
            wait_for_sums();
            if (lane == 0) *(volatile u32*)&n_ended = n_ended + 1;
            // Other threads of the block have put the first of these there.
            const float before = adds && is_there ? residual[lane] : 0.0f;
            float y = rms * ready_sum(sums, lane);
            if (kind == GATE_AND_UP) {
                const float up = __shfl_down_sync(~0u, y, 16);
                y = activation == SILU ? activate(SILU, y) * up : gated(activation, limit, y, up);
            }
            y = before + scale * (y + bias);
            const float next_row = __shfl_down_sync(~0u, y, 1);
            if (writes) store_words(to, pack_pair(y, next_row, tag_out), n_copies, of_copy);
            if (adds && is_there) residual[lane] = y;
        }
        tag = (tag + 2) & TAG;
    }
}
