//! Matrices of a model in GPU memory, repacked into the weight layouts of the kernels (`layout.rs`).
//!
//! A [`WgpuMatrix`] may be several tensors of the file, stacked or interleaved, so that one product computes all of
//! them. It consists of parts: rows of one tensor type in one buffer. Every product is one dispatch for each part.

mod experts;
mod layout;
mod repack;
mod types;
mod upload;

use std::sync::Arc;

use metal_attention_gguf::{Tensor, TensorType};

use crate::arena::{Arena, Slice};
use crate::device::WgpuDevice;
use crate::error::WgpuError;
use layout::RowLayout;
pub(crate) use repack::catalogue;
pub(crate) use types::{IntegerCodes, type_info, type_name};
use upload::RowSource;
pub(crate) use upload::{PartUpload, upload};

/// A matrix `W`, `[n_out, n_in]`, in one or more parts.
#[derive(Debug, Clone)]
pub struct WgpuMatrix {
    /// Elements of a row.
    n_in: usize,
    /// Rows of all parts.
    n_out: usize,
    /// The parts.
    parts: Vec<MatrixPart>,
}

/// Rows of a matrix that have one tensor type and lie in one buffer. Row `r` of the part is row
/// `first_row + r * row_step` of the matrix.
#[derive(Debug, Clone)]
pub struct MatrixPart {
    /// The tensor type.
    pub ty: TensorType,
    /// The matrix row that is the part's row 0.
    pub first_row: usize,
    /// Matrix rows from one row of the part to the next: 2 for gate or up rows of different types, else 1.
    pub row_step: usize,
    /// Rows of the part.
    pub n_rows: usize,
    /// The repacked rows, words that `shaders/types/` reads.
    pub buffer: Slice,
}

impl MatrixPart {
    /// Bytes of the rows, of `n_in` elements each.
    pub(crate) fn bytes(&self, n_in: usize) -> u64 {
        WgpuMatrix::bytes_of(self.ty, n_in, self.n_rows)
    }
}

impl WgpuMatrix {
    /// Uploads `tensors` as one matrix, stacked in this order, into `arena`. Neighbours of one type share a part as far
    /// as the largest binding and the arena allow. `what` names the matrix in errors.
    pub fn concat(gpu: &WgpuDevice, what: &str, tensors: &[&Tensor], arena: &mut Arena) -> Result<Self, WgpuError> {
        let mut rows = Vec::new();
        let matrix = Self::place_concat(gpu, what, tensors, arena, &mut rows)?;
        upload(gpu, &rows, &|_| ())?;
        Ok(matrix)
    }

    /// [`concat`](Self::concat) without the upload: the matrix has its place, and its rows are appended to `rows` for
    /// `upload`.
    pub(crate) fn place_concat(
        gpu: &WgpuDevice,
        what: &str,
        tensors: &[&Tensor],
        arena: &mut Arena,
        rows: &mut Vec<PartUpload>,
    ) -> Result<Self, WgpuError> {
        let Some(first) = tensors.first() else {
            return Err(mismatch(what, "it has no tensors".to_owned()));
        };
        let mut place = MatrixPlacer { gpu, what, n_in: first.row_len(), arena, parts: Vec::new(), rows };
        let mut n_out = 0;
        for run in tensors.chunk_by(|a, b| a.ty() == b.ty()) {
            for tensor in run {
                check_row_len(what, first, tensor)?;
            }
            let source = RowSource::new(run.iter().map(|&tensor| vec![tensor.clone()]));
            let n_rows = source.n_rows();
            place.rows(run[0].ty(), n_out, 1, source)?;
            n_out += n_rows;
        }
        Ok(Self { n_in: place.n_in, n_out, parts: place.parts })
    }

    /// Bytes of a part of `n_rows` rows of `n_in` elements of `ty` in GPU memory.
    pub fn bytes_of(ty: TensorType, n_in: usize, n_rows: usize) -> u64 {
        RowLayout::new(ty, n_in).part_bytes(n_rows as u64)
    }

    /// Uploads `gate` and `up` as one matrix with their rows interleaved: row `2 i` is row `i` of `gate`, row `2 i + 1`
    /// that of `up`.
    pub fn interleave(
        gpu: &WgpuDevice,
        what: &str,
        gate: &Tensor,
        up: &Tensor,
        arena: &mut Arena,
    ) -> Result<Self, WgpuError> {
        let mut rows = Vec::new();
        let matrix = Self::place_interleave(gpu, what, gate, up, arena, &mut rows)?;
        upload(gpu, &rows, &|_| ())?;
        Ok(matrix)
    }

    /// [`interleave`](Self::interleave) without the upload, like [`place_concat`](Self::place_concat).
    pub(crate) fn place_interleave(
        gpu: &WgpuDevice,
        what: &str,
        gate: &Tensor,
        up: &Tensor,
        arena: &mut Arena,
        rows: &mut Vec<PartUpload>,
    ) -> Result<Self, WgpuError> {
        check_row_len(what, gate, up)?;
        let n = gate.n_rows();
        if n != up.n_rows() {
            let why = format!("{} has {n} rows and {} has {}", gate.name(), up.name(), up.n_rows());
            return Err(mismatch(what, why));
        }
        let mut place = MatrixPlacer { gpu, what, n_in: gate.row_len(), arena, parts: Vec::new(), rows };
        if gate.ty() == up.ty() {
            place.rows(gate.ty(), 0, 1, RowSource::new([vec![gate.clone(), up.clone()]]))?;
        } else {
            place.rows(gate.ty(), 0, 2, RowSource::new([vec![gate.clone()]]))?;
            place.rows(up.ty(), 1, 2, RowSource::new([vec![up.clone()]]))?;
        }
        Ok(Self { n_in: place.n_in, n_out: 2 * n, parts: place.parts })
    }

    /// Columns: elements of the input.
    pub fn n_in(&self) -> usize {
        self.n_in
    }

    /// Rows: elements of the product.
    pub fn n_out(&self) -> usize {
        self.n_out
    }

    /// The parts. Together they hold every row once.
    pub fn parts(&self) -> &[MatrixPart] {
        &self.parts
    }

    /// Whether rows `2 i` and `2 i + 1` are neighbours in one part, for every `i`. True after
    /// [`interleave`](Self::interleave) of tensors of one type.
    pub fn has_pairs(&self) -> bool {
        self.parts.iter().all(|p| p.row_step == 1 && p.first_row.is_multiple_of(2) && p.n_rows.is_multiple_of(2))
    }

    /// Bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.buffer.size()).sum()
    }
}

fn mismatch(what: &str, why: String) -> WgpuError {
    WgpuError::Mismatch { what: what.to_owned(), why }
}

fn check_row_len(what: &str, a: &Tensor, b: &Tensor) -> Result<(), WgpuError> {
    if a.row_len() == b.row_len() {
        return Ok(());
    }
    let why =
        format!("rows of {} have {} elements and rows of {} have {}", a.name(), a.row_len(), b.name(), b.row_len());
    Err(mismatch(what, why))
}

/// Gives parts of one matrix their places in an arena.
struct MatrixPlacer<'a> {
    /// The GPU.
    gpu: &'a WgpuDevice,
    /// The matrix's name in errors.
    what: &'a str,
    /// Elements of a row.
    n_in: usize,
    /// Where the parts are placed.
    arena: &'a mut Arena,
    /// The parts so far.
    parts: Vec<MatrixPart>,
    /// Receives the rows to upload.
    rows: &'a mut Vec<PartUpload>,
}

impl MatrixPlacer<'_> {
    /// Places the rows of `source`, all of type `ty`, in as few parts as possible.
    fn rows(&mut self, ty: TensorType, first_row: usize, row_step: usize, source: RowSource) -> Result<(), WgpuError> {
        let n_rows = source.n_rows();
        let layout = RowLayout::new(ty, self.n_in);
        // Bindings are whole vectors of four words.
        let max = self.arena.max_slice(self.gpu) & !15;
        // Kernels compute row numbers in 32 bits.
        let last_row = (n_rows as u64).saturating_mul(row_step as u64).saturating_add(first_row as u64);
        // Gate and up rows of a pair stay in one part.
        let max_rows = (max.saturating_sub(layout.table_bytes()) / layout.row_bytes()) & !1;
        if max_rows == 0 || last_row > u64::from(u32::MAX) {
            let bytes = layout.part_bytes(n_rows as u64);
            return Err(WgpuError::TooLarge { what: self.what.to_owned(), bytes, max });
        }
        let source = Arc::new(source);
        let mut done = 0;
        while done < n_rows {
            let n = (n_rows - done).min(max_rows as usize);
            let buffer = self.arena.take(self.gpu, self.what, layout.part_bytes(n as u64))?;
            self.rows.push(PartUpload::new(layout.clone(), buffer.clone(), Arc::clone(&source), done, n));
            self.parts.push(MatrixPart { ty, first_row: first_row + done * row_step, row_step, n_rows: n, buffer });
            done += n;
        }
        Ok(())
    }
}
