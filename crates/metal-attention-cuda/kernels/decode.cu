// The persistent decode kernel: evaluates one token, or a few of one sequence that follow each other, through all layers of a model in
// one launch. Each token's id is the one with the highest logit (greedy decoding). MAX_TOKENS of src/decode.rs, four, limits the tokens,
// since a launch cannot be stopped. For decoders of attention and gated feed-forwards, dense or with experts; src/decode/layers.rs says
// which. Input: `DecodeArgs` (decode.cuh), that is, layers, the token's id, sequence and position, and the KV cache. Output: the new rows
// of the KV cache, the next token's id, and if wanted the logits. Terms (op, small op, tile, panel, digit, warp group, tagged word, tag,
// ...) are defined in decode.cuh.
//
// Division of work. One block runs on each multiprocessor for the whole launch. For each op a block has neighbouring tiles of rows, the
// same ones for every token; within the block each consumer warp has some of the columns (split-K within the block). Blocks wait for
// nothing but each other's results, which are tagged words in global memory (decode_exchange.cuh).
//
// The flow in each block. "<-" is a wait, "->" what it makes available to others:
//
//   consumer warps (`decode`)
//     for each token of the launch:
//       for layer i = 0 to n_layer, with tag t:       layer n_layer is a pseudo-layer; its only op is the output head
//         for each op: q/k/v, attention output, [router,] gate and up, down
//           if attention output:   attention          <- words of q/k/v, tag t               -> words of attention, tag t
//           if gate and up of experts: the last consumer warp routes
//                                                     <- words of the router, tag t          -> the block's choice of experts
//           if the block has no rows of the op:       consumer barrier, next op
//           if the op is small:    run_small_op       <- input words, weights                -> partial sums, for the epilogue warp; next op
//           prologue               what does not depend on the inputs
//           loads                  inputs to digits or F16 parts in shared memory
//                                                     <- input words of the warp's own columns, tag t + op.tag_in
//           products               partial sums       <- full stages of weights              -> empty stages, for the producer warps
//           consumer barrier
//           epilogue               sum of the warps, 1 / RMS, bias, gate, residual           -> output words, tag t + op.tag_out
//         t += 2                   a layer writes the residual stream twice, with t after attention and t + 1 after the feed-forward
//       argmax (`choose_token`)    <- words of the best logits of all blocks                 -> the next token's id
//   producer warps (`run_producer`)
//     for each token, each matrix: copy the block's weights, as far ahead as the rings allow
//                                  <- an empty stage; of experts: the choice                 -> a full stage
//   epilogue warp (`run_epilogue_warp`, SMALL kernels only)
//     for each small op:           finish the rows    <- partial sums of all consumer warps  -> output words
//
// Small ops (decode_preload.cuh). A warp loads its weights of a small op into registers before the inputs arrive, and the epilogue warp
// finishes the rows. In SMALL kernels, for small models, all ops are small, except for the token's first one (it reads the embedding) and
// the output head: these take the path of all other kernels (full ops), and consumer warps finish their rows.
//
// Experts are evaluated as one feed-forward: rows of gate and up of the chosen experts one below the other, columns of down side by
// side; each block routes by itself.
//
// Invariants, with writer and reader of each resource; proofs are in docs/design/decode-kernel.md:
//   Lemma 1   an output word of an op proves that its block has read all of the op's inputs
//   Lemma 2   the tag of a stale word differs from the wanted tag
//   Lemma 3   residual words after attention are overwritten (down) after gate, up and router have read them
//   Lemma 4   residual words after the feed-forward are overwritten (attention output) after q/k/v has read them
//   Lemma 5   q/k/v words are overwritten after attention has read them
//   Lemma 6   attention words are overwritten after the attention output has read them
//   Lemma 7   router and gated words are overwritten after the routing warps and down have read them
//   Lemma 8   a block begins token n + 1 after all blocks have ended token n; the KV cache is visible then
//   Lemma 9   a stage of weights is overwritten after its consumer warp has read it
//   Lemma 10  inputs and attention's scratch, which share memory, do not overlap in time
//   Lemma 11  a region of partial sums is overwritten after its epilogue has read it
//   Lemma 12  descriptions of layers and constants of heads are overwritten after all consumer warps have read them
//   Lemma 13  rows of the residual stream in shared memory have one writer at a time
//   Lemma 14  a choice of experts is overwritten after producer warps and epilogues have read it
//   Lemma 15  consumer warps and the epilogue warp of a SMALL kernel are at most one small op apart
//   Lemma 16  mailbox words of other ranks are overwritten after they are read
//   Lemma 17  nothing of a launch overlaps with the next one
//
// All blocks have to be resident at once: the launch is cooperative (`LaunchOrder::Cooperative` of src/launch.rs).
//
// The vocabulary has at most 2^20 tokens: a word of a block's best logit has 32 bits of the logit, 20 of the row and 12 of the tag.
#include "decode_attention.cuh"
#include "decode_products.cuh"
#include "decode_preload.cuh"
#include "decode_weights.cuh"
#include "element.cuh"
#include "exchange.cuh"
#include "argmax.cuh"

// The routing warp of a block (the last consumer warp): waits for the router's products in words `from`, chooses the experts of the
// token, and publishes the choice for the block's producer warps and epilogues. `layer_number`: that of `ExpertChoice::n_published`.
__device__ __forceinline__ void route(const DecodeArgs& a, const RouteArgs& layer_route, ExpertChoice& chosen, const u64_t* from, u32 tag,
                                      u32 layer_number, int lane) {
    RouteArgs route = layer_route;
    route.experts = chosen.experts, route.weights = chosen.weights;
    const RoutingScratch scratch(route.n_expert, (float*)(decode_memory + a.routing_at));
    const u32 n = route.n_expert / 2; // words of two products
#pragma unroll 1
    for (u32 first = 0; first < n; first += 64) {
        u64_t words[2];
        const bool wanted[2] = {first + lane < n, first + 32 + lane < n};
        auto word_at = [&](int k) { return from + first + 32 * k + lane; };
        load_words(words, wanted, word_at);
        wait_for_words(words, wanted, tag, word_at);
#pragma unroll
        for (int k = 0; k < 2; k++)
            if (wanted[k]) *(float2*)(scratch.scores + 2 * (first + 32 * k + lane)) = unpack_pair(words[k]);
    }
    __syncwarp();
    make_scores(route, scratch, lane);
#pragma unroll 1
    for (u32 i = 0; i < route.n_used; i++) {
        const Best best = take_best(scratch.choice_scores, scratch.taken, route.n_expert, lane);
        if (lane == 0) chosen.experts[i] = best.at, chosen.weights[i] = scratch.scores[best.at];
    }
    __syncwarp();
    // From the scores of the chosen experts to their weights, in place: one lane an expert.
    write_weights_together(route, chosen.experts, chosen.weights, 0, lane);
    chosen.publish(layer_number, route.n_used, lane);
}

__device__ __forceinline__ float power_of_two(int e) { return __uint_as_float((u32)(e + 127) << 23); }

// Converts the warp's inputs of a product with F16 or F32 weights, in place, from floats to two F16 parts (hi, and lo, which is 2048 times the
// remainder), after scaling by a power of two. `largest`: the largest magnitude that the lane has stored. Returns the factor of the products.
//
// The scale makes 13 the exponent of the largest magnitude. Then both parts are within F16 (its largest exponent is 15): hi is at most 2^14, its
// remainder at most half of its last bit, 2^2, and lo, with a factor of 2^11, at most 2^13.
constexpr int F16_PARTS_EXPONENT = 13;
__device__ __forceinline__ float split_into_f16(float4* inputs, float largest, u32 n_panels, int lane) {
    largest = warp_max(largest);
    // Values beyond these exponents, and infinity, are not scaled: the power of two would not be a normal number.
    const int largest_exponent = (__float_as_uint(largest) >> 23) - 127;
    const int exponent = largest_exponent > -100 && largest_exponent < 100 ? largest_exponent : 0;
    const float up = power_of_two(F16_PARTS_EXPONENT - exponent);
    // Eight lanes have the 32 elements of a quantisation block. Its two F16 parts take the same 128 bytes as its floats.
    const u32 n = n_panels * 16;
    for (u32 i = lane; i < (n + 31) / 32 * 32; i += 32) {
        const float4 v = i < n ? inputs[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float e[4] = {v.x * up, v.y * up, v.z * up, v.w * up};
        half hi[4], lo[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            hi[k] = __float2half_rn(e[k]);
            lo[k] = __float2half_rn((e[k] - __half2float(hi[k])) * 2048.0f);
        }
        // A lane's parts go to where other lanes of this round have read their floats.
        __syncwarp();
        if (i >= n) continue;
        unsigned char* to = (unsigned char*)inputs + i / 8 * 128 + 2 * place_in_block(i % 8 * 4);
        *(uint2*)to = make_uint2(bits(__halves2half2(hi[0], hi[1])), bits(__halves2half2(hi[2], hi[3])));
        *(uint2*)(to + 64) = make_uint2(bits(__halves2half2(lo[0], lo[1])), bits(__halves2half2(lo[2], lo[3])));
    }
    return power_of_two(exponent - F16_PARTS_EXPONENT);
}

__device__ __forceinline__ float largest_magnitude(const float4& v) { return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))); }

// A rank's part of a model that several ranks share by tensor parallelism: some columns of the attention output and of down in all layers,
// and some rows of the output head. Mirrored, behind DecodeArgs, by `DecodeOnRanksArgs` of src/decode/args.rs.
struct RankShare {
    Exchange exchange; // mailboxes of the ranks
    u32 first_row;     // first row of the output head that the rank has
    u32 unused;
};
// Exchanges between ranks in a token, in the order of their numbers: of each layer the sums of the attention output and of down, at the end
// the best logit. exchange.cuh numbers exchanges; `first_exchange` is the number of the token's first.
__device__ __forceinline__ u32 exchanges_per_token(const DecodeArgs& a) { return 2 * a.n_layer + 1; }
__device__ __forceinline__ u32 exchange_of_sum(u32 first_exchange, u32 layer, u32 kind) { return first_exchange + 2 * layer + (kind == DOWN); }

// Values that the epilogue of an op's rows needs. They are loaded before the partial sums exist, because all blocks wait for what follows the sums.
struct RowEpilogue {
    u64_t* to;      // words of the results, in the first copy
    u32 n_copies;   // copies of these
    u32 copy_words; // words of a copy
    u32 tag;        // of the words
    u32 activation; // Activation of the gate
    float limit;    // its parameter
    float scale;    // factor on what is added to the residual stream
    bool adds;      // whether the results are added to the residual stream
    __device__ __forceinline__ RowEpilogue(const Layer& l, const Op& op, u32 tag)
        : to(op.output), n_copies(op.n_copies), copy_words(op.n_out / 2), tag((tag + op.tag_out) & TAG_MASK), activation(l.activation),
          limit(l.activation_limit), scale(l.residual_scale), adds(op.kind == ATTENTION_OUTPUT || op.kind == DOWN) {}
    // The sum over all ranks of a row that is added to the residual stream; other rows as they are. `row` ~0: no row.
    __device__ __forceinline__ float sum_over_ranks(const RankShare* ranks, u32 exchange_no, u32 row, float y) const {
        return adds && row != ~0u ? exchanged_sum(ranks->exchange, exchange_no, row, y) : y;
    }
    // Adds the row to the residual stream, if the op does that: `before` is its old value, `residual` where it is kept; and stores the words of
    // rows at `at`. `row` ~0: no row. Neighbouring lanes have neighbouring rows, and all lanes of the warp call it: a word has two rows.
    __device__ __forceinline__ void put(u32 row, u64_t* at, float y, float before, float* residual) const {
        const bool exists = row != ~0u;
        if (adds) {
            y = before + scale * y;
            if (exists) *residual = y;
        }
        const float next_row = __shfl_down_sync(~0u, y, 1);
        // Overwrites the word of an earlier op that nothing reads any more (Lemmas 3, 4, 5 and 7).
        if (exists && row % 2 == 0) store_words(at, pack_pair(y, next_row, tag), n_copies, copy_words);
    }
};
// The norm of an op's input is applied to its results: products use weighted inputs, and rows are multiplied by 1 / RMS when they are
// finished. The warps' sums of squares (q) lie in the padding of the first two rows of partial sums (p) in the region of the op's first round:
//
//   float    0   1   2   3   4   5   6   7   8   9   10  11
//   row 0    p0  p1  p2  p3  p4  p5  p6  p7  q0  q1  q2  q3
//   row 1    p0  p1  p2  p3  p4  p5  p6  p7  q4  q5  q6  q7
//   row 2    p0  p1  p2  p3  p4  p5  p6  p7  unused
__device__ __forceinline__ u32 squares_index(u32 warp) { return warp / 4 * SUMS_STRIDE + CONSUMER_WARPS + warp % 4; }
__device__ __forceinline__ float inv_rms_of(const float* sums, float inverse_n_in, float eps) {
    static_assert(CONSUMER_WARPS == 8 && SUMS_STRIDE >= CONSUMER_WARPS + 4, "four sums of squares in the padding of each row");
    const float4 x = *(const float4*)(sums + squares_index(0)), y = *(const float4*)(sums + squares_index(4));
    return rsqrtf((((x.x + x.y) + (x.z + x.w)) + ((y.x + y.y) + (y.z + y.w))) * inverse_n_in + eps);
}

// A consumer warp's inputs of an op, stored as they arrive. Four lanes have a quantisation block of 32 inputs; each has a quad (four
// elements) of the block's first half and the corresponding quad of its second.
struct Inputs {
    CodeInput digits;      // for quantised matrices: digits, their factors and sums of inputs
    float4* floats;        // the same memory, for F16 and F32: floats, which `split_into_f16` turns into F16 parts in place
    u32 n_quant_blocks;    // quantisation blocks of the warp
    bool has_codes;        // which of the two: whether the matrices are quantised
    bool with_sums;        // whether sums of inputs are needed, for mins
    float squares = 0.0f;  // sum of squares of what the lane has stored
    float largest = 0.0f;  // largest magnitude of it (floats only)
    __device__ __forceinline__ Inputs(unsigned char* memory, u32 n_panels, const Op& op)
        : digits(memory, n_panels), floats((float4*)memory), n_quant_blocks(2 * n_panels), has_codes(op.has_codes), with_sums(op.has_mins) {}
    // Stores N quantisation blocks of the lane: block `first + lane / 4` and those 8, 16, ... behind it. `weights`: of the norm, or ones.
    template <int N> __device__ __forceinline__ void put(u32 first, float4 (&v)[N][2], const float4 (&weights)[N][2], int lane) {
        const u32 quant_block = first + lane / 4;
        bool exists[N];
#pragma unroll
        for (int i = 0; i < N; i++) exists[i] = quant_block + 8 * i < n_quant_blocks;
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) squares += sum_of_squares(v[i][h]), multiply(v[i][h], weights[i][h]);
        if (has_codes) {
            store_digits<N>(digits, quant_block, lane % 4, v, exists, with_sums);
        } else {
#pragma unroll
            for (int i = 0; i < N; i++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    if (exists[i]) {
                        floats[(quant_block + 8 * i) * 8 + lane % 4 + 4 * h] = v[i][h];
                        largest = fmaxf(largest, largest_magnitude(v[i][h]));
                    }
        }
    }
};
constexpr float4 ONES = {1.0f, 1.0f, 1.0f, 1.0f};

// The lane's quad k of N quantisation blocks, which are 8 blocks (64 quads) apart, relative to its first one: quad 2 i + h is in block i, in half h
// (4 quads).
__device__ __forceinline__ constexpr int quad_offset(int k) { return k / 2 * 64 + k % 2 * 4; }
// Loads 8 N quantisation blocks of inputs, from block `first` of the warp on, from words with tag `tag`. `from`: the lane's first quad; `norm`: the
// norm's weights there, or null; `n`: quads from there to the end of the vector, which is padded with zeros.
template <int N>
__device__ __forceinline__ void load_inputs_of_words(Inputs& inputs, u32 first, const ulonglong2* from, const float4* norm, u32 n, u32 tag,
                                                     int lane) {
    ulonglong2 words[2 * N];
    float4 v[N][2], weights[N][2];
    bool wanted[2 * N];
#pragma unroll
    for (int k = 0; k < 2 * N; k++)
        wanted[k] = ((u32)quad_offset(k) < n) & (first + k / 2 * 8 + lane / 4 < inputs.n_quant_blocks); // & instead of &&: no branch
    auto words_at = [&](int k) { return from + quad_offset(k); };
    load_words(words, wanted, words_at);
#pragma unroll
    for (int k = 0; k < 2 * N; k++) {
        weights[k / 2][k % 2] = ONES;
        if (norm && wanted[k]) weights[k / 2][k % 2] = norm[quad_offset(k)];
    }
    wait_for_words(words, wanted, tag, words_at);
    // Words that were not wanted are zeros.
#pragma unroll
    for (int k = 0; k < 2 * N; k++) v[k / 2][k % 2] = unpack_quad(words[k]);
    inputs.put<N>(first, v, weights, lane);
}

// The spans of attention of all layers for a token at `pos`, by `n_threads` threads.
__device__ __forceinline__ void find_spans(const DecodeArgs& a, u32 pos, int tid, int n_threads) {
    for (u32 i = tid; i < a.n_layer; i += n_threads) spans_of(a)[i] = span_of(a.layers[i], pos, a.split_gain);
}

// The largest of all blocks' best logits; waits for those of all blocks. Their words are not pairs of values, but keys of argmax.cuh with a tag in
// place of 12 bits that are the same in all keys, since rows have 20 bits:
//
//   bit 63                            32 31                     12 11          0
//       +-------------------------------+-------------------------+-------------+
//       | the logit, in an order of u32 | 2^20 - 1 - row          | tag         |
//       +-------------------------------+-------------------------+-------------+
__device__ __forceinline__ u64_t highest_of_blocks(const u64_t* words_of_blocks, u32 tag, int lane) {
    u64_t best = 0;
    // The bound depends on the lane so that all lanes go through the loop equally often: `wait_for_words` needs the whole warp.
#pragma unroll 1
    for (u32 block = lane; block < gridDim.x + lane; block += 32) {
        u64_t words[1];
        const bool wanted[1] = {block < gridDim.x};
        auto word_at = [&](int) { return words_of_blocks + block; };
        load_words(words, wanted, word_at);
        wait_for_words(words, wanted, tag, word_at);
        if (wanted[0] && words[0] > best) best = words[0];
    }
    return highest_of_lanes(best);
}
// The largest of all ranks. `own`: this rank's; the block with `sends` sends it to the other ranks. Its two words lie behind those of rows in
// the mailbox, because some blocks still read them while others exchange rows of the next token (Lemma 16).
__device__ __forceinline__ u64_t highest_of_ranks(const Exchange& e, u32 exchange_no, u64_t own, bool sends, int lane) {
    own &= ~(u64_t)TAG_MASK;
    const u32 at = e.n_words - 2;
    if (sends && lane < 2) send(e, exchange_no, at + lane, __uint_as_float(lane == 0 ? (u32)(own >> 32) : (u32)own));
    u64_t best = own;
    if (lane < (int)e.n_ranks && lane != (int)e.rank) {
        const u32 high = __float_as_uint(receive(e, exchange_no, lane, at)), low = __float_as_uint(receive(e, exchange_no, lane, at + 1));
        best = (u64_t)high << 32 | low;
    }
    return highest_of_lanes(best > own ? best : own);
}
// The row of such a word: bits 12 to 31 are 2^20 - 1 - row. Row 0 if all logits are NaN.
__device__ __forceinline__ u32 row_of_key(u64_t key) { return key >> 32 == 0 ? 0 : 0xfffffu - ((u32)key >> 12); }

// Loads the warp's inputs of an op: words of its input vector, in copy `copy_index`. `n4`: quads of the vector; `first_quad`: the lane's first
// one. Up to 32 quantisation blocks at a time (N = 4), so that many loads are in flight; a rest of up to eight blocks has code of its own (N = 1),
// which does not convert three times as many blocks that do not exist.
__device__ __forceinline__ void load_vector(const Op& op, Inputs& inputs, u32 copy_index, u32 tag_in, u32 n4, const float4* norm, u32 first_quad,
                                            int lane) {
    const ulonglong2* from = op.input + copy_index * n4 + first_quad;
    const u32 n = n4 > first_quad ? n4 - first_quad : 0;
    u32 first = 0;
#pragma unroll 1
    for (; first + 8 < inputs.n_quant_blocks; first += 32)
        load_inputs_of_words<4>(inputs, first, from + 8 * first, norm ? norm + first_quad + 8 * first : nullptr, n > 8 * first ? n - 8 * first : 0,
                                tag_in, lane);
    if (first < inputs.n_quant_blocks)
        load_inputs_of_words<1>(inputs, first, from + 8 * first, norm ? norm + first_quad + 8 * first : nullptr, n > 8 * first ? n - 8 * first : 0,
                                tag_in, lane);
}
// Epilogue: finishes the block's rows `begin` to `begin + n - 1` of a full op. Values of the op that are loaded before its inputs arrive are
// parameters of their own, since all blocks wait for what follows the sums; grouped in structs they get other registers.
//   l, op                                     the layer and its op
//   kind                                      OpKind of the op
//   shares                                    the block's shares of the op's matrices
//   chosen                                    experts of the layer; read for experts only
//   epilogue                                  where results go, and what is done with them
//   own_row, own_bias, own_residual, own_to   what the thread has loaded for its first row, row `tid` of the block: the row of the op (~0: none), its
//                                             bias, the old value of the residual stream, and where its word goes
//   sums                                      the region of the rows' partial sums
//   op_sums                                   the region of the op's first round, which has the sums of squares of its inputs
//   residual                                  the block's rows of the residual stream
//   inverse_n_in, eps                         as in Op
//   norm                                      weights of the norm of the inputs; null: there is none, and 1 / RMS is not applied
//   log_warps_per_tile                        as in Op
//   is_expert_op                              whether the op is gate and up of experts
//   ranks                                     this rank's share (ON_RANKS)
//   first_exchange                            the token's first exchange between ranks; in shared memory, `choose_token` advances it
//   layer                                     index of the layer
//   best                                      key of the thread's best logit, which the output head updates
template <bool EXPERTS, bool ON_RANKS>
__device__ __forceinline__ void finish_rows(const DecodeArgs& a, const Layer& l, const Op& op, u32 kind, const BlockShare* shares,
                                            const ExpertChoice& chosen, const RowEpilogue& epilogue, u32 own_row, float own_bias,
                                            float own_residual, u64_t* own_to, float* sums, float* op_sums, float* residual, u32 begin, u32 n,
                                            float inverse_n_in, float eps, const float4* norm, u32 log_warps_per_tile, bool is_expert_op,
                                            const RankShare* ranks, const u32& first_exchange, u32 layer, u64_t& best, int tid) {
    if ((u32)tid / 32 * 32 < n) {
        const float inv_rms_of_inputs = inv_rms_of(op_sums, inverse_n_in, eps), inv_rms = norm ? inv_rms_of_inputs : 1.0f;
        // All threads of a warp go through the loop together: a word has the rows of two lanes.
#pragma unroll 1
        for (u32 j_in_round = (u32)tid; j_in_round < (n + 31) / 32 * 32; j_in_round += CONSUMER_THREADS) {
            const u32 j = begin + j_in_round;
            const bool is_own = j == (u32)tid; // the thread's first row
            const u32 row = is_own ? own_row : row_at(op, shares, j);
            const bool exists = row != ~0u;
            const float bias = is_own ? own_bias : op.bias && exists ? op.bias[row] : 0.0f;
            const float* row_sums = sums + (exists ? j_in_round : 0) * SUMS_STRIDE;
            float y = inv_rms * sum_of_warps(row_sums, log_warps_per_tile);
            if (kind == OUTPUT_HEAD) {
                if (!exists) continue;
                y = (y + bias) * a.logit_scale;
                if (a.logit_cap != 0.0f) y = a.logit_cap * tanhf(y / a.logit_cap);
                const u32 vocab_row = ON_RANKS ? ranks->first_row + row : row;
                if (a.logits) a.logits[vocab_row] = y;
                const u64_t key = argmax_key(y, vocab_row);
                best = key > best ? key : best;
                continue;
            }
            if (kind == GATE_AND_UP) {
                float up = inv_rms * sum_of_warps(row_sums + a.gate_to_up_floats, log_warps_per_tile), weight = 1.0f;
                if (is_expert_op) {
                    const u32 n_ff = op.n_out / l.route.n_used, index = exists ? row / n_ff : 0; // of the expert among the chosen ones
                    const size_t at = (size_t)chosen.experts[index] * n_ff + (exists ? row % n_ff : 0);
                    if (l.expert_bias[0]) y += l.expert_bias[0][at];
                    if (l.expert_bias[1]) up += l.expert_bias[1][at];
                    weight = chosen.weights[index];
                }
                // The product with down sums over the experts, whose columns lie side by side: their weights have to be applied before it.
                const float gated_row = epilogue.activation == SILU ? activate(SILU, y) * up : gated(epilogue.activation, epilogue.limit, y, up);
                y = weight * gated_row;
            }
            if (EXPERTS && kind == DOWN && l.expert_bias[2] && exists)
                for (u32 k = 0; k < l.route.n_used; k++)
                    y += chosen.weights[k] * l.expert_bias[2][(size_t)chosen.experts[k] * op.n_out + row];
            const float residual_before = is_own ? own_residual : epilogue.adds && exists ? residual[j] : 0.0f;
            // Gate and up have no bias here. Of the ranks that add up their rows, only rank 0 has one.
            y += bias;
            if constexpr (ON_RANKS) y = epilogue.sum_over_ranks(ranks, exchange_of_sum(first_exchange, layer, kind), row, y);
            epilogue.put(row, is_own ? own_to : epilogue.to + row / 2, y, residual_before, residual + j);
        }
    }
}
// Argmax, by warp 0 of each block: publishes the block's best logit, waits for those of all blocks, and sets `token`, `n_tokens_done` and
// `first_exchange` to those of the next token (Lemma 8). After the launch's last token only block 0 waits; the others return false. `tag`: of the
// next token's first layer.
template <bool ON_RANKS>
__device__ __forceinline__ bool choose_token(const DecodeArgs& a, const RankShare* ranks, const u64_t* best_of_warps, Token& token,
                                             u32& n_tokens_done, u32& first_exchange, u32 tag, u32 next_pos, bool is_last, int lane) {
    u64_t best = highest_of_lanes(best_of_warps[lane % CONSUMER_WARPS]);
    // Release: orders the KV rows that the block has written before its word.
    __threadfence();
    // Two sets of words alternate from token to token. A block that has no rows of the next token's ops waits for no other block during
    // that token: with one set it could overwrite its word before slower blocks have read it.
    u64_t* const all = a.best_words + n_tokens_done % 2 * gridDim.x;
    // The key's high word, the 20 low bits of its low word, and the tag.
    if (lane == 0) store_exchanged(all + blockIdx.x, (best & 0xffffffff00000000ull) | (u32)best << 12 | tag);
    if (is_last && blockIdx.x != 0) return false;
    u64_t highest = highest_of_blocks(all, tag, lane);
    if constexpr (ON_RANKS) // the token's last exchange
        highest = highest_of_ranks(ranks->exchange, first_exchange + exchanges_per_token(a) - 1, highest, blockIdx.x == 0, lane);
    const u32 id = row_of_key(highest);
    // Acquire: orders the blocks' KV rows before this block's reads of them.
    __threadfence();
    if (lane == 0) {
        // Also where only logits are wanted; then no host reads the id.
        if (blockIdx.x == 0) publish_id(a.ids, /* row */ 0, a.first_step_number + n_tokens_done, id);
        token.id = id, token.pos = next_pos, n_tokens_done++;
        if (is_last && a.advance) *a.token = token;
        if constexpr (ON_RANKS) {
            first_exchange += exchanges_per_token(a);
            // The first block has heard from all blocks of the rank, which therefore have read the old number.
            if (is_last) *ranks->exchange.exchanges_done = first_exchange;
        }
    }
    return true;
}

// Registers of a thread of producer and consumer warps. The kernel is compiled for 384 threads with 168 registers each, 64512 in all. The 128
// threads of the four producer warps give most of theirs to the 256 threads of the consumer warps: 128 * 40 + 256 * 232 = 64512. In SMALL kernels
// one of the four is the epilogue warp, which needs more: 128 * 72 + 256 * 216 = 64512.
template <bool SMALL> constexpr int PRODUCER_REGISTERS = SMALL ? 72 : 40;
template <bool SMALL> constexpr int CONSUMER_REGISTERS = SMALL ? 216 : 232;

// The kernel; the flow is at the top of this file. C: elements of an attention head / 64, rounded up. SMALL: see "Small ops" at the top of this file.
// EXPERTS: layers may have experts; a parameter because the code for them would slow others down. ON_RANKS: several ranks share the model (tensor
// parallelism), and `ranks` is this one's share.
template <int C, bool SMALL, bool EXPERTS, bool ON_RANKS = false>
__device__ __forceinline__ void decode(const DecodeArgs& a, const RankShare* ranks = nullptr) {
    static_assert(!SMALL || !ON_RANKS, "models with small ops are not divided among ranks");
    __shared__ __align__(16) Layer layers[2];         // the current layer, and the next one (Lemma 12)
    __shared__ u64_t best_of_warps[CONSUMER_WARPS];   // keys of the warps' best logits
    __shared__ WarpWork warp_work[CONSUMER_WARPS][3]; // [warp][matrix of the op]; each warp reads what its own lanes have written
    __shared__ Token token;                           // the current one
    __shared__ ExpertChoice chosen;                   // experts of the current layer
    __shared__ u32 n_tokens_done;                     // of the launch
    __shared__ SmallOpSync sync;                      // consumer warps and epilogue warp of SMALL kernels
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    constexpr int LAYER_WORDS = sizeof(Layer) / 16;
    float* residual = (float*)(decode_memory + a.residual_at);

    // 16 bytes of zeros behind the barriers of the last ring, at the address of the first barrier of a ring that does not exist: lanes whose
    // column of a product has no digits read them (`DigitColumns`).
    unsigned char* zeros = (unsigned char*)full_barrier(a, CONSUMER_WARPS, 0);
    if (tid < 16) zeros[tid] = 0;
    // Each stage has two barriers: one thread arrives at `full`, the producer lane, and 32 at `empty`, the lanes of the consumer warp.
    for (u32 i = tid; i < 2 * CONSUMER_WARPS * a.stages_per_warp; i += BLOCK_THREADS)
        barrier_init(full_barrier(a, 0, 0) + i, i % 2 == 0 ? 1 : 32);
    if (tid == 0) sync.init();
    fence_barrier_init();
    for (u32 i = tid; i < a.n_matrices; i += BLOCK_THREADS) block_shares(a)[i] = block_share_of(a.matrices[i]);
    for (u32 i = tid; i < LAYER_WORDS; i += BLOCK_THREADS) ((uint4*)layers)[i] = ((const uint4*)a.layers)[i];
    if (tid == 0) token = *a.token, chosen.n_published = 0, n_tokens_done = 0;
    __shared__ u32 first_exchange; // number of the token's first exchange between ranks
    if constexpr (ON_RANKS)
        if (tid == 0) first_exchange = exchange_index(ranks->exchange, 0);
    find_spans(a, a.token->pos, tid, BLOCK_THREADS);
    __syncthreads();
    if (warp >= CONSUMER_WARPS) {
        release_registers<PRODUCER_REGISTERS<SMALL>>();
        // Lane l of producer warp w fills ring w + N l, so that the rings are divided evenly among the N producer warps; further lanes do nothing.
        constexpr int N = SMALL ? PRODUCER_WARPS - 1 : PRODUCER_WARPS;
        const u32 ring_index = warp - CONSUMER_WARPS + N * lane;
        if (SMALL && warp == CONSUMER_WARPS + N) run_epilogue_warp(a, residual, sync, lane);
        else run_producer<EXPERTS>(a, ring_index, lane, chosen);
        return;
    }
    take_registers<CONSUMER_REGISTERS<SMALL>>();

    // Consumer warps from here on. Loop over layers i and their ops s; layer `n_layer` is the output head's, and then the next token begins.
    HeadPrefetch prefetched = {0, 0};
    u32 tag = a.tag;        // of the layer
    u32 n_small_ops = 0;    // that have begun
    u32 layer_index = 0;    // index in `layers` of the current layer
    const u32 copy_index = blockIdx.x % COPIES; // the copy of each vector of words that this block reads
    WeightRing ring = {a, /* first */ warp * a.stages_per_warp, /* position */ {0, 0}, /* left */ 0, /* record */ 0};
#pragma unroll 1
    for (u32 i = 0;; i++) {
        const Layer& l = layers[layer_index];
        u64_t best = 0; // best logit of the thread's rows; used by the output head only
#pragma unroll 1
        for (u32 s = 0; s < l.n_ops; s++) {
            // Hides the thread's indices from the compiler, so that values derived from them are recomputed in each op: kept in registers across
            // ops, they would take those that an op needs.
            asm volatile("" : "+r"(tid), "+r"(warp), "+r"(lane));
            ring.left = 0; // a stage has weights of one matrix only
            const Op& op = l.ops[s];
            const u32 kind = op.kind;
            best = 0;
            const BlockShare* shares = block_shares(a) + op.first_matrix_index; // of the op's matrices; behind them those of the next op
            // Page ids and constants of heads do not depend on words: attention, after q/k/v, finds them loaded.
            if (kind == QKV) prefetched = prefetch_heads(a, l, spans_of(a)[i], token.pos, token.seq, tid);
            if (kind == ATTENTION_OUTPUT) {
                const bool is_first = i == 0;
                attention<C>(a, l, spans_of(a)[i], prefetched, is_first, token.pos, token.seq, tag, (float*)(decode_memory + a.inputs_at));
                // Loads the next layer's description over the previous layer's, which all consumer warps have left (Lemma 12).
                consumer_barrier();
                for (u32 j = tid; j < LAYER_WORDS; j += CONSUMER_THREADS)
                    copy16((uint4*)&layers[layer_index ^ 1] + j, (const uint4*)(a.layers + i + 1) + j);
                commit_copies();
            }
            if (kind == DOWN) wait_for_copies<0>();
            // Rows of the op that this block finishes. `tiles_above`: tiles of the block in the matrices above one, here those of q and k; a row of
            // gate and the row of up at the same place are one.
            const u32 n_block_rows = (kind == QKV ? shares[2].tiles_above + shares[2].n_tiles : shares[0].n_tiles) * 16;
            // The token's first op reads the embedding instead of words, and stores it to the residual stream, in blocks without rows as well.
            const bool reads_embedding = i == 0 && kind == QKV;
            // Routing, in blocks that have rows of gate and up or of down. The share of down, the next op, lies behind those of gate and up.
            const bool is_expert_op = EXPERTS && kind == GATE_AND_UP && l.route.n_expert > 0;
            const BlockShare* down_share = shares + 2;
            if (is_expert_op && warp == CONSUMER_WARPS - 1 && (shares[0].n_tiles > 0 || down_share->n_tiles > 0)) {
                const Op& router = l.ops[s - 1];
                route(a, l.route, chosen, router.output + copy_index * (router.n_out / 2), tag, n_tokens_done * (a.n_layer + 1) + i + 1, lane);
            }
            const u32 tag_in = (tag + op.tag_in) & TAG_MASK, n4 = op.n_in / 4;
            // A block without rows of the op does not wait for its inputs. Overwriting words stays safe: Lemmas 3 to 7 conclude from a word that a
            // block has stored that it has read its inputs, and this block stores none.
            if (n_block_rows == 0 && !reads_embedding) {
                consumer_barrier();
                continue;
            }
            if (SMALL && kind != OUTPUT_HEAD && !reads_embedding) {
                // The copies of all threads of the next layer's description have arrived (Lemma 12).
                if (kind == DOWN) consumer_barrier();
                run_small_op(a, l, op, shares, spans_of(a)[i].n_splits, tag, copy_index, zeros, ring, sync, n_small_ops++, warp, lane);
                continue;
            }
            // A full op in a SMALL kernel: inputs and sums take the place of those of the small op before (Lemmas 10 and 11). Waits until the
            // epilogue warp has finished all small ops that have begun.
            if (SMALL) sync.wait_until_finished(n_small_ops), __syncwarp();
            // ---- Prologue: everything that does not depend on the inputs. Each thread loads what the epilogue of its first row needs. ----
            const u32 own_row = row_at(op, shares, tid);
            const u32 log_warps_per_tile = op.log_warps_per_tile, log_groups = LOG_CONSUMER_WARPS - log_warps_per_tile;
            const float own_bias = op.bias && own_row != ~0u ? op.bias[own_row] : 0.0f;
            const RowEpilogue epilogue(l, op, tag);
            const float own_residual = epilogue.adds && own_row != ~0u ? residual[tid] : 0.0f, inverse_n_in = op.inverse_n_in, eps = op.eps;
            u64_t* own_to = epilogue.to + own_row / 2;
            pin_register(own_to);
            const float4* norm = (const float4*)op.norm;
            const WarpShare mine = warp_share_of(warp, op.units_per_tile, log_warps_per_tile);
            const u32 n_panels = mine.n * op.panels_per_unit;
            unsigned char* memory = decode_memory + a.inputs_at + warp * a.input_stride;
            Inputs inputs(memory, n_panels, op);
            const DigitColumns columns(inputs.digits, zeros, lane);
            if (lane < (int)op.n_matrices)
                warp_work[warp][lane] = warp_work_of(shares[lane], mine, warp, kind == GATE_AND_UP ? lane * a.gate_to_up_floats : 0);
            // ---- Loads: the warp's inputs. Four lanes have a quantisation block of 32 inputs, a quad of each half. ----
            const u32 first_quad = mine.first * op.panels_per_unit * 16 + lane / 4 * 8 + lane % 4;
            if (kind == ATTENTION_OUTPUT) {
#pragma unroll 1
                for (u32 first = 0; first < inputs.n_quant_blocks; first += 8) {
                    float4 v[1][2]; // the lane's two quads, one of each half of its block
                    const u64_t* values = a.attention + copy_index * a.attention_copy_words;
                    const u64_t* max_sums = a.attention_max_sums + copy_index * a.max_sums_copy_words;
                    const u32 n_splits = spans_of(a)[i].n_splits, from = first_quad + 8 * first;
                    const u32 end = first + lane / 4 < inputs.n_quant_blocks ? n4 : 0; // a lane without a block gets zeros
                    // Both quads are in one head if a head has whole quantisation blocks.
                    if (l.head_dim % 32 == 0) merge_splits<2, /* ONE_HEAD */ true>(l, n_splits, values, max_sums, from, end, tag, v[0]);
                    else merge_splits<2, /* ONE_HEAD */ false>(l, n_splits, values, max_sums, from, end, tag, v[0]);
                    inputs.put<1>(first, v, {{ONES, ONES}}, lane);
                }
            } else if (reads_embedding) {
                // The embedding; rows of the residual stream are divided among blocks as those of the attention output are (`first_block` of
                // src/decode/args.rs has the same rule). The op has a norm, as q/k/v always do.
                const u32 x_tiles = (a.n_embd + 15) / 16, first_block = gridDim.x - min(x_tiles, gridDim.x);
                const u32 first_tile = tiles_before(blockIdx.x, x_tiles, first_block);
                const u32 end_tile = tiles_before(blockIdx.x + 1, x_tiles, first_block);
#pragma unroll 1
                for (u32 first = 0; first < inputs.n_quant_blocks; first += 8) {
                    float4 v[1][2] = {}, weights[1][2];
                    const u32 k = first_quad + 8 * first;
                    const bool of_warp = first + lane / 4 < inputs.n_quant_blocks; // whether the lane's block is one of the warp's
                    // WITH_PANEL defines P, the type of a panel of the format.
                    if (of_warp && k < n4) WITH_PANEL(a.table.format, (elements_of<P>(a.table, token.id, k / 8, k % 8, v[0])));
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const u32 quad = k + 4 * h;
                        const bool exists = of_warp && quad < n4;
                        const float scale = exists ? a.embedding_scale : 0.0f;
                        float4& x = v[0][h];
                        x.x *= scale, x.y *= scale, x.z *= scale, x.w *= scale;
                        // Beyond the row x is 0, and so is its product with any weight, such as x itself.
                        weights[0][h] = exists ? norm[quad] : x;
                        if (exists && quad / 4 >= first_tile && quad / 4 < end_tile) *(float4*)(residual + 4 * quad - first_tile * 16) = x;
                    }
                    __syncwarp();
                    inputs.put<1>(first, v, weights, lane);
                }
            } else {
                load_vector(op, inputs, copy_index, tag_in, n4, norm, first_quad, lane);
            }
            __syncwarp();
            float* const op_sums = (float*)(decode_memory + a.regions_at[op.region]);
            const float factor = inputs.has_codes ? 1.0f : split_into_f16(inputs.floats, inputs.largest, n_panels, lane);
            if (norm) {
                const float squares = warp_sum(inputs.squares);
                // Each warp group has read all columns: only the first group's sums of squares count.
                if (lane == 0) op_sums[squares_index(warp)] = mine.group == 0 ? squares : 0.0f;
            }
            __syncwarp();

            // ---- Products: partial sums. The output head has too many rows for the region of sums. They are finished in rounds, which use the two
            // regions alternately (Lemma 11). Other ops have one round.
            const u32 tiles_per_round = kind == OUTPUT_HEAD ? OUTPUT_HEAD_TILES_PER_ROUND : ~0u; // of a warp group
            const u32 rows_per_round = kind == OUTPUT_HEAD ? OUTPUT_HEAD_TILES_PER_ROUND * 16 << log_groups : n_block_rows;
            const u32 n_matrices = op.n_matrices;
            // SMALL kernels have few full ops, which are not worth the code for two tiles at a time.
            constexpr bool TWO_TILES = !SMALL;
            u32 begin = 0, region = op.region;
            do {
                float* sums = (float*)(decode_memory + a.regions_at[region]);
#pragma unroll 1
                for (u32 p = 0; p < n_matrices; p++) {
                    const WarpWork work = warp_work[warp][p];
                    if (work.n_tiles == 0) continue;
                    // WITH_FORMAT defines FORMAT, the format as a constant.
                    WITH_FORMAT(work.format, (multiply_tiles<FORMAT, TWO_TILES>(work, begin / 16 >> log_groups, tiles_per_round, columns, memory,
                                                                             factor, sums, ring, lane)));
                }
                // All warps have read their inputs and stored their sums (Lemmas 1 and 11).
                consumer_barrier();

                // ---- Epilogue: rows of the block, or of the round. ----
                const u32 n = min(n_block_rows - begin, rows_per_round);
                finish_rows<EXPERTS, ON_RANKS>(a, l, op, kind, shares, chosen, epilogue, own_row, own_bias, own_residual, own_to, sums, op_sums,
                                               residual, begin, n, inverse_n_in, eps, norm, log_warps_per_tile, is_expert_op, ranks,
                                               first_exchange, i, best, tid);
                begin += rows_per_round, region ^= 1;
            } while (begin < n_block_rows);
        }
        tag = (tag + TAGS_PER_LAYER) & TAG_MASK, layer_index ^= 1;
        if (i < a.n_layer) continue;

        // ---- Argmax and end of the token: all blocks exchange their best logits (Lemma 8). After the last token only block 0 waits for them. ----
        best = highest_of_lanes(best);
        if (lane == 0) best_of_warps[warp] = best;
        const bool is_last = n_tokens_done + 1 == a.n_tokens;
        const u32 next_pos = token.pos + 1;
        consumer_barrier();
        if (is_last && warp != 0) return;
        if (!is_last) {
            // Meanwhile, what does not depend on the next token's id: the first layer's description, and the spans of the next position.
            for (u32 j = tid; j < LAYER_WORDS; j += CONSUMER_THREADS) copy16((uint4*)&layers[layer_index] + j, (const uint4*)a.layers + j);
            commit_copies();
            if (warp != 0) find_spans(a, next_pos, tid - 32, CONSUMER_THREADS - 32);
        }
        if (warp == 0 && !choose_token<ON_RANKS>(a, ranks, best_of_warps, token, n_tokens_done, first_exchange, tag, next_pos, is_last, lane)) return;
        wait_for_copies<0>();
        if (is_last) return;
        // The next token's embedding overwrites rows of the residual stream that the epilogue warp of a SMALL kernel uses (Lemma 13).
        if (SMALL) token_barrier();
        else consumer_barrier();
        i = ~0u; // the loop's increment makes it 0, the next token's first layer
    }
}

// decode_on_ranks.cu includes the template without these kernels.
#ifndef TEMPLATES_ALONE
#define DECODE(NAME, C, SMALL, EXPERTS)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) NAME(const __grid_constant__ DecodeArgs a) { decode<C, SMALL, EXPERTS>(a); }
// Names: decode[_small | _experts]_<largest number of elements of a head>.
DECODE(decode_64, 1, false, false)
DECODE(decode_128, 2, false, false)
DECODE(decode_256, 4, false, false)
DECODE(decode_small_64, 1, true, false)
DECODE(decode_experts_128, 2, false, true)
DECODE(decode_experts_256, 4, false, true)
#endif
