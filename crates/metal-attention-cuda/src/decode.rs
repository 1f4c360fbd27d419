//! One token in one launch: which models `kernels/decode.cu` takes, and what it works with.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use metal_attention_model::{CacheType, ModelSpec, Residual};

use crate::CudaError;
use crate::activations::Activations;
use crate::args::{HeadArgs, MatrixArgs, PagesArgs};
use crate::device::{CudaBuffer, CudaDevice, Kernel};
use crate::kv_cache::CudaKvCache;
use crate::launch::{Grid, Start};
use crate::matrix::{CudaMatrix, Format, PANEL, TILE};
use crate::parts::AttentionKernels;
use crate::step::Wanted;
use crate::weights::{
    CudaAttention, CudaDense, CudaEmbedding, CudaFeedForward, CudaLayer, CudaLinear, CudaMixer, CudaNorm, CudaWeights,
};

/// Warps of a block, query heads of a unit of attention, matrices of a layer: as `decode.cu` has them.
const WARPS: usize = 8;
const GROUP: usize = 4;
/// Copies of what all blocks read.
const COPIES: usize = 4;
const MATRICES: usize = 7;
const STEPS: usize = 4;
/// Most splits of a token's positions.
const MAX_SPLITS: usize = 32;
/// Bytes of a warp's weights that are asked for at once, at least where there is room, and at most where records are smaller.
const SLOT: usize = 2304;
const MAX_PIECE: usize = 4736;
/// Slots of a warp beyond which nothing is gained, and below which too much is lost.
const MAX_SLOTS: usize = 16;
const MIN_SLOTS: usize = 2;
const GOOD_SLOTS: usize = 3;
/// Bytes of workgroup memory that the kernel has besides.
const STATIC_SHARED: usize = 4096;
/// Bytes of a panel's inputs of a warp, and of `Part` of `decode.cu`.
const PANEL_INPUTS: usize = 256;
const PART: usize = 32;
/// Columns from which on products, and not what is between them, take most of a token.
const WIDE: usize = 2048;
/// Tags that words of an exchange have.
const TAGS: u32 = 1 << 12;

/// A product of all rows of up to three matrices with one input.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct StepArgs {
    norm: u64,
    bias: u64,
    from: u64,
    to: u64,
    kind: u32,
    n_in: u32,
    eps: f32,
    reciprocal: f32,
    first_part: u32,
    n_parts: u32,
    n_rows: [u32; 3],
    tag_in: u32,
    tag_out: u32,
    has_codes: u32,
    copies: u32,
    n_out: u32,
    unit: u32,
    n_units: u32,
    log_split: u32,
    unused: u32,
}

/// A matrix of a product.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct PartArgs {
    records: u64,
    tile_bytes: u32,
    n_tiles: u32,
    first: u32,
    n_of_product: u32,
    record_bytes: u16,
    records_a_slot: u16,
    format: u16,
    log_split: u16,
    n_units: u16,
    records_a_unit: u16,
    unused: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct LayerArgs {
    steps: [StepArgs; STEPS],
    inputs: HeadArgs,
    pages: PagesArgs,
    k_cache: u64,
    v_cache: u64,
    sinks: u64,
    n_steps: u32,
    n_head: u32,
    n_kv_head: u32,
    head_dim: u32,
    mask: u32,
    reach: u32,
    activation: u32,
    soft_cap: f32,
    scale: f32,
    unused: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct DecodeArgs {
    layers: u64,
    parts: u64,
    table: MatrixArgs,
    token: u64,
    logits: u64,
    ids: u64,
    best: u64,
    n_done: u64,
    qkv: u64,
    att: u64,
    sums: u64,
    n_layer: u32,
    n_embd: u32,
    n_parts: u32,
    tag: u32,
    advance: u32,
    slot_bytes: u32,
    n_slots: u32,
    stride: u32,
    head_stride: u32,
    region_floats: u32,
    att_words: u32,
    sums_words: u32,
    input_at: u32,
    input_stride: u32,
    regions_at: [u32; 2],
    residual_at: u32,
    parts_at: u32,
    barriers_at: u32,
    embedding_scale: f32,
    logit_scale: f32,
    logit_cap: f32,
}

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
    /// there is the kernel, and where it would not be faster, unless it is `wanted` up to so many tokens of a text.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        spec: &ModelSpec,
        weights: &CudaWeights,
        cache: &CudaKvCache,
        s: &Activations,
        wanted: Option<usize>,
    ) -> Result<Option<Self>, CudaError> {
        let summary = gpu.summary();
        let (n_layer, n_embd, n_blocks) = (spec.n_layer(), spec.n_embd, summary.n_sm);
        let (Some((head, output_bias)), Some(of_logits)) = (&weights.output, &spec.output.head) else {
            return Ok(None);
        };
        let Some(layers) = weights.layers.iter().map(PlainLayer::of).collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let Some(output_norm) = weights.output_norm.as_deref().filter(|norm| norm.is_on_the_way()) else {
            return Ok(None);
        };
        let plain = is_plain(&weights.embedding) && known(head) && known(&weights.embedding.table);
        let short = cache.cache_type == CacheType::F16;
        if !summary.has_wide() || !plain || !short || n_layer == 0 || 2 * n_layer + 2 >= TAGS as usize / 2 {
            return Ok(None);
        }
        let gains = layers.iter().flat_map(PlainLayer::matrices).map(|matrix| gains_until(matrix.format, n_embd)).min();
        let until = wanted.unwrap_or(gains.unwrap_or(0));
        if until == 0 {
            return Ok(None);
        }
        let attentions = || layers.iter().map(|layer| layer.attention);
        let n_ff = layers.iter().map(|layer| layer.up().n_rows).max().unwrap_or(0);
        let room_of_heads = attentions().map(|a| 4 * ((GROUP + 5 + WARPS * GROUP) * a.head_dim + 2 * WARPS * GROUP));
        let steps =
            || layers.iter().flat_map(PlainLayer::steps).map(|(kind, matrices)| Shape::of(kind, &matrices, n_blocks));
        let of_head = Shape::of(Kind::Head, &[head], n_blocks);
        let input_stride = steps().chain([of_head]).map(Shape::panels_a_warp).max().unwrap_or(1) * PANEL_INPUTS;
        let input_bytes = (WARPS * input_stride).max(room_of_heads.max().unwrap_or(0)).next_multiple_of(16);
        // Sums of the warps, of steps by turns: those with queries and with the gate have another place than those between them, and the
        // head has all that is behind.
        let stride = steps().map(Shape::tiles_a_group).max().unwrap_or(1) * TILE;
        let head_stride = of_head.tiles_a_group() * TILE;
        let region = WARPS * stride;
        let regions_bytes = 4 * (region + (2 * region).max(WARPS * head_stride));
        let n_parts = MATRICES * n_layer + 1;
        let residual_bytes = n_embd.div_ceil(TILE).div_ceil(n_blocks) * TILE * 4;
        let parts_bytes = PART * n_parts;
        let rest = input_bytes + regions_bytes + residual_bytes + parts_bytes + 16 * WARPS * MAX_SLOTS;
        let matrices = || layers.iter().flat_map(PlainLayer::matrices);
        let largest = matrices().chain([&**head]).map(|m| m.format.record().bytes).max().unwrap_or(SLOT);
        // What a warp has of a tile of the widest matrices, at once, where there is room for some of these.
        let pieces = layers.iter().map(|layer| piece_bytes(layer, n_blocks)).max().unwrap_or(SLOT);
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

        let words = |n: usize| 8 * n.div_ceil(2).next_multiple_of(2) as u64;
        let heads = attentions().map(|a| a.n_head).max().unwrap_or(0);
        let words_of_att = words(MAX_SPLITS * attentions().map(|a| a.n_head * a.head_dim).max().unwrap_or(0));
        let words_of_sums = words(2 * MAX_SPLITS * heads);
        let sizes = [
            COPIES as u64 * words(n_embd),
            words(attentions().map(CudaAttention::stride).max().unwrap_or(0)),
            COPIES as u64 * words_of_att,
            COPIES as u64 * words_of_sums,
            COPIES as u64 * words(n_ff),
        ];
        let exchange = gpu.zeros("exchanges between blocks", sizes.iter().sum())?;
        let mut at = exchange.ptr();
        let [x, qkv, att, sums, gated] = sizes.map(|bytes| {
            at += bytes;
            at - bytes
        });
        let best = gpu.zeros("the highest logit", 16)?;
        let words = Words { x, qkv, att, gated };
        let mut of_layers: Vec<_> =
            layers.iter().enumerate().map(|(i, layer)| layer_args(cache, i, layer, words, n_blocks)).collect();
        of_layers.push(LayerArgs {
            steps: [
                StepArgs {
                    norm: output_norm.weight.ptr(),
                    bias: output_bias.as_ref().map_or(0, CudaBuffer::ptr),
                    eps: output_norm.eps,
                    ..step_args(Kind::Head, [x, 0], MATRICES * n_layer, &[head], n_blocks)
                },
                StepArgs::zeroed(),
                StepArgs::zeroed(),
                StepArgs::zeroed(),
            ],
            n_steps: 1,
            ..LayerArgs::zeroed()
        });
        let of_layers = gpu.upload("layers", &of_layers)?;
        let parts_of = |kind, matrices: &[&CudaMatrix]| {
            parts_args(kind, matrices, Shape::of(kind, matrices, n_blocks), slot_bytes)
        };
        let parts: Vec<_> = layers
            .iter()
            .flat_map(|layer| layer.steps().into_iter().flat_map(|(kind, matrices)| parts_of(kind, &matrices)))
            .chain(parts_of(Kind::Head, &[head]))
            .collect();
        let parts = gpu.upload("layers", &parts)?;
        let ring_bytes = n_slots * WARPS * slot_bytes;
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
            att_words: (words_of_att / 8) as u32,
            sums_words: (words_of_sums / 8) as u32,
            input_at: ring_bytes as u32,
            input_stride: input_stride as u32,
            regions_at: [ring_bytes + input_bytes + 4 * region, ring_bytes + input_bytes].map(|at| at as u32),
            residual_at: (ring_bytes + input_bytes + regions_bytes) as u32,
            parts_at: (ring_bytes + input_bytes + regions_bytes + residual_bytes) as u32,
            barriers_at: (ring_bytes + input_bytes + regions_bytes + residual_bytes + parts_bytes) as u32,
            embedding_scale: spec.embedding.scale,
            logit_scale: of_logits.scale,
            logit_cap: of_logits.soft_cap.unwrap_or(0.0),
        };
        let kernel = gpu.kernel(match attentions().map(|a| a.head_dim).max().unwrap_or(0) {
            ..=64 => "decode_64",
            65..=128 => "decode_128",
            129.. => "decode_256",
        })?;
        let grid = Grid { blocks: [n_blocks, 1, 1], threads: 32 * (WARPS + 4), shared: rest + ring_bytes };
        Ok(Some(Self {
            kernel,
            grid,
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

/// A layer that the kernel takes: attention and a gated feed-forward behind `RMSNorm`s, and nothing besides.
#[derive(Debug, Clone, Copy)]
struct PlainLayer<'a> {
    mixer_norm: &'a CudaNorm,
    attention: &'a CudaAttention,
    qkv: [&'a CudaMatrix; 3],
    norm: &'a CudaNorm,
    dense: &'a CudaDense,
    gate: &'a CudaMatrix,
    scale: f32,
}

impl<'a> PlainLayer<'a> {
    fn of(layer: &'a CudaLayer) -> Option<Self> {
        let CudaLayer {
            mixer_norm,
            mixer,
            mixer_post_norm,
            feed_forward_norm,
            feed_forward,
            feed_forward_post_norm,
            residual,
            sum_norms,
            own_embedding,
            streams,
            output_scale,
        } = layer;
        let CudaMixer::Attention(attention) = mixer else { return None };
        let CudaFeedForward::Dense(dense) = feed_forward else { return None };
        let scale = match *residual {
            Residual::Sequential { scale } => scale,
            Residual::Parallel | Residual::PostNorm { .. } => return None,
        };
        let results = mixer_post_norm.is_some() || feed_forward_post_norm.is_some() || sum_norms.is_some();
        let more = own_embedding.is_some() || streams.is_some() || *output_scale != 1.0;
        let paged = attention.kernels == AttentionKernels::Paged && attention.inputs_apart.is_none();
        let [q, k, v] = &attention.qkv[..] else { return None };
        let on_the_way = |norm: &'a Option<CudaNorm>| norm.as_ref().filter(|norm| norm.is_on_the_way());
        let layer = Self {
            mixer_norm: on_the_way(mixer_norm)?,
            attention,
            qkv: [q, k, v],
            norm: on_the_way(feed_forward_norm)?,
            dense,
            gate: dense.gate.as_ref()?,
            scale,
        };
        // Inputs of products that go together are made for one kind of codes.
        let alike = |of: &[&CudaMatrix]| of.iter().all(|m| m.format.has_codes() == of[0].format.has_codes());
        let matrices = layer.matrices();
        let fits = alike(&matrices[..3]) && alike(&matrices[4..6]) && matrices.iter().all(|m| known(m));
        (!results && !more && paged && dense.on_the_way && fits).then_some(layer)
    }

    fn out(&self) -> &'a CudaLinear {
        &self.attention.out
    }

    fn up(&self) -> &'a CudaMatrix {
        &self.dense.up
    }

    fn down(&self) -> &'a CudaLinear {
        &self.dense.down
    }

    /// Its matrices, in the kernel's order.
    fn matrices(&self) -> [&'a CudaMatrix; MATRICES] {
        let [q, k, v] = self.qkv;
        [q, k, v, &self.out().weight, self.gate, self.up(), &self.down().weight]
    }

    /// The matrices of its steps.
    fn steps(&self) -> Vec<(Kind, Vec<&'a CudaMatrix>)> {
        let m = self.matrices();
        let of = |kind, matrices: &[&'a CudaMatrix]| (kind, matrices.to_vec());
        vec![
            of(Kind::Qkv, &m[..3]),
            of(Kind::AttentionOutput, &m[3..4]),
            of(Kind::GateAndUp, &m[4..6]),
            of(Kind::Down, &m[6..]),
        ]
    }
}

/// Whether tokens become rows of a table and nothing besides.
fn is_plain(embedding: &CudaEmbedding) -> bool {
    let CudaEmbedding { table: _, token_type, positions, norm, per_layer, streams } = embedding;
    let nothing = token_type.is_none() && positions.is_none() && norm.is_none();
    nothing && per_layer.is_none() && streams.is_none()
}

/// Whether the kernel knows a matrix's format and its rows.
fn known(matrix: &CudaMatrix) -> bool {
    let format = match matrix.format {
        Format::Q4_0 | Format::Q4K | Format::Q5K | Format::Q6K | Format::F16 | Format::F32 | Format::Q8_0 => true,
        Format::Codes | Format::CodesAndMins => false,
    };
    format && matrix.n_in.is_multiple_of(4)
}

/// Tokens of a text up to which one launch is faster where matrices have a format, by what was measured up to 4096 (docs/cuda.md):
/// attention takes longer here the more there are, the products less.
fn gains_until(format: Format, n_embd: usize) -> usize {
    let of_format = match format {
        Format::Q4K | Format::Q5K | Format::Q6K => 8192,
        Format::Q4_0 => 6144,
        Format::Q8_0 | Format::F16 | Format::F32 => 4608,
        Format::Codes | Format::CodesAndMins => 0,
    };
    if n_embd < WIDE { of_format.min(512) } else { of_format }
}

/// How the products of a step are shared out in a block: the columns of a tile of rows among some of the warps, tiles by turns among
/// groups of so many.
#[derive(Debug, Clone, Copy)]
struct Shape {
    /// Panels that stay together.
    unit: usize,
    n_units: usize,
    log_split: u32,
    /// Most tiles that a block has of a matrix, or of the matrices one below the other.
    n_tiles: usize,
}

impl Shape {
    /// Of `matrices` on `n_blocks` blocks: so that the warp with the most has as little as may be, and a tile as many warps as may be.
    fn of(kind: Kind, matrices: &[&CudaMatrix], n_blocks: usize) -> Self {
        let panels_of = |m: &&CudaMatrix| m.format.record().panels;
        let unit = matrices.iter().map(panels_of).max().unwrap_or(1);
        let n_units = matrices[0].n_in.div_ceil(PANEL).div_ceil(unit);
        let n_tiles = n_of_product(kind, matrices).div_ceil(n_blocks);
        let of_warp = |log_split: u32| n_tiles.div_ceil(WARPS >> log_split) * n_units.div_ceil(1 << log_split);
        let log_split = (0..=WARPS.ilog2()).rev().min_by_key(|&log_split| of_warp(log_split)).unwrap_or(0);
        Self { unit, n_units, log_split, n_tiles }
    }

    /// Most panels of a row that a warp has.
    fn panels_a_warp(self) -> usize {
        self.n_units.div_ceil(1 << self.log_split) * self.unit
    }

    /// Most tiles that a warp has.
    fn tiles_a_group(self) -> usize {
        self.n_tiles.div_ceil(WARPS >> self.log_split).max(1)
    }
}

/// Bytes that a warp has of a tile of a layer's gate, as far as it asks for them at once.
fn piece_bytes(layer: &PlainLayer<'_>, n_blocks: usize) -> usize {
    let record = layer.gate.format.record();
    let records = Shape::of(Kind::GateAndUp, &[layer.gate, layer.up()], n_blocks).panels_a_warp() / record.panels;
    record.bytes * records.min((MAX_PIECE / record.bytes).max(1))
}

/// Tiles of rows that are shared out among blocks together.
fn n_of_product(kind: Kind, matrices: &[&CudaMatrix]) -> usize {
    match kind {
        Kind::Qkv => matrices.iter().map(|m| m.n_tiles()).sum(),
        Kind::AttentionOutput | Kind::GateAndUp | Kind::Down | Kind::Head => matrices[0].n_tiles(),
    }
}

fn parts_args(kind: Kind, matrices: &[&CudaMatrix], shape: Shape, slot_bytes: usize) -> Vec<PartArgs> {
    let mut above = 0;
    let part = |matrix: &&CudaMatrix| {
        let record = matrix.format.record();
        let first = above;
        if matches!(kind, Kind::Qkv) {
            above += matrix.n_tiles();
        }
        PartArgs {
            records: matrix.args(0).records,
            tile_bytes: matrix.tile_bytes() as u32,
            n_tiles: matrix.n_tiles() as u32,
            first: first as u32,
            n_of_product: n_of_product(kind, matrices) as u32,
            record_bytes: record.bytes as u16,
            records_a_slot: (slot_bytes / record.bytes) as u16,
            format: matrix.format as u16,
            log_split: shape.log_split as u16,
            n_units: shape.n_units as u16,
            records_a_unit: (shape.unit / record.panels) as u16,
            unused: 0,
        }
    };
    matrices.iter().map(part).collect()
}

/// What a step is, as `Kind` of `decode.cu`.
#[derive(Debug, Clone, Copy)]
#[repr(u32)]
enum Kind {
    Qkv = 0,
    AttentionOutput = 1,
    GateAndUp = 2,
    Down = 3,
    Head = 4,
}

impl Kind {
    /// Tags of the words that a step reads and writes, beyond its layer's: the residual stream is written twice in a layer, and the
    /// next layer's tags are two more.
    fn tags(self) -> [u32; 2] {
        match self {
            Self::Qkv | Self::Head => [TAGS - 1, 0],
            Self::AttentionOutput | Self::GateAndUp => [0, 0],
            Self::Down => [0, 1],
        }
    }

    /// Copies of its results: queries, keys and values are read by few blocks.
    fn copies(self) -> usize {
        match self {
            Self::Qkv | Self::Head => 1,
            Self::AttentionOutput | Self::GateAndUp | Self::Down => COPIES,
        }
    }
}

/// A step without a norm and a bias, from which and to which words.
fn step_args(
    kind: Kind,
    [from, to]: [u64; 2],
    first_part: usize,
    matrices: &[&CudaMatrix],
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
        first_part: first_part as u32,
        n_parts: matrices.len() as u32,
        n_rows,
        tag_in,
        tag_out,
        has_codes: u32::from(matrices[0].format.has_codes()),
        copies: kind.copies() as u32,
        n_out: matrices[0].n_rows as u32,
        unit: shape.unit as u32,
        n_units: shape.n_units as u32,
        log_split: shape.log_split,
        unused: 0,
    }
}

/// Where the words of exchanges lie.
#[derive(Debug, Clone, Copy)]
struct Words {
    x: u64,
    qkv: u64,
    att: u64,
    gated: u64,
}

fn layer_args(cache: &CudaKvCache, i: usize, layer: &PlainLayer<'_>, words: Words, n_blocks: usize) -> LayerArgs {
    let ptr = |buffer: &Option<CudaBuffer>| buffer.as_ref().map_or(0, CudaBuffer::ptr);
    let a = layer.attention;
    let [k_cache, v_cache] = cache.of_layer(i);
    let (m, first) = (layer.matrices(), MATRICES * i);
    LayerArgs {
        steps: [
            StepArgs {
                norm: layer.mixer_norm.weight.ptr(),
                bias: ptr(&a.qkv_bias),
                eps: layer.mixer_norm.eps,
                ..step_args(Kind::Qkv, [words.x, words.qkv], first, &m[..3], n_blocks)
            },
            StepArgs {
                bias: layer.out().bias(),
                ..step_args(Kind::AttentionOutput, [words.att, words.x], first + 3, &m[3..4], n_blocks)
            },
            StepArgs {
                norm: layer.norm.weight.ptr(),
                eps: layer.norm.eps,
                ..step_args(Kind::GateAndUp, [words.x, words.gated], first + 4, &m[4..6], n_blocks)
            },
            StepArgs {
                bias: layer.down().bias(),
                ..step_args(Kind::Down, [words.gated, words.x], first + 6, &m[6..], n_blocks)
            },
        ],
        inputs: a.inputs,
        pages: cache.pages_of_layer(i),
        k_cache,
        v_cache,
        sinks: ptr(&a.sinks),
        n_steps: STEPS as u32,
        n_head: a.n_head as u32,
        n_kv_head: a.n_kv_head as u32,
        head_dim: a.head_dim as u32,
        mask: a.mask,
        reach: a.reach,
        activation: layer.dense.activation.0,
        soft_cap: a.soft_cap,
        scale: layer.scale,
        unused: 0,
    }
}
