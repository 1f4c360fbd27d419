//! The second matrices of low-rank products: from the results of the first ones to full width.

use super::bindings::ColumnRange;
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Channels of a workgroup.
const CHANNELS: usize = 32;
/// Invocations that share a channel.
const SPLITS: usize = 8;
/// Tokens of a workgroup in batches of several.
const TOKENS: usize = 8;
/// Elements of a row in workgroup memory at a time.
const BLOCK: usize = 64;
/// Most parts of one [`low_rank`].
pub const MAX_LOW_RANK_PARTS: usize = 8;

/// The activation between the two matrices of a low-rank product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LowRankActivation {
    /// None.
    AsItIs,
    /// The hyperbolic tangent.
    Tanh,
    /// The sigmoid, `1 / (1 + e^-x)`.
    Sigmoid,
}

/// The sizes of [`low_rank`]: several low-rank products (parts) of one width.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LowRankShape {
    /// Elements of each part's result.
    pub width: usize,
    /// The rank of each part, and its activation.
    pub parts: Vec<(usize, LowRankActivation)>,
}

impl LowRankShape {
    /// Elements of a token's input: the ranks of all parts, one after the other.
    pub fn n_in(&self) -> usize {
        self.parts.iter().map(|(rank, _)| rank).sum()
    }

    /// Elements of a token's result.
    pub fn n_out(&self) -> usize {
        self.parts.len() * self.width
    }

    /// The columns of part `i` in the result.
    pub fn result(&self, i: usize) -> ColumnRange {
        ColumnRange { stride: self.n_out(), first: i * self.width }
    }

    fn key(&self, tokens: usize) -> PipelineKey {
        let list = |value: &dyn Fn(&(usize, LowRankActivation)) -> usize| {
            self.parts.iter().map(|part| format!("{}u", value(part))).collect::<Vec<_>>().join(", ")
        };
        let squash = |part: &(usize, LowRankActivation)| match part.1 {
            LowRankActivation::AsItIs => 0,
            LowRankActivation::Tanh => 1,
            LowRankActivation::Sigmoid => 2,
        };
        PipelineKey::new(
            "recurrent/low_rank",
            [
                ("width", self.width.into()),
                ("n_in", self.n_in().into()),
                ("n_parts", self.parts.len().into()),
                ("ranks", list(&|part| part.0).into()),
                ("squashes", list(&squash).into()),
                ("columns", CHANNELS.into()),
                ("splits", SPLITS.into()),
                ("tokens", tokens.into()),
                ("block", BLOCK.into()),
                ("threads", (CHANNELS * SPLITS).into()),
            ],
        )
        .named("low_rank")
    }
}

/// `y[t][p] = up_p activation_p(x[t][p])` for each token and part `p`. `x` is `[n_tokens, n_in]`, `y`
/// `[n_tokens, n_parts, width]`; `up` holds the transposed matrices of all parts, `[n_in, width]`. `one`: made for one
/// token.
pub fn low_rank(
    gpu: &WgpuDevice,
    shape: &LowRankShape,
    one: bool,
    x: &wgpu::Buffer,
    up: &dyn Bind,
    y: &wgpu::Buffer,
    batch: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    if !(1..=MAX_LOW_RANK_PARTS).contains(&shape.parts.len()) {
        return Err(WgpuError::Mismatch { what: "a low-rank product".into(), why: format!("{shape:?}") });
    }
    let tokens = if one { 1 } else { TOKENS };
    let (n_in, n_out) = (shape.n_in(), shape.n_out());
    let buffers: [(&dyn Bind, AccessRange); 4] = [
        (x, AccessRange::Tokens(4 * n_in as u64)),
        (up, AccessRange::floats(n_in * shape.width)),
        (y, AccessRange::Tokens(4 * n_out as u64)),
        (batch, AccessRange::Batch),
    ];
    let groups = shape.parts.len() * shape.width.div_ceil(CHANNELS);
    let grid = [GridExtent::Fixed(groups as u32), GridExtent::Tokens(tokens as u32), GridExtent::Fixed(1)];
    Dispatch::new(gpu, &shape.key(tokens), &buffers, grid)
}

/// The scalar twin for one token.
pub fn low_rank_twin(shape: &LowRankShape, x: &[f32], up: &[f32]) -> Vec<f64> {
    let mut y = Vec::new();
    let mut at = 0;
    for &(rank, squash) in &shape.parts {
        for c in 0..shape.width {
            let of_element = |i: usize| {
                let x = f64::from(x[i]);
                let x = match squash {
                    LowRankActivation::AsItIs => x,
                    LowRankActivation::Tanh => x.tanh(),
                    LowRankActivation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
                };
                x * f64::from(up[i * shape.width + c])
            };
            y.push((at..at + rank).map(of_element).sum());
        }
        at += rank;
    }
    y
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let parts = vec![
        (64, LowRankActivation::Tanh),
        (64, LowRankActivation::AsItIs),
        (32, LowRankActivation::AsItIs),
        (128, LowRankActivation::Sigmoid),
    ];
    vec![LowRankShape { width: 2048, parts }.key(1)]
}
