// What a warp's lanes do together on the tensor cores.
#include "software_ptx.hpp"

namespace software {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

static float low(u32 pair) { return __half2float({(unsigned short)pair}); }
static float high(u32 pair) { return __half2float({(unsigned short)(pair >> 16)}); }

void multiply(void* const (&given)[32], u32 arrived) {
    if (arrived != ~0u) fail("a product of matrices wants all lanes of the warp");
    float a[16][16], b[16][8], c[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const Product& p = *(const Product*)given[lane];
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) {
            float* to = &a[g + 8 * (i % 2)][2 * t + 8 * (i / 2)];
            to[0] = low(p.a[i]), to[1] = high(p.a[i]);
        }
        for (int i = 0; i < 2; i++) b[2 * t + 8 * i][g] = low(p.b[i]), b[2 * t + 8 * i + 1][g] = high(p.b[i]);
        for (int i = 0; i < 4; i++) c[g + 8 * (i / 2)][2 * t + i % 2] = p.c[i];
    }
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int column = 0; column < 8; column++) c[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < 32; lane++) {
        const Product& p = *(const Product*)given[lane];
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) p.c[i] = c[g + 8 * (i / 2)][2 * t + i % 2];
    }
}

static void give(void* const (&given)[32], u32 arrived, bool turned) {
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
            const half first = turned ? rows[2 * t][g] : rows[g][2 * t], second = turned ? rows[2 * t + 1][g] : rows[g][2 * t + 1];
            results[lane][i] = first.bits | (u32)second.bits << 16;
        }
    }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) ((const Rows*)given[lane])->to[i] = results[lane][i];
}
void give_rows(void* const (&given)[32], u32 arrived) { give(given, arrived, false); }
void give_columns(void* const (&given)[32], u32 arrived) { give(given, arrived, true); }

}  // namespace software
