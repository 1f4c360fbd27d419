//! What comes before the first layer and after the last: embeddings, the last norm, logits.

use crate::kernels::{self, MatvecOutput, NormShape, Rows, ScaleShape};
use crate::{Dispatch, WgpuError};
use metal_attention_model::{NormKind, PerLayerEmbedding};

use super::{PlanBuilder, Product};
use crate::parts::scaled_logits;

impl PlanBuilder<'_> {
    /// `x = norm(scale * table[id] + types[0] + positions[pos])`, and what comes of it before the first layer.
    pub(super) fn embedding(&self) -> Result<Vec<Dispatch>, WgpuError> {
        let (s, w, spec) = (self.s, self.weights, &self.spec.embedding);
        let mut d = kernels::embedding(self.gpu, &w.token_embd, &s.x, self.batch)?;
        let positions = w.positions.as_ref().map(|(table, n)| (table, *n));
        if spec.scale != 1.0 || w.token_type.is_some() || positions.is_some() {
            let (n, types) = (self.spec.n_embd, w.token_type.as_ref());
            d.push(kernels::embedding_sum(self.gpu, n, spec.scale, &s.x, types, positions, self.batch)?);
        }
        if let Some(norm) = &w.embedding_norm {
            d.push(self.norm(norm, NormShape::of_row(norm.n), None, &s.x)?);
        }
        self.embed_for_layers(&mut d)?;
        self.spread_over_streams(&mut d)?;
        Ok(d)
    }

    /// The inputs of every layer's own embedding: `(norm(n_embd^-1/2 W x) + width^1/2 table[id]) / 2^1/2`.
    fn embed_for_layers(&self, d: &mut Vec<Dispatch>) -> Result<(), WgpuError> {
        let (s, n_embd, n_layer) = (self.s, self.spec.n_embd, self.spec.n_layer());
        let (Some(spec), Some(w)) = (&self.spec.embedding.per_layer, &self.weights.per_layer) else { return Ok(()) };
        let PerLayerEmbedding { width, proj_norm: _, post_norm: _ } = *spec;
        d.extend(kernels::embedding(self.gpu, &w.token_embd, &s.own_inputs, self.batch)?);
        let scale = (width as f32).sqrt() * std::f32::consts::FRAC_1_SQRT_2;
        let of = ScaleShape { n: n_layer * width, scale, soft_cap: None, wanted: false };
        d.push(kernels::scale(self.gpu, of, &s.own_inputs)?);
        self.multiply(d, Product::new(&w.model_proj, MatvecOutput::Store, &s.x, &s.own_projected))?;
        // A norm of `a x` is one of `x` with an epsilon of `eps / a^2`.
        let of = NormShape {
            n: width,
            rows: n_layer,
            kind: Some(w.proj_norm.kind),
            eps: w.proj_norm.eps * n_embd as f32,
            weight: true,
            bias: w.proj_norm.has_bias,
            scale: std::f32::consts::FRAC_1_SQRT_2,
            accumulate: true,
            wanted_only: false,
        };
        let weights = Some(&w.proj_norm.weights);
        d.push(kernels::norm(self.gpu, of, Some(&s.own_projected), weights, &s.own_inputs, self.batch)?);
        Ok(())
    }

    /// States after the last norm, of wanted tokens, next to one another in `h`.
    pub(super) fn hidden(&self) -> Result<Vec<Dispatch>, WgpuError> {
        let s = self.s;
        let mut d = Vec::new();
        self.join_streams(&mut d)?;
        let of = NormShape { wanted_only: true, ..NormShape::of_row(self.spec.n_embd) };
        let norm = match &self.weights.output_norm {
            Some(norm) => self.norm(norm, of, Some(&s.x), &s.h)?,
            None => kernels::norm(self.gpu, of, Some(&s.x), None, &s.h, self.batch)?,
        };
        d.push(norm);
        Ok(d)
    }

    /// Logits of wanted tokens; nothing for a model without.
    pub(super) fn head(&self) -> Result<Vec<Dispatch>, WgpuError> {
        let (s, w) = (self.s, self.weights);
        let Some(head) = &self.spec.output.head else { return Ok(Vec::new()) };
        let mut d = Vec::new();
        let logits = Product {
            linear: (w.output(), w.output_bias.as_ref()),
            output: MatvecOutput::Store,
            rows: Rows::Wanted,
            x: &s.x,
            y: &s.logits,
        };
        match &w.output_norm {
            Some(norm) if norm.kind == NormKind::Rms && !norm.has_bias => {
                self.join_streams(&mut d)?;
                self.norm_and_product(&mut d, norm, logits)?;
            }
            Some(_) | None => {
                d = self.hidden()?;
                self.multiply(&mut d, Product { rows: Rows::Gathered, x: &s.h, ..logits })?;
            }
        }
        if let Some((scale, soft_cap)) = scaled_logits(head) {
            let of = ScaleShape { n: self.spec.n_vocab, scale, soft_cap, wanted: true };
            d.push(kernels::scale(self.gpu, of, &s.logits)?);
        }
        Ok(d)
    }
}
