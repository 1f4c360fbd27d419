//! Columns of rows: those of several rows beside each other, or those of several vectors by turns.

use super::elementwise::{all, element_grid, n_elements};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Where [`place_columns`] puts the rows of `x`, of `n` vectors of `width` elements each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColumnPlace {
    /// Elements of a vector.
    pub width: usize,
    /// Vectors of a row.
    pub n: usize,
    /// The first column of `y`.
    pub at: usize,
    /// Elements of a row of `y`.
    pub y_width: usize,
}

/// `y[r][at + c n + i] = x[r][i][c]`, with `x` as `[n_rows, n, width]` and `y` as `[n_rows, y_width]`. The other columns of `y`
/// stay as they are.
pub fn place_columns(gpu: &WgpuDevice, place: ColumnPlace, x: &dyn Bind, y: &dyn Bind) -> Result<Dispatch, WgpuError> {
    let x_width = place.width * place.n;
    if x_width == 0 || place.at + x_width > place.y_width {
        let why = format!("{place:?} lies outside the rows");
        return Err(WgpuError::Mismatch { what: "columns of rows".into(), why });
    }
    let n_rows = n_elements(x).div_ceil(x_width);
    let buffers = [all(x), (y, AccessRange::floats(n_rows * place.y_width))];
    Dispatch::new(gpu, &key(place), &buffers, element_grid(n_elements(x)))
}

fn key(place: ColumnPlace) -> PipelineKey {
    let constants = [
        ("width", place.width.into()),
        ("n", place.n.into()),
        ("at", place.at.into()),
        ("y_width", place.y_width.into()),
    ];
    PipelineKey::new("place_columns", constants)
}

/// The scalar twin for one row, with `y` before the call.
pub fn place_columns_twin(place: ColumnPlace, x: &[f32], y: &[f32]) -> Vec<f32> {
    let mut y = y.to_vec();
    for (i, vector) in x.chunks_exact(place.width).enumerate() {
        for (c, v) in vector.iter().enumerate() {
            y[place.at + c * place.n + i] = *v;
        }
    }
    y
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![key(ColumnPlace { width: 576, n: 4, at: 0, y_width: 2304 })]
}
