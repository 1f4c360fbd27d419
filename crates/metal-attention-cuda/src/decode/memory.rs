//! How a block shares its workgroup memory out, for `kernels/decode.cu`.

use super::args::{GROUP, Kind, READY_FLOATS, SUMS_STRIDE, Shape, WARPS, records_a_slot};
use super::layers::{PlainLayer, StepMatrix, most_rows};
use crate::device::CudaSummary;
use crate::matrix::{PANEL, TILE, WeightLayout};

/// Slots of a warp: beyond the most nothing is gained, and below the least too much is lost.
const MAX_SLOTS: usize = 16;
const MIN_SLOTS: usize = 2;
const GOOD_SLOTS: usize = 3;
/// Elements of the heads of models for whose small steps there is a kernel, at most; a multiple of half a panel, of which lanes that share a block have one.
const SMALL_HEAD: usize = 64;
/// What their bytes are a multiple of, and at most where records are smaller.
const SLOT_UNIT: usize = 128;
const MAX_SLOT: usize = 5760;
/// Bytes of workgroup memory that the kernel has besides.
const STATIC_SHARED: usize = 4096;
/// Bytes of `Part` and of `Span` of `decode.cu`.
const PART: usize = 32;
const SPAN: usize = 32;
/// Bytes of workgroup memory for each expert that are chosen among, as `Choice` of `routing.cuh` has them.
const BYTES_OF_CHOICE: usize = 14;

/// Where things lie, from the beginning on, in bytes: first the slots of weights on their way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    /// What a warp asks for at once at most, and how often before it waits.
    pub(super) slot_bytes: usize,
    pub(super) n_slots: usize,
    /// Whether warps take their weights of all layers' steps before the inputs are there: then all that one has of a matrix is in one slot.
    pub(super) has_small_steps: bool,
    /// Inputs of the warps, so many bytes each; the same memory is attention's.
    pub(super) input_at: usize,
    pub(super) input_stride: usize,
    /// Sums of the warps, in one of two places, of steps by turns, and floats from the gate's to those of up.
    pub(super) regions_at: [usize; 2],
    pub(super) region_floats: usize,
    /// The block's rows of the residual stream.
    pub(super) residual_at: usize,
    /// The block's parts of matrices, which splits of positions it has, what turns heads, and what experts are chosen by.
    pub(super) parts_at: usize,
    pub(super) spans_at: usize,
    pub(super) heads_at: usize,
    pub(super) choice_at: usize,
    pub(super) barriers_at: usize,
    /// All of it.
    pub(super) bytes: usize,
}

impl Memory {
    /// For these layers and the output head, of a card that is `alone` or not; `None` where a block has not so much.
    pub(super) fn new(
        layers: &[PlainLayer<'_>],
        head: &[StepMatrix],
        n_embd: usize,
        summary: &CudaSummary,
        alone: bool,
    ) -> Option<Self> {
        let n_blocks = summary.n_sm;
        let all_steps = || layers.iter().flat_map(|layer| &layer.steps);
        let head_step = (Kind::Head, head);
        let shapes = || {
            let of_layers = all_steps().map(|(kind, matrices)| (*kind, matrices.as_slice()));
            of_layers.chain([head_step]).map(|(kind, matrices)| (kind, Shape::of(kind, matrices, n_blocks)))
        };
        let head_dim = || layers.iter().map(|layer| layer.attention.head_dim);

        let input_stride = shapes().map(|(_, shape)| shape.input_bytes()).max().unwrap_or(0).next_multiple_of(16);
        let of_attention = head_dim().map(attention_bytes).max().unwrap_or(0);
        let n_rows = shapes().map(|(kind, shape)| shape.rows_at_once(kind)).max().unwrap_or(0);
        let region_floats = n_rows * SUMS_STRIDE;
        // The gate's sums lie beside those of up.
        let has_gate =
            |place: usize| all_steps().enumerate().any(|(i, (kind, _))| i % 2 == place && *kind == Kind::GateAndUp);
        let floats_of =
            |place: usize| READY_FLOATS.max(if has_gate(place) { 2 * region_floats } else { region_floats });
        let n_parts = layers.iter().flat_map(PlainLayer::matrices).count() + 1;

        // What lies behind the slots.
        let mut rest = 0;
        let mut take = |bytes: usize| {
            rest += bytes;
            rest - bytes
        };
        let input_at = take((WARPS * input_stride).max(of_attention).next_multiple_of(16));
        let regions = [0, 1].map(|place| take(4 * floats_of(place)));
        let residual_at = take(n_embd.div_ceil(TILE).div_ceil(n_blocks) * TILE * 4);
        let parts_at = take(PART * n_parts);
        let spans_at = take(SPAN * layers.len());
        let heads_at = take(12 * head_dim().max().unwrap_or(0).next_multiple_of(4));
        let choice_at = take((BYTES_OF_CHOICE * most_rows(layers, Kind::Router)).next_multiple_of(16));
        // With 16 bytes of zeros behind those that there are.
        let barriers_at = take(16 * WARPS * MAX_SLOTS + 16);

        let room = summary.max_shared.saturating_sub(STATIC_SHARED + rest) / WARPS;
        let has_small_steps = alone
            && head_dim().all(|head_dim| head_dim <= SMALL_HEAD && head_dim.is_multiple_of(PANEL / 2))
            && all_steps()
                .all(|(kind, matrices)| Shape::of(*kind, matrices, n_blocks).ready_tiles(*kind, matrices) > 0);
        let (slot_bytes, n_slots) = if has_small_steps {
            let pieces = all_steps().flat_map(|(kind, matrices)| {
                let shape = Shape::of(*kind, matrices, n_blocks);
                matrices
                    .iter()
                    .map(move |m| (m.format.record(), shape.ready_tiles(*kind, matrices) * shape.panels_a_warp()))
                    .map(|(record, panels)| panels.div_ceil(record.panels) * record.bytes)
            });
            let of_head = 2 * head[0].format.record().bytes;
            slots_of(pieces.chain([of_head]).max().unwrap_or(of_head).next_multiple_of(SLOT_UNIT), room)
        } else {
            best_slots(layers.iter().flat_map(PlainLayer::matrices).chain(head), room)
        };
        let slots = n_slots * WARPS * slot_bytes;
        (n_slots >= MIN_SLOTS).then(|| Self {
            slot_bytes,
            n_slots,
            has_small_steps,
            input_at: slots + input_at,
            input_stride,
            regions_at: regions.map(|at| slots + at),
            region_floats,
            residual_at: slots + residual_at,
            parts_at: slots + parts_at,
            spans_at: slots + spans_at,
            heads_at: slots + heads_at,
            choice_at: slots + choice_at,
            barriers_at: slots + barriers_at,
            bytes: slots + rest,
        })
    }
}

/// Bytes of a slot, and how many of these a warp with so much room has.
fn slots_of(slot_bytes: usize, room: usize) -> (usize, usize) {
    (slot_bytes, (room / slot_bytes).min(MAX_SLOTS))
}

/// The slots that have the most bytes of the weights of `matrices`, as many as these have, on their way.
fn best_slots<'a>(matrices: impl Iterator<Item = &'a StepMatrix>, room: usize) -> (usize, usize) {
    let mut bytes_of: Vec<(WeightLayout, usize)> = Vec::new();
    for matrix in matrices {
        let bytes = matrix.n_tiles() * matrix.tile_bytes;
        match bytes_of.iter_mut().find(|(format, _)| *format == matrix.format) {
            Some((_, of_format)) => *of_format += bytes,
            None => bytes_of.push((matrix.format, bytes)),
        }
    }
    let largest =
        bytes_of.iter().map(|(format, _)| format.record().bytes).max().unwrap_or(1).next_multiple_of(SLOT_UNIT);
    let used = |(slot_bytes, n_slots): (usize, usize)| {
        let of_format = |(format, bytes): &(WeightLayout, usize)| {
            (records_a_slot(*format, slot_bytes) * format.record().bytes) as f64 * *bytes as f64
        };
        n_slots as f64 * bytes_of.iter().map(of_format).sum::<f64>()
    };
    let candidates = (largest..=MAX_SLOT.max(largest)).step_by(SLOT_UNIT).map(|bytes| slots_of(bytes, room));
    let good = candidates.filter(|(_, n_slots)| *n_slots >= GOOD_SLOTS);
    good.max_by(|a, b| used(*a).total_cmp(&used(*b))).unwrap_or_else(|| slots_of(largest, room))
}

/// Bytes of workgroup memory that attention takes: queries as halves, the token's own key and value, what becomes of values.
fn attention_bytes(head_dim: usize) -> usize {
    let padded = head_dim.next_multiple_of(64).next_power_of_two();
    let halves = 2 * GROUP * (padded + 8) + 2 * padded;
    let floats = GROUP + WARPS * GROUP * head_dim + 2 * WARPS * GROUP;
    2 * halves + 4 * floats
}
