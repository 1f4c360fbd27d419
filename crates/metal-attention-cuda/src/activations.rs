//! What steps work with, made at load.

use std::sync::Arc;

use metal_attention_model::{AttentionSpec, FeedForward, Mixer, ModelSpec};

use crate::CudaError;
use crate::args::QueryTileArgs;
use crate::device::{CudaBuffer, CudaDevice};
use crate::matrix::PANEL;
use crate::runner::{TOP_K, scratch_elements, split_bytes, top_k_bytes};

/// Most tokens of which something is wanted at once.
pub(crate) const MAX_OUTPUTS: usize = 256;

/// Blocks of attention of one token, or of a few, as far as splits make more of them: as many as a large GPU runs at a time.
pub(crate) const ATTENTION_BLOCKS: usize = 264;
/// Most splits of a token's positions.
pub(crate) const MAX_SPLITS: usize = 32;
/// Blocks that look for the largest logit of a row.
pub(crate) const ARGMAX_BLOCKS: usize = 128;

/// The widest rows of a model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Widths {
    n_embd: usize,
    n_vocab: usize,
    qkv: usize,
    attention: usize,
    n_ff: usize,
    n_head: usize,
    /// Elements of a head's partial result.
    partial: usize,
    /// Queries that are made apart.
    queries: usize,
    /// Gate and up of feed-forwards that do not go through the activation on the way.
    gate_up: usize,
    /// Embeddings of all layers of a token.
    own_inputs: usize,
    /// Residual streams, and the rank of what is learned beside attention.
    n_streams: usize,
    laurel_rank: usize,
    /// Elements of all rows that mixers and experts work on, of as many tokens as there is room for, and the widest row.
    rows: usize,
    row: usize,
    /// Elements of the first layer's values, where others read them.
    first_value: usize,
    /// Key heads of recurrences.
    n_key_head: usize,
}

impl Widths {
    pub(crate) fn new(spec: &ModelSpec, n_tokens: usize) -> Self {
        let attention = || spec.layers.iter().filter_map(|layer| layer.mixer.attention());
        let n_ff = spec.layers.iter().map(|layer| match &layer.feed_forward {
            FeedForward::Dense(dense) => dense.n_ff,
            FeedForward::Experts(experts) => experts.shared.map_or(0, |shared| shared.dense.n_ff),
            FeedForward::ChannelMix(_) | FeedForward::None => 0,
        });
        let latent = || spec.layers.iter().filter_map(|layer| layer.mixer.latent_attention());
        let (rows, row) = scratch_elements(spec, n_tokens);
        let first_value = spec.layers.iter().map(|layer| match &layer.mixer {
            Mixer::Rwkv7(of) => of.width,
            Mixer::Attention(_)
            | Mixer::LatentAttention(_)
            | Mixer::ShortConv(_)
            | Mixer::Mamba(_)
            | Mixer::Mamba2(_)
            | Mixer::AttentionAndMamba2(_)
            | Mixer::DeltaRule(_)
            | Mixer::Rwkv6(_)
            | Mixer::None => 0,
        });
        let n_key_head = spec.layers.iter().map(|layer| match &layer.mixer {
            Mixer::DeltaRule(of) => of.n_head_k,
            Mixer::Mamba2(of) => of.n_group,
            Mixer::AttentionAndMamba2(of) => of.mamba2.n_group,
            Mixer::Attention(_)
            | Mixer::LatentAttention(_)
            | Mixer::ShortConv(_)
            | Mixer::Mamba(_)
            | Mixer::Rwkv6(_)
            | Mixer::Rwkv7(_)
            | Mixer::None => 0,
        });
        let n_ff = n_ff.max().unwrap_or(0);
        let own = spec.embedding.per_layer.map_or(0, |own| own.width);
        let streams = spec.embedding.streams;
        let dims = |a: &AttentionSpec| (a.n_head * if a.output_gate { 2 } else { 1 } + 2 * a.n_head_kv) * a.head_dim;
        Self {
            n_embd: spec.n_embd,
            n_vocab: spec.n_vocab,
            qkv: attention().map(dims).max().unwrap_or(0),
            attention: attention().map(|a| a.n_head * a.head_dim).max().unwrap_or(0),
            n_ff: n_ff.max(own),
            n_head: attention().map(|a| a.n_head).chain(latent().map(|a| a.n_head)).max().unwrap_or(0),
            partial: attention().map(|a| a.head_dim).chain(latent().map(|a| a.kv_rank)).max().map_or(0, |n| n + 2),
            queries: attention().map(|a| a.n_head * a.head_dim).max().unwrap_or(0),
            gate_up: (2 * n_ff).max(own),
            own_inputs: own * spec.n_layer(),
            n_streams: streams.map_or(0, |streams| streams.n),
            laurel_rank: streams.map_or(0, |streams| streams.laurel_rank),
            rows,
            row,
            first_value: first_value.max().unwrap_or(0),
            n_key_head: n_key_head.max().unwrap_or(0),
        }
    }
}

/// Buffers of a step over `n_tokens` tokens at most, `n_outputs` of them with results.
#[derive(Debug)]
pub(crate) struct Activations {
    pub(crate) n_tokens: usize,
    pub(crate) n_outputs: usize,
    /// The batch, as `TokenArgs`.
    pub(crate) tokens: CudaBuffer,
    /// Places of the wanted tokens in it.
    pub(crate) output_rows: CudaBuffer,
    /// Tiles of queries, as `QueryTileArgs`.
    pub(crate) query_tiles: CudaBuffer,
    /// The residual stream, F32 `[n_tokens, n_embd]`.
    pub(crate) x: CudaBuffer,
    /// The same through a norm, as products of many tokens take it.
    pub(crate) packed_x: CudaBuffer,
    /// The same in F32, where a product does not take the norm on its way, `[n_tokens, n_embd]`.
    pub(crate) h: CudaBuffer,
    /// What a mixer or a feed-forward gives, where it is not added to the stream at once, `[n_tokens, n_embd]`.
    pub(crate) result: CudaBuffer,
    /// Queries that are made apart, `[n_tokens, n_head * head_dim]`.
    pub(crate) queries: CudaBuffer,
    /// Gate and up, or a gate alone, `[n_tokens, ..]`.
    pub(crate) gate_up: CudaBuffer,
    /// Of each layer the input of its own embedding, `[n_tokens, n_layer * width]`, and what is projected to it.
    pub(crate) own_inputs: CudaBuffer,
    pub(crate) own_projected: CudaBuffer,
    /// Residual streams, `[n_tokens, n_streams, n_embd]`, what chooses among them, `[n_tokens, n_streams]`, and what is learned
    /// beside attention, `[n_tokens, rank]` and `[n_tokens, n_embd]`.
    pub(crate) streams: CudaBuffer,
    pub(crate) router: CudaBuffer,
    pub(crate) laurel_small: CudaBuffer,
    pub(crate) laurel: CudaBuffer,
    /// Rows that mixers and experts work on.
    pub(crate) rows: CudaBuffer,
    /// The first layer's values, F32 `[n_tokens, ..]` (RWKV-7).
    pub(crate) first_value: CudaBuffer,
    /// Rows on their way to a product, packed.
    pub(crate) packed_rows: CudaBuffer,
    /// Queries, keys and values, F32 `[n_tokens, ..]`.
    pub(crate) qkv: CudaBuffer,
    /// What attention gives, F32 `[n_tokens, n_head * head_dim]`.
    pub(crate) att: CudaBuffer,
    pub(crate) packed_att: CudaBuffer,
    /// What goes into the feed-forward's last product, F32 `[a few, n_ff]`.
    pub(crate) gated: CudaBuffer,
    pub(crate) packed_gated: CudaBuffer,
    /// States after the last norm, F32 `[n_outputs, n_embd]`.
    pub(crate) hidden: CudaBuffer,
    /// F32 `[n_outputs, n_vocab]`.
    pub(crate) logits: CudaBuffer,
    pub(crate) best: CudaBuffer,
    /// The highest logits, ranks `[n_outputs, TOP_K]`, and those of chunks.
    pub(crate) top_k: CudaBuffer,
    pub(crate) top_k_lists: CudaBuffer,
    pub(crate) partial: CudaBuffer,
    /// Sums of products whose columns several blocks share out.
    pub(crate) split_sums: CudaBuffer,
    /// Counters of these, of attention, recurrences and routers, and of argmax and the highest logits, zero between kernels.
    pub(crate) split_tickets: CudaBuffer,
    pub(crate) tickets: CudaBuffer,
    pub(crate) argmax_tickets: CudaBuffer,
}

/// Bytes of `n_tokens` packed rows of `width` elements.
pub(crate) fn packed(width: usize, n_tokens: usize) -> usize {
    2 * width.next_multiple_of(PANEL) * n_tokens.next_multiple_of(8)
}

impl Activations {
    pub(crate) fn new(gpu: &Arc<CudaDevice>, w: &Widths, n_tokens: usize) -> Result<Self, CudaError> {
        let n_outputs = n_tokens.min(MAX_OUTPUTS);
        let zeros = |bytes: usize| gpu.zeros("activations", bytes as u64);
        let [split_sums, split_tickets] = split_bytes(gpu.summary(), n_tokens);
        Ok(Self {
            n_tokens,
            n_outputs,
            tokens: zeros(16 * n_tokens)?,
            output_rows: zeros(4 * n_tokens)?,
            query_tiles: zeros(size_of::<QueryTileArgs>() * n_tokens)?,
            x: zeros(4 * w.n_embd * n_tokens)?,
            packed_x: zeros(packed(w.n_embd, n_tokens))?,
            h: zeros(4 * w.n_embd * n_tokens)?,
            result: zeros(4 * w.n_embd * n_tokens)?,
            queries: zeros(4 * w.queries * n_tokens)?,
            gate_up: zeros(4 * w.gate_up * n_tokens)?,
            own_inputs: zeros(4 * w.own_inputs * n_tokens)?,
            own_projected: zeros(4 * w.own_inputs * n_tokens)?,
            streams: zeros(4 * w.n_streams * w.n_embd * n_tokens)?,
            router: zeros(4 * w.n_streams * n_tokens)?,
            laurel_small: zeros(4 * w.laurel_rank * n_tokens)?,
            laurel: zeros(4 * if w.n_streams > 0 { w.n_embd } else { 0 } * n_tokens)?,
            rows: zeros(4 * w.rows)?,
            first_value: zeros(4 * w.first_value * n_tokens)?,
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

    /// What they take, about.
    pub(crate) fn bytes(w: &Widths, n_tokens: usize) -> u64 {
        let rows = n_tokens
            * (4 * (4 * w.n_embd + w.qkv + 2 * w.attention + w.n_ff + w.gate_up)
                + 2 * (2 * w.n_embd + w.attention + w.n_ff));
        let own =
            4 * n_tokens * (2 * w.own_inputs + (w.n_streams + usize::from(w.n_streams > 0)) * w.n_embd + w.laurel_rank);
        let of_mixers = 4 * w.rows + n_tokens * (4 * w.first_value + 2 * w.row);
        let logits = (4 * w.n_vocab + top_k_bytes(w.n_vocab)) * n_tokens.min(MAX_OUTPUTS);
        (rows + own + of_mixers + logits + 4 * w.partial * w.n_head * partial_rows(n_tokens)) as u64
    }
}

/// Into how many parts the positions of each of `n_tokens` tokens are split where a token has so many blocks without.
pub(crate) fn n_splits(n_tokens: usize, blocks: usize) -> usize {
    (ATTENTION_BLOCKS / (blocks * n_tokens).max(1)).clamp(1, MAX_SPLITS)
}

/// Partial results of a head: tokens times splits at most.
fn partial_rows(n_tokens: usize) -> usize {
    n_tokens.max(ATTENTION_BLOCKS)
}
