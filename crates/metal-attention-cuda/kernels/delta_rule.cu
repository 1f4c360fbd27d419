// The gated delta rule (arXiv 2412.06464), and its form with a decay for each channel (Kimi Delta Attention, arXiv 2510.26692).
// Queries and keys are normalised to length 1; then S = decay S; S += k^T beta (v - k S); o = q S. Input: queries, keys and
// values after the convolution; output: o, [token][head][value].
#include "recurrence.cuh"

struct DeltaRuleArgs {
    Scan scan;            // of the heads
    Rows x;               // queries, keys, values, after the convolution
    Rows beta;            // [value head], before the sigmoid
    Rows decay;           // [value head], or [value head][key] for decays of channels
    const float* a;       // rate of the decay, negative, [n_head]
    const float* dt_bias; // bias of the decay, of the same shape as decay without tokens
    u32 n_head_k;         // key heads
    u32 heads_of_key;     // consecutive value heads that share a key head; 0: value head h has key head h % n_head_k
    u32 unused;
    float eps;            // of the normalisation of queries and keys
};
ASSERT_LAYOUT(DeltaRuleArgs);

// A token's vectors: query and key, not normalised, and decays of channels. Their scales are part of the factors and values:
// with qf and kf for the factors that normalise them, the state gets k U, where U = kf beta v - (kf kf beta decay) (k S), and o
// is (qf decay) (q S) + (qf q k) U. Decays of channels are applied to the state first, and the factors' decay is then 1.
template <int EACH_, bool CHANNELS> struct AnyDeltaRule {
    static constexpr int LANES = 16, EACH = EACH_, COLUMNS = 2, VECTORS = CHANNELS ? 3 : 2, VALUES = 1, UNROLLED = 2;
    typedef AnyDeltaRule Self;
    const DeltaRuleArgs& a;
    __device__ __forceinline__ void begin(u32, u32, u32) {}
    // The inputs of a preparing thread: the addresses of its head's query, key and value, and its scalars. All loads are issued
    // before any result is used.
    struct Given {
        const float *q, *k, *v;
        float decay, bias, beta, rate;
    };
    __device__ __forceinline__ u32 shared_by() const { return a.scan.n_head / a.n_head_k; }
    __device__ __forceinline__ u32 key_head_of(u32 head) const { return a.heads_of_key ? head / a.heads_of_key : head % a.n_head_k; }
    // The channels of the convolution's output at which query, key and value of a head begin.
    __device__ __forceinline__ Begins channels_of(u32 head) const {
        const u32 n_keys = a.n_head_k * a.scan.key_dim, q = key_head_of(head) * a.scan.key_dim;
        return {q, n_keys + q, 2 * n_keys + head * a.scan.value_dim};
    }
    __device__ __forceinline__ Given given(const float* q, const float* k, const float* v, u32 head, u32, u32 token, int) const {
        return {q, k, v, CHANNELS ? 0.0f : row_of(a.decay, token)[head], CHANNELS ? 0.0f : a.dt_bias[head], row_of(a.beta, token)[head], a.a[head]};
    }
    __device__ __forceinline__ void prepare(Prepared<Self>& t, u32 head, u32 column, u32 token, int lane) const {
        const float* x = row_of(a.x, token);
        const Begins at = channels_of(head);
        prepare(t, given(x + at.first, x + at.second, x + at.values, head, column, token, lane), head, column, token, lane);
    }
    __device__ __forceinline__ void prepare(Prepared<Self>& t, const Given& g, u32 head, u32 column, u32 token, int lane) const {
        const u32 key_dim = a.scan.key_dim, value_dim = a.scan.value_dim;
        const float *q = g.q, *k = g.k;
        const float rate = g.rate;
        const u32 own_column = column + lane;
        const float of_value = own_column < value_dim ? g.v[own_column] : 0.0f;
        float4 of_q[EACH / 4], of_k[EACH / 4];
#pragma unroll
        for (int e = 0; e < EACH / 4; e++) {
            of_q[e] = load_four(q, 4 * (lane + LANES * e), key_dim);
            of_k[e] = load_four(k, 4 * (lane + LANES * e), key_dim);
        }
        float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH / 4; e++) {
            store_vector(t, 0, 4 * (lane + LANES * e), of_q[e]);
            store_vector(t, 1, 4 * (lane + LANES * e), of_k[e]);
            qq = dot(of_q[e], of_q[e], qq), kk = dot(of_k[e], of_k[e], kk), qk = dot(of_q[e], of_k[e], qk);
        }
        if constexpr (CHANNELS) {
            const float *decays = row_of(a.decay, token) + head * key_dim, *biases = a.dt_bias + head * key_dim;
#pragma unroll
            for (int e = 0; e < EACH / 4; e++) of_q[e] = load_four(decays, 4 * (lane + LANES * e), key_dim);
#pragma unroll
            for (int e = 0; e < EACH / 4; e++) of_k[e] = load_four(biases, 4 * (lane + LANES * e), key_dim);
            auto decay = [&](float x, float bias) { return expf(rate * softplus(x + bias)); };
#pragma unroll
            for (int e = 0; e < EACH / 4; e++) {
                const float4 d = of_q[e], b = of_k[e];
                const float4 four = make_float4(decay(d.x, b.x), decay(d.y, b.y), decay(d.z, b.z), decay(d.w, b.w));
                store_vector(t, VECTORS - 1, 4 * (lane + LANES * e), four);
            }
        }
        const float q_factor = rsqrtf(sum_lanes<PREPARE_LANES>(qq) + a.eps) * rsqrtf((float)key_dim);
        const float k_factor = rsqrtf(sum_lanes<PREPARE_LANES>(kk) + a.eps);
        qk = sum_lanes<PREPARE_LANES>(qk);
        const float decay = CHANNELS ? 1.0f : expf(rate * softplus(g.decay + g.bias));
        const float k_beta = k_factor * sigmoid(g.beta);
        t.values[0][lane] = k_beta * of_value;
        if (lane == 0) t.factors = make_float4(decay, k_factor * k_beta * decay, q_factor * decay, q_factor * qk);
    }
    __device__ __forceinline__ float step(const Token<Self>& t, float (&s)[COLUMNS][EACH]) const {
        const float (&q)[EACH] = t.vectors[0], (&k)[EACH] = t.vectors[1];
        if constexpr (CHANNELS) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
#pragma unroll
                for (int e = 0; e < EACH; e++) s[c][e] *= t.vectors[VECTORS - 1][e];
        }
        float known[COLUMNS], y[COLUMNS], u[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) known[c] = dot(k, s[c]);
        sum_all<LANES>(known);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) y[c] = dot(q, s[c]);
        const float sum = sum_own<LANES>(y);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            u[c] = fmaf(-t.factors.y, known[c], t.values[0][c]);
#pragma unroll
            for (int e = 0; e < EACH; e++) s[c][e] = fmaf(k[e], u[c], CHANNELS ? s[c][e] : t.factors.x * s[c][e]);
        }
        return fmaf(t.factors.z, sum, t.factors.w * own<LANES>(u));
    }
};
static_assert(PREPARE_LANES == 16, "a thread that prepares has a column");
template <int EACH> using DeltaRule = AnyDeltaRule<EACH, false>;
template <int EACH> using DeltaRuleOfChannels = AnyDeltaRule<EACH, true>;
SCAN_KERNELS(delta_rule, DeltaRule, DeltaRuleArgs)
SCAN_KERNELS(delta_rule_of_channels, DeltaRuleOfChannels, DeltaRuleArgs)

struct FusedDeltaRuleArgs {
    DeltaRuleArgs args; // as for `scan`
    FusedDecode fused;  // convolution and norm
};
ASSERT_LAYOUT(FusedDeltaRuleArgs);
FUSED_DECODE_KERNELS(delta_rule, DeltaRule, FusedDeltaRuleArgs)
FUSED_DECODE_KERNELS(delta_rule_of_channels, DeltaRuleOfChannels, FusedDeltaRuleArgs)
