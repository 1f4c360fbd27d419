// Steps of small products in decode.cu: what a block has of them is so little that a warp takes its weights to registers before the inputs are
// there, as the tensor cores want them, whatever their format. What is left to do when they come is short, and without a branch.
#pragma once
#include "code_products.cuh"
#include "decode_attention.cuh"
#include "decode_products.cuh"

// Panels that a warp has at most: of one tile, or half as many of each of two.
constexpr int READY = 4, READY_HALF = READY / 2;

// What a lane takes of the inputs, from its quad on, and where in the block's memory it goes.
struct ReadyInputs {
    u32 quad, digits, factor, sums;
    bool in_row, there[2], tells_factor, tells_sum;
    float4 weights[2];
};

// Puts inputs of a block to their places, a quad of each half or one of either, as `put_digits` does, but for the order of digits: those of a half are
// side by side. All lanes that share a block take part.
template <int QUADS> __device__ __forceinline__ void put_plain_digits(const ReadyInputs& to, const float4 (&v)[QUADS], bool with_sums) {
    constexpr int LANES = 8 / QUADS;
    float most = largest_of(v[0]);
    u32 whole[QUADS][4];
    if (QUADS == 2) most = larger(most, largest_of(v[QUADS - 1]));
#pragma unroll
    for (int d = 1; d < LANES; d *= 2) most = larger(most, __shfl_xor_sync(~0u, most, d));
    const DigitScale scale(most);
#pragma unroll
    for (int q = 0; q < QUADS; q++) whole[q][0] = scale.whole(v[q].x), whole[q][1] = scale.whole(v[q].y), whole[q][2] = scale.whole(v[q].z), whole[q][3] = scale.whole(v[q].w);
    if (with_sums) {
        float sum[2];
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            sum[q] = (v[q].x + v[q].y) + (v[q].z + v[q].w);
            sum[q] += __shfl_xor_sync(~0u, sum[q], 1), sum[q] += __shfl_xor_sync(~0u, sum[q], 2);
            if (to.tells_sum) *(float*)(decode_memory + to.sums + 4 * q) = sum[q];
        }
    }
    if (!to.in_row) return;
    u32* digits = (u32*)(decode_memory + to.digits);
#pragma unroll
    for (int digit = 0; digit < 3; digit++)
#pragma unroll
        for (int q = 0; q < QUADS; q++) digits[16 * digit + q] = digit_of(digit, whole[q][0], whole[q][1], whole[q][2], whole[q][3]);
    if (to.tells_factor) *(float*)(decode_memory + to.factor) = scale.factor();
}

// Eight codes of each of rows g and g + 8 of a panel's two blocks, as bytes that go with digits, what their products are to be multiplied by, and
// what sums of inputs are, which the lane takes off: of each block, or in [0] of the one whose products the lane has.
struct ReadyPanel {
    u32 codes[2][4];
    float scales[2][2], mins[2][2];
};
// Half of what a warp has: panels from `first` on of a tile, of which the warp has `n`, and where what goes with them will be. `halves`: whether some of the
// step have a scale for each half of a block: then columns 0 to 2 of products are the digits of these or of whole blocks, 4 to 6 those of second halves.
// Else columns 0 to 2 are those of a panel's first block, 4 to 6 those of its second, whose products come to one sum (`Columns`).
struct ReadyHalf {
    ReadyPanel panels[READY_HALF];
    bool of_halves, has_mins; // whether the format has a scale for each half, and offsets
    u32 digits[READY_HALF][2], masks[2], factors[READY_HALF], sums[READY_HALF]; // in the block's memory

    // Takes those that lie from `record` on.
    template <u32 FORMAT> __device__ __forceinline__ void read(const unsigned char* record, u32 first, u32 n, bool halves, int lane) {
        typedef Codes<FORMAT> P;
        typedef Record<FORMAT> R;
        const int t = lane % 4, sub = P::SUBS == 2 ? t / 2 : 0;
        of_halves = P::SUBS == 2, has_mins = P::MINS;
        // Were they known, codes that are as they are to be would not be moved now to where products take them from, but then.
        u32 first_word = 0x3210, second_word = 0x7654;
        settle(first_word), settle(second_word);
        // One of the lanes that have the same offsets takes them off.
        const bool takes_off = (halves && P::SUBS == 1 ? t : t % 2) == 0;
#pragma unroll
        for (u32 k = 0; k < READY_HALF; k++) {
            if (first + k >= n) continue;
            P p;
            p.read(Place<FORMAT>(record + (first + k) / R::PANELS * R::BYTES, (first + k) % R::PANELS), lane);
            ReadyPanel& to = panels[k];
#pragma unroll
            for (int row = 0; row < 2; row++) {
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    u32 of[2];
                    p.bytes(b, row, of);
                    // Those of a half side by side, as digits are.
                    to.codes[b][row] = __byte_perm(of[0], of[1], P::TURNS ? 0x6420 : first_word);
                    to.codes[b][2 + row] = __byte_perm(of[0], of[1], P::TURNS ? 0x7531 : second_word);
                    to.scales[b][row] = p.scale(0, b, row, sub) * (1.0f / P::MULTIPLE);
                    if (P::MINS) to.mins[b][row] = takes_off ? p.min(b, row, sub) : 0.0f;
                }
                if (!halves && t >= 2) to.scales[0][row] = to.scales[1][row], to.mins[0][row] = to.mins[1][row];
            }
        }
    }
    // Finds where digits, factors and sums of its inputs will be. `zeros`: where there are none.
    __device__ __forceinline__ void place(const CodeInput& input, u32 first, u32 n, bool halves, const unsigned char* zeros, int lane) {
        const int g = lane / 4, t = lane % 4;
        masks[0] = of_halves && g >= 4 ? 0u : ~0u, masks[1] = of_halves && g < 4 ? 0u : ~0u;
#pragma unroll
        for (u32 k = 0; k < READY_HALF; k++) {
            const u32 i = first + k;
            const bool there = i < n;
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const bool mine = g % 4 < 3 && (halves ? of_halves || g < 4 : g / 4 == b);
                digits[k][b] = offset_of(there && mine ? input.digits + i * DIGITS_OF_PANEL + g % 4 * 64 + t * 16 + 8 * b : zeros);
                settle(digits[k][b]);
            }
            const int block = halves ? 0 : t / 2;
            factors[k] = offset_of(there ? (const unsigned char*)(input.factors + 2 * i + block) : zeros);
            sums[k] = offset_of(there ? (const unsigned char*)(input.sums + 4 * i + 2 * block) : zeros);
            settle(factors[k]), settle(sums[k]);
        }
    }
    // Begins products with the first K panels, and adds them: of rows g and g + 8 as far as the lane has them. Those with even t have the first two
    // digits, the others the third.
    template <int K> __device__ __forceinline__ void begin(int (&c)[K][4]) const {
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            const uint2 x = *at_offset<uint2>(digits[k][0]), y = *at_offset<uint2>(digits[k][1]);
            const u32(&of)[2][4] = panels[k].codes;
            mma_codes<true>(c[k], of[0][0], of[0][1], of[0][2], of[0][3], x.x, x.y);
            add_mma_codes<true>(c[k], of[1][0], of[1][1], of[1][2], of[1][3], y.x, y.y);
        }
    }
    template <int K> __device__ __forceinline__ void add(const int (&c)[K][4], float (&y)[2]) const {
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            const float factor = *at_offset<float>(factors[k]);
#pragma unroll
            for (int row = 0; row < 2; row++) y[row] += panels[k].scales[0][row] * factor * (float)((c[k][2 * row] << 8) + c[k][2 * row + 1]);
        }
    }
    // The same of halves.
    template <int K> __device__ __forceinline__ void begin_halves(int (&c)[K][2][4]) const {
#pragma unroll
        for (u32 k = 0; k < K; k++)
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const uint2 x = *at_offset<uint2>(digits[k][b]);
                const u32(&of)[4] = panels[k].codes[b];
                mma_codes<true>(c[k][b], of[0], of[1], of[2], of[3], x.x & masks[0], x.y & masks[1]);
            }
    }
    template <int K> __device__ __forceinline__ void add_halves(const int (&c)[K][2][4], float (&y)[2]) const {
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
    __device__ __forceinline__ void take_offsets(bool halves, int t, float (&y)[2]) const {
#pragma unroll
        for (u32 k = 0; k < READY_HALF; k++) {
            if (halves) {
                const float4 of = *at_offset<float4>(sums[k]);
                const float of_blocks[2] = {!of_halves ? of.x + of.y : t < 2 ? of.x : of.y, !of_halves ? of.z + of.w : t < 2 ? of.z : of.w};
#pragma unroll
                for (int b = 0; b < 2; b++)
#pragma unroll
                    for (int row = 0; row < 2; row++) y[row] -= panels[k].mins[b][row] * of_blocks[b];
            } else {
                const float2 of = *at_offset<float2>(sums[k]);
#pragma unroll
                for (int row = 0; row < 2; row++) y[row] -= panels[k].mins[0][row] * (of.x + of.y);
            }
        }
    }
};

// Products of the first K panels of H halves.
template <int H, int K> __device__ __forceinline__ void ready_products(const ReadyHalf (&ready)[2], bool halves, float (&y)[2][2]) {
    if (halves) {
        int c[H][K][2][4];
#pragma unroll
        for (int h = 0; h < H; h++) ready[h].begin_halves(c[h]);
#pragma unroll
        for (int h = 0; h < H; h++) ready[h].add_halves(c[h], y[h]);
    } else {
        int c[H][K][4];
#pragma unroll
        for (int h = 0; h < H; h++) ready[h].begin(c[h]);
#pragma unroll
        for (int h = 0; h < H; h++) ready[h].add(c[h], y[h]);
    }
}

template <int QUADS>
__device__ __forceinline__ void take_inputs(const DecodeArgs& a, const Layer& l, const Step& step, const ReadyInputs& in, u32 n_splits, u32 tag,
                                            u32 copy, bool with_sums) {
    const u32 n4 = step.n_in / 4;
    float4 v[QUADS];
    if (step.kind == ATTENTION_OUTPUT) {
        joined_splits<QUADS, true>(l, n_splits, a.att + copy * a.att_words, a.sums + copy * a.sums_words, in.quad, in.in_row ? n4 : 0, tag, v);
    } else {
        ulonglong2 words[QUADS];
        bool there[QUADS];
#pragma unroll
        for (int q = 0; q < QUADS; q++) there[q] = in.there[q];
        const ulonglong2* from = step.from + copy * n4 + in.quad;
        auto of = [&](int q) { return from + 4 * q; };
        ask_for_words(words, there, of);
        wait_for_words(words, there, (tag + step.tag_in) & TAG, of);
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            v[q] = there[q] ? unpack(words[q]) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            multiply(v[q], in.weights[q]);
        }
    }
    put_plain_digits(in, v, with_sums);
}

// A step of small products: a warp makes its weights ready before the inputs are there. `n_arrived`: steps before it.
__device__ __forceinline__ void ready_step(const DecodeArgs& a, const Layer& l, const Step& step, const Part* parts, u32 n_splits, u32 tag, u32 copy,
                                           const unsigned char* zeros, Ring& ring, StepEnds& ends, u32 n_arrived, int warp, int lane) {
    const u32 kind = step.kind, n4 = step.n_in / 4, n_tiles = tiles_of(step, parts);
    const Share mine = share_of(warp, step.n_units, LOG_WARPS);
    const u32 n_panels = mine.n * step.unit;
    const bool two = step.ready_tiles == 2, halves = step.has_halves;
    const CodeInput input(decode_memory + a.input_at + warp * a.input_stride, n_panels);
    // Eight lanes take a block of 32 inputs, a quad each, or where there are more than four blocks four lanes, of each half a quad.
    const bool is_narrow = n_panels <= 2;
    ReadyInputs in;
    const u32 block = is_narrow ? lane / 8 : lane / 4, t = is_narrow ? lane % 8 : lane % 4;
    in.quad = mine.first * step.unit * 16 + block * 8 + t;
    in.in_row = block < 2 * n_panels, in.tells_factor = in.in_row && t == 0, in.tells_sum = in.in_row && t % 4 == 1;
    in.digits = offset_of(input.digits + block / 2 * DIGITS_OF_PANEL + t % 4 * 16 + block % 2 * 8 + t / 4 * 4);
    in.factor = offset_of(input.factors + block), in.sums = offset_of(input.sums + 2 * block + t / 4);
    settle(in.digits), settle(in.factor), settle(in.sums);
#pragma unroll
    for (int q = 0; q < 2; q++) {
        in.there[q] = in.in_row && in.quad + 4 * q < n4 && !(is_narrow && q > 0);
        in.weights[q] = step.norm && in.there[q] ? ((const float4*)step.norm)[in.quad + 4 * q] : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    }

    ReadyHalf ready[2] = {};
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        const u32 tile = two ? h : 0, first = two ? 0 : h * READY_HALF;
        if (tile < n_tiles && n_panels > 0) {
            u32 p = kind == GATE_AND_UP ? tile : 0;
            if (kind == QKV)
                while (p < 2 && tile >= (u32)parts[p].before + parts[p].n_tiles) p++;
            const Part& part = parts[p];
            const u32 n_records = mine.n * part.records_a_unit;
            // All that the warp has of a part is in one slot.
            if (two || h == 0) ring.wait(part.records_a_slot, part.n_tiles * n_records);
            if (first < n_panels) WITH_CODES(part.format, (ready[h].read<FORMAT>(decode_memory + ring.record, first, n_panels, halves, lane)));
            if (two || h == 1) ring.take(n_records, part.record_bytes);
        }
        ready[h].place(input, first, tile < n_tiles ? n_panels : 0, halves, zeros, lane);
    }
    // A lane ends with the sum of one row of a tile, or of two.
    u32 sums = a.regions_at[step.region] + ((row_of_sum(lane) + 8 * (lane & 2)) * SUMS_STRIDE + warp) * 4;
    settle(sums);
    ends.wait_for_end(n_arrived);

    const bool has_mins = ready[0].has_mins || ready[1].has_mins;
    if (is_narrow) take_inputs<1>(a, l, step, in, n_splits, tag, copy, has_mins);
    else take_inputs<2>(a, l, step, in, n_splits, tag, copy, has_mins);
    __syncwarp();
    float y[2][2] = {};
    if (two || n_panels > READY_HALF) {
        if (n_panels > 1) ready_products<2, 2>(ready, halves, y);
        else ready_products<2, 1>(ready, halves, y);
    } else {
        if (n_panels > 1) ready_products<1, 2>(ready, halves, y);
        else ready_products<1, 1>(ready, halves, y);
    }
    const float of_digits = lane & 1 ? 1.0f / 256.0f : 256.0f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        y[h][0] *= of_digits, y[h][1] *= of_digits;
        if (has_mins) ready[h].take_offsets(halves, lane % 4, y[h]);
    }
    float* const to = (float*)(decode_memory + sums);
    if (two) {
        *to = sum_of_row<2>(y, lane);
    } else {
        const float of_both[1][2] = {{y[0][0] + y[1][0], y[0][1] + y[1][1]}}, sum = sum_of_row<1>(of_both, lane);
        if (!(lane & 2)) *to = sum;
    }
    ends.sums_are_ready();
}

// What a warp of its own does meanwhile, and after it: rows of the results of all steps of small products.
__device__ __forceinline__ void finish_steps(const DecodeArgs& a, float* residual, StepEnds& ends, int lane) {
    u32 tag = a.tag, n_steps = 0;
    const u32 copy = blockIdx.x % COPIES;
#pragma unroll 1
    for (u32 i = 0, n_done = 0; n_done < a.n_tokens; i++) {
        if (i == a.n_layer) {
            // The head's step has tags, too.
            tag = (tag + 2) & TAG, i = 0;
            if (++n_done == a.n_tokens) return;
            all_meet_who_ends();
        }
        const Layer& l = a.layers[i];
#pragma unroll 1
        for (u32 s = 0; s < l.n_steps; s++) {
            const Step& step = l.steps[s];
            const Part* parts = parts_of(a) + step.first_part;
            // The first step is not among them.
            if (tiles_of(step, parts) == 0 || (i == 0 && s == 0)) continue;
            const u32 kind = step.kind, row = row_at(step, parts, lane), n4 = step.n_in / 4, wanted = (tag + step.tag_in) & TAG, activation = l.activation;
            u32 n_copies = step.copies, tag_out = (tag + step.tag_out) & TAG;
            const bool is_there = row != ~0u, adds = kind == ATTENTION_OUTPUT || kind == DOWN, writes = is_there && row % 2 == 0;
            const float bias = step.bias && is_there ? step.bias[row] : 0.0f, scale = adds ? l.scale : 1.0f, limit = l.activation_limit;
            u64_t* to[COPIES];
#pragma unroll
            for (u32 c = 0; c < COPIES; c++) {
                to[c] = step.to + row / 2 + c * (step.n_out / 2);
                settle(to[c]);
            }
            u32 sums = a.regions_at[step.region] + lane * SUMS_STRIDE * 4;
            settle(sums), settle(tag_out), settle(n_copies);
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
            ends.wait_for_sums(n_steps++);
            // Other threads of the block have put the first of these there.
            const float before = adds && is_there ? residual[lane] : 0.0f;
            float y = rms * sum_of_warps(at_offset<float>(sums), LOG_WARPS);
            if (kind == GATE_AND_UP) {
                const float up = __shfl_down_sync(~0u, y, 16);
                y = activation == SILU ? activate(SILU, y) * up : gated(activation, limit, y, up);
            }
            y = before + scale * (y + bias);
            const float next_row = __shfl_down_sync(~0u, y, 1);
            const u64_t word = pack_pair(y, next_row, tag_out);
#pragma unroll
            for (u32 c = 0; c < COPIES; c++)
                if (writes && c < n_copies) store_exchanged(to[c], word);
            if (adds && is_there) residual[lane] = y;
            ends.tell_end(lane);
        }
        tag = (tag + 2) & TAG;
    }
}
