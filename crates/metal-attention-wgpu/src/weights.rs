//! The weights of a model on the GPU, in the groups that the plans multiply: tensors of the file that share their input
//! are stacked or interleaved into one matrix.

mod attention;
mod delta_rule;
mod experts;
mod rwkv;
mod uploads;

use metal_attention_gguf::Tensor;
use metal_attention_model::{
    DenseWeights, FeedForward, FeedForwardWeights, LayerSpec, LayerWeights, Linear, Mixer, MixerWeights, ModelSpec,
    Norm, NormKind, NormWeights, PerLayerWeights, Weights,
};
use wgpu::Buffer;

use crate::kernels::LayerMatrices;
use crate::mamba::{WgpuMamba, WgpuMamba2};
use crate::parts::PlainWeights;
use crate::{Arena, WgpuDevice, WgpuError, WgpuMatrix};
pub(super) use attention::WgpuAttention;
pub(super) use delta_rule::{WgpuDeltaRule, WgpuLowRank};
pub(super) use experts::WgpuExperts;
pub(super) use rwkv::{WgpuChannelMix, WgpuRwkv6, WgpuRwkv7};
pub(super) use uploads::Uploads;

/// `y = W x + b`, where `W` may be several tensors of the file that share their input.
#[derive(Debug)]
pub(super) struct WgpuLinear {
    /// `[n_out, n_in]`.
    pub(super) weight: WgpuMatrix,
    /// F32 `[n_out]`.
    pub(super) bias: Option<Buffer>,
}

/// A norm with its weights.
#[derive(Debug)]
pub(super) struct WgpuNorm {
    /// RMSNorm or layer norm.
    pub(super) kind: NormKind,
    /// Added to the variance.
    pub(super) eps: f32,
    /// Elements of a row.
    pub(super) n: usize,
    /// Weights `[n]`, then the bias `[n]` if there is one.
    pub(super) weights: Buffer,
    /// Whether there is a bias.
    pub(super) has_bias: bool,
}

/// The weights of one layer.
#[derive(Debug)]
pub(super) struct WgpuLayer {
    /// The norm before the mixer.
    pub(super) mixer_norm: Option<WgpuNorm>,
    /// The mixer.
    pub(super) mixer: WgpuMixer,
    /// The norm of the mixer's result, before it is added.
    pub(super) mixer_post_norm: Option<WgpuNorm>,
    /// The norm before the feed-forward. `None`: there is none, or it shares the mixer's.
    pub(super) feed_forward_norm: Option<WgpuNorm>,
    /// The feed-forward.
    pub(super) feed_forward: WgpuFeedForward,
    /// The norm of the feed-forward's result, before it is added.
    pub(super) feed_forward_post_norm: Option<WgpuNorm>,
    /// The norms after each residual join, of models with `Residual::PostNorm`.
    pub(super) sum_norms: Option<[WgpuNorm; 2]>,
    /// The weights that join the layer's per-layer embedding (Gemma 3n).
    pub(super) layer_embedding: Option<WgpuLayerEmbedding>,
    /// The weights of several residual streams (Gemma 3n).
    pub(super) streams: Option<WgpuLayerStreams>,
    /// The factor on the residual stream after the layer.
    pub(super) output_scale: f32,
}

/// The weights of a mixer.
#[derive(Debug)]
pub(super) enum WgpuMixer {
    /// Softmax attention.
    Attention(WgpuAttention),
    /// Latent attention (MLA).
    Latent {
        /// The compression of queries and the norm of the compressed ones. `None`: queries are not compressed.
        q_a: Option<(WgpuLinear, WgpuNorm)>,
        /// The projection to queries (`attn_q_b`), from compressed ones where there are some.
        q_b: WgpuLinear,
        /// The projection to the compressed row and the key that heads share.
        kv_a: WgpuLinear,
        /// Weight of the compressed row's norm, `[kv_rank]`.
        kv_a_norm: Buffer,
        /// The matrices that take each head's query to the compressed row, stacked.
        k_b: WgpuMatrix,
        /// The matrices that take the compressed row to each head's value, stacked.
        v_b: WgpuMatrix,
        /// The output projection.
        out: WgpuLinear,
    },
    /// A gated short convolution.
    ShortConv {
        /// The projection to both gates and the convolution's input.
        input: WgpuLinear,
        /// Taps, F32 `[n_tap, width]`, the oldest token's first.
        taps: Buffer,
        /// The output projection.
        out: WgpuLinear,
    },
    /// A gated delta rule.
    DeltaRule(WgpuDeltaRule),
    /// Mamba.
    Mamba(WgpuMamba),
    /// Mamba-2.
    Mamba2 {
        /// The projection to `z`, `x`, `B`, `C` and `dt`.
        input: WgpuLinear,
        /// All other weights.
        mamba2: WgpuMamba2,
    },
    /// Attention and Mamba-2 side by side.
    AttentionAndMamba2 {
        /// Attention. Its `qkv` also projects to Mamba-2's inputs, behind queries, keys and values.
        attention: WgpuAttention,
        /// Mamba-2 without its input projection.
        mamba2: WgpuMamba2,
    },
    /// RWKV-6's time mix.
    Rwkv6(Box<WgpuRwkv6>),
    /// RWKV-7's time mix.
    Rwkv7(Box<WgpuRwkv7>),
    /// No mixer.
    None,
}

/// The weights of a feed-forward.
#[derive(Debug)]
pub(super) enum WgpuFeedForward {
    /// A dense one.
    Dense(WgpuDense),
    /// A mixture of experts.
    Experts(Box<WgpuExperts>),
    /// RWKV's channel mix.
    ChannelMix(WgpuChannelMix),
    /// No feed-forward.
    None,
}

/// The weights of a dense feed-forward.
#[derive(Debug)]
pub(super) struct WgpuDense {
    /// Gate and up with interleaved rows; up alone if there is no gate.
    pub(super) gate_up: WgpuLinear,
    /// The down projection.
    pub(super) down: WgpuLinear,
}

/// The weights that join a per-layer embedding: `x += norm(proj(gelu(gate(x)) * e))`.
#[derive(Debug)]
pub(super) struct WgpuLayerEmbedding {
    /// `[width, n_embd]`.
    pub(super) gate: WgpuLinear,
    /// `[n_embd, width]`.
    pub(super) proj: WgpuLinear,
    /// The norm before the result is added.
    pub(super) post_norm: WgpuNorm,
}

/// The weights of a layer with several residual streams; `n` is their number.
#[derive(Debug)]
pub(super) struct WgpuLayerStreams {
    /// The norm before the router.
    pub(super) router_norm: WgpuNorm,
    /// The router's matrix, `[n, n_embd]`.
    pub(super) router: WgpuLinear,
    /// Coefficients of predictions, F32 `[n * n, n]`.
    pub(super) predict: Buffer,
    /// Coefficients of corrections, F32 `[n, n]`.
    pub(super) correct: Buffer,
    /// Factor on the first stream before the per-layer embedding is joined, `[n_embd]`.
    pub(super) correct_scale: Buffer,
    /// `LAuReL`'s first matrix, `[rank, n_embd]`.
    pub(super) laurel_l: WgpuLinear,
    /// `LAuReL`'s second matrix, `[n_embd, rank]`.
    pub(super) laurel_r: WgpuLinear,
    /// The norm of `LAuReL`'s product.
    pub(super) laurel_norm: WgpuNorm,
}

/// The projections between the first residual stream and each of the others.
#[derive(Debug)]
pub(super) struct WgpuStreams {
    /// From the embedding to streams 1, 2, ...
    pub(super) proj: Vec<WgpuLinear>,
    /// From streams 1, 2, ... back to the first one.
    pub(super) unembd_proj: Vec<WgpuLinear>,
}

/// The weights that make per-layer embeddings (Gemma 3n).
#[derive(Debug)]
pub(super) struct WgpuLayerEmbeddingInputs {
    /// An embedding table of all layers, `[n_vocab, n_layer * width]`.
    pub(super) token_embd: WgpuMatrix,
    /// The projection of the token embedding, `[n_layer * width, n_embd]`.
    pub(super) model_proj: WgpuLinear,
    /// The norm of that projection.
    pub(super) proj_norm: WgpuNorm,
}

/// The weights of a model.
#[derive(Debug)]
pub(super) struct WgpuWeights {
    /// The embedding table, `[n_vocab, n_embd]`.
    pub(super) token_embd: WgpuMatrix,
    /// Embedding of token type 0, added to every embedding, `[n_embd]`.
    pub(super) token_type: Option<Buffer>,
    /// Learned position embeddings, F32 `[n, n_embd]`, and their number `n`.
    pub(super) positions: Option<(Buffer, usize)>,
    /// The norm of the sum of embeddings.
    pub(super) embedding_norm: Option<WgpuNorm>,
    /// Per-layer embeddings.
    pub(super) per_layer: Option<WgpuLayerEmbeddingInputs>,
    /// Several residual streams.
    pub(super) streams: Option<WgpuStreams>,
    /// The layers.
    pub(super) layers: Vec<WgpuLayer>,
    /// The norm after the last layer.
    pub(super) output_norm: Option<WgpuNorm>,
    /// The output head, unless it is the embedding table.
    output: Option<WgpuMatrix>,
    /// Added to the logits, `[n_vocab]`.
    pub(super) output_bias: Option<Buffer>,
}

impl WgpuWeights {
    /// Gives every weight its place, and uploads all but the matrices, whose rows are left to `uploads`. Consecutive
    /// layers, at most `layers_in_a_buffer`, share a buffer as far as one binding reaches.
    pub(super) fn new(
        gpu: &WgpuDevice,
        spec: &ModelSpec,
        weights: &Weights,
        layers_in_a_buffer: usize,
        uploads: &mut Uploads,
    ) -> Result<Self, WgpuError> {
        let mut own = |what: &str, tensor: &Tensor| uploads.concat(gpu, what, &[tensor]);
        let output = weights.own_head().map(|head| own("the output head", &head.weight)).transpose()?;
        let token_embd = own("the embedding table", &weights.token_embd.weight)?;
        let positions = match &weights.positions {
            Some(table) => Some((gpu.upload("positions", &table.weight.to_f32())?, table.weight.n_rows())),
            None => None,
        };
        let token_type = weights.token_type.as_ref().map(|row| gpu.upload("the token type", row)).transpose()?;
        let per_layer = match (&spec.embedding.per_layer, &weights.per_layer) {
            (Some(spec), Some(w)) => Some(WgpuLayerEmbeddingInputs {
                token_embd: own("the layers' embedding tables", &w.token_embd.weight)?,
                model_proj: concat(gpu, "the layers' projection", &[&w.model_proj], uploads)?,
                proj_norm: WgpuNorm::new(gpu, &spec.proj_norm, &w.proj_norm)?,
            }),
            _ => None,
        };
        let mut each = |linears: &[Linear]| {
            let linear = |l: &Linear| concat(gpu, "a projection between streams", &[l], uploads);
            linears.iter().map(linear).collect::<Result<Vec<_>, _>>()
        };
        let streams = match &weights.streams {
            Some(w) => Some(WgpuStreams { proj: each(&w.proj)?, unembd_proj: each(&w.unembd_proj)? }),
            None => None,
        };
        // The layers' matrices are in as few buffers as possible: the persistent kernel runs all layers of one buffer.
        let bytes: Vec<_> = weights.layers.iter().map(layer_bytes).collect();
        let mut layers = Vec::new();
        for (n, arena) in Arena::in_runs(gpu, "the layers' weights", &bytes, layers_in_a_buffer)? {
            uploads.arena = arena;
            for i in layers.len()..layers.len() + n {
                layers.push(WgpuLayer::new(gpu, spec, &spec.layers[i], &weights.layers[i], uploads)?);
            }
        }
        let output_bias = weights.output.as_ref().and_then(|linear| linear.bias.as_ref());
        Ok(Self {
            token_embd,
            token_type,
            positions,
            embedding_norm: WgpuNorm::optional(gpu, spec.embedding.norm.as_ref(), weights.embedding_norm.as_ref())?,
            per_layer,
            streams,
            layers,
            output_norm: WgpuNorm::optional(gpu, spec.output.norm.as_ref(), weights.output_norm.as_ref())?,
            output,
            output_bias: output_bias.map(|bias| gpu.upload("a bias", bias)).transpose()?,
        })
    }

    /// The output head, `[n_vocab, n_embd]`.
    pub(super) fn output(&self) -> &WgpuMatrix {
        self.output.as_ref().unwrap_or(&self.token_embd)
    }
}

impl WgpuNorm {
    /// Uploads a norm.
    fn new(gpu: &WgpuDevice, norm: &Norm, w: &NormWeights) -> Result<Self, WgpuError> {
        let bias = w.bias.as_deref().unwrap_or(&[]);
        Ok(Self {
            kind: norm.kind,
            eps: norm.eps,
            n: w.weight.len(),
            weights: gpu.upload("a norm", &[&*w.weight, bias].concat())?,
            has_bias: w.bias.is_some(),
        })
    }

    /// Uploads a norm if there is one.
    fn optional(gpu: &WgpuDevice, norm: Option<&Norm>, w: Option<&NormWeights>) -> Result<Option<Self>, WgpuError> {
        norm.zip(w).map(|(norm, w)| Self::new(gpu, norm, w)).transpose()
    }
}

impl WgpuLayer {
    /// Uploads the weights of one layer, except the rows of its matrices.
    ///
    /// # Panics
    /// If `w` was not loaded for `spec`.
    fn new(
        gpu: &WgpuDevice,
        model: &ModelSpec,
        spec: &LayerSpec,
        w: &LayerWeights,
        uploads: &mut Uploads,
    ) -> Result<Self, WgpuError> {
        let norm = |norm: &Option<Norm>, w: &Option<NormWeights>| WgpuNorm::optional(gpu, norm.as_ref(), w.as_ref());
        let sum_norms = match (&spec.residual, &w.sum_norms) {
            (metal_attention_model::Residual::PostNorm { mixer_sum_norm, feed_forward_sum_norm }, Some([a, b])) => {
                Some([WgpuNorm::new(gpu, mixer_sum_norm, a)?, WgpuNorm::new(gpu, feed_forward_sum_norm, b)?])
            }
            _ => None,
        };
        let feed_forward = match (&spec.feed_forward, &w.feed_forward) {
            (FeedForward::Dense(_), FeedForwardWeights::Dense(w)) => {
                WgpuFeedForward::Dense(WgpuDense::new(gpu, w, uploads)?)
            }
            (FeedForward::Experts(e), FeedForwardWeights::Experts(w)) => {
                WgpuFeedForward::Experts(Box::new(WgpuExperts::new(gpu, e, w, model.n_embd, uploads)?))
            }
            (FeedForward::ChannelMix(_), FeedForwardWeights::ChannelMix(w)) => {
                WgpuFeedForward::ChannelMix(WgpuChannelMix::new(gpu, w, uploads)?)
            }
            (FeedForward::None, FeedForwardWeights::None) => WgpuFeedForward::None,
            (
                FeedForward::Dense(_) | FeedForward::Experts(_) | FeedForward::ChannelMix(_) | FeedForward::None,
                FeedForwardWeights::Dense(_)
                | FeedForwardWeights::Experts(_)
                | FeedForwardWeights::ChannelMix(_)
                | FeedForwardWeights::None,
            ) => {
                panic!("the weights are those of the layers: both were made from one description")
            }
        };
        let layer_embedding = match (&model.embedding.per_layer, &w.per_layer) {
            (Some(spec), Some(PerLayerWeights { gate, proj, post_norm })) => Some(WgpuLayerEmbedding {
                gate: concat(gpu, "the gate of the layer's embedding", &[gate], uploads)?,
                proj: concat(gpu, "the projection of the layer's embedding", &[proj], uploads)?,
                post_norm: WgpuNorm::new(gpu, &spec.post_norm, post_norm)?,
            }),
            _ => None,
        };
        let streams = match (&model.embedding.streams, &w.streams) {
            (Some(spec), Some(w)) => Some(WgpuLayerStreams {
                router_norm: WgpuNorm::new(gpu, &spec.router_norm, &w.router_norm)?,
                router: concat(gpu, "the router between streams", &[&w.router], uploads)?,
                predict: gpu.upload("predictions of streams", &w.predict.weight.to_f32())?,
                correct: gpu.upload("corrections of streams", &w.correct.weight.to_f32())?,
                correct_scale: gpu.upload("the scale of a stream", &w.correct_scale)?,
                laurel_l: concat(gpu, "LAuReL's matrix", &[&w.laurel_l], uploads)?,
                laurel_r: concat(gpu, "LAuReL's matrix", &[&w.laurel_r], uploads)?,
                laurel_norm: WgpuNorm::new(gpu, &spec.laurel_norm, &w.laurel_norm)?,
            }),
            _ => None,
        };
        Ok(Self {
            mixer_norm: norm(&spec.mixer_norm, &w.mixer_norm)?,
            mixer: WgpuMixer::new(gpu, &spec.mixer, &w.mixer, uploads)?,
            mixer_post_norm: norm(&spec.mixer_post_norm, &w.mixer_post_norm)?,
            feed_forward_norm: norm(&spec.feed_forward_norm, &w.feed_forward_norm)?,
            feed_forward,
            feed_forward_post_norm: norm(&spec.feed_forward_post_norm, &w.feed_forward_post_norm)?,
            sum_norms,
            layer_embedding,
            streams,
            output_scale: w.output_scale,
        })
    }

    /// The matrices of a layer in the persistent kernel; `None` for layers other than attention with a dense
    /// feed-forward.
    pub(super) fn matrices(&self) -> Option<LayerMatrices<'_>> {
        match (&self.mixer, &self.feed_forward) {
            (
                WgpuMixer::Attention(WgpuAttention { qkv, out, qk_norm: _, sinks_and_slopes: _ }),
                WgpuFeedForward::Dense(dense),
            ) => Some(LayerMatrices {
                qkv: &qkv.weight,
                out: &out.weight,
                gate_up: &dense.gate_up.weight,
                down: &dense.down.weight,
            }),
            (
                WgpuMixer::Latent { .. }
                | WgpuMixer::ShortConv { .. }
                | WgpuMixer::DeltaRule(_)
                | WgpuMixer::Mamba(_)
                | WgpuMixer::Mamba2 { .. }
                | WgpuMixer::AttentionAndMamba2 { .. }
                | WgpuMixer::Rwkv6(_)
                | WgpuMixer::Rwkv7(_)
                | WgpuMixer::None,
                _,
            )
            | (_, WgpuFeedForward::Experts(_) | WgpuFeedForward::ChannelMix(_) | WgpuFeedForward::None) => None,
        }
    }
}

impl WgpuMixer {
    fn new(gpu: &WgpuDevice, spec: &Mixer, w: &MixerWeights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        match (spec, w) {
            (Mixer::Attention(spec), MixerWeights::Attention(a)) => {
                Ok(Self::Attention(WgpuAttention::new(gpu, spec, a, None, uploads)?))
            }
            (Mixer::LatentAttention(spec), MixerWeights::LatentAttention(a)) => {
                let norm = Norm {
                    tensor_stem: "attn_q_a_norm",
                    has_weight: true,
                    has_bias: false,
                    kind: NormKind::Rms,
                    eps: spec.eps,
                    omits_weight_suffix: false,
                };
                let q_a = match &a.q_a {
                    Some((linear, w)) => Some((
                        concat(gpu, "the queries' compression", &[linear], uploads)?,
                        WgpuNorm::new(gpu, &norm, w)?,
                    )),
                    None => None,
                };
                let mut heads = |what: &str, matrices: &[Linear]| {
                    let weights: Vec<_> = matrices.iter().map(|l| &l.weight).collect();
                    uploads.concat(gpu, what, &weights)
                };
                let k_b = heads("the keys' expansions", &a.k_b)?;
                let v_b = heads("the values' expansions", &a.v_b)?;
                Ok(Self::Latent {
                    q_a,
                    q_b: concat(gpu, "the queries", &[&a.q], uploads)?,
                    kv_a: concat(gpu, "the compression of keys and values", &[&a.kv_a], uploads)?,
                    kv_a_norm: gpu.upload("a norm", &a.kv_a_norm.weight)?,
                    k_b,
                    v_b,
                    out: concat(gpu, "the attention's output matrix", &[&a.out], uploads)?,
                })
            }
            (Mixer::ShortConv(_), MixerWeights::ShortConv(w)) => Ok(Self::ShortConv {
                input: concat(gpu, "the convolution's gates and input", &[&w.input], uploads)?,
                taps: gpu.upload("the taps of a convolution", &w.taps)?,
                out: concat(gpu, "the convolution's output matrix", &[&w.out], uploads)?,
            }),
            (Mixer::DeltaRule(_), MixerWeights::DeltaRule(w)) => {
                Ok(Self::DeltaRule(WgpuDeltaRule::new(gpu, w, uploads)?))
            }
            (Mixer::Mamba(spec), MixerWeights::Mamba(w)) => {
                let out = concat(gpu, "Mamba's output matrix", &[&w.out], uploads)?;
                Ok(Self::Mamba(WgpuMamba::new(gpu, spec, w, out, uploads)?))
            }
            (Mixer::Mamba2(spec), MixerWeights::Mamba2(w)) => {
                let input = concat(gpu, "Mamba's input matrix", &[&w.input], uploads)?;
                let out = concat(gpu, "Mamba's output matrix", &[&w.out], uploads)?;
                Ok(Self::Mamba2 { input, mamba2: WgpuMamba2::new(gpu, spec, w, out)? })
            }
            (Mixer::AttentionAndMamba2(both), MixerWeights::AttentionAndMamba2(w)) => {
                let attention = WgpuAttention::new(gpu, &both.attention, &w.attention, Some(&w.mamba2.input), uploads)?;
                let out = concat(gpu, "Mamba's output matrix", &[&w.mamba2.out], uploads)?;
                let mamba2 = WgpuMamba2::new(gpu, &both.mamba2, &w.mamba2, out)?;
                Ok(Self::AttentionAndMamba2 { attention, mamba2 })
            }
            (Mixer::None, MixerWeights::None) => Ok(Self::None),
            (Mixer::Rwkv6(_), MixerWeights::Rwkv6(w)) => Ok(Self::Rwkv6(Box::new(WgpuRwkv6::new(gpu, w, uploads)?))),
            (Mixer::Rwkv7(spec), MixerWeights::Rwkv7(w)) => {
                Ok(Self::Rwkv7(Box::new(WgpuRwkv7::new(gpu, spec, w, uploads)?)))
            }
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
            ) => {
                panic!("the weights are those of the layers: both were made from one description")
            }
        }
    }
}

impl WgpuDense {
    fn new(gpu: &WgpuDevice, w: &DenseWeights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        Ok(Self {
            gate_up: match &w.gate {
                Some(gate) => interleave(gpu, "gate and up", gate, &w.up, uploads)?,
                None => concat(gpu, "the up projection", &[&w.up], uploads)?,
            },
            down: concat(gpu, "the down projection", &[&w.down], uploads)?,
        })
    }
}

/// Most bytes of a layer's matrices in an [`Arena`]. Stacked tensors of one type share a part, which takes no more.
fn layer_bytes(w: &LayerWeights) -> u64 {
    let bytes = |l: &Linear| WgpuMatrix::bytes_of(l.weight.ty(), l.weight.row_len(), l.weight.n_rows());
    w.linears().into_iter().map(|l| Arena::padded(bytes(l))).fold(0, u64::saturating_add)
}

/// Matrices stacked in this order, with their biases.
fn concat(gpu: &WgpuDevice, what: &str, linears: &[&Linear], uploads: &mut Uploads) -> Result<WgpuLinear, WgpuError> {
    let weights: Vec<_> = linears.iter().map(|l| &l.weight).collect();
    let bias =
        linears.iter().any(|l| l.bias.is_some()).then(|| linears.iter().flat_map(|l| bias(l)).collect::<Vec<_>>());
    Ok(WgpuLinear {
        weight: uploads.concat(gpu, what, &weights)?,
        bias: bias.map(|b| gpu.upload("a bias", &b)).transpose()?,
    })
}

/// Two matrices with their rows interleaved, and their biases likewise.
fn interleave(
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
fn interleave_all(
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

/// Norms and biases of all layers, one layer after the other, as `decode_layers` reads them; and which matrices have a
/// bias in any layer: Q, K and V; attention's output; gate and up; down.
pub(super) fn layer_params(layers: &[PlainWeights<'_>]) -> (Vec<f32>, [bool; 4]) {
    let mut biases = [false; 4];
    for w in layers {
        let a = w.attention;
        let groups: [&[&Linear]; 4] = [&[&a.q, w.k, w.v], &[&a.out], &[w.gate, w.up], &[w.down]];
        for (has, group) in biases.iter_mut().zip(groups) {
            *has |= group.iter().any(|l| l.bias.is_some());
        }
    }
    let mut params = Vec::new();
    for w in layers {
        let a = w.attention;
        params.extend([w.mixer_norm, w.feed_forward_norm].concat());
        if biases[0] {
            params.extend([&a.q, w.k, w.v].into_iter().flat_map(bias));
        }
        if biases[1] {
            params.extend(bias(&a.out));
        }
        if biases[2] {
            params.extend(bias(w.gate).into_iter().zip(bias(w.up)).flat_map(|(gate, up)| [gate, up]));
        }
        if biases[3] {
            params.extend(bias(w.down));
        }
        params.extend([&a.q_norm, &a.k_norm].into_iter().flatten().flat_map(|norm| &norm.weight));
    }
    (params, biases)
}

/// The bias of `linear`, zeros if it has none.
fn bias(linear: &Linear) -> Vec<f32> {
    linear.bias.clone().unwrap_or_else(|| vec![0.0; linear.weight.n_rows()])
}
