//! Mamba and Mamba-2: state spaces behind a short convolution, with a gate.

use bytemuck::Zeroable;
use metal_attention_model::{Mamba2Spec, MambaDecay, MambaSpec};

use super::layer::Given;
use super::product::Input;
use super::walk::Rule;
use super::{Step, Steps};
use crate::CudaError;
use crate::args::{
    ConvolutionArgs, GroupNormArgs, GroupNormKind, Mamba2AloneArgs, Mamba2Args, MambaArgs, RowsArgs, SelectArgs,
};
use crate::device::CudaBuffer;
use crate::launch::Grid;
use crate::weights::{CudaMamba, CudaMamba2};

/// `x` and `z`; `x` after the convolution; what the tokens choose by; of these `dt` before and after it is expanded, `B` and `C`;
/// result.
pub(super) fn widths(of: &MambaSpec) -> [usize; 7] {
    [2 * of.width, of.width, of.selection().n, of.dt_rank, of.n_dt(), 2 * of.d_state, of.width]
}

/// `z`, `x`, `B`, `C` and `dt`; what comes of the convolution; result.
pub(super) fn widths2(of: &Mamba2Spec) -> [usize; 3] {
    [of.input_width(), of.conv_width(), of.width()]
}

fn ptr(vector: Option<&CudaBuffer>) -> u64 {
    vector.map_or(0, CudaBuffer::ptr)
}

impl Steps {
    /// Mamba-2 of layer `i`.
    pub(super) fn mamba2<'w>(
        &mut self,
        step: Step<'_>,
        i: usize,
        w: &'w CudaMamba2,
        input: Input,
    ) -> Result<Given<'w>, CudaError> {
        let of = &w.spec;
        let (width, channels, stride) = (of.width(), of.conv_width(), of.input_width());
        let [inputs, conv, out] = self.areas(step, widths2(of));
        self.store_all(step, "Mamba inputs", [&w.input], input, inputs)?;
        let convolution = ConvolutionArgs {
            x: RowsArgs::new(inputs, stride, width),
            taps: w.taps.ptr(),
            bias: ptr(w.conv_bias.as_ref()),
            out: conv,
            channels: channels as u32,
            n_tap: of.n_tap as u32,
            block: channels as u32,
            step: channels as u32,
            ..ConvolutionArgs::zeroed()
        };
        let states = step.states.of_layer(i, (of.n_tap - 1) * channels);
        let of_conv = |first: usize| RowsArgs::new(conv, channels, first);
        let args = Mamba2Args {
            walk: Self::walk(step, Rule::MAMBA2, states, out, [of.n_head, of.d_state, of.head_dim]),
            x: of_conv(0),
            b: of_conv(width),
            c: of_conv(width + of.n_group * of.d_state),
            dt: RowsArgs::new(inputs, stride, width + channels),
            gate: RowsArgs::new(inputs, stride, 0),
            dt_bias: w.dt_bias.ptr(),
            a: w.a.ptr(),
            d: w.d.ptr(),
            heads_of_group: (of.n_head / of.n_group) as u32,
            gate_step: of.head_dim as u32,
        };
        let around = Self::convolution_of(step, i, convolution);
        if let Some(alone) = self.alone(step, Rule::MAMBA2, &args.walk, around, None) {
            self.launch_alone(step, Rule::MAMBA2, &args.walk, &Mamba2AloneArgs { of: args, alone })?;
        } else {
            self.convolution(step, i, convolution)?;
            self.launch_walk(step, Rule::MAMBA2, &args.walk, &args)?;
        }
        // The norm of a whole row goes with the product.
        let of_row = w.norm.as_ref().filter(|_| of.n_group == 1);
        if let Some(norm) = w.norm.as_ref().filter(|_| of.n_group > 1) {
            let norm = GroupNormArgs {
                x: out,
                out,
                weight: norm.weight.ptr(),
                n: (width / of.n_group) as u32,
                n_group: of.n_group as u32,
                of_groups: 1,
                norm: GroupNormKind::Rms as u32,
                eps: norm.eps,
                ..GroupNormArgs::zeroed()
            };
            self.group_norm(step, &norm)?;
        }
        let input = self.rows_input(step, out, width, of_row)?;
        Ok(Given::Product { what: "Mamba output", linear: &w.out, input })
    }

    /// Mamba of layer `i`.
    pub(super) fn mamba<'w>(
        &mut self,
        step: Step<'_>,
        i: usize,
        w: &'w CudaMamba,
        input: Input,
    ) -> Result<Given<'w>, CudaError> {
        let of = &w.spec;
        let (width, d_state, select) = (of.width, of.d_state, of.selection());
        let [inputs, conv, chosen, low, dt, bc, out] = self.areas(step, widths(of));
        self.store_all(step, "Mamba inputs", [&w.input], input, inputs)?;
        // Where there are heads, z and x of each lie one below the other.
        let (first, block, step_of) = match of.decay {
            MambaDecay::Channels => (0, width, width),
            MambaDecay::Heads(n_head) => (width / n_head, width / n_head, 2 * (width / n_head)),
        };
        let args = ConvolutionArgs {
            x: RowsArgs::new(inputs, 2 * width, first),
            taps: w.taps.ptr(),
            bias: ptr(w.conv_bias.as_ref()),
            out: conv,
            channels: width as u32,
            n_tap: of.n_tap as u32,
            block: block as u32,
            step: step_of as u32,
            ..ConvolutionArgs::zeroed()
        };
        self.convolution(step, i, args)?;
        self.store_rows(step, "Mamba selection", &w.select, conv, chosen)?;
        let args = SelectArgs {
            chosen,
            dt: low,
            bc,
            weights: w.norms.as_ref().map_or([0; 3], |norms| norms.each_ref().map(CudaBuffer::ptr)),
            n: select.n as u32,
            rank: of.dt_rank as u32,
            d_state: d_state as u32,
            at: [select.dt, select.b, select.c].map(|at| at as u32),
            eps: of.norms.map_or(0.0, |norms| norms.eps),
            unused: 0,
        };
        self.launch("mamba_select", "", Grid { blocks: [step.size.n_tokens, 1, 1], threads: 96, shared: 0 }, &args)?;
        // The bias is added where `dt` is read.
        let input = self.rows_input(step, low, of.dt_rank, None)?;
        self.store_matrices(step, "Mamba dt", [&w.dt.weight], 0, input, dt)?;
        let states = step.states.of_layer(i, (of.n_tap - 1) * width);
        let dt_bias = w.dt.bias();
        match of.decay {
            MambaDecay::Channels => {
                let args = MambaArgs {
                    walk: Self::walk(step, Rule::MAMBA, states, out, [1, d_state, width]),
                    x: conv,
                    dt,
                    bc,
                    gate: RowsArgs::new(inputs, 2 * width, width),
                    dt_bias,
                    a: w.a.ptr(),
                    d: w.d.ptr(),
                };
                self.launch_walk(step, Rule::MAMBA, &args.walk, &args)?;
            }
            MambaDecay::Heads(n_head) => {
                let head_dim = width / n_head;
                let args = Mamba2Args {
                    walk: Self::walk(step, Rule::MAMBA2, states, out, [n_head, d_state, head_dim]),
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
                self.launch_walk(step, Rule::MAMBA2, &args.walk, &args)?;
            }
        }
        let input = self.rows_input(step, out, width, None)?;
        Ok(Given::Product { what: "Mamba output", linear: &w.out, input })
    }
}
