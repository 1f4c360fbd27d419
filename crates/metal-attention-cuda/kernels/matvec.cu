// The GEMV kernels (`matvec_1` to `matvec_4`): y = W f(x) for one to four tokens, as exact as in F32. W is one matrix, up to three matrices one
// below the other, or a feed-forward's gate and up; f is the identity or an RMSNorm. The results are stored, added to the residual stream, or
// gated.
//
// Terms of this file:
//   tile          16 rows of a matrix
//   panel         64 columns of a tile: two quantisation blocks of 32 columns
//   record        codes and scales of one to four neighbouring panels of a tile, contiguous in memory (formats.cuh)
//   stage         one buffer of a warp's ring of weights in shared memory: one to four records of one tile (`RingStage`)
//   codes         the integers of quantised weights; F16 and F32 weights have none. The formats Q4_0, Q8_0, Q4_K, Q5_K and Q6_K have weight
//                 layouts of their own; all other quantised types are stored as 8-bit codes, CODES or, with mins, CODES_AND_MINS (formats.cuh)
//   mins          offsets that some formats subtract: weight = scale * code - min. They need the sums of the inputs
//   digits        the inputs as integers, for products with codes: three digits of 8 bits for each input (code_products.cuh). For F16 and F32
//                 weights inputs are two F16 parts instead, hi + lo / 2048 (products.cuh)
//   branch        of GATED: 0 gate, 1 up; otherwise there is only branch 0
//   round         the tiles that the eight warps of a block multiply at the same time: `warps_per_tile` warps share the columns of each
//                 (split-K within the block)
//
// `LinearOp` and `gemv` of src/runner/linear.rs launch the kernels. A warp goes through four sections (`matvec_share`):
//   stream        each warp copies its own records to a ring in shared memory, several stages ahead; the first ones before the input is there
//   prologue      warps with the same columns load x [n_tokens][n_in], apply the norm's weights, and store digits or F16 parts to shared memory
//   main loop     for each tile of the warp: products of its records, with partial sums in registers, then in shared memory
//   epilogue      the sums of the warps of a tile are added; 1 / RMS, bias, residual or gate; y [n_tokens][n_out]
//
// Fragments of the tensor-core products. Lane l of a warp has g = l / 4 and t = l % 4. The result of a product has 16 rows, those of the tile, and
// eight columns; a lane has four elements of it, c[0] to c[3]:
//
//                      column  0 1     2 3     4 5     6 7
//   row g      (0 to 7)        t = 0   t = 1   t = 2   t = 3      c[0], c[1] of lanes 4 g + t
//   row g + 8  (8 to 15)       t = 0   t = 1   t = 2   t = 3      c[2], c[3] of lanes 4 g + t
//
// The columns are inputs. D0, D1, D2: the digits of an input, 0 the highest; columns 3 and 7 are zeros:
//
//                      column  0    1    2    3    4    5    6    7
//   codes, one scale a block   D0   D1   D2   0    D0   D1   D2   0      left: token 2 i; right: token 2 i + 1 (zeros if there is none)
//   codes, a scale for each
//   half of a block            D0   D1   D2   0    D0   D1   D2   0      of token i; left: first halves of blocks, right: second halves
//   F16 and F32                hi   lo   hi   lo   hi   lo   hi   lo     of tokens 0, 1, 2, 3
//
// So with codes lanes with t of 0 and 2 have the terms of digits 0 and 1, those with t of 1 and 3 that of digit 2; `row_sum` adds them.
//
// Preconditions: n_in is a multiple of 4; warps_per_tile is 1, 2, 4 or 8; a block has 32 * WARPS threads; the matrices have n_panels >= n_in / 64,
// padded to whole records; y does not overlap x, since blocks store rows of y while others still read x. GATED: matrices[0] and matrices[1] have the
// same format and shape, and `bias` is ignored (the host uses GATED neither with a bias nor with activations that have a parameter:
// `fuses_activation` of src/support.rs).
#include "code_products.cuh"
#include "products.cuh"

// The use of a result. STORE: y = result; ADD: y += scale * result; GATED: y = activation(gate) * up.
enum Output : u32 { STORE = 0, ADD = 1, GATED = 2 };
constexpr int MAX_MATRICES = 3; // of a product
constexpr int WARPS = 8;        // of a block
// Named barriers of the warps that share a tile: this one and those after it, one for each tile of a round.
constexpr u32 FIRST_TILE_BARRIER = 1;

// Mirrored by `MatvecArgs` of src/args.rs.
struct MatvecArgs {
    Matrix matrices[MAX_MATRICES]; // one below the other; GATED: gate and up
    u32 n_matrices;                // how many
    u32 block_ends[MAX_MATRICES];  // of each matrix, the block after its last one: matrix i has blocks block_ends[i - 1] to block_ends[i] - 1.
                                   // Unused by GATED, where all blocks have rows of both
    u32 n_in;                  // elements of a row of x, a multiple of 4
    u32 n_out;                 // elements of a row of y
    u32 warps_per_tile;        // warps that share the columns of a tile: 1, 2, 4 or 8
    u32 output;                // Output
    u32 activation;            // GATED: Activation, without a parameter
    float eps;                 // of the norm
    float scale;               // ADD: factor on the result
    u32 unused;
    const float* x;            // [n_tokens][n_in]
    const float* norm;         // [n_in] weights of the RMSNorm; null: no norm
    const float* bias;         // [n_out]; null: none. Ignored by GATED
    float* y;                  // [n_tokens][n_out]
    const u32* rows;           // [n_tokens] the row of x of each token; null: row i for token i
};

// Bytes of a warp's ring of records, except of F32 (two records of 4096 bytes). Mirrored in src/runner/linear.rs.
constexpr int RING = 7168;

// A stage of a warp's ring: RECORDS neighbouring records of a tile, BYTES in all. Formats whose records have a single panel (576 to 1536 bytes)
// have several in a stage, so that stages of all quantised formats have some 2 or 3 KB and the warp waits for copies equally seldom. A ring has
// STAGES stages, at least two, and RING_BYTES bytes: RING, or more where two stages do not fit in it (F32).
template <u32 F> struct RingStage {
    static constexpr int RECORDS = F == Q4_0 ? 4 : F == Q8_0 || F == CODES || F == CODES_AND_MINS ? 2 : 1;
    static constexpr int BYTES = RECORDS * Record<F>::BYTES;
    static constexpr int STAGES = RING / BYTES > 2 ? RING / BYTES : 2;
    static constexpr int RING_BYTES = STAGES * BYTES > RING ? STAGES * BYTES : RING;
    // The lanes of a warp copy `n` bytes together.
    static __device__ __forceinline__ void copy(unsigned char* to, const unsigned char* from, int n, int lane) {
#pragma unroll
        for (int i = 0; i < BYTES; i += 512)
            if ((RECORDS == 1 && i + 512 <= BYTES) || i + lane * 16 < n) copy16(to + i + lane * 16, from + i + lane * 16);
    }
};

// The inputs of the tokens in shared memory, as digits or F16 parts, and a warp's accumulators for one tile. This version is for formats with
// codes; the columns of its products are drawn at the top.
//   acc[i][k]              the lane's terms of row g + 8 k, for the token `token_of(i, lane)`
//   mins[i][k]             the sum of the mins of that row and token, complete in each lane
//   factors[i], sums[i]    of that token: factors of the digits of each quantisation block, and sums of its inputs (`CodeInput`)
//   bytes                  shared memory for the inputs of all tokens
//   put                    stores eight inputs (two quads) of a quantisation block
//   add                    adds the products of one panel
//   finish                 stores the sums of the tile, [TOKENS][16], and clears the accumulators
template <u32 FORMAT, int TOKENS> struct Accumulators {
    typedef Codes<FORMAT> PanelWeights;
    // PanelWeights::SUBS: scales of a quantisation block, 1 or 2 (one for each half). MINS: whether the format has mins. A product has the digits of two
    // tokens side by side, or with two scales those of both halves of blocks of one token. N products for all tokens.
    static constexpr int SIDE_BY_SIDE = PanelWeights::SUBS == 1 ? 2 : 1, N = (TOKENS + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE;
    static __device__ __forceinline__ u32 bytes_of_token(u32 n_panels) { return (input_bytes(n_panels) + 15) / 16 * 16; }
    static __device__ __forceinline__ u32 bytes(u32 n_panels) { return TOKENS * bytes_of_token(n_panels); }
    static __device__ __forceinline__ CodeInput input_of(unsigned char* memory, u32 n_panels, u32 token) {
        return CodeInput(memory + token * bytes_of_token(n_panels), n_panels);
    }
    static __device__ __forceinline__ void put(unsigned char* memory, u32 n_panels, int token, u32 quant_block, int t, const float4 (&v)[2],
                                               bool is_there) {
        store_digits<1>(input_of(memory, n_panels, token), quant_block, t, {{v[0], v[1]}}, {is_there}, PanelWeights::MINS);
    }
    static __device__ __forceinline__ int token_of(int i, int lane) { return SIDE_BY_SIDE == 2 ? 2 * i + lane % 4 / 2 : i; }

    Digits digits[N];
    const float *factors[N], *sums[N];
    float acc[N][2], mins[N][2];
    __device__ __forceinline__ Accumulators(unsigned char* memory, u32 n_panels, const unsigned char* zeros, int lane) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            auto digits_of_token = [&](int token) { return token < TOKENS ? input_of(memory, n_panels, token).digits : nullptr; };
            digits[i] = digits_of<PanelWeights::SUBS>(digits_of_token(SIDE_BY_SIDE * i), digits_of_token(SIDE_BY_SIDE * i + 1), zeros, lane);
            const CodeInput input = input_of(memory, n_panels, min(token_of(i, lane), TOKENS - 1));
            factors[i] = input.factors, sums[i] = input.sums;
        }
        clear();
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int k = 0; k < 2; k++) acc[i][k] = mins[i][k] = 0.0f;
    }
    __device__ __forceinline__ void add(const PanelWeights& p, u32 panel, int lane) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            code_products(p, panel, digits[i], factors[i], lane, acc[i]);
            if (PanelWeights::MINS) add_mins(p, panel, sums[i], mins[i]);
        }
    }
    __device__ __forceinline__ void finish(float* to, int lane) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int token = token_of(i, lane);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                // All lanes of the token have the row's sum afterwards; the first of them stores it.
                const float y = row_sum<PanelWeights>(acc[i][k], lane) - mins[i][k];
                if (lane % (4 / SIDE_BY_SIDE) == 0 && token < TOKENS) to[token * 16 + lane / 4 + 8 * k] = y;
            }
        }
        clear();
    }
};
// This version is for F16 and F32 weights. `acc`: the lane's terms for token t: hi and lo of row g, hi and lo of row g + 8.
template <u32 FORMAT, int TOKENS> struct FloatAccumulators {
    typedef Staged<FORMAT> PanelWeights;
    // Of each quantisation block two F16 parts of 32 inputs, 128 bytes, and a factor.
    static __device__ __forceinline__ u32 bytes(u32 n_panels) { return TOKENS * n_panels * 2 * (128 + 4); }
    static __device__ __forceinline__ float* factors_of(unsigned char* memory, u32 n_panels) {
        return (float*)(memory + TOKENS * n_panels * 2 * 128);
    }
    static __device__ __forceinline__ void put(unsigned char* memory, u32 n_panels, int token, u32 quant_block, int t, const float4 (&v)[2],
                                               bool is_there) {
        store_f16_parts(memory, factors_of(memory, n_panels), token * n_panels * 2 + quant_block, t, v[0], v[1], is_there);
    }
    const unsigned char* input;
    const float* factors;
    u32 n_blocks;
    float acc[4];
    __device__ __forceinline__ FloatAccumulators(unsigned char* memory, u32 n_panels, const unsigned char*, int)
        : input(memory), factors(factors_of(memory, n_panels)), n_blocks(2 * n_panels) { clear(); }
    __device__ __forceinline__ void clear() { acc[0] = acc[1] = acc[2] = acc[3] = 0.0f; }
    __device__ __forceinline__ void add(const PanelWeights& p, u32 panel, int lane) {
        panel_products<PanelWeights, TOKENS>(p, panel, n_blocks, input, factors, lane, acc);
    }
    __device__ __forceinline__ void finish(float* to, int lane) {
        const int g = lane / 4, t = lane % 4;
        if (t < TOKENS) {
            to[t * 16 + g] = acc[0] + acc[1] * (1.0f / 2048.0f);
            to[t * 16 + g + 8] = acc[2] + acc[3] * (1.0f / 2048.0f);
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

// One block's share of y = W f(x): the rounds `block_of_matrix`, block_of_matrix + n_blocks_of_matrix, ... of a matrix, or of the pair of gate and up
// (`second_matrix` is up; not read otherwise). `block_of_matrix`, `n_blocks_of_matrix`: index among the blocks of this matrix, and their number. All
// threads of the block call it; shared memory is as `gemv_shared_bytes` of src/runner/linear.rs counts it.
template <u32 FORMAT, int TOKENS>
__device__ __forceinline__ void matvec_share(const MatvecArgs& a, const Matrix& first_matrix, const Matrix& second_matrix, u32 block_of_matrix,
                                            u32 n_blocks_of_matrix) {
    typedef Record<FORMAT> RecordType;
    typedef RingStage<FORMAT> Stage;
    typedef Accumulators<FORMAT, TOKENS> Sums;
    static_assert(Stage::RECORDS == 1 || RecordType::PANELS == 1, "indices of records are indices of panels where a stage has several records");
    SHARED_MEMORY(128, unsigned char, memory);
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const u32 n_panels = first_matrix.n_panels, n_rows = first_matrix.n_rows, n_in4 = a.n_in / 4;
    unsigned char* ring = memory + warp * Stage::RING_BYTES;
    // 16 bytes of zeros for each warp, which lanes of columns without digits read instead of digits.
    unsigned char* zeros = memory + WARPS * Stage::RING_BYTES + warp * 16;
    float* squares_of_warps = (float*)(memory + WARPS * (Stage::RING_BYTES + 16)); // [TOKENS][WARPS] sums of squares of x
    // Partial sums, [parity of the round][branch][WARPS][TOKENS][16]: two rounds alternate, so that one barrier a round is enough.
    float* partial = squares_of_warps + TOKENS * WARPS;
    constexpr u32 BRANCH_FLOATS = WARPS * TOKENS * 16;
    unsigned char* input = (unsigned char*)(partial + 4 * BRANCH_FLOATS);
    if (lane < 4) ((u32*)zeros)[lane] = 0;

    // The warp's share: `warps_per_tile` warps divide the records of a tile. `tile_in_round`: the warp's tile in the round; `share`: its index
    // among the warps of that tile.
    const bool gated = a.output == GATED;
    const u32 n_branches = gated ? 2 : 1, warps_per_tile = a.warps_per_tile, tiles_at_once = WARPS / warps_per_tile;
    const u32 tile_in_round = warp / warps_per_tile, share = warp % warps_per_tile;
    const u32 n_records = n_panels / RecordType::PANELS, first = share * n_records / warps_per_tile, end = (share + 1) * n_records / warps_per_tile;
    const u32 n_tiles = (n_rows + 15) / 16, n_rounds = (n_tiles + tiles_at_once - 1) / tiles_at_once;

    // ---- Stream: the ring of the warp's own records. `left`: records of the current tile that are not requested yet. ----
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
        next_stage = next_stage + 1 == Stage::STAGES ? 0 : next_stage + 1;
        commit_copies();
    };
    begin_tile();
#pragma unroll 1
    for (int i = 0; i < Stage::STAGES - 1; i++) request_stage();

    // ---- Prologue: inputs. In a step a warp converts four panels of one token; four lanes have a quantisation block. Warps with the same columns, one
    // for each tile of the round, divide these: each takes every `tiles_at_once`-th four panels, from its `first_panel` on. A warp without panels of
    // its own loads nothing and stores nothing. Loads run AHEAD steps ahead, further with several tokens, where a warp has more steps; the norm's
    // first weights are loaded before the input is there. ----
    constexpr int AHEAD = TOKENS == 1 ? 1 : 2;
    // The lane's quads of a quantisation block, one of each half.
    struct BlockQuads {
        float4 quads[2];
    };
    struct InputPosition {
        u32 panel, token;
    };
    const u32 first_panel = first * RecordType::PANELS + 4 * tile_in_round, end_panel = end * RecordType::PANELS, end4 = min(n_in4, end_panel * 16);
    const u32 quad = lane / 4 * 8 + lane % 4;
    const float4* norm = (const float4*)a.norm;
    auto load = [&](const float4* row, u32 panel, float padding) {
        BlockQuads to;
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
    InputPosition position = {first_panel, 0}, ahead = position; // the step that is converted, and the next one to load
    BlockQuads x[AHEAD + 1], weights[AHEAD + 1];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        if (norm) weights[i] = load(norm, ahead.panel, 1.0f);
        advance(ahead);
    }
    const float per_input = __fdividef(1.0f, (float)a.n_in);
    // Programmatic dependent launch: waits until the kernel before has stored x, then allows the kernel behind this one to start. That is safe so
    // early: before its own `wait_for_input`, which waits until this kernel has ended, the next kernel reads only what no kernel in flight writes
    // (ptx.cuh), and it writes nothing.
    wait_for_input();
    let_next_start();

    auto row_of = [&](u32 token) { return (const float4*)a.x + (size_t)(a.rows ? a.rows[token] : token) * n_in4; };
    ahead = position;
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
            for (int n = 0; n < TOKENS; n++) squares[n] += position.token == n ? squares_here : 0.0f;
        }
        const u32 quant_block = position.panel * 2 + lane / 4;
        Sums::put(input, n_panels, position.token, quant_block, lane % 4, v, quant_block < 2 * end_panel);
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
    // With several tiles at a time, warps with the same columns have converted each other's inputs. With one tile each warp has converted its
    // own; the sums of squares of the others are read behind the barrier of the tile, of which all warps are part.
    if (tiles_at_once > 1) __syncthreads();
    Sums sums(input, n_panels, zeros, lane);

    // ---- Main loop ----
    u32 stage = 0;
    for (u32 round = block_of_matrix, parity = 0; round < n_rounds; round += n_blocks_of_matrix, parity ^= 1) {
        const u32 tile = round * tiles_at_once + tile_in_round;
        if (tile >= n_tiles) break;
        // The results of the tile, [TOKENS][16 rows], are divided among the 32 * warps_per_tile lanes of its warps: a lane has result `share` * 32 +
        // lane, and with more than two tokens and one warp for the tile a second one. What they are added to is loaded before the products.
        constexpr int RESULTS = TOKENS > 2 ? 2 : 1;
        float old[RESULTS];
        u32 result[RESULTS];
        float* out[RESULTS];
#pragma unroll
        for (int j = 0; j < RESULTS; j++) {
            result[j] = share * 32 + lane + j * 32 * warps_per_tile;
            const u32 row = tile * 16 + result[j] % 16;
            out[j] = result[j] < 16 * TOKENS && row < n_rows ? a.y + (size_t)(result[j] / 16) * a.n_out + first_matrix.first_row + row : nullptr;
            old[j] = out[j] && a.output == ADD ? *out[j] : 0.0f;
        }
        float* tile_sums = partial + parity * 2 * BRANCH_FLOATS;
        for (u32 branch = 0; branch < n_branches; branch++) {
#pragma unroll 1
            for (u32 record = first; record < end; record += Stage::RECORDS) {
                wait_for_copies<Stage::STAGES - 2>();
                __syncwarp();
                // Refills the stage before this one, which all lanes have read.
                request_stage();
                const unsigned char* stage_data = ring + stage * Stage::BYTES;
                stage = stage + 1 == Stage::STAGES ? 0 : stage + 1;
                constexpr int PANELS = Stage::RECORDS * RecordType::PANELS, AT_ONCE = PANELS > 1 ? 2 : 1;
#pragma unroll
                for (int q = 0; q < PANELS; q += AT_ONCE) {
                    typename Sums::PanelWeights p[AT_ONCE];
                    // The last stage of a tile may have fewer than RECORDS records. Where RECORDS > 1 a record is one panel, so that q counts both.
                    if (Stage::RECORDS == 1 || record + q + AT_ONCE <= end) {
#pragma unroll
                        for (int i = 0; i < AT_ONCE; i++)
                            p[i].read(Place<FORMAT>(stage_data + (q + i) / RecordType::PANELS * RecordType::BYTES, (q + i) % RecordType::PANELS),
                                      lane);
#pragma unroll
                        for (int i = 0; i < AT_ONCE; i++) sums.add(p[i], record * RecordType::PANELS + q + i, lane);
                    } else {
                        if (record + q < end) {
                            p[0].read(Place<FORMAT>(stage_data + q * RecordType::BYTES, 0), lane);
                            sums.add(p[0], record + q, lane);
                        }
                        break;
                    }
                }
            }
            sums.finish(tile_sums + branch * BRANCH_FLOATS + warp * 16 * TOKENS, lane);
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
                for (int i = 0; i < WARPS; i++) sum += squares_of_warps[result[j] / 16 * WARPS + i];
                inv_rms = rsqrtf(sum * per_input + a.eps);
            }
            float y[2] = {0.0f, 0.0f};
#pragma unroll
            for (u32 branch = 0; branch < 2; branch++) { // unrolled with a constant bound: y stays in registers
                if (branch == n_branches) break;
                const float* warp_sums = tile_sums + branch * BRANCH_FLOATS + tile_in_round * warps_per_tile * 16 * TOKENS + result[j];
                float v[WARPS];
#pragma unroll
                for (u32 w = 0; w < WARPS; w++) v[w] = w < warps_per_tile ? warp_sums[w * 16 * TOKENS] : 0.0f;
#pragma unroll
                for (int d = 1; d < WARPS; d *= 2)
#pragma unroll
                    for (int w = 0; w < WARPS; w += 2 * d) v[w] += v[w + d];
                y[branch] = v[0] * inv_rms;
            }
            if (gated) {
                // Without the limit of CLAMPED_SWIGLU: the host does not use GATED with it.
                *out[j] = activate(a.activation, y[0]) * y[1];
            } else {
                const float v = a.bias ? y[0] + a.bias[first_matrix.first_row + tile * 16 + result[j] % 16] : y[0];
                *out[j] = a.output == ADD ? old[j] + a.scale * v : v;
            }
        }
    }
    wait_for_copies<0>();
}

// grouped_matvec.cu and rwkv.cu include the templates without these kernels.
#ifndef TEMPLATES_ALONE
template <int TOKENS> __device__ __forceinline__ void matvec(const MatvecArgs& a) {
    u32 i = 0, begin = 0; // the block's matrix, and the first block that has rows of it
    if (a.output != GATED)
        while (i + 1 < a.n_matrices && blockIdx.x >= a.block_ends[i]) begin = a.block_ends[i++];
    const Matrix& m = a.matrices[i];
    const Matrix& second = a.matrices[a.output == GATED ? 1 : i];
    const u32 n = (a.output == GATED ? gridDim.x : a.block_ends[i]) - begin, block = blockIdx.x - begin;
    WITH_FORMAT(m.format, (matvec_share<FORMAT, TOKENS>(a, m, second, block, n)));
}

#define MATVEC(N) \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) matvec_##N(const __grid_constant__ MatvecArgs a) { matvec<N>(a); }
MATVEC(1)
MATVEC(2)
MATVEC(3)
MATVEC(4)
#endif
