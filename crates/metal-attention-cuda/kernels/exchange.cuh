// Exchange of values between ranks (the GPUs that share a model by tensor parallelism), through peer memory, one tagged word a
// value, in the manner of NCCL's LL ("low latency") protocol.
//
// Each rank has a mailbox in its own memory: [2][sending rank][n_words] words of 8 bytes, a 4-byte value and a 4-byte tag. A rank stores its
// values into the mailboxes of all others and polls its own until the tags are those of the exchange. Sums are added in the order of the
// ranks, so that all ranks have the same bits. Behind the words lie chunks (exchange.cu), for vectors that are too long for a word a
// value.
//
// Exchanges are numbered from the first one of a pass on; exchange n uses half n % 2 of the mailboxes and has tag n % (2^32 - 1) + 1, which is
// never 0, the tag of memory that was never written.
//
// Write-after-read. Exchange n + 2 overwrites the words of exchange n. A rank that begins n + 2 has received what all others sent for n + 1, and
// a rank sends for n + 1 after it has received everything of n. This needs that a rank sends all that it has before it waits, and that all
// blocks that take part run at the same time on every rank. The persistent decode kernel exchanges row by row; its case is Lemma 16 of
// docs/design/decode-kernel.md.
//
// Memory ordering. Words are stored and loaded with relaxed accesses of system scope (`store_for_peer`, `load_from_peer`), and value and tag
// are one access.
#pragma once
#include "common.cuh"

constexpr int MAX_RANKS = 8;
// Polls of one word before the exchange is aborted; some 10 seconds.
constexpr u32 MAX_POLLS = 1 << 24;

struct Exchange {
    u64_t* mailboxes[MAX_RANKS]; // of all ranks, as this one addresses them
    u32* exchanges_done;         // exchanges of all earlier steps
    u32* abort;                  // host memory that all ranks see: 1 after any of them has aborted an exchange
    u32 rank;                    // this rank
    u32 n_ranks;                 // 2 to MAX_RANKS
    u32 n_words;                 // words from each rank to each, in each half
    u32 n_chunks;                // chunks from each rank to each, in each half and phase; a multiple of 4
};
ASSERT_LAYOUT(Exchange);

// The number of an exchange that comes after `exchanges_before` others of its step.
__device__ __forceinline__ u32 exchange_number_after(const Exchange& e, u32 exchanges_before) {
    return load_from_peer(e.exchanges_done) + exchanges_before;
}
__device__ __forceinline__ u32 tag_of(u32 exchange_number) { return exchange_number % 0xffffffffu + 1; }
// Index of the first word from rank `from` in a mailbox.
__device__ __forceinline__ size_t mailbox_offset(const Exchange& e, u32 exchange_number, u32 from) {
    return (size_t)((exchange_number & 1) * e.n_ranks + from) * e.n_words;
}
// Sends a value to all other ranks, as their word i.
__device__ __forceinline__ void send(const Exchange& e, u32 exchange_number, u32 i, float v) {
    const u64_t word = (u64_t)tag_of(exchange_number) << 32 | __float_as_uint(v);
    for (u32 peer = 0; peer < e.n_ranks; peer++)
        if (peer != e.rank) store_for_peer(e.mailboxes[peer] + mailbox_offset(e, exchange_number, e.rank) + i, word);
}
// Polls until `is_complete`, or until any rank aborts the step; the values of an aborted step are not used.
template <class Poll> __device__ __forceinline__ void poll_until(const Exchange& e, Poll is_complete) {
    for (u32 polls = 1; !is_complete(); polls++) {
        if (polls % 256 == 0 && load_from_peer(e.abort)) return;
        if (polls == MAX_POLLS) return store_for_peer(e.abort, 1);
        spin_pause();
    }
}
// Waits for the value that rank `from` has sent as word i.
__device__ __forceinline__ float receive(const Exchange& e, u32 exchange_number, u32 from, u32 i) {
    const u64_t* p = e.mailboxes[e.rank] + mailbox_offset(e, exchange_number, from) + i;
    u64_t word = 0;
    poll_until(e, [&] {
        word = load_from_peer(p);
        return (u32)(word >> 32) == tag_of(exchange_number);
    });
    return __uint_as_float((u32)word);
}
// The sum of word i of all ranks, added in their order; `own` is this rank's value. Waits for the others.
__device__ __forceinline__ float sum_of(const Exchange& e, u32 exchange_number, u32 i, float own) {
    float sum = 0.0f;
    for (u32 peer = 0; peer < e.n_ranks; peer++) sum += peer == e.rank ? own : receive(e, exchange_number, peer, i);
    return sum;
}
// Sends this rank's value and returns the sum.
__device__ __forceinline__ float exchanged_sum(const Exchange& e, u32 exchange_number, u32 i, float own) {
    send(e, exchange_number, i, own);
    return sum_of(e, exchange_number, i, own);
}
