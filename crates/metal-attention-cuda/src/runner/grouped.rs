//! Grouped products: each item, a row, is multiplied by the matrix of its group. For experts an item is a token at one of its
//! experts and the group is the expert; for latent attention an item is a token's row of one head and the group is the head.
//!
//! Few items use the grouped GEMV with F32 inputs, item by item (`grouped_matvec.cu`). Many items are sorted by group, their
//! rows packed as F16 in that order, and multiplied by the grouped GEMM (`grouped_matmul.cu`), which writes results back in the
//! order of the items.

use super::ModelRunner;
use super::linear::{PREFETCHED_PANELS, WARPS, WARPS_IN_FLIGHT, gemv_shared_bytes, previous_power_of_two};
use crate::CudaError;
use crate::args::{Epilogue, GatherArgs, GroupedMatmulArgs, GroupedMatvecArgs, SortArgs};
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::matrix::{PANEL, TILE};
use crate::slice::{DevicePtr, DeviceSlice};
use crate::stack::CudaStack;

/// Most blocks of a launch in its second dimension.
const MOST_ITEMS: usize = 65_535;

/// Most groups that items can be sorted by: `MAX_GROUPS` of `grouped_matmul.cu`.
const MAX_GROUPS: usize = 1024;

/// Tokens from which on items are sorted, even if each group has few.
const MANY_TOKENS: usize = 32;

/// Average items of a group from which on a block of the GEMM takes [`MOST_TILES`] tiles of 8 items, else [`FEW_TILES`].
const MANY_ITEMS: usize = 64;
/// The tiles of a block of `grouped_matmul_16_*`.
const MOST_TILES: usize = 16;
/// The tiles of a block of `grouped_matmul_4_*`.
const FEW_TILES: usize = 4;

/// Items sorted by group on the device. Each group begins at a multiple of 8 places, a tile of the GEMM; the places between
/// groups are empty.
#[derive(Clone, Copy)]
pub(crate) struct SortedItems {
    /// The item at each place, `[n_places]`.
    items: DevicePtr<u32>,
    /// The list of work for the GEMM's blocks: a group and some of its tiles each.
    work: DevicePtr<[u32; 4]>,
    /// The length of that list.
    n_work: DevicePtr<u32>,
    /// Places, including empty ones.
    n_places: usize,
    /// Groups: experts or heads.
    n_groups: usize,
    /// Tiles of 8 items of one entry of the list, at most.
    tiles_of_work: usize,
}

/// Most places of `n_items` sorted items in `n_groups` groups.
fn max_places(n_items: usize, n_groups: usize) -> usize {
    (n_items + 7 * n_groups.min(n_items)).next_multiple_of(8)
}

/// Scratch elements of a sort: the item of each place; the list of work and its length.
pub(crate) fn sorted_elements(n_items: usize, n_groups: usize) -> [usize; 2] {
    let n = max_places(n_items, n_groups);
    [n, n / 8 * 4 + 4]
}

/// Scratch elements (4 bytes each) of the packed rows of all places.
pub(crate) fn packed_elements(n_items: usize, n_groups: usize, width: usize) -> usize {
    max_places(n_items, n_groups) * width.next_multiple_of(PANEL) / 2
}

/// A product of all items with the matrices of their groups.
#[derive(Clone, Copy)]
pub(crate) struct GroupedLinearOp<'a> {
    /// A label for profiles.
    pub(crate) label: &'static str,
    /// The matrices; for [`Epilogue::Gated`] the gates.
    pub(crate) first: &'a CudaStack,
    /// More matrices with the same input, whose rows follow those of the first in `y`; for [`Epilogue::Gated`] the ups.
    pub(crate) second: Option<&'a CudaStack>,
    /// Store or gated.
    pub(crate) epilogue: Epilogue,
    /// The activation of a gated product, by its number in the kernels.
    pub(crate) activation: u32,
    /// The group of each item; null: the group of item `i` is `i % n`.
    pub(crate) groups: DevicePtr<u32>,
    /// The input: F32 rows, or packed F16 rows for a grouped GEMM. Item `i` reads the row that begins at element `i / items_a_row * x_stride`.
    pub(crate) x: DeviceSlice<f32>,
    /// Items that read the same row of the input.
    pub(crate) items_a_row: usize,
    /// Elements from a row of the input to the next one.
    pub(crate) x_stride: usize,
    /// The result: F32 rows, or packed F16 rows of a gated grouped GEMM. Item `i` is written from element `i * y_stride` on.
    pub(crate) y: DeviceSlice<f32>,
    /// Elements from a row of the result to the next one.
    pub(crate) y_stride: usize,
}

impl ModelRunner {
    /// Launches the grouped GEMV of `n_items` items.
    pub(crate) fn grouped_gemv(&mut self, p: &GroupedLinearOp<'_>, n_items: usize) -> Result<(), CudaError> {
        let (n_in, first) = (p.first.n_in(), p.first.args());
        let second = p.second.map_or(first, CudaStack::args);
        let n_panels = n_in.div_ceil(PANEL);
        let n_tiles = p.first.n_rows.div_ceil(TILE);
        let max_warps = (n_panels / PREFETCHED_PANELS).clamp(1, WARPS);
        let warps_per_tile = previous_power_of_two(WARPS_IN_FLIGHT.div_ceil(n_tiles * n_items).clamp(1, max_warps));
        let n_groups = n_tiles.div_ceil(WARPS / warps_per_tile);
        // A block prepares its input once and then takes several tiles.
        let blocks = (2 * self.gpu.summary().n_sm).div_ceil(n_items).clamp(1, n_groups);
        let parts = if p.second.is_some() && p.epilogue != Epilogue::Gated { 2 } else { 1 };
        let layouts = [p.first.layout(), p.second.map_or(p.first.layout(), CudaStack::layout)];
        let shared = gemv_shared_bytes(layouts.into_iter(), n_panels, 1);
        for first_item in (0..n_items).step_by(MOST_ITEMS) {
            let args = GroupedMatvecArgs {
                matrices: [first.0, second.0],
                tile_bytes: [first.1, second.1],
                groups: p.groups,
                n_groups: p.first.n as u32,
                n_in: n_in as u32,
                x: p.x.ptr(),
                items_a_row: p.items_a_row as u32,
                x_stride: p.x_stride as u32,
                bias: [p.first.bias(), p.second.map_or(DevicePtr::NULL, CudaStack::bias)],
                y: p.y.ptr(),
                y_stride: p.y_stride as u32,
                first_item: first_item as u32,
                warps_per_tile: warps_per_tile as u32,
                output: p.epilogue as u32,
                activation: p.activation,
                unused: 0,
            };
            let n = (n_items - first_item).min(MOST_ITEMS);
            let grid = LaunchGrid { blocks: [blocks, n, parts], threads: 32 * WARPS, shared };
            self.launch(kernels::GROUPED_MATVEC, p.label, grid, &args)?;
        }
        Ok(())
    }

    /// Whether the grouped GEMM is better for `n_items` items of `n_tokens` tokens. Not where products read F32 inputs.
    pub(crate) fn uses_grouped_gemm(&self, n_tokens: usize, n_items: usize, n_groups: usize) -> bool {
        let worth = n_items >= 2 * n_groups || n_tokens >= MANY_TOKENS;
        !self.uses_f32_inputs(n_tokens) && worth && n_groups <= MAX_GROUPS
    }

    /// Sorts items by group, to scratch of [`sorted_elements`].
    pub(crate) fn sort_by_group(
        &mut self,
        groups: DevicePtr<u32>,
        n_items: usize,
        n_groups: usize,
        [items, work]: [DeviceSlice<f32>; 2],
    ) -> Result<SortedItems, CudaError> {
        let tiles_of_work = if n_items / n_groups >= MANY_ITEMS { MOST_TILES } else { FEW_TILES };
        let n_places = max_places(n_items, n_groups);
        // The length of the list is before it, in a vector of its own.
        let (items, n_work) = (items.cast().ptr(), work.cast().ptr());
        let work = work.cast::<[u32; 4]>().skip(1).ptr();
        let sorted = SortedItems { items, work, n_work, n_places, n_groups, tiles_of_work };
        let args = SortArgs {
            groups,
            n_items: n_items as u32,
            n_groups: n_groups as u32,
            items,
            work,
            n_work,
            n_slots: n_places as u32,
            tiles_of_work: tiles_of_work as u32,
        };
        self.launch(
            kernels::SORT_BY_GROUP,
            "",
            LaunchGrid { blocks: [1, 1, 1], threads: MAX_GROUPS, shared: 12 * MAX_GROUPS },
            &args,
        )?;
        Ok(sorted)
    }

    /// Packs the rows of sorted items: the row of item `i` begins at element `i / items_a_row * x_stride` of `x`.
    pub(crate) fn gather_rows(
        &mut self,
        sorted: &SortedItems,
        (x, items_a_row, x_stride): (DeviceSlice<f32>, usize, usize),
        n_in: usize,
        packed: DeviceSlice<f32>,
    ) -> Result<(), CudaError> {
        let args = GatherArgs {
            x: x.ptr(),
            items: sorted.items,
            packed: packed.cast().ptr(),
            items_a_row: items_a_row as u32,
            x_stride: x_stride as u32,
            n_in: n_in as u32,
            n_slots: sorted.n_places as u32,
        };
        self.launch(kernels::GATHER, "", LaunchGrid { blocks: [sorted.n_places, 1, 1], threads: 128, shared: 0 }, &args)
    }

    /// Launches the grouped GEMM of sorted items, whose packed rows `p.x` is. The results go to the items' rows at `p.y`; those
    /// of a gated product are packed again, in the sorted order.
    pub(crate) fn grouped_gemm(&mut self, p: &GroupedLinearOp<'_>, sorted: &SortedItems) -> Result<(), CudaError> {
        let (gated, first) = (p.epilogue == Epilogue::Gated, p.first.args());
        let second = p.second.map_or(first, CudaStack::args);
        let args = GroupedMatmulArgs {
            matrices: [first.0, second.0],
            tile_bytes: [first.1, second.1],
            work: sorted.work,
            n_work: sorted.n_work,
            x: p.x.cast().ptr(),
            bias: [p.first.bias(), p.second.map_or(DevicePtr::NULL, CudaStack::bias)],
            items: sorted.items,
            y: if gated { DevicePtr::NULL } else { p.y.ptr() },
            packed: if gated { p.y.cast().ptr() } else { DevicePtr::NULL },
            n_slots: sorted.n_places as u32,
            n_out: p.y_stride as u32,
            output: p.epilogue as u32,
            activation: p.activation,
        };
        let tiles = sorted.tiles_of_work;
        let rows = p.first.n_rows.div_ceil(TILE).div_ceil(if gated { 4 } else { 8 });
        let most_work = sorted.n_groups + sorted.n_places / (8 * tiles);
        // A launch supports one weight layout.
        let unlike = p.second.filter(|second| !gated && !second.pairs_with(p.first));
        let parts = if p.second.is_some() && !gated && unlike.is_none() { 2 } else { 1 };
        let grid = LaunchGrid { blocks: [rows, most_work, parts], threads: 256, shared: 4 * tiles * 1024 };
        let of_layouts = if tiles == MOST_TILES { kernels::GROUPED_MATMUL_16 } else { kernels::GROUPED_MATMUL_4 };
        self.launch(of_layouts[p.first.layout() as usize], p.label, grid, &args)?;
        if let Some(stack) = unlike {
            let y = p.y.skip(p.first.n_rows);
            return self.grouped_gemm(&GroupedLinearOp { first: stack, second: None, y, ..*p }, sorted);
        }
        Ok(())
    }
}
