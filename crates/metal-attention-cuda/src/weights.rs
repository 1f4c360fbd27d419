//! The weights of a model in the device's memory.

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
pub(crate) use embedding::{CudaEmbedding, CudaLayerStreams, CudaOwnEmbedding, CudaPerLayer, CudaStreams};
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

/// All of them.
#[derive(Debug)]
pub(crate) struct CudaWeights {
    pub(crate) embedding: Arc<CudaEmbedding>,
    pub(crate) layers: Vec<CudaLayer>,
    pub(crate) output_norm: Option<Arc<CudaNorm>>,
    /// `[n_vocab, n_embd]`, and what is added.
    pub(crate) output: Option<(Arc<CudaMatrix>, Option<CudaVector>)>,
    /// Keeps the tables of rotations.
    _rope: Vec<CudaBuffer>,
}

/// F32 elements that kernels read.
pub(crate) type CudaVector = CudaBuffer;

/// `y = W x + b`.
#[derive(Debug)]
pub(crate) struct CudaLinear {
    pub(crate) weight: CudaMatrix,
    pub(crate) bias: Option<CudaVector>,
}

/// The same of several matrices one below the other, as few as their types allow.
#[derive(Debug)]
pub(crate) struct CudaJoined {
    pub(crate) parts: Vec<CudaMatrix>,
    pub(crate) bias: Option<CudaVector>,
}

impl CudaJoined {
    /// Elements of `y`.
    pub(crate) fn n_rows(&self) -> usize {
        self.parts.iter().map(|part| part.n_rows).sum()
    }
}

impl CudaLinear {
    /// Where its bias lies; 0: nowhere.
    pub(crate) fn bias(&self) -> u64 {
        self.bias.as_ref().map_or(0, CudaBuffer::ptr)
    }
}

/// A norm of rows.
#[derive(Debug)]
pub(crate) struct CudaNorm {
    pub(crate) kind: NormKind,
    pub(crate) weight: CudaVector,
    pub(crate) bias: Option<CudaVector>,
    pub(crate) eps: f32,
    /// Elements of a row.
    pub(crate) n: usize,
}

impl CudaNorm {
    /// Whether products take it on their way: an RMSNorm that adds nothing, of rows as they read them.
    pub(crate) fn fuses_with_product(&self) -> bool {
        match self.kind {
            NormKind::Rms => self.bias.is_none() && self.n.is_multiple_of(4),
            NormKind::Layer => false,
        }
    }
}

/// A layer.
#[derive(Debug)]
pub(crate) struct CudaLayer {
    pub(crate) mixer_norm: Option<CudaNorm>,
    pub(crate) mixer: CudaMixer,
    pub(crate) mixer_post_norm: Option<CudaNorm>,
    pub(crate) feed_forward_norm: Option<CudaNorm>,
    pub(crate) feed_forward: CudaFeedForward,
    pub(crate) feed_forward_post_norm: Option<CudaNorm>,
    pub(crate) residual: Residual,
    /// Norms of the sums after mixer and feed-forward, where the residual stream has some.
    pub(crate) sum_norms: Option<[CudaNorm; 2]>,
    pub(crate) own_embedding: Option<CudaOwnEmbedding>,
    pub(crate) streams: Option<CudaLayerStreams>,
    /// Factor on the layer's result.
    pub(crate) output_scale: f32,
}

/// What moves information between tokens.
#[derive(Debug)]
pub(crate) enum CudaMixer {
    /// Softmax attention.
    Attention(Box<CudaAttention>),
    /// Attention over compressed rows.
    LatentAttention(Box<CudaLatentAttention>),
    /// A gated short convolution.
    ShortConv(CudaShortConv),
    /// Mamba.
    Mamba(Box<CudaMamba>),
    /// Mamba-2.
    Mamba2(Box<CudaMamba2>),
    /// Attention and Mamba-2 side by side.
    AttentionAndMamba2(Box<(CudaAttention, CudaMamba2)>),
    /// The gated delta rule.
    DeltaRule(Box<CudaDeltaRule>),
    /// RWKV-6's time mix.
    Rwkv6(Box<CudaRwkv6>),
    /// RWKV-7's time mix.
    Rwkv7(Box<CudaRwkv7>),
    /// Nothing.
    None,
}

/// What works on each token alone.
#[derive(Debug)]
pub(crate) enum CudaFeedForward {
    /// The same matrices for all tokens.
    Dense(CudaDense),
    /// A few of many for each token.
    Experts(Box<CudaExperts>),
    /// RWKV's channel mix.
    ChannelMix(CudaChannelMix),
    /// Nothing.
    None,
}

/// What uploads weights.
pub(crate) struct Loader<'a> {
    gpu: &'a Arc<CudaDevice>,
    kernels: Kernels,
    ropes: Vec<(Rope, CudaBuffer)>,
}

impl CudaWeights {
    /// Uploads those of `spec`, which [`supports`](crate::support::supports) let through, for contexts of `n_ctx` positions, of
    /// which `n_positions` can be reached. Where cards share the model, `share` is this one's, and `spec` what it has of the whole.
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

/// Cosine and sine of every pair at every position, `[n_positions, n_rot / 2, 2]`.
fn rope_table(rope: &Rope, factors: Option<&[f32]>, n_positions: usize) -> Vec<f32> {
    let (frequencies, length) = rope.frequencies(factors);
    (0..n_positions)
        .flat_map(|pos| frequencies.iter().map(move |f| (pos as f64 * f).sin_cos()))
        .flat_map(|(sin, cos)| [(cos * length) as f32, (sin * length) as f32])
        .collect()
}

impl Loader<'_> {
    fn matrix(&mut self, linear: &Linear) -> Result<CudaMatrix, CudaError> {
        CudaMatrix::new(self.gpu, &mut self.kernels, &linear.weight)
    }

    fn linear(&mut self, linear: &Linear) -> Result<CudaLinear, CudaError> {
        Ok(CudaLinear { weight: self.matrix(linear)?, bias: self.optional(linear.bias.as_deref())? })
    }

    /// Matrices one below the other: those that follow each other are one where they are of one type and begin with a tile.
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

    fn vector(&self, values: &[f32]) -> Result<CudaVector, CudaError> {
        self.gpu.upload("norms", values)
    }

    fn optional(&self, values: Option<&[f32]>) -> Result<Option<CudaVector>, CudaError> {
        values.map(|values| self.vector(values)).transpose()
    }

    /// Where the table of a rotation lies; 0: nowhere.
    fn rope(&self, rope: Option<&Rope>) -> u64 {
        let table = rope.and_then(|rope| self.ropes.iter().find(|(known, _)| known == rope));
        table.map_or(0, |(_, table)| table.ptr())
    }

    /// `norm`, which has weights where there is one.
    fn norm(&self, norm: Option<&Norm>, weights: Option<&NormWeights>) -> Result<Option<CudaNorm>, CudaError> {
        let Some((norm, weights)) = norm.zip(weights) else { return Ok(None) };
        Ok(Some(self.one_norm(norm, weights)?))
    }

    fn one_norm(&self, norm: &Norm, weights: &NormWeights) -> Result<CudaNorm, CudaError> {
        Ok(CudaNorm {
            kind: norm.kind,
            weight: self.vector(&weights.weight)?,
            bias: self.optional(weights.bias.as_deref())?,
            eps: norm.eps,
            n: weights.weight.len(),
        })
    }

    fn layer(&mut self, model: &ModelSpec, spec: &LayerSpec, w: &LayerWeights) -> Result<CudaLayer, CudaError> {
        let sum_norms = match (&spec.residual, &w.sum_norms) {
            (Residual::PostNorm { mixer, feed_forward }, Some([of_mixer, of_feed_forward])) => {
                Some([self.one_norm(mixer, of_mixer)?, self.one_norm(feed_forward, of_feed_forward)?])
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
            own_embedding: self.own_embedding(model, w)?,
            streams: self.layer_streams(model, w)?,
            output_scale: w.output_scale,
        })
    }

    /// Matrices of one type and shape one below the other, with their biases.
    fn stack(&mut self, linears: &[&Linear]) -> Result<CudaStack, CudaError> {
        let tensors: Vec<_> = linears.iter().map(|linear| &linear.weight).collect();
        let biases: Vec<_> = linears.iter().filter_map(|linear| linear.bias.as_deref()).flatten().copied().collect();
        CudaStack::new(self.gpu, &mut self.kernels, &tensors, Some(&biases[..]).filter(|biases| !biases.is_empty()))
    }

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
