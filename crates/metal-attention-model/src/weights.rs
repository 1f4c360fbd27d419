//! A model's weights by role: handles into the mapped file, checked against the [`ModelSpec`].
//!
//! [`build`] asks a [`Source`] for every weight by name and shape. A file is one source; [`ModelSpec::tensors`] asks another,
//! which only notes what it is asked for. So there is one list of what a model has.

use std::collections::HashMap;
use std::convert::Infallible;

use metal_attention_gguf::Tensor;

use crate::Rope;
use crate::attention::{AttentionSpec, KvSource, LatentAttentionSpec, NormOver, QkNorm};
use crate::feed_forward::{Dense, Experts, FeedForward};
use crate::recurrent::{
    ChannelMixWeights, DeltaRuleWeights, Mamba2Weights, MambaWeights, Rwkv6Weights, Rwkv7Weights, ShortConvWeights,
    channel_mix, delta_rule, mamba, mamba2, rwkv6, rwkv7, short_conv,
};
use crate::spec::{Embedding, LayerSpec, Mixer, ModelSpec, Norm, NormKind, OutputScale, Residual};
use crate::tensors::{Need, Shape, Source};

/// `y = W x + b`.
#[derive(Debug, Clone)]
pub struct Linear {
    /// `W`, `[n_out, n_in]` row-major (GGUF shape `[n_in, n_out]`).
    pub weight: Tensor,
    /// `b`, `[n_out]`.
    pub bias: Option<Vec<f32>>,
}

/// Weights of a norm.
#[derive(Debug, Clone, PartialEq)]
pub struct NormWeights {
    /// Factor on each element; ones where the norm has none.
    pub weight: Vec<f32>,
    /// Added to each element.
    pub bias: Option<Vec<f32>>,
}

/// Weights of a whole model; `L` is what a matrix with its bias is.
#[derive(Debug, Clone)]
pub struct Weights<L = Linear> {
    /// Embedding table, `[n_vocab, n_embd]`.
    pub token_embd: L,
    /// Added to every token's embedding, `[n_embd]`.
    pub token_type: Option<Vec<f32>>,
    /// Learned positions, `[n_ctx, n_embd]`.
    pub positions: Option<L>,
    /// Norm of the embedding.
    pub embedding_norm: Option<NormWeights>,
    /// Embeddings for each layer.
    pub per_layer: Option<PerLayerTables<L>>,
    /// Several residual streams.
    pub streams: Option<StreamsWeights<L>>,
    /// The layers, first to last.
    pub layers: Vec<LayerWeights<L>>,
    /// Norm before the output head.
    pub output_norm: Option<NormWeights>,
    /// Output head, `[n_vocab, n_embd]`; the embedding table itself when tied. `None` where the model has no logits.
    pub output: Option<L>,
    /// What a pooled state goes through.
    pub dense: Vec<L>,
    /// A classifier over the pooled state.
    pub classifier: Option<ClassifierWeights<L>>,
    /// Divisors of the RoPE frequencies by the tensor they come from, `[n_rot / 2]` each.
    pub rope_factors: HashMap<&'static str, Vec<f32>>,
}

/// Tables of the embeddings for each layer.
#[derive(Debug, Clone)]
pub struct PerLayerTables<L = Linear> {
    /// `[n_vocab, n_layer * width]`.
    pub token_embd: L,
    /// `[n_layer * width, n_embd]`.
    pub model_proj: L,
    /// Over `width` elements.
    pub proj_norm: NormWeights,
}

/// What makes residual streams of one, and one of them.
#[derive(Debug, Clone)]
pub struct StreamsWeights<L = Linear> {
    /// Of each stream but the first, `[n_embd, n_embd]`.
    pub proj: Vec<L>,
    /// And back.
    pub unembd_proj: Vec<L>,
}

/// A classifier over the pooled state.
#[derive(Debug, Clone)]
pub struct ClassifierWeights<L = Linear> {
    /// `[n_embd, n_embd]`, or the scores at once.
    pub dense: Option<L>,
    /// Norm of what `dense` gives.
    pub norm: Option<NormWeights>,
    /// The scores.
    pub out: Option<L>,
}

/// Weights of one layer.
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
    /// Norms of the sums after mixer and feed-forward, where the residual stream has some.
    pub sum_norms: Option<[NormWeights; 2]>,
    /// What the layer does with its own embedding.
    pub per_layer: Option<PerLayerWeights<L>>,
    /// How the layer goes about with several streams.
    pub streams: Option<LayerStreams<L>>,
    /// Factor on the layer's result.
    pub output_scale: f32,
}

/// Weights of a mixer.
#[derive(Debug, Clone)]
pub enum MixerWeights<L = Linear> {
    /// Of attention.
    Attention(AttentionWeights<L>),
    /// Of latent attention.
    LatentAttention(LatentAttentionWeights<L>),
    /// Of a short convolution.
    ShortConv(ShortConvWeights<L>),
    /// Of Mamba.
    Mamba(MambaWeights<L>),
    /// Of Mamba-2.
    Mamba2(Mamba2Weights<L>),
    /// Of attention and Mamba-2 side by side.
    AttentionAndMamba2(Box<AttentionAndMamba2Weights<L>>),
    /// Of a gated delta rule.
    DeltaRule(DeltaRuleWeights<L>),
    /// Of RWKV-6's time mix.
    Rwkv6(Rwkv6Weights<L>),
    /// Of RWKV-7's time mix.
    Rwkv7(Rwkv7Weights<L>),
    /// None.
    None,
}

/// Weights of attention and Mamba-2 side by side.
#[derive(Debug, Clone)]
pub struct AttentionAndMamba2Weights<L = Linear> {
    /// Of the attention.
    pub attention: AttentionWeights<L>,
    /// Of the state space.
    pub mamba2: Mamba2Weights<L>,
}

/// Weights of an attention mixer.
#[derive(Debug, Clone)]
pub struct AttentionWeights<L = Linear> {
    /// Queries, `[n_head * head_dim, n_embd]`; each head's gate after it where there is one, `[n_head * 2 * head_dim, n_embd]`.
    pub q: L,
    /// Keys, `[n_head_kv * head_dim, n_embd]`; none where another layer's cache is read.
    pub k: Option<L>,
    /// Values, `[n_head_kv * head_dim, n_embd]`; none where keys stand for them, too.
    pub v: Option<L>,
    /// Output, `[n_embd, n_head * head_dim]`.
    pub out: L,
    /// Norm of queries, as long as [`NormOver`] says.
    pub q_norm: Option<NormWeights>,
    /// Norm of keys.
    pub k_norm: Option<NormWeights>,
    /// A score of each head, `[n_head]`.
    pub sinks: Option<Vec<f32>>,
}

/// Weights of latent attention.
#[derive(Debug, Clone)]
pub struct LatentAttentionWeights<L = Linear> {
    /// Compressed queries, `[q_rank, n_embd]`, and their norm.
    pub q_a: Option<(L, NormWeights)>,
    /// Queries, `[n_head * head_dim, q_rank or n_embd]`.
    pub q: L,
    /// The compressed row and the shared key, `[kv_rank + n_rot, n_embd]`.
    pub kv_a: L,
    /// Norm of the compressed row.
    pub kv_a_norm: NormWeights,
    /// Of each head: from the part of a query that is not rotated to the compressed row, `[kv_rank, n_nope]`.
    pub k_b: Vec<L>,
    /// Of each head: from the compressed row to a value, `[value_dim, kv_rank]`.
    pub v_b: Vec<L>,
    /// Output, `[n_embd, n_head * value_dim]`.
    pub out: L,
}

/// Weights of a feed-forward.
#[derive(Debug, Clone)]
pub enum FeedForwardWeights<L = Linear> {
    /// The same matrices for all tokens.
    Dense(DenseWeights<L>),
    /// Experts.
    Experts(Box<ExpertsWeights<L>>),
    /// Of RWKV's channel mix.
    ChannelMix(ChannelMixWeights<L>),
    /// None.
    None,
}

/// Weights of a dense feed-forward, or of one expert.
#[derive(Debug, Clone)]
pub struct DenseWeights<L = Linear> {
    /// Gate, `[n_ff, n_embd]`, where there is one.
    pub gate: Option<L>,
    /// Up, `[n_ff, n_embd]`.
    pub up: L,
    /// Down, `[n_embd, n_ff]`.
    pub down: L,
}

/// Weights of a mixture of experts.
#[derive(Debug, Clone)]
pub struct ExpertsWeights<L = Linear> {
    /// Router, `[n_expert, n_embd]`.
    pub router: L,
    /// Factor on the router's input, `[n_embd]`, where experts have norms of their own.
    pub router_scale: Option<Vec<f32>>,
    /// Added to the scores for the choice, `[n_expert]`.
    pub choice_bias: Option<Vec<f32>>,
    /// From the stream to the row that experts work on, `[latent, n_embd]`, and back, `[n_embd, latent]`.
    pub latent: Option<[L; 2]>,
    /// The experts.
    pub experts: Vec<DenseWeights<L>>,
    /// Factor on each expert's result, `[n_expert]`.
    pub expert_scale: Option<Vec<f32>>,
    /// What all tokens go through besides.
    pub shared: Option<DenseWeights<L>>,
    /// The gate of that, `[n_embd]`.
    pub shared_gate: Option<Vec<f32>>,
    /// Norms of the experts' input, their sum, and the result of what all tokens go through.
    pub own_norms: Option<[NormWeights; 3]>,
}

/// What a layer does with its own embedding.
#[derive(Debug, Clone)]
pub struct PerLayerWeights<L = Linear> {
    /// `[width, n_embd]`.
    pub gate: L,
    /// `[n_embd, width]`.
    pub proj: L,
    /// Norm of what is added.
    pub post_norm: NormWeights,
}

/// How a layer goes about with several streams.
#[derive(Debug, Clone)]
pub struct LayerStreams<L = Linear> {
    /// Norm of the router's input.
    pub router_norm: NormWeights,
    /// `[n, n_embd]`.
    pub router: L,
    /// `[n * n, n]`.
    pub predict: L,
    /// `[n, n]`.
    pub correct: L,
    /// Factor on the active stream before its embedding, `[n_embd]`.
    pub correct_scale: Vec<f32>,
    /// LAuReL, `[rank, n_embd]`.
    pub laurel_l: L,
    /// And back, `[n_embd, rank]`.
    pub laurel_r: L,
    /// Norm of LAuReL's result.
    pub laurel_norm: NormWeights,
}

impl Weights {
    /// Every matrix and table that a forward pass reads, each once. What a pooled state goes through is not among them.
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

    /// The output head, where it is not the embedding table.
    pub fn own_head(&self) -> Option<&Linear> {
        let tied = |head: &&Linear| std::ptr::eq(head.weight.bytes(), self.token_embd.weight.bytes());
        self.output.as_ref().filter(|head| !tied(head))
    }
}

impl<L> LayerWeights<L> {
    /// Every matrix, in the order of the computation: the one list that loading, memory estimates and the roofline go by.
    pub fn linears(&self) -> Vec<&L> {
        let mut all = Vec::new();
        let Ok(_) = self.map(&mut |linear| {
            all.push(linear);
            Ok::<(), Infallible>(())
        });
        all
    }

    /// The same with `f` of every matrix.
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
                own_norms: e.own_norms.clone(),
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
    /// The matrix of its output, `[n_embd, ..]`; that of attention where there are two. `None` where there is no mixer.
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
    /// Whether `linear` is one of its matrices, and not another that is equal.
    pub fn has(&self, linear: &L) -> bool {
        [self.gate.as_ref(), Some(&self.up), Some(&self.down)]
            .into_iter()
            .flatten()
            .any(|own| std::ptr::eq(own, linear))
    }

    fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<DenseWeights<M>, E> {
        Ok(DenseWeights { gate: self.gate.as_ref().map(&mut *f).transpose()?, up: f(&self.up)?, down: f(&self.down)? })
    }
}

impl<L> Weights<L> {
    /// The divisors of `rope`'s frequencies, `[n_rot / 2]`, where sequences have room for `n_ctx` positions.
    pub fn rope_factors(&self, rope: &Rope, n_ctx: usize) -> Option<&[f32]> {
        self.rope_factors.get(rope.factors.tensor(n_ctx)?).map(Vec::as_slice)
    }
}

/// Everything that a model of this kind has, from `source`.
pub(crate) fn build<S: Source>(spec: &ModelSpec, source: &mut S) -> Result<Weights<S::Linear>, S::Error> {
    let Embedding { scale: _, token_types, positions, norm, per_layer, streams } = &spec.embedding;
    let (n_embd, n_layer, output) = (spec.n_embd, spec.n_layer(), &spec.output);
    let mut b = Builder { source };
    let token_embd = b.matrix("token_embd", [n_embd, spec.n_vocab])?;
    let head = match output.head {
        None => None,
        Some(head) if head.tied == Some(true) => Some(None),
        Some(head) => {
            let bias = if head.bias { Need::Optional } else { Need::None };
            Some(b.source.linear("output", [n_embd, spec.n_vocab], Need::Optional, bias)?)
        }
    };
    let output_norm = b.norm(output.norm, "", n_embd)?;
    let token_type = match token_types {
        Some(n) => Some(b.source.first_row("token_types.weight", [n_embd, *n])?),
        None => None,
    };
    let positions = positions.map(|n| b.matrix("position_embd", [n_embd, n])).transpose()?;
    let embedding_norm = b.norm(*norm, "", n_embd)?;
    let per_layer = match per_layer {
        Some(p) => {
            // As long a row as any embedding: both sizes were checked, their product was not.
            let width = p.width.saturating_mul(n_layer);
            Some(PerLayerTables {
                token_embd: b.matrix("per_layer_token_embd", [width, spec.n_vocab])?,
                model_proj: b.matrix("per_layer_model_proj", [n_embd, width])?,
                proj_norm: b.one_norm(p.proj_norm, "", p.width)?,
            })
        }
        None => None,
    };
    let streams = match streams {
        Some(s) => Some(StreamsWeights {
            proj: b.source.matrices("altup_proj", [n_embd, n_embd, s.n - 1], Need::None)?,
            unembd_proj: b.source.matrices("altup_unembd_proj", [n_embd, n_embd, s.n - 1], Need::None)?,
        }),
        None => None,
    };
    let mut rope_factors = HashMap::new();
    for layer in &spec.layers {
        let Some(rope) = layer.mixer.rope() else { continue };
        for &tensor in rope.factors.tensors() {
            if let Some(divisors) = b.source.divisors(tensor, rope.n_rot / 2)? {
                rope_factors.insert(tensor, divisors);
            }
        }
    }
    let layers = (0..n_layer).map(|i| b.layer(spec, i)).collect::<Result<_, _>>()?;
    let dense = output.dense.iter().try_fold((Vec::new(), n_embd), |(mut all, n_in), dense| {
        all.push(b.matrix(dense.tensor, [n_in, dense.n_out])?);
        Ok((all, dense.n_out))
    })?;
    let classifier = match &output.classifier {
        Some(c) => Some(ClassifierWeights {
            dense: b.source.any_rows("cls", n_embd)?,
            norm: {
                let weight = b.source.vector("cls.norm.weight", n_embd, Need::Optional)?;
                weight.map(|weight| NormWeights { weight, bias: None })
            },
            out: {
                let shape = [n_embd, c.labels.len().max(1)];
                b.source.linear("cls.output", shape, Need::Optional, Need::Optional)?
            },
        }),
        None => None,
    };
    let output = head.map(|own| own.unwrap_or_else(|| token_embd.clone()));
    Ok(Weights {
        token_embd,
        token_type,
        positions,
        embedding_norm,
        per_layer,
        streams,
        layers,
        output_norm,
        output,
        dense: dense.0,
        classifier,
        rope_factors,
    })
}

struct Builder<'s, S> {
    source: &'s mut S,
}

impl<S: Source> Builder<'_, S> {
    /// A matrix without a bias.
    fn matrix(&mut self, name: &str, shape: Shape) -> Result<S::Linear, S::Error> {
        self.source.required(name, shape, Need::None)
    }

    /// A matrix whose bias may be there.
    fn linear(&mut self, name: &str, shape: Shape) -> Result<S::Linear, S::Error> {
        self.source.required(name, shape, Need::Optional)
    }

    fn norm(&mut self, norm: Option<Norm>, prefix: &str, n: usize) -> Result<Option<NormWeights>, S::Error> {
        norm.map(|norm| self.one_norm(norm, prefix, n)).transpose()
    }

    fn one_norm(&mut self, norm: Norm, prefix: &str, n: usize) -> Result<NormWeights, S::Error> {
        if !norm.weight {
            return Ok(NormWeights { weight: self.source.ones(n), bias: None });
        }
        let name = format!("{prefix}{}", norm.tensor);
        let suffix = if norm.bare { "" } else { ".weight" };
        let weight = self.source.vector(&format!("{name}{suffix}"), n, Need::Required)?.unwrap_or_default();
        let bias = if norm.bias { Need::Required } else { Need::None };
        let bias = self.source.vector(&format!("{name}.bias"), n, bias)?;
        Ok(NormWeights { weight, bias })
    }

    fn layer(&mut self, spec: &ModelSpec, i: usize) -> Result<LayerWeights<S::Linear>, S::Error> {
        let LayerSpec {
            mixer_norm,
            mixer,
            mixer_post_norm,
            feed_forward_norm,
            feed_forward,
            feed_forward_post_norm,
            residual,
            output_scale,
        } = &spec.layers[i];
        let n_embd = spec.n_embd;
        let p = format!("blk.{i}.");
        let mixer_norm = self.norm(*mixer_norm, &p, n_embd)?;
        let mixer = match mixer {
            Mixer::Attention(a) => MixerWeights::Attention(self.attention(a, &p, n_embd)?),
            Mixer::LatentAttention(a) => MixerWeights::LatentAttention(self.latent_attention(a, &p, n_embd)?),
            Mixer::ShortConv(conv) => MixerWeights::ShortConv(short_conv::build(self.source, *conv, &p, n_embd)?),
            Mixer::Mamba(spec) => MixerWeights::Mamba(mamba::build(self.source, spec, &p, n_embd)?),
            Mixer::Mamba2(spec) => MixerWeights::Mamba2(mamba2::build(self.source, spec, &p, n_embd)?),
            Mixer::AttentionAndMamba2(both) => {
                let attention = self.attention(&both.attention, &p, n_embd)?;
                let mamba2 = mamba2::build(self.source, &both.mamba2, &p, n_embd)?;
                MixerWeights::AttentionAndMamba2(Box::new(AttentionAndMamba2Weights { attention, mamba2 }))
            }
            Mixer::DeltaRule(spec) => MixerWeights::DeltaRule(delta_rule::build(self.source, spec, &p, n_embd)?),
            Mixer::Rwkv6(spec) => MixerWeights::Rwkv6(rwkv6::build(self.source, spec, &p, n_embd)?),
            Mixer::Rwkv7(spec) => MixerWeights::Rwkv7(rwkv7::build(self.source, spec, &p, n_embd)?),
            Mixer::None => MixerWeights::None,
        };
        let mixer_post_norm = self.norm(*mixer_post_norm, &p, n_embd)?;
        let feed_forward_norm = self.norm(*feed_forward_norm, &p, n_embd)?;
        let feed_forward = match feed_forward {
            FeedForward::Dense(dense) => FeedForwardWeights::Dense(self.dense(dense, &p, "", n_embd)?),
            FeedForward::Experts(e) => FeedForwardWeights::Experts(Box::new(self.experts(e, &p, n_embd)?)),
            FeedForward::ChannelMix(mix) => FeedForwardWeights::ChannelMix(channel_mix::build(self.source, mix, &p)?),
            FeedForward::None => FeedForwardWeights::None,
        };
        let feed_forward_post_norm = self.norm(*feed_forward_post_norm, &p, n_embd)?;
        let sum_norms = match residual {
            Residual::Sequential { .. } | Residual::Parallel => None,
            Residual::PostNorm { mixer, feed_forward } => {
                Some([self.one_norm(*mixer, &p, n_embd)?, self.one_norm(*feed_forward, &p, n_embd)?])
            }
        };
        let per_layer = match &spec.embedding.per_layer {
            Some(own) => Some(PerLayerWeights {
                gate: self.matrix(&format!("{p}inp_gate"), [n_embd, own.width])?,
                proj: self.matrix(&format!("{p}proj"), [own.width, n_embd])?,
                post_norm: self.one_norm(own.post_norm, &p, n_embd)?,
            }),
            None => None,
        };
        let streams = match &spec.embedding.streams {
            Some(s) => Some(LayerStreams {
                router_norm: self.one_norm(s.router_norm, &p, n_embd)?,
                router: self.matrix(&format!("{p}altup_router"), [n_embd, s.n])?,
                predict: self.matrix(&format!("{p}altup_predict_coef"), [s.n, s.n * s.n])?,
                correct: self.matrix(&format!("{p}altup_correct_coef"), [s.n, s.n])?,
                correct_scale: self.required_vector(&format!("{p}altup_correct_scale.weight"), n_embd)?,
                laurel_l: self.matrix(&format!("{p}laurel_l"), [n_embd, s.laurel_rank])?,
                laurel_r: self.matrix(&format!("{p}laurel_r"), [s.laurel_rank, n_embd])?,
                laurel_norm: self.one_norm(s.laurel_norm, &p, n_embd)?,
            }),
            None => None,
        };
        let output_scale = match output_scale {
            OutputScale::Fixed(scale) => *scale,
            OutputScale::Stored => {
                let stored = self.source.vector(&format!("{p}layer_output_scale.weight"), 1, Need::Optional)?;
                stored.and_then(|scale| scale.first().copied()).unwrap_or(1.0)
            }
        };
        Ok(LayerWeights {
            mixer_norm,
            mixer,
            mixer_post_norm,
            feed_forward_norm,
            feed_forward,
            feed_forward_post_norm,
            sum_norms,
            per_layer,
            streams,
            output_scale,
        })
    }

    fn required_vector(&mut self, name: &str, n: usize) -> Result<Vec<f32>, S::Error> {
        Ok(self.source.vector(name, n, Need::Required)?.unwrap_or_default())
    }

    fn attention(
        &mut self,
        a: &AttentionSpec,
        p: &str,
        n_embd: usize,
    ) -> Result<AttentionWeights<S::Linear>, S::Error> {
        let n_gate = if a.output_gate { a.n_head * a.head_dim } else { 0 };
        let (n_q, n_kv) = (a.n_head * a.head_dim + n_gate, a.n_head_kv * a.head_dim);
        let bias = if a.qkv_bias { Need::Required } else { Need::Optional };
        let (q, k, v) = match a.kv {
            KvSource::Own => {
                let parts = [("attn_q", n_q), ("attn_k", n_kv), ("attn_v", n_kv)];
                let [q, k, v] = self.source.parts(p, "attn_qkv", parts, n_embd, bias, a.fused_qkv)?;
                (q, Some(k), Some(v))
            }
            KvSource::KeysAsValues => {
                let q = self.source.required(&format!("{p}attn_q"), [n_embd, n_q], bias)?;
                (q, Some(self.source.required(&format!("{p}attn_k"), [n_embd, n_kv], bias)?), None)
            }
            KvSource::Layer(_) => (self.source.required(&format!("{p}attn_q"), [n_embd, n_q], bias)?, None, None),
        };
        let norm = |this: &mut Self, name: &str, n_head: usize, norm: QkNorm| {
            let n = match norm.over {
                NormOver::Head => a.head_dim,
                NormOver::EachHead | NormOver::Row => n_head * a.head_dim,
                NormOver::Unweighted => return Ok(NormWeights { weight: this.source.ones(a.head_dim), bias: None }),
            };
            let each = (norm.over == NormOver::EachHead).then_some(n_head);
            let weight = this.source.norm_weight(&format!("{p}{name}.weight"), n, each)?;
            let bias = if norm.kind == NormKind::Layer { Need::Optional } else { Need::None };
            Ok(NormWeights { weight, bias: this.source.vector(&format!("{p}{name}.bias"), n, bias)? })
        };
        let q_norm = a.qk_norm.map(|qk| norm(self, "attn_q_norm", a.n_head, qk)).transpose()?;
        let k_norm = match a.qk_norm.filter(|_| k.is_some()) {
            Some(qk) => Some(norm(self, "attn_k_norm", a.n_head_kv, qk)?),
            None => None,
        };
        let sinks = if a.sinks { Need::Required } else { Need::None };
        let sinks = self.source.vector(&format!("{p}attn_sinks.weight"), a.n_head, sinks)?;
        let out = self.linear(&format!("{p}attn_output"), [a.n_head * a.head_dim, n_embd])?;
        Ok(AttentionWeights { q, k, v, out, q_norm, k_norm, sinks })
    }

    fn latent_attention(
        &mut self,
        a: &LatentAttentionSpec,
        p: &str,
        n_embd: usize,
    ) -> Result<LatentAttentionWeights<S::Linear>, S::Error> {
        let n_q = a.n_head * a.head_dim();
        let norm = |tensor| Norm { tensor, weight: true, bias: false, kind: NormKind::Rms, eps: a.eps, bare: false };
        let (q_a, q) = match a.q_rank {
            Some(rank) => {
                let q_a = self.matrix(&format!("{p}attn_q_a"), [n_embd, rank])?;
                let q_norm = self.one_norm(norm("attn_q_a_norm"), p, rank)?;
                (Some((q_a, q_norm)), self.matrix(&format!("{p}attn_q_b"), [rank, n_q])?)
            }
            None => (None, self.matrix(&format!("{p}attn_q"), [n_embd, n_q])?),
        };
        let kv_a = self.matrix(&format!("{p}attn_kv_a_mqa"), [n_embd, a.kv_rank + a.shared_dim])?;
        let kv_a_norm = self.one_norm(norm("attn_kv_a_norm"), p, a.kv_rank)?;
        let (k_b, v_b) = self.source.expansions(p, a)?;
        let out = self.linear(&format!("{p}attn_output"), [a.n_head * a.value_dim, n_embd])?;
        Ok(LatentAttentionWeights { q_a, q, kv_a, kv_a_norm, k_b, v_b, out })
    }

    fn dense(
        &mut self,
        dense: &Dense,
        p: &str,
        suffix: &str,
        n_embd: usize,
    ) -> Result<DenseWeights<S::Linear>, S::Error> {
        let n_ff = dense.n_ff;
        let (gate, up, down) = (format!("ffn_gate{suffix}"), format!("ffn_up{suffix}"), format!("{p}ffn_down{suffix}"));
        let (gate, up) = if dense.gated {
            let parts = [(gate.as_str(), n_ff), (up.as_str(), n_ff)];
            let [gate, up] = self.source.parts(p, &up, parts, n_embd, Need::Optional, dense.fused)?;
            (Some(gate), up)
        } else {
            (None, self.linear(&format!("{p}{up}"), [n_embd, n_ff])?)
        };
        Ok(DenseWeights { gate, up, down: self.linear(&down, [n_ff, n_embd])? })
    }

    fn experts(&mut self, e: &Experts, p: &str, n_embd: usize) -> Result<ExpertsWeights<S::Linear>, S::Error> {
        let bias = if e.biases { Need::Required } else { Need::None };
        let router = self.source.required(&format!("{p}ffn_gate_inp"), [n_embd, e.n_expert], bias)?;
        let router_scale = match e.own_norms {
            Some(_) => Some(self.required_vector(&format!("{p}ffn_gate_inp.scale"), n_embd)?),
            None => None,
        };
        let need = if e.router.choice_bias { Need::Optional } else { Need::None };
        let mut choice_bias = self.source.vector(&format!("{p}exp_probs_b.bias"), e.n_expert, need)?;
        if choice_bias.is_none() {
            // Hunyuan 3's.
            choice_bias = self.source.vector(&format!("{p}exp_probs_b"), e.n_expert, need)?;
        }
        let (n_ff, n) = (e.expert.n_ff, e.n_expert);
        let latent = match e.latent {
            Some(n) => Some([
                self.matrix(&format!("{p}ffn_latent_down"), [n_embd, n])?,
                self.matrix(&format!("{p}ffn_latent_up"), [n, n_embd])?,
            ]),
            None => None,
        };
        let n_in = e.latent.unwrap_or(n_embd);
        let (gates, ups) = if e.expert.gated {
            let (gates, ups) = self.source.expert_pairs(p, [n_in, n_ff, n], bias, e.expert.fused)?;
            (gates.into_iter().map(Some).collect(), ups)
        } else {
            let none: Vec<Option<S::Linear>> = (0..n).map(|_| None).collect();
            (none, self.source.matrices(&format!("{p}ffn_up_exps"), [n_in, n_ff, n], bias)?)
        };
        let downs = self.source.matrices(&format!("{p}ffn_down_exps"), [n_ff, n_in, n], bias)?;
        let parts = gates.into_iter().zip(ups).zip(downs);
        let experts = parts.map(|((gate, up), down)| DenseWeights { gate, up, down }).collect();
        let expert_scale = self.source.vector(&format!("{p}ffn_down_exps.scale"), n, Need::Optional)?;
        let (mut shared, mut shared_gate) = (None, None);
        if let Some(s) = &e.shared {
            let suffix = if s.plain_names { "" } else { "_shexp" };
            if s.gated {
                shared_gate = Some(self.required_vector(&format!("{p}ffn_gate_inp_shexp.weight"), n_embd)?);
            }
            shared = Some(self.dense(&s.dense, p, suffix, n_embd)?);
        }
        let own_norms = match e.own_norms {
            Some(own) => Some([
                self.one_norm(own.input, p, n_embd)?,
                self.one_norm(own.result, p, n_embd)?,
                self.one_norm(own.shared_result, p, n_embd)?,
            ]),
            None => None,
        };
        Ok(ExpertsWeights {
            router,
            router_scale,
            choice_bias,
            latent,
            experts,
            expert_scale,
            shared,
            shared_gate,
            own_norms,
        })
    }
}
