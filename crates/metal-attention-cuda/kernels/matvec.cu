// y = W f(x) for one to four tokens, as exact as F32: f is nothing or an RMSNorm, and y is stored, added to the residual stream,
// or goes through the gate of a feed-forward.
//
// The tensor cores multiply codes, which F16 holds exactly, by inputs in two F16 parts, hi and lo / 2048, after these were
// multiplied by a power of two that brings the largest near 2^14. A token takes two of eight columns of a product, its scales are
// applied to F32 sums. Codes are taken as they lie in the low bits of an F16, whole multiples of 2^-24, which spares the
// subtraction of an offset and every other shift: what the offset adds goes with the sums of the inputs.
//
// Each warp has panels of its own on their way to workgroup memory, the first ones before the input is there.
#include "formats.cuh"

enum Output : u32 { STORE = 0, ADD = 1, GATED = 2 };
constexpr int MAX_PARTS = 3;
constexpr int WARPS = 8;

struct MatvecArgs {
    Matrix parts[MAX_PARTS]; // one below the other; GATED: the gate and up, of one format
    u32 n_parts;
    u32 blocks[MAX_PARTS]; // first block of the next part
    u32 n_in;
    u32 n_out;         // elements of a row of y
    u32 warps_a_tile;  // a power of two
    u32 output;
    u32 activation;
    float eps;         // of the norm
    float scale;       // ADD: of what is added
    u32 unused;
    const float* x;    // [n_tokens][n_in]
    const float* norm; // weight of the RMSNorm, or null
    const float* bias; // [n_out], or null
    float* y;          // [n_tokens][n_out]
    const u32* rows;   // rows of x to be taken, or null: in order
};

// 2^24: one in the place of a code's lowest bit.
constexpr float UNIT = 16777216.0f;
// Bytes of a warp's panels on their way, where these are not larger.
constexpr int RING = 6144;

// A format's panel in workgroup memory: bytes of its planes, and how the products of a block are made of it. `OFFSET` is in every
// code besides; `ODD_SIXTEENTH`: the codes of every other pair of columns are 16 times what they stand for.
template <u32 FORMAT> struct Staged;

// The lanes of a warp copy `BYTES` together.
template <int BYTES> __device__ __forceinline__ void copy_plane(unsigned char* to, const unsigned char* p, int lane) {
#pragma unroll
    for (int i = 0; i < BYTES; i += 512)
        if (BYTES - i >= 512 || lane * 16 < BYTES - i) copy16(to + i + lane * 16, p + i + lane * 16);
}

// Codes of four bits and what some formats have more, of row g (0) or g + 8 (1): four pairs as they lie in `word`.
__device__ __forceinline__ void spread(u32 word, u32 (&pairs)[4]) {
    const u32 v = word >> 8;
    pairs[0] = word & 0x000f000fu, pairs[1] = word & 0x00f000f0u, pairs[2] = v & 0x000f000fu, pairs[3] = v & 0x00f000f0u;
}

template <> struct Staged<Q4_0> {
    static constexpr int BYTES = 576, SUBS = 1, PLANES = 1;
    static constexpr bool ODD_SIXTEENTH = true, MINS = false;
    static constexpr float OFFSET = 8.0f;
    static __device__ __forceinline__ void stage(unsigned char* to, const Matrix& m, u32 tile, u32 panel, int lane) {
        const Place<Q4_0> at(m, tile, panel);
        copy_plane<512>(to, at.codes, lane);
        copy_plane<64>(to + 512, at.scales, lane);
    }
    uint4 w;
    uint2 s;
    __device__ __forceinline__ void read(const unsigned char* from, int lane) {
        w = *(const uint4*)(from + lane * 16);
        s = *(const uint2*)(from + 512 + lane / 4 * 8);
    }
    __device__ __forceinline__ void codes(int, int b, int row, u32 (&pairs)[4]) const {
        spread(b == 0 ? (row == 0 ? w.x : w.y) : (row == 0 ? w.z : w.w), pairs);
    }
    __device__ __forceinline__ float scale(int, int b, int row, int) const {
        const half2 v = halves(row == 0 ? s.x : s.y);
        return b == 0 ? __low2float(v) : __high2float(v);
    }
    __device__ __forceinline__ float min(int, int, int) const { return 0.0f; }
};

template <> struct Staged<Q4_K> {
    static constexpr int BYTES = 640, SUBS = 1, PLANES = 1;
    static constexpr bool ODD_SIXTEENTH = true, MINS = true;
    static constexpr float OFFSET = 0.0f;
    static __device__ __forceinline__ void stage(unsigned char* to, const Matrix& m, u32 tile, u32 panel, int lane) {
        const Place<Q4_K> at(m, tile, panel);
        copy_plane<512>(to, at.codes, lane);
        copy_plane<64>(to + 512, at.scales, lane);
        copy_plane<64>(to + 576, at.super, lane);
    }
    uint4 w;
    uint2 s, d;
    __device__ __forceinline__ void read(const unsigned char* from, int lane) {
        w = *(const uint4*)(from + lane * 16);
        s = *(const uint2*)(from + 512 + lane / 4 * 8);
        d = *(const uint2*)(from + 576 + lane / 4 * 8);
    }
    __device__ __forceinline__ void codes(int, int b, int row, u32 (&pairs)[4]) const {
        spread(b == 0 ? (row == 0 ? w.x : w.y) : (row == 0 ? w.z : w.w), pairs);
    }
    __device__ __forceinline__ float scale(int, int b, int row, int) const {
        return __low2float(halves(row == 0 ? d.x : d.y)) * byte_of(row == 0 ? s.x : s.y, b);
    }
    __device__ __forceinline__ float min(int b, int row, int) const {
        return __high2float(halves(row == 0 ? d.x : d.y)) * byte_of(row == 0 ? s.x : s.y, 2 + b);
    }
};

template <> struct Staged<Q5_K> {
    static constexpr int BYTES = 768, SUBS = 1, PLANES = 1;
    static constexpr bool ODD_SIXTEENTH = true, MINS = true;
    static constexpr float OFFSET = 0.0f;
    static __device__ __forceinline__ void stage(unsigned char* to, const Matrix& m, u32 tile, u32 panel, int lane) {
        const Place<Q5_K> at(m, tile, panel);
        copy_plane<128>(to + 640, at.high, lane);
        copy_plane<512>(to, at.codes, lane);
        copy_plane<64>(to + 512, at.scales, lane);
        copy_plane<64>(to + 576, at.super, lane);
    }
    Staged<Q4_K> low;
    u32 h;
    __device__ __forceinline__ void read(const unsigned char* from, int lane) {
        low.read(from, lane);
        h = *(const u32*)(from + 640 + lane * 4);
    }
    __device__ __forceinline__ void codes(int, int b, int row, u32 (&pairs)[4]) const {
        low.codes(0, b, row, pairs);
        // Bits i and 4 + i go to bit 4 of the halves, or to bit 8 where codes are 16 times as large.
        const u32 byte = h >> (8 * (2 * b + row)) & 0xffu;
        const u32 both = byte | byte << 12; // bit i at i, bit 4 + i at 16 + i
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] |= (both >> i & 0x00010001u) << (i % 2 == 0 ? 4 : 8);
    }
    __device__ __forceinline__ float scale(int, int b, int row, int) const { return low.scale(0, b, row, 0); }
    __device__ __forceinline__ float min(int b, int row, int) const { return low.min(b, row, 0); }
};

template <> struct Staged<Q6_K> {
    static constexpr int BYTES = 864, SUBS = 2, PLANES = 1;
    static constexpr bool ODD_SIXTEENTH = true, MINS = false;
    static constexpr float OFFSET = 32.0f;
    static __device__ __forceinline__ void stage(unsigned char* to, const Matrix& m, u32 tile, u32 panel, int lane) {
        const Place<Q6_K> at(m, tile, panel);
        copy_plane<512>(to, at.codes, lane);
        copy_plane<256>(to + 512, at.high, lane);
        copy_plane<64>(to + 768, at.scales, lane);
        copy_plane<32>(to + 832, at.super, lane);
    }
    uint4 w;
    uint2 h, s;
    u32 d;
    __device__ __forceinline__ void read(const unsigned char* from, int lane) {
        w = *(const uint4*)(from + lane * 16);
        h = *(const uint2*)(from + 512 + lane * 8);
        s = *(const uint2*)(from + 768 + lane / 4 * 8);
        d = *(const u32*)(from + 832 + lane / 4 * 4);
    }
    __device__ __forceinline__ void codes(int, int b, int row, u32 (&pairs)[4]) const {
        spread(b == 0 ? (row == 0 ? w.x : w.y) : (row == 0 ? w.z : w.w), pairs);
        const u32 high = (b == 0 ? h.x : h.y) >> (16 * row);
        const u32 both = (high & 0xffu) | (high & 0xff00u) << 8;
        // Bits 2 i of the halves go to bits 4, or to bits 8.
        pairs[0] |= both << 4 & 0x00300030u;
        pairs[1] |= both << 6 & 0x03000300u;
        pairs[2] |= both & 0x00300030u;
        pairs[3] |= both << 2 & 0x03000300u;
    }
    __device__ __forceinline__ float scale(int, int b, int row, int sub) const {
        const float of = row == 0 ? __low2float(halves(d)) : __high2float(halves(d));
        return of * signed_byte_of(row == 0 ? s.x : s.y, 2 * b + sub);
    }
    __device__ __forceinline__ float min(int, int, int) const { return 0.0f; }
};

template <> struct Staged<Q8_0> {
    static constexpr int BYTES = 1088, SUBS = 1, PLANES = 1;
    static constexpr bool ODD_SIXTEENTH = false, MINS = false;
    static constexpr float OFFSET = 128.0f;
    static __device__ __forceinline__ void stage(unsigned char* to, const Matrix& m, u32 tile, u32 panel, int lane) {
        const Place<Q8_0> at(m, tile, panel);
        copy_plane<1024>(to, at.codes, lane);
        copy_plane<64>(to + 1024, at.scales, lane);
    }
    uint4 w[2];
    uint2 s;
    __device__ __forceinline__ void read(const unsigned char* from, int lane) {
        w[0] = *(const uint4*)(from + lane * 16);
        w[1] = *(const uint4*)(from + 512 + lane * 16);
        s = *(const uint2*)(from + 1024 + lane / 4 * 8);
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
    __device__ __forceinline__ float min(int, int, int) const { return 0.0f; }
};

template <u32 FORMAT, bool HAS_MINS> struct StagedGeneral {
    static constexpr int BYTES = Record<FORMAT>::BYTES, SUBS = 2, PLANES = 1;
    static constexpr bool ODD_SIXTEENTH = false, MINS = HAS_MINS;
    static constexpr float OFFSET = 128.0f;
    static __device__ __forceinline__ void stage(unsigned char* to, const Matrix& m, u32 tile, u32 panel, int lane) {
        copy_plane<BYTES>(to, Place<FORMAT>(m, tile, panel).codes, lane);
    }
    GeneralPanel<FORMAT, HAS_MINS> p;
    __device__ __forceinline__ void read(const unsigned char* from, int lane) {
        const float4* scales = (const float4*)(from + 1024) + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            p.w[i] = *(const uint4*)(from + 512 * i + lane * 16);
            p.s[i] = scales[8 * i];
            if (HAS_MINS) p.m[i] = scales[16 + 8 * i];
        }
    }
    __device__ __forceinline__ void codes(int, int b, int row, u32 (&pairs)[4]) const {
        const uint4 v = p.w[b];
        const u32 first = (row == 0 ? v.x : v.z) ^ 0x80808080u, second = (row == 0 ? v.y : v.w) ^ 0x80808080u;
        pairs[0] = __byte_perm(first, 0, 0x4140), pairs[1] = __byte_perm(first, 0, 0x4342);
        pairs[2] = __byte_perm(second, 0, 0x4140), pairs[3] = __byte_perm(second, 0, 0x4342);
    }
    __device__ __forceinline__ float scale(int, int b, int row, int sub) const { return p.scale(0, b, row, sub); }
    __device__ __forceinline__ float min(int b, int row, int sub) const { return p.min(b, row, sub); }
};
template <> struct Staged<CODES> : StagedGeneral<CODES, false> {};
template <> struct Staged<CODES_AND_MINS> : StagedGeneral<CODES_AND_MINS, true> {};

template <int N_PLANES> struct StagedFloats {
    static constexpr int BYTES = 2048 * N_PLANES, SUBS = N_PLANES == 1 ? 0 : 1, PLANES = N_PLANES;
    static constexpr bool ODD_SIXTEENTH = false, MINS = false;
    static constexpr float OFFSET = 0.0f;
    static __device__ __forceinline__ void stage(unsigned char* to, const Matrix& m, u32 tile, u32 panel, int lane) {
        copy_plane<BYTES>(to, m.records + ((size_t)tile * m.n_panels + panel) * BYTES, lane);
    }
    uint4 w[4 * N_PLANES];
    __device__ __forceinline__ void read(const unsigned char* from, int lane) {
#pragma unroll
        for (int i = 0; i < 4 * N_PLANES; i++) w[i] = *(const uint4*)(from + 512 * i + lane * 16);
    }
    __device__ __forceinline__ void codes(int plane, int b, int row, u32 (&pairs)[4]) const {
        const uint4 v = w[4 * plane + 2 * b + row];
        pairs[0] = v.x, pairs[1] = v.y, pairs[2] = v.z, pairs[3] = v.w;
    }
    // Elements, and no codes of which one is 2^-24.
    __device__ __forceinline__ float scale(int plane, int, int, int) const { return (plane == 0 ? 1.0f : 1.0f / 2048.0f) / UNIT; }
    __device__ __forceinline__ float min(int, int, int) const { return 0.0f; }
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

// Thread i of the block has elements 4 (i + 256 j).. of the input.
constexpr int HELD = 4; // of these at once

template <typename S, int TOKENS>
__device__ __forceinline__ void matvec_part(const MatvecArgs& a, const Matrix& first_matrix, const Matrix& second_matrix, u32 block, u32 n_blocks_of_part) {
    SHARED_MEMORY(128, unsigned char, memory);
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const u32 n_blocks = (a.n_in + 63) / 64 * 2;
    // Panels that are asked for, and worked on, at once.
    constexpr int PAIR = S::BYTES > 1024 ? 1 : 2;
    constexpr int STAGES = RING / (PAIR * S::BYTES) > 2 ? RING / (PAIR * S::BYTES) : 2;
    unsigned char* ring = memory + warp * STAGES * PAIR * S::BYTES;
    unsigned char* input = memory + WARPS * STAGES * PAIR * S::BYTES; // each block's hi and lo, [tokens][n_blocks][128]
    float* sums = (float*)(input + (size_t)TOKENS * n_blocks * 128); // [tokens][n_blocks][2]
    float* partial = sums + TOKENS * n_blocks * 2;                   // [2][WARPS][16][TOKENS]
    float* factors = partial + 2 * WARPS * 16 * TOKENS;              // [TOKENS]
    __shared__ float2 scratch[WARPS];

    const bool gated = a.output == GATED;
    const u32 n_halves = gated ? 2 : 1;
    const u32 tiles_at_once = WARPS / a.warps_a_tile;
    const u32 of_group = warp / a.warps_a_tile, n_panels = first_matrix.n_panels;
    const u32 n_tiles = (first_matrix.n_rows + 15) / 16, n_groups = (n_tiles + tiles_at_once - 1) / tiles_at_once;
    // The warp's panels of each tile.
    const u32 each = (n_panels + a.warps_a_tile - 1) / a.warps_a_tile;
    const u32 first = min(warp % a.warps_a_tile * each, n_panels), end = min(first + each, n_panels);

    u32 ask_group = block, ask_half = 0, ask_panel = first, stage = 0;
    const Matrix* ask_matrix = &first_matrix;
    u32 ask_tile = ask_group * tiles_at_once + of_group;
    auto ask = [&] {
        // The next panels of all that are the warp's.
        if (ask_group < n_groups && ask_tile < n_tiles && first < end) {
#pragma unroll
            for (int i = 0; i < PAIR; i++)
                if (ask_panel + i < end)
                    S::stage(ring + (stage * PAIR + i) * S::BYTES, *ask_matrix, ask_tile, ask_panel + i, lane);
            ask_panel += PAIR;
            if (ask_panel >= end) {
                ask_panel = first;
                if (++ask_half == n_halves) ask_half = 0, ask_group += n_blocks_of_part, ask_tile = ask_group * tiles_at_once + of_group;
                ask_matrix = ask_half == 0 ? &first_matrix : &second_matrix;
            }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        commit_copies();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) ask();
    wait_for_input();
    let_next_start();

    const u32 n_in4 = (a.n_in + 3) / 4, n_padded4 = n_blocks * 8;
#pragma unroll 1
    for (int token = 0; token < TOKENS; token++) {
        const float4* x = (const float4*)(a.x + (size_t)(a.rows ? a.rows[token] : token) * a.n_in);
        const float4* norm = (const float4*)a.norm;
        const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f), one = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
        float squares = 0.0f, most = 0.0f;
        float4 held[HELD];
        const bool fits = n_padded4 <= HELD * 32 * WARPS;
        for (u32 base = 0; base < n_padded4; base += HELD * 32 * WARPS) {
            float4 weights[HELD];
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                const u32 i = base + tid + j * 32 * WARPS;
                held[j] = i < n_in4 ? x[i] : zero;
                weights[j] = norm && i < n_in4 ? norm[i] : one;
            }
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                float4& v = held[j];
                squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
                v.x *= weights[j].x, v.y *= weights[j].y, v.z *= weights[j].z, v.w *= weights[j].w;
                most = fmaxf(most, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
            }
        }
        squares = warp_sum(squares);
        most = warp_max(most);
        if (token > 0) __syncthreads();
        if (lane == 0) scratch[warp] = make_float2(squares, most);
        __syncthreads();
        squares = 0.0f, most = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) squares += scratch[i].x, most = fmaxf(most, scratch[i].y);
        const float rms = a.norm ? rsqrtf(squares / a.n_in + a.eps) : 1.0f;
        const float largest = most * rms;
        const int exponent = largest > 0.0f && largest < INFINITY ? ilogbf(largest) : 0;
        const float up = ldexpf(1.0f, 13 - exponent) * rms;
        if (tid == 0) factors[token] = ldexpf(S::SUBS == 0 ? 1.0f : UNIT, exponent - 13);
        for (u32 base = 0; base < n_padded4; base += HELD * 32 * WARPS) {
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                const u32 i = base + tid + j * 32 * WARPS;
                if (!fits) {
                    const float4 w = norm && i < n_in4 ? norm[i] : one;
                    held[j] = i < n_in4 ? x[i] : zero;
                    held[j].x *= w.x, held[j].y *= w.y, held[j].z *= w.z, held[j].w *= w.w;
                }
                const float v[4] = {held[j].x * up, held[j].y * up, held[j].z * up, held[j].w * up};
                half hi[4], lo[4];
                float sum = 0.0f;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float w = S::ODD_SIXTEENTH && e >= 2 ? v[e] * 0.0625f : v[e];
                    hi[e] = __float2half_rn(w);
                    lo[e] = __float2half_rn((w - __half2float(hi[e])) * 2048.0f);
                    sum += v[e];
                }
                // Four threads have the 16 columns of a product.
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (i >= n_padded4) continue;
                const u32 of = i / 8, k = i % 8 * 4;
                if (i % 4 == 0) sums[(token * n_blocks + of) * 2 + k / 16] = sum;
                unsigned char* to = input + ((size_t)token * n_blocks + of) * 128 + 2 * place_in_block(k);
                *(uint2*)to = make_uint2(bits(__halves2half2(hi[0], hi[1])), bits(__halves2half2(hi[2], hi[3])));
                *(uint2*)(to + 64) = make_uint2(bits(__halves2half2(lo[0], lo[1])), bits(__halves2half2(lo[2], lo[3])));
            }
        }
    }
    __syncthreads();

    const int g = lane / 4, t = lane % 4;
    u32 used = 0;
    for (u32 group = block; group < n_groups; group += n_blocks_of_part) {
        // What is added to, on its way.
        constexpr int EACH = TOKENS > 2 ? 2 : 1; // results of a thread
        float before[EACH];
        float* out[EACH];
        u32 of[EACH], rest[EACH], rows[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const u32 i = tid + j * 32 * WARPS;
            of[j] = i / (16 * TOKENS), rest[j] = i % (16 * TOKENS);
            const u32 of_part = (group * tiles_at_once + of[j]) * 16 + rest[j] / TOKENS;
            rows[j] = first_matrix.first_row + of_part;
            const bool writes = i < tiles_at_once * 16 * TOKENS && of_part < first_matrix.n_rows;
            out[j] = writes ? a.y + (size_t)(rest[j] % TOKENS) * a.n_out + rows[j] : nullptr;
            before[j] = writes && a.output == ADD ? *out[j] : 0.0f;
        }
        const bool has_tile = group * tiles_at_once + of_group < n_tiles;
        for (u32 half_of = 0; half_of < n_halves; half_of++) {
            float sums_of[PAIR][4] = {};
            if (has_tile) {
                for (u32 panel = first; panel < end; panel += PAIR) {
                    wait_for_copies<STAGES - 2>();
                    __syncwarp();
                    S p[PAIR];
#pragma unroll
                    for (int i = 0; i < PAIR; i++) p[i].read(ring + (used * PAIR + i) * S::BYTES, lane);
                    used = used + 1 == STAGES ? 0 : used + 1;
                    // Into the place of the panels before, which all lanes have read.
                    ask();
                    if (PAIR == 1 || panel + 1 < end) {
#pragma unroll
                        for (int i = 0; i < PAIR; i++)
                            panel_products<S, TOKENS>(p[i], panel + i, n_blocks, input, sums, lane, sums_of[i]);
                    } else {
                        panel_products<S, TOKENS>(p[0], panel, n_blocks, input, sums, lane, sums_of[0]);
                    }
                }
            }
            float acc[4];
#pragma unroll
            for (int i = 0; i < 4; i++) acc[i] = PAIR == 2 ? sums_of[0][i] + sums_of[PAIR - 1][i] : sums_of[0][i];
            if (t < TOKENS) {
                float* at = partial + ((half_of * WARPS + warp) * 16) * TOKENS;
                at[g * TOKENS + t] = acc[0] + acc[1] * (1.0f / 2048.0f);
                at[(g + 8) * TOKENS + t] = acc[2] + acc[3] * (1.0f / 2048.0f);
            }
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            if (!out[j]) continue;
            float y[2] = {0.0f, 0.0f};
#pragma unroll
            for (u32 half_of = 0; half_of < 2; half_of++) {
                if (half_of == n_halves) break;
                const float* at = partial + ((half_of * WARPS + of[j] * a.warps_a_tile) * 16) * TOKENS + rest[j];
                for (u32 w = 0; w < a.warps_a_tile; w++) y[half_of] += at[w * 16 * TOKENS];
                y[half_of] *= factors[rest[j] % TOKENS];
            }
            if (gated) {
                *out[j] = activate(a.activation, y[0]) * y[1];
            } else {
                const float v = a.bias ? y[0] + a.bias[rows[j]] : y[0];
                *out[j] = a.output == ADD ? before[j] + a.scale * v : v;
            }
        }
        __syncthreads();
    }
    wait_for_copies<0>();
}

// Other kernels take the templates.
#ifndef TEMPLATES_ALONE
template <int TOKENS> __device__ __forceinline__ void matvec(const MatvecArgs& a) {
    u32 part = 0, begin = 0;
    if (a.output != GATED)
        while (part + 1 < a.n_parts && blockIdx.x >= a.blocks[part]) begin = a.blocks[part++];
    const Matrix& m = a.parts[part];
    const Matrix& second = a.parts[a.output == GATED ? 1 : part];
    const u32 n = (a.output == GATED ? gridDim.x : a.blocks[part]) - begin, block = blockIdx.x - begin;
    switch (m.format) {
        case F16: matvec_part<Staged<F16>, TOKENS>(a, m, second, block, n); break;
        case Q8_0: matvec_part<Staged<Q8_0>, TOKENS>(a, m, second, block, n); break;
        case Q4_0: matvec_part<Staged<Q4_0>, TOKENS>(a, m, second, block, n); break;
        case Q4_K: matvec_part<Staged<Q4_K>, TOKENS>(a, m, second, block, n); break;
        case Q5_K: matvec_part<Staged<Q5_K>, TOKENS>(a, m, second, block, n); break;
        case Q6_K: matvec_part<Staged<Q6_K>, TOKENS>(a, m, second, block, n); break;
        case F32: matvec_part<Staged<F32>, TOKENS>(a, m, second, block, n); break;
        case CODES: matvec_part<Staged<CODES>, TOKENS>(a, m, second, block, n); break;
        case CODES_AND_MINS: matvec_part<Staged<CODES_AND_MINS>, TOKENS>(a, m, second, block, n); break;
        default: __trap();
    }
}

#define MATVEC(N) \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) matvec_##N(const __grid_constant__ MatvecArgs a) { matvec<N>(a); }
MATVEC(1)
MATVEC(2)
MATVEC(3)
MATVEC(4)
#endif
