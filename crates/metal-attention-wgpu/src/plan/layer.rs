//! One layer: its mixer and feed-forward, each with its norms and its way into the residual stream.

use crate::kernels::{self, Gating, MatvecOutput, NormShape, ScaleShape};
use crate::{Dispatch, WgpuError};
use metal_attention_model::{Activation, Dense, FeedForward, Residual};
use wgpu::Buffer;

use super::mixer::Mixed;
use super::{BatchKind, Input, PlanBuilder, Product};
use crate::weights::{WgpuDense, WgpuFeedForward, WgpuLinear, WgpuNorm};

/// What a feed-forward gives.
#[derive(Clone, Copy)]
enum Given<'a> {
    /// The activated gate, which this matrix multiplies.
    Gated(&'a WgpuLinear),
    /// A sum that lies there.
    Sum(&'a Buffer),
    /// Nothing more: it is in the residual stream, or there is none.
    Added,
}

impl PlanBuilder<'_> {
    /// All that layer `i` does.
    pub(super) fn layer(&self, i: usize) -> Result<Vec<Dispatch>, WgpuError> {
        let (s, layer, w) = (self.s, &self.spec.layers[i], &self.weights.layers[i]);
        let (mixer_post, post) = (w.mixer_post_norm.as_ref(), w.feed_forward_post_norm.as_ref());
        let mut d = Vec::new();
        match &layer.residual {
            Residual::Sequential { scale } => {
                self.predict_streams(&mut d, i)?;
                let input = self.input(&mut d, w.mixer_norm.as_ref(), self.mixer_shares_input(i))?;
                self.laurel(&mut d, i)?;
                let mixed = self.mixer(&mut d, i, input)?;
                self.join_mixed(&mut d, &mixed, mixer_post, *scale)?;
                self.add_laurel(&mut d, i)?;
                let input = self.input(&mut d, w.feed_forward_norm.as_ref(), self.feed_forward_shares_input(i))?;
                let result = self.feed_forward(&mut d, i, input, *scale)?;
                self.join_result(&mut d, result, post, *scale)?;
            }
            Residual::Parallel => {
                // What the feed-forward reads does not have the mixer's result.
                let shared = w.feed_forward_norm.is_none();
                let input = self.input(&mut d, w.mixer_norm.as_ref(), shared || self.mixer_shares_input(i))?;
                let mixed = self.mixer(&mut d, i, input)?;
                let own = w.feed_forward_norm.as_ref();
                let input = if shared { input } else { self.input(&mut d, own, self.feed_forward_shares_input(i))? };
                let given = self.feed_forward(&mut d, i, input, 1.0)?;
                self.join_mixed(&mut d, &mixed, mixer_post, 1.0)?;
                self.join_result(&mut d, given, post, 1.0)?;
            }
            Residual::PostNorm { mixer: _, feed_forward: _ } => {
                let [mixer_sum, feed_forward_sum] = w.sum_norms.as_ref().expect("norms of sums have weights");
                let input = self.input(&mut d, w.mixer_norm.as_ref(), self.mixer_shares_input(i))?;
                let mixed = self.mixer(&mut d, i, input)?;
                self.join_mixed(&mut d, &mixed, mixer_post, 1.0)?;
                d.push(self.norm(mixer_sum, NormShape::of_row(mixer_sum.n), None, &s.x)?);
                let input = self.input(&mut d, w.feed_forward_norm.as_ref(), self.feed_forward_shares_input(i))?;
                let result = self.feed_forward(&mut d, i, input, 1.0)?;
                self.join_result(&mut d, result, post, 1.0)?;
                d.push(self.norm(feed_forward_sum, NormShape::of_row(feed_forward_sum.n), None, &s.x)?);
            }
        }
        self.add_own_embedding(&mut d, i)?;
        if w.output_scale != 1.0 {
            let of = ScaleShape { n: self.spec.n_embd, scale: w.output_scale, soft_cap: None, wanted: false };
            d.push(kernels::scale(self.gpu, of, &s.x)?);
        }
        Ok(d)
    }

    /// `x += scale * norm(sum)` with the sum of what a mixer gives.
    fn join_mixed(
        &self,
        d: &mut Vec<Dispatch>,
        mixed: &[Mixed<'_>],
        norm: Option<&WgpuNorm>,
        scale: f32,
    ) -> Result<(), WgpuError> {
        let s = self.s;
        let straight = norm.is_none() && scale == 1.0;
        let y = if straight { &s.x } else { &s.result };
        for (i, of) in mixed.iter().enumerate() {
            let output = if straight || i > 0 { MatvecOutput::Accumulate } else { MatvecOutput::Store };
            let product = Product::new(of.out, output, of.x, y);
            match of.norm {
                Some(norm) => self.multiply_normed(d, norm, product)?,
                None => self.multiply(d, product)?,
            }
        }
        if straight || mixed.is_empty() { Ok(()) } else { self.add(d, &s.result, norm, scale, &s.x) }
    }

    /// `x += scale * norm(linear(input))`.
    fn join(
        &self,
        d: &mut Vec<Dispatch>,
        linear: &WgpuLinear,
        input: &Buffer,
        norm: Option<&WgpuNorm>,
        scale: f32,
    ) -> Result<(), WgpuError> {
        let s = self.s;
        if norm.is_none() && scale == 1.0 {
            return self.multiply(d, Product::new(linear, MatvecOutput::Accumulate, input, &s.x));
        }
        self.multiply(d, Product::new(linear, MatvecOutput::Store, input, &s.result))?;
        self.add(d, &s.result, norm, scale, &s.x)
    }

    /// What the feed-forward of layer `i` makes of `input`, but for its last product where that can be added to the residual
    /// stream at once. `scale` is the factor on what it gives.
    fn feed_forward(
        &self,
        d: &mut Vec<Dispatch>,
        i: usize,
        input: Input<'_>,
        scale: f32,
    ) -> Result<Given<'_>, WgpuError> {
        let layer = &self.weights.layers[i];
        match (&self.spec.layers[i].feed_forward, &layer.feed_forward) {
            (FeedForward::Dense(dense), WgpuFeedForward::Dense(w)) => {
                self.gated(d, dense, w, input)?;
                Ok(Given::Gated(&w.down))
            }
            (FeedForward::Experts(e), WgpuFeedForward::Experts(w)) => {
                // Without a norm before it, what follows the experts reads the stream itself.
                let plain = layer.feed_forward_post_norm.is_none() && w.expert_norms.is_none() && scale == 1.0;
                let added = plain && layer.feed_forward_norm.is_some();
                let sum = if added { &self.s.x } else { &self.s.experts_sum };
                self.experts(d, e, w, input, sum, added)?;
                Ok(if added { Given::Added } else { Given::Sum(sum) })
            }
            (FeedForward::ChannelMix(of), WgpuFeedForward::ChannelMix(w)) => {
                let plain = layer.feed_forward_post_norm.is_none() && scale == 1.0;
                let added = plain && layer.feed_forward_norm.is_some();
                self.channel_mix(d, i, of, w, input, added)?;
                Ok(match &w.receptance {
                    None => Given::Gated(&w.value),
                    Some(_) if added => Given::Added,
                    Some(_) => Given::Sum(&self.s.rwkv.k),
                })
            }
            (FeedForward::None, WgpuFeedForward::None) => Ok(Given::Added),
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

    /// Whether several kernels read the input of the feed-forward of layer `i`, and it is better made once: the kernels of
    /// one token take the norm on the way, but for a shared expert, which comes after others were added to the stream.
    fn feed_forward_shares_input(&self, i: usize) -> bool {
        match &self.spec.layers[i].feed_forward {
            FeedForward::Dense(_) | FeedForward::None => false,
            FeedForward::ChannelMix(_) => true,
            FeedForward::Experts(e) => self.kind != BatchKind::One || e.shared.is_some(),
        }
    }

    /// `x += scale * norm(given)`.
    fn join_result(
        &self,
        d: &mut Vec<Dispatch>,
        given: Given<'_>,
        norm: Option<&WgpuNorm>,
        scale: f32,
    ) -> Result<(), WgpuError> {
        match given {
            Given::Gated(down) => self.join(d, down, &self.s.gated, norm, scale),
            Given::Sum(sum) => self.add(d, sum, norm, scale, &self.s.x),
            Given::Added => Ok(()),
        }
    }

    /// `y += scale * norm(x)`.
    pub(super) fn add(
        &self,
        d: &mut Vec<Dispatch>,
        x: &Buffer,
        norm: Option<&WgpuNorm>,
        scale: f32,
        y: &Buffer,
    ) -> Result<(), WgpuError> {
        let of = NormShape { scale, accumulate: true, ..NormShape::of_row(self.spec.n_embd) };
        d.push(match norm {
            Some(norm) => self.norm(norm, of, Some(x), y)?,
            None => kernels::norm(self.gpu, of, Some(x), None, y, self.batch)?,
        });
        Ok(())
    }

    /// `gated = activation(gate(input)) * up(input)`.
    pub(super) fn gated(
        &self,
        d: &mut Vec<Dispatch>,
        dense: &Dense,
        w: &WgpuDense,
        input: Input<'_>,
    ) -> Result<(), WgpuError> {
        let (s, gate_up) = (self.s, &w.gate_up);
        let Dense { n_ff, gated, activation, fused: _ } = *dense;
        let silu = gated && activation == Activation::Silu;
        if silu && gate_up.weight.has_pairs() {
            return self.product_of(d, input, Product::new(gate_up, MatvecOutput::Gated, &s.x, &s.gated));
        }
        // No kernel for products sees both of a pair where gate and up have different types, or knows another activation.
        self.product_of(d, input, Product::new(gate_up, MatvecOutput::Store, &s.x, &s.gate_up))?;
        if silu {
            d.push(kernels::ffn_silu(self.gpu, n_ff, &s.gate_up, &s.gated)?);
            return Ok(());
        }
        let gating = if gated { Gating::Pairs } else { Gating::None };
        d.push(kernels::activation(self.gpu, activation, n_ff, gating, &s.gate_up, &s.gated)?);
        Ok(())
    }

    /// `x += norm(proj(gelu(gate(x)) * input))`, where layers have an embedding of their own; with several streams the first,
    /// times a factor, is read, and the others get it.
    fn add_own_embedding(&self, d: &mut Vec<Dispatch>, i: usize) -> Result<(), WgpuError> {
        let (s, n, w) = (self.s, self.spec.n_embd, &self.weights.layers[i]);
        let (Some(spec), Some(own)) = (&self.spec.embedding.per_layer, &w.own_embedding) else { return Ok(()) };
        let streams = self.spec.embedding.streams.as_ref().zip(w.streams.as_ref());
        if let Some((spec, w)) = streams {
            self.correct_streams(d, spec, w)?;
        }
        let x = if streams.is_some() { &s.h } else { &s.x };
        let (width, stride) = (spec.width, self.spec.n_layer() * spec.width);
        self.multiply(d, Product::new(&own.gate, MatvecOutput::Store, x, &s.gate_up))?;
        let gating = Gating::Rows { up: &s.own_inputs, stride, at: i * width };
        d.push(kernels::activation(self.gpu, Activation::Gelu, width, gating, &s.gate_up, &s.gated)?);
        let Some((spec, _)) = streams else { return self.join(d, &own.proj, &s.gated, Some(&own.post_norm), 1.0) };
        self.multiply(d, Product::new(&own.proj, MatvecOutput::Store, &s.gated, &s.result))?;
        d.push(self.norm(&own.post_norm, NormShape::of_row(n), None, &s.result)?);
        d.push(kernels::add_to_idle_streams(self.gpu, n, spec.n, &s.streams, &s.result)?);
        Ok(())
    }
}
