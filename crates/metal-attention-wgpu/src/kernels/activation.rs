//! Activations of a feed-forward: any function, with or without a gate.

use metal_attention_model::Activation;

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

const THREADS: usize = 256;

/// The factor of the activated gate, and the layout of `x`.
#[derive(Debug, Clone, Copy)]
pub enum Gating<'a> {
    /// By nothing: `x` is `[n_tokens, n]`.
    None,
    /// By up, interleaved with the gate: `x` is `[n_tokens, 2 n]`, gate `i` at `2 i` and up `i` at `2 i + 1`.
    Pairs,
    /// By elements `at..at + n` of the rows of another buffer, `[n_tokens, stride]`; `x` is `[n_tokens, n]`.
    Rows {
        /// The other buffer.
        up: &'a wgpu::Buffer,
        /// Elements of its rows.
        stride: usize,
        /// The first element used.
        at: usize,
    },
}

/// `y[t][i] = activation(gate[t][i]) * up[t][i]`. `x` has the layout that `gating` states; `y` is `[n_tokens, n]`.
pub fn activation(
    gpu: &WgpuDevice,
    activation: Activation,
    n: usize,
    gating: Gating<'_>,
    x: &wgpu::Buffer,
    y: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    let bytes = 4 * n as u64;
    let width = if matches!(gating, Gating::Pairs) { 2 * bytes } else { bytes };
    let mut buffers: Vec<(&dyn Bind, AccessRange)> =
        vec![(x, AccessRange::Tokens(width)), (y, AccessRange::Tokens(bytes))];
    if let Gating::Rows { up, stride, .. } = gating {
        buffers.push((up, AccessRange::Tokens(4 * stride as u64)));
    }
    let columns = match activation {
        Activation::SparseGelu { .. } => 1,
        Activation::Silu
        | Activation::Gelu
        | Activation::ReluSquared
        | Activation::ClampedSwiglu { .. }
        | Activation::ClampedSilu { .. } => n.div_ceil(THREADS),
    };
    let grid = [GridExtent::Fixed(columns as u32), GridExtent::Tokens(1), GridExtent::Fixed(1)];
    Dispatch::new(gpu, &key(activation, n, gating), &buffers, grid)
}

fn key(activation: Activation, n: usize, gating: Gating<'_>) -> PipelineKey {
    let (kind, parameter) = match activation {
        Activation::Silu => ("silu", 0.0),
        Activation::Gelu => ("gelu", 0.0),
        Activation::ReluSquared => ("relu_squared", 0.0),
        Activation::ClampedSwiglu { limit } => ("clamped_swiglu", limit),
        Activation::ClampedSilu { limit } => ("clamped_silu", limit),
        Activation::SparseGelu { n_std } => ("sparse_gelu", n_std),
    };
    let (gating, up_stride, up_at) = match gating {
        Gating::None => ("none", 0, 0),
        Gating::Pairs => ("pairs", 0, 0),
        Gating::Rows { up: _, stride, at } => ("rows", stride, at),
    };
    PipelineKey::new(
        "activation",
        [
            ("n", n.into()),
            ("kind", kind.into()),
            ("parameter", parameter.into()),
            ("gating", gating.into()),
            ("up_stride", up_stride.into()),
            ("up_at", up_at.into()),
            ("threads", THREADS.into()),
        ],
    )
}

/// The scalar twin: one row of the gate and, if there is one, of up.
pub fn activation_twin(activation: Activation, gate: &[f32], up: Option<&[f32]>) -> Vec<f32> {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let gelu = |x: f64| {
        let z = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
        x / 2.0 * (1.0 + z.tanh())
    };
    let n = gate.len() as f64;
    let mean = gate.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let squares = gate.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>();
    let deviation = (squares / (n - 1.0).max(1.0)).sqrt();
    let activated = |(i, &g): (usize, &f32)| {
        let g = f64::from(g);
        let up = up.map(|up| f64::from(up[i]));
        let (activated, up) = match activation {
            Activation::Silu => (g * sigmoid(g), up),
            Activation::Gelu => (gelu(g), up),
            Activation::ReluSquared => (g.max(0.0).powi(2), up),
            Activation::ClampedSwiglu { limit } => {
                let limit = f64::from(limit);
                (g.min(limit) * sigmoid(1.702 * g.min(limit)), up.map(|up| 1.0 + up.clamp(-limit, limit)))
            }
            Activation::ClampedSilu { limit } => {
                let limit = f64::from(limit);
                ((g * sigmoid(g)).min(limit), up.map(|up| up.clamp(-limit, limit)))
            }
            Activation::SparseGelu { n_std } => (gelu((g - mean - f64::from(n_std) * deviation).max(0.0)), up),
        };
        (activated * up.unwrap_or(1.0)) as f32
    };
    gate.iter().enumerate().map(activated).collect()
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![key(Activation::Gelu, 1536, Gating::Pairs)]
}
