//! One layer: its mixer and feed-forward, each with its norms and its residual join. The residual stream is
//! `scratch.x`.

use crate::kernels::{self, Gating, MatvecOutput, NormShape, ScaleShape};
use crate::{Dispatch, WgpuError};
use metal_attention_model::{Activation, Dense, FeedForward, Residual};
use wgpu::Buffer;

use super::mixer::MixerResult;
use super::{BatchKind, BranchInput, LinearProduct, PlanBuilder};
use crate::weights::{WgpuDense, WgpuFeedForward, WgpuLinear, WgpuNorm};

/// The result of a feed-forward, as far as it was computed.
#[derive(Clone, Copy)]
enum FeedForwardResult<'a> {
    /// `W gated`: the last product is not appended yet. It multiplies this matrix by `scratch.gated`.
    Gated(&'a WgpuLinear),
    /// The result is in this buffer and is to be added to the residual stream.
    Sum(&'a Buffer),
    /// The result was added to the residual stream already, or there is no feed-forward.
    Added,
}

impl PlanBuilder<'_> {
    /// All dispatches of layer `i`. The arms follow [`Residual`]:
    /// - Sequential: `x += scale * mixer(norm(x))`, then `x += scale * feed_forward(norm(x))`;
    /// - Parallel: `x += mixer(norm(x)) + feed_forward(norm(x))`, both of the same `x`;
    /// - `PostNorm`: `x = norm(x + mixer(x))`, then `x = norm(x + feed_forward(x))`.
    pub(super) fn layer(&self, i: usize) -> Result<Vec<Dispatch>, WgpuError> {
        let (scratch, layer, w) = (self.scratch, &self.spec.layers[i], &self.weights.layers[i]);
        let (mixer_post, post) = (w.mixer_post_norm.as_ref(), w.feed_forward_post_norm.as_ref());
        let mut dispatches = Vec::new();
        match &layer.residual {
            Residual::Sequential { scale } => {
                self.predict_streams(&mut dispatches, i)?;
                let input =
                    self.branch_input(&mut dispatches, w.mixer_norm.as_ref(), self.mixer_materialises_norm(i))?;
                self.laurel(&mut dispatches, i)?;
                let mixed = self.append_mixer(&mut dispatches, i, input)?;
                self.join_mixer(&mut dispatches, &mixed, mixer_post, *scale)?;
                self.add_laurel(&mut dispatches, i)?;
                let input = self.branch_input(
                    &mut dispatches,
                    w.feed_forward_norm.as_ref(),
                    self.feed_forward_materialises_norm(i),
                )?;
                let result = self.feed_forward(&mut dispatches, i, input, *scale)?;
                self.join_feed_forward(&mut dispatches, result, post, *scale)?;
            }
            Residual::Parallel => {
                // The mixer is joined only after the feed-forward has read `x`. Without a norm of its own the
                // feed-forward reads the mixer's input.
                let shares_input = w.feed_forward_norm.is_none();
                let input = self.branch_input(
                    &mut dispatches,
                    w.mixer_norm.as_ref(),
                    shares_input || self.mixer_materialises_norm(i),
                )?;
                let mixed = self.append_mixer(&mut dispatches, i, input)?;
                let own = w.feed_forward_norm.as_ref();
                let input = if shares_input {
                    input
                } else {
                    self.branch_input(&mut dispatches, own, self.feed_forward_materialises_norm(i))?
                };
                let result = self.feed_forward(&mut dispatches, i, input, 1.0)?;
                self.join_mixer(&mut dispatches, &mixed, mixer_post, 1.0)?;
                self.join_feed_forward(&mut dispatches, result, post, 1.0)?;
            }
            Residual::PostNorm { mixer_sum_norm: _, feed_forward_sum_norm: _ } => {
                let [mixer_sum, feed_forward_sum] = w.sum_norms.as_ref().expect("norms of sums have weights");
                let input =
                    self.branch_input(&mut dispatches, w.mixer_norm.as_ref(), self.mixer_materialises_norm(i))?;
                let mixed = self.append_mixer(&mut dispatches, i, input)?;
                self.join_mixer(&mut dispatches, &mixed, mixer_post, 1.0)?;
                dispatches.push(self.norm(mixer_sum, NormShape::of_row(mixer_sum.n), None, &scratch.x)?);
                let input = self.branch_input(
                    &mut dispatches,
                    w.feed_forward_norm.as_ref(),
                    self.feed_forward_materialises_norm(i),
                )?;
                let result = self.feed_forward(&mut dispatches, i, input, 1.0)?;
                self.join_feed_forward(&mut dispatches, result, post, 1.0)?;
                dispatches.push(self.norm(
                    feed_forward_sum,
                    NormShape::of_row(feed_forward_sum.n),
                    None,
                    &scratch.x,
                )?);
            }
        }
        self.add_layer_embedding(&mut dispatches, i)?;
        if w.output_scale != 1.0 {
            let shape = ScaleShape { n: self.spec.n_embd, scale: w.output_scale, soft_cap: None, outputs_only: false };
            dispatches.push(kernels::scale(self.gpu, shape, &scratch.x)?);
        }
        Ok(dispatches)
    }

    /// Appends `x += scale * norm(sum of the mixer's last products)`. Without norm and factor the products accumulate
    /// in `x`; otherwise in `result`, which is then added.
    fn join_mixer(
        &self,
        dispatches: &mut Vec<Dispatch>,
        mixed: &[MixerResult<'_>],
        norm: Option<&WgpuNorm>,
        scale: f32,
    ) -> Result<(), WgpuError> {
        let scratch = self.scratch;
        let accumulates = norm.is_none() && scale == 1.0;
        let y = if accumulates { &scratch.x } else { &scratch.result };
        for (i, part) in mixed.iter().enumerate() {
            let output = if accumulates || i > 0 { MatvecOutput::Accumulate } else { MatvecOutput::Store };
            let product = LinearProduct::new(part.out, output, part.input, y);
            match part.norm {
                Some(norm) => self.multiply_normed(dispatches, norm, product)?,
                None => self.multiply(dispatches, product)?,
            }
        }
        if accumulates || mixed.is_empty() {
            Ok(())
        } else {
            self.add(dispatches, &scratch.result, norm, scale, &scratch.x)
        }
    }

    /// Appends `x += scale * norm(linear input)`: one product if there is neither norm nor factor, else through
    /// `result`.
    fn join(
        &self,
        dispatches: &mut Vec<Dispatch>,
        linear: &WgpuLinear,
        input: &Buffer,
        norm: Option<&WgpuNorm>,
        scale: f32,
    ) -> Result<(), WgpuError> {
        let scratch = self.scratch;
        if norm.is_none() && scale == 1.0 {
            return self.multiply(dispatches, LinearProduct::new(linear, MatvecOutput::Accumulate, input, &scratch.x));
        }
        self.multiply(dispatches, LinearProduct::new(linear, MatvecOutput::Store, input, &scratch.result))?;
        self.add(dispatches, &scratch.result, norm, scale, &scratch.x)
    }

    /// Appends the feed-forward of layer `i` except, for a dense one, its last product. `scale`: the factor of the
    /// residual join, on which it depends whether the result can be added to `x` directly.
    fn feed_forward(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        input: BranchInput<'_>,
        scale: f32,
    ) -> Result<FeedForwardResult<'_>, WgpuError> {
        let layer = &self.weights.layers[i];
        match (&self.spec.layers[i].feed_forward, &layer.feed_forward) {
            (FeedForward::Dense(dense), WgpuFeedForward::Dense(w)) => {
                self.gated(dispatches, dense, w, input)?;
                Ok(FeedForwardResult::Gated(&w.down))
            }
            (FeedForward::Experts(e), WgpuFeedForward::Experts(w)) => {
                // Added directly only if a norm precedes the experts: without one they still read `x` while it would be
                // written.
                let plain = layer.feed_forward_post_norm.is_none() && w.expert_norms.is_none() && scale == 1.0;
                let added = plain && layer.feed_forward_norm.is_some();
                let sum = if added { &self.scratch.x } else { &self.scratch.experts_sum };
                self.experts(dispatches, e, w, input, sum, added)?;
                Ok(if added { FeedForwardResult::Added } else { FeedForwardResult::Sum(sum) })
            }
            (FeedForward::ChannelMix(shape), WgpuFeedForward::ChannelMix(w)) => {
                let plain = layer.feed_forward_post_norm.is_none() && scale == 1.0;
                let added = plain && layer.feed_forward_norm.is_some();
                self.channel_mix(dispatches, i, shape, w, input, added)?;
                Ok(match &w.receptance {
                    None => FeedForwardResult::Gated(&w.value),
                    Some(_) if added => FeedForwardResult::Added,
                    Some(_) => FeedForwardResult::Sum(&self.scratch.rwkv.k),
                })
            }
            (FeedForward::None, WgpuFeedForward::None) => Ok(FeedForwardResult::Added),
            (
                FeedForward::Dense(_) | FeedForward::Experts(_) | FeedForward::ChannelMix(_) | FeedForward::None,
                WgpuFeedForward::Dense(_)
                | WgpuFeedForward::Experts(_)
                | WgpuFeedForward::ChannelMix(_)
                | WgpuFeedForward::None,
            ) => {
                panic!("the weights are those of the layers: both were made from one description")
            }
        }
    }

    /// Whether the norm before the feed-forward of layer `i` is written to `normed` because several products read it.
    /// The kernels of one token compute it in their prologue instead, unless there is a shared expert: it runs after
    /// the others, which may have been added to `x` by then.
    fn feed_forward_materialises_norm(&self, i: usize) -> bool {
        match &self.spec.layers[i].feed_forward {
            FeedForward::Dense(_) | FeedForward::None => false,
            FeedForward::ChannelMix(_) => true,
            FeedForward::Experts(e) => self.kind != BatchKind::One || e.shared.is_some(),
        }
    }

    /// Appends `x += scale * norm(result)`.
    fn join_feed_forward(
        &self,
        dispatches: &mut Vec<Dispatch>,
        result: FeedForwardResult<'_>,
        norm: Option<&WgpuNorm>,
        scale: f32,
    ) -> Result<(), WgpuError> {
        match result {
            FeedForwardResult::Gated(down) => self.join(dispatches, down, &self.scratch.gated, norm, scale),
            FeedForwardResult::Sum(sum) => self.add(dispatches, sum, norm, scale, &self.scratch.x),
            FeedForwardResult::Added => Ok(()),
        }
    }

    /// Appends `y += scale * norm(x)`; without a norm `y += scale * x`.
    pub(super) fn add(
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

    /// Appends `gated = activation(gate(input)) * up(input)`, through `gate_up` unless one product does it all.
    pub(super) fn gated(
        &self,
        dispatches: &mut Vec<Dispatch>,
        dense: &Dense,
        w: &WgpuDense,
        input: BranchInput<'_>,
    ) -> Result<(), WgpuError> {
        let (scratch, gate_up) = (self.scratch, &w.gate_up);
        let Dense { n_ff, gated, activation, fused: _ } = *dense;
        let silu = gated && activation == Activation::Silu;
        if silu && gate_up.weight.has_pairs() {
            return self.multiply_branch_input(dispatches, input, gate_up, MatvecOutput::Gated, &scratch.gated);
        }
        // The gated product needs gate and up rows as neighbours, of one type, and SiLU. All others store the product
        // first.
        self.multiply_branch_input(dispatches, input, gate_up, MatvecOutput::Store, &scratch.gate_up)?;
        if silu {
            dispatches.push(kernels::ffn_silu(self.gpu, n_ff, &scratch.gate_up, &scratch.gated)?);
            return Ok(());
        }
        let gating = if gated { Gating::Pairs } else { Gating::None };
        dispatches.push(kernels::activation(self.gpu, activation, n_ff, gating, &scratch.gate_up, &scratch.gated)?);
        Ok(())
    }

    /// Appends `x += norm(proj(gelu(gate(x)) * e))` with the layer's per-layer embedding `e` (Gemma 3n); nothing for
    /// models without. With several residual streams the first one, scaled, takes the place of `x` on the right (in
    /// `normed`), and the result is added to the others.
    fn add_layer_embedding(&self, dispatches: &mut Vec<Dispatch>, i: usize) -> Result<(), WgpuError> {
        let (scratch, n, w) = (self.scratch, self.spec.n_embd, &self.weights.layers[i]);
        let (Some(spec), Some(own)) = (&self.spec.embedding.per_layer, &w.layer_embedding) else { return Ok(()) };
        let streams = self.spec.embedding.streams.as_ref().zip(w.streams.as_ref());
        if let Some((spec, w)) = streams {
            self.correct_streams(dispatches, spec, w)?;
        }
        let x = if streams.is_some() { &scratch.normed } else { &scratch.x };
        let (width, stride) = (spec.width, self.spec.n_layer() * spec.width);
        self.multiply(dispatches, LinearProduct::new(&own.gate, MatvecOutput::Store, x, &scratch.gate_up))?;
        let gating = Gating::Rows { up: &scratch.layer_embeddings, stride, at: i * width };
        dispatches.push(kernels::activation(
            self.gpu,
            Activation::Gelu,
            width,
            gating,
            &scratch.gate_up,
            &scratch.gated,
        )?);
        let Some((spec, _)) = streams else {
            return self.join(dispatches, &own.proj, &scratch.gated, Some(&own.post_norm), 1.0);
        };
        self.multiply(dispatches, LinearProduct::new(&own.proj, MatvecOutput::Store, &scratch.gated, &scratch.result))?;
        dispatches.push(self.norm(&own.post_norm, NormShape::of_row(n), None, &scratch.result)?);
        dispatches.push(kernels::add_to_idle_streams(self.gpu, n, spec.n, &scratch.streams, &scratch.result)?);
        Ok(())
    }
}
