//! Arguments of kernels that exchange values between ranks: structures of `kernels/exchange.cuh` and `kernels/exchange.cu`.

use super::kernel_args;
use crate::bounds::{Bounds, KernelArgs, Launch};
use crate::exchange::CHUNK;
use crate::slice::DevicePtr;

/// Ranks that can share a model: `MAX_RANKS` of `exchange.cuh`.
pub(crate) const MAX_RANKS: usize = 8;

kernel_args! {
    /// The mailboxes of the ranks: `Exchange` of `exchange.cuh`.
    pub(crate) struct ExchangeArgs = "Exchange" in "exchange.cuh" {
        /// The mailbox of each rank.
        pub(crate) mailboxes: [DevicePtr<u64>; MAX_RANKS],
        /// Exchanges of all earlier steps: a `u32` in device memory.
        pub(crate) exchanges_done: DevicePtr<u32>,
        /// [`AbortFlag`](crate::exchange::AbortFlag): a `u32` in host memory.
        pub(crate) abort: DevicePtr<u32>,
        /// This rank.
        pub(crate) rank: u32,
        /// Ranks that share the model.
        pub(crate) n_ranks: u32,
        /// Words from each rank to each, in each half of a mailbox.
        pub(crate) n_words: u32,
        /// Chunks from each rank to each, in each half and phase.
        pub(crate) n_chunks: u32,
    }

    /// The sum of a vector over the ranks: `AllReduceArgs` of `exchange.cu`.
    pub(crate) struct AllReduceArgs = "AllReduceArgs" in "exchange.cu" {
        pub(crate) exchange: ExchangeArgs,
        /// F32 `[n]`: this rank's terms.
        pub(crate) part: DevicePtr<f32>,
        /// F32 `[n]`: the result.
        pub(crate) out: DevicePtr<f32>,
        /// Elements.
        pub(crate) n: u32,
        /// 1: `out += scale * sum`; 0: `out = scale * sum`.
        pub(crate) add: u32,
        /// Factor on the sum.
        pub(crate) scale: f32,
        /// Exchanges of this step before this one.
        pub(crate) exchanges_before: u32,
    }

    /// Rows whose columns are divided among the ranks: `AllGatherArgs` of `exchange.cu`.
    pub(crate) struct AllGatherArgs = "AllGatherArgs" in "exchange.cu" {
        pub(crate) exchange: ExchangeArgs,
        /// F32 `[n_rows, stride]`, of which this rank has written its columns.
        pub(crate) rows: DevicePtr<f32>,
        /// Rows.
        pub(crate) n_rows: u32,
        /// Elements from one row to the next.
        pub(crate) stride: u32,
        /// First column of each rank, then the number of columns.
        pub(crate) first_columns: [u32; MAX_RANKS + 1],
        /// Exchanges of this step before this one.
        pub(crate) exchanges_before: u32,
    }

    /// The end of a step: `CountExchangesArgs` of `exchange.cu`.
    pub(crate) struct CountExchangesArgs = "CountExchangesArgs" in "exchange.cu" {
        /// Exchanges of all earlier steps, to which `n` is added.
        pub(crate) exchanges_done: DevicePtr<u32>,
        /// Exchanges of this step.
        pub(crate) n: u32,
        pub(crate) unused: u32,
    }
}

impl ExchangeArgs {
    /// States the mailboxes of all ranks, as `exchange.cu` describes them.
    pub(super) fn bounds(&self, bounds: &mut Bounds) {
        let [n_ranks, n_words, n_chunks] = [self.n_ranks, self.n_words, self.n_chunks].map(|n| n as usize);
        let words_of_chunks = 2 * n_ranks * 2 * n_chunks * (1 + CHUNK);
        for mailbox in self.mailboxes.iter().take(n_ranks) {
            bounds.array("exchange.mailboxes", *mailbox, 2 * n_ranks * n_words + words_of_chunks.div_ceil(2));
        }
        bounds.array("exchange.exchanges_done", self.exchanges_done, 1);
        bounds.array("exchange.abort", self.abort, 1);
    }
}

impl KernelArgs for AllReduceArgs {
    fn bounds(&self, _: &Launch, bounds: &mut Bounds) {
        self.exchange.bounds(bounds);
        bounds.array("part", self.part, self.n as usize);
        bounds.array("out", self.out, self.n as usize);
    }
}

impl KernelArgs for AllGatherArgs {
    fn bounds(&self, _: &Launch, bounds: &mut Bounds) {
        self.exchange.bounds(bounds);
        let width = self.first_columns.iter().max().map_or(0, |end| *end as usize);
        bounds.rows("rows", self.rows, self.n_rows as usize, self.stride, width);
    }
}

impl KernelArgs for CountExchangesArgs {
    fn bounds(&self, _: &Launch, bounds: &mut Bounds) {
        bounds.array("exchanges_done", self.exchanges_done, 1);
    }
}
