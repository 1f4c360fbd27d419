//! Products of rows each with a matrix of its own: those of experts, or of heads.

use super::Steps;
use super::product::{BUSY_WARPS, PANELS_AHEAD, WARPS};
use crate::CudaError;
use crate::args::{GroupedMatvecArgs, Output};
use crate::launch::Grid;
use crate::matrix::{Format, PANEL, TILE};
use crate::stack::CudaStack;

/// Most rows of a grid.
const MOST_ITEMS: usize = 65_535;

/// A product of items, each a row with the matrix of its group.
pub(super) struct Grouped<'a> {
    pub(super) what: &'static str,
    /// GATED: the gates.
    pub(super) first: &'a CudaStack,
    /// Its rows follow those of the first; GATED: the ups.
    pub(super) second: Option<&'a CudaStack>,
    pub(super) output: Output,
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

impl Steps {
    /// All `n_items` items, as exact as F32.
    pub(super) fn grouped(&mut self, p: &Grouped<'_>, n_items: usize) -> Result<(), CudaError> {
        let (n_in, first) = (p.first.n_in(), p.first.args());
        let second = p.second.map_or(first, CudaStack::args);
        let n_panels = n_in.div_ceil(PANEL);
        let n_tiles = p.first.n_rows.div_ceil(TILE);
        let most = (n_panels / PANELS_AHEAD).clamp(1, WARPS);
        let wanted = BUSY_WARPS.div_ceil(n_tiles * n_items).clamp(1, most);
        let warps_a_tile = if wanted.is_power_of_two() { wanted } else { wanted.next_power_of_two() / 2 };
        let n_groups = n_tiles.div_ceil(WARPS / warps_a_tile);
        // A block makes its input once, however many tiles it goes through.
        let blocks = (2 * self.gpu.summary().n_sm).div_ceil(n_items).clamp(1, n_groups);
        let parts = if p.second.is_some() && p.output != Output::Gated { 2 } else { 1 };
        let ring = |stack: &CudaStack| if stack.format() == Format::F32 { 8192 } else { 6144 };
        let ring = ring(p.first).max(p.second.map_or(0, ring));
        let shared = WARPS * ring + n_panels * 272 + 4 * (2 * WARPS * TILE + 1);
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
                output: p.output as u32,
                activation: p.activation,
                unused: 0,
            };
            let n = (n_items - first_item).min(MOST_ITEMS);
            let grid = Grid { blocks: [blocks, n, parts], threads: 32 * WARPS, shared };
            self.launch("grouped_matvec", p.what, grid, &args)?;
        }
        Ok(())
    }
}
