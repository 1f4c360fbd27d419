//! The two ends of the forward pass: token embeddings before the first layer; the last norm and logits after the last
//! one.

use crate::kernels::{self, MatvecOutput, NormShape, ScaleShape, TokenRows};
use crate::{Dispatch, WgpuError};
use metal_attention_model::{NormKind, PerLayerEmbedding};

use super::{LinearProduct, PlanBuilder};
use crate::parts::scaled_logits;

impl PlanBuilder<'_> {
    /// The dispatches before the first layer: `x = norm(scale * table[id] + types[0] + positions[pos])`, then the
    /// per-layer embeddings and residual streams of models that have them.
    pub(super) fn embedding(&self) -> Result<Vec<Dispatch>, WgpuError> {
        let (scratch, w, spec) = (self.scratch, self.weights, &self.spec.embedding);
        let mut dispatches = kernels::embedding(self.gpu, &w.token_embd, &scratch.x, self.batch)?;
        let positions = w.positions.as_ref().map(|(table, n)| (table, *n));
        if spec.scale != 1.0 || w.token_type.is_some() || positions.is_some() {
            let (n, types) = (self.spec.n_embd, w.token_type.as_ref());
            dispatches.push(kernels::embedding_sum(self.gpu, n, spec.scale, &scratch.x, types, positions, self.batch)?);
        }
        if let Some(norm) = &w.embedding_norm {
            dispatches.push(self.norm(norm, NormShape::of_row(norm.n), None, &scratch.x)?);
        }
        self.embed_for_layers(&mut dispatches)?;
        self.spread_over_streams(&mut dispatches)?;
        Ok(dispatches)
    }

    /// Appends Gemma 3n's per-layer embeddings of all layers, `(norm(n_embd^-1/2 W x) + width^1/2 table[id]) / 2^1/2`,
    /// to `layer_embeddings`.
    fn embed_for_layers(&self, dispatches: &mut Vec<Dispatch>) -> Result<(), WgpuError> {
        let (scratch, n_embd, n_layer) = (self.scratch, self.spec.n_embd, self.spec.n_layer());
        let (Some(spec), Some(w)) = (&self.spec.embedding.per_layer, &self.weights.per_layer) else { return Ok(()) };
        let PerLayerEmbedding { width, proj_norm: _, post_norm: _ } = *spec;
        dispatches.extend(kernels::embedding(self.gpu, &w.token_embd, &scratch.layer_embeddings, self.batch)?);
        let scale = (width as f32).sqrt() * std::f32::consts::FRAC_1_SQRT_2;
        let shape = ScaleShape { n: n_layer * width, scale, soft_cap: None, outputs_only: false };
        dispatches.push(kernels::scale(self.gpu, shape, &scratch.layer_embeddings)?);
        self.multiply(
            dispatches,
            LinearProduct::new(&w.model_proj, MatvecOutput::Store, &scratch.x, &scratch.layer_projections),
        )?;
        // The norm of `a x` equals the norm of `x` with an epsilon of `eps / a^2`, here with `a = n_embd^-1/2`.
        let shape = NormShape {
            n: width,
            rows: n_layer,
            kind: Some(w.proj_norm.kind),
            eps: w.proj_norm.eps * n_embd as f32,
            weight: true,
            bias: w.proj_norm.has_bias,
            scale: std::f32::consts::FRAC_1_SQRT_2,
            accumulate: true,
            outputs_only: false,
        };
        let weights = Some(&w.proj_norm.weights);
        dispatches.push(kernels::norm(
            self.gpu,
            shape,
            Some(&scratch.layer_projections),
            weights,
            &scratch.layer_embeddings,
            self.batch,
        )?);
        Ok(())
    }

    /// The hidden vectors of output tokens after the last norm: `normed`, `[n_outputs, n_embd]`.
    pub(super) fn hidden(&self) -> Result<Vec<Dispatch>, WgpuError> {
        let scratch = self.scratch;
        let mut dispatches = Vec::new();
        self.join_streams(&mut dispatches)?;
        let shape = NormShape { outputs_only: true, ..NormShape::of_row(self.spec.n_embd) };
        let norm = match &self.weights.output_norm {
            Some(norm) => self.norm(norm, shape, Some(&scratch.x), &scratch.normed)?,
            None => kernels::norm(self.gpu, shape, Some(&scratch.x), None, &scratch.normed, self.batch)?,
        };
        dispatches.push(norm);
        Ok(dispatches)
    }

    /// The logits of output tokens: `logits`, `[n_outputs, n_vocab]`. Empty for a model without an output head.
    pub(super) fn head(&self) -> Result<Vec<Dispatch>, WgpuError> {
        let (scratch, w) = (self.scratch, self.weights);
        let Some(head) = &self.spec.output.head else { return Ok(Vec::new()) };
        let mut dispatches = Vec::new();
        let logits = LinearProduct {
            linear: (w.output(), w.output_bias.as_ref()),
            output: MatvecOutput::Store,
            rows: TokenRows::Outputs,
            x: &scratch.x,
            y: &scratch.logits,
        };
        match &w.output_norm {
            Some(norm) if norm.kind == NormKind::Rms && !norm.has_bias => {
                self.join_streams(&mut dispatches)?;
                self.norm_then_multiply(&mut dispatches, norm, logits)?;
            }
            Some(_) | None => {
                dispatches = self.hidden()?;
                self.multiply(
                    &mut dispatches,
                    LinearProduct { rows: TokenRows::Gathered, x: &scratch.normed, ..logits },
                )?;
            }
        }
        if let Some((scale, soft_cap)) = scaled_logits(head) {
            let shape = ScaleShape { n: self.spec.n_vocab, scale, soft_cap, outputs_only: true };
            dispatches.push(kernels::scale(self.gpu, shape, &scratch.logits)?);
        }
        Ok(dispatches)
    }
}
