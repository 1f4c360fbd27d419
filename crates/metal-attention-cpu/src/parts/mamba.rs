//! Mamba and Mamba-2: from `normed` to `mixer_out`, `[n_tokens, width]`.
//!
//! Mamba: the steps are the input projection (`x` and the gate `z`), a causal convolution of `x`, the projections that give
//! each token's `dt`, `B` and `C`, the selective scan, and the gate. `PLaMo` 2 has one decay per head instead of one per
//! channel.
//!
//! Mamba-2: the input projection gives each token's gate `z`, the channels `x`, `B` and `C` of the convolution, and `dt` of
//! each head, in this order. After the convolution each head runs its state-space recurrence and is gated; some models then
//! apply a norm to each group of heads.

use metal_attention_model::{BatchToken, Mamba2Spec, Mamba2Weights, MambaDecay, MambaWeights, Segment};

use crate::forward::{MIN_PARALLEL_ELEMENTS, MIN_PARALLEL_STATE_ELEMENTS, MicroBatchRun, ProductInput, resize};
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

/// Channels of one task of the selective scan: their states fit the L1 cache together.
const CHANNELS: usize = 64;

/// Buffers of Mamba and Mamba-2.
#[derive(Default)]
pub(crate) struct MambaScratch {
    /// The input projection: `[n_tokens, 2 * width]`, of Mamba-2 `[n_tokens, input_width]`.
    pub(crate) input: Vec<f32>,
    /// The result of the convolution: `[n_tokens, width]`, of Mamba-2 `[n_tokens, conv_width]`.
    pub(crate) conv: Vec<f32>,
    /// Mamba-2's result before its norm, `[n_tokens, width]`.
    pub(crate) y: Vec<f32>,
    /// The result of Mamba-2 in parallel with attention, kept while attention fills `mixer_out`, `[n_tokens, width]`.
    pub(crate) parallel_out: Vec<f32>,
    /// The projection of `conv` that contains low-rank `dt`, `B` and `C`, `[n_tokens, dt_rank + 2 * d_state]`.
    selection: Vec<f32>,
    /// Low-rank `dt` after its norm, `[n_tokens, dt_rank]`.
    low: Vec<f32>,
    /// `B` and `C` after their norms, `[n_tokens, 2 * d_state]`.
    bc: Vec<f32>,
    /// `dt` of each channel or head, `[n_tokens, n_dt]`.
    dt: Vec<f32>,
}

impl MambaScratch {
    /// Bytes of all buffers.
    pub(crate) fn bytes(&self) -> usize {
        let all =
            [&self.input, &self.conv, &self.y, &self.parallel_out, &self.selection, &self.low, &self.bc, &self.dt];
        all.iter().map(|v| 4 * v.capacity()).sum()
    }
}

/// The causal convolution with SiLU of some columns of a projection. The columns are divided into blocks, each a task. The
/// last `n_tap - 1` inputs of a sequence are the beginning of the layer's state.
pub(crate) struct Convolved<'a> {
    /// The projection, `[n_tokens, n_in]`.
    pub(crate) input: &'a [f32],
    /// Columns of `input`.
    pub(crate) n_in: usize,
    /// The first column of the first block in `input`.
    pub(crate) first: usize,
    /// Columns from the beginning of one block to that of the next.
    pub(crate) step: usize,
    /// Channels of a block.
    pub(crate) block: usize,
    /// Weights of the convolution, `[n_tap, width]`, the oldest token's first.
    pub(crate) taps: &'a [f32],
    /// Bias, `[width]`.
    pub(crate) bias: Option<&'a [f32]>,
    /// Channels of all blocks together.
    pub(crate) width: usize,
}

impl Convolved<'_> {
    /// The block size where the layout prescribes none: a row is a few cache lines long.
    pub(crate) const BLOCK: usize = 256;

    /// Computes the convolution of the tokens of `segments` to `out`, `[n_tokens, width]`, and updates the state of `layer`.
    pub(crate) fn run(
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
        let worth = out.len() >= MIN_PARALLEL_ELEMENTS;
        let out = SharedMut::new(out);
        pool.for_each_if(worth, width.div_ceil(block), &|i| {
            let channels = i * block..width.min((i + 1) * block);
            let n_channel = channels.len();
            let mut first = 0;
            for segment in segments {
                let n = segment.n;
                // SAFETY: only this task accesses these channels of the states and results, and the segments come
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
    /// The mixer from `normed` up to `mixer_out`, `[n_tokens, width]`. Updates the states of the tokens' sequences.
    pub(crate) fn mamba(&mut self, layer: usize, w: &MambaWeights<PreparedLinear>, tokens: &[BatchToken]) {
        let m = &w.spec;
        let (n_tokens, width, isa) = (tokens.len(), m.width, self.isa);
        self.observe(&[&w.input], ProductInput::Normed);
        let s = &mut *self.scratch;
        let n_in = 2 * width;
        resize(&mut s.mamba.input, n_tokens * n_in);
        let y = &mut s.mamba.input;
        let mut products = [MatmulOp { matrix: &w.input.weight, rows: 0..n_tokens, y, accumulate: false }];
        matmul(self.pool, isa, &s.normed, &mut s.q8, &mut products);
        self.record_time("matmul_ssm_in");

        let s = &mut *self.scratch;
        resize(&mut s.mamba.conv, n_tokens * width);
        let (first, step, block) = match m.decay {
            MambaDecay::Channels => (0, Convolved::BLOCK, Convolved::BLOCK),
            MambaDecay::Heads(n_head) => (width / n_head, 2 * (width / n_head), width / n_head),
        };
        let (input, taps, bias) = (&s.mamba.input, &w.taps, w.conv_bias.as_deref());
        let convolved = Convolved { input, n_in, first, step, block, taps, bias, width };
        convolved.run(self.pool, isa, layer, self.states, self.pages.segments(tokens), &mut s.mamba.conv);
        self.record_time("ssm_conv");

        self.select(w, n_tokens);
        resize(&mut self.scratch.mixer_out, n_tokens * width);
        match m.decay {
            MambaDecay::Channels => self.scan_channels(layer, w, tokens),
            MambaDecay::Heads(n_head) => self.scan_heads(layer, w, n_head, tokens),
        }
        self.record_time("ssm_scan");
    }

    /// Computes `dt` (without its bias), `B` and `C` of all tokens from `mamba.conv`.
    fn select(&mut self, w: &MambaWeights<PreparedLinear>, n_tokens: usize) {
        let m = &w.spec;
        let (isa, at, rank, d_state) = (self.isa, m.selection(), m.dt_rank, m.d_state);
        let s = &mut *self.scratch;
        if let Some(observer) = &mut self.observer {
            observer(MatrixInput { matrix: &w.select.name, sub_matrix: None, x: &s.mamba.conv, n_in: m.width });
        }
        let c = &mut s.mamba;
        resize(&mut c.selection, n_tokens * at.n);
        let y = &mut c.selection;
        let mut products = [MatmulOp { matrix: &w.select.weight, rows: 0..n_tokens, y, accumulate: false }];
        matmul(self.pool, isa, &c.conv, &mut s.q8, &mut products);
        resize(&mut c.low, n_tokens * rank);
        resize(&mut c.bc, n_tokens * 2 * d_state);
        let rows =
            c.selection.chunks_exact(at.n).zip(c.low.chunks_exact_mut(rank)).zip(c.bc.chunks_exact_mut(2 * d_state));
        for ((selection, dt), bc) in rows {
            let (b, c) = bc.split_at_mut(d_state);
            let parts = [(at.dt, dt), (at.b, b), (at.c, c)];
            for (i, (start, out)) in parts.into_iter().enumerate() {
                let x = &selection[start..start + out.len()];
                match (&m.norms, &w.norms) {
                    (Some(norms), Some(weights)) => {
                        isa.run(RmsNorm { x, weight: &weights[i], eps: norms.eps, out });
                    }
                    (None, _) | (_, None) => out.copy_from_slice(x),
                }
            }
        }
        self.record_time("matmul_ssm_x");
        let s = &mut *self.scratch;
        if let Some(observer) = &mut self.observer {
            observer(MatrixInput { matrix: &w.dt.name, sub_matrix: None, x: &s.mamba.low, n_in: rank });
        }
        resize(&mut s.mamba.dt, n_tokens * m.n_dt());
        let y = &mut s.mamba.dt;
        let mut products = [MatmulOp { matrix: &w.dt.weight, rows: 0..n_tokens, y, accumulate: false }];
        matmul(self.pool, isa, &s.mamba.low, &mut s.q8, &mut products);
        self.record_time("matmul_ssm_dt");
    }

    /// The selective scan with a decay for each channel, and the gate; to `mixer_out`.
    fn scan_channels(&mut self, layer: usize, w: &MambaWeights<PreparedLinear>, tokens: &[BatchToken]) {
        let m = &w.spec;
        let (width, d_state) = (m.width, m.d_state);
        let (isa, states, segments) = (self.isa, self.states, self.pages.segments(tokens));
        let s = &mut *self.scratch;
        let (input, conv, bc) = (&s.mamba.input, &s.mamba.conv, &s.mamba.bc);
        let (dt, out) = (SharedMut::new(&mut s.mamba.dt), SharedMut::new(&mut s.mixer_out));
        let dt_bias = w.dt.bias.as_deref().expect("a bias that files must have");
        let worth = tokens.len() * width * d_state >= MIN_PARALLEL_STATE_ELEMENTS;
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
                // SAFETY: only this task accesses these channels of the states and results, and the segments come
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
                    // SAFETY: as above; the kernel has returned.
                    let out = unsafe { out.slice(t * width + at, n_channel) };
                    let gate = &input[(2 * t + 1) * width + at..][..n_channel];
                    isa.run(HeadOutput { out, norm: None, bonus: None, gate: Some((Gate::Silu, gate)) });
                }
                first += n;
            }
        });
    }

    /// The selective scan with a decay for each of `n_head` heads, and the gate; to `mixer_out`.
    fn scan_heads(&mut self, layer: usize, w: &MambaWeights<PreparedLinear>, n_head: usize, tokens: &[BatchToken]) {
        let m = &w.spec;
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
        self.pool.for_each_if(tokens.len() * width * d_state >= MIN_PARALLEL_STATE_ELEMENTS, n_head, &|h| {
            let start = (m.n_tap - 1) * width + h * of_head;
            let mut first = 0;
            for segment in segments {
                let n = segment.n;
                // SAFETY: only this task accesses this head of the states and results, and the segments come in
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
                    // SAFETY: as above; the kernel has returned.
                    let out = unsafe { out.slice(t * width + h * head_dim, head_dim) };
                    let gate = &input[2 * (t * width + h * head_dim)..][..head_dim];
                    isa.run(HeadOutput { out, norm: None, bonus: None, gate: Some((Gate::Silu, gate)) });
                }
                first += n;
            }
        });
    }
}

impl MicroBatchRun<'_> {
    /// The mixer from `normed` up to `mixer_out`, `[n_tokens, width]`. Updates the states of the tokens' sequences.
    pub(crate) fn mamba2(&mut self, layer: usize, w: &Mamba2Weights<PreparedLinear>, tokens: &[BatchToken]) {
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
