// The gated delta rule (arXiv 2412.06464) and the one whose channels decay each by itself (arXiv 2510.26692): queries and keys are
// brought to length 1, S = decay S; S += k^T beta (v - k S); o = q S.
#include "recurrence.cuh"

struct DeltaRuleArgs {
    Walk walk;
    Rows x;              // queries, keys, values, after their convolution
    Rows beta;           // of each value head
    Rows decay;          // of each value head, or of each of its channels
    const float* a;      // [n_head]
    const float* dt_bias;
    u32 n_head_k;
    u32 grouped;         // value heads that share a key head lie together; else they come in turns
    u32 of_channels;
    float eps;
};

template <int EACH> struct DeltaRule {
    const DeltaRuleArgs& a;
    struct Token {
        float q[EACH], k[EACH], v[COLUMNS], decay[EACH], beta;
    };
    __device__ __forceinline__ void load(Token& t, u32 head, u32 column, u32 token, int lane) const {
        const u32 key_dim = a.walk.key_dim, n_keys = a.n_head_k * key_dim;
        const u32 key_head = a.grouped ? head / (a.walk.n_head / a.n_head_k) : head % a.n_head_k;
        const float* x = row_of(a.x, token);
        load_key(t.q, x + key_head * key_dim, key_dim, lane);
        load_key(t.k, x + n_keys + key_head * key_dim, key_dim, lane);
        load_value(t.v, x + 2 * n_keys + head * a.walk.value_dim, a.walk.value_dim, column);
        t.beta = row_of(a.beta, token)[head];
        const float* decay = row_of(a.decay, token);
        if (a.of_channels) {
            load_key(t.decay, decay + head * key_dim, key_dim, lane);
        } else {
#pragma unroll
            for (int e = 0; e < EACH; e++) t.decay[e] = decay[head];
        }
    }
    __device__ __forceinline__ void step(const Token& t, float (&s)[COLUMNS][EACH], float (&y)[COLUMNS], u32 head, u32, u32) const {
        const int lane = threadIdx.x % 32;
        const u32 key_dim = a.walk.key_dim;
        float qq = 0.0f, kk = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; e++) qq += t.q[e] * t.q[e], kk += t.k[e] * t.k[e];
        const float q_factor = rsqrtf(warp_sum(qq) + a.eps) * rsqrtf((float)key_dim), k_factor = rsqrtf(warp_sum(kk) + a.eps);
        const float rate = a.a[head], beta = sigmoid(t.beta);
        float known[COLUMNS] = {};
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const u32 k = lane + 32 * e;
            const float bias = a.of_channels ? (k < key_dim ? a.dt_bias[head * key_dim + k] : 0.0f) : a.dt_bias[head];
            const float decay = expf(rate * softplus(t.decay[e] + bias));
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                s[c][e] *= decay;
                known[c] += k_factor * t.k[e] * s[c][e];
            }
        }
        sum_columns(known);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const float u = beta * (t.v[c] - known[c]);
            y[c] = 0.0f;
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                s[c][e] += k_factor * t.k[e] * u;
                y[c] += q_factor * t.q[e] * s[c][e];
            }
        }
        sum_columns(y);
    }
};
WALKS(delta_rule, DeltaRule, DeltaRuleArgs)
