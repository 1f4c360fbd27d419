// Recurrent scans: the state of a head, updated token by token. Shared by delta_rule.cu, mamba.cu, mamba2.cu, rwkv.cu (the
// kinds of recurrence) and recurrent.cu (convolution, norms).
//
// A micro-batch has runs, each the consecutive tokens of one sequence; kernels process all runs in parallel. A run consists of
// segments: each starts from the state in one slot and leaves the state after its last token in another one (possibly the
// same). States are F32, [slot][elements of the layer]; slot 0 is the state of a sequence without tokens: zeros, never written.
//
// A head's state is a matrix [value][key]: its columns, one for each value, are independent of each other. Each kernel has one
// block for some columns of a head and a run (`scan`), or one block for a whole head of a single decode token (`fused_decode`).
#pragma once
#include "common.cuh"

// The runs of a micro-batch.
struct Runs {
    const uint4* runs;     // [n_runs]: first token, tokens, first segment, segments
    const uint4* segments; // [n_segments]: first token, tokens, slot to read, slot to write
};
ASSERT_LAYOUT(Runs);

// The recurrent states of a layer.
struct States {
    float* states; // of the layer, [slot][stride]
    u32 stride;    // elements of a slot
    u32 first;     // the first element of a slot that the kernel uses
};
ASSERT_LAYOUT(States);
// The address of the state in a slot.
__device__ __forceinline__ float* slot_of(const States& s, u32 slot) { return s.states + (size_t)slot * s.stride + s.first; }

// The columns from `first` on of the rows of a buffer, one row for each token.
struct Rows {
    const float* rows; // [n_tokens][stride]
    u32 stride;        // elements of a row
    u32 first;         // the first element that is used
};
ASSERT_LAYOUT(Rows);
// The address of a token's columns.
__device__ __forceinline__ const float* row_of(const Rows& r, u32 token) { return r.rows + (size_t)token * r.stride + r.first; }

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// Elements i to i + 3 of an array of n elements, which need not be aligned; zeros past the end.
__device__ __forceinline__ float4 load_four(const float* from, u32 i, u32 n) {
    from += i;
    if (i + 4 <= n && (uintptr_t)from % 16 == 0) return *reinterpret_cast<const float4*>(from);
    return make_float4(i < n ? from[0] : 0.0f, i + 1 < n ? from[1] : 0.0f, i + 2 < n ? from[2] : 0.0f, i + 3 < n ? from[3] : 0.0f);
}
// Stores elements i to i + 3 of an array of n elements, which need not be aligned.
__device__ __forceinline__ void store_four(float* to, u32 i, u32 n, float4 v) {
    to += i;
    if (i + 4 <= n && (uintptr_t)to % 16 == 0) {
        *reinterpret_cast<float4*>(to) = v;
        return;
    }
    if (i < n) to[0] = v.x;
    if (i + 1 < n) to[1] = v.y;
    if (i + 2 < n) to[2] = v.z;
    if (i + 3 < n) to[3] = v.w;
}
// sum + a b
__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// The short convolution: each channel over its last n_tap tokens.
struct ConvolutionArgs {
    Runs runs;                        // of the micro-batch
    States states;                    // the last inputs, oldest first, [n_tap - 1][channels]
    Rows x;                           // channel c is element c / block * step + c % block of a row
    const float* taps;                // those of the oldest token first, [n_tap][channels]
    const float* bias;                // [channels], or null
    float* out;                       // [token][channels]
    u32 channels, n_tap, block, step; // sizes; block and step: see x
    u32 gated;                        // the input is the product of channels 0 and 2 of three, and the result is multiplied by channel 1 (LFM2);
                                      // else it goes through SiLU
    u32 unused;
};
ASSERT_LAYOUT(ConvolutionArgs);

// Norm, gate and bonus of each group (head) of a token's row: gate * (norm(x) * weight + bias + bonus).
enum Kind : u32 { NO_NORM = 0, RMS = 1, LAYER = 2 };
enum Gate : u32 { NO_GATE = 0, AS_IT_IS = 1, SILU_OF_GATE = 2, SIGMOID_OF_GATE = 3 };
struct GroupNormArgs {
    const float* x;            // [token][group][n]
    float* out;                // of the same shape, may be x
    const float* weight;       // [n], or [group][n] where `of_groups`
    const float* bias;         // the same, or null
    Rows gate;                 // [group][n]
    const float* r;            // RWKV-7's bonus, v sum(r k factor), of rows as x, or null
    const float* k;            // [token][group][n]
    const float* v;            // [token][group][n]
    const float* factor;       // [group][n]
    u32 n, n_group, of_groups; // elements of a group; groups; whether each group has its own weights
    u32 norm;                  // Kind
    u32 gate_kind;             // Gate
    float eps;                 // of the norm
};
ASSERT_LAYOUT(GroupNormArgs);
// The factor by which a gate multiplies.
__device__ __forceinline__ float factor_of(u32 gate_kind, float gate) {
    return gate_kind == AS_IT_IS ? gate : gate_kind == SILU_OF_GATE ? gate * sigmoid(gate) : sigmoid(gate);
}

// The channels of the convolution's output at which a head's parts begin: two vectors of `key_dim` (keys and queries, or B and
// C), one of `value_dim` (values, or x).
struct Begins {
    u32 first, second, values; // channels
};

// The arguments that every scan has.
struct Scan {
    Runs runs;                      // of the micro-batch
    States states;                  // of the layer's heads, [head][value][key], the transpose of the papers' matrices
    float* out;                     // [token][head][value]
    u32 n_head, key_dim, value_dim; // heads, and the size of their states
    u32 tile;                       // most tokens that are prepared at a time
};
ASSERT_LAYOUT(Scan);

// `scan`: warp specialisation with a ring of two tiles of tokens in shared memory. SCAN_WARPS warps scan: they hold some
// columns of a head's state in registers and go through the tokens of the current tile in order. The other warps prepare the
// next tile: all that does not depend on the state, computed once for the whole block.
//
// LANES threads share a column, or two (COLUMNS): thread l has the rows 4 l to 4 l + 3, 4 (l + LANES) to .., EACH rows in all.
// Neighbouring threads have the same rows of different columns, so that a read of shared memory serves half a warp at once, and
// not a quarter.
//
// A recurrence R defines LANES, EACH and COLUMNS; the vectors of `key_dim` numbers (VECTORS) and of one number for each of the
// block's columns (VALUES) that a token brings; and the unrolling of the token loop (UNROLLED). `R::prepare` writes these
// vectors. `R::step` updates the state with one token, and returns the result of the thread's own column (see `own`). The order
// of all sums is fixed, so that a token's result has the same bits at any place in a tile.
constexpr int SCAN_WARPS = 4;
// Threads that prepare one token.
constexpr int PREPARE_LANES = 16;

// SIDE_BY_SIDE: columns (or pairs of them) that neighbouring threads of a warp have. `number_of`: the index of a thread among
// those that share its columns.
template <int LANES> constexpr int SIDE_BY_SIDE = 32 / LANES;
template <int LANES> __device__ __forceinline__ int number_of(int lane) { return lane / SIDE_BY_SIDE<LANES>; }
// The first column of a thread, counted from the first one of its warp.
template <typename R> __device__ __forceinline__ int column_of(int lane) { return lane % SIDE_BY_SIDE<R::LANES> * R::COLUMNS; }

template <typename R> constexpr int columns_of_warp = 32 / R::LANES * R::COLUMNS;
template <typename R> constexpr int columns_of_block = SCAN_WARPS * columns_of_warp<R>;

// A prepared token in shared memory; vectors are zero past the end of a key.
template <typename R> struct __align__(16) Prepared {
    float vectors[R::VECTORS][R::LANES * R::EACH];
    float values[R::VALUES][columns_of_block<R>];
    float4 factors;
};
// Stores elements i to i + 3 of a vector of a prepared token.
template <typename R> __device__ __forceinline__ void store_vector(Prepared<R>& t, int vector, u32 i, float4 v) {
    *reinterpret_cast<float4*>(&t.vectors[vector][i]) = v;
}
// The part of a prepared token that one scanning thread reads.
template <typename R> struct Token {
    float vectors[R::VECTORS][R::EACH];
    float values[R::VALUES][R::COLUMNS];
    float4 factors;
};

// Loads the part of a prepared token that this thread reads.
template <typename R> __device__ __forceinline__ void load_token(Token<R>& t, const Prepared<R>& from, int lane, int warp) {
#pragma unroll
    for (int v = 0; v < R::VECTORS; v++)
#pragma unroll
        for (int e = 0; e < R::EACH; e += 4) {
            const float4 four = *reinterpret_cast<const float4*>(&from.vectors[v][4 * number_of<R::LANES>(lane) + R::LANES * e]);
            t.vectors[v][e] = four.x, t.vectors[v][e + 1] = four.y, t.vectors[v][e + 2] = four.z, t.vectors[v][e + 3] = four.w;
        }
#pragma unroll
    for (int v = 0; v < R::VALUES; v++) {
        const float* values = &from.values[v][warp * columns_of_warp<R> + column_of<R>(lane)];
        if constexpr (R::COLUMNS == 2) {
            const float2 two = *reinterpret_cast<const float2*>(values);
            t.values[v][0] = two.x, t.values[v][1] = two.y;
        } else {
            t.values[v][0] = values[0];
        }
    }
    t.factors = from.factors;
}

// The sum over LANES threads, STEP threads apart, in each of them.
template <int LANES, int STEP = 1> __device__ __forceinline__ float sum_lanes(float v) {
#pragma unroll
    for (int d = LANES / 2; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d * STEP);
    return v;
}
// A thread with two columns owns one, whose result it returns: the first half of the warp the first column.
template <int LANES> __device__ __forceinline__ float own(const float (&v)[1]) { return v[0]; }
template <int LANES> __device__ __forceinline__ float own(const float (&v)[2]) { return threadIdx.x & 16 ? v[1] : v[0]; }
// The sum of the own column over all threads that share it.
template <int LANES> __device__ __forceinline__ float sum_own(const float (&v)[1]) { return sum_lanes<LANES, SIDE_BY_SIDE<LANES>>(v[0]); }
template <int LANES> __device__ __forceinline__ float sum_own(const float (&v)[2]) {
    const float other = threadIdx.x & 16 ? v[0] : v[1];
    return sum_lanes<LANES / 2, SIDE_BY_SIDE<LANES>>(own<LANES>(v) + __shfl_xor_sync(~0u, other, 16));
}
// The sums of all columns of a thread, in each of the threads that share them.
template <int LANES, int COLUMNS> __device__ __forceinline__ void sum_all(float (&v)[COLUMNS]) {
#pragma unroll
    for (int d = LANES / 2; d > 0; d /= 2)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) v[c] += __shfl_xor_sync(~0u, v[c], d * SIDE_BY_SIDE<LANES>);
}
// The dot product of a thread's parts of two vectors, in several independent partial sums.
template <int EACH> __device__ __forceinline__ float dot(const float (&a)[EACH], const float (&b)[EACH]) {
    constexpr int SUMS = EACH / 4 < 2 ? 2 : EACH / 4;
    float sums[SUMS];
#pragma unroll
    for (int e = 0; e < EACH; e++) sums[e % SUMS] = e < SUMS ? a[e] * b[e] : fmaf(a[e], b[e], sums[e % SUMS]);
#pragma unroll
    for (int n = SUMS / 2; n > 0; n /= 2)
#pragma unroll
        for (int i = 0; i < n; i++) sums[i] += sums[i + n];
    return sums[0];
}

// Consecutive tokens of one segment that are prepared together.
struct Tile {
    u32 token, n; // first token and number of tokens; n = 0: no more tiles
    u32 rest;     // tokens of the segment after these
    u32 segment;  // index of the segment
};
// The first tile of a segment, and the tile after `t`, in this or the next segment.
__device__ __forceinline__ Tile first_tile(const Scan& w, u32 segment) {
    const uint4 bounds = w.runs.segments[segment];
    const u32 tokens = uniform(bounds.y), n = min(w.tile, tokens);
    return {uniform(bounds.x), n, tokens - n, segment};
}
__device__ __forceinline__ Tile tile_after(const Scan& w, u32 end_segment, const Tile& t) {
    if (t.rest == 0) return t.segment + 1 < end_segment ? first_tile(w, t.segment + 1) : Tile{0, 0, 0, 0};
    const u32 n = min(w.tile, t.rest);
    return {t.token + t.n, n, t.rest - n, t.segment};
}

// Warp `warp` of n_warps prepares its share of a tile.
template <typename R>
__device__ __forceinline__ void prepare_tile(const R& rule, Prepared<R>* to, const Tile& tile, u32 head, u32 first, int warp, int n_warps) {
    constexpr int TOKENS = 32 / PREPARE_LANES;
    const int lane = threadIdx.x % 32;
    for (u32 i = TOKENS * warp; i < tile.n; i += TOKENS * n_warps) {
        // Threads past the last token prepare that one again.
        const u32 token = min(i + lane / PREPARE_LANES, tile.n - 1);
        rule.prepare(to[token], head, first, tile.token + token, lane % PREPARE_LANES);
    }
}

// The scan of one block: blockIdx.x selects a head and columns of its state, blockIdx.y a run.
template <typename R> __device__ __forceinline__ void scan(const Scan& w, R rule) {
    SHARED_MEMORY(16, float4, walk_memory);
    float4* const begin = walk_memory;
    Prepared<R>* const prepared = reinterpret_cast<Prepared<R>*>(begin); // two tiles
    const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32), n_warps = blockDim.x / 32;
    const u32 blocks_of_head = (w.value_dim + columns_of_block<R> - 1) / columns_of_block<R>;
    const u32 head = blockIdx.x / blocks_of_head, first = blockIdx.x % blocks_of_head * columns_of_block<R>;
    const uint4 run = w.runs.runs[blockIdx.y];
    const u32 begin_segment = uniform(run.z), end_segment = begin_segment + uniform(run.w);

    // The columns of this thread, and the column whose result it may store.
    const u32 of_warp = first + warp * columns_of_warp<R>, column = of_warp + column_of<R>(lane);
    constexpr int SHARE = R::LANES / R::COLUMNS;
    const int number = number_of<R::LANES>(lane), result = column_of<R>(lane) + number / SHARE;
    const bool walks = warp < SCAN_WARPS, writes = walks && number % SHARE == 0 && of_warp + result < w.value_dim;
    const u32 row = 4 * number;
    const size_t of_head = ((size_t)head * w.value_dim + column) * w.key_dim;

    float s[R::COLUMNS][R::EACH] = {};
    if (walks) {
        const float* from = slot_of(w.states, w.runs.segments[begin_segment].z) + of_head;
#pragma unroll
        for (int c = 0; c < R::COLUMNS; c++)
#pragma unroll
            for (int e = 0; e < R::EACH; e += 4) {
                const float4 four = load_four(from + (size_t)c * w.key_dim, row + R::LANES * e, column + c < w.value_dim ? w.key_dim : 0);
                s[c][e] = four.x, s[c][e + 1] = four.y, s[c][e + 2] = four.z, s[c][e + 3] = four.w;
            }
        rule.begin(head, column, row);
    }
    // In the first round there is no tile to scan, so all warps prepare.
    Tile tile = {0, 0, 0, begin_segment - 1};
    for (u32 parity = 0;; parity ^= 1) {
        const Tile next = tile_after(w, end_segment, tile);
        const int walkers = tile.n == 0 ? 0 : SCAN_WARPS;
        if (warp >= walkers) {
            prepare_tile(rule, prepared + (parity ^ 1) * w.tile, next, head, first, warp - walkers, n_warps - walkers);
        } else {
            const Prepared<R>* tokens = prepared + parity * w.tile;
            float* out = w.out + ((size_t)tile.token * w.n_head + head) * w.value_dim + of_warp + result;
            const size_t step = (size_t)w.n_head * w.value_dim;
            Token<R> token;
            load_token(token, tokens[0], lane, warp);
#pragma unroll R::UNROLLED
            for (u32 i = 0; i < tile.n; i++) {
                Token<R> next_token;
                load_token(next_token, tokens[min(i + 1, tile.n - 1)], lane, warp);
                const float y = rule.step(token, s);
                if (writes) *out = y;
                out += step;
                token = next_token;
            }
            if (tile.rest == 0) {
                float* to = slot_of(w.states, w.runs.segments[tile.segment].w) + of_head;
#pragma unroll
                for (int c = 0; c < R::COLUMNS; c++)
#pragma unroll
                    for (int e = 0; e < R::EACH; e += 4) {
                        const float4 four = make_float4(s[c][e], s[c][e + 1], s[c][e + 2], s[c][e + 3]);
                        store_four(to + (size_t)c * w.key_dim, row + R::LANES * e, column + c < w.value_dim ? w.key_dim : 0, four);
                    }
            }
        }
        if (next.n == 0) return;
        __syncthreads();
        tile = next;
    }
}

// Defines the kernels of a recurrence, one for each number of rows of a thread. They are launched with four or eight preparing
// warps in addition to the scanning ones, or, if no run has more than one token, with none. Two blocks with four preparing warps fit
// on a multiprocessor, at 128 registers a thread or fewer.
#define SCAN_KERNEL(NAME, RULE, ARGS, EACH)                                                                                 \
    extern "C" __global__ void __launch_bounds__(96 * SCAN_WARPS, 1) NAME##_##EACH(const __grid_constant__ ARGS a) { \
        wait_for_input();                                                                                            \
        let_next_start();                                                                                            \
        scan(a.scan, RULE<EACH>{a});                                                                                 \
    }
#define SCAN_KERNELS(NAME, RULE, ARGS) \
    SCAN_KERNEL(NAME, RULE, ARGS, 4)   \
    SCAN_KERNEL(NAME, RULE, ARGS, 8)   \
    SCAN_KERNEL(NAME, RULE, ARGS, 16)

// A decode step fused into one launch: the convolution before the scan, the scan of one token, and the norm and gate of the
// head's result. A block has a whole head. The state and the convolution's last inputs do not depend on the previous launch, so
// their loads start before `wait_for_input`. Each thread has the rows and columns that it has in `scan`, and computes the same,
// so that the new state has the same bits.
struct FusedDecode {
    ConvolutionArgs convolution; // with up to FUSED_TAPS taps
    GroupNormArgs norm;          // norm = NO_NORM: the result is stored as it is
    u32* tickets;                // counters [run][key head], zero between launches
};
ASSERT_LAYOUT(FusedDecode);
// Most taps of the convolution.
constexpr int FUSED_TAPS = 4;
constexpr int FUSED_THREADS = 512;
// Most channels of the convolution of a thread.
constexpr int FUSED_CHANNELS = 2;

template <typename R> __device__ __forceinline__ void fused_decode(const Scan& w, const FusedDecode& a, const R& rule) {
    SHARED_MEMORY(16, float4, walk_memory);
    constexpr int QUADS = R::COLUMNS * R::EACH / 4, BEFORE = FUSED_TAPS - 1;
    const u32 tid = threadIdx.x, n_threads = blockDim.x, lane = tid % 32, warp = uniform(tid / 32), n_warps = n_threads / 32;
    const u32 head = blockIdx.x, key_dim = w.key_dim, value_dim = w.value_dim, n_x = 2 * key_dim + value_dim;
    const u32 of_pass = n_warps * columns_of_warp<R>, n_passes = (value_dim + of_pass - 1) / of_pass;
    const u32 n_chunks = (value_dim + columns_of_block<R> - 1) / columns_of_block<R>;
    float4* own_state = walk_memory + tid;                                                 // state of this thread, [passes][QUADS][threads]
    Prepared<R>* prepared = reinterpret_cast<Prepared<R>*>(walk_memory + n_passes * QUADS * n_threads); // [chunks of 16 columns]
    float* x = reinterpret_cast<float*>(prepared + n_chunks);                          // convolution's output of this head: two vectors of keys, one of values
    float* result = x + n_x;
    float* weights = result + value_dim;
    float* gates = weights + value_dim;
    __shared__ bool is_last;

    // Independent of the previous launch: the state and the convolution's inputs, and where the new ones go.
    const uint4 segment = w.runs.segments[w.runs.runs[blockIdx.y].z];
    const u32 token = uniform(segment.x);
    const int number = number_of<R::LANES>(lane);
    const u32 row = 4 * number, first_column = warp * columns_of_warp<R> + column_of<R>(lane);
    const float* from = slot_of(w.states, segment.z) + ((size_t)head * value_dim + first_column) * key_dim + row;
    const bool aligned = key_dim % 4 == 0 && (uintptr_t)from % 16 == 0;
    for (u32 p = 0; p < n_passes; p++)
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const u32 c = i / (R::EACH / 4), e = i % (R::EACH / 4) * R::LANES * 4, column = p * of_pass + first_column + c;
            const float* quad = from + (size_t)(p * of_pass + c) * key_dim + e;
            float4* to = own_state + (p * QUADS + i) * n_threads;
            if (aligned && column < value_dim && row + e < key_dim) copy16(to, quad);
            else *to = load_four(quad - row - e, row + e, column < value_dim ? key_dim : 0);
        }
    commit_copies();
    const ConvolutionArgs& conv = a.convolution;
    const Begins begins = rule.channels_of(head);
    const u32 n_before = conv.n_tap - 1;
    const float* inputs_before = slot_of(conv.states, segment.z);
    float inputs[FUSED_CHANNELS][FUSED_TAPS], taps[FUSED_CHANNELS][FUSED_TAPS], bias[FUSED_CHANNELS];
    u32 channels[FUSED_CHANNELS];
#pragma unroll
    for (int j = 0; j < FUSED_CHANNELS; j++) {
        const u32 i = tid + j * n_threads;
        const bool in_range = i < n_x;
        channels[j] = i < key_dim ? begins.first + i : i < 2 * key_dim ? begins.second + i - key_dim : begins.values + i - 2 * key_dim;
#pragma unroll
        for (int t = 0; t < FUSED_TAPS; t++) {
            // With fewer taps than FUSED_TAPS, the oldest are zero.
            const int tap = t + (int)n_before - BEFORE;
            taps[j][t] = in_range && tap >= 0 ? conv.taps[(size_t)tap * conv.channels + channels[j]] : 0.0f;
            if (t < BEFORE) inputs[j][t] = in_range && tap >= 0 ? inputs_before[(size_t)tap * conv.channels + channels[j]] : 0.0f;
        }
        bias[j] = in_range && conv.bias ? conv.bias[channels[j]] : 0.0f;
    }
    const bool has_norm = a.norm.norm != NO_NORM;
    if (has_norm)
        for (u32 i = tid; i < value_dim; i += n_threads) weights[i] = a.norm.weight[i];
    wait_for_input();
    let_next_start();

    const float* row_of_x = row_of(conv.x, token);
#pragma unroll
    for (int j = 0; j < FUSED_CHANNELS; j++) inputs[j][BEFORE] = tid + j * n_threads < n_x ? row_of_x[channels[j]] : 0.0f;
    if (has_norm && a.norm.gate_kind != NO_GATE)
        for (u32 i = tid; i < value_dim; i += n_threads) gates[i] = row_of(a.norm.gate, token)[head * value_dim + i];
    const u32 chunk = min(tid / PREPARE_LANES, n_chunks - 1), prepare_lane = tid % PREPARE_LANES;
    const auto given = rule.given(x, x + key_dim, x + 2 * key_dim, head, chunk * columns_of_block<R>, token, prepare_lane);
#pragma unroll
    for (int j = 0; j < FUSED_CHANNELS; j++) {
        float sum = bias[j];
#pragma unroll
        for (int t = 0; t < FUSED_TAPS; t++) sum = fmaf(taps[j][t], inputs[j][t], sum);
        const u32 i = tid + j * n_threads;
        if (i < n_x) x[i] = sigmoid(sum) * sum;
    }
    __syncthreads();
    // Heads that share key channels share their convolution state. The last head to have read it writes the new one.
    const u32 n_sharing = rule.shared_by();
    if (tid == 0) {
        is_last = true;
        if (n_sharing > 1) {
            u32* ticket = a.tickets + blockIdx.y * (w.n_head / n_sharing) + rule.key_head_of(head);
            is_last = atomicAdd(ticket, 1u) == n_sharing - 1;
            if (is_last) *ticket = 0;
        }
    }
    if (warp * 2 < n_chunks) rule.prepare(prepared[chunk], given, head, chunk * columns_of_block<R>, token, prepare_lane);
    wait_for_copies<0>();
    __syncthreads();

    constexpr int SHARE = R::LANES / R::COLUMNS, WARPS_OF_CHUNK = columns_of_block<R> / columns_of_warp<R>;
    const u32 written = warp * columns_of_warp<R> + column_of<R>(lane) + number / SHARE;
    float* to = slot_of(w.states, segment.w) + ((size_t)head * value_dim + first_column) * key_dim;
    for (u32 p = 0; p < n_passes; p++) {
        const u32 of_warps = p * n_warps + warp;
        Token<R> t;
        load_token(t, prepared[min(of_warps / WARPS_OF_CHUNK, n_chunks - 1)], lane, of_warps % WARPS_OF_CHUNK);
        float s[R::COLUMNS][R::EACH];
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const float4 four = own_state[(p * QUADS + i) * n_threads];
            float* elements = &s[i / (R::EACH / 4)][i % (R::EACH / 4) * 4];
            elements[0] = four.x, elements[1] = four.y, elements[2] = four.z, elements[3] = four.w;
        }
        const float y = rule.step(t, s);
        if (number % SHARE == 0 && p * of_pass + written < value_dim) result[p * of_pass + written] = y;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const u32 c = i / (R::EACH / 4), e = i % (R::EACH / 4) * 4, column = p * of_pass + first_column + c;
            const float4 four = make_float4(s[c][e], s[c][e + 1], s[c][e + 2], s[c][e + 3]);
            store_four(to + (size_t)(p * of_pass + c) * key_dim, row + R::LANES * e, column < value_dim ? key_dim : 0, four);
        }
    }
    __syncthreads();
    float factor = 1.0f;
    if (has_norm) {
        float squares = 0.0f;
        for (u32 i = lane; i < value_dim; i += 32) squares += result[i] * result[i];
        factor = rsqrtf(warp_sum(squares) / value_dim + a.norm.eps);
    }
    float* out = w.out + ((size_t)token * w.n_head + head) * value_dim;
    for (u32 i = tid; i < value_dim; i += n_threads) {
        float v = result[i] * factor;
        if (has_norm) v *= weights[i];
        if (has_norm && a.norm.gate_kind != NO_GATE) v *= factor_of(a.norm.gate_kind, gates[i]);
        out[i] = v;
    }
    float* inputs_after = slot_of(conv.states, segment.w);
#pragma unroll
    for (int j = 0; j < FUSED_CHANNELS; j++) {
        const u32 i = tid + j * n_threads;
        if (i >= n_x || (i < 2 * key_dim && !is_last)) continue;
#pragma unroll
        for (int t = 1; t < FUSED_TAPS; t++) {
            const int tap = t - 1 + (int)n_before - BEFORE;
            if (tap >= 0) inputs_after[(size_t)tap * conv.channels + channels[j]] = inputs[j][t];
        }
    }
}

#define FUSED_DECODE_KERNEL(NAME, RULE, ARGS, EACH)                                                                                    \
    extern "C" __global__ void __launch_bounds__(FUSED_THREADS, EACH <= 8 ? 2 : 1) NAME##_alone_##EACH(const __grid_constant__ ARGS a) {      \
        fused_decode(a.args.scan, a.fused, RULE<EACH>{a.args});                                                                     \
    }
#define FUSED_DECODE_KERNELS(NAME, RULE, ARGS) \
    FUSED_DECODE_KERNEL(NAME, RULE, ARGS, 4)   \
    FUSED_DECODE_KERNEL(NAME, RULE, ARGS, 8)   \
    FUSED_DECODE_KERNEL(NAME, RULE, ARGS, 16)
