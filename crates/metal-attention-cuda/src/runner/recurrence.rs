//! What recurrent mixers share: the convolution before a scan and the norm of groups after it (`recurrent.cu`), and the scan
//! itself, which updates the states of heads token by token over all runs (`recurrence.cuh`), for Mamba, Mamba-2, the delta rule,
//! RWKV-6 and RWKV-7.
//!
//! A head's state is a matrix `[key_dim, value_dim]`. A block owns some columns of it for one run, and keeps them in registers:
//! its scanning threads go through the tokens in order, while its preparing threads compute the vectors of the next tile of
//! tokens in shared memory. In decode steps, where every run is one token, a fused kernel does convolution, scan and norm of a
//! whole head in one launch (`fused_decode` of `recurrence.cuh`).

use bytemuck::Zeroable;

use super::{MicroBatch, ModelRunner};
use crate::CudaError;
use crate::args::{ConvolutionArgs, FusedDecodeArgs, GroupNormArgs, RunsArgs, ScanArgs, StatesArgs};
use crate::bounds::KernelArgs;
use crate::kernels::{self, EntryPoint};
use crate::launch::LaunchGrid;
use crate::recurrent_state::RunSizes;
use crate::slice::DeviceSlice;

/// Most taps of a convolution: `MAX_TAPS` of `recurrent.cu`.
const MAX_TAPS: usize = 16;
/// Most tokens of a run that a block of `convolution` or `token_shift` takes: `CONVOLVED` and `SHIFTED` of `recurrent.cu` and
/// `rwkv.cu`.
const TOKENS_OF_BLOCK: usize = 16;
/// Most elements of a group that one warp normalises; larger groups use a block.
const SMALL_GROUP: u32 = 256;

/// Rows of the state of a thread, at most: the last kernel of each family.
const MAX_ROWS: usize = 16;
/// Most tokens of a tile.
const TILE: usize = 16;
/// Most shared memory of a block's two tiles, so that several blocks are resident.
const TILES_BYTES: usize = 64 << 10;
/// Scanning threads of a block.
const SCAN_THREADS: usize = 128;

/// Most taps of the convolution that `fused_decode` supports: `FUSED_TAPS` of `recurrence.cuh`.
const FUSED_TAPS: u32 = 4;
/// Most warps of a block of `fused_decode`.
const FUSED_WARPS: usize = 16;
/// Most channels of a thread of `fused_decode`: `FUSED_CHANNELS` of `recurrence.cuh`.
const FUSED_CHANNELS: usize = 2;
/// Most shared memory of a block of `fused_decode`, which leaves space for blocks of the kernels before and after.
const FUSED_SHARED: usize = 96 << 10;

/// Checks that there are kernels for a convolution over `n` tokens; the error is the part without one.
pub(crate) fn supports_taps(n: usize) -> Result<(), &'static str> {
    if n > MAX_TAPS { Err("convolutions over that many tokens") } else { Ok(()) }
}

/// Preparing threads of a block, for a grid of `n_blocks` blocks and runs of up to `longest` tokens: none for single tokens;
/// twice as many where a block has a multiprocessor alone, since two such blocks would not fit on one.
fn preparing_threads(n_blocks: usize, n_sm: usize, longest: usize) -> usize {
    match longest {
        0 | 1 => 0,
        _ if n_blocks <= n_sm => 2 * SCAN_THREADS,
        _ => SCAN_THREADS,
    }
}

/// The geometry of the blocks of one kind of recurrence: `R` of `recurrence.cuh`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RecurrenceKernel {
    /// Threads that share a column of the state.
    lanes: usize,
    /// Columns of the state of a block.
    columns: usize,
    /// Vectors of `key_dim` numbers of each token.
    vectors: usize,
    /// Vectors of one number for each column of the block, of each token.
    values: usize,
}

impl RecurrenceKernel {
    /// The gated delta rule, with a decay for each head.
    pub(crate) const DELTA_RULE: Self = Self::per_head(2, 1);
    /// The gated delta rule, with a decay for each channel of a head.
    pub(crate) const DELTA_RULE_OF_CHANNELS: Self = Self::per_head(3, 1);
    /// Mamba: one head, whose columns are the channels.
    pub(crate) const MAMBA: Self = Self { lanes: 4, columns: 32, vectors: 2, values: 4 };
    /// Mamba-2.
    pub(crate) const MAMBA2: Self = Self::per_head(2, 3);
    /// RWKV-6.
    pub(crate) const RWKV6: Self = Self::per_head(3, 1);
    /// RWKV-7.
    pub(crate) const RWKV7: Self = Self::per_head(5, 1);

    /// A recurrence with a matrix for each head.
    const fn per_head(vectors: usize, values: usize) -> Self {
        Self { lanes: 16, columns: 16, vectors, values }
    }

    /// Whether there is a kernel for keys of `key_dim` numbers.
    pub(crate) fn has_keys_of(self, key_dim: usize) -> bool {
        key_dim <= self.lanes * MAX_ROWS
    }

    /// Checks that there is a kernel for keys of `key_dim` numbers; the error is the part without one.
    pub(crate) fn supports_keys(self, key_dim: usize) -> Result<(), &'static str> {
        if self.has_keys_of(key_dim) { Ok(()) } else { Err("recurrent states of that many rows") }
    }

    /// Rows of the state of a thread, for keys of `key_dim` numbers.
    fn rows(self, key_dim: usize) -> usize {
        4 * key_dim.div_ceil(4 * self.lanes).next_power_of_two()
    }

    /// The kernel of a family, one for 4, 8 and 16 rows of a thread each, for keys of `key_dim` numbers.
    fn for_keys<A>(self, family: [EntryPoint<A>; 3], key_dim: usize) -> EntryPoint<A> {
        family[(self.rows(key_dim) / 4).ilog2() as usize]
    }

    /// Bytes of a prepared token in shared memory: `Prepared` of `recurrence.cuh`.
    fn token_bytes(self, key_dim: usize) -> usize {
        4 * (self.vectors * self.lanes * self.rows(key_dim) + self.values * self.columns + 4)
    }

    /// Tokens of a tile, for runs of up to `longest` tokens.
    fn tile(self, key_dim: usize, longest: usize) -> usize {
        TILE.min(longest).min(TILES_BYTES / (2 * self.token_bytes(key_dim))).max(1)
    }

    /// Warps and shared memory of a block of `fused_decode` of `recurrence.cuh`, which has a whole head with its convolution. `None` if a limit is
    /// exceeded.
    fn fused_decode_block(self, n_tap: u32, key_dim: usize, value_dim: usize) -> Option<(usize, usize)> {
        let (columns_of_warp, channels) = (self.columns / 4, 2 * key_dim + value_dim);
        let warps = value_dim.div_ceil(columns_of_warp).max(channels.div_ceil(32 * FUSED_CHANNELS)).min(FUSED_WARPS);
        let columns = value_dim.next_multiple_of(warps * columns_of_warp);
        let state = 4 * columns * self.lanes * self.rows(key_dim);
        let shared =
            state + value_dim.div_ceil(self.columns) * self.token_bytes(key_dim) + 4 * (channels + 3 * value_dim);
        let fits = n_tap <= FUSED_TAPS && channels <= 32 * FUSED_CHANNELS * warps && shared <= FUSED_SHARED;
        fits.then_some((warps, shared))
    }
}

impl ModelRunner {
    /// The runs of the micro-batch, and their sizes.
    pub(crate) fn runs(batch: MicroBatch<'_>) -> (RunsArgs, RunSizes) {
        (batch.recurrent.runs(), batch.size.runs)
    }

    /// Launches the convolution of layer `i`. Its state, the last inputs, is the first part of the layer's state. `args` need
    /// no runs and states.
    pub(crate) fn convolution(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        args: ConvolutionArgs,
    ) -> Result<(), CudaError> {
        let args = Self::convolution_of(batch, i, args);
        let entry = if args.n_tap <= 4 { kernels::CONVOLUTION } else { kernels::CONVOLUTION_LONG };
        self.launch(entry, "", Self::channels_of_runs(batch, args.channels as usize), &args)
    }

    /// `args` with the runs of the micro-batch and the states of layer `i`.
    pub(crate) fn convolution_of(batch: MicroBatch<'_>, i: usize, args: ConvolutionArgs) -> ConvolutionArgs {
        let (runs, _) = Self::runs(batch);
        ConvolutionArgs { runs, states: batch.recurrent.of_layer(i, 0), ..args }
    }

    /// A grid with a thread for each channel and some tokens of a run, 128 channels to a block.
    pub(crate) fn channels_of_runs(batch: MicroBatch<'_>, channels: usize) -> LaunchGrid {
        let (_, sizes) = Self::runs(batch);
        let blocks = [channels.div_ceil(128), sizes.longest.div_ceil(TOKENS_OF_BLOCK), sizes.n];
        LaunchGrid { blocks, threads: 128, shared: 0 }
    }

    /// Launches norm and gate over groups of each token's row.
    pub(crate) fn group_norm(&mut self, batch: MicroBatch<'_>, args: &GroupNormArgs) -> Result<(), CudaError> {
        // Four elements for each thread, as far as a block has threads.
        let (entry, groups, threads) = match args.n {
            0..=SMALL_GROUP => (kernels::GROUP_NORM_SMALL, 4, 128),
            n => (kernels::GROUP_NORM, 1, (n as usize / 4).next_multiple_of(32).min(1024)),
        };
        let blocks = [(args.n_group as usize).div_ceil(groups), batch.size.n_tokens, 1];
        self.launch(entry, "", LaunchGrid { blocks, threads, shared: 0 }, args)
    }

    /// Arguments of a scan over all runs, from `states` to the rows `out`.
    pub(crate) fn scan_args(
        batch: MicroBatch<'_>,
        kernel: RecurrenceKernel,
        states: StatesArgs,
        out: DeviceSlice<f32>,
        [n_head, key_dim, value_dim]: [usize; 3],
    ) -> ScanArgs {
        let (runs, sizes) = Self::runs(batch);
        ScanArgs {
            runs,
            states,
            out: out.ptr(),
            n_head: n_head as u32,
            key_dim: key_dim as u32,
            value_dim: value_dim as u32,
            tile: kernel.tile(key_dim, sizes.longest) as u32,
        }
    }

    /// Launches a scan by a kernel of `family`. `args` are its arguments, which begin with `scan`.
    pub(crate) fn launch_scan<A: KernelArgs>(
        &mut self,
        batch: MicroBatch<'_>,
        kernel: RecurrenceKernel,
        family: [EntryPoint<A>; 3],
        scan: &ScanArgs,
        args: &A,
    ) -> Result<(), CudaError> {
        let (_, sizes) = Self::runs(batch);
        let (key_dim, value_dim) = (scan.key_dim as usize, scan.value_dim as usize);
        let blocks = [scan.n_head as usize * value_dim.div_ceil(kernel.columns), sizes.n, 1];
        let grid = LaunchGrid {
            blocks,
            threads: SCAN_THREADS + preparing_threads(blocks[0] * blocks[1], self.gpu.summary().n_sm, sizes.longest),
            shared: 2 * scan.tile as usize * kernel.token_bytes(key_dim),
        };
        self.launch(kernel.for_keys(family, key_dim), "", grid, args)
    }

    /// The further arguments of the fused decode kernel: the convolution before the scan and the norm of each head after it, if
    /// there is one. `None` if a run has several tokens or a head is too large; then these are separate launches.
    pub(crate) fn fused_decode_args(
        &self,
        batch: MicroBatch<'_>,
        kernel: RecurrenceKernel,
        scan: &ScanArgs,
        convolution: ConvolutionArgs,
        norm: Option<GroupNormArgs>,
    ) -> Option<FusedDecodeArgs> {
        let (_, sizes) = Self::runs(batch);
        let fits = kernel.fused_decode_block(convolution.n_tap, scan.key_dim as usize, scan.value_dim as usize)?;
        let is_decode = sizes.longest == 1 && fits.1 <= self.gpu.summary().max_shared;
        let norm = norm.unwrap_or(GroupNormArgs::zeroed());
        is_decode.then(|| FusedDecodeArgs { convolution, norm, tickets: self.buffers.tickets.ptr() })
    }

    /// Launches the fused decode kernel, one of `family`. `args` are its arguments, which begin with `scan`.
    pub(crate) fn launch_fused_decode<A: KernelArgs>(
        &mut self,
        batch: MicroBatch<'_>,
        kernel: RecurrenceKernel,
        family: [EntryPoint<A>; 3],
        scan: &ScanArgs,
        args: &A,
    ) -> Result<(), CudaError> {
        let (_, sizes) = Self::runs(batch);
        let (key_dim, value_dim) = (scan.key_dim as usize, scan.value_dim as usize);
        let (warps, shared) = kernel.fused_decode_block(1, key_dim, value_dim).expect("a head within the limits");
        let grid = LaunchGrid { blocks: [scan.n_head as usize, sizes.n, 1], threads: 32 * warps, shared };
        self.launch(kernel.for_keys(family, key_dim), "", grid, args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_with_a_multiprocessor_alone_prepare_with_more_threads() {
        assert_eq!([1, 128, 132, 133, 256].map(|n| preparing_threads(n, 132, 512)), [256, 256, 256, 128, 128]);
        assert_eq!([1, 256].map(|n| preparing_threads(n, 132, 1)), [0, 0]);
    }

    #[test]
    fn keys_are_as_long_as_the_rows_of_all_lanes() {
        let longest = |kernel: RecurrenceKernel| (1..1000).filter(|n| kernel.supports_keys(*n).is_ok()).max();
        assert_eq!(longest(RecurrenceKernel::MAMBA), Some(64));
        assert_eq!(longest(RecurrenceKernel::MAMBA2), Some(256));
    }

    #[test]
    fn decode_is_fused_where_the_state_fits() {
        let fused_warps = |kernel: RecurrenceKernel, key_dim, value_dim| {
            kernel.fused_decode_block(4, key_dim, value_dim).map(|(warps, _)| warps)
        };
        assert_eq!(fused_warps(RecurrenceKernel::DELTA_RULE, 128, 128), Some(16));
        assert_eq!(fused_warps(RecurrenceKernel::MAMBA2, 128, 64), Some(16));
        assert_eq!(fused_warps(RecurrenceKernel::MAMBA2, 256, 64), Some(16));
        assert_eq!(fused_warps(RecurrenceKernel::MAMBA2, 16, 5), Some(2));
        assert_eq!(fused_warps(RecurrenceKernel::DELTA_RULE, 256, 256), None, "256 KB of state");
        assert!(RecurrenceKernel::DELTA_RULE.fused_decode_block(5, 128, 128).is_none(), "taps");
    }

    #[test]
    fn tiles_are_as_long_as_runs_and_fit() {
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
            assert!(2 * kernel.tile(key_dim, 512) * kernel.token_bytes(key_dim) <= TILES_BYTES);
        }
    }
}
