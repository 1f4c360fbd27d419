//! Products of matrices with rows, by the kernels of the forward pass. Each reads the number of its rows from a batch buffer.

use std::collections::HashMap;
use std::sync::Arc;

use wgpu::Buffer;

use super::recorder::Recorder;
use super::rows::WgpuRows;
use crate::device::WgpuDevice;
use crate::error::WgpuError;
use crate::kernels::{MatmulScratch, MatvecOptions, TOKEN_TILE, leaves_idle_in_tiles, matmul, multi_token_matvec};
use crate::matrix::WgpuMatrix;

/// Most rows of a dispatch with a workgroup for each: below the 65535 workgroups that every device runs along an axis, and a
/// multiple of 64.
pub(super) const MOST_ROWS: usize = 1 << 15;

/// The first rows and the lengths of the parts of `n_rows` rows that dispatches have.
pub(super) fn parts(n_rows: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..n_rows).step_by(MOST_ROWS).map(move |first| (first, MOST_ROWS.min(n_rows - first)))
}

/// The buffers that products share.
#[derive(Debug)]
pub(super) struct Products {
    gpu: Arc<WgpuDevice>,
    exact: bool,
    /// A batch for each number of rows.
    batches: HashMap<usize, Buffer>,
    /// The inputs of matrix units.
    scratch: Option<Scratch>,
}

#[derive(Debug)]
struct Scratch {
    buffers: MatmulScratch,
    n_rows: usize,
    /// Elements of all rows.
    elements: usize,
}

impl Products {
    pub(super) fn new(gpu: Arc<WgpuDevice>, exact: bool) -> Self {
        Self { gpu, exact, batches: HashMap::new(), scratch: None }
    }

    /// Gives back the buffers.
    pub(super) fn clear(&mut self) {
        self.batches.clear();
        self.scratch = None;
    }

    /// Appends `y = W x`, plus the bias if there is one, to what `recorder` records. `x`: `[n_rows, n_in]`; `y`: `[n_rows, n_out]`.
    pub(super) fn multiply(
        &mut self,
        recorder: &mut Recorder,
        matrix: &WgpuMatrix,
        bias: Option<&Buffer>,
        x: &WgpuRows,
        y: &WgpuRows,
    ) -> Result<(), WgpuError> {
        if (x.width(), y.width(), x.n_rows()) != (matrix.n_in(), matrix.n_out(), y.n_rows()) {
            let (n_in, n_out) = (matrix.n_in(), matrix.n_out());
            let why = format!("its rows have {} elements and the matrix is [{n_out}, {n_in}]", x.width());
            return Err(WgpuError::Mismatch { what: "a product of the picture encoder".into(), why });
        }
        let gpu = Arc::clone(&self.gpu);
        let options = MatvecOptions { bias, ..MatvecOptions::default() };
        for (first, n) in parts(x.n_rows()) {
            let (x, y) = (x.part(first, n), y.part(first, n));
            let batch = self.batch(n)?;
            let dispatches = if leaves_idle_in_tiles(matrix, n) {
                multi_token_matvec(&gpu, matrix, options, TOKEN_TILE, &x, &y, &batch)?
            } else {
                let exact = self.exact;
                matmul(&gpu, matrix, options, n, exact, &x, &y, self.scratch(n, matrix.n_in())?, &batch)?
            };
            for dispatch in dispatches {
                recorder.dispatch(dispatch, n);
            }
        }
        Ok(())
    }

    /// A batch buffer of `n_rows` tokens, of which products read the number.
    fn batch(&mut self, n_rows: usize) -> Result<Buffer, WgpuError> {
        if let Some(batch) = self.batches.get(&n_rows) {
            return Ok(batch.clone());
        }
        let batch = self.gpu.buffer("a batch of rows", 16 * (1 + 2 * n_rows as u64))?;
        self.gpu.write(&batch, &[n_rows as u32, n_rows as u32, 0, 0]);
        self.batches.insert(n_rows, batch.clone());
        Ok(batch)
    }

    /// Buffers for `n_rows` rows of `n_in` elements in the format of matrix units.
    fn scratch(&mut self, n_rows: usize, n_in: usize) -> Result<&MatmulScratch, WgpuError> {
        let elements = n_rows * MatmulScratch::padded_len(n_in);
        let scratch = match self.scratch.take() {
            Some(scratch) if scratch.n_rows >= n_rows && scratch.elements >= elements => scratch,
            smaller => {
                let (rows, most) = smaller.map_or((0, 0), |scratch| (scratch.n_rows, scratch.elements));
                let (n_rows, elements) = (n_rows.max(rows), elements.max(most));
                let buffers = MatmulScratch::new(&self.gpu, n_rows, elements.div_ceil(n_rows))?;
                Scratch { buffers, n_rows, elements }
            }
        };
        Ok(&self.scratch.insert(scratch).buffers)
    }
}
