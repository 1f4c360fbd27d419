// Kernels that measure what a device can do at best (src/ceilings.rs): each does one thing over and over.
#include "args_layout.cuh"
#include "ptx.cuh"

struct RateArgs {
    const uint4* from; // input
    uint4* to;         // result
    u64_t n;           // vectors of 16 bytes
    u32 steps;         // how often the multiplications are repeated
    u32 unused;
};
ASSERT_LAYOUT(RateArgs);

// Vectors that a thread loads at a time.
constexpr int AHEAD = 4;

// Reads `n` vectors; each thread stores the sum of its words to `to`, 4 bytes for each thread.
extern "C" __global__ void __launch_bounds__(256) rate_read(const __grid_constant__ RateArgs a) {
    wait_for_input();
    const size_t stride = (size_t)gridDim.x * blockDim.x, thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    u32 sum = 0;
    for (size_t first = thread; first < a.n; first += AHEAD * stride) {
        uint4 v[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) v[i] = first + i * stride < a.n ? load_stream(a.from + first + i * stride) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) sum += v[i].x + v[i].y + v[i].z + v[i].w;
    }
    ((u32*)a.to)[thread] = sum;
}

// Copies `n` vectors.
extern "C" __global__ void __launch_bounds__(256) rate_copy(const __grid_constant__ RateArgs a) {
    wait_for_input();
    const size_t stride = (size_t)gridDim.x * blockDim.x, thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (size_t first = thread; first < a.n; first += AHEAD * stride) {
        uint4 v[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (first + i * stride < a.n) v[i] = load_stream(a.from + first + i * stride);
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (first + i * stride < a.n) a.to[first + i * stride] = v[i];
    }
}

// Independent accumulators of a thread.
constexpr int CHAINS = 8;

// Each thread makes `steps` times CHAINS multiply-adds, and stores their sum to `to`.
extern "C" __global__ void __launch_bounds__(256) rate_floats(const __grid_constant__ RateArgs a) {
    wait_for_input();
    const float factor = ((const float*)a.from)[0], summand = ((const float*)a.from)[1];
    float v[CHAINS];
#pragma unroll
    for (int i = 0; i < CHAINS; i++) v[i] = (float)(threadIdx.x + i);
#pragma unroll 8
    for (u32 step = 0; step < a.steps; step++)
#pragma unroll
        for (int i = 0; i < CHAINS; i++) v[i] = fmaf(v[i], factor, summand);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < CHAINS; i++) sum += v[i];
    ((float*)a.to)[(size_t)blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Each warp makes `steps` times CHAINS products of F16 matrices on the tensor cores, 16 x 16 by 16 x 8; each thread stores the
// sum of its elements to `to`.
extern "C" __global__ void __launch_bounds__(256) rate_mma(const __grid_constant__ RateArgs a) {
    wait_for_input();
    const uint4 of_a = a.from[threadIdx.x % 32], of_b = a.from[32 + threadIdx.x % 32];
    float c[CHAINS][4] = {};
#pragma unroll 4
    for (u32 step = 0; step < a.steps; step++)
#pragma unroll
        for (int i = 0; i < CHAINS; i++) mma(c[i], of_a.x, of_a.y, of_a.z, of_a.w, of_b.x, of_b.y);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < CHAINS; i++) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
    ((float*)a.to)[(size_t)blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Stores the previous kernel's word plus one: a launch with almost nothing to do, that depends on the one before.
extern "C" __global__ void rate_link(const __grid_constant__ RateArgs a) {
    wait_for_input();
    let_next_start();
    *(u32*)a.to = *(const u32*)a.from + 1;
}
