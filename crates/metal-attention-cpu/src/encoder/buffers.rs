//! [`Buffers`]: memory of rows that is used again by the next operations, since new pages of the system cost as much as writing them
//! several times.

use std::sync::{Arc, Mutex, PoisonError};

/// Buffers that are not in use.
#[derive(Debug, Clone, Default)]
pub(super) struct Buffers(Arc<Mutex<Vec<Vec<f32>>>>);

impl Buffers {
    /// A buffer of `n` elements of any values.
    pub(super) fn take(&self, n: usize) -> Vec<f32> {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = (0..free.len()).filter(|&i| free[i].capacity() >= n).min_by_key(|&i| free[i].capacity());
        let mut buffer = fitting.map(|i| free.swap_remove(i)).unwrap_or_default();
        drop(free);
        buffer.resize(n, 0.0);
        buffer
    }

    /// Gives a buffer back.
    fn put(&self, buffer: Vec<f32>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }

    /// Gives the memory of all buffers that are not in use back to the system.
    pub(super) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Rows, `[n_rows, width]`.
#[derive(Debug)]
pub(super) struct Rows {
    pub(super) values: Vec<f32>,
    pub(super) width: usize,
    buffers: Buffers,
}

impl Rows {
    /// `n_rows` rows of any values.
    pub(super) fn new(buffers: &Buffers, n_rows: usize, width: usize) -> Self {
        Self { values: buffers.take(n_rows * width), width, buffers: buffers.clone() }
    }

    /// Rows of these values.
    pub(super) fn of(buffers: &Buffers, values: &[f32], width: usize) -> Self {
        let mut rows = Self::new(buffers, values.len() / width, width);
        rows.values.copy_from_slice(values);
        rows
    }

    pub(super) fn n_rows(&self) -> usize {
        self.values.len() / self.width
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        self.buffers.put(std::mem::take(&mut self.values));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_buffer_that_fits_is_used_again() {
        let buffers = Buffers::default();
        let [small, large] = [100, 1000].map(|n| Rows::new(&buffers, n, 1));
        let (small_at, large_at) = (small.values.as_ptr(), large.values.as_ptr());
        drop((large, small));
        let rows = Rows::of(&buffers, &[1.0; 90], 9);
        assert_eq!((rows.values.as_ptr(), rows.n_rows()), (small_at, 10));
        assert_eq!(Rows::new(&buffers, 200, 1).values.as_ptr(), large_at);
        drop(rows);
        buffers.clear();
        assert_eq!(Rows::new(&buffers, 3, 2).values, [0.0; 6]);
    }
}
