//! The gated delta rule (Gated `DeltaNet`, Kimi Delta Attention): from `normed` to `mixer_out`, `[n_tokens, n_values]`.
//!
//! The projections of all tokens come first. Then each key head is a task: it takes blocks of tokens through the convolution,
//! the L2 norms, the recurrence of its value heads, and their gated norm, so that the values between these steps stay in the
//! core's cache. The state of a key head and its value heads is read and written by that task alone.

use metal_attention_model::{BatchToken, DeltaGates, DeltaRuleSpec, DeltaRuleWeights, NormKind};

use crate::forward::{MicroBatchRun, ProductInput, resize};
use crate::kernels::matmul::{MatmulOp, matmul};
use crate::kernels::recurrent::convolution::Convolution;
use crate::kernels::recurrent::delta_rule::DeltaRule;
use crate::kernels::recurrent::gates::{Decays, L2Norm};
use crate::kernels::recurrent::head_output::{Gate, HeadNorm, HeadOutput};
use crate::kernels::recurrent::{StridedRows, StridedRowsMut, run_tokens};
use crate::layers::PreparedLinear;
use crate::observer::MatrixInput;
use crate::shared::SharedMut;

/// Tokens that a task takes through all steps at a time.
const BLOCK: usize = 16;

/// Buffers of the delta rule.
#[derive(Default)]
pub(crate) struct DeltaScratch {
    /// The projection that beta is the sigmoid of, `[n_tokens, n_head_v]`.
    beta: Vec<f32>,
    /// The projection that the decay is computed from, `[n_tokens, n_decays]`.
    decay: Vec<f32>,
    /// Where decay and output gate are low-rank: the results of their down projections, `[2, n_tokens, rank]`, decay first.
    down: Vec<f32>,
    /// The work area of each task: queries and keys after the convolution, `[BLOCK, key_dim]` each, values,
    /// `[BLOCK, value_dim]`, betas, `[BLOCK]`, and decays, `[BLOCK]` or `[BLOCK, key_dim]`.
    blocks: Vec<f32>,
}

impl DeltaScratch {
    /// Bytes of all buffers.
    pub(crate) fn bytes(&self) -> usize {
        [&self.beta, &self.decay, &self.down, &self.blocks].iter().map(|v| 4 * v.capacity()).sum()
    }
}

impl MicroBatchRun<'_> {
    /// The mixer from `normed` up to `mixer_out`, `[n_tokens, n_values]`. Updates the states of the tokens' sequences.
    pub(crate) fn delta_rule(&mut self, layer: usize, w: &DeltaRuleWeights<PreparedLinear>, tokens: &[BatchToken]) {
        let spec = &w.spec;
        self.project_delta_rule(w, tokens.len());
        let (n, n_values) = (tokens.len(), spec.n_values());
        let s = &mut *self.scratch;
        let of_block = block_elements(spec);
        resize(&mut s.mixer_out, n * n_values);
        resize(&mut s.delta.blocks, spec.n_head_k * of_block);
        let (blocks, out) = (SharedMut::new(&mut s.delta.blocks), SharedMut::new(&mut s.mixer_out));
        let inputs = ProjectedInputs {
            q: &s.q,
            k: &s.k,
            v: &s.v,
            gate: &s.gate_or_hidden,
            beta: &s.delta.beta,
            decay: &s.delta.decay,
        };
        let (states, segments) = (self.states, self.pages.segments(tokens));
        let of_head = state_of_head(spec);
        self.pool.for_each(spec.n_head_k, &|head| {
            // SAFETY: each task has a work area of its own.
            let block = unsafe { blocks.slice(head * of_block, of_block) };
            let mut task = KeyHeadTask { isa: self.isa, w, inputs, head, block, out: &out };
            let mut first = 0;
            for segment in segments {
                // SAFETY: only this task accesses the state of this key head and its value heads, and the
                // segments come in order.
                let (source, target) =
                    unsafe { states.source_and_target(layer, segment, head * of_head..(head + 1) * of_head) };
                task.segment(first, segment.n, source, target);
                first += segment.n;
            }
        });
        self.record_time("delta_rule");
    }

    /// The projections of all `n` tokens: queries to `q`, keys to `k`, values to `v`, the output gate to `gate`, and the inputs
    /// of beta and the decay.
    fn project_delta_rule(&mut self, w: &DeltaRuleWeights<PreparedLinear>, n: usize) {
        let spec = &w.spec;
        let (n_keys, n_values) = (spec.n_keys(), spec.n_values());
        let down_projections = &w.before;
        self.observe(&[&w.q, &w.k, &w.v, &w.beta], ProductInput::Normed);
        match down_projections {
            None => self.observe(&[&w.decay, &w.gate], ProductInput::Normed),
            Some([decay, gate]) => self.observe(&[decay, gate], ProductInput::Normed),
        }
        let s = &mut *self.scratch;
        let [q, k, v] = [(&mut s.q, n_keys), (&mut s.k, n_keys), (&mut s.v, n_values)].map(|(y, width)| {
            resize(y, n * width);
            y.as_mut_slice()
        });
        resize(&mut s.delta.beta, n * spec.n_head_v);
        resize(&mut s.delta.decay, n * spec.n_decays());
        resize(&mut s.gate_or_hidden, n * n_values);
        let rank = down_projections.as_ref().map_or(0, |[decay, _]| decay.weight.n_out());
        resize(&mut s.delta.down, 2 * n * rank);
        let (first, second) = s.delta.down.split_at_mut(n * rank);
        let (decay, gate) = match down_projections {
            None => ((&w.decay, s.delta.decay.as_mut_slice()), (&w.gate, s.gate_or_hidden.as_mut_slice())),
            Some([decay, gate]) => ((decay, first), (gate, second)),
        };
        let products = [(&w.q, q), (&w.k, k), (&w.v, v), (&w.beta, &mut s.delta.beta), decay, gate];
        let mut products =
            products.map(|(linear, y)| MatmulOp { matrix: &linear.weight, rows: 0..n, y, accumulate: false });
        matmul(self.pool, self.isa, &s.normed, &mut s.q8, &mut products);
        if down_projections.is_some() {
            if let Some(observer) = &mut self.observer {
                for (linear, x) in [&w.decay, &w.gate].into_iter().zip(s.delta.down.chunks_exact(n * rank)) {
                    observer(MatrixInput { matrix: &linear.name, sub_matrix: None, x, n_in: rank });
                }
            }
            let (decay, gate) = (&mut s.delta.decay, &mut s.gate_or_hidden);
            let mut products = [(&w.decay, 0..n, decay), (&w.gate, n..2 * n, gate)].map(|(linear, rows, y)| MatmulOp {
                matrix: &linear.weight,
                rows,
                y,
                accumulate: false,
            });
            matmul(self.pool, self.isa, &s.delta.down, &mut s.q8, &mut products);
        }
        self.record_time("matmul_delta_rule");
    }
}

/// State elements of one key head and its value heads: the last inputs of the convolution, `[n_tap - 1, key_dim]` of queries,
/// the same of keys, and `[n_tap - 1, value_dim]` of each value head; then the state matrix of each value head,
/// `[key_dim, value_dim]`. `n_tap` is the width of the convolution in tokens.
fn state_of_head(spec: &DeltaRuleSpec) -> usize {
    spec.state_elements() / spec.n_head_k
}

/// Floats of a task's work area.
fn block_elements(spec: &DeltaRuleSpec) -> usize {
    BLOCK * (2 * spec.key_dim + spec.value_dim + 1 + n_decay(spec))
}

/// Decays of one value head and token: 1, or `key_dim` where each channel of the key has its own.
fn n_decay(spec: &DeltaRuleSpec) -> usize {
    spec.n_decays() / spec.n_head_v
}

/// The results of the projections, a row for each token.
#[derive(Clone, Copy)]
struct ProjectedInputs<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    gate: &'a [f32],
    beta: &'a [f32],
    decay: &'a [f32],
}

/// The work of one task: a key head with the value heads that read it, for all tokens.
struct KeyHeadTask<'a, 'b> {
    isa: crate::simd::Isa,
    w: &'a DeltaRuleWeights<PreparedLinear>,
    inputs: ProjectedInputs<'a>,
    /// The key head.
    head: usize,
    /// The work area, `[block_elements]`.
    block: &'a mut [f32],
    /// `mixer_out`, `[n_tokens, n_values]`, of which the task writes the columns of its value heads.
    out: &'a SharedMut<'b, f32>,
}

impl KeyHeadTask<'_, '_> {
    /// Computes tokens `first..first + n`, consecutive ones of one sequence. The state before them is `source` or, where that
    /// is `None`, in `target`; the state after them is written to `target`. Both are `[state_of_head]`.
    fn segment(&mut self, first: usize, n: usize, source: Option<&[f32]>, target: &mut [f32]) {
        let spec = &self.w.spec;
        let of_matrix = spec.key_dim * spec.value_dim;
        let n_matrices = spec.n_shared() * of_matrix;
        let (inputs, matrices) = target.split_at_mut(target.len() - n_matrices);
        if let Some(source) = source {
            inputs.copy_from_slice(&source[..inputs.len()]);
        }
        for start in (0..n).step_by(BLOCK) {
            let count = BLOCK.min(n - start);
            // The first block reads the matrices in `source` and writes those in `target`; the others update these.
            let old_matrices = source.filter(|_| start == 0).map(|source| &source[inputs.len()..]);
            self.convolve_keys(first + start, count, inputs);
            for i in 0..spec.n_shared() {
                let matrix = i * of_matrix..(i + 1) * of_matrix;
                let old_matrix = old_matrices.map(|matrices| &matrices[matrix.clone()]);
                self.value_head(first + start, count, i, inputs, old_matrix, &mut matrices[matrix]);
            }
        }
    }

    /// The queries and keys of a block: convolution, L2 norm, and the scale `1 / sqrt(key_dim)` of the queries.
    /// `inputs`: the last inputs of the convolution, updated.
    fn convolve_keys(&mut self, first: usize, count: usize, inputs: &mut [f32]) {
        let DeltaRuleSpec { key_dim, n_tap, eps, .. } = self.w.spec;
        let (column, n_keys) = (self.head * key_dim, self.w.spec.n_keys());
        let (q, rest) = self.block.split_at_mut(BLOCK * key_dim);
        let k = &mut rest[..BLOCK * key_dim];
        let (of_q, of_k) = inputs.split_at_mut((n_tap - 1) * key_dim);
        let queries = ConvChannels { x: self.inputs.q, width: n_keys, column, channel: column, dim: key_dim };
        let keys = ConvChannels { x: self.inputs.k, channel: n_keys + column, ..queries };
        convolve(self.isa, self.w, &queries, first, count, of_q, q);
        convolve(self.isa, self.w, &keys, first, count, &mut of_k[..(n_tap - 1) * key_dim], k);
        let scale = 1.0 / (key_dim as f32).sqrt();
        for (rows, scale) in [(q, scale), (k, 1.0)] {
            for x in rows.chunks_exact_mut(key_dim).take(count) {
                self.isa.run(L2Norm { x, eps, scale });
            }
        }
    }

    /// The key head's `i`-th value head for one block of tokens: convolution, recurrence and gated norm. `inputs`: the last
    /// inputs of the convolution, updated. `matrix`: the state matrix, updated; `old_matrix`: that before the block, where
    /// `matrix` does not hold it yet.
    fn value_head(
        &mut self,
        first: usize,
        count: usize,
        i: usize,
        inputs: &mut [f32],
        old_matrix: Option<&[f32]>,
        matrix: &mut [f32],
    ) {
        let DeltaRuleSpec { key_dim, value_dim, n_tap, n_head_k, n_head_v, eps, .. } = self.w.spec;
        let (head, n_values, n_decay) =
            (self.w.spec.value_head(self.head, i), self.w.spec.n_values(), n_decay(&self.w.spec));
        let (q, rest) = self.block.split_at_mut(BLOCK * key_dim);
        let (k, rest) = rest.split_at_mut(BLOCK * key_dim);
        let (v, gates) = rest.split_at_mut(BLOCK * value_dim);
        let (betas, decays) = gates.split_at_mut(BLOCK);
        let column = head * value_dim;
        let values = ConvChannels {
            x: self.inputs.v,
            width: n_values,
            column,
            channel: 2 * self.w.spec.n_keys() + column,
            dim: value_dim,
        };
        let of_values = (n_tap - 1) * value_dim;
        let of_v = &mut inputs[2 * (n_tap - 1) * key_dim + i * of_values..][..of_values];
        convolve(self.isa, self.w, &values, first, count, of_v, v);
        for (t, beta) in betas[..count].iter_mut().enumerate() {
            *beta = 1.0 / (1.0 + (-self.inputs.beta[(first + t) * n_head_v + head]).exp());
        }
        let out = first * n_values + column;
        let (q, k) = (rows(q, count, key_dim), rows(k, count, key_dim));
        let (v, beta) = (rows(v, count, value_dim), rows(betas, count, 1));
        let before = old_matrix.map(|matrix| StridedRows::new(matrix, key_dim, value_dim, value_dim));
        let state = StridedRowsMut::new(matrix, key_dim, value_dim, value_dim);
        // SAFETY: only this task accesses this head's columns of the output.
        let result = unsafe { StridedRowsMut::shared(self.out, out, count, value_dim, n_values) };
        for (t, x) in decays.chunks_exact_mut(n_decay).take(count).enumerate() {
            let at = ((first + t) * n_head_v + head) * n_decay;
            x.copy_from_slice(&self.inputs.decay[at..][..n_decay]);
            self.isa.run(Decays { x, bias: &self.w.dt_bias[head * n_decay..][..n_decay], a: self.w.a[head] });
        }
        let decay = rows(decays, count, n_decay);
        // A hint for prefetching: the next value head's matrix follows at this distance. Where it belongs to the next key head,
        // the inputs of a convolution lie between; they are few, so most of the prefetched lines are still the right ones.
        let more = self.head + 1 < n_head_k || i + 1 < self.w.spec.n_shared();
        let next = more.then_some(key_dim * value_dim);
        run_tokens(self.isa, &DeltaRule { q, k, v, decay, beta, before, next, state, out: result });
        let kind = match self.w.spec.gates {
            DeltaGates::OfHeads { paired: _ } => Gate::Silu,
            DeltaGates::OfChannels { rank: _ } => Gate::Sigmoid,
        };
        for t in 0..count {
            let gate = &self.inputs.gate[out + t * n_values..][..value_dim];
            // SAFETY: as above; the recurrence has returned.
            let out = unsafe { self.out.slice(out + t * n_values, value_dim) };
            let norm = HeadNorm { kind: NormKind::Rms, weight: &self.w.norm, bias: None, eps };
            self.isa.run(HeadOutput { out, norm: Some(norm), bonus: None, gate: Some((kind, gate)) });
        }
    }
}

/// The first `n` rows of a part of the work area, contiguous.
fn rows(block: &[f32], n: usize, width: usize) -> StridedRows<'_> {
    StridedRows::new(block, n, width, width)
}

/// The channels of one head in the convolution.
struct ConvChannels<'a> {
    /// The projection, `[n_tokens, width]`.
    x: &'a [f32],
    /// Columns of `x`.
    width: usize,
    /// The head's first column in `x`.
    column: usize,
    /// The head's first channel of the convolution, whose channels are those of queries, keys and values, in this order.
    channel: usize,
    /// Channels of the head.
    dim: usize,
}

/// The convolution with SiLU of tokens `first..first + count`, to `out`, `[count, dim]`. `inputs`: the last inputs before these
/// tokens, `[n_tap - 1, dim]`, updated. `w.taps` are its weights, `[n_tap, n_channels]`: `n_tap` for each channel.
fn convolve(
    isa: crate::simd::Isa,
    w: &DeltaRuleWeights<PreparedLinear>,
    &ConvChannels { x, width, column, channel, dim }: &ConvChannels<'_>,
    first: usize,
    count: usize,
    inputs: &mut [f32],
    out: &mut [f32],
) {
    isa.run(Convolution {
        x: StridedRows::new(&x[first * width + column..], count, dim, width),
        weights: StridedRows::new(&w.taps[channel..], w.spec.n_tap, dim, w.spec.n_channels()),
        bias: None,
        silu: true,
        state: StridedRowsMut::new(inputs, w.spec.n_tap - 1, dim, dim),
        out: StridedRowsMut::new(out, count, dim, dim),
    });
}
