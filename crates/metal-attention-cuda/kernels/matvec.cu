// y = W f(x) for one to four tokens, as exact as F32: f is nothing or an RMSNorm, and y is stored, added to the residual stream,
// or goes through the gate of a feed-forward.
//
// Each warp has panels of its own on their way to workgroup memory, the first ones before the input is there.
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

// A panel in workgroup memory: codes, scales, what these are multiplied by, further bits.
template <u32 F> struct Stage {
    typedef Record<F> R;
    static constexpr int BYTES = R::CODES + R::SCALES + R::SUPER + R::HIGH;
    // The lanes of a warp copy `N` bytes together.
    template <int N> static __device__ __forceinline__ void copy(unsigned char* to, const unsigned char* from, int lane) {
#pragma unroll
        for (int i = 0; i < N; i += 512)
            if (N - i >= 512 || lane * 16 < N - i) copy16(to + i + lane * 16, from + i + lane * 16);
    }
    static __device__ __forceinline__ void copy(unsigned char* to, const Matrix& m, u32 tile, u32 panel, int lane) {
        const Place<F> at(m, tile, panel);
        copy<R::CODES>(to, at.codes, lane);
        copy<R::SCALES>(to + R::CODES, at.scales, lane);
        copy<R::SUPER>(to + R::CODES + R::SCALES, at.super, lane);
        copy<R::HIGH>(to + R::CODES + R::SCALES + R::SUPER, at.high, lane);
    }
    static __device__ __forceinline__ Place<F> place(const unsigned char* from) {
        Place<F> at;
        at.codes = from, at.scales = from + R::CODES, at.super = at.scales + R::SCALES, at.high = at.super + R::SUPER;
        return at;
    }
};

// Bytes of a warp's panels on their way, where these are not larger.
constexpr int RING = 6144;

// Thread i of the block has elements 4 (i + 256 j).. of the input.
constexpr int HELD = 4; // of these at once

template <u32 FORMAT, int TOKENS>
__device__ __forceinline__ void matvec_part(const MatvecArgs& a, const Matrix& first_matrix, const Matrix& second_matrix, u32 block, u32 n_blocks_of_part) {
    typedef Staged<FORMAT> S;
    typedef Stage<FORMAT> Staging;
    SHARED_MEMORY(128, unsigned char, memory);
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const u32 n_blocks = (a.n_in + 63) / 64 * 2;
    // Panels that are asked for, and worked on, at once.
    constexpr int PAIR = Staging::BYTES > 1024 ? 1 : 2;
    constexpr int STAGES = RING / (PAIR * Staging::BYTES) > 2 ? RING / (PAIR * Staging::BYTES) : 2;
    unsigned char* ring = memory + warp * STAGES * PAIR * Staging::BYTES;
    unsigned char* input = memory + WARPS * STAGES * PAIR * Staging::BYTES; // each block's hi and lo, [tokens][n_blocks][128]
    float* sums = (float*)(input + (size_t)TOKENS * n_blocks * 128); // [tokens][n_blocks][2]
    float* partial = sums + TOKENS * n_blocks * 2;                   // [2][WARPS][16][TOKENS]
    float* factors = partial + 2 * WARPS * 16 * TOKENS;              // [TOKENS]
    __shared__ float2 scratch[WARPS];

    const bool gated = a.output == GATED;
    const u32 n_halves = gated ? 2 : 1;
    const u32 tiles_at_once = WARPS / a.warps_a_tile;
    const u32 of_group = warp / a.warps_a_tile, n_panels = first_matrix.n_panels;
    const u32 n_tiles = (first_matrix.n_rows + 15) / 16, n_groups = (n_tiles + tiles_at_once - 1) / tiles_at_once;
    // The warp's panels of each tile.
    const u32 each = (n_panels + a.warps_a_tile - 1) / a.warps_a_tile;
    const u32 first = min(warp % a.warps_a_tile * each, n_panels), end = min(first + each, n_panels);

    u32 ask_group = block, ask_half = 0, ask_panel = first, stage = 0;
    const Matrix* ask_matrix = &first_matrix;
    u32 ask_tile = ask_group * tiles_at_once + of_group;
    auto ask = [&] {
        // The next panels of all that are the warp's.
        if (ask_group < n_groups && ask_tile < n_tiles && first < end) {
#pragma unroll
            for (int i = 0; i < PAIR; i++)
                if (ask_panel + i < end)
                    Staging::copy(ring + (stage * PAIR + i) * Staging::BYTES, *ask_matrix, ask_tile, ask_panel + i, lane);
            ask_panel += PAIR;
            if (ask_panel >= end) {
                ask_panel = first;
                if (++ask_half == n_halves) ask_half = 0, ask_group += n_blocks_of_part, ask_tile = ask_group * tiles_at_once + of_group;
                ask_matrix = ask_half == 0 ? &first_matrix : &second_matrix;
            }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        commit_copies();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) ask();
    wait_for_input();
    let_next_start();

    const u32 n_in4 = (a.n_in + 3) / 4, n_padded4 = n_blocks * 8;
#pragma unroll 1
    for (int token = 0; token < TOKENS; token++) {
        const float4* x = (const float4*)(a.x + (size_t)(a.rows ? a.rows[token] : token) * a.n_in);
        const float4* norm = (const float4*)a.norm;
        const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f), one = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
        float squares = 0.0f, most = 0.0f;
        float4 held[HELD];
        const bool fits = n_padded4 <= HELD * 32 * WARPS;
        for (u32 base = 0; base < n_padded4; base += HELD * 32 * WARPS) {
            float4 weights[HELD];
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                const u32 i = base + tid + j * 32 * WARPS;
                held[j] = i < n_in4 ? x[i] : zero;
                weights[j] = norm && i < n_in4 ? norm[i] : one;
            }
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                float4& v = held[j];
                squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
                v.x *= weights[j].x, v.y *= weights[j].y, v.z *= weights[j].z, v.w *= weights[j].w;
                most = fmaxf(most, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
            }
        }
        squares = warp_sum(squares);
        most = warp_max(most);
        if (token > 0) __syncthreads();
        if (lane == 0) scratch[warp] = make_float2(squares, most);
        __syncthreads();
        squares = 0.0f, most = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) squares += scratch[i].x, most = fmaxf(most, scratch[i].y);
        const float rms = a.norm ? rsqrtf(squares / a.n_in + a.eps) : 1.0f;
        const float largest = most * rms;
        const int exponent = largest > 0.0f && largest < INFINITY ? ilogbf(largest) : 0;
        const float up = ldexpf(1.0f, 13 - exponent) * rms;
        if (tid == 0) factors[token] = ldexpf(S::SUBS == 0 ? 1.0f : UNIT, exponent - 13);
        for (u32 base = 0; base < n_padded4; base += HELD * 32 * WARPS) {
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                const u32 i = base + tid + j * 32 * WARPS;
                if (!fits) {
                    const float4 w = norm && i < n_in4 ? norm[i] : one;
                    held[j] = i < n_in4 ? x[i] : zero;
                    held[j].x *= w.x, held[j].y *= w.y, held[j].z *= w.z, held[j].w *= w.w;
                }
                const float v[4] = {held[j].x * up, held[j].y * up, held[j].z * up, held[j].w * up};
                half hi[4], lo[4];
                float sum = 0.0f;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float w = S::ODD_SIXTEENTH && e >= 2 ? v[e] * 0.0625f : v[e];
                    hi[e] = __float2half_rn(w);
                    lo[e] = __float2half_rn((w - __half2float(hi[e])) * 2048.0f);
                    sum += v[e];
                }
                // Four threads have the 16 columns of a product.
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (i >= n_padded4) continue;
                const u32 of = i / 8, k = i % 8 * 4;
                if (i % 4 == 0) sums[(token * n_blocks + of) * 2 + k / 16] = sum;
                unsigned char* to = input + ((size_t)token * n_blocks + of) * 128 + 2 * place_in_block(k);
                *(uint2*)to = make_uint2(bits(__halves2half2(hi[0], hi[1])), bits(__halves2half2(hi[2], hi[3])));
                *(uint2*)(to + 64) = make_uint2(bits(__halves2half2(lo[0], lo[1])), bits(__halves2half2(lo[2], lo[3])));
            }
        }
    }
    __syncthreads();

    const int g = lane / 4, t = lane % 4;
    u32 used = 0;
    for (u32 group = block; group < n_groups; group += n_blocks_of_part) {
        // What is added to, on its way.
        constexpr int EACH = TOKENS > 2 ? 2 : 1; // results of a thread
        float before[EACH];
        float* out[EACH];
        u32 of[EACH], rest[EACH], rows[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const u32 i = tid + j * 32 * WARPS;
            of[j] = i / (16 * TOKENS), rest[j] = i % (16 * TOKENS);
            const u32 of_part = (group * tiles_at_once + of[j]) * 16 + rest[j] / TOKENS;
            rows[j] = first_matrix.first_row + of_part;
            const bool writes = i < tiles_at_once * 16 * TOKENS && of_part < first_matrix.n_rows;
            out[j] = writes ? a.y + (size_t)(rest[j] % TOKENS) * a.n_out + rows[j] : nullptr;
            before[j] = writes && a.output == ADD ? *out[j] : 0.0f;
        }
        const bool has_tile = group * tiles_at_once + of_group < n_tiles;
        for (u32 half_of = 0; half_of < n_halves; half_of++) {
            float sums_of[PAIR][4] = {};
            if (has_tile) {
                for (u32 panel = first; panel < end; panel += PAIR) {
                    wait_for_copies<STAGES - 2>();
                    __syncwarp();
                    S p[PAIR];
#pragma unroll
                    for (int i = 0; i < PAIR; i++) p[i].read(Staging::place(ring + (used * PAIR + i) * Staging::BYTES), lane);
                    used = used + 1 == STAGES ? 0 : used + 1;
                    // Into the place of the panels before, which all lanes have read.
                    ask();
                    if (PAIR == 1 || panel + 1 < end) {
#pragma unroll
                        for (int i = 0; i < PAIR; i++)
                            panel_products<S, TOKENS>(p[i], panel + i, n_blocks, input, sums, lane, sums_of[i]);
                    } else {
                        panel_products<S, TOKENS>(p[0], panel, n_blocks, input, sums, lane, sums_of[0]);
                    }
                }
            }
            float acc[4];
#pragma unroll
            for (int i = 0; i < 4; i++) acc[i] = PAIR == 2 ? sums_of[0][i] + sums_of[PAIR - 1][i] : sums_of[0][i];
            if (t < TOKENS) {
                float* at = partial + ((half_of * WARPS + warp) * 16) * TOKENS;
                at[g * TOKENS + t] = acc[0] + acc[1] * (1.0f / 2048.0f);
                at[(g + 8) * TOKENS + t] = acc[2] + acc[3] * (1.0f / 2048.0f);
            }
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            if (!out[j]) continue;
            float y[2] = {0.0f, 0.0f};
#pragma unroll
            for (u32 half_of = 0; half_of < 2; half_of++) {
                if (half_of == n_halves) break;
                const float* at = partial + ((half_of * WARPS + of[j] * a.warps_a_tile) * 16) * TOKENS + rest[j];
                for (u32 w = 0; w < a.warps_a_tile; w++) y[half_of] += at[w * 16 * TOKENS];
                y[half_of] *= factors[rest[j] % TOKENS];
            }
            if (gated) {
                *out[j] = activate(a.activation, y[0]) * y[1];
            } else {
                const float v = a.bias ? y[0] + a.bias[rows[j]] : y[0];
                *out[j] = a.output == ADD ? before[j] + a.scale * v : v;
            }
        }
        __syncthreads();
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
    switch (m.format) {
        case F16: matvec_part<F16, TOKENS>(a, m, second, block, n); break;
        case Q8_0: matvec_part<Q8_0, TOKENS>(a, m, second, block, n); break;
        case Q4_0: matvec_part<Q4_0, TOKENS>(a, m, second, block, n); break;
        case Q4_K: matvec_part<Q4_K, TOKENS>(a, m, second, block, n); break;
        case Q5_K: matvec_part<Q5_K, TOKENS>(a, m, second, block, n); break;
        case Q6_K: matvec_part<Q6_K, TOKENS>(a, m, second, block, n); break;
        case F32: matvec_part<F32, TOKENS>(a, m, second, block, n); break;
        case CODES: matvec_part<CODES, TOKENS>(a, m, second, block, n); break;
        case CODES_AND_MINS: matvec_part<CODES_AND_MINS, TOKENS>(a, m, second, block, n); break;
        default: __trap();
    }
}

#define MATVEC(N) \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) matvec_##N(const __grid_constant__ MatvecArgs a) { matvec<N>(a); }
MATVEC(1)
MATVEC(2)
MATVEC(3)
MATVEC(4)
#endif
