//! Matrix products `Y = X W^T` with weights `W`, `[n_out, n_in]`, and activations `X`, `[n_tokens, n_in]`; for one token a
//! GEMV, for several a GEMM.
//!
//! [`matmul`] computes several products with the same input in one parallel region. It divides the rows of the matrices, in
//! *panels* of [`PANEL`] rows, into chunks for the threads, and calls the kernel for the matrix's weight layout:
//! `matmul_packed` for quantised weights and 8-bit activations, `matmul_plain` for float weights and F32 activations.

use std::ops::Range;

use metal_attention_gguf::Tensor;

use super::matmul_packed::run_packed;
pub(crate) use super::matmul_plain::run_panels;
use super::matmul_plain::{run_dequantized, run_floats};
use crate::activations::Q8Activations;
use crate::memory::PackedMemory;
use crate::packed::{FloatType, PANEL, PackedMatrix};
use crate::pool::ThreadPool;
use crate::shared::SharedMut;
use crate::simd::{Isa, LANES, Simd};

/// A weight matrix, `[n_out, n_in]`, in one of the forms that there are kernels for.
#[derive(Debug)]
pub(crate) enum WeightMatrix {
    /// Quantised and repacked; multiplied by 8-bit activations.
    Codes(PackedMatrix),
    /// F32, F16 or BF16, repacked; multiplied by F32 activations.
    Floats(PackedMatrix, FloatType),
    /// Quantised, in the mapped file (exact mode); dequantised in each product and multiplied by F32 activations.
    InPlace(Tensor),
}

impl WeightMatrix {
    /// Prepares `tensor`: repacks it to `memory`, or with `exact` leaves a quantised one in the file. `None` when there is not
    /// enough memory. Incomplete where the work of `pool` is cancelled.
    pub(crate) fn new(pool: &ThreadPool, memory: &mut PackedMemory, tensor: &Tensor, exact: bool) -> Option<Self> {
        match FloatType::of(tensor.ty()) {
            Some(ty) => PackedMatrix::pack(pool, memory, tensor).map(|matrix| Self::Floats(matrix, ty)),
            None if exact => Some(Self::InPlace(tensor.clone())),
            None => PackedMatrix::pack(pool, memory, tensor).map(Self::Codes),
        }
    }

    /// Columns: elements of an input row.
    pub(crate) fn n_in(&self) -> usize {
        match self {
            Self::Codes(m) | Self::Floats(m, _) => m.n_in,
            Self::InPlace(t) => t.row_len(),
        }
    }

    /// Rows: elements of an output row.
    pub(crate) fn n_out(&self) -> usize {
        match self {
            Self::Codes(m) | Self::Floats(m, _) => m.n_out,
            Self::InPlace(t) => t.n_rows(),
        }
    }

    /// Whether the product reads 8-bit activations.
    pub(crate) fn reads_q8(&self) -> bool {
        matches!(self, Self::Codes(_))
    }

    /// Bytes of weights that a product reads.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Codes(m) | Self::Floats(m, _) => m.bytes(),
            Self::InPlace(t) => t.bytes().len(),
        }
    }

    /// Bytes of allocated memory; 0 for a matrix in the mapped file.
    pub(crate) fn packed_bytes(&self) -> usize {
        match self {
            Self::Codes(m) | Self::Floats(m, _) => m.bytes(),
            Self::InPlace(_) => 0,
        }
    }
}

/// The part of a product that one task computes: a range of panels, for all tokens. No other thread computes these panels.
pub(crate) struct PanelSlice<'a> {
    panels: Range<usize>,
    /// The first row of the input.
    first_row: usize,
    n_tokens: usize,
    n_out: usize,
    /// The output of the whole product, `[n_tokens, n_out]`.
    y: &'a SharedMut<'a, f32>,
    /// Whether results are added to `y` instead of replacing it.
    accumulate: bool,
    /// What is added to each row, `[n_out]`.
    bias: Option<&'a [f32]>,
}

impl<'a> PanelSlice<'a> {
    /// `panels` of the product of `rows` of the input, with the output `y`.
    ///
    /// # Safety
    ///
    /// `y` is `[rows.len(), n_out]`, the panels lie in it, and no other slice in use contains any of them.
    unsafe fn new(
        panels: Range<usize>,
        rows: &Range<usize>,
        n_out: usize,
        y: &'a SharedMut<'a, f32>,
        accumulate: bool,
    ) -> Self {
        Self { panels, first_row: rows.start, n_tokens: rows.len(), n_out, y, accumulate, bias: None }
    }

    /// All panels of a product with the output `y`, `[n_tokens, n_out]`, to which results are added (`accumulate`) or which they
    /// replace.
    ///
    /// # Safety
    ///
    /// No other slice of `y` is in use.
    ///
    /// # Panics
    ///
    /// When `y` is shorter.
    pub(crate) unsafe fn whole(y: &'a SharedMut<'a, f32>, n_tokens: usize, n_out: usize, accumulate: bool) -> Self {
        let _ = y.at(n_tokens * n_out);
        // SAFETY: `y` has that length, and is used by this slice alone.
        unsafe { Self::new(0..n_out.div_ceil(PANEL), &(0..n_tokens), n_out, y, accumulate) }
    }

    /// The first row of the input.
    pub(crate) fn first_row(&self) -> usize {
        self.first_row
    }

    /// The panels to compute.
    pub(crate) fn panels(&self) -> Range<usize> {
        self.panels.clone()
    }

    /// Rows of the input and of the output.
    pub(crate) fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Rows of the whole matrix: the length of an output row.
    pub(crate) fn n_out(&self) -> usize {
        self.n_out
    }

    /// Writes, or adds, the results of one panel for one token: 16, or fewer in the last panel.
    ///
    /// # Safety
    ///
    /// The CPU has the instruction set; `panel` is in `panels`, and `token` below `n_tokens`.
    #[inline(always)]
    pub(crate) unsafe fn store<S: Simd>(&self, panel: usize, token: usize, y: S::F) {
        let row = panel * PANEL;
        let out = self.y.at(token * self.n_out + row);
        // SAFETY: these elements of `y` are accessed by this slice alone; the bias has as many elements as the output row.
        unsafe {
            let y = match self.bias {
                Some(bias) if self.n_out - row >= PANEL => S::f_add(S::f_load(bias.as_ptr().add(row)), y),
                Some(bias) => {
                    let mut lanes = [0f32; LANES];
                    lanes[..self.n_out - row].copy_from_slice(&bias[row..]);
                    S::f_add(S::f_load(lanes.as_ptr()), y)
                }
                None => y,
            };
            if self.n_out - row >= PANEL {
                S::f_store(out, if self.accumulate { S::f_add(S::f_load(out), y) } else { y });
            } else {
                let mut lanes = [0f32; LANES];
                S::f_store(lanes.as_mut_ptr(), y);
                for (lane, y) in lanes[..self.n_out - row].iter().enumerate() {
                    let out = out.add(lane);
                    *out = if self.accumulate { *out + y } else { *y };
                }
            }
        }
    }
}

/// One product of a call of [`matmul`].
pub(crate) struct MatmulOp<'a> {
    /// The weights, `[n_out, n_in]`.
    pub(crate) matrix: &'a WeightMatrix,
    /// The rows of the input that are multiplied.
    pub(crate) rows: Range<usize>,
    /// The output, `[rows.len(), n_out]`.
    pub(crate) y: &'a mut [f32],
    /// Whether the product is added to `y` (true) or replaces it.
    pub(crate) accumulate: bool,
}

/// The least number of multiplications in a chunk: a few microseconds.
pub(crate) const MIN_WORK: usize = 1 << 16;

/// The most multiplications in a chunk, unless a single panel has more: milliseconds, the time until cancelled work stops.
const MAX_WORK: usize = 1 << 28;

/// Computes all `products`, each with its rows of the common input `x`, `[n_rows, n_in]`, in one parallel region. Where one of
/// the matrices reads 8-bit activations, all of `x` is quantised to `q8` first.
///
/// # Panics
///
/// When the shapes of matrices, rows and outputs do not match.
pub(crate) fn matmul(pool: &ThreadPool, isa: Isa, x: &[f32], q8: &mut Q8Activations, products: &mut [MatmulOp<'_>]) {
    matmul_with_bias(pool, isa, x, q8, products, None);
}

/// [`matmul`] with a bias, `[n_out]`, that is added to each row of every product.
///
/// # Panics
///
/// When the shapes of matrices, rows, outputs and bias do not match.
pub(crate) fn matmul_with_bias(
    pool: &ThreadPool,
    isa: Isa,
    x: &[f32],
    q8: &mut Q8Activations,
    products: &mut [MatmulOp<'_>],
    bias: Option<&[f32]>,
) {
    struct Task<'a> {
        matrix: &'a WeightMatrix,
        rows: Range<usize>,
        y: SharedMut<'a, f32>,
        accumulate: bool,
        first_panel: usize,
    }
    if let Some(packed) = products.iter().find(|p| p.matrix.reads_q8()) {
        q8.quantize(pool, isa, x, packed.matrix.n_in());
    }
    let q8 = &*q8;
    let n_panels: usize = products.iter().map(|p| p.matrix.n_out().div_ceil(PANEL)).sum();
    let max_rows = products.iter().map(|p| p.rows.len()).max().unwrap_or(0);
    let n_in = products.first().map_or(0, |p| p.matrix.n_in());
    let mut first_panel = 0;
    let tasks: Vec<_> = products
        .iter_mut()
        .map(|p| {
            let n_out = p.matrix.n_out();
            assert_eq!(p.y.len(), p.rows.len() * n_out, "an output row for every input row");
            assert!(p.matrix.n_in() == n_in && p.rows.end * n_in <= x.len(), "rows of the input");
            assert!(bias.is_none_or(|bias| bias.len() == n_out), "a bias for each element of an output row");
            assert!(!p.matrix.reads_q8() || q8.n_in() == n_in, "products share their input");
            let (rows, accumulate) = (p.rows.clone(), p.accumulate);
            let task = Task { matrix: p.matrix, rows, y: SharedMut::new(p.y), accumulate, first_panel };
            first_panel += n_out.div_ceil(PANEL);
            task
        })
        .collect();
    // Several chunks per thread, so that the others do not wait long for a thread that was interrupted; none so small that
    // taking it costs more than computing it.
    let n_chunks = if pool.n_threads() == 1 { 1 } else { 6 * pool.n_threads() };
    let panel_work = (PANEL * n_in * max_rows).max(1);
    let chunk = n_panels.div_ceil(n_chunks).max(MIN_WORK / panel_work).min(MAX_WORK / panel_work).max(1);
    pool.for_each(n_panels.div_ceil(chunk), &|i| {
        let chunk = i * chunk..((i + 1) * chunk).min(n_panels);
        // Chunks are ranges of the panels of all products, one after the other. Begin with the first product that has panels in
        // this chunk.
        let first = tasks.partition_point(|task| task.first_panel <= chunk.start).saturating_sub(1);
        for task in &tasks[first..] {
            let end = task.first_panel + task.matrix.n_out().div_ceil(PANEL);
            let panels = chunk.start.max(task.first_panel)..chunk.end.min(end);
            if panels.is_empty() {
                break;
            }
            let panels = panels.start - task.first_panel..panels.end - task.first_panel;
            // SAFETY: `y` has this shape, as was checked above; each chunk of panels is computed by one thread.
            let slice = unsafe { PanelSlice::new(panels, &task.rows, task.matrix.n_out(), &task.y, task.accumulate) };
            let slice = PanelSlice { bias, ..slice };
            let x = &x[task.rows.start * n_in..task.rows.end * n_in];
            match task.matrix {
                WeightMatrix::Codes(matrix) => run_packed(isa, matrix, q8, &slice),
                WeightMatrix::Floats(matrix, ty) => run_floats(isa, matrix, *ty, x, &slice),
                WeightMatrix::InPlace(tensor) => run_dequantized(isa, tensor, x, &slice),
            }
        }
    });
}

/// Dequantises row `id` of an embedding table to `out`, `[n_embd]`.
pub(crate) fn embedding(table: &Tensor, id: usize, out: &mut [f32]) {
    table.ty().dequantize(table.row(id), out);
}
