//! The division of recurrences with a matrix for each head among workgroups.

use crate::device::WgpuDevice;
use crate::shader::Constant;

/// Most bytes of workgroup memory for the vectors of a block of tokens.
const STAGED_BYTES: usize = 12 << 10;
/// Most tokens of a block.
pub(super) const MOST_BLOCK: usize = 8;
/// Most invocations of a workgroup that processes a whole head.
const MOST_THREADS: usize = 512;
/// Bytes of workgroup memory that nearly every device has.
const WORKGROUP_BYTES: usize = 32 << 10;

/// The part of a head that a workgroup processes, and the tokens that it stages at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HeadTile {
    /// Columns of the state's matrix.
    pub(super) columns: usize,
    /// Invocations that share a column, each with some of its rows.
    pub(super) splits: usize,
    /// Tokens whose vectors are in workgroup memory at a time.
    pub(super) block: usize,
}

/// The sizes of a head that its division depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadShape {
    /// Rows of the state's matrix.
    pub(super) key_dim: usize,
    /// Columns of the state's matrix.
    pub(super) value_dim: usize,
    /// Vectors of `key_dim` elements of each token.
    pub(super) n_vectors: usize,
    /// Vectors of `value_dim` elements of each token.
    pub(super) n_values: usize,
    /// Sums over the rows of a column for each token.
    pub(super) n_sums: usize,
}

impl HeadShape {
    /// Invocations that can share a column, at most `most`, each with at least four rows.
    fn splits(&self, most: usize) -> usize {
        self.key_dim.div_ceil(4).next_power_of_two().min(most)
    }

    fn row_bytes(&self, columns: usize, splits: usize) -> usize {
        let keys = self.key_dim.div_ceil(4 * splits) * splits;
        16 * (self.n_vectors * keys + self.n_values * columns.div_ceil(4))
    }

    /// The tile for many tokens: a few columns, as columns are independent and a large GPU needs many workgroups.
    pub(super) fn scan(&self) -> HeadTile {
        let (columns, splits) = (self.value_dim.next_power_of_two().min(16), self.splits(8));
        let fitting = STAGED_BYTES / self.row_bytes(columns, splits);
        // Each token's gates are computed by one invocation.
        HeadTile { columns, splits, block: fitting.min(columns * splits).clamp(1, MOST_BLOCK) }
    }

    /// The tile of all columns, with up to `most_block` tokens at a time and `kept` other floats in workgroup memory.
    /// `None` if they do not fit a workgroup.
    fn whole(&self, kept: usize, most_block: usize, max_threads: usize, max_bytes: usize) -> Option<HeadTile> {
        let columns = self.value_dim.next_power_of_two();
        let most = max_threads.min(MOST_THREADS) / columns;
        if most == 0 {
            return None;
        }
        let splits = self.splits(prev_power_of_two(most).min(8));
        let threads = columns * splits;
        // Memory for sums, which only devices without subgroups need, is always included.
        let others = 4 * (2 * self.n_sums * threads + threads + kept) + 64;
        let fitting = max_bytes.saturating_sub(others).min(STAGED_BYTES) / self.row_bytes(columns, splits);
        let block = fitting.min(most_block).min(threads);
        (block > 0).then_some(HeadTile { columns, splits, block })
    }

    /// The tile of all columns on `gpu`, with up to `most_block` tokens at a time and `kept` other floats in workgroup
    /// memory. `None` if they do not fit a workgroup.
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
