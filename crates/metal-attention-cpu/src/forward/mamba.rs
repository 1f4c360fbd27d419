//! Mamba: the input's matrix, a convolution, what the tokens choose by, the state space of each channel, a gate.

use metal_attention_model::{BatchToken, MambaDecay, MambaSpec, MambaWeights, Segment};

use super::{MIN_ELEMENTS, MIN_STEPS, MicroBatchRun, ProductInput, resize};
use crate::kernels::elementwise::RmsNorm;
use crate::kernels::matmul::{MatmulOp, matmul};
use crate::kernels::recurrent::convolution::Convolution;
use crate::kernels::recurrent::gates::Softplus;
use crate::kernels::recurrent::head_output::{Gate, HeadOutput};
use crate::kernels::recurrent::mamba::Mamba;
use crate::kernels::recurrent::mamba2::Mamba2;
use crate::kernels::recurrent::{StridedRows, StridedRowsMut, run_tokens};
use crate::layers::PreparedLinear;
use crate::observer::MatrixInput;
use crate::pool::ThreadPool;
use crate::shared::SharedMut;
use crate::simd::Isa;
use crate::state::SharedStateSlots;

/// Channels of one task of the state space: those whose state stays in the L1 cache together.
const CHANNELS: usize = 64;

/// Activations of Mamba and Mamba-2.
#[derive(Default)]
pub(super) struct MambaScratch {
    /// What the input's matrix gives: `[n_tokens, 2 * width]`, or Mamba-2's `[n_tokens, input_width]`.
    pub(super) input: Vec<f32>,
    /// What comes of the convolution, `[n_tokens, width]`, or Mamba-2's `[n_tokens, conv_width]`.
    pub(super) conv: Vec<f32>,
    /// The heads' results before their norm, `[n_tokens, width]`.
    pub(super) y: Vec<f32>,
    /// The result that waits beside that of attention, `[n_tokens, width]`.
    pub(super) parallel_out: Vec<f32>,
    /// What the tokens choose by, `[n_tokens, dt_rank + 2 * d_state]`.
    chosen: Vec<f32>,
    /// Of these `dt` before it is expanded, `[n_tokens, dt_rank]`,
    low: Vec<f32>,
    /// and `B` and `C`, `[n_tokens, 2 * d_state]`.
    bc: Vec<f32>,
    /// `[n_tokens, n_dt]`
    dt: Vec<f32>,
}

impl MambaScratch {
    pub(super) fn bytes(&self) -> usize {
        let all = [&self.input, &self.conv, &self.y, &self.parallel_out, &self.chosen, &self.low, &self.bc, &self.dt];
        all.iter().map(|v| 4 * v.capacity()).sum()
    }
}

/// A convolution with SiLU over some channels of what a matrix gave, whose last inputs are the beginning of the layer's state.
pub(super) struct Convolved<'a> {
    /// Rows of `n_in`.
    pub(super) input: &'a [f32],
    pub(super) n_in: usize,
    /// Where in a row the first block of channels begins.
    pub(super) first: usize,
    /// From the beginning of one to that of the next.
    pub(super) step: usize,
    /// Channels of a block, which is a task.
    pub(super) block: usize,
    /// `[n_tap, width]`
    pub(super) taps: &'a [f32],
    /// `[width]`
    pub(super) bias: Option<&'a [f32]>,
    /// Channels of all blocks.
    pub(super) width: usize,
}

impl Convolved<'_> {
    /// Channels of a block where nothing else says how many: rows of a few cache lines.
    pub(super) const BLOCK: usize = 256;

    /// `out`: `[n_tokens, width]`.
    pub(super) fn run(
        &self,
        pool: &ThreadPool,
        isa: Isa,
        layer: usize,
        states: &SharedStateSlots<'_>,
        segments: &[Segment],
        out: &mut [f32],
    ) {
        let Self { input, n_in, first: first_block, step, block, taps, bias, width } = *self;
        let n_tap = taps.len() / width;
        let worth = out.len() >= MIN_ELEMENTS;
        let out = SharedMut::new(out);
        pool.for_each_if(worth, width.div_ceil(block), &|i| {
            let channels = i * block..width.min((i + 1) * block);
            let n_channel = channels.len();
            let mut first = 0;
            for segment in segments {
                let n = segment.n;
                // SAFETY: the task has these channels of all states and results for itself, and goes through the segments
                // in order.
                let (state, out) = unsafe {
                    let state = states.carry_over_rows(layer, segment, (0, n_tap - 1, width), &channels);
                    (state, StridedRowsMut::shared(&out, first * width + channels.start, n, n_channel, width))
                };
                isa.run(Convolution {
                    x: StridedRows::new(&input[first * n_in + first_block + i * step..], n, n_channel, n_in),
                    weights: StridedRows::new(&taps[channels.start..], n_tap, n_channel, width),
                    bias: bias.map(|bias| &bias[channels.clone()]),
                    silu: true,
                    state,
                    out,
                });
                first += n;
            }
        });
    }
}

impl MicroBatchRun<'_> {
    /// Mamba up to the row that the output matrix multiplies, `att`; the states of the tokens' sequences go on to what they
    /// are after them.
    pub(super) fn mamba(
        &mut self,
        layer: usize,
        m: &MambaSpec,
        w: &MambaWeights<PreparedLinear>,
        tokens: &[BatchToken],
    ) {
        let (n_tokens, width, isa) = (tokens.len(), m.width, self.isa);
        self.observe(&[&w.input], ProductInput::Normed);
        let s = &mut *self.scratch;
        let n_in = 2 * width;
        resize(&mut s.mamba.input, n_tokens * n_in);
        let y = &mut s.mamba.input;
        let mut products = [MatmulOp { matrix: &w.input.weight, rows: 0..n_tokens, y, accumulate: false }];
        matmul(self.pool, isa, &s.normed, &mut s.q8, &mut products);
        self.lap("matmul_ssm_in");

        let s = &mut *self.scratch;
        resize(&mut s.mamba.conv, n_tokens * width);
        let (first, step, block) = match m.decay {
            MambaDecay::Channels => (0, Convolved::BLOCK, Convolved::BLOCK),
            MambaDecay::Heads(n_head) => (width / n_head, 2 * (width / n_head), width / n_head),
        };
        let (input, taps, bias) = (&s.mamba.input, &w.taps, w.conv_bias.as_deref());
        let convolved = Convolved { input, n_in, first, step, block, taps, bias, width };
        convolved.run(self.pool, isa, layer, self.states, self.pages.segments(tokens), &mut s.mamba.conv);
        self.lap("ssm_conv");

        self.choose(m, w, n_tokens);
        resize(&mut self.scratch.mixer_out, n_tokens * width);
        match m.decay {
            MambaDecay::Channels => self.scan_channels(layer, m, w, tokens),
            MambaDecay::Heads(n_head) => self.scan_heads(layer, m, w, n_head, tokens),
        }
        self.lap("ssm_scan");
    }

    /// `dt`, without its bias, `B` and `C` of all tokens.
    fn choose(&mut self, m: &MambaSpec, w: &MambaWeights<PreparedLinear>, n_tokens: usize) {
        let (isa, at, rank, d_state) = (self.isa, m.selection(), m.dt_rank, m.d_state);
        let s = &mut *self.scratch;
        if let Some(observer) = &mut self.observer {
            observer(MatrixInput { matrix: &w.select.name, sub_matrix: None, x: &s.mamba.conv, n_in: m.width });
        }
        let c = &mut s.mamba;
        resize(&mut c.chosen, n_tokens * at.n);
        let y = &mut c.chosen;
        let mut products = [MatmulOp { matrix: &w.select.weight, rows: 0..n_tokens, y, accumulate: false }];
        matmul(self.pool, isa, &c.conv, &mut s.q8, &mut products);
        resize(&mut c.low, n_tokens * rank);
        resize(&mut c.bc, n_tokens * 2 * d_state);
        let rows =
            c.chosen.chunks_exact(at.n).zip(c.low.chunks_exact_mut(rank)).zip(c.bc.chunks_exact_mut(2 * d_state));
        for ((chosen, dt), bc) in rows {
            let (b, c) = bc.split_at_mut(d_state);
            let parts = [(at.dt, dt), (at.b, b), (at.c, c)];
            for (i, (start, out)) in parts.into_iter().enumerate() {
                let x = &chosen[start..start + out.len()];
                match (&m.norms, &w.norms) {
                    (Some(norms), Some(weights)) => {
                        isa.run(RmsNorm { x, weight: &weights[i], eps: norms.eps, out });
                    }
                    (None, _) | (_, None) => out.copy_from_slice(x),
                }
            }
        }
        self.lap("matmul_ssm_x");
        let s = &mut *self.scratch;
        if let Some(observer) = &mut self.observer {
            observer(MatrixInput { matrix: &w.dt.name, sub_matrix: None, x: &s.mamba.low, n_in: rank });
        }
        resize(&mut s.mamba.dt, n_tokens * m.n_dt());
        let y = &mut s.mamba.dt;
        let mut products = [MatmulOp { matrix: &w.dt.weight, rows: 0..n_tokens, y, accumulate: false }];
        matmul(self.pool, isa, &s.mamba.low, &mut s.q8, &mut products);
        self.lap("matmul_ssm_dt");
    }

    /// The state space where each channel decays by itself, and the gate.
    fn scan_channels(&mut self, layer: usize, m: &MambaSpec, w: &MambaWeights<PreparedLinear>, tokens: &[BatchToken]) {
        let (width, d_state) = (m.width, m.d_state);
        let (isa, states, segments) = (self.isa, self.states, self.pages.segments(tokens));
        let s = &mut *self.scratch;
        let (input, conv, bc) = (&s.mamba.input, &s.mamba.conv, &s.mamba.bc);
        let (dt, out) = (SharedMut::new(&mut s.mamba.dt), SharedMut::new(&mut s.mixer_out));
        let dt_bias = w.dt.bias.as_deref().expect("a bias that files must have");
        let worth = tokens.len() * width * d_state >= MIN_STEPS;
        self.pool.for_each_if(worth, width.div_ceil(CHANNELS), &|i| {
            let channels = i * CHANNELS..width.min((i + 1) * CHANNELS);
            let (at, n_channel) = (channels.start, channels.len());
            let mut first = 0;
            for segment in segments {
                let n = segment.n;
                for t in first..first + n {
                    // SAFETY: the task has these channels for itself.
                    let x = unsafe { dt.slice(t * width + at, n_channel) };
                    isa.run(Softplus { x, bias: &dt_bias[channels.clone()] });
                }
                // SAFETY: the task has these channels of all states and results for itself, and goes through the segments
                // in order.
                let (dt, state, rows) = unsafe {
                    let rows = ((m.n_tap - 1) * width, d_state, width);
                    (
                        StridedRows::shared(&dt, first * width + at, n, n_channel, width),
                        states.carry_over_rows(layer, segment, rows, &channels),
                        StridedRowsMut::shared(&out, first * width + at, n, n_channel, width),
                    )
                };
                let bc = &bc[first * 2 * d_state..];
                isa.run(Mamba {
                    x: StridedRows::new(&conv[first * width + at..], n, n_channel, width),
                    dt,
                    b: StridedRows::new(bc, n, d_state, 2 * d_state),
                    c: StridedRows::new(&bc[d_state..], n, d_state, 2 * d_state),
                    a: StridedRows::new(&w.a[at..], d_state, n_channel, width),
                    d: &w.d[channels.clone()],
                    state,
                    out: rows,
                });
                for t in first..first + n {
                    // SAFETY: as above; the kernel is done.
                    let out = unsafe { out.slice(t * width + at, n_channel) };
                    let gate = &input[(2 * t + 1) * width + at..][..n_channel];
                    isa.run(HeadOutput { out, norm: None, bonus: None, gate: Some((Gate::Silu, gate)) });
                }
                first += n;
            }
        });
    }

    /// The state space where each head has one decay, and the gate.
    fn scan_heads(
        &mut self,
        layer: usize,
        m: &MambaSpec,
        w: &MambaWeights<PreparedLinear>,
        n_head: usize,
        tokens: &[BatchToken],
    ) {
        let (width, d_state) = (m.width, m.d_state);
        let (isa, states, segments) = (self.isa, self.states, self.pages.segments(tokens));
        let s = &mut *self.scratch;
        let dt_bias = w.dt.bias.as_deref().expect("a bias that files must have");
        for x in s.mamba.dt.chunks_exact_mut(n_head) {
            isa.run(Softplus { x, bias: dt_bias });
        }
        let (input, conv, bc, dt) = (&s.mamba.input, &s.mamba.conv, &s.mamba.bc, &s.mamba.dt);
        let out = SharedMut::new(&mut s.mixer_out);
        let head_dim = width / n_head;
        let of_head = d_state * head_dim;
        self.pool.for_each_if(tokens.len() * width * d_state >= MIN_STEPS, n_head, &|h| {
            let start = (m.n_tap - 1) * width + h * of_head;
            let mut first = 0;
            for segment in segments {
                let n = segment.n;
                // SAFETY: the task has this head of all states and results for itself, and goes through the segments in
                // order.
                let ((before, state), rows) = unsafe {
                    let state = states.source_and_target(layer, segment, start..start + of_head);
                    (state, StridedRowsMut::shared(&out, first * width + h * head_dim, n, head_dim, width))
                };
                let bc = &bc[first * 2 * d_state..];
                let head = Mamba2 {
                    x: StridedRows::new(&conv[first * width + h * head_dim..], n, head_dim, width),
                    dt: StridedRows::new(&dt[first * n_head + h..], n, 1, n_head),
                    b: StridedRows::new(bc, n, d_state, 2 * d_state),
                    c: StridedRows::new(&bc[d_state..], n, d_state, 2 * d_state),
                    a: w.a[h],
                    d: w.d[h],
                    before: before.map(|before| StridedRows::new(before, d_state, head_dim, head_dim)),
                    state: StridedRowsMut::new(state, d_state, head_dim, head_dim),
                    out: rows,
                };
                run_tokens(isa, &head);
                for t in first..first + n {
                    // SAFETY: as above; the head is done.
                    let out = unsafe { out.slice(t * width + h * head_dim, head_dim) };
                    let gate = &input[2 * (t * width + h * head_dim)..][..head_dim];
                    isa.run(HeadOutput { out, norm: None, bonus: None, gate: Some((Gate::Silu, gate)) });
                }
                first += n;
            }
        });
    }
}
