//! Per-layer embeddings (Gemma 3n, Gemma 4): in addition to the token embedding, a token has a small embedding for each layer, which
//! the layer adds to the residual stream after its feed-forward.

use metal_attention_model::{Activation, BatchToken, Layer};

use super::{MicroBatchRun, normalize, normalize_row, resize};
use crate::kernels::elementwise::Activate;
use crate::kernels::matmul::{MatmulOp, embedding, matmul};
use crate::layers::CpuParts;

impl MicroBatchRun<'_> {
    /// Computes the per-layer embeddings of all layers to `per_layer`, `[n_tokens, n_layer * width]`: the mean of a normalised
    /// projection of the token embedding `x` and a row of a table, `(norm(W x / sqrt(n_embd)) + sqrt(width) * table[id]) /
    /// sqrt(2)`. Nothing where the model has none. Uses `branch_out`.
    pub(super) fn compute_per_layer_inputs(&mut self, tokens: &[BatchToken]) {
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
        super::scale_by(&mut s.branch_out, factor);
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
    pub(super) fn add_per_layer_embedding(&mut self, layer: usize, w: &Layer<CpuParts>) {
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
