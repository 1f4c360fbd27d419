//! The gated short convolution of LFM2: from `normed` to `mixer_out`, `[n_tokens, width]`.
//!
//! The input projection gives `b`, `c` and `x` of each token; the result is `c * conv(b * x)`. The last `n_tap - 1` products
//! `b * x` of a sequence are its recurrent state.

use metal_attention_model::{BatchToken, ShortConvSpec, ShortConvWeights};

use crate::forward::{MIN_PARALLEL_ELEMENTS, MicroBatchRun, ProductInput, add_bias, resize};
use crate::kernels::matmul::{MatmulOp, matmul};
use crate::kernels::recurrent::StridedRowsMut;
use crate::kernels::recurrent::short_conv::ShortConv;
use crate::layers::PreparedLinear;
use crate::shared::SharedMut;

/// Channels of one task: a row of them is a few cache lines long.
const CHANNELS: usize = 256;

impl MicroBatchRun<'_> {
    /// The input projection, both gates and the convolution of all tokens. Updates the states of their sequences.
    pub(crate) fn short_conv(&mut self, layer: usize, w: &ShortConvWeights<PreparedLinear>, tokens: &[BatchToken]) {
        let ShortConvSpec { width, n_tap } = w.spec;
        self.observe(&[&w.input], ProductInput::Normed);
        let s = &mut *self.scratch;
        resize(&mut s.q, tokens.len() * 3 * width);
        let rows = 0..tokens.len();
        let mut products = [MatmulOp { matrix: &w.input.weight, rows, y: &mut s.q, accumulate: false }];
        matmul(self.pool, self.isa, &s.normed, &mut s.q8, &mut products);
        for row in s.q.chunks_exact_mut(3 * width) {
            add_bias(row, &w.input);
        }
        self.record_time("matmul_short_conv");

        let s = &mut *self.scratch;
        resize(&mut s.mixer_out, tokens.len() * width);
        let (inputs, out) = (&s.q, SharedMut::new(&mut s.mixer_out));
        let (isa, states, segments) = (self.isa, self.states, self.pages.segments(tokens));
        let n_tasks = width.div_ceil(CHANNELS);
        self.pool.for_each_if(tokens.len() * width >= MIN_PARALLEL_ELEMENTS, n_tasks, &|i| {
            let channels = i * CHANNELS..width.min((i + 1) * CHANNELS);
            let mut first = 0;
            for segment in segments {
                let inputs = &inputs[first * 3 * width..][..segment.n * 3 * width];
                // SAFETY: only this task accesses these channels of the states and results, and the segments come
                // in order; the rows of results of this segment lie in the buffer.
                let (state, out) = unsafe {
                    let state = states.carry_over_rows(layer, segment, (0, n_tap - 1, width), &channels);
                    (
                        state,
                        StridedRowsMut::shared(&out, first * width + channels.start, segment.n, channels.len(), width),
                    )
                };
                isa.run(ShortConv { inputs, taps: &w.taps, state, out, width, first: channels.start });
                first += segment.n;
            }
        });
        self.record_time("short_conv");
    }
}
