// The persistent decode kernel: evaluates one token, or a few of one sequence that follow each other, through all layers of a model in
// one launch. Each token chooses the next one: the id with the highest logit (greedy decoding). A launch has few tokens (at most MAX_TOKENS of
// src/decode.rs, which is 4), because it cannot be stopped: cancellation is only seen between launches. The kernel is for decoders of attention
// and gated feed-forwards, dense or with experts; src/decode/layers.rs says which.
//
// Input: `DecodeArgs` (decode.cuh), that is, layers, the token's id, sequence and position, and the KV cache. Output: the new rows of the KV cache,
// the chosen ids, and if wanted the next token and the logits. Terms (op, small op, tile, panel, quant block, digit, warp group, tagged word,
// tag, ...) are defined in decode.cuh.
//
// Files:
//   decode.cuh             terms, arguments, the layout of shared memory, small helpers
//   decode_exchange.cuh    tagged words and their memory model, named barriers
//   decode_routing.cuh     how a block chooses the experts (`route`)
//   decode_weights.cuh     the blocks' and warps' shares, the rings of weights, producer warps (`run_producer`)
//   decode_attention.cuh   attention between q/k/v and the attention output (`attention`, `merge_splits`)
//   decode_inputs.cuh      a warp's inputs of a full op: words to digits or F16 parts (`load_vector`)
//   decode_products.cuh    a warp's partial sums of a full op (`multiply_tiles`)
//   decode_rows.cuh        the epilogue of full ops (`finish_rows`)
//   decode_preload.cuh     small ops (`run_small_op`) and their epilogue warp (`run_epilogue_warp`)
//   decode_argmax.cuh      the end of a token (`choose_token`)
//   decode.cu              this file: the flow (`decode`) and the kernels for a model on one device
//   decode_on_ranks.cu     the kernels for a model that several ranks share
//
// Division of work. One block runs on each multiprocessor for the whole launch. For each op a block has neighbouring tiles, the same ones for
// every token; within the block warp groups divide the tiles, and the consumer warps of a warp group the columns (split-K within the block).
// Blocks wait for nothing but each other's results, which are tagged words in global memory (decode_exchange.cuh). A word's values have 26 bits
// each; a block's own rows of the residual stream stay in F32.
//
// The flow in each block. "<-" is a wait, "->" what it makes available to others:
//
//   consumer warps (`decode`)
//     for each token of the launch:
//       for layer i = 0 to n_layer, with tag t:       layer n_layer is a pseudo-layer; its only op is the output head
//         for each op: q/k/v, attention output, [router,] gate and up, down
//           if attention output:   attention          <- words of q/k/v, tag t               -> words of attention, tag t; new KV rows
//           if gate and up of experts: the last consumer warp routes
//                                                     <- words of the router, tag t          -> the chosen experts, for this block
//           if the block has no rows of the op:       consumer barrier, next op
//           if the op is small:    run_small_op       <- input words, weights                -> partial sums, for the epilogue warp; next op
//           preparation            what does not depend on the inputs
//           loads                  inputs to digits or F16 parts in shared memory; the token's first op reads the embedding instead of words,
//                                  and stores the block's rows of it to the residual stream
//                                                     <- input words of the warp's own columns, tag t + op.tag_in_offset
//           products               partial sums       <- full stages of weights              -> empty stages, for the producer warps
//           consumer barrier
//           epilogue               sum of the warps, 1 / RMS, bias, gate, residual           -> output words, tag t + op.tag_out_offset
//         t += 2                   a layer writes the residual stream twice, with t after attention and t + 1 after the feed-forward
//       argmax (`choose_token`)    <- words of the best logits of all blocks                 -> the next token's id
//   producer warps (`run_producer`)
//     for each token, each matrix: copy the block's weights, as far ahead as the rings allow
//                                  <- an empty stage; of experts: the chosen ones            -> a full stage
//   epilogue warp (`run_epilogue_warp`, SMALL kernels only)
//     for each small op:           finish the rows    <- partial sums of all consumer warps  -> output words
//
// The KV cache. Attention writes the token's own row of each KV head: the task that has it among its positions gets key and value from words of
// q/k/v and stores them (decode_attention.cuh). Within the token no thread reads that row from the cache; later tokens do (Lemma 8).
//
// Small ops. A warp loads its weights of a small op into registers before the inputs arrive, and the epilogue warp finishes the rows. In SMALL
// kernels, for small models, all ops are small, except for the token's first one (it reads the embedding) and the output head: these take
// the path of all other kernels (full ops), and consumer warps finish their rows.
//
// Experts are evaluated as one feed-forward: rows of gate and up of the chosen experts one below the other, columns of down side by
// side; each block routes by itself.
//
// Preconditions, which the host establishes (src/decode.rs):
//   - Compute capability 9.0 and no other (sm_90a): setmaxnreg, cp.async.bulk.
//   - A cooperative launch (`LaunchOrder::Cooperative` of src/launch.rs) of one block for each multiprocessor, since all blocks have to be resident
//     at once; BLOCK_THREADS threads; dynamic shared memory of `SharedMemoryLayout::bytes` (src/decode/memory.rs).
//   - The contract of `DecodeArgs::tag`: words are zeros before the first launch, and tags continue from launch to launch.
//   - The KV cache has pages for the positions of all tokens of the launch, and the rows of all earlier positions.
//   - The vocabulary has at most 2^20 tokens: a word of a block's best logit has 32 bits of the logit, 20 of the row and 12 of the tag.
// Errors: none are reported. Waits for other blocks have no time limit: if a precondition is violated, the kernel may hang. Waits for other
// ranks end after some ten seconds, or when a rank has set the abort flag (`poll_until` of exchange.cuh); the host then discards the results.
//
// Invariants, with writer and reader of each resource. The lines that rely on one name it; proofs are in docs/design/decode-kernel.md:
//   Lemma 1   an output word of an op proves that its block has read the op's whole input vector
//   Lemma 2   the tag of a stale word differs from the wanted tag
//   Lemma 3   down overwrites the residual words of after attention only when gate, up and router have read them
//   Lemma 4   the attention output overwrites the residual words of after the feed-forward only when q/k/v has read them
//   Lemma 5   q/k/v overwrites its words only when attention has read them
//   Lemma 6   attention overwrites its words only when the attention output has read them
//   Lemma 7   router words, and the words of gate and up, are overwritten only when the routing warps and down have read them
//   Lemma 8   a block begins token n + 1 after all blocks have ended token n; the KV cache is visible then
//   Lemma 9   a stage of weights is overwritten after its consumer warp has read it
//   Lemma 10  inputs and attention's scratch, which share memory, do not overlap in time
//   Lemma 11  a region of partial sums is overwritten after its epilogue has read it
//   Lemma 12  descriptions of layers and constants of heads are overwritten after all consumer warps have read them
//   Lemma 13  rows of the residual stream in shared memory have one writer at a time, or several of equal values
//   Lemma 14  the chosen experts are overwritten after producer warps and epilogues have read them
//   Lemma 15  consumer warps and the epilogue warp of a SMALL kernel are at most one small op apart
//   Lemma 16  mailbox words of other ranks are overwritten after they are read
//   Lemma 17  nothing of a launch overlaps with the next one
#include "decode_argmax.cuh"
#include "decode_attention.cuh"
#include "decode_inputs.cuh"
#include "decode_preload.cuh"
#include "decode_products.cuh"
#include "decode_rows.cuh"
#include "decode_weights.cuh"
#include "element.cuh"

// Registers of a thread of producer and consumer warps. The kernel is compiled for 384 threads with 168 registers each, 64512 in all. The 128
// threads of the four producer warps give most of theirs to the 256 threads of the consumer warps: 128 * 40 + 256 * 232 = 64512. In SMALL kernels
// one of the four is the epilogue warp, which needs more: 128 * 72 + 256 * 216 = 64512.
template <bool SMALL> constexpr int PRODUCER_REGISTERS = SMALL ? 72 : 40;
template <bool SMALL> constexpr int CONSUMER_REGISTERS = SMALL ? 216 : 232;

// The kernel; the flow is at the top of this file.
//   HEAD_CHUNKS   chunks of 64 elements that an attention head has, rounded up: 1, 2 or 4 for heads of up to 64, 128 or 256 elements
//   SMALL         whether all ops are small but for the token's first one and the output head
//   EXPERTS       whether layers may have experts; a parameter because the code for them would slow others down
//   ON_RANKS      whether several ranks share the model (tensor parallelism); `ranks` is this one's share
template <int HEAD_CHUNKS, bool SMALL, bool EXPERTS, bool ON_RANKS = false>
__device__ __forceinline__ void decode(const DecodeArgs& a, const RankShare* ranks = nullptr) {
    static_assert(!SMALL || !ON_RANKS, "models with small ops are not divided among ranks");
    __shared__ __align__(16) LayerArgs layers[2];     // the current layer, and the next one (Lemma 12)
    __shared__ u64_t best_of_warps[CONSUMER_WARPS];   // argmax keys of the warps' best logits
    __shared__ WarpWork warp_work[CONSUMER_WARPS][3]; // [warp][matrix of the op]; each warp reads what its own lanes have written
    __shared__ Token token;                           // the current one
    __shared__ ExpertChoice chosen;                   // experts of the current layer
    __shared__ u32 n_tokens_done;                     // of the launch
    __shared__ SmallOpSync sync;                      // consumer warps and epilogue warp of SMALL kernels
    __shared__ u32 first_exchange_number;             // of the token's first exchange between ranks; `choose_token` advances it
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    constexpr int LAYER_PIECES = sizeof(LayerArgs) / 16; // a layer's description is copied in pieces of 16 bytes
    float* residual = (float*)(decode_memory + a.residual_at);

    // 16 bytes of zeros, for lanes whose column of a product has no digits (`DigitColumns`). They are the last part of
    // the dynamic shared memory (decode.cuh), after the barriers of all rings, where `full_barrier` places those of a further ring.
    unsigned char* zeros = (unsigned char*)full_barrier(a, CONSUMER_WARPS, 0);
    if (tid < 16) zeros[tid] = 0;
    // Each stage has two barriers: one thread arrives at `full`, the producer lane, and 32 at `empty`, the lanes of the consumer warp.
    for (u32 i = tid; i < 2 * CONSUMER_WARPS * a.stages_per_warp; i += BLOCK_THREADS)
        barrier_init(full_barrier(a, 0, 0) + i, i % 2 == 0 ? 1 : 32);
    if (tid == 0) sync.init();
    fence_barrier_init();
    for (u32 i = tid; i < a.n_matrices; i += BLOCK_THREADS) block_shares(a)[i] = block_share_of(a.matrices[i]);
    for (u32 i = tid; i < LAYER_PIECES; i += BLOCK_THREADS) ((uint4*)layers)[i] = ((const uint4*)a.layers)[i];
    if (tid == 0) token = *a.token, chosen.n_published = 0, n_tokens_done = 0;
    if constexpr (ON_RANKS)
        if (tid == 0) first_exchange_number = exchange_number_after(ranks->exchange, 0);
    find_spans(a, a.token->pos, tid, BLOCK_THREADS);
    __syncthreads();
    // Producer warps and the epilogue warp branch off here, and return when they are done; setmaxnreg moves registers from them to the consumer
    // warps.
    if (warp >= CONSUMER_WARPS) {
        release_registers<PRODUCER_REGISTERS<SMALL>>();
        // A single lane fills a ring. Lane l of producer warp w, from 0 to N - 1, has ring w + N l, so that the rings are divided evenly among
        // these warps; lanes whose ring does not exist only take part in the votes of `run_producer`.
        constexpr int N = SMALL ? PRODUCER_WARPS - 1 : PRODUCER_WARPS;
        const u32 ring_index = warp - CONSUMER_WARPS + N * lane;
        if (SMALL && warp == CONSUMER_WARPS + N) run_epilogue_warp(a, residual, sync, lane);
        else run_producer<EXPERTS>(a, ring_index, lane, chosen);
        return;
    }
    take_registers<CONSUMER_REGISTERS<SMALL>>();

    // Consumer warps from here on.
    HeadPrefetch prefetched = {0, 0};
    u32 tag = a.tag;        // layer tag of the current layer
    u32 n_small_ops = 0;    // that have begun
    u32 layer_slot = 0;     // index in `layers` of the current layer
    const u32 copy_index = blockIdx.x % COPIES; // the copy of each vector of words that this block reads
    WeightRing ring = {a, /* first */ warp * a.stages_per_warp, /* position: stage, parity */ {0, 0}, /* left of the open stage */ 0, /* record */ 0};
    // One loop over the layers of all tokens: behind layer `n_layer`, which is the output head's, `layer_index` begins again with 0.
#pragma unroll 1
    for (u32 layer_index = 0;; layer_index++) {
        const LayerArgs& layer = layers[layer_slot];
        u64_t best = 0; // argmax key of the best logit of the thread's rows; used by the output head only
#pragma unroll 1
        for (u32 op_index = 0; op_index < layer.n_ops; op_index++) {
            // Hides the thread's indices from the compiler, so that values derived from them are recomputed in each op: kept in registers across
            // ops, they would take those that an op needs.
            asm volatile("" : "+r"(tid), "+r"(warp), "+r"(lane));
            ring.left = 0; // redundant, as all stages are released: it ends the live range, so that no register keeps `left` across ops
            const OpArgs& op = layer.ops[op_index];
            const u32 kind = op.kind;
            best = 0; // redundant, too: only the output head, which is its layer's only op, sets it
            // The block's shares of the op's matrices. Those of the next op's matrices follow in the same array.
            const BlockShare* shares = block_shares(a) + op.first_matrix_index;
            // Page ids and constants of heads do not depend on words, so that they are loaded now, for attention after q/k/v.
            if (kind == QKV) prefetched = prefetch_heads(a, layer, spans_of(a)[layer_index], token, tid);
            if (kind == ATTENTION_OUTPUT) {
                // Attention; it also writes the token's rows of the layer's KV cache, and in the first layer the words of unused splits.
                const bool is_first_layer = layer_index == 0;
                attention<HEAD_CHUNKS>(a, layer, spans_of(a)[layer_index], prefetched, is_first_layer, token.pos, token.seq, tag,
                                       (float*)(decode_memory + a.inputs_at));
                // Loads the next layer's description over the previous layer's, which all consumer warps have left (Lemma 12).
                consumer_barrier();
                for (u32 j = tid; j < LAYER_PIECES; j += CONSUMER_THREADS)
                    copy16((uint4*)&layers[layer_slot ^ 1] + j, (const uint4*)(a.layers + layer_index + 1) + j);
                commit_copies();
            }
            // This thread's pieces of the next layer's description have arrived; the consumer barrier that follows in this op makes those of all
            // threads visible (Lemma 12).
            if (kind == DOWN) wait_for_copies<0>();
            // Rows of the op that this block finishes, with the padding of its last tile, for which `row_at` gives NO_ROW. The rows of q/k/v are
            // those of three matrices: shares[2] is v's, whose `tiles_above` counts the block's tiles of q and k. A row of gate and the row of up at
            // the same place count as one.
            const u32 n_block_rows = (kind == QKV ? shares[2].tiles_above + shares[2].n_tiles : shares[0].n_tiles) * 16;
            // The token's first op reads the embedding instead of words. Blocks without rows of q/k/v do so, too: they may have rows of the residual
            // stream, to which the embedding is stored.
            const bool reads_embedding = layer_index == 0 && kind == QKV;
            // Routing, in blocks that have rows of gate and up or of down. Gate and up have two matrices, so that shares[2] is the share of down, the
            // next op; `down_share` is for `is_expert_op` only. Producer lanes wait until `chosen.n_published` is the number of this routing in the
            // launch (`expert_layer_number`); epilogues read the chosen experts after the next consumer barrier. Router words have COPIES copies.
            const bool is_expert_op = EXPERTS && kind == GATE_AND_UP && layer.route.n_expert > 0;
            const BlockShare* down_share = shares + 2;
            if (is_expert_op && warp == CONSUMER_WARPS - 1 && (shares[0].n_tiles > 0 || down_share->n_tiles > 0)) {
                const OpArgs& router = layer.ops[op_index - 1];
                route(a, layer.route, chosen, router.output + copy_index * (router.n_out / 2), tag,
                      n_tokens_done * (a.n_layer + 1) + layer_index + 1, lane);
            }
            const u32 tag_in = (tag + op.tag_in_offset) & TAG_MASK, n4 = op.n_in / 4;
            // A block without rows of the op does not wait for its inputs. Overwriting words stays safe: Lemmas 3 to 7 infer from a stored word that
            // its block has read its inputs, and this block stores none.
            if (n_block_rows == 0 && !reads_embedding) {
                consumer_barrier();
                continue;
            }
            if (SMALL && kind != OUTPUT_HEAD && !reads_embedding) {
                // Makes all threads' pieces of the next layer's description visible (Lemma 12). Full ops have a barrier after their products.
                if (kind == DOWN) consumer_barrier();
                // Numbers and counts the op: `n_small_ops++`.
                run_small_op(a, layer, op, shares, spans_of(a)[layer_index].n_splits, tag, copy_index, zeros, ring, sync, n_small_ops++, warp, lane);
                continue;
            }
            // A full op in a SMALL kernel: its partial sums take the place of those of earlier small ops. Waits until the epilogue warp, which reads
            // those, has finished all small ops that have begun (Lemma 15).
            if (SMALL) {
                sync.wait_until_finished(n_small_ops);
                __syncwarp();
            }
            // ---- Preparation: everything that does not depend on the inputs. Each thread loads what the epilogue of its first row needs. ----
            const u32 first_row = row_at(op, shares, tid);
            const u32 log_warps_per_tile = op.log_warps_per_tile, log_warp_groups = LOG_CONSUMER_WARPS - log_warps_per_tile;
            const float first_row_bias = op.bias && first_row != NO_ROW ? op.bias[first_row] : 0.0f;
            const RowEpilogue epilogue(layer, op, tag);
            const float first_row_residual = epilogue.adds && first_row != NO_ROW ? residual[tid] : 0.0f;
            const float inverse_n_in = op.inverse_n_in, eps = op.eps;
            // Not dereferenced with NO_ROW, nor in the output head, which has no words.
            u64_t* first_row_words = epilogue.words + first_row / 2;
            pin_register(first_row_words);
            const float4* norm = (const float4*)op.norm;
            const WarpShare warp_share = warp_share_of(warp, op.units_per_tile, log_warps_per_tile);
            const u32 n_panels = warp_share.n * op.panels_per_unit;
            unsigned char* warp_inputs = decode_memory + a.inputs_at + warp * a.input_stride;
            Inputs inputs(warp_inputs, n_panels, op);
            const DigitColumns columns(inputs.digits, zeros, lane);
            if (lane < (int)op.n_matrices)
                warp_work[warp][lane] = warp_work_of(shares[lane], warp_share, warp, kind == GATE_AND_UP ? lane * a.gate_to_up_floats : 0);
            // ---- Loads: the warp's inputs. Four lanes share a quant block of 32 inputs: the lane has quad k of its first half and quad k + 4
            // of its second, where k is `first_quad` plus 64 for each eight quant blocks before. ----
            const u32 first_quad = warp_share.first * op.panels_per_unit * 16 + lane / 4 * 8 + lane % 4;
            if (kind == ATTENTION_OUTPUT) {
#pragma unroll 1
                for (u32 first = 0; first < inputs.n_quant_blocks; first += 8) { // eight quant blocks of the warp, from `first` on
                    float4 v[1][2]; // the lane's two quads, of one quant block (`store<1>`)
                    const u64_t* values = a.attention + copy_index * a.attention_copy_words;
                    const u64_t* max_sums = a.attention_max_sums + copy_index * a.max_sums_copy_words;
                    const u32 n_splits = spans_of(a)[layer_index].n_splits, from = first_quad + 8 * first;
                    const u32 end = first + lane / 4 < inputs.n_quant_blocks ? n4 : 0; // a lane without a quant block gets zeros
                    // Both quads are in one head if a head has whole quant blocks.
                    if (layer.head_dim % 32 == 0) merge_splits<2, /* ONE_HEAD */ true>(layer, n_splits, values, max_sums, from, end, tag, v[0]);
                    else merge_splits<2, /* ONE_HEAD */ false>(layer, n_splits, values, max_sums, from, end, tag, v[0]);
                    inputs.store<1>(first, v, {{ONES, ONES}}, lane);
                }
            } else if (reads_embedding) {
                // The embedding, which begins the residual stream x; its rows are divided among blocks as those of the attention output are
                // (`first_block` of src/decode/args.rs has the same rule). The op has a norm, as q/k/v always do.
                const u32 x_tiles = (a.n_embd + 15) / 16, first_block = gridDim.x - min(x_tiles, gridDim.x);
                const u32 first_tile = tiles_before(blockIdx.x, x_tiles, first_block);
                const u32 end_tile = tiles_before(blockIdx.x + 1, x_tiles, first_block);
#pragma unroll 1
                for (u32 first = 0; first < inputs.n_quant_blocks; first += 8) {
                    float4 v[1][2] = {}, weights[1][2];
                    const u32 k = first_quad + 8 * first;
                    const bool is_of_warp = first + lane / 4 < inputs.n_quant_blocks; // whether the lane's quant block is one of the warp's
                    // Loads quads k and k + 4 of the embedding, both of quant block k / 8. The lane's quad in each half is k % 8, which is lane % 4.
                    // WITH_PANEL defines P, the type of a panel of the format.
                    if (is_of_warp && k < n4) WITH_PANEL(a.table.format, (elements_of<P>(a.table, token.id, k / 8, k % 8, v[0])));
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const u32 quad = k + 4 * h;
                        const bool exists = is_of_warp && quad < n4;
                        const float scale = exists ? a.embedding_scale : 0.0f;
                        float4& x = v[0][h];
                        x.x *= scale, x.y *= scale, x.z *= scale, x.w *= scale;
                        // Where the quad does not exist x is 0, so that any finite weight will do: here x itself.
                        weights[0][h] = exists ? norm[quad] : x;
                        // In each warp group one warp has the quad: several warps store it, with equal values (Lemma 13).
                        if (exists && quad / 4 >= first_tile && quad / 4 < end_tile) *(float4*)(residual + 4 * quad - first_tile * 16) = x;
                    }
                    __syncwarp(); // the branches above diverge, and all lanes of the warp call `store` together
                    inputs.store<1>(first, v, weights, lane);
                }
            } else {
                load_vector(op, inputs, copy_index, tag_in, n4, norm, first_quad, lane);
            }
            __syncwarp(); // the lanes see each other's inputs
            float* const first_round_sums = (float*)(decode_memory + a.regions_at[op.region]);
            // Without codes: turns the inputs into F16 parts, in place, scaled by a power of two. `factor` takes the scale from the products.
            const float factor = inputs.has_codes ? 1.0f : split_into_f16(inputs.floats, inputs.largest, n_panels, lane);
            if (norm) {
                const float squares = warp_sum(inputs.squares);
                // Each warp group has read all columns: only the first group's sums of squares count. `squares_index` is in the part of a row of
                // SUMS_STRIDE floats that partial sums leave unused (`regions_at` in decode.cuh).
                if (lane == 0) first_round_sums[squares_index(warp)] = warp_share.warp_group == 0 ? squares : 0.0f;
            }
            __syncwarp(); // the lanes see each other's F16 parts

            // ---- Products: partial sums. The output head has too many rows for the region of sums. They are finished in rounds, which use the two
            // regions alternately (Lemma 11). Other ops have one round. A block without rows, in the token's first op, has one of no tiles and rows.
            const u32 tiles_per_round = kind == OUTPUT_HEAD ? OUTPUT_HEAD_TILES_PER_ROUND : ~0u; // of a warp group; ~0u: no limit
            const u32 rows_per_round = kind == OUTPUT_HEAD ? (OUTPUT_HEAD_TILES_PER_ROUND * 16) << log_warp_groups : n_block_rows;
            const u32 n_matrices = op.n_matrices;
            // SMALL kernels have few full ops, which are not worth the code for two tiles at a time.
            constexpr bool TWO_TILES = !SMALL;
            u32 begin = 0, region = op.region; // the round's first row, and its region
            do {
                float* round_sums = (float*)(decode_memory + a.regions_at[region]);
#pragma unroll 1
                for (u32 p = 0; p < n_matrices; p++) {
                    const WarpWork work = warp_work[warp][p];
                    if (work.n_tiles == 0) continue;
                    // The round's first tile, counted over the tiles of the warp group.
                    const u32 first_group_tile = (begin / 16) >> log_warp_groups;
                    // WITH_FORMAT defines FORMAT, the format as a constant.
                    WITH_FORMAT(work.format, (multiply_tiles<FORMAT, TWO_TILES>(work, first_group_tile, tiles_per_round, columns, warp_inputs, factor,
                                                                                 round_sums, ring, lane)));
                }
                // All warps have read their inputs and stored their sums (Lemmas 1 and 11).
                consumer_barrier();

                // ---- Epilogue: rows of the block, or of the round. ----
                const u32 n = min(n_block_rows - begin, rows_per_round);
                finish_rows<EXPERTS, ON_RANKS>(a, layer, op, kind, shares, chosen, epilogue, first_row, first_row_bias, first_row_residual,
                                               first_row_words, round_sums, first_round_sums, residual, begin, n, inverse_n_in, eps, norm,
                                               log_warps_per_tile, is_expert_op, ranks, first_exchange_number, layer_index, best, tid);
                begin += rows_per_round, region ^= 1;
            } while (begin < n_block_rows);
        }
        tag = (tag + TAGS_PER_LAYER) & TAG_MASK, layer_slot ^= 1;
        if (layer_index < a.n_layer) continue;

        // ---- Argmax and end of the token: all blocks exchange their best logits (Lemma 8). After the last token only block 0 waits for them, to
        // publish the id. ----
        best = highest_of_lanes(best);
        if (lane == 0) best_of_warps[warp] = best;
        const bool is_last = n_tokens_done + 1 == a.n_tokens;
        const u32 next_pos = token.pos + 1;
        consumer_barrier();
        if (is_last && warp != 0) return;
        if (!is_last) {
            // Meanwhile, what does not depend on the next token's id: the first layer's description, and the spans of the next position.
            for (u32 j = tid; j < LAYER_PIECES; j += CONSUMER_THREADS) copy16((uint4*)&layers[layer_slot] + j, (const uint4*)a.layers + j);
            commit_copies();
            if (warp != 0) find_spans(a, next_pos, tid - 32, CONSUMER_THREADS - 32);
        }
        // False after the last token, in all blocks but block 0. The block's other warps have returned then, so that none waits at a barrier.
        if (warp == 0 &&
            !choose_token<ON_RANKS>(a, ranks, best_of_warps, token, n_tokens_done, first_exchange_number, tag, next_pos, is_last, lane))
            return;
        wait_for_copies<0>();
        if (is_last) return; // warp 0 of block 0
        // The next token's embedding overwrites rows of the residual stream that the epilogue warp of a SMALL kernel uses (Lemma 13).
        if (SMALL) token_barrier();
        else consumer_barrier();
        layer_index = ~0u; // after the output head: the loop's increment makes it 0, the next token's first layer
    }
}

// decode_on_ranks.cu includes the template without these kernels.
#ifndef TEMPLATES_ALONE
#define DECODE(NAME, HEAD_CHUNKS, SMALL, EXPERTS)                                                                                \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) NAME(const __grid_constant__ DecodeArgs a) {                    \
        decode<HEAD_CHUNKS, SMALL, EXPERTS>(a);                                                                                  \
    }
// Names: decode[_small | _experts]_<largest number of elements of a head>. Ops are small for heads of up to 64 elements only (src/decode/memory.rs);
// models with experts and such heads use decode_experts_128.
DECODE(decode_64, 1, false, false)
DECODE(decode_128, 2, false, false)
DECODE(decode_256, 4, false, false)
DECODE(decode_small_64, 1, true, false)
DECODE(decode_experts_128, 2, false, true)
DECODE(decode_experts_256, 4, false, true)
#endif
