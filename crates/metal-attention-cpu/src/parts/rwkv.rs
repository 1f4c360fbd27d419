//! RWKV's time mixes (`rwkv6.rs`, `rwkv7.rs`) and channel mix. Here is what they share, first of all the token shift: inputs that are interpolated between a token's and that of the token before it in its sequence. The
//! input of the sequence's last token is a recurrent state. Also the buffers and helpers that the time mixes of RWKV-6 and
//! RWKV-7 share.
//!
//! A *mix* is one interpolated input: of keys, values, receptances, ...; each has its own interpolation factors (lerps).

mod channel_mix;
mod rwkv6;
mod rwkv7;

use std::ops::Range;

use metal_attention_model::{BatchToken, LowRankWeights};

use crate::forward::{MIN_PARALLEL_ELEMENTS, MicroBatchRun, resize};
use crate::kernels::matmul::{MatmulOp, matmul};
use crate::kernels::recurrent::time_mix::{ApplyNonlinearity, Nonlinearity, TokenLerp};
use crate::layers::PreparedLinear;
use crate::observer::MatrixInput;
use crate::pool::ThreadPool;
use crate::shared::SharedMut;
use crate::simd::Isa;

/// Channels of one task: a row of them is a few cache lines long.
const CHANNELS: usize = 256;

/// Elements of one task of [`apply_nonlinearity`].
const NONLINEARITY_CHUNK: usize = 1024;

/// Buffers of RWKV's time mix and channel mix.
#[derive(Default)]
pub(crate) struct RwkvScratch {
    /// The shifted inputs, `[n_mix, n_rows, width]`.
    pub(crate) mixed: Vec<f32>,
    /// The input of the token before each token, `[n_tokens, width]` (RWKV-6 only).
    pub(crate) previous: Vec<f32>,
    /// The results of the low-rank down projections, `[n_tokens, rank]` each.
    pub(crate) small: [Vec<f32>; 4],
    /// The results of the low-rank up projections and RWKV-6's gate, `[n_tokens, width]` each; RWKV-6's factors of the token
    /// shift, `[5, n_tokens, width]`.
    pub(crate) large: [Vec<f32>; 4],
    /// Keys with elements for each query head: of gated linear attention, or RWKV-7's removal keys, `[n_tokens, width]`.
    pub(crate) keys: Vec<f32>,
    /// The first layer's values, which all layers read, `[n_tokens, width]` (RWKV-7 only).
    pub(crate) first_value: Vec<f32>,
}

impl RwkvScratch {
    /// Bytes of all buffers.
    pub(crate) fn bytes(&self) -> usize {
        let own = [&self.mixed, &self.previous, &self.keys, &self.first_value];
        let all = own.into_iter().chain(&self.small).chain(&self.large);
        all.map(|v| 4 * v.capacity()).sum()
    }
}

/// The parameters of one token shift.
pub(crate) struct TokenShift<'a> {
    /// The layer's index.
    pub(crate) layer: usize,
    /// The elements of the layer's state that contain the last token's input.
    pub(crate) state: Range<usize>,
    /// The factors of the previous token's input, `[n_mix, width]`: 0 is the token's own input, 1 that of the token before.
    pub(crate) lerps: &'a [f32],
    /// Whether `rwkv.previous` gets the inputs of the tokens before.
    pub(crate) previous: bool,
    /// Whether `rwkv.mixed` has rows for the output tokens only.
    pub(crate) outputs_only: bool,
}

impl MicroBatchRun<'_> {
    /// Computes the shifted inputs of `normed`, `[n_tokens, width]`, to `rwkv.mixed`, `[n_mix, n_rows, width]`, and stores the
    /// input of each sequence's last token as its state.
    pub(crate) fn shift(&mut self, of: &TokenShift<'_>, tokens: &[BatchToken]) {
        let width = of.state.len();
        let n_mix = of.lerps.len() / width;
        let has_row = |token: &BatchToken| token.output || !of.outputs_only;
        let n_rows = tokens.iter().filter(|token| has_row(token)).count();
        let s = &mut *self.scratch;
        resize(&mut s.rwkv.mixed, n_mix * n_rows * width);
        resize(&mut s.rwkv.previous, if of.previous { tokens.len() * width } else { 0 });
        let (h, mixed, kept) = (&s.normed, SharedMut::new(&mut s.rwkv.mixed), SharedMut::new(&mut s.rwkv.previous));
        let (isa, states, segments) = (self.isa, self.states, self.pages.segments(tokens));
        self.pool.for_each_if(n_mix * h.len() >= MIN_PARALLEL_ELEMENTS, width.div_ceil(CHANNELS), &|task| {
            let first = task * CHANNELS;
            let n = CHANNELS.min(width - first);
            let x = |token: usize| &h[token * width + first..][..n];
            let (mut token, mut row) = (0, 0);
            for segment in segments {
                let part = of.state.start + first..of.state.start + first + n;
                // SAFETY: only this task accesses these channels of the states, and the segments come in order.
                let state = unsafe { states.carry_over(of.layer, segment, part) };
                let end = token + segment.n;
                for (i, token) in (token..end).enumerate() {
                    let previous = if i == 0 { &*state } else { x(token - 1) };
                    if of.previous {
                        // SAFETY: the same holds for these channels of the results.
                        unsafe { kept.slice(token * width + first, n) }.copy_from_slice(previous);
                    }
                    if !has_row(&tokens[token]) {
                        continue;
                    }
                    for (m, lerp) in of.lerps.chunks_exact(width).enumerate() {
                        // SAFETY: as above.
                        let out = unsafe { mixed.slice((m * n_rows + row) * width + first, n) };
                        isa.run(TokenLerp { x: x(token), previous, lerp: &lerp[first..first + n], more: None, out });
                    }
                    row += 1;
                }
                token = end;
                if segment.n > 0 {
                    state.copy_from_slice(x(token - 1));
                }
            }
        });
        self.record_time("token_shift");
    }

    /// The low-rank up projections, `large[i] = up small[i]`; entries of `of` that are `None` are skipped.
    pub(crate) fn expand(&mut self, of: &[Option<&LowRankWeights<PreparedLinear>>], n_tokens: usize) {
        for (i, low_rank) in of.iter().enumerate() {
            let Some(LowRankWeights { up, .. }) = low_rank else { continue };
            if let Some(observer) = &mut self.observer {
                let (x, n_in) = (&self.scratch.rwkv.small[i], up.weight.n_in());
                observer(MatrixInput { matrix: &up.name, sub_matrix: None, x, n_in });
            }
            let s = &mut *self.scratch;
            let y = &mut s.rwkv.large[i];
            resize(y, n_tokens * up.weight.n_out());
            let mut products = [MatmulOp { matrix: &up.weight, rows: 0..n_tokens, y, accumulate: false }];
            matmul(self.pool, self.isa, &s.rwkv.small[i], &mut s.q8, &mut products);
        }
        self.record_time("matmul_low_rank");
    }

    /// Passes to the observer the inputs of `linears`, each with the index of its mix in `mixed`, `[n_mix, n_rows, n_in]`.
    pub(crate) fn observe_mixed<'a>(
        &mut self,
        linears: impl IntoIterator<Item = (&'a PreparedLinear, usize)>,
        n_rows: usize,
    ) {
        let Some(observer) = &mut self.observer else { return };
        for (linear, mix) in linears {
            let n_in = linear.weight.n_in();
            let x = &self.scratch.rwkv.mixed[mix * n_rows * n_in..][..n_rows * n_in];
            observer(MatrixInput { matrix: &linear.name, sub_matrix: None, x, n_in });
        }
    }
}

/// `x[i] = nonlinearity(x[i])`
pub(crate) fn apply_nonlinearity(pool: &ThreadPool, isa: Isa, x: &mut [f32], nonlinearity: Nonlinearity) {
    let n = x.len();
    let x = SharedMut::new(x);
    pool.for_each_if(n >= MIN_PARALLEL_ELEMENTS, n.div_ceil(NONLINEARITY_CHUNK), &|i| {
        // SAFETY: each task owns its elements.
        let x = unsafe { x.slice(i * NONLINEARITY_CHUNK, NONLINEARITY_CHUNK.min(n - i * NONLINEARITY_CHUNK)) };
        isa.run(ApplyNonlinearity { x, nonlinearity });
    });
}
