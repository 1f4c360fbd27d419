//! The weights that a model has: their names in GGUF files and their shapes.
//!
//! [`build`] requests every weight from a [`WeightSource`] by name and shape. A file is one source.
//! [`ModelSpec::tensors`] uses another, which only records the requests; so there is one list of a model's tensors. `p`
//! is the prefix of a layer's names, `blk.N.`.

use std::collections::HashMap;

use super::{
    AttentionAndMamba2Weights, AttentionWeights, ClassifierWeights, DenseWeights, ExpertsWeights, FeedForwardWeights,
    LatentAttentionWeights, LayerStreams, LayerWeights, MixerWeights, NormWeights, PerLayerTables, PerLayerWeights,
    StreamsWeights, Weights,
};
use crate::attention::{AttentionSpec, KvSource, LatentAttentionSpec, NormOver, QkNorm};
use crate::feed_forward::{Dense, Experts, FeedForward};
use crate::recurrent::{channel_mix, delta_rule, mamba, mamba2, rwkv6, rwkv7, short_conv};
use crate::spec::{HeadMatrix, InputEmbedding, LayerSpec, Mixer, ModelSpec, Norm, NormKind, OutputScale, Residual};
use crate::tensors::{MatrixShape, Presence, WeightSource};

/// All weights of a model of `spec`, from `source`.
pub(crate) fn build<S: WeightSource>(spec: &ModelSpec, source: &mut S) -> Result<Weights<S::Linear>, S::Error> {
    let InputEmbedding { scale: _, n_token_types, n_positions, norm, per_layer, streams } = &spec.embedding;
    let (n_embd, n_layer, output) = (spec.n_embd, spec.n_layer(), &spec.output);
    let mut b = Builder { source };
    let token_embd = b.matrix("token_embd", [n_embd, spec.n_vocab])?;
    let head = match output.head {
        None => None,
        Some(head) if head.matrix == HeadMatrix::EmbeddingTable => Some(None),
        Some(head) => {
            let bias = if head.may_have_bias { Presence::Optional } else { Presence::None };
            Some(b.source.linear("output", [n_embd, spec.n_vocab], Presence::Optional, bias)?)
        }
    };
    let output_norm = b.norm(output.norm, "", n_embd)?;
    let token_type = match n_token_types {
        Some(n) => Some(b.source.first_row("token_types.weight", [n_embd, *n])?),
        None => None,
    };
    let positions = n_positions.map(|n| b.matrix("position_embd", [n_embd, n])).transpose()?;
    let embedding_norm = b.norm(*norm, "", n_embd)?;
    let per_layer = match per_layer {
        Some(p) => {
            // Saturating: both factors were checked, their product was not.
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
            proj: b.source.matrices("altup_proj", [n_embd, n_embd, s.n - 1], Presence::None)?,
            unembd_proj: b.source.matrices("altup_unembd_proj", [n_embd, n_embd, s.n - 1], Presence::None)?,
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
    let (pooled_projections, _) =
        output.pooled_projections.iter().try_fold((Vec::new(), n_embd), |(mut all, n_in), projection| {
            all.push(b.matrix(projection.tensor, [n_in, projection.n_out])?);
            Ok((all, projection.n_out))
        })?;
    let classifier = match &output.classifier {
        Some(c) => Some(ClassifierWeights {
            dense: b.source.any_rows("cls", n_embd)?,
            norm: {
                let weight = b.source.vector("cls.norm.weight", n_embd, Presence::Optional)?;
                weight.map(|weight| NormWeights { weight, bias: None })
            },
            out: {
                let shape = [n_embd, c.labels.len().max(1)];
                b.source.linear("cls.output", shape, Presence::Optional, Presence::Optional)?
            },
        }),
        None => None,
    };
    let output = head.map(|tensor| tensor.unwrap_or_else(|| token_embd.clone()));
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
        pooled_projections,
        classifier,
        rope_factors,
    })
}

/// The parts of [`build`] that need the source.
struct Builder<'s, S> {
    /// The source of the weights.
    source: &'s mut S,
}

impl<S: WeightSource> Builder<'_, S> {
    /// A matrix without a bias.
    fn matrix(&mut self, name: &str, shape: MatrixShape) -> Result<S::Linear, S::Error> {
        self.source.required(name, shape, Presence::None)
    }

    /// A matrix that may have a bias.
    fn linear(&mut self, name: &str, shape: MatrixShape) -> Result<S::Linear, S::Error> {
        self.source.required(name, shape, Presence::Optional)
    }

    /// The weights of a norm over `n` elements, if there is one.
    fn norm(&mut self, norm: Option<Norm>, prefix: &str, n: usize) -> Result<Option<NormWeights>, S::Error> {
        norm.map(|norm| self.one_norm(norm, prefix, n)).transpose()
    }

    /// The weights of a norm over `n` elements.
    fn one_norm(&mut self, norm: Norm, prefix: &str, n: usize) -> Result<NormWeights, S::Error> {
        if !norm.has_weight {
            return Ok(NormWeights { weight: self.source.ones(n), bias: None });
        }
        let name = format!("{prefix}{}", norm.tensor_stem);
        let suffix = if norm.omits_weight_suffix { "" } else { ".weight" };
        let weight = self.source.vector(&format!("{name}{suffix}"), n, Presence::Required)?.unwrap_or_default();
        let bias = if norm.has_bias { Presence::Required } else { Presence::None };
        let bias = self.source.vector(&format!("{name}.bias"), n, bias)?;
        Ok(NormWeights { weight, bias })
    }

    /// The weights of layer `i`.
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
            Residual::PostNorm { mixer_sum_norm, feed_forward_sum_norm } => {
                Some([self.one_norm(*mixer_sum_norm, &p, n_embd)?, self.one_norm(*feed_forward_sum_norm, &p, n_embd)?])
            }
        };
        let per_layer = match &spec.embedding.per_layer {
            Some(embedding) => Some(PerLayerWeights {
                gate: self.matrix(&format!("{p}inp_gate"), [n_embd, embedding.width])?,
                proj: self.matrix(&format!("{p}proj"), [embedding.width, n_embd])?,
                post_norm: self.one_norm(embedding.post_norm, &p, n_embd)?,
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
                let stored = self.source.vector(&format!("{p}layer_output_scale.weight"), 1, Presence::Optional)?;
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

    /// A vector that must be there.
    fn required_vector(&mut self, name: &str, n: usize) -> Result<Vec<f32>, S::Error> {
        Ok(self.source.vector(name, n, Presence::Required)?.unwrap_or_default())
    }

    /// The weights of softmax attention.
    fn attention(
        &mut self,
        a: &AttentionSpec,
        p: &str,
        n_embd: usize,
    ) -> Result<AttentionWeights<S::Linear>, S::Error> {
        let n_gate = if a.output_gate { a.n_head * a.head_dim } else { 0 };
        let (n_q, n_kv) = (a.n_head * a.head_dim + n_gate, a.n_head_kv * a.head_dim);
        let bias = if a.qkv_bias { Presence::Required } else { Presence::Optional };
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
            let bias = if norm.kind == NormKind::Layer { Presence::Optional } else { Presence::None };
            Ok(NormWeights { weight, bias: this.source.vector(&format!("{p}{name}.bias"), n, bias)? })
        };
        let q_norm = a.qk_norm.map(|qk| norm(self, "attn_q_norm", a.n_head, qk)).transpose()?;
        let k_norm = match a.qk_norm.filter(|_| k.is_some()) {
            Some(qk) => Some(norm(self, "attn_k_norm", a.n_head_kv, qk)?),
            None => None,
        };
        let sinks = if a.sinks { Presence::Required } else { Presence::None };
        let sinks = self.source.vector(&format!("{p}attn_sinks.weight"), a.n_head, sinks)?;
        let out = self.linear(&format!("{p}attn_output"), [a.n_head * a.head_dim, n_embd])?;
        Ok(AttentionWeights { q, k, v, out, q_norm, k_norm, sinks })
    }

    /// The weights of latent attention.
    fn latent_attention(
        &mut self,
        a: &LatentAttentionSpec,
        p: &str,
        n_embd: usize,
    ) -> Result<LatentAttentionWeights<S::Linear>, S::Error> {
        let n_q = a.n_head * a.head_dim();
        let norm = |tensor_stem| Norm {
            tensor_stem,
            has_weight: true,
            has_bias: false,
            kind: NormKind::Rms,
            eps: a.eps,
            omits_weight_suffix: false,
        };
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

    /// The weights of a dense feed-forward; `suffix` follows the names of its matrices.
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
            let [gate, up] = self.source.parts(p, &up, parts, n_embd, Presence::Optional, dense.fused)?;
            (Some(gate), up)
        } else {
            (None, self.linear(&format!("{p}{up}"), [n_embd, n_ff])?)
        };
        Ok(DenseWeights { gate, up, down: self.linear(&down, [n_ff, n_embd])? })
    }

    /// The weights of a mixture of experts.
    fn experts(&mut self, e: &Experts, p: &str, n_embd: usize) -> Result<ExpertsWeights<S::Linear>, S::Error> {
        let bias = if e.biases { Presence::Required } else { Presence::None };
        let router = self.source.required(&format!("{p}ffn_gate_inp"), [n_embd, e.n_expert], bias)?;
        let router_scale = match e.expert_norms {
            Some(_) => Some(self.required_vector(&format!("{p}ffn_gate_inp.scale"), n_embd)?),
            None => None,
        };
        let presence = if e.router.choice_bias { Presence::Optional } else { Presence::None };
        let mut choice_bias = self.source.vector(&format!("{p}exp_probs_b.bias"), e.n_expert, presence)?;
        if choice_bias.is_none() {
            // Hunyuan 3 names it without `.bias`.
            choice_bias = self.source.vector(&format!("{p}exp_probs_b"), e.n_expert, presence)?;
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
        let expert_scale = self.source.vector(&format!("{p}ffn_down_exps.scale"), n, Presence::Optional)?;
        let (mut shared, mut shared_gate) = (None, None);
        if let Some(s) = &e.shared {
            let suffix = if s.plain_names { "" } else { "_shexp" };
            if s.gated {
                shared_gate = Some(self.required_vector(&format!("{p}ffn_gate_inp_shexp.weight"), n_embd)?);
            }
            shared = Some(self.dense(&s.dense, p, suffix, n_embd)?);
        }
        let expert_norms = match e.expert_norms {
            Some(norms) => Some([
                self.one_norm(norms.input, p, n_embd)?,
                self.one_norm(norms.result, p, n_embd)?,
                self.one_norm(norms.shared_result, p, n_embd)?,
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
            expert_norms,
        })
    }
}
