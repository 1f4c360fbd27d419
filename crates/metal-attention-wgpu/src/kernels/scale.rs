//! Scaling and soft caps of rows.

use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// The sizes of [`scale`], and what it computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScaleShape {
    /// Elements of a row.
    pub n: usize,
    /// The factor.
    pub scale: f32,
    /// The bound of `cap * tanh(x / cap)`, if there is one.
    pub soft_cap: Option<f32>,
    /// Whether there is a row for each output token instead of each token.
    pub outputs_only: bool,
}

/// `x = cap * tanh(scale * x / cap)`, or `x *= scale`, in place. `x` is `[n_tokens or n_outputs, n]`.
pub fn scale(gpu: &WgpuDevice, shape: ScaleShape, x: &wgpu::Buffer) -> Result<Dispatch, WgpuError> {
    let bytes = 4 * shape.n as u64;
    let (rows, range) = if shape.outputs_only {
        (GridExtent::Outputs(1), AccessRange::Outputs(bytes))
    } else {
        (GridExtent::Tokens(1), AccessRange::Tokens(bytes))
    };
    Dispatch::new(
        gpu,
        &key(shape),
        &[(x, range)],
        [GridExtent::Fixed(shape.n.div_ceil(256) as u32), rows, GridExtent::Fixed(1)],
    )
}

fn key(shape: ScaleShape) -> PipelineKey {
    let cap = ("cap", shape.soft_cap.is_some().into());
    let soft_cap = ("soft_cap", shape.soft_cap.unwrap_or(0.0).into());
    PipelineKey::new("scale", [("n", shape.n.into()), ("scale", shape.scale.into()), cap, soft_cap])
}

/// The scalar twin for one element.
pub fn scale_twin(shape: ScaleShape, x: f32) -> f32 {
    let x = f64::from(x) * f64::from(shape.scale);
    shape.soft_cap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh()) as f32
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![key(ScaleShape { n: 49_152, scale: 1.0, soft_cap: Some(30.0), outputs_only: true })]
}
