// Convolutions within blocks, around a mixer or a feed-forward (DFlash-2).
#include "heads.cuh"

struct BlockConvArgs {
    const float* x;      // [n_tokens][n]
    const float* base;   // [2][n_tap][n]
    const float* taps;   // [n_tokens][2][n_tap][n / group_size]
    float* y;            // [n_tokens][n]
    const Token* tokens; // [n_tokens]; those of a sequence follow each other, and are a block
    u32 n, n_tap;        // channels; taps
    u32 group_size;      // channels that share the taps of a token
    u32 side;            // which of a part's convolutions: 0 that of its input, 1 that of its result
};
ASSERT_LAYOUT(BlockConvArgs);

// y[t][c] = sum over k of (base[side][k][c] + taps[t][side][k][c / group_size]) * x[t - k][c]; tokens before the block count as zeros.
extern "C" __global__ void __launch_bounds__(256) block_conv(const __grid_constant__ BlockConvArgs a) {
    wait_for_input();
    let_next_start();
    const u32 channel = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    if (channel >= a.n) return;
    const u32 n_groups = a.n / a.group_size, seq = a.tokens[token].seq;
    const float* base = a.base + (size_t)a.side * a.n_tap * a.n + channel;
    const float* taps = a.taps + ((size_t)token * 2 + a.side) * a.n_tap * n_groups + channel / a.group_size;
    const float* x = a.x + (size_t)token * a.n + channel;
    float sum = 0.0f;
    for (u32 k = 0; k < a.n_tap && k <= token && a.tokens[token - k].seq == seq; k++)
        sum += (base[(size_t)k * a.n] + taps[(size_t)k * n_groups]) * *(x - (size_t)k * a.n);
    a.y[(size_t)token * a.n + channel] = sum;
}
