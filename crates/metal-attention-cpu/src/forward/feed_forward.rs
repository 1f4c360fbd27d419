//! The feed-forward of a layer: which kind it is, and the dense one, `down(activation(gate(x)) * up(x))`.

use metal_attention_model::{BatchToken, Dense, DenseWeights, FeedForward, FeedForwardWeights};

use super::channel_mix::LayerContext;
use super::{MIN_PARALLEL_ELEMENTS, MicroBatchRun, ProductInput, ProductOutput, add_bias, resize};
use crate::kernels::elementwise::Activate;
use crate::kernels::matmul::{MatmulOp, matmul};
use crate::layers::PreparedLinear;
use crate::shared::SharedMut;

impl MicroBatchRun<'_> {
    /// The feed-forward of `normed`, `[n_tokens, n_embd]`: added to `x` where `to_x` is set, otherwise written to
    /// `branch_out`. Returns false, and does nothing, where the layer has none. A channel mix in the last layer reduces
    /// `tokens` to the output tokens.
    pub(super) fn feed_forward(
        &mut self,
        context: &LayerContext,
        spec: &FeedForward,
        w: &FeedForwardWeights<PreparedLinear>,
        tokens: &mut Vec<BatchToken>,
        to_x: bool,
    ) -> bool {
        match (spec, w) {
            (FeedForward::Dense(dense), FeedForwardWeights::Dense(w)) => self.dense(dense, w, to_x),
            (FeedForward::Experts(experts), FeedForwardWeights::Experts(w)) => self.experts(experts, w, to_x),
            (FeedForward::ChannelMix(mix), FeedForwardWeights::ChannelMix(w)) => {
                self.channel_mix(context, mix, w, tokens, to_x);
            }
            (FeedForward::None, FeedForwardWeights::None) => return false,
            (
                FeedForward::Dense(_) | FeedForward::Experts(_) | FeedForward::ChannelMix(_) | FeedForward::None,
                FeedForwardWeights::Dense(_)
                | FeedForwardWeights::Experts(_)
                | FeedForwardWeights::ChannelMix(_)
                | FeedForwardWeights::None,
            ) => {
                panic!("the weights are those of the layers: both were made from one description")
            }
        }
        true
    }

    /// `down(activation(gate(normed)) * up(normed))`, without a gate `down(activation(up(normed)))`; the result as of
    /// [`feed_forward`](Self::feed_forward).
    pub(super) fn dense(&mut self, dense: &Dense, w: &DenseWeights<PreparedLinear>, to_x: bool) {
        let n_ff = dense.n_ff;
        // Without a gate projection the up projection is written to `gate_or_hidden`, and activated there.
        let first = w.gate.as_ref().unwrap_or(&w.up);
        let second = w.gate.as_ref().map(|_| &w.up);
        match second {
            Some(up) => self.observe(&[first, up], ProductInput::Normed),
            None => self.observe(&[first], ProductInput::Normed),
        }
        let s = &mut *self.scratch;
        let n_tokens = s.x.len() / self.spec.n_embd;
        resize(&mut s.gate_or_hidden, n_tokens * n_ff);
        let mut products =
            vec![MatmulOp { matrix: &first.weight, rows: 0..n_tokens, y: &mut s.gate_or_hidden, accumulate: false }];
        if let Some(up) = second {
            resize(&mut s.up, n_tokens * n_ff);
            products.push(MatmulOp { matrix: &up.weight, rows: 0..n_tokens, y: &mut s.up, accumulate: false });
        }
        matmul(self.pool, self.isa, &s.normed, &mut s.q8, &mut products);
        self.record_time("matmul_gate_up");
        let s = &mut *self.scratch;
        let (isa, activation) = (self.isa, dense.activation);
        let (gate, up) = (SharedMut::new(&mut s.gate_or_hidden), SharedMut::new(&mut s.up));
        self.pool.for_each_if(n_tokens * n_ff >= MIN_PARALLEL_ELEMENTS, n_tokens, &|t| {
            // SAFETY: each token owns its rows.
            let gate = unsafe { gate.slice(t * n_ff, n_ff) };
            add_bias(gate, first);
            let up = second.map(|linear| {
                // SAFETY: as above.
                let up = unsafe { up.slice(t * n_ff, n_ff) };
                add_bias(up, linear);
                &*up
            });
            isa.run(Activate { activation, gate, up });
        });
        self.record_time("ffn_activation");
        self.project(&w.down, ProductInput::Hidden, ProductOutput::of_branch(to_x));
        self.record_time("matmul_down");
    }
}
