//! How mixer and feed-forward join the residual stream ([`Residual`]), and what follows them at the end of a layer.
//!
//! `x` is the residual stream. A result that is added as it is goes to `x` directly: the product accumulates (`to_x`). One that
//! has a norm of its own or a scale, or is added later ([`Residual::Parallel`]), goes to `branch_out` first.

use metal_attention_model::{BatchToken, LayerSpec, LayerWeights, MixerWeights, Norm, NormWeights, Residual};

use super::channel_mix::LayerContext;
use super::{MicroBatchRun, ProductInput, ProductOutput, scale_by};
use crate::layers::PreparedLinear;

impl MicroBatchRun<'_> {
    /// Adds the mixer's result and the feed-forward to the residual stream `x`, as the layer's [`Residual`] defines; then corrects
    /// the other residual streams, and applies the per-layer embedding and the layer's output scale.
    ///
    /// In the formulas `m` and `f` are mixer and feed-forward with the norms of their inputs and outputs; `m(x)` is `mixer_out`
    /// times the output projection. `i` is the layer's index. `may_drop_rows`: this is the last layer, and only rows of output
    /// tokens are needed after it. The others are dropped already, except before a feed-forward with a recurrent state, which
    /// reduces `tokens` and all buffers to the output tokens here. `ModelSpec::check_residuals` has checked the layer.
    pub(super) fn finish_layer(
        &mut self,
        i: usize,
        layer: &LayerSpec,
        w: &LayerWeights<PreparedLinear>,
        tokens: &mut Vec<BatchToken>,
        may_drop_rows: bool,
    ) {
        // In a layer's state, that of the feed-forward follows that of the mixer.
        let state_start = layer.mixer.state_elements();
        let context = LayerContext { layer: i, state_start, may_drop_rows };
        let feed_forward_norm = (layer.feed_forward_norm.as_ref(), w.feed_forward_norm.as_ref());
        match &layer.residual {
            // x += scale * m(x)
            // x += scale * f(x)
            Residual::Sequential { scale } => {
                self.add_mixer(layer, w, *scale);
                self.add_laurel();
                self.normalize_x_to_normed(feed_forward_norm.0, feed_forward_norm.1);
                self.add_feed_forward(&context, layer, w, tokens, *scale);
            }
            // x += m(x) + f(x)
            Residual::Parallel => {
                // Both read the same x. If f has a norm of its own, f reads x after m is computed, so m(x) is kept in
                // `branch_out` until f is added. Otherwise f reads `normed`, the mixer's normed input; m(x) may then be added
                // to x at once, unless m has an output norm, since `add_branch_out` would overwrite `normed`.
                let delayed = layer.mixer_post_norm.is_some() || layer.feed_forward_norm.is_some();
                self.project_mixer(w, !delayed);
                // The feed-forward uses `branch_out`, too. No rows are dropped while the result is set aside: the feed-forward has no
                // recurrent state. The layer has a mixer, so that the result is not an old one.
                let mixer_result = delayed.then(|| std::mem::take(&mut self.scratch.branch_out));
                if layer.feed_forward_norm.is_some() {
                    self.normalize_x_to_normed(feed_forward_norm.0, feed_forward_norm.1);
                }
                self.add_feed_forward(&context, layer, w, tokens, 1.0);
                if let Some(mixer_result) = mixer_result {
                    self.scratch.branch_out = mixer_result;
                    self.add_branch_out(mixer_post_norm(layer, w), 1.0);
                }
            }
            // x = mixer_sum_norm(x + m(x))
            // x = feed_forward_sum_norm(x + f(x))
            Residual::PostNorm { mixer_sum_norm, feed_forward_sum_norm } => {
                self.add_mixer(layer, w, 1.0);
                if let Some([weights, _]) = &w.sum_norms {
                    self.normalize_x(mixer_sum_norm, weights);
                }
                self.normalize_x_to_normed(feed_forward_norm.0, feed_forward_norm.1);
                self.add_feed_forward(&context, layer, w, tokens, 1.0);
                if let Some([_, weights]) = &w.sum_norms {
                    self.normalize_x(feed_forward_sum_norm, weights);
                }
            }
        }
        self.correct_streams(w);
        self.add_per_layer_embedding(i, w);
        if w.output_scale != 1.0 {
            scale_by(&mut self.scratch.x, w.output_scale);
        }
    }

    /// `x += scale * norm(W mixer_out + b)`, where the mixer has an output projection.
    fn add_mixer(&mut self, layer: &LayerSpec, w: &LayerWeights<PreparedLinear>, scale: f32) {
        let post_norm = mixer_post_norm(layer, w);
        let to_x = scale == 1.0 && post_norm.is_none();
        self.project_mixer(w, to_x);
        if w.mixer.out().is_some() && !to_x {
            self.add_branch_out(post_norm, scale);
        }
    }

    /// Multiplies `mixer_out` by the mixer's output projection; for attention in parallel with Mamba-2 adds the product of
    /// `mamba.parallel_out`. The result is added to `x` where `to_x` is set, otherwise it replaces `branch_out`.
    fn project_mixer(&mut self, w: &LayerWeights<PreparedLinear>, to_x: bool) {
        if let Some(out) = w.mixer.out() {
            self.project(out, ProductInput::MixerOut, ProductOutput::of_branch(to_x));
            // The name in profiles, whatever the mixer.
            self.record_time("matmul_attn_output");
        }
        if let MixerWeights::AttentionAndMamba2(both) = &w.mixer {
            let output = if to_x { ProductOutput::AddToX } else { ProductOutput::AddToBranchOut };
            self.project(&both.mamba2.out, ProductInput::ParallelOut, output);
            self.record_time("matmul_ssm_out");
        }
    }

    /// `x += scale * norm(f(normed))`; nothing where the layer has no feed-forward.
    fn add_feed_forward(
        &mut self,
        context: &LayerContext,
        layer: &LayerSpec,
        w: &LayerWeights<PreparedLinear>,
        tokens: &mut Vec<BatchToken>,
        scale: f32,
    ) {
        let post_norm = layer.feed_forward_post_norm.as_ref().zip(w.feed_forward_post_norm.as_ref());
        let to_x = scale == 1.0 && post_norm.is_none();
        let has_feed_forward = self.feed_forward(context, &layer.feed_forward, &w.feed_forward, tokens, to_x);
        if has_feed_forward && !to_x {
            self.add_branch_out(post_norm, scale);
        }
    }
}

/// The norm of the mixer's output and its weights; `None` where the layer has none.
fn mixer_post_norm<'a>(
    layer: &'a LayerSpec,
    w: &'a LayerWeights<PreparedLinear>,
) -> Option<(&'a Norm, &'a NormWeights)> {
    layer.mixer_post_norm.as_ref().zip(w.mixer_post_norm.as_ref())
}
