// What cards that share a model tell each other, over peer memory: sums of their parts of a vector, and parts of rows put together.
// Each card has a mailbox, [2][card][capacity] words of a value and a tag, which says which exchange it is of: a word is its own
// flag. A card writes its values to all others' mailboxes and reads its own one until the words have come. Sums are made in the order
// of the cards, so that all cards have the same bits. Exchanges use the halves of mailboxes by turns: who is at one has ended the
// one before, for which all others had begun it, and so ended the one before that, whose words are overwritten now. Block b waits for
// the blocks b of the others alone.
#include "common.cuh"

constexpr int MAX_CARDS = 8;
// Looks at a word, some 10 seconds, after which the others are given up.
constexpr u32 MOST_LOOKS = 1 << 24;

// As `ExchangeArgs` of src/args/exchange.rs has it.
struct Exchange {
    u64_t* mailboxes[MAX_CARDS];
    u32* state; // exchanges so far, and blocks that are done with this one
    u32* ended; // of the host: whether an exchange was given up, by whomever
    u32 rank, n_cards, capacity, unused;
};

__device__ __forceinline__ u32 tag_of(u32 n_exchanges) { return n_exchanges % 0xffffffffu + 1; }
// Where words from card `from` lie in a mailbox.
__device__ __forceinline__ size_t place_of(const Exchange& e, u32 n_exchanges, u32 from) {
    return (size_t)((n_exchanges & 1) * e.n_cards + from) * e.capacity;
}
__device__ __forceinline__ void send_to(const Exchange& e, u32 card, u32 n_exchanges, u32 i, float v) {
    const u64_t word = (u64_t)tag_of(n_exchanges) << 32 | __float_as_uint(v);
    store_for_peer(e.mailboxes[card] + place_of(e, n_exchanges, e.rank) + i, word);
}
__device__ __forceinline__ void send(const Exchange& e, u32 n_exchanges, u32 i, float v) {
    for (u32 card = 0; card < e.n_cards; card++)
        if (card != e.rank) send_to(e, card, n_exchanges, i, v);
}
// The value that card `from` sends. Where it does not come the step is given up, and what comes of it counts for nothing.
__device__ __forceinline__ float receive(const Exchange& e, u32 n_exchanges, u32 from, u32 i) {
    const u64_t* p = e.mailboxes[e.rank] + place_of(e, n_exchanges, from) + i;
    u64_t word = load_from_peer(p);
    for (u32 looks = 1; (u32)(word >> 32) != tag_of(n_exchanges); looks++) {
        if (looks % 256 == 0 && load_from_peer(e.ended)) break;
        if (looks == MOST_LOOKS) {
            store_for_peer(e.ended, 1);
            break;
        }
        spin_pause();
        word = load_from_peer(p);
    }
    return __uint_as_float((u32)word);
}
// The last block counts the exchange; nobody reads that number any more.
__device__ __forceinline__ void end_exchange(const Exchange& e, u32 n_exchanges) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(e.state + 1, 1) != gridDim.x - 1) return;
    e.state[1] = 0;
    e.state[0] = n_exchanges + 1;
}

struct AllReduceArgs {
    Exchange exchange;
    const float* part; // [n]
    float* out;        // [n]
    u32 n;
    u32 add;           // whether the sum is added to what lies there
    float scale;
    u32 unused;
};
// Of what all cards sent at place i, in their order; `own` is this one's part.
__device__ __forceinline__ float sum_of(const Exchange& e, u32 n_exchanges, u32 i, float own) {
    float sum = 0.0f;
    for (u32 card = 0; card < e.n_cards; card++) sum += card == e.rank ? own : receive(e, n_exchanges, card, i);
    return sum;
}
__device__ __forceinline__ void finish(const AllReduceArgs& a, u32 i, float sum) {
    a.out[i] = a.add ? a.out[i] + a.scale * sum : a.scale * sum;
}
extern "C" __global__ void __launch_bounds__(256) all_reduce(const __grid_constant__ AllReduceArgs a) {
    wait_for_input();
    let_next_start();
    const Exchange& e = a.exchange;
    const u32 n_exchanges = load_from_peer(e.state);
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (u32 i = first; i < a.n; i += step) send(e, n_exchanges, i, a.part[i]);
    for (u32 i = first; i < a.n; i += step) finish(a, i, sum_of(e, n_exchanges, i, a.part[i]));
    end_exchange(e, n_exchanges);
}

// The same in two steps, for many values: each card sums a slice of them, and tells the others the sums, which come behind the parts
// in mailboxes. Each sends twice the vector, however many there are.
extern "C" __global__ void __launch_bounds__(256) all_reduce_slices(const __grid_constant__ AllReduceArgs a) {
    wait_for_input();
    let_next_start();
    const Exchange& e = a.exchange;
    const u32 n_exchanges = load_from_peer(e.state);
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    const u32 slice = (a.n + e.n_cards - 1) / e.n_cards;
    for (u32 i = first; i < slice; i += step)
        for (u32 card = 0; card < e.n_cards; card++)
            if (card != e.rank && card * slice + i < a.n) send_to(e, card, n_exchanges, i, a.part[card * slice + i]);
    for (u32 i = first, at = e.rank * slice + first; i < slice && at < a.n; i += step, at += step) {
        const float sum = sum_of(e, n_exchanges, i, a.part[at]);
        send(e, n_exchanges, slice + i, sum);
        finish(a, at, sum);
    }
    for (u32 i = first; i < slice; i += step)
        for (u32 card = 0; card < e.n_cards; card++)
            if (card != e.rank && card * slice + i < a.n) finish(a, card * slice + i, receive(e, n_exchanges, card, slice + i));
    end_exchange(e, n_exchanges);
}

struct AllGatherArgs {
    Exchange exchange;
    float* rows;                    // [n_rows][stride], of which this card has its columns
    u32 n_rows, stride;
    u32 first_columns[MAX_CARDS + 1]; // of each card
    u32 unused;
};
extern "C" __global__ void __launch_bounds__(256) all_gather(const __grid_constant__ AllGatherArgs a) {
    wait_for_input();
    let_next_start();
    const Exchange& e = a.exchange;
    const u32 n_exchanges = load_from_peer(e.state);
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    const u32 begin = a.first_columns[e.rank], width = a.first_columns[e.rank + 1] - begin;
    for (u32 i = first; i < a.n_rows * width; i += step) {
        send(e, n_exchanges, i, a.rows[(size_t)(i / width) * a.stride + begin + i % width]);
    }
    for (u32 card = 0; card < e.n_cards; card++) {
        if (card == e.rank) continue;
        const u32 begin = a.first_columns[card], width = a.first_columns[card + 1] - begin;
        for (u32 i = first; i < a.n_rows * width; i += step) {
            a.rows[(size_t)(i / width) * a.stride + begin + i % width] = receive(e, n_exchanges, card, i);
        }
    }
    end_exchange(e, n_exchanges);
}
