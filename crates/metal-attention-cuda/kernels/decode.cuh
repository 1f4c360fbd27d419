// Shapes, arguments and small helpers of the persistent decode kernel (decode.cu), for all of its parts.
//
// The kernel evaluates one token, or a few that follow each other, through all layers of a model in one launch. Its grid is
// persistent and co-resident: one block on each multiprocessor, launched cooperatively, because blocks wait for each other's results
// in global memory. docs/design/decode-kernel.md describes the pipeline and proves that no write overtakes a read; "Lemma n" in these
// files refers to that page.
//
// Warps of a block (warp specialisation):
//   consumer warps   CONSUMER_WARPS; read inputs, multiply, and finish the rows of full ops
//   producer warps   PRODUCER_WARPS; give most of their registers to the consumers and copy weights into the consumers' rings
//   epilogue warp    in SMALL kernels only, the last of the producer warps: it finishes the rows of all small ops
//
// Terms used in all files decode*.cuh and in decode.cu. The weights:
//   quant block  quantisation block: 32 neighbouring columns of a row, or the 32 elements of an input vector that meet them. "Block" alone is
//                always the thread block.
//   tile         16 rows of a matrix.
//   panel        64 columns of a tile: two quant blocks of each row.
//   record       the codes and scales of one to four neighbouring panels of a tile, contiguous in memory (formats.cuh).
//   code         the integer of a quantised weight.
//   mins         offsets that formats such as Q4_K subtract: weight = scale * code - min. They need the sums of the inputs.
//   quad         four neighbouring elements of a vector.
//   digit        one of three signed 8-bit integers d0, d1 and d2 that stand for an input x in products with codes:
//                round(x 2^e) = 2^16 d0 + 2^8 d1 + d2. The exponent e of a quant block brings its largest magnitude, if that is at least 2^-100,
//                to [2^21, 2^22), so that errors are at most 2^-22 of that. The d0 of a quant block's inputs are one column of a tensor-core
//                product, the d1 another, the d2 a third; sums of codes times digits are exact (code_products.cuh). In products with F16 and
//                F32 weights an input is two F16 parts instead, hi + lo / 2048 (products.cuh).
// The ops:
//   op           one product of a layer with its prologue (norm, conversion of inputs) and epilogue (bias, gate, residual): q/k/v, attention
//                output, router, gate and up, down. The output head is the single op of a pseudo-layer with index `n_layer`. Attention itself
//                (scores, softmax, weighted sum of values) is no op: it runs before the attention output (decode_attention.cuh).
//                To finish a row is to add the warps' partial sums of it, and to do the epilogue.
//   small op     an op that a SMALL kernel evaluates from registers, into which each warp loads its weights before the inputs arrive
//                (decode_preload.cuh). No block has more than two tiles of it (of gate and up: one each), and no warp more than PRELOAD_PANELS
//                (four) panels in all, so that they fit. Its matrices are quantised; routers, experts and the output head are never small
//                (`preload_tiles` of src/decode/args.rs has the rule).
//   full op      any op that is not evaluated so. SMALL kernels are for models of which every op of every layer keeps to these limits; there
//                the token's first op, which reads the embedding, and the output head are the full ops. In other kernels all ops are.
// The division of work:
//   share        the part of a matrix or op that one rank, block or warp has (`RankShare`, `BlockShare`, `WarpShare`).
//   unit         the `panels_per_unit` neighbouring panels of a tile that one warp gets as a whole: as many panels as the largest record of
//                the op's matrices has, so that all matrices of the op are divided at the same columns and no record is divided.
//   warp group   the 2^log_warps_per_tile consumer warps of a block that share the columns of a tile (split-K within the block). Tile i of the
//                block, counted over q, k and v or over one other matrix, belongs to warp group i modulo the number of warp groups.
//   rank         one of several GPUs that share a model by tensor parallelism. Ranks exchange values through mailboxes (exchange.cuh).
//   stage        one buffer of a consumer warp's ring of weights in shared memory; it holds whole records of one matrix.
//   round        the tiles that a block multiplies before it finishes their rows: all tiles of an op, except of the output head, of which a
//                block has too many for their partial sums. There each warp group has OUTPUT_HEAD_TILES_PER_ROUND tiles of a round.
//   region       one of two areas of shared memory for the partial sums of a round. The ops of a token use them alternately
//                (`OpArgs::region`); so do the rounds of the output head, from the op's region on.
// Attention and experts:
//   head         of attention: a query head or a KV head. The output head is always called so.
//   head group   up to HEADS_PER_TASK query heads that share a KV head.
//   split        some of the positions that a token sees (split-KV).
//   span         the positions that a token sees in a layer, and how they are divided into splits (`AttentionSpan`).
//   task         of attention: one split, one KV head, and one of its head groups (decode_attention.cuh).
//   chosen       of experts: those that the router selects for the token, with their weights (`ExpertChoice` of decode_routing.cuh).
// The exchange between blocks:
//   tagged word  8 bytes in global memory that hold two values and a tag, stored at once, in the manner of NCCL's LL protocol
//                (decode_exchange.cuh). In short: word. Words of best logits hold a key of 52 bits in place of two values (decode_argmax.cuh).
//
//                  bit 63                    38 37                    12 11          0
//                      +-----------------------+-----------------------+-------------+
//                      | value 2 i             | value 2 i + 1         | tag         |
//                      | sign, exponent (8),   | the same              |             |
//                      | 17 bits of mantissa   |                       |             |
//                      +-----------------------+-----------------------+-------------+
//
//                A reader polls the word until it has the wanted tag. 12 bits for the tag leave 26 for each value: an F32 without its six
//                lowest mantissa bits, with a relative error below 2^-17 (`round_to_26_bits`). Errors of the residual stream do not add
//                up from layer to layer: the block that has a row keeps it in F32, and only the other blocks get the rounded value.
//   copy         of a vector of words: a vector that all blocks read has COPIES copies, of which each block reads one.
//   tag          the number in a word that says which layer of which token wrote it, modulo 2^12. Each layer has two tags (TAGS_PER_LAYER):
//                t, its layer tag, and t + 1, for the residual stream after the feed-forward. Before the first launch all words are zeros;
//                no reader of the first token wants tag 0, since its tags begin with 2. Tags repeat after 2^12 of them. An old word does not
//                have the wanted tag again: every word that is read was also written in the token before, or two tokens before if it is a
//                best logit, and a token has 2 (n_layer + 1) tags, fewer than 2^11 ("Budget of tags" in decode_exchange.cuh; Lemma 2 proves
//                it and names the exception).
//
// Tensor parallelism: decode_on_ranks.cu instantiates the kernel for ranks that share a model; its argument is DecodeArgs and a RankShare
// (decode_rows.cuh).
//
// Defined elsewhere: HeadInputs, Token, Pages and PAGE (64, the positions of a KV page) in heads.cuh; RouteArgs in routing.cuh; Matrix in
// formats.cuh; TAGS_PER_LAYER and TAG_MASK in decode_exchange.cuh; PRELOAD_PANELS in decode_preload.cuh; SUMS_STRIDE in
// decode_products.cuh; SHARED_MEMORY in ptx.cuh. MAX_TOKENS, the limit of tokens of a launch, is the host's (src/decode.rs).
#pragma once
#include "formats.cuh"
#include "heads.cuh"
#include "routing.cuh"

// The number of consumer warps, and its logarithm to base 2.
constexpr int LOG_CONSUMER_WARPS = 3, CONSUMER_WARPS = 1 << LOG_CONSUMER_WARPS;
constexpr int CONSUMER_THREADS = 32 * CONSUMER_WARPS;
constexpr int PRODUCER_WARPS = 4; // including the epilogue warp of SMALL kernels
constexpr int BLOCK_THREADS = CONSUMER_THREADS + 32 * PRODUCER_WARPS;
// Query heads of one KV head that one attention task evaluates together.
constexpr int HEADS_PER_TASK = 4;
// Tiles of the output head that a warp group multiplies in a round.
constexpr u32 OUTPUT_HEAD_TILES_PER_ROUND = 8;
// Copies of a vector that every block reads. Blocks read copy `blockIdx.x % COPIES`, so that polling spreads over more L2 lines.
constexpr u32 COPIES = 4;

// The block's dynamic shared memory; `DecodeArgs` has the offsets of its parts.
SHARED_MEMORY(128, unsigned char, decode_memory);

// The ops of a layer. The numbers are those of `OpKind` of src/decode/args.rs.
enum OpKind : u32 { QKV = 0, ATTENTION_OUTPUT = 1, GATE_AND_UP = 2, DOWN = 3, OUTPUT_HEAD = 4, ROUTER = 5 };

// One op. QKV has three matrices, one below the other; GATE_AND_UP has two of equal shape, whose rows are combined pairwise; the
// others have one. All matrices of an op have the same input. Some flags and small numbers have 16 bits, which keeps a layer's description small:
// each block copies it for every layer of every token.
struct OpArgs {
    const float* norm;         // [n_in] weights of the RMSNorm of the input, aligned to 16 bytes; null for ATTENTION_OUTPUT and DOWN, which have
                               // no norm, and never for the others
    const float* bias;         // [sum of n_rows] added to the results; null: none. Always null for GATE_AND_UP: the host does not use the kernel
                               // for a dense gate or up with a bias, and biases of experts are in `LayerArgs::expert_bias`. With several
                               // ranks the bias of ATTENTION_OUTPUT and of DOWN is on rank 0 only, since ranks add up their sums
                               // (src/sharding.rs)
    const ulonglong2* input;   // [COPIES][n_in / 4] pairs of words of the input vector. Unused by ATTENTION_OUTPUT, which merges the splits of
                               // attention (`DecodeArgs::attention`), and by the token's first op, which reads the embedding
    u64_t* output;             // [n_copies][(sum of n_rows) / 2] words of the result vector; of GATE_AND_UP [n_copies][n_out / 2]; null: the
                               // output head
    u32 kind;                  // OpKind
    u32 n_in;                  // elements of the input, a multiple of 4
    float eps;                 // of the norm
    float inverse_n_in;        // 1 / n_in
    u32 first_matrix_index;    // index of the op's first matrix among all matrices of the model
    u32 n_matrices;            // 1 to 3
    u32 n_rows[3];             // rows of each matrix, an even number except of the output head: the two values of a word are rows of one matrix
    u32 tag_in_offset;         // tag of the input words minus the layer tag, modulo 2^12. 0: words of the same layer; 2^12 - 1, that is, -1: what
                               // the layer before wrote last, with its layer tag + 1 (t - 1 = (t - TAGS_PER_LAYER) + 1)
    u32 tag_out_offset;        // tag of the output words minus the layer tag: 0, or 1 for DOWN
    unsigned short has_codes;  // 1: the matrices are quantised; 0: they are F16 or F32
    unsigned short has_mins;   // 1: a matrix has mins, for which sums of inputs are needed
    u32 n_copies;              // copies of the output words: COPIES, or 1 where few blocks read them
    u32 n_out;                 // elements of the output, twice the words of a copy. Of QKV the queries alone; it has no effect there, as there
                               // is one copy only
    u32 panels_per_unit;       // panels of a unit
    u32 units_per_tile;        // units of a tile, rounded up
    unsigned short log_warps_per_tile; // log2 of the warps of a warp group
    unsigned short region;             // 0 or 1: the region of the partial sums of the first round; the index of the op in the token modulo 2
    unsigned short has_half_scales;    // 1: a matrix has a scale for each half of a quant block
    unsigned short preload_tiles;      // most tiles that a block has, if the op keeps to the limits of small ops (1 or 2); otherwise 0. Only
                                       // small ops read it
};
ASSERT_LAYOUT(OpArgs);
// Ops of a layer at most: q/k/v; attention output; router, with experts only; gate and up; down.
constexpr int MAX_OPS = 5;

// One layer. The pseudo-layer `n_layer` has one op, the output head, and zeros otherwise.
struct __align__(16) LayerArgs {
    OpArgs ops[MAX_OPS];
    HeadInputs head_inputs;    // norm and rotation of queries and keys
    Pages pages;               // page table of the layer's cache group. The host has assigned pages for the positions of all tokens of the launch
    void* k_cache;             // F16 [page][n_head_kv][PAGE][head_dim]; no other type of cache is supported. The kernel writes the tokens' rows
    void* v_cache;             // the same
    const float* sinks;        // [n_head] scores of attention sinks; null: none
    u32 n_ops;                 // ops in use
    u32 n_head;                // query heads
    u32 n_head_kv;             // key and value heads
    u32 head_dim;              // elements of a head, a multiple of 8
    u32 mask;                  // Mask of masks.cuh
    u32 mask_positions;        // number of positions of the mask's window or chunk
    u32 activation;            // Activation of the gate
    float soft_cap;            // cap of attention scores; 0: none
    float residual_scale;      // factor on what is added to the residual stream
    u32 heads_per_kv_head;     // query heads that share a KV head
    u32 head_groups_per_kv_head; // head groups of a KV head: heads_per_kv_head / HEADS_PER_TASK, rounded up
    u32 tasks_per_split;       // attention tasks of one split of positions: n_head_kv * head_groups_per_kv_head
    u32 inverse_head_dim;      // 2^32 / head_dim + 1: bits 32 to 63 of its product with k are k / head_dim, exactly for k < 2^32 / head_dim;
                               // k is the index of an element of attention's result, below n_head * head_dim
    float activation_limit;    // of CLAMPED_SWIGLU and CLAMPED_SILU
    const float* expert_bias[3]; // [n_expert][rows of one expert] of gate, up and down; null: none. Of ranks only rank 0 has that of down
    RouteArgs route;           // of the router (routing.cuh); n_expert 0: a dense feed-forward. Its fields `products`, `experts`, `weights` and
                               // `input_weights` are null: the router's products are words, and the chosen experts and their weights are
                               // in shared memory (ExpertChoice of decode_routing.cuh)
};
ASSERT_LAYOUT(LayerArgs);

// One matrix of an op, as the host describes it. Of experts it stands for the matrices of all experts of the layer, of which the
// kernel multiplies the chosen ones: rows of gate and up one below the other, columns of down side by side.
//
// Tiles of an op are divided among the blocks, each of which gets a contiguous range (`tiles_before` of decode_weights.cuh). The op's tiles are
// those of its matrices one below the other for QKV; otherwise those of one matrix, and a block has the same tiles of gate and of up:
//
//   QKV      op tiles   0 ............................ op_tiles - 1
//                       | q             | k     | v     |
//            first_tile 0               n(q)    n(q) + n(k)              n: n_tiles of that matrix
//   others   op tiles   | the matrix                    |                first_tile = 0, n_tiles = op_tiles
struct OpMatrixArgs {
    const unsigned char* records;     // [tile][record], aligned to 16 bytes
    u32 tile_bytes;                   // bytes from one tile to the next
    u32 n_tiles;                      // tiles of the matrix; of gate and up of experts: of all chosen ones together
    u32 first_tile;                   // index of its first tile among the op's; 0 except for k and v
    u32 op_tiles;                     // tiles of the op that are divided among blocks
    unsigned short record_bytes;      // bytes of a record, a multiple of 16
    unsigned short records_per_stage; // records that fit in a stage
    unsigned short format;            // Format of formats.cuh
    unsigned short log_warps_per_tile; // as in OpArgs
    unsigned short units_per_tile;    // as in OpArgs
    unsigned short records_per_unit;  // records of a unit
    u32 expert_layer_number;          // of experts: 1 + index of their layer; 0: not experts. A producer lane does not request the weights before
                                      // `ExpertChoice::n_published` (decode_routing.cuh), the number of the layer that was routed last, has
                                      // reached this number plus n_layer + 1 for each earlier token of the launch
    u32 expert_stride;                // bytes from one expert's weights to the next one's
    u32 tiles_per_expert;             // tiles of one expert
    u32 records_per_expert;           // records of a tile that belong to one expert; of gate and up: all of them
    u32 first_block;                  // with fewer op tiles than blocks: the first block that gets one. Attention output and down have the last
                                      // blocks, q/k/v those before them, where there are enough: a block that still finishes down has no q/k/v
                                      // to do then (`first_block` of src/decode/args.rs). Other ops begin at block 0
};
ASSERT_LAYOUT(OpMatrixArgs);

// The kernel's argument. All that it points to, directly or in layers and matrices, stays
// allocated until the launch has ended, and nothing else writes it meanwhile.
//
// The block's dynamic shared memory, in this order (src/decode/memory.rs); the names are those of the offsets below, in bytes, multiples of 16:
//
//   0                    rings of weights: [CONSUMER_WARPS][stages_per_warp][stage_bytes]
//   inputs_at            the warps' inputs: [CONSUMER_WARPS][input_stride]; attention uses the same bytes as its scratch (Lemma 10)
//   regions_at[0]        partial sums: [row of the round][SUMS_STRIDE] floats, one for each warp of the row's warp group, then padding, in which
//                        the first two rows hold the warps' sums of squares of the inputs (decode_rows.cuh); those of up begin
//                        `gate_to_up_floats` after those of gate
//   regions_at[1]        the same
//   residual_at          the block's rows of the residual stream, F32
//   shares_at            [n_matrices] which tiles of each matrix the block has (BlockShare of decode_weights.cuh)
//   spans_at             [n_layer] the positions that the token sees, and their splits (AttentionSpan of decode_attention.cuh)
//   head_constants_at    cosines and sines for the token's position, then weights of the norms of attention's heads, of the current layer
//                        (HeadConstants of decode_attention.cuh)
//   routing_at           scores that experts are chosen by (RoutingScratch of routing.cuh)
//   barriers_at          two mbarriers for each stage of each ring, full and empty; then 16 bytes of zeros
struct DecodeArgs {
    const LayerArgs* layers;      // [n_layer + 1]; the last one is the pseudo-layer of the output head
    const OpMatrixArgs* matrices; // [n_matrices] of all layers in order, then of the output head
    Matrix table;                 // [n_vocab][n_embd] token embeddings
    Token* token;                 // the first token. All blocks read it when they begin; if `stores_next_token`, block 0
                                  // writes the token after the launch's last one to it at the end
    float* logits;                // [n_vocab] logits, which each token overwrites; null: not wanted
    u64_t* ids;                   // ring of IDS entries of 8 bytes in pinned host memory: the number of a decode step, and the id that it has
                                  // chosen (`publish_id` of argmax.cuh). Never null: an id is written even where the host reads none
    u64_t* best_words;            // [2][gridDim.x] words of the blocks' best logits. Successive tokens, also of different launches, use the two
                                  // halves alternately
    const u64_t* qkv;             // [(n_head + 2 n_head_kv) * head_dim / 2] words of queries, keys and values, one copy
    u64_t* attention;             // [COPIES][split][n_head * head_dim / 2] words of attention's weighted sums of values, with the layer's n_head and
                                  // head_dim. Copies are `attention_copy_words` apart, room for 32 splits of the widest layer; a token uses
                                  // `AttentionSpan::n_splits` of them (decode_attention.cuh)
    u64_t* attention_max_sums;    // [COPIES][split][n_head] words of the softmax: maximum score, and sum of the weights relative to it; copies are
                                  // `max_sums_copy_words` apart
    u32 n_layer;                  // layers of the model
    u32 n_embd;                   // elements of the residual stream
    u32 n_matrices;               // matrices of all ops
    // The layer tag of the first token's layer 0. Contract of the host (src/decode.rs): all vectors of words, `best_words` among them, are zeros
    // before the first launch, whose tag is 2; after a launch of n tokens the tag advances by n * (n_layer + 1) * TAGS_PER_LAYER, modulo 2^12.
    // Nothing else writes these vectors.
    u32 tag;
    u32 stores_next_token;        // 1: `*token` becomes the token after the launch's last one
    u32 stage_bytes;              // bytes of a stage
    u32 stages_per_warp;          // stages of a consumer warp's ring
    u32 gate_to_up_floats;        // floats from a row's partial sums of gate to those of up, in the same region
    u32 attention_copy_words;     // words of one copy of `attention`
    u32 max_sums_copy_words;      // words of one copy of `attention_max_sums`
    u32 inputs_at;                // offset of the warps' inputs
    u32 input_stride;             // bytes from one warp's inputs to the next one's
    u32 regions_at[2];            // offsets of the two regions
    u32 residual_at;              // offset of the rows of the residual stream
    u32 shares_at;                // offset of the shares
    u32 spans_at;                 // offset of the spans
    u32 head_constants_at;        // offset of the constants of heads
    u32 barriers_at;              // offset of the mbarriers, which are the last part
    u32 routing_at;               // offset of the scratch of routing
    float embedding_scale;        // factor on embeddings
    float logit_scale;            // factor on logits
    float logit_cap;              // cap of logits; 0: none
    u32 n_tokens;                 // tokens that the launch evaluates, 1 to MAX_TOKENS of src/decode.rs
    u32 first_step_number;        // number of the first token's decode step, with which its id is written to `ids`; 0 where the host reads no id
    float page_to_merge_time;     // P / M, a measured constant of src/decode.rs: a task attends to a KV page in the time P, and an element of one
                                  // split's result is merged in the time M. So n splits take pages / n * P + n * n_head * head_dim * M, which is
                                  // least for n = sqrt(pages * P / M / (n_head * head_dim)) (`span_of` of decode_attention.cuh)
    u32 max_stages_in_flight;     // stages of a warp whose copies may be outstanding, at most stages_per_warp. More than keep the memory busy
                                  // only delay the polling loads of words, which queue behind the copies
    u32 first_best_place;         // 0 or 1: the half of `best_words` that the first token uses
};
ASSERT_LAYOUT(DecodeArgs);

// RACECHECK builds are for compute-sanitizer's racecheck. It does not understand flags, barriers at which threads arrive without waiting, and
// lanes that wait for several mbarriers at a time; in these builds SmallOpSync, ExpertChoice and `run_producer` use slower means that it understands.
#ifdef RACECHECK
constexpr bool FOR_RACECHECK = true;
#else
constexpr bool FOR_RACECHECK = false;
#endif

// An integer as a type, so that a lambda can take a compile-time argument; std::integral_constant without its header.
template <int N> struct Constant {
    static constexpr int value = N;
};
// Addresses in the block's dynamic shared memory as 32-bit offsets, which take one register instead of two.
__device__ __forceinline__ u32 shared_offset(const void* p) { return (u32)((const unsigned char*)p - decode_memory); }
template <typename T> __device__ __forceinline__ const T* shared_at(u32 offset) { return (const T*)(decode_memory + offset); }
// Has the compiler compute `v` no later than here, where the empty instruction reads it from a register, and only once, as the instruction might
// have changed it. Only here the value has to be in a register: afterwards the compiler may spill it.
__device__ __forceinline__ void pin_register(u32& v) { asm volatile("" : "+r"(v)); }
template <typename T> __device__ __forceinline__ void pin_register(T*& p) { asm volatile("" : "+l"(p)); }

// v *= by, element by element.
__device__ __forceinline__ void multiply_by(float4& v, const float4& by) { v.x *= by.x, v.y *= by.y, v.z *= by.z, v.w *= by.w; }
__device__ __forceinline__ float sum_of_squares(const float4& v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
