// The GEMM without warpgroup instructions: Y = W X with packed F16 inputs (`packed_input`) and F32 sums. Each warp loads the
// records of its own rows from memory to registers and converts codes to F16 there; inputs go through a ring in shared memory,
// which all warps of a block share. Its templates are also used by matmul_few.cu, matmul_wide.cu and grouped_matmul.cu.
//
// A tile is 16 rows of a matrix, a panel 64 columns; a record has the codes and scales of one panel of a tile, or of four
// (formats.cuh).
#include "formats.cuh"

enum Output : u32 { STORE = 0, ADD = 1, GATED = 2 };

struct MatmulArgs {
    Matrix a;                    // the matrix; GATED: the gate
    Matrix b;                    // GATED: up
    const uint4* x;              // packed inputs
    u32 n_tokens, n_token_tiles; // tokens, and tiles of 8 of them in x
    u32 n_out;                   // elements of a row of y
    u32 output;                  // Output
    u32 activation;              // Activation, for GATED
    float scale;                 // ADD: factor on what is added
    const float* bias;           // [n_out], or null
    float* y;                    // [n_tokens][n_out]
    half* packed;                // GATED: the result, as packed input of the next product
    u32 y_token_tiles, unused;
};
ASSERT_LAYOUT(MatmulArgs);

// The elements of a block of 32 columns as F16: a[s][0..4] for the two products s.
template <typename P> __device__ __forceinline__ void elements(const P& p, int b, u32 (&a)[2][4]) {
    p.codes(0, b, a);
    if constexpr (P::SCALES_PER_QUANT_BLOCK > 0 && P::PLANES == 1)
#pragma unroll
        for (int s = 0; s < 2; s++)
#pragma unroll
            for (int row = 0; row < 2; row++) {
                u32 &first = a[s][row], &second = a[s][2 + row];
                if constexpr (P::FLOAT_SCALES) {
                    // F32 scales may exceed the range of F16, so the product is computed in F32 and rounded once.
                    const float scale = p.scale(0, b, row, s), min = p.min(b, row, s);
                    auto element = [&](u32 v) {
                        const float2 code = __half22float2(halves(v));
                        return bits(__floats2half2_rn(scale * code.x - min, scale * code.y - min));
                    };
                    first = element(first), second = element(second);
                } else if constexpr (P::MINS) {
                    const half2 scale = p.half_scale(b, row, s), min = __hneg2(p.half_min(b, row));
                    first = bits(__hfma2(halves(first), scale, min)), second = bits(__hfma2(halves(second), scale, min));
                } else {
                    const half2 scale = p.half_scale(b, row, s);
                    first = bits(__hmul2(halves(first), scale)), second = bits(__hmul2(halves(second), scale));
                }
            }
}

// The epilogue: bias, activation or addition, and the store of one warp's 16 x 8 sums (c; GATED: gate c and up).
template <typename Args> __device__ __forceinline__ void write_product(const Args& a, const Matrix& m, u32 tile, int lane, u32 token_tile,
                                              const float (&c)[4], const float (&up)[4]) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 row_of_matrix = tile * 16 + g + 8 * (i / 2), row = m.first_row + row_of_matrix, token = token_tile * 8 + 2 * t + i % 2;
        if (row_of_matrix >= m.n_rows || token >= a.n_tokens) continue;
        if (a.output == GATED) {
            a.packed[packed_input(token, row, a.y_token_tiles)] = __float2half_rn(activate(a.activation, c[i]) * up[i]);
            continue;
        }
        float* out = a.y + (size_t)token * a.n_out + row;
        const float v = a.bias ? c[i] + a.bias[row] : c[i];
        *out = a.output == ADD ? *out + a.scale * v : v;
    }
}

SHARED_MEMORY(16, float, matmul_memory);

// Tile of a block: 8 warps for 128 rows (GATED: 64 of the gate and the same 64 of up) and 128 tokens. A warp has two tiles of
// rows and half of the tokens.
constexpr int STAGES = 4;
constexpr int TOKEN_TILES = 16;

// Main loop: the products with TILES tiles of tokens from `first_tile` on; those from `end_tile` on are zeros.
template <int TILES, typename P, typename Q>
__device__ __forceinline__ void many_products(const MatmulArgs& a, const Matrix (&m)[2], const u32 (&tile)[2], const bool (&in_range)[2],
                                              uint4* staged, u32 first_tile, u32 end_tile, int lane, int half_of,
                                              float (&acc)[2][TILES / 2][4]) {
    constexpr int PANEL_WORDS = TILES * 64; // uint4 of a panel's inputs
    const u32 n_panels = m[0].n_panels;
    auto stage = [&](u32 panel) {
        if (panel < n_panels) {
            for (int i = threadIdx.x; i < PANEL_WORDS; i += 256) {
                const u32 token_tile = first_tile + i / 64;
                const bool inside = token_tile < end_tile;
                copy16_or_zero(staged + panel % STAGES * PANEL_WORDS + i,
                           a.x + ((size_t)panel * a.n_token_tiles + (inside ? token_tile : 0)) * 64 + i % 64, inside);
            }
        }
        commit_copies();
    };
    for (int i = 0; i < STAGES - 1; i++) stage(i);
    P next_p = {};
    Q next_q = {};
    if (in_range[0]) next_p.load(m[0], tile[0], 0, lane);
    if (in_range[1]) next_q.load(m[1], tile[1], 0, lane);
    for (u32 panel = 0; panel < n_panels; panel++) {
        const P p = next_p;
        const Q q = next_q;
        if (panel + 1 < n_panels) {
            if (in_range[0]) next_p.load(m[0], tile[0], panel + 1, lane);
            if (in_range[1]) next_q.load(m[1], tile[1], panel + 1, lane);
        }
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        stage(panel + STAGES - 1);
        const uint4* x = staged + panel % STAGES * PANEL_WORDS + half_of * (TILES / 2) * 64 + lane;
#pragma unroll
        for (int b = 0; b < 2; b++) {
            u32 e[2][2][4];
            elements(p, b, e[0]);
            elements(q, b, e[1]);
#pragma unroll
            for (int n = 0; n < TILES / 2; n++) {
                const uint4 v = x[n * 64 + b * 32];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    mma(acc[i][n], e[i][0][0], e[i][0][1], e[i][0][2], e[i][0][3], v.x, v.y);
                    mma(acc[i][n], e[i][1][0], e[i][1][1], e[i][1][2], e[i][1][3], v.z, v.w);
                }
            }
        }
    }
    wait_for_copies<0>();
}

// Defined by files that use the templates only.
#ifndef TEMPLATES_ALONE
// One block: 128 rows and 128 tokens. P and Q are the layouts of the two matrices.
template <typename P, typename Q> __device__ __forceinline__ void matmul(const MatmulArgs& a, uint4* staged) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half_of = warp / 4;
    const bool gated = a.output == GATED;
    const Matrix m[2] = {a.a, gated ? a.b : a.a};
    const u32 first = blockIdx.y * (gated ? 4 : 8) + (warp % 4) * (gated ? 1 : 2);
    const u32 tile[2] = {first, gated ? first : first + 1};
    const bool in_range[2] = {tile[0] * 16 < m[0].n_rows, tile[1] * 16 < m[1].n_rows};
    wait_for_input();
    let_next_start();
    float acc[2][TOKEN_TILES / 2][4] = {};
    many_products<TOKEN_TILES, P, Q>(a, m, tile, in_range, staged, blockIdx.x * TOKEN_TILES, a.n_token_tiles, lane, half_of, acc);
#pragma unroll
    for (int n = 0; n < TOKEN_TILES / 2; n++) {
        const u32 token_tile = blockIdx.x * TOKEN_TILES + half_of * (TOKEN_TILES / 2) + n;
        if (in_range[0]) write_product(a, m[0], tile[0], lane, token_tile, acc[0][n], acc[1][n]);
        if (in_range[1] && !gated) write_product(a, m[1], tile[1], lane, token_tile, acc[1][n], acc[1][n]);
    }
}

#define MATMUL(NAME, FORMAT)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256, 1) matmul_##NAME(const __grid_constant__ MatmulArgs a) {     \
        matmul<Panel<FORMAT>, Panel<FORMAT>>(a, (uint4*)matmul_memory);                                            \
    }
MATMUL(f16, F16)
MATMUL(q8_0, Q8_0)
MATMUL(q4_0, Q4_0)
MATMUL(q4_k, Q4_K)
MATMUL(q5_k, Q5_K)
MATMUL(q6_k, Q6_K)
MATMUL(f32, F32)
MATMUL(codes, CODES)
MATMUL(codes_and_mins, CODES_AND_MINS)
#endif
