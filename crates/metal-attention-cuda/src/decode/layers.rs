//! Layers as the persistent decode kernel (`kernels/decode.cu`, a "megakernel": one launch for all layers of a token)
//! evaluates them: which layers it supports, and the ops and matrices of a supported layer.
//!
//! [`DecodeLayer::if_supported`] turns a layer's weights into a list of ops, or returns `None` if the layer has
//! anything that the kernel does not do. If any layer gives `None`, so does `DecodeKernel::new`, and the model is
//! decoded with a launch for each op (`runner.rs`) instead; nothing is an error. What concerns the whole model is
//! checked by `DecodeKernel::new`: compute capability, F16 KV cache, length of the vocabulary, number of layers,
//! embedding, output norm and head, division between ranks, and shared memory.
//!
//! Supported layers have:
//! - softmax attention with q/k/v matrices and a KV cache of its own, causal, possibly with a window or chunks; heads
//!   of a multiple of 8 elements up to 256 (checked by `attention_kernels` of `parts/attention.rs`); optional biases,
//!   sinks, soft cap, RoPE, and RMS norms of single heads of queries and keys;
//! - a dense feed-forward with a gate: gate and up of one weight layout, without biases, and an activation that the
//!   epilogue applies (`fuses_activation`); an optional bias of down;
//! - or routed experts with a gate and an elementwise activation: at most 1024 in a layer, a multiple of 4, none of
//!   them shared; at most 32 of a token; `n_ff` fills whole records of down; weights on their results, not on their
//!   inputs; no products around them (latent), no norms of theirs or of the router. Optional: their biases and scales,
//!   a bias of the router, and one that is added to its scores only for choosing;
//! - inputs of ops of a multiple of 4 elements; either all or none of an op's matrices have codes;
//! - an `RMSNorm` without bias before attention and before the feed-forward, and no norm after either;
//! - [`Residual::Sequential`], with any scale; no embedding of the layer's own, no further residual streams, and no
//!   scale of the layer's output.
//!
//! Terms:
//! - An *op* is one product of a layer with its prologue and epilogue: q/k/v, attention output, router, gate and up,
//!   down.
//! - A *tile* is 16 rows of a matrix, a *panel* 64 columns of a tile. A *record* is the codes and scales of one to four
//!   panels of a tile, which lie together in memory (`kernels/formats.cuh`).
//! - A *code* is the integer of a quantised weight; the formats F16 and F32 have no codes. Inputs of products with
//!   codes are stored as *digits*, three signed 8-bit integers for each input, other inputs as two F16 parts.
//! - A *word* (tagged word) is 8 bytes with two values and a tag; through words blocks exchange vectors
//!   (`kernels/decode.cuh`).
//! - A *stack* ([`CudaStack`]) is the matrices of one kind (gate, up or down) of all experts of a layer, one below the
//!   other in memory, without gaps.
//!
//! The experts that a token is routed to are evaluated as one feed-forward. Of a token with experts a and b:
//!
//! ```text
//! gate, up: stacked by rows           down: stacked by columns; its product sums over the experts
//!   rows of a   [n_ff, n_embd]          [n_embd, n_ff] of a | [n_embd, n_ff] of b
//!   rows of b   [n_ff, n_embd]
//! ```

use metal_attention_model::{FeedForward, Mixer, Residual};

use super::args::OpKind;
use crate::matrix::{CudaMatrix, PANEL, TILE, WeightLayout};
use crate::parts::attention::AttentionKernels;
use crate::parts::dense::is_elementwise;
use crate::parts::experts::MAX_EXPERTS;
use crate::parts::{CudaAttention, CudaDense, CudaExperts, CudaLayer};
use crate::slice::DevicePtr;
use crate::stack::CudaStack;
use crate::weights::{CudaNorm, ptr_or_null};

/// Most experts of a token: the same constant of `kernels/decode_routing.cuh`.
const MAX_EXPERTS_PER_TOKEN: usize = 32;

/// A matrix of an op: one of the model's, or the matrices of the experts that a token is routed to as if they were one.
#[derive(Debug, Clone, Copy)]
pub(super) struct OpMatrix {
    /// Its first record; of experts: of the layer's first expert. Valid while the layer's weights
    /// live.
    pub(super) records: DevicePtr<u8>,
    /// Weight layout.
    pub(super) format: WeightLayout,
    /// Rows; of gate and up of experts: of all chosen experts together.
    pub(super) n_rows: usize,
    /// Columns; of down of experts: of all chosen experts together.
    pub(super) n_in: usize,
    /// Bytes from one tile to the next in memory; of experts: within one expert's matrix.
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
    /// Records of one tile of one expert's matrix. Of down, which is stacked by columns, a tile of the chosen experts
    /// has `n_used` times as many.
    pub(super) records_per_expert: usize,
}

impl OpMatrix {
    /// A matrix of the model.
    pub(super) fn of_matrix(matrix: &CudaMatrix) -> Self {
        Self {
            // 0 is the row of the result at which the matrix begins; the address does not depend on it.
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
        // Experts lie without gaps, each padded to whole tiles.
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

    /// Bytes of the matrix that are read for one token, padding to whole tiles and records included; of experts, of the
    /// chosen ones.
    pub(super) fn bytes_per_token(&self) -> usize {
        let record = self.format.record();
        self.n_tiles() * self.n_in.div_ceil(PANEL * record.panels) * record.bytes
    }

    /// Tiles; the last one may have fewer than 16 rows.
    pub(super) fn n_tiles(&self) -> usize {
        self.n_rows.div_ceil(TILE)
    }
}

/// Records of one tile of one expert's matrix. The division has no remainder: only formats of K-quants have records of
/// several panels. These are four, a super-block of 256 columns, and rows of K-quants are whole super-blocks.
fn records_per_expert(stack: &CudaStack) -> usize {
    stack.n_in().div_ceil(PANEL) / stack.layout().record().panels
}

/// The feed-forward of a supported layer; both kinds have a gate.
#[derive(Debug, Clone, Copy)]
enum GatedFeedForward<'a> {
    Dense(&'a CudaDense),
    Experts(&'a CudaExperts),
}

/// A layer that the kernel supports (see the top of this file): attention, then a gated feed-forward or experts, each
/// behind an `RMSNorm` and added to the residual stream.
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
    /// The ops in the order of their evaluation, each with its matrices: three of q/k/v (one below the other), two of
    /// gate and up, one of the others.
    pub(super) ops: Vec<(OpKind, Vec<OpMatrix>)>,
}

impl<'a> DecodeLayer<'a> {
    /// The layer as the kernel evaluates it; `None` if the kernel does not support it.
    pub(super) fn if_supported(layer: &'a CudaLayer) -> Option<Self> {
        let CudaLayer {
            mixer_norm,
            mixer_conv,
            mixer,
            mixer_post_norm,
            feed_forward_norm,
            feed_forward_conv,
            feed_forward,
            feed_forward_post_norm,
            residual,
            embedding,
            streams,
            output_scale,
        } = layer;
        let Mixer::Attention(attention) = mixer else { return None };
        // The kernel adds the attention's result to the residual stream before the feed-forward reads it.
        let residual_scale = match residual {
            Residual::Sequential { scale } => *scale,
            Residual::Parallel | Residual::PostNorm { .. } => return None,
        };
        // A norm of results would need another exchange between blocks: each has a few of a result's rows.
        let has_result_norms = mixer_post_norm.is_some() || feed_forward_post_norm.is_some();
        // Convolutions, embeddings of the layer, several residual streams, and a scale of the layer's output have no op in the
        // kernel.
        let has_convs = mixer_conv.is_some() || feed_forward_conv.is_some();
        let has_unsupported_parts = has_convs || embedding.is_some() || streams.is_some() || *output_scale != 1.0;
        // `attention_kernels` of `parts/attention.rs` decides on `kernels` and `separate_inputs`, by the same conditions
        // that `decode_attention.cuh` has. `Paged`: causal, possibly with a window or chunks; heads of a multiple of 8
        // elements, at most 256; no ALiBi. No `separate_inputs`: between the products of q/k/v and the attention there
        // are only norms of single heads and RoPE, which the attention kernel computes itself.
        // No gate of the result: the kernel has no product between attention's inputs and its result.
        let is_supported_attention = attention.kernels == AttentionKernels::Paged
            && attention.separate_inputs.is_none()
            && attention.gate.is_none();
        // Layers without keys or values of their own have fewer than three matrices: they read another layer's cache,
        // or use keys as values.
        if has_result_norms || has_unsupported_parts || !is_supported_attention || attention.qkv.len() != 3 {
            return None;
        }
        let mut ops = vec![
            (OpKind::Qkv, attention.qkv.iter().map(OpMatrix::of_matrix).collect()),
            (OpKind::AttentionOutput, vec![OpMatrix::of_matrix(&attention.out.weight)]),
        ];
        let feed_forward = match feed_forward {
            FeedForward::Dense(dense) => {
                // Returns `None` without a gate, or if the epilogue of the product cannot apply the activation. With
                // `fuses_activation`, gate and up have no biases and one weight layout.
                let gate = dense.gate.as_ref().filter(|_| dense.fuses_activation)?;
                ops.push((OpKind::GateAndUp, vec![OpMatrix::of_matrix(gate), OpMatrix::of_matrix(&dense.up)]));
                ops.push((OpKind::Down, vec![OpMatrix::of_matrix(&dense.down.weight)]));
                GatedFeedForward::Dense(dense)
            }
            FeedForward::Experts(experts) => {
                // Gate and up of experts may have different weight layouts; `same_input_form` below is all that is
                // required.
                let gate = experts.gate.as_ref().filter(|_| experts_are_supported(experts))?;
                let n_used = experts.spec.n_used;
                ops.push((OpKind::Router, vec![OpMatrix::of_matrix(&experts.router.weight)]));
                let gate_and_up = [gate, &experts.up].map(|stack| OpMatrix::stacked_by_rows(stack, n_used));
                ops.push((OpKind::GateAndUp, gate_and_up.to_vec()));
                ops.push((OpKind::Down, vec![OpMatrix::stacked_by_columns(&experts.down, n_used)]));
                GatedFeedForward::Experts(experts)
            }
            FeedForward::ChannelMix(_) | FeedForward::None => return None,
        };
        // The matrices of an op, at least one, share its inputs, which are stored as digits for codes, or as F16 parts
        // for floats: never both.
        let same_input_form = |matrices: &[OpMatrix]| {
            let has_codes = matrices[0].format.has_codes();
            matrices.iter().all(|matrix| matrix.format.has_codes() == has_codes)
        };
        let is_supported =
            |(_, matrices): &(OpKind, Vec<OpMatrix>)| same_input_form(matrices) && matrices.iter().all(has_whole_quads);
        // Inputs of q/k/v and of the feed-forward have an RMSNorm without a bias. Only then 1/RMS can be applied after
        // the product, to its rows.
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

    /// The activation of the gate (`Activation` of `kernels/common.cuh`), and the limit of an activation that cuts, 0 for
    /// others.
    pub(super) fn activation(&self) -> (u32, f32) {
        match self.feed_forward {
            GatedFeedForward::Dense(dense) => dense.activation,
            GatedFeedForward::Experts(experts) => experts.activation,
        }
    }

    /// The bias of an op's results, by row; null: none. That of q/k/v is
    /// the biases of the three matrices, one after the other. Gate and up have none here: `fuses_activation` excludes
    /// it for dense ones, and biases of experts are in `LayerArgs::expert_bias`. The output head is an op of the
    /// pseudo-layer, not of a `DecodeLayer`.
    pub(super) fn bias(&self, kind: OpKind) -> DevicePtr<f32> {
        match (kind, self.feed_forward) {
            (OpKind::Qkv, _) => ptr_or_null(self.attention.qkv_bias.as_ref()),
            (OpKind::AttentionOutput, _) => self.attention.out.bias(),
            (OpKind::Router, GatedFeedForward::Experts(experts)) => experts.router.bias(),
            (OpKind::Down, GatedFeedForward::Dense(dense)) => dense.down.bias(),
            (OpKind::Router, GatedFeedForward::Dense(_))
            | (OpKind::Down, GatedFeedForward::Experts(_))
            | (OpKind::GateAndUp | OpKind::OutputHead, _) => DevicePtr::NULL,
        }
    }

    /// The matrices of all ops, in the order of the ops.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &OpMatrix> {
        self.ops.iter().flat_map(|(_, matrices)| matrices)
    }
}

/// The largest number of rows that the result of an op of this kind has in any of `layers`; 0: no layer has such an op.
/// The rows are those of the op's first matrix: gate and up give one row for each pair, the others have one matrix.
/// Precondition: the kind is not q/k/v, whose result has the rows of three matrices.
pub(super) fn max_rows(layers: &[DecodeLayer<'_>], kind: OpKind) -> usize {
    debug_assert_ne!(kind, OpKind::Qkv);
    let of_kind = layers.iter().flat_map(|layer| &layer.ops).filter(|(op, _)| *op == kind);
    of_kind.map(|(_, matrices)| matrices[0].n_rows).max().unwrap_or(0)
}

/// Whether the kernel supports these experts: a router, and of each expert gate, up and down, with the options that the
/// top of this file lists.
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
        // The activation is checked below, from `spec`.
        activation: _,
        // Concerns other kernels.
        epilogue_applies_activation: _,
    } = experts;
    // Norms of their own and products around the experts have no op in the kernel; neither have shared experts.
    let has_norms_or_latent = router_norm.is_some() || latent.is_some() || expert_norms.is_some();
    let has_shared = shared.is_some() || shared_gate.is_some();
    // The columns of down of the chosen experts are multiplied as one matrix, whole records at a time. With padding
    // columns at an expert's end, the inputs of the next expert would meet the wrong columns. So `n_ff`, the columns of
    // down and the rows of gate and up, is a multiple of 64, and gate and up have no padding rows between experts.
    let has_whole_records = down.n_in().is_multiple_of(down.layout().record().panels * PANEL);
    // Scores of experts are exchanged as words, two in each; vectors of words are whole pairs of words.
    let has_supported_expert_count =
        spec.n_used <= MAX_EXPERTS_PER_TOKEN && spec.n_expert.is_multiple_of(4) && spec.n_expert <= MAX_EXPERTS;
    // Sparse activations need the whole gate vector of a token, of which each block has some rows.
    let activation_is_elementwise = is_elementwise(spec.expert.activation);
    // The kernel has weights on the experts' results only, not on their inputs.
    let weights_results = !spec.router.weights_inputs;
    activation_is_elementwise
        && !has_norms_or_latent
        && !has_shared
        && weights_results
        && has_whole_records
        && has_supported_expert_count
}

/// Whether the length of the matrix's input vector is a multiple of 4: inputs are read as quads, that is, pairs of
/// words of two elements each.
pub(super) fn has_whole_quads(matrix: &OpMatrix) -> bool {
    matrix.n_in.is_multiple_of(4)
}
