// The matrix instructions of a warp (`mma`, `wgmma`, `ldmatrix`). The last lane to arrive computes them for all lanes, from
// the fragments in `given`.
#include "software_ptx.hpp"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace software {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

// Converts F16 bits to floats.
template <int N> static void to_floats(const unsigned short (&halves)[N], float (&floats)[N]) {
#ifdef __F16C__
    for (int i = 0; i < N; i += 8) _mm256_storeu_ps(floats + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(halves + i))));
#else
    for (int i = 0; i < N; i++) floats[i] = __half2float({halves[i]});
#endif
}

// mma of F16: c += a b, with a 16 x 16, b 16 x 8 and c in F32.
void multiply(void* const (&given)[32], u32 arrived) {
    if (arrived != ~0u) fail("a product of matrices wants all lanes of the warp");
    unsigned short a_halves[256], b_halves[128];
    float a[256], b[128], c[16][8]; // row by row
    for (int lane = 0; lane < 32; lane++) {
        const Product& p = *(const Product*)given[lane];
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) {
            unsigned short* to = a_halves + (g + 8 * (i % 2)) * 16 + 2 * t + 8 * (i / 2);
            to[0] = (unsigned short)p.a[i], to[1] = (unsigned short)(p.a[i] >> 16);
        }
        for (int i = 0; i < 2; i++) {
            unsigned short* to = b_halves + (2 * t + 8 * i) * 8 + g;
            to[0] = (unsigned short)p.b[i], to[8] = (unsigned short)(p.b[i] >> 16);
        }
        for (int i = 0; i < 4; i++) c[g + 8 * (i / 2)][2 * t + i % 2] = p.c[i];
    }
    to_floats(a_halves, a);
    to_floats(b_halves, b);
    typedef float Row __attribute__((vector_size(32)));
    Row b_rows[16];
    memcpy(b_rows, b, sizeof b);
    for (int row = 0; row < 16; row++) {
        Row sums;
        memcpy(&sums, c[row], sizeof sums);
        for (int k = 0; k < 16; k++) sums += a[16 * row + k] * b_rows[k];
        memcpy(c[row], &sums, sizeof sums);
    }
    for (int lane = 0; lane < 32; lane++) {
        const Product& p = *(const Product*)given[lane];
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) p.c[i] = c[g + 8 * (i / 2)][2 * t + i % 2];
    }
}

// mma of 8-bit integers: d = a b, with a 16 x 32, b 32 x 8 and d in 32 bits.
void multiply_codes(void* const (&given)[32], u32 arrived) {
    if (arrived != ~0u) fail("a product of bytes wants all lanes of the warp");
    int a[16][32], b[8][32];
    for (int lane = 0; lane < 32; lane++) {
        const CodeProduct& p = *(const CodeProduct*)given[lane];
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 4; k++) {
                const unsigned char byte = (unsigned char)(p.a[i] >> (8 * k));
                a[g + 8 * (i % 2)][16 * (i / 2) + 4 * t + k] = p.has_sign ? (int)(signed char)byte : (int)byte;
            }
        for (int i = 0; i < 2; i++)
            for (int k = 0; k < 4; k++) b[g][16 * i + 4 * t + k] = (signed char)(p.b[i] >> (8 * k));
    }
    for (int lane = 0; lane < 32; lane++) {
        const CodeProduct& p = *(const CodeProduct*)given[lane];
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) {
            int sum = 0;
            for (int k = 0; k < 32; k++) sum += a[g + 8 * (i / 2)][k] * b[2 * t + i % 2][k];
            p.d[i] = sum;
        }
    }
}

// wgmma: one warp's 16 rows of c += a b, in tiles of 8 columns. b is in shared memory with the 128-byte swizzle.
void multiply_wide(void* const (&given)[32], u32 arrived) {
    if (arrived != ~0u) fail("a product of a group of warps wants all lanes");
    const WideProduct& first = *(const WideProduct*)given[0];
    if ((uintptr_t)first.b % 1024) fail("columns of a product of a group of warps are not aligned");
    for (int tile = 0; tile < first.columns / 8; tile++) {
        Product products[32];
        void* mine[32];
        for (int lane = 0; lane < 32; lane++) {
            const WideProduct& p = *(const WideProduct*)given[lane];
            const int g = lane / 4, t = lane % 4;
            products[lane].c = p.c[tile];
            memcpy(products[lane].a, p.a, sizeof products[lane].a);
            for (int i = 0; i < 2; i++)
                memcpy(&products[lane].b[i], p.b + (8 * tile + g) * 64 + ((2 * p.step + i) ^ g) * 8 + 2 * t, 4);
            mine[lane] = &products[lane];
        }
        multiply(mine, arrived);
    }
}

// ldmatrix: four 8 x 8 matrices of F16, of which lane 8 i + j gives row j of matrix i. `transposed`: as with .trans.
static void load_fragments(void* const (&given)[32], u32 arrived, bool transposed) {
    if (arrived != ~0u) fail("matrices are given to all lanes of the warp");
    u32 results[32][4];
    for (int i = 0; i < 4; i++) {
        const half* rows[8];
        for (int row = 0; row < 8; row++) {
            rows[row] = ((const Rows*)given[8 * i + row])->row;
            if ((uintptr_t)rows[row] % 16) fail("a row of a matrix is not aligned");
        }
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            const half first = transposed ? rows[2 * t][g] : rows[g][2 * t], second = transposed ? rows[2 * t + 1][g] : rows[g][2 * t + 1];
            results[lane][i] = first.bits | (u32)second.bits << 16;
        }
    }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) ((const Rows*)given[lane])->to[i] = results[lane][i];
}
void give_rows(void* const (&given)[32], u32 arrived) { load_fragments(given, arrived, false); }
void give_columns(void* const (&given)[32], u32 arrived) { load_fragments(given, arrived, true); }

}  // namespace software
