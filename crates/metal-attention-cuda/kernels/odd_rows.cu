// Products with rows that are not a multiple of four elements, which the other kernels cannot read as vectors. Only tiny models
// have them, so this is simple: a thread for each element of the result.
#include "element.cuh"

enum Output : u32 { STORE = 0, ADD = 1, GATED = 2 };

struct OddRowsArgs {
    Matrix a;          // the matrix; GATED: the gate
    Matrix b;          // GATED: up
    const float* x;    // [n_tokens][n_in]
    const float* bias; // [n_out], or null
    float* y;          // [n_tokens][n_out]
    const u32* rows;   // indices of the rows of x, or null: in order
    u32 n_in, n_out;   // elements of a row of x and of y
    u32 output;        // Output
    u32 activation;    // Activation, for GATED
    float scale;       // ADD: factor on what is added
    u32 unused;
};
ASSERT_LAYOUT(OddRowsArgs);

// The product of row `row` of a matrix with x.
template <typename P> __device__ __forceinline__ float dot(const Matrix& m, u32 row, const float* x, u32 n_in) {
    float sum = 0.0f;
    for (u32 k = 0; k < n_in; k++) sum += element_of<P>(m, row, k) * x[k];
    return sum;
}

// One thread: one row of the matrix and one token.
extern "C" __global__ void __launch_bounds__(128) odd_rows(const __grid_constant__ OddRowsArgs a) {
    wait_for_input();
    let_next_start();
    const u32 row_of_matrix = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y, row = a.a.first_row + row_of_matrix;
    if (row_of_matrix >= a.a.n_rows) return;
    const float* x = a.x + (size_t)(a.rows ? a.rows[token] : token) * a.n_in;
    float* out = a.y + (size_t)token * a.n_out + row;
    float v;
    WITH_PANEL(a.a.format, (v = dot<P>(a.a, row_of_matrix, x, a.n_in)));
    if (a.output == GATED) {
        float up;
        WITH_PANEL(a.b.format, (up = dot<P>(a.b, row_of_matrix, x, a.n_in)));
        *out = activate(a.activation, v) * up;
        return;
    }
    if (a.bias) v += a.bias[row];
    *out = a.output == ADD ? *out + a.scale * v : v;
}
