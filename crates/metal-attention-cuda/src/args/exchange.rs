//! Arguments of the kernels that exchange data with other ranks.

use bytemuck::{Pod, Zeroable};

/// Most ranks: as `exchange.cuh` has it.
pub(crate) const MAX_RANKS: usize = 8;

/// The mailboxes of all ranks: `Exchange` of `exchange.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct ExchangeArgs {
    pub(crate) mailboxes: [u64; MAX_RANKS],
    pub(crate) before: u64,
    pub(crate) ended: u64,
    pub(crate) rank: u32,
    pub(crate) n_ranks: u32,
    pub(crate) n_words: u32,
    pub(crate) n_chunks: u32,
}

/// Arguments of an all-reduce (`exchange.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct AllReduceArgs {
    pub(crate) exchange: ExchangeArgs,
    pub(crate) part: u64,
    pub(crate) out: u64,
    pub(crate) n: u32,
    pub(crate) add: u32,
    pub(crate) scale: f32,
    pub(crate) of_step: u32,
}

/// Arguments of the all-gather of logits (`exchange.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct AllGatherArgs {
    pub(crate) exchange: ExchangeArgs,
    pub(crate) rows: u64,
    pub(crate) n_rows: u32,
    pub(crate) stride: u32,
    pub(crate) first_columns: [u32; MAX_RANKS + 1],
    pub(crate) of_step: u32,
}

/// Arguments of the kernel that ends a forward pass's exchanges (`exchange.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct CountExchangesArgs {
    pub(crate) before: u64,
    pub(crate) n: u32,
    pub(crate) unused: u32,
}
