//! [`WgpuRows`]: rows in GPU memory. Buffers of rows that are no longer needed are kept for later ones ([`RowPool`]).

use std::sync::{Arc, Mutex, PoisonError};

use wgpu::Buffer;

use crate::arena::Slice;
use crate::device::WgpuDevice;
use crate::error::WgpuError;

/// Rows, F32 `[n_rows, width]`, at the start of a buffer.
#[derive(Debug)]
pub(super) struct WgpuRows {
    /// The rows and nothing else.
    slice: Slice,
    /// Rows.
    n_rows: usize,
    /// Elements of a row.
    width: usize,
    /// Returns the buffer to its pool.
    _lent: Option<Lent>,
}

impl WgpuRows {
    /// The first rows of `buffer`, which has room for them.
    fn new(buffer: Buffer, n_rows: usize, width: usize, lent: Option<Lent>) -> Self {
        let slice = Slice::from(buffer).part(0, bytes_of(n_rows, width));
        Self { slice, n_rows, width, _lent: lent }
    }

    /// Rows with `values`.
    pub(super) fn upload(gpu: &WgpuDevice, values: &[f32], width: usize) -> Result<Self, WgpuError> {
        let buffer = gpu.upload("rows of the picture encoder", values)?;
        Ok(Self::new(buffer, values.len() / width.max(1), width, None))
    }

    /// The memory of the rows.
    pub(super) fn slice(&self) -> &Slice {
        &self.slice
    }

    /// The memory of `n` rows from row `first` on. It can be bound if that is a multiple of 64: bindings begin at multiples of 256
    /// bytes.
    pub(super) fn part(&self, first: usize, n: usize) -> Slice {
        self.slice.part(bytes_of(first, self.width), bytes_of(n, self.width))
    }

    pub(super) fn n_rows(&self) -> usize {
        self.n_rows
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Number of elements.
    pub(super) fn n_elements(&self) -> usize {
        self.n_rows * self.width
    }

    /// The same elements in rows of `width`.
    pub(super) fn reshape(self, width: usize) -> Self {
        Self { n_rows: self.n_elements() / width.max(1), width, ..self }
    }
}

/// Bytes of rows.
fn bytes_of(n_rows: usize, width: usize) -> u64 {
    n_rows as u64 * width as u64 * size_of::<f32>() as u64
}

/// Buffers that no rows lie in. What is recorded runs in order, so that the results of one operation may overwrite rows that
/// operations recorded before it read.
#[derive(Debug, Default)]
pub(super) struct RowPool(Arc<Mutex<Vec<Buffer>>>);

/// A buffer of a pool that rows lie in.
#[derive(Debug)]
struct Lent {
    buffer: Buffer,
    pool: Arc<Mutex<Vec<Buffer>>>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner).push(self.buffer.clone());
    }
}

impl RowPool {
    /// Rows of any contents: in the smallest free buffer that holds them, unless that is more than twice as long, or in a new one.
    pub(super) fn rows(&self, gpu: &WgpuDevice, n_rows: usize, width: usize) -> Result<WgpuRows, WgpuError> {
        let bytes = bytes_of(n_rows, width);
        let free = {
            let mut buffers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let fits = |buffer: &Buffer| (bytes..=bytes.saturating_mul(2)).contains(&buffer.size());
            let fitting = buffers.iter().enumerate().filter(|(_, buffer)| fits(buffer));
            fitting.min_by_key(|(_, buffer)| buffer.size()).map(|(i, _)| i).map(|i| buffers.swap_remove(i))
        };
        let buffer = match free {
            Some(buffer) => buffer,
            None => gpu.buffer("rows of the picture encoder", bytes)?,
        };
        let lent = Lent { buffer: buffer.clone(), pool: Arc::clone(&self.0) };
        Ok(WgpuRows::new(buffer, n_rows, width, Some(lent)))
    }

    /// Gives back the free buffers.
    pub(super) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}
