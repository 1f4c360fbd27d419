//! Factors on rows, and soft caps.

use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, Extent, Reach};
use crate::error::WgpuError;
use crate::pso::PsoKey;

/// What [`scale`] computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScaleShape {
    /// Elements of a row.
    pub n: usize,
    /// Factor on each.
    pub scale: f32,
    /// What the results stay below: `cap * tanh(x / cap)`.
    pub soft_cap: Option<f32>,
    /// Rows are those of wanted tokens, not of all.
    pub wanted: bool,
}

/// `x = cap * tanh(scale * x / cap)`, in place, or `x *= scale`: `x` `[n_tokens or n_wanted, n]`.
pub fn scale(gpu: &WgpuDevice, of: ScaleShape, x: &wgpu::Buffer) -> Result<Dispatch, WgpuError> {
    let bytes = 4 * of.n as u64;
    let (rows, reach) =
        if of.wanted { (Extent::Wanted(1), Reach::Wanted(bytes)) } else { (Extent::Tokens(1), Reach::Tokens(bytes)) };
    Dispatch::new(gpu, &key(of), &[(x, reach)], [Extent::Fixed(of.n.div_ceil(256) as u32), rows, Extent::Fixed(1)])
}

fn key(of: ScaleShape) -> PsoKey {
    let cap = ("cap", of.soft_cap.is_some().into());
    let soft_cap = ("soft_cap", of.soft_cap.unwrap_or(0.0).into());
    PsoKey::new("scale", [("n", of.n.into()), ("scale", of.scale.into()), cap, soft_cap])
}

/// The scalar twin of one element.
pub fn scale_twin(of: ScaleShape, x: f32) -> f32 {
    let x = f64::from(x) * f64::from(of.scale);
    of.soft_cap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh()) as f32
}

pub(crate) fn catalogue() -> Vec<PsoKey> {
    vec![key(ScaleShape { n: 49_152, scale: 1.0, soft_cap: Some(30.0), wanted: true })]
}
