//! Mamba-2: from `normed` to `mixer_out`, `[n_tokens, width]`.
//!
//! The input projection gives each token's gate `z`, the channels `x`, `B` and `C` of the convolution, and `dt` of each head,
//! in this order. After the convolution each head runs its state-space recurrence and is gated; some models then apply a norm
//! to each group of heads.

use metal_attention_model::{BatchToken, Mamba2Spec, Mamba2Weights};

use super::mamba::Convolved;
use super::{MIN_PARALLEL_ELEMENTS, MIN_PARALLEL_STATE_ELEMENTS, MicroBatchRun, ProductInput, resize};
use crate::kernels::elementwise::RmsNorm;
use crate::kernels::matmul::{MatmulOp, matmul};
use crate::kernels::recurrent::gates::Softplus;
use crate::kernels::recurrent::head_output::{Gate, HeadOutput};
use crate::kernels::recurrent::mamba2::Mamba2;
use crate::kernels::recurrent::{StridedRows, StridedRowsMut, run_tokens};
use crate::layers::PreparedLinear;
use crate::shared::SharedMut;

impl MicroBatchRun<'_> {
    /// The mixer from `normed` up to `mixer_out`, `[n_tokens, width]`. Updates the states of the tokens' sequences.
    pub(super) fn mamba2(&mut self, layer: usize, w: &Mamba2Weights<PreparedLinear>, tokens: &[BatchToken]) {
        let (m, n_tokens, isa) = (&w.spec, tokens.len(), self.isa);
        let (width, n_conv, n_in) = (m.width(), m.conv_width(), m.input_width());
        let Mamba2Spec { n_head, head_dim, d_state, n_group, n_tap, conv_bias: _, norm } = *m;
        self.observe(&[&w.input], ProductInput::Normed);
        let s = &mut *self.scratch;
        resize(&mut s.mamba.input, n_tokens * n_in);
        let y = &mut s.mamba.input;
        let mut products = [MatmulOp { matrix: &w.input.weight, rows: 0..n_tokens, y, accumulate: false }];
        matmul(self.pool, isa, &s.normed, &mut s.q8, &mut products);
        self.record_time("matmul_ssm_in");

        let s = &mut *self.scratch;
        let input = SharedMut::new(&mut s.mamba.input);
        self.pool.for_each_if(n_tokens * n_head >= MIN_PARALLEL_ELEMENTS, n_tokens, &|t| {
            // SAFETY: each token owns its row.
            let dt = unsafe { input.slice(t * n_in + n_in - n_head, n_head) };
            isa.run(Softplus { x: dt, bias: &w.dt_bias });
        });
        let segments = self.pages.segments(tokens);
        resize(&mut s.mamba.conv, n_tokens * n_conv);
        let convolved = Convolved {
            input: &s.mamba.input,
            n_in,
            first: width,
            step: Convolved::BLOCK,
            block: Convolved::BLOCK,
            taps: &w.taps,
            bias: w.conv_bias.as_deref(),
            width: n_conv,
        };
        convolved.run(self.pool, isa, layer, self.states, segments, &mut s.mamba.conv);
        self.record_time("ssm_conv");

        let s = &mut *self.scratch;
        resize(&mut s.mixer_out, n_tokens * width);
        let y = if norm.is_some() { &mut s.mamba.y } else { &mut s.mixer_out };
        resize(y, n_tokens * width);
        let (input, conv, y, states) = (&s.mamba.input, &s.mamba.conv, SharedMut::new(y), self.states);
        let of_head = d_state * head_dim;
        self.pool.for_each_if(n_tokens * width * d_state >= MIN_PARALLEL_STATE_ELEMENTS, n_head, &|h| {
            let group = h / (n_head / n_group);
            let start = (n_tap - 1) * n_conv + h * of_head;
            let mut first = 0;
            for segment in segments {
                let n = segment.n;
                let (conv, input) = (&conv[first * n_conv..], &input[first * n_in..]);
                // SAFETY: only this task accesses this head of the states and results, and the segments come in
                // order.
                let ((before, state), out) = unsafe {
                    let state = states.source_and_target(layer, segment, start..start + of_head);
                    (state, StridedRowsMut::shared(&y, first * width + h * head_dim, n, head_dim, width))
                };
                let head = Mamba2 {
                    x: StridedRows::new(&conv[h * head_dim..], n, head_dim, n_conv),
                    dt: StridedRows::new(&input[n_in - n_head + h..], n, 1, n_in),
                    b: StridedRows::new(&conv[width + group * d_state..], n, d_state, n_conv),
                    c: StridedRows::new(&conv[width + (n_group + group) * d_state..], n, d_state, n_conv),
                    a: w.a[h],
                    d: w.d[h],
                    before: before.map(|before| StridedRows::new(before, d_state, head_dim, head_dim)),
                    state: StridedRowsMut::new(state, d_state, head_dim, head_dim),
                    out,
                };
                run_tokens(isa, &head);
                for t in 0..n {
                    // SAFETY: as above; the kernel has returned.
                    let out = unsafe { y.slice((first + t) * width + h * head_dim, head_dim) };
                    let gate = &input[t * n_in + h * head_dim..][..head_dim];
                    isa.run(HeadOutput { out, norm: None, bonus: None, gate: Some((Gate::Silu, gate)) });
                }
                first += n;
            }
        });
        self.record_time("ssm_scan");

        if let (Some(eps), Some(weight)) = (norm, &w.norm) {
            let s = &mut *self.scratch;
            let (y, att) = (&s.mamba.y, SharedMut::new(&mut s.mixer_out));
            let n = width / n_group;
            self.pool.for_each_if(n_tokens * width >= MIN_PARALLEL_ELEMENTS, n_tokens, &|t| {
                for (group, weight) in weight.chunks_exact(n).enumerate() {
                    let at = t * width + group * n;
                    // SAFETY: each token owns its row.
                    let out = unsafe { att.slice(at, n) };
                    isa.run(RmsNorm { x: &y[at..][..n], weight, eps, out });
                }
            });
            self.record_time("ssm_norm");
        }
    }
}
