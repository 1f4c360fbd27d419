//! One layer: its mixer and feed-forward, each with its norms and its way into the residual stream.

use metal_attention_model::Residual;

use super::product::{Input, Product};
use super::{Step, Steps};
use crate::CudaError;
use crate::args::Output;
use crate::weights::{CudaFeedForward, CudaLayer, CudaLinear, CudaMixer, CudaNorm};

/// What a mixer or a feed-forward gives; a mixer may give several, whose sum counts.
#[derive(Clone, Copy)]
pub(super) enum Given<'w> {
    /// What this matrix makes of rows.
    Product { what: &'static str, linear: &'w CudaLinear, input: Input },
}

impl Steps {
    /// All that layer `i` does.
    pub(super) fn layer(&mut self, step: Step<'_>, i: usize, layer: &CudaLayer) -> Result<(), CudaError> {
        let (n, n_embd) = (step.size.n_tokens, step.spec.n_embd);
        match layer.residual {
            Residual::Sequential { scale } => {
                let input = self.normed(layer.mixer_norm.as_ref(), n_embd, n)?;
                let given = self.mixer(step, i, &layer.mixer, input)?;
                self.join(step, &given, layer.mixer_post_norm.as_ref(), scale)?;
                let input = self.normed(layer.feed_forward_norm.as_ref(), n_embd, n)?;
                let given = self.feed_forward(step, i, &layer.feed_forward, input)?;
                self.join(step, &[given], layer.feed_forward_post_norm.as_ref(), scale)
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
            }
        }
        Ok(())
    }
}
