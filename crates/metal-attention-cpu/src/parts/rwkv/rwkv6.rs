//! The time mix of RWKV-6 and its variant with gated linear attention: from `normed` to `mixer_out`, `[n_tokens, width]`.
//!
//! The token shift interpolates between a token's input and that of the token before it, for each of five *mixes*: the inputs
//! of decay (w), keys (k), values (v), receptances (r) and gate (g). In RWKV-6 the token itself changes the interpolation,
//! through low-rank matrices. Then come the projections and the recurrence of each head. Without a bonus the recurrence is
//! gated linear attention. The formulas are at [`Rwkv6Spec`](metal_attention_model::Rwkv6Spec).

use metal_attention_model::{BatchToken, NormKind, RWKV6_MIXES, Rwkv6Weights};

use super::{TokenShift, apply_nonlinearity};
use crate::forward::{MIN_PARALLEL_ELEMENTS, MicroBatchRun, add_bias, resize};
use crate::kernels::matmul::{MatmulOp, matmul};
use crate::kernels::recurrent::head_output::{Gate, HeadNorm, HeadOutput};
use crate::kernels::recurrent::rwkv6::Rwkv6;
use crate::kernels::recurrent::time_mix::{LinearInputs, Nonlinearity, Rwkv6Decay, TokenLerp};
use crate::kernels::recurrent::{StridedRows, StridedRowsMut, run_tokens};
use crate::layers::PreparedLinear;
use crate::observer::MatrixInput;
use crate::shared::SharedMut;

// The indices of the mixes, in the order of the files.
const W: usize = 0;
const K: usize = 1;
const V: usize = 2;
const R: usize = 3;
const G: usize = 4;

/// The index of the decay in `rwkv.small` and `rwkv.large`.
const DECAY: usize = 0;
/// The index of the gate in `rwkv.large`.
const GATE: usize = 1;
/// The index in `rwkv.large` of what the tokens add to the interpolation factors.
const MIXES: usize = 2;

impl MicroBatchRun<'_> {
    /// The mixer from `normed` up to `mixer_out`, `[n_tokens, width]`. Updates the states of the tokens' sequences.
    pub(crate) fn rwkv6(&mut self, layer: usize, w: &Rwkv6Weights<PreparedLinear>, tokens: &[BatchToken]) {
        let spec = &w.spec;
        let state = spec.width * spec.head_dim..spec.state_elements();
        self.shift(&TokenShift { layer, state, lerps: &w.lerp_x, previous: true, outputs_only: false }, tokens);
        self.rwkv6_mixes(w, tokens.len());
        self.rwkv6_products(w, tokens.len());
        self.rwkv6_heads(layer, w, tokens);
    }

    /// The token shift of all five mixes, to `rwkv.mixed`, `[5, n_tokens, width]`. On entry `rwkv.mixed` contains the inputs
    /// shifted by `lerp_x`, `[n_tokens, width]`, from which the tokens' own factors are computed.
    fn rwkv6_mixes(&mut self, w: &Rwkv6Weights<PreparedLinear>, n_tokens: usize) {
        let (width, rank) = (w.spec.width, w.spec.mix_rank);
        self.observe_mixed([(&w.mix_down, 0)], n_tokens);
        let s = &mut *self.scratch;
        // The result of the down projection, `[n_tokens, 5, rank]`, and the same as `[5, n_tokens, rank]`.
        let [.., given, parts] = &mut s.rwkv.small;
        resize(given, n_tokens * RWKV6_MIXES * rank);
        resize(parts, n_tokens * RWKV6_MIXES * rank);
        let mut products = [MatmulOp { matrix: &w.mix_down.weight, rows: 0..n_tokens, y: given, accumulate: false }];
        matmul(self.pool, self.isa, &s.rwkv.mixed, &mut s.q8, &mut products);
        apply_nonlinearity(self.pool, self.isa, given, Nonlinearity::Tanh);
        for (token, row) in given.chunks_exact(RWKV6_MIXES * rank).enumerate() {
            for (m, part) in row.chunks_exact(rank).enumerate() {
                parts[(m * n_tokens + token) * rank..][..rank].copy_from_slice(part);
            }
        }
        if let Some(observer) = &mut self.observer {
            for (m, (linear, x)) in w.mix_up.iter().zip(parts.chunks_exact(n_tokens * rank)).enumerate() {
                let sub_matrix = Some((m, RWKV6_MIXES));
                observer(MatrixInput { matrix: &linear.name, sub_matrix, x, n_in: rank });
            }
        }
        let more = &mut s.rwkv.large[MIXES];
        resize(more, RWKV6_MIXES * n_tokens * width);
        let of_mixes = w.mix_up.iter().zip(more.chunks_exact_mut(n_tokens * width)).enumerate();
        let mut products = Vec::with_capacity(RWKV6_MIXES);
        for (m, (linear, y)) in of_mixes {
            let rows = m * n_tokens..(m + 1) * n_tokens;
            products.push(MatmulOp { matrix: &linear.weight, rows, y, accumulate: false });
        }
        matmul(self.pool, self.isa, parts, &mut s.q8, &mut products);
        self.record_time("matmul_low_rank");

        let s = &mut *self.scratch;
        resize(&mut s.rwkv.mixed, RWKV6_MIXES * n_tokens * width);
        let (h, previous, more) = (&s.normed, &s.rwkv.previous, &s.rwkv.large[MIXES]);
        let (isa, mixed) = (self.isa, SharedMut::new(&mut s.rwkv.mixed));
        self.pool.for_each_if(more.len() >= MIN_PARALLEL_ELEMENTS, RWKV6_MIXES * n_tokens, &|i| {
            let (m, token) = (i / n_tokens, i % n_tokens);
            let [x, previous] = [h, previous].map(|rows| &rows[token * width..][..width]);
            let more = Some(&more[i * width..][..width]);
            // SAFETY: each task owns its row.
            let out = unsafe { mixed.slice(i * width, width) };
            isa.run(TokenLerp { x, previous, lerp: &w.lerps[m * width..][..width], more, out });
        });
        self.record_time("token_shift");
    }

    /// The projections of the shifted inputs: receptances to `q`, keys to `k`, values to `v`, gate and decay to `rwkv.large`.
    fn rwkv6_products(&mut self, w: &Rwkv6Weights<PreparedLinear>, n_tokens: usize) {
        let linears = [(&w.receptance, R), (&w.key, K), (&w.value, V), (&w.gate, G), (&w.decay.down, W)];
        self.observe_mixed(linears, n_tokens);
        let s = &mut *self.scratch;
        let [small, ..] = &mut s.rwkv.small;
        let gate = &mut s.rwkv.large[GATE];
        let spec = &w.spec;
        let n_kv = spec.n_head_kv * spec.head_dim;
        let widths = [spec.width, n_kv, n_kv, spec.width, spec.decay_rank];
        let mut products = Vec::with_capacity(linears.len());
        for (((linear, mix), y), n) in linears.into_iter().zip([&mut s.q, &mut s.k, &mut s.v, gate, small]).zip(widths)
        {
            resize(y, n_tokens * n);
            let rows = mix * n_tokens..(mix + 1) * n_tokens;
            products.push(MatmulOp { matrix: &linear.weight, rows, y, accumulate: false });
        }
        matmul(self.pool, self.isa, &s.rwkv.mixed, &mut s.q8, &mut products);
        for (linear, y) in [(&w.receptance, &mut s.q), (&w.key, &mut s.k), (&w.value, &mut s.v)] {
            for row in y.chunks_exact_mut(linear.weight.n_out()) {
                add_bias(row, linear);
            }
        }
        apply_nonlinearity(self.pool, self.isa, &mut s.rwkv.small[DECAY], Nonlinearity::Tanh);
        self.record_time("matmul_time_mix");
        self.expand(&[Some(&w.decay)], n_tokens);
    }

    /// The recurrence of each head with the elementwise steps before and after it, to `mixer_out`. A head is a task.
    fn rwkv6_heads(&mut self, layer: usize, w: &Rwkv6Weights<PreparedLinear>, tokens: &[BatchToken]) {
        let spec = &w.spec;
        let (width, head_dim) = (spec.width, spec.head_dim);
        let (n_kv, of_kv) = (spec.n_head_kv * head_dim, spec.n_head() / spec.n_head_kv);
        let s = &mut *self.scratch;
        for rows in [&mut s.mixer_out, &mut s.rwkv.keys] {
            resize(rows, tokens.len() * width);
        }
        let [decay, gate, ..] = &mut s.rwkv.large;
        let (decay, gate) = (SharedMut::new(decay), &*gate);
        let (r, k, v) = (SharedMut::new(&mut s.q), &s.k, &s.v);
        let (own_k, out) = (SharedMut::new(&mut s.rwkv.keys), SharedMut::new(&mut s.mixer_out));
        let (isa, states, segments) = (self.isa, self.states, self.pages.segments(tokens));
        let work = tokens.len() * width * head_dim;
        self.pool.for_each_if(work >= MIN_PARALLEL_ELEMENTS, spec.n_head(), &|head| {
            let channels = head * head_dim..(head + 1) * head_dim;
            let kv_start = head / of_kv * head_dim;
            let bonus = w.bonus.as_ref().map(|bonus| &bonus[channels.clone()]);
            let mut first = 0;
            for segment in segments {
                let n = segment.n;
                for token in first..first + n {
                    let at = token * width + channels.start;
                    // SAFETY: only the task of this head accesses its channels of all rows.
                    unsafe {
                        let decay = decay.slice(at, head_dim);
                        isa.run(Rwkv6Decay { decay: &mut *decay, bias: &w.decay_bias[channels.clone()] });
                        if bonus.is_none() {
                            let key = &k[token * n_kv + kv_start..][..head_dim];
                            let scale = 1.0 / (head_dim as f32).sqrt();
                            let (r, k) = (r.slice(at, head_dim), own_k.slice(at, head_dim));
                            isa.run(LinearInputs { r, scale, key, decay, k });
                        }
                    }
                }
                let (at, at_kv) = (first * width + channels.start, first * n_kv + kv_start);
                // SAFETY: as above; the same holds for the head's part of all states, and the segments come in order.
                unsafe {
                    let k = match bonus {
                        Some(_) => StridedRows::new(&k[at_kv..], n, head_dim, n_kv),
                        None => StridedRows::shared(&own_k, at, n, head_dim, width),
                    };
                    let part = channels.start * head_dim..channels.end * head_dim;
                    let state = states.carry_over(layer, segment, part);
                    run_tokens(
                        isa,
                        &Rwkv6 {
                            r: StridedRows::shared(&r, at, n, head_dim, width),
                            k,
                            v: StridedRows::new(&v[at_kv..], n, head_dim, n_kv),
                            decay: StridedRows::shared(&decay, at, n, head_dim, width),
                            bonus,
                            state: StridedRowsMut::new(state, head_dim, head_dim, head_dim),
                            out: StridedRowsMut::shared(&out, at, n, head_dim, width),
                        },
                    );
                }
                for token in first..first + n {
                    let at = token * width + channels.start;
                    let norm = w.norm.as_ref().map(|[weight, bias]| HeadNorm {
                        kind: NormKind::Layer,
                        weight: &weight[channels.clone()],
                        bias: Some(&bias[channels.clone()]),
                        eps: spec.norm_eps(),
                    });
                    let kind = if spec.bonus { Gate::Silu } else { Gate::Sigmoid };
                    // SAFETY: as above.
                    let out = unsafe { out.slice(at, head_dim) };
                    isa.run(HeadOutput { out, norm, bonus: None, gate: Some((kind, &gate[at..at + head_dim])) });
                }
                first += n;
            }
        });
        self.record_time("rwkv6");
    }
}
