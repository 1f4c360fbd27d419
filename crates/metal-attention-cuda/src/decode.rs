//! One token in one launch: which models `kernels/decode.cu` takes, and what it works with.

mod args;
mod layers;
mod memory;

use std::sync::Arc;

use bytemuck::Zeroable;
use metal_attention_model::{CacheType, ModelSpec};

use crate::CudaError;
use crate::activations::Activations;
use crate::device::{CudaBuffer, CudaDevice, CudaSummary, Kernel};
use crate::exchange::Exchange;
use crate::ids::ChosenIds;
use crate::kv_cache::CudaKvCache;
use crate::launch::{LaunchGrid, LaunchOrder};
use crate::runner::TokenOutput;
use crate::sharding::Shard;
use crate::weights::{CudaAttention, CudaWeights};
use args::{
    COPIES, DecodeArgs, DecodeOnCardsArgs, First, Kind, LayerArgs, MAX_VOCAB, StepArgs, TAGS, WARPS, Words, layer_args,
    parts_args, step_args,
};
use layers::{PlainLayer, StepMatrix, is_plain, known, most_rows};
use memory::Memory;

/// What splits of a token's positions gain beside what it takes to join them, where all steps are small and where not: measured.
const SMALL_SPLIT_GAIN: f32 = 1000.0;
const SPLIT_GAIN: f32 = 4500.0;
/// Most splits of a token's positions.
const MAX_SPLITS: usize = 32;
/// Most tokens of a launch, and bytes of their weights, which take a millisecond or two: nobody needs those behind the last of a text. Two tokens that have
/// a launch each lie some 6 microseconds apart.
const MAX_TOKENS: usize = 4;
const LAUNCH_BYTES: usize = 3 << 30;
/// Bytes a second of memory for each multiprocessor from which on two of a warp's slots on their way are better than one, as measured
/// on an H100 and an H200, which have 25 and 37 GB/s: two are too many for the one, as exchanges wait behind them, and one is too few for the other.
const FAST_MEMORY: u64 = 30_000_000_000;
/// Threads of a block.
const THREADS: usize = 32 * (WARPS + 4);

/// Slots of a warp's weights that are on their way at most. Weights of experts are asked for late, and all at once.
fn slots_at_once(summary: &CudaSummary, has_experts: bool) -> u32 {
    if has_experts || summary.bandwidth > FAST_MEMORY * summary.n_sm as u64 { 2 } else { 1 }
}

/// The kernel, and what it works with.
#[derive(Debug)]
pub(crate) struct Decode {
    kernel: Kernel,
    grid: LaunchGrid,
    args: DecodeArgs,
    /// Tokens up to which a text takes it, and of a launch at most.
    until: usize,
    at_once: usize,
    logits: u64,
    /// Tags of a token's exchanges.
    tags: u32,
    /// Layers and matrices as the kernel reads them, words of the exchanges, the highest logit.
    _buffers: [CudaBuffer; 4],
}

impl Decode {
    /// What a token of `spec` takes in one launch; `None` where it is none of the models, or the device none of those, for which
    /// there is the kernel. `share`: what this card has of the model, where several share it. `wanted`: for so many first tokens of a text,
    /// instead of all.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        spec: &ModelSpec,
        weights: &CudaWeights,
        cache: &CudaKvCache,
        s: &Activations,
        ids: &ChosenIds,
        shard: Option<&Shard>,
        wanted: Option<usize>,
    ) -> Result<Option<Self>, CudaError> {
        let summary = gpu.summary();
        let (n_layer, n_embd) = (spec.n_layer(), spec.n_embd);
        let (Some((head, output_bias)), Some(of_logits)) = (&weights.output, &spec.output.head) else {
            return Ok(None);
        };
        let Some(layers) = weights.layers.iter().map(PlainLayer::of).collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let Some(output_norm) = weights.output_norm.as_deref().filter(|norm| norm.fuses_with_product()) else {
            return Ok(None);
        };
        let head = [StepMatrix::of(head)];
        let plain = is_plain(&weights.embedding) && known(&head[0]) && known(&StepMatrix::of(&weights.embedding.table));
        let short = cache.cache_type == CacheType::F16;
        let named = spec.n_vocab <= MAX_VOCAB;
        let divided = shard.is_none_or(|shard| shard.plan.shards_all(spec));
        if !summary.has_wgmma()
            || !plain
            || !named
            || !short
            || !divided
            || n_layer == 0
            || 2 * n_layer + 2 >= TAGS as usize / 2
        {
            return Ok(None);
        }
        let until = wanted.unwrap_or(usize::MAX);
        if until == 0 {
            return Ok(None);
        }
        let attentions = || layers.iter().map(|layer| layer.attention);
        let head_dim = attentions().map(|a| a.head_dim).max().unwrap_or(0);
        let n_blocks = summary.n_sm;
        let Some(memory) = Memory::new(&layers, &head, n_embd, summary, shard.is_none()) else { return Ok(None) };

        // Words of the exchanges: the residual stream, queries, keys and values, attention, its sums, the router's products, gated rows.
        let words = |n: usize| 8 * n.div_ceil(2).next_multiple_of(2);
        let n_expert = most_rows(&layers, Kind::Router);
        let heads = attentions().map(|a| a.n_head).max().unwrap_or(0);
        let of_att = words(MAX_SPLITS * attentions().map(|a| a.n_head * a.head_dim).max().unwrap_or(0));
        let of_sums = words(2 * MAX_SPLITS * heads);
        let sizes = [
            COPIES * words(n_embd),
            words(attentions().map(CudaAttention::stride).max().unwrap_or(0)),
            COPIES * of_att,
            COPIES * of_sums,
            COPIES * words(n_expert),
            COPIES * words(most_rows(&layers, Kind::GateAndUp)),
        ];
        let exchange = gpu.zeros("exchanges between blocks", sizes.iter().sum::<usize>() as u64)?;
        let mut at = exchange.ptr();
        let [x, qkv, att, sums, router, gated] = sizes.map(|bytes| {
            at += bytes as u64;
            at - bytes as u64
        });
        let best = gpu.zeros("the highest logit", 2 * 8 * n_blocks as u64)?;
        let words = Words { x, qkv, att, router, gated };
        let mut first = First { step: 0, part: 0 };
        let mut of_layers = Vec::with_capacity(n_layer + 1);
        for (i, layer) in layers.iter().enumerate() {
            let (args, next) = layer_args(cache, i, layer, words, first, n_blocks);
            of_layers.push(args);
            first = next;
        }
        let mut last = LayerArgs { n_steps: 1, ..LayerArgs::zeroed() };
        last.steps[0] = StepArgs {
            norm: output_norm.weight.ptr(),
            bias: output_bias.as_ref().map_or(0, CudaBuffer::ptr),
            eps: output_norm.eps,
            ..step_args(Kind::Head, words.of(Kind::Head), first, &head, n_blocks)
        };
        let kernel = match (head_dim, shard.is_some()) {
            (..=64, false) if memory.has_small_steps => "decode_small_64",
            (..=128, false) if n_expert > 0 => "decode_experts_128",
            (129.., false) if n_expert > 0 => "decode_experts_256",
            (..=64, false) => "decode_64",
            (65..=128, false) => "decode_128",
            (129.., false) => "decode_256",
            (..=128, true) if n_expert > 0 => "decode_experts_on_cards_128",
            (..=128, true) => "decode_on_cards_128",
            (129.., true) => return Ok(None),
        };
        let kernel = gpu.kernel(kernel)?;
        of_layers.push(last);
        let of_layers = gpu.upload("layers", &of_layers)?;
        let of_step = |i: usize, kind, matrices| parts_args(i, (kind, matrices), n_blocks, memory.slot_bytes);
        let parts_of_all: Vec<_> = layers
            .iter()
            .enumerate()
            .flat_map(|(i, layer)| layer.steps.iter().flat_map(move |(kind, matrices)| of_step(i, *kind, matrices)))
            .chain(of_step(n_layer, Kind::Head, &head))
            .collect();
        let parts = gpu.upload("layers", &parts_of_all)?;
        let bytes_of_all: usize =
            layers.iter().flat_map(PlainLayer::matrices).chain(&head).map(StepMatrix::bytes).sum();
        let args = DecodeArgs {
            layers: of_layers.ptr(),
            parts: parts.ptr(),
            table: weights.embedding.table.args(0),
            token: s.tokens.ptr(),
            logits: 0,
            ids: ids.ptr(),
            best: best.ptr(),
            qkv,
            att,
            sums,
            n_layer: n_layer as u32,
            n_embd: n_embd as u32,
            n_parts: parts_of_all.len() as u32,
            // Words that nobody has written have tag 0.
            tag: 2,
            advance: 0,
            slot_bytes: memory.slot_bytes as u32,
            n_slots: memory.n_slots as u32,
            region_floats: memory.region_floats as u32,
            att_words: (of_att / 8) as u32,
            sums_words: (of_sums / 8) as u32,
            input_at: memory.input_at as u32,
            input_stride: memory.input_stride as u32,
            regions_at: memory.regions_at.map(|at| at as u32),
            residual_at: memory.residual_at as u32,
            parts_at: memory.parts_at as u32,
            spans_at: memory.spans_at as u32,
            heads_at: memory.heads_at as u32,
            choice_at: memory.choice_at as u32,
            barriers_at: memory.barriers_at as u32,
            embedding_scale: spec.embedding.scale,
            logit_scale: of_logits.scale,
            logit_cap: of_logits.soft_cap.unwrap_or(0.0),
            n_tokens: 1,
            number: 0,
            split_gain: if memory.has_small_steps { SMALL_SPLIT_GAIN } else { SPLIT_GAIN },
            slots_at_once: slots_at_once(summary, n_expert > 0),
            unused: 0,
        };
        Ok(Some(Self {
            kernel,
            grid: LaunchGrid { blocks: [n_blocks, 1, 1], threads: THREADS, shared: memory.bytes },
            args,
            until,
            at_once: (LAUNCH_BYTES / bytes_of_all).clamp(1, MAX_TOKENS),
            logits: s.logits.ptr(),
            tags: 2 * n_layer as u32 + 2,
            _buffers: [of_layers, parts, exchange, best],
        }))
    }

    /// No more than `n`, 1 or more, do.
    pub(crate) fn limit(&mut self, n: usize) {
        self.at_once = self.at_once.min(n);
    }

    /// How many tokens, the first at position `pos` of its text, take one launch, each chosen by the one before; 0: it takes none.
    pub(crate) fn tokens_at_once(&self, pos: usize) -> usize {
        self.until.saturating_sub(pos).min(self.at_once)
    }

    /// Runs the token that the device has, and `n - 1` after it where it goes on with what it chooses; `number`: of the first one's step. Of a card that has
    /// a share of the model the others do the same, and `exchange` is what it has to do with them.
    pub(crate) fn launch(
        &mut self,
        gpu: &CudaDevice,
        exchange: Option<&Exchange>,
        wanted: TokenOutput,
        n: usize,
        number: u32,
    ) -> Result<(), CudaError> {
        let (logits, advance) = match wanted {
            TokenOutput::Logits | TokenOutput::TopK => (self.logits, false),
            TokenOutput::Id { advance } => (0, advance),
            TokenOutput::Hidden => return Err(CudaError::UnsupportedPart { part: "hidden states in one launch" }),
        };
        let args = DecodeArgs { logits, advance: u32::from(advance), n_tokens: n as u32, number, ..self.args };
        match exchange {
            None => gpu.launch(self.kernel, self.grid, &args, LaunchOrder::Cooperative)?,
            Some(exchange) => {
                let first_row = exchange.first_row() as u32;
                let args = DecodeOnCardsArgs { decode: args, exchange: exchange.args(), first_row, unused: 0 };
                gpu.launch(self.kernel, self.grid, &args, LaunchOrder::Cooperative)?;
            }
        }
        self.args.tag = (self.args.tag + n as u32 * self.tags) % TAGS;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fast_memory_and_experts_have_two_slots_on_their_way() {
        let card = |bandwidth: u64, n_sm| CudaSummary {
            ordinal: 0,
            name: String::new(),
            capability: (9, 0),
            memory: 80 << 30,
            bandwidth,
            n_sm,
            max_shared: 227 << 10,
            driver: 13000,
        };
        // What an H100 and an H200 say, a device that does not, and one with few multiprocessors.
        for (bandwidth, n_sm, wanted) in
            [(3_352_320_000_000, 132, 1), (4_916_736_000_000, 132, 2), (0, 132, 1), (4_022_784_000_000, 78, 2)]
        {
            let summary = card(bandwidth, n_sm);
            assert_eq!(
                (slots_at_once(&summary, false), slots_at_once(&summary, true)),
                (wanted, 2),
                "{bandwidth} {n_sm}"
            );
        }
    }
}
