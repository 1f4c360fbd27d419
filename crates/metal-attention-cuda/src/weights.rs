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
    FeedForward, FeedForwardWeights, LayerSpec, LayerWeights, Linear, Mixer, MixerWeights, ModelSpec, Norm, NormKind,
    NormWeights, Residual, Rope, Weights,
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
use crate::device::{CudaBuffer, CudaDevice, Kernels};
use crate::matrix::{CudaMatrix, TILE};
use crate::options::distinct_ropes;
use crate::sharding::Shard;
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
    /// The address of the bias, or 0.
    pub(crate) fn bias(&self) -> u64 {
        self.bias.as_ref().map_or(0, CudaBuffer::ptr)
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

/// The weights of a layer.
#[derive(Debug)]
pub(crate) struct CudaLayer {
    /// Norm of the mixer's input.
    pub(crate) mixer_norm: Option<CudaNorm>,
    /// The mixer.
    pub(crate) mixer: CudaMixer,
    /// Norm of the mixer's result, before the residual join.
    pub(crate) mixer_post_norm: Option<CudaNorm>,
    /// Norm of the feed-forward's input.
    pub(crate) feed_forward_norm: Option<CudaNorm>,
    /// The feed-forward.
    pub(crate) feed_forward: CudaFeedForward,
    /// Norm of the feed-forward's result, before the residual join.
    pub(crate) feed_forward_post_norm: Option<CudaNorm>,
    /// The order of norms and residual joins.
    pub(crate) residual: Residual,
    /// Norms of the residual stream after the mixer and after the feed-forward, for `Residual::PostNorm`.
    pub(crate) sum_norms: Option<[CudaNorm; 2]>,
    /// The weights for the layer's per-layer embedding.
    pub(crate) layer_embedding: Option<CudaLayerEmbedding>,
    /// The weights for several residual streams.
    pub(crate) streams: Option<CudaLayerStreams>,
    /// Factor on the residual stream at the end of the layer.
    pub(crate) output_scale: f32,
}

/// The weights of a mixer.
#[derive(Debug)]
pub(crate) enum CudaMixer {
    /// Softmax attention.
    Attention(Box<CudaAttention>),
    /// Latent attention.
    LatentAttention(Box<CudaLatentAttention>),
    /// A gated short convolution.
    ShortConv(CudaShortConv),
    /// Mamba.
    Mamba(Box<CudaMamba>),
    /// Mamba-2.
    Mamba2(Box<CudaMamba2>),
    /// Attention and Mamba-2, whose results are added.
    AttentionAndMamba2(Box<(CudaAttention, CudaMamba2)>),
    /// The gated delta rule.
    DeltaRule(Box<CudaDeltaRule>),
    /// The time mix of RWKV-6.
    Rwkv6(Box<CudaRwkv6>),
    /// The time mix of RWKV-7.
    Rwkv7(Box<CudaRwkv7>),
    /// No mixer.
    None,
}

/// The weights of a feed-forward.
#[derive(Debug)]
pub(crate) enum CudaFeedForward {
    /// A dense feed-forward.
    Dense(CudaDense),
    /// A mixture of experts.
    Experts(Box<CudaExperts>),
    /// RWKV's channel mix.
    ChannelMix(CudaChannelMix),
    /// No feed-forward.
    None,
}

/// Uploads weights, and keeps what several layers share.
pub(crate) struct Loader<'a> {
    /// The device.
    gpu: &'a Arc<CudaDevice>,
    /// The repacking kernels.
    kernels: Kernels,
    /// The RoPE cos/sin tables by their parameters.
    ropes: Vec<(Rope, CudaBuffer)>,
}

impl CudaWeights {
    /// Uploads the weights of `spec`, which [`supports`](crate::support::supports) has accepted, and the RoPE tables. `n_ctx`:
    /// the context length, on which some RoPE scalings depend; `n_positions`: the positions of the tables. `shard`: under
    /// tensor parallelism, this rank's shard and the whole model's spec, while `spec` is that of the shard; `weights` are the
    /// whole model's in any case.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        spec: &ModelSpec,
        weights: &Weights,
        shard: Option<(&Shard, &ModelSpec)>,
        (n_ctx, n_positions): (usize, usize),
    ) -> Result<Self, CudaError> {
        let ropes = distinct_ropes(spec).into_iter().map(|rope| {
            let table = rope_table(&rope, weights.rope_factors(&rope, n_ctx), n_positions);
            Ok((rope, gpu.upload("the RoPE table", &table)?))
        });
        let ropes = ropes.collect::<Result<_, CudaError>>()?;
        let mut loader = Loader { gpu, kernels: Kernels::default(), ropes };
        let embedding = Arc::new(loader.embedding(spec, weights)?);
        let output = match &weights.output {
            None => None,
            Some(head) => {
                let part = shard.filter(|(shard, _)| shard.plan.head).map(|(shard, _)| shard.head(head));
                let matrix = match (part, weights.own_head()) {
                    (Some(rows), _) => Arc::new(CudaMatrix::new(gpu, &mut loader.kernels, &rows)?),
                    (None, Some(head)) => Arc::new(loader.matrix(head)?),
                    (None, None) => Arc::clone(&embedding.table),
                };
                Some((matrix, loader.optional(head.bias.as_deref())?))
            }
        };
        let layers = spec.layers.iter().zip(&weights.layers).enumerate();
        let layers = layers.map(|(i, (layer, weights))| match shard {
            None => loader.layer(spec, layer, weights),
            Some((shard, whole)) => loader.layer(spec, layer, &shard.layer(whole, i, weights)),
        });
        let layers = layers.collect::<Result<_, _>>()?;
        let output_norm = loader.norm(spec.output.norm.as_ref(), weights.output_norm.as_ref())?.map(Arc::new);
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

    /// The address of the RoPE table, or 0.
    fn rope(&self, rope: Option<&Rope>) -> u64 {
        let table = rope.and_then(|rope| self.ropes.iter().find(|(known, _)| known == rope));
        table.map_or(0, |(_, table)| table.ptr())
    }

    /// Uploads a norm, if there is one.
    fn norm(&self, norm: Option<&Norm>, weights: Option<&NormWeights>) -> Result<Option<CudaNorm>, CudaError> {
        let Some((norm, weights)) = norm.zip(weights) else { return Ok(None) };
        Ok(Some(self.one_norm(norm, weights)?))
    }

    /// Uploads a norm.
    fn one_norm(&self, norm: &Norm, weights: &NormWeights) -> Result<CudaNorm, CudaError> {
        Ok(CudaNorm {
            kind: norm.kind,
            weight: self.vector(&weights.weight)?,
            bias: self.optional(weights.bias.as_deref())?,
            eps: norm.eps,
            n: weights.weight.len(),
        })
    }

    /// Uploads the weights of a layer of `model`.
    fn layer(&mut self, model: &ModelSpec, spec: &LayerSpec, w: &LayerWeights) -> Result<CudaLayer, CudaError> {
        let sum_norms = match (&spec.residual, &w.sum_norms) {
            (Residual::PostNorm { mixer_sum_norm, feed_forward_sum_norm }, Some([of_mixer, of_feed_forward])) => {
                Some([self.one_norm(mixer_sum_norm, of_mixer)?, self.one_norm(feed_forward_sum_norm, of_feed_forward)?])
            }
            (Residual::Sequential { .. } | Residual::Parallel | Residual::PostNorm { .. }, _) => None,
        };
        Ok(CudaLayer {
            mixer_norm: self.norm(spec.mixer_norm.as_ref(), w.mixer_norm.as_ref())?,
            mixer: self.mixer(&spec.mixer, &w.mixer)?,
            mixer_post_norm: self.norm(spec.mixer_post_norm.as_ref(), w.mixer_post_norm.as_ref())?,
            feed_forward_norm: self.norm(spec.feed_forward_norm.as_ref(), w.feed_forward_norm.as_ref())?,
            feed_forward: self.feed_forward(spec, &w.feed_forward)?,
            feed_forward_post_norm: self
                .norm(spec.feed_forward_post_norm.as_ref(), w.feed_forward_post_norm.as_ref())?,
            residual: spec.residual,
            sum_norms,
            layer_embedding: self.layer_embedding(model, w)?,
            streams: self.layer_streams(model, w)?,
            output_scale: w.output_scale,
        })
    }

    /// Uploads matrices of one type and shape, with their biases, for grouped products.
    fn stack(&mut self, linears: &[&Linear]) -> Result<CudaStack, CudaError> {
        let tensors: Vec<_> = linears.iter().map(|linear| &linear.weight).collect();
        let biases: Vec<_> = linears.iter().filter_map(|linear| linear.bias.as_deref()).flatten().copied().collect();
        CudaStack::new(self.gpu, &mut self.kernels, &tensors, Some(&biases[..]).filter(|biases| !biases.is_empty()))
    }

    /// Uploads the weights of a mixer.
    fn mixer(&mut self, spec: &Mixer, weights: &MixerWeights) -> Result<CudaMixer, CudaError> {
        Ok(match (spec, weights) {
            (Mixer::Attention(of), MixerWeights::Attention(w)) => {
                CudaMixer::Attention(Box::new(self.attention(of, w)?))
            }
            (Mixer::LatentAttention(of), MixerWeights::LatentAttention(w)) => {
                CudaMixer::LatentAttention(Box::new(self.latent_attention(of, w)?))
            }
            (Mixer::ShortConv(of), MixerWeights::ShortConv(w)) => CudaMixer::ShortConv(self.short_conv(*of, w)?),
            (Mixer::Mamba(of), MixerWeights::Mamba(w)) => CudaMixer::Mamba(Box::new(self.mamba(*of, w)?)),
            (Mixer::Mamba2(of), MixerWeights::Mamba2(w)) => CudaMixer::Mamba2(Box::new(self.mamba2(*of, w)?)),
            (Mixer::AttentionAndMamba2(of), MixerWeights::AttentionAndMamba2(w)) => {
                let attention = self.attention(&of.attention, &w.attention)?;
                CudaMixer::AttentionAndMamba2(Box::new((attention, self.mamba2(of.mamba2, &w.mamba2)?)))
            }
            (Mixer::DeltaRule(of), MixerWeights::DeltaRule(w)) => {
                CudaMixer::DeltaRule(Box::new(self.delta_rule(*of, w)?))
            }
            (Mixer::Rwkv6(of), MixerWeights::Rwkv6(w)) => CudaMixer::Rwkv6(Box::new(self.rwkv6(*of, w)?)),
            (Mixer::Rwkv7(of), MixerWeights::Rwkv7(w)) => CudaMixer::Rwkv7(Box::new(self.rwkv7(*of, w)?)),
            (Mixer::None, MixerWeights::None) => CudaMixer::None,
            (
                Mixer::Attention(_)
                | Mixer::LatentAttention(_)
                | Mixer::ShortConv(_)
                | Mixer::Mamba(_)
                | Mixer::Mamba2(_)
                | Mixer::AttentionAndMamba2(_)
                | Mixer::DeltaRule(_)
                | Mixer::Rwkv6(_)
                | Mixer::Rwkv7(_)
                | Mixer::None,
                _,
            ) => return Err(CudaError::UnsupportedPart { part: "weights of another mixer" }),
        })
    }

    /// Uploads the weights of a feed-forward.
    fn feed_forward(&mut self, spec: &LayerSpec, weights: &FeedForwardWeights) -> Result<CudaFeedForward, CudaError> {
        Ok(match (&spec.feed_forward, weights) {
            (FeedForward::Dense(of), FeedForwardWeights::Dense(w)) => CudaFeedForward::Dense(self.dense(of, w)?),
            (FeedForward::Experts(of), FeedForwardWeights::Experts(w)) => {
                CudaFeedForward::Experts(Box::new(self.experts(of, w)?))
            }
            (FeedForward::ChannelMix(of), FeedForwardWeights::ChannelMix(w)) => {
                CudaFeedForward::ChannelMix(self.channel_mix(*of, w, spec.mixer.state_elements())?)
            }
            (FeedForward::None, FeedForwardWeights::None) => CudaFeedForward::None,
            (FeedForward::Dense(_) | FeedForward::Experts(_) | FeedForward::ChannelMix(_) | FeedForward::None, _) => {
                return Err(CudaError::UnsupportedPart { part: "weights of another feed-forward" });
            }
        })
    }
}
