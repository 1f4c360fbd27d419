//! Products of rows each with a matrix of its own: those of experts, or of heads.

use super::ModelRunner;
use super::linear::{PREFETCHED_PANELS, WARPS, WARPS_IN_FLIGHT, gemv_shared_bytes, previous_power_of_two};
use crate::CudaError;
use crate::args::{Epilogue, GatherArgs, GroupedMatmulArgs, GroupedMatvecArgs, SortArgs};
use crate::launch::LaunchGrid;
use crate::matrix::{PANEL, TILE};
use crate::stack::CudaStack;

/// Most rows of a grid.
const MOST_ITEMS: usize = 65_535;

/// Groups that items can be sorted by: `MAX_GROUPS` of `grouped_matmul.cu`.
const MAX_GROUPS: usize = 1024;

/// Tokens from which on items are sorted, however few a group has.
const MANY_TOKENS: usize = 32;

/// Items of a group from which on blocks take 16 tiles of them at once, else 4.
const MANY_ITEMS: usize = 64;

/// Items sorted by group, in slots; each group begins with a tile of 8.
#[derive(Clone, Copy)]
pub(super) struct SortedItems {
    items: u64,
    work: u64,
    n_work: u64,
    n_slots: usize,
    n_groups: usize,
    tiles_of_work: usize,
}

/// Slots of so many items in so many groups, at most.
fn n_slots(n_items: usize, n_groups: usize) -> usize {
    (n_items + 7 * n_groups.min(n_items)).next_multiple_of(8)
}

/// Elements of what sorting gives: the item of each slot; work, and how much of it.
pub(super) fn sorted_elements(n_items: usize, n_groups: usize) -> [usize; 2] {
    let n = n_slots(n_items, n_groups);
    [n, n / 8 * 4 + 4]
}

/// Elements, of four bytes, of packed rows of all slots.
pub(super) fn packed_elements(n_items: usize, n_groups: usize, width: usize) -> usize {
    n_slots(n_items, n_groups) * width.next_multiple_of(PANEL) / 2
}

/// A product of items, each a row with the matrix of its group.
#[derive(Clone, Copy)]
pub(super) struct GroupedLinearOp<'a> {
    pub(super) label: &'static str,
    /// GATED: the gates.
    pub(super) first: &'a CudaStack,
    /// Its rows follow those of the first; GATED: the ups.
    pub(super) second: Option<&'a CudaStack>,
    pub(super) epilogue: Epilogue,
    pub(super) activation: u32,
    /// Where the group of each item lies; 0: group `i mod n` for item `i`.
    pub(super) groups: u64,
    /// Item `i` reads the row that begins at element `i / items_a_row * x_stride`.
    pub(super) x: u64,
    pub(super) items_a_row: usize,
    pub(super) x_stride: usize,
    /// Item `i` writes from element `i * y_stride` on.
    pub(super) y: u64,
    pub(super) y_stride: usize,
}

impl ModelRunner {
    /// All `n_items` items, as exact as F32.
    pub(super) fn grouped(&mut self, p: &GroupedLinearOp<'_>, n_items: usize) -> Result<(), CudaError> {
        let (n_in, first) = (p.first.n_in(), p.first.args());
        let second = p.second.map_or(first, CudaStack::args);
        let n_panels = n_in.div_ceil(PANEL);
        let n_tiles = p.first.n_rows.div_ceil(TILE);
        let most = (n_panels / PREFETCHED_PANELS).clamp(1, WARPS);
        let warps_a_tile = previous_power_of_two(WARPS_IN_FLIGHT.div_ceil(n_tiles * n_items).clamp(1, most));
        let n_groups = n_tiles.div_ceil(WARPS / warps_a_tile);
        // A block makes its input once, however many tiles it goes through.
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
                x: p.x,
                items_a_row: p.items_a_row as u32,
                x_stride: p.x_stride as u32,
                bias: [p.first.bias(), p.second.map_or(0, CudaStack::bias)],
                y: p.y,
                y_stride: p.y_stride as u32,
                first_item: first_item as u32,
                warps_a_tile: warps_a_tile as u32,
                output: p.epilogue as u32,
                activation: p.activation,
                unused: 0,
            };
            let n = (n_items - first_item).min(MOST_ITEMS);
            let grid = LaunchGrid { blocks: [blocks, n, parts], threads: 32 * WARPS, shared };
            self.launch("grouped_matvec", p.label, grid, &args)?;
        }
        Ok(())
    }

    /// Whether `n_items` items of `n_tokens` tokens are better sorted.
    pub(super) fn sorts(&self, n_tokens: usize, n_items: usize, n_groups: usize) -> bool {
        let worth = n_items >= 2 * n_groups || n_tokens >= MANY_TOKENS;
        !self.uses_f32_inputs(n_tokens) && worth && n_groups <= MAX_GROUPS
    }

    /// Sorts items by group, to places of [`sorted_elements`].
    pub(super) fn sort(
        &mut self,
        groups: u64,
        n_items: usize,
        n_groups: usize,
        [items, work]: [u64; 2],
    ) -> Result<SortedItems, CudaError> {
        let tiles_of_work = if n_items / n_groups >= MANY_ITEMS { 16 } else { 4 };
        let n_slots = n_slots(n_items, n_groups);
        let sorted = SortedItems { items, work: work + 16, n_work: work, n_slots, n_groups, tiles_of_work };
        let args = SortArgs {
            groups,
            n_items: n_items as u32,
            n_groups: n_groups as u32,
            items,
            work: sorted.work,
            n_work: sorted.n_work,
            n_slots: n_slots as u32,
            tiles_of_work: tiles_of_work as u32,
        };
        self.launch(
            "sort_by_group",
            "",
            LaunchGrid { blocks: [1, 1, 1], threads: MAX_GROUPS, shared: 12 * MAX_GROUPS },
            &args,
        )?;
        Ok(sorted)
    }

    /// Packs the rows of sorted items: item `i` has the one that begins at element `i / items_a_row * x_stride` of `x`.
    pub(super) fn gather(
        &mut self,
        sorted: &SortedItems,
        (x, items_a_row, x_stride): (u64, usize, usize),
        n_in: usize,
        packed: u64,
    ) -> Result<(), CudaError> {
        let args = GatherArgs {
            x,
            items: sorted.items,
            packed,
            items_a_row: items_a_row as u32,
            x_stride: x_stride as u32,
            n_in: n_in as u32,
            n_slots: sorted.n_slots as u32,
        };
        self.launch("gather", "", LaunchGrid { blocks: [sorted.n_slots, 1, 1], threads: 128, shared: 0 }, &args)
    }

    /// The product of sorted items, whose rows are packed: to the rows of items, or, GATED, packed again.
    pub(super) fn sorted_product(&mut self, p: &GroupedLinearOp<'_>, sorted: &SortedItems) -> Result<(), CudaError> {
        let (gated, first) = (p.epilogue == Epilogue::Gated, p.first.args());
        let second = p.second.map_or(first, CudaStack::args);
        let args = GroupedMatmulArgs {
            matrices: [first.0, second.0],
            tile_bytes: [first.1, second.1],
            work: sorted.work,
            n_work: sorted.n_work,
            x: p.x,
            bias: [p.first.bias(), p.second.map_or(0, CudaStack::bias)],
            items: sorted.items,
            y: if gated { 0 } else { p.y },
            packed: if gated { p.y } else { 0 },
            n_slots: sorted.n_slots as u32,
            n_out: p.y_stride as u32,
            output: p.epilogue as u32,
            activation: p.activation,
        };
        let tiles = sorted.tiles_of_work;
        let rows = p.first.n_rows.div_ceil(TILE).div_ceil(if gated { 4 } else { 8 });
        let most_work = sorted.n_groups + sorted.n_slots / (8 * tiles);
        // Parts of a product have one format in a kernel.
        let unlike = p.second.filter(|second| !gated && !second.pairs_with(p.first));
        let parts = if p.second.is_some() && !gated && unlike.is_none() { 2 } else { 1 };
        let grid = LaunchGrid { blocks: [rows, most_work, parts], threads: 256, shared: 4 * tiles * 1024 };
        let name = |stack: &CudaStack| format!("grouped_matmul_{tiles}_{}", stack.layout().name());
        self.launch(&name(p.first), p.label, grid, &args)?;
        if let Some(stack) = unlike {
            let y = p.y + 4 * p.first.n_rows as u64;
            return self.sorted_product(&GroupedLinearOp { first: stack, second: None, y, ..*p }, sorted);
        }
        Ok(())
    }
}
