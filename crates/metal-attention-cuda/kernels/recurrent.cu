// What stands around recurrences: the short convolution before them, norm and gate of what they give, functions of each element.
#include "recurrence.cuh"

struct ConvolutionArgs {
    Runs runs;
    States states;     // the last inputs, oldest first, [n_tap - 1][channels]
    Rows x;            // channel c lies at element c / block * step + c % block
    const float* taps; // those of the oldest token first, [n_tap][channels]
    const float* bias; // [channels], or null
    float* out;        // [token][channels]
    u32 channels, n_tap, block, step;
    u32 gated;         // the input is the product of channels 0 and 2 of three, and the result is multiplied by channel 1 (LFM2);
                       // else it goes through SiLU
    u32 unused;
};
constexpr u32 MAX_TAPS = 16;
// Tokens of a run that a block takes: at least as many as a result sees.
constexpr u32 CONVOLVED = 32;

// A thread a channel. The block with a run's first tokens has its state for itself.
extern "C" __global__ void __launch_bounds__(128) convolution(const __grid_constant__ ConvolutionArgs a) {
    wait_for_input();
    let_next_start();
    const u32 channel = blockIdx.x * 128 + threadIdx.x;
    const uint4 run = a.runs.runs[blockIdx.z];
    const int begin = blockIdx.y * CONVOLVED, end = min(begin + (int)CONVOLVED, (int)run.y);
    if (channel >= a.channels || begin >= end) return;
    const int before = a.n_tap - 1;
    const u32 place = channel / a.block * a.step + channel % a.block;
    auto of_token = [&](int t) {
        const float* x = row_of(a.x, run.x + t) + place;
        return a.gated ? x[0] * x[2 * a.channels] : x[0];
    };
    float old[MAX_TAPS - 1];
    if (begin == 0) {
        const float* state = slot_of(a.states, a.runs.segments[run.z].z) + channel;
        for (int i = 0; i < before; i++) old[i] = state[(size_t)i * a.channels];
    }
    auto input = [&](int t) { return t < 0 ? old[t + before] : of_token(t); };
    for (int t = begin; t < end; t++) {
        float sum = a.bias ? a.bias[channel] : 0.0f;
        for (int j = 0; j <= before; j++) sum += a.taps[(size_t)j * a.channels + channel] * input(t - before + j);
        const float factor = a.gated ? row_of(a.x, run.x + t)[place + a.channels] : sigmoid(sum);
        a.out[(size_t)(run.x + t) * a.channels + channel] = factor * sum;
    }
    if (begin > 0) return;
    for (u32 i = 0; i < run.w; i++) {
        const uint4 segment = a.runs.segments[run.z + i];
        const int last = segment.x + segment.y - run.x;
        float* state = slot_of(a.states, segment.w) + channel;
        for (int j = 0; j < before; j++) state[(size_t)j * a.channels] = input(last - before + j);
    }
}

enum Kind : u32 { NO_NORM = 0, RMS = 1, LAYER = 2 };
enum Gate : u32 { NO_GATE = 0, AS_IT_IS = 1, SILU_OF_GATE = 2, SIGMOID_OF_GATE = 3 };

struct GroupNormArgs {
    const float* x;      // [token][group][n]
    float* out;
    const float* weight; // [n], or [group][n] where `of_groups`
    const float* bias;   // the same, or null
    Rows gate;           // [group][n]
    const float* r;      // RWKV-7's bonus, v sum(r k factor), of rows as x, or null
    const float* k;
    const float* v;
    const float* factor; // [group][n]
    u32 n, n_group, of_groups;
    u32 norm;            // Kind
    u32 gate_kind;       // Gate
    float eps;
};

// gate (norm(x) weight + bias + bonus); a block for a group of a token.
extern "C" __global__ void __launch_bounds__(128) group_norm(const __grid_constant__ GroupNormArgs a) {
    __shared__ float scratch[8];
    wait_for_input();
    let_next_start();
    const u32 group = blockIdx.x, token = blockIdx.y;
    const size_t at = ((size_t)token * a.n_group + group) * a.n;
    const float* x = a.x + at;
    float mean = 0.0f, factor = 1.0f, bonus = 0.0f;
    if (a.norm == LAYER) {
        float sum = 0.0f;
        for (u32 i = threadIdx.x; i < a.n; i += blockDim.x) sum += x[i];
        mean = block_sum_max(sum, 0.0f, scratch).x / a.n;
    }
    if (a.norm != NO_NORM) {
        float squares = 0.0f;
        for (u32 i = threadIdx.x; i < a.n; i += blockDim.x) squares += (x[i] - mean) * (x[i] - mean);
        factor = rsqrtf(block_sum_max(squares, 0.0f, scratch).x / a.n + a.eps);
    }
    if (a.r) {
        float own = 0.0f;
        for (u32 i = threadIdx.x; i < a.n; i += blockDim.x) own += a.r[at + i] * a.k[at + i] * a.factor[group * a.n + i];
        bonus = block_sum_max(own, 0.0f, scratch).x;
    }
    for (u32 i = threadIdx.x; i < a.n; i += blockDim.x) {
        const u32 of_weight = a.of_groups ? group * a.n + i : i;
        float v = (x[i] - mean) * factor;
        if (a.norm != NO_NORM) v *= a.weight[of_weight];
        if (a.bias) v += a.bias[of_weight];
        if (a.r) v += bonus * a.v[at + i];
        if (a.gate_kind != NO_GATE) {
            const float gate = row_of(a.gate, token)[group * a.n + i];
            v *= a.gate_kind == AS_IT_IS ? gate : a.gate_kind == SILU_OF_GATE ? gate * sigmoid(gate) : sigmoid(gate);
        }
        a.out[at + i] = v;
    }
}

enum Function : u32 { TANH = 0, SIGMOID = 1, SQUARED = 2, SIGMOID_TIMES = 3 };
struct FunctionArgs {
    float* x;          // changed in place
    const float* with; // SIGMOID_TIMES: x = sigmoid(with) x
    u32 n;
    u32 function;
};
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
