//! [`KeptRows`]: rows that depend on the sizes of pictures alone. To compute them takes longer than some blocks on a GPU, and pictures
//! often have the sizes of those before.

use std::sync::Arc;

use super::geometry::Layout;
use super::ops::EncoderOps;
use super::positions::{Angles, PositionTable};

/// Most elements of all kept rows, unless those of one key have more: 128 MiB. A photograph of 16,000 patches has 17 million.
const MOST_ELEMENTS: usize = 1 << 25;

/// What rows were computed from, beside layouts.
#[derive(Debug, Clone)]
pub(super) enum KeptOf {
    /// Learned positions.
    Positions(Arc<PositionTable>),
    /// The angles of a rotation.
    Angles(Angles),
    /// Sines and cosines of the positions of patches ([`sinusoids`](super::positions::sinusoids)), rows of that width.
    Sinusoids(usize),
}

impl PartialEq for KeptOf {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Positions(table), Self::Positions(other)) => Arc::ptr_eq(table, other),
            (Self::Angles(angles), Self::Angles(other)) => angles == other,
            (Self::Sinusoids(width), Self::Sinusoids(other)) => width == other,
            (Self::Positions(_) | Self::Angles(_) | Self::Sinusoids(_), _) => false,
        }
    }
}

/// The rows of the sizes that pictures had last.
#[derive(Debug)]
pub struct KeptRows<R> {
    /// The last used one is the last.
    entries: Vec<Entry<R>>,
}

#[derive(Debug)]
struct Entry<R> {
    of: KeptOf,
    layouts: Vec<Layout>,
    n_elements: usize,
    rows: R,
}

impl<R> Default for KeptRows<R> {
    fn default() -> Self {
        Self { entries: Vec::new() }
    }
}

impl<R> KeptRows<R> {
    /// Rows of `width` elements, one for each place of all layouts. `values` computes those of a layout where they are not kept.
    pub(super) fn rows<O: EncoderOps<Rows = R>>(
        &mut self,
        ops: &mut O,
        of: KeptOf,
        layouts: &[Layout],
        width: usize,
        values: impl Fn(&Layout) -> Vec<f32>,
    ) -> Result<&R, O::Error> {
        let known = self.entries.iter().position(|entry| entry.of == of && entry.layouts == layouts);
        let entry = if let Some(i) = known {
            self.entries.remove(i)
        } else {
            let n_rows: usize = layouts.iter().map(|layout| layout.places.len()).sum();
            let all = || match layouts {
                [layout] => values(layout),
                layouts => layouts.iter().map(&values).collect::<Vec<_>>().concat(),
            };
            let rows = ops.upload([n_rows, width], all)?;
            let n_elements = n_rows * width;
            let mut kept: usize = n_elements + self.entries.iter().map(|entry| entry.n_elements).sum::<usize>();
            while kept > MOST_ELEMENTS && !self.entries.is_empty() {
                kept -= self.entries.remove(0).n_elements;
            }
            Entry { of, layouts: layouts.to_vec(), n_elements, rows }
        };
        let last = self.entries.len();
        self.entries.push(entry);
        Ok(&self.entries[last].rows)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::vision::work::ShapeOps;

    #[test]
    fn rows_are_kept_by_layouts_and_old_ones_are_given_up() {
        let mut kept = KeptRows::default();
        let mut ops =
            ShapeOps::new(|_, _: &crate::vision::EncoderLinear<crate::vision::FileWeights>| Ok::<_, Infallible>(()));
        let mut rows = |side: usize, width: usize| {
            let layouts = [Layout::grid(side, side), Layout::grid(2, 3)];
            let of = KeptOf::Sinusoids(width);
            let Ok(rows) = kept.rows(&mut ops, of, &layouts, width, |layout| vec![0.0; layout.places.len() * width]);
            (rows.n_rows(), kept.entries.len())
        };
        assert_eq!(rows(4, 8), (22, 1));
        assert_eq!(rows(5, 8), (31, 2), "another size");
        assert_eq!(rows(4, 16), (22, 3), "another width");
        assert_eq!(rows(4, 8), (22, 3), "kept");
        // With more elements than all kept rows may have.
        assert_eq!(rows(2048, 8), (2048 * 2048 + 6, 1));
        assert_eq!(rows(4, 8), (22, 1));
    }
}
