// The GEMV for many rows, with F32 inputs: all rows with one matrix (`matvec_rows`), or each row (item) with the matrix of its
// group, an expert or a head (`grouped_matvec`). The group is read on the device.
#define TEMPLATES_ALONE
#include "matvec.cu"

// Runs `matvec_share` for the layout of `first`, which is that of `second`, too.
template <int TOKENS>
__device__ __forceinline__ void of_format(const MatvecArgs& a, const Matrix& first, const Matrix& second) {
    switch (first.format) {
        case F16: matvec_share<F16, TOKENS>(a, first, second, blockIdx.x, gridDim.x); break;
        case Q8_0: matvec_share<Q8_0, TOKENS>(a, first, second, blockIdx.x, gridDim.x); break;
        case Q4_0: matvec_share<Q4_0, TOKENS>(a, first, second, blockIdx.x, gridDim.x); break;
        case Q4_K: matvec_share<Q4_K, TOKENS>(a, first, second, blockIdx.x, gridDim.x); break;
        case Q5_K: matvec_share<Q5_K, TOKENS>(a, first, second, blockIdx.x, gridDim.x); break;
        case Q6_K: matvec_share<Q6_K, TOKENS>(a, first, second, blockIdx.x, gridDim.x); break;
        case F32: matvec_share<F32, TOKENS>(a, first, second, blockIdx.x, gridDim.x); break;
        case CODES: matvec_share<CODES, TOKENS>(a, first, second, blockIdx.x, gridDim.x); break;
        case CODES_AND_MINS: matvec_share<CODES_AND_MINS, TOKENS>(a, first, second, blockIdx.x, gridDim.x); break;
        default: __trap();
    }
}

// Many tokens, four for each row of the grid: one matrix, or, GATED, gate and up.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) matvec_rows(const __grid_constant__ MatvecArgs a) {
    MatvecArgs p = a;
    p.x += (size_t)blockIdx.y * 4 * a.n_in;
    p.y += (size_t)blockIdx.y * 4 * a.n_out;
    of_format<4>(p, a.matrices[0], a.matrices[a.output == GATED ? 1 : 0]);
}

struct GroupedMatvecArgs {
    Matrix matrices[2];   // of all groups, the rows of each padded to whole tiles; `n_rows`: of one group
    u32 tile_bytes[2];    // bytes of a tile of rows
    const u32* groups;    // of each item; null: item i has group i % n_groups
    u32 n_groups;         // experts or heads
    u32 n_in;             // columns of the matrix
    const float* x;       // item i reads the row that begins at element i / items_a_row * x_stride
    u32 items_a_row;      // items that share a row of x
    u32 x_stride;         // elements from a row of x to the next one
    const float* bias[2]; // [n_groups][n_rows], or null
    float* y;             // item i is stored from element i * y_stride on; STORE: the second matrix's rows follow the first's
    u32 y_stride;         // elements from a row of y to the next one
    u32 first_item;       // of this launch
    u32 warps_per_tile;     // warps that share a tile of rows
    u32 output;           // Output
    u32 activation;       // Activation, for GATED
    u32 unused;
};
ASSERT_LAYOUT(GroupedMatvecArgs);

// The grid: blocks of a matrix, items, and, unless gated, the two matrices.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) grouped_matvec(const __grid_constant__ GroupedMatvecArgs a) {
    wait_for_input();
    const u32 item = a.first_item + blockIdx.y, part = blockIdx.z;
    const u32 group = a.groups ? a.groups[item] : item % a.n_groups;
    auto of_group = [&](int i) {
        Matrix m = a.matrices[i];
        m.records += (size_t)group * ((m.n_rows + 15) / 16) * a.tile_bytes[i];
        return m;
    };
    const bool gated = a.output == GATED;
    const Matrix first = of_group(part), second = gated ? of_group(1) : first;
    MatvecArgs p = {};
    p.n_in = a.n_in;
    p.n_out = a.y_stride;
    p.warps_per_tile = a.warps_per_tile;
    p.output = a.output;
    p.activation = a.activation;
    p.scale = 1.0f;
    p.x = a.x + (size_t)(item / a.items_a_row) * a.x_stride;
    p.bias = a.bias[part] ? a.bias[part] + (size_t)group * first.n_rows : nullptr;
    p.y = a.y + (size_t)item * a.y_stride + (part == 0 ? 0 : a.matrices[0].n_rows);
    of_format<1>(p, first, second);
}
