// Single elements of packed matrices, for what does not go through the tensor cores.
#pragma once
#include "formats.cuh"

// Element k of row `row`.
template <typename P> __device__ __forceinline__ float element_of(const Matrix& m, u32 row, u32 k) {
    const int place = place_in_block(k % 32), b = k % 64 / 32, r = row % 16 / 8;
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
