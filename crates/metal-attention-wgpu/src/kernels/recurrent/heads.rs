//! How the recurrences with a matrix a head are cut for workgroups.

use crate::device::WgpuDevice;
use crate::shader::Constant;

/// Bytes of workgroup memory that the vectors of a block of tokens may take up.
const STAGED_BYTES: usize = 12 << 10;
/// Tokens of a block, at most.
pub(super) const MOST_BLOCK: usize = 8;
/// Invocations of a workgroup that has a whole head, at most.
const MOST_THREADS: usize = 512;
/// Bytes of workgroup memory that nearly every device has.
const WORKGROUP_BYTES: usize = 32 << 10;

/// The part of a head that a workgroup has, and how it goes through the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HeadTile {
    /// Columns.
    pub(super) columns: usize,
    /// Invocations that share a column.
    pub(super) splits: usize,
    /// Tokens whose vectors lie in workgroup memory at once.
    pub(super) block: usize,
}

/// A head.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadShape {
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
    /// Vectors of `key_dim` elements that a token has.
    pub(super) n_vectors: usize,
    /// Vectors of `value_dim` elements that a token has.
    pub(super) n_values: usize,
    /// Sums over the rows of a column that a token takes.
    pub(super) n_sums: usize,
}

impl HeadShape {
    /// Invocations that can share a column, each with four rows or more.
    fn splits(&self, most: usize) -> usize {
        self.key_dim.div_ceil(4).next_power_of_two().min(most)
    }

    fn row_bytes(&self, columns: usize, splits: usize) -> usize {
        let keys = self.key_dim.div_ceil(4 * splits) * splits;
        16 * (self.n_vectors * keys + self.n_values * columns.div_ceil(4))
    }

    /// A few columns, for many tokens: columns do not touch each other, and a large GPU wants many workgroups.
    pub(super) fn scan(&self) -> HeadTile {
        let (columns, splits) = (self.value_dim.next_power_of_two().min(16), self.splits(8));
        let fitting = STAGED_BYTES / self.row_bytes(columns, splits);
        // Gates are computed by an invocation each.
        HeadTile { columns, splits, block: fitting.min(columns * splits).clamp(1, MOST_BLOCK) }
    }

    /// All columns, with up to `most_block` tokens at once and so many other floats beside them; `None` where they are too many
    /// for a workgroup.
    fn whole(&self, kept: usize, most_block: usize, max_threads: usize, max_bytes: usize) -> Option<HeadTile> {
        let columns = self.value_dim.next_power_of_two();
        let most = max_threads.min(MOST_THREADS) / columns;
        if most == 0 {
            return None;
        }
        let splits = self.splits(prev_power_of_two(most).min(8));
        let threads = columns * splits;
        // What sums go through where there are no subgroups is counted everywhere.
        let others = 4 * (2 * self.n_sums * threads + threads + kept) + 64;
        let fitting = max_bytes.saturating_sub(others).min(STAGED_BYTES) / self.row_bytes(columns, splits);
        let block = fitting.min(most_block).min(threads);
        (block > 0).then_some(HeadTile { columns, splits, block })
    }

    /// All columns on `gpu`, with up to `most_block` tokens at once and so many other floats in workgroup memory; `None` where
    /// they are too many for a workgroup.
    pub(super) fn whole_on(&self, gpu: &WgpuDevice, kept: usize, most_block: usize) -> Option<HeadTile> {
        let limits = gpu.wgpu().limits();
        let threads = limits.max_compute_invocations_per_workgroup.min(limits.max_compute_workgroup_size_x);
        self.whole(kept, most_block, threads as usize, limits.max_compute_workgroup_storage_size as usize)
    }

    /// [`whole_on`](Self::whole_on) nearly every device.
    pub(super) fn whole_anywhere(&self, kept: usize, most_block: usize) -> Option<HeadTile> {
        self.whole(kept, most_block, MOST_THREADS, WORKGROUP_BYTES)
    }

    pub(super) fn constants(&self, tile: HeadTile) -> Vec<(&'static str, Constant)> {
        vec![
            ("key_dim", self.key_dim.into()),
            ("value_dim", self.value_dim.into()),
            ("n_vectors", self.n_vectors.into()),
            ("n_values", self.n_values.into()),
            ("n_sums", self.n_sums.into()),
            ("columns", tile.columns.into()),
            ("splits", tile.splits.into()),
            ("block", tile.block.into()),
        ]
    }
}

fn prev_power_of_two(n: usize) -> usize {
    (n / 2 + 1).next_power_of_two()
}
