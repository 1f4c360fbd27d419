// RWKV: token shift, the scans of RWKV-6 (arXiv 2404.05892) and RWKV-7 (arXiv 2503.14456), the kernel that prepares RWKV-7's
// inputs, and several independent products of a single token in one launch.
#include "recurrence.cuh"

struct TokenShiftArgs {
    Runs runs;                  // of the micro-batch
    States states;              // the last token's input, of each sequence
    const float* x;             // [n_tokens][width]
    const float* lerps;         // [n_mix][width]
    const float* more;          // what tokens add to the interpolation weights, [n_tokens][n_mix][width], or null
    float* out;                 // [n_mix][n_tokens][width]
    u32 width, n_mix, n_tokens; // elements of a row, interpolations, tokens
    u32 advance;                // whether to store the last input as the new state
};
ASSERT_LAYOUT(TokenShiftArgs);
// Tokens of a run that a block processes, and tokens that a thread loads at a time.
constexpr u32 SHIFTED = 16;
constexpr u32 AT_ONCE = 8;

// out = x + (previous - x) (lerp + more), where `previous` is the same channel of the token before. Only the block with a run's
// first tokens reads and writes the run's states.
extern "C" __global__ void __launch_bounds__(128) token_shift(const __grid_constant__ TokenShiftArgs a) {
    wait_for_input();
    let_next_start();
    const u32 channel = blockIdx.x * 128 + threadIdx.x;
    const uint4 run = a.runs.runs[blockIdx.z];
    const u32 begin = blockIdx.y * SHIFTED, end = min(begin + SHIFTED, run.y);
    if (channel >= a.width || begin >= run.y) return;
    const float* x = a.x + (size_t)run.x * a.width + channel;
    float previous = begin == 0 ? slot_of(a.states, a.runs.segments[run.z].z)[channel] : x[(size_t)(begin - 1) * a.width];
    for (u32 t = begin; t < end; t += AT_ONCE) {
        const size_t token = run.x + t;
        float v[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) v[i] = t + i < end ? x[(size_t)(t + i) * a.width] : 0.0f;
        for (u32 m = 0; m < a.n_mix; m++) {
            const float of_all = a.lerps[(size_t)m * a.width + channel];
            float lerps[AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) {
                lerps[i] = of_all;
                if (a.more && t + i < end) lerps[i] += a.more[((token + i) * a.n_mix + m) * a.width + channel];
            }
            float* out = a.out + ((size_t)m * a.n_tokens + token) * a.width + channel;
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++)
                if (t + i < end) out[(size_t)i * a.width] = v[i] + ((i == 0 ? previous : v[i - 1]) - v[i]) * lerps[i];
        }
        previous = v[AT_ONCE - 1];
    }
    if (begin > 0 || !a.advance) return;
    for (u32 i = 0; i < run.w; i++) {
        const uint4 segment = a.runs.segments[run.z + i];
        slot_of(a.states, segment.w)[channel] = a.x[(size_t)(segment.x + segment.y - 1) * a.width + channel];
    }
}

struct Rwkv6Args {
    Scan scan;               // of the heads
    const float* r;          // [token][head][key]
    const float* k;          // [token][KV head][key]
    const float* v;          // [token][KV head][key]
    const float* decay;      // [token][head][key], before bias and functions
    const float* decay_bias; // [head][key]
    const float* bonus;      // [head][key]; null: gated linear attention
    u32 n_head_kv, unused;
};
ASSERT_LAYOUT(Rwkv6Args);

// A token's vectors: the decay w, the key k, and the vector that multiplies the old state in the result. The factor is the
// share of the new part k v in the result.
template <int EACH_> struct Rwkv6 {
    static constexpr int LANES = 16, EACH = EACH_, COLUMNS = 2, VECTORS = 3, VALUES = 1, UNROLLED = 2;
    const Rwkv6Args& a;
    __device__ __forceinline__ void begin(u32, u32, u32) {}
    __device__ __forceinline__ void prepare(Prepared<Rwkv6>& t, u32 head, u32 column, u32 token, int lane) const {
        const u32 dim = a.scan.key_dim, kv_head = head / (a.scan.n_head / a.n_head_kv);
        const size_t at = ((size_t)token * a.scan.n_head + head) * dim, at_kv = ((size_t)token * a.n_head_kv + kv_head) * dim;
        const float scale = rsqrtf((float)dim);
        const u32 own_column = column + lane;
        // All loads are issued before any result is used.
        const float value = own_column < dim ? a.v[at_kv + own_column] : 0.0f;
        float4 of_r[EACH / 4], of_k[EACH / 4], of_w[EACH / 4], biases[EACH / 4];
#pragma unroll
        for (int e = 0; e < EACH / 4; e++) {
            const u32 i = 4 * (lane + LANES * e);
            of_r[e] = load_four(a.r + at, i, dim), of_k[e] = load_four(a.k + at_kv, i, dim);
            of_w[e] = load_four(a.decay + at, i, dim), biases[e] = load_four(a.decay_bias + head * dim, i, dim);
        }
        t.values[0][lane] = value;
        float share = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH / 4; e++) {
            const u32 i = 4 * (lane + LANES * e);
            float4 r = of_r[e], k = of_k[e], w = of_w[e];
            const float4 bias = biases[e];
            w = make_float4(expf(-expf(w.x + bias.x)), expf(-expf(w.y + bias.y)), expf(-expf(w.z + bias.z)), expf(-expf(w.w + bias.w)));
            if (a.bonus) {
                const float4 bonus = load_four(a.bonus + head * dim, i, dim);
                share = dot(r, make_float4(bonus.x * k.x, bonus.y * k.y, bonus.z * k.z, bonus.w * k.w), share);
            } else {
                k = make_float4(k.x * (1.0f - w.x), k.y * (1.0f - w.y), k.z * (1.0f - w.z), k.w * (1.0f - w.w));
                r = make_float4(r.x * scale, r.y * scale, r.z * scale, r.w * scale);
                share = dot(r, k, share);
                r = make_float4(r.x * w.x, r.y * w.y, r.z * w.z, r.w * w.w);
            }
            store_vector(t, 0, i, w);
            store_vector(t, 1, i, k);
            store_vector(t, 2, i, r);
        }
        share = sum_lanes<PREPARE_LANES>(share);
        if (lane == 0) t.factors = make_float4(share, 0.0f, 0.0f, 0.0f);
    }
    __device__ __forceinline__ float step(const Token<Rwkv6>& t, float (&s)[COLUMNS][EACH]) const {
        float y[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            y[c] = dot(t.vectors[2], s[c]);
#pragma unroll
            for (int e = 0; e < EACH; e++) s[c][e] = fmaf(t.vectors[0][e], s[c][e], t.vectors[1][e] * t.values[0][c]);
        }
        return fmaf(t.factors.x, own<LANES>(t.values[0]), sum_own<LANES>(y));
    }
};
SCAN_KERNELS(rwkv6, Rwkv6, Rwkv6Args)

struct Rwkv7InputsArgs {
    float* decay;            // [token][head][key]: in: before bias and function; out: the decay
    float* rate;             // in: before bias and function; out: the normalised key times the rate
    float* k;                // in: the key; out: the key that is added to the state
    float* v;                // in and out: the value
    float* kappa;            // out: minus the normalised key
    const float* decay_bias; // [head][key]
    const float* rate_bias;  // [head][key]
    const float* removed;    // k_k, [head][key]
    const float* kept;       // k_a, [head][key]
    float* first_value;      // [token][head][key]: the first layer's values
    const float* value_mix;  // the share of these, before bias and sigmoid; null: this is the first layer
    const float* value_bias; // [head][key]
    u32 n_head, head_dim;    // heads and their elements
};
ASSERT_LAYOUT(Rwkv7InputsArgs);
// Normalises keys, applies the functions of decay and rate, and mixes in the first layer's values. A warp for a head of a
// token.
extern "C" __global__ void __launch_bounds__(128) rwkv7_inputs(const __grid_constant__ Rwkv7InputsArgs a) {
    wait_for_input();
    let_next_start();
    const u32 head = blockIdx.x * 4 + threadIdx.x / 32, token = blockIdx.y, lane = threadIdx.x % 32;
    if (head >= a.n_head) return;
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
    Scan scan;          // of the heads
    const float* r;     // [token][head][key], as are all
    const float* decay; // decay of the state
    const float* k;     // key
    const float* v;     // value
    const float* a;     // minus the normalised key
    const float* b;     // the normalised key times the rate
};
ASSERT_LAYOUT(Rwkv7Args);

// A token's vectors: w, k, a, b, and r w, which multiplies the old state in the result; of the new parts k v and b (a S), the
// factors r k and r b are the shares in the result.
template <int EACH_> struct Rwkv7 {
    static constexpr int LANES = 16, EACH = EACH_, COLUMNS = 2, VECTORS = 5, VALUES = 1, UNROLLED = 2;
    const Rwkv7Args& a;
    __device__ __forceinline__ void begin(u32, u32, u32) {}
    __device__ __forceinline__ void prepare(Prepared<Rwkv7>& t, u32 head, u32 column, u32 token, int lane) const {
        const u32 dim = a.scan.key_dim, own_column = column + lane;
        const size_t at = ((size_t)token * a.scan.n_head + head) * dim;
        // All loads are issued before any result is used.
        const float value = own_column < dim ? a.v[at + own_column] : 0.0f;
        const float* const from[VECTORS] = {a.decay + at, a.k + at, a.a + at, a.b + at, a.r + at};
        float4 four[VECTORS][EACH / 4];
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int e = 0; e < EACH / 4; e++) four[v][e] = load_four(from[v], 4 * (lane + LANES * e), dim);
        t.values[0][lane] = value;
        float rk = 0.0f, rb = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH / 4; e++) {
            const float4 w = four[0][e], r = four[4][e];
            rk = dot(r, four[1][e], rk), rb = dot(r, four[3][e], rb);
            four[4][e] = make_float4(r.x * w.x, r.y * w.y, r.z * w.z, r.w * w.w);
#pragma unroll
            for (int v = 0; v < VECTORS; v++) store_vector(t, v, 4 * (lane + LANES * e), four[v][e]);
        }
        rk = sum_lanes<PREPARE_LANES>(rk), rb = sum_lanes<PREPARE_LANES>(rb);
        if (lane == 0) t.factors = make_float4(rk, rb, 0.0f, 0.0f);
    }
    __device__ __forceinline__ float step(const Token<Rwkv7>& t, float (&s)[COLUMNS][EACH]) const {
        float u[COLUMNS], y[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) u[c] = dot(t.vectors[2], s[c]);
        sum_all<LANES>(u);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) y[c] = dot(t.vectors[4], s[c]);
        const float sum = sum_own<LANES>(y);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const float kept = fmaf(t.vectors[0][e], s[c][e], t.vectors[1][e] * t.values[0][c]);
                s[c][e] = fmaf(t.vectors[3][e], u[c], kept);
            }
        return fmaf(t.factors.x, own<LANES>(t.values[0]), fmaf(t.factors.y, own<LANES>(u), sum));
    }
};
static_assert(PREPARE_LANES == 16, "a thread that prepares has a column");
SCAN_KERNELS(rwkv7, Rwkv7, Rwkv7Args)

// Independent products of a single token, each with its own matrix and input, in one launch.
#define TEMPLATES_ALONE
#include "matvec.cu"

// The function that is applied to an input first.
enum InputFunction : u32 { AS_IT_LIES = 0, TANH_OF_INPUT = 1, SIGMOID_OF_INPUT = 2 };
// One of several independent products.
struct SideProduct {
    Matrix matrix;    // [n_out][n_in]
    const float* x;   // [n_in]
    float* y;         // [n_out]
    u32 n_in;         // columns
    u32 end;          // the block after the last one of this product
    u32 warps_per_tile; // a power of two
    u32 function;     // InputFunction; not AS_IT_LIES only for n_in up to MAX_CHANGED
};
ASSERT_LAYOUT(SideProduct);
constexpr u32 MAX_SIDE_PRODUCTS = 8;
constexpr u32 MAX_CHANGED = 1024;
struct SideProductsArgs {
    SideProduct products[MAX_SIDE_PRODUCTS]; // those after the last one have no blocks
};
ASSERT_LAYOUT(SideProductsArgs);
// Each block belongs to one of the products, and computes some tiles of its rows.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) side_products(const __grid_constant__ SideProductsArgs a) {
    __shared__ __align__(16) float changed[MAX_CHANGED];
    u32 at = 0, begin = 0;
    while (blockIdx.x >= a.products[at].end) begin = a.products[at++].end;
    const SideProduct& product = a.products[at];
    MatvecArgs p = {};
    p.n_in = product.n_in;
    p.n_out = product.matrix.n_rows;
    p.warps_per_tile = product.warps_per_tile;
    p.output = STORE;
    p.scale = 1.0f;
    p.x = product.x;
    p.y = product.y;
    if (product.function != AS_IT_LIES) {
        wait_for_input();
        for (u32 i = threadIdx.x; i < product.n_in; i += 32 * WARPS) changed[i] = product.function == TANH_OF_INPUT ? tanhf(product.x[i]) : sigmoid(product.x[i]);
        p.x = changed;
        __syncthreads();
    }
    const u32 block_of_matrix = blockIdx.x - begin, n_blocks_of_matrix = product.end - begin;
    WITH_FORMAT(product.matrix.format, (matvec_share<FORMAT, 1>(p, product.matrix, product.matrix, block_of_matrix, n_blocks_of_matrix)));
}
