// The time mixes of RWKV-6 (arXiv 2404.05892) and RWKV-7 (arXiv 2503.14456), and what stands before their recurrences.
#include "recurrence.cuh"

struct TokenShiftArgs {
    Runs runs;
    States states;      // the row of the token before
    const float* x;     // [n_tokens][width]
    const float* lerps; // [n_mix][width]
    const float* more;  // what tokens add to these, [n_tokens][n_mix][width], or null
    float* out;         // [n_mix][n_tokens][width]
    u32 width, n_mix, n_tokens;
    u32 advance;        // whether the states go on
};
// Tokens of a run that a block takes.
constexpr u32 SHIFTED = 32;

// x + (previous - x) (lerp + more). The block with a run's first tokens has its state for itself.
extern "C" __global__ void __launch_bounds__(128) token_shift(const __grid_constant__ TokenShiftArgs a) {
    wait_for_input();
    let_next_start();
    const u32 channel = blockIdx.x * 128 + threadIdx.x;
    const uint4 run = a.runs.runs[blockIdx.z];
    const u32 begin = blockIdx.y * SHIFTED, end = min(begin + SHIFTED, run.y);
    if (channel >= a.width || begin >= run.y) return;
    const float* x = a.x + (size_t)run.x * a.width + channel;
    float previous = begin == 0 ? slot_of(a.states, a.runs.segments[run.z].z)[channel] : x[(size_t)(begin - 1) * a.width];
    for (u32 t = begin; t < end; t++) {
        const float v = x[(size_t)t * a.width];
        const size_t token = run.x + t;
        for (u32 m = 0; m < a.n_mix; m++) {
            float lerp = a.lerps[(size_t)m * a.width + channel];
            if (a.more) lerp += a.more[(token * a.n_mix + m) * a.width + channel];
            a.out[((size_t)m * a.n_tokens + token) * a.width + channel] = v + (previous - v) * lerp;
        }
        previous = v;
    }
    if (begin > 0 || !a.advance) return;
    for (u32 i = 0; i < run.w; i++) {
        const uint4 segment = a.runs.segments[run.z + i];
        slot_of(a.states, segment.w)[channel] = a.x[(size_t)(segment.x + segment.y - 1) * a.width + channel];
    }
}

struct Rwkv6Args {
    Walk walk;
    const float* r;          // [token][head][key]
    const float* k;          // [token][kv head][key]
    const float* v;
    const float* decay;      // [token][head][key], before its functions
    const float* decay_bias; // [head][key]
    const float* bonus;      // [head][key]; null: gated linear attention
    u32 n_head_kv, unused;
};
template <int EACH> struct Rwkv6 {
    const Rwkv6Args& a;
    struct Token {
        float r[EACH], k[EACH], decay[EACH], v[COLUMNS];
    };
    __device__ __forceinline__ void load(Token& t, u32 head, u32 column, u32 token, int lane) const {
        const u32 dim = a.walk.key_dim, kv_head = head / (a.walk.n_head / a.n_head_kv);
        const size_t at = ((size_t)token * a.walk.n_head + head) * dim, at_kv = ((size_t)token * a.n_head_kv + kv_head) * dim;
        load_key(t.r, a.r + at, dim, lane);
        load_key(t.k, a.k + at_kv, dim, lane);
        load_key(t.decay, a.decay + at, dim, lane);
        load_value(t.v, a.v + at_kv, dim, column);
    }
    __device__ __forceinline__ void step(const Token& t, float (&s)[COLUMNS][EACH], float (&y)[COLUMNS], u32 head, u32, u32) const {
        const int lane = threadIdx.x % 32;
        const u32 dim = a.walk.key_dim;
        const float scale = rsqrtf((float)dim);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) y[c] = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const u32 i = lane + 32 * e;
            const bool there = i < dim;
            const float w = expf(-expf(t.decay[e] + (there ? a.decay_bias[head * dim + i] : 0.0f)));
            const float bonus = a.bonus && there ? a.bonus[head * dim + i] : 0.0f;
            const float k = a.bonus ? t.k[e] : t.k[e] * (1.0f - w), r = a.bonus ? t.r[e] : t.r[e] * scale;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                const float kv = k * t.v[c], before = s[c][e];
                s[c][e] = w * before + kv;
                y[c] += r * (a.bonus ? before + bonus * kv : s[c][e]);
            }
        }
        sum_columns(y);
    }
};
WALKS(rwkv6, Rwkv6, Rwkv6Args)

struct Rwkv7InputsArgs {
    float* decay;            // [token][head][key]: in: before its functions
    float* rate;             // out: the normalised key times the rate
    float* k;
    float* v;
    float* kappa;            // out: less the normalised key that is taken away
    const float* decay_bias; // [head][key]
    const float* rate_bias;
    const float* removed;
    const float* kept;
    float* first_value;      // [token][head][key]: the first layer's values
    const float* value_mix;  // how much of these comes in; null: this is the first layer
    const float* value_bias;
    u32 n_head, head_dim;
};
// A warp for a head of a token.
extern "C" __global__ void __launch_bounds__(32) rwkv7_inputs(const __grid_constant__ Rwkv7InputsArgs a) {
    wait_for_input();
    let_next_start();
    const u32 head = blockIdx.x, token = blockIdx.y, lane = threadIdx.x;
    const size_t at = ((size_t)token * a.n_head + head) * a.head_dim;
    const u32 channel = head * a.head_dim;
    float squares = 0.0f;
    for (u32 i = lane; i < a.head_dim; i += 32) {
        const float kappa = a.k[at + i] * a.removed[channel + i];
        squares += kappa * kappa;
    }
    const float factor = 1.0f / fmaxf(sqrtf(warp_sum(squares)), 1e-12f);
    for (u32 i = lane; i < a.head_dim; i += 32) {
        const float k = a.k[at + i], unit = k * a.removed[channel + i] * factor;
        const float rate = sigmoid(a.rate[at + i] + a.rate_bias[channel + i]);
        a.decay[at + i] = expf(-0.60653066f * sigmoid(a.decay[at + i] + a.decay_bias[channel + i]));
        a.rate[at + i] = unit * rate;
        a.kappa[at + i] = -unit;
        a.k[at + i] = k * ((rate - 1.0f) * a.kept[channel + i] + 1.0f);
        if (a.value_mix) {
            const float v = a.v[at + i];
            a.v[at + i] = v + (a.first_value[at + i] - v) * sigmoid(a.value_mix[at + i] + a.value_bias[channel + i]);
        } else {
            a.first_value[at + i] = a.v[at + i];
        }
    }
}

struct Rwkv7Args {
    Walk walk;
    const float* r;     // [token][head][key], as are all
    const float* decay;
    const float* k;
    const float* v;
    const float* a;     // what takes away
    const float* b;     // and puts back
};
template <int EACH> struct Rwkv7 {
    const Rwkv7Args& a;
    struct Token {
        float r[EACH], decay[EACH], k[EACH], a[EACH], b[EACH], v[COLUMNS];
    };
    __device__ __forceinline__ void load(Token& t, u32 head, u32 column, u32 token, int lane) const {
        const u32 dim = a.walk.key_dim;
        const size_t at = ((size_t)token * a.walk.n_head + head) * dim;
        load_key(t.r, a.r + at, dim, lane);
        load_key(t.decay, a.decay + at, dim, lane);
        load_key(t.k, a.k + at, dim, lane);
        load_key(t.a, a.a + at, dim, lane);
        load_key(t.b, a.b + at, dim, lane);
        load_value(t.v, a.v + at, dim, column);
    }
    __device__ __forceinline__ void step(const Token& t, float (&s)[COLUMNS][EACH], float (&y)[COLUMNS], u32, u32, u32) const {
        float u[COLUMNS] = {};
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int e = 0; e < EACH; e++) u[c] += t.a[e] * s[c][e];
        sum_columns(u);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            y[c] = 0.0f;
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                s[c][e] = t.decay[e] * s[c][e] + t.k[e] * t.v[c] + t.b[e] * u[c];
                y[c] += t.r[e] * s[c][e];
            }
        }
        sum_columns(y);
    }
};
WALKS(rwkv7, Rwkv7, Rwkv7Args)
