//! Matrix products `Y = X W^T`: which kernel a matrix takes, and how the work is
//! spread over threads.

use std::ops::Range;

use metal_attention_gguf::{Tensor, TensorType};

use super::matmul_packed::run_packed;
use super::matmul_plain::{run_dequantized, run_floats};
use crate::activations::Q8Activations;
use crate::memory::PackedMemory;
use crate::packed::{PANEL, PackedMatrix};
use crate::pool::ThreadPool;
use crate::shared::SharedMut;
use crate::simd::{Isa, LANES, Simd};

/// A weight matrix `[n_out, n_in]`, ready to be multiplied.
#[derive(Debug)]
pub(crate) enum WeightMatrix {
    /// Quantised and repacked; multiplied by 8-bit activations.
    Codes(PackedMatrix),
    /// F32, F16 or BF16, repacked; multiplied by F32 activations.
    Floats(PackedMatrix),
    /// Quantised, as it lies in the file; dequantised on the fly and multiplied by F32 activations.
    InPlace(Tensor),
}

impl WeightMatrix {
    /// Prepares `tensor`; `exact` keeps quantised types in place. `None` when
    /// `memory` has no room for the repacked matrix.
    pub(crate) fn new(pool: &ThreadPool, memory: &mut PackedMemory, tensor: &Tensor, exact: bool) -> Option<Self> {
        match tensor.ty() {
            TensorType::F32 | TensorType::F16 | TensorType::BF16 => {
                PackedMatrix::pack(pool, memory, tensor).map(Self::Floats)
            }
            _ if exact => Some(Self::InPlace(tensor.clone())),
            _ => PackedMatrix::pack(pool, memory, tensor).map(Self::Codes),
        }
    }

    pub(crate) fn n_in(&self) -> usize {
        match self {
            Self::Codes(m) | Self::Floats(m) => m.n_in,
            Self::InPlace(t) => t.row_len(),
        }
    }

    pub(crate) fn n_out(&self) -> usize {
        match self {
            Self::Codes(m) | Self::Floats(m) => m.n_out,
            Self::InPlace(t) => t.n_rows(),
        }
    }

    /// Whether it reads 8-bit activations.
    pub(crate) fn reads_q8(&self) -> bool {
        matches!(self, Self::Codes(_))
    }

    /// Bytes that a product reads.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Codes(m) | Self::Floats(m) => m.bytes(),
            Self::InPlace(t) => t.bytes().len(),
        }
    }

    /// Bytes of memory it holds besides the mapped file.
    pub(crate) fn packed_bytes(&self) -> usize {
        match self {
            Self::Codes(m) | Self::Floats(m) => m.bytes(),
            Self::InPlace(_) => 0,
        }
    }
}

/// Some panels (groups of [`PANEL`] rows) of a product `[n_tokens, n_out]`. No other thread works on the same panels of
/// the same product.
pub(crate) struct PanelSlice<'a> {
    panels: Range<usize>,
    /// The row of the input that is the product's first.
    first_row: usize,
    n_tokens: usize,
    n_out: usize,
    y: &'a SharedMut<'a, f32>,
    accumulate: bool,
}

impl<'a> PanelSlice<'a> {
    /// `panels` of the product `y`, or of what is added to it.
    ///
    /// # Safety
    ///
    /// `y` is `[rows.len(), n_out]`, the panels lie in it, and no other slice that is at work has any of them.
    unsafe fn new(
        panels: Range<usize>,
        rows: &Range<usize>,
        n_out: usize,
        y: &'a SharedMut<'a, f32>,
        accumulate: bool,
    ) -> Self {
        Self { panels, first_row: rows.start, n_tokens: rows.len(), n_out, y, accumulate }
    }

    /// The row of the input that is the product's first.
    pub(crate) fn first_row(&self) -> usize {
        self.first_row
    }

    pub(crate) fn panels(&self) -> Range<usize> {
        self.panels.clone()
    }

    pub(crate) fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Rows of the whole product.
    pub(crate) fn n_out(&self) -> usize {
        self.n_out
    }

    /// Writes a panel's 16 results for one token, or adds them.
    ///
    /// # Safety
    ///
    /// The CPU has the instruction set; the panel is one of `panels`, the token one of `n_tokens`.
    #[inline(always)]
    pub(crate) unsafe fn store<S: Simd>(&self, panel: usize, token: usize, y: S::F) {
        let row = panel * PANEL;
        let out = self.y.at(token * self.n_out + row);
        // SAFETY: the panel's rows of this token, which no other thread touches.
        unsafe {
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

/// One product of several in one parallel region.
pub(crate) struct MatmulOp<'a> {
    pub(crate) matrix: &'a WeightMatrix,
    /// The rows of the input that are multiplied.
    pub(crate) rows: Range<usize>,
    /// `[rows.len(), n_out]`
    pub(crate) y: &'a mut [f32],
    /// Whether the product is added to `y` or replaces it.
    pub(crate) accumulate: bool,
}

/// Multiplications of a chunk at least: a few microseconds.
pub(crate) const MIN_WORK: usize = 1 << 16;

/// Multiplications of a chunk at most, where a panel has no more: milliseconds, after which cancelled work ends.
const MAX_WORK: usize = 1 << 28;

/// Computes all `products` with their rows of `x`, `[n_rows, n_in]`, in one parallel region. Where a matrix is packed the rows
/// are brought to 8 bits first, in `q8`.
pub(crate) fn matmul(pool: &ThreadPool, isa: Isa, x: &[f32], q8: &mut Q8Activations, products: &mut [MatmulOp<'_>]) {
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
    let most_rows = products.iter().map(|p| p.rows.len()).max().unwrap_or(0);
    let n_in = products.first().map_or(0, |p| p.matrix.n_in());
    let mut first_panel = 0;
    let tasks: Vec<_> = products
        .iter_mut()
        .map(|p| {
            let n_out = p.matrix.n_out();
            assert_eq!(p.y.len(), p.rows.len() * n_out, "an output row for every input row");
            assert!(p.matrix.n_in() == n_in && p.rows.end * n_in <= x.len(), "rows of the input");
            assert!(!p.matrix.reads_q8() || q8.n_in() == n_in, "products share their input");
            let (rows, accumulate) = (p.rows.clone(), p.accumulate);
            let task = Task { matrix: p.matrix, rows, y: SharedMut::new(p.y), accumulate, first_panel };
            first_panel += n_out.div_ceil(PANEL);
            task
        })
        .collect();
    // Several chunks a thread, so that a thread that was interrupted is not waited for long; none so small that
    // handing it out takes longer than computing it.
    let n_chunks = if pool.n_threads() == 1 { 1 } else { 6 * pool.n_threads() };
    let panel_work = (PANEL * n_in * most_rows).max(1);
    let chunk = n_panels.div_ceil(n_chunks).max(MIN_WORK / panel_work).min(MAX_WORK / panel_work).max(1);
    pool.for_each(n_panels.div_ceil(chunk), &|i| {
        let chunk = i * chunk..((i + 1) * chunk).min(n_panels);
        // The tasks lie in order: the first whose panels reach into the chunk, and those after it.
        let first = tasks.partition_point(|task| task.first_panel <= chunk.start).saturating_sub(1);
        for task in &tasks[first..] {
            let end = task.first_panel + task.matrix.n_out().div_ceil(PANEL);
            let panels = chunk.start.max(task.first_panel)..chunk.end.min(end);
            if panels.is_empty() {
                break;
            }
            let panels = panels.start - task.first_panel..panels.end - task.first_panel;
            // SAFETY: `y` has this shape, as was checked above; each chunk of panels is taken by one thread.
            let slice = unsafe { PanelSlice::new(panels, &task.rows, task.matrix.n_out(), &task.y, task.accumulate) };
            let x = &x[task.rows.start * n_in..task.rows.end * n_in];
            match task.matrix {
                WeightMatrix::Codes(matrix) => run_packed(isa, matrix, q8, &slice),
                WeightMatrix::Floats(matrix) => run_floats(isa, matrix, x, &slice),
                WeightMatrix::InPlace(tensor) => run_dequantized(isa, tensor, x, &slice),
            }
        }
    });
}

/// Reads row `id` of an embedding table into `out`.
pub(crate) fn embedding(table: &Tensor, id: usize, out: &mut [f32]) {
    table.ty().dequantize(table.row(id), out);
}
