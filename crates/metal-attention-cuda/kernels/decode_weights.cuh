// A block's parts of matrices in decode.cu, and their weights on the way: warps of their own ask for what the others multiply.
#pragma once
#include "decode.cuh"

// A block's part of a matrix.
struct __align__(16) Part {
    const unsigned char* from; // its first tile; of experts all of them
    u32 tile_bytes;
    unsigned short n_tiles;
    unsigned short first_tile; // of the matrix
    unsigned short before;     // tiles that the block has of the step's matrices above
    unsigned short record_bytes, n_units, records_a_slot;
    unsigned char records_a_unit, log_split, format;
    bool of_experts;
};

// What comes before block `i` of `n` tiles that are shared out among all blocks, or where these are more than tiles among those from `first_block` on.
__device__ __forceinline__ u32 share(u32 i, u32 n, u32 first_block) {
    return n < gridDim.x ? min(max(i, first_block) - first_block, n) : i * n / gridDim.x;
}
__device__ __forceinline__ Part part_of(const PartArgs& m) {
    const u32 begin = share(blockIdx.x, m.n_of_product, m.first_block), end = share(blockIdx.x + 1, m.n_of_product, m.first_block);
    const u32 t0 = min(max(begin, m.first) - m.first, m.n_tiles), t1 = min(max(end, m.first) - m.first, m.n_tiles);
    Part part;
    part.of_experts = m.n_layers > 0;
    part.from = m.records + (part.of_experts ? 0 : (size_t)t0 * m.tile_bytes);
    part.tile_bytes = m.tile_bytes;
    part.n_tiles = t1 - t0;
    part.first_tile = t0;
    part.before = min(max(begin, m.first), end) - begin;
    part.record_bytes = m.record_bytes, part.n_units = m.n_units, part.records_a_slot = m.records_a_slot;
    part.records_a_unit = m.records_a_unit, part.log_split = m.log_split, part.format = m.format;
    return part;
}

// How a step's products are shared out in a block: the columns of a tile among 2^log_split warps, tiles by turns among groups of so many.
struct Share {
    u32 group, n_groups, log_groups;
    u32 first, n; // units of a row
};
__device__ __forceinline__ Share share_of(u32 warp, u32 n_units, u32 log_split) {
    const u32 of_group = warp & ((1u << log_split) - 1), first = of_group * n_units >> log_split;
    return {warp >> log_split, (u32)WARPS >> log_split, LOG_WARPS - log_split, first, ((of_group + 1) * n_units >> log_split) - first};
}
// The first of a part's tiles that a group has.
__device__ __forceinline__ u32 first_tile_of(const Share& s, const Part& part) { return (s.group - part.before) & (s.n_groups - 1); }

__device__ __forceinline__ Part* parts_of(const DecodeArgs& a) { return (Part*)(decode_memory + a.parts_at); }
// A warp's weights lie in slots, of which each is full or empty.
__device__ __forceinline__ unsigned char* slot_of(const DecodeArgs& a, u32 warp, u32 slot) {
    return decode_memory + (warp * a.n_slots + slot) * a.slot_bytes;
}
__device__ __forceinline__ u64_t* full(const DecodeArgs& a, u32 warp, u32 slot) {
    return (u64_t*)(decode_memory + a.barriers_at) + 2 * (warp * a.n_slots + slot);
}
__device__ __forceinline__ u64_t* empty(const DecodeArgs& a, u32 warp, u32 slot) { return full(a, warp, slot) + 1; }
struct Turn {
    u32 slot, parity;
    __device__ __forceinline__ void next(u32 n_slots) {
        if (++slot == n_slots) slot = 0, parity ^= 1;
    }
};

// Where the weights of experts lie that a warp takes: records of one after those of another.
struct OfExperts {
    u32 expert_bytes, tiles, records; // as `PartArgs` has them
    u32 tile;                         // of all experts
    u32 place;                        // of the expert among those chosen
    // The first record of the tile that is the expert's.
    __device__ __forceinline__ const unsigned char* from(const Part& part, Chosen& chosen) const {
        return part.from + (size_t)chosen.expert(place) * expert_bytes + (size_t)(tile % tiles) * part.tile_bytes;
    }
};

// Asks for all weights of the tokens that warp `ring` multiplies, each lane for those of another, as soon as a slot is empty. A slot is filled with what
// the warp has of a part, whichever tiles that is of. No more than `slots_at_once` of a warp are on their way: with more of them, requests queue up
// before the memory, and the blocks' exchanges behind them. EXPERTS: whether some may be of these; whoever has none does without the instructions.
template <bool EXPERTS> __device__ __forceinline__ void ask(const DecodeArgs& a, u32 ring, int lane, Chosen& chosen) {
    const Part* parts = parts_of(a);
    const u64_t policy = read_once();
    const unsigned char *tile = nullptr, *from = nullptr;
    // The token, the part of it, records of this that are left, of a tile, of it left, and how many of these lie together.
    u32 n = 0, p = 0, left = 0, records = 0, of_tile = 0, together = 0, step = 0, bytes = 0, a_slot = 0;
    OfExperts experts = {};
    Turn turn = {0, 0}, oldest = {0, 0}; // the next to be asked for, and the first of those on their way
    u32 n_on_their_way = 0;
    bool done = ring >= WARPS;
    // Whether the lane got any further.
    auto go_on = [&] {
        bool asked = false;
        if (!done && left == 0) {
            // The next part's first tile comes after `step`.
            if (p == a.n_parts) p = 0, n++;
            if (n == a.n_tokens) {
                done = asked = true;
            } else {
                const Part& part = parts[p];
                const Share s = share_of(ring, part.n_units, part.log_split);
                const u32 first = first_tile_of(s, part);
                bytes = part.record_bytes, a_slot = part.records_a_slot, step = s.n_groups * part.tile_bytes, records = s.n * part.records_a_unit;
                tile = part.from + (size_t)first * part.tile_bytes + s.first * part.records_a_unit * bytes - step;
                const u32 n_tiles = records == 0 || first >= part.n_tiles ? 0 : (part.n_tiles - first + s.n_groups - 1) / s.n_groups;
                bool known = true;
                experts.expert_bytes = 0;
                if (EXPERTS && part.of_experts && n_tiles > 0) {
                    const PartArgs& of = a.parts[p];
                    experts = {of.expert_bytes, of.tiles_of_expert, of.records_of_expert, part.first_tile + first - s.n_groups, 0};
                    known = chosen.has(n * (a.n_layer + 1) + of.n_layers);
                }
                if (known) left = n_tiles * records, p++, asked = true;
            }
        }
        if (n_on_their_way > 0 && barrier_has_ended(full(a, ring, oldest.slot), oldest.parity)) n_on_their_way--, oldest.next(a.n_slots);
        // Before it was ever full it counts as emptied.
        if (!done && left > 0 && n_on_their_way < a.slots_at_once && barrier_has_ended(empty(a, ring, turn.slot), turn.parity ^ 1)) {
            u32 count = min(a_slot, left);
            u64_t* barrier = full(a, ring, turn.slot);
            unsigned char* to = slot_of(a, ring, turn.slot);
            barrier_arrive_expecting(barrier, count * bytes);
            left -= count;
            while (count > 0) {
                if (together == 0) {
                    const bool is_next = of_tile == 0;
                    if (is_next) tile += step, from = tile, of_tile = together = records;
                    if (EXPERTS && experts.expert_bytes != 0) {
                        u32 before = 0;
                        if (is_next) {
                            const Part& part = parts[p - 1];
                            const Share s = share_of(ring, part.n_units, part.log_split);
                            const u32 first = s.first * part.records_a_unit;
                            before = first % experts.records;
                            experts.tile += s.n_groups, experts.place = experts.tile / experts.tiles + first / experts.records;
                        } else {
                            experts.place++;
                        }
                        from = experts.from(parts[p - 1], chosen) + before * bytes, together = min(experts.records - before, of_tile);
                    }
                }
                const u32 now = min(count, together);
                copy_bulk(to, from, now * bytes, barrier, policy);
                to += now * bytes, from += now * bytes, together -= now, of_tile -= now, count -= now;
            }
            n_on_their_way++;
            turn.next(a.n_slots);
            asked = true;
        }
        return asked;
    };
    while (__any_sync(~0u, !done)) {
        bool asked = false;
        if constexpr (FOR_RACECHECK) {
            for (int of = 0; of < WARPS; of++) {
                if (of == lane) asked = go_on();
                __syncwarp();
            }
        } else {
            asked = go_on();
        }
        if (!__any_sync(~0u, asked)) rest_shortly();
    }
}

// A warp's slots, by turns.
struct Ring {
    const DecodeArgs& a;
    u32 first; // of the warp
    Turn turn;
    u32 left;   // records of the slot that are not taken yet
    u32 record; // the first of these, in the block's memory
    // Waits for some, of the `n` that the warp still has of the part.
    __device__ __forceinline__ void wait(u32 a_slot, u32 n) {
        if (left > 0) return;
        while (!barrier_try_wait(full(a, 0, first + turn.slot), turn.parity)) spin_pause();
        record = offset_of(slot_of(a, 0, first + turn.slot)), left = min(a_slot, n);
    }
    // All lanes have read `n` of so many bytes, and what goes with them.
    __device__ __forceinline__ void take(u32 n, u32 bytes) {
        record += n * bytes, left -= n;
        if (left > 0) return;
        __syncwarp();
        barrier_arrive(empty(a, 0, first + turn.slot));
        turn.next(a.n_slots);
    }
};

// The row of a step's results that the block's row `j` is, or none.
__device__ __forceinline__ u32 row_at(const Step& step, const Part* parts, u32 j) {
    u32 part = 0, before = 0;
    if (step.kind == QKV)
        while (part < 2 && j >= (parts[part].before + parts[part].n_tiles) * 16u) before += step.n_rows[part++];
    const Part& of = parts[part];
    const u32 r = (of.first_tile - of.before) * 16u + j;
    return j < (of.before + of.n_tiles) * 16u && r < step.n_rows[part] ? before + r : ~0u;
}

// Tiles that a block has of a step.
__device__ __forceinline__ u32 tiles_of(const Step& step, const Part* parts) {
    return step.kind == QKV ? parts[2].before + parts[2].n_tiles : step.kind == GATE_AND_UP ? 2u * parts[0].n_tiles : parts[0].n_tiles;
}
