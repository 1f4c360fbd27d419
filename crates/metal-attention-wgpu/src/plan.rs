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

use metal_attention_model::{BatchKind, FewLimits, ModelSpec, NormKind};
use wgpu::Buffer;

use crate::activations::Activations;
use crate::forward_pass::Output;
use crate::kernels::{
    self, MAX_TOP_K, MatvecInput, MatvecOptions, MatvecOutput, NormShape, RmsNorm, Rows, SplitTile, TOKEN_TILE,
};
use crate::kv_cache::WgpuKvCache;
use crate::parts::MixerKernels;
use crate::state::WgpuStates;
use crate::weights::{WgpuLinear, WgpuNorm, WgpuWeights};
use crate::{Dispatch, StepSize, WgpuDevice, WgpuError, WgpuMatrix};

/// Most tokens of a batch that is multiplied token by token instead of tile by tile, and sequences decoded side by side.
pub(super) const FEW: usize = 16;

/// Most tokens of a few on matrix units, whose tiles for many leave most of a large GPU idle.
const FEW_ON_UNITS: usize = 128;

/// How many are a few on `gpu`.
pub(super) fn few_on(gpu: &WgpuDevice, exact: bool) -> FewLimits {
    let tokens = if gpu.features().cooperative_f16 && !exact { FEW_ON_UNITS } else { FEW };
    FewLimits { sequences: FEW, tokens }
}

/// All dispatches of one kind of batch.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) embedding: Vec<Dispatch>,
    pub(super) layers: Vec<Vec<Dispatch>>,
    /// All layers in one, or in one for each buffer that their weights lie in, for a step that shows nothing of what lies
    /// between them, of a sequence whose pages lie one after the other.
    pub(super) layers_at_once: Option<Vec<Dispatch>>,
    /// States after the last norm of the tokens whose logits are wanted.
    pub(super) hidden: Vec<Dispatch>,
    /// Logits of the tokens that want them.
    pub(super) head: Vec<Dispatch>,
    /// Their largest, which also becomes the next batch.
    pub(super) argmax: Vec<Dispatch>,
    /// Or a short list of the largest.
    pub(super) top_k: Vec<Dispatch>,
}

impl Plan {
    /// What follows the layers for `output` to come back.
    pub(super) fn results(&self, output: Output) -> impl Iterator<Item = &Dispatch> {
        let (first, then): (&[Dispatch], &[Dispatch]) = match output {
            Output::Hidden => (&self.hidden, &[]),
            Output::Logits => (&self.head, &[]),
            Output::Id => (&self.head, &self.argmax),
            Output::TopK => (&self.head, &self.top_k),
        };
        first.iter().chain(then)
    }

    /// All that it has of one kernel or another.
    fn all(&self) -> impl Iterator<Item = &Dispatch> {
        let Self { embedding, layers, layers_at_once, hidden, head, argmax, top_k } = self;
        let layers = layers.iter().chain(layers_at_once).flatten();
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
    pub(super) fn layers(&self, size: StepSize, in_order: bool) -> impl Iterator<Item = &Dispatch> {
        let at_once = self.layers_at_once.as_ref().filter(|_| size.n_wanted > 0 && in_order);
        let one_by_one = if at_once.is_some() { &[] } else { self.layers.as_slice() };
        at_once.into_iter().flatten().chain(one_by_one.iter().flatten())
    }

    /// Dispatches of all layers, one by one.
    pub(super) fn n_dispatches(&self) -> usize {
        self.layers.iter().map(Vec::len).sum()
    }

    /// Tokens times layers of a step that its first `n` dispatches of layers get done.
    pub(super) fn work(&self, size: StepSize, n: usize) -> u64 {
        let layers = n * self.layers.len() / self.n_dispatches().max(1);
        u64::from(size.n_tokens) * layers as u64
    }

    /// The dispatches of a greedy step of a sequence alone in the cache, in order.
    pub(super) fn greedy(&self, size: StepSize) -> impl Iterator<Item = &Dispatch> {
        self.embedding.iter().chain(self.layers(size, true)).chain(&self.head).chain(&self.argmax)
    }
}

/// What the dispatches work on.
pub(super) struct PlanBuilder<'a> {
    pub(super) gpu: &'a WgpuDevice,
    pub(super) spec: &'a ModelSpec,
    pub(super) weights: &'a WgpuWeights,
    pub(super) s: &'a Activations,
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
enum Method {
    /// Each weight is read once for so many tokens.
    TokenByToken(usize),
    /// On matrix units, the inputs of a row shared out.
    Split(SplitTile),
    /// In tiles of rows and tokens.
    Tiles { on_units: bool },
}

/// A matrix product and where its results go.
#[derive(Clone, Copy)]
struct Product<'a> {
    linear: (&'a WgpuMatrix, Option<&'a Buffer>),
    output: MatvecOutput,
    rows: Rows,
    x: &'a Buffer,
    y: &'a Buffer,
}

impl<'a> Product<'a> {
    /// A product for all tokens.
    fn new(linear: &'a WgpuLinear, output: MatvecOutput, x: &'a Buffer, y: &'a Buffer) -> Self {
        Self { linear: (&linear.weight, linear.bias.as_ref()), output, rows: Rows::Tokens, x, y }
    }
}

/// The input of products: what a norm makes of the residual stream, or that itself.
#[derive(Clone, Copy)]
enum Input<'a> {
    /// The norm is still to be taken of the stream; kernels for products do it on the way.
    Norm(&'a WgpuNorm),
    /// It lies there.
    Ready(&'a Buffer),
}

impl PlanBuilder<'_> {
    pub(super) fn build(&self) -> Result<Plan, WgpuError> {
        let (s, n_vocab) = (self.s, self.spec.n_vocab);
        let (mut argmax, mut top_k) = (Vec::new(), Vec::new());
        if self.spec.output.head.is_some() {
            argmax = kernels::argmax(self.gpu, n_vocab, &s.logits, &s.argmax, self.ids, Some(self.batch))?;
            top_k = kernels::top_k(self.gpu, n_vocab, MAX_TOP_K, &s.logits, &s.top_k, self.top_k)?;
        }
        Ok(Plan {
            embedding: self.embedding()?,
            layers: (0..self.spec.n_layer()).map(|i| self.layer(i)).collect::<Result<_, _>>()?,
            layers_at_once: None,
            hidden: self.hidden()?,
            head: self.head()?,
            argmax,
            top_k,
        })
    }

    /// Most tokens of a batch of this kind.
    fn most_tokens(&self) -> usize {
        match self.kind {
            BatchKind::One => 1,
            BatchKind::Sequences => FEW,
            BatchKind::Few => few_on(self.gpu, self.exact).tokens,
            BatchKind::Many => self.s.n_tokens,
        }
    }

    /// How a product with `matrix` is computed.
    fn method(&self, matrix: &WgpuMatrix) -> Method {
        let features = self.gpu.features();
        if self.kind == BatchKind::One {
            return Method::TokenByToken(1);
        }
        if self.kind != BatchKind::Many {
            if let Some(tile) = kernels::split_tile(features, matrix, self.most_tokens(), self.exact) {
                return Method::Split(tile);
            }
            if !kernels::all_on_units(features, matrix, self.exact) || !features.cooperative_f16 {
                return Method::TokenByToken(TOKEN_TILE);
            }
        }
        if kernels::leaves_idle_in_tiles(matrix, self.most_tokens()) {
            return Method::TokenByToken(TOKEN_TILE);
        }
        Method::Tiles { on_units: kernels::all_on_units(features, matrix, self.exact) }
    }

    /// What `norm` makes of the residual stream, for products; without a norm the stream. `shared`: several products read it,
    /// so that it is made once.
    fn input<'n>(
        &'n self,
        d: &mut Vec<Dispatch>,
        norm: Option<&'n WgpuNorm>,
        shared: bool,
    ) -> Result<Input<'n>, WgpuError> {
        let Some(norm) = norm else { return Ok(Input::Ready(&self.s.x)) };
        if !shared && norm.kind == NormKind::Rms && !norm.has_bias {
            return Ok(Input::Norm(norm));
        }
        d.push(self.norm(norm, NormShape::of_row(norm.n), Some(&self.s.x), &self.s.h)?);
        Ok(Input::Ready(&self.s.h))
    }

    /// `y = norm(x)` over rows of the norm's length, with the rest as `of` says; `None`: in place.
    fn norm(&self, norm: &WgpuNorm, of: NormShape, x: Option<&Buffer>, y: &Buffer) -> Result<Dispatch, WgpuError> {
        let of = NormShape { n: norm.n, kind: Some(norm.kind), eps: norm.eps, weight: true, bias: norm.has_bias, ..of };
        kernels::norm(self.gpu, of, x, Some(&norm.weights), y, self.batch)
    }

    /// The product with `input`, in place of the one that `product` has.
    fn product_of(&self, d: &mut Vec<Dispatch>, input: Input<'_>, product: Product<'_>) -> Result<(), WgpuError> {
        match input {
            Input::Norm(norm) => self.norm_and_product(d, norm, product),
            Input::Ready(x) => self.multiply(d, Product { x, ..product }),
        }
    }

    /// The product of `norm(x)`, an RMSNorm that adds nothing. Most kernels reckon it on the way; a norm of its own would cost
    /// a whole dispatch more.
    fn norm_and_product(&self, d: &mut Vec<Dispatch>, norm: &WgpuNorm, product: Product<'_>) -> Result<(), WgpuError> {
        let (weight, eps) = (&norm.weights, norm.eps);
        if !matches!(
            self.method(product.linear.0),
            Method::Tiles { on_units: false } | Method::TokenByToken(TOKEN_TILE)
        ) {
            d.extend(self.matvec(MatvecInput::RmsNorm { weight, eps }, product)?);
            return Ok(());
        }
        let wanted_only = product.rows == Rows::Wanted;
        let norm = RmsNorm { n: self.spec.n_embd, eps, wanted_only };
        d.push(kernels::rmsnorm(self.gpu, norm, product.x, weight, &self.s.h, self.batch)?);
        let rows = if wanted_only { Rows::Gathered } else { Rows::Tokens };
        self.multiply(d, Product { x: &self.s.h, rows, ..product })
    }

    /// The product of `norm(x)`, an RMSNorm of whole rows that adds nothing, for one token, whose kernel reckons it on the way.
    fn multiply_normed(&self, d: &mut Vec<Dispatch>, norm: &WgpuNorm, product: Product<'_>) -> Result<(), WgpuError> {
        d.extend(self.matvec(MatvecInput::RmsNorm { weight: &norm.weights, eps: norm.eps }, product)?);
        Ok(())
    }

    fn multiply(&self, d: &mut Vec<Dispatch>, product: Product<'_>) -> Result<(), WgpuError> {
        d.extend(self.matvec(MatvecInput::Plain, product)?);
        Ok(())
    }

    fn matvec(&self, input: MatvecInput<'_>, product: Product<'_>) -> Result<Vec<Dispatch>, WgpuError> {
        let Product { linear: (matrix, bias), output, rows, x, y } = product;
        let (gpu, batch) = (self.gpu, self.batch);
        let options = MatvecOptions { input, output, rows, bias };
        match self.method(matrix) {
            Method::TokenByToken(tile) => kernels::multi_token_matvec(gpu, matrix, options, tile, x, y, batch),
            Method::Split(tile) => kernels::split_matmul(gpu, matrix, options, tile, x, y, batch),
            Method::Tiles { .. } => {
                // Seldom are the logits of many tokens wanted.
                let most = if rows == Rows::Tokens { self.most_tokens() } else { self.most_tokens().min(FEW_ON_UNITS) };
                kernels::matmul(gpu, matrix, options, most, self.exact, x, y, &self.s.matmul, batch)
            }
        }
    }
}
