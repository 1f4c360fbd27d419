// Routing of a mixture of experts: from the router's products to the chosen experts of a token and their weights. One warp routes one token.
#pragma once
#include "common.cuh"

enum Score : u32 { SOFTMAX = 0, SIGMOID_OF_EACH = 1, SOFTMAX_OF_CHOSEN = 2 };
constexpr u32 MAX_CHOSEN = 64;

struct RouteArgs {
    const float* products;     // [n_tokens][n_expert] of the router, with its bias
    const float* choice_bias;  // [n_expert] added for the choice only; null: none
    const float* expert_scale; // [n_expert] factor on each expert's result; null: 1
    u32* experts;              // [n_tokens][n_used] chosen experts, best first
    float* weights;            // [n_tokens][n_used] factors on the experts' results
    float* input_weights;      // [n_tokens][n_used] factors on their inputs; null: the weights are applied to results
    u32 n_expert, n_used;
    u32 score;                 // Score: how products become scores
    u32 renormalize;
    u32 n_group, n_group_used; // groups of experts, and how many of them are chosen from; 0: no groups
    float scale;
    u32 unused;
};
ASSERT_LAYOUT(RouteArgs);

struct Best {
    float value;
    u32 at;
};
// The largest value of all lanes; the lowest index on ties.
__device__ __forceinline__ Best best_of_warp(Best b) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        const Best other = {__shfl_xor_sync(~0u, b.value, d), __shfl_xor_sync(~0u, b.at, d)};
        if (other.value > b.value || other.value == b.value && other.at < b.at) b = other;
    }
    return b;
}
// The largest value that is not taken, ignoring NaN; marks it as taken.
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

// Scratch for routing one token, in shared memory: 14 bytes for each expert.
struct RoutingScratch {
    float *scores, *choice_scores, *of_groups; // [n_expert] each: scores, scores with choice_bias, scores of groups
    bool *taken, *group_taken;
    __device__ RoutingScratch(u32 n_expert, float* memory) {
        scores = memory, choice_scores = scores + n_expert, of_groups = choice_scores + n_expert;
        taken = (bool*)(of_groups + n_expert), group_taken = taken + n_expert;
    }
};

// Turns the products in `c.scores` into scores, in place, and fills `c.choice_scores`: -infinity for experts that cannot be chosen.
__device__ __forceinline__ void make_scores(const RouteArgs& a, const RoutingScratch& c, u32 lane) {
    float largest = -INFINITY, sum = 0.0f;
    for (u32 i = lane; i < a.n_expert; i += 32) c.taken[i] = c.group_taken[i] = false;
    __syncwarp();
    if (a.score == SOFTMAX) {
        for (u32 i = lane; i < a.n_expert; i += 32) largest = fmaxf(largest, c.scores[i]);
        largest = warp_max(largest);
        for (u32 i = lane; i < a.n_expert; i += 32) sum += expf(c.scores[i] - largest);
        sum = warp_sum(sum);
    }
    for (u32 i = lane; i < a.n_expert; i += 32) {
        const float x = c.scores[i];
        const float score = a.score == SOFTMAX           ? expf(x - largest) / sum
                            : a.score == SIGMOID_OF_EACH ? 1.0f / (1.0f + expf(-x))
                                                         : x;
        c.scores[i] = score;
        const float choice = a.choice_bias ? score + a.choice_bias[i] : score;
        // NaN is never chosen before a number.
        c.choice_scores[i] = choice == choice ? choice : -INFINITY;
    }
    __syncwarp();
    if (a.n_group == 0) return;
    // The score of a group is the sum of its two best experts' scores.
    const u32 of_group = a.n_expert / a.n_group;
    for (u32 g = lane; g < a.n_group; g += 32) {
        float first = -INFINITY, second = -INFINITY;
        for (u32 i = g * of_group; i < (g + 1) * of_group; i++) {
            second = fmaxf(second, fminf(first, c.choice_scores[i]));
            first = fmaxf(first, c.choice_scores[i]);
        }
        c.of_groups[g] = of_group > 1 ? first + second : first;
    }
    __syncwarp();
    for (u32 i = 0; i < a.n_group_used; i++) take_best(c.of_groups, c.group_taken, a.n_group, lane);
    for (u32 i = lane; i < a.n_expert; i += 32)
        if (!c.group_taken[i / of_group]) c.choice_scores[i] = -INFINITY;
    __syncwarp();
}

// Writes the weights of up to 32 chosen experts, from their scores `weights`.
__device__ __forceinline__ void write_weights_together(const RouteArgs& a, const u32* chosen, const float* weights, u32 token, u32 lane) {
    const bool there = lane < a.n_used;
    float weight = there ? weights[lane] : 0.0f;
    const u32 expert = there ? chosen[lane] : 0;
    const float scale = a.expert_scale && there ? a.expert_scale[expert] : 1.0f;
    if (a.score == SOFTMAX_OF_CHOSEN) {
        const float largest = warp_max(there ? weight : -INFINITY);
        weight = there ? expf(weight - largest) : 0.0f;
        weight /= warp_sum(weight);
    }
    // The sum is at least F16's smallest normal number, against division by zero.
    if (a.renormalize) weight /= fmaxf(warp_sum(weight), 6.1035156e-5f);
    if (!there) return;
    const size_t at = (size_t)token * a.n_used + lane;
    weight *= a.scale;
    a.experts[at] = expert;
    if (a.input_weights) a.input_weights[at] = weight;
    a.weights[at] = (a.input_weights ? 1.0f : weight) * scale;
}
