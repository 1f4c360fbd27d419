// Recurrences: the runs of a batch, each the tokens of a sequence that follow each other, and how a head's state goes through the
// tokens of a run. States are F32, [slot][elements of the layer]; slot 0 is the empty text's: zeros that nobody writes.
#pragma once
#include "common.cuh"

struct Runs {
    const uint4* runs;     // first token, tokens, first segment, segments
    const uint4* segments; // first token, tokens, slot of the state before, slot of the state after
};

struct States {
    float* states; // of the layer
    u32 stride;    // elements of a slot
    u32 first;     // the first of those a kernel works on
};
__device__ __forceinline__ float* slot_of(const States& s, u32 slot) { return s.states + (size_t)slot * s.stride + s.first; }

// Rows of a buffer: what a kernel reads of a token begins at element `first` of its row.
struct Rows {
    const float* rows;
    u32 stride;
    u32 first;
};
__device__ __forceinline__ const float* row_of(const Rows& r, u32 token) { return r.rows + (size_t)token * r.stride + r.first; }

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// Columns of a head's state that a warp has, and warps of a block.
constexpr int COLUMNS = 4;
constexpr int WALK_WARPS = 4;

// What a walk goes over.
struct Walk {
    Runs runs;
    States states; // of the layer's heads, [head][value][key]: the other way round than papers write it
    float* out;    // [token][head][value]
    u32 n_head, key_dim, value_dim, unused;
};

// A warp takes some columns of a head through all tokens of a run. Lane l has elements l, l + 32.. of keys. `R::Token` is what
// a token brings, `R::load` reads it, `R::step` changes the state and returns what comes of the warp's columns.
template <typename R, int EACH> __device__ __forceinline__ void walk(const Walk& w, const R& rule) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 blocks_of_head = (w.value_dim + COLUMNS * WALK_WARPS - 1) / (COLUMNS * WALK_WARPS);
    const u32 head = blockIdx.x / blocks_of_head;
    const u32 column = (blockIdx.x % blocks_of_head * WALK_WARPS + warp) * COLUMNS;
    if (column >= w.value_dim) return;
    const uint4 run = w.runs.runs[blockIdx.y];
    const size_t of_head = ((size_t)head * w.value_dim + column) * w.key_dim;
    auto there = [&](int c, int e) { return column + c < w.value_dim && lane + 32 * e < w.key_dim; };

    float s[COLUMNS][EACH];
    {
        const float* from = slot_of(w.states, w.runs.segments[run.z].z) + of_head;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int e = 0; e < EACH; e++) s[c][e] = there(c, e) ? from[(size_t)c * w.key_dim + lane + 32 * e] : 0.0f;
    }
    const u32 end = run.x + run.y;
    typename R::Token next;
    rule.load(next, head, column, run.x, lane);
    for (u32 i = 0; i < run.w; i++) {
        const uint4 segment = w.runs.segments[run.z + i];
        for (u32 token = segment.x; token < segment.x + segment.y; token++) {
            const typename R::Token now = next;
            if (token + 1 < end) rule.load(next, head, column, token + 1, lane);
            float y[COLUMNS];
            rule.step(now, s, y, head, column, token);
            if (lane < COLUMNS && column + lane < w.value_dim) {
                float of_lane = y[0];
#pragma unroll
                for (int c = 1; c < COLUMNS; c++) of_lane = lane == c ? y[c] : of_lane;
                w.out[((size_t)token * w.n_head + head) * w.value_dim + column + lane] = of_lane;
            }
        }
        float* to = slot_of(w.states, segment.w) + of_head;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int e = 0; e < EACH; e++)
                if (there(c, e)) to[(size_t)c * w.key_dim + lane + 32 * e] = s[c][e];
    }
}

// The elements of a key, or something as long, that a lane has; zeros behind its end.
template <int EACH> __device__ __forceinline__ void load_key(float (&to)[EACH], const float* from, u32 key_dim, int lane) {
#pragma unroll
    for (int e = 0; e < EACH; e++) to[e] = lane + 32 * e < key_dim ? from[lane + 32 * e] : 0.0f;
}
// The elements of a value that a warp has; zeros behind its end.
__device__ __forceinline__ void load_value(float (&to)[COLUMNS], const float* from, u32 value_dim, u32 column) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) to[c] = column + c < value_dim ? from[column + c] : 0.0f;
}
// The sums of all columns over the lanes.
__device__ __forceinline__ void sum_columns(float (&y)[COLUMNS]) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) y[c] = warp_sum(y[c]);
}

#define WALKS(NAME, RULE, ARGS)                                                                                         \
    template <int EACH> __device__ __forceinline__ void NAME##_of(const ARGS& a) {                                      \
        wait_for_input();                                                                                               \
        let_next_start();                                                                                               \
        walk<RULE<EACH>, EACH>(a.walk, RULE<EACH>{a});                                                                  \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(32 * WALK_WARPS) NAME##_1(const __grid_constant__ ARGS a) { NAME##_of<1>(a); } \
    extern "C" __global__ void __launch_bounds__(32 * WALK_WARPS) NAME##_2(const __grid_constant__ ARGS a) { NAME##_of<2>(a); } \
    extern "C" __global__ void __launch_bounds__(32 * WALK_WARPS) NAME##_4(const __grid_constant__ ARGS a) { NAME##_of<4>(a); } \
    extern "C" __global__ void __launch_bounds__(32 * WALK_WARPS) NAME##_8(const __grid_constant__ ARGS a) { NAME##_of<8>(a); }
