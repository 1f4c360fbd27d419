//! The weights of a model in device memory, as the layers' launches need them. Each file below has the weights of one kind of
//! sublayer and their upload, as an `impl Loader`.

mod attention;
mod embedding;
mod experts;
mod feed_forward;
mod latent_attention;
mod recurrent;

use std::sync::Arc;

use metal_attention_model::{
    AttentionAndMamba2Weights, AttentionWeights, ChannelMixWeights, DeltaRuleWeights, DenseWeights, ExpertsWeights,
    LatentAttentionWeights, Layer, LayerEmbeddingWeights, LayerStreamsWeights, Linear, Loaded, Mamba2Weights,
    MambaWeights, ModelSpec, NormKind, NormWeights, Parts, Prepare, Rope, Rwkv6Weights, Rwkv7Weights, ShortConvWeights,
    Weights,
};

pub(crate) use attention::CudaAttention;
pub(crate) use embedding::{CudaEmbedding, CudaLayerEmbedding, CudaLayerStreams, CudaPerLayer, CudaStreams};
pub(crate) use experts::CudaExperts;
pub(crate) use feed_forward::CudaDense;
pub(crate) use latent_attention::CudaLatentAttention;
pub(crate) use recurrent::{
    CudaChannelMix, CudaDeltaRule, CudaLowRank, CudaMamba, CudaMamba2, CudaRwkv6, CudaRwkv7, CudaShortConv,
};

use crate::CudaError;
use crate::device::{CudaBuffer, CudaDevice};
use crate::kernels::Kernels;
use crate::matrix::{CudaMatrix, TILE};
use crate::options::distinct_ropes;
use crate::sharding::Shard;
use crate::slice::DevicePtr;
use crate::stack::CudaStack;

/// The weights of a model, or of a rank's shard of it.
#[derive(Debug)]
pub(crate) struct CudaWeights {
    /// The embedding.
    pub(crate) embedding: Arc<CudaEmbedding>,
    /// The layers.
    pub(crate) layers: Vec<CudaLayer>,
    /// The norm before the output head.
    pub(crate) output_norm: Option<Arc<CudaNorm>>,
    /// The output head, `[n_vocab, n_embd]`, which may be the embedding table, and its bias.
    pub(crate) output: Option<(Arc<CudaMatrix>, Option<CudaVector>)>,
    /// Owns the RoPE cos/sin tables, whose addresses the layers have.
    _rope: Vec<CudaBuffer>,
}

/// F32 numbers in device memory.
pub(crate) type CudaVector = CudaBuffer;

/// The weights of `y = W x + b`.
#[derive(Debug)]
pub(crate) struct CudaLinear {
    /// `W`, `[n_out, n_in]`.
    pub(crate) weight: CudaMatrix,
    /// `b`, `[n_out]`.
    pub(crate) bias: Option<CudaVector>,
}

/// The weights of several `y = W x + b` with the same input, whose rows follow each other in `y`. Neighbouring matrices are
/// joined to one where their types allow.
#[derive(Debug)]
pub(crate) struct CudaJoined {
    /// The matrices, as joined.
    pub(crate) parts: Vec<CudaMatrix>,
    /// The bias of all rows.
    pub(crate) bias: Option<CudaVector>,
}

impl CudaJoined {
    /// Elements of `y`.
    pub(crate) fn n_rows(&self) -> usize {
        self.parts.iter().map(|part| part.n_rows).sum()
    }
}

impl CudaLinear {
    /// The bias, or null.
    pub(crate) fn bias(&self) -> DevicePtr<f32> {
        self.bias.as_ref().map_or(DevicePtr::NULL, CudaBuffer::ptr)
    }
}

/// A norm of rows.
#[derive(Debug)]
pub(crate) struct CudaNorm {
    /// `RMSNorm` or `LayerNorm`.
    pub(crate) kind: NormKind,
    /// Weights, `[n]`.
    pub(crate) weight: CudaVector,
    /// Bias, `[n]`.
    pub(crate) bias: Option<CudaVector>,
    /// Epsilon.
    pub(crate) eps: f32,
    /// Elements of a row.
    pub(crate) n: usize,
}

impl CudaNorm {
    /// Whether the GEMV kernels can apply the norm to their input: an RMSNorm without bias, of rows that can be read as
    /// vectors.
    pub(crate) fn fuses_with_product(&self) -> bool {
        match self.kind {
            NormKind::Rms => self.bias.is_none() && self.n.is_multiple_of(4),
            NormKind::Layer => false,
        }
    }
}

/// The parts of layers on the device: weights, with the specification or the launches' constants made of it.
#[derive(Debug)]
pub(crate) enum CudaParts {}

impl Parts for CudaParts {
    type Norm = CudaNorm;
    type Attention = Box<CudaAttention>;
    type LatentAttention = Box<CudaLatentAttention>;
    type ShortConv = CudaShortConv;
    type Mamba = Box<CudaMamba>;
    type Mamba2 = Box<CudaMamba2>;
    type AttentionAndMamba2 = CudaAttentionAndMamba2;
    type DeltaRule = Box<CudaDeltaRule>;
    type Rwkv6 = Box<CudaRwkv6>;
    type Rwkv7 = Box<CudaRwkv7>;
    type Dense = CudaDense;
    type Experts = CudaExperts;
    type ChannelMix = CudaChannelMix;
    type LayerEmbedding = CudaLayerEmbedding;
    type LayerStreams = CudaLayerStreams;
    type OutputScale = f32;
}

/// A layer on the device.
pub(crate) type CudaLayer = Layer<CudaParts>;

/// Attention and Mamba-2, whose results are added.
#[derive(Debug)]
pub(crate) struct CudaAttentionAndMamba2 {
    /// The attention.
    pub(crate) attention: CudaAttention,
    /// The state space.
    pub(crate) mamba2: CudaMamba2,
}

/// Uploads weights, and keeps what several layers share.
pub(crate) struct Loader<'a> {
    /// The device.
    gpu: &'a Arc<CudaDevice>,
    /// The repacking kernels.
    kernels: Kernels,
    /// The RoPE cos/sin tables by their parameters.
    ropes: Vec<(Rope, CudaBuffer)>,
    /// Elements of the recurrent state of the current layer's mixer, behind which that of its feed-forward begins.
    mixer_state: usize,
}

impl CudaWeights {
    /// Uploads the weights of `spec`, which [`supports`](crate::support::supports) has accepted, and the RoPE tables. `n_ctx`:
    /// the context length, on which some RoPE scalings depend; `n_positions`: the positions of the tables. `shard`: under
    /// tensor parallelism, this rank's shard; `spec` is that of the shard, `weights` are the whole model's.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        spec: &ModelSpec,
        weights: &Weights,
        shard: Option<&Shard>,
        (n_ctx, n_positions): (usize, usize),
    ) -> Result<Self, CudaError> {
        let ropes = distinct_ropes(spec).into_iter().map(|rope| {
            let table = rope_table(&rope, weights.rope_factors(&rope, n_ctx), n_positions);
            Ok((rope, gpu.upload("the RoPE table", &table)?))
        });
        let ropes = ropes.collect::<Result<_, CudaError>>()?;
        let mut loader = Loader { gpu, kernels: Kernels::default(), ropes, mixer_state: 0 };
        let embedding = Arc::new(loader.embedding(weights)?);
        let output = match &weights.output {
            None => None,
            Some(head) => {
                let part = shard.filter(|shard| shard.plan.head).map(|shard| shard.head(head));
                let matrix = match (part, weights.own_head()) {
                    (Some(rows), _) => Arc::new(CudaMatrix::new(gpu, &mut loader.kernels, &rows)?),
                    (None, Some(head)) => Arc::new(loader.matrix(head)?),
                    (None, None) => Arc::clone(&embedding.table),
                };
                Some((matrix, loader.optional(head.bias.as_deref())?))
            }
        };
        let layers = spec.layers.iter().zip(&weights.layers).enumerate().map(|(i, (spec, layer))| {
            loader.mixer_state = spec.mixer.state_elements();
            match shard {
                None => layer.prepare(&mut loader),
                Some(shard) => shard.layer(i, layer).prepare(&mut loader),
            }
        });
        let layers = layers.collect::<Result<_, _>>()?;
        let output_norm = loader.optional_norm(weights.output_norm.as_ref())?.map(Arc::new);
        let rope = loader.ropes.into_iter().map(|(_, table)| table).collect();
        gpu.wait()?;
        Ok(Self { embedding, layers, output_norm, output, _rope: rope })
    }
}

/// The RoPE cos/sin table, `[n_positions, n_rot / 2, 2]`: cosine and sine of each pair of elements at each position.
fn rope_table(rope: &Rope, factors: Option<&[f32]>, n_positions: usize) -> Vec<f32> {
    let (frequencies, length) = rope.frequencies(factors);
    (0..n_positions)
        .flat_map(|pos| frequencies.iter().map(move |f| (pos as f64 * f).sin_cos()))
        .flat_map(|(sin, cos)| [(cos * length) as f32, (sin * length) as f32])
        .collect()
}

impl Loader<'_> {
    /// Uploads a matrix, without its bias.
    fn matrix(&mut self, linear: &Linear) -> Result<CudaMatrix, CudaError> {
        CudaMatrix::new(self.gpu, &mut self.kernels, &linear.weight)
    }

    /// Uploads a matrix and its bias.
    fn linear(&mut self, linear: &Linear) -> Result<CudaLinear, CudaError> {
        Ok(CudaLinear { weight: self.matrix(linear)?, bias: self.optional(linear.bias.as_deref())? })
    }

    /// Uploads matrices with the same input, one below the other. Neighbours of one type become one matrix where the upper one
    /// fills whole tiles.
    fn joined(&mut self, linears: &[&Linear]) -> Result<CudaJoined, CudaError> {
        let bias = self.biases(linears)?;
        let together = |a: &&Linear, b: &&Linear| {
            let kind = |linear: &Linear| (linear.weight.ty(), linear.weight.row_len());
            kind(a) == kind(b) && a.weight.n_rows().is_multiple_of(TILE)
        };
        let parts = linears.chunk_by(together).map(|linears| {
            let tensors: Vec<_> = linears.iter().map(|linear| &linear.weight).collect();
            CudaMatrix::joined(self.gpu, &mut self.kernels, &tensors)
        });
        Ok(CudaJoined { parts: parts.collect::<Result<_, _>>()?, bias })
    }

    /// Uploads F32 numbers.
    fn vector(&self, values: &[f32]) -> Result<CudaVector, CudaError> {
        self.gpu.upload("norms", values)
    }

    /// Uploads F32 numbers, if there are any.
    fn optional(&self, values: Option<&[f32]>) -> Result<Option<CudaVector>, CudaError> {
        values.map(|values| self.vector(values)).transpose()
    }

    /// The RoPE table, or null.
    fn rope(&self, rope: Option<&Rope>) -> DevicePtr<[f32; 2]> {
        let table = rope.and_then(|rope| self.ropes.iter().find(|(known, _)| known == rope));
        table.map_or(DevicePtr::NULL, |(_, table)| table.ptr())
    }

    /// Uploads a norm, if there is one.
    fn optional_norm(&mut self, norm: Option<&NormWeights>) -> Result<Option<CudaNorm>, CudaError> {
        norm.map(|norm| self.norm(norm)).transpose()
    }

    /// Uploads matrices of one type and shape, with their biases, for grouped products.
    fn stack(&mut self, linears: &[&Linear]) -> Result<CudaStack, CudaError> {
        let tensors: Vec<_> = linears.iter().map(|linear| &linear.weight).collect();
        let biases: Vec<_> = linears.iter().filter_map(|linear| linear.bias.as_deref()).flatten().copied().collect();
        CudaStack::new(self.gpu, &mut self.kernels, &tensors, Some(&biases[..]).filter(|biases| !biases.is_empty()))
    }
}

impl Prepare<'_, Loaded> for Loader<'_> {
    type To = CudaParts;
    type Error = CudaError;

    fn norm(&mut self, norm: &NormWeights) -> Result<CudaNorm, CudaError> {
        Ok(CudaNorm {
            kind: norm.kind,
            weight: self.vector(&norm.weight)?,
            bias: self.optional(norm.bias.as_deref())?,
            eps: norm.eps,
            n: norm.weight.len(),
        })
    }

    fn attention(&mut self, w: &AttentionWeights) -> Result<Box<CudaAttention>, CudaError> {
        Ok(Box::new(self.softmax_attention(w)?))
    }

    fn latent_attention(&mut self, w: &LatentAttentionWeights) -> Result<Box<CudaLatentAttention>, CudaError> {
        Ok(Box::new(self.compressed_attention(w)?))
    }

    fn short_conv(&mut self, w: &ShortConvWeights) -> Result<CudaShortConv, CudaError> {
        self.gated_convolution(w)
    }

    fn mamba(&mut self, w: &MambaWeights) -> Result<Box<CudaMamba>, CudaError> {
        Ok(Box::new(self.mamba_of(w)?))
    }

    fn mamba2(&mut self, w: &Mamba2Weights) -> Result<Box<CudaMamba2>, CudaError> {
        Ok(Box::new(self.mamba2_of(w)?))
    }

    fn attention_and_mamba2(&mut self, w: &AttentionAndMamba2Weights) -> Result<CudaAttentionAndMamba2, CudaError> {
        Ok(CudaAttentionAndMamba2 {
            attention: self.softmax_attention(&w.attention)?,
            mamba2: self.mamba2_of(&w.mamba2)?,
        })
    }

    fn delta_rule(&mut self, w: &DeltaRuleWeights) -> Result<Box<CudaDeltaRule>, CudaError> {
        Ok(Box::new(self.delta_rule_of(w)?))
    }

    fn rwkv6(&mut self, w: &Rwkv6Weights) -> Result<Box<CudaRwkv6>, CudaError> {
        Ok(Box::new(self.rwkv6_of(w)?))
    }

    fn rwkv7(&mut self, w: &Rwkv7Weights) -> Result<Box<CudaRwkv7>, CudaError> {
        Ok(Box::new(self.rwkv7_of(w)?))
    }

    fn dense(&mut self, w: &DenseWeights) -> Result<CudaDense, CudaError> {
        self.dense_of(w)
    }

    fn experts(&mut self, w: &ExpertsWeights) -> Result<CudaExperts, CudaError> {
        self.experts_of(w)
    }

    fn channel_mix(&mut self, w: &ChannelMixWeights) -> Result<CudaChannelMix, CudaError> {
        self.channel_mix_at(w, self.mixer_state)
    }

    fn layer_embedding(&mut self, w: &LayerEmbeddingWeights) -> Result<CudaLayerEmbedding, CudaError> {
        self.layer_embedding_of(w)
    }

    fn layer_streams(&mut self, w: &LayerStreamsWeights) -> Result<CudaLayerStreams, CudaError> {
        self.layer_streams_of(w)
    }

    fn output_scale(&mut self, scale: &f32) -> Result<f32, CudaError> {
        Ok(*scale)
    }
}
