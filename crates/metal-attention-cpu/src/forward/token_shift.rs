//! RWKV's token shift: inputs between a token's and that of the token before, the last of which is a recurrent state; and
//! what the time mixes of its versions have in common.

use std::ops::Range;

use metal_attention_model::{BatchToken, LowRankWeights};

use super::{MIN_ELEMENTS, MicroBatchRun, resize};
use crate::kernels::matmul::{MatmulOp, matmul};
use crate::kernels::recurrent::time_mix::{ApplyNonlinearity, Nonlinearity, TokenLerp};
use crate::layers::PreparedLinear;
use crate::observer::MatrixInput;
use crate::pool::ThreadPool;
use crate::shared::SharedMut;
use crate::simd::Isa;

/// Channels of one task: rows of a few cache lines.
const CHANNELS: usize = 256;

/// Elements of one task where a function is computed of each.
const NONLINEARITY_CHUNK: usize = 1024;

/// Activations of RWKV's mixes.
#[derive(Default)]
pub(super) struct RwkvScratch {
    /// Inputs between each token's and that of the one before, of each mix those of all tokens, `[n_mix, n_rows, width]`.
    pub(super) mixed: Vec<f32>,
    /// The inputs of the tokens before, `[n_tokens, width]` (RWKV-6).
    pub(super) previous: Vec<f32>,
    /// What small matrices give, `[n_tokens, rank]` each.
    pub(super) small: [Vec<f32>; 4],
    /// What comes of that, `[n_tokens, width]` each.
    pub(super) large: [Vec<f32>; 4],
    /// Keys that a head has for itself, `[n_tokens, width]`.
    pub(super) keys: Vec<f32>,
    /// The first layer's values, `[n_tokens, width]` (RWKV-7).
    pub(super) first_value: Vec<f32>,
}

impl RwkvScratch {
    pub(super) fn bytes(&self) -> usize {
        let own = [&self.mixed, &self.previous, &self.keys, &self.first_value];
        let all = own.into_iter().chain(&self.small).chain(&self.large);
        all.map(|v| 4 * v.capacity()).sum()
    }
}

/// Where a token shift finds its state and what it leaves.
pub(super) struct TokenShift<'a> {
    pub(super) layer: usize,
    /// The last token's input in the layer's state.
    pub(super) state: Range<usize>,
    /// How far each of its results goes towards the token before, `[n_mix, width]`.
    pub(super) lerps: &'a [f32],
    /// Whether the inputs of the tokens before are kept, too.
    pub(super) previous: bool,
    /// Whether only the tokens that are wanted get results.
    pub(super) wanted_only: bool,
}

impl MicroBatchRun<'_> {
    /// `mixed`, of the normalised state `h`; the states go on to the inputs of the last tokens.
    pub(super) fn shift(&mut self, of: &TokenShift<'_>, tokens: &[BatchToken]) {
        let width = of.state.len();
        let n_mix = of.lerps.len() / width;
        let has_row = |token: &BatchToken| token.logits || !of.wanted_only;
        let n_rows = tokens.iter().filter(|token| has_row(token)).count();
        let s = &mut *self.scratch;
        resize(&mut s.rwkv.mixed, n_mix * n_rows * width);
        resize(&mut s.rwkv.previous, if of.previous { tokens.len() * width } else { 0 });
        let (h, mixed, kept) = (&s.normed, SharedMut::new(&mut s.rwkv.mixed), SharedMut::new(&mut s.rwkv.previous));
        let (isa, states, segments) = (self.isa, self.states, self.pages.segments(tokens));
        self.pool.for_each_if(n_mix * h.len() >= MIN_ELEMENTS, width.div_ceil(CHANNELS), &|task| {
            let first = task * CHANNELS;
            let n = CHANNELS.min(width - first);
            let x = |token: usize| &h[token * width + first..][..n];
            let (mut token, mut row) = (0, 0);
            for segment in segments {
                let part = of.state.start + first..of.state.start + first + n;
                // SAFETY: the task has these channels of all states for itself, and goes through the segments in order.
                let state = unsafe { states.carry_over(of.layer, segment, part) };
                let end = token + segment.n;
                for (i, token) in (token..end).enumerate() {
                    let previous = if i == 0 { &*state } else { x(token - 1) };
                    if of.previous {
                        // SAFETY: and these channels of all results.
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
        self.lap("token_shift");
    }

    /// `large[i] = up small[i]` of every pair of matrices that there is.
    pub(super) fn expand(&mut self, of: &[Option<&LowRankWeights<PreparedLinear>>], n_tokens: usize) {
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
        self.lap("matmul_low_rank");
    }

    /// Shows the observer that the matrices are multiplied by these rows of `mixed`.
    pub(super) fn observe_mixed<'a>(
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

/// `x[i] = apply_nonlinearity(x[i])`
pub(super) fn apply_nonlinearity(pool: &ThreadPool, isa: Isa, x: &mut [f32], nonlinearity: Nonlinearity) {
    let n = x.len();
    let x = SharedMut::new(x);
    pool.for_each_if(n >= MIN_ELEMENTS, n.div_ceil(NONLINEARITY_CHUNK), &|i| {
        // SAFETY: each task has its elements for itself.
        let x = unsafe { x.slice(i * NONLINEARITY_CHUNK, NONLINEARITY_CHUNK.min(n - i * NONLINEARITY_CHUNK)) };
        isa.run(ApplyNonlinearity { x, nonlinearity });
    });
}
