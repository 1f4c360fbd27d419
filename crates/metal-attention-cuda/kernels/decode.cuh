// What decode.cu works on, and how its blocks talk to each other.
#pragma once
#include "formats.cuh"
#include "heads.cuh"
#include "routing.cuh"

constexpr int LOG_WARPS = 3, WARPS = 1 << LOG_WARPS;
constexpr int THREADS = 32 * WARPS;
// Four more warps, which give the others their registers and ask for weights; where products are small, one of them ends steps instead.
constexpr int ASKERS = 4, ALL_THREADS = THREADS + 32 * ASKERS;
constexpr int GROUP = 4; // query heads of a unit of attention
// Tiles of the head that a warp has sums of at once.
constexpr u32 HEAD_TILES = 8;
// Copies of what all blocks read, so that they do not all look at the same words.
constexpr u32 COPIES = 4;

SHARED_MEMORY(128, unsigned char, decode_memory);

enum Kind : u32 { QKV = 0, ATTENTION_OUTPUT = 1, GATE_AND_UP = 2, DOWN = 3, HEAD = 4, ROUTER = 5 };

// A product of all rows of up to three matrices, one below the other, or of the gate and up, with one input. As `StepArgs`
// of src/decode.rs has it.
struct Step {
    const float* norm;       // [n_in], or null
    const float* bias;       // [rows], or null
    const ulonglong2* from;  // words of the inputs
    u64_t* to;               // words of the results
    u32 kind;
    u32 n_in;
    float eps;
    float reciprocal;        // 1 / n_in
    u32 first_part, n_parts; // of all of the model
    u32 n_rows[3];           // of the matrices
    u32 tag_in, tag_out;     // of the words, beyond the layer's
    unsigned short has_codes, has_offsets; // whether the matrices are of codes, or of floats, and whether one has offsets
    u32 copies, n_out;       // of the results, and how many these are
    u32 unit, n_units;       // panels that stay together, and how many of these a row has
    unsigned short log_split; // of the warps among which the columns of a tile are split
    unsigned short region;    // where the sums of its products lie, by turns
    unsigned short has_halves;  // whether one of them has scales of halves of blocks
    unsigned short ready_tiles; // how many tiles a block has at most, where their weights are taken before the inputs are there; else 0
};
// Queries, keys and values; attention's output; the router, where there are experts; gate and up; down.
constexpr int STEPS = 5;

// As `LayerArgs` has it. The last one has nothing but the head's step.
struct __align__(16) Layer {
    Step steps[STEPS];
    HeadInputs inputs;
    Pages pages;
    void* k_cache;       // [page][kv head][64][head_dim]
    void* v_cache;
    const float* sinks;  // [n_head], or null
    u32 n_steps;
    u32 n_head, n_kv_head, head_dim, mask, reach, activation;
    float soft_cap, scale; // soft_cap 0: none
    u32 heads_a_kv_head;   // query heads
    u32 chunks_a_kv_head, units_a_split; // of attention, of up to GROUP of these heads
    u32 reciprocal_of_dim; // 2^32 / head_dim, and one more
    float activation_limit;
    const float* expert_bias[3]; // of gate, up and down: [n_expert][rows] each, or null
    RouteArgs route;       // of experts, which have gate, up and down; `n_expert` 0: of none. Words are in place of what it points to
};

// A matrix, as `PartArgs` of src/decode.rs has it.
struct PartArgs {
    const unsigned char* records;
    u32 tile_bytes;
    u32 n_tiles;
    u32 first, n_of_product; // of the tiles of a product, where these are those of several matrices
    unsigned short record_bytes, records_a_slot, format, log_split, n_units, records_a_unit;
    u32 n_layers; // of experts: known when those of so many of the token's layers are chosen; else 0
    // Of experts: bytes of each, tiles and records of a row that are those of one.
    u32 expert_bytes, tiles_of_expert, records_of_expert;
    u32 first_block; // that has some, where tiles are fewer than blocks
};

struct DecodeArgs {
    const Layer* layers;
    const PartArgs* parts;   // of layers, in their order, and the head
    Matrix table;            // [n_vocab][n_embd]
    Token* token;
    float* logits;           // [n_vocab], or null
    u64_t* ids;              // of the host: `tell_id`
    u64_t* best;             // words of the blocks' highest logits, of tokens by turns: [2][gridDim.x]
    const u64_t* qkv;        // words of queries, keys and values
    u64_t* att;              // of [split][n_head * head_dim]
    u64_t* sums;             // of [split][n_head] maxima and sums
    u32 n_layer, n_embd, n_parts;
    u32 tag;                 // of the first exchange
    u32 advance;             // whether the token goes on with what was chosen
    u32 slot_bytes, n_slots; // of each warp's weights on their way
    u32 region_floats;                        // of a matrix's sums
    u32 att_words, sums_words;                // of a copy
    // Where things lie in the block's memory: each warp's inputs, sums of products of steps by turns, the residual stream of the block's rows,
    // parts, spans of layers, what turns heads and weights of their norms, barriers, what experts are chosen by.
    u32 input_at, input_stride, regions_at[2], residual_at, parts_at, spans_at, heads_at, barriers_at, choice_at;
    float embedding_scale, logit_scale, logit_cap;
    u32 n_tokens, number;    // to go through all layers, and of the step that the first of them is
    float split_gain;        // of attention: `span_of`
    u32 slots_at_once;       // of a warp on their way at most
    u32 unused;
};

// For compute-sanitizer's racecheck, which does not follow flags, barriers at which threads arrive without waiting, and lanes that wait for several barriers
// side by side: what it does follow takes their place, which is slower.
#ifdef RACECHECK
constexpr bool FOR_RACECHECK = true;
#else
constexpr bool FOR_RACECHECK = false;
#endif

// A token's experts of a layer, chosen by a warp of the block for all of it.
constexpr int MAX_EXPERTS = 32;
struct Chosen {
    u32 experts[MAX_EXPERTS];
    float weights[MAX_EXPERTS];
    u32 n_layers; // of all tokens of the launch up to this one
    u32 known[FOR_RACECHECK ? MAX_EXPERTS : 1]; // the experts once more
    // By the warp that has chosen, for those who ask for weights. `n`: layers so far.
    __device__ __forceinline__ void tell(u32 n, u32 n_used, int lane) {
        if constexpr (FOR_RACECHECK) {
            if (lane < (int)n_used) atomicExch(known + lane, experts[lane]);
        }
        __threadfence_block();
        __syncwarp();
        if (lane > 0) return;
        if constexpr (FOR_RACECHECK) atomicExch(&n_layers, n);
        else *(volatile u32*)&n_layers = n;
    }
    // For those who ask: whether those of `n` layers are chosen, and the last one's.
    __device__ __forceinline__ bool has(u32 n) {
        const u32 so_far = FOR_RACECHECK ? atomicAdd(&n_layers, 0) : *(const volatile u32*)&n_layers;
        __threadfence_block();
        return so_far >= n;
    }
    __device__ __forceinline__ u32 expert(u32 place) { return FOR_RACECHECK ? atomicAdd(known + (FOR_RACECHECK ? place : 0), 0) : experts[place]; }
};

// A number that is known when code is compiled, as an argument.
template <int N> struct Count {
    static constexpr int value = N;
};
// Where something lies in the block's memory, in a register that is filled where it is said to be.
__device__ __forceinline__ u32 offset_of(const void* p) { return (u32)((const unsigned char*)p - decode_memory); }
template <typename T> __device__ __forceinline__ const T* at_offset(u32 offset) { return (const T*)(decode_memory + offset); }
__device__ __forceinline__ void settle(u32& v) { asm volatile("" : "+r"(v)); }
template <typename T> __device__ __forceinline__ void settle(T*& p) { asm volatile("" : "+l"(p)); }

// All threads that work; the warps that ask for weights do not.
__device__ __forceinline__ void all_meet() { threads_meet<1, THREADS>(); }

// How the warps that work on steps of small products and the one that ends them know of each other.
struct StepEnds {
    u32 n_ended;
    u64_t sums, ended; // FOR_RACECHECK: barriers, whose phases are steps
    __device__ __forceinline__ void init() {
        n_ended = 0;
        if constexpr (FOR_RACECHECK) barrier_init(&sums, THREADS), barrier_init(&ended, 32);
    }
    // A warp's sums are there.
    __device__ __forceinline__ void sums_are_ready() {
        if constexpr (FOR_RACECHECK) barrier_arrive(&sums);
        else threads_arrive<2, THREADS + 32>();
    }
    // Waits for all sums of step `n`.
    __device__ __forceinline__ void wait_for_sums(u32 n) {
        if constexpr (FOR_RACECHECK)
            while (!barrier_try_wait(&sums, n & 1)) spin_pause();
        else
            threads_meet<2, THREADS + 32>();
    }
    // One more has ended.
    __device__ __forceinline__ void tell_end(int lane) {
        if constexpr (FOR_RACECHECK) barrier_arrive(&ended);
        else if (lane == 0) *(volatile u32*)&n_ended = n_ended + 1;
    }
    // Waits until `n` of them have. Before a warp says that its sums are there, those of the step before have to be known to be: of inputs of a few heads, or
    // of no columns, it could have more before others have any.
    __device__ __forceinline__ void wait_for_end(u32 n) {
        if constexpr (FOR_RACECHECK)
            while (!barrier_try_wait(&ended, ~n & 1)) spin_pause();
        else
            while (*(const volatile u32*)&n_ended != n) spin_pause();
    }
};
// Whoever works, and who ends steps, between a token of these and the next.
__device__ __forceinline__ void all_meet_who_ends() { threads_meet<3, THREADS + 32>(); }

// Two values of 26 bits and a tag of 12.
constexpr u32 TAG = 0xfff;
// The six bits less are cut off, but half of what they are worth is added before, or some more or less, as a product that leaves infinity and what is no
// number what they are: of a mantissa from 1 to 2 it adds 0.375 to 0.75 of the last bit that is left. What is rounded stays as it is.
__device__ __forceinline__ u32 rounded(float v) { return __float_as_uint(v * (1.0f + 0.75f / (1 << 18))) & ~63u; }
__device__ __forceinline__ u64_t pack_pair(float a, float b, u32 tag) {
    const u32 x = rounded(a), y = rounded(b);
    return (u64_t)(x | y >> 26) << 32 | (y << 6 | tag);
}
__device__ __forceinline__ float2 unpack_pair(u64_t word) {
    return make_float2(__uint_as_float((u32)(word >> 32) & ~63u), __uint_as_float((u32)(word >> 6) & ~63u));
}
__device__ __forceinline__ bool has_tag(u64_t word, u32 tag) { return ((u32)word & TAG) == tag; }
__device__ __forceinline__ bool has_tag(const ulonglong2& words, u32 tag) { return ((((u32)words.x ^ tag) | ((u32)words.y ^ tag)) & TAG) == 0; }
// Whether words have a tag or one after it, of which a token has fewer than half of all.
__device__ __forceinline__ bool is_since(u64_t word, u32 tag) { return (((u32)word - tag) & TAG) <= TAG / 2; }
__device__ __forceinline__ bool is_since(const ulonglong2& words, u32 tag) { return is_since(words.x, tag) && is_since(words.y, tag); }
// Asks for the words that a warp's lanes want, each of what its `there` says.
template <int N, typename W, typename P> __device__ __forceinline__ void ask_for_words(W (&words)[N], const bool (&there)[N], P from) {
#pragma unroll
    for (int k = 0; k < N; k++) {
        words[k] = W();
        load_exchanged_if(there[k], words[k], from(k));
    }
}
// Waits for them: those that have no tag yet are looked at again.
template <int N, typename W, typename P> __device__ __forceinline__ void wait_for_words(W (&words)[N], const bool (&there)[N], u32 tag, P from) {
    while (true) {
        bool wanted[N], any = false;
#pragma unroll
        for (int k = 0; k < N; k++) wanted[k] = there[k] & !has_tag(words[k], tag), any |= wanted[k];
        if (!__any_sync(~0u, any)) return;
        spin_pause();
#pragma unroll
        for (int k = 0; k < N; k++) load_exchanged_if(wanted[k], words[k], from(k));
    }
}
// The same of two kinds of words, which are looked at together.
template <int N, typename W, typename P, int M, typename V, typename Q>
__device__ __forceinline__ void wait_for_words(W (&words)[N], const bool (&there)[N], P from, V (&more)[M], const bool (&more_there)[M], Q more_from, u32 tag) {
    while (true) {
        bool wanted[N], more_wanted[M], any = false;
#pragma unroll
        for (int k = 0; k < N; k++) wanted[k] = there[k] & !has_tag(words[k], tag), any |= wanted[k];
#pragma unroll
        for (int k = 0; k < M; k++) more_wanted[k] = more_there[k] & !has_tag(more[k], tag), any |= more_wanted[k];
        if (!__any_sync(~0u, any)) return;
        spin_pause();
#pragma unroll
        for (int k = 0; k < N; k++) load_exchanged_if(wanted[k], words[k], from(k));
#pragma unroll
        for (int k = 0; k < M; k++) load_exchanged_if(more_wanted[k], more[k], more_from(k));
    }
}
// Writes a word `n` times, `stride` words apart, for all who read it.
__device__ __forceinline__ void store_words(u64_t* to, u64_t word, u32 n, u32 stride) {
#pragma unroll
    for (u32 c = 0; c < COPIES; c++)
        if (c < n) store_exchanged(to + c * stride, word);
}
__device__ __forceinline__ float4 unpack(const ulonglong2& words) {
    const float2 a = unpack_pair(words.x), b = unpack_pair(words.y);
    return make_float4(a.x, a.y, b.x, b.y);
}
__device__ __forceinline__ void multiply(float4& v, const float4& by) { v.x *= by.x, v.y *= by.y, v.z *= by.z, v.w *= by.w; }
__device__ __forceinline__ float squares_of(const float4& v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
