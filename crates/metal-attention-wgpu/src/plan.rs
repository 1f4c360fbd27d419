//! The dispatches of a forward pass, in the order of the paper, bound to their buffers.

mod delta_rule;
mod ends;
mod experts;
mod layer;
mod mamba;
mod mixer;
mod rwkv;
mod short_conv;
mod streams;

pub(crate) use delta_rule::low_rank_of_delta_rule;
pub(crate) use rwkv::low_rank_of_rwkv7;

use metal_attention_model::{AFew, BatchKind, ModelSpec, NormKind};
use wgpu::Buffer;

use crate::activations::Activations;
use crate::forward_pass::ResultKind;
use crate::kernels::{
    self, MAX_TOP_K, MatvecInput, MatvecOptions, MatvecOutput, NormShape, RmsNormShape, SplitTile, TOKEN_TILE,
    TokenRows,
};
use crate::kv_cache::WgpuKvCache;
use crate::parts::MixerKernels;
use crate::state::WgpuStates;
use crate::weights::{WgpuLinear, WgpuNorm, WgpuWeights};
use crate::{BatchDims, Dispatch, WgpuDevice, WgpuError, WgpuMatrix};

/// Most tokens of a batch that is multiplied token by token instead of tile by tile, and sequences decoded side by side.
pub(super) const MAX_GEMV_TOKENS: usize = 16;

/// Most tokens of a few on matrix units, whose tiles for many leave most of a large GPU idle.
const MAX_FEW_TOKENS_ON_UNITS: usize = 128;

/// How many are a few on `gpu`.
pub(super) fn few_limits(gpu: &WgpuDevice, exact: bool) -> AFew {
    let tokens = if gpu.features().cooperative_f16 && !exact { MAX_FEW_TOKENS_ON_UNITS } else { MAX_GEMV_TOKENS };
    AFew { sequences: MAX_GEMV_TOKENS, tokens }
}

/// All dispatches of one kind of batch.
#[derive(Debug)]
pub(super) struct DispatchPlan {
    pub(super) embedding: Vec<Dispatch>,
    pub(super) layers: Vec<Vec<Dispatch>>,
    /// All layers in one, or in one for each buffer that their weights lie in, for a step that shows nothing of what lies
    /// between them, of a sequence whose pages lie one after the other.
    pub(super) persistent_layers: Option<Vec<Dispatch>>,
    /// States after the last norm of the tokens whose logits are wanted.
    pub(super) hidden: Vec<Dispatch>,
    /// Logits of the tokens that want them.
    pub(super) head: Vec<Dispatch>,
    /// Their largest, which also becomes the next batch.
    pub(super) argmax: Vec<Dispatch>,
    /// Or a short list of the largest.
    pub(super) top_k: Vec<Dispatch>,
}

impl DispatchPlan {
    /// What follows the layers for `output` to come back.
    pub(super) fn results(&self, output: ResultKind) -> impl Iterator<Item = &Dispatch> {
        let (first, then): (&[Dispatch], &[Dispatch]) = match output {
            ResultKind::Hidden => (&self.hidden, &[]),
            ResultKind::Logits => (&self.head, &[]),
            ResultKind::Id => (&self.head, &self.argmax),
            ResultKind::TopK => (&self.head, &self.top_k),
        };
        first.iter().chain(then)
    }

    /// All that it has of one kernel or another.
    fn all(&self) -> impl Iterator<Item = &Dispatch> {
        let Self { embedding, layers, persistent_layers, hidden, head, argmax, top_k } = self;
        let layers = layers.iter().chain(persistent_layers).flatten();
        embedding.iter().chain(layers).chain(hidden).chain(head).chain(argmax).chain(top_k)
    }

    /// Whether the pipelines of all dispatches are there.
    pub(super) fn is_ready(&self, gpu: &WgpuDevice) -> bool {
        self.all().all(|dispatch| dispatch.is_ready(gpu))
    }

    /// Waits for the pipelines of all dispatches; an error where one could not be built.
    pub(super) fn ready(&self, gpu: &WgpuDevice) -> Result<(), WgpuError> {
        self.all().try_for_each(|dispatch| dispatch.ready(gpu))
    }

    /// The dispatches of all layers, in order; `in_order`: whether the pages of the sequence lie one after the other.
    /// Whether layers at once ran to the end is known where something comes back.
    pub(super) fn layers(&self, size: BatchDims, in_order: bool) -> impl Iterator<Item = &Dispatch> {
        let persistent = self.persistent_layers.as_ref().filter(|_| size.n_wanted > 0 && in_order);
        let one_by_one = if persistent.is_some() { &[] } else { self.layers.as_slice() };
        persistent.into_iter().flatten().chain(one_by_one.iter().flatten())
    }

    /// Dispatches of all layers, one by one.
    pub(super) fn n_dispatches(&self) -> usize {
        self.layers.iter().map(Vec::len).sum()
    }

    /// Tokens times layers of a step that its first `n` dispatches of layers get done.
    pub(super) fn work(&self, size: BatchDims, n: usize) -> u64 {
        let layers = n * self.layers.len() / self.n_dispatches().max(1);
        u64::from(size.n_tokens) * layers as u64
    }

    /// The dispatches of a greedy step of a sequence alone in the cache, in order.
    pub(super) fn greedy(&self, size: BatchDims) -> impl Iterator<Item = &Dispatch> {
        self.embedding.iter().chain(self.layers(size, true)).chain(&self.head).chain(&self.argmax)
    }
}

/// What the dispatches work on.
pub(super) struct PlanBuilder<'a> {
    pub(super) gpu: &'a WgpuDevice,
    pub(super) spec: &'a ModelSpec,
    pub(super) weights: &'a WgpuWeights,
    pub(super) scratch: &'a Activations,
    pub(super) cache: &'a WgpuKvCache,
    pub(super) states: &'a WgpuStates,
    pub(super) mixers: &'a [MixerKernels],
    /// Cosines and sines of each layer.
    pub(super) rope: &'a [Buffer],
    pub(super) batch: &'a Buffer,
    pub(super) ids: &'a Buffer,
    pub(super) top_k: &'a Buffer,
    pub(super) exact: bool,
    pub(super) kind: BatchKind,
}

/// How a matrix product is computed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum ProductMethod {
    /// Each weight is read once for so many tokens.
    TokenByToken(usize),
    /// On matrix units, the inputs of a row shared out.
    Split(SplitTile),
    /// In tiles of rows and tokens.
    Tiles { on_units: bool },
}

/// A matrix product and where its results go.
#[derive(Clone, Copy)]
struct LinearProduct<'a> {
    linear: (&'a WgpuMatrix, Option<&'a Buffer>),
    output: MatvecOutput,
    rows: TokenRows,
    x: &'a Buffer,
    y: &'a Buffer,
}

impl<'a> LinearProduct<'a> {
    /// A product for all tokens.
    fn new(linear: &'a WgpuLinear, output: MatvecOutput, x: &'a Buffer, y: &'a Buffer) -> Self {
        Self { linear: (&linear.weight, linear.bias.as_ref()), output, rows: TokenRows::Tokens, x, y }
    }
}

/// The input of products: what a norm makes of the residual stream, or that itself.
#[derive(Clone, Copy)]
enum ProductInput<'a> {
    /// The norm is still to be taken of the stream; kernels for products do it on the way.
    Norm(&'a WgpuNorm),
    /// It lies there.
    Ready(&'a Buffer),
}

impl PlanBuilder<'_> {
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
            persistent_layers: None,
            hidden: self.hidden()?,
            head: self.head()?,
            argmax,
            top_k,
        })
    }

    /// Most tokens of a batch of this kind.
    fn max_tokens(&self) -> usize {
        match self.kind {
            BatchKind::One => 1,
            BatchKind::Sequences => MAX_GEMV_TOKENS,
            BatchKind::Few => few_limits(self.gpu, self.exact).tokens,
            BatchKind::Many => self.scratch.n_tokens,
        }
    }

    /// How a product with `matrix` is computed.
    fn method(&self, matrix: &WgpuMatrix) -> ProductMethod {
        let features = self.gpu.features();
        if self.kind == BatchKind::One {
            return ProductMethod::TokenByToken(1);
        }
        if self.kind != BatchKind::Many {
            if let Some(tile) = kernels::split_tile(features, matrix, self.max_tokens(), self.exact) {
                return ProductMethod::Split(tile);
            }
            if !kernels::all_on_units(features, matrix, self.exact) || !features.cooperative_f16 {
                return ProductMethod::TokenByToken(TOKEN_TILE);
            }
        }
        if kernels::leaves_idle_in_tiles(matrix, self.max_tokens()) {
            return ProductMethod::TokenByToken(TOKEN_TILE);
        }
        ProductMethod::Tiles { on_units: kernels::all_on_units(features, matrix, self.exact) }
    }

    /// What `norm` makes of the residual stream, for products; without a norm the stream. `shared`: several products read it,
    /// so that it is made once.
    fn input<'n>(
        &'n self,
        dispatches: &mut Vec<Dispatch>,
        norm: Option<&'n WgpuNorm>,
        shared: bool,
    ) -> Result<ProductInput<'n>, WgpuError> {
        let Some(norm) = norm else { return Ok(ProductInput::Ready(&self.scratch.x)) };
        if !shared && norm.kind == NormKind::Rms && !norm.has_bias {
            return Ok(ProductInput::Norm(norm));
        }
        dispatches.push(self.norm(norm, NormShape::of_row(norm.n), Some(&self.scratch.x), &self.scratch.h)?);
        Ok(ProductInput::Ready(&self.scratch.h))
    }

    /// `y = norm(x)` over rows of the norm's length, with the rest as `of` says; `None`: in place.
    fn norm(&self, norm: &WgpuNorm, shape: NormShape, x: Option<&Buffer>, y: &Buffer) -> Result<Dispatch, WgpuError> {
        let shape =
            NormShape { n: norm.n, kind: Some(norm.kind), eps: norm.eps, weight: true, bias: norm.has_bias, ..shape };
        kernels::norm(self.gpu, shape, x, Some(&norm.weights), y, self.batch)
    }

    /// The product with `input`, in place of the one that `product` has.
    fn project(
        &self,
        dispatches: &mut Vec<Dispatch>,
        input: ProductInput<'_>,
        product: LinearProduct<'_>,
    ) -> Result<(), WgpuError> {
        match input {
            ProductInput::Norm(norm) => self.norm_then_multiply(dispatches, norm, product),
            ProductInput::Ready(x) => self.multiply(dispatches, LinearProduct { x, ..product }),
        }
    }

    /// The product of `norm(x)`, an RMSNorm that adds nothing. Most kernels reckon it on the way; a norm of its own would cost
    /// a whole dispatch more.
    fn norm_then_multiply(
        &self,
        dispatches: &mut Vec<Dispatch>,
        norm: &WgpuNorm,
        product: LinearProduct<'_>,
    ) -> Result<(), WgpuError> {
        let (weight, eps) = (&norm.weights, norm.eps);
        if !matches!(
            self.method(product.linear.0),
            ProductMethod::Tiles { on_units: false } | ProductMethod::TokenByToken(TOKEN_TILE)
        ) {
            dispatches.extend(self.matvec(MatvecInput::RmsNorm { weight, eps }, product)?);
            return Ok(());
        }
        let wanted_only = product.rows == TokenRows::Wanted;
        let norm = RmsNormShape { n: self.spec.n_embd, eps, wanted_only };
        dispatches.push(kernels::rmsnorm(self.gpu, norm, product.x, weight, &self.scratch.h, self.batch)?);
        let rows = if wanted_only { TokenRows::Gathered } else { TokenRows::Tokens };
        self.multiply(dispatches, LinearProduct { x: &self.scratch.h, rows, ..product })
    }

    /// The product of `norm(x)`, an RMSNorm of whole rows that adds nothing, for one token, whose kernel reckons it on the way.
    fn multiply_normed(
        &self,
        dispatches: &mut Vec<Dispatch>,
        norm: &WgpuNorm,
        product: LinearProduct<'_>,
    ) -> Result<(), WgpuError> {
        dispatches.extend(self.matvec(MatvecInput::RmsNorm { weight: &norm.weights, eps: norm.eps }, product)?);
        Ok(())
    }

    fn multiply(&self, dispatches: &mut Vec<Dispatch>, product: LinearProduct<'_>) -> Result<(), WgpuError> {
        dispatches.extend(self.matvec(MatvecInput::Plain, product)?);
        Ok(())
    }

    fn matvec(&self, input: MatvecInput<'_>, product: LinearProduct<'_>) -> Result<Vec<Dispatch>, WgpuError> {
        let LinearProduct { linear: (matrix, bias), output, rows, x, y } = product;
        let (gpu, batch) = (self.gpu, self.batch);
        let options = MatvecOptions { input, output, rows, bias };
        match self.method(matrix) {
            ProductMethod::TokenByToken(tile) => kernels::multi_token_matvec(gpu, matrix, options, tile, x, y, batch),
            ProductMethod::Split(tile) => kernels::split_matmul(gpu, matrix, options, tile, x, y, batch),
            ProductMethod::Tiles { .. } => {
                // Seldom are the logits of many tokens wanted.
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
