//! A model's weights by role: matrices as handles into the mapped file, vectors in F32; all checked against the
//! [`ModelSpec`](crate::ModelSpec).
//!
//! `L` is the type of a matrix with its bias: [`Linear`] as loaded, or a backend's own form, made by
//! [`LayerWeights::map`]. Shapes are row-major, `[n_out, n_in]`.

mod build;

use std::collections::HashMap;
use std::convert::Infallible;

use metal_attention_gguf::Tensor;

use crate::Rope;
use crate::recurrent::{
    ChannelMixWeights, DeltaRuleWeights, Mamba2Weights, MambaWeights, Rwkv6Weights, Rwkv7Weights, ShortConvWeights,
};
pub(crate) use build::build;

/// A matrix with its bias: `y = W x + b`.
#[derive(Debug, Clone)]
pub struct Linear {
    /// `W`, `[n_out, n_in]` row-major (GGUF shape `[n_in, n_out]`).
    pub weight: Tensor,
    /// `b`, `[n_out]`.
    pub bias: Option<Vec<f32>>,
}

/// The weights of a norm.
#[derive(Debug, Clone, PartialEq)]
pub struct NormWeights {
    /// Factor on each element; all ones for a norm without a weight.
    pub weight: Vec<f32>,
    /// Added to each element.
    pub bias: Option<Vec<f32>>,
}

/// The weights of a whole model; `L` is the type of a matrix with its bias.
#[derive(Debug, Clone)]
pub struct Weights<L = Linear> {
    /// Embedding table, `[n_vocab, n_embd]`.
    pub token_embd: L,
    /// Row 0 of the table of token types, added to every token's embedding, `[n_embd]`.
    pub token_type: Option<Vec<f32>>,
    /// Learned positions, `[n_ctx, n_embd]`.
    pub positions: Option<L>,
    /// Norm of the embedding.
    pub embedding_norm: Option<NormWeights>,
    /// Additional embeddings for each layer.
    pub per_layer: Option<PerLayerTables<L>>,
    /// Matrices between one residual stream and several.
    pub streams: Option<StreamsWeights<L>>,
    /// The layers, first to last.
    pub layers: Vec<LayerWeights<L>>,
    /// Norm before the output head.
    pub output_norm: Option<NormWeights>,
    /// Output head, `[n_vocab, n_embd]`; the embedding table itself if tied. `None` if the model has no logits.
    pub output: Option<L>,
    /// The matrices that the pooled state goes through, in order.
    pub pooled_projections: Vec<L>,
    /// The classifier over the pooled state.
    pub classifier: Option<ClassifierWeights<L>>,
    /// Divisors of the RoPE frequencies, `[n_rot / 2]` each, by the tensor that they are in.
    pub rope_factors: HashMap<&'static str, Vec<f32>>,
}

/// Tables of the additional embeddings for each layer.
#[derive(Debug, Clone)]
pub struct PerLayerTables<L = Linear> {
    /// Embedding table of all layers, `[n_vocab, n_layer * width]`.
    pub token_embd: L,
    /// Projection of the token's embedding, `[n_layer * width, n_embd]`.
    pub model_proj: L,
    /// Norm of the projection, over each layer's `width` elements.
    pub proj_norm: NormWeights,
}

/// Matrices between one residual stream and several (AltUp).
#[derive(Debug, Clone)]
pub struct StreamsWeights<L = Linear> {
    /// From the embedding to each stream but the first, `[n_embd, n_embd]`.
    pub proj: Vec<L>,
    /// From each stream but the first to the output, `[n_embd, n_embd]`.
    pub unembd_proj: Vec<L>,
}

/// The weights of a classifier over the pooled state.
#[derive(Debug, Clone)]
pub struct ClassifierWeights<L = Linear> {
    /// Hidden layer, `[n_embd, n_embd]`; without `out`, the scores.
    pub dense: Option<L>,
    /// Norm of the hidden layer.
    pub norm: Option<NormWeights>,
    /// Scores, `[n_labels, n_embd]`.
    pub out: Option<L>,
}

/// The weights of one layer.
#[derive(Debug, Clone)]
pub struct LayerWeights<L = Linear> {
    /// Norm of the mixer's input.
    pub mixer_norm: Option<NormWeights>,
    /// Weights of the mixer.
    pub mixer: MixerWeights<L>,
    /// Norm of the mixer's result.
    pub mixer_post_norm: Option<NormWeights>,
    /// Norm of the feed-forward's input.
    pub feed_forward_norm: Option<NormWeights>,
    /// Weights of the feed-forward.
    pub feed_forward: FeedForwardWeights<L>,
    /// Norm of the feed-forward's result.
    pub feed_forward_post_norm: Option<NormWeights>,
    /// Norms of the sums after mixer and after feed-forward, with `Residual::PostNorm`.
    pub sum_norms: Option<[NormWeights; 2]>,
    /// Weights for the layer's additional embedding.
    pub per_layer: Option<PerLayerWeights<L>>,
    /// Weights for several residual streams.
    pub streams: Option<LayerStreams<L>>,
    /// Factor on the residual stream after the layer.
    pub output_scale: f32,
}

/// The weights of a mixer.
#[derive(Debug, Clone)]
pub enum MixerWeights<L = Linear> {
    /// Attention.
    Attention(AttentionWeights<L>),
    /// Latent attention.
    LatentAttention(LatentAttentionWeights<L>),
    /// Short convolution.
    ShortConv(ShortConvWeights<L>),
    /// Mamba.
    Mamba(MambaWeights<L>),
    /// Mamba-2.
    Mamba2(Mamba2Weights<L>),
    /// Attention and Mamba-2 side by side.
    AttentionAndMamba2(Box<AttentionAndMamba2Weights<L>>),
    /// Gated delta rule.
    DeltaRule(DeltaRuleWeights<L>),
    /// RWKV-6's time mix.
    Rwkv6(Rwkv6Weights<L>),
    /// RWKV-7's time mix.
    Rwkv7(Rwkv7Weights<L>),
    /// No mixer.
    None,
}

/// The weights of attention and Mamba-2 side by side.
#[derive(Debug, Clone)]
pub struct AttentionAndMamba2Weights<L = Linear> {
    /// Weights of the attention.
    pub attention: AttentionWeights<L>,
    /// Weights of the state space.
    pub mamba2: Mamba2Weights<L>,
}

/// The weights of softmax attention.
#[derive(Debug, Clone)]
pub struct AttentionWeights<L = Linear> {
    /// Queries, `[n_head * head_dim, n_embd]`; with an output gate, each head's query rows and then its gate rows,
    /// `[n_head * 2 * head_dim, n_embd]`.
    pub q: L,
    /// Keys, `[n_head_kv * head_dim, n_embd]`; `None` if another layer's cache is read.
    pub k: Option<L>,
    /// Values, `[n_head_kv * head_dim, n_embd]`; `None` if another layer's cache is read, or the keys are the values.
    pub v: Option<L>,
    /// Output, `[n_embd, n_head * head_dim]`.
    pub out: L,
    /// Norm of queries; its length depends on [`NormOver`](crate::NormOver).
    pub q_norm: Option<NormWeights>,
    /// Norm of keys; its length depends on [`NormOver`](crate::NormOver).
    pub k_norm: Option<NormWeights>,
    /// Attention sink of each head, `[n_head]`.
    pub sinks: Option<Vec<f32>>,
}

/// The weights of latent attention (MLA).
#[derive(Debug, Clone)]
pub struct LatentAttentionWeights<L = Linear> {
    /// Compression of queries, `[q_rank, n_embd]`, and the norm of the compressed row.
    pub q_a: Option<(L, NormWeights)>,
    /// Queries, `[n_head * head_dim, q_rank]`; without compression `[n_head * head_dim, n_embd]`.
    pub q: L,
    /// The compressed row of keys and values, and the shared key, `[kv_rank + shared_dim, n_embd]`.
    pub kv_a: L,
    /// Norm of the compressed row.
    pub kv_a_norm: NormWeights,
    /// For each head, from the elements of a query that are not rotated to the compressed row, `[kv_rank, n_nope]`.
    pub k_b: Vec<L>,
    /// For each head, from the compressed row to a value, `[value_dim, kv_rank]`.
    pub v_b: Vec<L>,
    /// Output, `[n_embd, n_head * value_dim]`.
    pub out: L,
}

/// The weights of a feed-forward.
#[derive(Debug, Clone)]
pub enum FeedForwardWeights<L = Linear> {
    /// The same matrices for all tokens.
    Dense(DenseWeights<L>),
    /// A mixture of experts.
    Experts(Box<ExpertsWeights<L>>),
    /// RWKV's channel mix.
    ChannelMix(ChannelMixWeights<L>),
    /// No feed-forward.
    None,
}

/// The weights of a dense feed-forward, or of one expert.
#[derive(Debug, Clone)]
pub struct DenseWeights<L = Linear> {
    /// Gate, `[n_ff, n_embd]`, if there is one.
    pub gate: Option<L>,
    /// Up, `[n_ff, n_embd]`.
    pub up: L,
    /// Down, `[n_embd, n_ff]`.
    pub down: L,
}

/// The weights of a mixture of experts.
#[derive(Debug, Clone)]
pub struct ExpertsWeights<L = Linear> {
    /// Router, `[n_expert, n_embd]`.
    pub router: L,
    /// Factor on the router's input, `[n_embd]`, if the experts have their own norms.
    pub router_scale: Option<Vec<f32>>,
    /// Added to the scores for the choice of experts, `[n_expert]`.
    pub choice_bias: Option<Vec<f32>>,
    /// From the residual stream to the experts' narrower input, `[latent, n_embd]`, and from their output back,
    /// `[n_embd, latent]`.
    pub latent: Option<[L; 2]>,
    /// The experts.
    pub experts: Vec<DenseWeights<L>>,
    /// Factor on each expert's result, `[n_expert]`.
    pub expert_scale: Option<Vec<f32>>,
    /// The shared expert.
    pub shared: Option<DenseWeights<L>>,
    /// Gate of the shared expert, `[n_embd]`.
    pub shared_gate: Option<Vec<f32>>,
    /// Norms of the experts' input, of their sum, and of the shared expert's result.
    pub expert_norms: Option<[NormWeights; 3]>,
}

/// The weights for a layer's additional embedding.
#[derive(Debug, Clone)]
pub struct PerLayerWeights<L = Linear> {
    /// Gate, `[width, n_embd]`.
    pub gate: L,
    /// Projection back, `[n_embd, width]`.
    pub proj: L,
    /// Norm of the projection's result.
    pub post_norm: NormWeights,
}

/// The weights of a layer with `n` residual streams (AltUp and LAuReL).
#[derive(Debug, Clone)]
pub struct LayerStreams<L = Linear> {
    /// Norm of the router's input.
    pub router_norm: NormWeights,
    /// Router of the streams, `[n, n_embd]`.
    pub router: L,
    /// From the router's result to the coefficients of the prediction, `[n * n, n]`.
    pub predict: L,
    /// From the router's result to the coefficients of the correction, `[n, n]`.
    pub correct: L,
    /// Factor on the active stream before the layer's embedding is added, `[n_embd]`.
    pub correct_scale: Vec<f32>,
    /// LAuReL's first matrix, `[rank, n_embd]`.
    pub laurel_l: L,
    /// LAuReL's second matrix, `[n_embd, rank]`.
    pub laurel_r: L,
    /// Norm of LAuReL's result.
    pub laurel_norm: NormWeights,
}

impl Weights {
    /// Every matrix and table that a forward pass reads, each once, without those of the pooled state.
    pub fn tensors(&self) -> Vec<&Tensor> {
        let mut linears = vec![&self.token_embd];
        linears.extend(&self.positions);
        if let Some(p) = &self.per_layer {
            linears.extend([&p.token_embd, &p.model_proj]);
        }
        if let Some(s) = &self.streams {
            linears.extend(s.proj.iter().chain(&s.unembd_proj));
        }
        linears.extend(self.layers.iter().flat_map(LayerWeights::linears));
        linears.extend(self.own_head());
        linears.into_iter().map(|linear| &linear.weight).collect()
    }

    /// The output head, if it is not the embedding table.
    pub fn own_head(&self) -> Option<&Linear> {
        let tied = |head: &&Linear| std::ptr::eq(head.weight.bytes(), self.token_embd.weight.bytes());
        self.output.as_ref().filter(|head| !tied(head))
    }
}

impl<L> LayerWeights<L> {
    /// Every matrix of the layer in the order of computation. Loading, memory estimates and the roofline use this list.
    pub fn linears(&self) -> Vec<&L> {
        let mut all = Vec::new();
        let Ok(_) = self.map(&mut |linear| {
            all.push(linear);
            Ok::<(), Infallible>(())
        });
        all
    }

    /// The layer with every matrix replaced by `f` of it, called in the order of computation; the first error ends it.
    pub fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<LayerWeights<M>, E> {
        let mixer = match &self.mixer {
            MixerWeights::Attention(a) => MixerWeights::Attention(a.map(f)?),
            MixerWeights::LatentAttention(a) => {
                let q_a = match &a.q_a {
                    Some((linear, norm)) => Some((f(linear)?, norm.clone())),
                    None => None,
                };
                MixerWeights::LatentAttention(LatentAttentionWeights {
                    q_a,
                    q: f(&a.q)?,
                    kv_a: f(&a.kv_a)?,
                    kv_a_norm: a.kv_a_norm.clone(),
                    k_b: a.k_b.iter().map(&mut *f).collect::<Result<_, _>>()?,
                    v_b: a.v_b.iter().map(&mut *f).collect::<Result<_, _>>()?,
                    out: f(&a.out)?,
                })
            }
            MixerWeights::ShortConv(conv) => MixerWeights::ShortConv(conv.map(f)?),
            MixerWeights::Mamba(mamba) => MixerWeights::Mamba(mamba.map(f)?),
            MixerWeights::Mamba2(mamba) => MixerWeights::Mamba2(mamba.map(f)?),
            MixerWeights::AttentionAndMamba2(both) => {
                let (attention, mamba2) = (both.attention.map(f)?, both.mamba2.map(f)?);
                MixerWeights::AttentionAndMamba2(Box::new(AttentionAndMamba2Weights { attention, mamba2 }))
            }
            MixerWeights::DeltaRule(rule) => MixerWeights::DeltaRule(rule.map(f)?),
            MixerWeights::Rwkv6(mix) => MixerWeights::Rwkv6(mix.map(f)?),
            MixerWeights::Rwkv7(mix) => MixerWeights::Rwkv7(mix.map(f)?),
            MixerWeights::None => MixerWeights::None,
        };
        let streams = match &self.streams {
            Some(s) => Some(LayerStreams {
                router_norm: s.router_norm.clone(),
                router: f(&s.router)?,
                predict: f(&s.predict)?,
                correct: f(&s.correct)?,
                correct_scale: s.correct_scale.clone(),
                laurel_l: f(&s.laurel_l)?,
                laurel_r: f(&s.laurel_r)?,
                laurel_norm: s.laurel_norm.clone(),
            }),
            None => None,
        };
        let feed_forward = match &self.feed_forward {
            FeedForwardWeights::Dense(dense) => FeedForwardWeights::Dense(dense.map(f)?),
            FeedForwardWeights::Experts(e) => FeedForwardWeights::Experts(Box::new(ExpertsWeights {
                router: f(&e.router)?,
                router_scale: e.router_scale.clone(),
                choice_bias: e.choice_bias.clone(),
                latent: match &e.latent {
                    Some([down, up]) => Some([f(down)?, f(up)?]),
                    None => None,
                },
                experts: e.experts.iter().map(|dense| dense.map(f)).collect::<Result<_, _>>()?,
                expert_scale: e.expert_scale.clone(),
                shared: e.shared.as_ref().map(|dense| dense.map(f)).transpose()?,
                shared_gate: e.shared_gate.clone(),
                expert_norms: e.expert_norms.clone(),
            })),
            FeedForwardWeights::ChannelMix(mix) => FeedForwardWeights::ChannelMix(mix.map(f)?),
            FeedForwardWeights::None => FeedForwardWeights::None,
        };
        let per_layer = match &self.per_layer {
            Some(p) => Some(PerLayerWeights { gate: f(&p.gate)?, proj: f(&p.proj)?, post_norm: p.post_norm.clone() }),
            None => None,
        };
        Ok(LayerWeights {
            mixer_norm: self.mixer_norm.clone(),
            mixer,
            mixer_post_norm: self.mixer_post_norm.clone(),
            feed_forward_norm: self.feed_forward_norm.clone(),
            feed_forward,
            feed_forward_post_norm: self.feed_forward_post_norm.clone(),
            sum_norms: self.sum_norms.clone(),
            per_layer,
            streams,
            output_scale: self.output_scale,
        })
    }
}

impl<L> AttentionWeights<L> {
    fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<AttentionWeights<M>, E> {
        Ok(AttentionWeights {
            q: f(&self.q)?,
            k: self.k.as_ref().map(&mut *f).transpose()?,
            v: self.v.as_ref().map(&mut *f).transpose()?,
            out: f(&self.out)?,
            q_norm: self.q_norm.clone(),
            k_norm: self.k_norm.clone(),
            sinks: self.sinks.clone(),
        })
    }
}

impl<L> MixerWeights<L> {
    /// The output matrix, `[n_embd, ..]`; of attention and Mamba-2, the attention's. `None` if there is no mixer.
    pub fn out(&self) -> Option<&L> {
        match self {
            Self::Attention(w) => Some(&w.out),
            Self::LatentAttention(w) => Some(&w.out),
            Self::ShortConv(w) => Some(&w.out),
            Self::Mamba(w) => Some(&w.out),
            Self::Mamba2(w) => Some(&w.out),
            Self::AttentionAndMamba2(both) => Some(&both.attention.out),
            Self::DeltaRule(w) => Some(&w.out),
            Self::Rwkv6(w) => Some(&w.out),
            Self::Rwkv7(w) => Some(&w.out),
            Self::None => None,
        }
    }
}

impl<L> DenseWeights<L> {
    /// Whether `linear` is one of these matrices (by address, not by value).
    pub fn has(&self, linear: &L) -> bool {
        [self.gate.as_ref(), Some(&self.up), Some(&self.down)]
            .into_iter()
            .flatten()
            .any(|matrix| std::ptr::eq(matrix, linear))
    }

    fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<DenseWeights<M>, E> {
        Ok(DenseWeights { gate: self.gate.as_ref().map(&mut *f).transpose()?, up: f(&self.up)?, down: f(&self.down)? })
    }
}

impl<L> Weights<L> {
    /// The divisors of `rope`'s frequencies, `[n_rot / 2]`, for a context of `n_ctx` positions; `None` if there are
    /// none.
    pub fn rope_factors(&self, rope: &Rope, n_ctx: usize) -> Option<&[f32]> {
        self.rope_factors.get(rope.factors.tensor(n_ctx)?).map(Vec::as_slice)
    }
}
