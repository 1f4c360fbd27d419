// The K highest logits of each row, sorted. Logits are compared by keys of 8 bytes (`argmax_key` of argmax.cuh: a number that rises
// with the logit above one that falls with the id); all keys of a row differ, and key 0 is no logit.
#include "args_layout.cuh"
#include "argmax.cuh"

// Logits that are found, and threads of a block.
constexpr int K = 128, THREADS = 256;
// Logits of a thread, and the most keys that are sorted.
constexpr int ITEMS = 16, LIST = 512;
// Keys of other blocks that a thread loads at a time.
constexpr u32 AHEAD = 16;

struct TopKArgs {
    const float* logits; // [n_rows][n_vocab]
    u64_t* lists;        // keys selected by each block, [n_rows][gridDim.x][THREADS]
    u32* tickets;        // counters [n_rows], zero between launches
    u64_t* best;         // keys [n_rows][K], the highest first; zeros if fewer logits are numbers
    u32 n_vocab;         // logits of a row
    u32 chunk;           // logits of a block, at most THREADS * ITEMS
};
ASSERT_LAYOUT(TopKArgs);

// The keys that a block has selected, in shared memory.
struct Selected {
    u64_t keys[LIST];
    u32 n;
    u32 sum;
};

// A number above 0 that at least K of all threads' numbers reach, and few more; 1 if fewer than K are above 0.
__device__ __forceinline__ u32 floor_of(u32 own_key) {
    u32 floor = 0;
    for (int bit = 31; bit >= 10; bit--) {
        const u32 higher = floor | 1u << bit;
        const int n = __syncthreads_count(own_key >= higher);
        if (n >= K) floor = higher;
        if (n == K) break;
    }
    return floor > 0 ? floor : 1;
}

// The sum of v over the threads of a block.
__device__ __forceinline__ u32 sum_of_block(u32 v, Selected& s) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    if (threadIdx.x == 0) s.sum = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0) atomicAdd(&s.sum, v);
    __syncthreads();
    v = s.sum;
    __syncthreads();
    return v;
}

// Copies the K highest of all keys that `each` iterates over to `s`, and as few others as is quickly found, at most CAPACITY in
// all. The K-th highest of the threads' own highest keys is a floor that at least K keys reach. Only if more than CAPACITY keys
// reach it, the floor is raised bit by bit.
template <int CAPACITY, typename Each> __device__ __forceinline__ void select(const Each& each, Selected& s) {
    u32 highest = 0;
    each([&](u64_t key) { highest = max(highest, (u32)(key >> 32)); });
    u64_t floor = (u64_t)floor_of(highest) << 32;
    for (;;) {
        if (threadIdx.x == 0) s.n = 0;
        __syncthreads();
        each([&](u64_t key) {
            if (key < floor) return;
            const u32 at = atomicAdd(&s.n, 1u);
            if (at < CAPACITY) s.keys[at] = key;
        });
        __syncthreads();
        if (s.n <= CAPACITY) return;
        const u64_t reached = floor;
        floor = 0;
        for (int bit = 63; bit >= 0; bit--) {
            const u64_t higher = floor | 1ull << bit;
            if (higher > reached) {
                u32 n = 0;
                each([&](u64_t key) { n += key >= higher; });
                n = sum_of_block(n, s);
                if (n < K) continue;
                if (n <= CAPACITY) bit = 0;
            }
            floor = higher;
        }
        __syncthreads();
    }
}

// Stores the K highest keys in order: a key's place is the number of higher ones.
__device__ __forceinline__ void write_in_order(const Selected& s, u64_t* best) {
    const u32 n = s.n;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        const u64_t own_key = s.keys[i];
        u32 place = 0;
        for (u32 j = 0; j < n; j++) place += s.keys[j] > own_key;
        if (place < K) best[place] = own_key;
    }
    for (u32 i = n + threadIdx.x; i < K; i += THREADS) best[i] = 0;
}

// Each block selects from a part of a row; the last block of a row to finish selects from what all blocks have selected.
extern "C" __global__ void __launch_bounds__(THREADS, 4) top_k(const __grid_constant__ TopKArgs a) {
    __shared__ Selected s;
    __shared__ bool is_last;
    wait_for_input();
    let_next_start();
    const u32 row = blockIdx.y, tid = threadIdx.x, first = blockIdx.x * a.chunk;
    u64_t* best = a.best + (size_t)row * K;
    {
        const float* logits = a.logits + (size_t)row * a.n_vocab + first;
        const u32 n = min(a.chunk, a.n_vocab - min(first, a.n_vocab));
        float items[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; i++) items[i] = i * THREADS + tid < n ? logits[i * THREADS + tid] : NAN;
        select<THREADS>(
            [&](auto&& take) {
#pragma unroll
                for (int i = 0; i < ITEMS; i++) take(argmax_key(items[i], first + i * THREADS + tid));
            },
            s);
    }
    if (gridDim.x == 1) {
        write_in_order(s, best);
        return;
    }
    u64_t* lists = a.lists + (size_t)row * gridDim.x * THREADS;
    lists[blockIdx.x * THREADS + tid] = tid < s.n ? s.keys[tid] : 0;
    __threadfence();
    __syncthreads();
    if (tid == 0) {
        is_last = atomicAdd(a.tickets + row, 1) == gridDim.x - 1;
        if (is_last) a.tickets[row] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    select<LIST>(
        [&](auto&& take) {
            for (u32 first = 0; first < gridDim.x; first += AHEAD) {
                u64_t keys[AHEAD];
#pragma unroll
                for (u32 i = 0; i < AHEAD; i++) keys[i] = first + i < gridDim.x ? __ldcg(lists + (first + i) * THREADS + tid) : 0;
#pragma unroll
                for (u32 i = 0; i < AHEAD; i++) take(keys[i]);
            }
        },
        s);
    write_in_order(s, best);
}
