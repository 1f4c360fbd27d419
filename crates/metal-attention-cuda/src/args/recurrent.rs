//! Arguments of the kernels of recurrent mixers and of RWKV's channel mix (`recurrence.cuh` and the files that include it).
//!
//! Which tokens and states a run has is known to the device alone. The bounds of a scan are stated as if each run had one token, as in
//! a decode step, where they are exact but for the state slots.

use super::{MatrixArgs, kernel_args};
use crate::bounds::{Bounds, KernelArgs, Launch};
use crate::slice::{DevicePtr, DeviceSlice};

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

kernel_args! {
    /// The runs of a micro-batch and their segments: `Runs` of `recurrence.cuh`.
    pub(crate) struct RunsArgs = "Runs" in "recurrence.cuh" {
        pub(crate) runs: DevicePtr<[u32; 4]>,
        pub(crate) segments: DevicePtr<[u32; 4]>,
    }

    /// The recurrent states of a layer: `States` of `recurrence.cuh`.
    pub(crate) struct StatesArgs = "States" in "recurrence.cuh" {
        pub(crate) states: DevicePtr<f32>,
        pub(crate) stride: u32,
        pub(crate) first: u32,
    }

    /// Some columns of rows: `Rows` of `recurrence.cuh`.
    pub(crate) struct RowsArgs = "Rows" in "recurrence.cuh" {
        pub(crate) rows: DevicePtr<f32>,
        pub(crate) stride: u32,
        pub(crate) first: u32,
    }

    /// What every scan takes: `Scan` of `recurrence.cuh`.
    pub(crate) struct ScanArgs = "Scan" in "recurrence.cuh" {
        pub(crate) runs: RunsArgs,
        pub(crate) states: StatesArgs,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) n_head: u32,
        pub(crate) key_dim: u32,
        pub(crate) value_dim: u32,
        pub(crate) tile: u32,
    }

    /// Arguments of the short convolution (`recurrence.cuh`).
    pub(crate) struct ConvolutionArgs = "ConvolutionArgs" in "recurrence.cuh" {
        pub(crate) runs: RunsArgs,
        pub(crate) states: StatesArgs,
        pub(crate) x: RowsArgs,
        pub(crate) taps: DevicePtr<f32>,
        pub(crate) bias: DevicePtr<f32>,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) channels: u32,
        pub(crate) n_tap: u32,
        pub(crate) block: u32,
        pub(crate) step: u32,
        pub(crate) gated: u32,
        pub(crate) unused: u32,
    }

    /// Arguments of the norm of groups of a row (`recurrence.cuh`).
    pub(crate) struct GroupNormArgs = "GroupNormArgs" in "recurrence.cuh" {
        pub(crate) x: DevicePtr<f32>,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) weight: DevicePtr<f32>,
        pub(crate) bias: DevicePtr<f32>,
        pub(crate) gate: RowsArgs,
        pub(crate) r: DevicePtr<f32>,
        pub(crate) k: DevicePtr<f32>,
        pub(crate) v: DevicePtr<f32>,
        pub(crate) factor: DevicePtr<f32>,
        pub(crate) n: u32,
        pub(crate) n_group: u32,
        pub(crate) of_groups: u32,
        pub(crate) norm: u32,
        pub(crate) gate_kind: u32,
        pub(crate) eps: f32,
    }

    /// Arguments of an elementwise function (`of_each` of `recurrent.cu`).
    pub(crate) struct FunctionArgs = "FunctionArgs" in "recurrent.cu" {
        pub(crate) x: DevicePtr<f32>,
        pub(crate) with: DevicePtr<f32>,
        pub(crate) n: u32,
        pub(crate) function: u32,
    }

    /// The further arguments of a scan that is fused with convolution and norm: `FusedDecode` of `recurrence.cuh`.
    pub(crate) struct FusedDecodeArgs = "FusedDecode" in "recurrence.cuh" {
        pub(crate) convolution: ConvolutionArgs,
        pub(crate) norm: GroupNormArgs,
        pub(crate) tickets: DevicePtr<u32>,
    }

    /// Arguments of the fused delta rule (`delta_rule.cu`).
    pub(crate) struct FusedDeltaRuleArgs = "FusedDeltaRuleArgs" in "delta_rule.cu" {
        pub(crate) args: DeltaRuleArgs,
        pub(crate) fused: FusedDecodeArgs,
    }

    /// Arguments of the fused Mamba-2 (`mamba2.cu`).
    pub(crate) struct FusedMamba2Args = "FusedMamba2Args" in "mamba2.cu" {
        pub(crate) args: Mamba2Args,
        pub(crate) fused: FusedDecodeArgs,
    }

    /// Arguments of the delta rule (`delta_rule.cu`).
    pub(crate) struct DeltaRuleArgs = "DeltaRuleArgs" in "delta_rule.cu" {
        pub(crate) scan: ScanArgs,
        pub(crate) x: RowsArgs,
        pub(crate) beta: RowsArgs,
        pub(crate) decay: RowsArgs,
        pub(crate) a: DevicePtr<f32>,
        pub(crate) dt_bias: DevicePtr<f32>,
        pub(crate) n_head_k: u32,
        pub(crate) heads_of_key: u32,
        pub(crate) unused: u32,
        pub(crate) eps: f32,
    }

    /// Arguments of Mamba-2's scan (`mamba2.cu`).
    pub(crate) struct Mamba2Args = "Mamba2Args" in "mamba2.cu" {
        pub(crate) scan: ScanArgs,
        pub(crate) x: RowsArgs,
        pub(crate) b: RowsArgs,
        pub(crate) c: RowsArgs,
        pub(crate) dt: RowsArgs,
        pub(crate) gate: RowsArgs,
        pub(crate) dt_bias: DevicePtr<f32>,
        pub(crate) a: DevicePtr<f32>,
        pub(crate) d: DevicePtr<f32>,
        pub(crate) heads_of_group: u32,
        pub(crate) gate_step: u32,
    }

    /// Arguments of Mamba's selection (`mamba.cu`).
    pub(crate) struct SelectArgs = "SelectArgs" in "mamba.cu" {
        pub(crate) chosen: DevicePtr<f32>,
        pub(crate) dt: DevicePtr<f32>,
        pub(crate) bc: DevicePtr<f32>,
        pub(crate) weights: [DevicePtr<f32>; 3],
        pub(crate) n: u32,
        pub(crate) rank: u32,
        pub(crate) d_state: u32,
        pub(crate) at: [u32; 3],
        pub(crate) eps: f32,
        pub(crate) unused: u32,
    }

    /// Arguments of Mamba's scan (`mamba.cu`).
    pub(crate) struct MambaArgs = "MambaArgs" in "mamba.cu" {
        pub(crate) scan: ScanArgs,
        pub(crate) x: DevicePtr<f32>,
        pub(crate) dt: DevicePtr<f32>,
        pub(crate) bc: DevicePtr<f32>,
        pub(crate) gate: RowsArgs,
        pub(crate) dt_bias: DevicePtr<f32>,
        pub(crate) a: DevicePtr<f32>,
        pub(crate) d: DevicePtr<f32>,
    }

    /// Arguments of the token shift (`rwkv.cu`).
    pub(crate) struct TokenShiftArgs = "TokenShiftArgs" in "rwkv.cu" {
        pub(crate) runs: RunsArgs,
        pub(crate) states: StatesArgs,
        pub(crate) x: DevicePtr<f32>,
        pub(crate) lerps: DevicePtr<f32>,
        pub(crate) more: DevicePtr<f32>,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) width: u32,
        pub(crate) n_mix: u32,
        pub(crate) n_tokens: u32,
        pub(crate) advance: u32,
    }

    /// Arguments of RWKV-6's scan (`rwkv.cu`).
    pub(crate) struct Rwkv6Args = "Rwkv6Args" in "rwkv.cu" {
        pub(crate) scan: ScanArgs,
        pub(crate) r: DevicePtr<f32>,
        pub(crate) k: DevicePtr<f32>,
        pub(crate) v: DevicePtr<f32>,
        pub(crate) decay: DevicePtr<f32>,
        pub(crate) decay_bias: DevicePtr<f32>,
        pub(crate) bonus: DevicePtr<f32>,
        pub(crate) n_head_kv: u32,
        pub(crate) unused: u32,
    }

    /// One of several independent products of a single token: `SideProduct` of `rwkv.cu`.
    pub(crate) struct SideProductArgs = "SideProduct" in "rwkv.cu" {
        pub(crate) matrix: MatrixArgs,
        pub(crate) x: DevicePtr<f32>,
        pub(crate) y: DevicePtr<f32>,
        pub(crate) n_in: u32,
        pub(crate) end: u32,
        pub(crate) warps_per_tile: u32,
        pub(crate) function: u32,
    }

    /// Arguments of several independent products (`side_products` of `rwkv.cu`); those after the last have no blocks.
    pub(crate) struct SideProductsArgs = "SideProductsArgs" in "rwkv.cu" {
        pub(crate) products: [SideProductArgs; MAX_SIDE_PRODUCTS],
    }

    /// Arguments of the kernel that prepares RWKV-7's scan (`rwkv.cu`).
    pub(crate) struct Rwkv7InputsArgs = "Rwkv7InputsArgs" in "rwkv.cu" {
        pub(crate) decay: DevicePtr<f32>,
        pub(crate) rate: DevicePtr<f32>,
        pub(crate) k: DevicePtr<f32>,
        pub(crate) v: DevicePtr<f32>,
        pub(crate) kappa: DevicePtr<f32>,
        pub(crate) decay_bias: DevicePtr<f32>,
        pub(crate) rate_bias: DevicePtr<f32>,
        pub(crate) removed: DevicePtr<f32>,
        pub(crate) kept: DevicePtr<f32>,
        pub(crate) first_value: DevicePtr<f32>,
        pub(crate) value_mix: DevicePtr<f32>,
        pub(crate) value_bias: DevicePtr<f32>,
        pub(crate) n_head: u32,
        pub(crate) head_dim: u32,
    }

    /// Arguments of RWKV-7's scan (`rwkv.cu`).
    pub(crate) struct Rwkv7Args = "Rwkv7Args" in "rwkv.cu" {
        pub(crate) scan: ScanArgs,
        pub(crate) r: DevicePtr<f32>,
        pub(crate) decay: DevicePtr<f32>,
        pub(crate) k: DevicePtr<f32>,
        pub(crate) v: DevicePtr<f32>,
        pub(crate) a: DevicePtr<f32>,
        pub(crate) b: DevicePtr<f32>,
    }
}

impl RowsArgs {
    /// The columns from `first` on of `rows`, with `stride` elements from a row to the next one.
    pub(crate) fn new(rows: DeviceSlice<f32>, stride: usize, first: usize) -> Self {
        Self { rows: rows.ptr(), stride: stride as u32, first: first as u32 }
    }

    /// States `width` columns of `n` rows.
    fn bounds(&self, field: &'static str, n: usize, width: usize, bounds: &mut Bounds) {
        bounds.rows(field, self.rows, n, self.stride, self.first as usize + width);
    }
}

impl RunsArgs {
    /// States `n` runs of one segment each.
    fn bounds(&self, n: usize, bounds: &mut Bounds) {
        bounds.array("runs.runs", self.runs, n);
        bounds.array("runs.segments", self.segments, n);
    }
}

impl StatesArgs {
    /// States `n` elements of the first slot.
    fn bounds(&self, n: usize, bounds: &mut Bounds) {
        bounds.array("states", self.states, self.first as usize + n);
    }
}

impl ScanArgs {
    /// Heads, and elements of a key and of a value.
    fn sizes(&self) -> [usize; 3] {
        [self.n_head, self.key_dim, self.value_dim].map(|n| n as usize)
    }

    /// States the addresses that all scans have; returns the runs, which are tokens in a decode step.
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) -> usize {
        let (n, [n_head, key_dim, value_dim]) = (launch.grid.blocks[1], self.sizes());
        self.runs.bounds(n, bounds);
        self.states.bounds(n_head * key_dim * value_dim, bounds);
        bounds.array("out", self.out, n * n_head * value_dim);
        n
    }
}

impl ConvolutionArgs {
    /// The convolution of channels that follow each other in the rows `x`, with taps `[n_tap, channels]`, without bias and
    /// gates. The caller sets the runs and the states.
    pub(crate) fn of_channels(
        x: RowsArgs,
        taps: DevicePtr<f32>,
        out: DevicePtr<f32>,
        channels: usize,
        n_tap: usize,
    ) -> Self {
        let n = channels as u32;
        Self { x, taps, out, channels: n, n_tap: n_tap as u32, block: n, step: n, ..bytemuck::Zeroable::zeroed() }
    }

    /// States the addresses for `n` runs.
    fn bounds_of_runs(&self, n: usize, bounds: &mut Bounds) {
        let (channels, n_tap) = (self.channels as usize, self.n_tap as usize);
        self.runs.bounds(n, bounds);
        self.states.bounds((n_tap - 1) * channels, bounds);
        // Channel c is element c / block * step + c % block of a row; a gated convolution reads three rows of channels.
        let last = (channels - 1) / self.block as usize * self.step as usize + (channels - 1) % self.block as usize;
        let width = if self.gated == 1 { 3 * channels } else { last + 1 };
        self.x.bounds("x", n, width, bounds);
        bounds.array("taps", self.taps, n_tap * channels);
        bounds.array("bias", self.bias, channels);
        bounds.array("out", self.out, n * channels);
    }
}

impl KernelArgs for ConvolutionArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        self.bounds_of_runs(launch.grid.blocks[2], bounds);
    }
}

impl GroupNormArgs {
    /// States the addresses for `n` tokens.
    fn bounds_of_tokens(&self, n: usize, bounds: &mut Bounds) {
        let (of_group, n_group) = (self.n as usize, self.n_group as usize);
        let row = of_group * n_group;
        let n_weights = if self.of_groups == 1 { row } else { of_group };
        bounds.array("x", self.x, n * row);
        bounds.array("out", self.out, n * row);
        if self.norm != GroupNormKind::None as u32 {
            bounds.array("weight", self.weight, n_weights);
            bounds.array("bias", self.bias, n_weights);
        }
        if self.gate_kind != OutputGate::None as u32 {
            self.gate.bounds("gate", n, row, bounds);
        }
        if !self.r.is_null() {
            bounds.array("r", self.r, n * row);
            bounds.array("k", self.k, n * row);
            bounds.array("v", self.v, n * row);
            bounds.array("factor", self.factor, row);
        }
    }
}

impl KernelArgs for GroupNormArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        self.bounds_of_tokens(launch.grid.blocks[1], bounds);
    }
}

impl KernelArgs for FunctionArgs {
    fn bounds(&self, _: &Launch, bounds: &mut Bounds) {
        bounds.array("x", self.x, self.n as usize);
        if self.function == ElementwiseFunction::SigmoidTimes as u32 {
            bounds.array("with", self.with, self.n as usize);
        }
    }
}

impl FusedDecodeArgs {
    /// States the addresses for runs of one token and `n_key_head` key heads.
    fn bounds(&self, launch: &Launch, n_key_head: usize, bounds: &mut Bounds) {
        let n = launch.grid.blocks[1];
        self.convolution.bounds_of_runs(n, bounds);
        if self.norm.norm != GroupNormKind::None as u32 {
            self.norm.bounds_of_tokens(n, bounds);
        }
        bounds.array("tickets", self.tickets, n * n_key_head);
    }
}

impl KernelArgs for FusedDeltaRuleArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        self.args.bounds(launch, bounds);
        self.fused.bounds(launch, self.args.n_head_k as usize, bounds);
    }
}

impl KernelArgs for FusedMamba2Args {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        self.args.bounds(launch, bounds);
        self.fused.bounds(launch, (self.args.scan.n_head / self.args.heads_of_group) as usize, bounds);
    }
}

impl KernelArgs for DeltaRuleArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let (n, [n_head, key_dim, value_dim]) = (self.scan.bounds(launch, bounds), self.scan.sizes());
        let of_channels = launch.kernel.starts_with("delta_rule_of_channels");
        let n_decays = if of_channels { n_head * key_dim } else { n_head };
        self.x.bounds("x", n, 2 * self.n_head_k as usize * key_dim + n_head * value_dim, bounds);
        self.beta.bounds("beta", n, n_head, bounds);
        self.decay.bounds("decay", n, n_decays, bounds);
        bounds.array("a", self.a, n_head);
        bounds.array("dt_bias", self.dt_bias, n_decays);
    }
}

impl KernelArgs for Mamba2Args {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let (n, [n_head, key_dim, value_dim]) = (self.scan.bounds(launch, bounds), self.scan.sizes());
        let n_keys = n_head.div_ceil(self.heads_of_group as usize) * key_dim;
        self.x.bounds("x", n, n_head * value_dim, bounds);
        self.b.bounds("b", n, n_keys, bounds);
        self.c.bounds("c", n, n_keys, bounds);
        self.dt.bounds("dt", n, n_head, bounds);
        self.gate.bounds("gate", n, (n_head - 1) * self.gate_step as usize + value_dim, bounds);
        bounds.array("dt_bias", self.dt_bias, n_head);
        bounds.array("a", self.a, n_head);
        bounds.array("d", self.d, n_head);
    }
}

impl KernelArgs for SelectArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let n = launch.grid.blocks[0];
        let [rank, d_state] = [self.rank, self.d_state].map(|n| n as usize);
        let sizes = [rank, d_state, d_state];
        let row = self.at.iter().zip(sizes).map(|(at, n)| *at as usize + n).max().unwrap_or(0);
        bounds.rows("chosen", self.chosen, n, self.n, row);
        bounds.array("dt", self.dt, n * rank);
        bounds.array("bc", self.bc, n * 2 * d_state);
        for (weights, n) in self.weights.iter().zip(sizes) {
            bounds.array("weights", *weights, n);
        }
    }
}

impl KernelArgs for MambaArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let (n, [_, d_state, channels]) = (self.scan.bounds(launch, bounds), self.scan.sizes());
        bounds.array("x", self.x, n * channels);
        bounds.array("dt", self.dt, n * channels);
        bounds.array("bc", self.bc, n * 2 * d_state);
        self.gate.bounds("gate", n, channels, bounds);
        bounds.array("dt_bias", self.dt_bias, channels);
        bounds.array("a", self.a, channels * d_state);
        bounds.array("d", self.d, channels);
    }
}

impl KernelArgs for TokenShiftArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let [width, n_mix, n_tokens] = [self.width, self.n_mix, self.n_tokens].map(|n| n as usize);
        self.runs.bounds(launch.grid.blocks[2], bounds);
        self.states.bounds(width, bounds);
        bounds.array("x", self.x, n_tokens * width);
        bounds.array("lerps", self.lerps, n_mix * width);
        bounds.array("more", self.more, n_tokens * n_mix * width);
        bounds.array("out", self.out, n_mix * n_tokens * width);
    }
}

impl KernelArgs for Rwkv6Args {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let (n, [n_head, key_dim, value_dim]) = (self.scan.bounds(launch, bounds), self.scan.sizes());
        bounds.array("r", self.r, n * n_head * key_dim);
        bounds.array("k", self.k, n * self.n_head_kv as usize * key_dim);
        bounds.array("v", self.v, n * self.n_head_kv as usize * value_dim);
        bounds.array("decay", self.decay, n * n_head * key_dim);
        bounds.array("decay_bias", self.decay_bias, n_head * key_dim);
        bounds.array("bonus", self.bonus, n_head * key_dim);
    }
}

impl KernelArgs for SideProductsArgs {
    fn bounds(&self, _: &Launch, bounds: &mut Bounds) {
        for SideProductArgs { matrix, x, y, n_in, .. } in self.products {
            bounds.matrices("products.matrix", &matrix, 1);
            bounds.array("products.x", x, n_in as usize);
            bounds.array("products.y", y, matrix.n_rows as usize);
        }
    }
}

impl KernelArgs for Rwkv7InputsArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let width = self.n_head as usize * self.head_dim as usize;
        let n = launch.grid.blocks[1] * width;
        for (field, rows) in [
            ("decay", self.decay),
            ("rate", self.rate),
            ("k", self.k),
            ("v", self.v),
            ("kappa", self.kappa),
            ("first_value", self.first_value),
            ("value_mix", self.value_mix),
        ] {
            bounds.array(field, rows, n);
        }
        for (field, weights) in [
            ("decay_bias", self.decay_bias),
            ("rate_bias", self.rate_bias),
            ("removed", self.removed),
            ("kept", self.kept),
            ("value_bias", self.value_bias),
        ] {
            bounds.array(field, weights, width);
        }
    }
}

impl KernelArgs for Rwkv7Args {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let (n, [n_head, key_dim, _]) = (self.scan.bounds(launch, bounds), self.scan.sizes());
        for (field, rows) in
            [("r", self.r), ("decay", self.decay), ("k", self.k), ("v", self.v), ("a", self.a), ("b", self.b)]
        {
            bounds.array(field, rows, n * n_head * key_dim);
        }
    }
}
