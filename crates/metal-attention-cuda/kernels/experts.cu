// Mixtures of experts: the choice of each token's experts and their weights, the activation between their matrices, and the
// weighted sum of their results. An item is a token at one of its experts, `token * n_used + i`.
#include "routing.cuh"

SHARED_MEMORY(16, float, route_memory);

// Copies the token's router logits to shared memory, where scores are made of them.
__device__ __forceinline__ void load_products(const RouteArgs& a, const RoutingScratch& c, u32 token, u32 lane) {
    for (u32 i = lane; i < a.n_expert; i += 32) c.scores[i] = __ldcg(a.products + (size_t)token * a.n_expert + i);
}

// One thread computes the weights from the scores of the chosen experts, and stores experts and weights.
__device__ __forceinline__ void write_weights(const RouteArgs& a, const u32* chosen, float* weights, u32 token) {
    float max_score = -INFINITY, sum = 0.0f;
    if (a.score == SOFTMAX_OF_CHOSEN) {
        for (u32 i = 0; i < a.n_used; i++) max_score = fmaxf(max_score, weights[i]);
        for (u32 i = 0; i < a.n_used; i++) weights[i] = expf(weights[i] - max_score), sum += weights[i];
        for (u32 i = 0; i < a.n_used; i++) weights[i] /= sum;
    }
    if (a.renormalize) {
        sum = 0.0f;
        for (u32 i = 0; i < a.n_used; i++) sum += weights[i];
        // At least the smallest normal F16 number, to avoid a division by zero.
        sum = fmaxf(sum, 6.1035156e-5f);
        for (u32 i = 0; i < a.n_used; i++) weights[i] /= sum;
    }
    for (u32 i = 0; i < a.n_used; i++) {
        const size_t at = (size_t)token * a.n_used + i;
        const float weight = weights[i] * a.scale;
        a.experts[at] = chosen[i];
        if (a.input_weights) a.input_weights[at] = weight;
        a.weights[at] = (a.input_weights ? 1.0f : weight) * (a.expert_scale ? a.expert_scale[chosen[i]] : 1.0f);
    }
}

// Chooses the experts of a token. A warp for each token.
extern "C" __global__ void __launch_bounds__(32) route(const __grid_constant__ RouteArgs a) {
    __shared__ float weights[MAX_CHOSEN];
    __shared__ u32 chosen[MAX_CHOSEN];
    wait_for_input();
    let_next_start();
    const u32 token = blockIdx.x, lane = threadIdx.x;
    const RoutingScratch c(a.n_expert, route_memory);
    load_products(a, c, token, lane);
    make_scores(a, c, lane);
    for (u32 i = 0; i < a.n_used; i++) {
        const Best best = take_best(c.choice_scores, c.taken, a.n_expert, lane);
        if (lane == 0) {
            chosen[i] = best.at;
            weights[i] = c.scores[best.at];
        }
    }
    __syncwarp();
    if (lane == 0) write_weights(a, chosen, weights, token);
}

struct FusedRouteArgs {
    RouteArgs route;     // its router logits are stored, too
    const float* x;      // [n_tokens][n_in]
    const float* norm;   // weight of the RMSNorm
    float* h;            // the normalised rows, for the experts, [n_tokens][n_in]
    const float* router; // [n_expert][n_in]
    const float* bias;   // [n_expert], or null
    u32* tickets;        // counters [n_tokens], zero between launches
    u32 n_in;            // elements of a row
    float eps;           // of the norm
};
ASSERT_LAYOUT(FusedRouteArgs);
constexpr int ROUTE_THREADS = 256;
// Vectors of four elements of a row that a thread holds in registers.
constexpr int ROUTE_KEPT = 8;

// Norm, router product and choice of experts for a few tokens, in one launch. Each block computes the logit of one expert; its
// weights do not depend on the previous launch, so their load starts before `wait_for_input`. The first block also stores the
// normalised row, and the last block of a token to finish chooses.
extern "C" __global__ void __launch_bounds__(ROUTE_THREADS, 2) route_alone(const __grid_constant__ FusedRouteArgs a) {
    __shared__ float2 sums[ROUTE_THREADS / 32];
    __shared__ float weights[MAX_CHOSEN];
    __shared__ u32 chosen[MAX_CHOSEN];
    __shared__ bool is_last;
    const u32 expert = blockIdx.x, token = blockIdx.y, tid = threadIdx.x, lane = tid % 32, n4 = a.n_in / 4;
    const float4* row = (const float4*)(a.router + (size_t)expert * a.n_in);
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 kept[ROUTE_KEPT];
#pragma unroll
    for (int j = 0; j < ROUTE_KEPT; j++) kept[j] = tid + j * ROUTE_THREADS < n4 ? row[tid + j * ROUTE_THREADS] : zero;
    wait_for_input();
    let_next_start();
    const float4 *x = (const float4*)(a.x + (size_t)token * a.n_in), *norm = (const float4*)a.norm;
    float squares = 0.0f, dot = 0.0f;
#pragma unroll
    for (int j = 0; j < ROUTE_KEPT; j++) {
        const u32 i = tid + j * ROUTE_THREADS;
        if (i >= n4) break;
        float4 v = x[i];
        const float4 w = norm[i];
        squares += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
        v.x *= w.x, v.y *= w.y, v.z *= w.z, v.w *= w.w;
        dot += (v.x * kept[j].x + v.y * kept[j].y) + (v.z * kept[j].z + v.w * kept[j].w);
        kept[j] = v;
    }
    squares = warp_sum(squares), dot = warp_sum(dot);
    if (lane == 0) sums[tid / 32] = make_float2(squares, dot);
    __syncthreads();
    squares = 0.0f, dot = 0.0f;
#pragma unroll
    for (int i = 0; i < ROUTE_THREADS / 32; i++) squares += sums[i].x, dot += sums[i].y;
    const float rms = rsqrtf(squares / a.n_in + a.eps);
    if (tid == 0) {
        const float product = rms * dot;
        ((float*)a.route.products)[(size_t)token * a.route.n_expert + expert] = a.bias ? product + a.bias[expert] : product;
        __threadfence();
        is_last = atomicAdd(a.tickets + token, 1u) == gridDim.x - 1;
        if (is_last) a.tickets[token] = 0;
        __threadfence();
    }
    if (expert == 0) {
        float4* h = (float4*)(a.h + (size_t)token * a.n_in);
#pragma unroll
        for (int j = 0; j < ROUTE_KEPT; j++) {
            const float4 v = kept[j];
            if (tid + j * ROUTE_THREADS < n4) h[tid + j * ROUTE_THREADS] = make_float4(v.x * rms, v.y * rms, v.z * rms, v.w * rms);
        }
    }
    __syncthreads();
    if (!is_last) return;
    const u32 n_expert = a.route.n_expert;
    const RoutingScratch c(n_expert, route_memory);
    if (tid < 32) {
        load_products(a.route, c, token, lane);
        make_scores(a.route, c, lane);
    }
    __syncthreads();
    // The place of an expert is the number of better ones; on ties the lower index is better.
    for (u32 i = tid; i < n_expert; i += ROUTE_THREADS) {
        const float score = c.choice_scores[i];
        u32 place = 0, j = 0;
        if (n_expert % 4 == 0) {
#pragma unroll 4
            for (; j < n_expert; j += 4) {
                const float4 four = *(const float4*)(c.choice_scores + j);
                place += (four.x > score || four.x == score && j < i) + (four.y > score || four.y == score && j + 1 < i);
                place += (four.z > score || four.z == score && j + 2 < i) + (four.w > score || four.w == score && j + 3 < i);
            }
        }
        for (; j < n_expert; j++) place += c.choice_scores[j] > score || c.choice_scores[j] == score && j < i;
        if (place < a.route.n_used) {
            chosen[place] = i;
            weights[place] = c.scores[i];
        }
    }
    __syncthreads();
    if (tid >= 32) return;
    if (a.route.n_used <= 32) write_weights_together(a.route, chosen, weights, token, lane);
    else if (lane == 0) write_weights(a.route, chosen, weights, token);
}

struct WeighArgs {
    const float* x;       // [n_tokens][n]
    const float* weights; // [n_tokens][n_used]
    float* out;           // [n_tokens * n_used][n]
    u32 n, n_used;        // elements of a row, experts of a token
};
ASSERT_LAYOUT(WeighArgs);
// Copies each token's row for each of its experts, times the expert's weight.
extern "C" __global__ void __launch_bounds__(256) weigh_inputs(const __grid_constant__ WeighArgs a) {
    wait_for_input();
    let_next_start();
    const u32 i = blockIdx.y * 256 + threadIdx.x, item = blockIdx.x;
    if (i < a.n) a.out[(size_t)item * a.n + i] = a.weights[item] * a.x[(size_t)(item / a.n_used) * a.n + i];
}

struct ExpertsActivationArgs {
    const float* x; // [n_items][gate, up], or [n_items][up]
    float* out;     // [n_items][n]
    u32 n;          // elements of a row of the result
    u32 gated;      // whether there is a gate
    u32 activation; // Activation
    float limit;    // of CLAMPED_SWIGLU and CLAMPED_SILU
};
ASSERT_LAYOUT(ExpertsActivationArgs);
// out = activation(gate) * up of each item, or activation(up).
extern "C" __global__ void __launch_bounds__(256) experts_activation(const __grid_constant__ ExpertsActivationArgs a) {
    wait_for_input();
    let_next_start();
    const u32 i = blockIdx.y * 256 + threadIdx.x, row = blockIdx.x;
    if (i >= a.n) return;
    const float* x = a.x + (size_t)row * a.n * (a.gated ? 2 : 1);
    const float v = a.gated ? gated(a.activation, a.limit, x[i], x[a.n + i]) : activate(a.activation, x[i]);
    a.out[(size_t)row * a.n + i] = v;
}

struct ExpertsSumArgs {
    const float* y;       // the experts' results, [n_tokens][n_used][n]
    const float* weights; // [n_tokens][n_used]
    const float* shared;  // the result of the shared experts, [n_tokens][n], or null
    const float* gate;    // [n], or null: `shared` is multiplied by the sigmoid of its product with h
    const float* h;       // [n_tokens][n]
    float* out;           // [n_tokens][n]
    u32 n, n_used;        // elements of a row, experts of a token
    u32 add;              // whether scale times the sum is added to `out`
    float scale;          // factor on the sum, where it is added
};
ASSERT_LAYOUT(ExpertsSumArgs);
// Several blocks of a token share its elements.
extern "C" __global__ void __launch_bounds__(256) experts_sum(const __grid_constant__ ExpertsSumArgs a) {
    __shared__ float scratch[16];
    wait_for_input();
    let_next_start();
    const u32 token = blockIdx.y;
    float factor = 1.0f;
    if (a.gate) {
        float dot = 0.0f;
        for (u32 i = threadIdx.x; i < a.n; i += blockDim.x) dot += a.h[(size_t)token * a.n + i] * a.gate[i];
        factor = 1.0f / (1.0f + expf(-block_sum_max(dot, 0.0f, scratch).x));
    }
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += gridDim.x * blockDim.x) {
        float sum = 0.0f;
#pragma unroll 8
        for (u32 k = 0; k < a.n_used; k++) {
            const u32 item = token * a.n_used + k;
            sum += a.weights[item] * a.y[(size_t)item * a.n + i];
        }
        const size_t at = (size_t)token * a.n + i;
        if (a.shared) sum += factor * a.shared[at];
        a.out[at] = a.add ? a.out[at] + a.scale * sum : sum;
    }
}
