//! Matrices of a model in GPU memory, repacked for the kernels.

mod experts;
mod layout;
mod types;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use metal_attention_gguf::{Tensor, TensorType};

use crate::arena::{Arena, Slice};
use crate::device::GpuDevice;
use crate::error::GpuError;
use layout::RowLayout;
pub(crate) use types::{type_info, type_name};

/// A matrix `W`, `[n_out, n_in]`, in one or more parts.
#[derive(Debug, Clone)]
pub struct GpuMatrix {
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
        GpuMatrix::bytes_of(self.ty, n_in, self.n_rows)
    }
}

/// Bytes of packed rows that one thread makes before it sends them off.
const CHUNK_BYTES: u64 = 4 << 20;

impl GpuMatrix {
    /// Uploads `tensors`, one below the other, into `arena`. Neighbours of one type share a part, as far as one binding of
    /// the device and the arena allow.
    pub fn concat(gpu: &GpuDevice, what: &str, tensors: &[&Tensor], arena: &mut Arena) -> Result<Self, GpuError> {
        let Some(first) = tensors.first() else {
            return Err(mismatch(what, "it has no tensors".to_owned()));
        };
        let n_in = first.row_len();
        let mut upload = Upload { gpu, what, n_in, arena, parts: Vec::new() };
        let mut n_out = 0;
        for run in tensors.chunk_by(|a, b| a.ty() == b.ty()) {
            let mut rows = 0;
            for tensor in run {
                check_row_len(what, first, tensor)?;
                rows += tensor.n_rows();
            }
            upload.rows(run[0].ty(), n_out, 1, rows, &|mut row| {
                for tensor in run {
                    if row < tensor.n_rows() {
                        return tensor.row(row);
                    }
                    row -= tensor.n_rows();
                }
                unreachable!("rows of the run are counted above")
            })?;
            n_out += rows;
        }
        for tensor in tensors {
            tensor.release_pages();
        }
        Ok(Self { n_in, n_out, parts: upload.parts })
    }

    /// Bytes that rows of `n_in` elements of `ty` take on the GPU.
    pub fn bytes_of(ty: TensorType, n_in: usize, n_rows: usize) -> u64 {
        RowLayout::new(ty, n_in).part_bytes(n_rows as u64)
    }

    /// As [`concat`](Self::concat), the matrix whose row `2 i` is row `i` of `gate` and whose row `2 i + 1` is row `i` of
    /// `up`.
    pub fn interleave(
        gpu: &GpuDevice,
        what: &str,
        gate: &Tensor,
        up: &Tensor,
        arena: &mut Arena,
    ) -> Result<Self, GpuError> {
        check_row_len(what, gate, up)?;
        let n = gate.n_rows();
        if n != up.n_rows() {
            let why = format!("{} has {n} rows and {} has {}", gate.name(), up.name(), up.n_rows());
            return Err(mismatch(what, why));
        }
        let n_in = gate.row_len();
        let mut upload = Upload { gpu, what, n_in, arena, parts: Vec::new() };
        if gate.ty() == up.ty() {
            upload.rows(gate.ty(), 0, 1, 2 * n, &|row| {
                if row.is_multiple_of(2) { gate.row(row / 2) } else { up.row(row / 2) }
            })?;
        } else {
            upload.rows(gate.ty(), 0, 2, n, &|row| gate.row(row))?;
            upload.rows(up.ty(), 1, 2, n, &|row| up.row(row))?;
        }
        gate.release_pages();
        up.release_pages();
        Ok(Self { n_in, n_out: 2 * n, parts: upload.parts })
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

fn mismatch(what: &str, why: String) -> GpuError {
    GpuError::Mismatch { what: what.to_owned(), why }
}

fn check_row_len(what: &str, a: &Tensor, b: &Tensor) -> Result<(), GpuError> {
    if a.row_len() == b.row_len() {
        return Ok(());
    }
    let why =
        format!("rows of {} have {} elements and rows of {} have {}", a.name(), a.row_len(), b.name(), b.row_len());
    Err(mismatch(what, why))
}

/// A matrix on its way to the GPU.
struct Upload<'a> {
    gpu: &'a GpuDevice,
    what: &'a str,
    n_in: usize,
    arena: &'a mut Arena,
    parts: Vec<MatrixPart>,
}

impl Upload<'_> {
    /// Adds `n_rows` rows of one type, `row(i)` being the `i`-th as the file has it, in as few parts as can be.
    fn rows<'t>(
        &mut self,
        ty: TensorType,
        first_row: usize,
        row_step: usize,
        n_rows: usize,
        row: &(dyn Fn(usize) -> &'t [u8] + Sync),
    ) -> Result<(), GpuError> {
        let layout = RowLayout::new(ty, self.n_in);
        // Buffers are whole vectors of four words.
        let max = self.arena.max_slice(self.gpu) & !15;
        // Kernels number rows with 32 bits.
        let last_row = (n_rows as u64).saturating_mul(row_step as u64).saturating_add(first_row as u64);
        // Pairs of rows stay together.
        let max_rows = (max.saturating_sub(layout.table_bytes()) / layout.row_bytes()) & !1;
        if max_rows == 0 || last_row > u64::from(u32::MAX) {
            let bytes = layout.part_bytes(n_rows as u64);
            return Err(GpuError::TooLarge { what: self.what.to_owned(), bytes, max });
        }
        let mut done = 0;
        while done < n_rows {
            let n = (n_rows - done).min(max_rows as usize);
            let buffer = self.arena.take(self.gpu, self.what, layout.part_bytes(n as u64))?;
            self.fill(&layout, &buffer, n, &|i| row(done + i))?;
            self.parts.push(MatrixPart { ty, first_row: first_row + done * row_step, row_step, n_rows: n, buffer });
            done += n;
        }
        Ok(())
    }

    /// Packs `n_rows` rows and the type's table into `buffer`: every thread a few MiB at a time, which are on the GPU before the next.
    fn fill<'t>(
        &self,
        layout: &RowLayout,
        buffer: &Slice,
        n_rows: usize,
        row: &(dyn Fn(usize) -> &'t [u8] + Sync),
    ) -> Result<(), GpuError> {
        if !layout.table.is_empty() {
            let at = buffer.offset() + layout.row_bytes() * n_rows as u64;
            self.gpu.write_at(buffer.buffer(), at, &layout.table);
        }
        let chunk_rows = (CHUNK_BYTES / layout.row_bytes()).max(1) as usize;
        let n_chunks = n_rows.div_ceil(chunk_rows);
        let n_threads = thread::available_parallelism().map_or(1, usize::from).min(16);
        let next = AtomicUsize::new(0);
        while next.load(Ordering::Relaxed) < n_chunks {
            let pack_next = || {
                let chunk = next.fetch_add(1, Ordering::Relaxed);
                if chunk < n_chunks {
                    let first = chunk * chunk_rows;
                    let n = chunk_rows.min(n_rows - first);
                    self.send_chunk(layout, buffer, n_rows, first, n, row);
                    self.gpu.watch().advance(layout.row_bytes() * n as u64);
                }
            };
            thread::scope(|scope| {
                for _ in 1..n_threads.min(n_chunks) {
                    scope.spawn(pack_next);
                }
                pack_next();
            });
            // What was written so far waits in staging memory until a submission has run.
            let submission = self.gpu.submit(self.gpu.encoder());
            self.gpu.wait(Some(submission))?;
        }
        Ok(())
    }

    /// Packs rows `first..first + n` of a part of `n_rows` and writes their piece of each section.
    fn send_chunk<'t>(
        &self,
        layout: &RowLayout,
        buffer: &Slice,
        n_rows: usize,
        first: usize,
        n: usize,
        row: &(dyn Fn(usize) -> &'t [u8] + Sync),
    ) {
        let mut pieces: Vec<Vec<u32>> = layout.sections.iter().map(|&words| vec![0; words * n]).collect();
        for i in 0..n {
            layout.pack(row(first + i), i, &mut pieces);
        }
        let mut section = 0;
        for (&words, piece) in layout.sections.iter().zip(&pieces) {
            self.gpu.write_at(buffer.buffer(), buffer.offset() + 4 * (section + first * words) as u64, piece);
            section += n_rows * words;
        }
    }
}
