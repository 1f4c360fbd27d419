//! Gemma 3n's residual streams: every token has several hidden vectors side by side, of which each layer evaluates the
//! first and predicts and corrects the others (`AltUp`, arXiv 2301.13310); its low-rank residuals beside attention
//! (`LAuReL`, arXiv 2411.07501); and the additional embeddings of its layers, which Gemma 4 also has.

use metal_attention_model::{
    Activation, InputEmbedding, LayerEmbeddingWeights, LayerSpec, LayerStreamsWeights, Linear, PerLayerEmbedding,
    PerLayerTables, Residual, ResidualStreams, StreamsWeights,
};
use wgpu::Buffer;

use crate::activations::{ActivationWidths, widen};
use crate::kernels::{self, Gating, MatvecOutput, NormShape, ScaleShape, StreamSlice, StreamsBuffers};
use crate::plan::{BranchInput, LastProduct, LinearProduct, PlanBuilder};
use crate::weights::{Uploads, WgpuLinear, WgpuNorm, concat};
use crate::{Dispatch, WgpuDevice, WgpuError, WgpuMatrix};

/// A layer's additional embedding `e` with its weights: `x += norm(proj(gelu(gate(x)) * e))`.
#[derive(Debug)]
pub(crate) struct WgpuLayerEmbedding {
    /// Elements of `e`.
    width: usize,
    /// `[width, n_embd]`.
    gate: WgpuLinear,
    /// `[n_embd, width]`.
    proj: WgpuLinear,
    /// The norm before the result is added.
    post_norm: WgpuNorm,
}

/// A layer's prediction and correction of several residual streams, and its low-rank residual, with their weights.
#[derive(Debug)]
pub(crate) struct WgpuLayerStreams {
    /// Number of streams.
    n: usize,
    /// The norm before the router.
    router_norm: WgpuNorm,
    /// The router's matrix, `[n, n_embd]`.
    router: WgpuLinear,
    /// Coefficients of predictions, F32 `[n * n, n]`.
    predict: Buffer,
    /// Coefficients of corrections, F32 `[n, n]`.
    correct: Buffer,
    /// Factor on the first stream before the per-layer embedding is joined, `[n_embd]`.
    correct_scale: Buffer,
    /// `LAuReL`'s first matrix, `[rank, n_embd]`.
    laurel_l: WgpuLinear,
    /// `LAuReL`'s second matrix, `[n_embd, rank]`.
    laurel_r: WgpuLinear,
    /// The norm of `LAuReL`'s product.
    laurel_norm: WgpuNorm,
}

/// The projections between the first residual stream and each of the others.
#[derive(Debug)]
pub(crate) struct WgpuStreams {
    /// Number of streams.
    n: usize,
    /// From the embedding to streams 1, 2, ...
    proj: Vec<WgpuLinear>,
    /// From streams 1, 2, ... back to the first one.
    unembd_proj: Vec<WgpuLinear>,
}

/// The weights that make the additional embeddings of all layers (Gemma 3n).
#[derive(Debug)]
pub(crate) struct WgpuLayerEmbeddingInputs {
    /// Elements of one layer's embedding.
    width: usize,
    /// An embedding table of all layers, `[n_vocab, n_layer * width]`.
    token_embd: WgpuMatrix,
    /// The projection of the token embedding, `[n_layer * width, n_embd]`.
    model_proj: WgpuLinear,
    /// The norm of that projection.
    proj_norm: WgpuNorm,
}

/// Checks the residual streams and additional embeddings of a model; the error is the part without kernels.
pub(super) fn supports(embedding: &InputEmbedding, layers: &[LayerSpec]) -> Result<(), &'static str> {
    let InputEmbedding {
        per_layer,
        streams,
        scale: _,
        assistant: _,
        n_token_types: _,
        n_positions: _,
        norm: _,
        state: _,
        n_rows: _,
    } = embedding;
    if let Some(streams) = streams {
        // Gemma 3n's arrangement is the only one that is supported: a layer corrects the streams when it adds its own
        // embedding.
        let alone = per_layer.is_none() || streams.active != 0;
        let sequential = layers.iter().all(|layer| matches!(layer.residual, Residual::Sequential { .. }));
        if alone || !sequential {
            return Err("residual streams but for those of Gemma 3n");
        }
    }
    Ok(())
}

/// Widens the scratch buffers for the additional embeddings of `n_layer` layers.
pub(super) fn widen_for_layer_embeddings(widths: &mut ActivationWidths, spec: &PerLayerEmbedding, n_layer: usize) {
    widen(&mut widths.layer_embeddings, n_layer * spec.width);
    widen(&mut widths.gate_up, spec.width);
    widen(&mut widths.gated, spec.width);
}

/// Widens the scratch buffers for residual streams of `n_embd` elements.
pub(super) fn widen_for_streams(widths: &mut ActivationWidths, spec: &ResidualStreams, n_embd: usize) {
    widen(&mut widths.streams, spec.n * n_embd);
    widen(&mut widths.router, spec.n);
    widen(&mut widths.laurel_rank, spec.laurel_rank);
    widen(&mut widths.laurel, n_embd);
}

impl WgpuLayerEmbedding {
    /// Uploads the weights.
    pub(super) fn new(gpu: &WgpuDevice, w: &LayerEmbeddingWeights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        // The norm of the inputs is that of all layers: `WgpuLayerEmbeddingInputs`. Weights have their norms' formulas.
        let PerLayerEmbedding { width, proj_norm: _, post_norm: _ } = w.spec;
        Ok(Self {
            width,
            gate: concat(gpu, "the gate of the layer's embedding", &[&w.gate], uploads)?,
            proj: concat(gpu, "the projection of the layer's embedding", &[&w.proj], uploads)?,
            post_norm: WgpuNorm::new(gpu, &w.post_norm)?,
        })
    }
}

impl WgpuLayerStreams {
    /// Uploads the weights.
    pub(super) fn new(gpu: &WgpuDevice, w: &LayerStreamsWeights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        // `supports` requires that the first stream is the active one. Weights have their norms' formulas.
        let ResidualStreams { n, active: _, laurel_rank: _, router_norm: _, laurel_norm: _ } = w.spec;
        Ok(Self {
            n,
            router_norm: WgpuNorm::new(gpu, &w.router_norm)?,
            router: concat(gpu, "the router between streams", &[&w.router], uploads)?,
            predict: gpu.upload("predictions of streams", &w.predict.weight.to_f32())?,
            correct: gpu.upload("corrections of streams", &w.correct.weight.to_f32())?,
            correct_scale: gpu.upload("the scale of a stream", &w.correct_scale)?,
            laurel_l: concat(gpu, "LAuReL's matrix", &[&w.laurel_l], uploads)?,
            laurel_r: concat(gpu, "LAuReL's matrix", &[&w.laurel_r], uploads)?,
            laurel_norm: WgpuNorm::new(gpu, &w.laurel_norm)?,
        })
    }
}

impl WgpuStreams {
    /// Uploads the weights.
    pub(crate) fn new(gpu: &WgpuDevice, w: &StreamsWeights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        let mut each = |linears: &[Linear]| {
            let linear = |l: &Linear| concat(gpu, "a projection between streams", &[l], uploads);
            linears.iter().map(linear).collect::<Result<Vec<_>, _>>()
        };
        Ok(Self { n: 1 + w.proj.len(), proj: each(&w.proj)?, unembd_proj: each(&w.unembd_proj)? })
    }
}

impl WgpuLayerEmbeddingInputs {
    /// Uploads the weights.
    pub(crate) fn new(gpu: &WgpuDevice, w: &PerLayerTables, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        Ok(Self {
            width: w.proj_norm.weight.len(),
            token_embd: uploads.concat(gpu, "the layers' embedding tables", &[&w.token_embd.weight])?,
            model_proj: concat(gpu, "the layers' projection", &[&w.model_proj], uploads)?,
            proj_norm: WgpuNorm::new(gpu, &w.proj_norm)?,
        })
    }
}

impl<'a> PlanBuilder<'a> {
    /// Appends the initial streams, before the first layer: the embedding `x`, and its projections scaled to the length
    /// of `x`. Writes `streams`.
    pub(super) fn spread_over_streams(&self, dispatches: &mut Vec<Dispatch>) -> Result<(), WgpuError> {
        let (scratch, n) = (self.scratch, self.spec.n_embd);
        let Some(w) = &self.weights.streams else { return Ok(()) };
        dispatches.push(kernels::stretch(self.gpu, n, self.rows(&scratch.x), None, self.stream(w.n, 0), false)?);
        for (i, proj) in (1..).zip(&w.proj) {
            self.multiply(dispatches, LinearProduct::new(proj, MatvecOutput::Store, &scratch.x, &scratch.result))?;
            let (from, goal) = (self.rows(&scratch.result), Some(self.rows(&scratch.x)));
            dispatches.push(kernels::stretch(self.gpu, n, from, goal, self.stream(w.n, i), false)?);
        }
        Ok(())
    }

    /// Appends a layer's prediction of every stream from all of them. Updates `streams`; `x` becomes the first.
    pub(crate) fn predict_streams(
        &self,
        dispatches: &mut Vec<Dispatch>,
        w: &WgpuLayerStreams,
    ) -> Result<(), WgpuError> {
        self.route(dispatches, w)?;
        let buffers = self.streams_buffers(&w.predict);
        dispatches.push(kernels::predict_streams(self.gpu, self.spec.n_embd, w.n, &buffers)?);
        Ok(())
    }

    /// Appends `laurel = input + norm(R (L input))`, where `input` is the mixer's.
    pub(crate) fn laurel(
        &self,
        dispatches: &mut Vec<Dispatch>,
        w: &WgpuLayerStreams,
        input: BranchInput<'a>,
    ) -> Result<(), WgpuError> {
        let scratch = self.scratch;
        let input = self.rows_of(dispatches, input)?;
        let down = LinearProduct::new(&w.laurel_l, MatvecOutput::Store, input, &scratch.laurel_small);
        self.multiply(dispatches, down)?;
        let up = LinearProduct::new(&w.laurel_r, MatvecOutput::Store, &scratch.laurel_small, &scratch.laurel);
        self.multiply(dispatches, up)?;
        let shape = NormShape::of_row(self.spec.n_embd);
        dispatches.push(self.norm(&w.laurel_norm, shape, None, &scratch.laurel)?);
        let shape = NormShape { accumulate: true, ..shape };
        dispatches.push(kernels::norm(self.gpu, shape, Some(input), None, &scratch.laurel, self.batch)?);
        Ok(())
    }

    /// Appends `x = (x + laurel) / sqrt(2)`, after the mixer is joined.
    pub(crate) fn add_laurel(&self, dispatches: &mut Vec<Dispatch>) -> Result<(), WgpuError> {
        let (scratch, n) = (self.scratch, self.spec.n_embd);
        let shape = NormShape { accumulate: true, ..NormShape::of_row(n) };
        dispatches.push(kernels::norm(self.gpu, shape, Some(&scratch.laurel), None, &scratch.x, self.batch)?);
        let shape = ScaleShape { n, scale: std::f32::consts::FRAC_1_SQRT_2, soft_cap: None, outputs_only: false };
        dispatches.push(kernels::scale(self.gpu, shape, &scratch.x)?);
        Ok(())
    }

    /// Appends the correction of every stream by the layer's result `x` for the first. Updates `streams`; `x` becomes
    /// the first, and `normed` the first times a learned factor.
    fn correct_streams(&self, dispatches: &mut Vec<Dispatch>, w: &WgpuLayerStreams) -> Result<(), WgpuError> {
        self.route(dispatches, w)?;
        let (n, buffers) = (self.spec.n_embd, self.streams_buffers(&w.correct));
        dispatches.push(kernels::correct_streams(self.gpu, n, w.n, &buffers, &w.correct_scale, &self.scratch.normed)?);
        Ok(())
    }

    /// Appends the end of the streams, after the last layer: `x` becomes the mean of all, each projected back and
    /// scaled to the length of the first.
    pub(super) fn join_streams(&self, dispatches: &mut Vec<Dispatch>) -> Result<(), WgpuError> {
        let (scratch, n) = (self.scratch, self.spec.n_embd);
        let Some(w) = &self.weights.streams else { return Ok(()) };
        for (i, proj) in (1..).zip(&w.unembd_proj) {
            dispatches.push(kernels::stretch(
                self.gpu,
                n,
                self.stream(w.n, i),
                None,
                self.rows(&scratch.normed),
                false,
            )?);
            self.multiply(dispatches, LinearProduct::new(proj, MatvecOutput::Store, &scratch.normed, &scratch.result))?;
            let goal = Some(self.stream(w.n, 0));
            dispatches.push(kernels::stretch(
                self.gpu,
                n,
                self.rows(&scratch.result),
                goal,
                self.rows(&scratch.x),
                true,
            )?);
        }
        let shape = ScaleShape { n, scale: 1.0 / w.n as f32, soft_cap: None, outputs_only: false };
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

    /// The rows of stream `i` of `n_streams`.
    fn stream(&self, n_streams: usize, i: usize) -> StreamSlice<'_> {
        let n = self.spec.n_embd;
        StreamSlice { buffer: &self.scratch.streams, stride: n_streams * n, at: i * n }
    }

    /// Appends Gemma 3n's per-layer embeddings of all layers, `(norm(n_embd^-1/2 W x) + width^1/2 table[id]) / 2^1/2`,
    /// to `layer_embeddings`.
    pub(super) fn embed_for_layers(&self, dispatches: &mut Vec<Dispatch>) -> Result<(), WgpuError> {
        let (scratch, n_embd, n_layer) = (self.scratch, self.spec.n_embd, self.spec.n_layer());
        let Some(w) = &self.weights.per_layer else { return Ok(()) };
        let width = w.width;
        dispatches.extend(kernels::embedding(self.gpu, &w.token_embd, &scratch.layer_embeddings, false, self.batch)?);
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
            columns: None,
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

    /// Appends `x += norm(proj(gelu(gate(x)) * e))` with layer `i`'s additional embedding `e`. With several residual
    /// streams they are corrected before; the first one, scaled, takes the place of `x` on the right (in `normed`), and
    /// the result is added to the others.
    pub(crate) fn add_layer_embedding(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        own: &WgpuLayerEmbedding,
        streams: Option<&WgpuLayerStreams>,
    ) -> Result<(), WgpuError> {
        let (scratch, n) = (self.scratch, self.spec.n_embd);
        if let Some(streams) = streams {
            self.correct_streams(dispatches, streams)?;
        }
        let x = if streams.is_some() { &scratch.normed } else { &scratch.x };
        let (width, stride) = (own.width, self.spec.n_layer() * own.width);
        self.multiply(dispatches, LinearProduct::new(&own.gate, MatvecOutput::Store, x, &scratch.gate_up))?;
        let gating = Gating::Rows { up: &scratch.layer_embeddings, stride, at: i * width };
        dispatches.push(kernels::activation(
            self.gpu,
            Activation::Gelu,
            width,
            gating,
            &scratch.gate_up,
            &scratch.gated,
        )?);
        let Some(streams) = streams else {
            let output = LastProduct::new(&own.proj, &scratch.gated).into();
            return self.join(dispatches, output, Some(&own.post_norm), 1.0);
        };
        self.multiply(dispatches, LinearProduct::new(&own.proj, MatvecOutput::Store, &scratch.gated, &scratch.result))?;
        dispatches.push(self.norm(&own.post_norm, NormShape::of_row(n), None, &scratch.result)?);
        dispatches.push(kernels::add_to_idle_streams(self.gpu, n, streams.n, &scratch.streams, &scratch.result)?);
        Ok(())
    }
}
