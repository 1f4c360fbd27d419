//! Mamba and Mamba-2: state spaces behind a short convolution, with a gate.

use metal_attention_model::{BatchKind, Mamba2Spec, MambaDecay, MambaSpec, NormKind};
use wgpu::Buffer;

use super::mixer::Mixed;
use super::{Input, PlanBuilder, Product};
use crate::kernels::{
    self, ConvolutionBuffers, ConvolutionShape, GroupNormBuffers, GroupNormShape, Mamba2Buffers, Mamba2Shape,
    Mamba2Step, Mamba2StepBuffers, MambaBuffers, MambaShape, MatvecOutput, NormShape, RowsAt, StatesAt,
};
use crate::mamba::{WgpuMamba, WgpuMamba2};
use crate::{Bind, Dispatch, Extent, WgpuError};

fn bound(buffer: Option<&Buffer>) -> Option<&dyn Bind> {
    buffer.map(|buffer| buffer as &dyn Bind)
}

impl PlanBuilder<'_> {
    /// Mamba-2 of layer `i`, whose `[z, x, B, C, dt]` are the `inputs` of rows of `qkv`, up to the row that its output matrix
    /// multiplies, for which there is room in `out`.
    pub(super) fn mamba2<'s>(
        &'s self,
        d: &mut Vec<Dispatch>,
        i: usize,
        of: &Mamba2Spec,
        w: &'s WgpuMamba2,
        inputs: RowsAt,
        out: &'s Buffer,
    ) -> Result<Mixed<'s>, WgpuError> {
        let Mamba2Spec { n_head, head_dim, d_state, n_group, n_tap, conv_bias: _, norm: _ } = *of;
        let (gpu, s, m, width, channels) = (self.gpu, self.s, &self.s.mamba, of.width(), of.conv_width());
        let part = |at: usize| RowsAt { at: inputs.at + at, ..inputs };
        let result = RowsAt::whole(width);
        let last_inputs = StatesAt { n_slots: self.states.n_slots(), stride: of.state_elements(), at: 0 };
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
            states: StatesAt { at: (n_tap - 1) * channels, ..last_inputs },
        };
        let buffers = Mamba2Buffers {
            x: &s.qkv,
            bc: None,
            dt: &s.qkv,
            dt_bias: &w.dt_bias,
            a: &w.a,
            d: &w.d,
            gate: Some(&s.qkv),
            states,
            out: y,
            segments,
        };
        let step = Mamba2Step { width: n_tap, bias: w.conv_bias.is_some(), convolution_at: 0 };
        let with = Mamba2StepBuffers { taps: &w.taps, bias: bound(w.conv_bias.as_ref()), tickets: &s.tickets };
        let at_once = if self.decodes() {
            kernels::mamba2_step(gpu, &shape, &step, &buffers, &with, Extent::Runs)?
        } else {
            None
        };
        if let Some(dispatch) = at_once {
            d.push(dispatch);
        } else {
            let convolution = ConvolutionShape {
                channels,
                width: n_tap,
                bias: w.conv_bias.is_some(),
                silu: true,
                x: part(width),
                out: RowsAt::whole(channels),
                states: last_inputs,
            };
            d.push(self.convolution(i, &convolution, &w.taps, w.conv_bias.as_ref())?);
            let shape = Mamba2Shape { x: RowsAt::whole(channels), ..shape };
            let buffers = Mamba2Buffers { x: &m.conv, ..buffers };
            d.push(kernels::mamba2(gpu, &shape, &buffers, Extent::Runs)?);
        }
        match &w.norm {
            None => Ok(Mixed::of(&w.out, out)),
            // The product of one token takes the norm of a whole row on its way.
            Some(norm) if n_group == 1 && self.kind == BatchKind::One => {
                Ok(Mixed { out: &w.out, x: y, norm: Some(norm) })
            }
            Some(norm) => {
                let of = GroupNormShape {
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
                d.push(kernels::group_norm(gpu, &of, &buffers)?);
                Ok(Mixed::of(&w.out, out))
            }
        }
    }

    /// Mamba of layer `i`, up to the row that its output matrix multiplies.
    pub(super) fn mamba<'s>(
        &'s self,
        d: &mut Vec<Dispatch>,
        i: usize,
        of: &MambaSpec,
        w: &'s WgpuMamba,
        input: Input<'_>,
    ) -> Result<Mixed<'s>, WgpuError> {
        let MambaSpec { width, d_state, dt_rank: _, n_tap, norms: _, decay } = *of;
        let (gpu, s, m) = (self.gpu, self.s, &self.s.mamba);
        self.product_of(d, input, Product::new(&w.input, MatvecOutput::Store, &s.x, &s.qkv))?;
        let (x, gate) = (RowsAt { stride: 2 * width, at: 0 }, RowsAt { stride: 2 * width, at: width });
        let last_inputs = StatesAt { n_slots: self.states.n_slots(), stride: of.state_elements(), at: 0 };
        let (row, bias) = (RowsAt::whole(width), w.conv_bias.is_some());
        let convolution =
            ConvolutionShape { channels: width, width: n_tap, bias, silu: true, x, out: row, states: last_inputs };
        d.push(self.convolution(i, &convolution, &w.taps, w.conv_bias.as_ref())?);

        let bc = self.choose(d, of, w)?;
        let of_state = StatesAt { at: (n_tap - 1) * width, ..last_inputs };
        let (states, segments) = (self.states.of_layer(i), self.states.segments());
        let (b, c) = (RowsAt { stride: 2 * d_state, at: 0 }, RowsAt { stride: 2 * d_state, at: d_state });
        d.push(match decay {
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
                    states: of_state,
                };
                let buffers = MambaBuffers {
                    x: &m.conv,
                    dt: &m.dt,
                    b: bc,
                    c: bc,
                    dt_bias: &w.dt_bias,
                    a: &w.a,
                    d: &w.d,
                    gate: Some(&s.qkv),
                    states,
                    out: &s.att,
                    segments,
                };
                kernels::mamba(gpu, &shape, &buffers, Extent::Runs)?
            }
            MambaDecay::Heads(n_head) => {
                let shape = Mamba2Shape {
                    n_head,
                    n_group: 1,
                    d_state,
                    head_dim: width / n_head,
                    x: row,
                    bc: Some(b),
                    dt: RowsAt::whole(n_head),
                    gate: Some(gate),
                    out: row,
                    states: of_state,
                };
                let buffers = Mamba2Buffers {
                    x: &m.conv,
                    bc: Some(bc),
                    dt: &m.dt,
                    dt_bias: &w.dt_bias,
                    a: &w.a,
                    d: &w.d,
                    gate: Some(&s.qkv),
                    states,
                    out: &s.att,
                    segments,
                };
                kernels::mamba2(gpu, &shape, &buffers, Extent::Runs)?
            }
        });
        Ok(Mixed::of(&w.out, &s.att))
    }

    /// `dt`, without its bias, of all tokens, and their `B` and `C`, which lie in what is returned.
    fn choose(&self, d: &mut Vec<Dispatch>, of: &MambaSpec, w: &WgpuMamba) -> Result<&Buffer, WgpuError> {
        let (m, d_state) = (&self.s.mamba, of.d_state);
        self.multiply(d, Product::new(&w.select_dt, MatvecOutput::Store, &m.conv, &m.low))?;
        self.multiply(d, Product::new(&w.select_bc, MatvecOutput::Store, &m.conv, &m.bc))?;
        let expanded = Product::new(&w.dt, MatvecOutput::Store, &m.low, &m.dt);
        let Some(norms) = &w.norms else {
            self.multiply(d, expanded)?;
            return Ok(&m.bc);
        };
        if self.kind == BatchKind::One {
            self.multiply_normed(d, &norms.dt, expanded)?;
        } else {
            d.push(self.norm(&norms.dt, NormShape::of_row(norms.dt.n), None, &m.low)?);
            self.multiply(d, expanded)?;
        }
        let rows = RowsAt::whole(2 * d_state);
        let of = GroupNormShape {
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
        d.push(kernels::group_norm(self.gpu, &of, &buffers)?);
        Ok(&m.bc_normed)
    }

    /// The convolution of layer `i`, of rows of `qkv`.
    fn convolution(
        &self,
        i: usize,
        of: &ConvolutionShape,
        taps: &Buffer,
        bias: Option<&Buffer>,
    ) -> Result<Dispatch, WgpuError> {
        let buffers = ConvolutionBuffers {
            x: &self.s.qkv,
            taps,
            bias: bound(bias),
            states: self.states.of_layer(i),
            out: &self.s.mamba.conv,
            segments: self.states.segments(),
        };
        kernels::convolution(self.gpu, of, &buffers, Extent::Runs)
    }
}
