//! Sums of rows: gathered rows, means, and convolutions of each column by itself.

use super::elementwise::{all, element_grid, n_elements};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Which rows of `x` a row of `y` is the sum of.
#[derive(Debug, Clone, Copy)]
pub enum SummedRows<'a> {
    /// Those with the next `n` of these indices; an index that `x` has no row for counts as zeros.
    Listed {
        /// The indices, U32, `n` for each row of `y`.
        rows: &'a dyn Bind,
        /// Indices of each row of `y`.
        n: usize,
        /// Factors, `[n, width]`: each row is multiplied by its row of them, element by element.
        weights: Option<&'a dyn Bind>,
    },
    /// The next `n` rows; `y` is their mean.
    Mean {
        /// Rows of a mean.
        n: usize,
    },
}

/// `y[r] = ` the sum of the rows of `x` that `rows` states. `x` and `y` are rows of `width` elements; there are as many rows of
/// `y` as `y` is long.
pub fn row_sums(
    gpu: &WgpuDevice,
    rows: SummedRows<'_>,
    width: usize,
    x: &dyn Bind,
    y: &dyn Bind,
) -> Result<Dispatch, WgpuError> {
    let mut buffers = vec![all(x), all(y)];
    let (n, listed, weighted) = match rows {
        SummedRows::Listed { rows, n, weights } => {
            buffers.push((rows, AccessRange::floats(n_elements(y).div_ceil(width.max(1)) * n)));
            buffers.extend(weights.map(|weights| (weights, AccessRange::floats(n * width))));
            (n, true, weights.is_some())
        }
        SummedRows::Mean { n } => (n, false, false),
    };
    Dispatch::new(gpu, &key(width, n, listed, weighted), &buffers, element_grid(n_elements(y)))
}

fn key(width: usize, n: usize, listed: bool, weighted: bool) -> PipelineKey {
    let constants = [
        ("width", width.into()),
        ("n", n.into()),
        ("listed", listed.into()),
        ("weighted", weighted.into()),
        ("mean", (!listed).into()),
    ];
    PipelineKey::new("row_sums", constants).named(match (listed, weighted) {
        (true, true) => "row_sums_weighted",
        (true, false) => "row_sums_gathered",
        (false, _) => "row_sums_mean",
    })
}

/// The scalar twin: the rows of `y`, for `rows` in lists of `n` and factors `weights`, `[n, width]`.
pub fn row_sums_twin(x: &[f32], width: usize, rows: &[u32], n: usize, weights: &[f32]) -> Vec<f32> {
    let at = |row: u32, i: usize| x.chunks_exact(width).nth(row as usize).map_or(0.0, |row| f64::from(row[i]));
    let sum = |rows: &[u32], i: usize| -> f32 {
        let terms = rows.iter().enumerate().map(|(j, &row)| at(row, i) * f64::from(weights[j * width + i]));
        terms.sum::<f64>() as f32
    };
    rows.chunks_exact(n).flat_map(|rows| (0..width).map(|i| sum(rows, i)).collect::<Vec<_>>()).collect()
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![key(576, 1, true, false), key(576, 9, true, true), key(576, 4, false, false)]
}
