// The GEMV kernels (`matvec_1` to `matvec_4`, for matrix times vector): y = W f(x) for one to four tokens. W is one matrix, up to three matrices
// one below the other, or a feed-forward's gate and up; f is the identity or an RMSNorm. The results are stored, added to the residual stream, or
// gated. Products are about as exact as in F32, and sums are in F32. With quantised weights inputs are rounded by at most 2^-22 of the largest
// magnitude among 32 of them; with F16 and F32 weights inputs, and the F32 weights, are two F16 parts.
//
// Terms of this file ("block" alone is the thread block):
//   quant block   quantisation block: 32 neighbouring columns of a row, or the 32 inputs that meet them
//   tile          16 rows of a matrix
//   panel         64 columns of a tile: two quant blocks of each row
//   record        codes and scales of one to four neighbouring panels of a tile, contiguous in memory (formats.cuh)
//   stage         one buffer of a warp's ring of weights in shared memory: one to four records of one tile (`RingStage`)
//   code          the integer of a quantised weight
//   format        a weight layout (`Format` of formats.cuh). F16 and F32 have no codes. The tensor types Q4_0, Q8_0, Q4_K, Q5_K and Q6_K have a
//                 format each; all other quantised ones are stored as 8-bit codes, in CODES or, with mins, CODES_AND_MINS
//   mins          offsets that some formats subtract: weight = scale * code - min. They need the sums of the inputs
//   quad          four neighbouring inputs. Four lanes share the eight quads of a quant block: lane t of the four has quads t and t + 4
//   digit         one of three signed 8-bit integers that stand for an input in products with codes (code_products.cuh). In products with F16
//                 and F32 weights an input is two F16 parts instead, hi + lo / 2048 (products.cuh)
//   branch        here: which of the two matrices of GATED, 0 gate or 1 up; otherwise there is only branch 0
//   round         the 8 / warps_per_tile tiles that the eight warps of a block multiply at the same time; `warps_per_tile` warps share the columns
//                 of each tile (split-K within the block)
//   partial sum   a warp's sum over its columns of one row, for one token
//
// `LinearOp` and `gemv` of src/runner/linear.rs launch the kernels. `matvec_share` has four sections. A warp goes through the first two once, then
// through the others for each of its tiles:
//   stream        requests the first stages: asynchronous copies of the warp's own records to its ring, before the input is there
//   prologue      warps with the same columns load x [n_tokens][n_in], apply the norm's weights, and store digits or F16 parts to shared memory
//   main loop     waits for a stage, requests a further one, and multiplies; the partial sums are in registers, then in shared memory
//   epilogue      adds the partial sums of the warps of the tile; 1 / RMS, bias, residual or gate; stores to y [n_tokens][n_out]
//
// Fragments of the tensor-core products, m16n8k32 of 8-bit integers for codes, m16n8k16 of F16 otherwise (ptx.cuh). Lane l of a warp has g = l / 4
// and t = l % 4. The result of a product has 16 rows, those of the tile, and eight columns; a lane has four elements of it, c[0] to c[3]:
//
//                      column  0 1     2 3     4 5     6 7
//   row g      (0 to 7)        t = 0   t = 1   t = 2   t = 3      c[0], c[1] of lanes 4 g + t
//   row g + 8  (8 to 15)       t = 0   t = 1   t = 2   t = 3      c[2], c[3] of lanes 4 g + t
//
// A column of a product (not of W) belongs to one token: D0, D1, D2 are the digits of its inputs, D0 the highest; columns 3 and 7 are zeros. One
// product has room for two tokens with codes, for one where each half of a quant block has a scale, so that the halves need sums of their own, and
// for four with F16 and F32. All tokens together have N_PRODUCTS products; i counts them:
//
//                   column of product  0    1    2    3    4    5    6    7
//   codes, one scale per quant block   D0   D1   D2   0    D0   D1   D2   0     product i: left token 2 i, right token 2 i + 1, or zeros
//   codes, a scale for each half       D0   D1   D2   0    D0   D1   D2   0     product i: token i, left first halves, right second halves
//   F16 and F32                        hi   lo   hi   lo   hi   lo   hi   lo    a single product: tokens 0, 1, 2, 3
//
// So with codes the lanes with t of 0 and 2 have the terms of D0 and D1, those with t of 1 and 3 that of D2; `row_sum` adds them.
//
// Shared memory of a block, in this order (`gemv_shared_bytes` of src/runner/linear.rs counts it):
//   [WARPS][RING_BYTES]                     the warps' rings of records
//   [WARPS][16]                             zeros, which lanes of columns without digits read
//   [TOKENS][WARPS] floats                  sums of squares of the inputs that each warp has converted
//   [2][2][WARPS][TOKENS][16] floats        partial sums: [buffer][branch][warp][token][row of the tile]; a block's rounds alternate buffers
//   Accumulators::bytes(n_panels)           the inputs of all tokens as digits or F16 parts
//
// Preconditions, of which none is checked:
//   - compute capability 8.0 or later
//   - a block has 32 * WARPS threads, and the dynamic shared memory drawn above, for that of its matrices' formats which needs most. Gate and up
//     have one format; other matrices of one launch may have different ones
//   - there are exactly TOKENS tokens
//   - y does not overlap x: blocks store rows of y while others still read x
//   - no kernel in flight writes `matrices` or `norm`, which are read before `wait_for_input`
//   - those at the fields of `MatvecArgs`
#include "code_products.cuh"
#include "products.cuh"

// The use of a result, which is W f(x) + bias. STORE: y = result; ADD: y += scale * result; GATED, without a bias: y = activation(gate) * up.
enum Output : u32 { STORE = 0, ADD = 1, GATED = 2 };
constexpr int MAX_MATRICES = 3; // of a product
constexpr int WARPS = 8;        // of a block
// Named barriers of the warps that share a tile: this one and those after it, one for each tile of a round.
constexpr u32 FIRST_TILE_BARRIER = 1;

struct MatvecArgs {
    // The matrices, one below the other. `n_panels` >= n_in / 64, padded to whole records with elements of 0 (repack.cu); `records` is aligned to
    // 16 bytes; `first_row` is the row of the result at which the matrix begins (`Matrix` of formats.cuh). GATED: gate and up, with the same format
    // and shape.
    Matrix matrices[MAX_MATRICES];
    u32 n_matrices;               // how many
    // Of each matrix the block after its last one: matrix i has blocks block_ends[i - 1] (0 for i = 0) to block_ends[i] - 1, at least one, and the
    // last of the n_matrices ends is gridDim.x. A matrix may have more blocks than rounds: the surplus ones do nothing. Unused by GATED, where all
    // blocks have rows of both.
    u32 block_ends[MAX_MATRICES];
    u32 n_in;                  // elements of a row of x, a multiple of 4
    u32 n_out;                 // elements of a row of y: the distance from one token's results to the next one's
    u32 warps_per_tile;        // warps that share the columns of a tile: 1, 2, 4 or 8
    u32 output;                // Output
    u32 activation;            // GATED: Activation, without a parameter (`fuses_activation` of src/parts/dense.rs)
    float eps;                 // of the norm
    float scale;               // ADD: factor on the result
    u32 unused;                // padding: pointers are aligned to 8 bytes
    const float* x;            // rows of n_in inputs, aligned to 16 bytes
    const float* norm;         // [n_in] weights of the RMSNorm, aligned to 16 bytes; null: no norm
    const float* bias;         // [n_out]; null: none. Ignored by GATED, which the host does not use with a bias
    float* y;                  // [n_tokens][n_out]; token i has row i. ADD reads it, too
    const u32* rows;           // [n_tokens] the row of x of each token; null: row i for token i. Concerns x only
};
ASSERT_LAYOUT(MatvecArgs);

// Bytes of a warp's ring of records, at least. Mirrored in src/runner/linear.rs (`gemv_shared_bytes`).
constexpr int MIN_RING_BYTES = 7168;

// A stage of a warp's ring: RECORDS neighbouring records of a tile, BYTES in all. Quantised formats whose records have a single panel (576 to 1536
// bytes) have several in a stage, so that stages of all quantised formats have some 2 or 3 KB, and warps wait for copies about equally often. A
// ring has STAGES stages: as many as fit into MIN_RING_BYTES, but at least two. RING_BYTES is more than MIN_RING_BYTES only where two stages need
// more (F32: two records of 4096 bytes).
template <u32 F> struct RingStage {
    static constexpr int RECORDS = F == Q4_0 ? 4 : F == Q8_0 || F == CODES || F == CODES_AND_MINS ? 2 : 1;
    static constexpr int BYTES = RECORDS * Record<F>::BYTES;
    static constexpr int STAGES = MIN_RING_BYTES / BYTES > 2 ? MIN_RING_BYTES / BYTES : 2;
    static constexpr int RING_BYTES = STAGES * BYTES > MIN_RING_BYTES ? STAGES * BYTES : MIN_RING_BYTES;
    // The lanes of a warp copy `n` bytes together, a multiple of 16, 512 bytes at a time. With RECORDS == 1 n is always BYTES: then only the last
    // copy needs a test, if it has fewer than 512 bytes.
    static __device__ __forceinline__ void copy(unsigned char* to, const unsigned char* from, int n, int lane) {
#pragma unroll
        for (int i = 0; i < BYTES; i += 512)
            if ((RECORDS == 1 && i + 512 <= BYTES) || i + lane * 16 < n) copy16(to + i + lane * 16, from + i + lane * 16);
    }
};

// Static members: the block's inputs in shared memory, as digits or F16 parts. Other members: one lane's part of a warp's accumulators for one
// tile. This version is for formats with codes; the columns of its products are drawn at the top.
//   PanelWeights                 the weights of a panel in a lane's registers
//   acc[i][k]                    of product i: the lane's terms of row g + 8 k, for the token `token_of(i, lane)`
//   mins[i][k]                   of the same row and token: the sum of min times sum of inputs, complete in each lane; `finish` subtracts it
//   factors[i], input_sums[i]    of that token: for each quant block the factor of its digits, and the sums of its inputs (`CodeInput`)
//   bytes                        shared memory for the inputs of all tokens
//   put                          stores the lane's two quads of a quant block, if it `exists`; `t`: lane % 4. All lanes of the warp call it
//   add                          adds the products of one panel
//   finish                       stores the warp's partial sums of the tile, [TOKENS][16], and clears the accumulators
template <u32 FORMAT, int TOKENS> struct Accumulators {
    typedef Codes<FORMAT> PanelWeights;
    // A product has the digits of two tokens side by side; with a scale for each half, those of both halves of the quant blocks of one token.
    static constexpr int TOKENS_PER_PRODUCT = PanelWeights::SCALES_PER_QUANT_BLOCK == 1 ? 2 : 1;
    static constexpr int N_PRODUCTS = (TOKENS + TOKENS_PER_PRODUCT - 1) / TOKENS_PER_PRODUCT; // for all tokens
    static __device__ __forceinline__ u32 bytes_of_token(u32 n_panels) { return (input_bytes(n_panels) + 15) / 16 * 16; }
    static __device__ __forceinline__ u32 bytes(u32 n_panels) { return TOKENS * bytes_of_token(n_panels); }
    static __device__ __forceinline__ CodeInput input_of(unsigned char* memory, u32 n_panels, u32 token) {
        return CodeInput(memory + token * bytes_of_token(n_panels), n_panels);
    }
    static __device__ __forceinline__ void put(unsigned char* memory, u32 n_panels, int token, u32 quant_block, int t, const float4 (&v)[2],
                                               bool exists) {
        store_digits<1>(input_of(memory, n_panels, token), quant_block, t, {{v[0], v[1]}}, {exists}, PanelWeights::MINS);
    }
    static __device__ __forceinline__ int token_of(int i, int lane) { return TOKENS_PER_PRODUCT == 2 ? 2 * i + lane % 4 / 2 : i; }

    Digits digits[N_PRODUCTS];
    const float *factors[N_PRODUCTS], *input_sums[N_PRODUCTS];
    float acc[N_PRODUCTS][2], mins[N_PRODUCTS][2];
    __device__ __forceinline__ Accumulators(unsigned char* memory, u32 n_panels, const unsigned char* zeros, int lane) {
#pragma unroll
        for (int i = 0; i < N_PRODUCTS; i++) {
            // Null for a second token that does not exist: `digits_of` takes zeros for it. With a scale for each half it does not use `second`.
            auto digits_of_token = [&](int token) { return token < TOKENS ? input_of(memory, n_panels, token).digits : nullptr; };
            const unsigned char *first = digits_of_token(TOKENS_PER_PRODUCT * i), *second = digits_of_token(TOKENS_PER_PRODUCT * i + 1);
            digits[i] = digits_of<PanelWeights::SCALES_PER_QUANT_BLOCK>(first, second, zeros, lane);
            // Lanes of a token that does not exist multiply zeros, and `finish` does not store their sums: any token's factors will do.
            const CodeInput input = input_of(memory, n_panels, min(token_of(i, lane), TOKENS - 1));
            factors[i] = input.factors, input_sums[i] = input.sums;
        }
        clear();
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < N_PRODUCTS; i++)
#pragma unroll
            for (int k = 0; k < 2; k++) acc[i][k] = mins[i][k] = 0.0f;
    }
    __device__ __forceinline__ void add(const PanelWeights& p, u32 panel, int lane) {
#pragma unroll
        for (int i = 0; i < N_PRODUCTS; i++) {
            code_products(p, panel, digits[i], factors[i], lane, acc[i]);
            if (PanelWeights::MINS) add_mins(p, panel, input_sums[i], mins[i]);
        }
    }
    __device__ __forceinline__ void finish(float* to, int lane) {
#pragma unroll
        for (int i = 0; i < N_PRODUCTS; i++) {
            const int token = token_of(i, lane);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                // `row_sum` gives the sum of row g + 8 k to all of the row's lanes of this token; the first of them stores it.
                const float y = row_sum<PanelWeights>(acc[i][k], lane) - mins[i][k];
                if (lane % (4 / TOKENS_PER_PRODUCT) == 0 && token < TOKENS) to[token * 16 + lane / 4 + 8 * k] = y;
            }
        }
        clear();
    }
};
// This version is for F16 and F32 weights. `acc`: for token t = lane % 4, complete in the lane: the sums of row g with hi parts and with lo parts of
// the inputs, then those of row g + 8. `factors`: [token][quant block] of the F16 parts.
template <u32 FORMAT, int TOKENS> struct FloatAccumulators {
    typedef Staged<FORMAT> PanelWeights;
    // Of each quant block 32 inputs as two F16 parts, 32 * 2 * 2 = 128 bytes, and a factor, 4 bytes.
    static __device__ __forceinline__ u32 bytes(u32 n_panels) { return TOKENS * n_panels * 2 * (128 + 4); }
    static __device__ __forceinline__ float* factors_of(unsigned char* memory, u32 n_panels) {
        return (float*)(memory + TOKENS * n_panels * 2 * 128);
    }
    static __device__ __forceinline__ void put(unsigned char* memory, u32 n_panels, int token, u32 quant_block, int t, const float4 (&v)[2],
                                               bool exists) {
        store_f16_parts(memory, factors_of(memory, n_panels), token * n_panels * 2 + quant_block, t, v[0], v[1], exists);
    }
    const unsigned char* input;
    const float* factors;
    u32 n_quant_blocks;
    float acc[4];
    __device__ __forceinline__ FloatAccumulators(unsigned char* memory, u32 n_panels, const unsigned char*, int)
        : input(memory), factors(factors_of(memory, n_panels)), n_quant_blocks(2 * n_panels) {
        clear();
    }
    __device__ __forceinline__ void clear() { acc[0] = acc[1] = acc[2] = acc[3] = 0.0f; }
    __device__ __forceinline__ void add(const PanelWeights& p, u32 panel, int lane) {
        panel_products<PanelWeights, TOKENS>(p, panel, n_quant_blocks, input, factors, lane, acc);
    }
    __device__ __forceinline__ void finish(float* to, int lane) {
        const int g = lane / 4, token = lane % 4;
        if (token < TOKENS) {
            to[token * 16 + g] = acc[0] + acc[1] * (1.0f / 2048.0f);
            to[token * 16 + g + 8] = acc[2] + acc[3] * (1.0f / 2048.0f);
        }
        clear();
    }
};
template <int TOKENS> struct Accumulators<F16, TOKENS> : FloatAccumulators<F16, TOKENS> {
    using FloatAccumulators<F16, TOKENS>::FloatAccumulators;
};
template <int TOKENS> struct Accumulators<F32, TOKENS> : FloatAccumulators<F32, TOKENS> {
    using FloatAccumulators<F32, TOKENS>::FloatAccumulators;
};

// Computes one block's share of y = W f(x): the rounds `block_of_matrix`, block_of_matrix + n_blocks_of_matrix, ... of `first_matrix`, or of the pair
// of gate and up (`second_matrix` is up; not read otherwise). `block_of_matrix`, `n_blocks_of_matrix`: index of the block among the blocks of the
// matrix, and their number. All threads of the block call it.
template <u32 FORMAT, int TOKENS>
__device__ __forceinline__ void matvec_share(const MatvecArgs& a, const Matrix& first_matrix, const Matrix& second_matrix, u32 block_of_matrix,
                                            u32 n_blocks_of_matrix) {
    typedef Record<FORMAT> RecordType;
    typedef RingStage<FORMAT> Stage;
    typedef Accumulators<FORMAT, TOKENS> TileAccumulators;
    static_assert(Stage::RECORDS == 1 || RecordType::PANELS == 1, "indices of records are indices of panels where a stage has several records");
    SHARED_MEMORY(128, unsigned char, memory);
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const u32 n_panels = first_matrix.n_panels, n_rows = first_matrix.n_rows, n_in4 = a.n_in / 4;
    unsigned char* ring = memory + warp * Stage::RING_BYTES;
    unsigned char* zeros = memory + WARPS * Stage::RING_BYTES + warp * 16;
    float* squares_of_warps = (float*)(memory + WARPS * (Stage::RING_BYTES + 16));
    // Successive rounds of the block use two buffers alternately, so that one barrier a round is enough.
    float* partial_sums = squares_of_warps + TOKENS * WARPS;
    constexpr u32 BRANCH_FLOATS = WARPS * TOKENS * 16;
    unsigned char* input = (unsigned char*)(partial_sums + 4 * BRANCH_FLOATS);
    if (lane < 4) ((u32*)zeros)[lane] = 0;

    // The warp's records: `warps_per_tile` warps divide those of a tile; this one has records `first` to `end` - 1. `tile_in_round`: the warp's
    // tile in the round; `warp_in_tile`: its index among the warps of that tile.
    const bool gated = a.output == GATED;
    const u32 n_branches = gated ? 2 : 1, warps_per_tile = a.warps_per_tile, tiles_at_once = WARPS / warps_per_tile;
    const u32 tile_in_round = warp / warps_per_tile, warp_in_tile = warp % warps_per_tile;
    const u32 n_records = n_panels / RecordType::PANELS;
    const u32 first = warp_in_tile * n_records / warps_per_tile, end = (warp_in_tile + 1) * n_records / warps_per_tile;
    const u32 n_tiles = (n_rows + 15) / 16, n_rounds = (n_tiles + tiles_at_once - 1) / tiles_at_once;

    // ---- Stream: requests the warp's records, tile by tile; of GATED for each tile those of the gate, then those of up. `left`: records of the
    // current tile and branch that are not requested yet. Behind the last tile it is 0, and `from` is not read. ----
    u32 next_tile = block_of_matrix * tiles_at_once + tile_in_round, next_branch = 0, left = 0, next_stage = 0;
    const unsigned char* from = nullptr;
    auto begin_tile = [&] {
        left = next_tile < n_tiles ? end - first : 0;
        from = (next_branch == 0 ? first_matrix.records : second_matrix.records) + ((size_t)next_tile * n_records + first) * RecordType::BYTES;
    };
    auto request_stage = [&] {
        if (left > 0) {
            const u32 n = min(left, (u32)Stage::RECORDS);
            Stage::copy(ring + next_stage * Stage::BYTES, from, n * RecordType::BYTES, lane);
            from += n * RecordType::BYTES, left -= n;
            if (left == 0) {
                if (++next_branch == n_branches) next_branch = 0, next_tile += n_blocks_of_matrix * tiles_at_once;
                begin_tile();
            }
        }
        // Also where nothing is left to request, as an empty group: `wait_for_copies` counts groups.
        next_stage = next_stage + 1 == Stage::STAGES ? 0 : next_stage + 1;
        commit_copies();
    };
    begin_tile();
#pragma unroll 1
    for (int i = 0; i < Stage::STAGES - 1; i++) request_stage();

    // ---- Prologue: inputs. An iteration converts four panels of one token: eight quant blocks, four lanes each. Warps with the same columns, one for
    // each tile of a round, divide these panels: a warp begins with `first_panel`, and goes on 4 * tiles_at_once panels further. Example: two warps
    // a tile, and so four tiles at once. Of the panels that they have in common, the warp of tile 0 converts 0 to 3, 16 to 19, ..., that of
    // tile 1 converts 4 to 7, 20 to 23, .... A warp that gets no panel (`first_panel` >= `end_panel`) stores nothing. In this order:
    //   1. loads the norm's weights of the first AHEAD iterations
    //   2. waits for x (`wait_for_input`)
    //   3. loads x of the first AHEAD iterations
    //   4. in each iteration: loads x and weights of the one that is AHEAD further, then converts its own
    // AHEAD is larger with several tokens, where a warp has more iterations. ----
    constexpr int AHEAD = TOKENS == 1 ? 1 : 2;
    // The lane's quads of a quant block, one of each half.
    struct LaneQuads {
        float4 quads[2];
    };
    struct InputPosition {
        u32 panel, token;
    };
    const u32 first_panel = first * RecordType::PANELS + 4 * tile_in_round, end_panel = end * RecordType::PANELS, end4 = min(n_in4, end_panel * 16);
    const u32 quad = lane / 4 * 8 + lane % 4;
    const float4* norm = (const float4*)a.norm;
    // The lane's quads of `row` in four panels from `panel` on. `padding`: in place of elements beyond the row or the warp's columns. x is padded with
    // 0, so that the padding of the norm's weights may be any finite number.
    auto load = [&](const float4* row, u32 panel, float padding) {
        LaneQuads to;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 i = panel * 16 + quad + 4 * h;
            to.quads[h] = i < end4 ? row[i] : make_float4(padding, padding, padding, padding);
        }
        return to;
    };
    auto advance = [&](InputPosition& p) {
        p.panel += 4 * tiles_at_once;
        if (p.panel >= end_panel) p.panel = first_panel, p.token++;
    };
    InputPosition position = {first_panel, 0}, ahead = position; // the current iteration, and the next one to load for
    LaneQuads x[AHEAD + 1], weights[AHEAD + 1];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        if (norm) weights[i] = load(norm, ahead.panel, 1.0f);
        advance(ahead);
    }
    const float inverse_n_in = __fdividef(1.0f, (float)a.n_in); // within two units in the last place
    // Programmatic dependent launch: waits until the kernel before has stored x, then allows the next kernel to start. That is safe so early: the
    // next kernel, too, waits for the end of this one (`wait_for_input`). Before that it reads only what no kernel in flight writes, and it writes
    // nothing (ptx.cuh). A kernel that is launched without the attribute (`LaunchOrder` of src/launch.rs) starts after the end of the one before.
    wait_for_input();
    let_next_start();

    auto row_of = [&](u32 token) { return (const float4*)a.x + (size_t)(a.rows ? a.rows[token] : token) * n_in4; };
    ahead = position; // back to the first iteration: its weights are loaded, x is not
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        if (ahead.token < TOKENS) x[i] = load(row_of(ahead.token), ahead.panel, 0.0f);
        advance(ahead);
    }
    // Each lane's sums of squares; they are added over the warp once, after the loop.
    float squares[TOKENS] = {};
#pragma unroll 1
    while (position.token < TOKENS) {
        if (ahead.token < TOKENS) {
            x[AHEAD] = load(row_of(ahead.token), ahead.panel, 0.0f);
            if (norm) weights[AHEAD] = load(norm, ahead.panel, 1.0f);
        }
        advance(ahead);
        float4(&v)[2] = x[0].quads;
        if (norm) {
            float squares_here = 0.0f;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float4& w = weights[0].quads[h];
                squares_here += v[h].x * v[h].x + v[h].y * v[h].y + v[h].z * v[h].z + v[h].w * v[h].w;
                v[h].x *= w.x, v[h].y *= w.y, v[h].z *= w.z, v[h].w *= w.w;
            }
#pragma unroll
            for (u32 n = 0; n < TOKENS; n++) squares[n] += position.token == n ? squares_here : 0.0f;
        }
        const u32 quant_block = position.panel * 2 + lane / 4;
        TileAccumulators::put(input, n_panels, position.token, quant_block, lane % 4, v, quant_block < 2 * end_panel);
        advance(position);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) x[i] = x[i + 1], weights[i] = weights[i + 1];
    }
    if (norm) {
#pragma unroll
        for (int n = 0; n < TOKENS; n++) {
            squares[n] = warp_sum(squares[n]);
            if (lane == 0) squares_of_warps[n * WARPS + warp] = squares[n];
        }
    }
    // With several tiles at a time a warp reads inputs that others have converted. With one tile it has converted its own, and the __syncwarp in
    // the main loop makes them visible to its lanes; it reads the others' sums of squares behind the tile's barrier, which all eight warps reach.
    if (tiles_at_once > 1) __syncthreads();
    TileAccumulators accumulators(input, n_panels, zeros, lane);

    // ---- Main loop ----
    u32 stage = 0;
    for (u32 round = block_of_matrix, parity = 0; round < n_rounds; round += n_blocks_of_matrix, parity ^= 1) {
        const u32 tile = round * tiles_at_once + tile_in_round;
        if (tile >= n_tiles) break; // all warps of the tile leave here, so that none of them is missing at its barrier
        // The results of the tile, [token][16 rows], are divided among the 32 * warps_per_tile lanes of its warps: a lane has the result with index
        // `warp_in_tile` * 32 + lane. With more than two tokens, more than 32 results, and a single warp it has a second one. `out`: where the result
        // goes; null: there is none. `before`: the value that it is added to, which is loaded before the products.
        constexpr int RESULTS = TOKENS > 2 ? 2 : 1;
        float before[RESULTS];
        u32 result_index[RESULTS];
        float* out[RESULTS];
#pragma unroll
        for (int j = 0; j < RESULTS; j++) {
            result_index[j] = warp_in_tile * 32 + lane + j * 32 * warps_per_tile;
            const u32 row = tile * 16 + result_index[j] % 16;
            const bool exists = result_index[j] < 16 * TOKENS && row < n_rows;
            out[j] = exists ? a.y + (size_t)(result_index[j] / 16) * a.n_out + first_matrix.first_row + row : nullptr;
            before[j] = out[j] && a.output == ADD ? *out[j] : 0.0f;
        }
        float* round_sums = partial_sums + parity * 2 * BRANCH_FLOATS;
        for (u32 branch = 0; branch < n_branches; branch++) {
#pragma unroll 1
            for (u32 record = first; record < end; record += Stage::RECORDS) {
                wait_for_copies<Stage::STAGES - 2>();
                __syncwarp();
                // Requests records for the stage before this one in the ring, which all lanes have read before the __syncwarp.
                request_stage();
                const unsigned char* stage_data = ring + stage * Stage::BYTES;
                stage = stage + 1 == Stage::STAGES ? 0 : stage + 1;
                constexpr int PANELS_PER_STAGE = Stage::RECORDS * RecordType::PANELS, AT_ONCE = PANELS_PER_STAGE > 1 ? 2 : 1;
#pragma unroll
                for (int q = 0; q < PANELS_PER_STAGE; q += AT_ONCE) { // `q`: panel of the stage
                    typename TileAccumulators::PanelWeights p[AT_ONCE];
                    // The last stage of a tile may have fewer than RECORDS records; the else branch is for its last record if their number is odd.
                    // Where RECORDS > 1 a record is one panel, so that q counts both. Place: addresses of the parts of a panel (formats.cuh).
                    if (Stage::RECORDS == 1 || record + q + AT_ONCE <= end) {
#pragma unroll
                        for (int i = 0; i < AT_ONCE; i++)
                            p[i].read(Place<FORMAT>(stage_data + (q + i) / RecordType::PANELS * RecordType::BYTES, (q + i) % RecordType::PANELS),
                                      lane);
#pragma unroll
                        for (int i = 0; i < AT_ONCE; i++) accumulators.add(p[i], record * RecordType::PANELS + q + i, lane);
                    } else {
                        if (record + q < end) {
                            p[0].read(Place<FORMAT>(stage_data + q * RecordType::BYTES, 0), lane);
                            accumulators.add(p[0], record + q, lane);
                        }
                        break;
                    }
                }
            }
            accumulators.finish(round_sums + branch * BRANCH_FLOATS + warp * 16 * TOKENS, lane);
        }
        // ---- Epilogue of the tile. The warps that share it meet at a named barrier of their own. ----
        if (warps_per_tile == 1) __syncwarp();
        else named_barrier_sync(FIRST_TILE_BARRIER + tile_in_round, 32 * warps_per_tile);
#pragma unroll
        for (int j = 0; j < RESULTS; j++) {
            if (!out[j]) continue;
            float inv_rms = 1.0f;
            if (norm) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < WARPS; i++) sum += squares_of_warps[result_index[j] / 16 * WARPS + i];
                inv_rms = rsqrtf(sum * inverse_n_in + a.eps);
            }
            float branch_results[2] = {0.0f, 0.0f};
#pragma unroll
            for (u32 branch = 0; branch < 2; branch++) { // unrolled with a constant bound: the results stay in registers
                if (branch == n_branches) break;
                const float* warp_sums = round_sums + branch * BRANCH_FLOATS + tile_in_round * warps_per_tile * 16 * TOKENS + result_index[j];
                float v[WARPS];
#pragma unroll
                for (u32 w = 0; w < WARPS; w++) v[w] = w < warps_per_tile ? warp_sums[w * 16 * TOKENS] : 0.0f;
#pragma unroll
                for (int d = 1; d < WARPS; d *= 2)
#pragma unroll
                    for (int w = 0; w < WARPS; w += 2 * d) v[w] += v[w + d];
                branch_results[branch] = v[0] * inv_rms;
            }
            if (gated) {
                // Without a limit: the host does not use GATED with CLAMPED_SWIGLU or CLAMPED_SILU.
                *out[j] = activate(a.activation, branch_results[0]) * branch_results[1];
            } else {
                const u32 row = first_matrix.first_row + tile * 16 + result_index[j] % 16;
                const float result = a.bias ? branch_results[0] + a.bias[row] : branch_results[0];
                *out[j] = a.output == ADD ? before[j] + a.scale * result : result;
            }
        }
    }
    wait_for_copies<0>();
}

// grouped_matvec.cu and rwkv.cu define TEMPLATES_ALONE: they include the templates without these kernels.
#ifndef TEMPLATES_ALONE
template <int TOKENS> __device__ __forceinline__ void matvec(const MatvecArgs& a) {
    u32 i = 0, begin = 0; // the block's matrix, and the first block that has rows of it
    if (a.output != GATED)
        while (i + 1 < a.n_matrices && blockIdx.x >= a.block_ends[i]) begin = a.block_ends[i++];
    const Matrix& m = a.matrices[i];
    const Matrix& second = a.matrices[a.output == GATED ? 1 : i];
    const u32 n_blocks_of_matrix = (a.output == GATED ? gridDim.x : a.block_ends[i]) - begin, block_of_matrix = blockIdx.x - begin;
    // WITH_FORMAT defines FORMAT, the format as a constant.
    WITH_FORMAT(m.format, (matvec_share<FORMAT, TOKENS>(a, m, second, block_of_matrix, n_blocks_of_matrix)));
}

#define MATVEC(N) \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) matvec_##N(const __grid_constant__ MatvecArgs a) { matvec<N>(a); }
MATVEC(1)
MATVEC(2)
MATVEC(3)
MATVEC(4)
#endif
