//! What the kernels of recurrent layers take: `recurrence.cuh` and the files that include it.

use bytemuck::{Pod, Zeroable};

use super::MatrixArgs;

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct RunsArgs {
    pub(crate) runs: u64,
    pub(crate) segments: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct StatesArgs {
    pub(crate) states: u64,
    pub(crate) stride: u32,
    pub(crate) first: u32,
}

/// `Rows` of `recurrence.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct RowsArgs {
    pub(crate) rows: u64,
    pub(crate) stride: u32,
    pub(crate) first: u32,
}

impl RowsArgs {
    /// Those of `rows`, `stride` elements long, from element `first` of each on.
    pub(crate) fn new(rows: u64, stride: usize, first: usize) -> Self {
        Self { rows, stride: stride as u32, first: first as u32 }
    }
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct ScanArgs {
    pub(crate) runs: RunsArgs,
    pub(crate) states: StatesArgs,
    pub(crate) out: u64,
    pub(crate) n_head: u32,
    pub(crate) key_dim: u32,
    pub(crate) value_dim: u32,
    pub(crate) tile: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct ConvolutionArgs {
    pub(crate) runs: RunsArgs,
    pub(crate) states: StatesArgs,
    pub(crate) x: RowsArgs,
    pub(crate) taps: u64,
    pub(crate) bias: u64,
    pub(crate) out: u64,
    pub(crate) channels: u32,
    pub(crate) n_tap: u32,
    pub(crate) block: u32,
    pub(crate) step: u32,
    pub(crate) gated: u32,
    pub(crate) unused: u32,
}

/// `Kind` of `recurrent.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum GroupNormKind {
    None = 0,
    Rms = 1,
    Layer = 2,
}

/// `Gate` of `recurrent.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum OutputGate {
    None = 0,
    AsItIs = 1,
    Silu = 2,
    Sigmoid = 3,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct GroupNormArgs {
    pub(crate) x: u64,
    pub(crate) out: u64,
    pub(crate) weight: u64,
    pub(crate) bias: u64,
    pub(crate) gate: RowsArgs,
    pub(crate) r: u64,
    pub(crate) k: u64,
    pub(crate) v: u64,
    pub(crate) factor: u64,
    pub(crate) n: u32,
    pub(crate) n_group: u32,
    pub(crate) of_groups: u32,
    pub(crate) norm: u32,
    pub(crate) gate_kind: u32,
    pub(crate) eps: f32,
}

/// `Function` of `recurrent.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum ElementwiseFunction {
    Tanh = 0,
    Sigmoid = 1,
    Squared = 2,
    /// `x = sigmoid(with) x`
    SigmoidTimes = 3,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct FunctionArgs {
    pub(crate) x: u64,
    pub(crate) with: u64,
    pub(crate) n: u32,
    pub(crate) function: u32,
}

/// What a token alone takes besides its walk: `Alone` of `recurrence.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct FusedDecodeArgs {
    pub(crate) convolution: ConvolutionArgs,
    pub(crate) norm: GroupNormArgs,
    pub(crate) tickets: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct FusedDeltaRuleArgs {
    pub(crate) of: DeltaRuleArgs,
    pub(crate) alone: FusedDecodeArgs,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct FusedMamba2Args {
    pub(crate) of: Mamba2Args,
    pub(crate) alone: FusedDecodeArgs,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct DeltaRuleArgs {
    pub(crate) walk: ScanArgs,
    pub(crate) x: RowsArgs,
    pub(crate) beta: RowsArgs,
    pub(crate) decay: RowsArgs,
    pub(crate) a: u64,
    pub(crate) dt_bias: u64,
    pub(crate) n_head_k: u32,
    pub(crate) heads_of_key: u32,
    pub(crate) unused: u32,
    pub(crate) eps: f32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct Mamba2Args {
    pub(crate) walk: ScanArgs,
    pub(crate) x: RowsArgs,
    pub(crate) b: RowsArgs,
    pub(crate) c: RowsArgs,
    pub(crate) dt: RowsArgs,
    pub(crate) gate: RowsArgs,
    pub(crate) dt_bias: u64,
    pub(crate) a: u64,
    pub(crate) d: u64,
    pub(crate) heads_of_group: u32,
    pub(crate) gate_step: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct SelectArgs {
    pub(crate) chosen: u64,
    pub(crate) dt: u64,
    pub(crate) bc: u64,
    pub(crate) weights: [u64; 3],
    pub(crate) n: u32,
    pub(crate) rank: u32,
    pub(crate) d_state: u32,
    pub(crate) at: [u32; 3],
    pub(crate) eps: f32,
    pub(crate) unused: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct MambaArgs {
    pub(crate) walk: ScanArgs,
    pub(crate) x: u64,
    pub(crate) dt: u64,
    pub(crate) bc: u64,
    pub(crate) gate: RowsArgs,
    pub(crate) dt_bias: u64,
    pub(crate) a: u64,
    pub(crate) d: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct TokenShiftArgs {
    pub(crate) runs: RunsArgs,
    pub(crate) states: StatesArgs,
    pub(crate) x: u64,
    pub(crate) lerps: u64,
    pub(crate) more: u64,
    pub(crate) out: u64,
    pub(crate) width: u32,
    pub(crate) n_mix: u32,
    pub(crate) n_tokens: u32,
    pub(crate) advance: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct Rwkv6Args {
    pub(crate) walk: ScanArgs,
    pub(crate) r: u64,
    pub(crate) k: u64,
    pub(crate) v: u64,
    pub(crate) decay: u64,
    pub(crate) decay_bias: u64,
    pub(crate) bonus: u64,
    pub(crate) n_head_kv: u32,
    pub(crate) unused: u32,
}

/// A product beside others: `SideProduct` of `rwkv.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct SideProductArgs {
    pub(crate) matrix: MatrixArgs,
    pub(crate) x: u64,
    pub(crate) y: u64,
    pub(crate) n_in: u32,
    pub(crate) end: u32,
    pub(crate) warps_a_tile: u32,
    pub(crate) function: u32,
}

/// What its input goes through on its way: `InputFunction` of `rwkv.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum InputFunction {
    AsItLies = 0,
    Tanh = 1,
    Sigmoid = 2,
}

/// Most of them.
pub(crate) const MAX_SIDE_PRODUCTS: usize = 8;

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct SideProductsArgs {
    pub(crate) products: [SideProductArgs; MAX_SIDE_PRODUCTS],
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct Rwkv7InputsArgs {
    pub(crate) decay: u64,
    pub(crate) rate: u64,
    pub(crate) k: u64,
    pub(crate) v: u64,
    pub(crate) kappa: u64,
    pub(crate) decay_bias: u64,
    pub(crate) rate_bias: u64,
    pub(crate) removed: u64,
    pub(crate) kept: u64,
    pub(crate) first_value: u64,
    pub(crate) value_mix: u64,
    pub(crate) value_bias: u64,
    pub(crate) n_head: u32,
    pub(crate) head_dim: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct Rwkv7Args {
    pub(crate) walk: ScanArgs,
    pub(crate) r: u64,
    pub(crate) decay: u64,
    pub(crate) k: u64,
    pub(crate) v: u64,
    pub(crate) a: u64,
    pub(crate) b: u64,
}
