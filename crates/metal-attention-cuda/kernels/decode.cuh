// Shapes, arguments and small helpers of the persistent decode kernel (decode.cu), for all of its parts.
//
// The kernel evaluates one token, or a few that follow each other, through all layers of a model in one launch. Its grid is
// persistent and co-resident: one block on each multiprocessor, launched cooperatively, because blocks wait for each other's results
// in global memory. docs/design/decode-kernel.md describes the pipeline and proves that no write overtakes a read; "Lemma n" in these
// files refers to that page.
//
// Warps of a block (warp specialisation):
//   consumer warps   CONSUMER_WARPS; read inputs, multiply, and (except for small ops) finish their rows
//   producer warps   PRODUCER_WARPS; give most of their registers to the consumers and copy weights into the consumers' rings
//   epilogue warp    the last of the producer warps where all ops are small (SMALL kernels): it finishes the rows of every op
//
// Words used in all files decode*.cuh:
//   op      one product of a layer with its prologue (norm) and epilogue (bias, gate, residual): q/k/v, attention output, router,
//           gate and up, down. The output head is the single op of a pseudo-layer with index `n_layer`.
//   tile    16 rows of a matrix.
//   panel   64 columns of a tile: two quantisation blocks of 32 columns each.
//   record  the codes and scales of one to four neighbouring panels of a tile, contiguous in memory (formats.cuh).
//   unit    the `panels_per_unit` panels of a row that one warp gets as a whole: the panels of the largest record of the op.
//   stage   one buffer of a consumer warp's ring of weights in shared memory; it holds whole records of one matrix.
//   word    an LL word (NCCL's low-latency protocol): 8 bytes in global memory with two values of 26 bits and a tag of 12 bits.
//   tag     the number in a word that says which layer of which token wrote it (decode_exchange.cuh).
//   region  one of two areas of shared memory for the warps' partial sums; ops use them alternately.
#pragma once
#include "formats.cuh"
#include "heads.cuh"
#include "routing.cuh"

constexpr int LOG_CONSUMER_WARPS = 3, CONSUMER_WARPS = 1 << LOG_CONSUMER_WARPS;
constexpr int CONSUMER_THREADS = 32 * CONSUMER_WARPS;
constexpr int PRODUCER_WARPS = 4; // including the epilogue warp of SMALL kernels
constexpr int BLOCK_THREADS = CONSUMER_THREADS + 32 * PRODUCER_WARPS;
// Query heads of one KV head that one unit of attention evaluates together.
constexpr int HEADS_PER_TASK = 4;
// Tiles of the output head of which a group of warps has partial sums at once. The head has too many rows for all sums to be in
// shared memory.
constexpr u32 HEAD_TILES_PER_ROUND = 8;
// Copies of a vector that every block reads. Blocks read copy `blockIdx.x % COPIES`, so that polling spreads over more L2 lines.
constexpr u32 COPIES = 4;

// The block's dynamic shared memory; `DecodeArgs` has the offsets of its parts.
SHARED_MEMORY(128, unsigned char, decode_memory);

// The ops of a layer. The numbers are those of `OpKind` of src/decode/args.rs.
enum OpKind : u32 { QKV = 0, ATTENTION_OUTPUT = 1, GATE_AND_UP = 2, DOWN = 3, OUTPUT_HEAD = 4, ROUTER = 5 };

// One op. QKV has three matrices, one below the other; GATE_AND_UP has two of equal shape, whose rows are combined pairwise; the
// others have one. All matrices of an op have the same input. Mirrored by `OpArgs` of src/decode/args.rs.
struct Op {
    const float* norm;         // [n_in] weights of the RMSNorm of the input; null: no norm
    const float* bias;         // [sum of n_rows] added to the results; null: none
    const ulonglong2* input;   // [COPIES][n_in / 4] pairs of words of the input vector; attention's results: unused
    u64_t* output;             // [copies][n_out / 2] words of the result vector
    u32 kind;                  // OpKind
    u32 n_in;                  // elements of the input, a multiple of 4
    float eps;                 // of the norm
    float inverse_n_in;        // 1 / n_in
    u32 first_matrix_index;         // index of the op's first matrix among all matrices of the model
    u32 n_matrices;            // 1 to 3
    u32 n_rows[3];             // rows of each matrix
    u32 tag_in;                // tag of the input words minus the layer's tag, modulo 2^12
    u32 tag_out;               // tag of the output words minus the layer's tag
    unsigned short has_codes;  // 1: the matrices are quantised; 0: they are F16 or F32
    unsigned short has_mins; // 1: a matrix has offsets (mins), for which sums of inputs are needed
    u32 n_copies;              // copies of the output words: COPIES, or 1 where few blocks read them
    u32 n_out;                 // elements of the output
    u32 panels_per_unit;       // panels of a unit
    u32 units_per_row;         // units of a row
    unsigned short log_warps_per_tile;  // log2 of the number of warps that share the columns of a tile
    unsigned short region;     // 0 or 1: the region of the partial sums; successive ops alternate
    unsigned short has_half_scales; // 1: a matrix has a scale for each half of a quantisation block
    unsigned short preload_tiles;   // most tiles that a block has of a small op (1 or 2); 0: the op is not small
};
// Ops of a layer at most: q/k/v; attention output; router, with experts only; gate and up; down.
constexpr int MAX_OPS = 5;

// One layer. The pseudo-layer `n_layer` has one op, the output head, and zeros otherwise. Mirrored by `LayerArgs`.
struct __align__(16) Layer {
    Op ops[MAX_OPS];
    HeadInputs head_inputs;    // norm and rotation of queries and keys
    Pages pages;               // page table of the layer's cache group
    void* k_cache;             // F16 [page][n_kv_head][64][head_dim]
    void* v_cache;             // the same shape
    const float* sinks;        // [n_head] scores of attention sinks; null: none
    u32 n_ops;                 // ops in use
    u32 n_head;                // query heads
    u32 n_kv_head;             // key and value heads
    u32 head_dim;              // elements of a head
    u32 mask;                  // Mask of masks.cuh
    u32 mask_positions;            // positions of the mask's window or chunk
    u32 activation;            // Activation of the gate
    float soft_cap;            // cap of attention scores; 0: none
    float residual_scale;      // factor on what is added to the residual stream
    u32 heads_per_kv_head;     // query heads that share a KV head
    u32 head_groups_per_kv_head;    // groups of query heads of a KV head: heads_per_kv_head / HEADS_PER_TASK, rounded up
    u32 tasks_per_split;       // units of one split of positions: n_kv_head * head_groups_per_kv_head
    u32 inverse_head_dim;      // 2^32 / head_dim + 1, for division by multiplication
    float activation_limit;    // of CLAMPED_SWIGLU
    const float* expert_bias[3]; // [n_expert][rows of one expert] of gate, up and down; null: none
    RouteArgs route;           // of the router; n_expert 0: a dense feed-forward. Its pointers to tokens are unused
};

// One matrix of an op, as the host describes it. Of experts it stands for the matrices of all experts of the layer, of which the
// kernel multiplies the chosen ones: rows of gate and up one below the other, columns of down side by side. Mirrored by
// `OpMatrixArgs`.
struct OpMatrixArgs {
    const unsigned char* records;     // [tile][record]
    u32 tile_bytes;                   // bytes from one tile to the next
    u32 n_tiles;                      // tiles of the matrix; of experts: of all chosen ones together
    u32 first_tile;                   // index of its first tile among those of the op
    u32 op_tiles;                     // tiles of the op that are divided among blocks together
    unsigned short record_bytes;      // bytes of a record
    unsigned short records_per_stage; // records that fit in a stage
    unsigned short format;            // Format of formats.cuh
    unsigned short log_warps_per_tile;         // as in Op
    unsigned short units_per_row;     // as in Op
    unsigned short records_per_unit;  // records of a unit
    u32 routed_layers;                // layers of the token whose experts have to be chosen before a copy starts; 0: not experts
    u32 expert_stride;                // bytes from one expert's weights to the next one's
    u32 tiles_per_expert;             // tiles of one expert
    u32 records_per_expert;           // records of a row that belong to one expert
    u32 first_block;                  // first block that gets a tile, where there are fewer tiles than blocks
};

// The kernel's argument. Mirrored by `DecodeArgs` of src/decode/args.rs.
struct DecodeArgs {
    const Layer* layers;          // [n_layer + 1]; the last one is the pseudo-layer of the output head
    const OpMatrixArgs* matrices; // [n_matrices] of all layers in order, then of the head
    Matrix table;                 // [n_vocab][n_embd] token embeddings
    Token* token;                 // the first token: id, sequence, position; the next one afterwards if `advance`
    float* logits;                // [n_vocab] of the last token; null: not wanted
    u64_t* ids;                   // host memory to which chosen ids are written (`publish_id`)
    u64_t* best_words;            // [2][gridDim.x] words of the blocks' best logits, alternating between tokens
    const u64_t* qkv;             // [(n_head + 2 n_kv_head) * head_dim / 2] words of queries, keys and values
    u64_t* attention;                 // [COPIES][split][n_head * head_dim / 2] words of attention's weighted sums of values
    u64_t* attention_max_sums;            // [COPIES][split][n_head] words of the maximum score and the sum of weights
    u32 n_layer;                  // layers of the model
    u32 n_embd;                   // elements of the residual stream
    u32 n_matrices;               // matrices of all ops
    u32 tag;                      // the layer tag of the first token's layer 0
    u32 advance;                  // 1: `*token` becomes the token after the last one
    u32 stage_bytes;              // bytes of a stage
    u32 stages_per_warp;          // stages of a consumer warp's ring
    u32 gate_to_up_floats;            // floats from the gate's partial sums to those of up
    u32 attention_copy_words;           // words of one copy of `attention`
    u32 max_sums_copy_words;        // words of one copy of `attention_max_sums`
    u32 inputs_at;                // offset of the warps' inputs, which attention uses as its scratch
    u32 input_stride;             // bytes from one warp's inputs to the next one's
    u32 regions_at[2];            // offsets of the two regions of partial sums
    u32 residual_at;              // offset of the block's rows of the residual stream
    u32 shares_at;                // offset of BlockShare [n_matrices]
    u32 spans_at;                 // offset of AttentionSpan [n_layer]
    u32 head_constants_at;                 // offset of cosines, sines and weights of head norms
    u32 barriers_at;              // offset of the rings' mbarriers, followed by 16 bytes of zeros
    u32 routing_at;               // offset of the scores that experts are chosen by
    float embedding_scale;        // factor on embeddings
    float logit_scale;            // factor on logits
    float logit_cap;              // cap of logits; 0: none
    u32 n_tokens;                 // tokens that the launch evaluates, at least 1
    u32 first_step_number;        // number of the first token's decode step, which is written with its id
    float split_gain;             // how much a split of positions saves, in units of merging it (`span_of`)
    u32 max_stages_in_flight;     // stages of a warp whose copies may be outstanding
    u32 unused;
};

// RACECHECK builds are for compute-sanitizer's racecheck. It does not understand flags, barriers at which threads arrive without
// waiting, and lanes that wait for several mbarriers at a time; these builds use slower means that it does understand.
#ifdef RACECHECK
constexpr bool FOR_RACECHECK = true;
#else
constexpr bool FOR_RACECHECK = false;
#endif

// An integer as a type, so that a lambda can take a compile-time argument.
template <int N> struct Constant {
    static constexpr int value = N;
};
// Addresses in the block's shared memory as 32-bit offsets, which take one register instead of two.
__device__ __forceinline__ u32 shared_offset(const void* p) { return (u32)((const unsigned char*)p - decode_memory); }
template <typename T> __device__ __forceinline__ const T* shared_at(u32 offset) { return (const T*)(decode_memory + offset); }
// Keeps the compiler from computing a value later than here, or a second time.
__device__ __forceinline__ void pin_register(u32& v) { asm volatile("" : "+r"(v)); }
template <typename T> __device__ __forceinline__ void pin_register(T*& p) { asm volatile("" : "+l"(p)); }

__device__ __forceinline__ void multiply(float4& v, const float4& by) { v.x *= by.x, v.y *= by.y, v.z *= by.z, v.w *= by.w; }
__device__ __forceinline__ float sum_of_squares(const float4& v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
