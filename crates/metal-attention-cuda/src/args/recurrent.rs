//! Arguments of the kernels of recurrent mixers and of RWKV's channel mix (`recurrence.cuh` and the files that include it).

use bytemuck::{Pod, Zeroable};

use super::MatrixArgs;

/// The runs of a micro-batch and their segments: `Runs` of `recurrence.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct RunsArgs {
    pub(crate) runs: u64,
    pub(crate) segments: u64,
}

/// The recurrent states of a layer: `States` of `recurrence.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct StatesArgs {
    pub(crate) states: u64,
    pub(crate) stride: u32,
    pub(crate) first: u32,
}

/// Some columns of rows: `Rows` of `recurrence.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct RowsArgs {
    pub(crate) rows: u64,
    pub(crate) stride: u32,
    pub(crate) first: u32,
}

impl RowsArgs {
    /// The columns from `first` on of the rows at `rows`, with `stride` elements from a row to the next one.
    pub(crate) fn new(rows: u64, stride: usize, first: usize) -> Self {
        Self { rows, stride: stride as u32, first: first as u32 }
    }
}

/// What every scan takes: `Scan` of `recurrence.cuh`.
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

/// Arguments of the short convolution (`recurrence.cuh`).
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

/// The norm of a group: `Kind` of `recurrence.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum GroupNormKind {
    None = 0,
    Rms = 1,
    Layer = 2,
}

/// The gate on a normalised group: `Gate` of `recurrence.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum OutputGate {
    None = 0,
    /// The gate as a factor, without a function.
    AsItIs = 1,
    Silu = 2,
    Sigmoid = 3,
}

/// Arguments of the norm of groups of a row (`recurrence.cuh`).
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

/// A function of each element: `Function` of `recurrent.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum ElementwiseFunction {
    Tanh = 0,
    Sigmoid = 1,
    Squared = 2,
    /// `x = sigmoid(with) x`
    SigmoidTimes = 3,
}

/// Arguments of an elementwise function (`of_each` of `recurrent.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct FunctionArgs {
    pub(crate) x: u64,
    pub(crate) with: u64,
    pub(crate) n: u32,
    pub(crate) function: u32,
}

/// The further arguments of a scan that is fused with convolution and norm: `FusedDecode` of `recurrence.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct FusedDecodeArgs {
    pub(crate) convolution: ConvolutionArgs,
    pub(crate) norm: GroupNormArgs,
    pub(crate) tickets: u64,
}

/// Arguments of the fused delta rule (`delta_rule.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct FusedDeltaRuleArgs {
    pub(crate) args: DeltaRuleArgs,
    pub(crate) fused: FusedDecodeArgs,
}

/// Arguments of the fused Mamba-2 (`mamba2.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct FusedMamba2Args {
    pub(crate) args: Mamba2Args,
    pub(crate) fused: FusedDecodeArgs,
}

/// Arguments of the delta rule (`delta_rule.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct DeltaRuleArgs {
    pub(crate) scan: ScanArgs,
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

/// Arguments of Mamba-2's scan (`mamba2.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct Mamba2Args {
    pub(crate) scan: ScanArgs,
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

/// Arguments of Mamba's selection (`mamba.cu`).
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

/// Arguments of Mamba's scan (`mamba.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct MambaArgs {
    pub(crate) scan: ScanArgs,
    pub(crate) x: u64,
    pub(crate) dt: u64,
    pub(crate) bc: u64,
    pub(crate) gate: RowsArgs,
    pub(crate) dt_bias: u64,
    pub(crate) a: u64,
    pub(crate) d: u64,
}

/// Arguments of the token shift (`rwkv.cu`).
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

/// Arguments of RWKV-6's scan (`rwkv.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct Rwkv6Args {
    pub(crate) scan: ScanArgs,
    pub(crate) r: u64,
    pub(crate) k: u64,
    pub(crate) v: u64,
    pub(crate) decay: u64,
    pub(crate) decay_bias: u64,
    pub(crate) bonus: u64,
    pub(crate) n_head_kv: u32,
    pub(crate) unused: u32,
}

/// One of several independent products of a single token: `SideProduct` of `rwkv.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct SideProductArgs {
    pub(crate) matrix: MatrixArgs,
    pub(crate) x: u64,
    pub(crate) y: u64,
    pub(crate) n_in: u32,
    pub(crate) end: u32,
    pub(crate) warps_per_tile: u32,
    pub(crate) function: u32,
}

/// The function on such a product's input: `InputFunction` of `rwkv.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum InputFunction {
    AsItLies = 0,
    Tanh = 1,
    Sigmoid = 2,
}

/// Most products of one launch.
pub(crate) const MAX_SIDE_PRODUCTS: usize = 8;

/// Arguments of several independent products (`side_products` of `rwkv.cu`); those after the last have no blocks.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct SideProductsArgs {
    pub(crate) products: [SideProductArgs; MAX_SIDE_PRODUCTS],
}

/// Arguments of the kernel that prepares RWKV-7's scan (`rwkv.cu`).
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

/// Arguments of RWKV-7's scan (`rwkv.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct Rwkv7Args {
    pub(crate) scan: ScanArgs,
    pub(crate) r: u64,
    pub(crate) decay: u64,
    pub(crate) k: u64,
    pub(crate) v: u64,
    pub(crate) a: u64,
    pub(crate) b: u64,
}
