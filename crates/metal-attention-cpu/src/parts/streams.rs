//! What some models have beside the one residual stream. Several residual streams (AltUp, arXiv 2301.13310) and low-rank residuals (LAuReL, arXiv 2411.07501), as in Gemma 3n.
//!
//! AltUp: a layer computes on one of `n` residual streams, the active one, which is `x`. Before the layer every stream is
//! predicted from all streams; after it every stream is corrected by the difference between the active stream's result and its
//! prediction. The coefficients of both come from the active stream through a small router. LAuReL: a low-rank projection of
//! the mixer's input is added to the sum after the mixer. All functions do nothing in models with one residual stream.
//!
//! Per-layer embeddings (Gemma 3n, Gemma 4): in addition to the token embedding, a token has a small embedding for each layer, which
//! the layer adds to the residual stream after its feed-forward.

use metal_attention_model::{Activation, BatchToken, Layer, LayerStreamsWeights};

use crate::forward::{MicroBatchRun, add, normalize, normalize_row, resize, scale_by};
use crate::kernels::elementwise::Activate;
use crate::kernels::matmul::{MatmulOp, embedding, matmul};
use crate::layers::{CpuParts, PreparedLinear};

/// Buffers of AltUp and LAuReL.
#[derive(Default)]
pub(crate) struct StreamScratch {
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
    pub(crate) fn bytes(&self) -> usize {
        let all = self.streams.iter().chain([&self.laurel, &self.small, &self.coefficients]);
        all.map(|v| 4 * v.capacity()).sum()
    }

    /// The buffers with a row for each token that a later part of the last layer reads: the first `n` streams and, where there
    /// are any, LAuReL's result.
    pub(crate) fn rows(&mut self, n: usize) -> impl Iterator<Item = &mut Vec<f32>> {
        let laurel = (n > 0).then_some(&mut self.laurel);
        self.streams.iter_mut().take(n).chain(laurel)
    }
}

impl MicroBatchRun<'_> {
    /// Initialises the streams before the first layer: stream 0 is the embedding `x`, the others are projections of it, scaled
    /// to its L2 norm.
    pub(crate) fn init_streams(&mut self) {
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
    pub(crate) fn predict_streams(&mut self, w: Option<&LayerStreamsWeights<PreparedLinear>>) {
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
    pub(crate) fn laurel(&mut self, w: Option<&LayerStreamsWeights<PreparedLinear>>) {
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
            add(row, h);
        }
        self.record_time("laurel");
    }

    /// `x = (x + laurel) / sqrt(2)`, after the mixer.
    pub(crate) fn add_laurel(&mut self) {
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
    pub(crate) fn correct_streams(&mut self, w: Option<&LayerStreamsWeights<PreparedLinear>>) {
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
    pub(crate) fn add_to_inactive_streams(&mut self) {
        let Some(spec) = self.spec.embedding.streams else { return };
        let s = &mut *self.scratch;
        for (_, stream) in s.streams.streams.iter_mut().enumerate().filter(|(i, _)| *i != spec.active) {
            add(stream, &s.branch_out);
        }
    }

    /// After the last layer, sets `x` to the mean of the active stream and the projections of the others, which are scaled to
    /// its L2 norm. Overwrites `normed`.
    pub(crate) fn merge_streams(&mut self) {
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
            add(&mut sum, &s.normed);
        }
        s.x = sum;
        let n = 1.0 / spec.n as f32;
        scale_by(&mut s.x, n);
        self.record_time("streams");
    }

    /// The router: `small = tanh(W (norm(x) / n_embd))`, `[n_tokens, n]`. Overwrites `normed`.
    fn router_modalities(&mut self, w: &LayerStreamsWeights<PreparedLinear>, n_tokens: usize) {
        let s = &mut *self.scratch;
        resize(&mut s.normed, s.x.len());
        normalize(self.pool, self.isa, &w.router_norm, &s.x, &mut s.normed);
        let factor = 1.0 / self.spec.n_embd as f32;
        scale_by(&mut s.normed, factor);
        resize(&mut s.streams.small, n_tokens * w.spec.n);
        let (matrix, y) = (&w.router.weight, &mut s.streams.small);
        let mut products = [MatmulOp { matrix, rows: 0..n_tokens, y, accumulate: false }];
        matmul(self.pool, self.isa, &s.normed, &mut s.q8, &mut products);
        s.streams.small.iter_mut().for_each(|x| *x = x.tanh());
    }
}

impl MicroBatchRun<'_> {
    /// Computes the per-layer embeddings of all layers to `per_layer`, `[n_tokens, n_layer * width]`: the mean of a normalised
    /// projection of the token embedding `x` and a row of a table, `(norm(W x / sqrt(n_embd)) + sqrt(width) * table[id]) /
    /// sqrt(2)`. Nothing where the model has none. Uses `branch_out`.
    pub(crate) fn compute_per_layer_inputs(&mut self, tokens: &[BatchToken]) {
        let (Some(spec), Some(w)) = (&self.spec.embedding.per_layer, &self.weights.per_layer) else { return };
        let (n_embd, n_layer) = (self.spec.n_embd, self.spec.n_layer());
        let width = spec.width;
        let s = &mut *self.scratch;
        let len = tokens.len() * n_layer * width;
        resize(&mut s.per_layer, len);
        resize(&mut s.branch_out, len);
        let rows = 0..tokens.len();
        let mut products = [MatmulOp { matrix: &w.model_proj.weight, rows, y: &mut s.branch_out, accumulate: false }];
        matmul(self.pool, self.isa, &s.x, &mut s.q8, &mut products);
        let factor = 1.0 / (n_embd as f32).sqrt();
        scale_by(&mut s.branch_out, factor);
        normalize(self.pool, self.isa, &w.proj_norm, &s.branch_out, &mut s.per_layer);
        let (scale, half) = ((width as f32).sqrt(), std::f32::consts::FRAC_1_SQRT_2);
        let mut row = vec![0.0; n_layer * width];
        for (token, inputs) in tokens.iter().zip(s.per_layer.chunks_exact_mut(n_layer * width)) {
            embedding(&w.token_embd, token.id as usize, &mut row);
            for (input, x) in inputs.iter_mut().zip(&row) {
                *input = (*input + scale * x) * half;
            }
        }
        self.record_time("per_layer_embedding");
    }

    /// Adds the per-layer embedding `e` of `layer` at the layer's end: `x += norm(proj(gelu(gate(x)) * e))`.
    ///
    /// With several residual streams (Gemma 3n), which are corrected already, `gate` multiplies the active stream `x` times a
    /// factor for each element, and the result is added to the inactive streams only. Nothing where the model has no per-layer
    /// embeddings.
    pub(crate) fn add_per_layer_embedding(&mut self, layer: usize, w: &Layer<CpuParts>) {
        let Some(weights) = &w.embedding else { return };
        let (n_embd, n_layer, width) = (self.spec.n_embd, self.spec.n_layer(), weights.spec.width);
        let s = &mut *self.scratch;
        let n_tokens = s.x.len() / n_embd;
        s.normed.clear();
        s.normed.extend_from_slice(&s.x);
        if let Some(streams) = &w.streams {
            for row in s.normed.chunks_exact_mut(n_embd) {
                row.iter_mut().zip(&streams.correct_scale).for_each(|(x, scale)| *x *= scale);
            }
        }
        resize(&mut s.gate_or_hidden, n_tokens * width);
        let rows = 0..n_tokens;
        let mut products = [MatmulOp {
            matrix: &weights.gate.weight,
            rows: rows.clone(),
            y: &mut s.gate_or_hidden,
            accumulate: false,
        }];
        matmul(self.pool, self.isa, &s.normed, &mut s.q8, &mut products);
        for (gate, inputs) in s.gate_or_hidden.chunks_exact_mut(width).zip(s.per_layer.chunks_exact(n_layer * width)) {
            let up = Some(&inputs[layer * width..][..width]);
            self.isa.run(Activate { activation: Activation::Gelu, gate, up });
        }
        resize(&mut s.branch_out, n_tokens * n_embd);
        let mut products = [MatmulOp { matrix: &weights.proj.weight, rows, y: &mut s.branch_out, accumulate: false }];
        matmul(self.pool, self.isa, &s.gate_or_hidden, &mut s.q8, &mut products);
        if w.streams.is_none() {
            self.add_branch_out(Some(&weights.post_norm), 1.0);
        } else {
            for row in s.branch_out.chunks_exact_mut(n_embd) {
                let x = row.to_vec();
                normalize_row(self.isa, &weights.post_norm, &x, row);
            }
            self.add_to_inactive_streams();
        }
        self.record_time("own_embedding");
    }
}

/// The L2 norm of a row.
fn l2_norm(row: &[f32]) -> f32 {
    row.iter().map(|x| x * x).sum::<f32>().sqrt()
}

/// Scales a row to the L2 norm `to`.
fn scale_to_norm(row: &mut [f32], to: f32) {
    scale_by(row, to / l2_norm(row));
}
