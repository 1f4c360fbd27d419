//! Walks of recurrences: the states of heads, which go through the tokens of all runs (`recurrence.cuh`).

use bytemuck::{Pod, Zeroable};

use super::{MicroBatch, ModelRunner};
use crate::CudaError;
use crate::args::{ConvolutionArgs, FusedDecodeArgs, GroupNormArgs, ScanArgs, StatesArgs};
use crate::launch::LaunchGrid;

/// Most tokens that are prepared at a time, and bytes of the two tiles of them that a block has: several blocks run side by side.
const TILE: usize = 16;
const ROOM: usize = 64 << 10;
/// Threads of a block that walk.
const WALKERS: usize = 128;

/// Taps, warps and channels of a thread of `walk_alone`, and bytes of workgroup memory, which leave room for the kernels beside it.
const ALONE_TAPS: u32 = 4;
const ALONE_WARPS: usize = 16;
const ALONE_CHANNELS: usize = 2;
const ALONE_ROOM: usize = 96 << 10;

/// Threads of a block that prepare tokens, where there are so many blocks and the longest run has as many tokens as `longest`. A block
/// that has a multiprocessor for itself takes twice as many as one of two, which would not fit beside each other.
fn preparers(n_blocks: usize, n_sm: usize, longest: usize) -> usize {
    match longest {
        0 | 1 => 0,
        _ if n_blocks <= n_sm => 2 * WALKERS,
        _ => WALKERS,
    }
}

/// What a launch has to know of a rule: `R` of `recurrence.cuh`.
#[derive(Debug, Clone, Copy)]
pub(super) struct RecurrenceKernel {
    /// Its kernels' names, but for the rows of a thread.
    name: &'static str,
    /// Threads that share a column.
    lanes: usize,
    /// Columns of a block.
    columns: usize,
    /// Vectors of a key that a token brings, and of the block's columns.
    vectors: usize,
    values: usize,
}

impl RecurrenceKernel {
    pub(super) const DELTA_RULE: Self = Self::per_head("delta_rule", 2, 1);
    pub(super) const DELTA_RULE_OF_CHANNELS: Self = Self::per_head("delta_rule_of_channels", 3, 1);
    pub(super) const MAMBA: Self = Self { name: "mamba", lanes: 4, columns: 32, vectors: 2, values: 4 };
    pub(super) const MAMBA2: Self = Self::per_head("mamba2", 2, 3);
    pub(super) const RWKV6: Self = Self::per_head("rwkv6", 3, 1);
    pub(super) const RWKV7: Self = Self::per_head("rwkv7", 5, 1);

    const fn per_head(name: &'static str, vectors: usize, values: usize) -> Self {
        Self { name, lanes: 16, columns: 16, vectors, values }
    }

    /// Rows of a thread, of keys of `key_dim`.
    fn rows(self, key_dim: usize) -> usize {
        4 * key_dim.div_ceil(4 * self.lanes).next_power_of_two()
    }

    /// Bytes of a token: `Prepared`.
    fn token_bytes(self, key_dim: usize) -> usize {
        4 * (self.vectors * self.lanes * self.rows(key_dim) + self.values * self.columns + 4)
    }

    /// Tokens of a tile where the longest run has as many as `longest`.
    fn tile(self, key_dim: usize, longest: usize) -> usize {
        TILE.min(longest).min(ROOM / (2 * self.token_bytes(key_dim))).max(1)
    }

    /// Warps and workgroup memory of a block of `walk_alone`, a head with its convolution, where it has room.
    fn fused_decode_block(self, n_tap: u32, key_dim: usize, value_dim: usize) -> Option<(usize, usize)> {
        let (columns_of_warp, channels) = (self.columns / 4, 2 * key_dim + value_dim);
        let warps = value_dim.div_ceil(columns_of_warp).max(channels.div_ceil(32 * ALONE_CHANNELS)).min(ALONE_WARPS);
        let columns = value_dim.next_multiple_of(warps * columns_of_warp);
        let state = 4 * columns * self.lanes * self.rows(key_dim);
        let shared =
            state + value_dim.div_ceil(self.columns) * self.token_bytes(key_dim) + 4 * (channels + 3 * value_dim);
        let fits = n_tap <= ALONE_TAPS && channels <= 32 * ALONE_CHANNELS * warps && shared <= ALONE_ROOM;
        fits.then_some((warps, shared))
    }
}

impl ModelRunner {
    /// What a walk of heads over all runs goes over, from states that begin at element `first` of a layer's.
    pub(super) fn scan_args(
        batch: MicroBatch<'_>,
        kernel: RecurrenceKernel,
        states: StatesArgs,
        out: u64,
        [n_head, key_dim, value_dim]: [usize; 3],
    ) -> ScanArgs {
        let (runs, sizes) = Self::runs(batch);
        ScanArgs {
            runs,
            states,
            out,
            n_head: n_head as u32,
            key_dim: key_dim as u32,
            value_dim: value_dim as u32,
            tile: kernel.tile(key_dim, sizes.longest) as u32,
        }
    }

    /// The walk of a rule over `of`, which is what `args` begin with.
    pub(super) fn launch_scan<A: Pod>(
        &mut self,
        batch: MicroBatch<'_>,
        kernel: RecurrenceKernel,
        scan: &ScanArgs,
        args: &A,
    ) -> Result<(), CudaError> {
        let (_, sizes) = Self::runs(batch);
        let (key_dim, value_dim) = (scan.key_dim as usize, scan.value_dim as usize);
        let blocks = [scan.n_head as usize * value_dim.div_ceil(kernel.columns), sizes.n, 1];
        let grid = LaunchGrid {
            blocks,
            threads: WALKERS + preparers(blocks[0] * blocks[1], self.gpu.summary().n_sm, sizes.longest),
            shared: 2 * scan.tile as usize * kernel.token_bytes(key_dim),
        };
        self.launch(&format!("{}_{}", kernel.name, kernel.rows(key_dim)), "", grid, args)
    }

    /// What tokens that are alone in their runs take besides the walk, to go through it together with the convolution before it and
    /// the norm of heads behind it, where there is one; `None`: these have launches of their own.
    pub(super) fn fused_decode_args(
        &self,
        batch: MicroBatch<'_>,
        kernel: RecurrenceKernel,
        scan: &ScanArgs,
        convolution: ConvolutionArgs,
        norm: Option<GroupNormArgs>,
    ) -> Option<FusedDecodeArgs> {
        let (_, sizes) = Self::runs(batch);
        let fits = kernel.fused_decode_block(convolution.n_tap, scan.key_dim as usize, scan.value_dim as usize)?;
        let goes = sizes.longest == 1 && fits.1 <= self.gpu.summary().max_shared;
        let norm = norm.unwrap_or(GroupNormArgs::zeroed());
        goes.then(|| FusedDecodeArgs { convolution, norm, tickets: self.buffers.tickets.ptr() })
    }

    /// The walk of `args`, which begin with `of`, of tokens that are alone, with what stands around it.
    pub(super) fn launch_fused_decode<A: Pod>(
        &mut self,
        batch: MicroBatch<'_>,
        kernel: RecurrenceKernel,
        scan: &ScanArgs,
        args: &A,
    ) -> Result<(), CudaError> {
        let (_, sizes) = Self::runs(batch);
        let (key_dim, value_dim) = (scan.key_dim as usize, scan.value_dim as usize);
        let (warps, shared) = kernel.fused_decode_block(1, key_dim, value_dim).expect("a walk that has room");
        let grid = LaunchGrid { blocks: [scan.n_head as usize, sizes.n, 1], threads: 32 * warps, shared };
        self.launch(&format!("{}_alone_{}", kernel.name, kernel.rows(key_dim)), "", grid, args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_are_alone_prepare_with_more_threads() {
        assert_eq!([1, 128, 132, 133, 256].map(|n| preparers(n, 132, 512)), [256, 256, 256, 128, 128]);
        assert_eq!([1, 256].map(|n| preparers(n, 132, 1)), [0, 0]);
    }

    #[test]
    fn heads_fuse_decode_where_their_state_has_room() {
        let alone = |kernel: RecurrenceKernel, key_dim, value_dim| {
            kernel.fused_decode_block(4, key_dim, value_dim).map(|(warps, _)| warps)
        };
        assert_eq!(alone(RecurrenceKernel::DELTA_RULE, 128, 128), Some(16));
        assert_eq!(alone(RecurrenceKernel::MAMBA2, 128, 64), Some(16));
        assert_eq!(alone(RecurrenceKernel::MAMBA2, 256, 64), Some(16));
        assert_eq!(alone(RecurrenceKernel::MAMBA2, 16, 5), Some(2));
        assert_eq!(alone(RecurrenceKernel::DELTA_RULE, 256, 256), None, "256 KB of state");
        assert!(RecurrenceKernel::DELTA_RULE.fused_decode_block(5, 128, 128).is_none(), "taps");
    }

    #[test]
    fn tiles_are_as_long_as_runs_and_have_room() {
        assert_eq!([1, 64, 65, 128, 129, 256].map(|n| RecurrenceKernel::DELTA_RULE.rows(n)), [4, 4, 8, 8, 16, 16]);
        assert_eq!([1, 16, 17, 64].map(|n| RecurrenceKernel::MAMBA.rows(n)), [4, 4, 8, 16]);
        assert_eq!([1, 5, 16, 512].map(|longest| RecurrenceKernel::DELTA_RULE.tile(128, longest)), [1, 5, 16, 16]);
        let rules = [
            RecurrenceKernel::DELTA_RULE,
            RecurrenceKernel::DELTA_RULE_OF_CHANNELS,
            RecurrenceKernel::MAMBA2,
            RecurrenceKernel::RWKV6,
            RecurrenceKernel::RWKV7,
        ];
        for (kernel, key_dim) in rules.map(|kernel| (kernel, 256)).into_iter().chain([(RecurrenceKernel::MAMBA, 64)]) {
            assert!((4..=16).contains(&kernel.rows(key_dim)));
            assert!(2 * kernel.tile(key_dim, 512) * kernel.token_bytes(key_dim) <= ROOM);
        }
    }
}
