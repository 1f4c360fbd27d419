//! One layer: its mixer and feed-forward, each with its norms and its way into the residual stream.

use metal_attention_model::Residual;

use super::product::{Input, Product, norm_args};
use super::{Step, Steps};
use crate::CudaError;
use crate::args::{NormArgs, Output};
use crate::weights::{CudaFeedForward, CudaLayer, CudaLinear, CudaMixer, CudaNorm};

/// What a mixer or a feed-forward gives; a mixer may give several, whose sum counts.
#[derive(Clone, Copy)]
pub(super) enum Given<'w> {
    /// What this matrix makes of rows.
    Product { what: &'static str, linear: &'w CudaLinear, input: Input },
    /// F32 rows that lie there, as wide as the residual stream.
    #[expect(dead_code, reason = "experts give it")]
    Rows(u64),
}

impl Steps {
    /// All that layer `i` does.
    pub(super) fn layer(&mut self, step: Step<'_>, i: usize, layer: &CudaLayer) -> Result<(), CudaError> {
        let (n, n_embd, x) = (step.size.n_tokens, step.spec.n_embd, self.s.x.ptr());
        let (mixer_norm, mixer_post) = (layer.mixer_norm.as_ref(), layer.mixer_post_norm.as_ref());
        let (norm, post) = (layer.feed_forward_norm.as_ref(), layer.feed_forward_post_norm.as_ref());
        match layer.residual {
            Residual::Sequential { scale } => {
                self.predict_streams(step, layer)?;
                let input = self.normed(mixer_norm, n_embd, n)?;
                self.laurel(step, layer, input)?;
                let given = self.mixer(step, i, &layer.mixer, input)?;
                self.join(step, &given, mixer_post, scale)?;
                self.add_laurel(step, layer)?;
                let input = self.normed(norm, n_embd, n)?;
                let given = self.feed_forward(step, i, &layer.feed_forward, input)?;
                self.join(step, &[given], post, scale)?;
            }
            Residual::Parallel => {
                // What the feed-forward reads does not have the mixer's result.
                let input = self.normed(mixer_norm, n_embd, n)?;
                let mixed = self.mixer(step, i, &layer.mixer, input)?;
                let input = if norm.is_some() { self.normed(norm, n_embd, n)? } else { input };
                let given = self.feed_forward(step, i, &layer.feed_forward, input)?;
                self.join(step, &mixed, mixer_post, 1.0)?;
                self.join(step, &[given], post, 1.0)?;
            }
            Residual::PostNorm { mixer: _, feed_forward: _ } => {
                let sum_norms = layer.sum_norms.as_ref();
                let after = |steps: &mut Self, which: usize| {
                    let args = norm_args(sum_norms.map(|norms| &norms[which]), x, n_embd);
                    steps.norm(NormArgs { out: x, ..args }, n)
                };
                let input = self.normed(mixer_norm, n_embd, n)?;
                let given = self.mixer(step, i, &layer.mixer, input)?;
                self.join(step, &given, mixer_post, 1.0)?;
                after(self, 0)?;
                let input = self.normed(norm, n_embd, n)?;
                let given = self.feed_forward(step, i, &layer.feed_forward, input)?;
                self.join(step, &[given], post, 1.0)?;
                after(self, 1)?;
            }
        }
        self.add_own_embedding(step, i, layer)?;
        if layer.output_scale != 1.0 {
            self.norm(NormArgs { out: x, scale: layer.output_scale, ..norm_args(None, x, n_embd) }, n)?;
        }
        Ok(())
    }

    /// What the mixer of layer `i` makes of `input`, but for its last products.
    fn mixer<'w>(
        &mut self,
        step: Step<'_>,
        i: usize,
        mixer: &'w CudaMixer,
        input: Input,
    ) -> Result<Vec<Given<'w>>, CudaError> {
        match mixer {
            CudaMixer::Attention(a) => Ok(vec![self.attention(step, i, a, input)?]),
        }
    }

    /// What the feed-forward of layer `i` makes of `input`, but for its last product.
    fn feed_forward<'w>(
        &mut self,
        step: Step<'_>,
        _i: usize,
        feed_forward: &'w CudaFeedForward,
        input: Input,
    ) -> Result<Given<'w>, CudaError> {
        match feed_forward {
            CudaFeedForward::Dense(w) => self.dense(step, w, input),
        }
    }

    /// `x += scale * norm(sum of given)`.
    pub(super) fn join(
        &mut self,
        step: Step<'_>,
        given: &[Given<'_>],
        norm: Option<&CudaNorm>,
        scale: f32,
    ) -> Result<(), CudaError> {
        let (n, n_embd, x, result) = (step.size.n_tokens, step.spec.n_embd, self.s.x.ptr(), self.s.result.ptr());
        for (i, of) in given.iter().enumerate() {
            // Through a norm goes the whole sum.
            let (y, output, scale) = match norm {
                None => (x, Output::Add, scale),
                Some(_) if i == 0 => (result, Output::Store, 1.0),
                Some(_) => (result, Output::Add, 1.0),
            };
            match *of {
                Given::Product { what, linear, input } => {
                    let product =
                        Product { output, scale, bias: linear.bias(), y, ..Product::stored(what, &linear.weight) };
                    self.product(&product, input, linear.weight.n_in, n)?;
                }
                Given::Rows(rows) => {
                    let accumulate = u32::from(output == Output::Add);
                    self.norm(NormArgs { out: y, scale, accumulate, ..norm_args(None, rows, n_embd) }, n)?;
                }
            }
        }
        if norm.is_some() && !given.is_empty() {
            self.norm(NormArgs { out: x, scale, accumulate: 1, ..norm_args(norm, result, n_embd) }, n)?;
        }
        Ok(())
    }
}
