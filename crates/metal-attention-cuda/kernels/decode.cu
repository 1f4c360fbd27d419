// One token through all layers in one launch: decoders of attention and gated feed-forwards, dense ones or experts.
//
// A block runs on every multiprocessor until the token is done, and has the same share of the rows of every matrix in all steps; each
// warp has some columns of these rows. What a token takes is its weights, which depend on nothing: four warps ask for them on behalf of the
// others in the order in which they will be needed, as far ahead as there is room, across layers. What blocks wait for is each other's
// results: they are exchanged through global memory in words of two values and a tag that tells the step and layer they are of, so that a word
// is its own flag (`pack_pair`), and whoever reads it looks until the tag is right. A warp looks for the inputs of its own columns and
// begins with them; only where it joins the others' sums does the block meet. Weights of experts depend on the token: those that it goes to are
// taken as one feed-forward, rows of gate and up one below the other, columns of down side by side, and are asked for when they are chosen, which
// each block does by itself. No other barrier is needed: a block writes the words of a vector
// anew only after it has read all of another vector whose writers had read this one.
//
// Where all products are small, what counts is how long a step takes from its inputs to its results: weights are made ready before (decode_ready.cuh), and
// a warp of its own ends steps, while the others make the next weights ready.
//
// The blocks have to run all at once: the launch is cooperative.
#include "code_products.cuh"
#include "decode_attention.cuh"
#include "decode_ready.cuh"
#include "element.cuh"
#include "products.cuh"
#include "rank.cuh"

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
    __device__ __forceinline__ const unsigned char* from(const Part& part, const Chosen& chosen) const {
        return part.from + (size_t)chosen.experts[place] * expert_bytes + (size_t)(tile % tiles) * part.tile_bytes;
    }
};

// Asks for all weights of the token that warp `ring` multiplies, each lane for those of another, as soon as a slot is empty. EXPERTS: whether some
// may be of these; whoever has none does without the instructions.
template <bool EXPERTS> __device__ __forceinline__ void ask(const DecodeArgs& a, u32 ring, const Chosen& chosen) {
    const Part* parts = parts_of(a);
    const unsigned char *tile = nullptr, *from = nullptr;
    // Records of a tile, those left of it, and how many of these lie together.
    u32 p = 0, tiles_left = 0, records = 0, left = 0, together = 0, step = 0, bytes = 0, a_slot = 0;
    OfExperts experts = {};
    Turn turn = {0, 0};
    bool done = ring >= WARPS;
    while (__any_sync(~0u, !done)) {
        bool asked = false;
        if (!done && left == 0 && tiles_left > 0) {
            tile += step, from = tile, left = together = records, tiles_left--;
            if (EXPERTS && experts.expert_bytes != 0) {
                const Part& part = parts[p - 1];
                const Share s = share_of(ring, part.n_units, part.log_split);
                const u32 first = s.first * part.records_a_unit, before = first % experts.records;
                experts.tile += s.n_groups, experts.place = experts.tile / experts.tiles + first / experts.records;
                from = experts.from(part, chosen) + before * bytes, together = experts.records - before;
            }
            asked = true;
        } else if (!done && left == 0) {
            // The next part's first tile comes after `step`.
            if (p == a.n_parts) {
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
                    known = *(const volatile u32*)&chosen.n_layers >= of.n_layers;
                    __threadfence_block();
                }
                if (known) tiles_left = n_tiles, p++, asked = true;
            }
        }
        // Before it was ever full it counts as emptied.
        if (!done && left > 0 && barrier_has_ended(empty(a, ring, turn.slot), turn.parity ^ 1)) {
            u32 count = min(a_slot, left);
            u64_t* barrier = full(a, ring, turn.slot);
            unsigned char* to = slot_of(a, ring, turn.slot);
            barrier_arrive_expecting(barrier, count * bytes);
            left -= count;
            while (EXPERTS && count > together) {
                if (together > 0) copy_bulk(to, from, together * bytes, barrier);
                to += together * bytes, count -= together;
                experts.place++;
                from = experts.from(parts[p - 1], chosen), together = experts.records;
            }
            copy_bulk(to, from, count * bytes, barrier);
            from += count * bytes, together -= count;
            turn.next(a.n_slots);
            asked = true;
        }
        if (!__any_sync(~0u, asked)) rest();
    }
}

// A warp chooses the experts of the token, by words of the router's products, for the block and for those who ask for their weights. `n_layers`: up to
// this one.
__device__ __forceinline__ void choose(const DecodeArgs& a, const RouteArgs& of_layer, Chosen& chosen, const u64_t* from, u32 tag, u32 n_layers, int lane) {
    RouteArgs route = of_layer;
    route.experts = chosen.experts, route.weights = chosen.weights;
    const Choice c(route.n_expert, (float*)(decode_memory + a.choice_at));
    const u32 n = route.n_expert / 2;
#pragma unroll 1
    for (u32 first = 0; first < n; first += 64) {
        u64_t words[2];
        const bool there[2] = {first + lane < n, first + 32 + lane < n};
        auto of = [&](int k) { return from + first + 32 * k + lane; };
        ask_for_words(words, there, of);
        wait_for_words(words, there, tag, of);
#pragma unroll
        for (int k = 0; k < 2; k++)
            if (there[k]) *(float2*)(c.scores + 2 * (first + 32 * k + lane)) = unpack_pair(words[k]);
    }
    __syncwarp();
    make_scores(route, c, lane);
#pragma unroll 1
    for (u32 i = 0; i < route.n_used; i++) {
        const Best best = take_best(c.choice, c.taken, route.n_expert, lane);
        if (lane == 0) chosen.experts[i] = best.at, chosen.weights[i] = c.scores[best.at];
    }
    __syncwarp();
    write_weights_together(route, chosen.experts, chosen.weights, 0, lane);
    __threadfence_block();
    __syncwarp();
    if (lane == 0) *(volatile u32*)&chosen.n_layers = n_layers;
}

// What a warp adds up of a tile: products of codes, or of floats.
template <u32 FORMAT> struct Tile {
    typedef Codes<FORMAT> P;
    const float *factors, *sums;
    Digits digits;
    float acc[2] = {}, mins[2] = {};
    __device__ __forceinline__ Tile(unsigned char* memory, u32 n_panels, float, const unsigned char* zeros, int lane) {
        const CodeInput input(memory, n_panels);
        digits = digits_of<P::SUBS>(input.digits, nullptr, zeros, lane), factors = input.factors, sums = input.sums;
    }
    __device__ __forceinline__ void add(const P& p, u32 panel, int lane) {
        code_products(p, panel, digits, factors, lane, acc);
        if (P::MINS) take_mins(p, panel, sums, mins);
    }
    __device__ __forceinline__ void finish(float* to, int lane) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const float y = row_sum<P>(acc[row], lane) - mins[row];
            if (lane % 4 == 0) to[lane / 4 + 8 * row] = y;
            acc[row] = 0.0f, mins[row] = 0.0f;
        }
    }
};
template <u32 FORMAT> struct FloatTile {
    typedef Staged<FORMAT> P;
    const unsigned char* input;
    u32 n_blocks;
    float factor;
    float acc[4] = {};
    __device__ __forceinline__ FloatTile(unsigned char* memory, u32 n_panels, float factor, const unsigned char*, int)
        : input(memory), n_blocks(2 * n_panels), factor(factor) {}
    __device__ __forceinline__ void add(const P& p, u32 panel, int lane) { panel_products<P, 1>(p, panel, n_blocks, input, nullptr, lane, acc); }
    __device__ __forceinline__ void finish(float* to, int lane) {
        if (lane % 4 == 0) {
            to[lane / 4] = (acc[0] + acc[1] * (1.0f / 2048.0f)) * factor;
            to[lane / 4 + 8] = (acc[2] + acc[3] * (1.0f / 2048.0f)) * factor;
        }
#pragma unroll
        for (int k = 0; k < 4; k++) acc[k] = 0.0f;
    }
};
template <> struct Tile<F16> : FloatTile<F16> {
    using FloatTile<F16>::FloatTile;
};
template <> struct Tile<F32> : FloatTile<F32> {
    using FloatTile<F32>::FloatTile;
};

// A warp's slots, by turns.
struct Ring {
    const DecodeArgs& a;
    u32 first; // of the warp
    Turn turn;
    __device__ __forceinline__ const unsigned char* wait() const {
        while (!barrier_try_wait(full(a, 0, first + turn.slot), turn.parity)) spin_pause();
        return slot_of(a, 0, first + turn.slot);
    }
    // All lanes have read the slot.
    __device__ __forceinline__ void next(int lane) {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty(a, 0, first + turn.slot));
        turn.next(a.n_slots);
    }
};

// Adds the products with RECORDS records, of which several panels are read before the first is multiplied.
template <u32 FORMAT, int RECORDS> __device__ __forceinline__ void add_records(Tile<FORMAT>& tile, const unsigned char* record, u32 panel, int lane) {
    typedef Record<FORMAT> R;
    constexpr int PANELS = R::PANELS * RECORDS, AT_ONCE = PANELS < 4 ? PANELS : R::PANELS == 1 ? 4 : 2;
#pragma unroll
    for (int q = 0; q < PANELS; q += AT_ONCE) {
        typename Tile<FORMAT>::P p[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            p[k].read(Place<FORMAT>(record + (q + k) / R::PANELS * R::BYTES, (q + k) % R::PANELS), lane);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) tile.add(p[k], panel + q + k, lane);
    }
}

// The warp's sums over its columns of a part, to where the step's lie. `memory`, `factor`: of its inputs.
template <u32 FORMAT>
__device__ __forceinline__ void products(const Part& part, const Share& share, unsigned char* memory, float factor, const unsigned char* zeros,
                                         float* to, Ring& ring, int lane) {
    typedef Record<FORMAT> R;
    const u32 n_records = share.n * part.records_a_unit, a_slot = part.records_a_slot, n_tiles = part.n_tiles, before = part.before;
    Tile<FORMAT> tile(memory, n_records * R::PANELS, factor, zeros, lane);
#pragma unroll 1
    for (u32 t = first_tile_of(share, part); t < n_tiles; t += share.n_groups) {
#pragma unroll 1
        for (u32 r = 0; r < n_records;) {
            const u32 n = min(a_slot, n_records - r);
            const unsigned char* record = ring.wait();
            u32 i = 0;
            if (R::PANELS == 1) {
#pragma unroll 1
                for (; i + 4 <= n; i += 4) add_records<FORMAT, 4>(tile, record + i * R::BYTES, r + i, lane);
                if (i + 2 <= n) add_records<FORMAT, 2>(tile, record + i * R::BYTES, r + i, lane), i += 2;
                if (i < n) add_records<FORMAT, 1>(tile, record + i * R::BYTES, r + i, lane);
            } else {
#pragma unroll 1
                for (; i < n; i++) add_records<FORMAT, 1>(tile, record + i * R::BYTES, (r + i) * R::PANELS, lane);
            }
            r += n;
            ring.next(lane);
        }
        tile.finish(to + ((before + t) >> share.log_groups) * 16, lane);
    }
}

// Row `row` of the block's rows of a step, summed over the warps that have its columns.
__device__ __forceinline__ float sum_of(const float* sums, u32 stride, u32 log_split, u32 row) {
    const u32 tile = row / 16, log_groups = LOG_WARPS - log_split, group = tile & ((1u << log_groups) - 1);
    const float* from = sums + (group << log_split) * stride + (tile >> log_groups) * 16 + row % 16;
    float v[WARPS];
#pragma unroll
    for (u32 k = 0; k < WARPS; k++) v[k] = k >> log_split == 0 ? from[k * stride] : 0.0f;
#pragma unroll
    for (int d = 1; d < WARPS; d *= 2)
#pragma unroll
        for (int k = 0; k < WARPS; k += 2 * d) v[k] += v[k + d];
    return v[0];
}

__device__ __forceinline__ float power_of_two(int e) { return __uint_as_float((u32)(e + 127) << 23); }

// Inputs of a warp's products with floats: quads that lie in place, of which the lanes have seen the largest, go to where they are as
// halves, hi and lo. What products are to be multiplied by.
__device__ __forceinline__ float finish_floats(float4* inputs, float most, u32 n_panels, int lane) {
    most = warp_max(most);
    // Of numbers too small to have one, and of infinity, none is needed.
    const int bits_of = (__float_as_uint(most) >> 23) - 127, exponent = bits_of > -100 && bits_of < 100 ? bits_of : 0;
    const float up = power_of_two(13 - exponent);
    // Eight lanes have the 32 elements of a block, which take as much room before and after.
    const u32 n = n_panels * 16;
    for (u32 i = lane; i < (n + 31) / 32 * 32; i += 32) {
        const float4 v = i < n ? inputs[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float e[4] = {v.x * up, v.y * up, v.z * up, v.w * up};
        half hi[4], lo[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            hi[k] = __float2half_rn(e[k]);
            lo[k] = __float2half_rn((e[k] - __half2float(hi[k])) * 2048.0f);
        }
        __syncwarp();
        if (i >= n) continue;
        unsigned char* to = (unsigned char*)inputs + i / 8 * 128 + 2 * place_in_block(i % 8 * 4);
        *(uint2*)to = make_uint2(bits(__halves2half2(hi[0], hi[1])), bits(__halves2half2(hi[2], hi[3])));
        *(uint2*)(to + 64) = make_uint2(bits(__halves2half2(lo[0], lo[1])), bits(__halves2half2(lo[2], lo[3])));
    }
    return power_of_two(exponent - 13);
}

__device__ __forceinline__ float squares_of(const float4& v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
__device__ __forceinline__ float most_of(const float4& v) { return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))); }

// The row of a step's results that the block's row `j` is, or none.
__device__ __forceinline__ u32 row_at(const Step& step, const Part* parts, u32 j) {
    u32 part = 0, before = 0;
    if (step.kind == QKV)
        while (part < 2 && j >= (parts[part].before + parts[part].n_tiles) * 16u) before += step.n_rows[part++];
    const Part& of = parts[part];
    const u32 r = (of.first_tile - of.before) * 16u + j;
    return j < (of.before + of.n_tiles) * 16u && r < step.n_rows[part] ? before + r : ~0u;
}

// Ends a step's row of results, row `j` of the block's: adds it to the residual stream, where it is one of its rows, and tells all blocks. Lanes side by
// side have rows side by side, `row` or none, and all take part.
__device__ __forceinline__ void put_row(const Layer& l, const Step& step, float* residual, u32 j, u32 row, float y, u32 tag) {
    const bool is_there = row != ~0u;
    if (step.kind == ATTENTION_OUTPUT || step.kind == DOWN) {
        y = (is_there ? residual[j] : 0.0f) + l.scale * y;
        if (is_there) residual[j] = y;
    }
    const float next_row = __shfl_down_sync(~0u, y, 1);
    if (is_there && row % 2 == 0) store_words(step.to + row / 2, pack_pair(y, next_row, tag), step.copies, step.n_out / 2);
}
// What rows are multiplied by for the sake of their input's norm, from the squares that warps have seen.
__device__ __forceinline__ float rms_of(const Step& step, const float* squares) {
    const float4 x = *(const float4*)squares, y = *(const float4*)(squares + 4);
    return rsqrtf((((x.x + x.y) + (x.z + x.w)) + ((y.x + y.y) + (y.z + y.w))) * step.reciprocal + step.eps);
}

// Where a warp's inputs of a step go, as they come: pairs of quads, one of each half of a block of 32 inputs, of which four lanes have one.
struct Inputs {
    CodeInput codes;
    float4* floats;
    u32 n_blocks;
    bool has_codes;
    float squares = 0.0f, most = 0.0f;
    __device__ __forceinline__ Inputs(unsigned char* memory, u32 n_panels, bool has_codes)
        : codes(memory, n_panels), floats((float4*)memory), n_blocks(2 * n_panels), has_codes(has_codes) {}
    // Of block `lane / 4` of eight after block `first`. `norm`: whether inputs are multiplied by `weights`.
    __device__ __forceinline__ void put(u32 first, float4 (&v)[2], bool norm, const float4 (&weights)[2], int lane) {
        const u32 block = first + lane / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            squares += squares_of(v[h]);
            if (norm) multiply(v[h], weights[h]);
        }
        if (has_codes) {
            put_digits(codes, block, lane % 4, v[0], v[1], block < n_blocks);
        } else if (block < n_blocks) {
#pragma unroll
            for (int h = 0; h < 2; h++) floats[block * 8 + lane % 4 + 4 * h] = v[h], most = fmaxf(most, most_of(v[h]));
        }
    }
};

// Takes 8 N blocks of inputs from words of an exchange. `from`: of the lane's first quad; `n`: quads from there on that there are. `norm`: the same of
// weights, or null.
template <int N> __device__ __forceinline__ void take_words(Inputs& inputs, u32 first, const ulonglong2* from, const float4* norm, u32 n, u32 tag, int lane) {
    ulonglong2 words[2 * N];
    float4 weights[N][2];
    bool there[2 * N];
#pragma unroll
    for (int k = 0; k < 2 * N; k++) there[k] = (k / 2 * 64 + k % 2 * 4 < n) & (first + k / 2 * 8 + lane / 4 < inputs.n_blocks);
    auto of = [&](int k) { return from + k / 2 * 64 + k % 2 * 4; };
    ask_for_words(words, there, of);
#pragma unroll
    for (int k = 0; k < 2 * N; k++) {
        weights[k / 2][k % 2] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (norm && there[k]) weights[k / 2][k % 2] = norm[k / 2 * 64 + k % 2 * 4];
    }
    wait_for_words(words, there, tag, of);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float4 v[2];
#pragma unroll
        for (int h = 0; h < 2; h++) v[h] = there[2 * i + h] ? unpack(words[2 * i + h]) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        inputs.put(first + 8 * i, v, norm != nullptr, weights[i], lane);
    }
}

// Tiles that a block has of a step.
__device__ __forceinline__ u32 tiles_of(const Step& step, const Part* parts) {
    return step.kind == QKV ? parts[2].before + parts[2].n_tiles : step.kind == GATE_AND_UP ? 2u * parts[0].n_tiles : parts[0].n_tiles;
}

// How many steps of small products the block has ended. Before a warp says that its sums are there, those of the step before have to be known to be: of
// inputs of a few heads, or of no columns, it could have more before others have any.
__device__ __forceinline__ void wait_for_end(const u32& n_ended, u32 n) {
    while (*(const volatile u32*)&n_ended != n) spin_pause();
}

// A step of small products: a warp makes its weights ready before the inputs are there. `n_arrived`: steps before it, of which the block has ended
// `n_ended`.
__device__ __forceinline__ void ready_step(const DecodeArgs& a, const Layer& l, const Step& step, const Part* parts, u32 n_splits, u32 tag, u32 copy,
                                           const unsigned char* zeros, Ring& ring, const u32& n_ended, u32 n_arrived, int warp, int lane) {
    const u32 kind = step.kind, n4 = step.n_in / 4, n_tiles = tiles_of(step, parts), wanted = (tag + step.tag_in) & TAG;
    const Share mine = share_of(warp, step.n_units, LOG_WARPS);
    const u32 n_panels = mine.n * step.unit;
    const bool two = step.ready_tiles == 2;
    const CodeInput input(decode_memory + a.input_at + warp * a.input_stride, n_panels);
    // Four lanes take a block of 32 inputs, of whose halves each has a quad.
    const u32 block = lane / 4, quad = mine.first * step.unit * 16 + block * 8 + lane % 4;
    const bool in_row = block < 2 * n_panels, there[2] = {in_row && quad < n4, in_row && quad + 4 < n4};
    float4 v[2], weights[2];
#pragma unroll
    for (int h = 0; h < 2; h++) weights[h] = step.norm && there[h] ? ((const float4*)step.norm)[quad + 4 * h] : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    const ulonglong2* from = step.from + copy * n4 + quad;

    ReadyHalf ready[2] = {};
    const unsigned char* record = nullptr;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        const u32 tile = two ? h : 0, first = two ? 0 : h * READY_HALF;
        if (tile < n_tiles && n_panels > 0) {
            u32 p = kind == GATE_AND_UP ? tile : 0;
            if (kind == QKV)
                while (p < 2 && tile >= (u32)parts[p].before + parts[p].n_tiles) p++;
            if (two || h == 0) record = ring.wait();
            if (first < n_panels) WITH_CODES(parts[p].format, (ready[h].read<FORMAT>(record, first, n_panels, lane)));
            if (two || h == 1) ring.next(lane);
        }
        ready[h].place(input, first, tile < n_tiles ? n_panels : 0, zeros, lane);
    }
    u32 sums = a.regions_at[step.region] + (lane / 4 * READY_STRIDE + 2 * warp + lane % 4) * 4;
    settle(sums);
    wait_for_end(n_ended, n_arrived);

    if (kind == ATTENTION_OUTPUT) {
        joined_splits(l, n_splits, a.att + copy * a.att_words, a.sums + copy * a.sums_words, quad, in_row ? n4 : 0, tag, v);
    } else {
        ulonglong2 words[2];
        auto of = [&](int h) { return from + 4 * h; };
        ask_for_words(words, there, of);
        wait_for_words(words, there, wanted, of);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            v[h] = there[h] ? unpack(words[h]) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            multiply(v[h], weights[h]);
        }
    }
    put_digits(input, block, lane % 4, v[0], v[1], in_row);
    __syncwarp();
    float y[2][2] = {};
    if (two || n_panels > READY_HALF) {
        if (n_panels > 1) ready_products<2, 2>(ready, y);
        else ready_products<2, 1>(ready, y);
    } else {
        if (n_panels > 1) ready_products<1, 2>(ready, y);
        else ready_products<1, 1>(ready, y);
    }
    const float of_digits = lane % 2 == 0 ? 256.0f : 1.0f / 256.0f;
#pragma unroll
    for (int h = 0; h < 2; h++) y[h][0] *= of_digits, y[h][1] *= of_digits;
    const bool of_halves = ready[0].of_halves || ready[1].of_halves;
    if (of_halves || ready[0].has_mins || ready[1].has_mins) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            ready[h].take_offsets(lane % 4, y[h]);
#pragma unroll
            for (int row = 0; row < 2; row++) y[h][row] += __shfl_xor_sync(~0u, y[h][row], 2);
        }
    }
    if (lane % 4 < 2) {
        float* const to = (float*)(decode_memory + sums);
        to[0] = two ? y[0][0] : y[0][0] + y[1][0], to[8 * READY_STRIDE] = two ? y[0][1] : y[0][1] + y[1][1];
        if (two) to[16 * READY_STRIDE] = y[1][0], to[24 * READY_STRIDE] = y[1][1];
    }
    sums_are_ready();
}

// What a warp of its own does meanwhile, and after it: rows of the results of all steps of small products.
__device__ __forceinline__ void finish_steps(const DecodeArgs& a, float* residual, u32& n_ended, int lane) {
    u32 tag = a.tag;
    const u32 copy = blockIdx.x % COPIES;
#pragma unroll 1
    for (u32 i = 0; i < a.n_layer; i++) {
        const Layer& l = a.layers[i];
#pragma unroll 1
        for (u32 s = 0; s < l.n_steps; s++) {
            const Step& step = l.steps[s];
            const Part* parts = parts_of(a) + step.first_part;
            // The first step is not among them.
            if (tiles_of(step, parts) == 0 || (i == 0 && s == 0)) continue;
            const u32 kind = step.kind, row = row_at(step, parts, lane), n4 = step.n_in / 4, wanted = (tag + step.tag_in) & TAG, activation = l.activation;
            const u32 n_copies = step.copies, of_copy = step.n_out / 2, tag_out = (tag + step.tag_out) & TAG;
            const bool is_there = row != ~0u, adds = kind == ATTENTION_OUTPUT || kind == DOWN, writes = is_there && row % 2 == 0;
            const float bias = step.bias && is_there ? step.bias[row] : 0.0f, scale = adds ? l.scale : 1.0f, limit = l.activation_limit;
            u64_t* const to = step.to + row / 2;
            const float* const sums = (const float*)(decode_memory + a.regions_at[step.region]);
            float rms = 1.0f;
            if (step.norm) {
                const float reciprocal = step.reciprocal, eps = step.eps;
                const ulonglong2* from = step.from + copy * n4;
                // One word is looked for, so as to be in nobody's way, until it is there: the others come with it.
                while (!is_since(load_exchanged(from + blockIdx.x % n4), wanted)) rest_shortly();
                float squares = 0.0f;
                constexpr int N = 5;
#pragma unroll 1
                for (u32 first = lane; first < n4 + lane; first += 32 * N) {
                    ulonglong2 words[N];
                    bool there[N];
#pragma unroll
                    for (int k = 0; k < N; k++) there[k] = first + 32 * k < n4;
                    auto of = [&](int k) { return from + first + 32 * k; };
                    ask_for_words(words, there, of);
                    wait_for_words(words, there, wanted, of);
#pragma unroll
                    for (int k = 0; k < N; k++)
                        if (there[k]) squares += squares_of(unpack(words[k]));
                }
                rms = rsqrtf(warp_sum(squares) * reciprocal + eps);
            }
            wait_for_sums();
            if (lane == 0) *(volatile u32*)&n_ended = n_ended + 1;
            // Other threads of the block have put the first of these there.
            const float before = adds && is_there ? residual[lane] : 0.0f;
            float y = rms * ready_sum(sums, lane);
            if (kind == GATE_AND_UP) {
                const float up = __shfl_down_sync(~0u, y, 16);
                y = activation == SILU ? activate(SILU, y) * up : gated(activation, limit, y, up);
            }
            y = before + scale * (y + bias);
            const float next_row = __shfl_down_sync(~0u, y, 1);
            if (writes) store_words(to, pack_pair(y, next_row, tag_out), n_copies, of_copy);
            if (adds && is_there) residual[lane] = y;
        }
        tag = (tag + 2) & TAG;
    }
}

// C: times 64 elements of a head. SMALL: whether all products of layers are small.
template <int C, bool SMALL> __device__ __forceinline__ void decode(const DecodeArgs& a) {
    __shared__ __align__(16) Layer layers[2];
    __shared__ __align__(16) float squares_of_warps[2][WARPS]; // of the inputs, of steps by turns
    __shared__ u64_t best_of_warps[WARPS];
    __shared__ Token token;
    __shared__ Chosen chosen;
    __shared__ u32 n_ended;
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    constexpr int LAYER_WORDS = sizeof(Layer) / 16;
    float* residual = (float*)(decode_memory + a.residual_at);

    // They lie behind the barriers.
    unsigned char* zeros = (unsigned char*)full(a, WARPS, 0);
    if (tid < 16) zeros[tid] = 0;
    for (u32 i = tid; i < 2 * WARPS * a.n_slots; i += ALL_THREADS) barrier_init(full(a, 0, 0) + i, 1);
    barriers_are_ready();
    for (u32 i = tid; i < a.n_parts; i += ALL_THREADS) parts_of(a)[i] = part_of(a.parts[i]);
    for (u32 i = tid; i < LAYER_WORDS; i += ALL_THREADS) ((uint4*)layers)[i] = ((const uint4*)a.layers)[i];
    if (tid == 0) token = *a.token, chosen.n_layers = 0, n_ended = 0;
    const u32 of_pos = a.token->pos;
    for (u32 i = tid; i < a.n_layer; i += ALL_THREADS) spans_of(a)[i] = span_of(a.layers[i], of_pos);
    __syncthreads();
    if (warp >= WARPS) {
        give_registers<SMALL ? 72 : 40>();
        constexpr int N = SMALL ? ASKERS - 1 : ASKERS;
        const u32 ring = warp - WARPS + N * lane;
        if (SMALL && warp == WARPS + N) finish_steps(a, residual, n_ended, lane);
        else if (!SMALL && a.has_experts) ask<true>(a, ring, chosen);
        else ask<false>(a, ring, chosen);
        return;
    }
    take_registers<SMALL ? 216 : 232>();

    u64_t best = 0;
    Ahead asked = {0, 0};
    u32 tag = a.tag, n_arrived = 0;
    const u32 copy = blockIdx.x % COPIES;
    Ring ring = {a, warp * a.n_slots, {0, 0}};
#pragma unroll 1
    for (u32 i = 0; i <= a.n_layer; i++) {
        const Layer& l = layers[i % 2];
#pragma unroll 1
        for (u32 s = 0; s < l.n_steps; s++) {
            // What follows from these is found anew: kept for all steps it would take the registers of what is needed in one.
            asm volatile("" : "+r"(tid), "+r"(warp), "+r"(lane));
            const Step& step = l.steps[s];
            const u32 kind = step.kind;
            best = 0;
            const Part* parts = parts_of(a) + step.first_part;
            if (kind == QKV) asked = ask_for_heads(a, l, spans_of(a)[i], token.pos, token.seq, tid);
            if (kind == ATTENTION_OUTPUT) {
                attention<C>(a, l, spans_of(a)[i], asked, i == 0, token.pos, token.seq, tag, (float*)(decode_memory + a.input_at));
                // The next layer's description comes meanwhile, in place of that of the last one, which all warps are done with.
                all_meet();
                for (u32 j = tid; j < LAYER_WORDS; j += THREADS) copy16((uint4*)&layers[(i + 1) % 2] + j, (const uint4*)(a.layers + i + 1) + j);
                commit_copies();
            }
            if (kind == DOWN) wait_for_copies<0>();
            const u32 n_rows = (kind == QKV ? parts[2].before + parts[2].n_tiles : parts[0].n_tiles) * 16;
            // The first step puts the embedding to the residual stream, also of blocks that have no other rows of it.
            const bool is_first = i == 0 && kind == QKV;
            // Whoever has rows of gate and up, or columns' sums of down, has to know the experts, and is waited for.
            const bool of_experts = !SMALL && kind == GATE_AND_UP && l.route.n_expert > 0;
            if (of_experts && warp == WARPS - 1 && (parts[0].n_tiles > 0 || parts[2].n_tiles > 0)) {
                const Step& router = l.steps[s - 1];
                choose(a, l.route, chosen, router.to + copy * (router.n_out / 2), tag, i + 1, lane);
            }
            const u32 wanted = (tag + step.tag_in) & TAG, n4 = step.n_in / 4;
            // Whoever has no rows need not wait. Words of attention are written by who has read queries of the same layer: by then all have read those
            // of the layer before, from which the residual stream is that these are from.
            if (n_rows == 0 && !is_first) {
                all_meet();
                continue;
            }
            if (SMALL && kind != HEAD && !is_first) {
                if (kind == DOWN) all_meet();
                ready_step(a, l, step, parts, spans_of(a)[i].n_splits, tag, copy, zeros, ring, n_ended, n_arrived++, warp, lane);
                continue;
            }
            // What the end of the step needs is at hand before the input is there.
            const u32 first_row = row_at(step, parts, tid), log_split = step.log_split;
            const float first_bias = step.bias && first_row != ~0u ? step.bias[first_row] : 0.0f;
            const float4* norm = (const float4*)step.norm;
            const Share mine = share_of(warp, step.n_units, log_split);
            const u32 n_panels = mine.n * step.unit;
            unsigned char* memory = decode_memory + a.input_at + warp * a.input_stride;
            Inputs inputs(memory, n_panels, step.has_codes);
            // Four lanes take a block of 32 inputs, of whose halves each has a quad.
            const u32 first_quad = mine.first * step.unit * 16 + lane / 4 * 8 + lane % 4;
            if (kind == ATTENTION_OUTPUT) {
#pragma unroll 1
                for (u32 first = 0; first < inputs.n_blocks; first += 8) {
                    float4 v[2], weights[2];
                    joined_splits(l, spans_of(a)[i].n_splits, a.att + copy * a.att_words, a.sums + copy * a.sums_words, first_quad + 8 * first,
                                  first + lane / 4 < inputs.n_blocks ? n4 : 0, tag, v);
                    inputs.put(first, v, false, weights, lane);
                }
            } else if (is_first) {
                // The embedding.
                const u32 x_tiles = (a.n_embd + 15) / 16, first_block = gridDim.x - min(x_tiles, gridDim.x);
                const u32 first_tile = share(blockIdx.x, x_tiles, first_block), last_tile = share(blockIdx.x + 1, x_tiles, first_block);
#pragma unroll 1
                for (u32 first = 0; first < inputs.n_blocks; first += 8) {
                    float4 v[2] = {}, weights[2];
                    const u32 k = first_quad + 8 * first;
                    const bool in_row = first + lane / 4 < inputs.n_blocks;
                    if (in_row && k < n4) WITH_PANEL(a.table.format, (elements_of<P>(a.table, token.id, k / 8, k % 8, v)));
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const u32 of = k + 4 * h;
                        const bool is_there = in_row && of < n4;
                        const float scale = is_there ? a.embedding_scale : 0.0f;
                        v[h].x *= scale, v[h].y *= scale, v[h].z *= scale, v[h].w *= scale;
                        weights[h] = is_there ? norm[of] : v[h];
                        if (is_there && of / 4 >= first_tile && of / 4 < last_tile) *(float4*)(residual + 4 * of - first_tile * 16) = v[h];
                    }
                    __syncwarp();
                    inputs.put(first, v, true, weights, lane);
                }
            } else {
                const ulonglong2* from = step.from + copy * n4 + first_quad;
                const u32 n = n4 > first_quad ? n4 - first_quad : 0;
                u32 first = 0;
#pragma unroll 1
                for (; first + 8 < inputs.n_blocks; first += 32)
                    take_words<4>(inputs, first, from + 8 * first, norm ? norm + first_quad + 8 * first : nullptr, n > 8 * first ? n - 8 * first : 0, wanted, lane);
                if (first < inputs.n_blocks)
                    take_words<1>(inputs, first, from + 8 * first, norm ? norm + first_quad + 8 * first : nullptr, n > 8 * first ? n - 8 * first : 0, wanted, lane);
            }
            __syncwarp();
            const float factor = inputs.has_codes ? 1.0f : finish_floats(inputs.floats, inputs.most, n_panels, lane);
            if (norm) {
                const float squares = warp_sum(inputs.squares);
                if (lane == 0) squares_of_warps[step.region][warp] = mine.group == 0 ? squares : 0.0f;
            }
            __syncwarp();

            const u32 stride = kind == HEAD ? a.head_stride : a.stride;
            float* sums = (float*)(decode_memory + a.regions_at[step.region]);
#pragma unroll 1
            for (u32 p = 0; p < step.n_parts; p++) {
                if (parts[p].n_tiles == 0) continue;
                float* to = sums + (kind == GATE_AND_UP ? p * a.region_floats : 0) + warp * stride;
                WITH_FORMAT(parts[p].format, (products<FORMAT>(parts[p], mine, memory, factor, zeros, to, ring, lane)));
            }
            all_meet();

            if (tid / 32 * 32 < (int)n_rows) {
                const float rms = norm ? rms_of(step, squares_of_warps[step.region]) : 1.0f;
                // Every thread of a warp takes part, for the sake of pairs.
#pragma unroll 1
                for (u32 j = tid; j < (n_rows + 31) / 32 * 32; j += THREADS) {
                    const u32 row = j == (u32)tid ? first_row : row_at(step, parts, j);
                    const bool is_there = row != ~0u;
                    const float bias = j == (u32)tid ? first_bias : step.bias && is_there ? step.bias[row] : 0.0f;
                    const u32 of = is_there ? j : 0;
                    float y = rms * sum_of(sums, stride, log_split, of);
                    if (kind == HEAD) {
                        if (!is_there) continue;
                        y = (y + bias) * a.logit_scale;
                        if (a.logit_cap != 0.0f) y = a.logit_cap * tanhf(y / a.logit_cap);
                        if (a.logits) a.logits[row] = y;
                        const u64_t rank = rank_of(y, row);
                        best = rank > best ? rank : best;
                        continue;
                    }
                    if (kind == GATE_AND_UP) {
                        float up = rms * sum_of(sums + a.region_floats, stride, log_split, of), weight = 1.0f;
                        if (of_experts) {
                            const u32 n_ff = step.n_out / l.route.n_used, place = is_there ? row / n_ff : 0;
                            const size_t at = (size_t)chosen.experts[place] * n_ff + (is_there ? row % n_ff : 0);
                            if (l.expert_bias[0]) y += l.expert_bias[0][at];
                            if (l.expert_bias[1]) up += l.expert_bias[1][at];
                            weight = chosen.weights[place];
                        }
                        y = weight * gated(l.activation, l.activation_limit, y, up);
                    }
                    if (kind == DOWN && l.expert_bias[2] && is_there)
                        for (u32 k = 0; k < l.route.n_used; k++) y += chosen.weights[k] * l.expert_bias[2][(size_t)chosen.experts[k] * step.n_out + row];
                    put_row(l, step, residual, j, row, y + bias, (tag + step.tag_out) & TAG);
                }
            }
        }
        tag = (tag + 2) & TAG;
    }

    // The highest logit.
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        const u64_t other = __shfl_xor_sync(~0u, best, d);
        best = other > best ? other : best;
    }
    if (lane == 0) best_of_warps[warp] = best;
    all_meet();
    if (warp != 0) return;
    best = best_of_warps[lane % WARPS];
#pragma unroll
    for (int d = WARPS / 2; d > 0; d /= 2) {
        const u64_t other = __shfl_xor_sync(~0u, best, d);
        best = other > best ? other : best;
    }
    // The first block hears those of all. The row, of which there are at most 2^20, lies above the tag.
    if (lane == 0) store_exchanged(a.best + blockIdx.x, (best & 0xffffffff00000000ull) | (u32)best << 12 | tag);
    if (blockIdx.x != 0) return;
    best = 0;
#pragma unroll 1
    for (u32 first = lane; first < gridDim.x + lane; first += 32) {
        u64_t words[1];
        const bool there[1] = {first < gridDim.x};
        auto of = [&](int) { return a.best + first; };
        ask_for_words(words, there, of);
        wait_for_words(words, there, tag, of);
        if (there[0] && words[0] > best) best = words[0];
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        const u64_t other = __shfl_xor_sync(~0u, best, d);
        best = other > best ? other : best;
    }
    if (lane != 0) return;
    // All NaN: the first.
    const u32 id = best >> 32 == 0 ? 0 : 0xfffffu - ((u32)best >> 12);
    *a.ids = id;
    if (a.advance) {
        a.token->id = id;
        a.token->pos = token.pos + 1;
    }
}

// Of heads of up to 64, 128, 256 elements.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) decode_64(const __grid_constant__ DecodeArgs a) { decode<1, false>(a); }
extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) decode_128(const __grid_constant__ DecodeArgs a) { decode<2, false>(a); }
extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) decode_256(const __grid_constant__ DecodeArgs a) { decode<4, false>(a); }
extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) decode_small_64(const __grid_constant__ DecodeArgs a) { decode<1, true>(a); }
