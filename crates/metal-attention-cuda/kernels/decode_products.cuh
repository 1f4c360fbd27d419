// Products of full ops in the persistent decode kernel: the partial sums of one consumer warp over its columns of the block's
// tiles, as stages of weights arrive. The warps' sums of a row are added afterwards (`sum_of_warps`).
//
// The time from the last input word to the first product is on the critical path of all blocks, because all wait for each other's rows.
// Everything that does not depend on the inputs is therefore computed before they arrive: `WarpWork` and `DigitColumns`.
//
// Lanes: g = lane / 4 and t = lane % 4, as in the fragments of mma (ptx.cuh). A lane has rows g and g + 8 of a tile.
#pragma once
#include "code_products.cuh"
#include "decode_weights.cuh"
#include "products.cuh"

// Partial sums of a block lie in a region as [row of the block][SUMS_STRIDE] floats: one for each warp of a warp group, then four of padding,
// which keep the rows in different banks. The padding of the first two rows holds the warps' sums of squares (`squares_index`).
constexpr u32 SUMS_STRIDE = CONSUMER_WARPS + 4;

// The work of one warp for one matrix of the op.
struct __align__(16) WarpWork {
    u32 format;            // Format of formats.cuh
    u32 records_per_stage; // as in OpMatrixArgs
    u32 n_records;         // records of a tile that the warp has
    u32 n_tiles;           // tiles of the warp group
    u32 to;                // float of the region at which the warp's sums of the first of these begin
    u32 tile_stride;       // floats from there to those of the warp group's next tile
    u32 unused[2];
};
// `to`: the float of the region at which the matrix's sums begin.
__device__ __forceinline__ WarpWork warp_work_of(const BlockShare& share, const WarpShare& warp_share, u32 warp, u32 to) {
    const u32 first = first_tile_of(warp_share, share), n = share.n_tiles;
    const u32 column = warp & (((u32)CONSUMER_WARPS >> warp_share.log_warp_groups) - 1);
    WarpWork work = {share.format, share.records_per_stage, warp_share.n * share.records_per_unit};
    work.n_tiles = first < n ? (n - first + warp_share.n_warp_groups - 1) >> warp_share.log_warp_groups : 0;
    work.to = to + (share.tiles_above + first) * (16 * SUMS_STRIDE) + column;
    work.tile_stride = warp_share.n_warp_groups * (16 * SUMS_STRIDE);
    return work;
}

// The sum of a row: the partial sums of the 2^log_warps_per_tile warps of its warp group, added in an order that does not depend on timing.
__device__ __forceinline__ float sum_of_warps(const float* of_row, u32 log_warps_per_tile) {
    float v[CONSUMER_WARPS];
#pragma unroll
    for (int k = 0; k < CONSUMER_WARPS; k += 4) *(float4*)(v + k) = *(const float4*)(of_row + k);
#pragma unroll
    for (int k = 1; k < CONSUMER_WARPS; k++) v[k] = k >> log_warps_per_tile == 0 ? v[k] : 0.0f;
#pragma unroll
    for (int d = 1; d < CONSUMER_WARPS; d *= 2)
#pragma unroll
        for (int k = 0; k < CONSUMER_WARPS; k += 2 * d) v[k] += v[k + d];
    return v[0];
}

// Where a lane reads its column of the inputs' digits, as offsets in shared memory that do not change during an op. Each of the eight
// columns of a product is a digit of a quant block (code_products.cuh); a lane reads column g.
struct DigitColumns {
    // Formats with one scale for each quant block: columns 0 to 2 are the digits of a panel's first quant block, 4 to 6 those of its second. The
    // columns of one are zeros in the other's product, so that both products accumulate in the same registers; then lanes with t of 0 and 1
    // have the sums for the first one's scales, lanes with t of 2 and 3 those for the second one's.
    u32 of_quant_blocks[2];      // for the product of each quant block: the digits of panel 0, or zeros
    u32 step_of_quant_blocks[2]; // bytes from one panel to the next; 0 for zeros
    u32 factors;           // factor of the lane's quant block of panel 0
    u32 sums;              // the two sums of that quant block's inputs
    // Formats with a scale for each half of a quant block: columns 0 to 2 are digits of first halves, 4 to 6 of second halves.
    u32 of_halves;         // the digits of panel 0, or zeros
    u32 step_of_halves;    // bytes from one panel to the next; 0 for zeros
    __device__ __forceinline__ DigitColumns(const CodeInput& input, const unsigned char* zeros, int lane) {
        const int g = lane / 4, t = lane % 4;
        const bool none = g % 4 == 3;
        const unsigned char* digits = input.digits + g % 4 * 64 + t * 16;
#pragma unroll
        for (int b = 0; b < 2; b++) {
            const bool is_mine = !none && g / 4 == b;
            of_quant_blocks[b] = shared_offset(is_mine ? digits + b * 8 : zeros), step_of_quant_blocks[b] = is_mine ? DIGITS_OF_PANEL : 0;
            pin_register(of_quant_blocks[b]), pin_register(step_of_quant_blocks[b]);
        }
        factors = shared_offset(input.factors + t / 2), sums = shared_offset(input.sums + t / 2 * 2);
        of_halves = shared_offset(none ? zeros : digits), step_of_halves = none ? 0 : DIGITS_OF_PANEL;
        pin_register(factors), pin_register(sums), pin_register(of_halves), pin_register(step_of_halves);
    }
};

// Adds up over the four lanes of a row: the row's sum of TILES tiles, of which each lane has the terms of rows g and g + 8. The result of
// lane t is that of row g + 8 (t % 2) of tile t / 2; with one tile, lanes with t of 2 and 3 repeat the others.
__device__ __forceinline__ u32 row_of_sum(int lane) { return lane / 4 + 8 * (lane & 1); }
template <int TILES> __device__ __forceinline__ float sum_of_row(const float (&y)[TILES][2], int lane) {
    const bool odd = lane & 1, upper = lane & 2;
    float mine[2] = {};
#pragma unroll
    for (int i = 0; i < TILES; i++) mine[i] = (odd ? y[i][1] : y[i][0]) + __shfl_xor_sync(~0u, odd ? y[i][0] : y[i][1], 1);
    if (TILES == 1) mine[1] = mine[0];
    return (upper ? mine[1] : mine[0]) + __shfl_xor_sync(~0u, upper ? mine[0] : mine[1], 2);
}
// Stores these results. `to`: the first row of the first tile; `tile_stride`: floats to the second tile.
template <int TILES> __device__ __forceinline__ void store_sums(float* to, u32 tile_stride, const float (&y)[TILES][2], int lane) {
    const float sum = sum_of_row<TILES>(y, lane);
    if (TILES == 2 || !(lane & 2)) to[row_of_sum(lane) * SUMS_STRIDE + (lane & 2 ? tile_stride : 0)] = sum;
}

// Accumulators of a warp for up to two tiles, which share what is read of the inputs. SCALES_PER_QUANT_BLOCK: 1, or 2 for one of each half.
// Each version has: TWO, whether two tiles at a time are worth the registers; `add`, which adds one panel of each tile; and `finish`, which
// stores the sums and clears the accumulators.
template <u32 FORMAT, int SCALES_PER_QUANT_BLOCK = Codes<FORMAT>::SCALES_PER_QUANT_BLOCK> struct CodeTiles;
template <u32 FORMAT> struct CodeTiles<FORMAT, 1> {
    typedef Codes<FORMAT> P;
    static constexpr bool TWO = true;
    const DigitColumns& columns;
    u32 quant_block; // of a panel: the one whose sums the lane has
    float acc[2][2] = {}, mins[2][2] = {};
    __device__ __forceinline__ CodeTiles(const DigitColumns& columns, unsigned char*, u32, float, int lane)
        : columns(columns), quant_block(lane % 4 / 2) {}
    template <int TILES> __device__ __forceinline__ void add(const P (&p)[TILES], u32 panel, int) {
        int c[TILES][4];
#pragma unroll
        for (int b = 0; b < 2; b++) {
            uint2 x = *shared_at<uint2>(columns.of_quant_blocks[b] + panel * columns.step_of_quant_blocks[b]);
            if (!P::HALVES_ALTERNATE) x = make_uint2(__byte_perm(x.x, x.y, 0x6420), __byte_perm(x.x, x.y, 0x7531));
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                u32 r0[2], r1[2];
                p[i].bytes(b, 0, r0);
                p[i].bytes(b, 1, r1);
                if (b == 0) mma_codes<P::SIGNED>(c[i], r0[0], r1[0], r0[1], r1[1], x.x, x.y);
                else add_mma_codes<P::SIGNED>(c[i], r0[0], r1[0], r0[1], r1[1], x.x, x.y);
            }
        }
        const float factor = *shared_at<float>(columns.factors + panel * 8);
        float sum = 0.0f;
        if (P::MINS) {
            const float2 of = *shared_at<float2>(columns.sums + panel * 16);
            sum = of.x + of.y;
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const float2 scales = p[i].scales_of(quant_block);
            acc[i][0] += scales.x * factor * (float)((c[i][0] << 8) + c[i][1]);
            acc[i][1] += scales.y * factor * (float)((c[i][2] << 8) + c[i][3]);
            if constexpr (P::MINS) {
                const float2 quant_block_mins = p[i].mins_of(quant_block);
                mins[i][0] += quant_block_mins.x * sum, mins[i][1] += quant_block_mins.y * sum;
            }
        }
    }
    template <int TILES> __device__ __forceinline__ void finish(float* to, u32 tile_stride, int lane) {
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
        store_sums<TILES>(to, tile_stride, y, lane);
    }
};
template <u32 FORMAT> struct CodeTiles<FORMAT, 2> {
    typedef Codes<FORMAT> P;
    static constexpr bool TWO = FORMAT == Q6_K;
    Digits digits;
    const float *factors, *sums;
    float acc[2][2] = {}, mins[2][2] = {};
    __device__ __forceinline__ CodeTiles(const DigitColumns& columns, unsigned char* memory, u32 n_panels, float, int)
        : digits{decode_memory + columns.of_halves, columns.step_of_halves} {
        const CodeInput input(memory, n_panels);
        factors = input.factors, sums = input.sums;
    }
    template <int TILES> __device__ __forceinline__ void add(const P (&p)[TILES], u32 panel, int lane) {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            code_products(p[i], panel, digits, factors, lane, acc[i]);
            if (P::MINS) add_mins(p[i], panel, sums, mins[i]);
        }
    }
    template <int TILES> __device__ __forceinline__ void finish(float* to, u32 tile_stride, int lane) {
        const float by = (lane % 2 == 0 ? 256.0f : 1.0f / 256.0f) / P::MULTIPLE;
        float y[TILES][2];
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int row = 0; row < 2; row++) {
                // All four lanes have the same mins; one of them subtracts them.
                y[i][row] = acc[i][row] * by - (lane % 4 == 0 ? mins[i][row] : 0.0f);
                acc[i][row] = 0.0f, mins[i][row] = 0.0f;
            }
        store_sums<TILES>(to, tile_stride, y, lane);
    }
};
template <u32 FORMAT> struct FloatTiles {
    typedef Staged<FORMAT> P;
    static constexpr bool TWO = false;
    const unsigned char* input;
    u32 n_quant_blocks;
    float factor;
    float acc[2][4] = {};
    __device__ __forceinline__ FloatTiles(const DigitColumns&, unsigned char* memory, u32 n_panels, float factor, int)
        : input(memory), n_quant_blocks(2 * n_panels), factor(factor) {}
    template <int TILES> __device__ __forceinline__ void add(const P (&p)[TILES], u32 panel, int lane) {
#pragma unroll
        for (int i = 0; i < TILES; i++) panel_products<P, 1>(p[i], panel, n_quant_blocks, input, nullptr, lane, acc[i]);
    }
    template <int TILES> __device__ __forceinline__ void finish(float* to, u32 tile_stride, int lane) {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            if (lane % 4 == 0) {
                float* of_row = to + i * tile_stride + lane / 4 * SUMS_STRIDE;
                of_row[0] = (acc[i][0] + acc[i][1] * (1.0f / 2048.0f)) * factor;
                of_row[8 * SUMS_STRIDE] = (acc[i][2] + acc[i][3] * (1.0f / 2048.0f)) * factor;
            }
#pragma unroll
            for (int k = 0; k < 4; k++) acc[i][k] = 0.0f;
        }
    }
};
template <u32 FORMAT> struct TileSums : CodeTiles<FORMAT> {
    using CodeTiles<FORMAT>::CodeTiles;
};
template <> struct TileSums<F16> : FloatTiles<F16> {
    using FloatTiles<F16>::FloatTiles;
};
template <> struct TileSums<F32> : FloatTiles<F32> {
    using FloatTiles<F32>::FloatTiles;
};

// Adds the products of RECORDS records of each of TILES tiles, `stride` bytes apart. AT_ONCE panels are read before the first is multiplied:
// as many as fit in the registers, so that reading overlaps with multiplying.
template <u32 FORMAT, int TILES, int RECORDS>
__device__ __forceinline__ void add_records(TileSums<FORMAT>& tiles, const unsigned char* record, u32 stride, u32 panel, int lane) {
    typedef Record<FORMAT> R;
    typedef typename TileSums<FORMAT>::P P;
    constexpr int PANELS = R::PANELS * RECORDS;
    constexpr int MAX_AT_ONCE = R::PANELS == 1 && TILES == 1 ? 4 : 2, AT_ONCE = PANELS < MAX_AT_ONCE ? PANELS : MAX_AT_ONCE;
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
// Adds the products of `n` records of each tile, from record `first` of their rows on.
template <u32 FORMAT, int TILES>
__device__ __forceinline__ void add_run(TileSums<FORMAT>& tiles, const unsigned char* record, u32 stride, u32 first, u32 n, int lane) {
    typedef Record<FORMAT> R;
    auto add = [&](u32 i, auto records) {
        add_records<FORMAT, TILES, decltype(records)::value>(tiles, record + i * R::BYTES, stride, (first + i) * R::PANELS, lane);
    };
    u32 i = 0;
    if (R::PANELS == 1 && TILES == 1) {
#pragma unroll 1
        for (; i + 4 <= n; i += 4) add(i, Constant<4>());
        if (i + 2 <= n) add(i, Constant<2>()), i += 2;
        if (i < n) add(i, Constant<1>());
    } else if (R::PANELS == 1) {
#pragma unroll 1
        for (; i + 2 <= n; i += 2) add(i, Constant<2>());
        if (i < n) add(i, Constant<1>());
    } else {
#pragma unroll 1
        for (; i < n; i++) add(i, Constant<1>());
    }
}

// Stores the warp's partial sums of its columns of a matrix: of the warp group's tiles from `begin` on, at most `tiles_per_round`. `memory`,
// `factor`: the warp's inputs and what products with floats are multiplied by. `to`: the region. Waits for stages as it needs them.
// TWO: whether two tiles may be multiplied together, which is separate code.
template <u32 FORMAT, bool TWO>
__device__ __forceinline__ void multiply_tiles(const WarpWork& work, u32 begin, u32 tiles_per_round, const DigitColumns& columns,
                                               unsigned char* memory, float factor, float* to, WeightRing& ring, int lane) {
    typedef Record<FORMAT> R;
    const u32 n_records = work.n_records, end = min(work.n_tiles, begin + tiles_per_round), per_stage = work.records_per_stage;
    u32 left = (work.n_tiles - min(begin, work.n_tiles)) * n_records;
    TileSums<FORMAT> tiles(columns, memory, n_records * R::PANELS, factor, lane);
    to += work.to;
#pragma unroll 1
    for (u32 t = begin; t < end;) {
        if (n_records > 0) ring.wait(per_stage, left);
        if constexpr (TWO && TileSums<FORMAT>::TWO) {
            // Both tiles have to lie in the open stage.
            if (t + 2 <= end && 2 * n_records <= ring.left && n_records > 0) {
                add_run<FORMAT, 2>(tiles, decode_memory + ring.record, n_records * R::BYTES, 0, n_records, lane);
                left -= 2 * n_records;
                ring.release(2 * n_records, R::BYTES);
                tiles.template finish<2>(to, work.tile_stride, lane);
                to += 2 * work.tile_stride, t += 2;
                continue;
            }
        }
#pragma unroll 1
        for (u32 r = 0; r < n_records;) {
            ring.wait(per_stage, left);
            const u32 n = min(ring.left, n_records - r);
            add_run<FORMAT, 1>(tiles, decode_memory + ring.record, 0, r, n, lane);
            r += n, left -= n;
            ring.release(n, R::BYTES);
        }
        tiles.template finish<1>(to, work.tile_stride, lane);
        to += work.tile_stride, t++;
    }
}
