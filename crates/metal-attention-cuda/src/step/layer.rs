//! One layer: its mixer and feed-forward, each with its norms and its way into the residual stream.

use metal_attention_model::Residual;

use super::product::{Input, Product, norm_args};
use super::rows::{feed_forward_reads_rows, mixer_reads_rows};
use super::{Step, Steps};
use crate::CudaError;
use crate::args::{ExpertsSumArgs, NormArgs, Output};
use crate::weights::{CudaFeedForward, CudaLayer, CudaLinear, CudaMixer, CudaNorm};

/// What a mixer or a feed-forward gives; a mixer may give several, whose sum counts.
#[derive(Clone, Copy)]
pub(super) enum Given<'w> {
    /// What this matrix makes of rows.
    Product { what: &'static str, linear: &'w CudaLinear, input: Input },
    /// F32 rows that lie there, as wide as the residual stream.
    Rows(u64),
    /// A weighted sum of what experts give, which is still to be made: as these say, but for where it goes.
    Sum(ExpertsSumArgs),
}

impl Steps {
    /// All that layer `i` does.
    pub(super) fn layer(&mut self, step: Step<'_>, i: usize, layer: &CudaLayer) -> Result<(), CudaError> {
        let (n, n_embd, x) = (step.size.n_tokens, step.spec.n_embd, self.s.x.ptr());
        let (mixer_norm, mixer_post) = (layer.mixer_norm.as_ref(), layer.mixer_post_norm.as_ref());
        let (norm, post) = (layer.feed_forward_norm.as_ref(), layer.feed_forward_post_norm.as_ref());
        let division = self.exchange.as_ref().map(|exchange| &exchange.share.division);
        let mixer_parts = division.is_some_and(|division| division.divides_mixer(&step.spec.layers[i].mixer));
        let parts = division.is_some_and(|division| division.feed_forwards[i]);
        match layer.residual {
            Residual::Sequential { scale } => {
                self.predict_streams(step, layer)?;
                let input = self.mixer_input(step, i, mixer_norm, false)?;
                self.laurel(step, layer, input)?;
                let given = self.mixer(step, i, &layer.mixer, input)?;
                self.join(step, &given, mixer_parts, mixer_post, scale)?;
                self.add_laurel(step, layer)?;
                let (input, unmade) = self.feed_forward_input(step, i, layer)?;
                let given = self.feed_forward(step, i, &layer.feed_forward, input, unmade)?;
                self.join(step, given.as_slice(), parts, post, scale)?;
            }
            Residual::Parallel => {
                // What the feed-forward reads does not have the mixer's result.
                let input = self.mixer_input(step, i, mixer_norm, norm.is_none())?;
                let mixed = self.mixer(step, i, &layer.mixer, input)?;
                let (input, unmade) =
                    if norm.is_some() { self.feed_forward_input(step, i, layer)? } else { (input, None) };
                let given = self.feed_forward(step, i, &layer.feed_forward, input, unmade)?;
                self.join(step, &mixed, mixer_parts, mixer_post, 1.0)?;
                self.join(step, given.as_slice(), parts, post, 1.0)?;
            }
            Residual::PostNorm { mixer: _, feed_forward: _ } => {
                let sum_norms = layer.sum_norms.as_ref();
                let after = |steps: &mut Self, which: usize| {
                    let args = norm_args(sum_norms.map(|norms| &norms[which]), x, n_embd);
                    steps.norm(NormArgs { out: x, ..args }, n)
                };
                let input = self.mixer_input(step, i, mixer_norm, false)?;
                let given = self.mixer(step, i, &layer.mixer, input)?;
                self.join(step, &given, mixer_parts, mixer_post, 1.0)?;
                after(self, 0)?;
                let (input, unmade) = self.feed_forward_input(step, i, layer)?;
                let given = self.feed_forward(step, i, &layer.feed_forward, input, unmade)?;
                self.join(step, given.as_slice(), parts, post, 1.0)?;
                after(self, 1)?;
            }
        }
        self.add_own_embedding(step, i, layer)?;
        if layer.output_scale != 1.0 {
            self.norm(NormArgs { out: x, scale: layer.output_scale, ..norm_args(None, x, n_embd) }, n)?;
        }
        Ok(())
    }

    /// The input of the mixer of layer `i`; where it is `shared`, that of the feed-forward, too.
    fn mixer_input(
        &mut self,
        step: Step<'_>,
        i: usize,
        norm: Option<&CudaNorm>,
        shared: bool,
    ) -> Result<Input, CudaError> {
        let layer = &step.spec.layers[i];
        let as_rows = mixer_reads_rows(&layer.mixer) || shared && feed_forward_reads_rows(&layer.feed_forward);
        self.input_of(step, norm, as_rows)
    }

    /// The input of the feed-forward of layer `i`, and the norm that still has to make it, where a router does.
    fn feed_forward_input<'w>(
        &mut self,
        step: Step<'_>,
        i: usize,
        layer: &'w CudaLayer,
    ) -> Result<(Input, Option<&'w CudaNorm>), CudaError> {
        let norm = layer.feed_forward_norm.as_ref();
        if let (CudaFeedForward::Experts(w), Some(norm)) = (&layer.feed_forward, norm)
            && self.router_norms(step, w, norm)
        {
            return Ok((Input::Rows { x: self.s.h.ptr(), norm: 0, eps: 0.0 }, Some(norm)));
        }
        let as_rows = feed_forward_reads_rows(&step.spec.layers[i].feed_forward);
        Ok((self.input_of(step, norm, as_rows)?, None))
    }

    fn input_of(&mut self, step: Step<'_>, norm: Option<&CudaNorm>, as_rows: bool) -> Result<Input, CudaError> {
        let (n, n_embd) = (step.size.n_tokens, step.spec.n_embd);
        if as_rows { self.normed_rows(norm, n_embd, n) } else { self.normed(norm, n_embd, n) }
    }

    /// What the mixer of layer `i` makes of `input`, but for its last products.
    fn mixer<'w>(
        &mut self,
        step: Step<'_>,
        i: usize,
        mixer: &'w CudaMixer,
        input: Input,
    ) -> Result<Vec<Given<'w>>, CudaError> {
        Ok(match mixer {
            CudaMixer::Attention(w) => vec![self.attention(step, i, w, input)?],
            CudaMixer::LatentAttention(w) => vec![self.latent_attention(step, i, w, input)?],
            CudaMixer::ShortConv(w) => vec![self.short_conv(step, i, w, input)?],
            CudaMixer::Mamba(w) => vec![self.mamba(step, i, w, input)?],
            CudaMixer::Mamba2(w) => vec![self.mamba2(step, i, w, input)?],
            CudaMixer::AttentionAndMamba2(both) => {
                let (attention, mamba2) = &**both;
                vec![self.attention(step, i, attention, input)?, self.mamba2(step, i, mamba2, input)?]
            }
            CudaMixer::DeltaRule(w) => vec![self.delta_rule(step, i, w, input)?],
            CudaMixer::Rwkv6(w) => vec![self.rwkv6(step, i, w)?],
            CudaMixer::Rwkv7(w) => vec![self.rwkv7(step, i, w)?],
            CudaMixer::None => Vec::new(),
        })
    }

    /// What the feed-forward of layer `i` makes of `input`, but for its last product. `unmade`: the norm that is still to make it.
    fn feed_forward<'w>(
        &mut self,
        step: Step<'_>,
        i: usize,
        feed_forward: &'w CudaFeedForward,
        input: Input,
        unmade: Option<&CudaNorm>,
    ) -> Result<Option<Given<'w>>, CudaError> {
        Ok(match feed_forward {
            CudaFeedForward::Dense(w) => Some(self.dense(step, w, input)?),
            CudaFeedForward::Experts(w) => Some(self.experts(step, w, input, unmade)?),
            CudaFeedForward::ChannelMix(w) => Some(self.channel_mix(step, i, w)?),
            CudaFeedForward::None => None,
        })
    }

    /// `x += scale * norm(sum of given)`; where these are `parts`, the sum goes over all cards, too.
    pub(super) fn join(
        &mut self,
        step: Step<'_>,
        given: &[Given<'_>],
        parts: bool,
        norm: Option<&CudaNorm>,
        scale: f32,
    ) -> Result<(), CudaError> {
        let (n, n_embd, x, result) = (step.size.n_tokens, step.spec.n_embd, self.s.x.ptr(), self.s.result.ptr());
        for (i, of) in given.iter().enumerate() {
            // Through a norm, and to other cards, goes the whole sum.
            let (y, output, scale) = match (norm.is_some() || parts, i) {
                (false, _) => (x, Output::Add, scale),
                (true, 0) => (result, Output::Store, 1.0),
                (true, _) => (result, Output::Add, 1.0),
            };
            match *of {
                Given::Product { what, linear, input } => {
                    let product =
                        Product { output, scale, bias: linear.bias(), y, ..Product::stored(what, &linear.weight) };
                    self.product(&product, input, linear.weight.n_in, n)?;
                }
                Given::Sum(args) => {
                    let add = u32::from(output == Output::Add);
                    self.experts_sum(step, &ExpertsSumArgs { out: y, add, scale, ..args })?;
                }
                Given::Rows(rows) => {
                    let accumulate = u32::from(output == Output::Add);
                    self.norm(NormArgs { out: y, scale, accumulate, ..norm_args(None, rows, n_embd) }, n)?;
                }
            }
        }
        if parts && !given.is_empty() {
            let (out, how) = if norm.is_some() { (result, (false, 1.0)) } else { (x, (true, scale)) };
            self.all_reduce(result, out, n * n_embd, how)?;
        }
        if norm.is_some() && !given.is_empty() {
            self.norm(NormArgs { out: x, scale, accumulate: 1, ..norm_args(norm, result, n_embd) }, n)?;
        }
        Ok(())
    }
}
