//! The arguments of the persistent decode kernel: layers, their ops and matrices. The terms op, tile, panel, record, unit, warp group,
//! stage, word and tag are those of `decode.cuh`, which also has the contracts of the fields.

use super::{ExchangeArgs, HeadArgs, MatrixArgs, PagesArgs, RouteArgs, TokenArgs, kernel_args};
use crate::bounds::{Bounds, KernelArgs, Launch};
use crate::ids::STEPS;
use crate::slice::DevicePtr;

/// Ops of a layer at most: `MAX_OPS` of `decode.cuh`.
pub(crate) const MAX_OPS: usize = 5;
/// Copies of vectors that all blocks read: `COPIES` of `decode.cuh`.
pub(crate) const COPIES: usize = 4;

kernel_args! {
    /// One op: a product of up to three matrices with one input. `OpArgs` of `decode.cuh`.
    pub(crate) struct OpArgs = "OpArgs" in "decode.cuh" {
        /// F32 `[n_in]` weights of the input's `RMSNorm`; 0 only for the attention output and down.
        pub(crate) norm: DevicePtr<f32>,
        /// F32 bias of all rows; always 0 for gate and up.
        pub(crate) bias: DevicePtr<f32>,
        /// Words of the input.
        pub(crate) input: DevicePtr<[u64; 2]>,
        /// Words of the result.
        pub(crate) output: DevicePtr<u64>,
        /// `OpKind` of `decode.cuh`.
        pub(crate) kind: u32,
        /// Elements of the input.
        pub(crate) n_in: u32,
        /// Epsilon of the norm.
        pub(crate) eps: f32,
        /// `1 / n_in`.
        pub(crate) inverse_n_in: f32,
        /// Index of the op's first matrix among those of the model.
        pub(crate) first_matrix_index: u32,
        /// Matrices of the op, 1 to 3.
        pub(crate) n_matrices: u32,
        /// Rows of each matrix.
        pub(crate) n_rows: [u32; 3],
        /// Tag of input words minus the layer tag, modulo 2^12.
        pub(crate) tag_in_offset: u32,
        /// Tag of result words minus the layer tag.
        pub(crate) tag_out_offset: u32,
        /// 1: quantised matrices; 0: F16 or F32.
        pub(crate) has_codes: u16,
        /// 1: a matrix has mins.
        pub(crate) has_mins: u16,
        /// Copies of the result words.
        pub(crate) n_copies: u32,
        /// Elements of the result.
        pub(crate) n_out: u32,
        /// Panels of a unit.
        pub(crate) panels_per_unit: u32,
        /// Units of a tile.
        pub(crate) units_per_tile: u32,
        /// log2 of the warps of a block that share the columns of a tile.
        pub(crate) log_warps_per_tile: u16,
        /// 0 or 1: the region of the partial sums.
        pub(crate) region: u16,
        /// 1: a matrix has a scale for each half of a quantisation block.
        pub(crate) has_half_scales: u16,
        /// Most tiles of a block, where the op is small; otherwise 0.
        pub(crate) preload_tiles: u16,
    }

    /// A matrix of an op. `OpMatrixArgs` of `decode.cuh`.
    pub(crate) struct OpMatrixArgs = "OpMatrixArgs" in "decode.cuh" {
        /// Its first record.
        pub(crate) records: DevicePtr<u8>,
        /// Bytes from one tile to the next.
        pub(crate) tile_bytes: u32,
        /// Tiles of the matrix.
        pub(crate) n_tiles: u32,
        /// Index of its first tile among the op's, where q, k and v lie one below the other.
        pub(crate) first_tile: u32,
        /// Tiles of the op that are divided among blocks together.
        pub(crate) op_tiles: u32,
        /// Bytes of a record.
        pub(crate) record_bytes: u16,
        /// Records in a stage.
        pub(crate) records_per_stage: u16,
        /// `WeightLayout`.
        pub(crate) format: u16,
        /// log2 of the warps that share the columns of a tile.
        pub(crate) log_warps_per_tile: u16,
        /// Units of a tile.
        pub(crate) units_per_tile: u16,
        /// Records of a unit.
        pub(crate) records_per_unit: u16,
        /// Of experts: 1 + index of their layer, for which experts must be chosen before the weights are known; each further token of the
        /// launch adds `n_layer + 1` (`ExpertChoice::n_published` of `decode_routing.cuh`). 0: not experts.
        pub(crate) expert_layer_number: u32,
        /// Bytes from one expert to the next.
        pub(crate) expert_stride: u32,
        /// Tiles of one expert.
        pub(crate) tiles_per_expert: u32,
        /// Records of a tile that belong to one expert.
        pub(crate) records_per_expert: u32,
        /// First block that has a tile, where there are fewer tiles than blocks.
        pub(crate) first_block: u32,
    }

    /// One layer, or the pseudo-layer of the output head. `LayerArgs` of `decode.cuh`.
    pub(crate) struct LayerArgs = "LayerArgs" in "decode.cuh" {
        /// The ops in their order; zeros from `n_ops` on.
        pub(crate) ops: [OpArgs; MAX_OPS],
        /// Norm and rotation of queries and keys.
        pub(crate) head_inputs: HeadArgs,
        /// Page table of the layer's cache group.
        pub(crate) pages: PagesArgs,
        /// F16 `[page, n_head_kv, 64, head_dim]`.
        pub(crate) k_cache: DevicePtr<u8>,
        /// F16 `[page, n_head_kv, 64, head_dim]`.
        pub(crate) v_cache: DevicePtr<u8>,
        /// F32 `[n_head]` scores of attention sinks.
        pub(crate) sinks: DevicePtr<f32>,
        /// Ops in use.
        pub(crate) n_ops: u32,
        /// Query heads.
        pub(crate) n_head: u32,
        /// KV heads.
        pub(crate) n_head_kv: u32,
        /// Elements of a head.
        pub(crate) head_dim: u32,
        /// `Mask` of `masks.cuh`.
        pub(crate) mask: u32,
        /// Positions of the mask's window or chunk.
        pub(crate) mask_positions: u32,
        /// `Activation` of `common.cuh`, of the gate.
        pub(crate) activation: u32,
        /// Cap of attention scores; 0: none.
        pub(crate) soft_cap: f32,
        /// Factor on what is added to the residual stream.
        pub(crate) residual_scale: f32,
        /// Query heads that share a KV head.
        pub(crate) heads_per_kv_head: u32,
        /// Groups of `HEADS_PER_TASK` of these, rounded up.
        pub(crate) head_groups_per_kv_head: u32,
        /// Attention tasks of one split of positions.
        pub(crate) tasks_per_split: u32,
        /// `2^32 / head_dim + 1`, for division by multiplication.
        pub(crate) inverse_head_dim: u32,
        /// Parameter of the activation.
        pub(crate) activation_limit: f32,
        /// F32 `[n_expert, rows of one expert]` biases of gate, up and down.
        pub(crate) expert_bias: [DevicePtr<f32>; 3],
        /// Routing; `n_expert` 0: a dense feed-forward.
        pub(crate) route: RouteArgs,
    }

    /// The kernel's argument. `DecodeArgs` of `decode.cuh`.
    pub(crate) struct DecodeArgs = "DecodeArgs" in "decode.cuh" {
        /// [`LayerArgs`] `[n_layer + 1]`; the last one is the pseudo-layer of the output head.
        pub(crate) layers: DevicePtr<LayerArgs>,
        /// [`OpMatrixArgs`] `[n_matrices]`.
        pub(crate) matrices: DevicePtr<OpMatrixArgs>,
        /// Embeddings `[n_vocab, n_embd]`.
        pub(crate) table: MatrixArgs,
        /// The token: `TokenArgs`.
        pub(crate) token: DevicePtr<TokenArgs>,
        /// F32 `[n_vocab]` logits.
        pub(crate) logits: DevicePtr<f32>,
        /// Host memory for chosen ids.
        pub(crate) ids: DevicePtr<u64>,
        /// Words `[2, n_blocks]` of the blocks' best logits.
        pub(crate) best_words: DevicePtr<u64>,
        /// Words of queries, keys and values.
        pub(crate) qkv: DevicePtr<u64>,
        /// Words `[COPIES, split, n_head * head_dim / 2]` of attention.
        pub(crate) attention: DevicePtr<u64>,
        /// Words `[COPIES, split, n_head]` of its maxima and sums.
        pub(crate) attention_max_sums: DevicePtr<u64>,
        /// Layers of the model.
        pub(crate) n_layer: u32,
        /// Elements of the residual stream.
        pub(crate) n_embd: u32,
        /// Matrices of all ops.
        pub(crate) n_matrices: u32,
        /// Layer tag of the first token's first layer: 2 in the first launch; each token adds two for every layer and for the output head.
        pub(crate) tag: u32,
        /// 1: the device's token becomes the one after the launch's last one.
        pub(crate) stores_next_token: u32,
        /// Bytes of a stage.
        pub(crate) stage_bytes: u32,
        /// Stages of a consumer warp.
        pub(crate) stages_per_warp: u32,
        /// Floats from the gate's partial sums to those of up.
        pub(crate) gate_to_up_floats: u32,
        /// Words of a copy of `attention`.
        pub(crate) attention_copy_words: u32,
        /// Words of a copy of `attention_max_sums`.
        pub(crate) max_sums_copy_words: u32,
        /// Offset of the warps' inputs in shared memory, in bytes; see `SharedMemoryLayout` (`decode/memory.rs`) for this and the following offsets.
        pub(crate) inputs_at: u32,
        /// Bytes of a warp's inputs.
        pub(crate) input_stride: u32,
        /// Offsets of the regions of partial sums.
        pub(crate) regions_at: [u32; 2],
        /// Offset of rows of the residual stream.
        pub(crate) residual_at: u32,
        /// Offset of the block's shares of matrices.
        pub(crate) shares_at: u32,
        /// Offset of the spans of attention.
        pub(crate) spans_at: u32,
        /// Offset of the constants of heads.
        pub(crate) head_constants_at: u32,
        /// Offset of the rings' mbarriers.
        pub(crate) barriers_at: u32,
        /// Offset of the scratch of routing.
        pub(crate) routing_at: u32,
        /// Factor on embeddings.
        pub(crate) embedding_scale: f32,
        /// Factor on logits.
        pub(crate) logit_scale: f32,
        /// Cap of logits; 0: none.
        pub(crate) logit_cap: f32,
        /// Tokens of the launch.
        pub(crate) n_tokens: u32,
        /// Number of the first token's decode step.
        pub(crate) first_step_number: u32,
        /// Time of a KV page, divided by the time of merging an element (`DecodeArgs` of `decode.cuh`).
        pub(crate) page_to_merge_time: f32,
        /// Stages of a warp whose copies may be outstanding.
        pub(crate) max_stages_in_flight: u32,
        /// 0 or 1: the place in `best_words` that the first token uses.
        pub(crate) first_best_place: u32,
    }

    /// A rank's share of a model. `RankShare` of `decode_rows.cuh`.
    pub(crate) struct RankShareArgs = "RankShare" in "decode_rows.cuh" {
        /// Mailboxes of the ranks.
        pub(crate) exchange: ExchangeArgs,
        /// First row of the output head that the rank has.
        pub(crate) first_vocab_row: u32,
        pub(crate) unused: u32,
    }

    /// The kernel's argument on a rank of a shared model: `DecodeOnRanksArgs` of `decode_on_ranks.cu`.
    pub(crate) struct DecodeOnRanksArgs = "DecodeOnRanksArgs" in "decode_on_ranks.cu" {
        /// What a rank that has the whole model takes.
        pub(crate) decode: DecodeArgs,
        /// Its share.
        pub(crate) ranks: RankShareArgs,
    }
}

// Blocks copy layers in pieces of 16 bytes.
const _: () = assert!(size_of::<LayerArgs>().is_multiple_of(16));

impl KernelArgs for DecodeArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        // The addresses in `layers` and `matrices` lie in device memory: nothing is stated of them.
        bounds.array("layers", self.layers, self.n_layer as usize + 1);
        bounds.array("matrices", self.matrices, self.n_matrices as usize);
        bounds.matrices("table", &self.table, 1);
        bounds.array("token", self.token, 1);
        bounds.array("ids", self.ids, STEPS as usize);
        bounds.array("best_words", self.best_words, 2 * launch.grid.blocks[0]);
        bounds.array("attention", self.attention, COPIES * self.attention_copy_words as usize);
        bounds.array("attention_max_sums", self.attention_max_sums, COPIES * self.max_sums_copy_words as usize);
        // The sizes of these two depend on the layers.
        bounds.array("logits", self.logits, 1);
        bounds.array("qkv", self.qkv, 1);
    }
}

impl KernelArgs for DecodeOnRanksArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        self.decode.bounds(launch, bounds);
        self.ranks.exchange.bounds(bounds);
    }
}
