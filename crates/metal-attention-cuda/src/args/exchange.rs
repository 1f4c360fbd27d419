//! Arguments of kernels that exchange values between ranks: structures of `kernels/exchange.cuh` and `kernels/exchange.cu`. Fields of type `u64`
//! are device addresses.

use bytemuck::{Pod, Zeroable};

/// Ranks that can share a model: `MAX_RANKS` of `exchange.cuh`.
pub(crate) const MAX_RANKS: usize = 8;

/// The mailboxes of the ranks: `Exchange` of `exchange.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct ExchangeArgs {
    /// The mailbox of each rank.
    pub(crate) mailboxes: [u64; MAX_RANKS],
    /// Exchanges of all earlier steps: a `u32` in device memory.
    pub(crate) exchanges_done: u64,
    /// [`AbortFlag`](crate::exchange::AbortFlag): a `u32` in host memory.
    pub(crate) abort: u64,
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
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct AllReduceArgs {
    pub(crate) exchange: ExchangeArgs,
    /// F32 `[n]`: this rank's terms.
    pub(crate) part: u64,
    /// F32 `[n]`: the result.
    pub(crate) out: u64,
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
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct AllGatherArgs {
    pub(crate) exchange: ExchangeArgs,
    /// F32 `[n_rows, stride]`, of which this rank has written its columns.
    pub(crate) rows: u64,
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
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct CountExchangesArgs {
    /// Exchanges of all earlier steps, to which `n` is added.
    pub(crate) exchanges_done: u64,
    /// Exchanges of this step.
    pub(crate) n: u32,
    pub(crate) unused: u32,
}
