// The GEMM for few tokens (3 to about 64): Y = W X with packed F16 inputs (`packed_input`) and F32 sums.
//
// Memory bandwidth and latency limit such a product. So each warp has two tiles of rows (GATED: one of the gate and the same of
// up) and some of the panels, and keeps the records of several panels in flight to its registers; the first ones are loaded
// before `wait_for_input`. Inputs are in the order of the tensor cores' fragments and are loaded from the L2 cache. The warps
// of a block have other panels of the same rows, or other rows. Panels may also be divided among blocks (split-K): the last
// block to finish adds up all partial sums, in a fixed order.
#define TEMPLATES_ALONE
#include "matmul.cu"

constexpr int MAX_MATRICES = 3;
constexpr int WARPS = 8;

struct MatmulFewArgs {
    Matrix matrices[MAX_MATRICES];     // one below the other; GATED: gate and up
    u32 n_matrices;                 // matrices
    u32 blocks[MAX_MATRICES];       // for each matrix, the block of rows after its last one
    const uint4* x;              // packed inputs
    u32 n_tokens, n_token_tiles; // tokens, and tiles of 8 of them in x
    u32 n_out;                   // elements of a row of y
    u32 output;                  // Output
    u32 activation;              // Activation, for GATED
    float scale;                 // ADD: factor on what is added
    const float* bias;           // [n_out], or null
    float* y;                    // [n_tokens][n_out]
    half* packed;                // GATED: the result, as packed input of the next product
    u32 y_token_tiles;           // tiles of 8 tokens in `packed`
    u32 warps_per_tile;            // warps that share the panels of a tile: 1, 2, 4 or 8
    u32 n_splits;                // blocks that share the panels (split-K)
    u32 unused;
    float4* sums;                // partial sums of splits, [block of the result][split][fragment][32]
    u32* tickets;                // counters, one for each block of the result, zero between launches
};
ASSERT_LAYOUT(MatmulFewArgs);

SHARED_MEMORY(16, float4, few_memory);

// The work of a warp: two tiles, and every `step`th panel from `first` to `end`.
struct WarpWork {
    const unsigned char *a, *b; // records
    u32 tile_a, tile_b, n_panels;
    u32 first, end, step;
};

// Main loop: the products of a warp with N tiles of tokens.
template <u32 FORMAT, int N>
__device__ __forceinline__ void few_products(const MatmulFewArgs& a, const WarpWork& work, int lane, float (&acc)[2][N][4]) {
    typedef Panel<FORMAT> P;
    typedef Record<FORMAT> Of;
    // Panels in flight, as many as there are registers for.
    constexpr int DEPTH = sizeof(P) <= 24 && N < 4 ? 4 : sizeof(P) <= 40 ? 2 : 1;
    P p[DEPTH][2];
    const u32 row_bytes = work.n_panels / Of::PANELS * Of::BYTES;
    const unsigned char *row_a = work.a + (size_t)work.tile_a * row_bytes, *row_b = work.b + (size_t)work.tile_b * row_bytes;
    // Past the last panel the last one is loaded again, and not used.
    const u32 last = work.end - 1;
    auto load = [&](P (&to)[2], u32 panel) {
        panel = min(panel, last);
        const u32 at = panel / Of::PANELS * Of::BYTES;
        to[0].template read<FromGlobal>(Place<FORMAT>(row_a + at, panel % Of::PANELS), lane);
        to[1].template read<FromGlobal>(Place<FORMAT>(row_b + at, panel % Of::PANELS), lane);
    };
#pragma unroll
    for (int d = 0; d < DEPTH; d++) load(p[d], work.first + d * work.step);
    wait_for_input();
    let_next_start();
    // Tiles of tokens past the last read the last one's inputs; their sums are not stored.
    const u32 first_token_tile = blockIdx.y * N, last_token_tile = a.n_token_tiles - 1;
    for (u32 from = work.first; from < work.end; from += DEPTH * work.step) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const u32 panel = from + d * work.step;
            if (panel >= work.end) break;
            const uint4* x_of = a.x + (size_t)panel * a.n_token_tiles * 64 + lane;
#pragma unroll
            for (int b = 0; b < 2; b++) {
                uint4 x[N];
#pragma unroll
                for (int n = 0; n < N; n++) x[n] = x_of[(min(first_token_tile + n, last_token_tile) * 2 + b) * 32];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    u32 e[2][4];
                    elements(p[d][i], b, e);
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        mma(acc[i][n], e[0][0], e[0][1], e[0][2], e[0][3], x[n].x, x[n].y);
                        mma(acc[i][n], e[1][0], e[1][1], e[1][2], e[1][3], x[n].z, x[n].w);
                    }
                }
            }
            load(p[d], panel + DEPTH * work.step);
        }
    }
}

// The rows of a block: a matrix and the first of its tiles. `block`: the index of the block of rows.
struct BlockRows {
    const Matrix& m;
    u32 first_tile, n_tiles;
    bool gated;
    // Tile `i` (0 or 1) of the warps in row `row` of the block; GATED: both are the same tile, of gate and up.
    __device__ __forceinline__ u32 tile(u32 row, u32 i) const { return first_tile + (gated ? row : 2 * row + i); }
};
// Finds the matrix and the tiles of a block of rows.
__device__ __forceinline__ BlockRows rows_of(const MatmulFewArgs& a, u32 block) {
    const bool gated = a.output == GATED;
    u32 part = 0, first_block = 0;
    while (!gated && part + 1 < a.n_matrices && block >= a.blocks[part]) first_block = a.blocks[part++];
    const u32 n_tiles = (a.matrices[part].n_rows + 15) / 16;
    return {a.matrices[part], (block - first_block) * (WARPS / a.warps_per_tile) * (gated ? 1 : 2), n_tiles, gated};
}

// Computes the sums of a warp and stores them to shared memory: [warp of panels][row of warps][2][N][lane].
template <int N> __device__ __forceinline__ void sum_up(const MatmulFewArgs& a, u32 warp, int lane) {
    const BlockRows rows = rows_of(a, blockIdx.x);
    const u32 panel_warps = a.warps_per_tile, row = warp / panel_warps;
    const u32 n_panels = rows.m.n_panels, panels_per_split = (n_panels + a.n_splits - 1) / a.n_splits;
    float4* to = few_memory + ((warp % panel_warps) * (WARPS / panel_warps) + row) * 2 * N * 32 + lane;
    // Gate and up of different layouts are computed one after the other, each in place of both.
    const u32 formats[2] = {rows.m.format, rows.gated ? a.matrices[1].format : rows.m.format};
    const u32 n_rounds = formats[0] == formats[1] ? 1 : 2;
#pragma unroll 1
    for (u32 round = 0; round < n_rounds; round++) {
        WarpWork work;
        work.n_panels = n_panels;
        work.first = blockIdx.z * panels_per_split + warp % panel_warps;
        work.end = min((blockIdx.z + 1) * panels_per_split, n_panels);
        work.step = panel_warps;
        // Past the last tile the last one is read again; its sums are not stored.
        work.tile_a = min(rows.tile(row, 0), rows.n_tiles - 1), work.tile_b = min(rows.tile(row, 1), rows.n_tiles - 1);
        const unsigned char *a_records = rows.m.records, *b_records = rows.gated ? a.matrices[1].records : a_records;
        work.a = round == 0 ? a_records : b_records, work.b = n_rounds == 2 && round == 0 ? a_records : b_records;
        // Hides these values from the optimiser, which would otherwise compute addresses for all layouts ahead and run out of
        // registers.
        asm volatile("" : "+r"(work.tile_a), "+r"(work.tile_b), "+r"(work.n_panels), "+r"(work.first));
        float acc[2][N][4] = {};
        WITH_FORMAT(round == 0 ? formats[0] : formats[1], (few_products<FORMAT, N>(a, work, lane, acc)));
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int n = 0; n < N; n++)
                if (round == 0 || i == 1) to[(i * N + n) * 32] = make_float4(acc[i][n][0], acc[i][n][1], acc[i][n][2], acc[i][n][3]);
    }
    __syncthreads();
}

// Adds up `n` partial sums, `stride` apart, in order.
__device__ __forceinline__ void add_up(float (&to)[4], const float4* from, u32 n, u32 stride) {
#pragma unroll 4
    for (u32 i = 0; i < n; i++) {
        const float4 v = from[i * stride];
        to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w;
    }
}

// The grid: blocks of rows, groups of tokens, splits.
template <int N> __device__ __forceinline__ void matmul_few(const MatmulFewArgs& a) {
    __shared__ bool is_last;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x;
    sum_up<N>(a, warp, lane);
    asm volatile("" : "+r"(warp), "+r"(lane), "+r"(block));
    const BlockRows rows = rows_of(a, block);
    u32 n_sums = a.warps_per_tile;
    const u32 n_fragments = WARPS / n_sums * 2 * N, stride = n_fragments * 32;
    const float4* sums = few_memory + lane;
    if (a.n_splits > 1) {
        const u32 result_block = blockIdx.y * gridDim.x + block;
        float4* split_sums = a.sums + (size_t)result_block * a.n_splits * stride + lane;
        for (u32 f = warp; f < n_fragments; f += WARPS) {
            float c[4] = {};
            add_up(c, sums + f * 32, n_sums, stride);
            split_sums[blockIdx.z * stride + f * 32] = make_float4(c[0], c[1], c[2], c[3]);
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            is_last = atomicAdd(a.tickets + result_block, 1u) == a.n_splits - 1;
            if (is_last) a.tickets[result_block] = 0;
        }
        __syncthreads();
        if (!is_last) return;
        __threadfence();
        sums = split_sums, n_sums = a.n_splits;
    }
    // In a fixed order, so that results do not depend on which block finished last.
    for (u32 item = warp; item < (rows.gated ? n_fragments / 2 : n_fragments); item += WARPS) {
        const u32 f = rows.gated ? item / N * 2 * N + item % N : item, tile = rows.tile(f / (2 * N), f / N % 2);
        float c[4] = {}, up[4] = {};
        add_up(c, sums + f * 32, n_sums, stride);
        if (rows.gated) add_up(up, sums + (f + N) * 32, n_sums, stride);
        if (tile < rows.n_tiles) write_product(a, rows.m, tile, lane, blockIdx.y * N + f % N, c, up);
    }
}

#define MATMUL_FEW(N)                                                                                        \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) matmul_few_##N(const __grid_constant__ MatmulFewArgs a) { matmul_few<N>(a); }
MATMUL_FEW(1)
MATMUL_FEW(2)
MATMUL_FEW(4)
