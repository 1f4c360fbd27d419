//! The parts of Gemma 3n beside mixer and feed-forward (`streams.cu`): per-layer embeddings; several residual streams, of which
//! each layer computes with the first and predicts the others (AltUp, arXiv 2301.13310); and a low-rank residual beside
//! attention (LAuReL, arXiv 2411.07501).

use metal_attention_model::{
    Activation, InputEmbedding, LayerEmbeddingWeights, LayerSpec, LayerStreamsWeights, Linear, ModelSpec,
    PerLayerEmbedding, PerLayerTables, Residual, ResidualStreams, StreamsWeights,
};

use super::CudaLayer;
use super::dense::activation_code;
use crate::CudaError;
use crate::activations::{Widths, widen};
use crate::args::{ActivationArgs, NormArgs, StreamsArgs, StretchArgs};
use crate::kernels::{self, EntryPoint};
use crate::launch::LaunchGrid;
use crate::matrix::CudaMatrix;
use crate::runner::linear::{LinearInput, norm_args};
use crate::runner::{MicroBatch, ModelRunner};
use crate::slice::{DevicePtr, DeviceSlice};
use crate::weights::{CudaLinear, CudaNorm, CudaVector, Loader};

/// Most residual streams: `MAX_STREAMS` of `streams.cu`.
const MAX_STREAMS: usize = 8;

/// The weights that make the per-layer embeddings of all layers.
#[derive(Debug)]
pub(crate) struct CudaPerLayer {
    /// Embeddings by token id, `[n_vocab, n_layer * width]`.
    table: CudaMatrix,
    /// Projection of the token embedding, `[n_layer * width, n_embd]`.
    model_proj: CudaLinear,
    /// Norm of the projection, `[width]`.
    proj_norm: CudaNorm,
}

/// The projections between the first residual stream and the others.
#[derive(Debug)]
pub(crate) struct CudaStreams {
    /// From the embedding to each further stream, `[n_embd, n_embd]` each.
    proj: Vec<CudaLinear>,
    /// From each further stream back, `[n_embd, n_embd]` each.
    unembd_proj: Vec<CudaLinear>,
}

/// The weights with which a layer adds its per-layer embedding to the residual stream.
#[derive(Debug)]
pub(crate) struct CudaLayerEmbedding {
    /// `[width, n_embd]`.
    gate: CudaLinear,
    /// `[n_embd, width]`.
    proj: CudaLinear,
    /// Norm of the projection, `[n_embd]`.
    post_norm: CudaNorm,
}

/// A layer's weights for several residual streams (AltUp, LAuReL).
#[derive(Debug)]
pub(crate) struct CudaLayerStreams {
    /// Sizes.
    spec: ResidualStreams,
    /// Norm of the router's input.
    router_norm: CudaNorm,
    /// The coefficients of prediction and correction, `[n, n_embd]` for `n` streams.
    router: CudaLinear,
    /// Prediction, F32 `[n * n, n]`.
    predict: CudaVector,
    /// Correction, F32 `[n, n]`.
    correct: CudaVector,
    /// Factors on the corrected first stream, as input of the per-layer embedding, `[n_embd]`.
    correct_scale: CudaVector,
    /// LAuReL's first product, `[laurel_rank, n_embd]`.
    laurel_l: CudaLinear,
    /// LAuReL's second product, `[n_embd, laurel_rank]`.
    laurel_r: CudaLinear,
    /// Norm of its result.
    laurel_norm: CudaNorm,
}

impl CudaPerLayer {
    /// Uploads the weights.
    pub(super) fn new(loader: &mut Loader<'_>, w: &PerLayerTables) -> Result<Self, CudaError> {
        Ok(Self {
            table: loader.matrix(&w.token_embd)?,
            model_proj: loader.linear(&w.model_proj)?,
            proj_norm: CudaNorm::new(loader, &w.proj_norm)?,
        })
    }
}

impl CudaStreams {
    /// Uploads the weights.
    pub(super) fn new(loader: &mut Loader<'_>, w: &StreamsWeights) -> Result<Self, CudaError> {
        let mut linears =
            |linears: &[Linear]| linears.iter().map(|linear| loader.linear(linear)).collect::<Result<_, _>>();
        Ok(Self { proj: linears(&w.proj)?, unembd_proj: linears(&w.unembd_proj)? })
    }
}

impl CudaLayerEmbedding {
    /// Uploads the weights.
    pub(super) fn new(loader: &mut Loader<'_>, w: &LayerEmbeddingWeights) -> Result<Self, CudaError> {
        Ok(Self {
            gate: loader.linear(&w.gate)?,
            proj: loader.linear(&w.proj)?,
            post_norm: CudaNorm::new(loader, &w.post_norm)?,
        })
    }
}

impl CudaLayerStreams {
    /// Uploads the weights.
    pub(super) fn new(loader: &mut Loader<'_>, w: &LayerStreamsWeights) -> Result<Self, CudaError> {
        Ok(Self {
            spec: w.spec,
            router_norm: CudaNorm::new(loader, &w.router_norm)?,
            router: loader.linear(&w.router)?,
            predict: loader.vector(&w.predict.weight.to_f32())?,
            correct: loader.vector(&w.correct.weight.to_f32())?,
            correct_scale: loader.vector(&w.correct_scale)?,
            laurel_l: loader.linear(&w.laurel_l)?,
            laurel_r: loader.linear(&w.laurel_r)?,
            laurel_norm: CudaNorm::new(loader, &w.laurel_norm)?,
        })
    }
}

/// Checks that there are kernels for the residual streams of a model; the error is the part without one.
pub(crate) fn supports(embedding: &InputEmbedding, layers: &[LayerSpec]) -> Result<(), &'static str> {
    // There are kernels for all others.
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
        // As in Gemma 3n files: layers correct the streams where they add their per-layer embedding, so both have to be there,
        // and the first stream is the one that layers compute with.
        let alone = per_layer.is_none() || streams.active != 0 || streams.n > MAX_STREAMS;
        let sequential = layers.iter().all(|layer| matches!(layer.residual, Residual::Sequential { .. }));
        if alone || !sequential {
            return Err("residual streams but for those of Gemma 3n");
        }
    }
    Ok(())
}

/// Widens the buffers of intermediate results for the additional embeddings of `n_layer` layers.
pub(super) fn widen_for_layer_embeddings(widths: &mut Widths, spec: &PerLayerEmbedding, n_layer: usize) {
    widen(&mut widths.per_layer_inputs, n_layer * spec.width);
    widen(&mut widths.gate_up, spec.width);
    widen(&mut widths.n_ff, spec.width);
}

/// Widens the buffers of intermediate results for several residual streams.
pub(super) fn widen_for_streams(widths: &mut Widths, spec: &ResidualStreams) {
    widen(&mut widths.n_streams, spec.n);
    widen(&mut widths.laurel_rank, spec.laurel_rank);
}

/// Rows in a buffer: from the first on, and the elements from one to the next.
pub(crate) type StreamRows = (DeviceSlice<f32>, usize);

impl ModelRunner {
    /// Launches the per-layer embeddings of all layers: `(norm(n_embd^-1/2 W x) + width^1/2 table[id]) / 2^1/2`.
    pub(crate) fn per_layer_embeddings(
        &mut self,
        spec: &ModelSpec,
        w: &CudaPerLayer,
        n: usize,
    ) -> Result<(), CudaError> {
        let (n_embd, n_layer, width) = (spec.n_embd, spec.n_layer(), w.proj_norm.n);
        let (inputs, projected) = (self.buffers.per_layer_inputs.slice(), self.buffers.per_layer_projected.slice());
        let half = std::f32::consts::FRAC_1_SQRT_2;
        self.look_up(&w.table, (width as f32).sqrt() * half, inputs, n)?;
        let x = self.rows(self.buffers.x.slice(), n_embd, n)?;
        self.store("projection to layers", &w.model_proj, x, projected, n)?;
        // `norm(a x)` is `norm(x)` with an epsilon of `eps / a^2`, so the factor goes into the epsilon.
        let args = norm_args(Some(&w.proj_norm), projected, width);
        let eps = args.eps * n_embd as f32;
        self.norm(NormArgs { out: inputs.ptr(), eps, scale: half, accumulate: 1, ..args }, n * n_layer)
    }

    /// Launches the per-layer embedding of layer `i`: `x += norm(proj(gelu(gate(x)) * input))`. With several streams, the
    /// streams are corrected first, the gate reads the scaled first stream, and the result is added to the other ones.
    pub(crate) fn add_layer_embedding(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        layer: &CudaLayer,
    ) -> Result<(), CudaError> {
        let (n, n_embd) = (batch.size.n_tokens, batch.spec.n_embd);
        let Some(own) = &layer.embedding else { return Ok(()) };
        let streams = layer.streams.as_ref();
        if let Some(w) = streams {
            self.route(n_embd, w, n)?;
            let args = StreamsArgs {
                matrix: w.correct.ptr(),
                scale: w.correct_scale.ptr(),
                scaled: self.buffers.h.ptr(),
                ..self.streams_args(&w.spec, n_embd)
            };
            self.mix(kernels::CORRECT_STREAMS, &args, n)?;
        }
        let x = if streams.is_some() { self.buffers.h.slice() } else { self.buffers.x.slice() };
        let (width, gate) = (own.gate.weight.n_rows, self.buffers.gate_up.slice());
        let input = self.rows(x, n_embd, n)?;
        self.store("gate of an embedding", &own.gate, input, gate, n)?;
        let (activation, parameter) = activation_code(Activation::Gelu);
        let args = ActivationArgs {
            gate: gate.ptr(),
            up: self.buffers.per_layer_inputs.slice().skip(i * width).ptr(),
            out: self.buffers.gated.ptr(),
            packed: self.buffers.packed_gated.ptr(),
            gate_stride: width as u32,
            up_stride: (batch.spec.n_layer() * width) as u32,
            n_ff: width as u32,
            n_token_tiles: 0,
            activation,
            parameter,
        };
        self.activate(args, n)?;
        let result = self.buffers.result.slice();
        let input = self.input(&self.buffers.gated, &self.buffers.packed_gated, n);
        self.store("projection of an embedding", &own.proj, input, result, n)?;
        let normed = norm_args(Some(&own.post_norm), result, n_embd);
        let Some(streams) = streams else {
            return self.norm(NormArgs { out: self.buffers.x.ptr(), accumulate: 1, ..normed }, n);
        };
        self.norm(NormArgs { out: result.ptr(), ..normed }, n)?;
        let args = StreamsArgs { x: result.ptr(), ..self.streams_args(&streams.spec, n_embd) };
        self.mix(kernels::ADD_TO_IDLE_STREAMS, &args, n)
    }

    /// Launches the streams before the first layer: the first is the embedding, the others are projections of it with the same
    /// norm.
    pub(crate) fn spread_over_streams(
        &mut self,
        spec: &ModelSpec,
        w: Option<&CudaStreams>,
        n: usize,
    ) -> Result<(), CudaError> {
        let (Some(streams), Some(w)) = (&spec.embedding.streams, w) else { return Ok(()) };
        let n_embd = spec.n_embd;
        let (x, result) = ((self.buffers.x.slice(), n_embd), (self.buffers.result.slice(), n_embd));
        self.stretch(n_embd, x, None, self.stream(streams, n_embd, 0), n)?;
        let input = self.rows(x.0, n_embd, n)?;
        for (i, proj) in (1..).zip(&w.proj) {
            self.store("projection to a stream", proj, input, result.0, n)?;
            self.stretch(n_embd, result, Some(x), self.stream(streams, n_embd, i), n)?;
        }
        Ok(())
    }

    /// Launches a layer's prediction of every stream; `x` becomes the predicted first one.
    pub(crate) fn predict_streams(&mut self, batch: MicroBatch<'_>, layer: &CudaLayer) -> Result<(), CudaError> {
        let (n, n_embd) = (batch.size.n_tokens, batch.spec.n_embd);
        let Some(w) = &layer.streams else { return Ok(()) };
        self.route(n_embd, w, n)?;
        let args = StreamsArgs { matrix: w.predict.ptr(), ..self.streams_args(&w.spec, n_embd) };
        self.mix(kernels::PREDICT_STREAMS, &args, n)
    }

    /// Launches `laurel = h + norm(r(l(h)))`, where `h` is the mixer's input.
    pub(crate) fn laurel(
        &mut self,
        batch: MicroBatch<'_>,
        layer: &CudaLayer,
        input: LinearInput,
    ) -> Result<(), CudaError> {
        let (n, n_embd) = (batch.size.n_tokens, batch.spec.n_embd);
        let Some(w) = &layer.streams else { return Ok(()) };
        let (small, laurel) = (self.buffers.laurel_small.slice(), self.buffers.laurel.slice());
        self.store("laurel", &w.laurel_l, input, small, n)?;
        let input = self.rows(small, w.laurel_r.weight.n_in, n)?;
        self.store("laurel", &w.laurel_r, input, laurel, n)?;
        self.norm(NormArgs { out: laurel.ptr(), ..norm_args(Some(&w.laurel_norm), laurel, n_embd) }, n)?;
        let args = norm_args(layer.mixer_norm.as_ref(), self.buffers.x.slice(), n_embd);
        self.norm(NormArgs { out: laurel.ptr(), accumulate: 1, ..args }, n)
    }

    /// Launches `x = (x + laurel) / sqrt(2)`, after attention.
    pub(crate) fn add_laurel(&mut self, batch: MicroBatch<'_>, layer: &CudaLayer) -> Result<(), CudaError> {
        let (n, n_embd, x) = (batch.size.n_tokens, batch.spec.n_embd, self.buffers.x.slice());
        if layer.streams.is_none() {
            return Ok(());
        }
        self.norm(NormArgs { out: x.ptr(), accumulate: 1, ..norm_args(None, self.buffers.laurel.slice(), n_embd) }, n)?;
        let scale = std::f32::consts::FRAC_1_SQRT_2;
        self.norm(NormArgs { out: x.ptr(), scale, ..norm_args(None, x, n_embd) }, n)
    }

    /// Launches the end of the streams after the last layer: `x` becomes the mean of all, each projected and rescaled to the
    /// norm of the first.
    pub(crate) fn join_streams(
        &mut self,
        spec: &ModelSpec,
        w: Option<&CudaStreams>,
        n: usize,
    ) -> Result<(), CudaError> {
        let (Some(streams), Some(w)) = (&spec.embedding.streams, w) else { return Ok(()) };
        let n_embd = spec.n_embd;
        let (x, h, result) =
            [&self.buffers.x, &self.buffers.h, &self.buffers.result].map(|buffer| (buffer.slice(), n_embd)).into();
        for (i, proj) in (1..).zip(&w.unembd_proj) {
            self.stretch(n_embd, self.stream(streams, n_embd, i), None, h, n)?;
            let input = self.rows(h.0, n_embd, n)?;
            self.store("projection of a stream", proj, input, result.0, n)?;
            let args = stretch_args(n_embd, result, Some(self.stream(streams, n_embd, 0)), x);
            self.launch_stretch(&StretchArgs { accumulate: 1, ..args }, n)?;
        }
        let scale = 1.0 / streams.n as f32;
        self.norm(NormArgs { out: x.0.ptr(), scale, ..norm_args(None, x.0, n_embd) }, n)
    }

    /// Launches `router = W norm(x) / n_embd`, the coefficients of prediction and correction.
    fn route(&mut self, n_embd: usize, w: &CudaLayerStreams, n: usize) -> Result<(), CudaError> {
        let (h, router) = (self.buffers.h.slice(), self.buffers.router.slice());
        let args = norm_args(Some(&w.router_norm), self.buffers.x.slice(), n_embd);
        self.norm(NormArgs { out: h.ptr(), scale: 1.0 / n_embd as f32, ..args }, n)?;
        let input = self.rows(h, n_embd, n)?;
        self.store("router of streams", &w.router, input, router, n)
    }

    /// Arguments of the kernels of streams; the caller sets the matrix, and for a correction the scale.
    fn streams_args(&self, spec: &ResidualStreams, n_embd: usize) -> StreamsArgs {
        StreamsArgs {
            router: self.buffers.router.ptr(),
            matrix: DevicePtr::NULL,
            streams: self.buffers.streams.ptr(),
            x: self.buffers.x.ptr(),
            scale: DevicePtr::NULL,
            scaled: DevicePtr::NULL,
            n: n_embd as u32,
            n_streams: spec.n as u32,
        }
    }

    /// Launches a kernel with a thread for each element of the residual stream.
    fn mix(&mut self, entry: EntryPoint<StreamsArgs>, args: &StreamsArgs, n_tokens: usize) -> Result<(), CudaError> {
        let blocks = (args.n as usize).div_ceil(256);
        self.launch(entry, "", LaunchGrid { blocks: [blocks, n_tokens, 1], threads: 256, shared: 0 }, args)
    }

    /// The rows of stream `i`.
    fn stream(&self, spec: &ResidualStreams, n_embd: usize, i: usize) -> StreamRows {
        (self.buffers.streams.slice().skip(i * n_embd), spec.n * n_embd)
    }

    /// Launches `y = a`, rescaled to the norm of `goal` if there is one.
    pub(crate) fn stretch(
        &mut self,
        n_embd: usize,
        a: StreamRows,
        goal: Option<StreamRows>,
        y: StreamRows,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        self.launch_stretch(&stretch_args(n_embd, a, goal, y), n_tokens)
    }

    /// Launches the rescaling kernel, a block for each token.
    fn launch_stretch(&mut self, args: &StretchArgs, n_tokens: usize) -> Result<(), CudaError> {
        self.launch(kernels::STRETCH, "", LaunchGrid { blocks: [n_tokens, 1, 1], threads: 256, shared: 0 }, args)
    }
}

/// Arguments of `y = a`, rescaled to the norm of `goal` if there is one.
fn stretch_args(n_embd: usize, a: StreamRows, goal: Option<StreamRows>, y: StreamRows) -> StretchArgs {
    let (goal, goal_stride) = goal.unwrap_or((DeviceSlice::NONE, 0));
    StretchArgs {
        a: a.0.ptr(),
        goal: goal.ptr(),
        y: y.0.ptr(),
        n: n_embd as u32,
        a_stride: a.1 as u32,
        goal_stride: goal_stride as u32,
        y_stride: y.1 as u32,
        accumulate: 0,
        scale: 1.0,
    }
}
