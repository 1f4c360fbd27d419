// The kernels of encoders of pictures, beside products, norms and attention: functions of elements, sums and orders of rows, and the
// rotation of heads. Rows are F32, [n_rows][width].
#include "elements.cuh"

// A row of zeros, where a row's index is expected.
constexpr u32 NO_ROW = ~0u;

struct ElementsArgs {
    const float* x;    // [n_rows][width]
    const float* y;    // rows of width elements, y_stride apart; null for activations: ones
    float* out;        // [n_rows][width], may be x; null: none
    half* packed;      // the same as input of GEMMs; null: none
    u32 n_rows, width;
    u32 y_stride;      // 0: one row of y for all rows
    u32 function;      // Function
    float a, b;        // SCALED: the factor; CLAMPED: the least and the greatest value
    u32 n_token_tiles; // of `packed`, with the WIDE flag
    u32 unused;
};
ASSERT_LAYOUT(ElementsArgs);

// The column of a thread, and the rows that it takes. All kernels divide their work so.
#define FOR_ROWS(a, row) for (u32 row = blockIdx.y; row < (a).n_rows; row += gridDim.y)
__device__ __forceinline__ u32 own_column() { return blockIdx.x * blockDim.x + threadIdx.x; }

extern "C" __global__ void __launch_bounds__(256) encoder_elements(const __grid_constant__ ElementsArgs a) {
    wait_for_input();
    let_next_start();
    const u32 column = own_column();
    if (column >= a.width) {
        // Zeros fill the last panel up.
        if (a.packed && column < (a.width + 63) / 64 * 64)
            FOR_ROWS(a, row) a.packed[packed_input(row, column, a.n_token_tiles)] = __float2half_rn(0.0f);
        return;
    }
    FOR_ROWS(a, row) {
        const size_t at = (size_t)row * a.width + column;
        const float x = a.x[at], y = a.y ? a.y[(size_t)row * a.y_stride + column] : 1.0f;
        float v;
        switch (a.function) {
            case SUM: v = x + y; break;
            case PRODUCT: v = x * y; break;
            case SCALED: v = x * a.a; break;
            case CLAMPED: v = fminf(fmaxf(x, a.a), a.b); break;
            default: v = activated(a.function, x) * y;
        }
        if (a.out) a.out[at] = v;
        if (a.packed) a.packed[packed_input(row, column, a.n_token_tiles)] = __float2half_rn(v);
    }
}

struct PatchesArgs {
    const unsigned char* rgb; // [height][width][3]
    float* out;               // [height / side * (width / side)][3 side side]
    u32 width, height;        // pixels
    u32 side;                 // of a patch
    u32 pixel_first;          // whether a patch has the colours of a pixel together; else all values of a colour
    float mean[3], std[3];    // a value is (v / 255 - mean) / std
};
ASSERT_LAYOUT(PatchesArgs);

// The patches of a picture as rows. A thread: an element of each row.
extern "C" __global__ void __launch_bounds__(256) encoder_patches(const __grid_constant__ PatchesArgs a) {
    wait_for_input();
    let_next_start();
    const u32 n = 3 * a.side * a.side, element = own_column(), nx = a.width / a.side;
    if (element >= n) return;
    const u32 c = a.pixel_first ? element % 3 : element / (a.side * a.side), pixel = a.pixel_first ? element / 3 : element % (a.side * a.side);
    const u32 y = pixel / a.side, x = pixel % a.side;
    const float mean = c == 0 ? a.mean[0] : c == 1 ? a.mean[1] : a.mean[2], std = c == 0 ? a.std[0] : c == 1 ? a.std[1] : a.std[2];
    for (u32 row = blockIdx.y; row < a.height / a.side * nx; row += gridDim.y) {
        const u32 v = a.rgb[3 * ((size_t)(row / nx * a.side + y) * a.width + row % nx * a.side + x) + c];
        a.out[(size_t)row * n + element] = ((float)v / 255.0f - mean) / std;
    }
}

struct SumRowsArgs {
    const float* x;       // rows of width elements
    const u32* rows;      // [n_rows][n]: rows of x, or NO_ROW; null: in order
    const float* weights; // [n][width]; null: ones
    float* out;           // rows of width elements, out_stride apart
    u32 n_rows, width;
    u32 n;                // rows of a sum
    u32 out_stride;
    float divisor;        // of the sums
    u32 unused;
};
ASSERT_LAYOUT(SumRowsArgs);

// Sums of n rows each. Of one row they are a copy, in another order, or between other columns.
extern "C" __global__ void __launch_bounds__(256) encoder_sum_rows(const __grid_constant__ SumRowsArgs a) {
    wait_for_input();
    let_next_start();
    const u32 column = own_column();
    if (column >= a.width) return;
    FOR_ROWS(a, row) {
        float sum = 0.0f;
        for (u32 j = 0; j < a.n; j++) {
            const size_t at = (size_t)row * a.n + j, from = a.rows ? a.rows[at] : at;
            if (a.rows && from == NO_ROW) continue;
            const float v = a.x[from * a.width + column];
            sum += a.weights ? v * a.weights[(size_t)j * a.width + column] : v;
        }
        a.out[(size_t)row * a.out_stride + column] = sum / a.divisor;
    }
}

struct InterleaveArgs {
    const float* x; // [n_rows][n][width / n]
    float* out;     // [n_rows][width / n][n]
    u32 n_rows, width;
    u32 n;
    u32 unused;
};
ASSERT_LAYOUT(InterleaveArgs);

extern "C" __global__ void __launch_bounds__(256) encoder_interleave(const __grid_constant__ InterleaveArgs a) {
    wait_for_input();
    let_next_start();
    const u32 column = own_column();
    if (column >= a.width) return;
    const u32 from = column % a.n * (a.width / a.n) + column / a.n;
    FOR_ROWS(a, row) a.out[(size_t)row * a.width + column] = a.x[(size_t)row * a.width + from];
}

struct RotateArgs {
    float* x;           // [n_rows][width]
    const float* table; // [n_rows][head_dim / 2][2]: cosines and sines
    u32 n_rows, width;
    u32 head_dim;
    u32 block;          // elements of a head of which the first half and the second half are pairs
};
ASSERT_LAYOUT(RotateArgs);

// A thread: a pair of elements of a row.
extern "C" __global__ void __launch_bounds__(256) encoder_rotate(const __grid_constant__ RotateArgs a) {
    wait_for_input();
    let_next_start();
    const u32 pair = own_column(), half_block = a.block / 2, pairs = a.head_dim / a.block * half_block;
    if (pair >= a.width / a.head_dim * pairs) return;
    const u32 block = pair % pairs / half_block * a.block, i = pair % pairs % half_block;
    FOR_ROWS(a, row) {
        float* first = a.x + (size_t)row * a.width + pair / pairs * a.head_dim + block + i;
        const float* angle = a.table + (size_t)row * a.head_dim + block + 2 * i;
        const float x = first[0], y = first[half_block], cosine = angle[0], sine = angle[1];
        first[0] = x * cosine - y * sine;
        first[half_block] = x * sine + y * cosine;
    }
}
