// Several residual streams, of which a layer computes with the first only (AltUp, arXiv 2301.13310).
#include "common.cuh"

constexpr u32 MAX_STREAMS = 8;

struct StretchArgs {
    const float* a;                      // rows, a_stride apart
    const float* goal;                   // rows whose norm the result gets, goal_stride apart; null: none
    float* y;                            // rows, y_stride apart
    u32 n;                               // elements of each
    u32 a_stride, goal_stride, y_stride; // elements from a row to the next one
    u32 accumulate;                      // whether the result is added to y
    float scale;                         // factor on the result
};
ASSERT_LAYOUT(StretchArgs);

// y = scale * a, rescaled to the norm of `goal` if there is one; stored or added. A block for each row.
extern "C" __global__ void __launch_bounds__(256) stretch(const __grid_constant__ StretchArgs a) {
    __shared__ float scratch[16];
    wait_for_input();
    let_next_start();
    const float* from = a.a + (size_t)blockIdx.x * a.a_stride;
    float* to = a.y + (size_t)blockIdx.x * a.y_stride;
    float factor = a.scale;
    if (a.goal) {
        const float* goal = a.goal + (size_t)blockIdx.x * a.goal_stride;
        float squares = 0.0f, goal_squares = 0.0f;
        for (u32 i = threadIdx.x; i < a.n; i += blockDim.x) squares += from[i] * from[i], goal_squares += goal[i] * goal[i];
        squares = block_sum_max(squares, 0.0f, scratch).x;
        goal_squares = block_sum_max(goal_squares, 0.0f, scratch).x;
        factor *= sqrtf(goal_squares) / sqrtf(squares);
    }
    for (u32 i = threadIdx.x; i < a.n; i += blockDim.x) to[i] = factor * from[i] + (a.accumulate ? to[i] : 0.0f);
}

struct StreamsArgs {
    const float* router; // [n_tokens][n_streams]
    const float* matrix; // prediction: [n_streams * n_streams][n_streams]; correction: [n_streams][n_streams]
    float* streams;      // [n_tokens][n_streams][n]
    float* x;            // [n_tokens][n], the first stream
    const float* scale;  // [n], for a correction only
    float* scaled;       // [n_tokens][n], for a correction only
    u32 n, n_streams;    // elements of a row, streams
};
ASSERT_LAYOUT(StreamsArgs);

// One element of the residual streams of a token: prediction, or correction by the layer's result.
template <bool CORRECT> __device__ __forceinline__ void mix_streams(const StreamsArgs& a) {
    wait_for_input();
    let_next_start();
    const u32 e = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y, n = a.n_streams;
    if (e >= a.n) return;
    float inputs[MAX_STREAMS], old[MAX_STREAMS];
#pragma unroll
    for (u32 j = 0; j < MAX_STREAMS; j++) {
        inputs[j] = j < n ? tanhf(a.router[token * n + j]) : 0.0f;
        old[j] = j < n ? a.streams[((size_t)token * n + j) * a.n + e] : 0.0f;
    }
    float* x = a.x + (size_t)token * a.n + e;
    const float innovation = CORRECT ? *x - old[0] : 0.0f;
    for (u32 i = 0; i < n; i++) {
        float sum = a.streams[((size_t)token * n + i) * a.n + e];
        if (CORRECT) {
            float c = 1.0f;
#pragma unroll
            for (u32 k = 0; k < MAX_STREAMS; k++)
                if (k < n) c += a.matrix[i * n + k] * inputs[k];
            sum += innovation * c;
        } else {
#pragma unroll
            for (u32 j = 0; j < MAX_STREAMS; j++) {
                if (j >= n) continue;
                float c = 0.0f;
#pragma unroll
                for (u32 k = 0; k < MAX_STREAMS; k++)
                    if (k < n) c += a.matrix[(i * n + j) * n + k] * inputs[k];
                sum += c * old[j];
            }
        }
        a.streams[((size_t)token * n + i) * a.n + e] = sum;
        if (i == 0) {
            *x = sum;
            if (CORRECT) a.scaled[(size_t)token * a.n + e] = sum * a.scale[e];
        }
    }
}
// streams[i] += sum over j of c[i][j] streams[j], with c = matrix tanh(router). Then x is the first stream.
extern "C" __global__ void __launch_bounds__(256) predict_streams(const __grid_constant__ StreamsArgs a) { mix_streams<false>(a); }
// streams[i] += (x - streams[0]) (c[i] + 1). Then x is the first stream, and `scaled` is x times `scale`.
extern "C" __global__ void __launch_bounds__(256) correct_streams(const __grid_constant__ StreamsArgs a) { mix_streams<true>(a); }

// Adds x to all streams but the first.
extern "C" __global__ void __launch_bounds__(256) add_to_idle_streams(const __grid_constant__ StreamsArgs a) {
    wait_for_input();
    let_next_start();
    const u32 e = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    if (e >= a.n) return;
    for (u32 i = 1; i < a.n_streams; i++) a.streams[((size_t)token * a.n_streams + i) * a.n + e] += a.x[(size_t)token * a.n + e];
}
