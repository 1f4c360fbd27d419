//! Matrix products `Y = X W^T`: which kernel a matrix takes, and how the work is
//! spread over threads.

use metal_attention_gguf::Tensor;

use super::matmul_packed::{PackedProduct, run_packed};
use super::matmul_plain::{PlainProduct, run_plain};
use crate::activations::Q8Activations;
use crate::packed::{PANEL, PackedMatrix, can_pack};
use crate::pool::ThreadPool;
use crate::shared::SharedMut;
use crate::simd::Isa;

/// A weight matrix `[n_out, n_in]`, ready to be multiplied.
#[derive(Debug)]
pub(crate) enum Matrix {
    /// Quantised and repacked; multiplied by 8-bit activations.
    Packed(PackedMatrix),
    /// As it lies in the file; multiplied by F32 activations. Quantised rows are
    /// dequantised on the fly.
    InPlace(Tensor),
}

impl Matrix {
    /// Prepares `tensor`; `exact` keeps quantised types in place. `None` when
    /// there is no memory for the repacked matrix.
    pub(crate) fn new(pool: &ThreadPool, tensor: &Tensor, exact: bool) -> Option<Self> {
        if exact || !can_pack(tensor.ty()) {
            return Some(Self::InPlace(tensor.clone()));
        }
        PackedMatrix::pack(pool, tensor).map(Self::Packed)
    }

    pub(crate) fn n_in(&self) -> usize {
        match self {
            Self::Packed(m) => m.n_in,
            Self::InPlace(t) => t.row_len(),
        }
    }

    pub(crate) fn n_out(&self) -> usize {
        match self {
            Self::Packed(m) => m.n_out,
            Self::InPlace(t) => t.n_rows(),
        }
    }

    /// Whether it reads 8-bit activations.
    pub(crate) fn is_packed(&self) -> bool {
        matches!(self, Self::Packed(_))
    }

    /// Bytes of memory it holds besides the mapped file.
    pub(crate) fn packed_bytes(&self) -> usize {
        match self {
            Self::Packed(m) => m.bytes(),
            Self::InPlace(_) => 0,
        }
    }
}

/// One product of several that share their activations.
pub(crate) struct Product<'a> {
    pub(crate) matrix: &'a Matrix,
    /// `[n_tokens, n_out]`
    pub(crate) y: &'a mut [f32],
    /// Whether the product is added to `y` or replaces it.
    pub(crate) accumulate: bool,
}

/// Multiplications of a chunk at least: a few microseconds.
pub(crate) const MIN_WORK: usize = 1 << 16;

/// Computes all `products` with the rows of `x`, `[n_tokens, n_in]`, in one
/// parallel region. Where a matrix is packed the rows are brought to 8 bits
/// first, in `q8`.
pub(crate) fn matmul(pool: &ThreadPool, isa: Isa, x: &[f32], q8: &mut Q8Activations, products: &mut [Product<'_>]) {
    struct Task<'a> {
        matrix: &'a Matrix,
        y: SharedMut<'a, f32>,
        accumulate: bool,
        first_panel: usize,
    }
    if let Some(packed) = products.iter().find(|p| p.matrix.is_packed()) {
        q8.quantize(pool, isa, x, packed.matrix.n_in());
    }
    let q8 = &*q8;
    let n_panels: usize = products.iter().map(|p| p.matrix.n_out().div_ceil(PANEL)).sum();
    let n_tokens = products.first().map_or(0, |p| p.y.len() / p.matrix.n_out());
    let mut first_panel = 0;
    let tasks: Vec<_> = products
        .iter_mut()
        .map(|p| {
            let (n_in, n_out) = (p.matrix.n_in(), p.matrix.n_out());
            assert_eq!(p.y.len(), n_tokens * n_out, "an output row for every token");
            assert_eq!(x.len(), n_tokens * n_in, "an input row for every token");
            assert!(!p.matrix.is_packed() || q8.n_in() == n_in, "products share their input");
            let task = Task { matrix: p.matrix, y: SharedMut::new(p.y), accumulate: p.accumulate, first_panel };
            first_panel += n_out.div_ceil(PANEL);
            task
        })
        .collect();
    // Several chunks a thread, so that a thread that was interrupted is not waited for long; none so small that
    // handing it out takes longer than computing it.
    let n_chunks = if pool.n_threads() == 1 { 1 } else { 6 * pool.n_threads() };
    let panel_work = (PANEL * x.len()).max(1);
    let chunk = n_panels.div_ceil(n_chunks).max(MIN_WORK / panel_work).max(1);
    pool.for_each(n_panels.div_ceil(chunk), &|i| {
        let chunk = i * chunk..((i + 1) * chunk).min(n_panels);
        for task in &tasks {
            let end = task.first_panel + task.matrix.n_out().div_ceil(PANEL);
            let panels = chunk.start.max(task.first_panel)..chunk.end.min(end);
            if panels.is_empty() {
                continue;
            }
            let panels = panels.start - task.first_panel..panels.end - task.first_panel;
            let (y, accumulate) = (&task.y, task.accumulate);
            match task.matrix {
                Matrix::Packed(matrix) => {
                    run_packed(isa, PackedProduct { matrix, panels, x: q8, n_tokens, y, accumulate });
                }
                Matrix::InPlace(tensor) => {
                    run_plain(isa, &PlainProduct { tensor, panels, x, n_tokens, y, accumulate });
                }
            }
        }
    });
}

/// Reads row `id` of an embedding table into `out`.
pub(crate) fn embedding(table: &Tensor, id: usize, out: &mut [f32]) {
    table.ty().dequantize(table.row(id), out);
}
