// Products of a step in decode.cu: what a warp sums up of the rows of a part of a matrix, as its weights come. From the last input to the first product
// all blocks wait for every instruction, so what can be known before is found before (`Work`, `Columns`).
#pragma once
#include "code_products.cuh"
#include "decode_weights.cuh"
#include "products.cuh"

// Floats from one row's sums to those of the next: one of each warp that has some of its columns, and some so that rows lie in banks of their own.
constexpr u32 SUMS_STRIDE = WARPS + 4;

// What a warp has to do of a part.
struct __align__(16) Work {
    u32 format, records_a_slot;
    u32 n_records; // of a tile
    u32 n_tiles;   // of the warp's group
    u32 to;        // where the warp's sums of the first of them lie, in floats from those of the step on
    u32 step;      // from there to those of the next
    u32 unused[2];
};
__device__ __forceinline__ Work work_of(const Part& part, const Share& share, u32 warp, u32 to) {
    const u32 first = first_tile_of(share, part), n = part.n_tiles, column = warp & (((u32)WARPS >> share.log_groups) - 1);
    Work work = {part.format, part.records_a_slot, share.n * part.records_a_unit};
    work.n_tiles = first < n ? (n - first + share.n_groups - 1) >> share.log_groups : 0;
    work.to = to + (part.before + first) * (16 * SUMS_STRIDE) + column;
    work.step = share.n_groups * (16 * SUMS_STRIDE);
    return work;
}

// A row's sum over the warps among which its columns are split.
__device__ __forceinline__ float sum_of_warps(const float* of_row, u32 log_split) {
    float v[WARPS];
#pragma unroll
    for (int k = 0; k < WARPS; k += 4) *(float4*)(v + k) = *(const float4*)(of_row + k);
#pragma unroll
    for (int k = 1; k < WARPS; k++) v[k] = k >> log_split == 0 ? v[k] : 0.0f;
#pragma unroll
    for (int d = 1; d < WARPS; d *= 2)
#pragma unroll
        for (int k = 0; k < WARPS; k += 2 * d) v[k] += v[k + d];
    return v[0];
}

// Where a lane finds the inputs of its columns of products, in the block's memory.
struct Columns {
    // Of formats with a scale for each block: columns 0 to 2 are the digits of a panel's first block, 4 to 6 those of its second, each of whose
    // products is nothing in the other's columns. So both come to one sum, and lanes with t of 0 and 1 have what is to be multiplied by the first
    // block's scales, the others the second's.
    u32 of_blocks[2], step_of_blocks[2], factors, sums;
    // With one for each half of a block: columns 4 to 6 are those of the second halves.
    u32 of_halves, step_of_halves;
    __device__ __forceinline__ Columns(const CodeInput& input, const unsigned char* zeros, int lane) {
        const int g = lane / 4, t = lane % 4;
        const bool none = g % 4 == 3;
        const unsigned char* digits = input.digits + g % 4 * 64 + t * 16;
#pragma unroll
        for (int b = 0; b < 2; b++) {
            const bool is_mine = !none && g / 4 == b;
            of_blocks[b] = offset_of(is_mine ? digits + b * 8 : zeros), step_of_blocks[b] = is_mine ? DIGITS_OF_PANEL : 0;
            settle(of_blocks[b]), settle(step_of_blocks[b]);
        }
        factors = offset_of(input.factors + t / 2), sums = offset_of(input.sums + t / 2 * 2);
        of_halves = offset_of(none ? zeros : digits), step_of_halves = none ? 0 : DIGITS_OF_PANEL;
        settle(factors), settle(sums), settle(of_halves), settle(step_of_halves);
    }
};

// The row's sum that a lane has of TILES tiles, from what four lanes have of rows g and g + 8: lane t has row g + 8 (t % 2) of tile t / 2, of one tile
// lanes with t of 2 and 3 have the same as the others.
__device__ __forceinline__ u32 row_of_sum(int lane) { return lane / 4 + 8 * (lane & 1); }
template <int TILES> __device__ __forceinline__ float sum_of_row(const float (&y)[TILES][2], int lane) {
    const bool odd = lane & 1, upper = lane & 2;
    float mine[2] = {};
#pragma unroll
    for (int i = 0; i < TILES; i++) mine[i] = (odd ? y[i][1] : y[i][0]) + __shfl_xor_sync(~0u, odd ? y[i][0] : y[i][1], 1);
    if (TILES == 1) mine[1] = mine[0];
    return (upper ? mine[1] : mine[0]) + __shfl_xor_sync(~0u, upper ? mine[0] : mine[1], 2);
}
// `to`: of the first tile's first row; `step`: from there to that of the second.
template <int TILES> __device__ __forceinline__ void put_sums(float* to, u32 step, const float (&y)[TILES][2], int lane) {
    const float sum = sum_of_row<TILES>(y, lane);
    if (TILES == 2 || !(lane & 2)) to[row_of_sum(lane) * SUMS_STRIDE + (lane & 2 ? step : 0)] = sum;
}

// What a warp adds up of up to two tiles at a time: products of codes, or of floats.
template <u32 FORMAT, int SUBS = Codes<FORMAT>::SUBS> struct CodeTiles;
template <u32 FORMAT> struct CodeTiles<FORMAT, 1> {
    typedef Codes<FORMAT> P;
    static constexpr bool TWO = true; // whether two tiles go together
    const Columns& columns;
    u32 block;
    float acc[2][2] = {}, mins[2][2] = {};
    __device__ __forceinline__ CodeTiles(const Columns& columns, unsigned char*, u32, float, int lane) : columns(columns), block(lane % 4 / 2) {}
    template <int TILES> __device__ __forceinline__ void add(const P (&p)[TILES], u32 panel, int) {
        int c[TILES][4];
#pragma unroll
        for (int b = 0; b < 2; b++) {
            uint2 x = *at_offset<uint2>(columns.of_blocks[b] + panel * columns.step_of_blocks[b]);
            if (!P::TURNS) x = make_uint2(__byte_perm(x.x, x.y, 0x6420), __byte_perm(x.x, x.y, 0x7531));
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                u32 r0[2], r1[2];
                p[i].bytes(b, 0, r0);
                p[i].bytes(b, 1, r1);
                if (b == 0) mma_codes<P::SIGNED>(c[i], r0[0], r1[0], r0[1], r1[1], x.x, x.y);
                else add_mma_codes<P::SIGNED>(c[i], r0[0], r1[0], r0[1], r1[1], x.x, x.y);
            }
        }
        const float factor = *at_offset<float>(columns.factors + panel * 8);
        float sum = 0.0f;
        if (P::MINS) {
            const float2 of = *at_offset<float2>(columns.sums + panel * 16);
            sum = of.x + of.y;
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const float2 scales = p[i].scales_of(block);
            acc[i][0] += scales.x * factor * (float)((c[i][0] << 8) + c[i][1]);
            acc[i][1] += scales.y * factor * (float)((c[i][2] << 8) + c[i][3]);
            if constexpr (P::MINS) {
                const float2 offsets = p[i].mins_of(block);
                mins[i][0] += offsets.x * sum, mins[i][1] += offsets.y * sum;
            }
        }
    }
    template <int TILES> __device__ __forceinline__ void finish(float* to, u32 step, int lane) {
        const bool odd = lane & 1;
        const float by = (odd ? 1.0f / 256.0f : 256.0f) / P::MULTIPLE;
        float y[TILES][2];
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int row = 0; row < 2; row++) {
                y[i][row] = acc[i][row] * by - (odd ? 0.0f : mins[i][row]);
                acc[i][row] = 0.0f, mins[i][row] = 0.0f;
            }
        put_sums<TILES>(to, step, y, lane);
    }
};
template <u32 FORMAT> struct CodeTiles<FORMAT, 2> {
    typedef Codes<FORMAT> P;
    static constexpr bool TWO = FORMAT == Q6_K;
    Digits digits;
    const float *factors, *sums;
    float acc[2][2] = {}, mins[2][2] = {};
    __device__ __forceinline__ CodeTiles(const Columns& columns, unsigned char* memory, u32 n_panels, float, int)
        : digits{decode_memory + columns.of_halves, columns.step_of_halves} {
        const CodeInput input(memory, n_panels);
        factors = input.factors, sums = input.sums;
    }
    template <int TILES> __device__ __forceinline__ void add(const P (&p)[TILES], u32 panel, int lane) {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            code_products(p[i], panel, digits, factors, lane, acc[i]);
            if (P::MINS) take_mins(p[i], panel, sums, mins[i]);
        }
    }
    template <int TILES> __device__ __forceinline__ void finish(float* to, u32 step, int lane) {
        const float by = (lane % 2 == 0 ? 256.0f : 1.0f / 256.0f) / P::MULTIPLE;
        float y[TILES][2];
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int row = 0; row < 2; row++) {
                // All lanes have the offsets.
                y[i][row] = acc[i][row] * by - (lane % 4 == 0 ? mins[i][row] : 0.0f);
                acc[i][row] = 0.0f, mins[i][row] = 0.0f;
            }
        put_sums<TILES>(to, step, y, lane);
    }
};
template <u32 FORMAT> struct FloatTiles {
    typedef Staged<FORMAT> P;
    static constexpr bool TWO = false;
    const unsigned char* input;
    u32 n_blocks;
    float factor;
    float acc[2][4] = {};
    __device__ __forceinline__ FloatTiles(const Columns&, unsigned char* memory, u32 n_panels, float factor, int)
        : input(memory), n_blocks(2 * n_panels), factor(factor) {}
    template <int TILES> __device__ __forceinline__ void add(const P (&p)[TILES], u32 panel, int lane) {
#pragma unroll
        for (int i = 0; i < TILES; i++) panel_products<P, 1>(p[i], panel, n_blocks, input, nullptr, lane, acc[i]);
    }
    template <int TILES> __device__ __forceinline__ void finish(float* to, u32 step, int lane) {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            if (lane % 4 == 0) {
                float* of_row = to + i * step + lane / 4 * SUMS_STRIDE;
                of_row[0] = (acc[i][0] + acc[i][1] * (1.0f / 2048.0f)) * factor;
                of_row[8 * SUMS_STRIDE] = (acc[i][2] + acc[i][3] * (1.0f / 2048.0f)) * factor;
            }
#pragma unroll
            for (int k = 0; k < 4; k++) acc[i][k] = 0.0f;
        }
    }
};
template <u32 FORMAT> struct Tiles : CodeTiles<FORMAT> {
    using CodeTiles<FORMAT>::CodeTiles;
};
template <> struct Tiles<F16> : FloatTiles<F16> {
    using FloatTiles<F16>::FloatTiles;
};
template <> struct Tiles<F32> : FloatTiles<F32> {
    using FloatTiles<F32>::FloatTiles;
};

// Adds the products of TILES tiles with RECORDS records of each, which lie `stride` bytes apart: several panels are read before the first is multiplied, as
// there are registers for.
template <u32 FORMAT, int TILES, int RECORDS>
__device__ __forceinline__ void add_records(Tiles<FORMAT>& tiles, const unsigned char* record, u32 stride, u32 panel, int lane) {
    typedef Record<FORMAT> R;
    typedef typename Tiles<FORMAT>::P P;
    constexpr int PANELS = R::PANELS * RECORDS, MOST = R::PANELS == 1 && TILES == 1 ? 4 : 2, AT_ONCE = PANELS < MOST ? PANELS : MOST;
#pragma unroll
    for (int q = 0; q < PANELS; q += AT_ONCE) {
        P p[AT_ONCE][TILES];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
            for (int i = 0; i < TILES; i++)
                p[k][i].read(Place<FORMAT>(record + i * stride + (q + k) / R::PANELS * R::BYTES, (q + k) % R::PANELS), lane);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) tiles.template add<TILES>(p[k], panel + q + k, lane);
    }
}
// With `n` records of each.
template <u32 FORMAT, int TILES>
__device__ __forceinline__ void add_run(Tiles<FORMAT>& tiles, const unsigned char* record, u32 stride, u32 first, u32 n, int lane) {
    typedef Record<FORMAT> R;
    auto add = [&](u32 i, auto records) {
        add_records<FORMAT, TILES, decltype(records)::value>(tiles, record + i * R::BYTES, stride, (first + i) * R::PANELS, lane);
    };
    u32 i = 0;
    if (R::PANELS == 1 && TILES == 1) {
#pragma unroll 1
        for (; i + 4 <= n; i += 4) add(i, Count<4>());
        if (i + 2 <= n) add(i, Count<2>()), i += 2;
        if (i < n) add(i, Count<1>());
    } else if (R::PANELS == 1) {
#pragma unroll 1
        for (; i + 2 <= n; i += 2) add(i, Count<2>());
        if (i < n) add(i, Count<1>());
    } else {
#pragma unroll 1
        for (; i < n; i++) add(i, Count<1>());
    }
}

// The warp's sums over its columns of a part's tiles, `n_a_round` from the `begin`th on that its group has, to where the step's lie. `memory`, `factor`: of
// its inputs. TWO: whether two tiles may go together, which is code of its own.
template <u32 FORMAT, bool TWO>
__device__ __forceinline__ void products(const Work& work, u32 begin, u32 n_a_round, const Columns& columns, unsigned char* memory, float factor, float* to,
                                         Ring& ring, int lane) {
    typedef Record<FORMAT> R;
    const u32 n_records = work.n_records, end = min(work.n_tiles, begin + n_a_round), a_slot = work.records_a_slot;
    u32 left = (work.n_tiles - min(begin, work.n_tiles)) * n_records;
    Tiles<FORMAT> tiles(columns, memory, n_records * R::PANELS, factor, lane);
    to += work.to;
#pragma unroll 1
    for (u32 t = begin; t < end;) {
        if (n_records > 0) ring.wait(a_slot, left);
        if constexpr (TWO && Tiles<FORMAT>::TWO) {
            // They share what is read of the inputs, where the slot has both.
            if (t + 2 <= end && 2 * n_records <= ring.left && n_records > 0) {
                add_run<FORMAT, 2>(tiles, decode_memory + ring.record, n_records * R::BYTES, 0, n_records, lane);
                left -= 2 * n_records;
                ring.take(2 * n_records, R::BYTES);
                tiles.template finish<2>(to, work.step, lane);
                to += 2 * work.step, t += 2;
                continue;
            }
        }
#pragma unroll 1
        for (u32 r = 0; r < n_records;) {
            ring.wait(a_slot, left);
            const u32 n = min(ring.left, n_records - r);
            add_run<FORMAT, 1>(tiles, decode_memory + ring.record, 0, r, n, lane);
            r += n, left -= n;
            ring.take(n, R::BYTES);
        }
        tiles.template finish<1>(to, work.step, lane);
        to += work.step, t++;
    }
}
