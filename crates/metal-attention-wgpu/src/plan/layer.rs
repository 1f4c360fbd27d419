//! One layer: [`LayerPlan`] has the operations of [`LayerOps`], which prescribes their order. Each appends the dispatches
//! of a part, of a norm or of a residual join. The residual stream is `scratch.x`.

use metal_attention_model::{FeedForward, Layer, LayerOps, Mixer};
use wgpu::Buffer;

use super::{BranchInput, LinearProduct, PlanBuilder};
use crate::kernels::{self, MatvecOutput, NormShape, ScaleShape};
use crate::parts::{WgpuBlockConv, WgpuParts};
use crate::weights::{WgpuLinear, WgpuNorm};
use crate::{Dispatch, WgpuError};

/// The result of a mixer or a feed-forward, `[n_tokens, n_embd]`, as far as it is computed.
pub(crate) enum BranchOutput<'a> {
    /// The sum of these products, of which none has a dispatch as yet: one, or two of attention in parallel with Mamba-2.
    Products(Vec<LastProduct<'a>>),
    /// It is in this buffer, and is to be added to the residual stream.
    Sum(&'a Buffer),
    /// It is added to the residual stream already, or there is no mixer or no feed-forward.
    Added,
}

/// The last product of a mixer or a feed-forward, `[n_tokens, n_embd]`, without a dispatch as yet: `out * input`, or
/// `out * norm(input)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LastProduct<'a> {
    /// The matrix, `[n_embd, n_in]`.
    pub(crate) out: &'a WgpuLinear,
    /// The scratch buffer that it multiplies, `[n_tokens, n_in]`.
    pub(crate) input: &'a Buffer,
    /// The norm of `input` that the product computes in its prologue; only of Mamba-2, in plans for one token. `None`:
    /// the product multiplies `input` itself.
    pub(crate) norm: Option<&'a WgpuNorm>,
}

impl<'a> LastProduct<'a> {
    /// The product `out * input` without a norm.
    pub(crate) fn new(out: &'a WgpuLinear, input: &'a Buffer) -> Self {
        Self { out, input, norm: None }
    }
}

impl<'a> From<LastProduct<'a>> for BranchOutput<'a> {
    fn from(product: LastProduct<'a>) -> Self {
        Self::Products(vec![product])
    }
}

/// The dispatches of one layer, as far as they are appended.
pub(super) struct LayerPlan<'p, 'a> {
    /// What the dispatches are bound to.
    plan: &'p PlanBuilder<'a>,
    /// Index of the layer.
    i: usize,
    /// The dispatches.
    dispatches: Vec<Dispatch>,
}

impl PlanBuilder<'_> {
    /// All dispatches of layer `i`.
    pub(super) fn layer(&self, i: usize) -> Result<Vec<Dispatch>, WgpuError> {
        let mut layer = LayerPlan { plan: self, i, dispatches: Vec::new() };
        layer.run_layer(&self.weights.layers[i])?;
        Ok(layer.dispatches)
    }

    /// The dispatches that store the keys and values of context rows in `x` for layer `i`.
    pub(super) fn context(&self, i: usize) -> Result<Vec<Dispatch>, WgpuError> {
        let mut layer = LayerPlan { plan: self, i, dispatches: Vec::new() };
        layer.store_context(&self.weights.layers[i])?;
        Ok(layer.dispatches)
    }
}

impl<'a> LayerOps<'a, WgpuParts> for LayerPlan<'_, 'a> {
    type Input = BranchInput<'a>;
    type Output = BranchOutput<'a>;
    type Error = WgpuError;

    fn predict_streams(&mut self, layer: &'a Layer<WgpuParts>) -> Result<(), WgpuError> {
        match &layer.streams {
            Some(streams) => self.plan.predict_streams(&mut self.dispatches, streams),
            None => Ok(()),
        }
    }

    fn mixer_input(&mut self, layer: &'a Layer<WgpuParts>, shared: bool) -> Result<BranchInput<'a>, WgpuError> {
        if self.plan.spec.attends_to_state() {
            return Ok(BranchInput::Rows(&self.plan.scratch.joined));
        }
        let input = self.plan.branch_input(&mut self.dispatches, layer.mixer_norm.as_ref())?;
        // LAuReL, the low-rank branch of models with several residual streams, reads the mixer's input, too.
        if shared || layer.streams.is_some() {
            return Ok(BranchInput::Rows(self.plan.rows_of(&mut self.dispatches, input)?));
        }
        Ok(input)
    }

    fn convolve_input(
        &mut self,
        conv: &'a WgpuBlockConv,
        input: BranchInput<'a>,
    ) -> Result<BranchInput<'a>, WgpuError> {
        self.plan.convolve_input(&mut self.dispatches, conv, input)
    }

    fn convolve_output(
        &mut self,
        conv: &'a WgpuBlockConv,
        output: BranchOutput<'a>,
    ) -> Result<BranchOutput<'a>, WgpuError> {
        self.plan.convolve_output(&mut self.dispatches, conv, output)
    }

    fn store_context(&mut self, layer: &'a Layer<WgpuParts>) -> Result<(), WgpuError> {
        let attention = layer.mixer.attention_alone();
        let attention =
            attention.ok_or(WgpuError::UnsupportedPart { part: "context rows of other mixers than attention" })?;
        self.plan.store_context(&mut self.dispatches, self.i, attention)
    }

    fn laurel(&mut self, layer: &'a Layer<WgpuParts>, input: BranchInput<'a>) -> Result<(), WgpuError> {
        match &layer.streams {
            Some(streams) => self.plan.laurel(&mut self.dispatches, streams, input),
            None => Ok(()),
        }
    }

    fn mixer(&mut self, layer: &'a Layer<WgpuParts>, input: BranchInput<'a>) -> Result<BranchOutput<'a>, WgpuError> {
        let (plan, dispatches, i) = (self.plan, &mut self.dispatches, self.i);
        Ok(match &layer.mixer {
            Mixer::Attention(part) => plan.attention(dispatches, i, part, input)?.into(),
            Mixer::LatentAttention(part) => plan.latent_attention(dispatches, i, part, input)?.into(),
            Mixer::ShortConv(part) => plan.short_conv(dispatches, i, part, input)?.into(),
            Mixer::Mamba(part) => plan.mamba(dispatches, i, part, input)?.into(),
            Mixer::Mamba2(part) => plan.mamba2(dispatches, i, part, input)?.into(),
            Mixer::AttentionAndMamba2(part) => {
                BranchOutput::Products(plan.attention_and_mamba2(dispatches, i, part, input)?.into())
            }
            Mixer::DeltaRule(part) => plan.delta_rule(dispatches, i, part, input)?.into(),
            Mixer::Rwkv6(part) => plan.rwkv6(dispatches, i, part, input)?.into(),
            Mixer::Rwkv7(part) => plan.rwkv7(dispatches, i, part, input)?.into(),
            Mixer::None => BranchOutput::Added,
        })
    }

    fn add_laurel(&mut self, layer: &'a Layer<WgpuParts>) -> Result<(), WgpuError> {
        if layer.streams.is_some() { self.plan.add_laurel(&mut self.dispatches) } else { Ok(()) }
    }

    fn feed_forward_input(&mut self, layer: &'a Layer<WgpuParts>) -> Result<BranchInput<'a>, WgpuError> {
        self.plan.branch_input(&mut self.dispatches, layer.feed_forward_norm.as_ref())
    }

    fn feed_forward(
        &mut self,
        layer: &'a Layer<WgpuParts>,
        input: BranchInput<'a>,
        scale: f32,
    ) -> Result<BranchOutput<'a>, WgpuError> {
        let (plan, dispatches) = (self.plan, &mut self.dispatches);
        // A result can be added to `x` directly only if a norm precedes the feed-forward: without one, later products
        // still read `x` while it would be written.
        let joins_as_is = layer.feed_forward_post_norm.is_none() && layer.feed_forward_conv.is_none() && scale == 1.0;
        let may_add = joins_as_is && layer.feed_forward_norm.is_some();
        match &layer.feed_forward {
            FeedForward::Dense(part) => Ok(plan.dense(dispatches, part, input)?.into()),
            FeedForward::Experts(part) => plan.experts(dispatches, part, input, may_add),
            FeedForward::ChannelMix(part) => plan.channel_mix(dispatches, self.i, part, input, may_add),
            FeedForward::None => Ok(BranchOutput::Added),
        }
    }

    fn join(&mut self, output: BranchOutput<'a>, norm: Option<&'a WgpuNorm>, scale: f32) -> Result<(), WgpuError> {
        self.plan.join(&mut self.dispatches, output, norm, scale)
    }

    fn normalize(&mut self, norm: &'a WgpuNorm) -> Result<(), WgpuError> {
        let dispatch = self.plan.norm(norm, NormShape::of_row(norm.n), None, &self.plan.scratch.x)?;
        self.dispatches.push(dispatch);
        Ok(())
    }

    fn finish(&mut self, layer: &'a Layer<WgpuParts>) -> Result<(), WgpuError> {
        let plan = self.plan;
        if let Some(embedding) = &layer.embedding {
            plan.add_layer_embedding(&mut self.dispatches, self.i, embedding, layer.streams.as_ref())?;
        }
        if layer.output_scale != 1.0 {
            let (n, scale) = (plan.spec.n_embd, layer.output_scale);
            let shape = ScaleShape { n, scale, soft_cap: None, outputs_only: false };
            self.dispatches.push(kernels::scale(plan.gpu, shape, &plan.scratch.x)?);
        }
        Ok(())
    }
}

impl PlanBuilder<'_> {
    /// Appends `x += scale * norm(output)`. Without norm and factor, products accumulate in `x`; otherwise in `result`,
    /// which is then added.
    pub(crate) fn join(
        &self,
        dispatches: &mut Vec<Dispatch>,
        output: BranchOutput<'_>,
        norm: Option<&WgpuNorm>,
        scale: f32,
    ) -> Result<(), WgpuError> {
        let scratch = self.scratch;
        let products = match output {
            BranchOutput::Products(products) => products,
            BranchOutput::Sum(sum) => return self.add(dispatches, sum, norm, scale, &scratch.x),
            BranchOutput::Added => return Ok(()),
        };
        let accumulates = norm.is_none() && scale == 1.0;
        let y = if accumulates { &scratch.x } else { &scratch.result };
        self.multiply_to(dispatches, products, y, accumulates)?;
        if accumulates { Ok(()) } else { self.add(dispatches, &scratch.result, norm, scale, &scratch.x) }
    }

    /// Appends the sum of `products`, which is stored in `y` or added to it.
    pub(crate) fn multiply_to(
        &self,
        dispatches: &mut Vec<Dispatch>,
        products: Vec<LastProduct<'_>>,
        y: &Buffer,
        accumulates: bool,
    ) -> Result<(), WgpuError> {
        for (i, LastProduct { out, input, norm }) in products.into_iter().enumerate() {
            let output = if accumulates || i > 0 { MatvecOutput::Accumulate } else { MatvecOutput::Store };
            let product = LinearProduct::new(out, output, input, y);
            match norm {
                Some(norm) => self.multiply_normed(dispatches, norm, product)?,
                None => self.multiply(dispatches, product)?,
            }
        }
        Ok(())
    }

    /// Appends `y += scale * norm(x)`; without a norm `y += scale * x`.
    pub(crate) fn add(
        &self,
        dispatches: &mut Vec<Dispatch>,
        x: &Buffer,
        norm: Option<&WgpuNorm>,
        scale: f32,
        y: &Buffer,
    ) -> Result<(), WgpuError> {
        let shape = NormShape { scale, accumulate: true, ..NormShape::of_row(self.spec.n_embd) };
        dispatches.push(match norm {
            Some(norm) => self.norm(norm, shape, Some(x), y)?,
            None => kernels::norm(self.gpu, shape, Some(x), None, y, self.batch)?,
        });
        Ok(())
    }
}
