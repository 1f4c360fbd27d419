// Sums over cards that share a model, and parts of rows put together.
#include "exchange.cuh"

struct AllReduceArgs {
    Exchange exchange;
    const float* part; // [n]
    float* out;        // [n]
    u32 n;
    u32 add;           // whether the sum is added to what lies there
    float scale;
    u32 of_step;       // exchanges of this step before this one
};
__device__ __forceinline__ void finish(const AllReduceArgs& a, u32 i, float sum) {
    a.out[i] = a.add ? a.out[i] + a.scale * sum : a.scale * sum;
}
extern "C" __global__ void __launch_bounds__(256) all_reduce(const __grid_constant__ AllReduceArgs a) {
    wait_for_input();
    let_next_start();
    const Exchange& e = a.exchange;
    const u32 n_exchanges = number_of(e, a.of_step);
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (u32 i = first; i < a.n; i += step) send(e, n_exchanges, i, a.part[i]);
    for (u32 i = first; i < a.n; i += step) finish(a, i, sum_of(e, n_exchanges, i, a.part[i]));
}

// The same for many values, in two phases: each card sums a slice of them, and tells the others the sums. Each sends twice the vector,
// however many there are. Values go in chunks, 16 bytes at a time; the tags of chunks lie apart and follow when a block has sent all of its
// own. A chunk is 16 values of each thread.
constexpr u32 SLICE_THREADS = 512, CHUNK = 16 * SLICE_THREADS;
// Blocks of a multiprocessor: one has something to do while another waits.
constexpr u32 SLICE_BLOCKS = 2;

struct Chunk {
    u32* tag;
    uint4* values; // CHUNK words
};
// Chunk `c` from card `from`, in the mailbox of `card`: [2][card][phase][n_chunks] tags, and as many chunks.
__device__ __forceinline__ Chunk chunk_of(const Exchange& e, u32 card, u32 n_exchanges, u32 from, u32 phase, u32 c) {
    u32* tags = (u32*)(e.mailboxes[card] + (size_t)2 * e.n_cards * e.n_words);
    const size_t at = (((n_exchanges & 1) * e.n_cards + from) * 2 + phase) * e.n_chunks + c;
    return {tags + at, (uint4*)(tags + (size_t)4 * e.n_cards * e.n_chunks + at * CHUNK)};
}

// A thread's values of a chunk: four times four that lie together.
struct Sixteen {
    float4 v[4];
};
__device__ __forceinline__ u32 place_in_chunk(int k) { return 4 * (k * SLICE_THREADS + threadIdx.x); }
// Those from `first` on, as far as they come before `end`.
__device__ __forceinline__ Sixteen load_values(const float* from, u32 first, u32 end) {
    Sixteen s;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const u32 i = first + place_in_chunk(k);
        s.v[k] = i < end ? *(const float4*)(from + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    return s;
}

// How values go to others. As they are:
template <bool EXACT> struct Parcel {
    Sixteen s;
    __device__ __forceinline__ explicit Parcel(const Sixteen& values) : s(values) {}
    __device__ __forceinline__ explicit Parcel(const uint4* from) {
#pragma unroll
        for (int k = 0; k < 4; k++) s.v[k] = __ldcg((const float4*)from + k * SLICE_THREADS + threadIdx.x);
    }
    __device__ __forceinline__ void put(uint4* to) const {
#pragma unroll
        for (int k = 0; k < 4; k++) ((float4*)to)[k * SLICE_THREADS + threadIdx.x] = s.v[k];
    }
    __device__ __forceinline__ Sixteen values() const { return s; }
};
// In F16, with a power of two by which the largest of them is as large as F16 allows.
template <> struct Parcel<false> {
    uint4 pairs[2];
    float scale;
    __device__ __forceinline__ explicit Parcel(const Sixteen& s) {
        float most = 0.0f;
#pragma unroll
        for (int k = 0; k < 4; k++) most = fmaxf(fmaxf(fmaxf(most, fabsf(s.v[k].x)), fmaxf(fabsf(s.v[k].y), fabsf(s.v[k].z))), fabsf(s.v[k].w));
        const int exponent = max((int)(__float_as_uint(most) >> 23) - 127, -100);
        const float factor = __uint_as_float((u32)(127 + 14 - exponent) << 23);
        scale = __uint_as_float((u32)(127 - 14 + exponent) << 23);
        if (!isfinite(most)) scale = NAN;
        u32 p[8];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            p[2 * k] = bits(__floats2half2_rn(s.v[k].x * factor, s.v[k].y * factor));
            p[2 * k + 1] = bits(__floats2half2_rn(s.v[k].z * factor, s.v[k].w * factor));
        }
        pairs[0] = make_uint4(p[0], p[1], p[2], p[3]), pairs[1] = make_uint4(p[4], p[5], p[6], p[7]);
    }
    __device__ __forceinline__ explicit Parcel(const uint4* from) {
        pairs[0] = __ldcg(from + threadIdx.x), pairs[1] = __ldcg(from + SLICE_THREADS + threadIdx.x);
        scale = __ldcg((const float*)(from + 2 * SLICE_THREADS) + threadIdx.x);
    }
    __device__ __forceinline__ void put(uint4* to) const {
        to[threadIdx.x] = pairs[0], to[SLICE_THREADS + threadIdx.x] = pairs[1];
        ((float*)(to + 2 * SLICE_THREADS))[threadIdx.x] = scale;
    }
    __device__ __forceinline__ Sixteen values() const {
        const u32 p[8] = {pairs[0].x, pairs[0].y, pairs[0].z, pairs[0].w, pairs[1].x, pairs[1].y, pairs[1].z, pairs[1].w};
        Sixteen s;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float2 a = __half22float2(halves(p[2 * k])), b = __half22float2(halves(p[2 * k + 1]));
            s.v[k] = make_float4(scale * a.x, scale * a.y, scale * b.x, scale * b.y);
        }
        return s;
    }
};

// The others may read this block's chunks of a phase.
__device__ __forceinline__ void tell(const Exchange& e, u32 n_exchanges, u32 phase, u32 n_chunks) {
    __syncthreads();
    const u32 n = (n_chunks - blockIdx.x + gridDim.x - 1) / gridDim.x * e.n_cards;
    for (u32 i = threadIdx.x; i < n; i += SLICE_THREADS) {
        const u32 card = i % e.n_cards, c = blockIdx.x + i / e.n_cards * gridDim.x;
        if (card == e.rank) continue;
        // What the whole block wrote, which met, comes before the tag.
        __threadfence_system();
        store_for_peer(chunk_of(e, card, n_exchanges, e.rank, phase, c).tag, tag_of(n_exchanges));
    }
}
// Waits for a chunk from every other card.
__device__ __forceinline__ void wait_for_chunk(const Exchange& e, u32 n_exchanges, u32 phase, u32 c) {
    const u32 card = threadIdx.x;
    if (card < e.n_cards && card != e.rank) {
        const u32* tag = chunk_of(e, e.rank, n_exchanges, card, phase, c).tag;
        look_until(e, [&] { return load_from_peer(tag) == tag_of(n_exchanges); });
        __threadfence_system();
    }
    __syncthreads();
}
__device__ __forceinline__ void finish(const AllReduceArgs& a, u32 first, u32 end, const Sixteen& sums) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const u32 i = first + place_in_chunk(k);
        if (i >= end) continue;
        float4* out = (float4*)(a.out + i);
        float4 v = a.add ? *out : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        v.x += a.scale * sums.v[k].x, v.y += a.scale * sums.v[k].y, v.z += a.scale * sums.v[k].z, v.w += a.scale * sums.v[k].w;
        *out = v;
    }
}
template <bool EXACT> __device__ __forceinline__ void reduce_by_slices(const AllReduceArgs& a) {
    wait_for_input();
    let_next_start();
    const Exchange& e = a.exchange;
    const u32 n_exchanges = number_of(e, a.of_step);
    const u32 slice = (a.n / 4 + e.n_cards - 1) / e.n_cards * 4, n_chunks = (slice + CHUNK - 1) / CHUNK;
    for (u32 c = blockIdx.x; c < n_chunks; c += gridDim.x) {
        for (u32 card = 0; card < e.n_cards; card++) {
            if (card == e.rank) continue;
            const Sixteen part = load_values(a.part, card * slice + c * CHUNK, min(a.n, (card + 1) * slice));
            Parcel<EXACT>(part).put(chunk_of(e, card, n_exchanges, e.rank, 0, c).values);
        }
    }
    tell(e, n_exchanges, 0, n_chunks);
    for (u32 c = blockIdx.x; c < n_chunks; c += gridDim.x) {
        const u32 first = e.rank * slice + c * CHUNK, end = min(a.n, (e.rank + 1) * slice);
        Sixteen own = load_values(a.part, first, end), sums = {};
        wait_for_chunk(e, n_exchanges, 0, c);
        for (u32 card = 0; card < e.n_cards; card++) {
            const Sixteen part = card == e.rank ? own : Parcel<EXACT>(chunk_of(e, e.rank, n_exchanges, card, 0, c).values).values();
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float4& sum = sums.v[k];
                sum.x += part.v[k].x, sum.y += part.v[k].y, sum.z += part.v[k].z, sum.w += part.v[k].w;
            }
        }
        const Parcel<EXACT> told(sums);
        for (u32 card = 0; card < e.n_cards; card++)
            if (card != e.rank) told.put(chunk_of(e, card, n_exchanges, e.rank, 1, c).values);
        // As the others have them.
        finish(a, first, end, told.values());
    }
    tell(e, n_exchanges, 1, n_chunks);
    for (u32 c = blockIdx.x; c < n_chunks; c += gridDim.x) {
        wait_for_chunk(e, n_exchanges, 1, c);
        for (u32 card = 0; card < e.n_cards; card++) {
            if (card == e.rank) continue;
            const Sixteen sums = Parcel<EXACT>(chunk_of(e, e.rank, n_exchanges, card, 1, c).values).values();
            finish(a, card * slice + c * CHUNK, min(a.n, (card + 1) * slice), sums);
        }
    }
}
extern "C" __global__ void __launch_bounds__(SLICE_THREADS, SLICE_BLOCKS) sum_slices_exactly(const __grid_constant__ AllReduceArgs a) { reduce_by_slices<true>(a); }
extern "C" __global__ void __launch_bounds__(SLICE_THREADS, SLICE_BLOCKS) sum_slices(const __grid_constant__ AllReduceArgs a) { reduce_by_slices<false>(a); }

struct AllGatherArgs {
    Exchange exchange;
    float* rows;                    // [n_rows][stride], of which this card has its columns
    u32 n_rows, stride;
    u32 first_columns[MAX_CARDS + 1]; // of each card
    u32 of_step;                      // exchanges of this step before this one
};
extern "C" __global__ void __launch_bounds__(256) all_gather(const __grid_constant__ AllGatherArgs a) {
    wait_for_input();
    let_next_start();
    const Exchange& e = a.exchange;
    const u32 n_exchanges = number_of(e, a.of_step);
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
}

struct CountExchangesArgs {
    u32* before;
    u32 n; // exchanges of this step
    u32 unused;
};
extern "C" __global__ void count_exchanges(const __grid_constant__ CountExchangesArgs a) {
    wait_for_input();
    let_next_start();
    if (threadIdx.x == 0) *a.before += a.n;
}
