//! RWKV's channel mix: the feed-forward of an RWKV layer, `value(relu(key(x_k))^2)`, in RWKV-6 times
//! `sigmoid(receptance(x_r))`.
//!
//! Its inputs `x_k` and `x_r` are interpolated between a token and the token before it (token shift), so it has a
//! recurrent state: the input of the sequence's last token.

use metal_attention_model::{Activation, BatchToken, ChannelMixSpec, ChannelMixWeights};

use super::TokenShift;
use crate::forward::{MIN_PARALLEL_ELEMENTS, MicroBatchRun, ProductInput, ProductOutput, resize};
use crate::kernels::elementwise::Activate;
use crate::kernels::matmul::{MatmulOp, matmul};
use crate::kernels::recurrent::time_mix::{ApplyNonlinearity, Nonlinearity};
use crate::layers::PreparedLinear;
use crate::shared::SharedMut;

// The indices of the token shift's results: inputs of the keys and of the receptances.
const K: usize = 0;
const R: usize = 1;

impl MicroBatchRun<'_> {
    /// The channel mix of `normed`, except its last product: the hidden vectors, `[n_rows, width]`, to `gate_or_hidden`.
    /// If gated, that product is taken here, and the gated result, `[n_rows, n_embd]`, is written to `up`. Updates the
    /// states of the tokens' sequences; `state_start` is the first element of this state in the layer's. Where
    /// `may_drop_rows` is set (in the last layer) it reduces `tokens` and all buffers to the output tokens; where none is
    /// left, it stops after the states.
    pub(crate) fn channel_mix(
        &mut self,
        layer: usize,
        state_start: usize,
        w: &ChannelMixWeights<PreparedLinear>,
        tokens: &mut Vec<BatchToken>,
        may_drop_rows: bool,
    ) {
        let ChannelMixSpec { n_embd, width, gated: _ } = w.spec;
        let state = state_start..state_start + n_embd;
        self.shift(&TokenShift { layer, state, lerps: &w.lerps, previous: false, outputs_only: may_drop_rows }, tokens);
        if may_drop_rows {
            self.drop_rows_without_output(tokens);
        }
        let n_rows = tokens.len();
        self.observe_mixed([(&w.key, K)].into_iter().chain(w.receptance.iter().map(|linear| (linear, R))), n_rows);
        if n_rows == 0 {
            return;
        }
        let s = &mut *self.scratch;
        resize(&mut s.gate_or_hidden, n_rows * width);
        let rows = |mix: usize| mix * n_rows..(mix + 1) * n_rows;
        let mut products =
            vec![MatmulOp { matrix: &w.key.weight, rows: rows(K), y: &mut s.gate_or_hidden, accumulate: false }];
        if let Some(receptance) = &w.receptance {
            resize(&mut s.up, n_rows * n_embd);
            products.push(MatmulOp { matrix: &receptance.weight, rows: rows(R), y: &mut s.up, accumulate: false });
        }
        matmul(self.pool, self.isa, &s.rwkv.mixed, &mut s.q8, &mut products);
        self.record_time("matmul_gate_up");

        let s = &mut *self.scratch;
        let (isa, keys) = (self.isa, SharedMut::new(&mut s.gate_or_hidden));
        self.pool.for_each_if(n_rows * width >= MIN_PARALLEL_ELEMENTS, n_rows, &|row| {
            // SAFETY: each task owns its row.
            let gate = unsafe { keys.slice(row * width, width) };
            isa.run(Activate { activation: Activation::ReluSquared, gate, up: None });
        });
        self.record_time("ffn_activation");
        if w.receptance.is_some() {
            self.project(&w.value, ProductInput::Hidden, ProductOutput::ReplaceBranchOut);
            self.record_time("matmul_down");
            self.gate_channels(n_embd);
        }
    }

    /// `up = sigmoid(up) * branch_out`
    fn gate_channels(&mut self, n_embd: usize) {
        let s = &mut *self.scratch;
        let n_rows = s.x.len() / n_embd;
        let (isa, result, gate) = (self.isa, &s.branch_out, SharedMut::new(&mut s.up));
        self.pool.for_each_if(n_rows * n_embd >= MIN_PARALLEL_ELEMENTS, n_rows, &|row| {
            let at = row * n_embd;
            // SAFETY: each task owns its row.
            let gate = unsafe { gate.slice(at, n_embd) };
            isa.run(ApplyNonlinearity { x: &mut *gate, nonlinearity: Nonlinearity::Sigmoid });
            for (gate, result) in gate.iter_mut().zip(&result[at..][..n_embd]) {
                *gate *= result;
            }
        });
        self.record_time("ffn_activation");
    }
}
