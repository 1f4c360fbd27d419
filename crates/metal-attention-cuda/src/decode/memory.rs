//! The layout of a block's shared memory in the persistent decode kernel (`kernels/decode.cu`): the consumer warps' rings of weights first, then
//! everything else. Whatever is not needed otherwise goes to the rings.

use super::args::{CONSUMER_WARPS, HEADS_PER_TASK, OpKind, SMALL_OP_FLOATS, SUMS_STRIDE, WorkSplit, records_per_stage};
use super::layers::{DecodeLayer, OpMatrix, max_rows};
use crate::device::CudaSummary;
use crate::matrix::{PANEL, TILE, WeightLayout};

/// Stages of a warp's ring at most: more gain nothing.
const MAX_STAGES: usize = 16;
/// Stages of a ring at least: with one, copies and products would alternate. A device without memory for them does not get the kernel.
const MIN_STAGES: usize = 2;
/// Stages that a ring should have: their size is chosen so that there are that many, where possible.
const GOOD_STAGES: usize = 3;
/// Elements of a head at most for `decode_small_64`, the kernel for small ops; also a multiple of 32, so that the lanes of a quantisation block are in one head.
const SMALL_HEAD: usize = 64;
/// The size of stages is a multiple of this many bytes.
const STAGE_UNIT: usize = 128;
/// Bytes of a stage at most, unless a record is larger.
const MAX_STAGE_BYTES: usize = 5760;
/// Bytes for the kernel's static shared memory.
const STATIC_SHARED: usize = 4096;
/// Bytes of `BlockShare` of `decode_weights.cuh`.
const BLOCK_SHARE_BYTES: usize = 32;
/// Bytes of `AttentionSpan` of `decode_attention.cuh`.
const SPAN_BYTES: usize = 32;
/// Bytes of scratch for each expert in routing: `RoutingScratch` of `routing.cuh`.
const ROUTING_BYTES_PER_EXPERT: usize = 14;

/// Offsets in a block's shared memory, in bytes. The rings of stages begin at 0.
#[derive(Debug, Clone, Copy)]
pub(super) struct SharedMemoryLayout {
    /// Bytes of a stage.
    pub(super) stage_bytes: usize,
    /// Stages of a consumer warp's ring.
    pub(super) n_stages: usize,
    /// Whether all ops of all layers are small (`decode_preload.cuh`). Then a stage holds all that a warp has of a matrix.
    pub(super) has_small_ops: bool,
    /// Inputs of the consumer warps; also the scratch of attention.
    pub(super) inputs_at: usize,
    /// Bytes of a warp's inputs.
    pub(super) input_stride: usize,
    /// The two regions of partial sums.
    pub(super) regions_at: [usize; 2],
    /// Floats from the gate's partial sums to those of up.
    pub(super) gate_to_up_floats: usize,
    /// The block's rows of the residual stream, F32.
    pub(super) residual_at: usize,
    /// The block's share of each matrix.
    pub(super) shares_at: usize,
    /// The span of attention of each layer.
    pub(super) spans_at: usize,
    /// Cosines, sines and weights of norms of heads.
    pub(super) head_constants_at: usize,
    /// Scratch of routing.
    pub(super) routing_at: usize,
    /// mbarriers of the rings, and 16 bytes of zeros.
    pub(super) barriers_at: usize,
    /// Bytes of dynamic shared memory.
    pub(super) bytes: usize,
}

impl SharedMemoryLayout {
    /// The layout for these layers and this output head on a device; `None` if a block does not have enough shared memory. `alone`: whether a
    /// single rank has the whole model; only then small ops have a kernel.
    pub(super) fn new(
        layers: &[DecodeLayer<'_>],
        head: &[OpMatrix],
        n_embd: usize,
        summary: &CudaSummary,
        alone: bool,
    ) -> Option<Self> {
        let n_blocks = summary.n_sm;
        let all_ops = || layers.iter().flat_map(|layer| &layer.ops);
        let head_op = (OpKind::OutputHead, head);
        let splits = || {
            let of_layers = all_ops().map(|(kind, matrices)| (*kind, matrices.as_slice()));
            of_layers.chain([head_op]).map(|(kind, matrices)| (kind, WorkSplit::of(kind, matrices, n_blocks)))
        };
        let head_dim = || layers.iter().map(|layer| layer.attention.head_dim);

        let input_stride = splits().map(|(_, split)| split.input_bytes()).max().unwrap_or(0).next_multiple_of(16);
        let of_attention = head_dim().map(attention_bytes).max().unwrap_or(0);
        let n_rows = splits().map(|(kind, split)| split.rows_at_once(kind)).max().unwrap_or(0);
        let gate_to_up_floats = n_rows * SUMS_STRIDE;
        // A region holds the sums of gate and up, where an op of gate and up uses it.
        let has_gate =
            |place: usize| all_ops().enumerate().any(|(i, (kind, _))| i % 2 == place && *kind == OpKind::GateAndUp);
        let floats_of =
            |place: usize| SMALL_OP_FLOATS.max(if has_gate(place) { 2 * gate_to_up_floats } else { gate_to_up_floats });
        let n_matrices = layers.iter().flat_map(DecodeLayer::matrices).count() + 1;

        // Everything behind the rings.
        let mut rest = 0;
        let mut take = |bytes: usize| {
            rest += bytes;
            rest - bytes
        };
        let inputs_at = take((CONSUMER_WARPS * input_stride).max(of_attention).next_multiple_of(16));
        let regions = [0, 1].map(|place| take(4 * floats_of(place)));
        let residual_at = take(n_embd.div_ceil(TILE).div_ceil(n_blocks) * TILE * 4);
        let shares_at = take(BLOCK_SHARE_BYTES * n_matrices);
        let spans_at = take(SPAN_BYTES * layers.len());
        let head_constants_at = take(12 * head_dim().max().unwrap_or(0).next_multiple_of(4));
        let routing_at = take((ROUTING_BYTES_PER_EXPERT * max_rows(layers, OpKind::Router)).next_multiple_of(16));
        // Two mbarriers of 8 bytes a stage, and 16 bytes of zeros.
        let barriers_at = take(16 * CONSUMER_WARPS * MAX_STAGES + 16);

        let bytes_per_warp = summary.max_shared.saturating_sub(STATIC_SHARED + rest) / CONSUMER_WARPS;
        let has_small_ops = alone
            && head_dim().all(|head_dim| head_dim <= SMALL_HEAD && head_dim.is_multiple_of(PANEL / 2))
            && all_ops()
                .all(|(kind, matrices)| WorkSplit::of(*kind, matrices, n_blocks).preload_tiles(*kind, matrices) > 0);
        let (stage_bytes, n_stages) = if has_small_ops {
            let pieces = all_ops().flat_map(|(kind, matrices)| {
                let split = WorkSplit::of(*kind, matrices, n_blocks);
                matrices
                    .iter()
                    .map(move |m| (m.format.record(), split.preload_tiles(*kind, matrices) * split.panels_per_warp()))
                    .map(|(record, panels)| panels.div_ceil(record.panels) * record.bytes)
            });
            let of_head = 2 * head[0].format.record().bytes;
            stages_of(pieces.chain([of_head]).max().unwrap_or(of_head).next_multiple_of(STAGE_UNIT), bytes_per_warp)
        } else {
            best_stages(layers.iter().flat_map(DecodeLayer::matrices).chain(head), bytes_per_warp)
        };
        let rings = n_stages * CONSUMER_WARPS * stage_bytes;
        (n_stages >= MIN_STAGES).then(|| Self {
            stage_bytes,
            n_stages,
            has_small_ops,
            inputs_at: rings + inputs_at,
            input_stride,
            regions_at: regions.map(|at| rings + at),
            gate_to_up_floats,
            residual_at: rings + residual_at,
            shares_at: rings + shares_at,
            spans_at: rings + spans_at,
            head_constants_at: rings + head_constants_at,
            routing_at: rings + routing_at,
            barriers_at: rings + barriers_at,
            bytes: rings + rest,
        })
    }
}

/// The size of a stage, and how many stages fit in `bytes_per_warp`, at most [`MAX_STAGES`].
fn stages_of(stage_bytes: usize, bytes_per_warp: usize) -> (usize, usize) {
    (stage_bytes, (bytes_per_warp / stage_bytes).min(MAX_STAGES))
}

/// The size and number of stages with which a full ring holds the most bytes of weights, on average over the bytes of `matrices`: stages hold whole
/// records, so that a size suits formats differently.
fn best_stages<'a>(matrices: impl Iterator<Item = &'a OpMatrix>, bytes_per_warp: usize) -> (usize, usize) {
    let mut bytes_of: Vec<(WeightLayout, usize)> = Vec::new();
    for matrix in matrices {
        let bytes = matrix.n_tiles() * matrix.tile_bytes;
        match bytes_of.iter_mut().find(|(format, _)| *format == matrix.format) {
            Some((_, of_format)) => *of_format += bytes,
            None => bytes_of.push((matrix.format, bytes)),
        }
    }
    let largest =
        bytes_of.iter().map(|(format, _)| format.record().bytes).max().unwrap_or(1).next_multiple_of(STAGE_UNIT);
    let used = |(stage_bytes, n_stages): (usize, usize)| {
        let of_format = |(format, bytes): &(WeightLayout, usize)| {
            (records_per_stage(*format, stage_bytes) * format.record().bytes) as f64 * *bytes as f64
        };
        n_stages as f64 * bytes_of.iter().map(of_format).sum::<f64>()
    };
    let candidates =
        (largest..=MAX_STAGE_BYTES.max(largest)).step_by(STAGE_UNIT).map(|bytes| stages_of(bytes, bytes_per_warp));
    let good = candidates.filter(|(_, n_stages)| *n_stages >= GOOD_STAGES);
    good.max_by(|a, b| used(*a).total_cmp(&used(*b))).unwrap_or_else(|| stages_of(largest, bytes_per_warp))
}

/// Bytes of scratch of attention: queries in two F16 parts, the token's own key and value, and the teams' weighted sums, maxima and sums of weights.
fn attention_bytes(head_dim: usize) -> usize {
    let padded = head_dim.next_multiple_of(64).next_power_of_two();
    let halves = 2 * HEADS_PER_TASK * (padded + 8) + 2 * padded;
    let floats = HEADS_PER_TASK + CONSUMER_WARPS * HEADS_PER_TASK * head_dim + 2 * CONSUMER_WARPS * HEADS_PER_TASK;
    2 * halves + 4 * floats
}
