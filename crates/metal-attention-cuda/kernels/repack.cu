// Repacks rows of a GGUF file to tiles of records (formats.cuh), once, at load. Blocks<FORMAT> reads codes, scales, minimums
// and super-block scales at column k of a row, as the GGUF specification lays them out.
#include "formats.cuh"

struct RepackArgs {
    const unsigned char* raw;              // [n_rows][row_bytes]
    unsigned char* records;                // the first record of the rows' tiles
    u32 n_rows, n_in, n_panels, row_bytes; // rows, columns, panels of a row, bytes of a row in `raw`
};
ASSERT_LAYOUT(RepackArgs);

template <u32 FORMAT> struct Blocks;

__device__ __forceinline__ unsigned short half_bits(const unsigned char* p) { return p[0] | p[1] << 8; }

template <> struct Blocks<Q8_0> {
    static __device__ u32 code(const unsigned char* row, int k) { return row[k / 32 * 34 + 2 + k % 32]; }
    static __device__ u32 scale(const unsigned char* row, int k) { return half_bits(row + k / 32 * 34); }
};
template <> struct Blocks<Q4_0> {
    static __device__ u32 code(const unsigned char* row, int k) {
        const unsigned char q = row[k / 32 * 18 + 2 + k % 16];
        return k % 32 < 16 ? q & 15 : q >> 4;
    }
    static __device__ u32 scale(const unsigned char* row, int k) { return half_bits(row + k / 32 * 18); }
};
template <int BYTES> struct KBlocks {
    static __device__ const unsigned char* block(const unsigned char* row, int k) { return row + (size_t)(k / 256) * BYTES; }
    static __device__ u32 scale(const unsigned char* row, int k) {
        const unsigned char* q = block(row, k) + 4;
        const int j = k % 256 / 32;
        return j < 4 ? q[j] & 63 : (q[j + 4] & 15) | (q[j - 4] >> 6) << 4;
    }
    static __device__ u32 min(const unsigned char* row, int k) {
        const unsigned char* q = block(row, k) + 4;
        const int j = k % 256 / 32;
        return j < 4 ? q[j + 4] & 63 : q[j + 4] >> 4 | (q[j] >> 6) << 4;
    }
    static __device__ u32 super(const unsigned char* row, int k) {
        const unsigned char* b = block(row, k);
        return half_bits(b) | (u32)half_bits(b + 2) << 16;
    }
};
template <> struct Blocks<Q4_K> : KBlocks<144> {
    static __device__ u32 code(const unsigned char* row, int k) {
        const unsigned char q = block(row, k)[16 + k % 256 / 64 * 32 + k % 32];
        return k % 64 < 32 ? q & 15 : q >> 4;
    }
};
template <> struct Blocks<Q5_K> : KBlocks<176> {
    static __device__ u32 code(const unsigned char* row, int k) {
        const unsigned char* b = block(row, k);
        const unsigned char q = b[48 + k % 256 / 64 * 32 + k % 32];
        const u32 high = b[16 + k % 32] >> (k % 256 / 32) & 1;
        return (k % 64 < 32 ? q & 15 : q >> 4) | high << 4;
    }
};
template <> struct Blocks<Q6_K> {
    static __device__ const unsigned char* block(const unsigned char* row, int k) { return row + (size_t)(k / 256) * 210; }
    static __device__ u32 code(const unsigned char* row, int k) {
        const unsigned char* b = block(row, k);
        const int n = k % 256 / 128, quarter = k % 128 / 32, r = k % 32;
        const unsigned char q = b[64 * n + r + quarter % 2 * 32];
        return (quarter < 2 ? q & 15 : q >> 4) | (b[128 + 32 * n + r] >> (2 * quarter) & 3) << 4;
    }
    static __device__ u32 scale(const unsigned char* row, int k) { return block(row, k)[192 + k % 256 / 16]; }
    static __device__ u32 super(const unsigned char* row, int k) { return half_bits(block(row, k) + 208); }
};

// The column of place p of lane t in a block of 32 columns.
__device__ __forceinline__ int column(int panel, int b, int t, int p) { return panel * 64 + b * 32 + p / 4 * 16 + 4 * t + p % 4; }

// A warp for each panel of a tile.
template <u32 FORMAT> __device__ __forceinline__ void repack(const RepackArgs& a) {
    const u32 warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 tile = warp / a.n_panels, panel = warp % a.n_panels;
    if (tile * 16 >= a.n_rows) return;
    const Matrix m = {a.records, FORMAT, a.n_rows, a.n_panels, 0};
    const Place<FORMAT> at(m, tile, panel);
    const unsigned char* rows[2];
    bool in_range[2];
    for (int r = 0; r < 2; r++) {
        const u32 row = tile * 16 + g + 8 * r;
        in_range[r] = row < a.n_rows;
        rows[r] = a.raw + (size_t)(in_range[r] ? row : 0) * a.row_bytes;
    }
    typedef Blocks<FORMAT> B;
    // Elements outside of the matrix have code 0 and scale 0.
    auto inside = [&](int r, int k) { return in_range[r] && k < (int)a.n_in; };
    auto code = [&](int r, int k) -> u32 { return inside(r, k) ? B::code(rows[r], k) : 0; };

    if (FORMAT == Q8_0) {
        for (int b = 0; b < 2; b++) {
            u32 words[4] = {};
            for (int r = 0; r < 2; r++)
                for (int p = 0; p < 8; p++) words[2 * r + p / 4] |= code(r, column(panel, b, t, p)) << (8 * (p % 4));
            ((uint4*)at.codes)[32 * b + lane] = make_uint4(words[0], words[1], words[2], words[3]);
        }
    } else {
        u32 words[4] = {}, fifth = 0, two[2] = {};
        for (int b = 0; b < 2; b++)
            for (int r = 0; r < 2; r++)
                for (int p = 0; p < 8; p++) {
                    const u32 c = code(r, column(panel, b, t, p));
                    words[2 * b + r] |= (c & 15) << (4 * (p / 2 + 4 * (p % 2)));
                    const int byte = p / 4 + 2 * (p % 2), odd = p / 2 % 2;
                    fifth |= (c >> 4 & 1) << (8 * byte + 4 * b + 2 * r + odd);
                    two[b] |= (c >> 4 & 3) << (8 * byte + 4 * r + 2 * odd);
                }
        ((uint4*)at.codes)[lane] = make_uint4(words[0], words[1], words[2], words[3]);
        if (FORMAT == Q5_K) ((u32*)at.high)[lane] = fifth;
        if (FORMAT == Q6_K) ((uint2*)at.high)[lane] = make_uint2(two[0], two[1]);
    }
    if (t != 0) return;
    u32 scales[2] = {}, super[2] = {};
    for (int r = 0; r < 2; r++)
        for (int b = 0; b < 2; b++) {
            const int k = panel * 64 + b * 32;
            if (!inside(r, k)) continue;
            if constexpr (FORMAT == Q8_0 || FORMAT == Q4_0) scales[r] |= B::scale(rows[r], k) << (16 * b);
            if constexpr (FORMAT == Q4_K || FORMAT == Q5_K) {
                scales[r] |= B::scale(rows[r], k) << (8 * b) | B::min(rows[r], k) << (16 + 8 * b);
                super[r] = B::super(rows[r], k);
            }
            if constexpr (FORMAT == Q6_K) {
                scales[r] |= B::scale(rows[r], k) << (16 * b) | B::scale(rows[r], k + 16) << (16 * b + 8);
                super[r] = B::super(rows[r], k);
            }
        }
    ((uint2*)at.scales)[g] = make_uint2(scales[0], scales[1]);
    if (panel % 4 == 0) {
        if constexpr (FORMAT == Q4_K || FORMAT == Q5_K) ((uint2*)at.super)[g] = make_uint2(super[0], super[1]);
        if constexpr (FORMAT == Q6_K) ((u32*)at.super)[g] = super[0] | super[1] << 16;
    }
}

// Element i as F32, for F16, F32 and BF16 (`unsigned short`).
__device__ __forceinline__ float element(const half* p, size_t i) { return __half2float(p[i]); }
__device__ __forceinline__ float element(const float* p, size_t i) { return p[i]; }
__device__ __forceinline__ float element(const unsigned short* p, size_t i) { return __uint_as_float((u32)p[i] << 16); }

// F16 as it is (one plane), F32 and BF16 as two planes of F16: high part, and remainder times 2048.
template <typename T, int PLANES> __device__ __forceinline__ void repack_floats(const RepackArgs& a) {
    const u32 warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 tile = warp / a.n_panels, panel = warp % a.n_panels;
    if (tile * 16 >= a.n_rows) return;
    for (int b = 0; b < 2; b++)
        for (int r = 0; r < 2; r++) {
            const u32 row = tile * 16 + g + 8 * r;
            u32 words[2][4] = {};
            for (int p = 0; p < 8; p++) {
                const int k = column(panel, b, t, p);
                const float v = row < a.n_rows && k < (int)a.n_in ? element((const T*)(a.raw + (size_t)row * a.row_bytes), k) : 0.0f;
                const half hi = __float2half_rn(v);
                words[0][p / 2] |= (u32)__half_as_ushort(hi) << (16 * (p % 2));
                words[1][p / 2] |= (u32)__half_as_ushort(__float2half_rn((v - __half2float(hi)) * 2048.0f)) << (16 * (p % 2));
            }
            for (int plane = 0; plane < PLANES; plane++)
                ((uint4*)a.records)[(size_t)warp * 128 * PLANES + 32 * (4 * plane + 2 * b + r) + lane] =
                    make_uint4(words[plane][0], words[plane][1], words[plane][2], words[plane][3]);
        }
}

#define REPACK(NAME, FORMAT) \
    extern "C" __global__ void __launch_bounds__(256) repack_##NAME(const __grid_constant__ RepackArgs a) { repack<FORMAT>(a); }
REPACK(q8_0, Q8_0)
REPACK(q4_0, Q4_0)
REPACK(q4_k, Q4_K)
REPACK(q5_k, Q5_K)
REPACK(q6_k, Q6_K)
extern "C" __global__ void __launch_bounds__(256) repack_f16(const __grid_constant__ RepackArgs a) { repack_floats<half, 1>(a); }
extern "C" __global__ void __launch_bounds__(256) repack_f32(const __grid_constant__ RepackArgs a) { repack_floats<float, 2>(a); }
extern "C" __global__ void __launch_bounds__(256) repack_bf16(const __grid_constant__ RepackArgs a) { repack_floats<unsigned short, 2>(a); }
