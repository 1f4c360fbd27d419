//! Which layers the persistent decode kernel (`kernels/decode.cu`, a "megakernel": one launch for all layers of a token) supports, and
//! its ops and their matrices.
//!
//! [`DecodeLayer::of`] turns a layer's weights into a list of ops, or returns `None` if the layer has anything that the kernel does
//! not do. If it does so for any layer, `DecodeKernel::new` returns `None`, and the model is decoded with a launch for each op
//! (`runner.rs`) instead; nothing is an error.
//!
//! Terms: an *op* is one product of a layer with its prologue and epilogue (q/k/v, attention output, router, gate and up, down). A
//! *tile* is 16 rows of a matrix, a *panel* 64 columns of a tile, and a *record* the codes and scales of one to four panels of a
//! tile, which lie together in memory (`kernels/formats.cuh`). A *code* is the integer of a quantised weight; the formats F16 and F32
//! have no codes. Inputs of products with codes are stored as *digits*, three integers of 8 bits for each input, other inputs as two F16
//! parts. A *word* is 8 bytes with two values and a tag, through which blocks exchange vectors (`kernels/decode.cuh`). A *stack* ([`CudaStack`]) is the matrices of all experts of a layer, one below the other in memory.
//!
//! The experts that a token is routed to are evaluated as one feed-forward. Of a token with experts a and b:
//!
//! ```text
//! gate, up: stacked by rows           down: stacked by columns; its product sums over the experts
//!   rows of a   [n_ff, n_embd]          [n_embd, n_ff] of a | [n_embd, n_ff] of b
//!   rows of b   [n_ff, n_embd]
//! ```

use metal_attention_model::{Activation, Residual};

use super::args::OpKind;
use crate::device::CudaBuffer;
use crate::matrix::{CudaMatrix, PANEL, TILE, WeightLayout};
use crate::stack::CudaStack;
use crate::support::AttentionKernels;
use crate::weights::{
    CudaAttention, CudaDense, CudaEmbedding, CudaExperts, CudaFeedForward, CudaLayer, CudaMixer, CudaNorm,
};

/// Experts that a token may be routed to: the same constant of `kernels/decode_exchange.cuh`.
const MAX_EXPERTS_PER_TOKEN: usize = 32;
/// Experts of a layer that a token may be routed among; their scores lie in shared memory (`RoutingScratch` of `kernels/routing.cuh`, for
/// which `SharedMemoryLayout` takes space).
const MAX_EXPERTS_PER_LAYER: usize = 1024;

/// A matrix of an op: one of the model's, or the matrices of the experts that a token is routed to as if they were one.
#[derive(Debug, Clone, Copy)]
pub(super) struct OpMatrix {
    /// Address of its first record; of experts: of the layer's first expert.
    pub(super) records: u64,
    /// Weight layout.
    pub(super) format: WeightLayout,
    /// Rows; of experts below each other: of all chosen ones together.
    pub(super) n_rows: usize,
    /// Columns; of experts side by side: of all chosen ones together.
    pub(super) n_in: usize,
    /// Bytes from one tile to the next in memory.
    pub(super) tile_bytes: usize,
    /// Where the experts lie; `None`: not a matrix of experts.
    pub(super) experts: Option<ExpertLayout>,
}

/// Where the matrices of a layer's experts lie in memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpertLayout {
    /// Bytes from one expert's matrix to the next one's (expert stride).
    pub(super) stride_bytes: usize,
    /// Tiles of one expert's matrix.
    pub(super) tiles_per_expert: usize,
    /// Records of a tile that belong to one expert: all of them for gate and up; for down those of one expert's columns.
    pub(super) records_per_expert: usize,
}

impl OpMatrix {
    /// A matrix of the model.
    pub(super) fn of(matrix: &CudaMatrix) -> Self {
        Self {
            // The address alone: the row of the result at which a matrix begins (here 0) is not used.
            records: matrix.args(0).records,
            format: matrix.layout,
            n_rows: matrix.n_rows,
            n_in: matrix.n_in,
            tile_bytes: matrix.tile_bytes(),
            experts: None,
        }
    }

    /// The matrices of `n_used` experts, one below the other: gate and up.
    fn stacked_by_rows(stack: &CudaStack, n_used: usize) -> Self {
        let expert = Self::of_expert(stack);
        Self { n_rows: n_used * stack.n_rows, ..expert }
    }

    /// The matrices of `n_used` experts, side by side: down, whose product then sums over the experts.
    fn stacked_by_columns(stack: &CudaStack, n_used: usize) -> Self {
        let expert = Self::of_expert(stack);
        Self { n_in: n_used * stack.n_in(), ..expert }
    }

    /// The matrix of one expert, the first of the layer.
    fn of_expert(stack: &CudaStack) -> Self {
        let (args, tile_bytes) = stack.args();
        let tiles = stack.n_rows.div_ceil(TILE);
        let experts = ExpertLayout {
            stride_bytes: tiles * tile_bytes as usize,
            tiles_per_expert: tiles,
            records_per_expert: records_per_expert(stack),
        };
        Self {
            records: args.records,
            format: stack.layout(),
            n_rows: stack.n_rows,
            n_in: stack.n_in(),
            tile_bytes: tile_bytes as usize,
            experts: Some(experts),
        }
    }

    /// Bytes of the matrix that are read for one token; of experts, of the chosen ones.
    pub(super) fn bytes_per_token(&self) -> usize {
        let record = self.format.record();
        self.n_tiles() * self.n_in.div_ceil(PANEL * record.panels) * record.bytes
    }

    /// Tiles; the last one may have fewer than 16 rows.
    pub(super) fn n_tiles(&self) -> usize {
        self.n_rows.div_ceil(TILE)
    }
}

/// Records of one tile of one expert's matrix. Exact: only formats of 256 columns (K-quants) have records of several panels, and their rows
/// are whole quantisation blocks.
fn records_per_expert(stack: &CudaStack) -> usize {
    stack.n_in().div_ceil(PANEL) / stack.layout().record().panels
}

/// The feed-forward of a supported layer; both kinds have a gate.
#[derive(Debug, Clone, Copy)]
enum GatedFeedForward<'a> {
    Dense(&'a CudaDense),
    Experts(&'a CudaExperts),
}

/// A layer that the kernel supports: attention, then a gated feed-forward or experts, each behind an `RMSNorm` and added to the residual
/// stream, and nothing else.
#[derive(Debug, Clone)]
pub(super) struct DecodeLayer<'a> {
    /// Norm of the input of q/k/v.
    pub(super) mixer_norm: &'a CudaNorm,
    /// The attention.
    pub(super) attention: &'a CudaAttention,
    /// Norm of the input of the feed-forward, and of the router.
    pub(super) feed_forward_norm: &'a CudaNorm,
    feed_forward: GatedFeedForward<'a>,
    /// Factor on what is added to the residual stream.
    pub(super) residual_scale: f32,
    /// The ops in their order, each with its matrices: three of q/k/v (one below the other), two of gate and up, one of the others.
    pub(super) ops: Vec<(OpKind, Vec<OpMatrix>)>,
}

impl<'a> DecodeLayer<'a> {
    /// The layer as the kernel evaluates it; `None` if the kernel does not support it.
    pub(super) fn of(layer: &'a CudaLayer) -> Option<Self> {
        let CudaLayer {
            mixer_norm,
            mixer,
            mixer_post_norm,
            feed_forward_norm,
            feed_forward,
            feed_forward_post_norm,
            residual,
            sum_norms,
            layer_embedding,
            streams,
            output_scale,
        } = layer;
        let CudaMixer::Attention(attention) = mixer else { return None };
        // The kernel adds the attention's result to the residual stream before the feed-forward reads it, and has norms of inputs only.
        let residual_scale = match *residual {
            Residual::Sequential { scale } => scale,
            Residual::Parallel | Residual::PostNorm { .. } => return None,
        };
        // A norm of results would need another exchange between blocks: each has a few of a result's rows.
        let has_result_norms = mixer_post_norm.is_some() || feed_forward_post_norm.is_some() || sum_norms.is_some();
        // Embeddings of the layer, several residual streams, and a scale of the layer's output have no op in the kernel.
        let has_extras = layer_embedding.is_some() || streams.is_some() || *output_scale != 1.0;
        // `decode_attention.cuh` supports what the paged kernels support without a kernel before them. `AttentionKernels::Paged` means a causal
        // mask, also with a window or chunks, and no ALiBi. `separate_inputs` is the kernel that makes queries, keys and values of the products
        // where the attention kernel cannot; without it there are norms of single heads, RoPE, and nothing else in between.
        // `attention_kernels` of `support.rs` decides both.
        let is_paged = attention.kernels == AttentionKernels::Paged && attention.separate_inputs.is_none();
        // Layers without keys or values of their own have fewer matrices: they read another layer's cache, or use keys as values.
        if has_result_norms || has_extras || !is_paged || attention.qkv.len() != 3 {
            return None;
        }
        let mut ops = vec![
            (OpKind::Qkv, attention.qkv.iter().map(OpMatrix::of).collect()),
            (OpKind::AttentionOutput, vec![OpMatrix::of(&attention.out.weight)]),
        ];
        let feed_forward = match feed_forward {
            CudaFeedForward::Dense(dense) => {
                // `fuses_activation`: a product's epilogue can apply the gate's activation; this implies that gate and up have no biases, and one
                // weight layout.
                let gate = dense.gate.as_ref().filter(|_| dense.fuses_activation)?;
                ops.push((OpKind::GateAndUp, vec![OpMatrix::of(gate), OpMatrix::of(&dense.up)]));
                ops.push((OpKind::Down, vec![OpMatrix::of(&dense.down.weight)]));
                GatedFeedForward::Dense(dense)
            }
            CudaFeedForward::Experts(experts) => {
                let gate = experts.gate.as_ref().filter(|_| experts_are_supported(experts))?;
                let n_used = experts.spec.n_used;
                ops.push((OpKind::Router, vec![OpMatrix::of(&experts.router.weight)]));
                let gate_and_up = [gate, &experts.up].map(|stack| OpMatrix::stacked_by_rows(stack, n_used));
                ops.push((OpKind::GateAndUp, gate_and_up.to_vec()));
                ops.push((OpKind::Down, vec![OpMatrix::stacked_by_columns(&experts.down, n_used)]));
                GatedFeedForward::Experts(experts)
            }
            CudaFeedForward::ChannelMix(_) | CudaFeedForward::None => return None,
        };
        // The matrices of an op share its inputs, which are stored as digits for codes, or as F16 parts for floats: never both.
        let share_inputs = |matrices: &[OpMatrix]| {
            let has_codes = matrices[0].format.has_codes();
            matrices.iter().all(|matrix| matrix.format.has_codes() == has_codes)
        };
        let is_supported =
            |(_, matrices): &(OpKind, Vec<OpMatrix>)| share_inputs(matrices) && matrices.iter().all(reads_whole_quads);
        // Inputs of q/k/v and of the feed-forward have an RMSNorm, without a bias: its factor is applied to the product's rows.
        let rms_norm = |norm: &'a Option<CudaNorm>| norm.as_ref().filter(|norm| norm.fuses_with_product());
        let (mixer_norm, feed_forward_norm) = (rms_norm(mixer_norm)?, rms_norm(feed_forward_norm)?);
        ops.iter().all(is_supported).then_some(Self {
            mixer_norm,
            attention,
            feed_forward_norm,
            feed_forward,
            residual_scale,
            ops,
        })
    }

    /// The experts; `None`: the feed-forward is dense.
    pub(super) fn experts(&self) -> Option<&'a CudaExperts> {
        match self.feed_forward {
            GatedFeedForward::Dense(_) => None,
            GatedFeedForward::Experts(experts) => Some(experts),
        }
    }

    /// The activation of the gate (`Activation` of `kernels/common.cuh`) and its parameter.
    pub(super) fn activation(&self) -> (u32, f32) {
        match self.feed_forward {
            GatedFeedForward::Dense(dense) => dense.activation,
            GatedFeedForward::Experts(experts) => experts.activation,
        }
    }

    /// Address of the bias of an op's results; 0: none. Gate and up never have one: `fuses_activation` implies it of dense ones, and biases of
    /// experts are in `LayerArgs::expert_bias` instead.
    pub(super) fn bias(&self, kind: OpKind) -> u64 {
        let ptr = |buffer: &Option<CudaBuffer>| buffer.as_ref().map_or(0, CudaBuffer::ptr);
        match (kind, self.feed_forward) {
            (OpKind::Qkv, _) => ptr(&self.attention.qkv_bias),
            (OpKind::AttentionOutput, _) => self.attention.out.bias(),
            (OpKind::Router, GatedFeedForward::Experts(experts)) => experts.router.bias(),
            (OpKind::Down, GatedFeedForward::Dense(dense)) => dense.down.bias(),
            (OpKind::Router, GatedFeedForward::Dense(_))
            | (OpKind::Down, GatedFeedForward::Experts(_))
            | (OpKind::GateAndUp | OpKind::OutputHead, _) => 0,
        }
    }

    /// The matrices of all ops, in their order.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &OpMatrix> {
        self.ops.iter().flat_map(|(_, matrices)| matrices)
    }
}

/// The largest number of rows that the result of an op of kind `of` has: those of its first matrix, since gate and up give one row for each
/// pair and the others have one matrix. Precondition: `of` is not q/k/v, whose result has the rows of three matrices. 0: no layer has such
/// an op.
pub(super) fn max_rows(layers: &[DecodeLayer<'_>], of: OpKind) -> usize {
    debug_assert_ne!(of, OpKind::Qkv);
    let of_kind = layers.iter().flat_map(|layer| &layer.ops).filter(|(kind, _)| *kind == of);
    of_kind.map(|(_, matrices)| matrices[0].n_rows).max().unwrap_or(0)
}

/// Whether the kernel supports these experts: a router, and of each expert gate, up and down, and nothing else.
fn experts_are_supported(experts: &CudaExperts) -> bool {
    let CudaExperts {
        spec,
        router: _,
        // The router again in another layout, for other kernels.
        router_rows: _,
        router_norm,
        // Supported: `RouteArgs` has it.
        choice_bias: _,
        latent,
        gate: _,
        up: _,
        down,
        // Supported: `RouteArgs` has it.
        expert_scale: _,
        shared,
        shared_gate,
        expert_norms,
        activation: _,
        // `has_known_activation`, which is private: it concerns other kernels. The activation is checked below.
        ..
    } = experts;
    // Norms of their own and products around the experts have no op in the kernel; neither have shared experts.
    let has_extras = router_norm.is_some() || latent.is_some() || expert_norms.is_some();
    let has_shared = shared.is_some() || shared_gate.is_some();
    // The columns of down of all chosen experts lie side by side, and records are copied whole: a record with columns of two experts, or
    // with padding between them, would shift the inputs. The columns of an expert's down are the rows of its gate and up
    // (`n_ff`), which so fill whole tiles.
    let has_whole_records = down.n_in().is_multiple_of(down.layout().record().panels * PANEL);
    // The scores of experts are exchanged like any vector, in pairs of words: four elements.
    let is_routable = spec.n_used <= MAX_EXPERTS_PER_TOKEN
        && spec.n_expert.is_multiple_of(4)
        && spec.n_expert <= MAX_EXPERTS_PER_LAYER;
    // Sparse activations need the whole gate vector of a token, of which each block has some rows.
    let is_elementwise = match spec.expert.activation {
        Activation::Silu | Activation::Gelu | Activation::ReluSquared | Activation::ClampedSwiglu { limit: _ } => true,
        Activation::SparseGelu { n_std: _ } => false,
    };
    // Weights on the experts' inputs instead of their results are not implemented.
    is_elementwise && !has_extras && !has_shared && !spec.router.weights_inputs && has_whole_records && is_routable
}

/// Whether the embedding of a token is a row of the table, times a scale, and nothing else: the kernel reads it by itself.
pub(super) fn is_table_only(embedding: &CudaEmbedding) -> bool {
    let CudaEmbedding { table: _, token_type, positions, norm, per_layer, streams } = embedding;
    let has_no_sum = token_type.is_none() && positions.is_none() && norm.is_none();
    has_no_sum && per_layer.is_none() && streams.is_none()
}

/// Whether the length of the matrix's input vector is a multiple of 4: inputs are read as quads, that is, pairs of words of two elements each.
pub(super) fn reads_whole_quads(matrix: &OpMatrix) -> bool {
    matrix.n_in.is_multiple_of(4)
}
