//! Repacking rows on the GPU, bit by bit.
//!
//! For most tensor types a repacked row has the bits of the file's row in another order, some of them inverted. The
//! order is found by repacking blocks with a single bit set on the CPU, so that the kernel makes exactly the words that
//! [`RowLayout::pack`] does. Types whose codes are looked up or computed are repacked on the CPU.

use metal_attention_gguf::TensorType;

use super::layout::RowLayout;
use crate::arena::{Bind, Slice};
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Threads of a workgroup.
const THREADS: usize = 256;

/// Words before the rows in the kernel's input.
const HEADER_WORDS: usize = 32;

/// Words of [`BitOrder::table`] for each repacked word: the word to XOR with, then the source positions of its bits,
/// two to a word.
const ENTRY_WORDS: usize = 17;

/// The source position of a bit that is constant.
const NOWHERE: u32 = 0xffff;

/// Whether a repacked row of `ty` has the bits of the file's row in another order.
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
        TensorType::IQ3_S | TensorType::MXFP4 | TensorType::NVFP4 | TensorType::TQ1_0 | TensorType::I64 => false,
    }
}

/// Where each bit of a repacked row of one tensor type comes from.
#[derive(Debug)]
pub(super) struct BitOrder {
    /// Bits of a stretch: a whole number of blocks, after which the order repeats.
    stretch_bits: usize,
    /// Words of a stretch in each section of the repacked row.
    section_words: Vec<usize>,
    /// [`ENTRY_WORDS`] for each word of a stretch, section by section.
    table: Vec<u32>,
}

impl BitOrder {
    /// The order of `ty`; `None` if its rows cannot be repacked by reordering bits.
    pub(super) fn of(ty: TensorType) -> Option<Self> {
        if !reorders_bits(ty) {
            return None;
        }
        // Two 16-bit scales share a word, so two blocks; types without blocks are laid out in units of eight elements.
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

    /// The table as the kernel reads it.
    pub(super) fn table(&self) -> &[u32] {
        &self.table
    }

    /// Bytes of the kernel's input for `n` rows of `row_bytes` in the file: the header and the rows.
    pub(super) fn source_bytes(row_bytes: usize, n: usize) -> u64 {
        (4 * HEADER_WORDS + row_bytes * n).next_multiple_of(4) as u64
    }

    /// The kernel's header for rows `first..first + n` of a part of `n_rows` rows, `row_bytes` each in the file.
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

/// The kernel that repacks the `n` rows in `source` (a header and rows in the file's format) into their places in `to`.
/// Both come with the bytes that the kernel accesses.
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
