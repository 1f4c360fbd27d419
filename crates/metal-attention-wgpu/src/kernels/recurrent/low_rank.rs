//! What small matrices have given, through the second matrices of low-rank products.

use super::bindings::RowsAt;
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, Extent, Reach};
use crate::error::WgpuError;
use crate::pso::PsoKey;

/// Channels of a workgroup, and invocations that share each.
const CHANNELS: usize = 32;
const SPLITS: usize = 8;
/// Tokens of a workgroup where there are many, and elements of their rows in workgroup memory.
const TOKENS: usize = 8;
const BLOCK: usize = 64;
/// Most parts of [`low_rank`].
pub const MAX_LOW_RANK_PARTS: usize = 8;

/// A function of each element between the two matrices of a low-rank product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Squash {
    /// None.
    AsItIs,
    /// The hyperbolic tangent.
    Tanh,
    /// `1 / (1 + e^-x)`
    Sigmoid,
}

/// What [`low_rank`] computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LowRankShape {
    /// Elements of each part's result.
    pub width: usize,
    /// Rank of each part, and what is done to the elements before.
    pub parts: Vec<(usize, Squash)>,
}

impl LowRankShape {
    /// Elements of a token before: those of all parts, one after the other.
    pub fn n_in(&self) -> usize {
        self.parts.iter().map(|(rank, _)| rank).sum()
    }

    /// Elements of a token after.
    pub fn n_out(&self) -> usize {
        self.parts.len() * self.width
    }

    /// Where part `i` lies in what comes of it.
    pub fn result(&self, i: usize) -> RowsAt {
        RowsAt { stride: self.n_out(), at: i * self.width }
    }

    fn key(&self, tokens: usize) -> PsoKey {
        let list = |of: &dyn Fn(&(usize, Squash)) -> usize| {
            self.parts.iter().map(|part| format!("{}u", of(part))).collect::<Vec<_>>().join(", ")
        };
        let squash = |part: &(usize, Squash)| match part.1 {
            Squash::AsItIs => 0,
            Squash::Tanh => 1,
            Squash::Sigmoid => 2,
        };
        PsoKey::new(
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

/// `y[t][p] = up_p squash_p(x[t][p])` for each part `p`: `x` `[n_tokens, n_in]`, `y` `[n_tokens, n_parts, width]`, `up` the
/// matrices of all parts with a row for each element of `x`, F32 `[n_in, width]`. `one`: made for a token by itself.
pub fn low_rank(
    gpu: &WgpuDevice,
    of: &LowRankShape,
    one: bool,
    x: &wgpu::Buffer,
    up: &dyn Bind,
    y: &wgpu::Buffer,
    batch: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    if !(1..=MAX_LOW_RANK_PARTS).contains(&of.parts.len()) {
        return Err(WgpuError::Mismatch { what: "a low-rank product".into(), why: format!("{of:?}") });
    }
    let tokens = if one { 1 } else { TOKENS };
    let (n_in, n_out) = (of.n_in(), of.n_out());
    let buffers: [(&dyn Bind, Reach); 4] = [
        (x, Reach::Tokens(4 * n_in as u64)),
        (up, Reach::floats(n_in * of.width)),
        (y, Reach::Tokens(4 * n_out as u64)),
        (batch, Reach::Batch),
    ];
    let groups = of.parts.len() * of.width.div_ceil(CHANNELS);
    let grid = [Extent::Fixed(groups as u32), Extent::Tokens(tokens as u32), Extent::Fixed(1)];
    Dispatch::new(gpu, &of.key(tokens), &buffers, grid)
}

/// The scalar twin of one token.
pub fn low_rank_twin(of: &LowRankShape, x: &[f32], up: &[f32]) -> Vec<f64> {
    let mut y = Vec::new();
    let mut at = 0;
    for &(rank, squash) in &of.parts {
        for c in 0..of.width {
            let of_element = |i: usize| {
                let x = f64::from(x[i]);
                let x = match squash {
                    Squash::AsItIs => x,
                    Squash::Tanh => x.tanh(),
                    Squash::Sigmoid => 1.0 / (1.0 + (-x).exp()),
                };
                x * f64::from(up[i * of.width + c])
            };
            y.push((at..at + rank).map(of_element).sum());
        }
        at += rank;
    }
    y
}

pub(crate) fn catalogue() -> Vec<PsoKey> {
    let parts = vec![(64, Squash::Tanh), (64, Squash::AsItIs), (32, Squash::AsItIs), (128, Squash::Sigmoid)];
    vec![LowRankShape { width: 2048, parts }.key(1)]
}
