// A mixture of experts: which experts a token goes to and with what weights, what lies between their matrices, and the weighted
// sum of what they give.
#include "common.cuh"

enum Score : u32 { SOFTMAX = 0, SIGMOID_OF_EACH = 1, SOFTMAX_OF_CHOSEN = 2 };
constexpr u32 MAX_CHOSEN = 64;

struct RouteArgs {
    const float* products;     // [n_tokens][n_expert], with the router's bias
    const float* choice_bias;  // added for the choice, or null
    const float* expert_scale; // factor on each expert's result, or null
    u32* experts;              // [n_tokens][n_used], best first
    float* weights;            // the same, of results
    float* input_weights;      // the same, of inputs; null: weights are those of results
    u32 n_expert, n_used;
    u32 score;                 // Score
    u32 renormalize;
    u32 n_group, n_group_used; // 0: no groups
    float scale;
    u32 unused;
};

struct Best {
    float value;
    u32 at;
};
// The largest value of all lanes; the lower place on ties.
__device__ __forceinline__ Best best_of_warp(Best b) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        const Best other = {__shfl_xor_sync(~0u, b.value, d), __shfl_xor_sync(~0u, b.at, d)};
        if (other.value > b.value || other.value == b.value && other.at < b.at) b = other;
    }
    return b;
}
// The largest of values that are not taken, and that no NaN is; it is taken.
__device__ __forceinline__ Best take_best(const float* values, bool* taken, u32 n, u32 lane) {
    Best best = {-INFINITY, 0xffffffffu};
    for (u32 i = lane; i < n; i += 32) {
        const float v = values[i] == values[i] ? values[i] : -INFINITY;
        if (!taken[i] && (v > best.value || best.at == 0xffffffffu)) best = {v, i};
    }
    best = best_of_warp(best);
    if (lane == 0) taken[best.at] = true;
    __syncwarp();
    return best;
}

SHARED_MEMORY(16, float, route_memory);

// A warp a token.
extern "C" __global__ void __launch_bounds__(32) route(const __grid_constant__ RouteArgs a) {
    float* scores = route_memory;           // [n_expert]
    float* choice = scores + a.n_expert;    // [n_expert]
    float* of_groups = choice + a.n_expert; // [n_expert], as are the next two
    bool* taken = (bool*)(of_groups + a.n_expert);
    bool* group_taken = taken + a.n_expert;
    __shared__ float weights[MAX_CHOSEN];
    wait_for_input();
    let_next_start();
    const u32 token = blockIdx.x, lane = threadIdx.x;
    const float* products = a.products + (size_t)token * a.n_expert;
    float most = -INFINITY, sum = 0.0f;
    if (a.score == SOFTMAX) {
        for (u32 i = lane; i < a.n_expert; i += 32) most = fmaxf(most, products[i]);
        most = warp_max(most);
        for (u32 i = lane; i < a.n_expert; i += 32) sum += expf(products[i] - most);
        sum = warp_sum(sum);
    }
    for (u32 i = lane; i < a.n_expert; i += 32) {
        const float x = products[i];
        const float score = a.score == SOFTMAX           ? expf(x - most) / sum
                            : a.score == SIGMOID_OF_EACH ? 1.0f / (1.0f + expf(-x))
                                                         : x;
        scores[i] = score;
        choice[i] = a.choice_bias ? score + a.choice_bias[i] : score;
        taken[i] = false;
        group_taken[i] = false;
    }
    __syncwarp();
    if (a.n_group > 0) {
        // A group counts as much as its two best experts together.
        const u32 of_group = a.n_expert / a.n_group;
        for (u32 g = lane; g < a.n_group; g += 32) {
            float first = -INFINITY, second = -INFINITY;
            for (u32 i = g * of_group; i < (g + 1) * of_group; i++) {
                second = fmaxf(second, fminf(first, choice[i]));
                first = fmaxf(first, choice[i]);
            }
            of_groups[g] = of_group > 1 ? first + second : first;
        }
        __syncwarp();
        for (u32 i = 0; i < a.n_group_used; i++) take_best(of_groups, group_taken, a.n_group, lane);
        for (u32 i = lane; i < a.n_expert; i += 32)
            if (!group_taken[i / of_group]) choice[i] = -INFINITY;
        __syncwarp();
    }
    for (u32 i = 0; i < a.n_used; i++) {
        const Best best = take_best(choice, taken, a.n_expert, lane);
        if (lane == 0) {
            a.experts[(size_t)token * a.n_used + i] = best.at;
            weights[i] = scores[best.at];
        }
    }
    __syncwarp();
    if (lane != 0) return;
    if (a.score == SOFTMAX_OF_CHOSEN) {
        most = -INFINITY, sum = 0.0f;
        for (u32 i = 0; i < a.n_used; i++) most = fmaxf(most, weights[i]);
        for (u32 i = 0; i < a.n_used; i++) weights[i] = expf(weights[i] - most), sum += weights[i];
        for (u32 i = 0; i < a.n_used; i++) weights[i] /= sum;
    }
    if (a.renormalize) {
        sum = 0.0f;
        for (u32 i = 0; i < a.n_used; i++) sum += weights[i];
        // As large at least as the smallest number of 16 bits.
        sum = fmaxf(sum, 6.1035156e-5f);
        for (u32 i = 0; i < a.n_used; i++) weights[i] /= sum;
    }
    for (u32 i = 0; i < a.n_used; i++) {
        const size_t at = (size_t)token * a.n_used + i;
        const float weight = weights[i] * a.scale;
        if (a.input_weights) a.input_weights[at] = weight;
        a.weights[at] = (a.input_weights ? 1.0f : weight) * (a.expert_scale ? a.expert_scale[a.experts[at]] : 1.0f);
    }
}

struct WeighArgs {
    const float* x;       // [n_tokens][n]
    const float* weights; // [n_tokens][n_used]
    float* out;           // [n_tokens * n_used][n]
    u32 n, n_used;
};
// A row of each token for each of its experts, times the weight there.
extern "C" __global__ void __launch_bounds__(256) weigh_inputs(const __grid_constant__ WeighArgs a) {
    wait_for_input();
    let_next_start();
    const u32 i = blockIdx.y * 256 + threadIdx.x, visit = blockIdx.x;
    if (i < a.n) a.out[(size_t)visit * a.n + i] = a.weights[visit] * a.x[(size_t)(visit / a.n_used) * a.n + i];
}

enum ExpertActivation : u32 { CLAMPED_SWIGLU = 3 };
struct ExpertsActivationArgs {
    const float* x; // [n_rows][gate, up], or [n_rows][up]
    float* out;     // [n_rows][n]
    u32 n;
    u32 gated;
    u32 activation; // Activation, or CLAMPED_SWIGLU
    float limit;
};
extern "C" __global__ void __launch_bounds__(256) experts_activation(const __grid_constant__ ExpertsActivationArgs a) {
    wait_for_input();
    let_next_start();
    const u32 i = blockIdx.y * 256 + threadIdx.x, row = blockIdx.x;
    if (i >= a.n) return;
    const float* x = a.x + (size_t)row * a.n * (a.gated ? 2 : 1);
    float v;
    if (a.activation == CLAMPED_SWIGLU) {
        const float gate = fminf(x[i], a.limit), up = fminf(fmaxf(x[a.n + i], -a.limit), a.limit);
        v = gate / (1.0f + expf(-1.702f * gate)) * (1.0f + up);
    } else {
        v = activate(a.activation, x[i]) * (a.gated ? x[a.n + i] : 1.0f);
    }
    a.out[(size_t)row * a.n + i] = v;
}

struct ExpertsSumArgs {
    const float* y;       // what experts give, [n_tokens][n_used][n]
    const float* weights; // [n_tokens][n_used]
    const float* shared;  // what all tokens went through, [n_tokens][n], or null
    const float* gate;    // whose sigmoid of a product with h it is multiplied by, [n], or null
    const float* h;       // [n_tokens][n]
    float* out;           // [n_tokens][n]
    u32 n, n_used;
    u32 add;              // whether scale times the sum is added to what is there
    float scale;
};
// A block a token.
extern "C" __global__ void __launch_bounds__(256) experts_sum(const __grid_constant__ ExpertsSumArgs a) {
    __shared__ float scratch[16];
    wait_for_input();
    let_next_start();
    const u32 token = blockIdx.x;
    float factor = 1.0f;
    if (a.gate) {
        float dot = 0.0f;
        for (u32 i = threadIdx.x; i < a.n; i += blockDim.x) dot += a.h[(size_t)token * a.n + i] * a.gate[i];
        factor = 1.0f / (1.0f + expf(-block_sum_max(dot, 0.0f, scratch).x));
    }
    for (u32 i = threadIdx.x; i < a.n; i += blockDim.x) {
        float sum = 0.0f;
        for (u32 k = 0; k < a.n_used; k++) {
            const u32 visit = token * a.n_used + k;
            sum += a.weights[visit] * a.y[(size_t)visit * a.n + i];
        }
        const size_t at = (size_t)token * a.n + i;
        if (a.shared) sum += factor * a.shared[at];
        a.out[at] = a.add ? a.out[at] + a.scale * sum : sum;
    }
}
