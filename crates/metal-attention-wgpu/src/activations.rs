//! Scratch buffers of the forward pass: the values that kernels pass to each other. They are made once, for the largest
//! micro-batch and the widest layer, and reused by every layer and batch. All are F32 with a row for each token.
//!
//! Those that attention passes values through, row-major (other mixers use some of them, too, see [`Activations`]):
//!
//! ```text
//! buffer              shape                             contents: written by -> read by
//! x                   [n_tokens, n_embd]                residual stream: residual joins -> input products (a pending norm,
//!                                                       or no norm)
//! normed              [n_tokens, n_embd]                normed input: rows_of -> input products, RWKV's token shifts,
//!                                                       LAuReL; or, before a product whose kernel has no prologue: a
//!                                                       norm dispatch -> this product
//! projected           [n_tokens, row]                   input products (latent: q_b) -> kernels of the mixer;
//!                                                       rope_append changes the queries in place
//! queries             [n_tokens, n_head, key_dim]       queries after norm and RoPE, general kernels only:
//!                                                       attention_inputs -> general_attention
//!                                                       latent: head_products, latent_inputs -> general_attention
//! q_compressed        [n_tokens, q_rank]                latent: q_a, then its norm in place -> q_b
//! kv_compressed       [n_tokens, kv_rank + shared_dim]  latent: compressed row, then the shared key, neither normed nor
//!                                                       rotated yet: kv_a -> latent_inputs
//! mixer_out           [n_tokens, n_head, value_dim]     result of attention, times the gates -> output projection
//!                     [n_tokens, width]                 result of a recurrent mixer -> output projection
//!                     [n_tokens, n_head, kv_rank]       latent: general_attention -> head_products of v_b
//! head_outputs        [n_tokens, n_head, value_dim]     latent: head_products of v_b -> output projection
//! mamba.parallel_out  [n_tokens, Mamba-2's width]       Mamba-2 in parallel with attention -> its output projection
//! partial             [n_splits, n_tokens, n_head,      split-KV, of each split: weighted sum of the values, highest
//!                       value_dim + 2]                  score, sum of the weights: decode attention -> its merge
//!                                                       (latent: kv_rank + 2)
//! ```
//!
//! An *input product* is one that multiplies the input of a mixer.

mod mamba;
mod rwkv;

use metal_attention_model::{ModelSpec, Weights};
use wgpu::Buffer;

use crate::kernels::{
    ExpertsScratch, ExpertsShape, MAX_TOP_K, MatmulScratch, argmax_scratch_bytes, top_k_scratch_bytes,
};
use crate::parts::{LayerPages, widen_for_parts};
use crate::{WgpuDevice, WgpuError};
use mamba::{MambaScratch, MambaWidths};
use rwkv::{RwkvScratch, RwkvWidths};

/// The width of each scratch buffer: elements for each token, those of the widest layer; 0 where no layer uses it. The
/// fields have the names and meanings of [`Activations`], except where noted. Each part widens the buffers that it needs
/// (`parts/`).
#[derive(Debug, Clone, Default)]
pub(super) struct ActivationWidths {
    /// The residual stream; also the width of `normed` and `result`.
    pub(super) n_embd: usize,
    /// The product of a mixer's input projection: queries, keys and values, or the inputs of a recurrence.
    pub(super) projected: usize,
    /// Queries of the general attention kernels; results of a recurrent mixer's convolution.
    pub(super) queries: usize,
    /// Compressed queries of latent attention.
    pub(super) q_compressed: usize,
    /// Compressed keys and values of latent attention.
    pub(super) kv_compressed: usize,
    /// The result of attention or another mixer.
    pub(super) mixer_out: usize,
    /// The value of each head: of latent attention after the value expansion, of a delta rule before its norm.
    pub(super) head_outputs: usize,
    /// Counters of workgroups that share a recurrent state.
    pub(super) tickets: usize,
    /// Scratch buffers of Mamba and Mamba-2 only.
    pub(super) mamba: MambaWidths,
    /// Gate and up, or up alone.
    pub(super) gate_up: usize,
    /// The activated gate times up.
    pub(super) gated: usize,
    /// The per-layer embeddings of all layers (Gemma 3n).
    pub(super) layer_embeddings: usize,
    /// Scores of the router.
    pub(super) scores: usize,
    /// The sum of a token's experts.
    pub(super) experts_sum: usize,
    /// The different shapes of the experts of all layers.
    pub(super) experts: Vec<ExpertsShape>,
    /// Residual streams side by side (Gemma 3n).
    pub(super) streams: usize,
    /// The router between residual streams.
    pub(super) router: usize,
    /// `LAuReL`'s low-rank product.
    pub(super) laurel_rank: usize,
    /// `LAuReL`'s result.
    pub(super) laurel: usize,
    /// Scratch buffers of RWKV only.
    pub(super) rwkv: RwkvWidths,
    /// Partial results of split-KV attention, of each sequence of a decode step.
    pub(super) partial: usize,
    /// The taps of a block's convolutions, of both sides (DFlash-2).
    pub(super) block_taps: usize,
    /// The result of a block's convolution.
    pub(super) convolved: usize,
    /// States, in drafters.
    pub(super) states: usize,
    /// Rows as wide as an assistant's target.
    pub(super) target_rows: usize,
    /// What drafters make of a state before a product: the normed embedding and the normed state beside each other, or the normed
    /// state alone.
    pub(super) joined: usize,
    /// The logits of an output token; 0 for models without an output head.
    pub(super) n_vocab: usize,
}

/// Makes `width` at least `to`.
pub(super) fn widen(width: &mut usize, to: usize) {
    *width = to.max(*width);
}

impl ActivationWidths {
    /// The widths for a model. `pages`: those of each layer.
    pub(super) fn new(spec: &ModelSpec, weights: &Weights, pages: &[LayerPages]) -> Self {
        let n_vocab = if spec.output.head.is_some() { spec.n_vocab } else { 0 };
        let mut widths = Self { n_embd: spec.n_embd, n_vocab, ..Self::default() };
        widen_for_parts(&mut widths, spec.n_embd, weights, pages);
        widths
    }

    /// The widths of all buffers with a row for each token.
    fn rows(&self) -> Vec<usize> {
        let Self {
            n_embd,
            projected,
            queries,
            q_compressed,
            kv_compressed,
            mixer_out,
            head_outputs,
            tickets,
            ref mamba,
            gate_up,
            gated,
            layer_embeddings,
            scores,
            experts_sum,
            experts: _,
            streams,
            router,
            laurel_rank,
            laurel,
            ref rwkv,
            partial: _,
            states,
            target_rows,
            block_taps,
            convolved,
            joined,
            n_vocab: _,
        } = *self;
        let own = [
            n_embd,
            n_embd,
            n_embd,
            projected,
            queries,
            q_compressed,
            kv_compressed,
            mixer_out,
            head_outputs,
            tickets,
            gate_up,
            gated,
            layer_embeddings,
            layer_embeddings,
            scores,
            experts_sum,
            streams,
            router,
            laurel_rank,
            laurel,
            states,
            target_rows,
            block_taps,
            convolved,
            joined,
        ];
        own.into_iter().chain(mamba.rows()).chain(rwkv.rows()).collect()
    }

    /// Bytes of the experts' scratch buffers for `n_tokens` tokens: input and result of every visit (a token at one of
    /// its experts), in 32-bit floats and, for matrix units, in 16 bits.
    pub(super) fn experts_bytes(&self, n_tokens: usize) -> u64 {
        let of_visit = |shape: &ExpertsShape| 6 * shape.n_used as u64 * (shape.n_ff + shape.n_embd) as u64;
        self.experts.iter().map(of_visit).max().unwrap_or(0).saturating_mul(n_tokens as u64)
    }

    /// The widest input of any matrix product.
    fn input(&self) -> usize {
        let own = [
            self.n_embd,
            self.q_compressed,
            self.mixer_out,
            self.head_outputs,
            self.gated,
            self.laurel_rank,
            self.states,
            self.convolved,
            self.joined,
        ];
        own.into_iter().chain(self.mamba.inputs()).max().unwrap_or(0)
    }
}

/// The scratch buffers of one forward pass.
#[derive(Debug)]
pub(super) struct Activations {
    /// The residual stream, `[n_tokens, n_embd]`.
    pub(super) x: Buffer,
    /// The normed input of a mixer, a feed-forward or the output head, `[n_tokens, n_embd]`.
    pub(super) normed: Buffer,
    /// The result of a mixer or feed-forward that a norm or factor separates from the residual join,
    /// `[n_tokens, n_embd]`.
    pub(super) result: Buffer,
    /// The product of a mixer's input projection. For softmax attention a row is: gates of the query heads (if any),
    /// query heads, key heads, value heads, inputs of a parallel Mamba-2 (if any); without the first and the last
    /// `[n_tokens, (n_head + 2 n_head_kv) * head_dim]`. For latent attention only queries, `[n_tokens, n_head,
    /// head_dim]`. For other mixers their inputs.
    pub(super) projected: Buffer,
    /// Queries of the general attention kernels after norm and RoPE, `[n_tokens, n_head, key_dim]`. For a delta rule
    /// the result of its convolution, `[n_tokens, n_channels]`.
    pub(super) queries: Buffer,
    /// Compressed queries of latent attention, `[n_tokens, q_rank]`.
    pub(super) q_compressed: Buffer,
    /// Latent attention's compressed keys and values, followed by the key part that all heads share,
    /// `[n_tokens, kv_rank + shared_dim]`. For a delta rule its gates, if they have a projection of their own.
    pub(super) kv_compressed: Buffer,
    /// The mixer's result, `[n_tokens, n_head * value_dim]`, which the output projection multiplies. For latent
    /// attention the weighted sums of compressed rows, `[n_tokens, n_head, kv_rank]`.
    pub(super) mixer_out: Buffer,
    /// The output of each head of latent attention after the value expansion, `[n_tokens, n_head, value_dim]`. For a
    /// delta rule the output of each head before its norm, `[n_tokens, n_head_v, value_dim]`.
    pub(super) head_outputs: Buffer,
    /// Counters by which the workgroups of a run find the last of them, `[n_runs, n]`; zero between dispatches.
    pub(super) tickets: Buffer,
    /// Scratch buffers of Mamba and Mamba-2 only.
    pub(super) mamba: MambaScratch,
    /// Gate and up of an element side by side, `[n_tokens, n_ff, 2]`; up alone without a gate, `[n_tokens, n_ff]`.
    pub(super) gate_up: Buffer,
    /// The activated gate times up, which the down projection multiplies, `[n_tokens, n_ff]`.
    pub(super) gated: Buffer,
    /// The per-layer embeddings of all layers (Gemma 3n), `[n_tokens, n_layer * width]`.
    pub(super) layer_embeddings: Buffer,
    /// The projection of the residual stream that is added to them, of the same shape.
    pub(super) layer_projections: Buffer,
    /// Scores of the router, `[n_tokens, n_expert]`.
    pub(super) scores: Buffer,
    /// The sum of a token's experts that a norm or factor separates from the residual join, `[n_tokens, n_embd]`.
    pub(super) experts_sum: Buffer,
    /// Scratch buffers of the experts' kernels; `None` for a model without experts.
    pub(super) experts: Option<ExpertsScratch>,
    /// Residual streams side by side (Gemma 3n), `[n_tokens, n_streams, n_embd]`.
    pub(super) streams: Buffer,
    /// The router between residual streams, `[n_tokens, n_streams]`.
    pub(super) router: Buffer,
    /// `LAuReL`'s low-rank product, `[n_tokens, rank]`.
    pub(super) laurel_small: Buffer,
    /// `LAuReL`'s result, `[n_tokens, n_embd]`.
    pub(super) laurel: Buffer,
    /// Scratch buffers of RWKV only.
    pub(super) rwkv: RwkvScratch,
    /// The taps of a block's convolutions (DFlash-2), `[n_tokens, 2, n_tap, n_groups]`.
    pub(super) block_taps: Buffer,
    /// The result of a block's convolution, `[n_tokens, n_embd]`.
    pub(super) convolved: Buffer,
    /// The states that a prediction head reads, `[n_tokens, n_embd]`.
    pub(super) states: Buffer,
    /// Of an assistant rows as wide as its target: the embeddings of the tokens, then the states for the next drafts,
    /// `[n_tokens, target_width]`.
    pub(super) target_rows: Buffer,
    /// The normed embedding, then the normed state, `[n_tokens, 2, n_embd]`.
    pub(super) joined: Buffer,
    /// Logits of output tokens, `[n_outputs, n_vocab]`.
    pub(super) logits: Buffer,
    /// Intermediate results of argmax.
    pub(super) argmax: Buffer,
    /// Intermediate results of top-k.
    pub(super) top_k: Buffer,
    /// Partial results of split-KV attention.
    pub(super) partial: Buffer,
    /// Inputs of GEMM on matrix units, in the units' format.
    pub(super) matmul: MatmulScratch,
    /// Most tokens of a micro-batch.
    pub(super) n_tokens: usize,
    /// Most output tokens of a micro-batch whose logits are computed.
    pub(super) n_outputs: usize,
}

/// Most bytes of logits at one time; batches with more output tokens are cut.
const LOGITS_BYTES: usize = 64 << 20;

impl Activations {
    /// The most tokens, and the most output tokens, of a micro-batch: `n_ubatch`, or fewer where a buffer would be
    /// larger than a binding of `max_binding` bytes.
    pub(super) fn capacity(max_binding: u64, widths: &ActivationWidths, n_ubatch: usize) -> (usize, usize) {
        let binding = max_binding as usize;
        let widest = widths.rows().into_iter().max().unwrap_or(0);
        // WebGPU allows 65,535 workgroups along an axis of a grid.
        let n_tokens = n_ubatch.min(65_535).min(binding / (4 * widest.max(1))).max(1);
        let n_outputs = n_tokens.min(LOGITS_BYTES.min(binding) / (4 * widths.n_vocab.max(1))).max(1);
        (n_tokens, n_outputs)
    }

    /// Bytes of all buffers with a row for each token, and of the logits.
    pub(super) fn bytes(widths: &ActivationWidths, (n_tokens, n_outputs): (usize, usize)) -> u64 {
        let row: usize = widths.rows().iter().sum();
        4 * (n_tokens as u64 * row as u64 + n_outputs as u64 * widths.n_vocab as u64)
    }

    /// Makes the buffers. `n_decoded`: most sequences of a decode step.
    pub(super) fn new(
        gpu: &WgpuDevice,
        widths: &ActivationWidths,
        (n_tokens, n_outputs): (usize, usize),
        n_decoded: usize,
    ) -> Result<Self, WgpuError> {
        let rows = |width: usize| gpu.buffer("activations", 4 * n_tokens as u64 * width as u64);
        Ok(Self {
            x: rows(widths.n_embd)?,
            normed: rows(widths.n_embd)?,
            result: rows(widths.n_embd)?,
            projected: rows(widths.projected)?,
            queries: rows(widths.queries)?,
            q_compressed: rows(widths.q_compressed)?,
            kv_compressed: rows(widths.kv_compressed)?,
            mixer_out: rows(widths.mixer_out)?,
            head_outputs: rows(widths.head_outputs)?,
            tickets: rows(widths.tickets)?,
            mamba: MambaScratch::new(gpu, &widths.mamba, n_tokens)?,
            gate_up: rows(widths.gate_up)?,
            gated: rows(widths.gated)?,
            layer_embeddings: rows(widths.layer_embeddings)?,
            layer_projections: rows(widths.layer_embeddings)?,
            scores: rows(widths.scores)?,
            experts_sum: rows(widths.experts_sum)?,
            experts: match &widths.experts[..] {
                [] => None,
                shapes => Some(ExpertsScratch::new(gpu, shapes, n_tokens)?),
            },
            streams: rows(widths.streams)?,
            router: rows(widths.router)?,
            laurel_small: rows(widths.laurel_rank)?,
            laurel: rows(widths.laurel)?,
            rwkv: RwkvScratch::new(widths.rwkv, &rows)?,
            states: rows(widths.states)?,
            target_rows: rows(widths.target_rows)?,
            block_taps: rows(widths.block_taps)?,
            convolved: rows(widths.convolved)?,
            joined: rows(widths.joined)?,
            logits: gpu.buffer("the logits", 4 * n_outputs as u64 * widths.n_vocab as u64)?,
            argmax: gpu.buffer("the stages of argmax", argmax_scratch_bytes(widths.n_vocab, n_outputs))?,
            top_k: gpu.buffer("the stages of top-k", top_k_scratch_bytes(widths.n_vocab, MAX_TOP_K, n_outputs))?,
            partial: gpu.buffer("parts of attention", 4 * n_decoded as u64 * widths.partial as u64)?,
            matmul: MatmulScratch::new(gpu, n_tokens, widths.input())?,
            n_tokens,
            n_outputs,
        })
    }
}
