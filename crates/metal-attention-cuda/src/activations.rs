//! [`Activations`]: the device buffers of intermediate results, allocated at load for micro-batches of up to `n_ubatch` tokens.

use std::sync::Arc;

use metal_attention_model::ModelSpec;

use crate::CudaError;
use crate::args::{QueryTileArgs, TokenArgs};
use crate::device::{CudaBuffer, CudaDevice};
use crate::matrix::PANEL;
use crate::parts::widen_for_parts;
use crate::runner::{SCRATCH_ALIGNMENT, TOP_K, split_bytes, top_k_bytes};

/// Most output tokens of a micro-batch.
pub(crate) const MAX_OUTPUTS: usize = 256;

/// Blocks that attention over a few tokens is divided into, by split-KV: as many as a large GPU runs at the same time.
pub(crate) const ATTENTION_BLOCKS: usize = 264;
/// Most parts that the positions of one token are split into.
pub(crate) const MAX_SPLITS: usize = 32;
/// Blocks that search one row of logits for the highest.
pub(crate) const ARGMAX_BLOCKS: usize = 128;

/// The largest widths over all parts of a model, in elements of one token unless stated otherwise. Each part widens those that it
/// uses.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Widths {
    /// Most tokens of a micro-batch.
    n_tokens: usize,
    /// The residual stream.
    n_embd: usize,
    /// The logits.
    n_vocab: usize,
    /// Queries (with their gates), keys and values.
    pub(crate) qkv: usize,
    /// The result of attention, and queries that a kernel of their own makes, `n_head * head_dim`.
    pub(crate) attention: usize,
    /// The inner width of dense feed-forwards and shared experts.
    pub(crate) n_ff: usize,
    /// Query heads.
    pub(crate) n_head: usize,
    /// A split-KV partial result of one head: the weighted sum, the largest score and the sum of the weights.
    pub(crate) partial: usize,
    /// Gate and up, where the product does not apply the activation itself.
    pub(crate) gate_up: usize,
    /// The per-layer embeddings of all layers.
    pub(crate) per_layer_inputs: usize,
    /// Residual streams (`AltUp`).
    pub(crate) n_streams: usize,
    /// The rank of the low-rank residual beside attention (`LAuReL`).
    pub(crate) laurel_rank: usize,
    /// Scratch of one mixer or feed-forward, for all tokens of a micro-batch together.
    rows: usize,
    /// The widest single row in that scratch.
    row: usize,
    /// The first layer's values, which later layers read (RWKV-7).
    pub(crate) first_value: usize,
    /// The taps of a block's convolutions, of both sides (DFlash-2).
    pub(crate) block_taps: usize,
    /// The result of a block's convolution.
    pub(crate) convolved: usize,
    /// Key heads or groups of recurrent mixers.
    pub(crate) n_key_head: usize,
}

/// Widens a width to at least `n`.
pub(crate) fn widen(width: &mut usize, n: usize) {
    *width = (*width).max(n);
}

impl Widths {
    /// The widths of `spec`, with scratch for micro-batches of up to `n_tokens` tokens.
    pub(crate) fn new(spec: &ModelSpec, n_tokens: usize) -> Self {
        let mut widths = Self { n_tokens, n_embd: spec.n_embd, n_vocab: spec.n_vocab, ..Self::default() };
        widen_for_parts(&mut widths, spec);
        widths
    }

    /// Widens the scratch for a part that takes `elements(n)` elements of it for `n` tokens
    /// ([`ModelRunner::scratch`](crate::runner::ModelRunner::scratch)).
    pub(crate) fn widen_scratch<const N: usize>(&mut self, elements: impl Fn(usize) -> [usize; N]) {
        widen(&mut self.rows, elements(self.n_tokens).iter().map(|n| n.next_multiple_of(SCRATCH_ALIGNMENT)).sum());
        widen(&mut self.row, elements(1).into_iter().max().unwrap_or(0));
    }

    /// Widens the scratch for a part that takes rows of these widths for each token
    /// ([`ModelRunner::scratch_rows`](crate::runner::ModelRunner::scratch_rows)).
    pub(crate) fn widen_scratch_rows<const N: usize>(&mut self, widths: [usize; N]) {
        self.widen_scratch(|n| widths.map(|width| width.saturating_mul(n)));
    }
}

/// Device buffers of the intermediate results of a micro-batch.
///
/// Rows are F32 and in the order of the batch's tokens, unless stated otherwise. A buffer `packed_..` has the same rows as F16, in the
/// order in which the tensor-core products read them: tiles of 8 tokens times panels of 64 elements (`packed_input` of
/// `kernels/common.cuh`).
#[derive(Debug)]
pub(crate) struct Activations {
    /// Most tokens of a micro-batch.
    pub(crate) n_tokens: usize,
    /// Most output tokens of a micro-batch.
    pub(crate) n_outputs: usize,
    /// The tokens, `TokenArgs` each.
    pub(crate) tokens: CudaBuffer,
    /// The indices of the output tokens in the batch, u32 `[n_outputs]`.
    pub(crate) output_rows: CudaBuffer,
    /// The query tiles of prefill attention, `QueryTileArgs` each.
    pub(crate) query_tiles: CudaBuffer,
    /// The residual stream, `[n_tokens, n_embd]`.
    pub(crate) x: CudaBuffer,
    /// The normalised residual stream, packed.
    pub(crate) packed_x: CudaBuffer,
    /// The normalised residual stream, `[n_tokens, n_embd]`, where the product that reads it does not apply the norm itself.
    pub(crate) h: CudaBuffer,
    /// The result of a mixer or feed-forward before its norm or its sum over the ranks, `[n_tokens, n_embd]`.
    pub(crate) result: CudaBuffer,
    /// Queries after norm and RoPE, `[n_tokens, n_head * head_dim]`, where a separate kernel makes them.
    pub(crate) queries: CudaBuffer,
    /// Gate and up before the activation, `[n_tokens, 2 * n_ff]`, or a gate alone.
    pub(crate) gate_up: CudaBuffer,
    /// The per-layer embeddings of all layers, `[n_tokens, n_layer * width]`.
    pub(crate) per_layer_inputs: CudaBuffer,
    /// The projection of the token embedding that is added to them, of the same shape.
    pub(crate) per_layer_projected: CudaBuffer,
    /// The residual streams of `AltUp`, `[n_tokens, n_streams, n_embd]`.
    pub(crate) streams: CudaBuffer,
    /// The router of these streams, `[n_tokens, n_streams]`.
    pub(crate) router: CudaBuffer,
    /// The inner row of `LAuReL`, `[n_tokens, laurel_rank]`.
    pub(crate) laurel_small: CudaBuffer,
    /// The result of `LAuReL`, `[n_tokens, n_embd]`.
    pub(crate) laurel: CudaBuffer,
    /// Scratch of the mixer or the feed-forward that runs (`runner/scratch.rs`).
    pub(crate) rows: CudaBuffer,
    /// The first layer's values, `[n_tokens, width]` (RWKV-7).
    pub(crate) first_value: CudaBuffer,
    /// The taps of a block's convolutions (DFlash-2), `[n_tokens, 2, n_tap, n_groups]`.
    pub(crate) block_taps: CudaBuffer,
    /// The result of a block's convolution, `[n_tokens, n_embd]`.
    pub(crate) convolved: CudaBuffer,
    /// Rows of the scratch that the next product reads, packed.
    pub(crate) packed_rows: CudaBuffer,
    /// Queries, keys and values before norm and RoPE, `[n_tokens, qkv]`.
    pub(crate) qkv: CudaBuffer,
    /// The result of attention, `[n_tokens, n_head * head_dim]`.
    pub(crate) att: CudaBuffer,
    /// The result of attention, packed.
    pub(crate) packed_att: CudaBuffer,
    /// The input of the feed-forward's last product, `[n_tokens, n_ff]`.
    pub(crate) gated: CudaBuffer,
    /// The same, packed.
    pub(crate) packed_gated: CudaBuffer,
    /// The hidden vectors of the output tokens after the last norm, `[n_outputs, n_embd]`.
    pub(crate) hidden: CudaBuffer,
    /// The logits of the output tokens, `[n_outputs, n_vocab]`.
    pub(crate) logits: CudaBuffer,
    /// The highest logit of each block of argmax, u64 `[n_outputs, ARGMAX_BLOCKS]`.
    pub(crate) best: CudaBuffer,
    /// The highest logits, u64 `[n_outputs, TOP_K]`: a logit and its id each (`argmax_key` of `kernels/argmax.cuh`).
    pub(crate) top_k: CudaBuffer,
    /// The highest logits of each part of the vocabulary, before they are merged.
    pub(crate) top_k_lists: CudaBuffer,
    /// Partial results of split-KV attention.
    pub(crate) partial: CudaBuffer,
    /// Partial sums of split-K products.
    pub(crate) split_sums: CudaBuffer,
    /// Counters by which the last block of a split-K product knows that it is the last, u32, as the two below zero between kernels.
    pub(crate) split_tickets: CudaBuffer,
    /// Counters of attention, recurrences and routers.
    pub(crate) tickets: CudaBuffer,
    /// Counters of argmax and of the highest logits.
    pub(crate) argmax_tickets: CudaBuffer,
}

/// Bytes of `n_tokens` packed F16 rows of `width` elements: rows padded to panels, tokens to tiles of 8.
pub(crate) fn packed(width: usize, n_tokens: usize) -> usize {
    2 * width.next_multiple_of(PANEL) * n_tokens.next_multiple_of(8)
}

impl Activations {
    /// Allocates the buffers, filled with zeros.
    pub(crate) fn new(gpu: &Arc<CudaDevice>, w: &Widths) -> Result<Self, CudaError> {
        let n_tokens = w.n_tokens;
        let n_outputs = n_tokens.min(MAX_OUTPUTS);
        let zeros = |bytes: usize| gpu.zeros("activations", bytes as u64);
        let [split_sums, split_tickets] = split_bytes(gpu.summary(), n_tokens);
        Ok(Self {
            n_tokens,
            n_outputs,
            tokens: zeros(size_of::<TokenArgs>() * n_tokens)?,
            output_rows: zeros(4 * n_tokens)?,
            query_tiles: zeros(size_of::<QueryTileArgs>() * n_tokens)?,
            x: zeros(4 * w.n_embd * n_tokens)?,
            packed_x: zeros(packed(w.n_embd, n_tokens))?,
            h: zeros(4 * w.n_embd * n_tokens)?,
            result: zeros(4 * w.n_embd * n_tokens)?,
            queries: zeros(4 * w.attention * n_tokens)?,
            gate_up: zeros(4 * w.gate_up * n_tokens)?,
            per_layer_inputs: zeros(4 * w.per_layer_inputs * n_tokens)?,
            per_layer_projected: zeros(4 * w.per_layer_inputs * n_tokens)?,
            streams: zeros(4 * w.n_streams * w.n_embd * n_tokens)?,
            router: zeros(4 * w.n_streams * n_tokens)?,
            laurel_small: zeros(4 * w.laurel_rank * n_tokens)?,
            laurel: zeros(4 * if w.n_streams > 0 { w.n_embd } else { 0 } * n_tokens)?,
            rows: zeros(4 * w.rows)?,
            first_value: zeros(4 * w.first_value * n_tokens)?,
            block_taps: zeros(4 * w.block_taps * n_tokens)?,
            convolved: zeros(4 * w.convolved * n_tokens)?,
            packed_rows: zeros(packed(w.n_embd.max(w.laurel_rank).max(w.row), n_tokens))?,
            qkv: zeros(4 * w.qkv * n_tokens)?,
            att: zeros(4 * w.attention * n_tokens)?,
            packed_att: zeros(packed(w.attention, n_tokens))?,
            gated: zeros(4 * w.n_ff * n_tokens)?,
            packed_gated: zeros(packed(w.n_ff, n_tokens))?,
            hidden: zeros(4 * w.n_embd * n_tokens)?,
            logits: zeros(4 * w.n_vocab * n_outputs)?,
            best: zeros(8 * ARGMAX_BLOCKS * n_outputs)?,
            top_k: zeros(8 * TOP_K * n_outputs)?,
            top_k_lists: zeros(top_k_bytes(w.n_vocab) * n_outputs)?,
            partial: zeros(4 * w.partial * w.n_head * partial_rows(n_tokens))?,
            split_sums: zeros(split_sums)?,
            split_tickets: zeros(split_tickets)?,
            tickets: zeros(4 * w.n_head.max(w.n_key_head).max(1) * n_tokens)?,
            argmax_tickets: zeros(4 * n_outputs)?,
        })
    }

    /// An estimate of the bytes of all buffers.
    pub(crate) fn bytes(w: &Widths) -> u64 {
        let n_tokens = w.n_tokens;
        let rows = n_tokens
            * (4 * (4 * w.n_embd + w.qkv + 2 * w.attention + w.n_ff + w.gate_up)
                + 2 * (2 * w.n_embd + w.attention + w.n_ff));
        let streams = 4
            * n_tokens
            * (2 * w.per_layer_inputs + (w.n_streams + usize::from(w.n_streams > 0)) * w.n_embd + w.laurel_rank);
        let scratch = 4 * w.rows + n_tokens * (4 * (w.first_value + w.block_taps + w.convolved) + 2 * w.row);
        let logits = (4 * w.n_vocab + top_k_bytes(w.n_vocab)) * n_tokens.min(MAX_OUTPUTS);
        (rows + streams + scratch + logits + 4 * w.partial * w.n_head * partial_rows(n_tokens)) as u64
    }
}

/// The number of parts that each token's positions are split into (split-KV), for `n_tokens` tokens of `blocks` blocks each
/// without splits.
pub(crate) fn n_splits(n_tokens: usize, blocks: usize) -> usize {
    (ATTENTION_BLOCKS / (blocks * n_tokens).max(1)).clamp(1, MAX_SPLITS)
}

/// Partial results of one head: at most this many tokens times splits.
fn partial_rows(n_tokens: usize) -> usize {
    n_tokens.max(ATTENTION_BLOCKS)
}
