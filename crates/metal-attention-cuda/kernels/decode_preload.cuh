// Small ops of the persistent decode kernel (SMALL kernels): a block has so little of an op, one or two tiles and at most four panels a warp,
// that each consumer warp loads its weights into registers before the inputs arrive, as bytes in the order of mma operands, whatever
// their format. Little is left to do between the arrival of inputs and the partial sums, and without a branch. The epilogue warp then finishes the
// rows (`run_epilogue_warp`), while the consumer warps preload the weights of the next op.
//
// Lanes: g = lane / 4 and t = lane % 4, as in the fragments of mma (ptx.cuh).
#pragma once
#include "code_products.cuh"
#include "decode_attention.cuh"
#include "decode_products.cuh"

// Panels that a warp can preload: of one tile, or half as many of each of two tiles.
constexpr int PRELOAD_PANELS = 4, PRELOAD_HALF = PRELOAD_PANELS / 2;

// The quads of an op's input that a lane loads, and the offsets in shared memory at which it stores them in the warp's inputs (`CodeInput`). Both
// quads of a lane are in the same quant block.
struct InputTargets {
    u32 quad;            // index of the lane's first quad in the input vector
    u32 digits;          // where its digits go
    u32 factor;          // where the factor of its quant block goes
    u32 sums;            // where the sum of its half of the quant block goes
    bool of_warp;        // whether its quant block belongs to the warp
    bool there[2];       // whether its quads are inside the input vector
    bool stores_factor;  // whether the lane is the one that stores the quant block's factor
    bool stores_sum;     // whether the lane is the one that stores the half's sum
    float4 weights[2];   // of the norm; ones without a norm
};

// Stores inputs as digits: like `store_digits` of code_products.cuh, except that the digits of half a quant block are contiguous. A lane has one
// quad of a quant block (QUADS 1, eight lanes for each), or one of each half (QUADS 2, four lanes for each). All lanes of a quant block have to
// call it.
template <int QUADS> __device__ __forceinline__ void store_plain_digits(const InputTargets& to, const float4 (&v)[QUADS], bool with_sums) {
    constexpr int LANES = 8 / QUADS;
    float largest = largest_of(v[0]);
    u32 whole[QUADS][4];
    if (QUADS == 2) largest = larger(largest, largest_of(v[QUADS - 1]));
#pragma unroll
    for (int d = 1; d < LANES; d *= 2) largest = larger(largest, __shfl_xor_sync(~0u, largest, d));
    const DigitScale scale(largest);
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        whole[q][0] = scale.whole(v[q].x), whole[q][1] = scale.whole(v[q].y);
        whole[q][2] = scale.whole(v[q].z), whole[q][3] = scale.whole(v[q].w);
    }
    if (with_sums) {
        float sum[2];
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            sum[q] = (v[q].x + v[q].y) + (v[q].z + v[q].w);
            sum[q] += __shfl_xor_sync(~0u, sum[q], 1), sum[q] += __shfl_xor_sync(~0u, sum[q], 2);
            if (to.stores_sum) *(float*)(decode_memory + to.sums + 4 * q) = sum[q];
        }
    }
    if (!to.of_warp) return;
    u32* digits = (u32*)(decode_memory + to.digits);
#pragma unroll
    for (int digit = 0; digit < 3; digit++)
#pragma unroll
        for (int q = 0; q < QUADS; q++) digits[16 * digit + q] = digit_of(digit, whole[q][0], whole[q][1], whole[q][2], whole[q][3]);
    if (to.stores_factor) *(float*)(decode_memory + to.factor) = scale.factor();
}

// One panel of a tile, in registers: of each of rows g and g + 8, eight codes of each of the two quant blocks.
struct PreloadedPanel {
    u32 codes[2][4];    // [quant block]: operands of mma
    float scales[2][2]; // [quant block][row]; where both share a sum, [0] is that of the quant block whose sum the lane has
    float mins[2][2];   // the same of mins; 0 in lanes that do not subtract them
};
// Up to PRELOAD_HALF panels of one tile, from panel `first` of the warp's `n` on, and where their inputs will lie. `halves`: whether a
// matrix of the op has a scale for each half of a quant block. Then columns 0 to 2 of the products are digits of first halves or of whole quant
// blocks, columns 4 to 6 those of second halves. Otherwise columns 0 to 2 are digits of a panel's first quant block and columns 4 to 6 of its
// second, whose products accumulate in one sum (`DigitColumns`).
struct PreloadedPanels {
    PreloadedPanel panels[PRELOAD_HALF];
    bool of_halves;            // whether this tile's format has a scale for each half of a quant block
    bool has_mins;             // whether it has mins
    u32 digits[PRELOAD_HALF][2]; // [panel][quant block]: offset of the lane's column of digits, or of zeros
    u32 masks[2];              // for first and second halves: 0 hides digits that are not the lane's
    u32 factors[PRELOAD_HALF]; // offset of the panel's factors
    u32 sums[PRELOAD_HALF];    // offset of the panel's sums of inputs

    // Loads panels from the records at `record`, which lie in shared memory.
    template <u32 FORMAT> __device__ __forceinline__ void read(const unsigned char* record, u32 first, u32 n, bool halves, int lane) {
        typedef Codes<FORMAT> P;
        typedef Record<FORMAT> R;
        const int t = lane % 4, sub = P::SCALES_PER_QUANT_BLOCK == 2 ? t / 2 : 0;
        of_halves = P::SCALES_PER_QUANT_BLOCK == 2, has_mins = P::MINS;
        // The selectors are hidden from the compiler: if it knew that some permutations change nothing, it would move the codes to the registers of
        // the mma operands only after the inputs have arrived.
        u32 first_word = 0x3210, second_word = 0x7654;
        pin_register(first_word), pin_register(second_word);
        // Several lanes have the same mins; one of them subtracts them.
        const bool subtracts = (halves && P::SCALES_PER_QUANT_BLOCK == 1 ? t : t % 2) == 0;
#pragma unroll
        for (u32 k = 0; k < PRELOAD_HALF; k++) {
            if (first + k >= n) continue;
            P p;
            p.read(Place<FORMAT>(record + (first + k) / R::PANELS * R::BYTES, (first + k) % R::PANELS), lane);
            PreloadedPanel& to = panels[k];
#pragma unroll
            for (int row = 0; row < 2; row++) {
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    u32 of[2];
                    p.bytes(b, row, of);
                    // The codes of a half contiguous, as its digits are.
                    to.codes[b][row] = __byte_perm(of[0], of[1], P::HALVES_ALTERNATE ? 0x6420 : first_word);
                    to.codes[b][2 + row] = __byte_perm(of[0], of[1], P::HALVES_ALTERNATE ? 0x7531 : second_word);
                    to.scales[b][row] = p.scale(0, b, row, sub) * (1.0f / P::MULTIPLE);
                    if (P::MINS) to.mins[b][row] = subtracts ? p.min(b, row, sub) : 0.0f;
                }
                if (!halves && t >= 2) to.scales[0][row] = to.scales[1][row], to.mins[0][row] = to.mins[1][row];
            }
        }
    }
    // Sets the offsets of digits, factors and sums. `zeros`: 16 bytes of zeros, for panels that the warp does not have.
    __device__ __forceinline__ void place(const CodeInput& input, u32 first, u32 n, bool halves, const unsigned char* zeros, int lane) {
        const int g = lane / 4, t = lane % 4;
        masks[0] = of_halves && g >= 4 ? 0u : ~0u, masks[1] = of_halves && g < 4 ? 0u : ~0u;
#pragma unroll
        for (u32 k = 0; k < PRELOAD_HALF; k++) {
            const u32 i = first + k;
            const bool there = i < n;
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const bool mine = g % 4 < 3 && (halves ? of_halves || g < 4 : g / 4 == b);
                digits[k][b] = shared_offset(there && mine ? input.digits + i * DIGITS_OF_PANEL + g % 4 * 64 + t * 16 + 8 * b : zeros);
                pin_register(digits[k][b]);
            }
            const int quant_block = halves ? 0 : t / 2;
            factors[k] = shared_offset(there ? (const unsigned char*)(input.factors + 2 * i + quant_block) : zeros);
            sums[k] = shared_offset(there ? (const unsigned char*)(input.sums + 4 * i + 2 * quant_block) : zeros);
            pin_register(factors[k]), pin_register(sums[k]);
        }
    }
    // `begin` multiplies the first K panels; `add` scales the products and adds them to y[0] (row g) and y[1] (row g + 8). Lanes with even t have
    // the first two digits, lanes with odd t the third.
    template <int K> __device__ __forceinline__ void begin(int (&c)[K][4]) const {
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            const uint2 x = *shared_at<uint2>(digits[k][0]), y = *shared_at<uint2>(digits[k][1]);
            const u32(&of)[2][4] = panels[k].codes;
            mma_codes<true>(c[k], of[0][0], of[0][1], of[0][2], of[0][3], x.x, x.y);
            add_mma_codes<true>(c[k], of[1][0], of[1][1], of[1][2], of[1][3], y.x, y.y);
        }
    }
    template <int K> __device__ __forceinline__ void add(const int (&c)[K][4], float (&y)[2]) const {
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            const float factor = *shared_at<float>(factors[k]);
#pragma unroll
            for (int row = 0; row < 2; row++) y[row] += panels[k].scales[0][row] * factor * (float)((c[k][2 * row] << 8) + c[k][2 * row + 1]);
        }
    }
    // `begin` and `add` for formats with a scale for each half of a quant block.
    template <int K> __device__ __forceinline__ void begin_halves(int (&c)[K][2][4]) const {
#pragma unroll
        for (u32 k = 0; k < K; k++)
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const uint2 x = *shared_at<uint2>(digits[k][b]);
                const u32(&of)[4] = panels[k].codes[b];
                mma_codes<true>(c[k][b], of[0], of[1], of[2], of[3], x.x & masks[0], x.y & masks[1]);
            }
    }
    template <int K> __device__ __forceinline__ void add_halves(const int (&c)[K][2][4], float (&y)[2]) const {
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            const float2 factor = *shared_at<float2>(factors[k]);
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int row = 0; row < 2; row++)
                    y[row] += panels[k].scales[b][row] * (b == 0 ? factor.x : factor.y) * (float)((c[k][b][2 * row] << 8) + c[k][b][2 * row + 1]);
        }
    }
    __device__ __forceinline__ void subtract_mins(bool halves, int t, float (&y)[2]) const {
#pragma unroll
        for (u32 k = 0; k < PRELOAD_HALF; k++) {
            if (halves) {
                const float4 of = *shared_at<float4>(sums[k]);
                const float of_quant_blocks[2] = {!of_halves ? of.x + of.y : t < 2 ? of.x : of.y, !of_halves ? of.z + of.w : t < 2 ? of.z : of.w};
#pragma unroll
                for (int b = 0; b < 2; b++)
#pragma unroll
                    for (int row = 0; row < 2; row++) y[row] -= panels[k].mins[b][row] * of_quant_blocks[b];
            } else {
                const float2 of = *shared_at<float2>(sums[k]);
#pragma unroll
                for (int row = 0; row < 2; row++) y[row] -= panels[k].mins[0][row] * (of.x + of.y);
            }
        }
    }
};

// Multiplies the first K panels of each of H sets, side by side, and adds the results to y[set][row].
template <int H, int K> __device__ __forceinline__ void preloaded_products(const PreloadedPanels (&weights)[2], bool halves, float (&y)[2][2]) {
    if (halves) {
        int c[H][K][2][4];
#pragma unroll
        for (int h = 0; h < H; h++) weights[h].begin_halves(c[h]);
#pragma unroll
        for (int h = 0; h < H; h++) weights[h].add_halves(c[h], y[h]);
    } else {
        int c[H][K][4];
#pragma unroll
        for (int h = 0; h < H; h++) weights[h].begin(c[h]);
#pragma unroll
        for (int h = 0; h < H; h++) weights[h].add(c[h], y[h]);
    }
}

// Waits for the lane's quads of the inputs and stores them as digits. `with_sums`: whether sums of inputs are needed.
template <int QUADS>
__device__ __forceinline__ void load_inputs(const DecodeArgs& a, const LayerArgs& layer, const OpArgs& op, const InputTargets& in, u32 n_splits,
                                            u32 tag, u32 copy_index, bool with_sums) {
    const u32 n4 = op.n_in / 4;
    float4 v[QUADS];
    if (op.kind == ATTENTION_OUTPUT) {
        merge_splits<QUADS, true>(layer, n_splits, a.attention + copy_index * a.attention_copy_words,
                                  a.attention_max_sums + copy_index * a.max_sums_copy_words, in.quad, in.of_warp ? n4 : 0, tag, v);
    } else {
        ulonglong2 words[QUADS];
        bool there[QUADS];
#pragma unroll
        for (int q = 0; q < QUADS; q++) there[q] = in.there[q];
        const ulonglong2* from = op.input + copy_index * n4 + in.quad;
        auto of = [&](int q) { return from + 4 * q; };
        load_words(words, there, of);
        wait_for_words(words, there, (tag + op.tag_in_offset) & TAG_MASK, of);
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            v[q] = there[q] ? unpack_quad(words[q]) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            multiply_by(v[q], in.weights[q]);
        }
    }
    store_plain_digits(in, v, with_sums);
}

// A consumer warp's part of a small op: preloads its weights, waits for the inputs, multiplies, and leaves its partial sums in the op's
// region. `zeros`: 16 bytes of zeros. `n_small_ops`: small ops of the launch before this one. Returns before the rows are finished (Lemma 15).
__device__ __forceinline__ void run_small_op(const DecodeArgs& a, const LayerArgs& layer, const OpArgs& op, const BlockShare* shares, u32 n_splits,
                                             u32 tag, u32 copy_index, const unsigned char* zeros, WeightRing& ring, SmallOpSync& sync,
                                             u32 n_small_ops, int warp, int lane) {
    const u32 kind = op.kind, n4 = op.n_in / 4, n_tiles = tiles_of(op, shares);
    const WarpShare warp_share = warp_share_of(warp, op.units_per_tile, LOG_CONSUMER_WARPS);
    const u32 n_panels = warp_share.n * op.panels_per_unit;
    const bool two = op.preload_tiles == 2, halves = op.has_half_scales;
    const CodeInput input(decode_memory + a.inputs_at + warp * a.input_stride, n_panels);
    // Up to four quant blocks: eight lanes for each, with one quad each. More: four lanes for each, with a quad of each half.
    const bool is_narrow = n_panels <= 2;
    InputTargets in;
    const u32 quant_block = is_narrow ? lane / 8 : lane / 4, t = is_narrow ? lane % 8 : lane % 4;
    in.quad = warp_share.first * op.panels_per_unit * 16 + quant_block * 8 + t;
    in.of_warp = quant_block < 2 * n_panels, in.stores_factor = in.of_warp && t == 0, in.stores_sum = in.of_warp && t % 4 == 1;
    in.digits = shared_offset(input.digits + quant_block / 2 * DIGITS_OF_PANEL + t % 4 * 16 + quant_block % 2 * 8 + t / 4 * 4);
    in.factor = shared_offset(input.factors + quant_block), in.sums = shared_offset(input.sums + 2 * quant_block + t / 4);
    pin_register(in.digits), pin_register(in.factor), pin_register(in.sums);
#pragma unroll
    for (int q = 0; q < 2; q++) {
        in.there[q] = in.of_warp && in.quad + 4 * q < n4 && !(is_narrow && q > 0);
        in.weights[q] = op.norm && in.there[q] ? ((const float4*)op.norm)[in.quad + 4 * q] : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    }

    // ---- Preload: weights to registers. ----
    PreloadedPanels weights[2] = {};
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        const u32 tile = two ? h : 0, first = two ? 0 : h * PRELOAD_HALF;
        if (tile < n_tiles && n_panels > 0) {
            u32 p = kind == GATE_AND_UP ? tile : 0;
            if (kind == QKV)
                while (p < 2 && tile >= (u32)shares[p].tiles_above + shares[p].n_tiles) p++;
            const BlockShare& share = shares[p];
            const u32 n_records = warp_share.n * share.records_per_unit;
            // All that the warp has of a matrix lies in one stage (src/decode/memory.rs makes stages that large).
            if (two || h == 0) ring.wait(share.records_per_stage, share.n_tiles * n_records);
            if (first < n_panels) WITH_CODES(share.format, (weights[h].read<FORMAT>(decode_memory + ring.record, first, n_panels, halves, lane)));
            if (two || h == 1) ring.release(n_records, share.record_bytes);
        }
        weights[h].place(input, first, tile < n_tiles ? n_panels : 0, halves, zeros, lane);
    }
    // Each lane ends with the sum of one row of a tile (two tiles: of either).
    u32 sums = a.regions_at[op.region] + ((row_of_sum(lane) + 8 * (lane & 2)) * SUMS_STRIDE + warp) * 4;
    pin_register(sums);
    sync.wait_until_finished(n_small_ops);

    // ---- Loads. ----
    const bool has_mins = weights[0].has_mins || weights[1].has_mins;
    if (is_narrow) load_inputs<1>(a, layer, op, in, n_splits, tag, copy_index, has_mins);
    else load_inputs<2>(a, layer, op, in, n_splits, tag, copy_index, has_mins);
    __syncwarp();
    // ---- Products. ----
    float y[2][2] = {};
    if (two || n_panels > PRELOAD_HALF) {
        if (n_panels > 1) preloaded_products<2, 2>(weights, halves, y);
        else preloaded_products<2, 1>(weights, halves, y);
    } else {
        if (n_panels > 1) preloaded_products<1, 2>(weights, halves, y);
        else preloaded_products<1, 1>(weights, halves, y);
    }
    const float of_digits = lane & 1 ? 1.0f / 256.0f : 256.0f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        y[h][0] *= of_digits, y[h][1] *= of_digits;
        if (has_mins) weights[h].subtract_mins(halves, lane % 4, y[h]);
    }
    float* const to = (float*)(decode_memory + sums);
    if (two) {
        *to = sum_of_row<2>(y, lane);
    } else {
        const float of_both[1][2] = {{y[0][0] + y[1][0], y[0][1] + y[1][1]}}, sum = sum_of_row<1>(of_both, lane);
        if (!(lane & 2)) *to = sum;
    }
    sync.arrive_with_sums();
}

// The epilogue warp of a SMALL kernel: finishes the rows of every small op, lane j row j of the block (at most two tiles, 32 rows): adds
// the warps' partial sums, applies norm, bias, gate and residual, and stores the words of the results. It also computes the RMS of the
// op's input by itself, meanwhile.
__device__ __forceinline__ void run_epilogue_warp(const DecodeArgs& a, float* residual, SmallOpSync& sync, int lane) {
    u32 tag = a.tag, n_ops = 0;
    const u32 copy_index = blockIdx.x % COPIES;
#pragma unroll 1
    for (u32 i = 0, n_done = 0; n_done < a.n_tokens; i++) {
        if (i == a.n_layer) {
            // The pseudo-layer of the output head: its op is not small, but it has tags.
            tag = (tag + TAGS_PER_LAYER) & TAG_MASK, i = 0;
            if (++n_done == a.n_tokens) return;
            token_barrier();
        }
        const LayerArgs& layer = a.layers[i];
#pragma unroll 1
        for (u32 s = 0; s < layer.n_ops; s++) {
            const OpArgs& op = layer.ops[s];
            const BlockShare* shares = block_shares(a) + op.first_matrix_index;
            // The token's first op reads the embedding and is not small.
            if (tiles_of(op, shares) == 0 || (i == 0 && s == 0)) continue;
            const u32 kind = op.kind, row = row_at(op, shares, lane), n4 = op.n_in / 4, wanted = (tag + op.tag_in_offset) & TAG_MASK;
            const u32 activation = layer.activation;
            u32 n_copies = op.n_copies, tag_out = (tag + op.tag_out_offset) & TAG_MASK;
            const bool exists = row != NO_ROW, adds = kind == ATTENTION_OUTPUT || kind == DOWN, writes = exists && row % 2 == 0;
            const float bias = op.bias && exists ? op.bias[row] : 0.0f, scale = adds ? layer.residual_scale : 1.0f;
            const float activation_limit = layer.activation_limit;
            u64_t* to[COPIES];
#pragma unroll
            for (u32 c = 0; c < COPIES; c++) {
                to[c] = op.output + row / 2 + c * (op.n_out / 2);
                pin_register(to[c]);
            }
            u32 sums = a.regions_at[op.region] + lane * SUMS_STRIDE * 4;
            pin_register(sums), pin_register(tag_out), pin_register(n_copies);
            float inv_rms = 1.0f;
            if (op.norm) {
                const float inverse_n_in = op.inverse_n_in, eps = op.eps;
                const ulonglong2* from = op.input + copy_index * n4;
                // Polls a single word until it has arrived, so as not to compete with the consumer warps' loads; the others arrive at about
                // the same time.
                while (!is_at_or_after(load_exchanged(from + blockIdx.x % n4), wanted)) sleep_briefly();
                float squares = 0.0f;
                constexpr int N = 5;
#pragma unroll 1
                for (u32 first = lane; first < n4 + lane; first += 32 * N) {
                    ulonglong2 words[N];
                    bool there[N];
#pragma unroll
                    for (int k = 0; k < N; k++) there[k] = first + 32 * k < n4;
                    auto of = [&](int k) { return from + first + 32 * k; };
                    load_words(words, there, of);
                    wait_for_words(words, there, wanted, of);
#pragma unroll
                    for (int k = 0; k < N; k++)
                        if (there[k]) squares += sum_of_squares(unpack_quad(words[k]));
                }
                inv_rms = rsqrtf(warp_sum(squares) * inverse_n_in + eps);
            }
            sync.wait_for_sums(n_ops++);
            // Read after the wait: at the token's first small op, consumer warps wrote the embedding there (Lemma 13).
            const float before = adds && exists ? residual[lane] : 0.0f;
            float y = inv_rms * sum_of_warps(shared_at<float>(sums), LOG_CONSUMER_WARPS);
            if (kind == GATE_AND_UP) {
                const float up = __shfl_down_sync(~0u, y, 16);
                y = activation == SILU ? activate(SILU, y) * up : gated(activation, activation_limit, y, up);
            }
            y = before + scale * (y + bias);
            const float next_row = __shfl_down_sync(~0u, y, 1);
            const u64_t word = pack_pair(y, next_row, tag_out);
#pragma unroll
            for (u32 c = 0; c < COPIES; c++) // as in RowEpilogue::store_row (Lemmas 3, 4, 5 and 7)
                if (writes && c < n_copies) store_exchanged(to[c], word);
            if (adds && exists) residual[lane] = y;
            sync.publish_finished(lane);
        }
        tag = (tag + TAGS_PER_LAYER) & TAG_MASK;
    }
}
