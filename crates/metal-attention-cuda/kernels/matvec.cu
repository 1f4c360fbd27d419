// y = W f(x) for one to four tokens, as exact as F32: f is nothing or an RMSNorm, and y is stored, added to the residual stream,
// or goes through the gate of a feed-forward.
//
// Each warp has records of its own on their way to workgroup memory, the first ones before the input is there. When it is, warps that
// take the same columns make of these what products take, and begin; a norm's RMS is known only where their sums meet.
#include "code_products.cuh"
#include "products.cuh"

enum Output : u32 { STORE = 0, ADD = 1, GATED = 2 };
constexpr int MAX_PARTS = 3;
constexpr int WARPS = 8;

struct MatvecArgs {
    Matrix parts[MAX_PARTS]; // one below the other; GATED: the gate and up, of one format
    u32 n_parts;
    u32 blocks[MAX_PARTS]; // first block of the next part
    u32 n_in;
    u32 n_out;         // elements of a row of y
    u32 warps_a_tile;  // a power of two
    u32 output;
    u32 activation;
    float eps;         // of the norm
    float scale;       // ADD: of what is added
    u32 unused;
    const float* x;    // [n_tokens][n_in]
    const float* norm; // weight of the RMSNorm, or null
    const float* bias; // [n_out], or null
    float* y;          // [n_tokens][n_out]
    const u32* rows;   // rows of x to be taken, or null: in order
};

// Bytes of a warp's records on their way, but of F32: as `shared_of` of src/step/product.rs has them.
constexpr int RING = 7168;

// What a warp has on its way of a tile: the next so many of its records, which lie one after the other.
template <u32 F> struct Chunk {
    static constexpr int RECORDS = F == Q4_0 ? 4 : F == Q8_0 || F == CODES || F == CODES_AND_MINS ? 2 : 1;
    static constexpr int BYTES = RECORDS * Record<F>::BYTES;
    static constexpr int STAGES = RING / BYTES > 2 ? RING / BYTES : 2, ALL = STAGES * BYTES > RING ? STAGES * BYTES : RING;
    // The lanes of a warp copy `n` bytes together.
    static __device__ __forceinline__ void copy(unsigned char* to, const unsigned char* from, int n, int lane) {
#pragma unroll
        for (int i = 0; i < BYTES; i += 512)
            if ((RECORDS == 1 && i + 512 <= BYTES) || i + lane * 16 < n) copy16(to + i + lane * 16, from + i + lane * 16);
    }
};

// Inputs of tokens in workgroup memory, and what a warp adds up of a tile: products of codes.
template <u32 FORMAT, int TOKENS> struct Sums {
    typedef Codes<FORMAT> P;
    // Tokens of a product, and products.
    static constexpr int SIDE_BY_SIDE = P::SUBS == 1 ? 2 : 1, N = (TOKENS + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE;
    static __device__ __forceinline__ u32 bytes_of_token(u32 n_panels) { return (input_bytes(n_panels) + 15) / 16 * 16; }
    static __device__ __forceinline__ u32 bytes(u32 n_panels) { return TOKENS * bytes_of_token(n_panels); }
    static __device__ __forceinline__ CodeInput input_of(unsigned char* memory, u32 n_panels, u32 token) {
        return CodeInput(memory + token * bytes_of_token(n_panels), n_panels);
    }
    static __device__ __forceinline__ void put(unsigned char* memory, u32 n_panels, int token, u32 block, int t, const float4 (&v)[2], bool is_there) {
        store_digits<1>(input_of(memory, n_panels, token), block, t, {{v[0], v[1]}}, {is_there}, P::MINS);
    }
    static __device__ __forceinline__ int token_of(int i, int lane) { return SIDE_BY_SIDE == 2 ? 2 * i + lane % 4 / 2 : i; }

    Digits digits[N];
    const float *factors[N], *sums[N];
    float acc[N][2], mins[N][2];
    __device__ __forceinline__ Sums(unsigned char* memory, u32 n_panels, const unsigned char* zeros, int lane) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            auto digits_of_token = [&](int token) { return token < TOKENS ? input_of(memory, n_panels, token).digits : nullptr; };
            digits[i] = digits_of<P::SUBS>(digits_of_token(SIDE_BY_SIDE * i), digits_of_token(SIDE_BY_SIDE * i + 1), zeros, lane);
            const CodeInput of = input_of(memory, n_panels, min(token_of(i, lane), TOKENS - 1));
            factors[i] = of.factors, sums[i] = of.sums;
        }
        clear();
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int row = 0; row < 2; row++) acc[i][row] = mins[i][row] = 0.0f;
    }
    __device__ __forceinline__ void add(const P& p, u32 panel, int lane) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            code_products(p, panel, digits[i], factors[i], lane, acc[i]);
            if (P::MINS) add_mins(p, panel, sums[i], mins[i]);
        }
    }
    // To [TOKENS][16].
    __device__ __forceinline__ void finish(float* to, int lane) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int token = token_of(i, lane);
#pragma unroll
            for (int row = 0; row < 2; row++) {
                const float y = row_sum<P>(acc[i][row], lane) - mins[i][row];
                if (lane % (4 / SIDE_BY_SIDE) == 0 && token < TOKENS) to[token * 16 + lane / 4 + 8 * row] = y;
            }
        }
        clear();
    }
};
// The same of floats.
template <u32 FORMAT, int TOKENS> struct FloatSums {
    typedef Staged<FORMAT> P;
    static __device__ __forceinline__ u32 bytes(u32 n_panels) { return TOKENS * n_panels * 2 * (128 + 4); }
    static __device__ __forceinline__ float* factors_of(unsigned char* memory, u32 n_panels) { return (float*)(memory + TOKENS * n_panels * 2 * 128); }
    static __device__ __forceinline__ void put(unsigned char* memory, u32 n_panels, int token, u32 block, int t, const float4 (&v)[2], bool is_there) {
        store_halves(memory, factors_of(memory, n_panels), token * n_panels * 2 + block, t, v[0], v[1], is_there);
    }
    const unsigned char* input;
    const float* factors;
    u32 n_blocks;
    float acc[4];
    __device__ __forceinline__ FloatSums(unsigned char* memory, u32 n_panels, const unsigned char*, int)
        : input(memory), factors(factors_of(memory, n_panels)), n_blocks(2 * n_panels) { clear(); }
    __device__ __forceinline__ void clear() { acc[0] = acc[1] = acc[2] = acc[3] = 0.0f; }
    __device__ __forceinline__ void add(const P& p, u32 panel, int lane) { panel_products<P, TOKENS>(p, panel, n_blocks, input, factors, lane, acc); }
    __device__ __forceinline__ void finish(float* to, int lane) {
        const int g = lane / 4, t = lane % 4;
        if (t < TOKENS) {
            to[t * 16 + g] = acc[0] + acc[1] * (1.0f / 2048.0f);
            to[t * 16 + g + 8] = acc[2] + acc[3] * (1.0f / 2048.0f);
        }
        clear();
    }
};
template <int TOKENS> struct Sums<F16, TOKENS> : FloatSums<F16, TOKENS> {
    using FloatSums<F16, TOKENS>::FloatSums;
};
template <int TOKENS> struct Sums<F32, TOKENS> : FloatSums<F32, TOKENS> {
    using FloatSums<F32, TOKENS>::FloatSums;
};

template <u32 FORMAT, int TOKENS>
__device__ __forceinline__ void matvec_part(const MatvecArgs& a, const Matrix& first_matrix, const Matrix& second_matrix, u32 block, u32 n_blocks_of_part) {
    typedef Record<FORMAT> R;
    typedef Chunk<FORMAT> C;
    typedef Sums<FORMAT, TOKENS> S;
    SHARED_MEMORY(128, unsigned char, memory);
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const u32 n_panels = first_matrix.n_panels, n_rows = first_matrix.n_rows, n_in4 = a.n_in / 4;
    unsigned char* ring = memory + warp * C::ALL;
    unsigned char* zeros = memory + WARPS * C::ALL + warp * 16;
    float* squares_of = (float*)(memory + WARPS * (C::ALL + 16)); // [TOKENS][WARPS]
    float* partial = squares_of + TOKENS * WARPS;               // of groups by turns, of a gate and up, [2][2][WARPS][TOKENS][16]
    constexpr u32 HALF = WARPS * TOKENS * 16;
    unsigned char* input = (unsigned char*)(partial + 4 * HALF);
    if (lane < 4) ((u32*)zeros)[lane] = 0;

    // `warps_a_tile` warps share a tile's records out, and meet at a barrier of theirs.
    const bool gated = a.output == GATED;
    const u32 n_halves = gated ? 2 : 1, n_sharing = a.warps_a_tile, tiles_at_once = WARPS / n_sharing;
    const u32 of_group = warp / n_sharing, share = warp % n_sharing;
    const u32 n_records = n_panels / R::PANELS, first = share * n_records / n_sharing, end = (share + 1) * n_records / n_sharing;
    const u32 n_tiles = (n_rows + 15) / 16, n_groups = (n_tiles + tiles_at_once - 1) / tiles_at_once;

    // What is asked for next.
    u32 ask_tile = block * tiles_at_once + of_group, ask_half = 0, left = 0, ask_stage = 0;
    const unsigned char* from = nullptr;
    auto ask_for_tile = [&] {
        left = ask_tile < n_tiles ? end - first : 0;
        from = (ask_half == 0 ? first_matrix.records : second_matrix.records) + ((size_t)ask_tile * n_records + first) * R::BYTES;
    };
    auto ask = [&] {
        if (left > 0) {
            const u32 n = min(left, (u32)C::RECORDS);
            C::copy(ring + ask_stage * C::BYTES, from, n * R::BYTES, lane);
            from += n * R::BYTES, left -= n;
            if (left == 0) {
                if (++ask_half == n_halves) ask_half = 0, ask_tile += n_blocks_of_part * tiles_at_once;
                ask_for_tile();
            }
        }
        ask_stage = ask_stage + 1 == C::STAGES ? 0 : ask_stage + 1;
        commit_copies();
    };
    ask_for_tile();
#pragma unroll 1
    for (int i = 0; i < C::STAGES - 1; i++) ask();

    // Inputs of four panels of a token at once: four lanes have a block. Warps that take the same columns deal these out. What is put
    // after those at hand is on its way; a norm's first weights are before the input is there.
    constexpr int AHEAD = TOKENS == 1 ? 1 : 2;
    struct Quads {
        float4 of[2];
    };
    struct Turn {
        u32 panel, token;
    };
    const u32 first_panel = first * R::PANELS + 4 * of_group, end_panel = end * R::PANELS, end4 = min(n_in4, end_panel * 16);
    const u32 quad = lane / 4 * 8 + lane % 4;
    const float4* norm = (const float4*)a.norm;
    auto load = [&](const float4* row, u32 panel, float otherwise) {
        Quads to;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 i = panel * 16 + quad + 4 * h;
            to.of[h] = i < end4 ? row[i] : make_float4(otherwise, otherwise, otherwise, otherwise);
        }
        return to;
    };
    auto go_on = [&](Turn& at) {
        at.panel += 4 * tiles_at_once;
        if (at.panel >= end_panel) at.panel = first_panel, at.token++;
    };
    Turn at = {first_panel, 0}, ahead = at;
    Quads x[AHEAD + 1], weights[AHEAD + 1];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        if (norm) weights[i] = load(norm, ahead.panel, 1.0f);
        go_on(ahead);
    }
    const float per_input = __fdividef(1.0f, (float)a.n_in);
    wait_for_input();
    let_next_start();

    auto row_of = [&](u32 token) { return (const float4*)a.x + (size_t)(a.rows ? a.rows[token] : token) * n_in4; };
    ahead = at;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        if (ahead.token < TOKENS) x[i] = load(row_of(ahead.token), ahead.panel, 0.0f);
        go_on(ahead);
    }
    // Each lane's, which meet where all are there, side by side.
    float squares[TOKENS] = {};
#pragma unroll 1
    while (at.token < TOKENS) {
        if (ahead.token < TOKENS) {
            x[AHEAD] = load(row_of(ahead.token), ahead.panel, 0.0f);
            if (norm) weights[AHEAD] = load(norm, ahead.panel, 1.0f);
        }
        go_on(ahead);
        float4(&v)[2] = x[0].of;
        if (norm) {
            float of_turn = 0.0f;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float4& w = weights[0].of[h];
                of_turn += v[h].x * v[h].x + v[h].y * v[h].y + v[h].z * v[h].z + v[h].w * v[h].w;
                v[h].x *= w.x, v[h].y *= w.y, v[h].z *= w.z, v[h].w *= w.w;
            }
#pragma unroll
            for (int n = 0; n < TOKENS; n++) squares[n] += at.token == n ? of_turn : 0.0f;
        }
        const u32 of_block = at.panel * 2 + lane / 4;
        S::put(input, n_panels, at.token, of_block, lane % 4, v, of_block < 2 * end_panel);
        go_on(at);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) x[i] = x[i + 1], weights[i] = weights[i + 1];
    }
    if (norm) {
#pragma unroll
        for (int n = 0; n < TOKENS; n++) {
            squares[n] = warp_sum(squares[n]);
            if (lane == 0) squares_of[n * WARPS + warp] = squares[n];
        }
    }
    if (tiles_at_once > 1) __syncthreads();
    S sums(input, n_panels, zeros, lane);

    u32 stage = 0;
    for (u32 group = block, turn = 0; group < n_groups; group += n_blocks_of_part, turn ^= 1) {
        const u32 tile = group * tiles_at_once + of_group;
        if (tile >= n_tiles) break;
        // Results of a thread, and what is added to, on its way.
        constexpr int EACH = TOKENS > 2 ? 2 : 1;
        float before[EACH];
        u32 rest[EACH];
        float* out[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            rest[j] = share * 32 + lane + j * 32 * n_sharing;
            const u32 row = tile * 16 + rest[j] % 16;
            out[j] = rest[j] < 16 * TOKENS && row < n_rows ? a.y + (size_t)(rest[j] / 16) * a.n_out + first_matrix.first_row + row : nullptr;
            before[j] = out[j] && a.output == ADD ? *out[j] : 0.0f;
        }
        float* parts = partial + turn * 2 * HALF;
        for (u32 half_of = 0; half_of < n_halves; half_of++) {
#pragma unroll 1
            for (u32 record = first; record < end; record += C::RECORDS) {
                wait_for_copies<C::STAGES - 2>();
                __syncwarp();
                // Into the place of the records before, which all lanes have read.
                ask();
                const unsigned char* chunk = ring + stage * C::BYTES;
                stage = stage + 1 == C::STAGES ? 0 : stage + 1;
                constexpr int PANELS = C::RECORDS * R::PANELS, PAIR = PANELS > 1 ? 2 : 1;
#pragma unroll
                for (int q = 0; q < PANELS; q += PAIR) {
                    typename S::P p[PAIR];
                    if (C::RECORDS == 1 || record + q + PAIR <= end) {
#pragma unroll
                        for (int i = 0; i < PAIR; i++)
                            p[i].read(Place<FORMAT>(chunk + (q + i) / R::PANELS * R::BYTES, (q + i) % R::PANELS), lane);
#pragma unroll
                        for (int i = 0; i < PAIR; i++) sums.add(p[i], record * R::PANELS + q + i, lane);
                    } else {
                        if (record + q < end) {
                            p[0].read(Place<FORMAT>(chunk + q * R::BYTES, 0), lane);
                            sums.add(p[0], record + q, lane);
                        }
                        break;
                    }
                }
            }
            sums.finish(parts + half_of * HALF + warp * 16 * TOKENS, lane);
        }
        if (n_sharing == 1) __syncwarp();
        else named_barrier_sync(1 + of_group, 32 * n_sharing);
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            if (!out[j]) continue;
            float rms = 1.0f;
            if (norm) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < WARPS; i++) sum += squares_of[rest[j] / 16 * WARPS + i];
                rms = rsqrtf(sum * per_input + a.eps);
            }
            float y[2] = {0.0f, 0.0f};
#pragma unroll
            for (u32 half_of = 0; half_of < 2; half_of++) {
                if (half_of == n_halves) break;
                const float* at = parts + half_of * HALF + of_group * n_sharing * 16 * TOKENS + rest[j];
                float v[WARPS];
#pragma unroll
                for (u32 w = 0; w < WARPS; w++) v[w] = w < n_sharing ? at[w * 16 * TOKENS] : 0.0f;
#pragma unroll
                for (int d = 1; d < WARPS; d *= 2)
#pragma unroll
                    for (int w = 0; w < WARPS; w += 2 * d) v[w] += v[w + d];
                y[half_of] = v[0] * rms;
            }
            if (gated) {
                *out[j] = activate(a.activation, y[0]) * y[1];
            } else {
                const float v = a.bias ? y[0] + a.bias[first_matrix.first_row + tile * 16 + rest[j] % 16] : y[0];
                *out[j] = a.output == ADD ? before[j] + a.scale * v : v;
            }
        }
    }
    wait_for_copies<0>();
}

// Other kernels take the templates.
#ifndef TEMPLATES_ALONE
template <int TOKENS> __device__ __forceinline__ void matvec(const MatvecArgs& a) {
    u32 part = 0, begin = 0;
    if (a.output != GATED)
        while (part + 1 < a.n_parts && blockIdx.x >= a.blocks[part]) begin = a.blocks[part++];
    const Matrix& m = a.parts[part];
    const Matrix& second = a.parts[a.output == GATED ? 1 : part];
    const u32 n = (a.output == GATED ? gridDim.x : a.blocks[part]) - begin, block = blockIdx.x - begin;
    WITH_FORMAT(m.format, (matvec_part<FORMAT, TOKENS>(a, m, second, block, n)));
}

#define MATVEC(N) \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) matvec_##N(const __grid_constant__ MatvecArgs a) { matvec<N>(a); }
MATVEC(1)
MATVEC(2)
MATVEC(3)
MATVEC(4)
#endif
