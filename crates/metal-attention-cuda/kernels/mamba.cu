// Mamba (arXiv 2312.00752): the selection, and the selective scan, in which each element of a channel's state decays by itself:
// h = exp(dt A) h + dt B x; y = (C h + D x) silu(z). The scan has one head, whose values are the channels.
#include "recurrence.cuh"

struct SelectArgs {
    const float* chosen;     // the selection product, [token][n]
    float* dt;               // [token][rank]
    float* bc;               // B, then C, [token][2][d_state]
    const float* weights[3]; // of the norms of dt, B and C; null: no norms
    u32 n, rank, d_state;    // elements of a row, of dt, and of B and C each
    u32 at[3];               // the elements at which dt, B and C begin
    float eps;               // of the norms
    u32 unused;
};
ASSERT_LAYOUT(SelectArgs);
// Splits the selection product into dt, B and C and applies their norms. A warp for each of the three, a block for each token.
extern "C" __global__ void __launch_bounds__(96) mamba_select(const __grid_constant__ SelectArgs a) {
    wait_for_input();
    let_next_start();
    const u32 token = blockIdx.x, part = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 n = part == 0 ? a.rank : a.d_state;
    const float* x = a.chosen + (size_t)token * a.n + a.at[part];
    float* out = part == 0 ? a.dt + (size_t)token * a.rank : a.bc + ((size_t)token * 2 + part - 1) * a.d_state;
    const float* weight = a.weights[part];
    float squares = 0.0f;
    for (u32 i = lane; i < n; i += 32) squares += x[i] * x[i];
    const float factor = rsqrtf(warp_sum(squares) / n + a.eps);
    for (u32 i = lane; i < n; i += 32) out[i] = weight ? x[i] * factor * weight[i] : x[i];
}

struct MambaArgs {
    Scan scan;            // one head, whose values are the channels
    const float* x;       // [token][channel], after the convolution
    const float* dt;      // [token][channel], without bias
    const float* bc;      // [token][2][d_state]
    Rows gate;            // [channel]
    const float* dt_bias; // [channel]
    const float* a;       // [channel][d_state], negative
    const float* d;       // [channel]
};
ASSERT_LAYOUT(MambaArgs);

// A token's vectors: B and C. Its values: dt, dt x, silu(z), D x silu(z).
template <int EACH_> struct Mamba {
    static constexpr int LANES = 4, EACH = EACH_, COLUMNS = 1, VECTORS = 2, VALUES = 4, UNROLLED = 2;
    const MambaArgs& a;
    float rates[EACH]; // A of the thread's elements
    __device__ __forceinline__ void begin(u32, u32 column, u32 row) {
        const u32 d_state = a.scan.key_dim;
#pragma unroll
        for (int e = 0; e < EACH; e += 4) {
            const float4 four = load_four(a.a + (size_t)column * d_state, row + LANES * e, column < a.scan.value_dim ? d_state : 0);
            rates[e] = four.x, rates[e + 1] = four.y, rates[e + 2] = four.z, rates[e + 3] = four.w;
        }
    }
    __device__ __forceinline__ void prepare(Prepared<Mamba>& t, u32, u32 column, u32 token, int lane) const {
        const u32 d_state = a.scan.key_dim, channels = a.scan.value_dim;
        const float* b = a.bc + (size_t)token * 2 * d_state;
        constexpr int CHANNELS = columns_of_block<Mamba> / PREPARE_LANES;
        // All loads are issued before any result is used.
        float x[CHANNELS], z[CHANNELS], dt[CHANNELS], d[CHANNELS];
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) {
            const u32 channel = column + c * PREPARE_LANES + lane;
            const bool in_range = channel < channels;
            x[c] = in_range ? a.x[(size_t)token * channels + channel] : 0.0f;
            z[c] = in_range ? row_of(a.gate, token)[channel] : 0.0f;
            dt[c] = in_range ? a.dt[(size_t)token * channels + channel] + a.dt_bias[channel] : 0.0f;
            d[c] = in_range ? a.d[channel] : 0.0f;
        }
        // Each thread takes at most four elements of B and of C.
        static_assert(LANES * EACH <= 4 * PREPARE_LANES);
        const float4 of_b = load_four(b, 4 * lane, d_state), of_c = load_four(b + d_state, 4 * lane, d_state);
        if (4 * lane < LANES * EACH) {
            store_vector(t, 0, 4 * lane, of_b);
            store_vector(t, 1, 4 * lane, of_c);
        }
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) {
            const int at = c * PREPARE_LANES + lane;
            const float step_size = softplus(dt[c]), gate = z[c] * sigmoid(z[c]);
            t.values[0][at] = step_size;
            t.values[1][at] = step_size * x[c];
            t.values[2][at] = gate;
            t.values[3][at] = gate * (d[c] * x[c]);
        }
    }
    __device__ __forceinline__ float step(const Token<Mamba>& t, float (&s)[COLUMNS][EACH]) const {
        const float dt = t.values[0][0], x = t.values[1][0];
#pragma unroll
        for (int e = 0; e < EACH; e++) s[0][e] = fmaf(expf(dt * rates[e]), s[0][e], t.vectors[0][e] * x);
        return fmaf(t.values[2][0], sum_lanes<LANES, SIDE_BY_SIDE<LANES>>(dot(t.vectors[1], s[0])), t.values[3][0]);
    }
};
SCAN_KERNELS(mamba, Mamba, MambaArgs)
