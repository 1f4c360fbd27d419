//! Matrices of a model in GPU memory, repacked for the kernels.

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
    n_in: usize,
    n_out: usize,
    parts: Vec<MatrixPart>,
}

/// Rows of a matrix that have one type and lie in one buffer: row `r` of the part is row `first_row + r * row_step` of
/// the matrix.
#[derive(Debug, Clone)]
pub struct MatrixPart {
    /// How the numbers are stored.
    pub ty: TensorType,
    /// The matrix row that is this part's first.
    pub first_row: usize,
    /// Matrix rows from one row of the part to the next.
    pub row_step: usize,
    /// Rows of the part.
    pub n_rows: usize,
    /// The packed rows, an `array<u32>` that `shaders/types/` reads.
    pub buffer: Slice,
}

impl MatrixPart {
    /// Bytes that its rows, of `n_in` elements, take up.
    pub(crate) fn bytes(&self, n_in: usize) -> u64 {
        WgpuMatrix::bytes_of(self.ty, n_in, self.n_rows)
    }
}

impl WgpuMatrix {
    /// Uploads `tensors`, one below the other, into `arena`. Neighbours of one type share a part, as far as one binding of
    /// the device and the arena allow.
    pub fn concat(gpu: &WgpuDevice, what: &str, tensors: &[&Tensor], arena: &mut Arena) -> Result<Self, WgpuError> {
        let mut rows = Vec::new();
        let matrix = Self::place_concat(gpu, what, tensors, arena, &mut rows)?;
        upload(gpu, &rows, &|_| ())?;
        Ok(matrix)
    }

    /// As [`concat`](Self::concat), but that the rows come when `rows` are uploaded.
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

    /// Bytes that rows of `n_in` elements of `ty` take on the GPU.
    pub fn bytes_of(ty: TensorType, n_in: usize, n_rows: usize) -> u64 {
        RowLayout::new(ty, n_in).part_bytes(n_rows as u64)
    }

    /// As [`concat`](Self::concat), the matrix whose row `2 i` is row `i` of `gate` and whose row `2 i + 1` is row `i` of
    /// `up`.
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

    /// As [`interleave`](Self::interleave), but that the rows come when `rows` are uploaded.
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

    /// Columns: length of the input.
    pub fn n_in(&self) -> usize {
        self.n_in
    }

    /// Rows: length of the product.
    pub fn n_out(&self) -> usize {
        self.n_out
    }

    /// The parts; together they hold every row once.
    pub fn parts(&self) -> &[MatrixPart] {
        &self.parts
    }

    /// Whether rows `2 i` and `2 i + 1` are neighbours in a part, for every `i`. True after
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

/// A matrix that is given its place in the GPU's memory.
struct MatrixPlacer<'a> {
    gpu: &'a WgpuDevice,
    what: &'a str,
    n_in: usize,
    arena: &'a mut Arena,
    parts: Vec<MatrixPart>,
    rows: &'a mut Vec<PartUpload>,
}

impl MatrixPlacer<'_> {
    /// Finds a place for the rows of `source`, which are of one type, in as few parts as can be.
    fn rows(&mut self, ty: TensorType, first_row: usize, row_step: usize, source: RowSource) -> Result<(), WgpuError> {
        let n_rows = source.n_rows();
        let layout = RowLayout::new(ty, self.n_in);
        // Buffers are whole vectors of four words.
        let max = self.arena.max_slice(self.gpu) & !15;
        // Kernels number rows with 32 bits.
        let last_row = (n_rows as u64).saturating_mul(row_step as u64).saturating_add(first_row as u64);
        // Pairs of rows stay together.
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
