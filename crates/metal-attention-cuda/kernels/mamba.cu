// The selective scan of Mamba (arXiv 2312.00752), in which each element of a channel's state decays by itself:
// h = exp(dt A) h + dt B x; y = (C h + D x) silu(z).
#include "recurrence.cuh"

struct SelectArgs {
    const float* chosen;     // [token][n]
    float* dt;               // [token][rank]
    float* bc;               // B, then C, [token][2][d_state]
    const float* weights[3]; // of the norms of dt, B and C; null: none
    u32 n, rank, d_state;
    u32 at[3];               // where they begin
    float eps;
    u32 unused;
};
// A warp for each of dt, B and C of a token.
extern "C" __global__ void __launch_bounds__(96) mamba_select(const __grid_constant__ SelectArgs a) {
    wait_for_input();
    let_next_start();
    const u32 token = blockIdx.x, part = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 n = part == 0 ? a.rank : a.d_state;
    const float* x = a.chosen + (size_t)token * a.n + a.at[part];
    float* out = part == 0 ? a.dt + (size_t)token * a.rank : a.bc + ((size_t)token * 2 + part - 1) * a.d_state;
    const float* weight = a.weights[part];
    float squares = 0.0f;
    for (u32 i = lane; i < n; i += 32) squares += x[i] * x[i];
    const float factor = rsqrtf(warp_sum(squares) / n + a.eps);
    for (u32 i = lane; i < n; i += 32) out[i] = weight ? x[i] * factor * weight[i] : x[i];
}

struct MambaArgs {
    Runs runs;
    States states;  // [channel][d_state]
    const float* x; // [token][channel], after the convolution
    const float* dt;
    const float* bc; // [token][2][d_state]
    Rows gate;       // [channel]
    const float* dt_bias;
    const float* a;  // [channel][d_state], negative
    const float* d;
    float* out;      // [token][channel]
    u32 channels, d_state;
};
// Threads that share a channel's state.
constexpr int SHARE = 4;

template <int EACH> __device__ __forceinline__ void mamba(const MambaArgs& a) {
    wait_for_input();
    let_next_start();
    const u32 part = threadIdx.x % SHARE, channel = (blockIdx.x * blockDim.x + threadIdx.x) / SHARE;
    // Threads of channels that there are not take the last one's part in the sums.
    const u32 at = min(channel, a.channels - 1);
    const uint4 run = a.runs.runs[blockIdx.y];
    float h[EACH], rate[EACH];
    const float* from = slot_of(a.states, a.runs.segments[run.z].z) + (size_t)at * a.d_state;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const u32 s = part + SHARE * e;
        h[e] = s < a.d_state ? from[s] : 0.0f;
        rate[e] = s < a.d_state ? a.a[(size_t)at * a.d_state + s] : 0.0f;
    }
    const float bias = a.dt_bias[at], d = a.d[at];
    for (u32 i = 0; i < run.w; i++) {
        const uint4 segment = a.runs.segments[run.z + i];
        for (u32 token = segment.x; token < segment.x + segment.y; token++) {
            const float x = a.x[(size_t)token * a.channels + at], dt = softplus(a.dt[(size_t)token * a.channels + at] + bias);
            const float* b = a.bc + (size_t)token * 2 * a.d_state;
            const float* c = b + a.d_state;
            float sum = 0.0f;
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const u32 s = part + SHARE * e;
                if (s >= a.d_state) continue;
                h[e] = expf(dt * rate[e]) * h[e] + b[s] * dt * x;
                sum += c[s] * h[e];
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const float gate = row_of(a.gate, token)[at];
            if (part == 0 && channel < a.channels) a.out[(size_t)token * a.channels + at] = (sum + d * x) * (gate * sigmoid(gate));
        }
        float* to = slot_of(a.states, segment.w) + (size_t)at * a.d_state;
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (channel < a.channels && part + SHARE * e < a.d_state) to[part + SHARE * e] = h[e];
    }
}
#define MAMBA(EACH) \
    extern "C" __global__ void __launch_bounds__(128) mamba_##EACH(const __grid_constant__ MambaArgs a) { mamba<EACH>(a); }
MAMBA(4)
MAMBA(8)
MAMBA(16)
