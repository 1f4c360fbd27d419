//! Mamba and Mamba-2: a short convolution, a selective state space, and a gate. The state of a sequence in a layer is
//! the last inputs of the convolution, `[n_tap - 1, channels]`, followed by the state of the state space:
//! `[n_head, d_state, head_dim]`, for Mamba with a decay for each channel `[d_state, width]`.

use metal_attention_model::{BatchKind, Mamba2Spec, MambaDecay, MambaSpec, NormKind};
use wgpu::Buffer;

use super::mixer::MixerResult;
use super::{BranchInput, LinearProduct, PlanBuilder};
use crate::kernels::{
    self, ColumnRange, ConvolutionBuffers, ConvolutionShape, GroupNormBuffers, GroupNormShape, Mamba2Buffers,
    Mamba2Shape, Mamba2Step, Mamba2StepBuffers, MambaBuffers, MambaShape, MatvecOutput, NormShape, StateRange,
};
use crate::mamba::{WgpuMamba, WgpuMamba2};
use crate::{Bind, Dispatch, GridExtent, WgpuError};

/// A buffer as a kernel's optional binding.
fn bound(buffer: Option<&Buffer>) -> Option<&dyn Bind> {
    buffer.map(|buffer| buffer as &dyn Bind)
}

impl PlanBuilder<'_> {
    /// Appends Mamba-2 of layer `i`. Reads `inputs`, the part of the rows of `projected` that holds `[z, x, B, C, dt]`;
    /// writes its result to `out` (`mamba.y` before a norm). Decode steps run one kernel where it fits the GPU; other
    /// batches a convolution to `mamba.conv` and a scan.
    pub(super) fn mamba2<'s>(
        &'s self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        spec: &Mamba2Spec,
        w: &'s WgpuMamba2,
        inputs: ColumnRange,
        out: &'s Buffer,
    ) -> Result<MixerResult<'s>, WgpuError> {
        let Mamba2Spec { n_head, head_dim, d_state, n_group, n_tap, conv_bias: _, norm: _ } = *spec;
        let (gpu, scratch, m, width, channels) =
            (self.gpu, self.scratch, &self.scratch.mamba, spec.width(), spec.conv_width());
        let part = |at: usize| ColumnRange { first: inputs.first + at, ..inputs };
        let result = ColumnRange::whole(width);
        let last_inputs = StateRange { n_slots: self.states.n_slots(), stride: spec.state_elements(), at: 0 };
        let y = if w.norm.is_some() { &m.y } else { out };
        let (states, segments) = (self.states.of_layer(i), self.states.segments());
        let shape = Mamba2Shape {
            n_head,
            n_group,
            d_state,
            head_dim,
            x: part(width),
            bc: None,
            dt: part(width + channels),
            gate: Some(part(0)),
            out: result,
            states: StateRange { at: (n_tap - 1) * channels, ..last_inputs },
        };
        let buffers = Mamba2Buffers {
            x: &scratch.projected,
            bc: None,
            dt: &scratch.projected,
            dt_bias: &w.dt_bias,
            a: &w.a,
            d: &w.d,
            gate: Some(&scratch.projected),
            states,
            out: y,
            segments,
        };
        let step = Mamba2Step { width: n_tap, bias: w.conv_bias.is_some(), convolution_at: 0 };
        let with = Mamba2StepBuffers { taps: &w.taps, bias: bound(w.conv_bias.as_ref()), tickets: &scratch.tickets };
        let fused_step = if self.uses_decode_kernels() {
            kernels::mamba2_step(gpu, &shape, &step, &buffers, &with, GridExtent::Runs)?
        } else {
            None
        };
        if let Some(dispatch) = fused_step {
            dispatches.push(dispatch);
        } else {
            let convolution = ConvolutionShape {
                channels,
                width: n_tap,
                bias: w.conv_bias.is_some(),
                silu: true,
                x: part(width),
                out: ColumnRange::whole(channels),
                states: last_inputs,
            };
            dispatches.push(self.convolution(i, &convolution, &w.taps, w.conv_bias.as_ref())?);
            let shape = Mamba2Shape { x: ColumnRange::whole(channels), ..shape };
            let buffers = Mamba2Buffers { x: &m.conv, ..buffers };
            dispatches.push(kernels::mamba2(gpu, &shape, &buffers, GridExtent::Runs)?);
        }
        match &w.norm {
            None => Ok(MixerResult::new(&w.out, out)),
            // The output product of one token computes the norm of a whole row in its prologue.
            Some(norm) if n_group == 1 && self.kind == BatchKind::One => {
                Ok(MixerResult { out: &w.out, input: y, norm: Some(norm) })
            }
            Some(norm) => {
                let shape = GroupNormShape {
                    n: norm.n,
                    groups: n_group,
                    kind: norm.kind,
                    eps: norm.eps,
                    of_groups: true,
                    bias: false,
                    x: result,
                    gate: None,
                    out: result,
                };
                let buffers = GroupNormBuffers { x: y, weight: &norm.weights, bias: None, gate: None, out };
                dispatches.push(kernels::group_norm(gpu, &shape, &buffers)?);
                Ok(MixerResult::new(&w.out, out))
            }
        }
    }

    /// Appends Mamba of layer `i`. Projects `input` to `projected` (x and gate z), convolves x to `mamba.conv`,
    /// computes dt, B and C of each token, and scans; the result is in `mixer_out`.
    pub(super) fn mamba<'s>(
        &'s self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        spec: &MambaSpec,
        w: &'s WgpuMamba,
        input: BranchInput<'_>,
    ) -> Result<MixerResult<'s>, WgpuError> {
        let MambaSpec { width, d_state, dt_rank: _, n_tap, norms: _, decay } = *spec;
        let (gpu, scratch, m) = (self.gpu, self.scratch, &self.scratch.mamba);
        self.multiply_branch_input(dispatches, input, &w.input, MatvecOutput::Store, &scratch.projected)?;
        let (x, gate) = (ColumnRange { stride: 2 * width, first: 0 }, ColumnRange { stride: 2 * width, first: width });
        let last_inputs = StateRange { n_slots: self.states.n_slots(), stride: spec.state_elements(), at: 0 };
        let (row, bias) = (ColumnRange::whole(width), w.conv_bias.is_some());
        let convolution =
            ConvolutionShape { channels: width, width: n_tap, bias, silu: true, x, out: row, states: last_inputs };
        dispatches.push(self.convolution(i, &convolution, &w.taps, w.conv_bias.as_ref())?);

        let bc = self.select(dispatches, spec, w)?;
        let state_space = StateRange { at: (n_tap - 1) * width, ..last_inputs };
        let (states, segments) = (self.states.of_layer(i), self.states.segments());
        let (b, c) =
            (ColumnRange { stride: 2 * d_state, first: 0 }, ColumnRange { stride: 2 * d_state, first: d_state });
        dispatches.push(match decay {
            MambaDecay::Channels => {
                let shape = MambaShape {
                    channels: width,
                    d_state,
                    x: row,
                    dt: row,
                    b,
                    c,
                    gate: Some(gate),
                    out: row,
                    states: state_space,
                };
                let buffers = MambaBuffers {
                    x: &m.conv,
                    dt: &m.dt,
                    b: bc,
                    c: bc,
                    dt_bias: &w.dt_bias,
                    a: &w.a,
                    d: &w.d,
                    gate: Some(&scratch.projected),
                    states,
                    out: &scratch.mixer_out,
                    segments,
                };
                kernels::mamba(gpu, &shape, &buffers, GridExtent::Runs)?
            }
            MambaDecay::Heads(n_head) => {
                let shape = Mamba2Shape {
                    n_head,
                    n_group: 1,
                    d_state,
                    head_dim: width / n_head,
                    x: row,
                    bc: Some(b),
                    dt: ColumnRange::whole(n_head),
                    gate: Some(gate),
                    out: row,
                    states: state_space,
                };
                let buffers = Mamba2Buffers {
                    x: &m.conv,
                    bc: Some(bc),
                    dt: &m.dt,
                    dt_bias: &w.dt_bias,
                    a: &w.a,
                    d: &w.d,
                    gate: Some(&scratch.projected),
                    states,
                    out: &scratch.mixer_out,
                    segments,
                };
                kernels::mamba2(gpu, &shape, &buffers, GridExtent::Runs)?
            }
        });
        Ok(MixerResult::new(&w.out, &scratch.mixer_out))
    }

    /// Appends the selection: what each token derives its state update from. Reads `mamba.conv`; writes `mamba.low` and
    /// the step size `mamba.dt`, without its bias, and `mamba.bc`. Returns the buffer that holds B and C.
    fn select(&self, dispatches: &mut Vec<Dispatch>, spec: &MambaSpec, w: &WgpuMamba) -> Result<&Buffer, WgpuError> {
        let (m, d_state) = (&self.scratch.mamba, spec.d_state);
        self.multiply(dispatches, LinearProduct::new(&w.select_dt, MatvecOutput::Store, &m.conv, &m.low))?;
        self.multiply(dispatches, LinearProduct::new(&w.select_bc, MatvecOutput::Store, &m.conv, &m.bc))?;
        let expanded = LinearProduct::new(&w.dt, MatvecOutput::Store, &m.low, &m.dt);
        let Some(norms) = &w.norms else {
            self.multiply(dispatches, expanded)?;
            return Ok(&m.bc);
        };
        if self.kind == BatchKind::One {
            self.multiply_normed(dispatches, &norms.dt, expanded)?;
        } else {
            dispatches.push(self.norm(&norms.dt, NormShape::of_row(norms.dt.n), None, &m.low)?);
            self.multiply(dispatches, expanded)?;
        }
        let rows = ColumnRange::whole(2 * d_state);
        let shape = GroupNormShape {
            n: d_state,
            groups: 2,
            kind: NormKind::Rms,
            eps: norms.dt.eps,
            of_groups: true,
            bias: false,
            x: rows,
            gate: None,
            out: rows,
        };
        let buffers = GroupNormBuffers { x: &m.bc, weight: &norms.bc, bias: None, gate: None, out: &m.bc_normed };
        dispatches.push(kernels::group_norm(self.gpu, &shape, &buffers)?);
        Ok(&m.bc_normed)
    }

    /// The convolution of layer `i`, from `projected` to `mamba.conv`.
    fn convolution(
        &self,
        i: usize,
        shape: &ConvolutionShape,
        taps: &Buffer,
        bias: Option<&Buffer>,
    ) -> Result<Dispatch, WgpuError> {
        let buffers = ConvolutionBuffers {
            x: &self.scratch.projected,
            taps,
            bias: bound(bias),
            states: self.states.of_layer(i),
            out: &self.scratch.mamba.conv,
            segments: self.states.segments(),
        };
        kernels::convolution(self.gpu, shape, &buffers, GridExtent::Runs)
    }
}
