//! Weights of Mamba and Mamba-2 in the GPU's memory, and what lies between their kernels.

use metal_attention_model::{Linear, Mamba2Spec, Mamba2Weights, MambaDecay, MambaSpec, MambaWeights, NormKind};
use wgpu::Buffer;

use crate::weights::{Uploads, WgpuLinear, WgpuNorm};
use crate::{WgpuDevice, WgpuError};

/// Weights of Mamba-2, but for the matrix of its inputs.
#[derive(Debug)]
pub(super) struct WgpuMamba2 {
    /// F32 `[n_tap, conv_width]`, the oldest token's first.
    pub(super) taps: Buffer,
    /// `[conv_width]`
    pub(super) conv_bias: Option<Buffer>,
    /// `[n_head]`
    pub(super) dt_bias: Buffer,
    /// `[n_head]`, negative.
    pub(super) a: Buffer,
    /// `[n_head]`
    pub(super) d: Buffer,
    /// Of each group, `[n_group, width / n_group]`.
    pub(super) norm: Option<WgpuNorm>,
    pub(super) out: WgpuLinear,
}

impl WgpuMamba2 {
    /// `out`: the output matrix, uploaded.
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

/// Weights of Mamba.
#[derive(Debug)]
pub(super) struct WgpuMamba {
    /// `x` and `z` one below the other, those of heads too, `[2 * width, n_embd]`.
    pub(super) input: WgpuLinear,
    /// F32 `[n_tap, width]`, the oldest token's first.
    pub(super) taps: Buffer,
    /// `[width]`
    pub(super) conv_bias: Option<Buffer>,
    /// What gives `dt` before it is expanded, `[dt_rank, width]`.
    pub(super) select_dt: WgpuLinear,
    /// What gives `B` and `C`, `[2 * d_state, width]`.
    pub(super) select_bc: WgpuLinear,
    pub(super) norms: Option<WgpuMambaNorms>,
    /// Without its bias, `[n_dt, dt_rank]`.
    pub(super) dt: WgpuLinear,
    /// `[n_dt]`
    pub(super) dt_bias: Buffer,
    /// Negative: `[d_state, width]`, or `[n_head]`.
    pub(super) a: Buffer,
    /// `[n_dt]`
    pub(super) d: Buffer,
    pub(super) out: WgpuLinear,
}

/// Norms of what tokens choose by.
#[derive(Debug)]
pub(super) struct WgpuMambaNorms {
    pub(super) dt: WgpuNorm,
    /// Factors of `B`, then of `C`, `[2, d_state]`.
    pub(super) bc: Buffer,
}

impl WgpuMamba {
    /// `out`: the output matrix, uploaded.
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
            // One behind the other in every order.
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

/// Elements a token of what lies between the kernels, 0 of those that a model does without: the widest of its layers.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct MambaWidths {
    /// What comes of the convolution.
    conv: usize,
    /// Results before their norm.
    y: usize,
    /// Results beside those of attention.
    beside: usize,
    /// `dt` before it is expanded, and after.
    low: usize,
    dt: usize,
    /// `B` and `C`.
    bc: usize,
}

impl MambaWidths {
    pub(super) fn widen_for(&mut self, of: &MambaSpec) {
        self.conv = self.conv.max(of.width);
        self.low = self.low.max(of.dt_rank);
        self.dt = self.dt.max(of.n_dt());
        self.bc = self.bc.max(2 * of.d_state);
    }

    /// For Mamba-2, perhaps beside attention.
    pub(super) fn widen_for_heads(&mut self, of: &Mamba2Spec, beside: bool) {
        self.conv = self.conv.max(of.conv_width());
        self.y = self.y.max(of.width() * usize::from(of.norm.is_some()));
        self.beside = self.beside.max(of.width() * usize::from(beside));
    }

    /// Elements of all buffers with a row for each token.
    pub(super) fn rows(&self) -> [usize; 7] {
        let Self { conv, y, beside, low, dt, bc } = *self;
        [conv, y, beside, low, dt, bc, bc]
    }

    /// Those that matrices multiply.
    pub(super) fn inputs(&self) -> [usize; 4] {
        [self.conv, self.y, self.beside, self.low]
    }
}

/// What lies between the kernels, of up to so many tokens.
#[derive(Debug)]
pub(super) struct MambaScratch {
    /// What comes of the convolution, `[n_tokens, width]`, or Mamba-2's `[n_tokens, conv_width]`.
    pub(super) conv: Buffer,
    /// Results before their norm, `[n_tokens, width]`.
    pub(super) y: Buffer,
    /// Results beside those of attention, `[n_tokens, width]`.
    pub(super) beside: Buffer,
    /// `dt` before it is expanded, `[n_tokens, dt_rank]`,
    pub(super) low: Buffer,
    /// and after, `[n_tokens, n_dt]`.
    pub(super) dt: Buffer,
    /// `B` and `C`, `[n_tokens, 2 * d_state]`, and what their norms make of them.
    pub(super) bc: Buffer,
    pub(super) bc_normed: Buffer,
}

impl MambaScratch {
    pub(super) fn new(gpu: &WgpuDevice, widths: &MambaWidths, n_tokens: usize) -> Result<Self, WgpuError> {
        let rows = |width: usize| gpu.buffer("activations of Mamba", 4 * n_tokens as u64 * width as u64);
        Ok(Self {
            conv: rows(widths.conv)?,
            y: rows(widths.y)?,
            beside: rows(widths.beside)?,
            low: rows(widths.low)?,
            dt: rows(widths.dt)?,
            bc: rows(widths.bc)?,
            bc_normed: rows(widths.bc)?,
        })
    }
}
