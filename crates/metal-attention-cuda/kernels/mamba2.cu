// Mamba-2's scan (arXiv 2405.21060), with one decay for each head: S = exp(dt A) S + dt B^T x; y = (C S + D x) silu(z). B and C
// take the place of keys and queries, x that of values.
#include "recurrence.cuh"

struct Mamba2Args {
    Scan scan;            // key_dim is d_state
    Rows x;               // [head][value]
    Rows b;               // [group][key]
    Rows c;               // [group][key]
    Rows dt;              // [head]
    Rows gate;            // z: head h begins at element gate_step * h
    const float* dt_bias; // [n_head]
    const float* a;       // [n_head], negative
    const float* d;       // [n_head]
    u32 heads_of_group;   // heads that share B and C
    u32 gate_step;        // elements from a head's gate to the next one's
};
ASSERT_LAYOUT(Mamba2Args);

// A token's vectors: B and C. Its values: dt x, silu(z), D x silu(z). Its factors: the decay.
template <int EACH_> struct Mamba2 {
    static constexpr int LANES = 16, EACH = EACH_, COLUMNS = 2, VECTORS = 2, VALUES = 3, UNROLLED = 4;
    const Mamba2Args& a;
    __device__ __forceinline__ void begin(u32, u32, u32) {}
    // The inputs of a preparing thread: the addresses of its head's B, C and x, and its scalars.
    struct Given {
        const float *b, *c, *x;
        float z, dt, bias, rate, d;
    };
    __device__ __forceinline__ u32 shared_by() const { return a.heads_of_group; }
    __device__ __forceinline__ u32 key_head_of(u32 head) const { return head / a.heads_of_group; }
    // The channels of the convolution's output at which B, C and x of a head begin.
    __device__ __forceinline__ Begins channels_of(u32 head) const {
        const u32 group = key_head_of(head) * a.scan.key_dim;
        return {a.b.first + group, a.c.first + group, a.x.first + head * a.scan.value_dim};
    }
    __device__ __forceinline__ Given given(const float* b, const float* c, const float* x, u32 head, u32 column, u32 token, int lane) const {
        const bool in_range = column + lane < a.scan.value_dim;
        const float z = in_range ? row_of(a.gate, token)[head * a.gate_step + column + lane] : 0.0f;
        return {b, c, x, z, row_of(a.dt, token)[head], a.dt_bias[head], a.a[head], a.d[head]};
    }
    __device__ __forceinline__ void prepare(Prepared<Mamba2>& t, u32 head, u32 column, u32 token, int lane) const {
        const u32 group = key_head_of(head) * a.scan.key_dim;
        const float *b = row_of(a.b, token) + group, *c = row_of(a.c, token) + group, *x = row_of(a.x, token) + head * a.scan.value_dim;
        prepare(t, given(b, c, x, head, column, token, lane), head, column, token, lane);
    }
    __device__ __forceinline__ void prepare(Prepared<Mamba2>& t, const Given& g, u32, u32 column, u32, int lane) const {
        const u32 key_dim = a.scan.key_dim;
        const float *b = g.b, *c = g.c;
        const float x = column + lane < a.scan.value_dim ? g.x[column + lane] : 0.0f;
        float4 of_b[EACH / 4], of_c[EACH / 4];
#pragma unroll
        for (int e = 0; e < EACH / 4; e++) {
            of_b[e] = load_four(b, 4 * (lane + LANES * e), key_dim);
            of_c[e] = load_four(c, 4 * (lane + LANES * e), key_dim);
        }
#pragma unroll
        for (int e = 0; e < EACH / 4; e++) {
            store_vector(t, 0, 4 * (lane + LANES * e), of_b[e]);
            store_vector(t, 1, 4 * (lane + LANES * e), of_c[e]);
        }
        const float dt = softplus(g.dt + g.bias);
        const float gate = g.z * sigmoid(g.z);
        t.values[0][lane] = dt * x;
        t.values[1][lane] = gate;
        t.values[2][lane] = gate * (g.d * x);
        if (lane == 0) t.factors = make_float4(expf(dt * g.rate), 0.0f, 0.0f, 0.0f);
    }
    __device__ __forceinline__ float step(const Token<Mamba2>& t, float (&s)[COLUMNS][EACH]) const {
        float y[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
            for (int e = 0; e < EACH; e++) s[c][e] = fmaf(t.factors.x, s[c][e], t.vectors[0][e] * t.values[0][c]);
            y[c] = dot(t.vectors[1], s[c]);
        }
        return fmaf(own<LANES>(t.values[1]), sum_own<LANES>(y), own<LANES>(t.values[2]));
    }
};
static_assert(PREPARE_LANES == 16, "a thread that prepares has a column");
SCAN_KERNELS(mamba2, Mamba2, Mamba2Args)

struct FusedMamba2Args {
    Mamba2Args args;   // as for `scan`
    FusedDecode fused; // convolution and norm
};
ASSERT_LAYOUT(FusedMamba2Args);
FUSED_DECODE_KERNELS(mamba2, Mamba2, FusedMamba2Args)
