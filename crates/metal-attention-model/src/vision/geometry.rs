//! Where the rows of a picture stand: orders, merges and windows, as lists of row indices.

/// The index of a row of zeros.
pub const NO_ROW: u32 = u32::MAX;

/// What a row is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A patch, or what was made of several, in this row and column of the grid.
    Patch {
        /// Row.
        y: u32,
        /// Column.
        x: u32,
    },
    /// A class token, or another row before or behind the patches.
    Class,
    /// The row behind a row of patches.
    Break,
}

/// The rows of a picture: a grid of patches, in some order, with other rows among them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Patches of a row.
    pub nx: usize,
    /// Rows of patches.
    pub ny: usize,
    /// Each row's place, in the order of the rows.
    pub places: Vec<Place>,
}

/// An order of the patches of a picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// Row by row.
    RowMajor,
    /// In blocks of `side` x `side`: blocks row by row, in each the patches row by row.
    Blocks(u32),
    /// In windows of `window` x `window`, row by row; in each in blocks of `block` x `block`.
    Windows {
        /// Patches along the side of a window.
        window: u32,
        /// Patches along the side of a block.
        block: u32,
    },
}

/// The order of the values of merged patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergeOrder {
    /// `[side, side, width]`: patch by patch, row by row.
    PatchFirst,
    /// `[width, side, side]`: value by value, as a convolution reads them.
    ValueFirst,
    /// `[side, side, width]`: patch by patch, row by row; the merged rows follow each other column by column.
    Transposed,
}

impl Layout {
    /// The patches of a picture, row by row.
    pub fn grid(nx: usize, ny: usize) -> Self {
        let patch = |i: usize| Place::Patch { y: (i / nx) as u32, x: (i % nx) as u32 };
        Self { nx, ny, places: (0..nx * ny).map(patch).collect() }
    }

    /// Puts the patches in `order`; other rows go behind them. Returns for each row the index that it had.
    pub fn reorder(&mut self, order: RowOrder) -> Vec<u32> {
        let key = |place: &Place| match *place {
            Place::Patch { y, x } => match order {
                RowOrder::RowMajor => [0, y, x, 0, 0, 0, 0],
                RowOrder::Blocks(side) => [0, y / side, x / side, y % side, x % side, 0, 0],
                RowOrder::Windows { window, block } => {
                    let (v, u) = (y % window, x % window);
                    [0, y / window, x / window, v / block, u / block, v % block, u % block]
                }
            },
            Place::Class | Place::Break => [1, 0, 0, 0, 0, 0, 0],
        };
        let mut rows: Vec<u32> = (0..self.places.len() as u32).collect();
        rows.sort_by_key(|&row| key(&self.places[row as usize]));
        self.take(&rows);
        rows
    }

    /// Keeps the rows with these indices, in their order.
    fn take(&mut self, rows: &[u32]) {
        self.places = rows.iter().map(|&row| self.places[row as usize]).collect();
    }

    /// Takes all rows away that are not those of patches. Returns the indices of the others.
    pub fn drop_others(&mut self) -> Vec<u32> {
        let is_patch = |row: &u32| matches!(self.places[*row as usize], Place::Patch { .. });
        let rows: Vec<u32> = (0..self.places.len() as u32).filter(is_patch).collect();
        self.take(&rows);
        rows
    }

    /// The number of patches.
    pub fn n_patches(&self) -> usize {
        self.places.iter().filter(|place| matches!(place, Place::Patch { .. })).count()
    }

    /// Takes the patches away and gives their places to the other rows, of which there are as many. Returns the indices of those.
    pub fn keep_queries(&mut self) -> Vec<u32> {
        let is_other = |row: &u32| !matches!(self.places[*row as usize], Place::Patch { .. });
        let rows: Vec<u32> = (0..self.places.len() as u32).filter(is_other).collect();
        let (nx, ny) = if rows.len() == self.nx * self.ny { (self.nx, self.ny) } else { (rows.len(), 1) };
        *self = Self::grid(nx, ny);
        rows
    }

    /// Merges each `side` x `side` patches, row by row, and puts the results in row order (`transposed`: column by column).
    /// Returns the indices of the rows of each result, one after the other; patches beyond whole groups are left out.
    pub fn merge(&mut self, side: usize, transposed: bool) -> Vec<u32> {
        let (nx, ny) = (self.nx / side, self.ny / side);
        let mut at = vec![0; self.nx * self.ny];
        for (row, place) in self.places.iter().enumerate() {
            if let Place::Patch { y, x } = *place {
                at[y as usize * self.nx + x as usize] = row as u32;
            }
        }
        let mut rows = Vec::with_capacity(nx * ny * side * side);
        let place = |i: usize| if transposed { (i % ny, i / ny) } else { (i / nx, i % nx) };
        for (y, x) in (0..nx * ny).map(place) {
            rows.extend((0..side * side).map(|i| at[(side * y + i / side) * self.nx + side * x + i % side]));
        }
        *self = Self::grid(nx, ny);
        rows
    }

    /// The windows of a convolution of `side` x `side` patches, row by row, with a step of `stride` and zeros around the grid, of
    /// which there are as many before as behind it or one less (`SAME` padding), or, if `centred`, `side / 2` before it. Returns the
    /// indices of the rows of each result, one after the other.
    pub fn unfold(&mut self, side: usize, stride: usize, centred: bool) -> Vec<u32> {
        let (nx, ny) = (self.nx.div_ceil(stride), self.ny.div_ceil(stride));
        let before = |n: usize, results: usize| {
            if centred { side / 2 } else { (results.saturating_sub(1) * stride + side).saturating_sub(n) / 2 }
        };
        let (left, above) = (before(self.nx, nx), before(self.ny, ny));
        let mut rows = Vec::with_capacity(nx * ny * side * side);
        for (y, x) in (0..nx * ny).map(|i| (i / nx * stride, i % nx * stride)) {
            for (v, u) in (0..side * side).map(|i| (y + i / side, x + i % side)) {
                let inside = v >= above && v - above < self.ny && u >= left && u - left < self.nx;
                rows.push(if inside { ((v - above) * self.nx + u - left) as u32 } else { NO_ROW });
            }
        }
        *self = Self::grid(nx, ny);
        rows
    }

    /// Repeats each patch `factor` times in each direction. Returns the index of each result's row.
    pub fn enlarge(&mut self, factor: usize) -> Vec<u32> {
        let (nx, ny) = (self.nx * factor, self.ny * factor);
        let rows = (0..nx * ny).map(|i| (i / nx / factor * self.nx + i % nx / factor) as u32).collect();
        *self = Self::grid(nx, ny);
        rows
    }

    /// The windows of `side` x `side` patches, row by row, the last ones filled up with [`NO_ROW`]: the indices of the rows of each,
    /// one after the other, and for each row its index among those; [`NO_ROW`] for rows that are not those of patches.
    pub fn filled_windows(&self, side: usize) -> (Vec<u32>, Vec<u32>) {
        let (columns, rows) = (self.nx.div_ceil(side), self.ny.div_ceil(side));
        let mut windows = vec![NO_ROW; columns * rows * side * side];
        let mut back = vec![NO_ROW; self.places.len()];
        for (row, place) in self.places.iter().enumerate() {
            if let Place::Patch { y, x } = *place {
                let (y, x) = (y as usize, x as usize);
                let at = ((y / side * columns + x / side) * side + y % side) * side + x % side;
                windows[at] = row as u32;
                back[row] = at as u32;
            }
        }
        (windows, back)
    }

    /// The lengths of the parts that attend to each other: rows that follow each other in one window of `window` x `window`
    /// patches; all rows without a window.
    pub fn windows(&self, window: Option<usize>) -> Vec<usize> {
        let Some(window) = window else { return vec![self.places.len()] };
        let of = |place: &Place| match *place {
            Place::Patch { y, x } => Some((y as usize / window, x as usize / window)),
            Place::Class | Place::Break => None,
        };
        self.places.chunk_by(|a, b| of(a) == of(b)).map(<[Place]>::len).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patches(layout: &Layout) -> Vec<(u32, u32)> {
        let of = |place: &Place| match *place {
            Place::Patch { y, x } => (y, x),
            Place::Class | Place::Break => (99, 99),
        };
        layout.places.iter().map(of).collect()
    }

    #[test]
    fn orders_list_every_patch_once() {
        let mut layout = Layout::grid(4, 2);
        assert_eq!(layout.reorder(RowOrder::Blocks(2)), [0, 1, 4, 5, 2, 3, 6, 7]);
        assert_eq!(patches(&layout)[..5], [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]);
        assert_eq!(layout.reorder(RowOrder::RowMajor), [0, 1, 4, 5, 2, 3, 6, 7]);
        assert_eq!(layout, Layout::grid(4, 2));
        let mut layout = Layout::grid(6, 4);
        layout.reorder(RowOrder::Windows { window: 4, block: 2 });
        assert_eq!(layout.windows(Some(4)), [16, 8]);
        assert_eq!(patches(&layout)[..6], [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3)]);
        assert_eq!(patches(&layout)[16..20], [(0, 4), (0, 5), (1, 4), (1, 5)]);
        assert_eq!(layout.windows(None), [24]);
    }

    #[test]
    fn merged_patches_are_neighbours_whatever_the_order_before() {
        for order in [RowOrder::RowMajor, RowOrder::Blocks(2), RowOrder::Windows { window: 2, block: 1 }] {
            let mut layout = Layout::grid(5, 4);
            let before = layout.reorder(order);
            let rows = layout.merge(2, false);
            let patches: Vec<u32> = rows.iter().map(|&row| before[row as usize]).collect();
            assert_eq!(patches, [0, 1, 5, 6, 2, 3, 7, 8, 10, 11, 15, 16, 12, 13, 17, 18], "{order:?}");
            assert_eq!(layout, Layout::grid(2, 2));
        }
        assert_eq!(Layout::grid(2, 2).merge(1, true), [0, 2, 1, 3]);
    }

    #[test]
    fn queries_take_the_places_of_patches() {
        let mut layout = Layout::grid(2, 1);
        layout.places.extend([Place::Class; 2]);
        assert_eq!(layout.n_patches(), 2);
        assert_eq!(layout.keep_queries(), [2, 3]);
        assert_eq!(layout, Layout::grid(2, 1));
    }

    #[test]
    fn windows_are_filled_up() {
        const NO: u32 = NO_ROW;
        let (windows, back) = Layout::grid(3, 2).filled_windows(2);
        assert_eq!(windows, [0, 1, 3, 4, 2, NO, 5, NO]);
        assert_eq!(back, [0, 1, 4, 2, 3, 6]);
    }

    #[test]
    fn windows_of_convolutions_have_zeros_around_the_grid() {
        const NO: u32 = NO_ROW;
        let mut layout = Layout::grid(3, 1);
        assert_eq!(layout.unfold(3, 1, false)[..9], [NO, NO, NO, NO, 0, 1, NO, NO, NO]);
        assert_eq!(layout, Layout::grid(3, 1));
        // With an even grid the single row and column of zeros are behind it.
        let mut layout = Layout::grid(4, 2);
        assert_eq!(layout.unfold(3, 2, false), [0, 1, 2, 4, 5, 6, NO, NO, NO, 2, 3, NO, 6, 7, NO, NO, NO, NO]);
        assert_eq!(layout, Layout::grid(2, 1));
        let centred = Layout::grid(4, 2).unfold(3, 2, true);
        assert_eq!(centred, [NO, NO, NO, NO, 0, 1, NO, 4, 5, NO, NO, NO, 1, 2, 3, 5, 6, 7]);
        assert_eq!(layout.enlarge(2), [0, 0, 1, 1, 0, 0, 1, 1]);
        assert_eq!(layout, Layout::grid(4, 2));
    }
}
