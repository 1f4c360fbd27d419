//! How a block shares its workgroup memory out, for `kernels/decode.cu`.

use super::args::{GROUP, Kind, READY_FLOATS, Shape, WARPS, piece_bytes};
use super::layers::{PlainLayer, StepMatrix, most_rows};
use crate::device::CudaSummary;
use crate::matrix::TILE;

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

/// Where things lie, from the beginning on, in bytes: first the slots of weights on their way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    /// What a warp asks for at once at most, and how often before it waits.
    pub(super) slot_bytes: usize,
    pub(super) n_slots: usize,
    /// Inputs of the warps, so many bytes each; the same memory is attention's.
    pub(super) input_at: usize,
    pub(super) input_stride: usize,
    /// Sums of the warps, in one of two places, of steps by turns: floats from one warp's to the next's, of the head the same, and from
    /// the gate's to those of up.
    pub(super) regions_at: [usize; 2],
    pub(super) stride: usize,
    pub(super) head_stride: usize,
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
    /// For these layers and the output head; `None` where a block has not so much.
    pub(super) fn new(
        layers: &[PlainLayer<'_>],
        head: &[StepMatrix],
        n_embd: usize,
        summary: &CudaSummary,
    ) -> Option<Self> {
        let n_blocks = summary.n_sm;
        let all_steps = || layers.iter().flat_map(|layer| &layer.steps);
        let shapes = || all_steps().map(|(kind, matrices)| Shape::of(*kind, matrices, n_blocks));
        let of_head = Shape::of(Kind::Head, head, n_blocks);
        let head_dim = || layers.iter().map(|layer| layer.attention.head_dim);

        let input_stride = shapes().chain([of_head]).map(Shape::input_bytes).max().unwrap_or(0).next_multiple_of(16);
        let of_attention = head_dim().map(attention_bytes).max().unwrap_or(0);
        let stride = shapes().map(Shape::tiles_a_group).max().unwrap_or(1) * TILE;
        let head_stride = of_head.tiles_a_group() * TILE;
        let region_floats = WARPS * stride;
        // The gate's sums lie beside those of up. The head has all that is behind.
        let has_gate =
            |place: usize| all_steps().enumerate().any(|(i, (kind, _))| i % 2 == place && *kind == Kind::GateAndUp);
        let floats_of =
            |place: usize| READY_FLOATS.max(if has_gate(place) { 2 * region_floats } else { region_floats });
        let place_of_head = all_steps().count() % 2;
        let n_parts = layers.iter().flat_map(PlainLayer::matrices).count() + 1;

        // What lies behind the slots.
        let mut rest = 0;
        let mut take = |bytes: usize| {
            rest += bytes;
            rest - bytes
        };
        let input_at = take((WARPS * input_stride).max(of_attention).next_multiple_of(16));
        let first_region = take(4 * floats_of(1 - place_of_head));
        let second_region = take(4 * floats_of(place_of_head).max(WARPS * head_stride));
        let residual_at = take(n_embd.div_ceil(TILE).div_ceil(n_blocks) * TILE * 4);
        let parts_at = take(PART * n_parts);
        let spans_at = take(SPAN * layers.len());
        let heads_at = take(12 * head_dim().max().unwrap_or(0).next_multiple_of(4));
        let choice_at = take((BYTES_OF_CHOICE * most_rows(layers, Kind::Router)).next_multiple_of(16));
        // With 16 bytes of zeros behind those that there are.
        let barriers_at = take(16 * WARPS * MAX_SLOTS + 16);

        let matrices = layers.iter().flat_map(PlainLayer::matrices).chain(head);
        let largest = matrices.map(|m| m.format.record().bytes).max().unwrap_or(SLOT);
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
        let slots = n_slots * WARPS * slot_bytes;
        let regions = if place_of_head == 0 { [second_region, first_region] } else { [first_region, second_region] };
        (n_slots >= MIN_SLOTS).then(|| Self {
            slot_bytes,
            n_slots,
            input_at: slots + input_at,
            input_stride,
            regions_at: regions.map(|at| slots + at),
            stride,
            head_stride,
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

/// Bytes of workgroup memory that attention takes: queries as halves, the token's own key and value, what becomes of values.
fn attention_bytes(head_dim: usize) -> usize {
    let padded = head_dim.next_multiple_of(64).next_power_of_two();
    let halves = 2 * GROUP * (padded + 8) + 2 * padded;
    let floats = GROUP + WARPS * GROUP * head_dim + 2 * WARPS * GROUP;
    2 * halves + 4 * floats
}
