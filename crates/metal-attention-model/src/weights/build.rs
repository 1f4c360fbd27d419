//! The weights that a model has: their names in GGUF files and their shapes.
//!
//! [`build`] requests every weight from a [`WeightSource`] by name and shape. A file is one source.
//! [`ModelSpec::tensors`] uses another, which only records the requests; so there is one list of a model's tensors.

use std::collections::HashMap;

use super::{
    AssistantWeights, AttentionAndMamba2Weights, AttentionWeights, ClassifierWeights, DenseWeights, ExpertsWeights,
    LatentAttentionWeights, LayerEmbeddingWeights, LayerStreamsWeights, NormWeights, PerLayerTables, StateInputWeights,
    StreamsWeights, Weights,
};
use crate::attention::{AttentionSpec, KvSource, LatentAttentionSpec, NormOver, QkNorm};
use crate::block_conv::{self, BlockConvSpec, BlockConvWeights};
use crate::feed_forward::{Dense, Experts};
use crate::parts::{Loaded, Prepare, Specs};
use crate::recurrent::{
    ChannelMixSpec, ChannelMixWeights, DeltaRuleSpec, DeltaRuleWeights, Mamba2Spec, Mamba2Weights, MambaSpec,
    MambaWeights, Rwkv6Spec, Rwkv6Weights, Rwkv7Spec, Rwkv7Weights, ShortConvSpec, ShortConvWeights, channel_mix,
    delta_rule, mamba, mamba2, rwkv6, rwkv7, short_conv,
};
use crate::spec::{
    AttentionAndMamba2Spec, HeadMatrix, InputEmbedding, ModelSpec, Norm, NormKind, OutputScale, PerLayerEmbedding,
    ResidualStreams,
};
use crate::state_input::{AttendedState, JoinedState, ProjectedState, StateInput};
use crate::tensors::{MatrixShape, Presence, WeightSource};

/// All weights of a model of `spec`, from `source`.
pub(crate) fn build<S: WeightSource>(spec: &ModelSpec, source: &mut S) -> Result<Weights<S::Linear>, S::Error> {
    let InputEmbedding { scale: _, n_token_types, n_positions, norm, per_layer, streams, state, assistant, n_rows: _ } =
        &spec.embedding;
    let (n_embd, n_layer, output) = (spec.n_embd, spec.n_layer(), &spec.output);
    let n_mixer = if spec.attends_to_state() { 2 * n_embd } else { n_embd };
    let mut b = Builder { source, n_embd, n_mixer, prefix: String::new() };
    let (table, ends) = ([n_embd, spec.n_ids()], [n_embd, spec.n_vocab]);
    // A prediction head may have a table, a last norm and an output head of its own, in its block.
    let block = match state {
        Some(StateInput::Joined(_)) => Some(format!("blk.{}.", spec.first_block)),
        None | Some(StateInput::Attended(_) | StateInput::Projected(_)) => None,
    };
    let of_head = |b: &Builder<'_, S>, name: &str| {
        block.as_ref().map(|block| format!("{block}{name}")).filter(|name| b.source.has(name))
    };
    let own_table = of_head(&b, "nextn.embed_tokens");
    let token_embd = match assistant {
        Some(assistant) => Some(b.source.target_table([assistant.target_width, spec.n_vocab])?),
        None if spec.reads_tokens() => Some(b.matrix(own_table.as_deref().unwrap_or("token_embd"), table)?),
        None => None,
    };
    let head = match (output.head, of_head(&b, "nextn.shared_head_head")) {
        (None, _) => None,
        (Some(_), Some(own)) => Some(Some(b.matrix(&own, ends)?)),
        (Some(head), None) => {
            let bias = if head.may_have_bias { Presence::Optional } else { Presence::None };
            let found = match head.matrix {
                HeadMatrix::EmbeddingTable => None,
                HeadMatrix::OutputTensor | HeadMatrix::OutputTensorInSomeFiles => {
                    b.source.linear("output", ends, Presence::Optional, bias)?
                }
            };
            // Tied to the table of the file, not to that of the prediction head or of an assistant's target.
            Some(match found {
                None if own_table.is_some() || assistant.is_some() => Some(b.matrix("token_embd", ends)?),
                found => found,
            })
        }
    };
    let state = match state {
        Some(state) => Some(b.state_input(state, spec.first_block)?),
        None => None,
    };
    let assistant = match assistant {
        Some(assistant) => {
            let width = assistant.target_width;
            Some(AssistantWeights {
                spec: *assistant,
                pre_projection: b.matrix("nextn.pre_projection", [2 * width, n_embd])?,
                post_projection: b.matrix("nextn.post_projection", [n_embd, width])?,
            })
        }
        None => None,
    };
    let output_norm = match (output.norm, &block) {
        (None, _) => None,
        (Some(norm), Some(block)) if norm.tensor_stem != "output_norm" => {
            b.prefix.clone_from(block);
            let norm = b.norm(&norm)?;
            b.prefix.clear();
            Some(norm)
        }
        (Some(norm), _) => Some(b.norm(&norm)?),
    };
    let token_type = match n_token_types {
        Some(n) => Some(b.source.first_row("token_types.weight", [n_embd, *n])?),
        None => None,
    };
    let positions = n_positions.map(|n| b.matrix("position_embd", [n_embd, n])).transpose()?;
    let embedding_norm = norm.map(|norm| b.norm(&norm)).transpose()?;
    let per_layer = match per_layer {
        Some(p) => {
            // Saturating: both factors were checked, their product was not.
            let width = p.width.saturating_mul(n_layer);
            Some(PerLayerTables {
                token_embd: b.matrix("per_layer_token_embd", [width, spec.n_vocab])?,
                model_proj: b.matrix("per_layer_model_proj", [n_embd, width])?,
                proj_norm: b.norm_over(p.proj_norm, p.width)?,
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
            if let Some(divisors) = b.source.divisors(tensor, rope.n_factors())? {
                rope_factors.insert(tensor, divisors);
            }
        }
    }
    let layers = spec.layers.iter().enumerate().map(|(i, layer)| {
        b.prefix = format!("blk.{}.", spec.first_block + i);
        layer.prepare(&mut b)
    });
    let layers = layers.collect::<Result<_, _>>()?;
    b.prefix.clear();
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
                weight.map(|weight| NormWeights { kind: NormKind::Layer, eps: c.norm_eps, weight, bias: None })
            },
            out: {
                let shape = [n_embd, c.labels.len().max(1)];
                b.source.linear("cls.output", shape, Presence::Optional, Presence::Optional)?
            },
        }),
        None => None,
    };
    let output = head.and_then(|tensor| tensor.or_else(|| token_embd.clone()));
    Ok(Weights {
        token_embd,
        token_type,
        positions,
        embedding_norm,
        per_layer,
        streams,
        state,
        assistant,
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
    /// Width of the residual stream.
    n_embd: usize,
    /// Width of the input of attention's queries, keys and values.
    n_mixer: usize,
    /// Prefix of the names of a layer's tensors, `blk.N.`; empty outside of layers.
    prefix: String,
}

impl<S: WeightSource> Builder<'_, S> {
    /// The name of a tensor with the layer's prefix.
    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// A matrix without a bias.
    fn matrix(&mut self, name: &str, shape: MatrixShape) -> Result<S::Linear, S::Error> {
        let name = self.name(name);
        self.source.required(&name, shape, Presence::None)
    }

    /// A matrix with a bias of this presence.
    fn linear(&mut self, name: &str, shape: MatrixShape, bias: Presence) -> Result<S::Linear, S::Error> {
        let name = self.name(name);
        self.source.required(&name, shape, bias)
    }

    /// A vector.
    fn vector(&mut self, name: &str, n: usize, presence: Presence) -> Result<Option<Vec<f32>>, S::Error> {
        let name = self.name(name);
        self.source.vector(&name, n, presence)
    }

    /// A vector that must be there.
    fn required_vector(&mut self, name: &str, n: usize) -> Result<Vec<f32>, S::Error> {
        Ok(self.vector(name, n, Presence::Required)?.unwrap_or_default())
    }

    /// What reads states. `first_block`: that of the first layer.
    fn state_input(
        &mut self,
        state: &StateInput,
        first_block: usize,
    ) -> Result<StateInputWeights<S::Linear>, S::Error> {
        let n_embd = self.n_embd;
        self.prefix = match state {
            StateInput::Joined(_) | StateInput::Attended(_) => format!("blk.{first_block}."),
            StateInput::Projected(_) => String::new(),
        };
        let weights = match state {
            StateInput::Joined(JoinedState { embedding_norm, state_norm, heads: _ }) => {
                let proj = self.linear("nextn.eh_proj", [2 * n_embd, n_embd], Presence::None)?;
                let (embedding_norm, state_norm) = (self.norm(embedding_norm)?, self.norm(state_norm)?);
                StateInputWeights::Joined { embedding_norm, state_norm, proj }
            }
            StateInput::Attended(AttendedState { embedding_norm, state_norm, norms_residual }) => {
                let (embedding_norm, state_norm) = (self.norm(embedding_norm)?, self.norm(state_norm)?);
                StateInputWeights::Attended { embedding_norm, state_norm, norms_residual: *norms_residual }
            }
            StateInput::Projected(ProjectedState { width, norm }) => StateInputWeights::Projected {
                norm: norm.map(|norm| self.norm_over(norm, *width)).transpose()?,
                fc: self.linear("fc", [*width, n_embd], Presence::Optional)?,
            },
        };
        self.prefix.clear();
        Ok(weights)
    }

    /// A norm over `n` elements.
    fn norm_over(&mut self, norm: Norm, n: usize) -> Result<NormWeights, S::Error> {
        let Norm { tensor_stem, has_weight, has_bias, kind, eps, omits_weight_suffix } = norm;
        if !has_weight {
            return Ok(NormWeights { kind, eps, weight: self.source.ones(n), bias: None });
        }
        let suffix = if omits_weight_suffix { "" } else { ".weight" };
        let weight = self.required_vector(&format!("{tensor_stem}{suffix}"), n)?;
        let bias = if has_bias { Presence::Required } else { Presence::None };
        Ok(NormWeights { kind, eps, weight, bias: self.vector(&format!("{tensor_stem}.bias"), n, bias)? })
    }

    /// A norm of query or key heads.
    fn qk_norm(&mut self, name: &str, norm: QkNorm, n_head: usize, head_dim: usize) -> Result<NormWeights, S::Error> {
        let QkNorm { kind, eps, over, after_rope: _ } = norm;
        let n = match over {
            NormOver::Head => head_dim,
            NormOver::EachHead | NormOver::Row => n_head * head_dim,
            NormOver::Unweighted => {
                return Ok(NormWeights { kind, eps, weight: self.source.ones(head_dim), bias: None });
            }
        };
        let each = (over == NormOver::EachHead).then_some(n_head);
        let weight = self.source.norm_weight(&self.name(&format!("{name}.weight")), n, each)?;
        let bias = if kind == NormKind::Layer { Presence::Optional } else { Presence::None };
        Ok(NormWeights { kind, eps, weight, bias: self.vector(&format!("{name}.bias"), n, bias)? })
    }

    /// A dense feed-forward; `suffix` follows the names of its matrices.
    fn dense_with(&mut self, dense: &Dense, suffix: &str) -> Result<DenseWeights<S::Linear>, S::Error> {
        let (n_ff, n_embd) = (dense.n_ff, self.n_embd);
        let (gate, up, down) = (format!("ffn_gate{suffix}"), format!("ffn_up{suffix}"), format!("ffn_down{suffix}"));
        let (gate, up) = if dense.gated {
            let parts = [(gate.as_str(), n_ff), (up.as_str(), n_ff)];
            let [gate, up] = self.source.parts(&self.prefix, &up, parts, n_embd, Presence::Optional, dense.fused)?;
            (Some(gate), up)
        } else {
            (None, self.linear(&up, [n_embd, n_ff], Presence::Optional)?)
        };
        Ok(DenseWeights { spec: *dense, gate, up, down: self.linear(&down, [n_ff, n_embd], Presence::Optional)? })
    }
}

impl<S: WeightSource> Prepare<'_, Specs> for Builder<'_, S> {
    type To = Loaded<S::Linear>;
    type Error = S::Error;

    fn norm(&mut self, norm: &Norm) -> Result<NormWeights, S::Error> {
        self.norm_over(*norm, self.n_embd)
    }

    fn attention(&mut self, a: &AttentionSpec) -> Result<AttentionWeights<S::Linear>, S::Error> {
        let (n_embd, n_in) = (self.n_embd, self.n_mixer);
        let (n_q, n_kv) = (a.n_head * a.query_rows(), a.n_head_kv * a.head_dim);
        let bias = if a.qkv_bias { Presence::Required } else { Presence::Optional };
        let (q, k, v) = match a.kv {
            KvSource::Own => {
                let parts = [("attn_q", n_q), ("attn_k", n_kv), ("attn_v", n_kv)];
                let [q, k, v] = self.source.parts(&self.prefix, "attn_qkv", parts, n_in, bias, a.fused_qkv)?;
                (q, Some(k), Some(v))
            }
            KvSource::KeysAsValues => {
                let q = self.linear("attn_q", [n_in, n_q], bias)?;
                (q, Some(self.linear("attn_k", [n_in, n_kv], bias)?), None)
            }
            KvSource::Layer(_) | KvSource::Target(_) => (self.linear("attn_q", [n_in, n_q], bias)?, None, None),
        };
        let gate = a.gate_rows().map(|n_gate| self.matrix("attn_gate", [n_in, n_gate])).transpose()?;
        let q_norm = a.qk_norm.map(|norm| self.qk_norm("attn_q_norm", norm, a.n_head, a.head_dim)).transpose()?;
        let k_norm = a.qk_norm.filter(|_| k.is_some());
        let k_norm = k_norm.map(|norm| self.qk_norm("attn_k_norm", norm, a.n_head_kv, a.head_dim)).transpose()?;
        let sinks = if a.sinks { Presence::Required } else { Presence::None };
        let sinks = self.vector("attn_sinks.weight", a.n_head, sinks)?;
        let out = self.linear("attn_output", [a.n_head * a.head_dim, n_embd], Presence::Optional)?;
        Ok(AttentionWeights { spec: a.clone(), q, k, v, gate, out, q_norm, k_norm, sinks })
    }

    fn latent_attention(&mut self, a: &LatentAttentionSpec) -> Result<LatentAttentionWeights<S::Linear>, S::Error> {
        let (n_embd, n_q) = (self.n_embd, a.n_head * a.head_dim());
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
                let q_a = self.matrix("attn_q_a", [n_embd, rank])?;
                let q_norm = self.norm_over(norm("attn_q_a_norm"), rank)?;
                (Some((q_a, q_norm)), self.matrix("attn_q_b", [rank, n_q])?)
            }
            None => (None, self.matrix("attn_q", [n_embd, n_q])?),
        };
        let kv_a = self.matrix("attn_kv_a_mqa", [n_embd, a.kv_rank + a.shared_dim])?;
        let kv_a_norm = self.norm_over(norm("attn_kv_a_norm"), a.kv_rank)?;
        let (k_b, v_b) = self.source.expansions(&self.prefix, a)?;
        let out = self.linear("attn_output", [a.n_head * a.value_dim, n_embd], Presence::Optional)?;
        Ok(LatentAttentionWeights { spec: a.clone(), q_a, q, kv_a, kv_a_norm, k_b, v_b, out })
    }

    fn short_conv(&mut self, spec: &ShortConvSpec) -> Result<ShortConvWeights<S::Linear>, S::Error> {
        short_conv::build(self.source, spec, &self.prefix, self.n_embd)
    }

    fn mamba(&mut self, spec: &MambaSpec) -> Result<MambaWeights<S::Linear>, S::Error> {
        mamba::build(self.source, spec, &self.prefix, self.n_embd)
    }

    fn mamba2(&mut self, spec: &Mamba2Spec) -> Result<Mamba2Weights<S::Linear>, S::Error> {
        mamba2::build(self.source, spec, &self.prefix, self.n_embd)
    }

    fn attention_and_mamba2(
        &mut self,
        both: &AttentionAndMamba2Spec,
    ) -> Result<AttentionAndMamba2Weights<S::Linear>, S::Error> {
        Ok(AttentionAndMamba2Weights {
            attention: self.attention(&both.attention)?,
            mamba2: self.mamba2(&both.mamba2)?,
        })
    }

    fn delta_rule(&mut self, spec: &DeltaRuleSpec) -> Result<DeltaRuleWeights<S::Linear>, S::Error> {
        delta_rule::build(self.source, spec, &self.prefix, self.n_embd)
    }

    fn rwkv6(&mut self, spec: &Rwkv6Spec) -> Result<Rwkv6Weights<S::Linear>, S::Error> {
        rwkv6::build(self.source, spec, &self.prefix, self.n_embd)
    }

    fn rwkv7(&mut self, spec: &Rwkv7Spec) -> Result<Rwkv7Weights<S::Linear>, S::Error> {
        rwkv7::build(self.source, spec, &self.prefix, self.n_embd)
    }

    fn dense(&mut self, dense: &Dense) -> Result<DenseWeights<S::Linear>, S::Error> {
        self.dense_with(dense, "")
    }

    fn experts(&mut self, e: &Experts) -> Result<ExpertsWeights<S::Linear>, S::Error> {
        let n_embd = self.n_embd;
        let bias = if e.biases { Presence::Required } else { Presence::None };
        let router = self.linear("ffn_gate_inp", [n_embd, e.n_expert], bias)?;
        let router_scale = match e.expert_norms {
            Some(_) => Some(self.required_vector("ffn_gate_inp.scale", n_embd)?),
            None => None,
        };
        let presence = if e.router.choice_bias { Presence::Optional } else { Presence::None };
        let mut choice_bias = self.vector("exp_probs_b.bias", e.n_expert, presence)?;
        if choice_bias.is_none() {
            // Hunyuan 3 names it without `.bias`.
            choice_bias = self.vector("exp_probs_b", e.n_expert, presence)?;
        }
        let (n_ff, n) = (e.expert.n_ff, e.n_expert);
        let latent = match e.latent {
            Some(n) => Some([self.matrix("ffn_latent_down", [n_embd, n])?, self.matrix("ffn_latent_up", [n, n_embd])?]),
            None => None,
        };
        let n_in = e.latent.unwrap_or(n_embd);
        let (gates, ups) = if e.expert.gated {
            let (gates, ups) = self.source.expert_pairs(&self.prefix, [n_in, n_ff, n], bias, e.expert.fused)?;
            (gates.into_iter().map(Some).collect(), ups)
        } else {
            let none: Vec<Option<S::Linear>> = (0..n).map(|_| None).collect();
            (none, self.source.matrices(&self.name("ffn_up_exps"), [n_in, n_ff, n], bias)?)
        };
        let downs = self.source.matrices(&self.name("ffn_down_exps"), [n_ff, n_in, n], bias)?;
        let parts = gates.into_iter().zip(ups).zip(downs);
        let experts = parts.map(|((gate, up), down)| DenseWeights { spec: e.expert, gate, up, down }).collect();
        let expert_scale = self.vector("ffn_down_exps.scale", n, Presence::Optional)?;
        let (mut shared, mut shared_gate) = (None, None);
        if let Some(s) = &e.shared {
            let suffix = if s.plain_names { "" } else { "_shexp" };
            if s.gated {
                shared_gate = Some(self.required_vector("ffn_gate_inp_shexp.weight", n_embd)?);
            }
            shared = Some(self.dense_with(&s.dense, suffix)?);
        }
        let expert_norms = match e.expert_norms {
            Some(norms) => {
                Some([self.norm(&norms.input)?, self.norm(&norms.result)?, self.norm(&norms.shared_result)?])
            }
            None => None,
        };
        Ok(ExpertsWeights {
            spec: e.clone(),
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

    fn channel_mix(&mut self, spec: &ChannelMixSpec) -> Result<ChannelMixWeights<S::Linear>, S::Error> {
        channel_mix::build(self.source, spec, &self.prefix)
    }

    fn block_conv(&mut self, spec: &BlockConvSpec) -> Result<BlockConvWeights<S::Linear>, S::Error> {
        block_conv::build(self.source, spec, &self.prefix, self.n_embd)
    }

    fn layer_embedding(&mut self, spec: &PerLayerEmbedding) -> Result<LayerEmbeddingWeights<S::Linear>, S::Error> {
        let (n_embd, width) = (self.n_embd, spec.width);
        Ok(LayerEmbeddingWeights {
            spec: *spec,
            gate: self.matrix("inp_gate", [n_embd, width])?,
            proj: self.matrix("proj", [width, n_embd])?,
            post_norm: self.norm(&spec.post_norm)?,
        })
    }

    fn layer_streams(&mut self, spec: &ResidualStreams) -> Result<LayerStreamsWeights<S::Linear>, S::Error> {
        let (n_embd, n) = (self.n_embd, spec.n);
        Ok(LayerStreamsWeights {
            spec: *spec,
            router_norm: self.norm(&spec.router_norm)?,
            router: self.matrix("altup_router", [n_embd, n])?,
            predict: self.matrix("altup_predict_coef", [n, n * n])?,
            correct: self.matrix("altup_correct_coef", [n, n])?,
            correct_scale: self.required_vector("altup_correct_scale.weight", n_embd)?,
            laurel_l: self.matrix("laurel_l", [n_embd, spec.laurel_rank])?,
            laurel_r: self.matrix("laurel_r", [spec.laurel_rank, n_embd])?,
            laurel_norm: self.norm(&spec.laurel_norm)?,
        })
    }

    fn output_scale(&mut self, scale: &OutputScale) -> Result<f32, S::Error> {
        match scale {
            OutputScale::Fixed(scale) => Ok(*scale),
            OutputScale::Stored => {
                let stored = self.vector("layer_output_scale.weight", 1, Presence::Optional)?;
                Ok(stored.and_then(|scale| scale.first().copied()).unwrap_or(1.0))
            }
        }
    }
}
