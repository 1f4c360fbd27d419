//! The dispatches of a forward pass: for each kind of batch a list of kernels in the order in which they run, each
//! bound to its buffers.
//!
//! A [`DispatchPlan`] is built once for each [`BatchKind`] when a model is set up, and recorded for every micro-batch of
//! that kind: grid sizes are computed from the numbers of tokens and splits when it is recorded
//! ([`GridExtent`](crate::dispatch::GridExtent)), and kernels read tokens, positions and page tables from the buffer
//! `batch` ([`BatchBuffer`](crate::BatchBuffer)). The kinds, with the limits that [`few_limits`] returns:
//!
//! ```text
//! One         one token                                          kernels of decode steps
//! Sequences   one token each of 2 to `sequences` sequences       kernels of decode steps
//! Few         any other micro-batch of at most `tokens` tokens   kernels of prefill
//! Many        all others                                         kernels of prefill
//! ```
//!
//! [`PlanBuilder`] builds it. This file has norms and products, `plan/layer.rs` the order of a layer and its residual
//! joins, and the files of `parts/` the parts. All of them append to a `Vec<Dispatch>`. WebGPU orders dispatches: each
//! sees what those before it have written. They pass values from kernel to kernel in the scratch buffers of
//! [`Activations`]: the residual stream is `scratch.x`.
//!
//! # Errors
//!
//! Of all functions: a kernel does not support a shape, or the driver cannot make a pipeline. They occur when the plan
//! is built, not when it is recorded.

mod layer;

pub(crate) use layer::{BranchOutput, LastProduct};

use metal_attention_model::{BatchKind, FewLimits, ModelSpec};
use wgpu::Buffer;

use crate::activations::Activations;
use crate::executor::ResultKind;
use crate::kernels::{
    self, MAX_TOP_K, MatvecInput, MatvecOptions, MatvecOutput, NormShape, RmsNormShape, SplitTile, StateRange,
    TOKEN_TILE, TokenRows,
};
use crate::kv_cache::WgpuKvCache;
use crate::spans::Spans;
use crate::state::WgpuStates;
use crate::weights::{WgpuLinear, WgpuNorm, WgpuWeights};
use crate::{BatchDims, Bind, Dispatch, WgpuDevice, WgpuError, WgpuMatrix};

/// Most tokens of a batch that goes through GEMV kernels, and most sequences of a decode step that
/// `BatchKind::Sequences` covers.
pub(super) const MAX_GEMV_TOKENS: usize = 16;

/// Most tokens of `BatchKind::Few` on GPUs with matrix units: fewer tokens than this leave most of a large GPU idle in
/// the tiles that `BatchKind::Many` uses.
const MAX_FEW_TOKENS_ON_UNITS: usize = 128;

/// The largest batches of `BatchKind::Sequences` and `BatchKind::Few` on `gpu`. `exact`: without 16-bit matrix units.
pub(super) fn few_limits(gpu: &WgpuDevice, exact: bool) -> FewLimits {
    let tokens = if gpu.features().cooperative_f16 && !exact { MAX_FEW_TOKENS_ON_UNITS } else { MAX_GEMV_TOKENS };
    FewLimits { sequences: MAX_GEMV_TOKENS, tokens }
}

/// All dispatches of one kind of batch, in groups that run one after the other.
#[derive(Debug)]
pub(super) struct DispatchPlan {
    /// Token ids to the residual stream.
    pub(super) embedding: Vec<Dispatch>,
    /// The residual stream through each layer.
    pub(super) layers: Vec<Vec<Dispatch>>,
    /// The context rows of a block drafter, which are in the residual stream, to the KV cache of each layer. Empty for other models.
    pub(super) context: Vec<Dispatch>,
    /// The persistent kernel, which replaces `layers`: one dispatch, or one for each buffer that weights lie in. Only
    /// for one token of a sequence whose KV pages are consecutive. `None` where the GPU or the model does not suit it.
    pub(super) persistent_layers: Option<Vec<Dispatch>>,
    /// Between the layers and the last norm: the residual stream from several ones. Empty for most models.
    pub(super) merge_streams: Vec<Dispatch>,
    /// Hidden vectors of all tokens after the last norm, in `scratch.normed`, for traces.
    pub(super) hidden_of_all: Vec<Dispatch>,
    /// The states for an assistant's next drafts, of all tokens, in `scratch.target_rows`; empty for other models.
    pub(super) next_states: Vec<Dispatch>,
    /// Hidden vectors of the output tokens after the last norm, in `scratch.normed`.
    pub(super) hidden: Vec<Dispatch>,
    /// Logits of the output tokens, in `scratch.logits`; empty for a model without an output head.
    pub(super) head: Vec<Dispatch>,
    /// The ids of the largest logits, in `ids`. They also become the tokens of the batch buffer, one position further.
    pub(super) argmax: Vec<Dispatch>,
    /// The largest logits with their ids, in `top_k`.
    pub(super) top_k: Vec<Dispatch>,
}

impl DispatchPlan {
    /// The dispatches after `merge_streams` that compute the results `output`.
    pub(super) fn result_dispatches(&self, output: ResultKind) -> impl Iterator<Item = &Dispatch> {
        let (first, then): (&[Dispatch], &[Dispatch]) = match output {
            ResultKind::Hidden => (&self.hidden, &[]),
            ResultKind::Logits => (&self.head, &[]),
            ResultKind::Id => (&self.head, &self.argmax),
            ResultKind::TopK => (&self.head, &self.top_k),
        };
        first.iter().chain(then)
    }

    /// All dispatches.
    fn all_dispatches(&self) -> impl Iterator<Item = &Dispatch> {
        let Self {
            embedding,
            layers,
            context,
            persistent_layers,
            merge_streams,
            hidden_of_all,
            next_states,
            hidden,
            head,
            argmax,
            top_k,
        } = self;
        let layers = layers.iter().chain(persistent_layers).flatten();
        let hidden = merge_streams.iter().chain(hidden_of_all).chain(next_states).chain(hidden);
        embedding.iter().chain(layers).chain(context).chain(hidden).chain(head).chain(argmax).chain(top_k)
    }

    /// Whether the pipelines of all dispatches are compiled, or could not be.
    pub(super) fn is_ready(&self, gpu: &WgpuDevice) -> bool {
        self.all_dispatches().all(|dispatch| dispatch.is_ready(gpu))
    }

    /// Waits until the pipelines of all dispatches are compiled; an error if one cannot be.
    pub(super) fn wait_ready(&self, gpu: &WgpuDevice) -> Result<(), WgpuError> {
        self.all_dispatches().try_for_each(|dispatch| dispatch.wait_ready(gpu))
    }

    /// The dispatches of all layers, in order. `consecutive_pages`: whether the KV pages of the sequence are
    /// consecutive. The persistent kernel needs that, and a result to read back: its time-out flag arrives with the
    /// result. `deepstack`: the addition after each of the first layers, of which the persistent kernel has none.
    pub(super) fn layers<'p>(
        &'p self,
        size: BatchDims,
        consecutive_pages: bool,
        deepstack: &'p [Dispatch],
    ) -> impl Iterator<Item = &'p Dispatch> {
        let suits = size.n_outputs > 0 && consecutive_pages && deepstack.is_empty();
        let persistent = self.persistent_layers.as_ref().filter(|_| suits);
        let n_one_by_one = if persistent.is_some() { 0 } else { self.layers.len() };
        persistent.into_iter().flatten().chain((0..n_one_by_one).flat_map(|i| self.layer_of_step(i, deepstack)))
    }

    /// The dispatches of layer `i`, with those of `deepstack` that follow it.
    pub(super) fn layer_of_step<'p>(
        &'p self,
        i: usize,
        deepstack: &'p [Dispatch],
    ) -> impl Iterator<Item = &'p Dispatch> {
        self.layers[i].iter().chain(deepstack.get(i))
    }

    /// Number of dispatches of all layers without the persistent kernel.
    pub(super) fn n_dispatches(&self) -> usize {
        self.layers.iter().map(Vec::len).sum()
    }

    /// Progress after the first `n` dispatches of the layers, in tokens times layers.
    pub(super) fn work(&self, size: BatchDims, n: usize) -> u64 {
        let layers = n * self.layers.len() / self.n_dispatches().max(1);
        u64::from(size.n_tokens) * layers as u64
    }

    /// The dispatches of a greedy decode step of a sequence with consecutive KV pages, in order.
    pub(super) fn greedy_step(&self, size: BatchDims) -> impl Iterator<Item = &Dispatch> {
        let before = self.embedding.iter().chain(self.layers(size, true, &[])).chain(&self.merge_streams);
        before.chain(&self.head).chain(&self.argmax)
    }
}

/// Everything that the dispatches of one kind of batch are bound to.
pub(super) struct PlanBuilder<'a> {
    /// The GPU.
    pub(super) gpu: &'a WgpuDevice,
    /// The model's description.
    pub(super) spec: &'a ModelSpec,
    /// Its weights on the GPU.
    pub(super) weights: &'a WgpuWeights,
    /// Scratch buffers between kernels.
    pub(super) scratch: &'a Activations,
    /// Keys and values.
    pub(super) cache: &'a WgpuKvCache,
    /// Recurrent states.
    pub(super) states: &'a WgpuStates,
    /// The RoPE cos/sin table of each layer; see [`RopeTables`](crate::rope_tables::RopeTables).
    pub(super) rope: &'a [Buffer],
    /// The buffers of spans, of which attention reads the last inputs that inputs attend to.
    pub(super) spans: &'a Spans,
    /// Tokens and page tables, see [`BatchBuffer`](crate::BatchBuffer).
    pub(super) batch: &'a Buffer,
    /// Receives the ids of argmax, `[n_outputs]`.
    pub(super) ids: &'a Buffer,
    /// Receives the largest logits, `[n_outputs, MAX_TOP_K, 2]`.
    pub(super) top_k: &'a Buffer,
    /// Whether products keep 32-bit floats where matrix units would round to 16 bits.
    pub(super) exact: bool,
    /// The kind of batch that the plan is for.
    pub(super) kind: BatchKind,
}

/// Which kernel computes a matrix product.
#[derive(Debug, Clone, Copy, PartialEq)]
enum ProductMethod {
    /// GEMV: each weight is read once for this number of tokens.
    Gemv(usize),
    /// Split-K on matrix units: the inner dimension is divided among subgroups. For a few tokens.
    SplitK(SplitTile),
    /// GEMM in tiles of rows and tokens, on matrix units or in plain loops.
    Gemm { on_units: bool },
}

/// One matrix product: `y = W x + bias`, with an epilogue.
#[derive(Clone, Copy)]
pub(crate) struct LinearProduct<'a> {
    /// The matrix and its bias `[n_out]`.
    pub(crate) linear: (&'a WgpuMatrix, Option<&'a Buffer>),
    /// The epilogue: the product is stored, added to `y`, or gated.
    pub(crate) output: MatvecOutput,
    /// Which tokens' rows of `x` are multiplied.
    pub(crate) rows: TokenRows,
    /// The input, a row of `n_in` floats for each token.
    pub(crate) x: &'a Buffer,
    /// The result, a row of `n_out` floats for each token (half as many when gated).
    pub(crate) y: &'a Buffer,
}

impl<'a> LinearProduct<'a> {
    /// A product of all tokens.
    pub(crate) fn new(linear: &'a WgpuLinear, output: MatvecOutput, x: &'a Buffer, y: &'a Buffer) -> Self {
        Self { linear: (&linear.weight, linear.bias.as_ref()), output, rows: TokenRows::Tokens, x, y }
    }
}

/// The input of a mixer or a feed-forward, `[n_tokens, n_embd]`: what its first products multiply.
#[derive(Clone, Copy)]
pub(crate) enum BranchInput<'a> {
    /// This norm of the residual stream `scratch.x`, which no dispatch has computed yet. Each product that reads the
    /// input computes it: most kernels in their prologue, the others by a norm kernel before, to `scratch.normed`.
    PendingNorm(&'a WgpuNorm),
    /// The rows of this buffer, which earlier dispatches write.
    Rows(&'a Buffer),
}

impl<'a> PlanBuilder<'a> {
    /// Builds the plan, without the persistent kernel.
    pub(super) fn build(&self) -> Result<DispatchPlan, WgpuError> {
        let (scratch, n_vocab) = (self.scratch, self.spec.n_vocab);
        let (mut argmax, mut top_k) = (Vec::new(), Vec::new());
        if self.spec.output.head.is_some() {
            argmax = kernels::argmax(self.gpu, n_vocab, &scratch.logits, &scratch.argmax, self.ids, Some(self.batch))?;
            top_k = kernels::top_k(self.gpu, n_vocab, MAX_TOP_K, &scratch.logits, &scratch.top_k, self.top_k)?;
        }
        Ok(DispatchPlan {
            embedding: self.embedding()?,
            layers: (0..self.spec.n_layer()).map(|i| self.layer(i)).collect::<Result<_, _>>()?,
            context: {
                let of_layers = (0..self.spec.n_layer()).filter(|_| self.spec.takes_context).map(|i| self.context(i));
                of_layers.collect::<Result<Vec<_>, _>>()?.concat()
            },
            persistent_layers: None,
            merge_streams: self.merge_streams()?,
            hidden_of_all: self.hidden(false)?,
            next_states: self.next_states()?,
            hidden: self.hidden(true)?,
            head: self.head()?,
            argmax,
            top_k,
        })
    }

    /// The most tokens of a batch of this kind.
    pub(crate) fn max_tokens(&self) -> usize {
        match self.kind {
            BatchKind::One => 1,
            BatchKind::Sequences => MAX_GEMV_TOKENS,
            BatchKind::Few => few_limits(self.gpu, self.exact).tokens,
            BatchKind::Many => self.scratch.n_tokens,
        }
    }

    /// Which kernel multiplies `matrix` by the tokens of this kind of batch.
    fn method(&self, matrix: &WgpuMatrix) -> ProductMethod {
        let features = self.gpu.features();
        if self.kind == BatchKind::One {
            return ProductMethod::Gemv(1);
        }
        if self.kind != BatchKind::Many {
            if let Some(tile) = kernels::split_tile(features, matrix, self.max_tokens(), self.exact) {
                return ProductMethod::SplitK(tile);
            }
            if !kernels::all_on_units(features, matrix, self.exact) || !features.cooperative_f16 {
                return ProductMethod::Gemv(TOKEN_TILE);
            }
        }
        if kernels::leaves_idle_in_tiles(matrix, self.max_tokens()) {
            return ProductMethod::Gemv(TOKEN_TILE);
        }
        ProductMethod::Gemm { on_units: kernels::all_on_units(features, matrix, self.exact) }
    }

    /// Whether the plan uses the kernels of decode steps: each token is the only one of its sequence in the micro-batch.
    pub(crate) fn uses_decode_kernels(&self) -> bool {
        match self.kind {
            BatchKind::One | BatchKind::Sequences => true,
            BatchKind::Few | BatchKind::Many => false,
        }
    }

    /// Where a part of layer `i`'s state lies that begins at element `at`.
    pub(crate) fn states_at(&self, i: usize, at: usize) -> StateRange {
        StateRange { n_slots: self.states.n_slots(), stride: self.spec.layers[i].state_elements(), at }
    }

    /// The input of a mixer or feed-forward whose input norm is `norm`: norm of `x`, without one `x` itself. Where no
    /// product can compute the norm in its prologue, appends a dispatch that writes it to `normed`. A part whose input
    /// has several readers, or readers other than products, writes it itself ([`rows_of`](Self::rows_of)).
    fn branch_input(
        &self,
        dispatches: &mut Vec<Dispatch>,
        norm: Option<&'a WgpuNorm>,
    ) -> Result<BranchInput<'a>, WgpuError> {
        let Some(norm) = norm else { return Ok(BranchInput::Rows(&self.scratch.x)) };
        let input = BranchInput::PendingNorm(norm);
        if norm.fits_prologue() { Ok(input) } else { Ok(BranchInput::Rows(self.rows_of(dispatches, input)?)) }
    }

    /// The rows of an input, for several readers, or for others than products. Appends a dispatch that writes a pending norm
    /// to `normed`.
    pub(crate) fn rows_of(
        &self,
        dispatches: &mut Vec<Dispatch>,
        input: BranchInput<'a>,
    ) -> Result<&'a Buffer, WgpuError> {
        let scratch = self.scratch;
        match input {
            BranchInput::Rows(rows) => Ok(rows),
            BranchInput::PendingNorm(norm) => {
                dispatches.push(self.norm(norm, NormShape::of_row(norm.n), Some(&scratch.x), &scratch.normed)?);
                Ok(&scratch.normed)
            }
        }
    }

    /// `y = norm(x)`; where `x` is `None`, `y = norm(y)`. `shape` sets what `norm` does not: number of rows, scale,
    /// accumulation, all tokens or only the output tokens.
    pub(crate) fn norm(
        &self,
        norm: &WgpuNorm,
        shape: NormShape,
        x: Option<&Buffer>,
        y: &Buffer,
    ) -> Result<Dispatch, WgpuError> {
        let shape =
            NormShape { n: norm.n, kind: Some(norm.kind), eps: norm.eps, weight: true, bias: norm.has_bias, ..shape };
        kernels::norm(self.gpu, shape, x.map(|x| x as &dyn Bind), Some(&norm.weights), y, self.batch)
    }

    /// Appends `y = linear input` for all tokens, with the epilogue `output`. A pending norm is computed from
    /// `scratch.x`.
    pub(crate) fn multiply_branch_input(
        &self,
        dispatches: &mut Vec<Dispatch>,
        input: BranchInput<'_>,
        linear: &WgpuLinear,
        output: MatvecOutput,
        y: &Buffer,
    ) -> Result<(), WgpuError> {
        match input {
            BranchInput::PendingNorm(norm) => {
                self.norm_then_multiply(dispatches, norm, LinearProduct::new(linear, output, &self.scratch.x, y))
            }
            BranchInput::Rows(x) => self.multiply(dispatches, LinearProduct::new(linear, output, x, y)),
        }
    }

    /// Appends the product of `norm(product.x)`, an RMSNorm without bias. Most kernels compute it in their prologue,
    /// which saves a dispatch. The others read `normed`, which a norm kernel writes before.
    pub(crate) fn norm_then_multiply(
        &self,
        dispatches: &mut Vec<Dispatch>,
        norm: &WgpuNorm,
        product: LinearProduct<'_>,
    ) -> Result<(), WgpuError> {
        let (weight, eps) = (&norm.weights, norm.eps);
        if !matches!(
            self.method(product.linear.0),
            ProductMethod::Gemm { on_units: false } | ProductMethod::Gemv(TOKEN_TILE)
        ) {
            dispatches.extend(self.product_dispatches(MatvecInput::RmsNorm { weight, eps }, product)?);
            return Ok(());
        }
        let outputs_only = product.rows == TokenRows::Outputs;
        let norm = RmsNormShape { n: self.spec.n_embd, eps, outputs_only };
        dispatches.push(kernels::rmsnorm(self.gpu, norm, product.x, weight, &self.scratch.normed, self.batch)?);
        let rows = if outputs_only { TokenRows::Gathered } else { TokenRows::Tokens };
        self.multiply(dispatches, LinearProduct { x: &self.scratch.normed, rows, ..product })
    }

    /// Appends the product of `norm(product.x)`, an RMSNorm of whole rows without bias, computed in the prologue. Only
    /// for one token: all kernels of one token can.
    pub(crate) fn multiply_normed(
        &self,
        dispatches: &mut Vec<Dispatch>,
        norm: &WgpuNorm,
        product: LinearProduct<'_>,
    ) -> Result<(), WgpuError> {
        dispatches
            .extend(self.product_dispatches(MatvecInput::RmsNorm { weight: &norm.weights, eps: norm.eps }, product)?);
        Ok(())
    }

    /// Appends a product.
    pub(crate) fn multiply(&self, dispatches: &mut Vec<Dispatch>, product: LinearProduct<'_>) -> Result<(), WgpuError> {
        dispatches.extend(self.product_dispatches(MatvecInput::Plain, product)?);
        Ok(())
    }

    /// The dispatches of one product; one for each part of the matrix.
    fn product_dispatches(
        &self,
        input: MatvecInput<'_>,
        product: LinearProduct<'_>,
    ) -> Result<Vec<Dispatch>, WgpuError> {
        let LinearProduct { linear: (matrix, bias), output, rows, x, y } = product;
        let (gpu, batch) = (self.gpu, self.batch);
        let options = MatvecOptions { input, output, rows, bias };
        match self.method(matrix) {
            ProductMethod::Gemv(tile) => kernels::multi_token_matvec(gpu, matrix, options, tile, x, y, batch),
            ProductMethod::SplitK(tile) => kernels::split_matmul(gpu, matrix, options, tile, x, y, batch),
            ProductMethod::Gemm { .. } => {
                // Logits of many tokens are seldom wanted: tiles are chosen for a few.
                let most = if rows == TokenRows::Tokens {
                    self.max_tokens()
                } else {
                    self.max_tokens().min(MAX_FEW_TOKENS_ON_UNITS)
                };
                kernels::matmul(gpu, matrix, options, most, self.exact, x, y, &self.scratch.matmul, batch)
            }
        }
    }
}
