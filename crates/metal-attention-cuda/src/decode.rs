//! The persistent decode kernel on the host's side: one launch evaluates a token, or a few that follow each other, through all layers
//! (`kernels/decode.cu`; docs/design/decode-kernel.md describes it).
//!
//! [`DecodeKernel::new`] checks whether the kernel supports a model on a device, and makes its arguments once, when the model is loaded:
//! descriptions of the layers (`layers.rs`, `args.rs`), the division of shared memory (`memory.rs`), and the vectors of words through which
//! blocks exchange results. [`DecodeKernel::launch`] runs it; `decode_steps.rs` does so for batches of a single token.

mod args;
mod layers;
mod memory;

use std::sync::Arc;

use bytemuck::Zeroable;
use metal_attention_model::{CacheType, ModelSpec};

use crate::CudaError;
use crate::activations::Activations;
use crate::args::{COPIES, DecodeArgs, DecodeOnRanksArgs, LayerArgs, OpArgs, RankShareArgs};
use crate::device::{CudaBuffer, CudaDevice, CudaSummary};
use crate::exchange::Exchange;
use crate::ids::ChosenIds;
use crate::kernels::{self, Kernel};
use crate::kv_cache::CudaKvCache;
use crate::launch::{LaunchGrid, LaunchOrder};
use crate::parts::{CudaAttention, CudaEmbedding};
use crate::runner::TokenOutput;
use crate::sharding::Shard;
use crate::slice::DevicePtr;
use crate::weights::{CudaWeights, ptr_or_null};
use args::{
    CONSUMER_WARPS, MAX_VOCAB, OpIndex, OpKind, PRODUCER_WARPS, TAGS, WordBuffers, layer_args, matrices_args, op_args,
};
use layers::{DecodeLayer, OpMatrix, has_whole_quads, max_rows};
use memory::SharedMemoryLayout;

/// `page_to_merge_time` of a model whose ops are all small: how much dividing the positions saves, relative to the cost of merging the splits.
/// Measured.
const SMALL_PAGE_TO_MERGE_TIME: f32 = 1000.0;
/// `page_to_merge_time` of other models. Measured.
const PAGE_TO_MERGE_TIME: f32 = 4500.0;
/// Splits of a token's positions at most: the limit of `max_splits` of `decode_attention.cuh`.
const MAX_SPLITS: usize = 32;
/// Tokens (decode steps of one sequence) of a launch at most. A launch cannot be stopped, and tokens after the end of a sequence are wasted;
/// launches are some 6 microseconds apart. The kernel itself needs fewer than `STEPS` of `ids.rs`, so that no unread id is overwritten.
const MAX_TOKENS: usize = 4;
/// Bytes of weights that the tokens of a launch read at most, unless it is one token; they take a millisecond or two.
const LAUNCH_BYTES: usize = 3 << 30;
/// Bytes a second of memory bandwidth for each multiprocessor from which on two stages in flight are faster than one. Measured on an H100
/// (25 GB/s), where words wait behind the second stage's requests, and on an H200 (37 GB/s), where one stage does not use the bandwidth.
const FAST_MEMORY: u64 = 30_000_000_000;
/// Threads of a block.
const THREADS: usize = 32 * (CONSUMER_WARPS + PRODUCER_WARPS);

/// Stages of a consumer warp whose copies may be outstanding. Two with experts: their copies start late and all at once.
fn max_stages_in_flight(summary: &CudaSummary, has_experts: bool) -> u32 {
    if has_experts || summary.bandwidth > FAST_MEMORY * summary.n_sm as u64 { 2 } else { 1 }
}

/// Whether the embedding of a token is a row of the table, times a scale, and nothing else. The kernel reads such a row by itself.
fn embedding_is_table_row(embedding: &CudaEmbedding) -> bool {
    let CudaEmbedding { table: _, token_type, positions, norm, state, assistant, per_layer, streams } = embedding;
    let has_no_sum = token_type.is_none() && positions.is_none() && norm.is_none();
    has_no_sum && state.is_none() && assistant.is_none() && per_layer.is_none() && streams.is_none()
}

/// The kernel of a rank that has the whole model, or a share of it.
#[derive(Debug, Clone, Copy)]
enum LoadedKernel {
    Alone(Kernel<DecodeArgs>),
    OnRanks(Kernel<DecodeOnRanksArgs>),
}

/// The kernel with its arguments and buffers, for one model on one device.
#[derive(Debug)]
pub(crate) struct DecodeKernel {
    kernel: LoadedKernel,
    grid: LaunchGrid,
    args: DecodeArgs,
    /// Position of a sequence from which on the kernel is not used.
    n_positions: usize,
    /// Decode steps (tokens) of a launch at most.
    max_steps: usize,
    /// The logits, `[n_vocab]`.
    logits: DevicePtr<f32>,
    /// Tags that a token uses: two a layer, and two for the output head.
    tags_per_token: u32,
    /// Layers, matrices, vectors of words, and words of best logits; addresses of them are in `args`.
    _buffers: [CudaBuffer; 4],
}

impl DecodeKernel {
    /// The kernel for the model `spec`; `None` if it does not support the model, its KV cache, or the device: then every op is a launch.
    /// `shard`: this rank's part of a model that several ranks share. `n_positions`: the kernel is used at positions of a sequence
    /// below this; `None`: at all. Errors: device memory cannot be allocated.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        spec: &ModelSpec,
        weights: &CudaWeights,
        cache: &CudaKvCache,
        s: &Activations,
        ids: &ChosenIds,
        shard: Option<&Shard>,
        n_positions: Option<usize>,
    ) -> Result<Option<Self>, CudaError> {
        let summary = gpu.summary();
        let (n_layer, n_embd) = (spec.n_layer(), spec.n_embd);
        let (Some((head, output_bias)), Some(of_logits)) = (&weights.output, &spec.output.head) else {
            return Ok(None);
        };
        let Some(layers) = weights.layers.iter().map(DecodeLayer::if_supported).collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let Some(output_norm) = weights.output_norm.as_deref().filter(|norm| norm.fuses_with_product()) else {
            return Ok(None);
        };
        // Blocks are no decode steps.
        if spec.takes_context {
            return Ok(None);
        }
        let head = [OpMatrix::of_matrix(head)];
        let Some(table) = &weights.embedding.table else { return Ok(None) };
        let has_plain_ends = embedding_is_table_row(&weights.embedding)
            && has_whole_quads(&head[0])
            && has_whole_quads(&OpMatrix::of_matrix(table));
        let is_f16_cache = cache.cache_type == CacheType::F16;
        let fits_words = spec.n_vocab <= MAX_VOCAB;
        // Ranks exchange the rows of every layer's two sums and the best logit, so that all layers and the output head have to be divided.
        let is_divided = shard.is_none_or(|shard| shard.plan.shards_all(spec));
        if !summary.has_wgmma()
            || !has_plain_ends
            || !fits_words
            || !is_f16_cache
            || !is_divided
            || n_layer == 0
            // A token uses less than half of all tags (Lemma 2 of docs/design/decode-kernel.md).
            || 2 * n_layer + 2 >= TAGS as usize / 2
        {
            return Ok(None);
        }
        let n_positions = n_positions.unwrap_or(usize::MAX);
        if n_positions == 0 {
            return Ok(None);
        }
        let attentions = || layers.iter().map(|layer| layer.attention);
        let head_dim = attentions().map(|a| a.head_dim).max().unwrap_or(0);
        let n_blocks = summary.n_sm;
        let Some(memory) = SharedMemoryLayout::new(&layers, &head, n_embd, summary, shard.is_none()) else {
            return Ok(None);
        };

        // Bytes of the words of a vector of n elements: two elements a word, padded to pairs of words.
        let words = |n: usize| 8 * n.div_ceil(2).next_multiple_of(2);
        let n_expert = max_rows(&layers, OpKind::Router);
        let heads = attentions().map(|a| a.n_head).max().unwrap_or(0);
        let of_att = words(MAX_SPLITS * attentions().map(|a| a.n_head * a.head_dim).max().unwrap_or(0));
        let of_states = words(2 * MAX_SPLITS * heads);
        let sizes = [
            COPIES * words(n_embd),
            words(attentions().map(CudaAttention::stride).max().unwrap_or(0)),
            COPIES * of_att,
            COPIES * of_states,
            COPIES * words(n_expert),
            COPIES * words(max_rows(&layers, OpKind::GateAndUp)),
        ];
        let exchange = gpu.zeros("exchanges between blocks", sizes.iter().sum::<usize>() as u64)?;
        let mut rest = exchange.slice::<u64>();
        let [residual, qkv, attention, attention_max_sums, router, gated] = sizes.map(|bytes| {
            let vector = rest.take(bytes / 8);
            rest = rest.skip(bytes / 8);
            vector.ptr()
        });
        let best = gpu.zeros("the highest logit", 2 * 8 * n_blocks as u64)?;
        let words = WordBuffers { residual, qkv, attention, router, gated };
        let mut index = OpIndex { op: 0, matrix: 0 };
        let mut of_layers = Vec::with_capacity(n_layer + 1);
        for (i, layer) in layers.iter().enumerate() {
            let (args, next) = layer_args(cache, i, layer, words, index, n_blocks);
            of_layers.push(args);
            index = next;
        }
        // The output head is the only op of a pseudo-layer behind the last layer.
        let mut head_layer = LayerArgs { n_ops: 1, ..LayerArgs::zeroed() };
        head_layer.ops[0] = OpArgs {
            norm: output_norm.weight.ptr(),
            bias: ptr_or_null(output_bias.as_ref()),
            eps: output_norm.eps,
            ..op_args(OpKind::OutputHead, words.of(OpKind::OutputHead), index, &head, n_blocks)
        };
        let kernel = match (head_dim, shard.is_some()) {
            (..=64, false) if memory.has_small_ops => LoadedKernel::Alone(gpu.kernel(kernels::DECODE_SMALL_64)?),
            (..=128, false) if n_expert > 0 => LoadedKernel::Alone(gpu.kernel(kernels::DECODE_EXPERTS_128)?),
            (129.., false) if n_expert > 0 => LoadedKernel::Alone(gpu.kernel(kernels::DECODE_EXPERTS_256)?),
            (..=64, false) => LoadedKernel::Alone(gpu.kernel(kernels::DECODE_64)?),
            (65..=128, false) => LoadedKernel::Alone(gpu.kernel(kernels::DECODE_128)?),
            (129.., false) => LoadedKernel::Alone(gpu.kernel(kernels::DECODE_256)?),
            (..=128, true) if n_expert > 0 => LoadedKernel::OnRanks(gpu.kernel(kernels::DECODE_EXPERTS_ON_RANKS_128)?),
            (..=128, true) => LoadedKernel::OnRanks(gpu.kernel(kernels::DECODE_ON_RANKS_128)?),
            (129.., true) => return Ok(None),
        };
        of_layers.push(head_layer);
        let of_layers = gpu.upload("layers", &of_layers)?;
        let of_op = |i: usize, kind, matrices| matrices_args(i, (kind, matrices), n_blocks, memory.stage_bytes);
        let all_matrices: Vec<_> = layers
            .iter()
            .enumerate()
            .flat_map(|(i, layer)| layer.ops.iter().flat_map(move |(kind, matrices)| of_op(i, *kind, matrices)))
            .chain(of_op(n_layer, OpKind::OutputHead, &head))
            .collect();
        let matrices = gpu.upload("layers", &all_matrices)?;
        let bytes_of_all: usize =
            layers.iter().flat_map(DecodeLayer::matrices).chain(&head).map(OpMatrix::bytes_per_token).sum();
        let args = DecodeArgs {
            layers: of_layers.ptr(),
            matrices: matrices.ptr(),
            table: table.args(0),
            token: s.tokens.ptr(),
            logits: DevicePtr::NULL,
            ids: ids.ptr(),
            best_words: best.ptr(),
            qkv,
            attention,
            attention_max_sums,
            n_layer: n_layer as u32,
            n_embd: n_embd as u32,
            n_matrices: all_matrices.len() as u32,
            // Words that were never written have tag 0.
            tag: 2,
            stores_next_token: 0,
            stage_bytes: memory.stage_bytes as u32,
            stages_per_warp: memory.n_stages as u32,
            gate_to_up_floats: memory.gate_to_up_floats as u32,
            attention_copy_words: (of_att / 8) as u32,
            max_sums_copy_words: (of_states / 8) as u32,
            inputs_at: memory.inputs_at as u32,
            input_stride: memory.input_stride as u32,
            regions_at: memory.regions_at.map(|at| at as u32),
            residual_at: memory.residual_at as u32,
            shares_at: memory.shares_at as u32,
            spans_at: memory.spans_at as u32,
            head_constants_at: memory.head_constants_at as u32,
            routing_at: memory.routing_at as u32,
            barriers_at: memory.barriers_at as u32,
            embedding_scale: spec.embedding.scale,
            logit_scale: of_logits.scale,
            logit_cap: of_logits.soft_cap.unwrap_or(0.0),
            n_tokens: 1,
            first_step_number: 0,
            page_to_merge_time: if memory.has_small_ops { SMALL_PAGE_TO_MERGE_TIME } else { PAGE_TO_MERGE_TIME },
            max_stages_in_flight: max_stages_in_flight(summary, n_expert > 0),
            first_best_place: 0,
        };
        Ok(Some(Self {
            kernel,
            grid: LaunchGrid { blocks: [n_blocks, 1, 1], threads: THREADS, shared: memory.bytes },
            args,
            n_positions,
            max_steps: (LAUNCH_BYTES / bytes_of_all).clamp(1, MAX_TOKENS),
            logits: s.logits.ptr(),
            tags_per_token: 2 * n_layer as u32 + 2,
            _buffers: [of_layers, matrices, exchange, best],
        }))
    }

    /// Limits the decode steps of a launch to `n`, at least 1.
    pub(crate) fn limit_steps(&mut self, n: usize) {
        self.max_steps = self.max_steps.min(n);
    }

    /// Decode steps that one launch may evaluate, the first at position `pos` of its sequence; 0: the kernel is not used there.
    pub(crate) fn steps_per_launch(&self, pos: usize) -> usize {
        self.n_positions.saturating_sub(pos).min(self.max_steps)
    }

    /// Launches the kernel for the token in device memory and, greedily, the `n - 1` tokens after it. `n`: 1 to `steps_per_launch`; more than 1 only if
    /// `output` is `Id`. `number`: number of the first token's decode step, with which its id is published. `exchange`: mailboxes of the
    /// ranks that share the model; all of them have to launch the same. Does not wait for the kernel. Errors: hidden states are wanted, which the
    /// kernel does not store, or the launch fails.
    pub(crate) fn launch(
        &mut self,
        gpu: &CudaDevice,
        exchange: Option<&Exchange>,
        output: TokenOutput,
        n: usize,
        number: u32,
    ) -> Result<(), CudaError> {
        let (logits, advance) = match output {
            TokenOutput::Logits | TokenOutput::TopK => (self.logits, false),
            TokenOutput::Id { feeds_next_step } => (DevicePtr::NULL, feeds_next_step),
            TokenOutput::Hidden => return Err(CudaError::UnsupportedPart { part: "hidden states in one launch" }),
        };
        let args = DecodeArgs {
            logits,
            stores_next_token: u32::from(advance),
            n_tokens: n as u32,
            first_step_number: number,
            ..self.args
        };
        let (grid, order) = (self.grid, LaunchOrder::Cooperative);
        match (self.kernel, exchange) {
            (LoadedKernel::Alone(kernel), None) => {
                // SAFETY: the addresses are of the buffers of this object, of the model's weights and of its caches, which the executor
                // holds beside it; their sizes are those that `new` has allocated.
                unsafe { gpu.launch(kernel, grid, &args, order)? };
            }
            (LoadedKernel::OnRanks(kernel), Some(exchange)) => {
                let first_vocab_row = exchange.first_row() as u32;
                let ranks = RankShareArgs { exchange: exchange.args(), first_vocab_row, unused: 0 };
                // SAFETY: as above; mailboxes of other ranks live as long as these, which hold each other's addresses.
                unsafe { gpu.launch(kernel, grid, &DecodeOnRanksArgs { decode: args, ranks }, order)? };
            }
            (LoadedKernel::Alone(_), Some(_)) | (LoadedKernel::OnRanks(_), None) => {
                let part = "a rank's share in the kernel of a whole model, or the reverse";
                return Err(CudaError::UnsupportedPart { part });
            }
        }
        self.args.tag = (self.args.tag + n as u32 * self.tags_per_token) % TAGS;
        self.args.first_best_place = (self.args.first_best_place + n as u32) % 2;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fast_memory_and_experts_have_two_stages_in_flight() {
        let device = |bandwidth: u64, n_sm| CudaSummary {
            ordinal: 0,
            name: String::new(),
            capability: (9, 0),
            memory: 80 << 30,
            bandwidth,
            n_sm,
            max_shared: 227 << 10,
            driver: 13000,
        };
        // An H100, an H200, a device that reports no bandwidth, and one with few multiprocessors.
        for (bandwidth, n_sm, wanted) in
            [(3_352_320_000_000, 132, 1), (4_916_736_000_000, 132, 2), (0, 132, 1), (4_022_784_000_000, 78, 2)]
        {
            let summary = device(bandwidth, n_sm);
            assert_eq!(
                (max_stages_in_flight(&summary, false), max_stages_in_flight(&summary, true)),
                (wanted, 2),
                "{bandwidth} {n_sm}"
            );
        }
    }
}
