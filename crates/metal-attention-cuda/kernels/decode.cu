// Tokens through all layers in one launch, each chosen by the one before: decoders of attention and gated feed-forwards, dense ones or experts.
//
// A block runs on every multiprocessor until they are done, and has the same share of the rows of every matrix in all steps; each
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
#include "decode_attention.cuh"
#include "decode_products.cuh"
#include "decode_ready.cuh"
#include "decode_weights.cuh"
#include "element.cuh"
#include "exchange.cuh"
#include "rank.cuh"

// A warp chooses the experts of the token, by words of the router's products, for the block and for those who ask for their weights. `n_layers`: of all
// tokens up to this one.
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
    chosen.tell(n_layers, route.n_used, lane);
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

__device__ __forceinline__ float most_of(const float4& v) { return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))); }

// What a card that shares a model has of it, and how it exchanges parts with the others: as `DecodeOnCardsArgs` of src/decode/args.rs has it. Each has some of the
// columns of attention's output and of down, of all layers, and some rows of the head.
struct OnCards {
    Exchange exchange;
    u32 first_row; // of the head
    u32 unused;
};
// Exchanges of a token: two a layer, and what each card has chosen.
__device__ __forceinline__ u32 exchanges_of_token(const DecodeArgs& a) { return 2 * a.n_layer + 1; }

// What ends a step's rows: known before their sums are there, as all blocks wait for what is done after.
struct Ending {
    u64_t* to;
    u32 copies, of_copy, tag, activation;
    float limit, scale;
    bool adds; // to the residual stream
    __device__ __forceinline__ Ending(const Layer& l, const Step& step, u32 tag)
        : to(step.to), copies(step.copies), of_copy(step.n_out / 2), tag((tag + step.tag_out) & TAG), activation(l.activation), limit(l.activation_limit),
          scale(l.scale), adds(step.kind == ATTENTION_OUTPUT || step.kind == DOWN) {}
    // What is added to a row, `row` or none, from this card's part of it, or what is no part as it is.
    __device__ __forceinline__ float of_all_cards(const OnCards* cards, u32 n_exchanges, u32 row, float y) const {
        return adds && row != ~0u ? exchanged_sum(cards->exchange, n_exchanges, row, y) : y;
    }
    // Tells all blocks of a row, `row` or none, by words from `at` on, and keeps it at `residual`, where `before` was, if it is one of the residual stream.
    // Lanes side by side have rows side by side, and all take part.
    __device__ __forceinline__ void put(u32 row, u64_t* at, float y, float before, float* residual) const {
        const bool is_there = row != ~0u;
        if (adds) {
            y = before + scale * y;
            if (is_there) *residual = y;
        }
        const float next_row = __shfl_down_sync(~0u, y, 1);
        if (is_there && row % 2 == 0) store_words(at, pack_pair(y, next_row, tag), copies, of_copy);
    }
};
// What rows are multiplied by for the sake of their input's norm, from the squares that warps have seen: these lie behind the sums of the first two rows.
__device__ __forceinline__ u32 place_of_squares(u32 warp) { return warp / 4 * SUMS_STRIDE + WARPS + warp % 4; }
__device__ __forceinline__ float rms_of(const float* sums, float reciprocal, float eps) {
    static_assert(WARPS == 8 && SUMS_STRIDE >= WARPS + 4, "four behind each row");
    const float4 x = *(const float4*)(sums + place_of_squares(0)), y = *(const float4*)(sums + place_of_squares(4));
    return rsqrtf((((x.x + x.y) + (x.z + x.w)) + ((y.x + y.y) + (y.z + y.w))) * reciprocal + eps);
}

// Where a warp's inputs of a step go, as they come: pairs of quads, one of each half of a block of 32 inputs, of which four lanes have one.
struct Inputs {
    CodeInput codes;
    float4* floats;
    u32 n_blocks;
    bool has_codes, with_sums;
    float squares = 0.0f, most = 0.0f;
    __device__ __forceinline__ Inputs(unsigned char* memory, u32 n_panels, const Step& step)
        : codes(memory, n_panels), floats((float4*)memory), n_blocks(2 * n_panels), has_codes(step.has_codes), with_sums(step.has_offsets) {}
    // Of block `lane / 4` of the eight from block `first` on, and of the N - 1 times eight after them. `weights`: of a norm, or ones.
    template <int N> __device__ __forceinline__ void put(u32 first, float4 (&v)[N][2], const float4 (&weights)[N][2], int lane) {
        const u32 block = first + lane / 4;
        bool is_there[N];
#pragma unroll
        for (int i = 0; i < N; i++) is_there[i] = block + 8 * i < n_blocks;
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) squares += squares_of(v[i][h]), multiply(v[i][h], weights[i][h]);
        if (has_codes) {
            put_digits<N>(codes, block, lane % 4, v, is_there, with_sums);
        } else {
#pragma unroll
            for (int i = 0; i < N; i++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    if (is_there[i]) floats[(block + 8 * i) * 8 + lane % 4 + 4 * h] = v[i][h], most = fmaxf(most, most_of(v[i][h]));
        }
    }
};
constexpr float4 ONES = {1.0f, 1.0f, 1.0f, 1.0f};

// Takes 8 N blocks of inputs from words of an exchange. `from`: of the lane's first quad; `n`: quads from there on that there are. `norm`: the same of
// weights, or null.
template <int N> __device__ __forceinline__ void take_words(Inputs& inputs, u32 first, const ulonglong2* from, const float4* norm, u32 n, u32 tag, int lane) {
    ulonglong2 words[2 * N];
    float4 v[N][2], weights[N][2];
    bool there[2 * N];
#pragma unroll
    for (int k = 0; k < 2 * N; k++) there[k] = ((u32)(k / 2 * 64 + k % 2 * 4) < n) & (first + k / 2 * 8 + lane / 4 < inputs.n_blocks);
    auto of = [&](int k) { return from + k / 2 * 64 + k % 2 * 4; };
    ask_for_words(words, there, of);
#pragma unroll
    for (int k = 0; k < 2 * N; k++) {
        weights[k / 2][k % 2] = ONES;
        if (norm && there[k]) weights[k / 2][k % 2] = norm[k / 2 * 64 + k % 2 * 4];
    }
    wait_for_words(words, there, tag, of);
    // Words that are not there are zeros.
#pragma unroll
    for (int k = 0; k < 2 * N; k++) v[k / 2][k % 2] = unpack(words[k]);
    inputs.put<N>(first, v, weights, lane);
}

__device__ __forceinline__ void find_spans(const DecodeArgs& a, u32 pos, int tid, int n_threads) {
    for (u32 i = tid; i < a.n_layer; i += n_threads) spans_of(a)[i] = span_of(a.layers[i], pos, a.split_gain);
}

// The highest rank of all blocks, the row above a tag.
__device__ __forceinline__ u64_t highest_of_blocks(const u64_t* words_of_blocks, u32 tag, int lane) {
    u64_t best = 0;
#pragma unroll 1
    for (u32 first = lane; first < gridDim.x + lane; first += 32) {
        u64_t words[1];
        const bool there[1] = {first < gridDim.x};
        auto of = [&](int) { return words_of_blocks + first; };
        ask_for_words(words, there, of);
        wait_for_words(words, there, tag, of);
        if (there[0] && words[0] > best) best = words[0];
    }
    return highest_of_lanes(best);
}
// The same of all cards, of which each has the one of its own blocks; one of these tells it. Words have a place behind those of rows, as some blocks read them when
// others are at rows of the next token.
__device__ __forceinline__ u64_t highest_of_cards(const Exchange& e, u32 n_exchanges, u64_t own, bool tells, int lane) {
    own &= ~(u64_t)TAG;
    const u32 at = e.n_words - 2;
    if (tells && lane < 2) send(e, n_exchanges, at + lane, __uint_as_float(lane == 0 ? (u32)(own >> 32) : (u32)own));
    u64_t best = own;
    if (lane < (int)e.n_cards && lane != (int)e.rank) {
        const u32 high = __float_as_uint(receive(e, n_exchanges, lane, at)), low = __float_as_uint(receive(e, n_exchanges, lane, at + 1));
        best = (u64_t)high << 32 | low;
    }
    return highest_of_lanes(best > own ? best : own);
}
// The row of such a rank; where all are NaN the first.
__device__ __forceinline__ u32 row_of_rank(u64_t rank) { return rank >> 32 == 0 ? 0 : 0xfffffu - ((u32)rank >> 12); }

// C: times 64 elements of a head. SMALL: whether all products of layers are small. EXPERTS: whether layers may have experts, in whose way the others
// would be. ON_CARDS: whether the model is shared by several, of which `cards` tells.
template <int C, bool SMALL, bool EXPERTS, bool ON_CARDS = false> __device__ __forceinline__ void decode(const DecodeArgs& a, const OnCards* cards = nullptr) {
    static_assert(!SMALL || !ON_CARDS, "small products gain nothing there");
    __shared__ __align__(16) Layer layers[2];
    __shared__ u64_t best_of_warps[WARPS];
    __shared__ Work works[WARPS][3]; // of a step's parts
    __shared__ Token token;
    __shared__ Chosen chosen;
    __shared__ u32 n_done;  // tokens
    __shared__ StepEnds ends;
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    constexpr int LAYER_WORDS = sizeof(Layer) / 16;
    float* residual = (float*)(decode_memory + a.residual_at);

    // They lie behind the barriers.
    unsigned char* zeros = (unsigned char*)full(a, WARPS, 0);
    if (tid < 16) zeros[tid] = 0;
    for (u32 i = tid; i < 2 * WARPS * a.n_slots; i += ALL_THREADS) barrier_init(full(a, 0, 0) + i, i % 2 == 0 ? 1 : 32);
    if (tid == 0) ends.init();
    barriers_are_ready();
    for (u32 i = tid; i < a.n_parts; i += ALL_THREADS) parts_of(a)[i] = part_of(a.parts[i]);
    for (u32 i = tid; i < LAYER_WORDS; i += ALL_THREADS) ((uint4*)layers)[i] = ((const uint4*)a.layers)[i];
    if (tid == 0) token = *a.token, chosen.n_layers = 0, n_done = 0;
    __shared__ u32 first_exchange; // of the token
    if constexpr (ON_CARDS)
        if (tid == 0) first_exchange = number_of(cards->exchange, 0);
    find_spans(a, a.token->pos, tid, ALL_THREADS);
    __syncthreads();
    if (warp >= WARPS) {
        give_registers<SMALL ? 72 : 40>();
        constexpr int N = SMALL ? ASKERS - 1 : ASKERS;
        const u32 ring = warp - WARPS + N * lane;
        if (SMALL && warp == WARPS + N) finish_steps(a, residual, ends, lane);
        else ask<EXPERTS>(a, ring, lane, chosen);
        return;
    }
    take_registers<SMALL ? 216 : 232>();

    Ahead asked = {0, 0};
    u32 tag = a.tag, n_arrived = 0, place = 0; // where the layer's description lies
    const u32 copy = blockIdx.x % COPIES;
    Ring ring = {a, warp * a.n_slots, {0, 0}, 0, 0};
#pragma unroll 1
    for (u32 i = 0;; i++) {
        const Layer& l = layers[place];
        u64_t best = 0; // of the head's step; nothing before, which would take registers of others
#pragma unroll 1
        for (u32 s = 0; s < l.n_steps; s++) {
            // What follows from these is found anew: kept for all steps it would take the registers of what is needed in one.
            asm volatile("" : "+r"(tid), "+r"(warp), "+r"(lane));
            ring.left = 0; // no slot is of two steps
            const Step& step = l.steps[s];
            const u32 kind = step.kind;
            best = 0;
            const Part* parts = parts_of(a) + step.first_part;
            if (kind == QKV) asked = ask_for_heads(a, l, spans_of(a)[i], token.pos, token.seq, tid);
            if (kind == ATTENTION_OUTPUT) {
                attention<C>(a, l, spans_of(a)[i], asked, i == 0, token.pos, token.seq, tag, (float*)(decode_memory + a.input_at));
                // The next layer's description comes meanwhile, in place of that of the last one, which all warps are done with.
                all_meet();
                for (u32 j = tid; j < LAYER_WORDS; j += THREADS) copy16((uint4*)&layers[place ^ 1] + j, (const uint4*)(a.layers + i + 1) + j);
                commit_copies();
            }
            if (kind == DOWN) wait_for_copies<0>();
            const u32 n_rows = (kind == QKV ? parts[2].before + parts[2].n_tiles : parts[0].n_tiles) * 16;
            // The first step puts the embedding to the residual stream, also of blocks that have no other rows of it.
            const bool is_first = i == 0 && kind == QKV;
            // Whoever has rows of gate and up, or columns' sums of down, has to know the experts, and is waited for.
            const bool of_experts = EXPERTS && kind == GATE_AND_UP && l.route.n_expert > 0;
            if (of_experts && warp == WARPS - 1 && (parts[0].n_tiles > 0 || parts[2].n_tiles > 0)) {
                const Step& router = l.steps[s - 1];
                choose(a, l.route, chosen, router.to + copy * (router.n_out / 2), tag, n_done * (a.n_layer + 1) + i + 1, lane);
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
                ready_step(a, l, step, parts, spans_of(a)[i].n_splits, tag, copy, zeros, ring, ends, n_arrived++, warp, lane);
                continue;
            }
            // Before inputs and sums of this step take the place of those of small products.
            if (SMALL) ends.wait_for_end(n_arrived), __syncwarp();
            // What the end of the step needs is at hand before the input is there.
            const u32 first_row = row_at(step, parts, tid), log_split = step.log_split, log_groups = LOG_WARPS - log_split;
            const float first_bias = step.bias && first_row != ~0u ? step.bias[first_row] : 0.0f;
            const Ending ending(l, step, tag);
            const float first_before = ending.adds && first_row != ~0u ? residual[tid] : 0.0f, reciprocal = step.reciprocal, eps = step.eps;
            u64_t* first_to = ending.to + first_row / 2;
            settle(first_to);
            const float4* norm = (const float4*)step.norm;
            const Share mine = share_of(warp, step.n_units, log_split);
            const u32 n_panels = mine.n * step.unit;
            unsigned char* memory = decode_memory + a.input_at + warp * a.input_stride;
            Inputs inputs(memory, n_panels, step);
            const Columns columns(inputs.codes, zeros, lane);
            if (lane < (int)step.n_parts) works[warp][lane] = work_of(parts[lane], mine, warp, kind == GATE_AND_UP ? lane * a.region_floats : 0);
            // Four lanes take a block of 32 inputs, of whose halves each has a quad.
            const u32 first_quad = mine.first * step.unit * 16 + lane / 4 * 8 + lane % 4;
            if (kind == ATTENTION_OUTPUT) {
#pragma unroll 1
                for (u32 first = 0; first < inputs.n_blocks; first += 8) {
                    float4 v[1][2];
                    const u64_t *att = a.att + copy * a.att_words, *sums = a.sums + copy * a.sums_words;
                    const u32 n_splits = spans_of(a)[i].n_splits, from = first_quad + 8 * first, n = first + lane / 4 < inputs.n_blocks ? n4 : 0;
                    if (l.head_dim % 32 == 0) joined_splits<2, true>(l, n_splits, att, sums, from, n, tag, v[0]);
                    else joined_splits<2, false>(l, n_splits, att, sums, from, n, tag, v[0]);
                    inputs.put<1>(first, v, {{ONES, ONES}}, lane);
                }
            } else if (is_first) {
                // The embedding.
                const u32 x_tiles = (a.n_embd + 15) / 16, first_block = gridDim.x - min(x_tiles, gridDim.x);
                const u32 first_tile = share(blockIdx.x, x_tiles, first_block), last_tile = share(blockIdx.x + 1, x_tiles, first_block);
#pragma unroll 1
                for (u32 first = 0; first < inputs.n_blocks; first += 8) {
                    float4 v[1][2] = {}, weights[1][2];
                    const u32 k = first_quad + 8 * first;
                    const bool in_row = first + lane / 4 < inputs.n_blocks;
                    if (in_row && k < n4) WITH_PANEL(a.table.format, (elements_of<P>(a.table, token.id, k / 8, k % 8, v[0])));
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const u32 of = k + 4 * h;
                        const bool is_there = in_row && of < n4;
                        const float scale = is_there ? a.embedding_scale : 0.0f;
                        float4& x = v[0][h];
                        x.x *= scale, x.y *= scale, x.z *= scale, x.w *= scale;
                        weights[0][h] = is_there ? norm[of] : x;
                        if (is_there && of / 4 >= first_tile && of / 4 < last_tile) *(float4*)(residual + 4 * of - first_tile * 16) = x;
                    }
                    __syncwarp();
                    inputs.put<1>(first, v, weights, lane);
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
            float* const of_step = (float*)(decode_memory + a.regions_at[step.region]);
            const float factor = inputs.has_codes ? 1.0f : finish_floats(inputs.floats, inputs.most, n_panels, lane);
            if (norm) {
                const float squares = warp_sum(inputs.squares);
                if (lane == 0) of_step[place_of_squares(warp)] = mine.group == 0 ? squares : 0.0f;
            }
            __syncwarp();

            // The head's rows, which are many, are done by rounds, whose sums have the places of steps by turns.
            const u32 a_group = kind == HEAD ? HEAD_TILES : ~0u, a_round = kind == HEAD ? HEAD_TILES * 16 << log_groups : n_rows, n_parts = step.n_parts;
            u32 begin = 0, region = step.region;
            do {
                float* sums = (float*)(decode_memory + a.regions_at[region]);
#pragma unroll 1
                for (u32 p = 0; p < n_parts; p++) {
                    const Work work = works[warp][p];
                    if (work.n_tiles == 0) continue;
                    WITH_FORMAT(work.format, (products<FORMAT, !SMALL>(work, begin / 16 >> log_groups, a_group, columns, memory, factor, sums, ring, lane)));
                }
                all_meet();

                const u32 n = min(n_rows - begin, a_round);
                if ((u32)tid / 32 * 32 < n) {
                    const float of_squares = rms_of(of_step, reciprocal, eps), rms = norm ? of_squares : 1.0f;
                    // Every thread of a warp takes part, for the sake of pairs.
#pragma unroll 1
                    for (u32 of_round = (u32)tid; of_round < (n + 31) / 32 * 32; of_round += THREADS) {
                        const u32 j = begin + of_round;
                        const bool is_first = j == (u32)tid;
                        const u32 row = is_first ? first_row : row_at(step, parts, j);
                        const bool is_there = row != ~0u;
                        const float bias = is_first ? first_bias : step.bias && is_there ? step.bias[row] : 0.0f;
                        const float* of_row = sums + (is_there ? of_round : 0) * SUMS_STRIDE;
                        float y = rms * sum_of_warps(of_row, log_split);
                        if (kind == HEAD) {
                            if (!is_there) continue;
                            y = (y + bias) * a.logit_scale;
                            if (a.logit_cap != 0.0f) y = a.logit_cap * tanhf(y / a.logit_cap);
                            const u32 of_all = ON_CARDS ? cards->first_row + row : row;
                            if (a.logits) a.logits[of_all] = y;
                            const u64_t rank = rank_of(y, of_all);
                            best = rank > best ? rank : best;
                            continue;
                        }
                        if (kind == GATE_AND_UP) {
                            float up = rms * sum_of_warps(of_row + a.region_floats, log_split), weight = 1.0f;
                            if (of_experts) {
                                const u32 n_ff = step.n_out / l.route.n_used, place = is_there ? row / n_ff : 0;
                                const size_t at = (size_t)chosen.experts[place] * n_ff + (is_there ? row % n_ff : 0);
                                if (l.expert_bias[0]) y += l.expert_bias[0][at];
                                if (l.expert_bias[1]) up += l.expert_bias[1][at];
                                weight = chosen.weights[place];
                            }
                            y = weight * (ending.activation == SILU ? activate(SILU, y) * up : gated(ending.activation, ending.limit, y, up));
                        }
                        if (EXPERTS && kind == DOWN && l.expert_bias[2] && is_there)
                            for (u32 k = 0; k < l.route.n_used; k++) y += chosen.weights[k] * l.expert_bias[2][(size_t)chosen.experts[k] * step.n_out + row];
                        const float before = is_first ? first_before : ending.adds && is_there ? residual[j] : 0.0f;
                        y += bias;
                        if constexpr (ON_CARDS) y = ending.of_all_cards(cards, first_exchange + 2 * i + (kind == DOWN), row, y);
                        ending.put(row, is_first ? first_to : ending.to + row / 2, y, before, residual + j);
                    }
                }
                begin += a_round, region ^= 1;
            } while (begin < n_rows);
        }
        tag = (tag + 2) & TAG, place ^= 1;
        if (i < a.n_layer) continue;

        // The token is done, the next one what all blocks' highest logit is of: only the first block has to know what the last one is.
        best = highest_of_lanes(best);
        if (lane == 0) best_of_warps[warp] = best;
        const bool is_last = n_done + 1 == a.n_tokens;
        const u32 next_pos = token.pos + 1;
        all_meet();
        if (is_last && warp != 0) return;
        if (!is_last) {
            // What does not depend on it is made ready meanwhile.
            for (u32 j = tid; j < LAYER_WORDS; j += THREADS) copy16((uint4*)&layers[place] + j, (const uint4*)a.layers + j);
            commit_copies();
            if (warp != 0) find_spans(a, next_pos, tid - 32, THREADS - 32);
        }
        if (warp == 0) {
            best = highest_of_lanes(best_of_warps[lane % WARPS]);
            // Keys and values that the block has written go before it. The row, of which there are at most 2^20, lies above the tag.
            __threadfence();
            // Who has no rows may be done with the next token before others have read this one's words, which are in one place and the other by turns for that.
            u64_t* const all = a.best + n_done % 2 * gridDim.x;
            if (lane == 0) store_exchanged(all + blockIdx.x, (best & 0xffffffff00000000ull) | (u32)best << 12 | tag);
            if (is_last && blockIdx.x != 0) return;
            u64_t highest = highest_of_blocks(all, tag, lane);
            if constexpr (ON_CARDS) highest = highest_of_cards(cards->exchange, first_exchange + 2 * a.n_layer, highest, blockIdx.x == 0, lane);
            const u32 id = row_of_rank(highest);
            __threadfence();
            if (lane == 0) {
                if (blockIdx.x == 0) tell_id(a.ids, 0, a.number + n_done, id);
                token.id = id, token.pos = next_pos, n_done++;
                if (is_last && a.advance) *a.token = token;
                if constexpr (ON_CARDS) {
                    first_exchange += exchanges_of_token(a);
                    // All blocks of this card have read it.
                    if (is_last) *cards->exchange.before = first_exchange;
                }
            }
        }
        wait_for_copies<0>();
        if (is_last) return;
        // Until steps are ended, rows of the residual stream are not the next token's.
        if (SMALL) all_meet_who_ends();
        else all_meet();
        i = ~0u;
    }
}

// Those of several cards take the template.
#ifndef TEMPLATES_ALONE
#define DECODE(NAME, C, SMALL, EXPERTS)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) NAME(const __grid_constant__ DecodeArgs a) { decode<C, SMALL, EXPERTS>(a); }
// Of heads of up to 64, 128, 256 elements.
DECODE(decode_64, 1, false, false)
DECODE(decode_128, 2, false, false)
DECODE(decode_256, 4, false, false)
DECODE(decode_small_64, 1, true, false)
DECODE(decode_experts_128, 2, false, true)
DECODE(decode_experts_256, 4, false, true)
#endif
