//! One token in one launch: which models `kernels/decode.cu` takes, and what it works with.

mod args;
mod layers;

use std::sync::Arc;

use bytemuck::Zeroable;
use metal_attention_model::{CacheType, ModelSpec};

use crate::CudaError;
use crate::activations::Activations;
use crate::device::{CudaBuffer, CudaDevice, Kernel};
use crate::kv_cache::CudaKvCache;
use crate::launch::{Grid, Start};
use crate::matrix::TILE;
use crate::step::Wanted;
use crate::weights::{CudaAttention, CudaWeights};
use args::{
    COPIES, DecodeArgs, First, GROUP, Kind, LayerArgs, Shape, StepArgs, TAGS, WARPS, Words, layer_args, parts_args,
    piece_bytes, step_args,
};
use layers::{PlainLayer, StepMatrix, is_plain, known};

/// Most splits of a token's positions.
const MAX_SPLITS: usize = 32;
/// Bytes of a warp's weights that are asked for at once, at least where there is room.
const SLOT: usize = 2304;
/// Slots of a warp beyond which nothing is gained, and below which too much is lost.
const MAX_SLOTS: usize = 16;
const MIN_SLOTS: usize = 2;
const GOOD_SLOTS: usize = 3;
/// Bytes of workgroup memory that the kernel has besides.
const STATIC_SHARED: usize = 4096;
/// Bytes of `Part` and of `Span` of `decode.cu`.
const PART: usize = 32;
const SPAN: usize = 32;
/// Bytes of workgroup memory for each expert that are chosen among, as `Choice` of `routing.cuh` has them.
const BYTES_OF_CHOICE: usize = 14;
/// Threads of a block.
const THREADS: usize = 32 * (WARPS + 4);

/// The kernel, and what it works with.
#[derive(Debug)]
pub(crate) struct Decode {
    kernel: Kernel,
    grid: Grid,
    args: DecodeArgs,
    /// Tokens up to which a text takes it.
    until: usize,
    logits: u64,
    /// Tags of a token's exchanges.
    tags: u32,
    /// Layers and matrices as the kernel reads them, words of the exchanges, the highest logit.
    _buffers: [CudaBuffer; 4],
}

impl Decode {
    /// What a token of `spec` takes in one launch; `None` where it is none of the models, or the device none of those, for which
    /// there is the kernel. `wanted`: for so many first tokens of a text, instead of all.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        spec: &ModelSpec,
        weights: &CudaWeights,
        cache: &CudaKvCache,
        s: &Activations,
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
        let Some(output_norm) = weights.output_norm.as_deref().filter(|norm| norm.is_on_the_way()) else {
            return Ok(None);
        };
        let head = [StepMatrix::of(head)];
        let plain = is_plain(&weights.embedding) && known(&head[0]) && known(&StepMatrix::of(&weights.embedding.table));
        let short = cache.cache_type == CacheType::F16;
        if !summary.has_wide() || !plain || !short || n_layer == 0 || 2 * n_layer + 2 >= TAGS as usize / 2 {
            return Ok(None);
        }
        let until = wanted.unwrap_or(usize::MAX);
        if until == 0 {
            return Ok(None);
        }
        let attentions = || layers.iter().map(|layer| layer.attention);
        let head_dim = attentions().map(|a| a.head_dim).max().unwrap_or(0);
        let kernel = gpu.kernel(match head_dim {
            ..=64 => "decode_64",
            65..=128 => "decode_128",
            129.. => "decode_256",
        })?;

        let n_blocks = summary.n_sm;
        let all_steps = || layers.iter().flat_map(|layer| &layer.steps);
        // Most rows of a kind of steps.
        let most_rows = |wanted: Kind| {
            let of_kind = all_steps().filter(|(kind, _)| *kind == wanted);
            of_kind.map(|(_, matrices)| matrices[0].n_rows).max().unwrap_or(0)
        };
        let n_expert = most_rows(Kind::Router);
        let room_of_heads = attentions().map(|a| attention_bytes(a.head_dim));
        let steps = || all_steps().map(|(kind, matrices)| Shape::of(*kind, matrices, n_blocks));
        let of_head = Shape::of(Kind::Head, &head, n_blocks);
        let input_stride = steps().chain([of_head]).map(Shape::input_bytes).max().unwrap_or(0).next_multiple_of(16);
        let input_bytes = (WARPS * input_stride).max(room_of_heads.max().unwrap_or(0)).next_multiple_of(16);
        // Sums of the warps have one of two places, of steps by turns; the gate's lie beside those of up. The head has all that is behind.
        let stride = steps().map(Shape::tiles_a_group).max().unwrap_or(1) * TILE;
        let head_stride = of_head.tiles_a_group() * TILE;
        let region = WARPS * stride;
        let with_gate =
            |place: usize| all_steps().enumerate().any(|(i, (kind, _))| i % 2 == place && *kind == Kind::GateAndUp);
        let region_of = |place: usize| if with_gate(place) { 2 * region } else { region };
        let place_of_head = all_steps().count() % 2;
        let before_head = 4 * region_of(1 - place_of_head);
        let regions_bytes = before_head + 4 * region_of(place_of_head).max(WARPS * head_stride);
        let n_parts = layers.iter().flat_map(PlainLayer::matrices).count() + 1;
        let residual_bytes = n_embd.div_ceil(TILE).div_ceil(n_blocks) * TILE * 4;
        let parts_bytes = PART * n_parts;
        let spans_bytes = SPAN * n_layer;
        let heads_bytes = 12 * attentions().map(|a| a.head_dim).max().unwrap_or(0).next_multiple_of(4);

        // Words of the exchanges: the residual stream, queries, keys and values, attention, its sums, gated rows.
        let words = |n: usize| 8 * n.div_ceil(2).next_multiple_of(2);
        let heads = attentions().map(|a| a.n_head).max().unwrap_or(0);
        let of_att = words(MAX_SPLITS * attentions().map(|a| a.n_head * a.head_dim).max().unwrap_or(0));
        let of_sums = words(2 * MAX_SPLITS * heads);
        let sizes = [
            COPIES * words(n_embd),
            words(attentions().map(CudaAttention::stride).max().unwrap_or(0)),
            COPIES * of_att,
            COPIES * of_sums,
            COPIES * words(n_expert),
            COPIES * words(most_rows(Kind::GateAndUp)),
        ];

        let barriers_bytes = 16 * WARPS * MAX_SLOTS;
        let choice_bytes = (BYTES_OF_CHOICE * n_expert).next_multiple_of(16);
        let fixed = [
            input_bytes,
            regions_bytes,
            residual_bytes,
            parts_bytes,
            spans_bytes,
            heads_bytes,
            choice_bytes,
            barriers_bytes,
        ];
        let rest = fixed.iter().sum::<usize>();
        let matrices = || layers.iter().flat_map(PlainLayer::matrices);
        let largest = matrices().chain(&head).map(|m| m.format.record().bytes).max().unwrap_or(SLOT);
        // What a warp has of a tile of the widest matrices, at once, where there is room for some of these.
        let gates = all_steps().filter(|(kind, _)| *kind == Kind::GateAndUp);
        let pieces = gates.map(|(_, matrices)| piece_bytes(matrices, n_blocks)).max().unwrap_or(SLOT);
        let room = summary.max_shared.saturating_sub(STATIC_SHARED + rest);
        let slots_of = |slot_bytes: usize| (slot_bytes, (room / (WARPS * slot_bytes)).min(MAX_SLOTS));
        let small = largest.next_multiple_of(128);
        let (slot_bytes, n_slots) = match slots_of(small.max(SLOT).max(pieces.next_multiple_of(128))) {
            wide @ (_, GOOD_SLOTS..) => wide,
            _ => slots_of(small),
        };
        if n_slots < MIN_SLOTS {
            return Ok(None);
        }
        let ring_bytes = n_slots * WARPS * slot_bytes;

        let exchange = gpu.zeros("exchanges between blocks", sizes.iter().sum::<usize>() as u64)?;
        let mut at = exchange.ptr();
        let [x, qkv, att, sums, router, gated] = sizes.map(|bytes| {
            at += bytes as u64;
            at - bytes as u64
        });
        let best = gpu.zeros("the highest logit", 16)?;
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
        of_layers.push(last);
        let of_layers = gpu.upload("layers", &of_layers)?;
        let of_step = |i: usize, kind, matrices| parts_args(i, (kind, matrices), n_blocks, slot_bytes);
        let parts: Vec<_> = layers
            .iter()
            .enumerate()
            .flat_map(|(i, layer)| layer.steps.iter().flat_map(move |(kind, matrices)| of_step(i, *kind, matrices)))
            .chain(of_step(n_layer, Kind::Head, &head))
            .collect();
        let parts = gpu.upload("layers", &parts)?;
        let mut end = ring_bytes;
        let at = fixed.map(|bytes| {
            end += bytes;
            (end - bytes) as u32
        });
        let args = DecodeArgs {
            layers: of_layers.ptr(),
            parts: parts.ptr(),
            table: weights.embedding.table.args(0),
            token: s.tokens.ptr(),
            logits: 0,
            ids: s.ids.ptr(),
            best: best.ptr(),
            n_done: best.ptr() + 8,
            qkv,
            att,
            sums,
            n_layer: n_layer as u32,
            n_embd: n_embd as u32,
            n_parts: n_parts as u32,
            // Words that nobody has written have tag 0.
            tag: 2,
            advance: 0,
            slot_bytes: slot_bytes as u32,
            n_slots: n_slots as u32,
            stride: stride as u32,
            head_stride: head_stride as u32,
            region_floats: region as u32,
            att_words: (of_att / 8) as u32,
            sums_words: (of_sums / 8) as u32,
            input_at: at[0],
            input_stride: input_stride as u32,
            regions_at: std::array::from_fn(
                |place| if place == place_of_head { at[1] + before_head as u32 } else { at[1] },
            ),
            residual_at: at[2],
            parts_at: at[3],
            spans_at: at[4],
            heads_at: at[5],
            choice_at: at[6],
            barriers_at: at[7],
            embedding_scale: spec.embedding.scale,
            logit_scale: of_logits.scale,
            logit_cap: of_logits.soft_cap.unwrap_or(0.0),
            has_experts: u32::from(n_expert > 0),
        };
        Ok(Some(Self {
            kernel,
            grid: Grid { blocks: [n_blocks, 1, 1], threads: THREADS, shared: rest + ring_bytes },
            args,
            until,
            logits: s.logits.ptr(),
            tags: 2 * n_layer as u32 + 2,
            _buffers: [of_layers, parts, exchange, best],
        }))
    }

    /// Whether the token at position `pos` of its text takes it.
    pub(crate) fn takes(&self, pos: usize) -> bool {
        pos < self.until
    }

    /// Runs the token that the device has.
    pub(crate) fn launch(&mut self, gpu: &CudaDevice, wanted: Wanted) -> Result<(), CudaError> {
        let (logits, advance) = match wanted {
            Wanted::Logits | Wanted::TopK => (self.logits, false),
            Wanted::Id { advance } => (0, advance),
            Wanted::Hidden => return Err(CudaError::UnsupportedPart { part: "hidden states in one launch" }),
        };
        let args = DecodeArgs { logits, advance: u32::from(advance), ..self.args };
        gpu.launch(self.kernel, self.grid, &args, Start::Together)?;
        self.args.tag = (self.args.tag + self.tags) % TAGS;
        Ok(())
    }
}

/// Bytes of workgroup memory that attention takes: queries as halves, the token's own key and value, what becomes of values.
fn attention_bytes(head_dim: usize) -> usize {
    let padded = head_dim.next_multiple_of(64).next_power_of_two();
    let halves = 2 * GROUP * (padded + 8) + 2 * padded;
    let floats = GROUP + WARPS * GROUP * head_dim + 2 * WARPS * GROUP;
    2 * halves + 4 * floats
}
