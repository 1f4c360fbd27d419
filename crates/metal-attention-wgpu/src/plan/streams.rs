//! Several residual streams of which each layer computes with the first (`AltUp`, arXiv 2301.13310), and learned residuals of low
//! rank beside attention (`LAuReL`, arXiv 2411.07501), as Gemma 3n has them.

use crate::kernels::{self, MatvecOutput, NormShape, RowsOf, ScaleShape, StreamsBuffers};
use crate::{Dispatch, WgpuError};
use metal_attention_model::Streams;
use wgpu::Buffer;

use super::{PlanBuilder, Product};
use crate::weights::WgpuLayerStreams;

impl PlanBuilder<'_> {
    /// Before the first layer: the other streams are projections of the embedding, as long as it.
    pub(super) fn spread_over_streams(&self, d: &mut Vec<Dispatch>) -> Result<(), WgpuError> {
        let (s, n) = (self.s, self.spec.n_embd);
        let (Some(spec), Some(w)) = (&self.spec.embedding.streams, &self.weights.streams) else { return Ok(()) };
        d.push(kernels::stretch(self.gpu, n, self.rows(&s.x), None, self.stream(spec, 0), false)?);
        for (i, proj) in (1..).zip(&w.proj) {
            self.multiply(d, Product::new(proj, MatvecOutput::Store, &s.x, &s.result))?;
            let (from, goal) = (self.rows(&s.result), Some(self.rows(&s.x)));
            d.push(kernels::stretch(self.gpu, n, from, goal, self.stream(spec, i), false)?);
        }
        Ok(())
    }

    /// A layer's prediction of every stream; `x` becomes that of the first.
    pub(super) fn predict_streams(&self, d: &mut Vec<Dispatch>, i: usize) -> Result<(), WgpuError> {
        let (Some(spec), Some(w)) = (&self.spec.embedding.streams, &self.weights.layers[i].streams) else {
            return Ok(());
        };
        self.route(d, w)?;
        let buffers = self.streams_buffers(&w.predict);
        d.push(kernels::predict_streams(self.gpu, self.spec.n_embd, spec.n, &buffers)?);
        Ok(())
    }

    /// `laurel = h + norm(r(l(h)))` of the mixer's input.
    pub(super) fn laurel(&self, d: &mut Vec<Dispatch>, i: usize) -> Result<(), WgpuError> {
        let (s, Some(w)) = (self.s, &self.weights.layers[i].streams) else { return Ok(()) };
        self.multiply(d, Product::new(&w.laurel_l, MatvecOutput::Store, &s.h, &s.laurel_small))?;
        self.multiply(d, Product::new(&w.laurel_r, MatvecOutput::Store, &s.laurel_small, &s.laurel))?;
        let of = NormShape::of_row(self.spec.n_embd);
        d.push(self.norm(&w.laurel_norm, of, None, &s.laurel)?);
        let of = NormShape { accumulate: true, ..of };
        d.push(kernels::norm(self.gpu, of, Some(&s.h), None, &s.laurel, self.batch)?);
        Ok(())
    }

    /// `x = (x + laurel) / sqrt(2)`, after attention.
    pub(super) fn add_laurel(&self, d: &mut Vec<Dispatch>, i: usize) -> Result<(), WgpuError> {
        let (s, n) = (self.s, self.spec.n_embd);
        if self.weights.layers[i].streams.is_none() {
            return Ok(());
        }
        let of = NormShape { accumulate: true, ..NormShape::of_row(n) };
        d.push(kernels::norm(self.gpu, of, Some(&s.laurel), None, &s.x, self.batch)?);
        let of = ScaleShape { n, scale: std::f32::consts::FRAC_1_SQRT_2, soft_cap: None, wanted: false };
        d.push(kernels::scale(self.gpu, of, &s.x)?);
        Ok(())
    }

    /// Every stream is corrected by what the layer made of the first; `x` becomes that, and `h` that times a factor.
    pub(super) fn correct_streams(
        &self,
        d: &mut Vec<Dispatch>,
        spec: &Streams,
        w: &WgpuLayerStreams,
    ) -> Result<(), WgpuError> {
        self.route(d, w)?;
        let (n, buffers) = (self.spec.n_embd, self.streams_buffers(&w.correct));
        d.push(kernels::correct_streams(self.gpu, n, spec.n, &buffers, &w.correct_scale, &self.s.h)?);
        Ok(())
    }

    /// After the last layer: `x` becomes the mean of all streams, projected back to the first one's length.
    pub(super) fn join_streams(&self, d: &mut Vec<Dispatch>) -> Result<(), WgpuError> {
        let (s, n) = (self.s, self.spec.n_embd);
        let (Some(spec), Some(w)) = (&self.spec.embedding.streams, &self.weights.streams) else { return Ok(()) };
        for (i, proj) in (1..).zip(&w.unembd_proj) {
            d.push(kernels::stretch(self.gpu, n, self.stream(spec, i), None, self.rows(&s.h), false)?);
            self.multiply(d, Product::new(proj, MatvecOutput::Store, &s.h, &s.result))?;
            let goal = Some(self.stream(spec, 0));
            d.push(kernels::stretch(self.gpu, n, self.rows(&s.result), goal, self.rows(&s.x), true)?);
        }
        let of = ScaleShape { n, scale: 1.0 / spec.n as f32, soft_cap: None, wanted: false };
        d.push(kernels::scale(self.gpu, of, &s.x)?);
        Ok(())
    }

    /// `router = W norm(x) / n_embd`
    fn route(&self, d: &mut Vec<Dispatch>, w: &WgpuLayerStreams) -> Result<(), WgpuError> {
        let (s, n) = (self.s, self.spec.n_embd);
        let of = NormShape { scale: 1.0 / n as f32, ..NormShape::of_row(n) };
        d.push(self.norm(&w.router_norm, of, Some(&s.x), &s.h)?);
        self.multiply(d, Product::new(&w.router, MatvecOutput::Store, &s.h, &s.router))
    }

    fn streams_buffers<'b>(&'b self, matrix: &'b Buffer) -> StreamsBuffers<'b> {
        StreamsBuffers { router: &self.s.router, matrix, streams: &self.s.streams, x: &self.s.x }
    }

    /// Whole rows of a buffer as wide as the residual stream.
    fn rows<'b>(&self, buffer: &'b Buffer) -> RowsOf<'b> {
        RowsOf { buffer, stride: self.spec.n_embd, at: 0 }
    }

    /// Rows of one of the streams.
    fn stream(&self, spec: &Streams, i: usize) -> RowsOf<'_> {
        let n = self.spec.n_embd;
        RowsOf { buffer: &self.s.streams, stride: spec.n * n, at: i * n }
    }
}
