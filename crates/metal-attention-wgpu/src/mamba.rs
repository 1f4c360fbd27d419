//! Weights of Mamba and Mamba-2 on the GPU, and the scratch buffers between their kernels.

use metal_attention_model::{Linear, Mamba2Spec, Mamba2Weights, MambaDecay, MambaSpec, MambaWeights, NormKind};
use wgpu::Buffer;

use crate::weights::{Uploads, WgpuLinear, WgpuNorm};
use crate::{WgpuDevice, WgpuError};

/// Weights of Mamba-2, except the input projection.
#[derive(Debug)]
pub(super) struct WgpuMamba2 {
    /// Taps of the convolution, F32 `[n_tap, conv_width]`, the oldest token's first.
    pub(super) taps: Buffer,
    /// Bias of the convolution, `[conv_width]`.
    pub(super) conv_bias: Option<Buffer>,
    /// Bias of the step size dt, `[n_head]`.
    pub(super) dt_bias: Buffer,
    /// The decay rate A of each head, `[n_head]`, negative.
    pub(super) a: Buffer,
    /// The skip factor D of each head, `[n_head]`.
    pub(super) d: Buffer,
    /// The norm of each group's results, `[n_group, width / n_group]`.
    pub(super) norm: Option<WgpuNorm>,
    /// The output projection.
    pub(super) out: WgpuLinear,
}

impl WgpuMamba2 {
    /// Uploads the weights. `out`: the output projection, uploaded already.
    pub(super) fn new(
        gpu: &WgpuDevice,
        spec: &Mamba2Spec,
        w: &Mamba2Weights,
        out: WgpuLinear,
    ) -> Result<Self, WgpuError> {
        let norm = match (spec.norm, &w.norm) {
            (Some(eps), Some(weight)) => Some(rms_norm(gpu, spec.width() / spec.n_group, eps, weight)?),
            (None, _) | (_, None) => None,
        };
        Ok(Self {
            taps: gpu.upload("the taps of a convolution", &w.taps)?,
            conv_bias: optional(gpu, w.conv_bias.as_ref())?,
            dt_bias: gpu.upload("a bias", &w.dt_bias)?,
            a: gpu.upload("decays", &w.a)?,
            d: gpu.upload("factors of inputs", &w.d)?,
            norm,
            out,
        })
    }
}

/// Weights of Mamba (Mamba-1, or `PLaMo` 2's variant with heads).
#[derive(Debug)]
pub(super) struct WgpuMamba {
    /// The projections to `x` and to the gate `z`, one below the other, `[2 * width, n_embd]`.
    pub(super) input: WgpuLinear,
    /// Taps of the convolution, F32 `[n_tap, width]`, the oldest token's first.
    pub(super) taps: Buffer,
    /// Bias of the convolution, `[width]`.
    pub(super) conv_bias: Option<Buffer>,
    /// The projection to the low-rank step size, `[dt_rank, width]`.
    pub(super) select_dt: WgpuLinear,
    /// The projection to `B` and `C`, one below the other, `[2 * d_state, width]`.
    pub(super) select_bc: WgpuLinear,
    /// Norms of the low-rank step size, `B` and `C`.
    pub(super) norms: Option<WgpuMambaNorms>,
    /// The expansion of the step size dt, `[n_dt, dt_rank]`, without its bias.
    pub(super) dt: WgpuLinear,
    /// Bias of dt, `[n_dt]`.
    pub(super) dt_bias: Buffer,
    /// The decay rate A, negative: `[d_state, width]`, or `[n_head]`.
    pub(super) a: Buffer,
    /// The skip factor D, `[n_dt]`.
    pub(super) d: Buffer,
    /// The output projection.
    pub(super) out: WgpuLinear,
}

/// Norms of the inputs that each token selects its state update by.
#[derive(Debug)]
pub(super) struct WgpuMambaNorms {
    /// Norm of the low-rank step size, `[dt_rank]`.
    pub(super) dt: WgpuNorm,
    /// Weights of the norms of `B`, then of `C`, `[2, d_state]`.
    pub(super) bc: Buffer,
}

impl WgpuMamba {
    /// Uploads the weights. `out`: the output projection, uploaded already.
    pub(super) fn new(
        gpu: &WgpuDevice,
        spec: &MambaSpec,
        w: &MambaWeights,
        out: WgpuLinear,
        uploads: &mut Uploads,
    ) -> Result<Self, WgpuError> {
        let MambaSpec { width, d_state, dt_rank, n_tap: _, norms, decay } = *spec;
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
            (Some(norms), Some([dt, b, c])) => Some(WgpuMambaNorms {
                dt: rms_norm(gpu, dt_rank, norms.eps, dt)?,
                bc: gpu.upload("a norm", &[&**b, c].concat())?,
            }),
            (None, _) | (_, None) => None,
        };
        Ok(Self {
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

fn rms_norm(gpu: &WgpuDevice, n: usize, eps: f32, weight: &[f32]) -> Result<WgpuNorm, WgpuError> {
    Ok(WgpuNorm { kind: NormKind::Rms, eps, n, weights: gpu.upload("a norm", weight)?, has_bias: false })
}

fn optional(gpu: &WgpuDevice, bias: Option<&Vec<f32>>) -> Result<Option<Buffer>, WgpuError> {
    bias.map(|bias| gpu.upload("a bias", bias)).transpose()
}

/// The width of each buffer of [`MambaScratch`]: elements for each token, those of the widest layer; 0 where none uses
/// it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct MambaWidths {
    /// Results of the convolution.
    conv: usize,
    /// Results before their norm.
    y: usize,
    /// Results of Mamba-2 in parallel with attention.
    parallel_out: usize,
    /// The low-rank step size.
    low: usize,
    /// The step size dt.
    dt: usize,
    /// `B` and `C`.
    bc: usize,
}

impl MambaWidths {
    /// Widens the buffers for Mamba.
    pub(super) fn widen_for(&mut self, of: &MambaSpec) {
        self.conv = self.conv.max(of.width);
        self.low = self.low.max(of.dt_rank);
        self.dt = self.dt.max(of.n_dt());
        self.bc = self.bc.max(2 * of.d_state);
    }

    /// Widens the buffers for Mamba-2. `parallel`: it runs in parallel with attention.
    pub(super) fn widen_for_heads(&mut self, of: &Mamba2Spec, parallel: bool) {
        self.conv = self.conv.max(of.conv_width());
        self.y = self.y.max(of.width() * usize::from(of.norm.is_some()));
        self.parallel_out = self.parallel_out.max(of.width() * usize::from(parallel));
    }

    /// The widths of all buffers.
    pub(super) fn rows(&self) -> [usize; 7] {
        let Self { conv, y, parallel_out, low, dt, bc } = *self;
        [conv, y, parallel_out, low, dt, bc, bc]
    }

    /// The widths of those buffers that matrices multiply.
    pub(super) fn inputs(&self) -> [usize; 4] {
        [self.conv, self.y, self.parallel_out, self.low]
    }
}

/// The scratch buffers.
#[derive(Debug)]
pub(super) struct MambaScratch {
    /// Results of the convolution, `[n_tokens, width]`, or Mamba-2's `[n_tokens, conv_width]`.
    pub(super) conv: Buffer,
    /// Results before their norm, `[n_tokens, width]`.
    pub(super) y: Buffer,
    /// Results of Mamba-2 in parallel with attention, whose own are in `mixer_out`, `[n_tokens, width]`.
    pub(super) parallel_out: Buffer,
    /// The low-rank step size, `[n_tokens, dt_rank]`.
    pub(super) low: Buffer,
    /// The step size dt, `[n_tokens, n_dt]`.
    pub(super) dt: Buffer,
    /// `B` and `C`, `[n_tokens, 2 * d_state]`.
    pub(super) bc: Buffer,
    /// `B` and `C` after their norms, of the same shape.
    pub(super) bc_normed: Buffer,
}

impl MambaScratch {
    pub(super) fn new(gpu: &WgpuDevice, widths: &MambaWidths, n_tokens: usize) -> Result<Self, WgpuError> {
        let rows = |width: usize| gpu.buffer("activations of Mamba", 4 * n_tokens as u64 * width as u64);
        Ok(Self {
            conv: rows(widths.conv)?,
            y: rows(widths.y)?,
            parallel_out: rows(widths.parallel_out)?,
            low: rows(widths.low)?,
            dt: rows(widths.dt)?,
            bc: rows(widths.bc)?,
            bc_normed: rows(widths.bc)?,
        })
    }
}
