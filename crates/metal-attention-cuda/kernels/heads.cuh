// From the products of q/k/v to attention's operands: norm of heads, RoPE, scale. And tokens and page tables, as attention kernels read them.
#pragma once
#include "common.cuh"

enum HeadNorm : u32 { NO_NORM = 0, NORM_OF_HEAD = 1, NORM_OF_EACH_HEAD = 2, NORM_UNWEIGHTED = 3 };
enum Rotation : u32 { NO_ROPE = 0, INTERLEAVED = 1, HALVES = 2 };

struct HeadInputs {
    const float* q_norm;    // weights of the norm of queries, [head_dim], or [n_head][head_dim] where each head has its own
    const float* k_norm;    // weights of the norm of keys, [head_dim] or [n_head_kv][head_dim]
    const float2* rope;     // RoPE cos/sin table, [rows][n_rot / 2], indexed by `Token::rope_row`
    u32 norm;               // HeadNorm: none, the same weights for all heads, weights of each head, no weights
    u32 norm_after_rope;    // 1: the norm follows RoPE; 0: it comes before
    u32 rotation;           // Rotation: which elements form a pair
    u32 n_rot;              // rotated elements at the start of a head; even
    float eps;              // epsilon of the norm
    float scale;            // factor on queries
};
ASSERT_LAYOUT(HeadInputs);

// A gate of attention's result.
enum GateActivation : u32 { GATE_SIGMOID = 0, GATE_SOFTPLUS = 1 };
struct ResultGate {
    const float* gates; // of head 0 of token 0, or null: no gate
    u32 stride;         // elements from one token's gates to the next one's
    u32 head_step;      // from one head's to the next one's
    u32 element_step;   // from the gate of one element of a head to the next one's; 0: a head has one gate
    u32 activation;     // GateActivation
};
ASSERT_LAYOUT(ResultGate);

// Element d of a head's result, times the factor of its gate. There are gates.
__device__ __forceinline__ float apply_gate(const ResultGate& gate, u32 token, u32 head, u32 d, float v) {
    const float g = gate.gates[(size_t)token * gate.stride + head * gate.head_step + d * gate.element_step];
    if (gate.activation == GATE_SOFTPLUS) {
        // ln(1 + e), for small e by its series: the sum with 1 and __logf have errors of 1e-7, whatever e is. The library's log1pf needs more registers.
        const float e = __expf(-fabsf(g));
        return v * (fmaxf(g, 0.0f) + (e < 0.01f ? e * (1.0f - e * (0.5f - e * (1.0f / 3.0f))) : __logf(1.0f + e)));
    }
    return v / (1.0f + __expf(-g));
}

// The RMSNorm of a head in shared memory, in place; one warp. `weight`: [dim], or null.
__device__ __forceinline__ void norm_head(float* v, const float* weight, float eps, int dim, int lane) {
    float squares = 0.0f;
    for (int i = lane; i < dim; i += 32) squares += v[i] * v[i];
    const float factor = rsqrtf(warp_sum(squares) / dim + eps);
    __syncwarp();
    for (int i = lane; i < dim; i += 32) v[i] *= weight ? factor * weight[i] : factor;
    __syncwarp();
}

// Rotates a head by RoPE. `cos_sin`: [n_rot / 2] of its position.
__device__ __forceinline__ void rotate_head(float* v, const HeadInputs& in, const float2* cos_sin, int lane) {
    if (in.rotation == NO_ROPE) return;
    for (int i = lane; i < (int)in.n_rot / 2; i += 32) {
        const int a = in.rotation == HALVES ? i : 2 * i, b = in.rotation == HALVES ? i + in.n_rot / 2 : 2 * i + 1;
        const float2 rotation = cos_sin[i];
        const float x = v[a], y = v[b];
        v[a] = x * rotation.x - y * rotation.y;
        v[b] = x * rotation.y + y * rotation.x;
    }
    __syncwarp();
}

// Applies norm, rotation and scale to a head in shared memory; one warp. `weight`: [dim] of the norm, or null; `cos_sin`: of its position.
__device__ __forceinline__ void make_head(float* v, const HeadInputs& in, const float* weight, const float2* cos_sin, int dim, float scale, int lane) {
    if (in.norm != NO_NORM && !in.norm_after_rope) norm_head(v, weight, in.eps, dim, lane);
    rotate_head(v, in, cos_sin, lane);
    if (in.norm != NO_NORM && in.norm_after_rope) norm_head(v, weight, in.eps, dim, lane);
    if (scale != 1.0f) {
        for (int i = lane; i < dim; i += 32) v[i] *= scale;
        __syncwarp();
    }
}

// Overload for head `head` of a token with this row of the RoPE table; `weights`: the norm's weights of all heads of its kind.
__device__ __forceinline__ void make_head(float* v, const HeadInputs& in, const float* weights, u32 head, u32 rope_row, int dim, float scale, int lane) {
    const float* weight = in.norm == NORM_OF_EACH_HEAD ? weights + (size_t)head * dim : in.norm == NORM_UNWEIGHTED ? nullptr : weights;
    make_head(v, in, weight, in.rope + (size_t)rope_row * (in.n_rot / 2), dim, scale, lane);
}

// A token of a batch, or a row of embeddings in its place.
struct Token {
    u32 id, seq;  // its id in the vocabulary, the index of its sequence
    u32 pos;      // its index in the sequence, by which it is cached and masks are applied
    u32 last;     // the last index that it sees under masks that look ahead and in bidirectional spans; otherwise at most `pos`
    u32 position; // its position, which equals the index before the first span of rows: for learned positions and temperatures
    u32 rope_row; // the row of the RoPE table for its position
};
ASSERT_LAYOUT(Token);
constexpr int PAGE = 64;

struct Pages {
    const u32* pages; // page tables [sequence][n_pages] of the layer's cache group
    u32 n_pages, unused;
};
ASSERT_LAYOUT(Pages);

template <typename T> struct Cache {
    T* k; // [page][n_head_kv][64][head_dim]; v alike
    T* v;
};
__device__ __forceinline__ void store(half* p, float v) { *p = __float2half_rn(v); }
__device__ __forceinline__ void store(float* p, float v) { *p = v; }
__device__ __forceinline__ float to_float(half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(float v) { return v; }
