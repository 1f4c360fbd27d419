// Products of a panel with one to four tokens as exact as in F32, of codes in workgroup memory.
//
// The tensor cores multiply codes, which F16 holds exactly, by inputs in two F16 parts, hi and lo / 2048, after these were
// multiplied by a power of two that brings the largest near 2^14. A token takes two of eight columns of a product, its scales are
// applied to F32 sums. Codes are taken as they lie in the low bits of an F16, whole multiples of 2^-24, which spares the
// subtraction of an offset and every other shift: what the offset adds goes with the sums of the inputs.
#pragma once
#include "formats.cuh"

// 2^24: one in the place of a code's lowest bit.
constexpr float UNIT = 16777216.0f;
// A format's panel, read from workgroup memory, and how the products of a block are made of it. `OFFSET` is in every code besides; `ODD_SIXTEENTH`: the codes of every other pair of columns are 16 times what they stand for.
template <u32 FORMAT> struct Staged;

// Codes of four bits and what some formats have more, of row g (0) or g + 8 (1): four pairs as they lie in `word`.
__device__ __forceinline__ void spread(u32 word, u32 (&pairs)[4]) {
    const u32 v = word >> 8;
    pairs[0] = word & 0x000f000fu, pairs[1] = word & 0x00f000f0u, pairs[2] = v & 0x000f000fu, pairs[3] = v & 0x00f000f0u;
}

template <> struct Staged<Q4_0> {
    static constexpr int SUBS = 1, PLANES = 1;
    static constexpr bool ODD_SIXTEENTH = true, MINS = false;
    static constexpr float OFFSET = 8.0f;
    uint4 w;
    uint2 s;
    __device__ __forceinline__ void read(const Place<Q4_0>& at, int lane) {
        w = ((const uint4*)at.codes)[lane];
        s = ((const uint2*)at.scales)[lane / 4];
    }
    __device__ __forceinline__ void codes(int, int b, int row, u32 (&pairs)[4]) const {
        spread(b == 0 ? (row == 0 ? w.x : w.y) : (row == 0 ? w.z : w.w), pairs);
    }
    __device__ __forceinline__ float scale(int, int b, int row, int) const {
        const half2 v = halves(row == 0 ? s.x : s.y);
        return b == 0 ? __low2float(v) : __high2float(v);
    }
    __device__ __forceinline__ float min(int, int, int = 0) const { return 0.0f; }
};

template <> struct Staged<Q4_K> {
    static constexpr int SUBS = 1, PLANES = 1;
    static constexpr bool ODD_SIXTEENTH = true, MINS = true;
    static constexpr float OFFSET = 0.0f;
    uint4 w;
    uint2 s, d;
    template <typename P> __device__ __forceinline__ void read(const P& at, int lane) {
        w = ((const uint4*)at.codes)[lane];
        s = ((const uint2*)at.scales)[lane / 4];
        d = ((const uint2*)at.super)[lane / 4];
    }
    __device__ __forceinline__ void codes(int, int b, int row, u32 (&pairs)[4]) const {
        spread(b == 0 ? (row == 0 ? w.x : w.y) : (row == 0 ? w.z : w.w), pairs);
    }
    __device__ __forceinline__ float scale(int, int b, int row, int) const {
        return __low2float(halves(row == 0 ? d.x : d.y)) * byte_of(row == 0 ? s.x : s.y, b);
    }
    __device__ __forceinline__ float min(int b, int row, int = 0) const {
        return __high2float(halves(row == 0 ? d.x : d.y)) * byte_of(row == 0 ? s.x : s.y, 2 + b);
    }
};

template <> struct Staged<Q5_K> {
    static constexpr int SUBS = 1, PLANES = 1;
    static constexpr bool ODD_SIXTEENTH = true, MINS = true;
    static constexpr float OFFSET = 0.0f;
    Staged<Q4_K> low;
    u32 h;
    __device__ __forceinline__ void read(const Place<Q5_K>& at, int lane) {
        low.read(at, lane);
        h = ((const u32*)at.high)[lane];
    }
    __device__ __forceinline__ void codes(int, int b, int row, u32 (&pairs)[4]) const {
        low.codes(0, b, row, pairs);
        // To bit 4 of the halves, or to bit 8 where codes are 16 times as large.
        const u32 even = fifth_bits(h, b, row, 0), odd = fifth_bits(h, b, row, 1);
        pairs[0] |= even & 0x00100010u, pairs[1] |= odd << 4 & 0x01000100u;
        pairs[2] |= even >> 8 & 0x00100010u, pairs[3] |= odd >> 4 & 0x01000100u;
    }
    __device__ __forceinline__ float scale(int, int b, int row, int) const { return low.scale(0, b, row, 0); }
    __device__ __forceinline__ float min(int b, int row, int = 0) const { return low.min(b, row, 0); }
};

template <> struct Staged<Q6_K> {
    static constexpr int SUBS = 2, PLANES = 1;
    static constexpr bool ODD_SIXTEENTH = true, MINS = false;
    static constexpr float OFFSET = 32.0f;
    uint4 w;
    uint2 h, s;
    u32 d;
    __device__ __forceinline__ void read(const Place<Q6_K>& at, int lane) {
        w = ((const uint4*)at.codes)[lane];
        h = ((const uint2*)at.high)[lane];
        s = ((const uint2*)at.scales)[lane / 4];
        d = ((const u32*)at.super)[lane / 4];
    }
    __device__ __forceinline__ void codes(int, int b, int row, u32 (&pairs)[4]) const {
        spread(b == 0 ? (row == 0 ? w.x : w.y) : (row == 0 ? w.z : w.w), pairs);
        // To bits 4 of the halves, or to bits 8.
        const u32 high = (b == 0 ? h.x : h.y) >> (4 * row);
        pairs[0] |= high << 4 & 0x00300030u, pairs[1] |= high << 6 & 0x03000300u;
        pairs[2] |= high >> 4 & 0x00300030u, pairs[3] |= high >> 2 & 0x03000300u;
    }
    __device__ __forceinline__ float scale(int, int b, int row, int sub) const {
        const float of = row == 0 ? __low2float(halves(d)) : __high2float(halves(d));
        return of * signed_byte_of(row == 0 ? s.x : s.y, 2 * b + sub);
    }
    __device__ __forceinline__ float min(int, int, int = 0) const { return 0.0f; }
};

template <> struct Staged<Q8_0> {
    static constexpr int SUBS = 1, PLANES = 1;
    static constexpr bool ODD_SIXTEENTH = false, MINS = false;
    static constexpr float OFFSET = 128.0f;
    uint4 w[2];
    uint2 s;
    __device__ __forceinline__ void read(const Place<Q8_0>& at, int lane) {
        w[0] = ((const uint4*)at.codes)[lane];
        w[1] = ((const uint4*)at.codes)[32 + lane];
        s = ((const uint2*)at.scales)[lane / 4];
    }
    __device__ __forceinline__ void codes(int, int b, int row, u32 (&pairs)[4]) const {
        const uint4 v = w[b];
        const u32 first = (row == 0 ? v.x : v.z) ^ 0x80808080u, second = (row == 0 ? v.y : v.w) ^ 0x80808080u;
        pairs[0] = __byte_perm(first, 0, 0x4140), pairs[1] = __byte_perm(first, 0, 0x4342);
        pairs[2] = __byte_perm(second, 0, 0x4140), pairs[3] = __byte_perm(second, 0, 0x4342);
    }
    __device__ __forceinline__ float scale(int, int b, int row, int) const {
        const half2 v = halves(row == 0 ? s.x : s.y);
        return b == 0 ? __low2float(v) : __high2float(v);
    }
    __device__ __forceinline__ float min(int, int, int = 0) const { return 0.0f; }
};

template <u32 FORMAT, bool HAS_MINS> struct StagedGeneral {
    static constexpr int SUBS = 2, PLANES = 1;
    static constexpr bool ODD_SIXTEENTH = false, MINS = HAS_MINS;
    static constexpr float OFFSET = 0.0f;
    GeneralPanel<FORMAT, HAS_MINS> p;
    __device__ __forceinline__ void read(const Place<FORMAT>& at, int lane) {
        const float4* scales = (const float4*)at.scales + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            p.w[i] = ((const uint4*)at.codes)[32 * i + lane];
            p.s[i] = scales[8 * i];
            if (HAS_MINS) p.m[i] = scales[16 + 8 * i];
        }
    }
    __device__ __forceinline__ void codes(int, int b, int row, u32 (&pairs)[4]) const {
        const uint4 v = p.w[b];
        const u32 words[2] = {(row == 0 ? v.x : v.z) ^ 0x80808080u, (row == 0 ? v.y : v.w) ^ 0x80808080u};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            pairs[2 * i] = minus(__byte_perm(words[i], 0x64646464u, 0x4140), 1152.0f);
            pairs[2 * i + 1] = minus(__byte_perm(words[i], 0x64646464u, 0x4342), 1152.0f);
        }
    }
    // Codes as they are, and not as multiples of 2^-24: an offset would be large beside most of them.
    __device__ __forceinline__ float scale(int, int b, int row, int sub) const { return p.scale(0, b, row, sub) / UNIT; }
    __device__ __forceinline__ float min(int b, int row, int sub = 0) const { return p.min(b, row, sub); }
};
template <> struct Staged<CODES> : StagedGeneral<CODES, false> {};
template <> struct Staged<CODES_AND_MINS> : StagedGeneral<CODES_AND_MINS, true> {};

template <int N_PLANES> struct StagedFloats {
    static constexpr int SUBS = N_PLANES == 1 ? 0 : 1, PLANES = N_PLANES;
    static constexpr bool ODD_SIXTEENTH = false, MINS = false;
    static constexpr float OFFSET = 0.0f;
    uint4 w[4 * N_PLANES];
    template <typename P> __device__ __forceinline__ void read(const P& at, int lane) {
#pragma unroll
        for (int i = 0; i < 4 * N_PLANES; i++) w[i] = ((const uint4*)at.codes)[32 * i + lane];
    }
    __device__ __forceinline__ void codes(int plane, int b, int row, u32 (&pairs)[4]) const {
        const uint4 v = w[4 * plane + 2 * b + row];
        pairs[0] = v.x, pairs[1] = v.y, pairs[2] = v.z, pairs[3] = v.w;
    }
    // Elements, and no codes of which one is 2^-24.
    __device__ __forceinline__ float scale(int plane, int, int, int) const { return (plane == 0 ? 1.0f : 1.0f / 2048.0f) / UNIT; }
    __device__ __forceinline__ float min(int, int, int = 0) const { return 0.0f; }
};
template <> struct Staged<F16> : StagedFloats<1> {};
template <> struct Staged<F32> : StagedFloats<2> {};

// Adds a panel's products with rows g and g + 8, of token t in lanes 4 g + t the hi and lo sums of both, times 2^-24.
template <typename S, int TOKENS>
__device__ __forceinline__ void panel_products(const S& p, u32 panel, u32 n_blocks, const unsigned char* input, const float* sums,
                                               int lane, float (&acc)[4]) {
    const int g = lane / 4, t = lane % 4;
    // Lanes whose columns and tokens nobody wants take those of others.
    const int column = g % (2 * TOKENS), token = t % TOKENS;
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const u32 block = panel * 2 + b;
        const uint4 x = *(const uint4*)(input + ((column / 2) * n_blocks + block) * 128 + (column % 2) * 64 + t * 16);
        float of_block[2] = {};
#pragma unroll
        for (int plane = 0; plane < S::PLANES; plane++) {
            u32 r0[4], r1[4];
            p.codes(plane, b, 0, r0);
            p.codes(plane, b, 1, r1);
            if (S::SUBS == 0) {
                mma(acc, r0[0], r1[0], r0[1], r1[1], x.x, x.y);
                mma(acc, r0[2], r1[2], r0[3], r1[3], x.z, x.w);
            } else if (S::SUBS == 1) {
                float c[4];
                mma_new(c, r0[0], r1[0], r0[1], r1[1], x.x, x.y);
                mma(c, r0[2], r1[2], r0[3], r1[3], x.z, x.w);
                const float s0 = p.scale(plane, b, 0, 0), s1 = p.scale(plane, b, 1, 0);
                of_block[0] = s0, of_block[1] = s1;
                acc[0] += s0 * c[0], acc[1] += s0 * c[1], acc[2] += s1 * c[2], acc[3] += s1 * c[3];
            } else {
#pragma unroll
                for (int sub = 0; sub < 2; sub++) {
                    float c[4];
                    mma_new(c, r0[2 * sub], r1[2 * sub], r0[2 * sub + 1], r1[2 * sub + 1], sub == 0 ? x.x : x.z, sub == 0 ? x.y : x.w);
                    const float s0 = p.scale(plane, b, 0, sub), s1 = p.scale(plane, b, 1, sub);
                    acc[0] += s0 * c[0], acc[1] += s0 * c[1], acc[2] += s1 * c[2], acc[3] += s1 * c[3];
                    if (!S::MINS && S::OFFSET == 0.0f) continue;
                    const float sum = sums[(token * n_blocks + block) * 2 + sub] * (1.0f / UNIT);
                    acc[0] -= (S::OFFSET * s0 + p.min(b, 0, sub)) * sum;
                    acc[2] -= (S::OFFSET * s1 + p.min(b, 1, sub)) * sum;
                }
            }
        }
        if (S::SUBS == 1 && (S::MINS || S::OFFSET != 0.0f)) {
            const float2 of_subs = *(const float2*)(sums + (token * n_blocks + block) * 2);
            const float sum = (of_subs.x + of_subs.y) * (1.0f / UNIT);
            acc[0] -= (S::MINS ? p.min(b, 0, 0) : S::OFFSET * of_block[0]) * sum;
            acc[2] -= (S::MINS ? p.min(b, 1, 0) : S::OFFSET * of_block[1]) * sum;
        }
    }
}
