//! Learned positions of patches, and the angles of their rotation.

use super::geometry::{Layout, Place};

/// Learned positions: a row for each patch, interpolated from a table for a grid of another size.
#[derive(Debug, Clone, PartialEq)]
pub struct PositionTable {
    /// The table, `[ny, nx, width]`; of [`Interpolation::Axes`] `[2, n, width]`, a table for columns and one for rows.
    pub rows: Vec<f32>,
    /// Elements of a row.
    pub width: usize,
    /// Rows and columns of the table.
    pub size: [usize; 2],
    /// How a row is computed.
    pub interpolation: Interpolation,
}

/// How the position of a patch is computed from the rows of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interpolation {
    /// The table's row of the same index: pictures have the table's number of patches.
    None,
    /// The sum of a row for the column and a row for the row, each from a table of its own.
    Axes,
    /// Linear in both directions, so that the corners of both grids are the same.
    Corners,
    /// Linear in both directions between centres; with a wider window where the grid is smaller than the table (antialiasing).
    Antialiased,
    /// Cubic in both directions between centres, with `a = -0.75`; indices are clamped at the borders.
    Cubic,
    /// Cubic in both directions between centres, with `a = -0.5`; with a wider window where the grid is smaller than the table.
    AntialiasedCubic,
    /// Row `floor(n * i / grid)` and the column likewise.
    Buckets,
    /// Linear in both directions between centres; indices are clamped at the borders.
    Linear,
    /// Linear in both directions between centres, as if the grid were a tenth of a patch longer (Hunyuan-VL); indices are clamped at
    /// the borders.
    Lengthened,
}

/// Some rows along one axis of a table with their weights: those that a patch reads.
type Taps = Vec<(usize, f32)>;

impl PositionTable {
    /// The positions of the rows of a picture, `[n_rows, width]`; zeros for rows that are not those of patches.
    pub fn of(&self, layout: &Layout) -> Vec<f32> {
        let mut out = vec![0.0; layout.places.len() * self.width];
        let [ny, nx] = self.size;
        let (rows, columns) = match self.interpolation {
            Interpolation::None | Interpolation::Axes => (Vec::new(), Vec::new()),
            Interpolation::Corners
            | Interpolation::Antialiased
            | Interpolation::Cubic
            | Interpolation::AntialiasedCubic
            | Interpolation::Buckets
            | Interpolation::Linear
            | Interpolation::Lengthened => (self.taps(ny, layout.ny), self.taps(nx, layout.nx)),
        };
        for (out, place) in out.chunks_exact_mut(self.width).zip(&layout.places) {
            let Place::Patch { y, x } = *place else { continue };
            let (y, x) = (y as usize, x as usize);
            match self.interpolation {
                Interpolation::None => self.add(out, y * layout.nx + x, 1.0),
                Interpolation::Axes => {
                    self.add(out, x.min(nx - 1), 1.0);
                    self.add(out, nx + y.min(nx - 1), 1.0);
                }
                Interpolation::Corners
                | Interpolation::Antialiased
                | Interpolation::Cubic
                | Interpolation::AntialiasedCubic
                | Interpolation::Buckets
                | Interpolation::Linear
                | Interpolation::Lengthened => {
                    for &(row, v) in &rows[y] {
                        for &(column, u) in &columns[x] {
                            self.add(out, row * nx + column, v * u);
                        }
                    }
                }
            }
        }
        out
    }

    /// `out += weight * row i`
    fn add(&self, out: &mut [f32], i: usize, weight: f32) {
        let row = &self.rows[i * self.width..][..self.width];
        out.iter_mut().zip(row).for_each(|(out, v)| *out += weight * v);
    }

    /// The taps of each of `n` patches along an axis of a table of `size`.
    fn taps(&self, size: usize, n: usize) -> Vec<Taps> {
        let last = size - 1;
        let ratio = size as f32 / n as f32;
        (0..n)
            .map(|i| match self.interpolation {
                Interpolation::None | Interpolation::Axes => Vec::new(),
                Interpolation::Linear | Interpolation::Lengthened => {
                    let longer = if self.interpolation == Interpolation::Lengthened { 0.1 } else { 0.0 };
                    let at = ((i as f32 + 0.5) * size as f32 / (n as f32 + longer) - 0.5).clamp(0.0, last as f32);
                    let first = at as usize;
                    vec![(first, 1.0 - (at - first as f32)), ((first + 1).min(last), at - first as f32)]
                }
                _ if size == n => vec![(i, 1.0)],
                Interpolation::Corners => {
                    let at = if n > 1 { i as f32 * last as f32 / (n - 1) as f32 } else { 0.0 };
                    let first = (at as usize).min(last);
                    let part = at - first as f32;
                    vec![(first, 1.0 - part), ((first + 1).min(last), part)]
                }
                Interpolation::Antialiased => antialiased(i, ratio, size, 1.0, |x| (1.0 - x.abs()).max(0.0)),
                Interpolation::AntialiasedCubic => antialiased(i, ratio, size, 2.0, |x| cubic(x, -0.5)),
                Interpolation::Cubic => {
                    let at = (i as f32 + 0.5) * ratio - 0.5;
                    let first = at.floor();
                    let clamped = |j: i32| (first as i64 + i64::from(j)).clamp(0, last as i64) as usize;
                    (-1..=2).map(|j| (clamped(j), cubic(at - first - j as f32, -0.75))).collect()
                }
                Interpolation::Buckets => vec![((i * size / n).min(last), 1.0)],
            })
            .collect()
    }
}

/// The taps of patch `i` with the filter `kernel`, which is zero from the distance `radius` on, over a table of `size` rows of which
/// `ratio` are a patch.
fn antialiased(i: usize, ratio: f32, size: usize, radius: f32, kernel: impl Fn(f32) -> f32) -> Taps {
    let (centre, scale) = ((i as f32 + 0.5) * ratio, ratio.max(1.0));
    let support = radius * scale;
    let first = (centre - support + 0.5).max(0.0) as usize;
    let end = ((centre + support + 0.5) as usize).min(size);
    let weight = |j: usize| kernel((j as f32 - centre + 0.5) / scale);
    let sum: f32 = (first..end).map(&weight).sum();
    (first..end).map(|j| (j, weight(j) / sum)).collect()
}

/// The kernel of cubic convolution (Keys 1981) at distance `x`.
fn cubic(x: f32, a: f32) -> f32 {
    let x = x.abs();
    if x <= 1.0 {
        ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a
    } else {
        0.0
    }
}

/// The angles by which the pairs of a head are rotated (2-D RoPE).
#[derive(Debug, Clone, PartialEq)]
pub struct Angles {
    /// For each pair of a head, in the order of their first elements: the axis whose position rotates it, and the angle of
    /// position 1.
    pub pairs: Vec<(Axis, f32)>,
    /// In each `block` elements of a head element `i` and element `i + block / 2` are a pair.
    pub block: usize,
    /// The position of the first row and column. Rows that are not those of patches are not rotated.
    pub first: f32,
}

/// An axis of a picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// The row of a patch.
    Y,
    /// The column of a patch.
    X,
    /// The number of rows of the picture before this one.
    Row,
}

impl Angles {
    /// (cos, sin) of each pair of each row, `[n_rows, pairs, 2]`.
    pub fn table(&self, layout: &Layout) -> Vec<f32> {
        let of = |(row, place): (usize, &Place), (axis, frequency): (Axis, f32)| {
            let position = match (*place, axis) {
                (Place::Patch { .. } | Place::Class | Place::Break, Axis::Row) => self.first + row as f32,
                (Place::Patch { y, .. }, Axis::Y) => self.first + y as f32,
                (Place::Patch { x, .. }, Axis::X) => self.first + x as f32,
                (Place::Class | Place::Break, Axis::X | Axis::Y) => 0.0,
            };
            let angle = position * frequency;
            [angle.cos(), angle.sin()]
        };
        layout
            .places
            .iter()
            .enumerate()
            .flat_map(|place| self.pairs.iter().flat_map(move |&pair| of(place, pair)))
            .collect()
    }

    /// Halves of a head rotate together, element `i` with `i + head_dim / 2`: the first half of the pairs by the row, the second by
    /// the column, both with frequencies `10000^(-2j / (head_dim / 2))` (Qwen2-VL, arXiv 2409.12191).
    pub fn of_halves(head_dim: usize) -> Self {
        let n = head_dim / 4;
        let of = |axis| (0..n).map(move |j| (axis, frequency(10_000.0, j as f64 / n as f64)));
        Self { pairs: of(Axis::Y).chain(of(Axis::X)).collect(), block: head_dim, first: 0.0 }
    }

    /// Halves of a head rotate together, element `i` with `i + head_dim / 2`, by the number of the row, with frequencies
    /// `base^(-2i / head_dim)`, as in text models.
    pub fn of_rows(head_dim: usize, base: f64) -> Self {
        let n = head_dim / 2;
        Self {
            pairs: (0..n).map(|i| (Axis::Row, frequency(base, i as f64 / n as f64))).collect(),
            block: head_dim,
            first: 0.0,
        }
    }

    /// Neighbouring elements are pairs: those of the first half of a head by `axes[0]`, those of the second by `axes[1]`, with
    /// frequencies `10000^(-(4j + shifts[i]) / head_dim)`.
    pub fn of_neighbours(head_dim: usize, axes: [Axis; 2], shifts: [f64; 2]) -> Self {
        let n = head_dim / 4;
        let of = |i: usize| {
            (0..n).map(move |j| (axes[i], frequency(10_000.0, (4.0 * j as f64 + shifts[i]) / head_dim as f64)))
        };
        Self { pairs: of(0).chain(of(1)).collect(), block: 2, first: 0.0 }
    }

    /// In each half of a head element `j` and element `j + head_dim / 4` are a pair: the first half by the column, the second by the
    /// row, with frequencies `base^(-j / (head_dim / 4))` (Gemma 4).
    pub fn within_halves(head_dim: usize, base: f64) -> Self {
        let n = head_dim / 4;
        let of = |axis| (0..n).map(move |j| (axis, frequency(base, j as f64 / n as f64)));
        Self { pairs: of(Axis::X).chain(of(Axis::Y)).collect(), block: head_dim / 2, first: 0.0 }
    }
}

/// `base^-exponent`
fn frequency(base: f64, exponent: f64) -> f32 {
    base.powf(-exponent) as f32
}

/// Positions of patches as sines and cosines, `[n_rows, width]`: sines and cosines of the column, then of the row, each `width / 4`
/// with frequencies `10000^(-j / (width / 4))` (MiniCPM-V's `get_2d_sincos_pos_embed`).
pub(super) fn sinusoids(layout: &Layout, width: usize) -> Vec<f32> {
    let n = width / 4;
    let frequencies: Vec<f32> = (0..n).map(|j| 10_000_f64.powf(-(j as f64) / n as f64) as f32).collect();
    let of = |place: &Place| {
        let (y, x) = match *place {
            Place::Patch { y, x } => (y as f32, x as f32),
            Place::Class | Place::Break => (0.0, 0.0),
        };
        let mut row = Vec::with_capacity(width);
        for position in [x, y] {
            row.extend(frequencies.iter().map(|f| (position * f).sin()));
            row.extend(frequencies.iter().map(|f| (position * f).cos()));
        }
        row.resize(width, 0.0);
        row
    };
    layout.places.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(interpolation: Interpolation, size: usize, n: usize) -> Vec<f32> {
        let rows = (0..size).map(|i| i as f32).collect();
        let table = PositionTable { rows, width: 1, size: [1, size], interpolation };
        table.of(&Layout::grid(n, 1))
    }

    #[test]
    fn tables_are_interpolated() {
        use Interpolation::{Antialiased, Buckets, Corners, Cubic};
        assert_eq!(of(Corners, 5, 3), [0.0, 2.0, 4.0]);
        assert_eq!(of(Corners, 3, 5), [0.0, 0.5, 1.0, 1.5, 2.0]);
        assert_eq!(of(Corners, 3, 1), [0.0]);
        assert_eq!(of(Antialiased, 2, 4), [0.0, 0.25, 0.75, 1.0]);
        // Windows of four elements around the centres at 1 and 3, cut at the borders.
        let halves = of(Antialiased, 4, 2);
        assert!((halves[0] - 5.0 / 7.0).abs() < 1e-6 && (halves[1] - 16.0 / 7.0).abs() < 1e-6, "{halves:?}");
        assert_eq!(of(Buckets, 70, 4), [0.0, 17.0, 35.0, 52.0]);
        assert_eq!(of(Interpolation::Linear, 6, 3), [0.5, 2.5, 4.5]);
        // 0.5 / 1.1 - 0.5 is before the first row; 1.5 / 1.1 - 0.5, 0.86; 2.5 * 2 / 2.1 - 0.5, behind the last.
        assert_eq!(of(Interpolation::Lengthened, 1, 1), [0.0]);
        let lengthened = of(Interpolation::Lengthened, 2, 2);
        assert!(lengthened[0] == 0.0 && (lengthened[1] - (3.0 / 2.1 - 0.5)).abs() < 1e-6, "{lengthened:?}");
        for interpolation in [
            Corners,
            Antialiased,
            Cubic,
            Interpolation::AntialiasedCubic,
            Buckets,
            Interpolation::Linear,
            Interpolation::None,
        ] {
            assert_eq!(of(interpolation, 4, 4), [0.0, 1.0, 2.0, 3.0], "{interpolation:?}");
        }
        // Symmetric weights around the centres at 1 and 3, of eight elements, cut at the borders; values of a line are kept in the middle.
        let halves = of(Interpolation::AntialiasedCubic, 16, 8);
        assert!((halves[4] - 8.5).abs() < 1e-5 && (halves[0] + halves[7] - 15.0).abs() < 1e-5, "{halves:?}");
        // A quarter of the way from 2 to 3: weights of -27/256, 225/256, 67/256 and -9/256.
        let cubic = of(Cubic, 8, 16);
        assert!((cubic[5] - (-27.0 + 2.0 * 225.0 + 3.0 * 67.0 - 4.0 * 9.0) / 256.0).abs() < 1e-6, "{cubic:?}");
        assert!((cubic[5] + cubic[10] - 7.0).abs() < 1e-6, "{cubic:?}");
    }

    #[test]
    fn the_sum_of_axes_is_a_row_of_each() {
        let rows = vec![1.0, 2.0, 3.0, 10.0, 20.0, 30.0];
        let table = PositionTable { rows, width: 1, size: [2, 3], interpolation: Interpolation::Axes };
        assert_eq!(table.of(&Layout::grid(3, 2)), [11.0, 12.0, 13.0, 21.0, 22.0, 23.0]);
    }

    #[test]
    fn angles_are_those_of_rows_and_columns() {
        let layout = Layout::grid(3, 2);
        let table = Angles::of_halves(8).table(&layout);
        assert_eq!(table.len(), 6 * 4 * 2);
        // Row 1, column 2: pairs 0 and 1 by the row, 2 and 3 by the column.
        let want = [1.0_f32, 0.01, 2.0, 0.02];
        for (pair, angle) in table[5 * 8..].chunks_exact(2).zip(want) {
            assert!((pair[0] - angle.cos()).abs() < 1e-6 && (pair[1] - angle.sin()).abs() < 1e-6);
        }
    }
}
