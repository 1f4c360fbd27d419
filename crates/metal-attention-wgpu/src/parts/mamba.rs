//! Mamba and Mamba-2: a short convolution, a selective state space, and a gate. The state of a sequence in a layer is
//! the last inputs of the convolution, `[n_tap - 1, channels]`, followed by the state of the state space:
//! `[n_head, d_state, head_dim]`, for Mamba with a decay for each channel `[d_state, width]`.

use metal_attention_model::{
    AttentionAndMamba2Weights, BatchKind, Linear, Mamba2Spec, Mamba2Weights, MambaDecay, MambaSpec, MambaWeights,
    NormKind,
};
use wgpu::Buffer;

use super::{AttentionKernels, LayerPages, WgpuAttention};
use crate::activations::{ActivationWidths, widen};
use crate::kernels::{
    self, ColumnRange, ConvolutionBuffers, ConvolutionShape, GroupNormBuffers, GroupNormShape, Mamba2Buffers,
    Mamba2Shape, Mamba2Step, Mamba2StepBuffers, MambaBuffers, MambaShape, MatvecOutput, NormShape, StateRange,
};
use crate::plan::{BranchInput, LastProduct, LinearProduct, PlanBuilder};
use crate::weights::{Uploads, WgpuLinear, WgpuNorm, concat};
use crate::{Bind, Dispatch, GridExtent, WgpuDevice, WgpuError};

/// Mamba (Mamba-1, or `PLaMo` 2's variant with heads) with its weights.
#[derive(Debug)]
pub(crate) struct WgpuMamba {
    /// Its sizes.
    spec: MambaSpec,
    /// The projections to `x` and to the gate `z`, one below the other, `[2 * width, n_embd]`.
    input: WgpuLinear,
    /// Taps of the convolution, F32 `[n_tap, width]`, the oldest token's first.
    taps: Buffer,
    /// Bias of the convolution, `[width]`.
    conv_bias: Option<Buffer>,
    /// The projection to the low-rank step size, `[dt_rank, width]`.
    select_dt: WgpuLinear,
    /// The projection to `B` and `C`, one below the other, `[2 * d_state, width]`.
    select_bc: WgpuLinear,
    /// Norms of the low-rank step size, `B` and `C`.
    norms: Option<SelectionNorms>,
    /// The expansion of the step size dt, `[n_dt, dt_rank]`, without its bias.
    dt: WgpuLinear,
    /// Bias of dt, `[n_dt]`.
    dt_bias: Buffer,
    /// The decay rate A, negative: `[d_state, width]`, or `[n_head]`.
    a: Buffer,
    /// The skip factor D, `[n_dt]`.
    d: Buffer,
    /// The output projection.
    out: WgpuLinear,
}

/// Norms of the inputs that each token selects its state update by.
#[derive(Debug)]
struct SelectionNorms {
    /// Norm of the low-rank step size, `[dt_rank]`.
    dt: WgpuNorm,
    /// Weights of the norms of `B`, then of `C`, `[2, d_state]`.
    bc: Buffer,
}

/// Mamba-2 with its weights.
#[derive(Debug)]
pub(crate) struct WgpuMamba2 {
    /// The projection to `z`, `x`, `B`, `C` and `dt`.
    input: WgpuLinear,
    /// What follows it.
    recurrence: Mamba2Recurrence,
}

/// Attention and Mamba-2 over the same input, with their weights.
#[derive(Debug)]
pub(crate) struct WgpuAttentionAndMamba2 {
    /// Attention. Its `qkv` also projects to Mamba-2's inputs, behind queries, keys and values.
    attention: WgpuAttention,
    /// Mamba-2 after its input projection.
    recurrence: Mamba2Recurrence,
}

/// Mamba-2 after its input projection.
#[derive(Debug)]
struct Mamba2Recurrence {
    /// Its sizes.
    spec: Mamba2Spec,
    /// Taps of the convolution, F32 `[n_tap, conv_width]`, the oldest token's first.
    taps: Buffer,
    /// Bias of the convolution, `[conv_width]`.
    conv_bias: Option<Buffer>,
    /// Bias of the step size dt, `[n_head]`.
    dt_bias: Buffer,
    /// The decay rate A of each head, `[n_head]`, negative.
    a: Buffer,
    /// The skip factor D of each head, `[n_head]`.
    d: Buffer,
    /// The norm of each group's results, `[n_group, width / n_group]`.
    norm: Option<WgpuNorm>,
    /// The output projection.
    out: WgpuLinear,
}

/// Most elements of a row of a Mamba state: the kernels hold a row in registers and workgroup memory.
const MAX_STATE: usize = 512;

/// Checks that kernels exist for Mamba; the error is the part without one.
pub(super) fn supports_mamba(spec: &MambaSpec) -> Result<(), &'static str> {
    let MambaSpec { width: _, d_state, dt_rank: _, n_tap, norms: _, decay } = *spec;
    match decay {
        MambaDecay::Channels | MambaDecay::Heads(_) => supports_sizes(n_tap, d_state),
    }
}

/// Checks that kernels exist for Mamba-2; the error is the part without one.
pub(super) fn supports_mamba2(spec: &Mamba2Spec) -> Result<(), &'static str> {
    let Mamba2Spec { n_head: _, head_dim: _, d_state, n_group: _, n_tap, conv_bias: _, norm: _ } = *spec;
    supports_sizes(n_tap, d_state)
}

/// Checks the taps of the convolution and the elements of the state for each channel.
fn supports_sizes(n_tap: usize, d_state: usize) -> Result<(), &'static str> {
    if n_tap > ConvolutionShape::MAX_WIDTH {
        return Err("convolutions of Mamba with more taps than the kernels support");
    }
    if d_state > MAX_STATE { Err("states of Mamba with more elements than the kernels support") } else { Ok(()) }
}

/// Widens the scratch buffers for Mamba.
pub(super) fn widen_for_mamba(widths: &mut ActivationWidths, spec: &MambaSpec) {
    widen(&mut widths.projected, 2 * spec.width);
    widen(&mut widths.mixer_out, spec.width);
    let mamba = &mut widths.mamba;
    widen(&mut mamba.conv, spec.width);
    widen(&mut mamba.low, spec.dt_rank);
    widen(&mut mamba.dt, spec.n_dt());
    widen(&mut mamba.bc, 2 * spec.d_state);
}

/// Widens the scratch buffers for Mamba-2.
pub(super) fn widen_for_mamba2(widths: &mut ActivationWidths, spec: &Mamba2Spec) {
    widen(&mut widths.projected, spec.input_width());
    widen(&mut widths.mixer_out, spec.width());
    widen_for_recurrence(widths, spec);
}

/// Widens the scratch buffers for attention and Mamba-2. `pages`: where keys and values are stored.
pub(super) fn widen_for_both(widths: &mut ActivationWidths, w: &AttentionAndMamba2Weights, pages: LayerPages) {
    let (attention, spec) = (AttentionKernels::new(&w.attention, pages), &w.mamba2.spec);
    attention.widen(widths);
    widen(&mut widths.projected, attention.qkv_len() + spec.input_width());
    widen(&mut widths.mamba.parallel_out, spec.width());
    widen_for_recurrence(widths, spec);
}

/// Widens the scratch buffers for Mamba-2 after its input projection.
fn widen_for_recurrence(widths: &mut ActivationWidths, spec: &Mamba2Spec) {
    widen(&mut widths.mamba.conv, spec.conv_width());
    widen(&mut widths.mamba.y, spec.width() * usize::from(spec.norm.is_some()));
    widen(&mut widths.tickets, spec.n_group);
}

impl WgpuMamba {
    /// Uploads the weights.
    pub(super) fn new(gpu: &WgpuDevice, w: &MambaWeights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        let spec = &w.spec;
        let MambaSpec { width, d_state, dt_rank, n_tap: _, norms, decay } = *spec;
        let out = concat(gpu, "Mamba's output matrix", &[&w.out], uploads)?;
        let at = spec.selection();
        let input: Vec<_> = match decay {
            MambaDecay::Channels => std::iter::once(0..2 * width).collect(),
            MambaDecay::Heads(n_head) => {
                let n = width / n_head;
                let of = |first: usize| (0..n_head).map(move |h| (2 * h + first) * n..(2 * h + first + 1) * n);
                of(1).chain(of(0)).collect()
            }
        };
        let mut rows = |what: &str, linear: &Linear, parts: &[std::ops::Range<usize>]| {
            let parts: Vec<_> = parts.iter().map(|part| linear.weight.rows(part.clone())).collect();
            let weight = uploads.concat(gpu, what, &parts.iter().collect::<Vec<_>>())?;
            Ok::<_, WgpuError>(WgpuLinear { weight, bias: None })
        };
        let norms = match (norms, &w.norms) {
            (Some(norms), Some([dt, b, c])) => Some(SelectionNorms {
                dt: rms_norm(gpu, dt_rank, norms.eps, dt)?,
                bc: gpu.upload("a norm", &[&**b, c].concat())?,
            }),
            (None, _) | (_, None) => None,
        };
        Ok(Self {
            spec: *spec,
            input: rows("Mamba's input matrix", &w.input, &input)?,
            taps: gpu.upload("the taps of a convolution", &w.taps)?,
            conv_bias: optional(gpu, w.conv_bias.as_ref())?,
            select_dt: rows("what gives Mamba's dt", &w.select, std::slice::from_ref(&(at.dt..at.dt + dt_rank)))?,
            // The file may have B, C and dt in any order; the kernel reads B, then C.
            select_bc: rows("what gives Mamba's B and C", &w.select, &[at.b..at.b + d_state, at.c..at.c + d_state])?,
            norms,
            dt: rows("what expands Mamba's dt", &w.dt, std::slice::from_ref(&(0..spec.n_dt())))?,
            dt_bias: gpu.upload("a bias", w.dt.bias.as_ref().expect("a bias that files must have"))?,
            a: gpu.upload("decays", &w.a)?,
            d: gpu.upload("factors of inputs", &w.d)?,
            out,
        })
    }
}

impl WgpuMamba2 {
    /// Uploads the weights.
    pub(super) fn new(gpu: &WgpuDevice, w: &Mamba2Weights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        let input = concat(gpu, "Mamba's input matrix", &[&w.input], uploads)?;
        Ok(Self { input, recurrence: Mamba2Recurrence::new(gpu, w, uploads)? })
    }
}

impl WgpuAttentionAndMamba2 {
    /// Uploads the weights. `pages`: where keys and values are stored.
    pub(super) fn new(
        gpu: &WgpuDevice,
        w: &AttentionAndMamba2Weights,
        pages: LayerPages,
        uploads: &mut Uploads,
    ) -> Result<Self, WgpuError> {
        let attention = WgpuAttention::new(gpu, &w.attention, Some(&w.mamba2.input), pages, uploads)?;
        Ok(Self { attention, recurrence: Mamba2Recurrence::new(gpu, &w.mamba2, uploads)? })
    }
}

impl Mamba2Recurrence {
    /// Uploads the weights, except the input projection.
    fn new(gpu: &WgpuDevice, w: &Mamba2Weights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        let spec = w.spec;
        let norm = match (spec.norm, &w.norm) {
            (Some(eps), Some(weight)) => Some(rms_norm(gpu, spec.width() / spec.n_group, eps, weight)?),
            (None, _) | (_, None) => None,
        };
        Ok(Self {
            spec,
            taps: gpu.upload("the taps of a convolution", &w.taps)?,
            conv_bias: optional(gpu, w.conv_bias.as_ref())?,
            dt_bias: gpu.upload("a bias", &w.dt_bias)?,
            a: gpu.upload("decays", &w.a)?,
            d: gpu.upload("factors of inputs", &w.d)?,
            norm,
            out: concat(gpu, "Mamba's output matrix", &[&w.out], uploads)?,
        })
    }
}

/// Uploads an RMSNorm over rows of `n` elements. `weight`: of one row or, with several groups, of each.
fn rms_norm(gpu: &WgpuDevice, n: usize, eps: f32, weight: &[f32]) -> Result<WgpuNorm, WgpuError> {
    Ok(WgpuNorm { kind: NormKind::Rms, eps, n, weights: gpu.upload("a norm", weight)?, has_bias: false })
}

/// Uploads a bias if there is one.
fn optional(gpu: &WgpuDevice, bias: Option<&Vec<f32>>) -> Result<Option<Buffer>, WgpuError> {
    bias.map(|bias| gpu.upload("a bias", bias)).transpose()
}

/// A buffer as a kernel's optional binding.
fn bound(buffer: Option<&Buffer>) -> Option<&dyn Bind> {
    buffer.map(|buffer| buffer as &dyn Bind)
}

impl<'a> PlanBuilder<'a> {
    /// Appends Mamba-2 of layer `i`, up to the input of its output projection.
    pub(crate) fn mamba2(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        w: &'a WgpuMamba2,
        input: BranchInput<'a>,
    ) -> Result<LastProduct<'a>, WgpuError> {
        let (scratch, recurrence) = (self.scratch, &w.recurrence);
        self.multiply_branch_input(dispatches, input, &w.input, MatvecOutput::Store, &scratch.projected)?;
        let inputs = ColumnRange::whole(recurrence.spec.input_width());
        self.mamba2_recurrence(dispatches, i, recurrence, inputs, &scratch.mixer_out)
    }

    /// Appends attention and Mamba-2 of layer `i`, each up to the input of its output projection. They share the input
    /// product: in each row of `projected`, the inputs of Mamba-2 follow those of attention. The two access different
    /// columns, so that their order does not matter.
    pub(crate) fn attention_and_mamba2(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        w: &'a WgpuAttentionAndMamba2,
        input: BranchInput<'a>,
    ) -> Result<[LastProduct<'a>; 2], WgpuError> {
        let WgpuAttentionAndMamba2 { attention, recurrence } = w;
        let scratch = self.scratch;
        self.multiply_branch_input(dispatches, input, &attention.qkv, MatvecOutput::Store, &scratch.projected)?;
        let first = attention.kernels.qkv_len();
        let inputs = ColumnRange { stride: first + recurrence.spec.input_width(), first };
        let mamba2 = self.mamba2_recurrence(dispatches, i, recurrence, inputs, &scratch.mamba.parallel_out)?;
        Ok([self.attend(dispatches, i, attention)?, mamba2])
    }

    /// Appends Mamba-2 of layer `i` after its input projection. Reads `inputs`, the part of the rows of `projected` that
    /// holds `[z, x, B, C, dt]`; writes its result to `out` (`mamba.y` before a norm). Decode steps run one kernel where it
    /// fits the GPU; other batches a convolution to `mamba.conv` and a scan.
    fn mamba2_recurrence(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        w: &'a Mamba2Recurrence,
        inputs: ColumnRange,
        out: &'a Buffer,
    ) -> Result<LastProduct<'a>, WgpuError> {
        let spec = &w.spec;
        let Mamba2Spec { n_head, head_dim, d_state, n_group, n_tap, conv_bias: _, norm: _ } = *spec;
        let (gpu, scratch, m, width, channels) =
            (self.gpu, self.scratch, &self.scratch.mamba, spec.width(), spec.conv_width());
        let part = |at: usize| ColumnRange { first: inputs.first + at, ..inputs };
        let result = ColumnRange::whole(width);
        let last_inputs = self.states_at(i, 0);
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
            None => Ok(LastProduct::new(&w.out, out)),
            // The output product of one token computes the norm of a whole row in its prologue.
            Some(norm) if n_group == 1 && self.kind == BatchKind::One => {
                Ok(LastProduct { out: &w.out, input: y, norm: Some(norm) })
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
                Ok(LastProduct::new(&w.out, out))
            }
        }
    }

    /// Appends Mamba of layer `i`. Projects `input` to `projected` (x and gate z), convolves x to `mamba.conv`,
    /// computes dt, B and C of each token, and scans; the result is in `mixer_out`.
    pub(crate) fn mamba(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        w: &'a WgpuMamba,
        input: BranchInput<'a>,
    ) -> Result<LastProduct<'a>, WgpuError> {
        let MambaSpec { width, d_state, dt_rank: _, n_tap, norms: _, decay } = w.spec;
        let (gpu, scratch, m) = (self.gpu, self.scratch, &self.scratch.mamba);
        self.multiply_branch_input(dispatches, input, &w.input, MatvecOutput::Store, &scratch.projected)?;
        let (x, gate) = (ColumnRange { stride: 2 * width, first: 0 }, ColumnRange { stride: 2 * width, first: width });
        let last_inputs = self.states_at(i, 0);
        let (row, bias) = (ColumnRange::whole(width), w.conv_bias.is_some());
        let convolution =
            ConvolutionShape { channels: width, width: n_tap, bias, silu: true, x, out: row, states: last_inputs };
        dispatches.push(self.convolution(i, &convolution, &w.taps, w.conv_bias.as_ref())?);

        let bc = self.select(dispatches, w)?;
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
        Ok(LastProduct::new(&w.out, &scratch.mixer_out))
    }

    /// Appends the selection: what each token derives its state update from. Reads `mamba.conv`; writes `mamba.low` and
    /// the step size `mamba.dt`, without its bias, and `mamba.bc`. Returns the buffer that holds B and C.
    fn select(&self, dispatches: &mut Vec<Dispatch>, w: &WgpuMamba) -> Result<&'a Buffer, WgpuError> {
        let (m, d_state) = (&self.scratch.mamba, w.spec.d_state);
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
