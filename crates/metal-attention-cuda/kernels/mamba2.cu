// The state space of Mamba-2 (arXiv 2405.21060), each head with one decay: S = exp(dt A) S + dt B^T x; y = (C S + D x) silu(z).
#include "recurrence.cuh"

struct Mamba2Args {
    Walk walk;           // keys are B and C
    Rows x;              // [head][value]
    Rows b;              // [group][key]
    Rows c;
    Rows dt;             // [head]
    Rows gate;           // element `gate_step` h of head h on
    const float* dt_bias;
    const float* a;      // [n_head], negative
    const float* d;      // [n_head]
    u32 heads_of_group;
    u32 gate_step;
};

template <int EACH> struct Mamba2 {
    const Mamba2Args& a;
    struct Token {
        float b[EACH], c[EACH], x[COLUMNS], gate[COLUMNS], dt;
    };
    __device__ __forceinline__ void load(Token& t, u32 head, u32 column, u32 token, int lane) const {
        const u32 key_dim = a.walk.key_dim, value_dim = a.walk.value_dim, group = head / a.heads_of_group;
        load_key(t.b, row_of(a.b, token) + group * key_dim, key_dim, lane);
        load_key(t.c, row_of(a.c, token) + group * key_dim, key_dim, lane);
        load_value(t.x, row_of(a.x, token) + head * value_dim, value_dim, column);
        load_value(t.gate, row_of(a.gate, token) + head * a.gate_step, value_dim, column);
        t.dt = row_of(a.dt, token)[head];
    }
    __device__ __forceinline__ void step(const Token& t, float (&s)[COLUMNS][EACH], float (&y)[COLUMNS], u32 head, u32, u32) const {
        const float dt = softplus(t.dt + a.dt_bias[head]), decay = expf(dt * a.a[head]), d = a.d[head];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const float x = dt * t.x[c];
            y[c] = 0.0f;
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                s[c][e] = decay * s[c][e] + t.b[e] * x;
                y[c] += t.c[e] * s[c][e];
            }
        }
        sum_columns(y);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) y[c] = (y[c] + d * t.x[c]) * (t.gate[c] * sigmoid(t.gate[c]));
    }
};
WALKS(mamba2, Mamba2, Mamba2Args)
