// Products of panels of F16 or F32 weights in shared memory with one to four tokens, as exact as in F32.
//
// Inputs are scaled, for each quantisation block (quant block) of 32, by a power of two that brings the largest near 2^14, and split into two F16
// parts, hi + lo / 2048. Each part is a column of a tensor-core product: a token has two of its eight columns. F32 weights are two F16 parts as
// well (planes).
#pragma once
#include "formats.cuh"

// One panel in a lane's registers, read from a stage in shared memory. `codes(plane, b, row)`: four pairs of elements of row g (0) or g + 8 (1) of
// quant block b. An element is the sum over PLANES, the second one divided by 2048.
template <u32 FORMAT> struct Staged;
template <int N_PLANES> struct StagedFloats {
    static constexpr int PLANES = N_PLANES;
    uint4 w[4 * N_PLANES];
    template <typename P> __device__ __forceinline__ void read(const P& at, int lane) {
#pragma unroll
        for (int i = 0; i < 4 * N_PLANES; i++) w[i] = ((const uint4*)at.codes)[32 * i + lane];
    }
    __device__ __forceinline__ uint4 codes(int plane, int b, int row) const { return w[4 * plane + 2 * b + row]; }
};
template <> struct Staged<F16> : StagedFloats<1> {};
template <> struct Staged<F32> : StagedFloats<2> {};

// Stores eight inputs of a quant block as two F16 parts, like `store_digits` of code_products.cuh: 128 bytes each, hi then lo.
__device__ __forceinline__ void store_f16_parts(unsigned char* quant_blocks, float* factors, u32 quant_block, int t, const float4& first,
                                                const float4& second, bool exists) {
    const float v[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) largest = max(largest, __float_as_uint(v[i]) & 0x7fffffffu);
#pragma unroll
    for (int d = 1; d < 4; d *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, d));
    // The largest value's exponent becomes 13. Quant blocks below 2^-100 become zeros; infinity stays as it is.
    const u32 biased = largest >> 23, exponent = biased == 255 ? 140u : max(biased, 27u);
    const float up = __uint_as_float((267u - exponent) << 23);
    u32 hi[4], lo[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 w = make_float2(v[2 * i] * up, v[2 * i + 1] * up);
        const half2 of = __floats2half2_rn(w.x, w.y);
        hi[i] = bits(of), lo[i] = bits(__floats2half2_rn((w.x - __low2float(of)) * 2048.0f, (w.y - __high2float(of)) * 2048.0f));
    }
    if (!exists) return;
    unsigned char* to = quant_blocks + (size_t)quant_block * 128 + t * 16;
    *(uint4*)to = make_uint4(hi[0], hi[1], hi[2], hi[3]);
    *(uint4*)(to + 64) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    if (t == 0) factors[quant_block] = __uint_as_float((exponent - 13u) << 23);
}

// Adds a panel's products with rows g and g + 8 to `acc`: lane 4 g + t gets the sums of hi and lo of both rows for token t. `input`:
// [token][n_quant_blocks][128 bytes]; `factors`: [token][n_quant_blocks], or null for 1.
template <typename S, int TOKENS>
__device__ __forceinline__ void panel_products(const S& p, u32 panel, u32 n_quant_blocks, const unsigned char* input, const float* factors,
                                               int lane, float (&acc)[4]) {
    const int g = lane / 4, t = lane % 4;
    // Columns and tokens beyond TOKENS repeat others; their results are not used.
    const int column = g % (2 * TOKENS), token = t % TOKENS;
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const u32 quant_block = panel * 2 + b;
        const uint4 x = *(const uint4*)(input + ((column / 2) * n_quant_blocks + quant_block) * 128 + (column % 2) * 64 + t * 16);
        const float of_quant_block = factors ? factors[token * n_quant_blocks + quant_block] : 1.0f;
#pragma unroll
        for (int plane = 0; plane < S::PLANES; plane++) {
            const uint4 r0 = p.codes(plane, b, 0), r1 = p.codes(plane, b, 1);
            if (S::PLANES == 1 && !factors) {
                mma(acc, r0.x, r1.x, r0.y, r1.y, x.x, x.y);
                mma(acc, r0.z, r1.z, r0.w, r1.w, x.z, x.w);
                continue;
            }
            float c[4];
            mma_new(c, r0.x, r1.x, r0.y, r1.y, x.x, x.y);
            mma(c, r0.z, r1.z, r0.w, r1.w, x.z, x.w);
            const float factor = plane == 0 ? of_quant_block : of_quant_block * (1.0f / 2048.0f);
#pragma unroll
            for (int i = 0; i < 4; i++) acc[i] += factor * c[i];
        }
    }
}
