//! Scratch memory of the forward pass: made once, used by every step.

mod rwkv;

use metal_attention_model::{Embedding, FeedForward, LatentAttentionSpec, Mixer, ModelSpec};
use wgpu::Buffer;

use crate::kernels::{
    ExpertsScratch, ExpertsShape, MAX_TOP_K, MatmulScratch, argmax_scratch_bytes, top_k_scratch_bytes,
};
use crate::mamba::{MambaScratch, MambaWidths};
use crate::parts::{AttentionKernels, MixerKernels};
use crate::plan::{low_rank_of_delta_rule, low_rank_of_rwkv7};
use crate::{WgpuDevice, WgpuError};
use rwkv::{RwkvScratch, RwkvWidths};

/// Elements of a model's activations a token, 0 of those that it does without: the widest of its layers.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ActivationWidths {
    pub(super) n_embd: usize,
    /// What is projected to queries, keys and values; queries alone where attention is latent. The inputs of other mixers.
    pub(super) qkv: usize,
    /// Queries as the general kernels compare them with cached keys; what a convolution before a recurrence gives.
    pub(super) queries: usize,
    /// Compressed queries.
    pub(super) q_rank: usize,
    /// Compressed rows and the key that heads share; gates of a recurrence, where they are projected apart.
    pub(super) compressed: usize,
    /// What attention or another mixer gives.
    pub(super) mixer_out: usize,
    /// Values of the heads, where what attention gives has to be expanded to them; results of a recurrence before their norm.
    pub(super) values: usize,
    /// Counters of the workgroups that share what a recurrence keeps.
    pub(super) tickets: usize,
    /// What Mamba and Mamba-2 have besides.
    pub(super) mamba: MambaWidths,
    /// Gate and up, or up.
    pub(super) gate_up: usize,
    /// The activated gate.
    pub(super) gated: usize,
    /// Inputs of every layer's own embedding.
    pub(super) layer_embeddings: usize,
    /// Products of the router to experts, and their sum where it is not added to the residual stream at once.
    pub(super) scores: usize,
    pub(super) experts: usize,
    /// Residual streams side by side, and the router between them.
    pub(super) streams: usize,
    pub(super) router: usize,
    /// `LAuReL`'s way through few elements, and its result.
    pub(super) laurel_rank: usize,
    pub(super) laurel: usize,
    /// Of RWKV's mixes.
    pub(super) rwkv: RwkvWidths,
    /// Logits; none of models without.
    pub(super) n_vocab: usize,
}

impl ActivationWidths {
    pub(super) fn new(spec: &ModelSpec, mixers: &[MixerKernels]) -> Self {
        let Embedding { scale: _, token_types: _, positions: _, norm: _, per_layer, streams } = &spec.embedding;
        let n_vocab = if spec.output.head.is_some() { spec.n_vocab } else { 0 };
        let mut w = Self { n_embd: spec.n_embd, n_vocab, ..Self::default() };
        let widen = |width: &mut usize, to: usize| *width = to.max(*width);
        for (layer, mixer) in spec.layers.iter().zip(mixers) {
            match mixer {
                MixerKernels::Fast(shape) => {
                    widen(&mut w.qkv, shape.qkv_len());
                    widen(&mut w.mixer_out, shape.att_len());
                }
                MixerKernels::General(inputs, attention) => {
                    widen(&mut w.qkv, inputs.row());
                    widen(&mut w.queries, attention.n_head * attention.key_dim);
                    widen(&mut w.mixer_out, attention.n_head * attention.value_dim);
                }
                MixerKernels::Latent(_, attention) => {
                    widen(&mut w.queries, attention.n_head * attention.key_dim);
                    widen(&mut w.mixer_out, attention.n_head * attention.value_dim);
                }
                MixerKernels::Mamba(of) => {
                    widen(&mut w.qkv, 2 * of.width);
                    widen(&mut w.mixer_out, of.width);
                    w.mamba.widen_for(of);
                }
                MixerKernels::Mamba2(of) => {
                    widen(&mut w.qkv, of.input_width());
                    widen(&mut w.mixer_out, of.width());
                    w.mamba.widen_for_heads(of, false);
                    widen(&mut w.tickets, of.n_group);
                }
                MixerKernels::AttentionAndMamba2(attention, of) => {
                    widen(&mut w.qkv, attention.qkv_len() + of.input_width());
                    match attention {
                        AttentionKernels::Fast(shape) => widen(&mut w.mixer_out, shape.att_len()),
                        AttentionKernels::General(_, attention) => {
                            widen(&mut w.queries, attention.n_head * attention.key_dim);
                            widen(&mut w.mixer_out, attention.n_head * attention.value_dim);
                        }
                    }
                    w.mamba.widen_for_heads(of, true);
                    widen(&mut w.tickets, of.n_group);
                }
                MixerKernels::None => {}
                MixerKernels::ShortConv(conv) => {
                    widen(&mut w.qkv, 3 * conv.width);
                    widen(&mut w.mixer_out, conv.width);
                }
                MixerKernels::DeltaRule(rule) => {
                    let (n_channels, n_values) = (rule.n_channels(), rule.n_values());
                    widen(&mut w.qkv, n_channels + n_values + 2 * rule.n_head_v);
                    widen(&mut w.compressed, 2 * rule.n_head_v);
                    widen(&mut w.queries, n_channels);
                    widen(&mut w.values, n_values);
                    widen(&mut w.mixer_out, n_values);
                    widen(&mut w.tickets, rule.n_head_k);
                    if let Some(low_rank) = low_rank_of_delta_rule(rule) {
                        w.rwkv.low_rank(&low_rank);
                    }
                }
                MixerKernels::Rwkv6(of) => {
                    w.rwkv.rwkv6(of);
                    widen(&mut w.mixer_out, of.width);
                }
                MixerKernels::Rwkv7(of) => {
                    w.rwkv.rwkv7(of, &low_rank_of_rwkv7(of));
                    widen(&mut w.mixer_out, of.width);
                }
            }
            match &layer.mixer {
                // What is refused needs nothing.
                Mixer::Attention(_)
                | Mixer::ShortConv(_)
                | Mixer::Mamba(_)
                | Mixer::Mamba2(_)
                | Mixer::AttentionAndMamba2(_)
                | Mixer::DeltaRule(_)
                | Mixer::Rwkv6(_)
                | Mixer::Rwkv7(_)
                | Mixer::None => {}
                Mixer::LatentAttention(a) => {
                    let LatentAttentionSpec { n_head, q_rank, kv_rank, value_dim, shared_dim, .. } = a;
                    widen(&mut w.qkv, n_head * a.head_dim());
                    widen(&mut w.q_rank, q_rank.unwrap_or(0));
                    widen(&mut w.compressed, kv_rank + shared_dim);
                    widen(&mut w.values, n_head * value_dim);
                }
            }
            match &layer.feed_forward {
                FeedForward::None => {}
                FeedForward::ChannelMix(mix) => {
                    w.rwkv.channel_mix(mix);
                    widen(&mut w.gate_up, mix.width);
                    widen(&mut w.gated, mix.width);
                }
                FeedForward::Dense(dense) => {
                    widen(&mut w.gate_up, dense.n_ff * if dense.gated { 2 } else { 1 });
                    widen(&mut w.gated, dense.n_ff);
                }
                FeedForward::Experts(e) => {
                    widen(&mut w.scores, e.n_expert);
                    w.experts = spec.n_embd;
                    if let Some(shared) = &e.shared {
                        widen(&mut w.gate_up, shared.dense.n_ff * if shared.dense.gated { 2 } else { 1 });
                        widen(&mut w.gated, shared.dense.n_ff);
                    }
                }
            }
        }
        if let Some(p) = per_layer {
            w.layer_embeddings = spec.n_layer() * p.width;
            widen(&mut w.gate_up, p.width);
            widen(&mut w.gated, p.width);
        }
        if let Some(streams) = streams {
            w.streams = streams.n * spec.n_embd;
            w.router = streams.n;
            w.laurel_rank = streams.laurel_rank;
            w.laurel = spec.n_embd;
        }
        w
    }

    /// Elements of all buffers with a row for each token.
    fn rows(&self) -> Vec<usize> {
        let Self {
            n_embd, qkv, queries, q_rank, compressed, mixer_out, values, gate_up, gated, layer_embeddings, ..
        } = *self;
        let Self { tickets, scores, experts, streams, router, laurel_rank, laurel, mamba, rwkv, n_vocab: _, .. } =
            *self;
        let own = [
            n_embd,
            n_embd,
            n_embd,
            qkv,
            queries,
            q_rank,
            compressed,
            mixer_out,
            values,
            tickets,
            gate_up,
            gated,
            layer_embeddings,
            layer_embeddings,
            scores,
            experts,
            streams,
            router,
            laurel_rank,
            laurel,
        ];
        own.into_iter().chain(mamba.rows()).chain(rwkv.rows()).collect()
    }

    /// The widest input of a matrix product.
    fn input(&self) -> usize {
        let own = [self.n_embd, self.q_rank, self.mixer_out, self.values, self.gated, self.laurel_rank];
        own.into_iter().chain(self.mamba.inputs()).max().unwrap_or(0)
    }
}

/// Activations of up to `n_tokens` tokens.
#[derive(Debug)]
pub(super) struct Activations {
    /// Residual stream, `[n_tokens, n_embd]`.
    pub(super) x: Buffer,
    /// Normalised input of a mixer, feed-forward or the head, `[n_tokens, n_embd]`.
    pub(super) h: Buffer,
    /// What a mixer or feed-forward gives, where it is not added to `x` at once, `[n_tokens, n_embd]`.
    pub(super) result: Buffer,
    /// `[n_tokens, (n_head + 2 n_head_kv) * head_dim]`
    pub(super) qkv: Buffer,
    /// Queries as the general kernels compare them with cached keys, `[n_tokens, n_head, key_dim]`; what a convolution before a
    /// recurrence gives, `[n_tokens, n_channels]`.
    pub(super) queries: Buffer,
    /// Compressed queries, `[n_tokens, q_rank]`.
    pub(super) q_a: Buffer,
    /// Compressed rows and the key that heads share, `[n_tokens, kv_rank + shared_dim]`; gates of a recurrence.
    pub(super) kv_a: Buffer,
    /// What attention gives, `[n_tokens, n_head * value_dim]`.
    pub(super) mixer_out: Buffer,
    /// Values that came of compressed ones, or results of a recurrence before their norm, `[n_tokens, n_head * value_dim]`.
    pub(super) values: Buffer,
    /// Counters of the workgroups that share what a recurrence keeps, `[n_runs, n]`: zeros between dispatches.
    pub(super) tickets: Buffer,
    /// What Mamba and Mamba-2 have besides.
    pub(super) mamba: MambaScratch,
    /// `[n_tokens, 2 n_ff]`, gate and up of an element side by side; `[n_tokens, n_ff]` without a gate.
    pub(super) gate_up: Buffer,
    /// `[n_tokens, n_ff]`
    pub(super) gated: Buffer,
    /// Inputs of every layer's own embedding, `[n_tokens, n_layer * width]`, and what is projected on the way to them.
    pub(super) layer_embeddings: Buffer,
    pub(super) layer_projections: Buffer,
    /// Products of the router to experts, `[n_tokens, n_expert]`.
    pub(super) scores: Buffer,
    /// The experts' sum, where it is not added to `x` at once, `[n_tokens, n_embd]`.
    pub(super) experts_sum: Buffer,
    /// What lies between the experts' kernels, where the model has experts.
    pub(super) experts: Option<ExpertsScratch>,
    /// Residual streams, `[n_tokens, n_streams, n_embd]`, and the router between them, `[n_tokens, n_streams]`.
    pub(super) streams: Buffer,
    pub(super) router: Buffer,
    /// `LAuReL`'s way through few elements, `[n_tokens, rank]`, and its result, `[n_tokens, n_embd]`.
    pub(super) laurel_small: Buffer,
    pub(super) laurel: Buffer,
    /// Of RWKV's mixes.
    pub(super) rwkv: RwkvScratch,
    /// `[n_wanted, n_vocab]`
    pub(super) logits: Buffer,
    /// Stages of argmax.
    pub(super) argmax: Buffer,
    /// Stages of the search for the largest logits.
    pub(super) top_k: Buffer,
    /// Parts of decode attention over a long context.
    pub(super) partial: Buffer,
    /// Inputs of matrix units.
    pub(super) matmul: MatmulScratch,
    /// Tokens there is room for.
    pub(super) n_tokens: usize,
    /// Rows of logits there is room for.
    pub(super) n_wanted: usize,
}

/// Bytes of what lies between the kernels of experts, for `n_tokens` tokens: what goes in and out of every visit, in 32-bit
/// floats and, for matrix units, in 16 bits.
pub(super) fn experts_bytes(spec: &ModelSpec, n_tokens: usize) -> u64 {
    let of_visit = |shape: &ExpertsShape| 6 * shape.n_used as u64 * (shape.n_ff + shape.n_embd) as u64;
    experts_shapes(spec).iter().map(of_visit).max().unwrap_or(0).saturating_mul(n_tokens as u64)
}

/// The different shapes of a model's experts.
pub(super) fn experts_shapes(spec: &ModelSpec) -> Vec<ExpertsShape> {
    let mut shapes = Vec::new();
    for layer in &spec.layers {
        match &layer.feed_forward {
            FeedForward::Dense(_) | FeedForward::ChannelMix(_) | FeedForward::None => {}
            FeedForward::Experts(e) => {
                let shape = ExpertsShape::new(e, spec.n_embd);
                if !shapes.contains(&shape) {
                    shapes.push(shape);
                }
            }
        }
    }
    shapes
}

/// Bytes of logits that are held at once, at most: larger batches are cut.
const LOGITS_BYTES: usize = 64 << 20;

impl Activations {
    /// Tokens and rows of logits that one run through the layers can have on this GPU, `n_ubatch` at most.
    pub(super) fn capacity(max_binding: u64, widths: &ActivationWidths, n_ubatch: usize) -> (usize, usize) {
        let binding = max_binding as usize;
        let widest = widths.rows().into_iter().max().unwrap_or(0);
        // An axis of a grid has 65,535 workgroups at most.
        let n_tokens = n_ubatch.min(65_535).min(binding / (4 * widest.max(1))).max(1);
        let n_wanted = n_tokens.min(LOGITS_BYTES.min(binding) / (4 * widths.n_vocab.max(1))).max(1);
        (n_tokens, n_wanted)
    }

    /// Bytes of all buffers.
    pub(super) fn bytes(widths: &ActivationWidths, (n_tokens, n_wanted): (usize, usize)) -> u64 {
        let row: usize = widths.rows().iter().sum();
        4 * (n_tokens as u64 * row as u64 + n_wanted as u64 * widths.n_vocab as u64)
    }

    /// `n_decoded`: sequences that are decoded side by side at most.
    pub(super) fn new(
        gpu: &WgpuDevice,
        widths: &ActivationWidths,
        mixers: &[MixerKernels],
        experts: &[ExpertsShape],
        (n_tokens, n_wanted): (usize, usize),
        n_decoded: usize,
    ) -> Result<Self, WgpuError> {
        let rows = |width: usize| gpu.buffer("activations", 4 * n_tokens as u64 * width as u64);
        Ok(Self {
            x: rows(widths.n_embd)?,
            h: rows(widths.n_embd)?,
            result: rows(widths.n_embd)?,
            qkv: rows(widths.qkv)?,
            queries: rows(widths.queries)?,
            q_a: rows(widths.q_rank)?,
            kv_a: rows(widths.compressed)?,
            mixer_out: rows(widths.mixer_out)?,
            values: rows(widths.values)?,
            tickets: rows(widths.tickets)?,
            mamba: MambaScratch::new(gpu, &widths.mamba, n_tokens)?,
            gate_up: rows(widths.gate_up)?,
            gated: rows(widths.gated)?,
            layer_embeddings: rows(widths.layer_embeddings)?,
            layer_projections: rows(widths.layer_embeddings)?,
            scores: rows(widths.scores)?,
            experts_sum: rows(widths.experts)?,
            experts: match experts {
                [] => None,
                shapes => Some(ExpertsScratch::new(gpu, shapes, n_tokens)?),
            },
            streams: rows(widths.streams)?,
            router: rows(widths.router)?,
            laurel_small: rows(widths.laurel_rank)?,
            laurel: rows(widths.laurel)?,
            rwkv: RwkvScratch::new(widths.rwkv, &rows)?,
            logits: gpu.buffer("the logits", 4 * n_wanted as u64 * widths.n_vocab as u64)?,
            argmax: gpu.buffer("the stages of argmax", argmax_scratch_bytes(widths.n_vocab, n_wanted))?,
            top_k: gpu.buffer("the stages of top-k", top_k_scratch_bytes(widths.n_vocab, MAX_TOP_K, n_wanted))?,
            partial: gpu.buffer(
                "parts of attention",
                mixers.iter().map(|mixer| mixer.partial_bytes(n_decoded)).max().unwrap_or(0),
            )?,
            matmul: MatmulScratch::new(gpu, n_tokens, widths.input())?,
            n_tokens,
            n_wanted,
        })
    }
}
