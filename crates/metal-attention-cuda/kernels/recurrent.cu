// The kernels beside recurrent scans: the short convolution before them, the norm and gate of their results, and elementwise
// functions. Argument structures are in recurrence.cuh.
#include "recurrence.cuh"

// Most taps of a convolution.
constexpr u32 MAX_TAPS = 16;
// Tokens of a run that a block processes, which may not be fewer than MAX_TAPS - 1, and tokens that a thread loads at a time.
constexpr int CONVOLVED = 16;
constexpr int AT_ONCE = 8;

// One thread for each channel. Only the block with a run's first tokens reads and writes the run's states. TAPS may be more
// than n_tap; then the oldest are zero.
template <int TAPS> __device__ __forceinline__ void convolve(const ConvolutionArgs& a) {
    const u32 channel = blockIdx.x * 128 + threadIdx.x;
    const uint4 run = a.runs.runs[blockIdx.z];
    const int begin = blockIdx.y * CONVOLVED, end = min(begin + CONVOLVED, (int)run.y);
    if (channel >= a.channels || begin >= end) return;
    constexpr int BEFORE = TAPS - 1;
    const int n_before = a.n_tap - 1;
    const float* x = row_of(a.x, run.x) + channel / a.block * a.step + channel % a.block;
    auto of_token = [&](int t) {
        const float* input = x + (size_t)t * a.x.stride;
        return a.gated ? input[0] * input[2 * a.channels] : input[0];
    };
    float taps[TAPS];
#pragma unroll
    for (int j = 0; j < TAPS; j++) taps[j] = j + n_before < BEFORE ? 0.0f : a.taps[(size_t)(j + n_before - BEFORE) * a.channels + channel];
    const float bias = a.bias ? a.bias[channel] : 0.0f;
    // The last inputs before the next token, and the inputs of the next tokens.
    float inputs[BEFORE + AT_ONCE];
    const float* state = slot_of(a.states, a.runs.segments[run.z].z) + channel;
#pragma unroll
    for (int j = 0; j < BEFORE; j++) {
        const int t = j - BEFORE;
        inputs[j] = t + n_before < 0 ? 0.0f : begin > 0 ? of_token(begin + t) : state[(size_t)(t + n_before) * a.channels];
    }
    float old[BEFORE];
#pragma unroll
    for (int j = 0; j < BEFORE; j++) old[j] = inputs[j];
    for (int t = begin; t < end; t += AT_ONCE) {
        float gates[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            inputs[BEFORE + i] = t + i < end ? of_token(t + i) : 0.0f;
            gates[i] = a.gated && t + i < end ? x[(size_t)(t + i) * a.x.stride + a.channels] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            float sum = bias;
#pragma unroll
            for (int j = 0; j < TAPS; j++) sum = fmaf(taps[j], inputs[i + j], sum);
            if (t + i < end) a.out[(size_t)(run.x + t + i) * a.channels + channel] = (a.gated ? gates[i] : sigmoid(sum)) * sum;
        }
#pragma unroll
        for (int j = 0; j < BEFORE; j++) inputs[j] = inputs[j + AT_ONCE];
    }
    if (begin > 0) return;
    for (u32 i = 0; i < run.w; i++) {
        const uint4 segment = a.runs.segments[run.z + i];
        const int last = segment.x + segment.y - run.x;
        float* to = slot_of(a.states, segment.w) + channel;
        for (int j = 0; j < n_before; j++) {
            const int t = last - n_before + j;
            float input = 0.0f;
            if (t >= 0) input = of_token(t);
#pragma unroll
            for (int o = 0; o < BEFORE; o++)
                if (t == o - BEFORE) input = old[o];
            to[(size_t)j * a.channels] = input;
        }
    }
}
// For up to 4 taps, and for up to MAX_TAPS.
extern "C" __global__ void __launch_bounds__(128) convolution(const __grid_constant__ ConvolutionArgs a) {
    wait_for_input();
    let_next_start();
    convolve<4>(a);
}
extern "C" __global__ void __launch_bounds__(128) convolution_long(const __grid_constant__ ConvolutionArgs a) {
    wait_for_input();
    let_next_start();
    convolve<MAX_TAPS>(a);
}

// Computes gate (norm(x) weight + bias + bonus) for one group of a token's row. `thread` is the index of this thread among
// `threads`; `sum` adds a value over these.
template <typename Sum>
__device__ __forceinline__ void normalise(const GroupNormArgs& a, u32 group, u32 token, u32 thread, u32 threads, const Sum& sum) {
    const size_t at = ((size_t)token * a.n_group + group) * a.n;
    const float* x = a.x + at;
    float mean = 0.0f, factor = 1.0f, bonus = 0.0f;
    if (a.norm == LAYER) {
        float all = 0.0f;
        for (u32 i = thread; i < a.n; i += threads) all += x[i];
        mean = sum(all) / a.n;
    }
    if (a.norm != NO_NORM) {
        float squares = 0.0f;
        for (u32 i = thread; i < a.n; i += threads) squares += (x[i] - mean) * (x[i] - mean);
        factor = rsqrtf(sum(squares) / a.n + a.eps);
    }
    if (a.r) {
        float partial = 0.0f;
        for (u32 i = thread; i < a.n; i += threads) partial += a.r[at + i] * a.k[at + i] * a.factor[group * a.n + i];
        bonus = sum(partial);
    }
#pragma unroll 4
    for (u32 i = thread; i < a.n; i += threads) {
        const u32 of_weight = a.of_groups ? group * a.n + i : i;
        float v = (x[i] - mean) * factor;
        if (a.norm != NO_NORM) v *= a.weight[of_weight];
        if (a.bias) v += a.bias[of_weight];
        if (a.r) v += bonus * a.v[at + i];
        if (a.gate_kind != NO_GATE) v *= factor_of(a.gate_kind, row_of(a.gate, token)[group * a.n + i]);
        a.out[at + i] = v;
    }
}
// A block for each group.
extern "C" __global__ void __launch_bounds__(1024) group_norm(const __grid_constant__ GroupNormArgs a) {
    __shared__ float scratch[64];
    wait_for_input();
    let_next_start();
    normalise(a, blockIdx.x, blockIdx.y, threadIdx.x, blockDim.x, [&](float v) { return block_sum_max(v, 0.0f, scratch).x; });
}
// A warp for each group, if groups are small.
extern "C" __global__ void __launch_bounds__(128) group_norm_small(const __grid_constant__ GroupNormArgs a) {
    wait_for_input();
    let_next_start();
    const u32 group = blockIdx.x * 4 + threadIdx.x / 32;
    if (group < a.n_group) normalise(a, group, blockIdx.y, threadIdx.x % 32, 32, [](float v) { return warp_sum(v); });
}

enum Function : u32 { TANH = 0, SIGMOID = 1, SQUARED = 2, SIGMOID_TIMES = 3 };
struct FunctionArgs {
    float* x;          // updated in place
    const float* with; // for SIGMOID_TIMES: x = sigmoid(with) x
    u32 n;             // elements of x
    u32 function;      // Function
};
ASSERT_LAYOUT(FunctionArgs);
// Applies a function to each element of x.
extern "C" __global__ void __launch_bounds__(256) of_each(const __grid_constant__ FunctionArgs a) {
    wait_for_input();
    let_next_start();
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += gridDim.x * blockDim.x) {
        const float x = a.x[i], positive = fmaxf(x, 0.0f);
        a.x[i] = a.function == TANH      ? tanhf(x)
                 : a.function == SIGMOID ? sigmoid(x)
                 : a.function == SQUARED ? positive * positive
                                         : sigmoid(a.with[i]) * x;
    }
}
