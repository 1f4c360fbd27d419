//! Several residual streams (AltUp, arXiv 2301.13310) and low-rank residuals (LAuReL, arXiv 2411.07501), as in Gemma 3n.
//!
//! AltUp: a layer computes on one of `n` residual streams, the active one, which is `x`. Before the layer every stream is
//! predicted from all streams; after it every stream is corrected by the difference between the active stream's result and its
//! prediction. The coefficients of both come from the active stream through a small router. LAuReL: a low-rank projection of
//! the mixer's input is added to the sum after the mixer. All functions do nothing in models with one residual stream.

use metal_attention_model::LayerStreamsWeights;

use super::{MicroBatchRun, normalize, normalize_row, resize};
use crate::kernels::matmul::{MatmulOp, matmul};
use crate::layers::PreparedLinear;

/// Buffers of AltUp and LAuReL.
#[derive(Default)]
pub(super) struct StreamScratch {
    /// Each stream, `[n_tokens, n_embd]`; within a layer its prediction.
    streams: Vec<Vec<f32>>,
    /// LAuReL's result, `[n_tokens, n_embd]`.
    laurel: Vec<f32>,
    /// The router's result, `[n_tokens, n]`, or LAuReL's low-rank row, `[n_tokens, laurel_rank]`.
    small: Vec<f32>,
    /// Coefficients of the prediction, `[n_tokens, n, n]`, or of the correction, `[n_tokens, n]`.
    coefficients: Vec<f32>,
}

impl StreamScratch {
    /// Bytes of all buffers.
    pub(super) fn bytes(&self) -> usize {
        let all = self.streams.iter().chain([&self.laurel, &self.small, &self.coefficients]);
        all.map(|v| 4 * v.capacity()).sum()
    }

    /// The buffers with a row for each token that a later part of the last layer reads: the first `n` streams and, where there
    /// are any, LAuReL's result.
    pub(super) fn rows(&mut self, n: usize) -> impl Iterator<Item = &mut Vec<f32>> {
        let laurel = (n > 0).then_some(&mut self.laurel);
        self.streams.iter_mut().take(n).chain(laurel)
    }
}

impl MicroBatchRun<'_> {
    /// Initialises the streams before the first layer: stream 0 is the embedding `x`, the others are projections of it, scaled
    /// to its L2 norm.
    pub(super) fn init_streams(&mut self) {
        let (Some(spec), Some(w)) = (self.spec.embedding.streams, &self.weights.streams) else { return };
        let n_embd = self.spec.n_embd;
        let s = &mut *self.scratch;
        let rows = 0..s.x.len() / n_embd;
        s.streams.streams.resize_with(spec.n, Vec::new);
        s.streams.streams[0].clone_from(&s.x);
        for (stream, linear) in s.streams.streams[1..].iter_mut().zip(&w.proj) {
            resize(stream, s.x.len());
            let mut products = [MatmulOp { matrix: &linear.weight, rows: rows.clone(), y: stream, accumulate: false }];
            matmul(self.pool, self.isa, &s.x, &mut s.q8, &mut products);
            for (row, x) in stream.chunks_exact_mut(n_embd).zip(s.x.chunks_exact(n_embd)) {
                scale_to_norm(row, l2_norm(x));
            }
        }
        self.record_time("streams");
    }

    /// Predicts every stream at the beginning of a layer, `stream += sum over j of coefficient[j] * stream[j]`, and sets `x` to
    /// the active one.
    pub(super) fn predict_streams(&mut self, w: Option<&LayerStreamsWeights<PreparedLinear>>) {
        let Some(w) = w else { return };
        let spec = w.spec;
        let n = spec.n;
        let n_tokens = self.scratch.x.len() / self.spec.n_embd;
        self.scratch.x.clone_from(&self.scratch.streams.streams[spec.active]);
        self.router_modalities(w, n_tokens);
        let s = &mut *self.scratch;
        resize(&mut s.streams.coefficients, n_tokens * n * n);
        let (matrix, y) = (&w.predict.weight, &mut s.streams.coefficients);
        let mut products = [MatmulOp { matrix, rows: 0..n_tokens, y, accumulate: false }];
        matmul(self.pool, self.isa, &s.streams.small, &mut s.q8, &mut products);
        let n_embd = self.spec.n_embd;
        let mut old = vec![0.0; n];
        for t in 0..n_tokens {
            let coefficients = &s.streams.coefficients[t * n * n..][..n * n];
            for e in t * n_embd..(t + 1) * n_embd {
                for (old, stream) in old.iter_mut().zip(&s.streams.streams) {
                    *old = stream[e];
                }
                for (stream, row) in s.streams.streams.iter_mut().zip(coefficients.chunks_exact(n)) {
                    stream[e] += row.iter().zip(&old).map(|(c, x)| c * x).sum::<f32>();
                }
            }
        }
        s.x.clone_from(&s.streams.streams[spec.active]);
        self.record_time("streams");
    }

    /// `laurel = normed + norm(r(l(normed)))`, which [`add_laurel`](Self::add_laurel) adds after the mixer.
    pub(super) fn laurel(&mut self, w: Option<&LayerStreamsWeights<PreparedLinear>>) {
        let Some(w) = w else { return };
        let spec = w.spec;
        let n_embd = self.spec.n_embd;
        let s = &mut *self.scratch;
        let rows = 0..s.normed.len() / n_embd;
        resize(&mut s.streams.small, rows.len() * spec.laurel_rank);
        resize(&mut s.streams.laurel, s.normed.len());
        let (matrix, y) = (&w.laurel_l.weight, &mut s.streams.small);
        matmul(
            self.pool,
            self.isa,
            &s.normed,
            &mut s.q8,
            &mut [MatmulOp { matrix, rows: rows.clone(), y, accumulate: false }],
        );
        let (matrix, y) = (&w.laurel_r.weight, &mut s.streams.laurel);
        let mut products = [MatmulOp { matrix, rows, y, accumulate: false }];
        matmul(self.pool, self.isa, &s.streams.small, &mut s.q8, &mut products);
        for (row, h) in s.streams.laurel.chunks_exact_mut(n_embd).zip(s.normed.chunks_exact(n_embd)) {
            let x = row.to_vec();
            normalize_row(self.isa, &w.laurel_norm, &x, row);
            super::add(row, h);
        }
        self.record_time("laurel");
    }

    /// `x = (x + laurel) / sqrt(2)`, after the mixer.
    pub(super) fn add_laurel(&mut self) {
        if self.spec.embedding.streams.is_none() {
            return;
        }
        let s = &mut *self.scratch;
        for (x, laurel) in s.x.iter_mut().zip(&s.streams.laurel) {
            *x = (*x + laurel) * std::f32::consts::FRAC_1_SQRT_2;
        }
    }

    /// Corrects every stream at the end of a layer, `stream += (1 + coefficient) * (x - prediction of the active stream)`, and
    /// sets `x` to the active one.
    pub(super) fn correct_streams(&mut self, w: Option<&LayerStreamsWeights<PreparedLinear>>) {
        let Some(w) = w else { return };
        let spec = w.spec;
        let (n, n_embd) = (spec.n, self.spec.n_embd);
        let n_tokens = self.scratch.x.len() / n_embd;
        self.router_modalities(w, n_tokens);
        let s = &mut *self.scratch;
        resize(&mut s.streams.coefficients, n_tokens * n);
        let (matrix, y) = (&w.correct.weight, &mut s.streams.coefficients);
        let mut products = [MatmulOp { matrix, rows: 0..n_tokens, y, accumulate: false }];
        matmul(self.pool, self.isa, &s.streams.small, &mut s.q8, &mut products);
        for t in 0..n_tokens {
            let coefficients = &s.streams.coefficients[t * n..][..n];
            for e in t * n_embd..(t + 1) * n_embd {
                let innovation = s.x[e] - s.streams.streams[spec.active][e];
                for (stream, c) in s.streams.streams.iter_mut().zip(coefficients) {
                    stream[e] += innovation * (c + 1.0);
                }
            }
        }
        s.x.clone_from(&s.streams.streams[spec.active]);
        self.record_time("streams");
    }

    /// Adds `branch_out` to all streams but the active one.
    pub(super) fn add_to_inactive_streams(&mut self) {
        let Some(spec) = self.spec.embedding.streams else { return };
        let s = &mut *self.scratch;
        for (_, stream) in s.streams.streams.iter_mut().enumerate().filter(|(i, _)| *i != spec.active) {
            super::add(stream, &s.branch_out);
        }
    }

    /// After the last layer, sets `x` to the mean of the active stream and the projections of the others, which are scaled to
    /// its L2 norm. Overwrites `normed`.
    pub(super) fn merge_streams(&mut self) {
        let (Some(spec), Some(w)) = (self.spec.embedding.streams, &self.weights.streams) else { return };
        let n_embd = self.spec.n_embd;
        let s = &mut *self.scratch;
        s.x.clone_from(&s.streams.streams[spec.active]);
        let rows = 0..s.x.len() / n_embd;
        let mut sum = s.x.clone();
        resize(&mut s.normed, s.x.len());
        for (stream, linear) in s.streams.streams[1..].iter().zip(&w.unembd_proj) {
            let mut products =
                [MatmulOp { matrix: &linear.weight, rows: rows.clone(), y: &mut s.normed, accumulate: false }];
            matmul(self.pool, self.isa, stream, &mut s.q8, &mut products);
            for (row, x) in s.normed.chunks_exact_mut(n_embd).zip(s.x.chunks_exact(n_embd)) {
                scale_to_norm(row, l2_norm(x));
            }
            super::add(&mut sum, &s.normed);
        }
        s.x = sum;
        let n = 1.0 / spec.n as f32;
        super::scale_by(&mut s.x, n);
        self.record_time("streams");
    }

    /// The router: `small = tanh(W (norm(x) / n_embd))`, `[n_tokens, n]`. Overwrites `normed`.
    fn router_modalities(&mut self, w: &LayerStreamsWeights<PreparedLinear>, n_tokens: usize) {
        let s = &mut *self.scratch;
        resize(&mut s.normed, s.x.len());
        normalize(self.pool, self.isa, &w.router_norm, &s.x, &mut s.normed);
        let factor = 1.0 / self.spec.n_embd as f32;
        super::scale_by(&mut s.normed, factor);
        resize(&mut s.streams.small, n_tokens * w.spec.n);
        let (matrix, y) = (&w.router.weight, &mut s.streams.small);
        let mut products = [MatmulOp { matrix, rows: 0..n_tokens, y, accumulate: false }];
        matmul(self.pool, self.isa, &s.normed, &mut s.q8, &mut products);
        s.streams.small.iter_mut().for_each(|x| *x = x.tanh());
    }
}

/// The L2 norm of a row.
fn l2_norm(row: &[f32]) -> f32 {
    row.iter().map(|x| x * x).sum::<f32>().sqrt()
}

/// Scales a row to the L2 norm `to`.
fn scale_to_norm(row: &mut [f32], to: f32) {
    super::scale_by(row, to / l2_norm(row));
}
