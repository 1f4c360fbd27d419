//! The gate of attention's result, where a matrix of its own produces it.

use metal_attention_model::{GateActivation, GateWidth};

use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

const THREADS: usize = 256;

/// Sizes of a gate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionGateShape {
    /// Query heads.
    pub n_head: usize,
    /// Elements of a head's result.
    pub head_dim: usize,
    /// What one gate multiplies.
    pub width: GateWidth,
    /// From a gate's product to its factor.
    pub activation: GateActivation,
    /// Elements from one token's row of products to the next one's.
    pub stride: usize,
    /// The first gate in such a row.
    pub first: usize,
}

impl AttentionGateShape {
    /// Gates of a token.
    fn n_gates(&self) -> usize {
        self.n_head * self.head_dim / self.elements_per_gate()
    }

    /// Elements of the result that one gate multiplies.
    fn elements_per_gate(&self) -> usize {
        match self.width {
            GateWidth::Element => 1,
            GateWidth::Head => self.head_dim,
        }
    }
}

/// `y[t][i] *= factor(gate[t][i])`, for `y` of `[n_tokens, n_head * head_dim]` and gates within rows of `projected`,
/// `[n_tokens, stride]`.
pub fn attention_gate(
    gpu: &WgpuDevice,
    shape: &AttentionGateShape,
    projected: &wgpu::Buffer,
    y: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    if shape.first + shape.n_gates() > shape.stride {
        let why = format!("{} gates from {} on in rows of {}", shape.n_gates(), shape.first, shape.stride);
        return Err(WgpuError::Mismatch { what: "a gate of attention's result".into(), why });
    }
    let n = shape.n_head * shape.head_dim;
    let rows = |n: usize| AccessRange::Tokens(4 * n as u64);
    let grid = [GridExtent::Fixed(n.div_ceil(THREADS) as u32), GridExtent::Tokens(1), GridExtent::Fixed(1)];
    Dispatch::new(gpu, &key(shape), &[(projected, rows(shape.stride)), (y, rows(n))], grid)
}

fn key(shape: &AttentionGateShape) -> PipelineKey {
    let softplus = match shape.activation {
        GateActivation::Sigmoid => false,
        GateActivation::Softplus => true,
    };
    PipelineKey::new(
        "attention_gate",
        [
            ("n", (shape.n_head * shape.head_dim).into()),
            ("stride", shape.stride.into()),
            ("first", shape.first.into()),
            ("elements_per_gate", shape.elements_per_gate().into()),
            ("softplus", softplus.into()),
            ("threads", THREADS.into()),
        ],
    )
}

/// The scalar twin: a token's result, `[n_head * head_dim]`, times the factors of its gates, from its row of products.
pub fn attention_gate_twin(shape: &AttentionGateShape, projected: &[f32], y: &[f32]) -> Vec<f32> {
    let factor = |g: f64| match shape.activation {
        GateActivation::Sigmoid => 1.0 / (1.0 + (-g).exp()),
        GateActivation::Softplus => g.max(0.0) + (-g.abs()).exp().ln_1p(),
    };
    let gate = |i: usize| f64::from(projected[shape.first + i / shape.elements_per_gate()]);
    y.iter().enumerate().map(|(i, y)| (f64::from(*y) * factor(gate(i))) as f32).collect()
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let (width, activation) = (GateWidth::Head, GateActivation::Softplus);
    vec![key(&AttentionGateShape { n_head: 6, head_dim: 64, width, activation, stride: 1024, first: 640 })]
}
