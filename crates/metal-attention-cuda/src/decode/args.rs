//! What `kernels/decode.cu` reads: layers, their steps and matrices, and how these are shared out.

use bytemuck::{Pod, Zeroable};

use super::layers::{PlainLayer, StepMatrix};
use crate::args::{ExchangeArgs, HeadArgs, MatrixArgs, PagesArgs, RouteArgs};
use crate::device::CudaBuffer;
use crate::kv_cache::CudaKvCache;
use crate::matrix::{PANEL, TILE, WeightLayout};
use crate::runner::route_args;
use crate::stack::CudaStack;

/// Warps of a block, steps of a layer at most: as `decode.cu` has them.
pub(super) const WARPS: usize = 8;
pub(super) const STEPS: usize = 5;
/// Query heads of a unit of attention: as `decode.cu` has them.
pub(super) const GROUP: usize = 4;
/// Copies of what all blocks read.
pub(super) const COPIES: usize = 4;
/// Tiles of the head that a warp has sums of at once: as `decode.cuh` has them.
pub(super) const HEAD_TILES: usize = 8;
/// Floats of a row's sums: as `decode_products.cuh` has them.
pub(super) const SUMS_STRIDE: usize = WARPS + 4;
/// Panels that a warp takes to registers before the inputs of a step are there, and floats of the sums of such a step.
const READY: usize = 4;
pub(super) const READY_FLOATS: usize = 2 * TILE * SUMS_STRIDE;
/// Rows of the output head at most: the words by which blocks tell their highest logits have room for so many.
pub(super) const MAX_VOCAB: usize = 1 << 20;
/// Tags that words of an exchange have.
pub(super) const TAGS: u32 = 1 << 12;

/// A product of all rows of up to three matrices with one input.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(super) struct StepArgs {
    pub(super) norm: u64,
    pub(super) bias: u64,
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) kind: u32,
    pub(super) n_in: u32,
    pub(super) eps: f32,
    pub(super) reciprocal: f32,
    pub(super) first_part: u32,
    pub(super) n_parts: u32,
    pub(super) n_rows: [u32; 3],
    pub(super) tag_in: u32,
    pub(super) tag_out: u32,
    pub(super) has_codes: u16,
    pub(super) has_offsets: u16,
    pub(super) copies: u32,
    pub(super) n_out: u32,
    pub(super) unit: u32,
    pub(super) n_units: u32,
    pub(super) log_split: u16,
    pub(super) region: u16,
    pub(super) has_halves: u16,
    pub(super) ready_tiles: u16,
}

/// A matrix of a product.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(super) struct PartArgs {
    pub(super) records: u64,
    pub(super) tile_bytes: u32,
    pub(super) n_tiles: u32,
    pub(super) first: u32,
    pub(super) n_of_product: u32,
    pub(super) record_bytes: u16,
    pub(super) records_a_slot: u16,
    pub(super) format: u16,
    pub(super) log_split: u16,
    pub(super) n_units: u16,
    pub(super) records_a_unit: u16,
    pub(super) n_layers: u32,
    pub(super) expert_bytes: u32,
    pub(super) tiles_of_expert: u32,
    pub(super) records_of_expert: u32,
    pub(super) first_block: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(super) struct LayerArgs {
    pub(super) steps: [StepArgs; STEPS],
    pub(super) inputs: HeadArgs,
    pub(super) pages: PagesArgs,
    pub(super) k_cache: u64,
    pub(super) v_cache: u64,
    pub(super) sinks: u64,
    pub(super) n_steps: u32,
    pub(super) n_head: u32,
    pub(super) n_kv_head: u32,
    pub(super) head_dim: u32,
    pub(super) mask: u32,
    pub(super) reach: u32,
    pub(super) activation: u32,
    pub(super) soft_cap: f32,
    pub(super) scale: f32,
    pub(super) heads_a_kv_head: u32,
    pub(super) chunks_a_kv_head: u32,
    pub(super) units_a_split: u32,
    pub(super) reciprocal_of_dim: u32,
    pub(super) activation_limit: f32,
    pub(super) expert_bias: [u64; 3],
    pub(super) route: RouteArgs,
}

// Blocks copy layers by 16 bytes.
const _: () = assert!(size_of::<LayerArgs>().is_multiple_of(16));

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(super) struct DecodeArgs {
    pub(super) layers: u64,
    pub(super) parts: u64,
    pub(super) table: MatrixArgs,
    pub(super) token: u64,
    pub(super) logits: u64,
    pub(super) ids: u64,
    pub(super) best: u64,
    pub(super) qkv: u64,
    pub(super) att: u64,
    pub(super) sums: u64,
    pub(super) n_layer: u32,
    pub(super) n_embd: u32,
    pub(super) n_parts: u32,
    pub(super) tag: u32,
    pub(super) advance: u32,
    pub(super) slot_bytes: u32,
    pub(super) n_slots: u32,
    pub(super) region_floats: u32,
    pub(super) att_words: u32,
    pub(super) sums_words: u32,
    pub(super) input_at: u32,
    pub(super) input_stride: u32,
    pub(super) regions_at: [u32; 2],
    pub(super) residual_at: u32,
    pub(super) parts_at: u32,
    pub(super) spans_at: u32,
    pub(super) heads_at: u32,
    pub(super) barriers_at: u32,
    pub(super) choice_at: u32,
    pub(super) embedding_scale: f32,
    pub(super) logit_scale: f32,
    pub(super) logit_cap: f32,
    pub(super) n_tokens: u32,
    pub(super) number: u32,
    pub(super) split_gain: f32,
    pub(super) slots_at_once: u32,
    pub(super) unused: u32,
}

/// The same for a card that shares the model with others: `DecodeOnCardsArgs` of `decode_on_cards.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(super) struct DecodeOnCardsArgs {
    pub(super) decode: DecodeArgs,
    pub(super) exchange: ExchangeArgs,
    pub(super) first_row: u32,
    pub(super) unused: u32,
}

/// How the products of a step are shared out in a block: the columns of a tile of rows among some of the warps, tiles by turns among
/// groups of so many.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    /// Panels that stay together.
    unit: usize,
    n_units: usize,
    log_split: u32,
    /// Most tiles that a block has of a matrix, or of the matrices one below the other.
    n_tiles: usize,
    /// Whether these are of codes, or of floats.
    has_codes: bool,
}

impl Shape {
    /// Of `matrices` on `n_blocks` blocks: so that the warp with the most has as little as may be, and a tile as many warps as may be.
    pub(super) fn of(kind: Kind, matrices: &[StepMatrix], n_blocks: usize) -> Self {
        let panels_of = |m: &StepMatrix| m.format.record().panels;
        let unit = matrices.iter().map(panels_of).max().unwrap_or(1);
        let n_units = matrices[0].n_in.div_ceil(PANEL).div_ceil(unit);
        let n_tiles = n_of_product(kind, matrices).div_ceil(n_blocks);
        let of_warp = |log_split: u32| n_tiles.div_ceil(WARPS >> log_split) * n_units.div_ceil(1 << log_split);
        let log_split = (0..=WARPS.ilog2()).rev().min_by_key(|&log_split| of_warp(log_split)).unwrap_or(0);
        Self { unit, n_units, log_split, n_tiles, has_codes: matrices[0].format.has_codes() }
    }

    /// Most panels of a row that a warp has.
    pub(super) fn panels_a_warp(self) -> usize {
        self.n_units.div_ceil(1 << self.log_split) * self.unit
    }

    /// How many tiles a block has at most, where warps can take what they have of these to registers before the inputs are there; else 0.
    pub(super) fn ready_tiles(self, kind: Kind, matrices: &[StepMatrix]) -> usize {
        let tiles = match kind {
            Kind::Qkv | Kind::AttentionOutput | Kind::Down => self.n_tiles,
            Kind::GateAndUp => 2 * self.n_tiles,
            Kind::Router | Kind::Head => return 0,
        };
        let of_all_warps = 1 << self.log_split == WARPS;
        let plain = matrices.iter().all(|m| m.experts.is_none());
        let fits = self.has_codes && of_all_warps && plain && tiles <= 2 && tiles * self.panels_a_warp() <= READY;
        if fits { tiles } else { 0 }
    }

    /// Bytes of a warp's inputs at most: digits, sums and factors (`CodeInput` of `code_products.cuh`), or floats.
    pub(super) fn input_bytes(self) -> usize {
        self.panels_a_warp() * if self.has_codes { 216 } else { 256 }
    }

    /// Rows of a block that there are sums of at once, at most.
    pub(super) fn rows_at_once(self, kind: Kind) -> usize {
        let tiles = match kind {
            Kind::Head => self.n_tiles.min(HEAD_TILES * (WARPS >> self.log_split)),
            Kind::Qkv | Kind::AttentionOutput | Kind::Router | Kind::GateAndUp | Kind::Down => self.n_tiles,
        };
        tiles * TILE
    }
}

/// Records of a format that a slot of so many bytes has: where these are single panels four at a time, as they are multiplied.
pub(super) fn records_a_slot(format: WeightLayout, slot_bytes: usize) -> usize {
    let record = format.record();
    match slot_bytes / record.bytes {
        n @ 4.. if record.panels == 1 => n / 4 * 4,
        n => n,
    }
}

/// Tiles of rows that are shared out among blocks together.
fn n_of_product(kind: Kind, matrices: &[StepMatrix]) -> usize {
    match kind {
        Kind::Qkv => matrices.iter().map(StepMatrix::n_tiles).sum(),
        Kind::AttentionOutput | Kind::Router | Kind::GateAndUp | Kind::Down | Kind::Head => matrices[0].n_tiles(),
    }
}

/// The first block that has tiles of a step with fewer of them than blocks: a block that has rows of the residual stream has, where that can be,
/// nothing of the other steps, whose weights it would take too late; and attention begins with the first blocks.
fn first_block(kind: Kind, matrices: &[StepMatrix], n_blocks: usize) -> usize {
    let n_tiles = n_of_product(kind, matrices);
    match kind {
        Kind::AttentionOutput | Kind::Down => n_blocks.saturating_sub(n_tiles),
        Kind::Qkv => n_blocks.saturating_sub(matrices[0].n_in.div_ceil(TILE) + n_tiles),
        Kind::Router | Kind::GateAndUp | Kind::Head => 0,
    }
}

/// What the matrices of a step of layer `i` are.
pub(super) fn parts_args(
    i: usize,
    (kind, matrices): (Kind, &[StepMatrix]),
    n_blocks: usize,
    slot_bytes: usize,
) -> Vec<PartArgs> {
    let shape = Shape::of(kind, matrices, n_blocks);
    let mut above = 0;
    let part = |matrix: &StepMatrix| {
        let record = matrix.format.record();
        let first = above;
        if matches!(kind, Kind::Qkv) {
            above += matrix.n_tiles();
        }
        let [expert_bytes, tiles_of_expert, records_of_expert] =
            matrix.experts.map_or([0; 3], |of| [of.bytes, of.tiles, of.records].map(|n| n as u32));
        PartArgs {
            records: matrix.records,
            tile_bytes: matrix.tile_bytes as u32,
            n_tiles: matrix.n_tiles() as u32,
            first: first as u32,
            n_of_product: n_of_product(kind, matrices) as u32,
            record_bytes: record.bytes as u16,
            records_a_slot: records_a_slot(matrix.format, slot_bytes) as u16,
            format: matrix.format as u16,
            log_split: shape.log_split as u16,
            n_units: shape.n_units as u16,
            records_a_unit: (shape.unit / record.panels) as u16,
            n_layers: matrix.experts.map_or(0, |_| i as u32 + 1),
            expert_bytes,
            tiles_of_expert,
            records_of_expert,
            first_block: first_block(kind, matrices, n_blocks) as u32,
        }
    };
    matrices.iter().map(part).collect()
}

/// What a step is, as `Kind` of `decode.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Kind {
    Qkv = 0,
    AttentionOutput = 1,
    GateAndUp = 2,
    Down = 3,
    Head = 4,
    Router = 5,
}

impl Kind {
    /// Tags of the words that a step reads and writes, beyond its layer's: the residual stream is written twice in a layer, and the
    /// next layer's tags are two more.
    fn tags(self) -> [u32; 2] {
        match self {
            Self::Qkv | Self::Head => [TAGS - 1, 0],
            Self::AttentionOutput | Self::Router | Self::GateAndUp => [0, 0],
            Self::Down => [0, 1],
        }
    }

    /// Copies of its results: queries, keys and values are read by few blocks.
    fn copies(self) -> usize {
        match self {
            Self::Qkv | Self::Head => 1,
            Self::AttentionOutput | Self::Router | Self::GateAndUp | Self::Down => COPIES,
        }
    }
}

/// Which of a token's steps and matrices are a step's first.
#[derive(Debug, Clone, Copy)]
pub(super) struct First {
    pub(super) step: usize,
    pub(super) part: usize,
}

/// A step without a norm and a bias, from which and to which words, on so many blocks.
pub(super) fn step_args(
    kind: Kind,
    [from, to]: [u64; 2],
    first: First,
    matrices: &[StepMatrix],
    n_blocks: usize,
) -> StepArgs {
    let shape = Shape::of(kind, matrices, n_blocks);
    let mut n_rows = [0; 3];
    for (to, matrix) in n_rows.iter_mut().zip(matrices) {
        *to = matrix.n_rows as u32;
    }
    let [tag_in, tag_out] = kind.tags();
    StepArgs {
        norm: 0,
        bias: 0,
        from,
        to,
        kind: kind as u32,
        n_in: matrices[0].n_in as u32,
        eps: 0.0,
        reciprocal: 1.0 / matrices[0].n_in as f32,
        first_part: first.part as u32,
        n_parts: matrices.len() as u32,
        n_rows,
        tag_in,
        tag_out,
        has_codes: u16::from(shape.has_codes),
        has_offsets: u16::from(matrices.iter().any(|m| m.format.has_offsets())),
        copies: kind.copies() as u32,
        n_out: matrices[0].n_rows as u32,
        unit: shape.unit as u32,
        n_units: shape.n_units as u32,
        log_split: shape.log_split as u16,
        region: (first.step % 2) as u16,
        has_halves: u16::from(matrices.iter().any(|m| m.format.has_halves())),
        ready_tiles: shape.ready_tiles(kind, matrices) as u16,
    }
}

/// Where the words of exchanges lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct Words {
    pub(super) x: u64,
    pub(super) qkv: u64,
    pub(super) att: u64,
    pub(super) router: u64,
    pub(super) gated: u64,
}

impl Words {
    /// What a step reads and writes.
    pub(super) fn of(self, kind: Kind) -> [u64; 2] {
        match kind {
            Kind::Qkv => [self.x, self.qkv],
            Kind::AttentionOutput => [self.att, self.x],
            Kind::Router => [self.x, self.router],
            Kind::GateAndUp => [self.x, self.gated],
            Kind::Down => [self.gated, self.x],
            Kind::Head => [self.x, 0],
        }
    }
}

/// Layer `i`, and which steps and matrices come after it.
pub(super) fn layer_args(
    cache: &CudaKvCache,
    i: usize,
    layer: &PlainLayer<'_>,
    words: Words,
    mut first: First,
    n_blocks: usize,
) -> (LayerArgs, First) {
    let a = layer.attention;
    let [k_cache, v_cache] = cache.layer_addresses(i);
    let (activation, activation_limit) = layer.activation();
    let heads = a.n_head / a.n_kv_head;
    let chunks = heads.div_ceil(GROUP);
    let mut steps = [StepArgs::zeroed(); STEPS];
    for (to, (kind, matrices)) in steps.iter_mut().zip(&layer.steps) {
        let norm = match kind {
            Kind::Qkv => Some(layer.mixer_norm),
            Kind::Router | Kind::GateAndUp => Some(layer.norm),
            Kind::AttentionOutput | Kind::Down | Kind::Head => None,
        };
        *to = StepArgs {
            norm: norm.map_or(0, |norm| norm.weight.ptr()),
            bias: layer.bias(*kind),
            eps: norm.map_or(0.0, |norm| norm.eps),
            ..step_args(*kind, words.of(*kind), first, matrices, n_blocks)
        };
        first = First { step: first.step + 1, part: first.part + matrices.len() };
    }
    let args = LayerArgs {
        steps,
        inputs: a.inputs,
        pages: cache.page_table_of_layer(i),
        k_cache,
        v_cache,
        sinks: a.sinks.as_ref().map_or(0, CudaBuffer::ptr),
        n_steps: layer.steps.len() as u32,
        n_head: a.n_head as u32,
        n_kv_head: a.n_kv_head as u32,
        head_dim: a.head_dim as u32,
        mask: a.mask,
        reach: a.reach,
        activation,
        soft_cap: a.soft_cap,
        scale: layer.scale,
        heads_a_kv_head: heads as u32,
        chunks_a_kv_head: chunks as u32,
        units_a_split: (a.n_kv_head * chunks) as u32,
        reciprocal_of_dim: ((1u64 << 32) / a.head_dim as u64 + 1) as u32,
        activation_limit,
        expert_bias: layer.experts().map_or([0; 3], |experts| {
            [experts.gate.as_ref(), Some(&experts.up), Some(&experts.down)].map(|of| of.map_or(0, CudaStack::bias))
        }),
        route: layer.experts().map_or(RouteArgs::zeroed(), |experts| route_args(experts, 0, [0; 3])),
    };
    (args, first)
}
