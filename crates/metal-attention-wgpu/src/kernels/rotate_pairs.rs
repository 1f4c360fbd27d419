//! The rotation of pairs by a table of angles, one row of it for each row.

use super::elementwise::{all, element_grid, n_elements};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// The rows of [`rotate_pairs`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RotateShape {
    /// Elements of a row: of whole heads.
    pub width: usize,
    /// Elements of a head: whole blocks.
    pub head_dim: usize,
    /// In each so many elements of a head element `i` and element `i + block / 2` are a pair. Even.
    pub block: usize,
}

/// Rotates the pairs of the rows of `x`, `[n_rows, width]`, in place. `angles`: `[n_rows, head_dim / 2, 2]`, cosine and sine.
pub fn rotate_pairs(
    gpu: &WgpuDevice,
    shape: RotateShape,
    x: &dyn Bind,
    angles: &dyn Bind,
) -> Result<Dispatch, WgpuError> {
    let RotateShape { width, head_dim, block } = shape;
    let whole = |n: usize, of: usize| of > 0 && n > 0 && n.is_multiple_of(of);
    if !(whole(width, head_dim) && whole(head_dim, block) && whole(block, 2)) {
        let why = format!("rows of {width} elements, heads of {head_dim} and blocks of {block}");
        return Err(WgpuError::Mismatch { what: "the rotation of pairs".into(), why });
    }
    let n_rows = n_elements(x).div_ceil(width);
    let buffers = [all(x), (angles, AccessRange::floats(n_rows * head_dim))];
    Dispatch::new(gpu, &key(shape), &buffers, element_grid(n_elements(x) / 2))
}

fn key(RotateShape { width, head_dim, block }: RotateShape) -> PipelineKey {
    let constants = [("width", width.into()), ("head_dim", head_dim.into()), ("block", block.into())];
    PipelineKey::new("rotate_pairs", constants)
}

/// The scalar twin for one row, with its row of angles.
pub fn rotate_pairs_twin(shape: RotateShape, x: &[f32], angles: &[f32]) -> Vec<f32> {
    let half = shape.block / 2;
    let mut y = x.to_vec();
    for (i, y) in y.iter_mut().enumerate() {
        let (head, place) = (i / shape.head_dim * shape.head_dim, i % shape.head_dim);
        let (block, element) = (place / shape.block * shape.block, place % shape.block);
        let pair = element % half;
        let [cos, sin] = [0, 1].map(|part| f64::from(angles[block + 2 * pair + part]));
        let [a, b] = [pair, pair + half].map(|e| f64::from(x[head + block + e]));
        *y = if element < half { a * cos - b * sin } else { a * sin + b * cos } as f32;
    }
    y
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![key(RotateShape { width: 576, head_dim: 64, block: 32 })]
}
