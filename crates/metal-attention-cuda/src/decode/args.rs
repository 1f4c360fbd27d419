//! Makes the arguments of the persistent decode kernel (`crate::args`) from the layers of a model; and how the products of an op are divided
//! among blocks and warps. The terms op, tile, panel, record, unit, warp group, stage, word and tag are those of `kernels/decode.cuh`.

use bytemuck::Zeroable;

use super::layers::{DecodeLayer, OpMatrix};
use crate::args::{COPIES, LayerArgs, MAX_OPS, OpArgs, OpMatrixArgs, RouteArgs};
use crate::kv_cache::CudaKvCache;
use crate::matrix::{PANEL, TILE, WeightLayout};
use crate::parts::experts::route_args;
use crate::slice::{DevicePtr, DeviceSlice};
use crate::stack::CudaStack;
use crate::weights::ptr_or_null;

/// Consumer warps of a block: `CONSUMER_WARPS` of `decode.cuh`.
pub(super) const CONSUMER_WARPS: usize = 8;
/// Producer warps of a block: `PRODUCER_WARPS` of `decode.cuh`.
pub(super) const PRODUCER_WARPS: usize = 4;
/// Query heads of an attention task: `HEADS_PER_TASK` of `decode.cuh`.
pub(super) const HEADS_PER_TASK: usize = 4;
/// Tiles of the output head that a warp group multiplies in a round: `OUTPUT_HEAD_TILES_PER_ROUND` of `decode.cuh`.
pub(super) const OUTPUT_HEAD_TILES_PER_ROUND: usize = 8;
/// Floats from one row's partial sums to the next row's: `SUMS_STRIDE` of `decode_products.cuh`.
pub(super) const SUMS_STRIDE: usize = CONSUMER_WARPS + 4;
/// Panels that a warp can preload into registers: `PRELOAD_PANELS` of `decode_preload.cuh`.
const PRELOAD_PANELS: usize = 4;
/// Floats of the partial sums of a small op: two tiles.
pub(super) const SMALL_OP_FLOATS: usize = 2 * TILE * SUMS_STRIDE;
/// Tokens of a vocabulary at most: the word of a block's best logit has 20 bits for the row of the output head.
pub(super) const MAX_VOCAB: usize = 1 << 20;
/// Tags of words: 12 bits.
pub(super) const TAGS: u32 = 1 << 12;

/// The division of an op's products in a block: `1 << log_warps_per_tile` warps are a warp group and share the columns of a tile; the warp groups
/// take the block's tiles alternately.
#[derive(Debug, Clone, Copy)]
pub(super) struct WorkSplit {
    /// Panels of a unit: those of the largest record of the op, which no warp divides.
    panels_per_unit: usize,
    /// Units of a tile, rounded up.
    units_per_tile: usize,
    /// log2 of the warps of a warp group.
    log_warps_per_tile: u32,
    /// Most tiles that a block has: of q/k/v together, of other ops of one matrix.
    n_tiles: usize,
    /// Whether the matrices are quantised.
    has_codes: bool,
}

impl WorkSplit {
    /// The division of an op of `matrices` among `n_blocks` blocks: the one whose busiest warp has the fewest units, and of equal ones that
    /// with the largest warp groups.
    pub(super) fn of(kind: OpKind, matrices: &[OpMatrix], n_blocks: usize) -> Self {
        let panels_of = |m: &OpMatrix| m.format.record().panels;
        let panels_per_unit = matrices.iter().map(panels_of).max().unwrap_or(1);
        let units_per_tile = matrices[0].n_in.div_ceil(PANEL).div_ceil(panels_per_unit);
        let n_tiles = op_tiles(kind, matrices).div_ceil(n_blocks);
        let of_warp = |log_warps_per_tile: u32| {
            n_tiles.div_ceil(CONSUMER_WARPS >> log_warps_per_tile) * units_per_tile.div_ceil(1 << log_warps_per_tile)
        };
        let log_warps_per_tile = (0..=CONSUMER_WARPS.ilog2())
            .rev()
            .min_by_key(|&log_warps_per_tile| of_warp(log_warps_per_tile))
            .unwrap_or(0);
        Self { panels_per_unit, units_per_tile, log_warps_per_tile, n_tiles, has_codes: matrices[0].format.has_codes() }
    }

    /// Panels of a tile that the busiest warp has.
    pub(super) fn panels_per_warp(self) -> usize {
        self.units_per_tile.div_ceil(1 << self.log_warps_per_tile) * self.panels_per_unit
    }

    /// Most tiles of a block, if the op is small: each warp can preload its weights into registers. Otherwise 0.
    pub(super) fn preload_tiles(self, kind: OpKind, matrices: &[OpMatrix]) -> usize {
        let tiles = match kind {
            OpKind::Qkv | OpKind::AttentionOutput | OpKind::Down => self.n_tiles,
            OpKind::GateAndUp => 2 * self.n_tiles,
            OpKind::Router | OpKind::OutputHead => return 0,
        };
        let of_all_warps = 1 << self.log_warps_per_tile == CONSUMER_WARPS;
        let is_dense = matrices.iter().all(|m| m.experts.is_none());
        let fits = self.has_codes
            && of_all_warps
            && is_dense
            && tiles <= 2
            && tiles * self.panels_per_warp() <= PRELOAD_PANELS;
        if fits { tiles } else { 0 }
    }

    /// Bytes of a warp's inputs at most: digits, sums and factors (`input_bytes` of `code_products.cuh`: 216 a panel), or 64 floats a panel.
    pub(super) fn input_bytes(self) -> usize {
        self.panels_per_warp() * if self.has_codes { 216 } else { 256 }
    }

    /// Rows of a block that have partial sums at the same time, at most: all of them, except in the output head.
    pub(super) fn rows_at_once(self, kind: OpKind) -> usize {
        let tiles = match kind {
            OpKind::OutputHead => {
                self.n_tiles.min(OUTPUT_HEAD_TILES_PER_ROUND * (CONSUMER_WARPS >> self.log_warps_per_tile))
            }
            OpKind::Qkv | OpKind::AttentionOutput | OpKind::Router | OpKind::GateAndUp | OpKind::Down => self.n_tiles,
        };
        tiles * TILE
    }
}

/// Records of a format in a stage. Of single panels: a multiple of four where there are that many, since they are multiplied four at a time.
pub(super) fn records_per_stage(format: WeightLayout, stage_bytes: usize) -> usize {
    let record = format.record();
    match stage_bytes / record.bytes {
        n @ 4.. if record.panels == 1 => n / 4 * 4,
        n => n,
    }
}

/// Tiles that are divided among blocks together. Those of gate and up are divided alike, so that one block has both rows of a pair.
fn op_tiles(kind: OpKind, matrices: &[OpMatrix]) -> usize {
    match kind {
        OpKind::Qkv => matrices.iter().map(OpMatrix::n_tiles).sum(),
        OpKind::AttentionOutput | OpKind::Router | OpKind::GateAndUp | OpKind::Down | OpKind::OutputHead => {
            matrices[0].n_tiles()
        }
    }
}

/// The first block that has a tile of an op, if the op has fewer tiles than blocks. Rows of the residual stream belong to the last blocks, and
/// q/k/v to those before them: where there are enough blocks, a block with rows of the residual stream has no rows of q/k/v, whose weights it
/// would copy too late. Attention tasks begin with the first block.
fn first_block(kind: OpKind, matrices: &[OpMatrix], n_blocks: usize) -> usize {
    let n_tiles = op_tiles(kind, matrices);
    match kind {
        OpKind::AttentionOutput | OpKind::Down => n_blocks.saturating_sub(n_tiles),
        OpKind::Qkv => n_blocks.saturating_sub(matrices[0].n_in.div_ceil(TILE) + n_tiles),
        OpKind::Router | OpKind::GateAndUp | OpKind::OutputHead => 0,
    }
}

/// The matrices of an op of layer `layer`, for stages of `stage_bytes`.
pub(super) fn matrices_args(
    layer: usize,
    (kind, matrices): (OpKind, &[OpMatrix]),
    n_blocks: usize,
    stage_bytes: usize,
) -> Vec<OpMatrixArgs> {
    let split = WorkSplit::of(kind, matrices, n_blocks);
    let mut above = 0;
    let part = |matrix: &OpMatrix| {
        let record = matrix.format.record();
        let first_tile = above;
        if matches!(kind, OpKind::Qkv) {
            above += matrix.n_tiles();
        }
        let [expert_stride, tiles_per_expert, records_per_expert] = matrix
            .experts
            .map_or([0; 3], |of| [of.stride_bytes, of.tiles_per_expert, of.records_per_expert].map(|n| n as u32));
        OpMatrixArgs {
            records: matrix.records,
            tile_bytes: matrix.tile_bytes as u32,
            n_tiles: matrix.n_tiles() as u32,
            first_tile: first_tile as u32,
            op_tiles: op_tiles(kind, matrices) as u32,
            record_bytes: record.bytes as u16,
            records_per_stage: records_per_stage(matrix.format, stage_bytes) as u16,
            format: matrix.format as u16,
            log_warps_per_tile: split.log_warps_per_tile as u16,
            units_per_tile: split.units_per_tile as u16,
            records_per_unit: (split.panels_per_unit / record.panels) as u16,
            expert_layer_number: matrix.experts.map_or(0, |_| layer as u32 + 1),
            expert_stride,
            tiles_per_expert,
            records_per_expert,
            first_block: first_block(kind, matrices, n_blocks) as u32,
        }
    };
    matrices.iter().map(part).collect()
}

/// The ops of a layer, and the output head: `OpKind` of `decode.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum OpKind {
    Qkv = 0,
    AttentionOutput = 1,
    GateAndUp = 2,
    Down = 3,
    OutputHead = 4,
    Router = 5,
}

impl OpKind {
    /// Tags of the words that an op reads and writes, minus the layer tag, modulo [`TAGS`]. A layer has two tags, as it writes the residual
    /// stream twice; q/k/v and the output head read what the layer before wrote last.
    fn tag_offsets(self) -> [u32; 2] {
        match self {
            Self::Qkv | Self::OutputHead => [TAGS - 1, 0],
            Self::AttentionOutput | Self::Router | Self::GateAndUp => [0, 0],
            Self::Down => [0, 1],
        }
    }

    /// Copies of its result words. Queries, keys and values are read by few blocks, and the output head writes no vector.
    fn n_copies(self) -> usize {
        match self {
            Self::Qkv | Self::OutputHead => 1,
            Self::AttentionOutput | Self::Router | Self::GateAndUp | Self::Down => COPIES,
        }
    }
}

/// Where an op stands in a token.
#[derive(Debug, Clone, Copy)]
pub(super) struct OpIndex {
    /// Ops before it, of all layers.
    pub(super) op: usize,
    /// Matrices of these ops.
    pub(super) matrix: usize,
}

/// An op without a norm and a bias. `input`, `output`: its words.
pub(super) fn op_args(
    kind: OpKind,
    [input, output]: [DevicePtr<u64>; 2],
    index: OpIndex,
    matrices: &[OpMatrix],
    n_blocks: usize,
) -> OpArgs {
    let split = WorkSplit::of(kind, matrices, n_blocks);
    let mut n_rows = [0; 3];
    for (to, matrix) in n_rows.iter_mut().zip(matrices) {
        *to = matrix.n_rows as u32;
    }
    let [tag_in_offset, tag_out_offset] = kind.tag_offsets();
    OpArgs {
        norm: DevicePtr::NULL,
        bias: DevicePtr::NULL,
        input: input.cast(),
        output,
        kind: kind as u32,
        n_in: matrices[0].n_in as u32,
        eps: 0.0,
        inverse_n_in: 1.0 / matrices[0].n_in as f32,
        first_matrix_index: index.matrix as u32,
        n_matrices: matrices.len() as u32,
        n_rows,
        tag_in_offset,
        tag_out_offset,
        has_codes: u16::from(split.has_codes),
        has_mins: u16::from(matrices.iter().any(|m| m.format.has_mins())),
        n_copies: kind.n_copies() as u32,
        n_out: matrices[0].n_rows as u32,
        panels_per_unit: split.panels_per_unit as u32,
        units_per_tile: split.units_per_tile as u32,
        log_warps_per_tile: split.log_warps_per_tile as u16,
        region: (index.op % 2) as u16,
        has_half_scales: u16::from(matrices.iter().any(|m| m.format.has_halves())),
        preload_tiles: split.preload_tiles(kind, matrices) as u16,
    }
}

/// The vectors of words that blocks exchange. All layers use the same ones.
#[derive(Debug, Clone, Copy)]
pub(super) struct WordBuffers {
    /// The residual stream.
    pub(super) residual: DevicePtr<u64>,
    /// Queries, keys and values.
    pub(super) qkv: DevicePtr<u64>,
    /// Attention's weighted sums of values.
    pub(super) attention: DevicePtr<u64>,
    /// Products of the router.
    pub(super) router: DevicePtr<u64>,
    /// The feed-forward's gated rows.
    pub(super) gated: DevicePtr<u64>,
}

impl WordBuffers {
    /// The vectors that an op reads and writes. The output head writes none.
    pub(super) fn of(self, kind: OpKind) -> [DevicePtr<u64>; 2] {
        match kind {
            OpKind::Qkv => [self.residual, self.qkv],
            OpKind::AttentionOutput => [self.attention, self.residual],
            OpKind::Router => [self.residual, self.router],
            OpKind::GateAndUp => [self.residual, self.gated],
            OpKind::Down => [self.gated, self.residual],
            OpKind::OutputHead => [self.residual, DevicePtr::NULL],
        }
    }
}

/// The arguments of layer `i`, whose first op has index `index`; and the index of the op after it.
pub(super) fn layer_args(
    cache: &CudaKvCache,
    i: usize,
    layer: &DecodeLayer<'_>,
    words: WordBuffers,
    mut index: OpIndex,
    n_blocks: usize,
) -> (LayerArgs, OpIndex) {
    let a = layer.attention;
    let [k_cache, v_cache] = cache.layer_pages(i);
    let (activation, activation_limit) = layer.activation();
    let heads = a.n_head / a.n_head_kv;
    let head_groups = heads.div_ceil(HEADS_PER_TASK);
    let mut ops = [OpArgs::zeroed(); MAX_OPS];
    for (to, (kind, matrices)) in ops.iter_mut().zip(&layer.ops) {
        let norm = match kind {
            OpKind::Qkv => Some(layer.mixer_norm),
            OpKind::Router | OpKind::GateAndUp => Some(layer.feed_forward_norm),
            OpKind::AttentionOutput | OpKind::Down | OpKind::OutputHead => None,
        };
        *to = OpArgs {
            norm: norm.map_or(DevicePtr::NULL, |norm| norm.weight.ptr()),
            bias: layer.bias(*kind),
            eps: norm.map_or(0.0, |norm| norm.eps),
            ..op_args(*kind, words.of(*kind), index, matrices, n_blocks)
        };
        index = OpIndex { op: index.op + 1, matrix: index.matrix + matrices.len() };
    }
    let args = LayerArgs {
        ops,
        head_inputs: a.inputs,
        pages: cache.page_table_of_layer(i),
        k_cache,
        v_cache,
        sinks: ptr_or_null(a.sinks.as_ref()),
        n_ops: layer.ops.len() as u32,
        n_head: a.n_head as u32,
        n_head_kv: a.n_head_kv as u32,
        head_dim: a.head_dim as u32,
        mask: a.mask,
        mask_positions: a.reach,
        activation,
        soft_cap: a.soft_cap,
        residual_scale: layer.residual_scale,
        heads_per_kv_head: heads as u32,
        head_groups_per_kv_head: head_groups as u32,
        tasks_per_split: (a.n_head_kv * head_groups) as u32,
        inverse_head_dim: ((1u64 << 32) / a.head_dim as u64 + 1) as u32,
        activation_limit,
        expert_bias: layer.experts().map_or([DevicePtr::NULL; 3], |experts| {
            [experts.gate.as_ref(), Some(&experts.up), Some(&experts.down)]
                .map(|of| of.map_or(DevicePtr::NULL, CudaStack::bias))
        }),
        route: layer.experts().map_or(RouteArgs::zeroed(), |experts| {
            route_args(experts, DeviceSlice::NONE, DeviceSlice::NONE, [DeviceSlice::NONE; 2])
        }),
    };
    (args, index)
}
