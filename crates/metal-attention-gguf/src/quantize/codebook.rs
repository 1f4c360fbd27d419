//! The search for the nearest point of a codebook, for the quantisers of the `IQ1`, `IQ2` and `IQ3` types.
//!
//! Each element is first rounded by itself to the nearest of the values that it can have. The combination of these values is a
//! *cell*. Where a point of the codebook has these values, no other point is nearer, whatever the weights. Otherwise the points
//! that are close to the cell are compared. They are determined when the cell occurs for the first time.

use std::array::from_fn;
use std::sync::OnceLock;

use crate::blocks::CodebookGrid;

/// The number of points that are compared.
const AROUND: usize = 16;

/// A codebook of points of `W` elements with `B + 1` possible values, and the cells that have occurred.
pub(crate) struct CodebookSearch<const W: usize, const B: usize> {
    /// The points, by code.
    points: Vec<[f32; W]>,
    /// The values of an element in ascending order.
    values: Vec<f32>,
    /// The midpoints between neighbouring values.
    borders: [f32; B],
    /// The codes near each cell, `[(B + 1)^W]`.
    cells: Vec<OnceLock<NearestCodes>>,
}

/// The codes near a cell.
enum NearestCodes {
    /// The code of the point with the cell's values.
    At(u16),
    /// The codes of the points closest to the cell, where no point has its values.
    Around([u16; AROUND]),
}

impl<const W: usize, const B: usize> CodebookSearch<W, B> {
    /// The codebook of `grid`. Panics where `W` or `B` does not match.
    pub(crate) fn new(grid: CodebookGrid) -> Self {
        assert!(grid.width() == W && grid.values.len() == B + 1, "a codebook of other points");
        let values: Vec<f32> = grid.values.iter().map(|&v| v.into()).collect();
        let point = |code| from_fn(|k| grid.value(code, k).into());
        Self {
            points: (0..grid.entries.len()).map(point).collect(),
            borders: from_fn(|i| f32::midpoint(values[i], values[i + 1])),
            cells: (0..values.len().pow(W as u32)).map(|_| OnceLock::new()).collect(),
            values,
        }
    }

    /// The point of `code`.
    pub(crate) fn point(&self, code: u16) -> &[f32; W] {
        &self.points[usize::from(code)]
    }

    /// The largest value of an element.
    pub(crate) fn largest(&self) -> f32 {
        self.values[self.values.len() - 1]
    }

    /// The code of the point nearest to `x`, with the weights `w` of the squared distances. Rarely another point is slightly
    /// nearer.
    pub(crate) fn nearest(&self, x: &[f32; W], w: &[f32; W]) -> u16 {
        let mut cell = 0;
        for &x in x.iter().rev() {
            let rounded = self.borders.iter().map(|&border| usize::from(x > border)).sum::<usize>();
            cell = cell * (B + 1) + rounded;
        }
        let codes = match self.cells[cell].get_or_init(|| self.near(cell)) {
            NearestCodes::At(code) => return *code,
            NearestCodes::Around(codes) => codes,
        };
        let distance = |code: u16| -> f32 {
            let point = self.point(code);
            (0..W).map(|k| w[k] * (x[k] - point[k]) * (x[k] - point[k])).sum()
        };
        let mut best = (f32::INFINITY, codes[0]);
        for &code in codes {
            let distance = distance(code);
            if distance < best.0 {
                best = (distance, code);
            }
        }
        best.1
    }

    /// Determines the codes near a cell.
    fn near(&self, cell: usize) -> NearestCodes {
        let n = B + 1;
        let center: [f32; W] = from_fn(|k| self.values[cell / n.pow(k as u32) % n]);
        let distance = |point: &[f32; W]| -> f32 { (0..W).map(|k| (point[k] - center[k]).powi(2)).sum() };
        let mut codes: Vec<(f32, u16)> = self.points.iter().zip(0..).map(|(p, code)| (distance(p), code)).collect();
        codes.select_nth_unstable_by(AROUND - 1, |a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
        match codes[..AROUND].iter().find(|(distance, _)| *distance == 0.0) {
            Some(&(_, code)) => NearestCodes::At(code),
            None => NearestCodes::Around(from_fn(|i| codes[i].1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The smallest weighted squared distance from `x` to any point.
    fn exhaustive<const W: usize, const B: usize>(book: &CodebookSearch<W, B>, x: &[f32; W], w: &[f32; W]) -> f32 {
        let distance = |p: &[f32; W]| (0..W).map(|k| w[k] * (x[k] - p[k]).powi(2)).sum::<f32>();
        book.points.iter().map(distance).fold(f32::INFINITY, f32::min)
    }

    /// The mean squared distance of the points that [`CodebookSearch::nearest`] finds, relative to that of the nearest points.
    fn compare<const W: usize, const B: usize>(grid: CodebookGrid, low: f32, high: f32) -> f64 {
        let book = CodebookSearch::<W, B>::new(grid);
        let mut state = 7u64;
        let mut uniform = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 24) as f32
        };
        let (mut found, mut best) = (0.0, 0.0);
        for _ in 0..2000 {
            let x = from_fn(|_| low + (high - low) * uniform());
            let w = from_fn(|_| 0.5 + uniform());
            let point = book.point(book.nearest(&x, &w));
            found += f64::from((0..W).map(|k| w[k] * (x[k] - point[k]).powi(2)).sum::<f32>());
            best += f64::from(exhaustive(&book, &x, &w));
        }
        found / best
    }

    #[test]
    fn points_found_are_hardly_farther_than_the_nearest() {
        let ratios = [
            compare::<8, 2>(CodebookGrid::IQ2_XXS, -4.0, 45.0),
            compare::<8, 2>(CodebookGrid::IQ2_XS, -4.0, 45.0),
            compare::<8, 2>(CodebookGrid::IQ2_S, -4.0, 45.0),
            compare::<8, 2>(CodebookGrid::IQ1, -1.2, 1.2),
            compare::<4, 7>(CodebookGrid::IQ3_XXS, -4.0, 64.0),
            compare::<4, 7>(CodebookGrid::IQ3_S, -1.0, 16.0),
        ];
        assert!(ratios.iter().all(|r| (0.9999..1.02).contains(r)), "{ratios:?}");
    }
}
