//! Gemma 3n's residual streams: every token has several hidden vectors side by side, of which each layer evaluates the
//! first and predicts and corrects the others (`AltUp`, arXiv 2301.13310); and its low-rank residuals beside attention
//! (`LAuReL`, arXiv 2411.07501). All functions append nothing for models without.

use crate::kernels::{self, MatvecOutput, NormShape, ScaleShape, StreamSlice, StreamsBuffers};
use crate::{Dispatch, WgpuError};
use metal_attention_model::ResidualStreams;
use wgpu::Buffer;

use super::{LinearProduct, PlanBuilder};
use crate::weights::WgpuLayerStreams;

impl PlanBuilder<'_> {
    /// Appends the initial streams, before the first layer: the embedding `x`, and its projections scaled to the length
    /// of `x`. Writes `streams`.
    pub(super) fn spread_over_streams(&self, dispatches: &mut Vec<Dispatch>) -> Result<(), WgpuError> {
        let (scratch, n) = (self.scratch, self.spec.n_embd);
        let (Some(spec), Some(w)) = (&self.spec.embedding.streams, &self.weights.streams) else { return Ok(()) };
        dispatches.push(kernels::stretch(self.gpu, n, self.rows(&scratch.x), None, self.stream(spec, 0), false)?);
        for (i, proj) in (1..).zip(&w.proj) {
            self.multiply(dispatches, LinearProduct::new(proj, MatvecOutput::Store, &scratch.x, &scratch.result))?;
            let (from, goal) = (self.rows(&scratch.result), Some(self.rows(&scratch.x)));
            dispatches.push(kernels::stretch(self.gpu, n, from, goal, self.stream(spec, i), false)?);
        }
        Ok(())
    }

    /// Appends a layer's prediction of every stream from all of them. Updates `streams`; `x` becomes the first.
    pub(super) fn predict_streams(&self, dispatches: &mut Vec<Dispatch>, i: usize) -> Result<(), WgpuError> {
        let (Some(spec), Some(w)) = (&self.spec.embedding.streams, &self.weights.layers[i].streams) else {
            return Ok(());
        };
        self.route(dispatches, w)?;
        let buffers = self.streams_buffers(&w.predict);
        dispatches.push(kernels::predict_streams(self.gpu, self.spec.n_embd, spec.n, &buffers)?);
        Ok(())
    }

    /// Appends `laurel = normed + norm(R (L normed))`, where `normed` is the mixer's input.
    pub(super) fn laurel(&self, dispatches: &mut Vec<Dispatch>, i: usize) -> Result<(), WgpuError> {
        let (scratch, Some(w)) = (self.scratch, &self.weights.layers[i].streams) else { return Ok(()) };
        self.multiply(
            dispatches,
            LinearProduct::new(&w.laurel_l, MatvecOutput::Store, &scratch.normed, &scratch.laurel_small),
        )?;
        self.multiply(
            dispatches,
            LinearProduct::new(&w.laurel_r, MatvecOutput::Store, &scratch.laurel_small, &scratch.laurel),
        )?;
        let shape = NormShape::of_row(self.spec.n_embd);
        dispatches.push(self.norm(&w.laurel_norm, shape, None, &scratch.laurel)?);
        let shape = NormShape { accumulate: true, ..shape };
        dispatches.push(kernels::norm(self.gpu, shape, Some(&scratch.normed), None, &scratch.laurel, self.batch)?);
        Ok(())
    }

    /// Appends `x = (x + laurel) / sqrt(2)`, after the mixer is joined.
    pub(super) fn add_laurel(&self, dispatches: &mut Vec<Dispatch>, i: usize) -> Result<(), WgpuError> {
        let (scratch, n) = (self.scratch, self.spec.n_embd);
        if self.weights.layers[i].streams.is_none() {
            return Ok(());
        }
        let shape = NormShape { accumulate: true, ..NormShape::of_row(n) };
        dispatches.push(kernels::norm(self.gpu, shape, Some(&scratch.laurel), None, &scratch.x, self.batch)?);
        let shape = ScaleShape { n, scale: std::f32::consts::FRAC_1_SQRT_2, soft_cap: None, outputs_only: false };
        dispatches.push(kernels::scale(self.gpu, shape, &scratch.x)?);
        Ok(())
    }

    /// Appends the correction of every stream by the layer's result `x` for the first. Updates `streams`; `x` becomes
    /// the first, and `normed` the first times a learned factor.
    pub(super) fn correct_streams(
        &self,
        dispatches: &mut Vec<Dispatch>,
        spec: &ResidualStreams,
        w: &WgpuLayerStreams,
    ) -> Result<(), WgpuError> {
        self.route(dispatches, w)?;
        let (n, buffers) = (self.spec.n_embd, self.streams_buffers(&w.correct));
        dispatches.push(kernels::correct_streams(
            self.gpu,
            n,
            spec.n,
            &buffers,
            &w.correct_scale,
            &self.scratch.normed,
        )?);
        Ok(())
    }

    /// Appends the end of the streams, after the last layer: `x` becomes the mean of all, each projected back and
    /// scaled to the length of the first.
    pub(super) fn join_streams(&self, dispatches: &mut Vec<Dispatch>) -> Result<(), WgpuError> {
        let (scratch, n) = (self.scratch, self.spec.n_embd);
        let (Some(spec), Some(w)) = (&self.spec.embedding.streams, &self.weights.streams) else { return Ok(()) };
        for (i, proj) in (1..).zip(&w.unembd_proj) {
            dispatches.push(kernels::stretch(
                self.gpu,
                n,
                self.stream(spec, i),
                None,
                self.rows(&scratch.normed),
                false,
            )?);
            self.multiply(dispatches, LinearProduct::new(proj, MatvecOutput::Store, &scratch.normed, &scratch.result))?;
            let goal = Some(self.stream(spec, 0));
            dispatches.push(kernels::stretch(
                self.gpu,
                n,
                self.rows(&scratch.result),
                goal,
                self.rows(&scratch.x),
                true,
            )?);
        }
        let shape = ScaleShape { n, scale: 1.0 / spec.n as f32, soft_cap: None, outputs_only: false };
        dispatches.push(kernels::scale(self.gpu, shape, &scratch.x)?);
        Ok(())
    }

    /// Appends `router = W norm(x) / n_embd`, the coefficients of predictions and corrections.
    fn route(&self, dispatches: &mut Vec<Dispatch>, w: &WgpuLayerStreams) -> Result<(), WgpuError> {
        let (scratch, n) = (self.scratch, self.spec.n_embd);
        let shape = NormShape { scale: 1.0 / n as f32, ..NormShape::of_row(n) };
        dispatches.push(self.norm(&w.router_norm, shape, Some(&scratch.x), &scratch.normed)?);
        self.multiply(dispatches, LinearProduct::new(&w.router, MatvecOutput::Store, &scratch.normed, &scratch.router))
    }

    /// The buffers of a prediction or correction with the coefficients' `matrix`.
    fn streams_buffers<'b>(&'b self, matrix: &'b Buffer) -> StreamsBuffers<'b> {
        StreamsBuffers { router: &self.scratch.router, matrix, streams: &self.scratch.streams, x: &self.scratch.x }
    }

    /// The rows of a buffer as wide as the residual stream.
    fn rows<'b>(&self, buffer: &'b Buffer) -> StreamSlice<'b> {
        StreamSlice { buffer, stride: self.spec.n_embd, at: 0 }
    }

    /// The rows of stream `i`.
    fn stream(&self, spec: &ResidualStreams, i: usize) -> StreamSlice<'_> {
        let n = self.spec.n_embd;
        StreamSlice { buffer: &self.scratch.streams, stride: spec.n * n, at: i * n }
    }
}
