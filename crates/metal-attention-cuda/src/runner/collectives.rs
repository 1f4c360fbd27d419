//! Collective operations of the ranks within a forward pass: all-reduce of partial sums and all-gather of logits
//! (`exchange.cu`).
//!
//! Every rank launches the same collectives in the same order; each has a number, from which its kernel derives the tags of its
//! messages. Kernels wait for the other ranks on the device, and abort if that takes too long or a rank has failed;
//! [`check_not_aborted`](ModelRunner::check_not_aborted) reports it.

use super::ModelRunner;
use crate::CudaError;
use crate::args::{AllGatherArgs, AllReduceArgs, MAX_RANKS};
use crate::exchange::{CHUNK, Exchange};
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::slice::DeviceSlice;

/// Threads of a block of the collectives that are not sliced.
const THREADS: usize = 256;
/// Threads of a block of a sliced all-reduce, as `exchange.cu` has them.
const SLICE_THREADS: usize = 512;
/// Blocks of a sliced all-reduce on each multiprocessor: while one waits, the other works.
const SLICE_BLOCKS: usize = 2;
/// Values that a rank would send from which on an all-reduce is sliced: each rank sums one slice (reduce-scatter) and sends the
/// sums to the others (all-gather). Below that, each rank sends all of its values to all others, which takes one exchange of
/// messages.
const MIN_SLICED_VALUES: usize = 1 << 18;

impl ModelRunner {
    /// The number of the next exchange within the forward pass.
    fn next_exchange(&mut self) -> u32 {
        self.exchange.as_mut().map_or(0, Exchange::next_index)
    }

    /// Counts the exchanges of the forward pass on the device, so that the tags of the next pass differ. The last launch of a
    /// pass.
    pub(crate) fn count_exchanges(&mut self) -> Result<(), CudaError> {
        let Some(args) = self.exchange.as_ref().map(Exchange::count_args).filter(|args| args.n > 0) else {
            return Ok(());
        };
        self.launch(kernels::COUNT_EXCHANGES, "", LaunchGrid { blocks: [1, 1, 1], threads: 32, shared: 0 }, &args)
    }

    /// An error if the ranks have aborted an exchange of a forward pass that has ended.
    pub(crate) fn check_not_aborted(&self) -> Result<(), CudaError> {
        self.exchange.as_ref().map_or(Ok(()), |exchange| exchange.abort.check())
    }

    /// The grid for `n` values. No more blocks than multiprocessors, since all of them have to be resident while they wait for
    /// other ranks.
    fn exchange_grid(&self, n: usize) -> LaunchGrid {
        let blocks = n.div_ceil(THREADS).clamp(1, self.gpu.summary().n_sm);
        LaunchGrid { blocks: [blocks, 1, 1], threads: THREADS, shared: 0 }
    }

    /// `out = scale * sum of part over the ranks`, or, with `add`, `out += ...`: the first `n` elements of `part` and
    /// `out`. The sum is computed in the order of the ranks, so that all have the same bits. Sliced sums are sent as F16 unless
    /// the runner is `exact`. Does nothing without tensor parallelism.
    pub(crate) fn all_reduce(
        &mut self,
        part: DeviceSlice<f32>,
        out: DeviceSlice<f32>,
        n: usize,
        (add, scale): (bool, f32),
    ) -> Result<(), CudaError> {
        let Some(exchange) = &self.exchange else { return Ok(()) };
        let args = exchange.args();
        let n_ranks = args.n_ranks as usize;
        // Slices are processed four values at a time.
        let in_slices = n * (n_ranks - 1) >= MIN_SLICED_VALUES && n.is_multiple_of(4);
        let at_once = if in_slices { exchange.max_slice_values() } else { exchange.capacity };
        for first in (0..n).step_by(at_once) {
            let n = (n - first).min(at_once);
            let args = AllReduceArgs {
                exchange: args,
                part: part.skip(first).ptr(),
                out: out.skip(first).ptr(),
                n: n as u32,
                add: u32::from(add),
                scale,
                exchanges_before: self.next_exchange(),
            };
            if in_slices {
                let entry = if self.exact { kernels::SUM_SLICES_EXACTLY } else { kernels::SUM_SLICES };
                let blocks = n.div_ceil(n_ranks).div_ceil(CHUNK).min(SLICE_BLOCKS * self.gpu.summary().n_sm);
                let grid = LaunchGrid { blocks: [blocks, 1, 1], threads: SLICE_THREADS, shared: 0 };
                self.launch(entry, "", grid, &args)?;
            } else {
                self.launch(kernels::ALL_REDUCE, "", self.exchange_grid(n), &args)?;
            }
        }
        Ok(())
    }

    /// Gathers the logits of `n_rows` tokens, `[n_rows, n_vocab]`, of which each rank has computed the columns of its part of
    /// the vocabulary. Does nothing if the output head is not sharded.
    pub(crate) fn gather_logits(&mut self, n_rows: usize, n_vocab: usize) -> Result<(), CudaError> {
        let Some(exchange) = self.exchange.as_ref().filter(|exchange| exchange.shard.plan.head) else {
            return Ok(());
        };
        let widest = exchange.vocabulary.iter().map(ExactSizeIterator::len).max().unwrap_or(1).max(1);
        let mut first_columns = [n_vocab as u32; MAX_RANKS + 1];
        for (first, rows) in first_columns.iter_mut().zip(&exchange.vocabulary) {
            *first = rows.start as u32;
        }
        let (exchange, rows_at_once) = (exchange.args(), exchange.capacity / widest);
        for first in (0..n_rows).step_by(rows_at_once) {
            let n = (n_rows - first).min(rows_at_once);
            let rows = self.buffers.logits.slice().skip(first * n_vocab).ptr();
            let (n_rows, stride) = (n as u32, n_vocab as u32);
            let exchanges_before = self.next_exchange();
            let args = AllGatherArgs { exchange, rows, n_rows, stride, first_columns, exchanges_before };
            self.launch(kernels::ALL_GATHER, "", self.exchange_grid(n * widest), &args)?;
        }
        Ok(())
    }
}
