//! One layer: its mixer and feed-forward, each with its norms and its way into the residual stream.

use metal_attention_model::Residual;

use super::product::{Input, Product};
use super::rows::{feed_forward_reads_rows, mixer_reads_rows};
use super::{Step, Steps};
use crate::CudaError;
use crate::args::Output;
use crate::weights::{CudaFeedForward, CudaLayer, CudaLinear, CudaMixer, CudaNorm};

/// What a mixer or a feed-forward gives; a mixer may give several, whose sum counts.
#[derive(Clone, Copy)]
pub(super) enum Given<'w> {
    /// What this matrix makes of rows.
    Product { what: &'static str, linear: &'w CudaLinear, input: Input },
    /// F32 rows.
    Rows(u64),
}

impl Steps {
    /// All that layer `i` does.
    pub(super) fn layer(&mut self, step: Step<'_>, i: usize, layer: &CudaLayer) -> Result<(), CudaError> {
        let (n, n_embd) = (step.size.n_tokens, step.spec.n_embd);
        match layer.residual {
            Residual::Sequential { scale } => {
                let as_rows = mixer_reads_rows(&step.spec.layers[i].mixer);
                let input = self.normed(layer.mixer_norm.as_ref(), n_embd, n, as_rows)?;
                let given = self.mixer(step, i, &layer.mixer, input)?;
                self.join(step, &given, layer.mixer_post_norm.as_ref(), scale)?;
                let as_rows = feed_forward_reads_rows(&step.spec.layers[i].feed_forward);
                let input = self.normed(layer.feed_forward_norm.as_ref(), n_embd, n, as_rows)?;
                let given = self.feed_forward(step, i, &layer.feed_forward, input)?;
                self.join(step, given.as_slice(), layer.feed_forward_post_norm.as_ref(), scale)
            }
            Residual::Parallel | Residual::PostNorm { mixer: _, feed_forward: _ } => {
                Err(CudaError::UnsupportedPart { part: "residual streams but for sequential ones" })
            }
        }
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

    /// What the feed-forward of layer `i` makes of `input`, but for its last product.
    fn feed_forward<'w>(
        &mut self,
        step: Step<'_>,
        i: usize,
        feed_forward: &'w CudaFeedForward,
        input: Input,
    ) -> Result<Option<Given<'w>>, CudaError> {
        Ok(match feed_forward {
            CudaFeedForward::Dense(w) => Some(self.dense(step, w, input)?),
            CudaFeedForward::Experts(w) => Some(self.experts(step, w, input)?),
            CudaFeedForward::ChannelMix(w) => Some(self.channel_mix(step, i, w)?),
            CudaFeedForward::None => None,
        })
    }

    /// `x += scale * norm(sum of given)`.
    fn join(
        &mut self,
        step: Step<'_>,
        given: &[Given<'_>],
        norm: Option<&CudaNorm>,
        scale: f32,
    ) -> Result<(), CudaError> {
        if norm.is_some() {
            return Err(CudaError::UnsupportedPart { part: "norms of results" });
        }
        for of in given {
            match *of {
                Given::Product { what, linear, input } => {
                    let product = Product {
                        what,
                        parts: vec![(&linear.weight, 0)],
                        n_out: step.spec.n_embd,
                        output: Output::Add,
                        activation: 0,
                        scale,
                        bias: linear.bias(),
                        y: self.s.x.ptr(),
                        packed: 0,
                    };
                    self.product(&product, input, linear.weight.n_in, step.size.n_tokens)?;
                }
                Given::Rows(rows) => self.add_rows(step, rows, scale)?,
            }
        }
        Ok(())
    }
}
