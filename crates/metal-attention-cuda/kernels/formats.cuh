// The layout of weight matrices in device memory, which kernels read without conversion in the order of tensor-core operands. A matrix is divided
// into tiles of 16 rows and panels of 64 columns (two quantisation blocks, in short quant blocks, of 32). In a panel, lane l of a warp has, of rows
// g = l / 4 and g + 8 of the tile and of each quant block, the 8 columns that `place_in_quant_block` gives t = l % 4. A warp reads the codes of a
// panel with one load; scales follow. repack.cu writes this layout from a file's quantisation blocks.
#pragma once
#include "common.cuh"

// Mirrored by `Format` of src/matrix.rs. CODES, CODES_AND_MINS: 8-bit codes with F32 scales, for tensor types without a layout of their own.
enum Format : u32 { F16 = 0, Q8_0 = 1, Q4_0 = 2, Q4_K = 3, Q5_K = 4, Q6_K = 5, F32 = 6, CODES = 7, CODES_AND_MINS = 8 };

struct Matrix {
    const unsigned char* records; // [tile][panel / PANELS] records
    u32 format;
    u32 n_rows;
    u32 n_panels;
    u32 first_row; // index of its first row in the result of a product of several matrices
};
ASSERT_LAYOUT(Matrix);

// A record: PANELS neighbouring panels of a tile. First the codes of all panels, then their high bits, then their scales, each [panel][lane or g],
// then the scales of scales of the whole record, [g]. Sizes are bytes of one panel, SUPER of the record.
template <int N, int CODES_, int HIGH_, int SCALES_, int SUPER_> struct RecordOf {
    static constexpr int PANELS = N, CODES = CODES_, HIGH = HIGH_, SCALES = SCALES_, SUPER = SUPER_;
    static constexpr int BYTES = N * (CODES_ + HIGH_ + SCALES_) + SUPER_;
};
template <u32 FORMAT> struct Record;
template <> struct Record<F16> : RecordOf<1, 2048, 0, 0, 0> {};
template <> struct Record<F32> : RecordOf<1, 4096, 0, 0, 0> {};
template <> struct Record<Q8_0> : RecordOf<1, 1024, 0, 64, 0> {};
template <> struct Record<Q4_0> : RecordOf<1, 512, 0, 64, 0> {};
template <> struct Record<Q4_K> : RecordOf<4, 512, 0, 64, 64> {};
template <> struct Record<Q5_K> : RecordOf<4, 512, 128, 64, 64> {};
template <> struct Record<Q6_K> : RecordOf<4, 512, 256, 64, 32> {};
template <> struct Record<CODES> : RecordOf<1, 1024, 0, 256, 0> {};
template <> struct Record<CODES_AND_MINS> : RecordOf<1, 1024, 0, 512, 0> {};

// Addresses of the parts of panel `i` of a record.
template <u32 FORMAT> struct Place {
    typedef Record<FORMAT> R;
    const unsigned char *codes, *high, *scales, *super;
    __device__ __forceinline__ Place() {}
    __device__ __forceinline__ Place(const unsigned char* record, u32 i) {
        codes = record + i * R::CODES;
        high = record + R::PANELS * R::CODES + i * R::HIGH;
        scales = record + R::PANELS * (R::CODES + R::HIGH) + i * R::SCALES;
        super = record + R::PANELS * (R::CODES + R::HIGH + R::SCALES);
    }
    __device__ __forceinline__ Place(const Matrix& m, u32 tile, u32 panel)
        : Place(m.records + ((size_t)tile * m.n_panels + panel) / R::PANELS * R::BYTES, panel % R::PANELS) {}
};

// Codes `i` of both halves of a word as F16 values code + `offset_of(i)`: the code is at bit 0 (even i) or 4 (odd i) of the mantissa, which saves
// shifts.
__device__ __forceinline__ u32 nibbles(u32 word, int i) {
    const u32 v = i < 2 ? word : word >> 8;
    return i % 2 == 0 ? and_or(v, 0x000f000fu, 0x64006400u) : and_or(v, 0x00f000f0u, 0x54005400u);
}
__device__ __forceinline__ constexpr float offset_of(int i) { return i % 2 == 0 ? 1024.0f : 64.0f; }
// v << n, or v >> -n.
__device__ __forceinline__ u32 shifted(u32 v, int n) { return n >= 0 ? v << n : v >> -n; }
__device__ __forceinline__ u32 minus(u32 v, float offset) { return bits(__hsub2(halves(v), __float2half2_rn(offset))); }
__device__ __forceinline__ float byte_of(u32 word, int i) {
    // 2^23 + byte is exact in F32.
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i)) - 8388608.0f;
}
__device__ __forceinline__ float signed_byte_of(u32 word, int i) {
    return __uint_as_float(__byte_perm(word ^ 0x80808080u, 0x4b000000u, 0x7440 + i)) - 8388736.0f;
}

// Element `i` of a pair, twice.
__device__ __forceinline__ half2 both(half2 pair, int i) { return i == 0 ? __low2half2(pair) : __high2half2(pair); }
// (byte - offset) * factor of bytes `first` (0 or 2) and `first` + 1 of a word.
__device__ __forceinline__ half2 scaled_bytes(u32 word, int first, float offset, half2 factor) {
    const half2 above = halves(__byte_perm(word, 0x64646464u, first == 0 ? 0x4140 : 0x4342)); // 1024 + byte
    return __hmul2(__hsub2(above, __float2half2_rn(1024.0f + offset)), factor);
}

// Where a panel is read from: global memory, once, or shared memory.
struct FromGlobal {
    template <typename T> static __device__ __forceinline__ T get(const T* p) { return load_stream(p); }
};
struct FromShared {
    template <typename T> static __device__ __forceinline__ T get(const T* p) { return *p; }
};

// One panel in a lane's registers, as F16 elements. SCALES_PER_QUANT_BLOCK: scales of each quant block and row. MINS: whether there are as many
// mins. `codes(plane, b, a)`: codes of quant block b as mma operands, a[s][0..4] for product s. `scale(plane, b, row, sub)`, `min(b, row, sub)`: in
// F32. An element is the sum over PLANES of scale * code, minus min; with SCALES_PER_QUANT_BLOCK 0 codes are the elements. FLOAT_SCALES: scales may
// be beyond F16's range. The others with one plane have `half_scale(b, row, sub)` and, with MINS, `half_min(b, row)`: the same rounded to F16, twice,
// with fewer instructions.
template <u32 FORMAT> struct Panel;
template <u32 FORMAT> struct PanelOf {
    // Reads it from global memory.
    __device__ __forceinline__ void load(const Matrix& m, u32 tile, u32 panel, int lane) {
        static_cast<Panel<FORMAT>*>(this)->template read<FromGlobal>(Place<FORMAT>(m, tile, panel), lane);
    }
};

template <> struct Panel<F16> : PanelOf<F16> {
    static constexpr int SCALES_PER_QUANT_BLOCK = 0, PLANES = 1;
    static constexpr bool MINS = false, FLOAT_SCALES = false;
    uint4 w[4];
    template <typename From> __device__ __forceinline__ void read(const Place<F16>& at, int lane) {
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = From::get((const uint4*)at.codes + lane + 32 * i);
    }
    __device__ __forceinline__ void codes(int, int b, u32 (&a)[2][4]) const {
        const uint4 x = w[2 * b], y = w[2 * b + 1];
        a[0][0] = x.x, a[0][2] = x.y, a[1][0] = x.z, a[1][2] = x.w;
        a[0][1] = y.x, a[0][3] = y.y, a[1][1] = y.z, a[1][3] = y.w;
    }
    __device__ __forceinline__ float scale(int, int, int, int) const { return 1.0f; }
    __device__ __forceinline__ float min(int, int, int = 0) const { return 0.0f; }
};

// An F32 element as the sum of an F16 value and 2^-11 times another one; that covers BF16 and most of F32.
template <> struct Panel<F32> : PanelOf<F32> {
    static constexpr int SCALES_PER_QUANT_BLOCK = 1, PLANES = 2;
    static constexpr bool MINS = false, FLOAT_SCALES = false;
    uint4 w[8];
    template <typename From> __device__ __forceinline__ void read(const Place<F32>& at, int lane) {
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = From::get((const uint4*)at.codes + lane + 32 * i);
    }
    __device__ __forceinline__ void codes(int plane, int b, u32 (&a)[2][4]) const {
        const uint4 x = w[4 * plane + 2 * b], y = w[4 * plane + 2 * b + 1];
        a[0][0] = x.x, a[0][2] = x.y, a[1][0] = x.z, a[1][2] = x.w;
        a[0][1] = y.x, a[0][3] = y.y, a[1][1] = y.z, a[1][3] = y.w;
    }
    __device__ __forceinline__ float scale(int plane, int, int, int) const { return plane == 0 ? 1.0f : 1.0f / 2048.0f; }
    __device__ __forceinline__ float min(int, int, int = 0) const { return 0.0f; }
};

// 8-bit codes with sign as pairs of F16.
__device__ __forceinline__ void signed_codes(const uint4 x, u32 (&a)[2][4]) {
    const u32 words[2][2] = {{x.x, x.y}, {x.z, x.w}};
#pragma unroll
    for (int row = 0; row < 2; row++)
#pragma unroll
        for (int p = 0; p < 2; p++) {
            const u32 v = words[row][p] ^ 0x80808080u;
            a[p][row] = minus(__byte_perm(v, 0x64646464u, 0x4140), 1152.0f);
            a[p][2 + row] = minus(__byte_perm(v, 0x64646464u, 0x4342), 1152.0f);
        }
}

template <> struct Panel<Q8_0> : PanelOf<Q8_0> {
    static constexpr int SCALES_PER_QUANT_BLOCK = 1, PLANES = 1;
    static constexpr bool MINS = false, FLOAT_SCALES = false;
    uint4 w[2];
    uint2 s;
    template <typename From> __device__ __forceinline__ void read(const Place<Q8_0>& at, int lane) {
#pragma unroll
        for (int i = 0; i < 2; i++) w[i] = From::get((const uint4*)at.codes + 32 * i + lane);
        s = From::get((const uint2*)at.scales + lane / 4);
    }
    __device__ __forceinline__ void codes(int, int b, u32 (&a)[2][4]) const {
        signed_codes(w[b], a);
    }
    __device__ __forceinline__ float scale(int, int b, int row, int) const {
        const half2 v = halves(row == 0 ? s.x : s.y);
        return b == 0 ? __low2float(v) : __high2float(v);
    }
    __device__ __forceinline__ half2 half_scale(int b, int row, int) const { return __float2half2_rn(scale(0, b, row, 0)); }
    __device__ __forceinline__ float min(int, int, int = 0) const { return 0.0f; }
};

// 4-bit codes.
struct Nibbles {
    uint4 w;
    __device__ __forceinline__ u32 word(int b, int row) const {
        return b == 0 ? (row == 0 ? w.x : w.y) : (row == 0 ? w.z : w.w);
    }
    template <typename From> __device__ __forceinline__ void load_codes(const unsigned char* codes, int lane) { w = From::get((const uint4*)codes + lane); }
    __device__ __forceinline__ void codes_minus(int b, u32 (&a)[2][4], float offset) const {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const u32 v = word(b, row);
#pragma unroll
            for (int i = 0; i < 4; i++) a[i / 2][2 * (i % 2) + row] = minus(nibbles(v, i), offset_of(i) + offset);
        }
    }
};

// One F16 scale for each quant block: {row g: quant block 0, 1; row g + 8: quant block 0, 1}.
struct HalfScales {
    uint2 s;
    template <typename From> __device__ __forceinline__ void load_scales(const unsigned char* scales, int lane) { s = From::get((const uint2*)scales + lane / 4); }
    __device__ __forceinline__ float scale(int, int b, int row, int) const {
        const half2 v = halves(row == 0 ? s.x : s.y);
        return b == 0 ? __low2float(v) : __high2float(v);
    }
    __device__ __forceinline__ half2 half_scale(int b, int row, int) const { return both(halves(row == 0 ? s.x : s.y), b); }
    // The scales of quant block b, of rows g and g + 8.
    __device__ __forceinline__ float2 scales_of(u32 b) const { return __half22float2(halves(__byte_perm(s.x, s.y, b == 0 ? 0x5410 : 0x7632))); }
};

template <> struct Panel<Q4_0> : PanelOf<Q4_0>, Nibbles, HalfScales {
    static constexpr int SCALES_PER_QUANT_BLOCK = 1, PLANES = 1;
    static constexpr bool MINS = false, FLOAT_SCALES = false;
    template <typename From> __device__ __forceinline__ void read(const Place<Q4_0>& at, int lane) {
        load_codes<From>(at.codes, lane);
        load_scales<From>(at.scales, lane);
    }
    __device__ __forceinline__ void codes(int, int b, u32 (&a)[2][4]) const { codes_minus(b, a, 8.0f); }
    __device__ __forceinline__ float min(int, int, int = 0) const { return 0.0f; }
};

// 6-bit scales and mins (offsets that are subtracted) for each quant block, and F16 scales of these for 256 columns (K-quants). Scales: {row g:
// scale 0, 1, min 0, 1; row g + 8: the same}. Super: {d, dmin of row g; of row g + 8}.
struct KScales {
    uint2 s, d;
    template <typename From, typename P> __device__ __forceinline__ void load_scales(const P& at, int lane) {
        s = From::get((const uint2*)at.scales + lane / 4);
        d = From::get((const uint2*)at.super + lane / 4);
    }
    __device__ __forceinline__ float scale(int, int b, int row, int) const {
        return __low2float(halves(row == 0 ? d.x : d.y)) * byte_of(row == 0 ? s.x : s.y, b);
    }
    __device__ __forceinline__ float min(int b, int row, int = 0) const {
        return __high2float(halves(row == 0 ? d.x : d.y)) * byte_of(row == 0 ? s.x : s.y, 2 + b);
    }
    __device__ __forceinline__ half2 half_scale(int b, int row, int) const {
        return both(scaled_bytes(row == 0 ? s.x : s.y, 0, 0.0f, both(halves(row == 0 ? d.x : d.y), 0)), b);
    }
    __device__ __forceinline__ half2 half_min(int b, int row) const {
        return both(scaled_bytes(row == 0 ? s.x : s.y, 2, 0.0f, both(halves(row == 0 ? d.x : d.y), 1)), b);
    }
    // The scales, or mins, of quant block b, of rows g and g + 8.
    __device__ __forceinline__ float2 scales_of(u32 b) const {
        return make_float2(__low2float(halves(d.x)) * byte_of(s.x >> 8 * b, 0), __low2float(halves(d.y)) * byte_of(s.y >> 8 * b, 0));
    }
    __device__ __forceinline__ float2 mins_of(u32 b) const {
        return make_float2(__high2float(halves(d.x)) * byte_of(s.x >> 8 * b, 2), __high2float(halves(d.y)) * byte_of(s.y >> 8 * b, 2));
    }
};

template <> struct Panel<Q4_K> : PanelOf<Q4_K>, Nibbles, KScales {
    static constexpr int SCALES_PER_QUANT_BLOCK = 1, PLANES = 1;
    static constexpr bool MINS = true, FLOAT_SCALES = false;
    template <typename From> __device__ __forceinline__ void read(const Place<Q4_K>& at, int lane) {
        load_codes<From>(at.codes, lane);
        load_scales<From>(at, lane);
    }
    __device__ __forceinline__ void codes(int, int b, u32 (&a)[2][4]) const { codes_minus(b, a, 0.0f); }
};

// The fifth bits of codes 0, 2, 4, 6 (`odd` 0) or 1, 3, 5, 7 of a word, at bit 4 of bytes 0 to 3. In `high` they are bit 4 b + 2 row + odd of each
// byte.
__device__ __forceinline__ u32 fifth_bits(u32 high, int b, int row, int odd) {
    return shifted(high, 4 - (4 * b + 2 * row + odd));
}
template <> struct Panel<Q5_K> : PanelOf<Q5_K>, Nibbles, KScales {
    static constexpr int SCALES_PER_QUANT_BLOCK = 1, PLANES = 1;
    static constexpr bool MINS = true, FLOAT_SCALES = false;
    u32 h;
    template <typename From> __device__ __forceinline__ void read(const Place<Q5_K>& at, int lane) {
        load_codes<From>(at.codes, lane);
        load_scales<From>(at, lane);
        h = From::get((const u32*)at.high + lane);
    }
    __device__ __forceinline__ void codes(int, int b, u32 (&a)[2][4]) const {
#pragma unroll
        for (int row = 0; row < 2; row++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                // The fifth bits of both codes, above the other four.
                const u32 fifth = shifted(h, (i % 2 == 0 ? 4 : 8) - (4 * b + 2 * row + i % 2) - 8 * (i / 2));
                a[i / 2][2 * (i % 2) + row] = minus(and_or(fifth, i % 2 == 0 ? 0x00100010u : 0x01000100u, nibbles(word(b, row), i)), offset_of(i));
            }
    }
};

// Signed 8-bit scales for 16 columns each: {row g: 4; row g + 8: 4}, and super {d of row g, of row g + 8}.
struct SixthScales {
    uint2 s;
    u32 d;
    template <typename From, typename P> __device__ __forceinline__ void load_scales(const P& at, int lane) {
        s = From::get((const uint2*)at.scales + lane / 4);
        d = From::get((const u32*)at.super + lane / 4);
    }
    __device__ __forceinline__ float scale(int, int b, int row, int sub) const {
        const float of = row == 0 ? __low2float(halves(d)) : __high2float(halves(d));
        return of * signed_byte_of(row == 0 ? s.x : s.y, 2 * b + sub);
    }
    __device__ __forceinline__ half2 half_scale(int b, int row, int sub) const {
        return both(scaled_bytes((row == 0 ? s.x : s.y) ^ 0x80808080u, 2 * b, 128.0f, both(halves(d), row)), sub);
    }
};
// The two high bits of codes, a word for each quant block: of codes 0, 2, 4, 6 of row g in bits 0 and 1 of its bytes, of codes 1, 3, 5, 7 in bits 2
// and 3; of row g + 8 in bits 4 to 7.
template <> struct Panel<Q6_K> : PanelOf<Q6_K>, Nibbles, SixthScales {
    static constexpr int SCALES_PER_QUANT_BLOCK = 2, PLANES = 1;
    static constexpr bool MINS = false, FLOAT_SCALES = false;
    uint2 h;
    template <typename From> __device__ __forceinline__ void read(const Place<Q6_K>& at, int lane) {
        load_codes<From>(at.codes, lane);
        h = From::get((const uint2*)at.high + lane);
        load_scales<From>(at, lane);
    }
    __device__ __forceinline__ void codes(int, int b, u32 (&a)[2][4]) const {
        const u32 high = b == 0 ? h.x : h.y;
#pragma unroll
        for (int row = 0; row < 2; row++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = 8 * (i / 2) + 4 * row + 2 * (i % 2);
                // The high bits of both codes, above the other four.
                const u32 two = shifted(high, (i % 2 == 0 ? 4 : 8) - at);
                a[i / 2][2 * (i % 2) + row] =
                    minus(and_or(two, i % 2 == 0 ? 0x00300030u : 0x03000300u, nibbles(word(b, row), i)), offset_of(i) + 32.0f);
            }
    }
    __device__ __forceinline__ float min(int, int, int = 0) const { return 0.0f; }
};

// CODES and CODES_AND_MINS: 8-bit codes; for each 16 columns an F32 scale and, with HAS_MINS, an F32 offset: [row of 16][4].
template <u32 FORMAT, bool HAS_MINS> struct GeneralPanel : PanelOf<FORMAT> {
    static constexpr int SCALES_PER_QUANT_BLOCK = 2, PLANES = 1;
    static constexpr bool MINS = HAS_MINS, FLOAT_SCALES = true;
    uint4 w[2];
    float4 s[2], m[HAS_MINS ? 2 : 1];
    template <typename From> __device__ __forceinline__ void read(const Place<FORMAT>& at, int lane) {
        const float4* scales = (const float4*)at.scales + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            w[i] = From::get((const uint4*)at.codes + 32 * i + lane);
            s[i] = scales[8 * i];
            if (HAS_MINS) m[i] = scales[16 + 8 * i];
        }
    }
    __device__ __forceinline__ void codes(int, int b, u32 (&a)[2][4]) const { signed_codes(w[b], a); }
    static __device__ __forceinline__ float one_of(const float4& v, int b, int sub) {
        return b == 0 ? (sub == 0 ? v.x : v.y) : (sub == 0 ? v.z : v.w);
    }
    __device__ __forceinline__ float scale(int, int b, int row, int sub) const { return one_of(row == 0 ? s[0] : s[1], b, sub); }
    __device__ __forceinline__ float min(int b, int row, int sub = 0) const {
        return HAS_MINS ? one_of(row == 0 ? m[0] : m[HAS_MINS ? 1 : 0], b, sub) : 0.0f;
    }
};
template <> struct Panel<CODES> : GeneralPanel<CODES, false> {};
template <> struct Panel<CODES_AND_MINS> : GeneralPanel<CODES_AND_MINS, true> {};

// Runs `body` with the compile-time constant `FORMAT` (WITH_FORMAT), or with the type P of its panels (WITH_PANEL).
#define WITH_FORMAT(format, body)                                            \
    switch (format) {                                                        \
        case F16: { constexpr u32 FORMAT = F16; body; break; }               \
        case Q8_0: { constexpr u32 FORMAT = Q8_0; body; break; }             \
        case Q4_0: { constexpr u32 FORMAT = Q4_0; body; break; }             \
        case Q4_K: { constexpr u32 FORMAT = Q4_K; body; break; }             \
        case Q5_K: { constexpr u32 FORMAT = Q5_K; body; break; }             \
        case Q6_K: { constexpr u32 FORMAT = Q6_K; body; break; }             \
        case F32: { constexpr u32 FORMAT = F32; body; break; }               \
        case CODES: { constexpr u32 FORMAT = CODES; body; break; }           \
        case CODES_AND_MINS: { constexpr u32 FORMAT = CODES_AND_MINS; body; break; } \
        default: __trap();                                                   \
    }
// WITH_FORMAT for formats of codes; others trap.
#define WITH_CODES(format, body)                                             \
    switch (format) {                                                        \
        case Q8_0: { constexpr u32 FORMAT = Q8_0; body; break; }             \
        case Q4_0: { constexpr u32 FORMAT = Q4_0; body; break; }             \
        case Q4_K: { constexpr u32 FORMAT = Q4_K; body; break; }             \
        case Q5_K: { constexpr u32 FORMAT = Q5_K; body; break; }             \
        case Q6_K: { constexpr u32 FORMAT = Q6_K; body; break; }             \
        case CODES: { constexpr u32 FORMAT = CODES; body; break; }           \
        case CODES_AND_MINS: { constexpr u32 FORMAT = CODES_AND_MINS; body; break; } \
        default: __trap();                                                   \
    }
#define WITH_PANEL(format, body) WITH_FORMAT(format, { typedef Panel<FORMAT> P; body; })
