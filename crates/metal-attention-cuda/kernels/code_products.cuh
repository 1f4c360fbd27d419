// Products of panels of quantised weights in shared memory with one to four tokens, as exact as in F32, with integer tensor cores.
//
// Weights are codes of 4 to 8 bits. Inputs become integers as well: each quantisation block (quant block) of 32 inputs is scaled by the power of
// two that brings the largest magnitude to [2^21, 2^22), and rounded to integers with sign, of 23 bits; an error is at most 2^-22 of the largest
// magnitude. Each integer is 2^16 d0 + 2^8 d1 + d2, with three digits of 8 bits with sign. A digit of a token is one column of a product, so that
// codes times digits over 32 columns are exact. Lanes with even t get the sums of digits 0 and 1, lanes with odd t that of digit 2; each lane
// converts its own to F32, multiplies it by the scales, and the lanes of a row are added at its end (`row_sum`).
//
// "Block" alone is the thread block. Lanes: g = lane / 4 and t = lane % 4, as in the fragments of mma (ptx.cuh).
#pragma once
#include "formats.cuh"

// The inputs of one token in shared memory: digits [panel][digit][t][quant block of two][8 bytes] (the order that `digits_of` reads), sums of the
// inputs of each half of a quant block (for mins), and the factor of each quant block's digits. `input_bytes` in all.
constexpr u32 DIGITS_OF_PANEL = 192;
__device__ __forceinline__ u32 input_bytes(u32 n_panels) { return n_panels * (DIGITS_OF_PANEL + 2 * 12); }
struct CodeInput {
    unsigned char* digits;
    float* sums;    // [n_quant_blocks][2]
    float* factors; // [n_quant_blocks]
    __device__ __forceinline__ CodeInput(unsigned char* memory, u32 n_panels)
        : digits(memory), sums((float*)(memory + n_panels * DIGITS_OF_PANEL)), factors(sums + 4 * n_panels) {}
};

__device__ __forceinline__ float largest_of(const float4& v) { return larger(larger(fabsf(v.x), fabsf(v.y)), larger(fabsf(v.z), fabsf(v.w))); }
// The power of two that scales a quant block. `largest`: its largest magnitude, whose exponent becomes 21. Quant blocks below 2^-100 become zeros.
struct DigitScale {
    u32 exponent;
    float up;
    __device__ __forceinline__ DigitScale(float largest)
        : exponent(max(__float_as_uint(largest) >> 23, 27u)), up(__uint_as_float((275u - exponent) << 23)) {}
    // The integer of an input as three bytes; each is its digit plus 128. The sum with 1.5 * 2^23 = 0x4b400000 rounds to the integer, in the low
    // bits.
    __device__ __forceinline__ u32 whole(float v) const { return __float_as_uint(fmaf(v, up, 12582912.0f)) + (0x00808080u - 0x4b400000u); }
    // The factor of sums of digits; NaN if the quant block has infinity or NaN.
    __device__ __forceinline__ float factor() const {
        return exponent == 255 ? __uint_as_float(0x7fc00000u) : __uint_as_float((exponent - 21u) << 23);
    }
};

// Digit `digit` of four inputs, given by their integers, as four bytes.
__device__ __forceinline__ u32 digit_of(int digit, u32 a, u32 b, u32 c, u32 d) {
    // Selects the byte of two integers each, then of all four.
    const u32 of_two = 2 - digit + ((6 - digit) << 4);
    return __byte_perm(__byte_perm(a, b, of_two), __byte_perm(c, d, of_two), 0x5410) ^ 0x80808080u;
}

// Stores the lane's eight inputs of each of N quant blocks as digits: elements 4 t.. of the first half and of the second half. The quant blocks are
// `quant_block` and those 8, 16, ... after it; one that does not exist is left out. The four lanes of a quant block are neighbours, and all lanes
// of the warp call it. `with_sums`: whether sums of inputs are needed.
template <int N>
__device__ __forceinline__ void store_digits(const CodeInput& to, u32 quant_block, int t, const float4 (&v)[N][2], const bool (&exists)[N],
                                             bool with_sums) {
    float largest[N];
#pragma unroll
    for (int i = 0; i < N; i++) largest[i] = larger(largest_of(v[i][0]), largest_of(v[i][1]));
#pragma unroll
    for (int d = 1; d < 4; d *= 2)
#pragma unroll
        for (int i = 0; i < N; i++) largest[i] = larger(largest[i], __shfl_xor_sync(~0u, largest[i], d));
    if (with_sums) {
        float sum[N][2];
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) sum[i][h] = (v[i][h].x + v[i][h].y) + (v[i][h].z + v[i][h].w);
#pragma unroll
        for (int d = 1; d < 4; d *= 2)
#pragma unroll
            for (int i = 0; i < N; i++) sum[i][0] += __shfl_xor_sync(~0u, sum[i][0], d), sum[i][1] += __shfl_xor_sync(~0u, sum[i][1], d);
#pragma unroll
        for (int i = 0; i < N; i++)
            if (exists[i] && t == 1) *(float2*)(to.sums + 2 * (quant_block + 8 * i)) = make_float2(sum[i][0], sum[i][1]);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        const DigitScale scale(largest[i]);
        const float e[8] = {v[i][0].x, v[i][0].y, v[i][0].z, v[i][0].w, v[i][1].x, v[i][1].y, v[i][1].z, v[i][1].w};
        u32 whole[8];
#pragma unroll
        for (int k = 0; k < 8; k++) whole[k] = scale.whole(e[k]);
        // One quant block: lanes without it are done. Several: predicates instead of branches keep them side by side.
        if (N == 1 && !exists[i]) return;
        unsigned char* digits = to.digits + quant_block / 2 * DIGITS_OF_PANEL + t * 16 + quant_block % 2 * 8 + i * 4 * DIGITS_OF_PANEL;
        // The codes of both halves alternate (`column` of repack.cu), and so do the digits: element 0 of the first half, 0 of the second, 1, 1; 2, 2,
        // 3, 3.
#pragma unroll
        for (int digit = 0; digit < 3; digit++) {
            uint2 words;
            words.x = digit_of(digit, whole[0], whole[4], whole[1], whole[5]);
            words.y = digit_of(digit, whole[2], whole[6], whole[3], whole[7]);
            if (exists[i]) *(uint2*)(digits + digit * 64) = words;
        }
        if (exists[i] && t == 0) to.factors[quant_block + 8 * i] = scale.factor();
    }
}

// One panel of a format in a lane's registers. `read` loads it from shared memory.
//   bytes(b, row)            eight codes of row g (0) or g + 8 (1) of quant block b as bytes, signed or not (SIGNED), times MULTIPLE
//   HALVES_ALTERNATE         whether bytes of the quant block's two halves alternate, or follow each other
//   SCALES_PER_QUANT_BLOCK   1, or 2 for one of each half
//   MINS                     whether there are mins, offsets that are subtracted: weight = scale * code - min
template <u32 FORMAT> struct Codes;

__device__ __forceinline__ u32 word_of(const uint4& w, int b, int row) { return b == 0 ? (row == 0 ? w.x : w.y) : (row == 0 ? w.z : w.w); }

template <> struct Codes<Q4_0> : HalfScales {
    static constexpr int SCALES_PER_QUANT_BLOCK = 1;
    static constexpr bool SIGNED = true, HALVES_ALTERNATE = true, MINS = false;
    static constexpr float MULTIPLE = 16.0f;
    uint4 w;
    __device__ __forceinline__ void read(const Place<Q4_0>& at, int lane) {
        w = ((const uint4*)at.codes)[lane];
        load_scales<FromShared>(at.scales, lane);
    }
    // Code - 8, as two's complement.
    __device__ __forceinline__ void bytes(int b, int row, u32 (&of)[2]) const {
        const u32 word = word_of(w, b, row);
        of[0] = and_xor(word << 4, 0xf0f0f0f0u, 0x80808080u), of[1] = and_xor(word, 0xf0f0f0f0u, 0x80808080u);
    }
    __device__ __forceinline__ float min(int, int, int) const { return 0.0f; }
};

template <> struct Codes<Q4_K> : KScales {
    static constexpr int SCALES_PER_QUANT_BLOCK = 1;
    static constexpr bool SIGNED = false, HALVES_ALTERNATE = true, MINS = true;
    static constexpr float MULTIPLE = 1.0f;
    uint4 w;
    template <typename P> __device__ __forceinline__ void read(const P& at, int lane) {
        w = ((const uint4*)at.codes)[lane];
        load_scales<FromShared>(at, lane);
    }
    __device__ __forceinline__ void bytes(int b, int row, u32 (&of)[2]) const {
        const u32 word = word_of(w, b, row);
        of[0] = word & 0x0f0f0f0fu, of[1] = word >> 4 & 0x0f0f0f0fu;
    }
};

template <> struct Codes<Q5_K> : KScales {
    static constexpr int SCALES_PER_QUANT_BLOCK = 1;
    static constexpr bool SIGNED = false, HALVES_ALTERNATE = true, MINS = true;
    static constexpr float MULTIPLE = 1.0f;
    uint4 w;
    u32 h;
    __device__ __forceinline__ void read(const Place<Q5_K>& at, int lane) {
        w = ((const uint4*)at.codes)[lane];
        h = ((const u32*)at.high)[lane];
        load_scales<FromShared>(at, lane);
    }
    __device__ __forceinline__ void bytes(int b, int row, u32 (&of)[2]) const {
        const u32 word = word_of(w, b, row);
        of[0] = word & 0x0f0f0f0fu | fifth_bits(h, b, row, 0) & 0x10101010u;
        of[1] = word >> 4 & 0x0f0f0f0fu | fifth_bits(h, b, row, 1) & 0x10101010u;
    }
};

template <> struct Codes<Q6_K> : SixthScales {
    static constexpr int SCALES_PER_QUANT_BLOCK = 2;
    static constexpr bool SIGNED = true, HALVES_ALTERNATE = true, MINS = false;
    static constexpr float MULTIPLE = 4.0f;
    uint4 w;
    uint2 h;
    __device__ __forceinline__ void read(const Place<Q6_K>& at, int lane) {
        w = ((const uint4*)at.codes)[lane];
        h = ((const uint2*)at.high)[lane];
        load_scales<FromShared>(at, lane);
    }
    // Code - 32.
    __device__ __forceinline__ void bytes(int b, int row, u32 (&of)[2]) const {
        const u32 word = word_of(w, b, row), high = b == 0 ? h.x : h.y;
        of[0] = and_xor(word << 2, 0x3c3c3c3cu, 0x80808080u) ^ (high << (6 - 4 * row) & 0xc0c0c0c0u);
        of[1] = and_xor(word >> 2, 0x3c3c3c3cu, 0x80808080u) ^ ((row == 0 ? high << 4 : high) & 0xc0c0c0c0u);
    }
    __device__ __forceinline__ float min(int, int, int) const { return 0.0f; }
};

template <> struct Codes<Q8_0> : HalfScales {
    static constexpr int SCALES_PER_QUANT_BLOCK = 1;
    static constexpr bool SIGNED = true, HALVES_ALTERNATE = false, MINS = false;
    static constexpr float MULTIPLE = 1.0f;
    uint4 w[2];
    __device__ __forceinline__ void read(const Place<Q8_0>& at, int lane) {
        w[0] = ((const uint4*)at.codes)[lane];
        w[1] = ((const uint4*)at.codes)[32 + lane];
        load_scales<FromShared>(at.scales, lane);
    }
    __device__ __forceinline__ void bytes(int b, int row, u32 (&of)[2]) const {
        of[0] = row == 0 ? w[b].x : w[b].z, of[1] = row == 0 ? w[b].y : w[b].w;
    }
    __device__ __forceinline__ float min(int, int, int) const { return 0.0f; }
};

template <u32 FORMAT, bool HAS_MINS> struct GeneralCodes : GeneralPanel<FORMAT, HAS_MINS> {
    static constexpr bool SIGNED = true, HALVES_ALTERNATE = false;
    static constexpr float MULTIPLE = 1.0f;
    __device__ __forceinline__ void read(const Place<FORMAT>& at, int lane) {
        GeneralPanel<FORMAT, HAS_MINS>::template read<FromShared>(at, lane);
    }
    __device__ __forceinline__ void bytes(int b, int row, u32 (&of)[2]) const {
        const uint4 v = this->w[b];
        of[0] = row == 0 ? v.x : v.z, of[1] = row == 0 ? v.y : v.w;
    }
};
template <> struct Codes<CODES> : GeneralCodes<CODES, false> {};
template <> struct Codes<CODES_AND_MINS> : GeneralCodes<CODES_AND_MINS, true> {};

// Where a lane reads its column (column g) of a token's digits.
struct Digits {
    const unsigned char* from;
    u32 step; // bytes from one panel to the next; 0 for zeros
};
// With one scale per quant block, columns 0 to 2 are the digits of the first of two tokens, columns 4 to 6 those of the second. With two scales
// they are the digits of first halves of quant blocks, and of second halves, of the first token. `first`, `second`: the tokens' digits; null: there
// is no such token. Unused columns read `zeros`, 16 bytes.
template <int SCALES_PER_QUANT_BLOCK>
__device__ __forceinline__ Digits digits_of(const unsigned char* first, const unsigned char* second, const unsigned char* zeros, int lane) {
    const int g = lane / 4, t = lane % 4;
    const unsigned char* token = SCALES_PER_QUANT_BLOCK == 2 || g < 4 ? first : second;
    if (g % 4 == 3 || !token) return {zeros, 0};
    return {token + g % 4 * 64 + t * 16, DIGITS_OF_PANEL};
}

// Adds a panel's products with rows g and g + 8 to `acc`, for the digits and the token or half that the lane has.
template <typename C>
__device__ __forceinline__ void code_products(const C& p, u32 panel, const Digits& digits, const float* factors, int lane, float (&acc)[2]) {
    const uint4 x = *(const uint4*)(digits.from + panel * digits.step);
    const float2 factor = *(const float2*)(factors + 2 * panel);
    const bool upper = lane >= 16;
    const int sub = C::SCALES_PER_QUANT_BLOCK == 2 ? lane % 4 / 2 : 0;
#pragma unroll
    for (int b = 0; b < 2; b++) {
        u32 b0 = b == 0 ? x.x : x.z, b1 = b == 0 ? x.y : x.w;
        if (!C::HALVES_ALTERNATE) {
            const u32 even = __byte_perm(b0, b1, 0x6420);
            b1 = __byte_perm(b0, b1, 0x7531), b0 = even;
        }
        if (C::SCALES_PER_QUANT_BLOCK == 2) {
            // Columns 0 to 3 are of first halves, columns 4 to 7 of second halves; the other half's bytes are hidden.
            const u32 mask = upper ? 0xff00ff00u : 0x00ff00ffu;
            b0 = C::HALVES_ALTERNATE ? b0 & mask : upper ? 0u : b0, b1 = C::HALVES_ALTERNATE ? b1 & mask : upper ? b1 : 0u;
        }
        u32 r0[2], r1[2];
        p.bytes(b, 0, r0);
        p.bytes(b, 1, r1);
        int c[4];
        mma_codes<C::SIGNED>(c, r0[0], r1[0], r0[1], r1[1], b0, b1);
        const float f = b == 0 ? factor.x : factor.y;
        acc[0] += p.scale(0, b, 0, sub) * f * (float)((c[0] << 8) + c[1]);
        acc[1] += p.scale(0, b, 1, sub) * f * (float)((c[2] << 8) + c[3]);
    }
}
// Adds to `mins` what a panel's mins contribute: min times the sum of inputs.
template <typename C> __device__ __forceinline__ void add_mins(const C& p, u32 panel, const float* sums, float (&mins)[2]) {
    const float4 of = *(const float4*)(sums + 4 * panel);
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const float first = b == 0 ? of.x : of.z, second = b == 0 ? of.y : of.w;
#pragma unroll
        for (int row = 0; row < 2; row++)
            mins[row] += C::SCALES_PER_QUANT_BLOCK == 1 ? p.min(b, row, 0) * (first + second) : p.min(b, row, 0) * first + p.min(b, row, 1) * second;
    }
}
// The sum of a row, in all lanes of its token: adds the lanes of digits, and of halves if they have scales of their own.
template <typename C> __device__ __forceinline__ float row_sum(float of, int lane) {
    of *= (lane % 2 == 0 ? 256.0f : 1.0f / 256.0f) / C::MULTIPLE;
    of += __shfl_xor_sync(~0u, of, 1);
    return C::SCALES_PER_QUANT_BLOCK == 2 ? of + __shfl_xor_sync(~0u, of, 2) : of;
}
