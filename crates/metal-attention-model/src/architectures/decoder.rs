//! A Llama-like decoder: the starting point of most families' files, and functions that change its parts.

use crate::attention::{AttentionGate, AttentionSpec, KvSource, Mask, NormOver, Positions, QkNorm};
use crate::feed_forward::{Activation, Dense, Experts, Router, RouterGroups, RouterScore, SharedExpert};
use crate::metadata_reader::MetadataReader;
use crate::parts::{FeedForward, LayerSpec, Mixer, Residual};
use crate::spec::{
    Classifier, ClassifierActivation, HeadMatrix, InputEmbedding, ModelSpec, Norm, NormKind, OutputHead, OutputScale,
    OutputSpec, PerLayerEmbedding, Pooling, ResidualStreams,
};
use crate::{ModelError, RopeFactors, RopeLayout};

/// A Llama-like decoder with norms and RoPE of the given kinds: norms before attention and feed-forward, gated
/// feed-forwards with SiLU, an output head.
pub(super) fn decoder(k: &MetadataReader<'_>, norm: NormKind, layout: RopeLayout) -> Result<ModelSpec, ModelError> {
    let n_layer = k.n_layer()?;
    let head_count = k.per_layer("attention.head_count", n_layer)?.ok_or_else(|| k.missing("attention.head_count"))?;
    let head_count_kv = k.per_layer("attention.head_count_kv", n_layer)?.unwrap_or_else(|| head_count.clone());
    let heads = head_count.iter().copied().zip(head_count_kv);
    let mixers = heads.map(|heads| attention(k, layout, head_count[0], heads)).collect::<Result<_, ModelError>>()?;
    around(k, norm, mixers)
}

/// Causal attention with `n_head` heads and `n_head_kv` KV heads. Heads of all layers have the same length: that of the
/// key, otherwise `n_embd` divided by the `n_head_first` heads of the first layer.
pub(super) fn attention(
    k: &MetadataReader<'_>,
    layout: RopeLayout,
    n_head_first: usize,
    (n_head, n_head_kv): (usize, usize),
) -> Result<Mixer, ModelError> {
    let divides = n_head.is_multiple_of(n_head_kv);
    k.check("attention.head_count_kv", n_head_kv, divides, "must divide attention.head_count")?;
    let head_dim = if let Some(n) = k.opt_positive("attention.key_length")? {
        n
    } else {
        let n_embd = k.positive("embedding_length")?;
        let why = "must divide embedding_length where attention.key_length is not given";
        k.check("attention.head_count", n_head_first, n_embd.is_multiple_of(n_head_first), why)?;
        n_embd / n_head_first
    };
    if let Some(v) = k.opt_positive("attention.value_length")? {
        k.check("attention.value_length", v, v == head_dim, "value heads must be as long as key heads")?;
    }
    let rope = k.rope(layout, head_dim)?;
    check_heads(k, n_head, head_dim)?;
    Ok(Mixer::Attention(AttentionSpec {
        n_head,
        n_head_kv,
        head_dim,
        scale: 1.0 / (head_dim as f32).sqrt(),
        mask: Mask::Causal,
        positions: Positions::Rope(rope),
        soft_cap: None,
        sinks: false,
        qk_norm: None,
        value_norm: None,
        clamp_qkv: None,
        kv: KvSource::Own,
        temperature: None,
        qkv_bias: false,
        fused_qkv: false,
        gate: None,
    }))
}

/// A decoder with these mixers, one for each layer, and gated feed-forwards with SiLU.
pub(super) fn around(k: &MetadataReader<'_>, norm: NormKind, mixers: Vec<Mixer>) -> Result<ModelSpec, ModelError> {
    let n_ff = if let Some(widths) = k.per_layer("feed_forward_length", mixers.len())? {
        widths
    } else {
        // Models with experts only may omit it.
        let widths = k.per_layer("expert_feed_forward_length", mixers.len())?;
        widths.ok_or_else(|| k.missing("feed_forward_length"))?
    };
    let dense = |n_ff| FeedForward::Dense(Dense { n_ff, gated: true, activation: Activation::Silu, fused: false });
    stack(k, k.norm(norm)?, mixers.into_iter().zip(n_ff.into_iter().map(dense)).collect())
}

/// A decoder with these mixers and feed-forwards, each with a norm before it unless it is `None`.
pub(super) fn stack(
    k: &MetadataReader<'_>,
    norm: Norm,
    layers: Vec<(Mixer, FeedForward)>,
) -> Result<ModelSpec, ModelError> {
    let layer = |(mixer, feed_forward)| LayerSpec {
        mixer_norm: (mixer != Mixer::None).then_some(norm),
        mixer_conv: None,
        mixer,
        mixer_post_norm: None,
        feed_forward_norm: (feed_forward != FeedForward::None).then_some(norm.with_tensor("ffn_norm")),
        feed_forward_conv: None,
        feed_forward,
        feed_forward_post_norm: None,
        residual: Residual::Sequential { scale: 1.0 },
        embedding: None,
        streams: None,
        output_scale: OutputScale::Fixed(1.0),
    };
    Ok(ModelSpec {
        name: k.name()?,
        n_vocab: k.n_vocab()?,
        n_ctx_train: k.positive("context_length")?,
        n_embd: k.positive("embedding_length")?,
        embedding: InputEmbedding {
            scale: 1.0,
            n_token_types: None,
            n_positions: None,
            norm: None,
            per_layer: None,
            streams: None,
            state: None,
            n_rows: None,
            assistant: None,
        },
        first_block: 0,
        takes_context: false,
        layers: layers.into_iter().map(layer).collect(),
        output: OutputSpec {
            norm: Some(norm.with_tensor("output_norm")),
            head: Some(OutputHead {
                scale: 1.0,
                soft_cap: None,
                matrix: HeadMatrix::OutputTensorInSomeFiles,
                may_have_bias: false,
            }),
            pooling: k.pooling()?,
            pooled_projections: Vec::new(),
            classifier: None,
        },
        architecture: k.architecture().to_owned(),
    })
}

/// An error if the heads are implausibly large.
pub(super) fn check_heads(k: &MetadataReader<'_>, n_head: usize, head_dim: usize) -> Result<(), ModelError> {
    let plausible = n_head.checked_mul(head_dim).is_some_and(|n| n <= 1 << 28);
    k.check("attention.key_length", head_dim, plausible, "heads this large are not plausible")
}

impl ModelSpec {
    /// The attention of every layer that has one, with the layer's index.
    pub(super) fn attention_mut(&mut self) -> impl Iterator<Item = (usize, &mut AttentionSpec)> {
        self.layers.iter_mut().enumerate().filter_map(|(i, layer)| match &mut layer.mixer {
            Mixer::Attention(a) => Some((i, a)),
            Mixer::AttentionAndMamba2(both) => Some((i, &mut both.attention)),
            Mixer::LatentAttention(_)
            | Mixer::ShortConv(_)
            | Mixer::Mamba(_)
            | Mixer::Mamba2(_)
            | Mixer::DeltaRule(_)
            | Mixer::Rwkv6(_)
            | Mixer::Rwkv7(_)
            | Mixer::None => None,
        })
    }

    /// The dense feed-forward of every layer that has one.
    pub(super) fn dense_mut(&mut self) -> impl Iterator<Item = &mut Dense> {
        self.layers.iter_mut().filter_map(|layer| match &mut layer.feed_forward {
            FeedForward::Dense(dense) => Some(dense),
            FeedForward::Experts(_) | FeedForward::ChannelMix(_) | FeedForward::None => None,
        })
    }

    /// The RoPE of every layer that has one.
    pub(super) fn rope_mut(&mut self) -> impl Iterator<Item = &mut crate::Rope> {
        self.attention_mut().filter_map(|(_, a)| a.rope_mut())
    }

    /// Sets the sections of RoPE, where the file has any.
    pub(super) fn set_rope_sections(&mut self, k: &MetadataReader<'_>, interleaved: bool) -> Result<(), ModelError> {
        let sections = k.rope_sections(interleaved)?;
        self.rope_mut().for_each(|rope| rope.sections = sections);
        Ok(())
    }

    /// The RoPE of the layers that `windowed` marks and that have one.
    pub(super) fn window_rope_mut(&mut self, windowed: &[bool]) -> impl Iterator<Item = &mut crate::Rope> {
        self.attention_mut().filter(|(i, _)| windowed[*i]).filter_map(|(_, a)| a.rope_mut())
    }

    /// Sets how positions enter the attention of every layer.
    pub(super) fn set_positions(&mut self, positions: Positions) {
        self.attention_mut().for_each(|(_, a)| a.positions = positions);
    }

    /// Sets the norm of queries and keys of every layer.
    pub(super) fn set_qk_norm(&mut self, norm: QkNorm) {
        self.attention_mut().for_each(|(_, a)| a.qk_norm = Some(norm));
    }

    /// Adds an RMSNorm of each head of queries and keys before the rotation (Qwen 3).
    pub(super) fn norm_heads(&mut self, eps: f32) {
        self.set_qk_norm(QkNorm { kind: NormKind::Rms, eps, over: NormOver::Head, after_rope: false });
    }

    /// Sets the gate of every layer's attention.
    pub(super) fn set_gate(&mut self, gate: AttentionGate) {
        self.attention_mut().for_each(|(_, a)| a.gate = Some(gate));
    }

    /// Gives each layer an additional embedding of the token.
    pub(super) fn set_per_layer_embedding(&mut self, embedding: PerLayerEmbedding) {
        self.embedding.per_layer = Some(embedding);
        self.layers.iter_mut().for_each(|layer| layer.embedding = Some(embedding));
    }

    /// Lets all layers compute with several residual streams.
    pub(super) fn set_streams(&mut self, streams: ResidualStreams) {
        self.embedding.streams = Some(streams);
        self.layers.iter_mut().for_each(|layer| layer.streams = Some(streams));
    }

    /// Removes the gate from dense feed-forwards, and sets their activation.
    pub(super) fn no_gate(&mut self, activation: Activation) {
        self.dense_mut().for_each(|dense| (dense.gated, dense.activation) = (false, activation));
    }

    /// Computes attention and feed-forward in parallel, from one norm.
    pub(super) fn side_by_side(&mut self) {
        for layer in &mut self.layers {
            (layer.residual, layer.feed_forward_norm) = (Residual::Parallel, None);
        }
    }

    /// Declares that the family's files always have the tensor `output.weight`.
    pub(super) fn set_own_head(&mut self) {
        self.output.head = self.output.head.map(|head| OutputHead { matrix: HeadMatrix::OutputTensor, ..head });
    }

    /// Sets whether the norms before mixers and feed-forwards, of the embedding and of the output have a bias.
    pub(super) fn set_norm_biases(&mut self, bias: bool) {
        let layers = self.layers.iter_mut().flat_map(|layer| [&mut layer.mixer_norm, &mut layer.feed_forward_norm]);
        for norm in layers.chain([&mut self.embedding.norm, &mut self.output.norm]).flatten() {
            norm.has_bias = bias;
        }
    }

    /// Adds norms of the mixers' and feed-forwards' results, with Gemma's names.
    pub(super) fn add_post_norms(&mut self, norm: Norm) {
        for layer in &mut self.layers {
            layer.mixer_post_norm = Some(norm.with_tensor("post_attention_norm"));
            layer.feed_forward_post_norm = Some(norm.with_tensor("post_ffw_norm"));
        }
    }

    /// Moves the norms from before mixers and feed-forwards to their results (OLMo 2, EXAONE 4).
    pub(super) fn only_post_norms(&mut self, norm: Norm) {
        self.add_post_norms(norm);
        for layer in &mut self.layers {
            (layer.mixer_norm, layer.feed_forward_norm) = (None, None);
        }
    }

    /// Sets the mask of the layers that `windowed` marks, and, with `rope`, their base of frequencies, without an
    /// extension of the context.
    pub(super) fn set_windows(&mut self, windowed: &[bool], mask: Mask, rope: Option<WindowRope>) {
        for (_, a) in self.attention_mut().filter(|(i, _)| windowed[*i]) {
            a.mask = mask;
            if let (Positions::Rope(r), Some(WindowRope { freq_base })) = (&mut a.positions, rope) {
                r.freq_base = freq_base;
                r.scaling = crate::RopeScaling::None;
                r.factors = RopeFactors::None;
            }
        }
    }

    /// Gives the layers that `windowed` marks a sliding window; the others get no positions (Command R7B).
    pub(super) fn rotate_in_windows_only(&mut self, windowed: &[bool], window: usize) {
        for (i, a) in self.attention_mut() {
            if windowed[i] {
                a.mask = Mask::Window(window);
            } else {
                a.positions = Positions::None;
            }
        }
    }

    /// Gives the layers from `first_sparse` on these experts.
    pub(super) fn set_experts(&mut self, first_sparse: usize, experts: &Experts) {
        for layer in self.layers.iter_mut().skip(first_sparse) {
            layer.feed_forward = FeedForward::Experts(Box::new(experts.clone()));
        }
    }
}

/// The classifier of rerankers; `None` if the file has none. `pooling`: the family's pooling, if no key gives it.
pub(super) fn classifier(
    k: &MetadataReader<'_>,
    pooling: Pooling,
    norm_eps: f32,
) -> Result<Option<Classifier>, ModelError> {
    let is_ranker = k.pooling()? == Some(Pooling::Classifier);
    if !["cls.weight", "cls.output.weight"].iter().any(|name| k.has_tensor(name, is_ranker)) {
        return Ok(None);
    }
    let pooling = k.pooling_by("classifier.pooling_type")?.filter(|&p| p != Pooling::Classifier).unwrap_or(pooling);
    let labels = k.strings("classifier.output_labels")?;
    Ok(Some(Classifier { labels, pooling, activation: ClassifierActivation::Tanh, norm_eps, softmax: false }))
}

/// The RoPE of layers with a sliding window, where it differs.
#[derive(Clone, Copy)]
pub(super) struct WindowRope {
    /// Base of the frequencies.
    pub(super) freq_base: f32,
}

/// The properties of a family's experts when its files do not give them.
#[derive(Clone, Copy)]
pub(super) struct ExpertDefaults {
    /// From the router's products to scores.
    pub(super) score: RouterScore,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub(super) renormalize: bool,
}

/// The experts of the file; an error if it has none. `n_ff`: an expert's width if no key gives it.
pub(super) fn experts(k: &MetadataReader<'_>, defaults: ExpertDefaults, n_ff: usize) -> Result<Experts, ModelError> {
    let n_used = k.positive("expert_used_count")?;
    let n_ff = match k.per_layer("expert_feed_forward_length", k.n_layer()?) {
        Ok(Some(widths)) => {
            let alike = widths.iter().all(|n| *n == widths[0]);
            k.check("expert_feed_forward_length", widths[0], alike, "layers must have experts of one width")?;
            widths[0]
        }
        Ok(None) => n_ff,
        // 0 means the width of `feed_forward_length`.
        Err(_) if k.opt_usize("expert_feed_forward_length").ok().flatten() == Some(0) => n_ff,
        Err(e) => return Err(e),
    };
    experts_of(k, defaults, n_used, n_ff)
}

/// [`experts`] of one layer, with `n_used` experts for each token and width `n_ff`.
pub(super) fn experts_of(
    k: &MetadataReader<'_>,
    defaults: ExpertDefaults,
    n_used: usize,
    n_ff: usize,
) -> Result<Experts, ModelError> {
    let n_expert = k.n_expert()?.ok_or_else(|| k.missing("expert_count"))?;
    let some = n_used > 0 && n_used <= n_expert;
    k.check("expert_used_count", n_used, some, "must be above 0 and at most expert_count")?;
    k.check("expert_feed_forward_length", n_ff, n_ff > 0, "experts need a width")?;
    let score = match k.opt_usize("expert_gating_func")? {
        None | Some(0) => defaults.score,
        Some(1) => RouterScore::Softmax,
        Some(2) => RouterScore::Sigmoid,
        Some(3) => RouterScore::SoftmaxOfChosen,
        Some(other) => {
            let why = "the gating functions are 1 (softmax), 2 (sigmoid) and 3 (softmax of the chosen)";
            return Err(k.unsupported("expert_gating_func", other, why));
        }
    };
    let groups = match (k.opt_usize("expert_group_count")?, k.opt_usize("expert_group_used_count")?) {
        (Some(n), used) if n > 1 => {
            let (n_used_experts, n_used) = (n_used, used.unwrap_or(n));
            k.check("expert_group_count", n, n_expert.is_multiple_of(n), "must divide expert_count")?;
            k.check("expert_group_used_count", n_used, n_used > 0 && n_used <= n, "must be 1 to expert_group_count")?;
            let enough = n_used * (n_expert / n) >= n_used_experts;
            k.check("expert_group_used_count", n_used, enough, "the groups must hold expert_used_count experts")?;
            Some(RouterGroups { n, n_used })
        }
        (Some(_) | None, _) => None,
    };
    Ok(Experts {
        n_expert,
        n_used,
        expert: Dense { n_ff, gated: true, activation: Activation::Silu, fused: false },
        biases: false,
        latent: None,
        router: Router {
            score,
            choice_bias: false,
            renormalize: k.opt_bool("expert_weights_norm")?.unwrap_or(defaults.renormalize),
            scale: k.positive_f32("expert_weights_scale", 1.0)?,
            groups,
            weights_inputs: false,
        },
        expert_norms: None,
        shared: None,
    })
}

/// A shared expert of width `n_ff`.
pub(super) fn shared_expert(n_ff: usize, gated: bool) -> SharedExpert {
    let dense = Dense { n_ff, gated: true, activation: Activation::Silu, fused: false };
    SharedExpert { dense, gated, plain_names: false }
}
