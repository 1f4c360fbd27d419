// What cards that share a model tell each other, over peer memory, a word at a time.
// Each card has a mailbox, [2][card][n_words] words of a value and a tag, which says which exchange it is of: a word is its own
// flag. A card writes its values to all others' mailboxes and reads its own one until the words have come. Sums are made in the order
// of the cards, so that all cards have the same bits. Exchanges use the halves of mailboxes by turns: who is at one has ended the
// one before, for which all others had begun it, and so ended the one before that, whose words are overwritten now. Blocks send
// all that they have before they wait, and all of an exchange run at once, on every card. Behind the words lie chunks, for what is too
// much for a word each.
#pragma once
#include "common.cuh"

constexpr int MAX_CARDS = 8;
// Looks at a word, some 10 seconds, after which the others are given up.
constexpr u32 MOST_LOOKS = 1 << 24;

// As `ExchangeArgs` of src/args/exchange.rs has it.
struct Exchange {
    u64_t* mailboxes[MAX_CARDS];
    u32* before;       // exchanges of the steps before
    u32* ended;        // of the host: whether an exchange was given up, by whomever
    u32 rank, n_cards;
    u32 n_words;       // from each card to each, twice an exchange
    u32 n_chunks;      // the same of chunks; a multiple of 4
};

// Exchanges before one that comes after `of_step` others of its step.
__device__ __forceinline__ u32 number_of(const Exchange& e, u32 of_step) { return load_from_peer(e.before) + of_step; }
__device__ __forceinline__ u32 tag_of(u32 n_exchanges) { return n_exchanges % 0xffffffffu + 1; }
// Where words from card `from` lie in a mailbox.
__device__ __forceinline__ size_t place_of(const Exchange& e, u32 n_exchanges, u32 from) {
    return (size_t)((n_exchanges & 1) * e.n_cards + from) * e.n_words;
}
__device__ __forceinline__ void send(const Exchange& e, u32 n_exchanges, u32 i, float v) {
    const u64_t word = (u64_t)tag_of(n_exchanges) << 32 | __float_as_uint(v);
    for (u32 card = 0; card < e.n_cards; card++)
        if (card != e.rank) store_for_peer(e.mailboxes[card] + place_of(e, n_exchanges, e.rank) + i, word);
}
// Looks until `is_there`, or until the step is given up, by whomever; what comes of it counts for nothing then.
template <class Look> __device__ __forceinline__ void look_until(const Exchange& e, Look is_there) {
    for (u32 looks = 1; !is_there(); looks++) {
        if (looks % 256 == 0 && load_from_peer(e.ended)) return;
        if (looks == MOST_LOOKS) return store_for_peer(e.ended, 1);
        spin_pause();
    }
}
// The value that card `from` sends.
__device__ __forceinline__ float receive(const Exchange& e, u32 n_exchanges, u32 from, u32 i) {
    const u64_t* p = e.mailboxes[e.rank] + place_of(e, n_exchanges, from) + i;
    u64_t word = 0;
    look_until(e, [&] {
        word = load_from_peer(p);
        return (u32)(word >> 32) == tag_of(n_exchanges);
    });
    return __uint_as_float((u32)word);
}
// Of what all cards sent at place i, in their order; `own` is this one's part.
__device__ __forceinline__ float sum_of(const Exchange& e, u32 n_exchanges, u32 i, float own) {
    float sum = 0.0f;
    for (u32 card = 0; card < e.n_cards; card++) sum += card == e.rank ? own : receive(e, n_exchanges, card, i);
    return sum;
}
// The same, once it is sent.
__device__ __forceinline__ float exchanged_sum(const Exchange& e, u32 n_exchanges, u32 i, float own) {
    send(e, n_exchanges, i, own);
    return sum_of(e, n_exchanges, i, own);
}
