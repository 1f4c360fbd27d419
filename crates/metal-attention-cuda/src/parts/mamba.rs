//! Mamba and Mamba-2: input product, short convolution, the selective scan (`runner/recurrence.rs`), gate and output product.

use bytemuck::Zeroable;
use metal_attention_model::{
    AttentionAndMamba2Weights, Mamba2Spec, Mamba2Weights, MambaDecay, MambaSpec, MambaWeights, NormKind,
};

use super::CudaAttention;
use crate::CudaError;
use crate::activations::{Widths, widen};
use crate::args::{
    ConvolutionArgs, FusedMamba2Args, GroupNormArgs, GroupNormKind, Mamba2Args, MambaArgs, RowsArgs, SelectArgs,
};
use crate::device::CudaBuffer;
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::runner::layer::SublayerOutput;
use crate::runner::linear::LinearInput;
use crate::runner::recurrence::{RecurrenceKernel, supports_taps};
use crate::runner::{MicroBatch, ModelRunner};
use crate::slice::DevicePtr;
use crate::weights::{CudaLinear, CudaNorm, CudaVector, Loader, ptr_or_null};

/// A Mamba mixer.
#[derive(Debug)]
pub(crate) struct CudaMamba {
    /// Its sizes.
    spec: MambaSpec,
    /// `x` and `z` one below the other, `[2 * width, n_embd]`; with decays of heads, `z` and `x` of each head.
    input: CudaLinear,
    /// Coefficients of the convolution, those of the oldest token first, `[n_tap, width]`.
    taps: CudaVector,
    /// Bias of the convolution, `[width]`.
    conv_bias: Option<CudaVector>,
    /// The selection `W_x`, `[dt_rank + 2 * d_state, width]`.
    select: CudaLinear,
    /// Weights of the norms of `dt`, `B` and `C`.
    norms: Option<[CudaVector; 3]>,
    /// `W_dt`, `[n_dt, dt_rank]`; the scan adds its bias, not the product.
    dt: CudaLinear,
    /// `A`, negative, `[width, d_state]`, or `[n_head]`.
    a: CudaVector,
    /// `D`, `[n_dt]`.
    d: CudaVector,
    /// Output, `[n_embd, width]`.
    out: CudaLinear,
}

/// A Mamba-2 mixer.
#[derive(Debug)]
pub(crate) struct CudaMamba2 {
    /// Its sizes.
    spec: Mamba2Spec,
    /// `z`, `x`, `B`, `C` and `dt`, one below the other, `[input_width, n_embd]`.
    input: CudaLinear,
    /// Coefficients of the convolution, those of the oldest token first, `[n_tap, conv_width]`.
    taps: CudaVector,
    /// Bias of the convolution, `[conv_width]`.
    conv_bias: Option<CudaVector>,
    /// Bias of `dt`, `[n_head]`.
    dt_bias: CudaVector,
    /// `A`, negative, `[n_head]`.
    a: CudaVector,
    /// `D`, `[n_head]`.
    d: CudaVector,
    /// Norm of the result, over groups or the whole row.
    norm: Option<CudaNorm>,
    /// Output, `[n_embd, width]`.
    out: CudaLinear,
}

/// Attention and Mamba-2, whose results are added.
#[derive(Debug)]
pub(crate) struct CudaAttentionAndMamba2 {
    /// The attention.
    pub(crate) attention: CudaAttention,
    /// The state space.
    pub(crate) mamba2: CudaMamba2,
}

impl CudaMamba {
    /// Uploads the weights.
    pub(super) fn new(loader: &mut Loader<'_>, w: &MambaWeights) -> Result<Self, CudaError> {
        let norms = match &w.norms {
            Some([dt, b, c]) => Some([loader.vector(dt)?, loader.vector(b)?, loader.vector(c)?]),
            None => None,
        };
        let a = match w.spec.decay {
            // Transposed to `[width, d_state]`, so that the numbers of a channel are adjacent.
            MambaDecay::Channels => {
                let channel_values = |channel: usize| w.a.iter().skip(channel).step_by(w.spec.width).copied();
                loader.vector(&(0..w.spec.width).flat_map(channel_values).collect::<Vec<_>>())?
            }
            MambaDecay::Heads(_) => loader.vector(&w.a)?,
        };
        Ok(Self {
            spec: w.spec,
            input: loader.linear(&w.input)?,
            taps: loader.vector(&w.taps)?,
            conv_bias: loader.optional(w.conv_bias.as_deref())?,
            select: loader.linear(&w.select)?,
            norms,
            dt: loader.linear(&w.dt)?,
            a,
            d: loader.vector(&w.d)?,
            out: loader.linear(&w.out)?,
        })
    }
}

impl CudaMamba2 {
    /// Uploads the weights.
    pub(super) fn new(loader: &mut Loader<'_>, w: &Mamba2Weights) -> Result<Self, CudaError> {
        let norm = match (w.spec.norm, &w.norm) {
            (Some(eps), Some(weight)) => {
                let (kind, n) = (NormKind::Rms, weight.len());
                Some(CudaNorm { kind, weight: loader.vector(weight)?, bias: None, eps, n })
            }
            (None, _) | (_, None) => None,
        };
        Ok(Self {
            spec: w.spec,
            input: loader.linear(&w.input)?,
            taps: loader.vector(&w.taps)?,
            conv_bias: loader.optional(w.conv_bias.as_deref())?,
            dt_bias: loader.vector(&w.dt_bias)?,
            a: loader.vector(&w.a)?,
            d: loader.vector(&w.d)?,
            norm,
            out: loader.linear(&w.out)?,
        })
    }
}

impl CudaAttentionAndMamba2 {
    /// Uploads the weights.
    pub(super) fn new(loader: &mut Loader<'_>, w: &AttentionAndMamba2Weights) -> Result<Self, CudaError> {
        Ok(Self { attention: CudaAttention::new(loader, &w.attention)?, mamba2: CudaMamba2::new(loader, &w.mamba2)? })
    }
}

/// Checks that there are kernels for Mamba; the error is the part without one.
pub(crate) fn supports_mamba(spec: &MambaSpec) -> Result<(), &'static str> {
    supports_taps(spec.n_tap)?;
    match spec.decay {
        MambaDecay::Channels if !RecurrenceKernel::MAMBA.has_keys_of(spec.d_state) => {
            Err("Mamba with states of that many elements")
        }
        MambaDecay::Channels => Ok(()),
        MambaDecay::Heads(_) => RecurrenceKernel::MAMBA2.supports_keys(spec.d_state),
    }
}

/// Checks that there are kernels for Mamba-2; the error is the part without one.
pub(crate) fn supports_mamba2(spec: &Mamba2Spec) -> Result<(), &'static str> {
    supports_taps(spec.n_tap)?;
    RecurrenceKernel::MAMBA2.supports_keys(spec.d_state)
}

/// Widens the buffers of intermediate results.
pub(super) fn widen_for_mamba(widths: &mut Widths, spec: &MambaSpec) {
    widths.widen_scratch_rows(mamba_widths(spec));
}

/// Widens the buffers of intermediate results.
pub(super) fn widen_for_mamba2(widths: &mut Widths, spec: &Mamba2Spec) {
    widen(&mut widths.n_key_head, spec.n_group);
    widths.widen_scratch_rows(mamba2_widths(spec));
}

/// Scratch widths of Mamba: `x` and `z`; `x` after the convolution; the selection, that is, `dt`, `B` and `C` before norms;
/// `dt` before and after its expansion; `B` and `C`; the result.
fn mamba_widths(spec: &MambaSpec) -> [usize; 7] {
    [2 * spec.width, spec.width, spec.selection().n, spec.dt_rank, spec.n_dt(), 2 * spec.d_state, spec.width]
}

/// Scratch widths of Mamba-2: `z`, `x`, `B`, `C` and `dt`; `x`, `B` and `C` after the convolution; the result.
fn mamba2_widths(spec: &Mamba2Spec) -> [usize; 3] {
    [spec.input_width(), spec.conv_width(), spec.width()]
}

impl ModelRunner {
    /// Launches the Mamba-2 of layer `i`, except its output product. The layer's state is the last inputs of the convolution,
    /// `[n_tap - 1, channels]`, then a matrix for each head.
    pub(crate) fn mamba2<'w>(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        w: &'w CudaMamba2,
        input: LinearInput,
    ) -> Result<SublayerOutput<'w>, CudaError> {
        let spec = &w.spec;
        let (width, channels, stride) = (spec.width(), spec.conv_width(), spec.input_width());
        let [inputs, conv, out] = self.scratch_rows(batch, mamba2_widths(spec));
        self.store_all(batch, "Mamba inputs", [&w.input], input, inputs)?;
        let x = RowsArgs::new(inputs, stride, width);
        let convolution = ConvolutionArgs {
            bias: ptr_or_null(w.conv_bias.as_ref()),
            ..ConvolutionArgs::of_channels(x, w.taps.ptr(), conv.ptr(), channels, spec.n_tap)
        };
        let states = batch.recurrent.of_layer(i, (spec.n_tap - 1) * channels);
        let of_conv = |first: usize| RowsArgs::new(conv, channels, first);
        let args = Mamba2Args {
            scan: Self::scan_args(
                batch,
                RecurrenceKernel::MAMBA2,
                states,
                out,
                [spec.n_head, spec.d_state, spec.head_dim],
            ),
            x: of_conv(0),
            b: of_conv(width),
            c: of_conv(width + spec.n_group * spec.d_state),
            dt: RowsArgs::new(inputs, stride, width + channels),
            gate: RowsArgs::new(inputs, stride, 0),
            dt_bias: w.dt_bias.ptr(),
            a: w.a.ptr(),
            d: w.d.ptr(),
            heads_of_group: (spec.n_head / spec.n_group) as u32,
            gate_step: spec.head_dim as u32,
        };
        let around = Self::convolution_of(batch, i, convolution);
        if let Some(fused) = self.fused_decode_args(batch, RecurrenceKernel::MAMBA2, &args.scan, around, None) {
            let args = FusedMamba2Args { args, fused };
            self.launch_fused_decode(batch, RecurrenceKernel::MAMBA2, kernels::MAMBA2_ALONE, &args.args.scan, &args)?;
        } else {
            self.convolution(batch, i, convolution)?;
            self.launch_scan(batch, RecurrenceKernel::MAMBA2, kernels::MAMBA2, &args.scan, &args)?;
        }
        // A norm over the whole row is applied by the output product; a norm of groups is a launch.
        let of_row = w.norm.as_ref().filter(|_| spec.n_group == 1);
        if let Some(norm) = w.norm.as_ref().filter(|_| spec.n_group > 1) {
            let norm = GroupNormArgs {
                x: out.ptr(),
                out: out.ptr(),
                weight: norm.weight.ptr(),
                n: (width / spec.n_group) as u32,
                n_group: spec.n_group as u32,
                of_groups: 1,
                norm: GroupNormKind::Rms as u32,
                eps: norm.eps,
                ..GroupNormArgs::zeroed()
            };
            self.group_norm(batch, &norm)?;
        }
        let input = self.rows_input(batch, out, width, of_row)?;
        Ok(SublayerOutput::Product { label: "Mamba output", linear: &w.out, input })
    }

    /// Launches the Mamba of layer `i`, except its output product. The layer's state is the last inputs of the convolution,
    /// then `d_state` numbers for each channel.
    pub(crate) fn mamba<'w>(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        w: &'w CudaMamba,
        input: LinearInput,
    ) -> Result<SublayerOutput<'w>, CudaError> {
        let spec = &w.spec;
        let (width, d_state, select) = (spec.width, spec.d_state, spec.selection());
        let [inputs, conv, chosen, low, dt, bc, out] = self.scratch_rows(batch, mamba_widths(spec));
        self.store_all(batch, "Mamba inputs", [&w.input], input, inputs)?;
        // With decays of heads, the input rows are z and x of each head in turn, and not all z and then all x.
        let (first, block, step_of) = match spec.decay {
            MambaDecay::Channels => (0, width, width),
            MambaDecay::Heads(n_head) => (width / n_head, width / n_head, 2 * (width / n_head)),
        };
        let x = RowsArgs::new(inputs, 2 * width, first);
        let args = ConvolutionArgs {
            bias: ptr_or_null(w.conv_bias.as_ref()),
            block: block as u32,
            step: step_of as u32,
            ..ConvolutionArgs::of_channels(x, w.taps.ptr(), conv.ptr(), width, spec.n_tap)
        };
        self.convolution(batch, i, args)?;
        self.store_rows(batch, "Mamba selection", &w.select, conv, chosen)?;
        let args = SelectArgs {
            chosen: chosen.ptr(),
            dt: low.ptr(),
            bc: bc.ptr(),
            weights: w.norms.as_ref().map_or([DevicePtr::NULL; 3], |norms| norms.each_ref().map(CudaBuffer::ptr)),
            n: select.n as u32,
            rank: spec.dt_rank as u32,
            d_state: d_state as u32,
            at: [select.dt, select.b, select.c].map(|at| at as u32),
            eps: spec.norms.map_or(0.0, |norms| norms.eps),
            unused: 0,
        };
        self.launch(
            kernels::MAMBA_SELECT,
            "",
            LaunchGrid { blocks: [batch.size.n_tokens, 1, 1], threads: 96, shared: 0 },
            &args,
        )?;
        // The scan adds the bias.
        let input = self.rows_input(batch, low, spec.dt_rank, None)?;
        self.store_matrices(batch, "Mamba dt", [&w.dt.weight], DevicePtr::NULL, input, dt)?;
        let states = batch.recurrent.of_layer(i, (spec.n_tap - 1) * width);
        let dt_bias = w.dt.bias();
        match spec.decay {
            MambaDecay::Channels => {
                let args = MambaArgs {
                    scan: Self::scan_args(batch, RecurrenceKernel::MAMBA, states, out, [1, d_state, width]),
                    x: conv.ptr(),
                    dt: dt.ptr(),
                    bc: bc.ptr(),
                    gate: RowsArgs::new(inputs, 2 * width, width),
                    dt_bias,
                    a: w.a.ptr(),
                    d: w.d.ptr(),
                };
                self.launch_scan(batch, RecurrenceKernel::MAMBA, kernels::MAMBA, &args.scan, &args)?;
            }
            MambaDecay::Heads(n_head) => {
                let head_dim = width / n_head;
                let args = Mamba2Args {
                    scan: Self::scan_args(batch, RecurrenceKernel::MAMBA2, states, out, [n_head, d_state, head_dim]),
                    x: RowsArgs::new(conv, width, 0),
                    b: RowsArgs::new(bc, 2 * d_state, 0),
                    c: RowsArgs::new(bc, 2 * d_state, d_state),
                    dt: RowsArgs::new(dt, n_head, 0),
                    gate: RowsArgs::new(inputs, 2 * width, 0),
                    dt_bias,
                    a: w.a.ptr(),
                    d: w.d.ptr(),
                    heads_of_group: n_head as u32,
                    gate_step: 2 * head_dim as u32,
                };
                self.launch_scan(batch, RecurrenceKernel::MAMBA2, kernels::MAMBA2, &args.scan, &args)?;
            }
        }
        let input = self.rows_input(batch, out, width, None)?;
        Ok(SublayerOutput::Product { label: "Mamba output", linear: &w.out, input })
    }
}
