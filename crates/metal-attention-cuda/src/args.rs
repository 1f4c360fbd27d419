//! The arguments of the kernels: structures with the layout that `kernels/` declares in C++.
//!
//! A kernel takes one structure by value. Device addresses are `u64`, with 0 for null; `unused` fields are padding. Fields have
//! the kernel's names, and are documented at the structure of the same name, or the one named here, in `kernels/`.

mod exchange;
mod experts;
mod latent;
mod recurrent;

use bytemuck::{Pod, Zeroable};

pub(crate) use exchange::{AllGatherArgs, AllReduceArgs, CountExchangesArgs, ExchangeArgs, MAX_RANKS};
pub(crate) use experts::{
    ExpertsActivationArgs, ExpertsSumArgs, FusedRouteArgs, GatherArgs, GroupedMatmulArgs, GroupedMatvecArgs, RouteArgs,
    SortArgs, WeighArgs,
};
pub(crate) use latent::{LatentAttentionArgs, LatentInputsArgs};
pub(crate) use recurrent::{
    ConvolutionArgs, DeltaRuleArgs, ElementwiseFunction, FunctionArgs, FusedDecodeArgs, FusedDeltaRuleArgs,
    FusedMamba2Args, GroupNormArgs, GroupNormKind, InputFunction, MAX_SIDE_PRODUCTS, Mamba2Args, MambaArgs, OutputGate,
    RowsArgs, RunsArgs, Rwkv6Args, Rwkv7Args, Rwkv7InputsArgs, ScanArgs, SelectArgs, SideProductArgs, SideProductsArgs,
    StatesArgs, TokenShiftArgs,
};

/// A weight matrix: `Matrix` of `formats.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct MatrixArgs {
    pub(crate) records: u64,
    pub(crate) format: u32,
    pub(crate) n_rows: u32,
    pub(crate) n_panels: u32,
    pub(crate) first_row: u32,
}

/// Arguments of the `repack_*` kernels (`repack.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct RepackArgs {
    pub(crate) raw: u64,
    pub(crate) records: u64,
    pub(crate) n_rows: u32,
    pub(crate) n_in: u32,
    pub(crate) n_panels: u32,
    pub(crate) row_bytes: u32,
}

/// What a product's kernel does with the finished sums: `Output` of `matvec.cu`, `matmul.cu` and `odd_rows.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Epilogue {
    /// Stores them, with the bias.
    Store = 0,
    /// Adds them, times a factor, to the result's old values.
    Add = 1,
    /// Stores `activation(gate) * up`.
    Gated = 2,
}

/// Most matrices of one launch of a product.
pub(crate) const MAX_MATRICES: usize = 3;

/// Arguments of the GEMV kernels; `matvec.cu` has the contracts of the fields, and asserts the size.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct MatvecArgs {
    pub(crate) matrices: [MatrixArgs; MAX_MATRICES],
    pub(crate) n_matrices: u32,
    /// For each matrix, the block after its last one, in ascending order; the end of the last matrix is the size of the grid.
    pub(crate) block_ends: [u32; MAX_MATRICES],
    pub(crate) n_in: u32,
    pub(crate) n_out: u32,
    pub(crate) warps_per_tile: u32,
    pub(crate) output: u32,
    pub(crate) activation: u32,
    pub(crate) eps: f32,
    pub(crate) scale: f32,
    pub(crate) unused: u32,
    pub(crate) x: u64,
    pub(crate) norm: u64,
    pub(crate) bias: u64,
    pub(crate) y: u64,
    pub(crate) rows: u64,
}

const _: () = assert!(size_of::<MatvecArgs>() == 160);

/// Arguments of the GEMM without warpgroup instructions (`matmul.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct MatmulArgs {
    pub(crate) a: MatrixArgs,
    pub(crate) b: MatrixArgs,
    pub(crate) x: u64,
    pub(crate) n_tokens: u32,
    pub(crate) n_token_tiles: u32,
    pub(crate) n_out: u32,
    pub(crate) output: u32,
    pub(crate) activation: u32,
    pub(crate) scale: f32,
    pub(crate) bias: u64,
    pub(crate) y: u64,
    pub(crate) packed: u64,
    pub(crate) y_token_tiles: u32,
    pub(crate) unused: u32,
}

/// Arguments of the GEMM for few tokens (`matmul_few.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct MatmulFewArgs {
    pub(crate) matrices: [MatrixArgs; MAX_MATRICES],
    pub(crate) n_matrices: u32,
    pub(crate) blocks: [u32; MAX_MATRICES],
    pub(crate) x: u64,
    pub(crate) n_tokens: u32,
    pub(crate) n_token_tiles: u32,
    pub(crate) n_out: u32,
    pub(crate) output: u32,
    pub(crate) activation: u32,
    pub(crate) scale: f32,
    pub(crate) bias: u64,
    pub(crate) y: u64,
    pub(crate) packed: u64,
    pub(crate) y_token_tiles: u32,
    pub(crate) warps_per_tile: u32,
    pub(crate) n_splits: u32,
    pub(crate) unused: u32,
    pub(crate) sums: u64,
    pub(crate) tickets: u64,
}

/// Arguments of the GEMM with warpgroup instructions (`matmul_wide.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct MatmulWideArgs {
    pub(crate) matrices: [MatrixArgs; MAX_MATRICES],
    pub(crate) n_matrices: u32,
    pub(crate) blocks: [u32; MAX_MATRICES],
    pub(crate) x: u64,
    pub(crate) n_tokens: u32,
    pub(crate) n_token_tiles: u32,
    pub(crate) n_out: u32,
    pub(crate) output: u32,
    pub(crate) activation: u32,
    pub(crate) scale: f32,
    pub(crate) bias: u64,
    pub(crate) y: u64,
    pub(crate) packed: u64,
    pub(crate) n_splits: u32,
    pub(crate) unused: u32,
    pub(crate) sums: u64,
    pub(crate) tickets: u64,
}

/// Arguments of the product for rows that are not a multiple of four elements (`odd_rows.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct OddRowsArgs {
    pub(crate) a: MatrixArgs,
    pub(crate) b: MatrixArgs,
    pub(crate) x: u64,
    pub(crate) bias: u64,
    pub(crate) y: u64,
    pub(crate) rows: u64,
    pub(crate) n_in: u32,
    pub(crate) n_out: u32,
    pub(crate) output: u32,
    pub(crate) activation: u32,
    pub(crate) scale: f32,
    pub(crate) unused: u32,
}

/// Norm and RoPE of queries and keys: `HeadInputs` of `heads.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct HeadArgs {
    pub(crate) q_norm: u64,
    pub(crate) k_norm: u64,
    pub(crate) rope: u64,
    pub(crate) norm: u32,
    pub(crate) norm_after_rope: u32,
    pub(crate) rotation: u32,
    pub(crate) n_rot: u32,
    pub(crate) eps: f32,
    pub(crate) scale: f32,
}

/// The page tables of a cache group: `Pages` of `heads.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct PagesArgs {
    pub(crate) pages: u64,
    pub(crate) n_pages: u32,
    pub(crate) unused: u32,
}

/// Arguments of attention over whole KV pages, and of the append to the cache (`attention.cu`, `attention_on_units.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct AttentionArgs {
    pub(crate) inputs: HeadArgs,
    pub(crate) tokens: u64,
    pub(crate) pages: PagesArgs,
    pub(crate) k_cache: u64,
    pub(crate) v_cache: u64,
    pub(crate) qkv: u64,
    pub(crate) out: u64,
    pub(crate) packed: u64,
    pub(crate) partial: u64,
    pub(crate) tickets: u64,
    pub(crate) sinks: u64,
    pub(crate) n_head: u32,
    pub(crate) n_head_kv: u32,
    pub(crate) head_dim: u32,
    pub(crate) stride: u32,
    pub(crate) n_splits: u32,
    pub(crate) n_chunks: u32,
    pub(crate) n_token_tiles: u32,
    pub(crate) mask: u32,
    pub(crate) reach: u32,
    pub(crate) soft_cap: f32,
    pub(crate) gates: u64,
    pub(crate) gate_stride: u32,
    pub(crate) q_step: u32,
    pub(crate) k_at: u32,
    pub(crate) v_at: u32,
}

/// Arguments of the separate kernel for queries, keys and values (`attention_inputs.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct AttentionInputsArgs {
    pub(crate) inputs: HeadArgs,
    pub(crate) q_bias: u64,
    pub(crate) k_bias: u64,
    pub(crate) tokens: u64,
    pub(crate) pages: PagesArgs,
    pub(crate) k_cache: u64,
    pub(crate) v_cache: u64,
    pub(crate) qkv: u64,
    pub(crate) queries: u64,
    pub(crate) n_head: u32,
    pub(crate) n_head_kv: u32,
    pub(crate) head_dim: u32,
    pub(crate) stride: u32,
    pub(crate) q_step: u32,
    pub(crate) k_at: u32,
    pub(crate) v_at: u32,
    pub(crate) owns_cache: u32,
    pub(crate) kind: u32,
    pub(crate) clamp: f32,
    pub(crate) value_eps: f32,
    pub(crate) growth: f32,
    pub(crate) growth_length: u32,
    pub(crate) growth_offset: u32,
}

/// Arguments of the attention for every mask and head size (`general_attention.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct GeneralAttentionArgs {
    pub(crate) tokens: u64,
    pub(crate) pages: PagesArgs,
    pub(crate) k_cache: u64,
    pub(crate) v_cache: u64,
    pub(crate) queries: u64,
    pub(crate) out: u64,
    pub(crate) packed: u64,
    pub(crate) partial: u64,
    pub(crate) tickets: u64,
    pub(crate) sinks: u64,
    pub(crate) slopes: u64,
    pub(crate) gates: u64,
    pub(crate) gate_stride: u32,
    pub(crate) n_head: u32,
    pub(crate) n_head_kv: u32,
    pub(crate) key_dim: u32,
    pub(crate) value_dim: u32,
    pub(crate) n_splits: u32,
    pub(crate) n_token_tiles: u32,
    pub(crate) mask: u32,
    pub(crate) reach: u32,
    pub(crate) soft_cap: f32,
}

/// Arguments of attention over query tiles (`prefill_attention.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct PrefillArgs {
    pub(crate) tiles: u64,
    pub(crate) pages: PagesArgs,
    pub(crate) k_cache: u64,
    pub(crate) v_cache: u64,
    pub(crate) qkv: u64,
    pub(crate) packed: u64,
    pub(crate) sinks: u64,
    pub(crate) n_head: u32,
    pub(crate) n_head_kv: u32,
    pub(crate) stride: u32,
    pub(crate) n_token_tiles: u32,
    pub(crate) mask: u32,
    pub(crate) reach: u32,
    pub(crate) soft_cap: f32,
    pub(crate) gate_stride: u32,
    pub(crate) gates: u64,
}

/// Arguments of the embedding (`ends.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct EmbeddingArgs {
    pub(crate) table: MatrixArgs,
    pub(crate) positions: MatrixArgs,
    pub(crate) types: u64,
    pub(crate) tokens: u64,
    pub(crate) x: u64,
    pub(crate) scale: f32,
    pub(crate) n_embd: u32,
}

/// Arguments of the norm of rows (`norm.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct NormArgs {
    pub(crate) x: u64,
    pub(crate) weight: u64,
    pub(crate) bias: u64,
    pub(crate) packed: u64,
    pub(crate) out: u64,
    pub(crate) rows: u64,
    pub(crate) n_in: u32,
    pub(crate) n_token_tiles: u32,
    pub(crate) kind: u32,
    pub(crate) eps: f32,
    pub(crate) scale: f32,
    pub(crate) accumulate: u32,
}

/// Arguments of a feed-forward's activation (`activation.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct ActivationArgs {
    pub(crate) gate: u64,
    pub(crate) up: u64,
    pub(crate) out: u64,
    pub(crate) packed: u64,
    pub(crate) gate_stride: u32,
    pub(crate) up_stride: u32,
    pub(crate) n_ff: u32,
    pub(crate) n_token_tiles: u32,
    pub(crate) activation: u32,
    pub(crate) parameter: f32,
}

/// Arguments of the kernel that rescales rows to the norm of others (`streams.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct StretchArgs {
    pub(crate) a: u64,
    pub(crate) goal: u64,
    pub(crate) y: u64,
    pub(crate) n: u32,
    pub(crate) a_stride: u32,
    pub(crate) goal_stride: u32,
    pub(crate) y_stride: u32,
    pub(crate) accumulate: u32,
    pub(crate) scale: f32,
}

/// Arguments of the kernels of several residual streams (`streams.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct StreamsArgs {
    pub(crate) router: u64,
    pub(crate) matrix: u64,
    pub(crate) streams: u64,
    pub(crate) x: u64,
    pub(crate) scale: u64,
    pub(crate) scaled: u64,
    pub(crate) n: u32,
    pub(crate) n_streams: u32,
}

/// Arguments of the scaling of logits (`ends.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct LogitsArgs {
    pub(crate) logits: u64,
    pub(crate) n: u32,
    pub(crate) scale: f32,
    pub(crate) soft_cap: f32,
    pub(crate) unused: u32,
}

/// Arguments of argmax over logits (`ends.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct ArgmaxArgs {
    pub(crate) logits: u64,
    pub(crate) n_vocab: u32,
    pub(crate) advance: u32,
    pub(crate) best: u64,
    pub(crate) tickets: u64,
    pub(crate) ids: u64,
    pub(crate) tokens: u64,
    pub(crate) numbers: u64,
}

/// Arguments of the search for the highest logits (`top_k.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct TopKArgs {
    pub(crate) logits: u64,
    pub(crate) lists: u64,
    pub(crate) tickets: u64,
    pub(crate) best: u64,
    pub(crate) n_vocab: u32,
    pub(crate) chunk: u32,
}

/// Arguments of the kernels that measure the device (`rates.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct RateArgs {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) n: u64,
    pub(crate) steps: u32,
    pub(crate) unused: u32,
}

/// A token of a micro-batch: `Token` of `heads.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct TokenArgs {
    /// Its id in the vocabulary.
    pub(crate) id: u32,
    /// The index of its sequence.
    pub(crate) seq: u32,
    /// Its position.
    pub(crate) pos: u32,
    /// The last position of its sequence in the micro-batch, to which masks that are not causal extend.
    pub(crate) last: u32,
}

/// Up to 64 consecutive tokens of one sequence: `QueryTile` of `prefill_attention.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct QueryTileArgs {
    /// The index of the first token in the micro-batch.
    pub(crate) token: u32,
    /// Tokens.
    pub(crate) n: u32,
    /// The index of the sequence.
    pub(crate) seq: u32,
    /// The position of the first token.
    pub(crate) pos: u32,
    /// The last position of the sequence in the micro-batch.
    pub(crate) last: u32,
}
