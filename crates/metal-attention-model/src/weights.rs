//! A model's weights by role: matrices as handles into the mapped file, vectors in F32; all checked against the
//! [`ModelSpec`](crate::ModelSpec).
//!
//! `L` is the type of a matrix with its bias: [`Linear`] as loaded, or a backend's own form, made by
//! [`Layer::map`]. Shapes are row-major, `[n_out, n_in]`.

mod build;

use std::collections::HashMap;
use std::convert::Infallible;

use metal_attention_gguf::Tensor;

use crate::Rope;
use crate::attention::{AttentionSpec, LatentAttentionSpec};
use crate::block_conv::BlockConvWeights;
use crate::feed_forward::{Dense, Experts};
use crate::parts::{Layer, Loaded, Mixer, Prepare};
use crate::recurrent::{
    ChannelMixWeights, DeltaRuleWeights, Mamba2Weights, MambaWeights, Rwkv6Weights, Rwkv7Weights, ShortConvWeights,
};
use crate::spec::{AssistantEnds, NormKind, PerLayerEmbedding, ResidualStreams};
pub(crate) use build::build;

/// A matrix with its bias: `y = W x + b`.
#[derive(Debug, Clone)]
pub struct Linear {
    /// `W`, `[n_out, n_in]` row-major (GGUF shape `[n_in, n_out]`).
    pub weight: Tensor,
    /// `b`, `[n_out]`.
    pub bias: Option<Vec<f32>>,
}

/// A norm with its weights.
#[derive(Debug, Clone, PartialEq)]
pub struct NormWeights {
    /// The formula.
    pub kind: NormKind,
    /// Epsilon, added to the mean of squares or the variance.
    pub eps: f32,
    /// Factor on each element; all ones for a norm without a weight.
    pub weight: Vec<f32>,
    /// Added to each element.
    pub bias: Option<Vec<f32>>,
}

/// The weights of a whole model; `L` is the type of a matrix with its bias.
#[derive(Debug, Clone)]
pub struct Weights<L = Linear> {
    /// Embedding table, `[n_vocab, n_embd]`; `None` if no tokens are read ([`StateInput::Projected`](crate::StateInput::Projected)).
    /// Of an assistant it is that of its target model, `[n_vocab, target_width]`.
    pub token_embd: Option<L>,
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
    /// What reads states, in drafters.
    pub state: Option<StateInputWeights<L>>,
    /// What leads from the target model to an assistant and back.
    pub assistant: Option<AssistantWeights<L>>,
    /// The layers, first to last.
    pub layers: Vec<Layer<Loaded<L>>>,
    /// Norm before the output head.
    pub output_norm: Option<NormWeights>,
    /// Output head, `[n_vocab, n_embd]`; the embedding table itself if tied. `None` if the model has no logits.
    pub output: Option<L>,
    /// The matrices that the pooled state goes through, in order.
    pub pooled_projections: Vec<L>,
    /// The classifier over the pooled state.
    pub classifier: Option<ClassifierWeights<L>>,
    /// Divisors of the RoPE frequencies, at least `n_rot / 2` each, by the tensor that they are in.
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

/// The weights that read states: those of a [`StateInput`](crate::StateInput).
#[derive(Debug, Clone)]
pub enum StateInputWeights<L = Linear> {
    /// Those of [`StateInput::Joined`](crate::StateInput::Joined).
    Joined {
        /// Norm of the token's embedding.
        embedding_norm: NormWeights,
        /// Norm of the state.
        state_norm: NormWeights,
        /// From the normed embedding, followed by the normed state, to the input of the first layer, `[n_embd, 2 * n_embd]`.
        proj: L,
    },
    /// Those of [`StateInput::Attended`](crate::StateInput::Attended).
    Attended {
        /// Norm of the token's embedding.
        embedding_norm: NormWeights,
        /// Norm of the state.
        state_norm: NormWeights,
        /// Whether the residual stream begins as the normed state.
        norms_residual: bool,
    },
    /// Those of [`StateInput::Projected`](crate::StateInput::Projected).
    Projected {
        /// Norm of the whole state.
        norm: Option<NormWeights>,
        /// From the state to the residual stream, `[n_embd, width]`.
        fc: L,
    },
}

impl<L> StateInputWeights<L> {
    /// Its matrix, if it has one.
    pub fn linear(&self) -> Option<&L> {
        match self {
            Self::Joined { proj: linear, .. } | Self::Projected { fc: linear, .. } => Some(linear),
            Self::Attended { .. } => None,
        }
    }

    /// The same with `f` of its matrix, if it has one.
    pub fn try_map<M, E>(&self, f: impl FnOnce(&L) -> Result<M, E>) -> Result<StateInputWeights<M>, E> {
        Ok(match self {
            Self::Joined { embedding_norm, state_norm, proj } => StateInputWeights::Joined {
                embedding_norm: embedding_norm.clone(),
                state_norm: state_norm.clone(),
                proj: f(proj)?,
            },
            Self::Attended { embedding_norm, state_norm, norms_residual } => StateInputWeights::Attended {
                embedding_norm: embedding_norm.clone(),
                state_norm: state_norm.clone(),
                norms_residual: *norms_residual,
            },
            Self::Projected { norm, fc } => StateInputWeights::Projected { norm: norm.clone(), fc: f(fc)? },
        })
    }
}

/// The weights between an assistant and its target model.
#[derive(Debug, Clone)]
pub struct AssistantWeights<L = Linear> {
    /// The specification.
    pub spec: AssistantEnds,
    /// From the target's embedding, followed by the state, to the input of the first layer, `[n_embd, 2 * target_width]`.
    pub pre_projection: L,
    /// From the result of the output norm to the next state, `[target_width, n_embd]`.
    pub post_projection: L,
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
    /// The specification.
    pub spec: AttentionSpec,
    /// Queries, `[n_head * head_dim, n_embd]`; with [`AttentionGate::InQueries`](crate::AttentionGate::InQueries) each
    /// head's query rows and then its gate rows, `[n_head * 2 * head_dim, n_embd]`.
    pub q: L,
    /// Keys, `[n_head_kv * head_dim, n_embd]`; `None` if another layer's cache is read.
    pub k: Option<L>,
    /// Values, `[n_head_kv * head_dim, n_embd]`; `None` if another layer's cache is read, or the keys are the values.
    pub v: Option<L>,
    /// Gate with a tensor of its own, `[n_head * head_dim, n_embd]` or `[n_head, n_embd]`.
    pub gate: Option<L>,
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
    /// The specification.
    pub spec: LatentAttentionSpec,
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

/// The weights of a dense feed-forward, or of one expert.
#[derive(Debug, Clone)]
pub struct DenseWeights<L = Linear> {
    /// The specification.
    pub spec: Dense,
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
    /// The specification.
    pub spec: Experts,
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

/// The weights of a layer's additional embedding.
#[derive(Debug, Clone)]
pub struct LayerEmbeddingWeights<L = Linear> {
    /// The specification.
    pub spec: PerLayerEmbedding,
    /// Gate, `[width, n_embd]`.
    pub gate: L,
    /// Projection back, `[n_embd, width]`.
    pub proj: L,
    /// Norm of the projection's result.
    pub post_norm: NormWeights,
}

/// The weights of a layer with `n` residual streams (AltUp and LAuReL).
#[derive(Debug, Clone)]
pub struct LayerStreamsWeights<L = Linear> {
    /// The specification.
    pub spec: ResidualStreams,
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
        let mut linears: Vec<&Linear> = self.token_embd.iter().chain(&self.positions).collect();
        if let Some(p) = &self.per_layer {
            linears.extend([&p.token_embd, &p.model_proj]);
        }
        if let Some(s) = &self.streams {
            linears.extend(s.proj.iter().chain(&s.unembd_proj));
        }
        linears.extend(self.state.iter().filter_map(StateInputWeights::linear));
        linears.extend(
            self.assistant.iter().flat_map(|assistant| [&assistant.pre_projection, &assistant.post_projection]),
        );
        linears.extend(self.layers.iter().flat_map(Layer::linears));
        linears.extend(self.own_head());
        linears.into_iter().map(|linear| &linear.weight).collect()
    }

    /// The output head, if it is not the embedding table.
    pub fn own_head(&self) -> Option<&Linear> {
        let is_table = |head: &Linear, table: &Linear| std::ptr::eq(head.weight.bytes(), table.weight.bytes());
        let tied = |head: &&Linear| self.token_embd.as_ref().is_some_and(|table| is_table(head, table));
        self.output.as_ref().filter(|head| !tied(head))
    }
}

impl<L> Layer<Loaded<L>> {
    /// Every matrix of the layer in the order of its fields. Loading, memory estimates and the roofline use this list.
    pub fn linears(&self) -> Vec<&L> {
        let mut all = Vec::new();
        let Ok(_) = self.map(&mut |linear| {
            all.push(linear);
            Ok::<(), Infallible>(())
        });
        all
    }

    /// The layer with every matrix replaced by `f` of it, called in the order of the fields; the first error ends it.
    pub fn map<'a, M: 'a, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<Layer<Loaded<M>>, E> {
        self.prepare(&mut MapLinears(f))
    }
}

/// Replaces the matrices of a layer; all else is copied.
struct MapLinears<'f, 'a, L, M, E>(&'f mut dyn FnMut(&'a L) -> Result<M, E>);

impl<'a, L, M, E> Prepare<'a, Loaded<L>> for MapLinears<'_, 'a, L, M, E> {
    type To = Loaded<M>;
    type Error = E;

    fn norm(&mut self, w: &NormWeights) -> Result<NormWeights, E> {
        Ok(w.clone())
    }

    fn attention(&mut self, w: &'a AttentionWeights<L>) -> Result<AttentionWeights<M>, E> {
        Ok(AttentionWeights {
            spec: w.spec.clone(),
            q: (self.0)(&w.q)?,
            k: w.k.as_ref().map(&mut *self.0).transpose()?,
            v: w.v.as_ref().map(&mut *self.0).transpose()?,
            gate: w.gate.as_ref().map(&mut *self.0).transpose()?,
            out: (self.0)(&w.out)?,
            q_norm: w.q_norm.clone(),
            k_norm: w.k_norm.clone(),
            sinks: w.sinks.clone(),
        })
    }

    fn latent_attention(&mut self, w: &'a LatentAttentionWeights<L>) -> Result<LatentAttentionWeights<M>, E> {
        Ok(LatentAttentionWeights {
            spec: w.spec.clone(),
            q_a: match &w.q_a {
                Some((linear, norm)) => Some(((self.0)(linear)?, norm.clone())),
                None => None,
            },
            q: (self.0)(&w.q)?,
            kv_a: (self.0)(&w.kv_a)?,
            kv_a_norm: w.kv_a_norm.clone(),
            k_b: w.k_b.iter().map(&mut *self.0).collect::<Result<_, _>>()?,
            v_b: w.v_b.iter().map(&mut *self.0).collect::<Result<_, _>>()?,
            out: (self.0)(&w.out)?,
        })
    }

    fn short_conv(&mut self, w: &'a ShortConvWeights<L>) -> Result<ShortConvWeights<M>, E> {
        w.map(self.0)
    }

    fn mamba(&mut self, w: &'a MambaWeights<L>) -> Result<MambaWeights<M>, E> {
        w.map(self.0)
    }

    fn mamba2(&mut self, w: &'a Mamba2Weights<L>) -> Result<Mamba2Weights<M>, E> {
        w.map(self.0)
    }

    fn attention_and_mamba2(&mut self, w: &'a AttentionAndMamba2Weights<L>) -> Result<AttentionAndMamba2Weights<M>, E> {
        Ok(AttentionAndMamba2Weights { attention: self.attention(&w.attention)?, mamba2: self.mamba2(&w.mamba2)? })
    }

    fn delta_rule(&mut self, w: &'a DeltaRuleWeights<L>) -> Result<DeltaRuleWeights<M>, E> {
        w.map(self.0)
    }

    fn rwkv6(&mut self, w: &'a Rwkv6Weights<L>) -> Result<Rwkv6Weights<M>, E> {
        w.map(self.0)
    }

    fn rwkv7(&mut self, w: &'a Rwkv7Weights<L>) -> Result<Rwkv7Weights<M>, E> {
        w.map(self.0)
    }

    fn dense(&mut self, w: &'a DenseWeights<L>) -> Result<DenseWeights<M>, E> {
        Ok(DenseWeights {
            spec: w.spec,
            gate: w.gate.as_ref().map(&mut *self.0).transpose()?,
            up: (self.0)(&w.up)?,
            down: (self.0)(&w.down)?,
        })
    }

    fn experts(&mut self, w: &'a ExpertsWeights<L>) -> Result<ExpertsWeights<M>, E> {
        Ok(ExpertsWeights {
            spec: w.spec.clone(),
            router: (self.0)(&w.router)?,
            router_scale: w.router_scale.clone(),
            choice_bias: w.choice_bias.clone(),
            latent: match &w.latent {
                Some([down, up]) => Some([(self.0)(down)?, (self.0)(up)?]),
                None => None,
            },
            experts: w.experts.iter().map(|dense| self.dense(dense)).collect::<Result<_, _>>()?,
            expert_scale: w.expert_scale.clone(),
            shared: w.shared.as_ref().map(|dense| self.dense(dense)).transpose()?,
            shared_gate: w.shared_gate.clone(),
            expert_norms: w.expert_norms.clone(),
        })
    }

    fn channel_mix(&mut self, w: &'a ChannelMixWeights<L>) -> Result<ChannelMixWeights<M>, E> {
        w.map(self.0)
    }

    fn block_conv(&mut self, w: &'a BlockConvWeights<L>) -> Result<BlockConvWeights<M>, E> {
        w.map(self.0)
    }

    fn layer_embedding(&mut self, w: &'a LayerEmbeddingWeights<L>) -> Result<LayerEmbeddingWeights<M>, E> {
        Ok(LayerEmbeddingWeights {
            spec: w.spec,
            gate: (self.0)(&w.gate)?,
            proj: (self.0)(&w.proj)?,
            post_norm: w.post_norm.clone(),
        })
    }

    fn layer_streams(&mut self, w: &'a LayerStreamsWeights<L>) -> Result<LayerStreamsWeights<M>, E> {
        Ok(LayerStreamsWeights {
            spec: w.spec,
            router_norm: w.router_norm.clone(),
            router: (self.0)(&w.router)?,
            predict: (self.0)(&w.predict)?,
            correct: (self.0)(&w.correct)?,
            correct_scale: w.correct_scale.clone(),
            laurel_l: (self.0)(&w.laurel_l)?,
            laurel_r: (self.0)(&w.laurel_r)?,
            laurel_norm: w.laurel_norm.clone(),
        })
    }

    fn output_scale(&mut self, scale: &f32) -> Result<f32, E> {
        Ok(*scale)
    }
}

impl<L> Mixer<Loaded<L>> {
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
}

impl<L> Weights<L> {
    /// The divisors of `rope`'s frequencies, at least `n_rot / 2`, for a context of `n_ctx` positions; `None` if there are
    /// none.
    pub fn rope_factors(&self, rope: &Rope, n_ctx: usize) -> Option<&[f32]> {
        self.rope_factors.get(rope.factors.tensor(n_ctx)?).map(Vec::as_slice)
    }
}
