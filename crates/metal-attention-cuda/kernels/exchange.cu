// All-reduce and all-gather between ranks, for the kernels that are launched op by op. Inputs are this rank's terms of a vector, or its columns
// of rows; the result is the same on every rank, bit for bit. Blocks of these kernels wait for blocks of other ranks: a launch has no more blocks
// than run at once.
#include "exchange.cuh"

struct AllReduceArgs {
    Exchange exchange;
    const float* part; // [n] this rank's terms
    float* out;        // [n] the result
    u32 n;
    u32 add;           // 1: out += scale * sum; 0: out = scale * sum
    float scale;
    u32 exchanges_before; // exchanges of this step before this one
};
ASSERT_LAYOUT(AllReduceArgs);
__device__ __forceinline__ void finish(const AllReduceArgs& a, u32 i, float sum) {
    a.out[i] = a.add ? a.out[i] + a.scale * sum : a.scale * sum;
}
extern "C" __global__ void __launch_bounds__(256) all_reduce(const __grid_constant__ AllReduceArgs a) {
    wait_for_input();
    let_next_start();
    const Exchange& e = a.exchange;
    const u32 exchange_number = exchange_number_after(e, a.exchanges_before);
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (u32 i = first; i < a.n; i += step) send(e, exchange_number, i, a.part[i]);
    for (u32 i = first; i < a.n; i += step) finish(a, i, sum_of(e, exchange_number, i, a.part[i]));
}

// All-reduce of long vectors, in two phases (reduce-scatter, all-gather): each rank adds up one slice of the vector and sends the sums to the
// others. Each rank sends twice the vector, however many ranks there are. Values go in chunks, 16 bytes at a time; the chunks' tags are
// separate and are stored after all chunks of a block, behind a fence. A chunk is 16 values of each thread.
constexpr u32 SLICE_THREADS = 512, CHUNK = 16 * SLICE_THREADS;
// Blocks of a multiprocessor: one works while the other waits.
constexpr u32 SLICE_BLOCKS = 2;

struct Chunk {
    u32* tag;
    uint4* values; // CHUNK words of 4 bytes at largest
};
// Chunk `c` that rank `from` sends to rank `peer`, in the mailbox of `peer`: behind the words, [2][sending rank][phase][n_chunks] tags of 4 bytes,
// then as many chunks.
__device__ __forceinline__ Chunk chunk_of(const Exchange& e, u32 peer, u32 exchange_number, u32 from, u32 phase, u32 c) {
    u32* tags = (u32*)(e.mailboxes[peer] + (size_t)2 * e.n_ranks * e.n_words);
    const size_t at = (((exchange_number & 1) * e.n_ranks + from) * 2 + phase) * e.n_chunks + c;
    return {tags + at, (uint4*)(tags + (size_t)4 * e.n_ranks * e.n_chunks + at * CHUNK)};
}

// A thread's values of a chunk: four times four neighbouring ones.
struct Sixteen {
    float4 v[4];
};
__device__ __forceinline__ u32 place_in_chunk(int k) { return 4 * (k * SLICE_THREADS + threadIdx.x); }
// Loads the thread's values of the chunk that begins at `first`; zeros from `end` on.
__device__ __forceinline__ Sixteen load_values(const float* from, u32 first, u32 end) {
    Sixteen s;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const u32 i = first + place_in_chunk(k);
        s.v[k] = i < end ? *(const float4*)(from + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    return s;
}

// The form in which values are sent. EXACT: F32.
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
// F16, scaled by a power of two so that the largest of the thread's 16 values is just below F16's largest.
template <> struct Parcel<false> {
    uint4 pairs[2];
    float scale;
    __device__ __forceinline__ explicit Parcel(const Sixteen& s) {
        float largest = 0.0f;
#pragma unroll
        for (int k = 0; k < 4; k++) largest = fmaxf(fmaxf(fmaxf(largest, fabsf(s.v[k].x)), fmaxf(fabsf(s.v[k].y), fabsf(s.v[k].z))), fabsf(s.v[k].w));
        const int exponent = max((int)(__float_as_uint(largest) >> 23) - 127, -100);
        const float factor = __uint_as_float((u32)(127 + 14 - exponent) << 23);
        scale = __uint_as_float((u32)(127 - 14 + exponent) << 23);
        if (!isfinite(largest)) scale = NAN;
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

// Lets the other ranks read this block's chunks of a phase: stores their tags.
__device__ __forceinline__ void publish_chunks(const Exchange& e, u32 exchange_number, u32 phase, u32 n_chunks) {
    __syncthreads();
    const u32 n = (n_chunks - blockIdx.x + gridDim.x - 1) / gridDim.x * e.n_ranks;
    for (u32 i = threadIdx.x; i < n; i += SLICE_THREADS) {
        const u32 peer = i % e.n_ranks, c = blockIdx.x + i / e.n_ranks * gridDim.x;
        if (peer == e.rank) continue;
        // Release: the fence orders the chunks, which the whole block wrote before the barrier, before their tags.
        __threadfence_system();
        store_for_peer(chunk_of(e, peer, exchange_number, e.rank, phase, c).tag, tag_of(exchange_number));
    }
}
// Waits for chunk `c` from every other rank. The fence is the acquire of the chunk's values.
__device__ __forceinline__ void wait_for_chunk(const Exchange& e, u32 exchange_number, u32 phase, u32 c) {
    const u32 peer = threadIdx.x;
    if (peer < e.n_ranks && peer != e.rank) {
        const u32* tag = chunk_of(e, e.rank, exchange_number, peer, phase, c).tag;
        poll_until(e, [&] { return load_from_peer(tag) == tag_of(exchange_number); });
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
    const u32 exchange_number = exchange_number_after(e, a.exchanges_before);
    const u32 slice = (a.n / 4 + e.n_ranks - 1) / e.n_ranks * 4, n_chunks = (slice + CHUNK - 1) / CHUNK;
    for (u32 c = blockIdx.x; c < n_chunks; c += gridDim.x) {
        for (u32 peer = 0; peer < e.n_ranks; peer++) {
            if (peer == e.rank) continue;
            const Sixteen part = load_values(a.part, peer * slice + c * CHUNK, min(a.n, (peer + 1) * slice));
            Parcel<EXACT>(part).put(chunk_of(e, peer, exchange_number, e.rank, 0, c).values);
        }
    }
    publish_chunks(e, exchange_number, 0, n_chunks);
    for (u32 c = blockIdx.x; c < n_chunks; c += gridDim.x) {
        const u32 first = e.rank * slice + c * CHUNK, end = min(a.n, (e.rank + 1) * slice);
        Sixteen own = load_values(a.part, first, end), sums = {};
        wait_for_chunk(e, exchange_number, 0, c);
        for (u32 peer = 0; peer < e.n_ranks; peer++) {
            const Sixteen part = peer == e.rank ? own : Parcel<EXACT>(chunk_of(e, e.rank, exchange_number, peer, 0, c).values).values();
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float4& sum = sums.v[k];
                sum.x += part.v[k].x, sum.y += part.v[k].y, sum.z += part.v[k].z, sum.w += part.v[k].w;
            }
        }
        const Parcel<EXACT> sent(sums);
        for (u32 peer = 0; peer < e.n_ranks; peer++)
            if (peer != e.rank) sent.put(chunk_of(e, peer, exchange_number, e.rank, 1, c).values);
        // The rounded values, as the other ranks receive them.
        finish(a, first, end, sent.values());
    }
    publish_chunks(e, exchange_number, 1, n_chunks);
    for (u32 c = blockIdx.x; c < n_chunks; c += gridDim.x) {
        wait_for_chunk(e, exchange_number, 1, c);
        for (u32 peer = 0; peer < e.n_ranks; peer++) {
            if (peer == e.rank) continue;
            const Sixteen sums = Parcel<EXACT>(chunk_of(e, e.rank, exchange_number, peer, 1, c).values).values();
            finish(a, peer * slice + c * CHUNK, min(a.n, (peer + 1) * slice), sums);
        }
    }
}
extern "C" __global__ void __launch_bounds__(SLICE_THREADS, SLICE_BLOCKS) sum_slices_exactly(const __grid_constant__ AllReduceArgs a) { reduce_by_slices<true>(a); }
extern "C" __global__ void __launch_bounds__(SLICE_THREADS, SLICE_BLOCKS) sum_slices(const __grid_constant__ AllReduceArgs a) { reduce_by_slices<false>(a); }

struct AllGatherArgs {
    Exchange exchange;
    float* rows;                    // [n_rows][stride], of which this rank has its columns
    u32 n_rows, stride;
    u32 first_columns[MAX_RANKS + 1]; // of each rank
    u32 exchanges_before;             // exchanges of this step before this one
};
ASSERT_LAYOUT(AllGatherArgs);
extern "C" __global__ void __launch_bounds__(256) all_gather(const __grid_constant__ AllGatherArgs a) {
    wait_for_input();
    let_next_start();
    const Exchange& e = a.exchange;
    const u32 exchange_number = exchange_number_after(e, a.exchanges_before);
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    const u32 begin = a.first_columns[e.rank], width = a.first_columns[e.rank + 1] - begin;
    for (u32 i = first; i < a.n_rows * width; i += step) {
        send(e, exchange_number, i, a.rows[(size_t)(i / width) * a.stride + begin + i % width]);
    }
    for (u32 peer = 0; peer < e.n_ranks; peer++) {
        if (peer == e.rank) continue;
        const u32 begin = a.first_columns[peer], width = a.first_columns[peer + 1] - begin;
        for (u32 i = first; i < a.n_rows * width; i += step) {
            a.rows[(size_t)(i / width) * a.stride + begin + i % width] = receive(e, exchange_number, peer, i);
        }
    }
}

struct CountExchangesArgs {
    u32* exchanges_done;
    u32 n; // exchanges of this step
    u32 unused;
};
ASSERT_LAYOUT(CountExchangesArgs);
extern "C" __global__ void count_exchanges(const __grid_constant__ CountExchangesArgs a) {
    wait_for_input();
    let_next_start();
    if (threadIdx.x == 0) *a.exchanges_done += a.n;
}
