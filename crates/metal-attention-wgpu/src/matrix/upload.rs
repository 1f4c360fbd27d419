//! Uploading matrices: reads rows of tensors from the file, repacks them on the CPU or the GPU, and writes them to
//! their places in GPU memory, some MiB at a time.

use std::sync::Arc;
use std::thread;

use metal_attention_gguf::{Tensor, TensorType};

use super::layout::RowLayout;
use super::repack::{BitOrder, repack};
use crate::arena::{Arena, Slice};
use crate::device::WgpuDevice;
use crate::dispatch::BatchDims;
use crate::error::WgpuError;

/// Bytes of repacked rows in one chunk, the work of one thread at a time.
const CHUNK_BYTES: u64 = 4 << 20;

/// Most threads that read and repack rows.
const MAX_PACKERS: usize = 16;

/// Dimensions for dispatches that do not depend on a batch.
const ONE: BatchDims = BatchDims { n_tokens: 1, n_outputs: 1, n_runs: 1, n_splits: 1 };

/// Rows of one tensor type and length, in the order in which a matrix part stores them. The tensors of a group have
/// equally many rows, which are interleaved: row 0 of each, then row 1 of each. Groups follow one another.
#[derive(Debug)]
pub(super) struct RowSource {
    /// The tensors of each group, and the number of rows up to the group's end.
    groups: Vec<(Vec<Tensor>, usize)>,
}

impl RowSource {
    /// The rows of `groups`, each a list of tensors with equally many rows.
    pub(super) fn new(groups: impl IntoIterator<Item = Vec<Tensor>>) -> Self {
        let mut end = 0;
        let with_end = |group: Vec<Tensor>| {
            end += group.iter().map(Tensor::n_rows).sum::<usize>();
            (group, end)
        };
        Self { groups: groups.into_iter().map(with_end).collect() }
    }

    pub(super) fn n_rows(&self) -> usize {
        self.groups.last().map_or(0, |(_, end)| *end)
    }

    /// Row `i` in the file's format.
    fn row(&self, i: usize) -> &[u8] {
        let group = self.groups.partition_point(|(_, end)| *end <= i);
        let before = group.checked_sub(1).map_or(0, |before| self.groups[before].1);
        let (tensors, _) = &self.groups[group];
        tensors[(i - before) % tensors.len()].row((i - before) / tensors.len())
    }

    /// Bytes of a row in the file's format.
    fn row_bytes(&self) -> usize {
        self.groups.first().map_or(0, |(tensors, _)| tensors[0].row(0).len())
    }

    /// Notifies the operating system that the tensors' pages in the file's mapping are no longer needed.
    fn release_pages(&self) {
        self.groups.iter().flat_map(|(tensors, _)| tensors).for_each(Tensor::release_pages);
    }
}

/// Rows of a matrix part that have a place in GPU memory but are not written yet.
#[derive(Debug)]
pub(crate) struct PartUpload {
    /// Their layout in GPU memory.
    layout: RowLayout,
    /// Their place.
    to: Slice,
    /// Where they come from.
    source: Arc<RowSource>,
    /// Index of the first row in `source`.
    first: usize,
    /// Number of rows.
    n_rows: usize,
}

impl PartUpload {
    /// Rows `first..first + n_rows` of `source`, to be written to `to`.
    pub(super) fn new(layout: RowLayout, to: Slice, source: Arc<RowSource>, first: usize, n_rows: usize) -> Self {
        Self { layout, to, source, first, n_rows }
    }

    /// Repacks rows `first..first + n` on the CPU and writes them to each section.
    fn send(&self, gpu: &WgpuDevice, first: usize, n: usize) {
        let mut pieces: Vec<Vec<u32>> = self.layout.sections.iter().map(|&words| vec![0; words * n]).collect();
        for i in 0..n {
            self.layout.pack(self.source.row(self.first + first + i), i, &mut pieces);
        }
        let mut section = 0;
        for (&words, piece) in self.layout.sections.iter().zip(&pieces) {
            gpu.write_at(self.to.buffer(), self.to.offset() + 4 * (section + first * words) as u64, piece);
            section += self.n_rows * words;
        }
        gpu.watch().advance(self.layout.row_bytes() * n as u64);
    }

    /// Writes rows `first..first + n` in the file's format to `slot`, with the header that the repacking kernel needs.
    fn send_raw(&self, gpu: &WgpuDevice, order: &BitOrder, slot: &Slice, first: usize, n: usize) {
        let row_bytes = self.source.row_bytes();
        let header = order.header(&self.layout, row_bytes, self.n_rows, first, n);
        let bytes = BitOrder::source_bytes(row_bytes, n);
        gpu.write_with(slot, bytes, |to| {
            let header: &[u8] = bytemuck::cast_slice(&header);
            to.slice(..header.len()).copy_from_slice(header);
            for i in 0..n {
                let at = header.len() + i * row_bytes;
                to.slice(at..at + row_bytes).copy_from_slice(self.source.row(self.first + first + i));
            }
        });
        gpu.watch().advance(self.layout.row_bytes() * n as u64);
    }

    /// Writes the table that all rows share, behind the last section.
    fn send_table(&self, gpu: &WgpuDevice) {
        if !self.layout.table.is_empty() {
            let at = self.to.offset() + self.layout.row_bytes() * self.n_rows as u64;
            gpu.write_at(self.to.buffer(), at, &self.layout.table);
        }
    }

    /// The chunks of the part: (part, first row, number of rows).
    fn chunks(&self) -> impl Iterator<Item = (&Self, usize, usize)> {
        let rows = (CHUNK_BYTES / self.layout.row_bytes()).max(1) as usize;
        (0..self.n_rows).step_by(rows).map(move |first| (self, first, rows.min(self.n_rows - first)))
    }
}

/// The bit order of one tensor type, by which the GPU repacks its rows.
struct Repacker {
    /// The tensor type.
    ty: TensorType,
    /// Where each bit of a repacked row comes from.
    order: BitOrder,
    /// The bit order as the kernel reads it.
    table: wgpu::Buffer,
}

/// GPU memory for rows in the file's format, from which they are repacked.
struct RawRows {
    /// One for each tensor type that the GPU can repack.
    repackers: Vec<Repacker>,
    /// Space for one chunk each, of all chunks of a round.
    slots: Vec<Slice>,
}

impl RawRows {
    /// Memory for `n_slots` chunks of `parts`; none if no part is repacked on the GPU.
    fn new(gpu: &WgpuDevice, parts: &[PartUpload], n_slots: usize) -> Result<Self, WgpuError> {
        let mut repackers: Vec<Repacker> = Vec::new();
        let mut longest = 0;
        for part in parts {
            let ty = part.layout.ty();
            if !repackers.iter().any(|repacker| repacker.ty == ty) {
                let Some(order) = BitOrder::of(ty) else { continue };
                let table = gpu.upload("the order of bits", order.table())?;
                repackers.push(Repacker { ty, order, table });
            }
            for (_, _, n) in part.chunks() {
                longest = longest.max(BitOrder::source_bytes(part.source.row_bytes(), n));
            }
        }
        let n_slots = if longest == 0 { 0 } else { n_slots };
        let mut arena = Arena::new(gpu, "rows on their way", Arena::padded(longest) * n_slots as u64)?;
        let slots = (0..n_slots).map(|_| arena.take(gpu, "rows on their way", longest)).collect::<Result<_, _>>()?;
        Ok(Self { repackers, slots })
    }

    /// The bit order for `part`; `None`: it is repacked on the CPU.
    fn repacker(&self, part: &PartUpload) -> Option<&Repacker> {
        // A row longer than a chunk would need a larger slot than all others; such rows are rare.
        let suits = part.layout.row_bytes() <= CHUNK_BYTES;
        self.repackers.iter().find(|repacker| suits && repacker.ty == part.layout.ty())
    }
}

/// Writes all rows of `parts`. At any time two rounds are in flight, each of one chunk for every thread. Pages of the
/// file are released once read. `meanwhile` is called after each round with the fraction of rows that are written.
pub(crate) fn upload(gpu: &WgpuDevice, parts: &[PartUpload], meanwhile: &dyn Fn(f64)) -> Result<(), WgpuError> {
    // A software GPU runs on the same cores, where the CPU's code is faster.
    let on_gpu = !gpu.summary().is_software();
    upload_by(gpu, parts, on_gpu, meanwhile)
}

/// [`upload`] with repacking on the GPU, as far as it can, if `on_gpu`.
fn upload_by(gpu: &WgpuDevice, parts: &[PartUpload], on_gpu: bool, meanwhile: &dyn Fn(f64)) -> Result<(), WgpuError> {
    for part in parts {
        part.send_table(gpu);
    }
    let chunks: Vec<_> = parts.iter().flat_map(PartUpload::chunks).collect();
    let n_threads = thread::available_parallelism().map_or(1, usize::from).min(MAX_PACKERS);
    let raw = RawRows::new(gpu, if on_gpu { parts } else { &[] }, n_threads.min(chunks.len()))?;
    let (mut before, mut done) = (None, 0);
    for round in chunks.chunks(n_threads) {
        thread::scope(|scope| {
            let send = |i: usize| {
                let (part, first, n) = round[i];
                match raw.repacker(part) {
                    Some(repacker) => part.send_raw(gpu, &repacker.order, &raw.slots[i], first, n),
                    None => part.send(gpu, first, n),
                }
            };
            for i in 1..round.len() {
                // Without a thread this one does the work.
                if thread::Builder::new().spawn_scoped(scope, move || send(i)).is_err() {
                    send(i);
                }
            }
            send(0);
        });
        let mut encoder = gpu.encoder();
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        for (&(part, _, n), i) in round.iter().zip(0..) {
            if let Some(repacker) = raw.repacker(part) {
                let slot: &Slice = &raw.slots[i];
                let source = (slot, BitOrder::source_bytes(part.source.row_bytes(), n));
                let to = (&part.to, part.layout.row_bytes() * part.n_rows as u64);
                repack(gpu, &part.layout, n, source, &repacker.table, to)?.record(gpu, &mut pass, ONE);
            }
        }
        drop(pass);
        // wgpu keeps written data in staging memory until a submission is done: wait for the round before.
        let submission = gpu.submit(encoder);
        done += round.len();
        meanwhile(done as f64 / chunks.len() as f64);
        if let Some(before) = before.replace(submission) {
            gpu.wait(Some(before))?;
        }
        // Some pages of tensors that are in several parts are read from the file again.
        for (part, first, n) in round {
            if first + n == part.n_rows {
                part.source.release_pages();
            }
        }
    }
    before.map_or(Ok(()), |last| gpu.wait(Some(last)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::WgpuOptions;
    use metal_attention_gguf::{GgufFile, GgufWriter, Metadata, TensorDecl};

    /// Two tensors of random bytes.
    fn tensors(ty: TensorType, n_in: usize, n_rows: usize) -> Vec<Tensor> {
        let decls = ["a", "b"].map(|name| TensorDecl { name: name.into(), shape: vec![n_in, n_rows], ty });
        let mut writer = GgufWriter::new(Vec::new(), 3, &Metadata::new(), &decls).unwrap();
        let mut state = 0x9e37_79b9_u32;
        for _ in &decls {
            let bytes = (0..n_rows * n_in / ty.block_len() * ty.block_bytes()).map(|_| {
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                (state >> 11) as u8
            });
            writer.write(&bytes.collect::<Vec<_>>()).unwrap();
        }
        GgufFile::from_bytes(&writer.finish().unwrap()).unwrap().tensors().to_vec()
    }

    #[test]
    fn gpu_and_cpu_repack_rows_alike() {
        let gpu = match WgpuDevice::open(&WgpuOptions { checked: true, ..Default::default() }) {
            Ok(gpu) => gpu,
            Err(WgpuError::NoAdapter) if std::env::var_os("CI").is_none() => return,
            Err(e) => panic!("{e}"),
        };
        for &ty in TensorType::ALL {
            // Odd and even numbers of 16-bit scales, full and partly filled words, rows that end in the middle of a
            // word.
            let lens = if ty.block_len() == 1 { [8, 33, 1001] } else { [1, 2, 7].map(|n| n * ty.block_len()) };
            for n_in in lens {
                let layout = RowLayout::new(ty, n_in);
                let source = Arc::new(RowSource::new([tensors(ty, n_in, 9)]));
                // Two chunks of the source; the second begins in the middle of a tensor.
                let words = |on_gpu| {
                    let buffer = gpu.buffer("w", layout.part_bytes(14)).unwrap();
                    let rows = PartUpload::new(layout.clone(), buffer.clone().into(), Arc::clone(&source), 3, 14);
                    upload_by(&gpu, &[rows], on_gpu, &|_| ()).unwrap();
                    gpu.read::<u32>(&buffer, (layout.part_bytes(14) / 4) as usize).unwrap()
                };
                assert_eq!(words(true), words(false), "{ty}, rows of {n_in}");
            }
        }
        let unlike = TensorType::ALL.iter().filter(|&&ty| BitOrder::of(ty).is_none());
        assert_eq!(unlike.count(), 4);
    }

    #[test]
    fn groups_follow_each_other_with_their_tensors_interleaved() {
        let (a, b) = (tensors(TensorType::F32, 8, 2), tensors(TensorType::F32, 8, 3));
        let source = RowSource::new([a.clone(), vec![b[0].clone()], vec![b[1].clone()]]);
        let rows: Vec<_> = (0..source.n_rows()).map(|i| source.row(i)).collect();
        let want = [(&a[0], 0), (&a[1], 0), (&a[0], 1), (&a[1], 1), (&b[0], 0), (&b[0], 1), (&b[0], 2), (&b[1], 0)];
        assert_eq!(rows.len(), 10);
        assert!(rows.iter().zip(want).all(|(row, (tensor, i))| *row == tensor.row(i)));
    }
}
