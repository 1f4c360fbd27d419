// The end of a token in the persistent decode kernel: argmax of the logits over all blocks, and over all ranks that share the model. It is also the
// barrier between two tokens, and orders the KV cache's new rows before the next token's reads of them (Lemma 8).
#pragma once
#include "argmax.cuh"
#include "decode_rows.cuh"

// The largest of all blocks' best logits; waits for those of all blocks. All lanes of the warp call it. The words are not pairs of values, but
// argmax keys (argmax.cuh). Of a key's lower 32 bits, 2^32 - 1 - row, the upper 12 are ones for every row below 2^20; they are left out to make
// room for the tag:
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
// The largest of all ranks' words; waits for those of all ranks. `own`: this rank's word; `sends`: whether this block sends it to the other ranks,
// which one block of the rank does. The two halves of the word are values of a mailbox that lie behind those of rows, because some blocks
// still read them while others exchange rows of the next token (Lemma 16).
__device__ __forceinline__ u64_t highest_of_ranks(const Exchange& e, u32 exchange_number, u64_t own, bool sends, int lane) {
    own &= ~(u64_t)TAG_MASK;
    const u32 at = e.n_words - 2;
    if (sends && lane < 2) send(e, exchange_number, at + lane, __uint_as_float(lane == 0 ? (u32)(own >> 32) : (u32)own));
    u64_t best = own;
    if (lane < (int)e.n_ranks && lane != (int)e.rank) {
        const u32 high = __float_as_uint(receive(e, exchange_number, lane, at)), low = __float_as_uint(receive(e, exchange_number, lane, at + 1));
        best = (u64_t)high << 32 | low;
    }
    return highest_of_lanes(best > own ? best : own);
}
// The row of such a word: bits 12 to 31 are 2^20 - 1 - row. Row 0 if all logits are NaN.
__device__ __forceinline__ u32 row_of_best_word(u64_t word) { return word >> 32 == 0 ? 0 : 0xfffffu - ((u32)word >> 12); }

// Argmax, by warp 0 of each block: publishes the block's best logit, waits for those of all blocks, and sets `token`, `n_tokens_done` and
// `first_exchange_number` to those of the next token (Lemma 8). No other warp reads these three between the consumer barrier before the call and the
// one after it. After the launch's last token only block 0 waits. Returns whether the block has waited, and set them.
//   best_of_warps   argmax keys of the block's consumer warps
//   tag             of the next token's first layer
//   next_pos        position of the next token
//   is_last         whether the token is the launch's last one
template <bool ON_RANKS>
__device__ __forceinline__ bool choose_token(const DecodeArgs& a, const RankShare* ranks, const u64_t* best_of_warps, Token& token,
                                             u32& n_tokens_done, u32& first_exchange_number, u32 tag, u32 next_pos, bool is_last, int lane) {
    u64_t best = highest_of_lanes(best_of_warps[lane % CONSUMER_WARPS]);
    // Release: orders the KV rows that the block has written before its word.
    __threadfence();
    // Two sets of words alternate from token to token. A block that has no rows of the next token's ops waits for no other block during
    // that token: with one set it could overwrite its word before slower blocks have read it.
    u64_t* const all = a.best_words + (a.first_best_place + n_tokens_done) % 2 * gridDim.x;
    // The key's upper 32 bits, its lowest 20 bits, and the tag.
    if (lane == 0) store_exchanged(all + blockIdx.x, (best & 0xffffffff00000000ull) | (u32)best << 12 | tag);
    if (is_last && blockIdx.x != 0) return false;
    u64_t highest = highest_of_blocks(all, tag, lane);
    if constexpr (ON_RANKS) // the token's last exchange
        highest = highest_of_ranks(ranks->exchange, first_exchange_number + exchanges_per_token(a) - 1, highest, blockIdx.x == 0, lane);
    const u32 id = row_of_best_word(highest);
    // Acquire: orders the blocks' KV rows before this block's reads of them.
    __threadfence();
    if (lane == 0) {
        // Also where only logits are wanted; then no host reads the id.
        if (blockIdx.x == 0) publish_id(a.ids, /* row */ 0, a.first_step_number + n_tokens_done, id);
        token.id = id, token.pos = next_pos, token.position++, token.rope_row++, n_tokens_done++;
        if (is_last && a.stores_next_token) *a.token = token;
        if constexpr (ON_RANKS) {
            first_exchange_number += exchanges_per_token(a);
            // The first block has heard from all blocks of the rank, which therefore have read the old number.
            if (is_last) *ranks->exchange.exchanges_done = first_exchange_number;
        }
    }
    return true;
}
