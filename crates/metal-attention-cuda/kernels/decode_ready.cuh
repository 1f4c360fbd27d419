// Steps of small products in decode.cu: what a block has of them is so little that a warp takes its weights to registers before the inputs are
// there, as the tensor cores want them, whatever their format. What is left to do when they come is short, and without a branch.
#pragma once
#include "code_products.cuh"
#include "decode.cuh"

// Where something lies in the block's memory, in a register that is filled where it is said to be.
__device__ __forceinline__ u32 offset_of(const void* p) { return (u32)((const unsigned char*)p - decode_memory); }
template <typename T> __device__ __forceinline__ const T* at_offset(u32 offset) { return (const T*)(decode_memory + offset); }
__device__ __forceinline__ void settle(u32& v) { asm volatile("" : "+r"(v)); }

// Panels that a warp has at most: of one tile, or half as many of each of two.
constexpr int READY = 4, READY_HALF = READY / 2;
// Floats from one row's sums to those of the next: two of each warp, and some so that rows lie in banks of their own.
constexpr u32 READY_STRIDE = 2 * WARPS + 4;

// Eight codes of each of rows g and g + 8 of a panel's two blocks, as bytes that go with digits, what their products are to be multiplied by, and
// what sums of inputs are, which the lane takes off.
struct ReadyPanel {
    u32 codes[2][4];
    float scales[2][2], mins[2][2];
};
// Half of what a warp has: panels from `first` on of a tile, of which the warp has `n`, and where what goes with them will be.
struct ReadyHalf {
    ReadyPanel panels[READY_HALF];
    bool of_halves, has_mins; // whether the format has a scale for each half of a block, and offsets
    u32 digits[READY_HALF], mask, factors[READY_HALF], sums[READY_HALF]; // in the block's memory

    // Takes those that lie from `record` on.
    template <u32 FORMAT> __device__ __forceinline__ void read(const unsigned char* record, u32 first, u32 n, int lane) {
        static_assert(Record<FORMAT>::PANELS == 1, "records are single panels");
        typedef Codes<FORMAT> P;
        const int t = lane % 4, sub = P::SUBS == 2 ? t / 2 : 0;
        of_halves = P::SUBS == 2, has_mins = P::MINS;
#pragma unroll
        for (u32 k = 0; k < READY_HALF; k++) {
            if (first + k >= n) continue;
            P p;
            p.read(Place<FORMAT>(record + (first + k) * Record<FORMAT>::BYTES, 0), lane);
            ReadyPanel& to = panels[k];
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int row = 0; row < 2; row++) {
                    u32 of[2];
                    p.bytes(b, row, of);
                    // Those of both halves of a block by turns, as digits are.
                    to.codes[b][row] = P::TURNS ? of[0] : __byte_perm(of[0], of[1], 0x5140);
                    to.codes[b][2 + row] = P::TURNS ? of[1] : __byte_perm(of[0], of[1], 0x7362);
                    to.scales[b][row] = p.scale(0, b, row, sub) * (1.0f / P::MULTIPLE);
                    if (P::MINS) to.mins[b][row] = (P::SUBS == 2 ? t % 2 : t) == 0 ? p.min(b, row, sub) : 0.0f;
                }
        }
    }
    // Finds where digits, factors and sums of its inputs will be. `zeros`: where there are none.
    __device__ __forceinline__ void place(const CodeInput& input, u32 first, u32 n, const unsigned char* zeros, int lane) {
        const int g = lane / 4, t = lane % 4;
        // Columns 0 to 3 are those of whole blocks, or of their first halves, the others of the second.
        const bool none = g % 4 == 3 || (g >= 4 && !of_halves);
        mask = !of_halves ? ~0u : g < 4 ? 0x00ff00ffu : 0xff00ff00u;
#pragma unroll
        for (u32 k = 0; k < READY_HALF; k++) {
            const u32 i = first + k;
            const bool there = i < n;
            digits[k] = offset_of(there && !none ? input.digits + i * DIGITS_OF_PANEL + g % 4 * 64 + t * 16 : zeros);
            factors[k] = offset_of(there ? (const unsigned char*)(input.factors + 2 * i) : zeros);
            sums[k] = offset_of(there ? (const unsigned char*)(input.sums + 4 * i) : zeros);
            settle(digits[k]), settle(factors[k]), settle(sums[k]);
        }
    }
    // Begins products with the first K panels, and adds them: of rows g and g + 8 as far as the lane has them. Those with even t have the first two
    // digits, the others the third.
    template <int K> __device__ __forceinline__ void begin(int (&c)[K][2][4]) const {
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            const uint4 x = *at_offset<uint4>(digits[k]);
            const u32(&of)[2][4] = panels[k].codes;
            mma_codes<true>(c[k][0], of[0][0], of[0][1], of[0][2], of[0][3], x.x & mask, x.y & mask);
            mma_codes<true>(c[k][1], of[1][0], of[1][1], of[1][2], of[1][3], x.z & mask, x.w & mask);
        }
    }
    template <int K> __device__ __forceinline__ void add(const int (&c)[K][2][4], float (&y)[2]) const {
#pragma unroll
        for (u32 k = 0; k < K; k++) {
            const float2 factor = *at_offset<float2>(factors[k]);
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int row = 0; row < 2; row++)
                    y[row] += panels[k].scales[b][row] * (b == 0 ? factor.x : factor.y) * (float)((c[k][b][2 * row] << 8) + c[k][b][2 * row + 1]);
        }
    }
    __device__ __forceinline__ void take_offsets(int t, float (&y)[2]) const {
#pragma unroll
        for (u32 k = 0; k < READY_HALF; k++) {
            const float4 of = *at_offset<float4>(sums[k]);
            const float of_blocks[2] = {!of_halves ? of.x + of.y : t < 2 ? of.x : of.y, !of_halves ? of.z + of.w : t < 2 ? of.z : of.w};
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int row = 0; row < 2; row++) y[row] -= panels[k].mins[b][row] * of_blocks[b];
        }
    }
};

// Products of the first K panels of H halves.
template <int H, int K> __device__ __forceinline__ void ready_products(const ReadyHalf (&ready)[2], float (&y)[2][2]) {
    int c[H][K][2][4];
#pragma unroll
    for (int h = 0; h < H; h++) ready[h].begin(c[h]);
#pragma unroll
    for (int h = 0; h < H; h++) ready[h].add(c[h], y[h]);
}

// Row `row`'s sum over all warps.
__device__ __forceinline__ float ready_sum(const float* sums, u32 row) {
    float v[2 * WARPS];
#pragma unroll
    for (int k = 0; k < 2 * WARPS; k += 4) *(float4*)(v + k) = *(const float4*)(sums + row * READY_STRIDE + k);
#pragma unroll
    for (int d = 1; d < 2 * WARPS; d *= 2)
#pragma unroll
        for (int k = 0; k < 2 * WARPS; k += 2 * d) v[k] += v[k + d];
    return v[0];
}
