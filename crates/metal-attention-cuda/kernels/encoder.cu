// The kernels of encoders of pictures, beside products and norms: functions of elements, sums and orders of rows, the rotation of heads,
// and attention without a mask. Rows are F32, [n_rows][width].
#include "common.cuh"

// A row of zeros, where a row's index is expected.
constexpr u32 NO_ROW = ~0u;

enum Function : u32 { GELU_TANH = 0, GELU_ERF = 1, QUICK_GELU = 2, SILU_OF = 3, SUM = 4, PRODUCT = 5, SCALED = 6, CLAMPED = 7, SQUARED_RELU = 8 };

struct ElementsArgs {
    const float* x;    // [n_rows][width]
    const float* y;    // rows of width elements, y_stride apart; null for activations: ones
    float* out;        // [n_rows][width], may be x
    u32 n_rows, width;
    u32 y_stride;      // 0: one row of y for all rows
    u32 function;      // Function
    float a, b;        // SCALED: the factor; CLAMPED: the least and the greatest value
};
ASSERT_LAYOUT(ElementsArgs);

__device__ __forceinline__ float activated(u32 function, float v) {
    switch (function) {
        case GELU_TANH: return 0.5f * v * (1.0f + tanhf(0.79788456080286535588f * (v + 0.044715f * v * v * v)));
        case GELU_ERF: return 0.5f * v * (1.0f + erff(v * 0.70710678118654752440f));
        case QUICK_GELU: return v / (1.0f + expf(-1.702f * v));
        case SQUARED_RELU: return v * fmaxf(v, 0.0f);
        default: return v / (1.0f + expf(-v));
    }
}

// The column of a thread, and the rows that it takes. All kernels but attention divide their work so.
#define FOR_ROWS(a, row) for (u32 row = blockIdx.y; row < (a).n_rows; row += gridDim.y)
__device__ __forceinline__ u32 own_column() { return blockIdx.x * blockDim.x + threadIdx.x; }

extern "C" __global__ void __launch_bounds__(256) encoder_elements(const __grid_constant__ ElementsArgs a) {
    wait_for_input();
    let_next_start();
    const u32 column = own_column();
    if (column >= a.width) return;
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
        a.out[at] = v;
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

// Up to 64 queries that attend to the same keys.
struct EncoderTile {
    u32 query, n;    // the first query's row and the number of queries
    u32 key, n_keys; // likewise of keys and values; at least one key
};
ASSERT_LAYOUT(EncoderTile);

struct EncoderAttentionArgs {
    const float* q;           // [n_queries][width]
    const float* k;           // [n_keys][kv_width]
    const float* v;           // the same for values
    float* out;               // [n_queries][width]
    const EncoderTile* tiles; // [gridDim.x]
    u32 n_queries, n_keys;    // the rows that tiles refer to
    u32 width, kv_width;      // a multiple of head_dim each
    u32 head_dim;             // even
    float scale;              // factor on the scores
};
ASSERT_LAYOUT(EncoderAttentionArgs);

// The first element of this block's head in a row of keys: neighbouring heads of queries share one.
__device__ __forceinline__ u32 kv_column(const EncoderAttentionArgs& a) {
    return blockIdx.y * (a.kv_width / a.head_dim) / (a.width / a.head_dim) * a.head_dim;
}

SHARED_MEMORY(16, float, encoder_memory);

// Attention in F32, for heads of up to 256 elements. A block takes 32 queries of a tile and a head: blockIdx.z is the half of the tile. Each warp
// has four queries, whose scores of 32 keys are in its lanes. Shared memory: queries [32][head_dim + 2], keys or values of the same
// shape, weights [32][32].
extern "C" __global__ void __launch_bounds__(256) encoder_attention(const __grid_constant__ EncoderAttentionArgs a) {
    constexpr u32 ROWS = 32, OF_WARP = 4, PARTS = 8;
    wait_for_input();
    let_next_start();
    const EncoderTile tile = a.tiles[blockIdx.x];
    const u32 first_query = ROWS * blockIdx.z;
    if (first_query >= tile.n) return;
    const u32 n_queries = min(tile.n - first_query, ROWS), lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * OF_WARP;
    const u32 dim = a.head_dim, stride = dim + 2, column = blockIdx.y * dim, of_keys = kv_column(a);
    float* queries = encoder_memory;
    float* staged = queries + ROWS * stride;
    float* weights = staged + ROWS * stride;
    // Copies n rows of a head, and zeros behind them.
    auto stage = [&](float* to, const float* from, u32 width, u32 n) {
        for (u32 i = threadIdx.x; i < ROWS * dim / 2; i += blockDim.x) {
            const u32 row = i / (dim / 2), pair = 2 * (i % (dim / 2));
            *(float2*)(to + row * stride + pair) = row < n ? *(const float2*)(from + (size_t)row * width + pair) : make_float2(0.0f, 0.0f);
        }
    };
    stage(queries, a.q + (size_t)(tile.query + first_query) * a.width + column, a.width, n_queries);
    float largest[OF_WARP], sum[OF_WARP], out[OF_WARP][PARTS] = {};
#pragma unroll
    for (u32 j = 0; j < OF_WARP; j++) largest[j] = -INFINITY, sum[j] = 0.0f;
    for (u32 first = 0; first < tile.n_keys; first += ROWS) {
        const u32 n = min(tile.n_keys - first, ROWS);
        const size_t from = (size_t)(tile.key + first) * a.kv_width + of_keys;
        stage(staged, a.k + from, a.kv_width, n);
        __syncthreads();
        float score[OF_WARP] = {};
#pragma unroll 4
        for (u32 i = 0; i < dim; i += 2) {
            const float2 k = *(const float2*)(staged + lane * stride + i);
#pragma unroll
            for (u32 j = 0; j < OF_WARP; j++) {
                const float2 q = *(const float2*)(queries + (row0 + j) * stride + i);
                score[j] += q.x * k.x, score[j] += q.y * k.y;
            }
        }
#pragma unroll
        for (u32 j = 0; j < OF_WARP; j++) {
            const float scaled = lane < n ? a.scale * score[j] : -INFINITY, now = fmaxf(largest[j], warp_max(scaled));
            const float factor = expf(largest[j] - now), weight = expf(scaled - now);
            largest[j] = now;
            sum[j] = sum[j] * factor + weight;
#pragma unroll
            for (u32 part = 0; part < PARTS; part++) out[j][part] *= factor;
            weights[(row0 + j) * ROWS + lane] = weight;
        }
        __syncthreads();
        stage(staged, a.v + from, a.kv_width, n);
        __syncthreads();
#pragma unroll
        for (u32 part = 0; part < PARTS; part++) {
            const u32 element = 32 * part + lane;
            if (element >= dim) break;
#pragma unroll 2
            for (u32 key = 0; key < ROWS; key += 4) {
                float v[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++) v[i] = staged[(key + i) * stride + element];
#pragma unroll
                for (u32 j = 0; j < OF_WARP; j++) {
                    const float4 w = *(const float4*)(weights + (row0 + j) * ROWS + key);
                    out[j][part] += w.x * v[0], out[j][part] += w.y * v[1], out[j][part] += w.z * v[2], out[j][part] += w.w * v[3];
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 j = 0; j < OF_WARP; j++) {
        const float factor = 1.0f / warp_sum(sum[j]);
        if (row0 + j >= n_queries) continue;
        float* to = a.out + (size_t)(tile.query + first_query + row0 + j) * a.width + column;
#pragma unroll
        for (u32 part = 0; part < PARTS; part++)
            if (32 * part + lane < dim) to[32 * part + lane] = out[j][part] * factor;
    }
}

// Attention on the tensor cores in F16 with F32 sums, for heads of up to D elements, which zeros fill up. A block takes a tile and a head, each of its
// four warps 16 queries. Shared memory: keys and values [64][D + 8] each, F16.
template <u32 D> __device__ __forceinline__ void attention_on_units(const EncoderAttentionArgs& a) {
    constexpr u32 KEYS = 64, ROW = D + 8;
    wait_for_input();
    let_next_start();
    const EncoderTile tile = a.tiles[blockIdx.x];
    const u32 dim = a.head_dim, column = blockIdx.y * dim, of_keys = kv_column(a);
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row0 = threadIdx.x / 32 * 16 + g;
    half* keys = (half*)encoder_memory;
    half* values = keys + KEYS * ROW;

    u32 q[D / 16][4];
#pragma unroll
    for (u32 s = 0; s < D / 16; s++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 row = row0 + 8 * (i % 2), element = 16 * s + 8 * (i / 2) + 2 * t;
            const float* from = a.q + (size_t)(tile.query + row) * a.width + column + element;
            const float2 v = row < tile.n && element < dim ? *(const float2*)from : make_float2(0.0f, 0.0f);
            q[s][i] = bits(__floats2half2_rn(v.x * a.scale, v.y * a.scale));
        }
    float out[D / 8][4] = {};
    float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    for (u32 first = 0; first < tile.n_keys; first += KEYS) {
        const u32 n = min(tile.n_keys - first, KEYS);
        const size_t from = (size_t)(tile.key + first) * a.kv_width + of_keys;
#pragma unroll 4
        for (u32 i = threadIdx.x; i < KEYS * D / 2; i += 128) {
            const u32 row = i / (D / 2), element = 2 * (i % (D / 2));
            const bool there = row < n && element < dim;
            const size_t at = from + (size_t)row * a.kv_width + element;
            const float2 k = there ? *(const float2*)(a.k + at) : make_float2(0.0f, 0.0f);
            const float2 v = there ? *(const float2*)(a.v + at) : make_float2(0.0f, 0.0f);
            *(half2*)(keys + row * ROW + element) = __floats2half2_rn(k.x, k.y);
            *(half2*)(values + row * ROW + element) = __floats2half2_rn(v.x, v.y);
        }
        __syncthreads();
        float score[8][4] = {};
#pragma unroll
        for (u32 j = 0; j < 8; j++)
#pragma unroll
            for (u32 s = 0; s < D / 16; s++) {
                // Of four matrices the last two are those of the next 16 elements, if there are any.
                if (s % 2 == 1) continue;
                u32 b[4];
                const bool two = s + 1 < D / 16;
                load_matrices(b, keys + (8 * j + lane % 8) * ROW + 16 * s + 8 * (two ? lane / 8 : lane / 8 % 2));
                mma(score[j], q[s][0], q[s][1], q[s][2], q[s][3], b[0], b[1]);
                if (two) mma(score[j], q[(s + 1) % (D / 16)][0], q[(s + 1) % (D / 16)][1], q[(s + 1) % (D / 16)][2], q[(s + 1) % (D / 16)][3], b[2], b[3]);
            }
        if (n < KEYS) {
#pragma unroll
            for (u32 j = 0; j < 8; j++)
#pragma unroll
                for (u32 i = 0; i < 4; i++)
                    if (8 * j + 2 * t + i % 2 >= n) score[j][i] = -INFINITY;
        }
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            float now = largest[r];
#pragma unroll
            for (u32 j = 0; j < 8; j++) now = fmaxf(now, fmaxf(score[j][2 * r], score[j][2 * r + 1]));
            now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
            now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
            const float factor = __expf(largest[r] - now);
            largest[r] = now;
            sum[r] *= factor;
#pragma unroll
            for (u32 j = 0; j < D / 8; j++) out[j][2 * r] *= factor, out[j][2 * r + 1] *= factor;
#pragma unroll
            for (u32 j = 0; j < 8; j++)
#pragma unroll
                for (u32 i = 2 * r; i < 2 * r + 2; i++) {
                    score[j][i] = __expf(score[j][i] - now);
                    sum[r] += score[j][i];
                }
        }
#pragma unroll
        for (u32 s = 0; s < 4; s++) {
            u32 p[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) p[i] = bits(__floats2half2_rn(score[2 * s + i / 2][2 * (i % 2)], score[2 * s + i / 2][2 * (i % 2) + 1]));
#pragma unroll
            for (u32 j = 0; j < D / 8; j += 2) {
                u32 b[4];
                load_matrices_transposed(b, values + (16 * s + lane % 8 + lane / 8 % 2 * 8) * ROW + 8 * j + lane / 16 * 8);
                mma(out[j], p[0], p[1], p[2], p[3], b[0], b[1]);
                mma(out[j + 1], p[0], p[1], p[2], p[3], b[2], b[3]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        const float factor = 1.0f / sum[r];
        if (row0 + 8 * r >= tile.n) continue;
        float* to = a.out + (size_t)(tile.query + row0 + 8 * r) * a.width + column;
#pragma unroll
        for (u32 j = 0; j < D / 8; j++)
            if (8 * j + 2 * t < dim) *(float2*)(to + 8 * j + 2 * t) = make_float2(out[j][2 * r] * factor, out[j][2 * r + 1] * factor);
    }
}

#define ATTENTION_ON_UNITS(D) \
    extern "C" __global__ void __launch_bounds__(128) encoder_attention_on_units_##D(const __grid_constant__ EncoderAttentionArgs a) { attention_on_units<D>(a); }
ATTENTION_ON_UNITS(64)
ATTENTION_ON_UNITS(80)
ATTENTION_ON_UNITS(128)
