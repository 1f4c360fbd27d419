// Single elements of packed matrices, for kernels that do not use the tensor cores: embeddings, odd rows.
#pragma once
#include "formats.cuh"

// Element k of row `row`, in F32.
template <typename P> __device__ __forceinline__ float element_of(const Matrix& m, u32 row, u32 k) {
    const int place = place_in_quant_block(k % 32), b = k % 64 / 32, r = row % 16 / 8;
    const int lane = row % 8 * 4 + place / 8, p = place % 8, s = p / 4, pair = p % 4 / 2;
    P panel;
    panel.load(m, row / 16, k / 64, lane);
    float sum = 0.0f;
    for (int plane = 0; plane < P::PLANES; plane++) {
        u32 a[2][4];
        panel.codes(plane, b, a);
        u32 word = 0;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (i == s && j == 2 * pair + r) word = a[i][j];
        const float code = p % 2 == 0 ? __low2float(halves(word)) : __high2float(halves(word));
        sum += panel.scale(plane, b, r, s) * code;
    }
    return sum - panel.min(b, r, s);
}

// Eight elements of row `row`, with one load: elements 4 t to 4 t + 3 of the first half (v[0]) and of the second half (v[1]) of quantisation block
// `quant_block`.
template <typename P> __device__ __forceinline__ void elements_of(const Matrix& m, u32 row, u32 quant_block, int t, float4 (&v)[2]) {
    const int b = quant_block % 2, r = row % 16 / 8;
    P panel;
    panel.load(m, row / 16, quant_block / 2, row % 8 * 4 + t);
#pragma unroll
    for (int s = 0; s < 2; s++) v[s] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int plane = 0; plane < P::PLANES; plane++) {
        u32 of[2][2][4];
        panel.codes(plane, 0, of[0]);
        panel.codes(plane, 1, of[1]);
#pragma unroll
        for (int s = 0; s < 2; s++) {
            const u32 first = b == 0 ? (r == 0 ? of[0][s][0] : of[0][s][1]) : r == 0 ? of[1][s][0] : of[1][s][1];
            const u32 second = b == 0 ? (r == 0 ? of[0][s][2] : of[0][s][3]) : r == 0 ? of[1][s][2] : of[1][s][3];
            const float2 x = __half22float2(halves(first)), y = __half22float2(halves(second));
            const float scale = panel.scale(plane, b, r, s);
            v[s].x += scale * x.x, v[s].y += scale * x.y, v[s].z += scale * y.x, v[s].w += scale * y.y;
        }
    }
#pragma unroll
    for (int s = 0; s < 2; s++) {
        const float min = panel.min(b, r, s);
        v[s].x -= min, v[s].y -= min, v[s].z -= min, v[s].w -= min;
    }
}
