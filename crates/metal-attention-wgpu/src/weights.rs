//! The weights of a model on the GPU, in the groups that the plans multiply: tensors of the file that share their input
//! are stacked or interleaved into one matrix. The parts and their weights are in `parts/`.

mod uploads;

use metal_attention_gguf::Tensor;
use metal_attention_model::{Layer, Linear, Loaded, ModelSpec, NormKind, NormWeights, Weights};
use wgpu::Buffer;

use crate::parts::{LayerPages, PartsUploader, WgpuEnds, WgpuLayerEmbeddingInputs, WgpuParts, WgpuStreams};
use crate::{Arena, WgpuDevice, WgpuError, WgpuMatrix};
pub(crate) use uploads::Uploads;

/// `y = W x + b`, where `W` may be several tensors of the file that share their input.
#[derive(Debug)]
pub(crate) struct WgpuLinear {
    /// `[n_out, n_in]`.
    pub(crate) weight: WgpuMatrix,
    /// F32 `[n_out]`.
    pub(crate) bias: Option<Buffer>,
}

/// A norm with its weights.
#[derive(Debug)]
pub(crate) struct WgpuNorm {
    /// RMSNorm or layer norm.
    pub(crate) kind: NormKind,
    /// Added to the variance.
    pub(crate) eps: f32,
    /// Elements of a row.
    pub(crate) n: usize,
    /// Weights `[n]`, then the bias `[n]` if there is one.
    pub(crate) weights: Buffer,
    /// Whether there is a bias.
    pub(crate) has_bias: bool,
}

impl WgpuNorm {
    /// Uploads a norm.
    pub(crate) fn new(gpu: &WgpuDevice, w: &NormWeights) -> Result<Self, WgpuError> {
        let bias = w.bias.as_deref().unwrap_or(&[]);
        Ok(Self {
            kind: w.kind,
            eps: w.eps,
            n: w.weight.len(),
            weights: gpu.upload("a norm", &[&*w.weight, bias].concat())?,
            has_bias: w.bias.is_some(),
        })
    }

    /// Whether products can compute the norm in their prologue.
    pub(crate) fn fits_prologue(&self) -> bool {
        match self.kind {
            NormKind::Rms => !self.has_bias,
            NormKind::Layer => false,
        }
    }
}

/// The weights of a model.
#[derive(Debug)]
pub(crate) struct WgpuWeights {
    /// Embedding, last norm and output head.
    pub(crate) ends: WgpuEnds,
    /// The additional embeddings of all layers.
    pub(crate) per_layer: Option<WgpuLayerEmbeddingInputs>,
    /// Several residual streams.
    pub(crate) streams: Option<WgpuStreams>,
    /// The layers.
    pub(crate) layers: Vec<Layer<WgpuParts>>,
}

impl WgpuWeights {
    /// Gives every weight its place, and uploads all but the matrices, whose rows are left to `uploads`. Consecutive
    /// layers, at most `layers_in_a_buffer`, share a buffer as far as one binding reaches. `pages`: those of each layer.
    /// `first`: as for [`WgpuEnds::new`].
    pub(crate) fn new(
        gpu: &WgpuDevice,
        spec: &ModelSpec,
        weights: &Weights,
        pages: &[LayerPages],
        layers_in_a_buffer: usize,
        uploads: &mut Uploads,
        first: &[(Tensor, WgpuMatrix)],
    ) -> Result<Self, WgpuError> {
        let ends = WgpuEnds::new(gpu, &spec.embedding, weights, uploads, first)?;
        let per_layer =
            weights.per_layer.as_ref().map(|w| WgpuLayerEmbeddingInputs::new(gpu, w, uploads)).transpose()?;
        let streams = weights.streams.as_ref().map(|w| WgpuStreams::new(gpu, w, uploads)).transpose()?;
        // The layers' matrices are in as few buffers as possible: the persistent kernel runs all layers of one buffer.
        let bytes: Vec<_> = weights.layers.iter().map(layer_bytes).collect();
        let mut all = weights.layers.iter().zip(pages);
        let mut layers = Vec::new();
        for (n, arena) in Arena::in_runs(gpu, "the layers' weights", &bytes, layers_in_a_buffer)? {
            uploads.arena = arena;
            for (layer, &pages) in all.by_ref().take(n) {
                let mut uploader = PartsUploader { gpu, uploads: &mut *uploads, n_embd: spec.n_embd, pages };
                layers.push(layer.prepare(&mut uploader)?);
            }
        }
        Ok(Self { ends, per_layer, streams, layers })
    }
}

/// Most bytes of a layer's matrices in an [`Arena`]. Stacked tensors of one type share a part, which takes no more.
fn layer_bytes(layer: &Layer<Loaded>) -> u64 {
    let bytes = |l: &Linear| WgpuMatrix::bytes_of(l.weight.ty(), l.weight.row_len(), l.weight.n_rows());
    layer.linears().into_iter().map(|l| Arena::padded(bytes(l))).fold(0, u64::saturating_add)
}

/// Matrices stacked in this order, with their biases.
pub(crate) fn concat(
    gpu: &WgpuDevice,
    what: &str,
    linears: &[&Linear],
    uploads: &mut Uploads,
) -> Result<WgpuLinear, WgpuError> {
    let weights: Vec<_> = linears.iter().map(|l| &l.weight).collect();
    let bias =
        linears.iter().any(|l| l.bias.is_some()).then(|| linears.iter().flat_map(|l| bias(l)).collect::<Vec<_>>());
    Ok(WgpuLinear {
        weight: uploads.concat(gpu, what, &weights)?,
        bias: bias.map(|b| gpu.upload("a bias", &b)).transpose()?,
    })
}

/// Two matrices with their rows interleaved, and their biases likewise.
pub(crate) fn interleave(
    gpu: &WgpuDevice,
    what: &str,
    even: &Linear,
    odd: &Linear,
    uploads: &mut Uploads,
) -> Result<WgpuLinear, WgpuError> {
    let has_bias = even.bias.is_some() || odd.bias.is_some();
    let bias = has_bias.then(|| bias(even).into_iter().zip(bias(odd)).flat_map(|(e, o)| [e, o]).collect::<Vec<_>>());
    Ok(WgpuLinear {
        weight: uploads.interleave(gpu, what, &even.weight, &odd.weight)?,
        bias: bias.map(|b| gpu.upload("a bias", &b)).transpose()?,
    })
}

/// The gates and ups of all experts with their rows interleaved, one expert below the other, and their biases likewise.
pub(crate) fn interleave_all(
    gpu: &WgpuDevice,
    what: &str,
    gates: &[&Linear],
    ups: &[&Linear],
    uploads: &mut Uploads,
) -> Result<WgpuLinear, WgpuError> {
    let has_bias = gates.iter().chain(ups).any(|linear| linear.bias.is_some());
    let pairs = gates.iter().zip(ups).flat_map(|(gate, up)| bias(gate).into_iter().zip(bias(up)));
    let bias: Vec<f32> = if has_bias { pairs.flat_map(|(gate, up)| [gate, up]).collect() } else { Vec::new() };
    let tensors = |linears: &[&'_ Linear]| linears.iter().map(|linear| linear.weight.clone()).collect::<Vec<_>>();
    let (gates, ups) = (tensors(gates), tensors(ups));
    let (gates, ups): (Vec<_>, Vec<_>) = (gates.iter().collect(), ups.iter().collect());
    Ok(WgpuLinear {
        weight: uploads.interleave_all(gpu, what, &gates, &ups)?,
        bias: has_bias.then(|| gpu.upload("a bias", &bias)).transpose()?,
    })
}

/// The bias of `linear`, zeros if it has none.
pub(crate) fn bias(linear: &Linear) -> Vec<f32> {
    linear.bias.clone().unwrap_or_else(|| vec![0.0; linear.weight.n_rows()])
}

/// The matrices transposed, `[n_in, n_out]` each, one after the other.
pub(crate) fn transposed(matrices: &[&Linear]) -> Vec<f32> {
    let mut rows = Vec::new();
    for linear in matrices {
        let (n_in, values) = (linear.weight.row_len(), linear.weight.to_f32());
        rows.extend((0..n_in).flat_map(|i| values.iter().skip(i).step_by(n_in).copied()));
    }
    rows
}
