// Activations of feed-forwards, where the epilogue of the product of gate and up cannot apply them: with biases, with gate and
// up of different layouts, without a gate, and the activations of a few models. out = activation(gate) * up.
#include "common.cuh"

struct ActivationArgs {
    const float* gate;          // rows of n_ff elements, gate_stride apart; without a gate, up
    const float* up;            // rows of n_ff elements, up_stride apart; null: no gate
    float* out;                 // [n_tokens][n_ff]
    half* packed;               // the same as packed F16, or null
    u32 gate_stride, up_stride; // elements from a row to the next one
    u32 n_ff;                   // elements of a row of the result
    u32 n_token_tiles;          // of `packed`, with the WIDE flag
    u32 activation;             // Activation
    float parameter;            // CLAMPED_SWIGLU, CLAMPED_SILU: the limit; SPARSE_GELU: standard deviations
};
ASSERT_LAYOUT(ActivationArgs);

// The blocks of a row share its elements.
extern "C" __global__ void __launch_bounds__(256) activation(const __grid_constant__ ActivationArgs a) {
    __shared__ float scratch[16];
    wait_for_input();
    let_next_start();
    const u32 token = blockIdx.y;
    const float* gate = a.gate + (size_t)token * a.gate_stride;
    const float* up = a.up ? a.up + (size_t)token * a.up_stride : nullptr;
    float cutoff = 0.0f;
    if (a.activation == SPARSE_GELU) {
        float sum = 0.0f, squares = 0.0f;
        for (u32 i = threadIdx.x; i < a.n_ff; i += blockDim.x) sum += gate[i];
        const float mean = block_sum_max(sum, 0.0f, scratch).x / a.n_ff;
        for (u32 i = threadIdx.x; i < a.n_ff; i += blockDim.x) squares += (gate[i] - mean) * (gate[i] - mean);
        const float variance = block_sum_max(squares, 0.0f, scratch).x / (max(a.n_ff, 2u) - 1.0f);
        cutoff = mean + a.parameter * sqrtf(variance);
    }
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < (a.n_ff + 63) / 64 * 64; i += gridDim.x * blockDim.x) {
        float v = 0.0f;
        if (i < a.n_ff) {
            const float g = gate[i], u = up ? up[i] : 1.0f;
            if (a.activation == CLAMPED_SWIGLU) {
                const float low = fminf(g, a.parameter);
                v = low / (1.0f + __expf(-1.702f * low)) * (up ? 1.0f + fminf(fmaxf(u, -a.parameter), a.parameter) : 1.0f);
            } else if (a.activation == CLAMPED_SILU) {
                v = fminf(activate(SILU, g), a.parameter) * (up ? fminf(fmaxf(u, -a.parameter), a.parameter) : 1.0f);
            } else if (a.activation == SPARSE_GELU) {
                v = activate(GELU, fmaxf(g - cutoff, 0.0f)) * u;
            } else {
                v = activate(a.activation, g) * u;
            }
            a.out[(size_t)token * a.n_ff + i] = v;
        }
        if (a.packed) a.packed[packed_input(token, i, a.n_token_tiles)] = __float2half_rn(v);
    }
}
