//! Which layers `kernels/decode.cu` takes.

use metal_attention_model::{Activation, Residual};

use super::args::Kind;
use crate::device::CudaBuffer;
use crate::matrix::{CudaMatrix, Format, PANEL, TILE};
use crate::parts::AttentionKernels;
use crate::stack::CudaStack;
use crate::weights::{
    CudaAttention, CudaDense, CudaEmbedding, CudaExperts, CudaFeedForward, CudaLayer, CudaMixer, CudaNorm,
};

/// Experts of a token, as `decode.cuh` has it, and of a layer, at most.
const MAX_EXPERTS: usize = 32;
const MAX_ROUTED: usize = 1024;

/// A matrix as a step multiplies it: one of the model's, or those of the experts that a token goes to.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepMatrix {
    pub(super) records: u64,
    pub(super) format: Format,
    /// Of all experts that a token goes to together.
    pub(super) n_rows: usize,
    pub(super) n_in: usize,
    pub(super) tile_bytes: usize,
    pub(super) experts: Option<OfExperts>,
}

/// How experts lie in a matrix of those that a token goes to.
#[derive(Debug, Clone, Copy)]
pub(super) struct OfExperts {
    /// Bytes from one to the next, of all that there are.
    pub(super) bytes: usize,
    /// Tiles of rows, and records of a row, that are those of one.
    pub(super) tiles: usize,
    pub(super) records: usize,
}

impl StepMatrix {
    pub(super) fn of(matrix: &CudaMatrix) -> Self {
        Self {
            records: matrix.args(0).records,
            format: matrix.format,
            n_rows: matrix.n_rows,
            n_in: matrix.n_in,
            tile_bytes: matrix.tile_bytes(),
            experts: None,
        }
    }

    /// Of `n_used` experts one below the other.
    fn below(stack: &CudaStack, n_used: usize) -> Self {
        let one = Self::of_one(stack);
        Self { n_rows: n_used * stack.n_rows, ..one }
    }

    /// Of `n_used` experts side by side.
    fn beside(stack: &CudaStack, n_used: usize) -> Self {
        let one = Self::of_one(stack);
        Self { n_in: n_used * stack.n_in(), ..one }
    }

    fn of_one(stack: &CudaStack) -> Self {
        let (args, tile_bytes) = stack.args();
        let tiles = stack.n_rows.div_ceil(TILE);
        let experts = OfExperts { bytes: tiles * tile_bytes as usize, tiles, records: records(stack) };
        Self {
            records: args.records,
            format: stack.format(),
            n_rows: stack.n_rows,
            n_in: stack.n_in(),
            tile_bytes: tile_bytes as usize,
            experts: Some(experts),
        }
    }

    /// Bytes that a token takes of it.
    pub(super) fn bytes(&self) -> usize {
        let record = self.format.record();
        self.n_tiles() * self.n_in.div_ceil(PANEL * record.panels) * record.bytes
    }

    /// Tiles of its rows.
    pub(super) fn n_tiles(&self) -> usize {
        self.n_rows.div_ceil(TILE)
    }
}

/// Records of a row.
fn records(stack: &CudaStack) -> usize {
    stack.n_in().div_ceil(PANEL) / stack.format().record().panels
}

/// What is behind attention.
#[derive(Debug, Clone, Copy)]
enum FeedForward<'a> {
    Dense(&'a CudaDense),
    Experts(&'a CudaExperts),
}

/// A layer that the kernel takes: attention and a gated feed-forward or experts behind `RMSNorm`s, and nothing besides.
#[derive(Debug, Clone)]
pub(super) struct PlainLayer<'a> {
    pub(super) mixer_norm: &'a CudaNorm,
    pub(super) attention: &'a CudaAttention,
    pub(super) norm: &'a CudaNorm,
    feed_forward: FeedForward<'a>,
    pub(super) scale: f32,
    /// Its products, in order, and the matrices of each.
    pub(super) steps: Vec<(Kind, Vec<StepMatrix>)>,
}

impl<'a> PlainLayer<'a> {
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
            own_embedding,
            streams,
            output_scale,
        } = layer;
        let CudaMixer::Attention(attention) = mixer else { return None };
        let scale = match *residual {
            Residual::Sequential { scale } => scale,
            Residual::Parallel | Residual::PostNorm { .. } => return None,
        };
        let results = mixer_post_norm.is_some() || feed_forward_post_norm.is_some() || sum_norms.is_some();
        let more = own_embedding.is_some() || streams.is_some() || *output_scale != 1.0;
        let paged = attention.kernels == AttentionKernels::Paged && attention.inputs_apart.is_none();
        if results || more || !paged || attention.qkv.len() != 3 {
            return None;
        }
        let mut steps = vec![
            (Kind::Qkv, attention.qkv.iter().map(StepMatrix::of).collect()),
            (Kind::AttentionOutput, vec![StepMatrix::of(&attention.out.weight)]),
        ];
        let feed_forward = match feed_forward {
            CudaFeedForward::Dense(dense) => {
                let gate = dense.gate.as_ref().filter(|_| dense.on_the_way)?;
                steps.push((Kind::GateAndUp, vec![StepMatrix::of(gate), StepMatrix::of(&dense.up)]));
                steps.push((Kind::Down, vec![StepMatrix::of(&dense.down.weight)]));
                FeedForward::Dense(dense)
            }
            CudaFeedForward::Experts(experts) => {
                let (gate, n_used) = (experts.gate.as_ref().filter(|_| are_plain(experts))?, experts.spec.n_used);
                steps.push((Kind::Router, vec![StepMatrix::of(&experts.router.weight)]));
                let gate_and_up = [gate, &experts.up].map(|stack| StepMatrix::below(stack, n_used));
                steps.push((Kind::GateAndUp, gate_and_up.to_vec()));
                steps.push((Kind::Down, vec![StepMatrix::beside(&experts.down, n_used)]));
                FeedForward::Experts(experts)
            }
            CudaFeedForward::ChannelMix(_) | CudaFeedForward::None => return None,
        };
        // Inputs of products that go together are made for one kind of codes.
        let alike = |of: &[StepMatrix]| of.iter().all(|m| m.format.has_codes() == of[0].format.has_codes());
        let fits = |(_, of): &(Kind, Vec<StepMatrix>)| alike(of) && of.iter().all(known);
        let on_the_way = |norm: &'a Option<CudaNorm>| norm.as_ref().filter(|norm| norm.is_on_the_way());
        let (mixer_norm, norm) = (on_the_way(mixer_norm)?, on_the_way(feed_forward_norm)?);
        steps.iter().all(fits).then_some(Self { mixer_norm, attention, norm, feed_forward, scale, steps })
    }

    /// Its experts, where it has any.
    pub(super) fn experts(&self) -> Option<&'a CudaExperts> {
        match self.feed_forward {
            FeedForward::Dense(_) => None,
            FeedForward::Experts(experts) => Some(experts),
        }
    }

    /// Number of the activation between gate and up, and its parameter.
    pub(super) fn activation(&self) -> (u32, f32) {
        match self.feed_forward {
            FeedForward::Dense(dense) => dense.activation,
            FeedForward::Experts(experts) => experts.activation,
        }
    }

    /// What is added to the rows of a step's results.
    pub(super) fn bias(&self, kind: Kind) -> u64 {
        let ptr = |buffer: &Option<CudaBuffer>| buffer.as_ref().map_or(0, CudaBuffer::ptr);
        match (kind, self.feed_forward) {
            (Kind::Qkv, _) => ptr(&self.attention.qkv_bias),
            (Kind::AttentionOutput, _) => self.attention.out.bias(),
            (Kind::Router, FeedForward::Experts(experts)) => experts.router.bias(),
            (Kind::Down, FeedForward::Dense(dense)) => dense.down.bias(),
            (Kind::Router, FeedForward::Dense(_))
            | (Kind::Down, FeedForward::Experts(_))
            | (Kind::GateAndUp | Kind::Head, _) => 0,
        }
    }

    pub(super) fn matrices(&self) -> impl Iterator<Item = &StepMatrix> {
        self.steps.iter().flat_map(|(_, matrices)| matrices)
    }
}

/// Most rows of a kind of steps.
pub(super) fn most_rows(layers: &[PlainLayer<'_>], wanted: Kind) -> usize {
    let of_kind = layers.iter().flat_map(|layer| &layer.steps).filter(|(kind, _)| *kind == wanted);
    of_kind.map(|(_, matrices)| matrices[0].n_rows).max().unwrap_or(0)
}

/// Whether experts are a router, gate, up and down, and nothing besides, whose columns fill whole records.
fn are_plain(experts: &CudaExperts) -> bool {
    let CudaExperts {
        spec,
        router: _,
        router_rows: _,
        router_norm,
        choice_bias: _,
        latent,
        gate: _,
        up: _,
        down,
        expert_scale: _,
        shared,
        shared_gate,
        expert_norms,
        activation: _,
        ..
    } = experts;
    let more = router_norm.is_some() || latent.is_some() || expert_norms.is_some();
    let all_tokens = shared.is_some() || shared_gate.is_some();
    let whole = down.n_in().is_multiple_of(down.format().record().panels * PANEL);
    let chosen = spec.n_used <= MAX_EXPERTS && spec.n_expert.is_multiple_of(4) && spec.n_expert <= MAX_ROUTED;
    let activated = match spec.expert.activation {
        Activation::Silu | Activation::Gelu | Activation::ReluSquared | Activation::ClampedSwiglu { limit: _ } => true,
        Activation::SparseGelu { n_std: _ } => false,
    };
    activated && !more && !all_tokens && !spec.router.weight_input && whole && chosen
}

/// Whether tokens become rows of a table and nothing besides.
pub(super) fn is_plain(embedding: &CudaEmbedding) -> bool {
    let CudaEmbedding { table: _, token_type, positions, norm, per_layer, streams } = embedding;
    let nothing = token_type.is_none() && positions.is_none() && norm.is_none();
    nothing && per_layer.is_none() && streams.is_none()
}

/// Whether the kernel takes rows of that many elements.
pub(super) fn known(matrix: &StepMatrix) -> bool {
    matrix.n_in.is_multiple_of(4)
}
