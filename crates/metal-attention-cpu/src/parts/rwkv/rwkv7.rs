//! The time mix of RWKV-7: from `normed` to `mixer_out`, `[n_tokens, width]`.
//!
//! The token shift interpolates between a token's input and that of the token before it, for each of six *mixes*: the inputs
//! of receptances (r), decay (w), keys (k), values (v), learning rates (a) and gate (g). Then come the projections and the
//! recurrence of each head. The formulas are at [`Rwkv7Spec`](metal_attention_model::Rwkv7Spec). The first layer's values are kept for all other layers.

use metal_attention_model::{BatchToken, NormKind, Rwkv7Weights};

use super::{TokenShift, apply_nonlinearity};
use crate::forward::{MIN_PARALLEL_ELEMENTS, MicroBatchRun, resize};
use crate::kernels::matmul::{MatmulOp, matmul};
use crate::kernels::recurrent::head_output::{Bonus, Gate, HeadNorm, HeadOutput};
use crate::kernels::recurrent::rwkv7::Rwkv7;
use crate::kernels::recurrent::time_mix::{MixFirst, Nonlinearity, Rwkv7Inputs};
use crate::kernels::recurrent::{StridedRows, StridedRowsMut, run_tokens};
use crate::layers::PreparedLinear;
use crate::shared::SharedMut;

// The indices of the mixes, in the order of the files.
const R: usize = 0;
const W: usize = 1;
const K: usize = 2;
const V: usize = 3;
const A: usize = 4;
const G: usize = 5;

/// The index of the decay in `rwkv.small`.
const DECAY: usize = 0;
/// The index of the gate in `rwkv.small`.
const GATE: usize = 3;

impl MicroBatchRun<'_> {
    /// The mixer from `normed` up to `mixer_out`, `[n_tokens, width]`. Updates the states of the tokens' sequences.
    pub(crate) fn rwkv7(&mut self, layer: usize, w: &Rwkv7Weights<PreparedLinear>, tokens: &[BatchToken]) {
        let spec = &w.spec;
        let state = spec.width * spec.head_dim..spec.state_elements();
        self.shift(&TokenShift { layer, state, lerps: &w.lerps, previous: false, outputs_only: false }, tokens);
        self.rwkv7_products(w, tokens.len());
        self.rwkv7_heads(layer, w, tokens);
    }

    /// The projections of the shifted inputs: receptances to `q`, keys to `k`, values to `v`; decay, learning rates, the share
    /// of the first layer's values, and the gate to `rwkv.large`, through low-rank matrices.
    fn rwkv7_products(&mut self, w: &Rwkv7Weights<PreparedLinear>, n_tokens: usize) {
        let first_value = w.first_value.as_ref().map(|(low_rank, _)| low_rank);
        let low_rank = [Some(&w.decay), Some(&w.rate), first_value, w.gate.as_ref()];
        let of_low_rank =
            low_rank.iter().zip([W, A, V, G]).filter_map(|(low_rank, mix)| Some((&(*low_rank)?.down, mix)));
        let large = [(&w.receptance, R), (&w.key, K), (&w.value, V)];
        self.observe_mixed(large.into_iter().chain(of_low_rank), n_tokens);

        let s = &mut *self.scratch;
        let mut products = Vec::with_capacity(7);
        for ((linear, mix), y) in large.into_iter().zip([&mut s.q, &mut s.k, &mut s.v]) {
            resize(y, n_tokens * w.spec.width);
            let rows = mix * n_tokens..(mix + 1) * n_tokens;
            products.push(MatmulOp { matrix: &linear.weight, rows, y, accumulate: false });
        }
        for ((low_rank, mix), y) in low_rank.iter().zip([W, A, V, G]).zip(&mut s.rwkv.small) {
            let Some(low_rank) = low_rank else { continue };
            resize(y, n_tokens * low_rank.down.weight.n_out());
            let rows = mix * n_tokens..(mix + 1) * n_tokens;
            products.push(MatmulOp { matrix: &low_rank.down.weight, rows, y, accumulate: false });
        }
        matmul(self.pool, self.isa, &s.rwkv.mixed, &mut s.q8, &mut products);
        apply_nonlinearity(self.pool, self.isa, &mut s.rwkv.small[DECAY], Nonlinearity::Tanh);
        if w.gate.is_some() {
            apply_nonlinearity(self.pool, self.isa, &mut s.rwkv.small[GATE], Nonlinearity::Sigmoid);
        }
        self.record_time("matmul_time_mix");
        self.expand(&low_rank, n_tokens);
    }

    /// The recurrence of each head with the elementwise steps before and after it, to `mixer_out`. A head is a task.
    fn rwkv7_heads(&mut self, layer: usize, w: &Rwkv7Weights<PreparedLinear>, tokens: &[BatchToken]) {
        let spec = &w.spec;
        let (width, head_dim) = (spec.width, spec.head_dim);
        let s = &mut *self.scratch;
        for rows in [&mut s.mixer_out, &mut s.rwkv.keys, &mut s.rwkv.first_value] {
            resize(rows, tokens.len() * width);
        }
        let [decay, rate, first_mix, gate] = &mut s.rwkv.large;
        let (decay, rate, first_mix, gate) = (SharedMut::new(decay), SharedMut::new(rate), &*first_mix, &*gate);
        let (r, k, v) = (&s.q, SharedMut::new(&mut s.k), SharedMut::new(&mut s.v));
        let (kappa, first_value) = (SharedMut::new(&mut s.rwkv.keys), SharedMut::new(&mut s.rwkv.first_value));
        let out = SharedMut::new(&mut s.mixer_out);
        let (isa, states, segments) = (self.isa, self.states, self.pages.segments(tokens));
        let work = tokens.len() * width * head_dim;
        self.pool.for_each_if(work >= MIN_PARALLEL_ELEMENTS, spec.n_head(), &|head| {
            let channels = head * head_dim..(head + 1) * head_dim;
            let mut first = 0;
            for segment in segments {
                for token in first..first + segment.n {
                    let at = token * width + channels.start;
                    // SAFETY: only the task of this head accesses its channels of all rows.
                    unsafe {
                        isa.run(Rwkv7Inputs {
                            decay: decay.slice(at, head_dim),
                            decay_bias: &w.decay_bias[channels.clone()],
                            rate: rate.slice(at, head_dim),
                            rate_bias: &w.rate_bias[channels.clone()],
                            k: k.slice(at, head_dim),
                            removed: &w.removed[channels.clone()],
                            kept: &w.kept[channels.clone()],
                            kappa: kappa.slice(at, head_dim),
                        });
                        let (v, first) = (v.slice(at, head_dim), first_value.slice(at, head_dim));
                        match &w.first_value {
                            None => first.copy_from_slice(v),
                            Some((_, bias)) => {
                                let (mix, bias) = (&first_mix[at..at + head_dim], &bias[channels.clone()]);
                                isa.run(MixFirst { v, first, mix, bias });
                            }
                        }
                    }
                }
                let at = first * width + channels.start;
                let n = segment.n;
                // SAFETY: as above; the same holds for the head's part of all states, and the segments come in order.
                unsafe {
                    let part = channels.start * head_dim..channels.end * head_dim;
                    let state = states.carry_over(layer, segment, part);
                    run_tokens(
                        isa,
                        &Rwkv7 {
                            r: StridedRows::new(&r[at..], n, head_dim, width),
                            decay: StridedRows::shared(&decay, at, n, head_dim, width),
                            k: StridedRows::shared(&k, at, n, head_dim, width),
                            v: StridedRows::shared(&v, at, n, head_dim, width),
                            a: StridedRows::shared(&kappa, at, n, head_dim, width),
                            b: StridedRows::shared(&rate, at, n, head_dim, width),
                            state: StridedRowsMut::new(state, head_dim, head_dim, head_dim),
                            out: StridedRowsMut::shared(&out, at, n, head_dim, width),
                        },
                    );
                }
                for token in first..first + n {
                    let at = token * width + channels.start;
                    // SAFETY: as above.
                    unsafe {
                        let (k, v) = (&*k.slice(at, head_dim), &*v.slice(at, head_dim));
                        let norm = w.norm.as_ref().map(|[weight, bias]| HeadNorm {
                            kind: NormKind::Layer,
                            weight: &weight[channels.clone()],
                            bias: Some(&bias[channels.clone()]),
                            eps: spec.norm_eps(),
                        });
                        isa.run(HeadOutput {
                            out: out.slice(at, head_dim),
                            norm,
                            bonus: Some(Bonus { r: &r[at..at + head_dim], k, factor: &w.bonus[channels.clone()], v }),
                            gate: w.gate.is_some().then(|| (Gate::Identity, &gate[at..at + head_dim])),
                        });
                    }
                }
                first += n;
            }
        });
        self.record_time("rwkv7");
    }
}
