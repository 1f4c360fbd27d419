//! [`LayerRun`]: the operations of one layer on the CPU ([`LayerOps`], which has their order).
//!
//! `x` is the residual stream. Mixers and feed-forwards read `normed`. A result that joins `x` as it is goes there directly:
//! its last product accumulates. One that has a norm of its own or a factor goes to `branch_out` first.

use metal_attention_model::{BatchToken, BlockConvWeights, FeedForward, Layer, LayerOps, Mixer, NormWeights};

use super::{MicroBatchRun, ProductInput, ProductOutput, scale_by};
use crate::kv_cache::{CacheElement, SharedKvCache};
use crate::layers::{CpuParts, PreparedLinear};
use crate::parts::attention::AttentionParams;
use crate::parts::block_conv::ConvSide;

/// Why a layer with attention has a cache.
const CACHE: &str = "the caches are made for the mixers of the layers";

/// One layer of a micro-batch.
pub(super) struct LayerRun<'r, 'a, 'c, E> {
    /// The micro-batch.
    pub(super) run: &'r mut MicroBatchRun<'a>,
    /// The layer's index.
    pub(super) i: usize,
    /// The KV cache that the layer reads; `None` for a layer without attention.
    pub(super) cache: Option<&'r SharedKvCache<'c, E>>,
    /// The tokens whose rows are left.
    pub(super) tokens: &'r mut Vec<BatchToken>,
    /// Whether only the rows of output tokens are needed after the layer, so that the others are dropped once their keys,
    /// values and states are stored: in the last layer, unless a trace needs them.
    pub(super) may_drop_rows: bool,
}

/// A layer ended early: keys, values and states are stored, and no token is an output token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoRowsLeft;

/// The result of a mixer or a feed-forward, `[n_tokens, n_embd]`.
pub(super) enum BranchOutput<'w> {
    /// There is no mixer or no feed-forward.
    Nothing,
    /// A product that is not computed yet.
    Product(LastProduct<'w>),
    /// The sum of two such products.
    Sum([LastProduct<'w>; 2]),
    /// The rows in `up`.
    Rows,
}

/// A last product that is not computed yet.
pub(super) struct LastProduct<'w> {
    /// The matrix, `[n_embd, n_in]`.
    linear: &'w PreparedLinear,
    /// What it is multiplied by.
    input: ProductInput,
    /// The name in profiles.
    kernel: &'static str,
}

impl<E: CacheElement> LayerRun<'_, '_, '_, E> {
    /// Drops the rows of all but the output tokens in the last layer. A feed-forward with a recurrent state (RWKV's channel
    /// mix) needs all rows and drops them itself.
    fn drop_rows_after_mixer(&mut self, layer: &Layer<CpuParts>) -> Result<(), NoRowsLeft> {
        let feed_forward_has_state = match &layer.feed_forward {
            FeedForward::ChannelMix(_) => true,
            FeedForward::Dense(_) | FeedForward::Experts(_) | FeedForward::None => false,
        };
        if self.may_drop_rows && !feed_forward_has_state && self.tokens.iter().any(|token| !token.output) {
            self.run.drop_rows_without_output(self.tokens);
        }
        if self.tokens.is_empty() { Err(NoRowsLeft) } else { Ok(()) }
    }
}

impl MicroBatchRun<'_> {
    /// Computes the products of `output`, if it has any: added to `x` (`to_x`), or to `branch_out`.
    fn project_output(&mut self, output: &BranchOutput<'_>, to_x: bool) {
        let products: &[LastProduct<'_>] = match output {
            BranchOutput::Nothing | BranchOutput::Rows => &[],
            BranchOutput::Product(product) => std::slice::from_ref(product),
            BranchOutput::Sum(products) => products,
        };
        for (i, product) in products.iter().enumerate() {
            let to = match (to_x, i) {
                (true, _) => ProductOutput::AddToX,
                (false, 0) => ProductOutput::ReplaceBranchOut,
                (false, _) => ProductOutput::AddToBranchOut,
            };
            self.project(product.linear, product.input, to);
            self.record_time(product.kernel);
        }
    }
}

impl<'w, E: CacheElement> LayerOps<'w, CpuParts> for LayerRun<'_, '_, '_, E> {
    /// Always `normed`.
    type Input = ();
    type Output = BranchOutput<'w>;
    type Error = NoRowsLeft;

    fn predict_streams(&mut self, layer: &'w Layer<CpuParts>) -> Result<(), NoRowsLeft> {
        self.run.predict_streams(layer.streams.as_ref());
        Ok(())
    }

    fn mixer_input(&mut self, layer: &'w Layer<CpuParts>, _shared: bool) -> Result<(), NoRowsLeft> {
        // Then `normed` has the tokens and their states already.
        if !self.run.spec.attends_to_state() {
            self.run.normalize_x_to_normed(layer.mixer_norm.as_ref());
        }
        Ok(())
    }

    fn convolve_input(&mut self, conv: &'w BlockConvWeights<PreparedLinear>, (): ()) -> Result<(), NoRowsLeft> {
        self.run.convolve_normed(conv, self.tokens);
        Ok(())
    }

    fn convolve_output(
        &mut self,
        conv: &'w BlockConvWeights<PreparedLinear>,
        output: BranchOutput<'w>,
    ) -> Result<BranchOutput<'w>, NoRowsLeft> {
        if let BranchOutput::Nothing = output {
            return Ok(output);
        }
        // The result goes to `up`.
        if !matches!(output, BranchOutput::Rows) {
            self.run.project_output(&output, false);
            std::mem::swap(&mut self.run.scratch.branch_out, &mut self.run.scratch.up);
        }
        let mut rows = std::mem::take(&mut self.run.scratch.up);
        self.run.convolve(conv, ConvSide::Output, self.tokens, &mut rows);
        self.run.scratch.up = rows;
        self.run.record_time("block_conv");
        Ok(BranchOutput::Rows)
    }

    /// Of the other mixers nothing is known without the rows before.
    fn store_context(&mut self, layer: &'w Layer<CpuParts>) -> Result<(), NoRowsLeft> {
        self.run.normalize_x_to_normed(None);
        let attention = layer.mixer.attention_alone().expect("block drafters have attention in each layer");
        self.run.project_and_cache(self.i, attention, self.cache.expect(CACHE), self.tokens);
        Ok(())
    }

    fn laurel(&mut self, layer: &'w Layer<CpuParts>, (): ()) -> Result<(), NoRowsLeft> {
        self.run.laurel(layer.streams.as_ref());
        Ok(())
    }

    /// Attention drops rows as soon as keys and values are stored, other mixers at their end.
    fn mixer(&mut self, layer: &'w Layer<CpuParts>, (): ()) -> Result<BranchOutput<'w>, NoRowsLeft> {
        let i = self.i;
        let output = |linear| {
            // The name in profiles, whatever the mixer.
            LastProduct { linear, input: ProductInput::MixerOut, kernel: "matmul_attn_output" }
        };
        let output = match &layer.mixer {
            Mixer::Attention(w) => {
                self.run.project_and_cache(i, w, self.cache.expect(CACHE), self.tokens);
                self.drop_rows_after_mixer(layer)?;
                self.run.attend(i, &AttentionParams::new(w), self.cache.expect(CACHE), self.tokens);
                self.run.gate_heads(&w.spec);
                BranchOutput::Product(output(&w.out))
            }
            Mixer::LatentAttention(w) => {
                self.run.compress_and_cache(i, w, self.cache.expect(CACHE), self.tokens);
                self.drop_rows_after_mixer(layer)?;
                self.run.attend_latent(i, w, self.cache.expect(CACHE), self.tokens);
                BranchOutput::Product(output(&w.out))
            }
            Mixer::AttentionAndMamba2(both) => {
                // Mamba-2 writes its result to `mixer_out`, as attention does next. So the two buffers are swapped.
                self.run.mamba2(i, &both.mamba2, self.tokens);
                let s = &mut *self.run.scratch;
                std::mem::swap(&mut s.mixer_out, &mut s.mamba.parallel_out);
                self.run.project_and_cache(i, &both.attention, self.cache.expect(CACHE), self.tokens);
                self.drop_rows_after_mixer(layer)?;
                self.run.attend(i, &AttentionParams::new(&both.attention), self.cache.expect(CACHE), self.tokens);
                self.run.gate_heads(&both.attention.spec);
                let (linear, input) = (&both.mamba2.out, ProductInput::ParallelOut);
                let of_mamba2 = LastProduct { linear, input, kernel: "matmul_ssm_out" };
                BranchOutput::Sum([output(&both.attention.out), of_mamba2])
            }
            Mixer::ShortConv(w) => {
                self.run.short_conv(i, w, self.tokens);
                BranchOutput::Product(output(&w.out))
            }
            Mixer::Mamba(w) => {
                self.run.mamba(i, w, self.tokens);
                BranchOutput::Product(output(&w.out))
            }
            Mixer::Mamba2(w) => {
                self.run.mamba2(i, w, self.tokens);
                BranchOutput::Product(output(&w.out))
            }
            Mixer::DeltaRule(w) => {
                self.run.delta_rule(i, w, self.tokens);
                BranchOutput::Product(output(&w.out))
            }
            Mixer::Rwkv6(w) => {
                self.run.rwkv6(i, w, self.tokens);
                BranchOutput::Product(output(&w.out))
            }
            Mixer::Rwkv7(w) => {
                self.run.rwkv7(i, w, self.tokens);
                BranchOutput::Product(output(&w.out))
            }
            Mixer::None => BranchOutput::Nothing,
        };
        self.drop_rows_after_mixer(layer)?;
        Ok(output)
    }

    fn add_laurel(&mut self, layer: &'w Layer<CpuParts>) -> Result<(), NoRowsLeft> {
        if layer.streams.is_some() {
            self.run.add_laurel();
        }
        Ok(())
    }

    fn feed_forward_input(&mut self, layer: &'w Layer<CpuParts>) -> Result<(), NoRowsLeft> {
        self.run.normalize_x_to_normed(layer.feed_forward_norm.as_ref());
        Ok(())
    }

    fn feed_forward(
        &mut self,
        layer: &'w Layer<CpuParts>,
        (): (),
        _scale: f32,
    ) -> Result<BranchOutput<'w>, NoRowsLeft> {
        let output =
            |linear| BranchOutput::Product(LastProduct { linear, input: ProductInput::Hidden, kernel: "matmul_down" });
        Ok(match &layer.feed_forward {
            FeedForward::Dense(w) => {
                self.run.dense(w);
                output(&w.down)
            }
            FeedForward::Experts(w) => {
                self.run.experts(w);
                BranchOutput::Rows
            }
            FeedForward::ChannelMix(w) => {
                // In a layer's state, that of the feed-forward follows that of the mixer.
                let state_start = self.run.spec.layers[self.i].mixer.state_elements();
                self.run.channel_mix(self.i, state_start, w, self.tokens, self.may_drop_rows);
                if self.tokens.is_empty() {
                    return Err(NoRowsLeft);
                }
                if w.receptance.is_some() { BranchOutput::Rows } else { output(&w.value) }
            }
            FeedForward::None => BranchOutput::Nothing,
        })
    }

    fn join(&mut self, output: BranchOutput<'w>, norm: Option<&'w NormWeights>, scale: f32) -> Result<(), NoRowsLeft> {
        let to_x = norm.is_none() && scale == 1.0;
        match &output {
            BranchOutput::Nothing => return Ok(()),
            BranchOutput::Product(_) | BranchOutput::Sum(_) => self.run.project_output(&output, to_x),
            BranchOutput::Rows => std::mem::swap(&mut self.run.scratch.branch_out, &mut self.run.scratch.up),
        }
        let is_added = to_x && !matches!(output, BranchOutput::Rows);
        if !is_added {
            self.run.add_branch_out(norm, scale);
        }
        Ok(())
    }

    fn normalize(&mut self, norm: &'w NormWeights) -> Result<(), NoRowsLeft> {
        self.run.normalize_x(norm);
        Ok(())
    }

    fn finish(&mut self, layer: &'w Layer<CpuParts>) -> Result<(), NoRowsLeft> {
        self.run.correct_streams(layer.streams.as_ref());
        self.run.add_per_layer_embedding(self.i, layer);
        if layer.output_scale != 1.0 {
            scale_by(&mut self.run.scratch.x, layer.output_scale);
        }
        Ok(())
    }
}
