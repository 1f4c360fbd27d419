//! [`ModelRunner::layer`]: one layer, that is, a mixer and a feed-forward, each with its norms and its residual join.
//!
//! The residual stream `x` (F32 `[n_tokens, n_embd]`) is read and updated in place. A sublayer stops short of its last product
//! and returns it as [`SublayerOutput`], so that [`join`](ModelRunner::join) can let that product add to the residual stream
//! itself where no norm and no sum over ranks comes between.

use metal_attention_model::Residual;

use super::linear::{LinearInput, LinearOp, norm_args};
use super::scratch::{feed_forward_reads_rows, mixer_reads_rows};
use super::{MicroBatch, ModelRunner};
use crate::CudaError;
use crate::args::{Epilogue, ExpertsSumArgs, NormArgs};
use crate::weights::{CudaFeedForward, CudaLayer, CudaLinear, CudaMixer, CudaNorm};

/// The result of a mixer or a feed-forward, mostly not computed yet. A mixer may have several, which are added.
#[derive(Clone, Copy)]
pub(super) enum SublayerOutput<'w> {
    /// The product `linear` of `input`.
    Product { label: &'static str, linear: &'w CudaLinear, input: LinearInput },
    /// F32 rows `[n_tokens, n_embd]` at this address.
    Rows(u64),
    /// The weighted sum over the experts of each token. `out`, `add` and `scale` are still to be set.
    Sum(ExpertsSumArgs),
}

impl ModelRunner {
    /// Launches layer `i`, in the order that its [`Residual`] prescribes.
    pub(super) fn layer(&mut self, batch: MicroBatch<'_>, i: usize, layer: &CudaLayer) -> Result<(), CudaError> {
        let (n, n_embd, x) = (batch.size.n_tokens, batch.spec.n_embd, self.buffers.x.ptr());
        let (mixer_norm, mixer_post) = (layer.mixer_norm.as_ref(), layer.mixer_post_norm.as_ref());
        let (norm, post) = (layer.feed_forward_norm.as_ref(), layer.feed_forward_post_norm.as_ref());
        let plan = self.exchange.as_ref().map(|exchange| &exchange.shard.plan);
        let mixer_is_sharded = plan.is_some_and(|plan| plan.shards_mixer(&batch.spec.layers[i].mixer));
        let feed_forward_is_sharded = plan.is_some_and(|plan| plan.feed_forwards[i]);
        match layer.residual {
            // x += scale * mixer(norm(x)); x += scale * feed_forward(norm(x))
            Residual::Sequential { scale } => {
                self.predict_streams(batch, layer)?;
                let input = self.mixer_input(batch, i, mixer_norm, false)?;
                self.laurel(batch, layer, input)?;
                let output = self.mixer(batch, i, &layer.mixer, input)?;
                self.join(batch, &output, mixer_is_sharded, mixer_post, scale)?;
                self.add_laurel(batch, layer)?;
                let (input, router_norm) = self.feed_forward_input(batch, i, layer)?;
                let output = self.feed_forward(batch, i, &layer.feed_forward, input, router_norm)?;
                self.join(batch, output.as_slice(), feed_forward_is_sharded, post, scale)?;
            }
            // x += mixer(norm(x)) + feed_forward(norm(x))
            Residual::Parallel => {
                // The feed-forward reads the residual stream without the mixer's result, so both outputs are joined at the end.
                let input = self.mixer_input(batch, i, mixer_norm, norm.is_none())?;
                let mixer_output = self.mixer(batch, i, &layer.mixer, input)?;
                let (input, router_norm) =
                    if norm.is_some() { self.feed_forward_input(batch, i, layer)? } else { (input, None) };
                let output = self.feed_forward(batch, i, &layer.feed_forward, input, router_norm)?;
                self.join(batch, &mixer_output, mixer_is_sharded, mixer_post, 1.0)?;
                self.join(batch, output.as_slice(), feed_forward_is_sharded, post, 1.0)?;
            }
            // x = norm(x + mixer(x)); x = norm(x + feed_forward(x))
            Residual::PostNorm { mixer_sum_norm: _, feed_forward_sum_norm: _ } => {
                let sum_norms = layer.sum_norms.as_ref();
                let sum_norm = |runner: &mut Self, which: usize| {
                    let args = norm_args(sum_norms.map(|norms| &norms[which]), x, n_embd);
                    runner.norm(NormArgs { out: x, ..args }, n)
                };
                let input = self.mixer_input(batch, i, mixer_norm, false)?;
                let output = self.mixer(batch, i, &layer.mixer, input)?;
                self.join(batch, &output, mixer_is_sharded, mixer_post, 1.0)?;
                sum_norm(self, 0)?;
                let (input, router_norm) = self.feed_forward_input(batch, i, layer)?;
                let output = self.feed_forward(batch, i, &layer.feed_forward, input, router_norm)?;
                self.join(batch, output.as_slice(), feed_forward_is_sharded, post, 1.0)?;
                sum_norm(self, 1)?;
            }
        }
        self.add_layer_embedding(batch, i, layer)?;
        if layer.output_scale != 1.0 {
            self.norm(NormArgs { out: x, scale: layer.output_scale, ..norm_args(None, x, n_embd) }, n)?;
        }
        Ok(())
    }

    /// Makes the input of the mixer of layer `i`; if `shared`, it is also that of the feed-forward.
    fn mixer_input(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        norm: Option<&CudaNorm>,
        shared: bool,
    ) -> Result<LinearInput, CudaError> {
        let layer = &batch.spec.layers[i];
        let as_rows = mixer_reads_rows(&layer.mixer) || shared && feed_forward_reads_rows(&layer.feed_forward);
        self.normed_input(batch, norm, as_rows)
    }

    /// Makes the input of the feed-forward of layer `i`. In a decode step of a mixture of experts the router's kernel applies
    /// the norm and writes the normalised rows; then that norm is returned, and the input is valid only after the router has
    /// run.
    fn feed_forward_input<'w>(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        layer: &'w CudaLayer,
    ) -> Result<(LinearInput, Option<&'w CudaNorm>), CudaError> {
        let norm = layer.feed_forward_norm.as_ref();
        if let (CudaFeedForward::Experts(w), Some(norm)) = (&layer.feed_forward, norm)
            && self.router_norms(batch, w, norm)
        {
            return Ok((LinearInput::Rows { x: self.buffers.h.ptr(), norm: 0, eps: 0.0 }, Some(norm)));
        }
        let as_rows = feed_forward_reads_rows(&batch.spec.layers[i].feed_forward);
        Ok((self.normed_input(batch, norm, as_rows)?, None))
    }

    /// The normalised residual stream as input of products; if `as_rows`, also as F32 rows in `h`.
    fn normed_input(
        &mut self,
        batch: MicroBatch<'_>,
        norm: Option<&CudaNorm>,
        as_rows: bool,
    ) -> Result<LinearInput, CudaError> {
        let (n, n_embd) = (batch.size.n_tokens, batch.spec.n_embd);
        if as_rows { self.normed_with_f32(norm, n_embd, n) } else { self.normed(norm, n_embd, n) }
    }

    /// Launches the mixer of layer `i`, except its last products.
    fn mixer<'w>(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        mixer: &'w CudaMixer,
        input: LinearInput,
    ) -> Result<Vec<SublayerOutput<'w>>, CudaError> {
        Ok(match mixer {
            CudaMixer::Attention(w) => vec![self.attention(batch, i, w, input)?],
            CudaMixer::LatentAttention(w) => vec![self.latent_attention(batch, i, w, input)?],
            CudaMixer::ShortConv(w) => vec![self.short_conv(batch, i, w, input)?],
            CudaMixer::Mamba(w) => vec![self.mamba(batch, i, w, input)?],
            CudaMixer::Mamba2(w) => vec![self.mamba2(batch, i, w, input)?],
            CudaMixer::AttentionAndMamba2(both) => {
                let (attention, mamba2) = &**both;
                vec![self.attention(batch, i, attention, input)?, self.mamba2(batch, i, mamba2, input)?]
            }
            CudaMixer::DeltaRule(w) => vec![self.delta_rule(batch, i, w, input)?],
            CudaMixer::Rwkv6(w) => vec![self.rwkv6(batch, i, w)?],
            CudaMixer::Rwkv7(w) => vec![self.rwkv7(batch, i, w)?],
            CudaMixer::None => Vec::new(),
        })
    }

    /// Launches the feed-forward of layer `i`, except its last product. `router_norm`: the norm that the router's kernel has
    /// to apply.
    fn feed_forward<'w>(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        feed_forward: &'w CudaFeedForward,
        input: LinearInput,
        router_norm: Option<&CudaNorm>,
    ) -> Result<Option<SublayerOutput<'w>>, CudaError> {
        Ok(match feed_forward {
            CudaFeedForward::Dense(w) => Some(self.dense(batch, w, input)?),
            CudaFeedForward::Experts(w) => Some(self.experts(batch, w, input, router_norm)?),
            CudaFeedForward::ChannelMix(w) => Some(self.channel_mix(batch, i, w)?),
            CudaFeedForward::None => None,
        })
    }

    /// `x += scale * norm(sum of outputs)`. `is_sharded`: the outputs are partial sums of this rank, and are added up over all
    /// ranks first.
    pub(super) fn join(
        &mut self,
        batch: MicroBatch<'_>,
        outputs: &[SublayerOutput<'_>],
        is_sharded: bool,
        norm: Option<&CudaNorm>,
        scale: f32,
    ) -> Result<(), CudaError> {
        let (n, n_embd, x, result) =
            (batch.size.n_tokens, batch.spec.n_embd, self.buffers.x.ptr(), self.buffers.result.ptr());
        for (i, sum) in outputs.iter().enumerate() {
            // A norm, and a sum over the ranks, need the complete sum of the outputs in `result`; else each output is added to
            // `x` directly.
            let (y, epilogue, scale) = match (norm.is_some() || is_sharded, i) {
                (false, _) => (x, Epilogue::Add, scale),
                (true, 0) => (result, Epilogue::Store, 1.0),
                (true, _) => (result, Epilogue::Add, 1.0),
            };
            match *sum {
                SublayerOutput::Product { label, linear, input } => {
                    let product =
                        LinearOp { epilogue, scale, bias: linear.bias(), y, ..LinearOp::stored(label, &linear.weight) };
                    self.product(&product, input, linear.weight.n_in, n)?;
                }
                SublayerOutput::Sum(args) => {
                    let add = u32::from(epilogue == Epilogue::Add);
                    self.experts_sum(batch, &ExpertsSumArgs { out: y, add, scale, ..args })?;
                }
                SublayerOutput::Rows(rows) => {
                    let accumulate = u32::from(epilogue == Epilogue::Add);
                    self.norm(NormArgs { out: y, scale, accumulate, ..norm_args(None, rows, n_embd) }, n)?;
                }
            }
        }
        if is_sharded && !outputs.is_empty() {
            let (out, how) = if norm.is_some() { (result, (false, 1.0)) } else { (x, (true, scale)) };
            self.all_reduce(result, out, n * n_embd, how)?;
        }
        if norm.is_some() && !outputs.is_empty() {
            self.norm(NormArgs { out: x, scale, accumulate: 1, ..norm_args(norm, result, n_embd) }, n)?;
        }
        Ok(())
    }
}
