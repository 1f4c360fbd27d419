//! Rows repacked on the GPU, bit by bit.
//!
//! In most types a packed row has the bits of the file's in another order, some of them turned over. Where each comes from is
//! found by packing blocks with a single bit set, so that the GPU makes the very words that [`RowLayout::pack`] does.

use metal_attention_gguf::TensorType;

use super::layout::RowLayout;
use crate::arena::{Bind, Slice};
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Threads of a workgroup.
const THREADS: usize = 256;

/// Numbers before the rows.
const HEADER_WORDS: usize = 32;

/// Words of [`BitOrder::table`] for a word: what is added, and places of its bits, two a word.
const ENTRY_WORDS: usize = 17;

/// Stands for a bit that comes from nowhere.
const NOWHERE: u32 = 0xffff;

/// Whether a packed row of `ty` has the bits of the file's row in another order. In the other types codes are looked up or
/// reckoned.
fn reorders_bits(ty: TensorType) -> bool {
    match ty {
        TensorType::F32
        | TensorType::F16
        | TensorType::BF16
        | TensorType::Q4_0
        | TensorType::Q4_1
        | TensorType::Q5_0
        | TensorType::Q5_1
        | TensorType::Q8_0
        | TensorType::Q2_K
        | TensorType::Q3_K
        | TensorType::Q4_K
        | TensorType::Q5_K
        | TensorType::Q6_K
        | TensorType::IQ4_NL
        | TensorType::IQ4_XS
        | TensorType::IQ3_XXS
        | TensorType::IQ2_S
        | TensorType::IQ2_XS
        | TensorType::IQ2_XXS
        | TensorType::IQ1_M
        | TensorType::IQ1_S
        | TensorType::TQ2_0
        | TensorType::Q2_0
        | TensorType::Q1_0 => true,
        TensorType::IQ3_S | TensorType::MXFP4 | TensorType::NVFP4 | TensorType::TQ1_0 => false,
    }
}

/// Where the bits of packed rows of a type come from.
#[derive(Debug)]
pub(super) struct BitOrder {
    /// Bits of a stretch of blocks, after which the order begins anew.
    stretch_bits: usize,
    /// Words of a stretch in each section.
    section_words: Vec<usize>,
    /// For each word of a stretch, section by section, [`ENTRY_WORDS`].
    table: Vec<u32>,
}

impl BitOrder {
    /// The order of `ty`; `None` where a packed row is more than that.
    pub(super) fn of(ty: TensorType) -> Option<Self> {
        if !reorders_bits(ty) {
            return None;
        }
        // Halves go two to a word; what has no blocks goes in units of eight.
        let blocks = if ty.block_len() == 1 { 8 } else { 2 };
        let layout = RowLayout::new(ty, blocks * ty.block_len());
        let pack = |row: &[u8]| -> Vec<u32> {
            let mut sections: Vec<_> = layout.sections.iter().map(|&words| vec![0; words]).collect();
            layout.pack(row, 0, &mut sections);
            sections.concat()
        };
        let mut row = vec![0; blocks * ty.block_bytes()];
        let zeros = pack(&row);
        let mut table: Vec<u32> = zeros
            .iter()
            .flat_map(|&word| [word].into_iter().chain([NOWHERE | NOWHERE << 16; ENTRY_WORDS - 1]))
            .collect();
        for place in 0..8 * row.len() {
            row[place / 8] = 1 << (place % 8);
            for (i, (word, zero)) in pack(&row).iter().zip(&zeros).enumerate() {
                let changed = word ^ zero;
                if changed != 0 {
                    let bit = changed.trailing_zeros() as usize;
                    let pair = &mut table[i * ENTRY_WORDS + 1 + bit / 2];
                    let shift = 16 * (bit % 2);
                    *pair = *pair & !(NOWHERE << shift) | (place as u32) << shift;
                }
            }
            row[place / 8] = 0;
        }
        Some(Self { stretch_bits: 8 * row.len(), section_words: layout.sections.clone(), table })
    }

    /// The table for the GPU.
    pub(super) fn table(&self) -> &[u32] {
        &self.table
    }

    /// Bytes of [`fill`](Self::fill) for `n` rows of `row_bytes`.
    pub(super) fn source_bytes(row_bytes: usize, n: usize) -> u64 {
        (4 * HEADER_WORDS + row_bytes * n).next_multiple_of(4) as u64
    }

    /// What comes before rows `first..first + n` of a part of `n_rows`, each of `row_bytes` in the file.
    pub(super) fn header(
        &self,
        layout: &RowLayout,
        row_bytes: usize,
        n_rows: usize,
        first: usize,
        n: usize,
    ) -> [u32; HEADER_WORDS] {
        let mut header = [0; HEADER_WORDS];
        let row_words: usize = layout.sections.iter().sum();
        let numbers = [row_bytes, n_rows, first, n, row_words, self.stretch_bits, layout.sections.len()];
        let mut entry = 0;
        let sections =
            layout.sections.iter().zip(&self.section_words).enumerate().flat_map(|(i, (&words, &stretch))| {
                let planes = layout.planes(i);
                let begin = entry;
                entry += stretch;
                [words, words / planes, stretch / planes, begin]
            });
        for (to, number) in header.iter_mut().zip(numbers.into_iter().chain(sections)) {
            *to = number as u32;
        }
        header
    }
}

/// Repacks the `n` rows of `source` into their places in `to`.
pub(super) fn repack(
    gpu: &WgpuDevice,
    layout: &RowLayout,
    n: usize,
    source: (&Slice, u64),
    table: &wgpu::Buffer,
    to: (&Slice, u64),
) -> Result<Dispatch, WgpuError> {
    let words = n * layout.row_bytes() as usize / 4;
    let range = |bytes: u64| AccessRange::Fixed(bytes);
    let buffers: [(&dyn Bind, AccessRange); 3] =
        [(source.0, range(source.1)), (table, range(table.size())), (to.0, range(to.1))];
    let grid = [GridExtent::Fixed(words.div_ceil(THREADS) as u32), GridExtent::Fixed(1), GridExtent::Fixed(1)];
    Dispatch::new(gpu, &key(), &buffers, grid)
}

fn key() -> PipelineKey {
    let constants = [("threads", THREADS.into()), ("header", HEADER_WORDS.into()), ("entry", ENTRY_WORDS.into())];
    PipelineKey::new("repack", constants)
}

/// The kernel, to read.
pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![key()]
}
