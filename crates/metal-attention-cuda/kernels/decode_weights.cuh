// Weights of the persistent decode kernel: which tiles of each matrix a block multiplies, and the rings of stages in shared memory through
// which producer warps bring them to the consumer warps.
//
// Each consumer warp has a ring of its own, of `stages_per_warp` stages. One lane of a producer warp fills it, in the order in which the
// warp will multiply: all ops of all layers of all tokens. Weights depend on no result, so that copies run ahead as far as the ring
// reaches, across ops, layers and tokens; only weights of experts wait until the experts are chosen. Each stage has two mbarriers:
//   full   completes when all bytes that the producer announced have arrived; the consumer waits for it
//   empty  completes when all 32 lanes of the consumer warp have read the stage; the producer waits for it (Lemma 9)
#pragma once
#include "decode_routing.cuh"

// The part of one matrix that one block multiplies: neighbouring tiles.
struct __align__(16) BlockShare {
    const unsigned char* from;        // records of its first tile; of experts: of the layer's first expert
    u32 tile_bytes;                   // bytes from one tile to the next
    unsigned short n_tiles;           // tiles of the block
    unsigned short first_tile;        // index of the first one in the matrix
    unsigned short tiles_above;       // tiles that the block has of the op's matrices above this one
    unsigned short record_bytes;      // this and the next five: as in OpMatrixArgs
    unsigned short units_per_tile;
    unsigned short records_per_stage;
    unsigned char records_per_unit;
    unsigned char log_warps_per_tile;
    unsigned char format;
    bool of_experts;                  // whether it stands for the chosen experts of a layer
};

// The number of tiles, out of `n`, that belong to blocks before block `i`. Tiles are divided evenly; where there are fewer tiles than blocks, each of
// the blocks from `first_block` on gets one.
__device__ __forceinline__ u32 tiles_before(u32 i, u32 n, u32 first_block) {
    return n < gridDim.x ? min(max(i, first_block) - first_block, n) : i * n / gridDim.x;
}
// The share of this block.
__device__ __forceinline__ BlockShare block_share_of(const OpMatrixArgs& m) {
    const u32 begin = tiles_before(blockIdx.x, m.op_tiles, m.first_block), end = tiles_before(blockIdx.x + 1, m.op_tiles, m.first_block);
    const u32 t0 = min(max(begin, m.first_tile) - m.first_tile, m.n_tiles), t1 = min(max(end, m.first_tile) - m.first_tile, m.n_tiles);
    BlockShare share;
    share.of_experts = m.expert_layer_number > 0;
    share.from = m.records + (share.of_experts ? 0 : (size_t)t0 * m.tile_bytes);
    share.tile_bytes = m.tile_bytes;
    share.n_tiles = t1 - t0;
    share.first_tile = t0;
    share.tiles_above = min(max(begin, m.first_tile), end) - begin;
    share.record_bytes = m.record_bytes, share.units_per_tile = m.units_per_tile, share.records_per_stage = m.records_per_stage;
    share.records_per_unit = m.records_per_unit, share.log_warps_per_tile = m.log_warps_per_tile, share.format = m.format;
    return share;
}

// The part of the block's tiles of an op that one consumer warp multiplies. 2^log_warps_per_tile warps are a warp group: they share
// the columns of the same tiles, each with neighbouring units. Tile i of the block belongs to warp group i % n_warp_groups.
struct WarpShare {
    u32 warp_group;      // index of the warp group among those of the block
    u32 n_warp_groups;   // CONSUMER_WARPS / 2^log_warps_per_tile
    u32 log_warp_groups; // log2 of that
    u32 first;           // first unit of each tile that the warp has
    u32 n;               // number of its units of each tile
};
__device__ __forceinline__ WarpShare warp_share_of(u32 warp, u32 units_per_tile, u32 log_warps_per_tile) {
    const u32 in_warp_group = warp & ((1u << log_warps_per_tile) - 1), first = in_warp_group * units_per_tile >> log_warps_per_tile;
    return {warp >> log_warps_per_tile, (u32)CONSUMER_WARPS >> log_warps_per_tile, LOG_CONSUMER_WARPS - log_warps_per_tile, first,
            ((in_warp_group + 1) * units_per_tile >> log_warps_per_tile) - first};
}
// The first tile of a matrix, among the block's, that belongs to the warp group.
__device__ __forceinline__ u32 first_tile_of(const WarpShare& s, const BlockShare& share) {
    return (s.warp_group - share.tiles_above) & (s.n_warp_groups - 1);
}

// [n_matrices] in shared memory.
__device__ __forceinline__ BlockShare* block_shares(const DecodeArgs& a) { return (BlockShare*)(decode_memory + a.shares_at); }
// Stage `stage` of consumer warp `warp`, and its two mbarriers.
__device__ __forceinline__ unsigned char* stage_of(const DecodeArgs& a, u32 warp, u32 stage) {
    return decode_memory + (warp * a.stages_per_warp + stage) * a.stage_bytes;
}
__device__ __forceinline__ u64_t* full_barrier(const DecodeArgs& a, u32 warp, u32 stage) {
    return (u64_t*)(decode_memory + a.barriers_at) + 2 * (warp * a.stages_per_warp + stage);
}
__device__ __forceinline__ u64_t* empty_barrier(const DecodeArgs& a, u32 warp, u32 stage) { return full_barrier(a, warp, stage) + 1; }
// A position in a ring: the stage, and the parity of its mbarriers' phase, which changes each time the ring has been gone through.
struct RingPosition {
    u32 stage, parity;
    __device__ __forceinline__ void next(u32 stages_per_warp) {
        if (++stage == stages_per_warp) stage = 0, parity ^= 1;
    }
};

// Where a producer lane reads a tile of the chosen experts. The tile may have records of several: in `down` their columns lie side by side.
struct ExpertCursor {
    u32 expert_stride;      // as in OpMatrixArgs; 0: the matrix is not one of experts
    u32 tiles_per_expert;   // as in OpMatrixArgs
    u32 records_per_expert; // as in OpMatrixArgs
    u32 tile;               // the tile, counted over all chosen experts
    u32 index;              // index of the expert among the chosen ones
    // The first record of the tile that is the expert's.
    __device__ __forceinline__ const unsigned char* from(const BlockShare& share, ExpertChoice& chosen) const {
        return share.from + (size_t)chosen.expert(index) * expert_stride + (size_t)(tile % tiles_per_expert) * share.tile_bytes;
    }
};

// A producer lane: copies all weights that consumer warp `ring` multiplies in this launch into that warp's stages; lanes with `ring` >=
// CONSUMER_WARPS do nothing. A stage gets up to `records_per_stage` records of one matrix, of whichever tiles. At most
// `max_stages_in_flight` copies of a ring are outstanding: more than keep the memory busy only delay the polling loads of words, which queue
// behind them. EXPERTS: whether layers may have experts; the kernels for other models leave the code out.
template <bool EXPERTS> __device__ __forceinline__ void run_producer(const DecodeArgs& a, u32 ring, int lane, ExpertChoice& chosen) {
    const BlockShare* shares = block_shares(a);
    const u64_t policy = evict_first_policy();
    const unsigned char *tile = nullptr, *from = nullptr; // the tile, and the next record to copy
    u32 n = 0;           // token of the launch
    u32 p = 0;           // matrix after the current one
    u32 left = 0;        // records of the current matrix that are not copied yet
    u32 records = 0;     // records of one of its tiles
    u32 left_of_tile = 0; // records of the current tile that are not copied yet
    u32 contiguous = 0;  // how many of these lie together
    u32 tile_stride = 0; // bytes to the warp group's next tile
    u32 bytes = 0;       // bytes of a record
    u32 per_stage = 0;   // records of a stage
    ExpertCursor experts = {};
    RingPosition position = {0, 0}, oldest = {0, 0}; // the next stage to fill, and the first one in flight
    u32 n_in_flight = 0;
    bool done = ring >= CONSUMER_WARPS;
    // Moves on to the next matrix and fills one stage, as far as that is possible without waiting; returns whether anything was.
    auto advance = [&] {
        bool advanced = false;
        if (!done && left == 0) {
            if (p == a.n_matrices) p = 0, n++;
            if (n == a.n_tokens) {
                done = advanced = true;
            } else {
                const BlockShare& share = shares[p];
                const WarpShare s = warp_share_of(ring, share.units_per_tile, share.log_warps_per_tile);
                const u32 first = first_tile_of(s, share);
                bytes = share.record_bytes, per_stage = share.records_per_stage;
                tile_stride = s.n_warp_groups * share.tile_bytes, records = s.n * share.records_per_unit;
                // One stride before the first tile, to which the first copy moves on.
                tile = share.from + (size_t)first * share.tile_bytes + s.first * share.records_per_unit * bytes - tile_stride;
                const u32 n_tiles = records == 0 || first >= share.n_tiles ? 0 : (share.n_tiles - first + s.n_warp_groups - 1) / s.n_warp_groups;
                bool known = true;
                experts.expert_stride = 0;
                if (EXPERTS && share.of_experts && n_tiles > 0) {
                    const OpMatrixArgs& of = a.matrices[p];
                    experts = {of.expert_stride, of.tiles_per_expert, of.records_per_expert, share.first_tile + first - s.n_warp_groups, 0};
                    known = chosen.is_published(n * (a.n_layer + 1) + of.expert_layer_number);
                }
                if (known) left = n_tiles * records, p++, advanced = true;
            }
        }
        if (n_in_flight > 0 && barrier_has_ended(full_barrier(a, ring, oldest.stage), oldest.parity)) n_in_flight--, oldest.next(a.stages_per_warp);
        // The opposite parity: a stage that was never filled counts as empty (Lemma 9).
        if (!done && left > 0 && n_in_flight < a.max_stages_in_flight &&
            barrier_has_ended(empty_barrier(a, ring, position.stage), position.parity ^ 1)) {
            u32 count = min(per_stage, left);
            u64_t* barrier = full_barrier(a, ring, position.stage);
            unsigned char* to = stage_of(a, ring, position.stage);
            barrier_arrive_expecting(barrier, count * bytes);
            left -= count;
            while (count > 0) {
                if (contiguous == 0) {
                    const bool is_next_tile = left_of_tile == 0;
                    if (is_next_tile) tile += tile_stride, from = tile, left_of_tile = contiguous = records;
                    if (EXPERTS && experts.expert_stride != 0) {
                        u32 before = 0; // records of the expert's row before the warp's first one
                        if (is_next_tile) {
                            const BlockShare& share = shares[p - 1];
                            const WarpShare s = warp_share_of(ring, share.units_per_tile, share.log_warps_per_tile);
                            const u32 first = s.first * share.records_per_unit;
                            before = first % experts.records_per_expert;
                            experts.tile += s.n_warp_groups;
                            experts.index = experts.tile / experts.tiles_per_expert + first / experts.records_per_expert;
                        } else {
                            experts.index++;
                        }
                        from = experts.from(shares[p - 1], chosen) + before * bytes;
                        contiguous = min(experts.records_per_expert - before, left_of_tile);
                    }
                }
                const u32 now = min(count, contiguous);
                copy_bulk(to, from, now * bytes, barrier, policy);
                to += now * bytes, from += now * bytes, contiguous -= now, left_of_tile -= now, count -= now;
            }
            n_in_flight++;
            position.next(a.stages_per_warp);
            advanced = true;
        }
        return advanced;
    };
    while (__any_sync(~0u, !done)) {
        bool advanced = false;
        if constexpr (FOR_RACECHECK) {
            for (int turn = 0; turn < CONSUMER_WARPS; turn++) {
                if (turn == lane) advanced = advance();
                __syncwarp();
            }
        } else {
            advanced = advance();
        }
        if (!__any_sync(~0u, advanced)) sleep_briefly();
    }
}

// A consumer warp's side of its ring.
struct WeightRing {
    const DecodeArgs& a;
    u32 first;  // the warp's first stage, counted over all warps
    RingPosition position;
    u32 left;   // records of the current stage that are not released yet; 0: no stage is open
    u32 record; // offset in shared memory of the first of these
    // Opens the next stage unless one is open: waits until it is full. `n`: records of the current matrix that the warp has not released.
    __device__ __forceinline__ void wait(u32 per_stage, u32 n) {
        if (left > 0) return;
        while (!barrier_try_wait(full_barrier(a, 0, first + position.stage), position.parity)) spin_pause();
        record = shared_offset(stage_of(a, 0, first + position.stage)), left = min(per_stage, n);
    }
    // All lanes have read the next `n` records, of `bytes` each. Gives the stage back to the producer with its last record.
    __device__ __forceinline__ void release(u32 n, u32 bytes) {
        record += n * bytes, left -= n;
        if (left > 0) return;
        __syncwarp();
        barrier_arrive(empty_barrier(a, 0, first + position.stage));
        position.next(a.stages_per_warp);
    }
};

// In place of the index of a row: there is none.
constexpr u32 NO_ROW = ~0u;
// Row j of the block's rows of an op, as an index of the op's result vector. NO_ROW: a row of padding, beyond the matrix in its last tile, or a row
// beyond the block's tiles.
__device__ __forceinline__ u32 row_at(const OpArgs& op, const BlockShare* shares, u32 j) {
    u32 matrix = 0, rows_above = 0;
    if (op.kind == QKV)
        while (matrix < 2 && j >= (shares[matrix].tiles_above + shares[matrix].n_tiles) * 16u) rows_above += op.n_rows[matrix++];
    const BlockShare& of = shares[matrix];
    const u32 r = (of.first_tile - of.tiles_above) * 16u + j;
    return j < (of.tiles_above + of.n_tiles) * 16u && r < op.n_rows[matrix] ? rows_above + r : NO_ROW;
}

// Tiles that the block has of an op; the tiles of gate and up both count.
__device__ __forceinline__ u32 tiles_of(const OpArgs& op, const BlockShare* shares) {
    return op.kind == QKV ? shares[2].tiles_above + shares[2].n_tiles : op.kind == GATE_AND_UP ? 2u * shares[0].n_tiles : shares[0].n_tiles;
}
