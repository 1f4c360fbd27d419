// Epilogue of full ops in the persistent decode kernel: finishes the rows of the block, that is, adds the warps' partial sums, applies 1 / RMS,
// bias, gate, experts' weights and residual, adds up the sums of several ranks, and stores the words of the results. The rows of small ops are
// finished by the epilogue warp (decode_preload.cuh).
#pragma once
#include "argmax.cuh"
#include "decode_products.cuh"
#include "exchange.cuh"

// A rank's share of a model that several ranks have together by tensor parallelism: some columns of the attention output and of down in all
// layers, and some rows of the output head. The part of `DecodeOnRanksArgs` that follows DecodeArgs (decode_on_ranks.cu).
struct RankShare {
    Exchange exchange;   // mailboxes of the ranks
    u32 first_vocab_row; // first row of the output head that the rank has
    u32 unused;
};
ASSERT_LAYOUT(RankShare);
// Exchanges between ranks in a token, in the order of their numbers: of each layer the sums of the attention output and of down, at the end
// the best logit. exchange.cuh numbers exchanges; `first_exchange_number` is the number of the token's first.
__device__ __forceinline__ u32 exchanges_per_token(const DecodeArgs& a) { return 2 * a.n_layer + 1; }
__device__ __forceinline__ u32 exchange_number_of_sum(u32 first_exchange_number, u32 layer_index, u32 kind) {
    return first_exchange_number + 2 * layer_index + (kind == DOWN);
}

// Values that the epilogue of an op's rows needs. They are loaded before the partial sums exist: what follows the sums is on the critical path of
// all blocks.
struct RowEpilogue {
    u64_t* words;           // words of the results, in the first copy; null: the output head
    u32 n_copies;           // copies of these
    u32 copy_words;         // words of a copy
    u32 tag;                // of the words
    u32 activation;         // Activation of the gate
    float activation_limit; // its parameter
    float scale;            // factor on what is added to the residual stream
    bool adds;              // whether the results are added to the residual stream
    __device__ __forceinline__ RowEpilogue(const LayerArgs& layer, const OpArgs& op, u32 tag)
        : words(op.output), n_copies(op.n_copies), copy_words(op.n_out / 2), tag((tag + op.tag_out_offset) & TAG_MASK),
          activation(layer.activation), activation_limit(layer.activation_limit), scale(layer.residual_scale),
          adds(op.kind == ATTENTION_OUTPUT || op.kind == DOWN) {}
    // The sum over all ranks of a row that is added to the residual stream; other rows as they are. `row`: NO_ROW for none.
    __device__ __forceinline__ float sum_over_ranks(const RankShare* ranks, u32 exchange_number, u32 row, float y) const {
        return adds && row != NO_ROW ? exchanged_sum(ranks->exchange, exchange_number, row, y) : y;
    }
    // Adds the row to the residual stream, if the op does that: `before` is its old value, `residual` where it is kept. Then the lane of an even row
    // stores the word of that row and the next one at `at`. `row`: NO_ROW for none. All lanes of the warp call it. The lane after that of an
    // even row has the next row, since matrices have an even number of rows (`OpArgs::n_rows`).
    __device__ __forceinline__ void store_row(u32 row, u64_t* at, float y, float before, float* residual) const {
        const bool exists = row != NO_ROW;
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

// Finishes rows `begin` to `begin + n - 1` of the block's rows of a full op; all consumer threads call it. Values of the op that are loaded before
// its inputs arrive are parameters of their own; grouped in structs they get other registers. The parameters in their order:
//   a, layer, op            the kernel's argument, the layer, its op
//   kind                    OpKind of the op
//   shares                  the block's shares of the op's matrices
//   chosen                  the choice of experts; read for experts only
//   epilogue                where results go, and what is done with them
//   first_row               of the thread's first row, which is row `tid` of the block: the row of the op, or NO_ROW
//   first_row_bias          its bias
//   first_row_residual      its value in the residual stream
//   first_row_words         where its word goes
//   round_sums              region of the partial sums of these rows
//   first_round_sums        region of the op's first round, which has the sums of squares of its inputs
//   residual                the block's rows of the residual stream
//   begin, n                the rows
//   inverse_n_in, eps       as in OpArgs
//   norm                    weights of the norm of the inputs; null: there is none, and 1 / RMS is not applied
//   log_warps_per_tile      as in OpArgs
//   is_expert_op            whether the op is gate and up of experts
//   ranks                   this rank's share (ON_RANKS)
//   first_exchange_number   of the token's first exchange between ranks (ON_RANKS)
//   layer_index             index of the layer
//   best                    argmax key of the thread's best logit, which the output head updates
//   tid                     index of the thread
template <bool EXPERTS, bool ON_RANKS>
__device__ __forceinline__ void finish_rows(const DecodeArgs& a, const LayerArgs& layer, const OpArgs& op, u32 kind, const BlockShare* shares,
                                            const ExpertChoice& chosen, const RowEpilogue& epilogue, u32 first_row, float first_row_bias,
                                            float first_row_residual, u64_t* first_row_words, float* round_sums, float* first_round_sums,
                                            float* residual, u32 begin, u32 n, float inverse_n_in, float eps, const float4* norm,
                                            u32 log_warps_per_tile, bool is_expert_op, const RankShare* ranks, const u32& first_exchange_number,
                                            u32 layer_index, u64_t& best, int tid) {
    if ((u32)tid / 32 * 32 < n) {
        // Without a norm no warp has stored sums of squares: `inv_rms_of_inputs` has no meaning then, and is not used.
        const float inv_rms_of_inputs = inv_rms_of(first_round_sums, inverse_n_in, eps), inv_rms = norm ? inv_rms_of_inputs : 1.0f;
        // All threads of a warp go through the loop together: a word has the rows of two lanes.
#pragma unroll 1
        for (u32 j_in_round = (u32)tid; j_in_round < (n + 31) / 32 * 32; j_in_round += CONSUMER_THREADS) {
            const u32 j = begin + j_in_round;        // the row of the block
            const bool is_first_row = j == (u32)tid; // whether it is the thread's first row; only in the first round
            const u32 row = is_first_row ? first_row : row_at(op, shares, j);
            const bool exists = row != NO_ROW;
            const float bias = is_first_row ? first_row_bias : op.bias && exists ? op.bias[row] : 0.0f;
            const float* row_sums = round_sums + (exists ? j_in_round : 0) * SUMS_STRIDE;
            float y = inv_rms * sum_of_warps(row_sums, log_warps_per_tile);
            if (kind == OUTPUT_HEAD) {
                if (!exists) continue;
                y = (y + bias) * a.logit_scale;
                if (a.logit_cap != 0.0f) y = a.logit_cap * tanhf(y / a.logit_cap);
                const u32 vocab_row = ON_RANKS ? ranks->first_vocab_row + row : row;
                if (a.logits) a.logits[vocab_row] = y;
                const u64_t key = argmax_key(y, vocab_row);
                best = key > best ? key : best;
                continue;
            }
            if (kind == GATE_AND_UP) {
                float up = inv_rms * sum_of_warps(row_sums + a.gate_to_up_floats, log_warps_per_tile), weight = 1.0f;
                if (is_expert_op) {
                    // `n_out` is the number of rows of all chosen experts.
                    const u32 n_ff = op.n_out / layer.route.n_used, index = exists ? row / n_ff : 0; // of the expert among the chosen ones
                    const size_t at = (size_t)chosen.experts[index] * n_ff + (exists ? row % n_ff : 0);
                    if (layer.expert_bias[0]) y += layer.expert_bias[0][at];
                    if (layer.expert_bias[1]) up += layer.expert_bias[1][at];
                    weight = chosen.weights[index];
                }
                // The product with down sums over the experts, whose columns lie side by side: their weights have to be applied before it.
                const float gated_row =
                    epilogue.activation == SILU ? activate(SILU, y) * up : gated(epilogue.activation, epilogue.activation_limit, y, up);
                y = weight * gated_row;
            }
            if (EXPERTS && kind == DOWN && layer.expert_bias[2] && exists)
                for (u32 k = 0; k < layer.route.n_used; k++)
                    y += chosen.weights[k] * layer.expert_bias[2][(size_t)chosen.experts[k] * op.n_out + row];
            const float residual_before = is_first_row ? first_row_residual : epilogue.adds && exists ? residual[j] : 0.0f;
            // Gate and up have no bias here. Of the ranks that add up their rows, only rank 0 has one.
            y += bias;
            if constexpr (ON_RANKS)
                y = epilogue.sum_over_ranks(ranks, exchange_number_of_sum(first_exchange_number, layer_index, kind), row, y);
            epilogue.store_row(row, is_first_row ? first_row_words : epilogue.words + row / 2, y, residual_before, residual + j);
        }
    }
}
