//! The weight layout of the CPU kernels, and repacking to it when a model is loaded.
//!
//! A *panel* is 16 rows of a matrix, one for each lane of a vector. Of float types it contains column after column,
//! `[n_in, 16]`. Of quantised types it is a sequence of blocks along the columns. A panel's block contains the quantisation
//! blocks of all 16 rows, of 32 to 256 columns: first the codes, then the scales, interleaved so that one vector load reads the
//! same 4 columns of every row. A repacked matrix is as large as in the file, except for `IQ3_S` and `TQ1_0`, whose codes are
//! stored with more bits, and some types with a codebook: these are up to 22 % larger.
//!
//! Codes lie in bit planes, each for 32 columns. A vector of 64 bytes is 16 rows x 4 columns; *step* `s` (of 8) is the columns
//! `4s..4s + 4`:
//! - 4-bit plane, 4 vectors: low nibbles of vector `v` are step `v`, high ones step `v + 4`;
//! - 2-bit plane, 2 vectors: bits `2i` and `2i + 1` of vector `v` are step `4v + i`;
//! - 1-bit plane, 1 vector: bit `s` is step `s`;
//! - 8-bit codes, 8 vectors: step `s` is vector `s`.
//!
//! Whatever the type, the kernels compute with `w = scale * (code - OFFSET) + min`; how these are read from a block is in
//! [`formats`], [`codebooks`] and [`fp4`].

pub(crate) mod codebooks;
pub(crate) mod formats;
pub(crate) mod fp4;

use std::array::from_fn;
use std::ops::Range;

use metal_attention_gguf::blocks::{BlockIq3S, BlockTq1_0, CodebookGrid, cast};
use metal_attention_gguf::codes::{Codes, four_bits, nibble_halves, shifted, two_bits};
use metal_attention_gguf::{Tensor, TensorType};

use crate::memory::{PackedBytes, PackedMemory};
use crate::pool::ThreadPool;
use crate::shared::SharedMut;
use crate::simd::LANES;

/// Rows of a panel, one for each lane.
pub(crate) const PANEL: usize = LANES;

/// A repacked matrix, `[n_out, n_in]`.
#[derive(Debug)]
pub(crate) struct PackedMatrix {
    /// The tensor type in the file, which determines the layout of the blocks.
    pub(crate) ty: TensorType,
    /// Rows: elements of an output row.
    pub(crate) n_out: usize,
    /// Columns: elements of an input row.
    pub(crate) n_in: usize,
    /// The panels. Rows beyond `n_out` in the last panel are zeros.
    data: PackedBytes,
    /// Bytes of one panel.
    panel_bytes: usize,
}

impl PackedMatrix {
    /// Repacks `tensor` to `memory` on the threads of `pool`, and releases the file's pages. `None` when there is not enough
    /// memory. The result is incomplete where the work of `pool` is cancelled.
    pub(crate) fn pack(pool: &ThreadPool, memory: &mut PackedMemory, tensor: &Tensor) -> Option<Self> {
        let (ty, n_in, n_out) = (tensor.ty(), tensor.row_len(), tensor.n_rows());
        let layout = layout(ty);
        let n_panels = n_out.div_ceil(PANEL);
        let block_bytes = match &layout {
            PanelLayout::Floats(_) => ty.block_bytes(),
            PanelLayout::Blocks(layout) => layout.packed_bytes,
        };
        let panel_bytes = n_in / ty.block_len() * block_bytes * PANEL;
        let mut data = memory.allocate(n_panels.checked_mul(panel_bytes)?)?;
        let out = SharedMut::new(&mut data);
        let panels_per_task = (1 << 20) / panel_bytes.max(1) + 1;
        pool.for_each(n_panels.div_ceil(panels_per_task), &|task| {
            let panels = task * panels_per_task..n_panels.min((task + 1) * panels_per_task);
            pool.watch().advance((panels.len() * panel_bytes) as u64);
            for panel in panels {
                // SAFETY: each panel is packed by one task.
                let out = unsafe { out.slice(panel * panel_bytes, panel_bytes) };
                let rows = panel * PANEL..n_out.min((panel + 1) * PANEL);
                for (lane, row) in rows.map(|row| tensor.row(row)).enumerate() {
                    match &layout {
                        PanelLayout::Blocks(layout) => pack_row(layout, row, lane, out),
                        PanelLayout::Floats(FloatType::F32) => pack_floats::<4>(row, lane, out),
                        PanelLayout::Floats(FloatType::F16 | FloatType::BF16) => pack_floats::<2>(row, lane, out),
                    }
                }
            }
        });
        tensor.release_pages();
        Some(Self { ty, n_out, n_in, data, panel_bytes })
    }

    /// The bytes of some panels.
    pub(crate) fn panels(&self, panels: Range<usize>) -> &[u8] {
        &self.data[panels.start * self.panel_bytes..panels.end * self.panel_bytes]
    }

    /// Bytes of all panels.
    pub(crate) fn bytes(&self) -> usize {
        self.data.len()
    }
}

/// The element type of a float matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FloatType {
    /// 32 bits.
    F32,
    /// IEEE's 16 bits.
    F16,
    /// bfloat16.
    BF16,
}

impl FloatType {
    /// The element type of matrices of type `ty`; `None` for quantised types.
    pub(crate) fn of(ty: TensorType) -> Option<Self> {
        match layout(ty) {
            PanelLayout::Floats(ty) => Some(ty),
            PanelLayout::Blocks(_) => None,
        }
    }
}

/// The repacking of the rows of a tensor type to panels.
enum PanelLayout {
    /// Column after column.
    Floats(FloatType),
    /// Block after block.
    Blocks(BlockLayout),
}

/// The repacking of a quantised type's blocks to blocks of a panel.
struct BlockLayout {
    /// Columns of a block.
    block_len: usize,
    /// Bytes of one row's block in the file.
    row_bytes: usize,
    /// Bytes of one row's block in the panel.
    packed_bytes: usize,
    /// How a block is repacked.
    packing: Packing,
}

/// The repacking of one row's block.
enum Packing {
    /// To bit planes, then a tail.
    Planes {
        /// Bits of a code in the panel.
        bits: CodeBits,
        /// Returns the codes of columns `32 i..32 i + 32` of one row's block.
        codes: fn(&[u8], usize) -> Codes,
        /// The fields after the codes, such as scales, as (offset in the file's block, bytes, count). Each is interleaved by
        /// lane.
        tail: &'static [(usize, usize, usize)],
    },
    /// By a function of the type's own.
    Custom(PackBlock),
}

/// A function `(block, lane, out)` that repacks one row's block of the file to its lane of a panel's block.
pub(crate) type PackBlock = fn(&[u8], usize, &mut [u8]);

/// Bits of a code in bit planes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CodeBits {
    One = 1,
    Two = 2,
    Three = 3,
    Four = 4,
    Five = 5,
    Six = 6,
    Eight = 8,
}

/// The layout of a tensor type.
fn layout(ty: TensorType) -> PanelLayout {
    use CodeBits::{Eight, Five, Four, One, Six, Three, Two};
    type PlaneFields = (CodeBits, fn(&[u8], usize) -> Codes, &'static [(usize, usize, usize)]);
    let custom = |packed_bytes, pack| {
        let (block_len, row_bytes) = (ty.block_len(), ty.block_bytes());
        PanelLayout::Blocks(BlockLayout { block_len, row_bytes, packed_bytes, packing: Packing::Custom(pack) })
    };
    let (bits, codes, tail): PlaneFields = match ty {
        TensorType::Q4_0 | TensorType::IQ4_NL => (Four, |b, _| nibble_halves(&b[2..]), &[(0, 2, 1)]),
        TensorType::Q4_1 => (Four, |b, _| nibble_halves(&b[4..]), &[(0, 2, 1), (2, 2, 1)]),
        TensorType::Q5_0 => (Five, |b, _| q5(&b[2..]), &[(0, 2, 1)]),
        TensorType::Q5_1 => (Five, |b, _| q5(&b[4..]), &[(0, 2, 1), (2, 2, 1)]),
        // Signed codes become unsigned ones with an offset of 128.
        TensorType::Q8_0 => (Eight, |b, _| from_fn(|l| b[2 + l] ^ 0x80), &[(0, 2, 1)]),
        TensorType::Q2_K => (Two, |b, i| two_bits(&b[16..80], i), &[(0, 1, 16), (80, 2, 1), (82, 2, 1)]),
        TensorType::Q3_K => (Three, q3_k, &[(96, 1, 12), (108, 2, 1)]),
        TensorType::Q4_K => (Four, |b, i| four_bits(&b[16..144], i), &[(4, 1, 12), (0, 2, 1), (2, 2, 1)]),
        TensorType::Q5_K => (Five, q5_k, &[(4, 1, 12), (0, 2, 1), (2, 2, 1)]),
        TensorType::Q6_K => (Six, q6_k, &[(192, 1, 16), (208, 2, 1)]),
        TensorType::IQ4_XS => (Four, |b, i| nibble_halves(&b[8 + 16 * i..]), &[(2, 1, 6), (0, 2, 1)]),
        TensorType::F32 => return PanelLayout::Floats(FloatType::F32),
        TensorType::F16 => return PanelLayout::Floats(FloatType::F16),
        TensorType::BF16 => return PanelLayout::Floats(FloatType::BF16),
        TensorType::TQ2_0 => (Two, two_bits, &[(64, 2, 1)]),
        TensorType::TQ1_0 => (Two, |b, i| from_fn(|l| cast::<BlockTq1_0>(b)[0].code(32 * i + l)), &[(52, 2, 1)]),
        TensorType::Q2_0 => (Two, |b, i| from_fn(|l| b[2 + 8 * i + l / 4] >> (2 * (l % 4)) & 3), &[(0, 2, 1)]),
        TensorType::Q1_0 => (One, |b, i| from_fn(|l| b[2 + 4 * i + l / 8] >> (l % 8) & 1), &[(0, 2, 1)]),
        TensorType::IQ3_S => (Four, iq3_s, &[(106, 1, 4), (0, 2, 1)]),
        TensorType::MXFP4 => return custom(18, fp4::mxfp4),
        TensorType::NVFP4 => return custom(40, fp4::nvfp4),
        TensorType::IQ3_XXS => return custom(102, codebooks::iq3_xxs),
        TensorType::IQ2_S => return custom(82, codebooks::iq2_s),
        TensorType::IQ2_XS => return custom(78, codebooks::iq2_xs),
        TensorType::IQ2_XXS => return custom(70, codebooks::iq2_xxs),
        TensorType::IQ1_M => return custom(58, codebooks::iq1_m),
        TensorType::IQ1_S => return custom(50, codebooks::iq1_s),
        TensorType::I64 => unreachable!("weights are no whole numbers, which loading checks"),
    };
    let fields: usize = tail.iter().map(|(_, width, count)| width * count).sum();
    PanelLayout::Blocks(BlockLayout {
        block_len: ty.block_len(),
        row_bytes: ty.block_bytes(),
        packed_bytes: ty.block_len() / 8 * bits as usize + fields,
        packing: Packing::Planes { bits, codes, tail },
    })
}

/// Writes one row of floats of `N` bytes to its lane of a panel.
fn pack_floats<const N: usize>(row: &[u8], lane: usize, panel: &mut [u8]) {
    let (row, panel) = (row.as_chunks::<N>().0, panel.as_chunks_mut::<N>().0);
    for (column, x) in panel.chunks_exact_mut(PANEL).zip(row) {
        column[lane] = *x;
    }
}

/// Repacks one row of a quantised type to its lane of a panel.
fn pack_row(layout: &BlockLayout, row: &[u8], lane: usize, panel: &mut [u8]) {
    for (src, dst) in row.chunks_exact(layout.row_bytes).zip(panel.chunks_exact_mut(layout.packed_bytes * PANEL)) {
        let (bits, codes, tail) = match layout.packing {
            Packing::Planes { bits, codes, tail } => (bits, codes, tail),
            Packing::Custom(pack) => {
                pack(src, lane, dst);
                continue;
            }
        };
        let code_bytes = 4 * bits as usize * PANEL;
        let n_groups = layout.block_len / 32;
        let (code_part, tail_part) = dst.split_at_mut(n_groups * code_bytes);
        for (i, out) in code_part.chunks_exact_mut(code_bytes).enumerate() {
            pack_codes(bits, &codes(src, i), lane, out);
        }
        let mut at = 0;
        for &(offset, width, count) in tail {
            for field in src[offset..offset + width * count].chunks_exact(width) {
                tail_part[at + lane * width..][..width].copy_from_slice(field);
                at += width * PANEL;
            }
        }
    }
}

/// Writes the codes of 32 columns, of `bits` bits each, to their lane of the bit planes `out`, `[bits, 64]` bytes.
pub(crate) fn pack_codes(bits: CodeBits, codes: &Codes, lane: usize, out: &mut [u8]) {
    assert_eq!(out.len(), 64 * bits as usize, "the bit planes");
    // A word for each step: 4 columns.
    let mut steps = [0u32; 8];
    for (step, group) in steps.iter_mut().zip(codes.as_chunks::<4>().0) {
        *step = u32::from_le_bytes(*group);
    }
    let part = |mask: u32, shift: u32| steps.map(|step| step >> shift & (mask * 0x0101_0101));
    match bits {
        CodeBits::One => write_lane(out, lane, plane1(part(1, 0))),
        CodeBits::Two => write_lane(out, lane, plane2(part(3, 0))),
        CodeBits::Three => {
            let (low, high) = out.split_at_mut(128);
            write_lane(low, lane, plane2(part(3, 0)));
            write_lane(high, lane, plane1(part(1, 2)));
        }
        CodeBits::Four => write_lane(out, lane, plane4(part(15, 0))),
        CodeBits::Five => {
            let (low, high) = out.split_at_mut(256);
            write_lane(low, lane, plane4(part(15, 0)));
            write_lane(high, lane, plane1(part(1, 4)));
        }
        CodeBits::Six => {
            let (low, high) = out.split_at_mut(256);
            write_lane(low, lane, plane4(part(15, 0)));
            write_lane(high, lane, plane2(part(3, 4)));
        }
        CodeBits::Eight => write_lane(out, lane, steps),
    }
}

/// Writes word `v` to lane `lane` of vector `v` of `out`.
fn write_lane<const N: usize>(out: &mut [u8], lane: usize, words: [u32; N]) {
    for (vector, word) in out.chunks_exact_mut(64).zip(words) {
        vector[4 * lane..][..4].copy_from_slice(&word.to_le_bytes());
    }
}

/// The words of a 4-bit plane, from the codes of 8 steps.
fn plane4(s: [u32; 8]) -> [u32; 4] {
    from_fn(|v| s[v] | s[v + 4] << 4)
}

/// The words of a 2-bit plane, from the codes of 8 steps.
fn plane2(s: [u32; 8]) -> [u32; 2] {
    from_fn(|v| s[4 * v] | s[4 * v + 1] << 2 | s[4 * v + 2] << 4 | s[4 * v + 3] << 6)
}

/// The word of a 1-bit plane, from the codes of 8 steps.
fn plane1(s: [u32; 8]) -> [u32; 1] {
    [(0..8).fold(0, |word, i| word | s[i] << i)]
}

/// The codes of a `Q5_0` or `Q5_1` block from its byte `b` on: 4 bytes with the fifth bits, then nibbles.
fn q5(b: &[u8]) -> Codes {
    let high = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    let mut codes = nibble_halves(&b[4..]);
    for (column, code) in codes.iter_mut().enumerate() {
        *code |= ((high >> column & 1) as u8) << 4;
    }
    codes
}

/// `low | high << shift`, of each code.
fn joined(mut low: Codes, high: Codes, shift: usize) -> Codes {
    for (low, high) in low.iter_mut().zip(high) {
        *low |= high << shift;
    }
    low
}

/// The codes of columns `32 i..32 i + 32` of a `Q3_K` block.
fn q3_k(b: &[u8], i: usize) -> Codes {
    joined(two_bits(&b[32..96], i), shifted(&b[..32], i, 1), 2)
}

/// The codes of columns `32 i..32 i + 32` of a `Q5_K` block.
fn q5_k(b: &[u8], i: usize) -> Codes {
    joined(four_bits(&b[48..176], i), shifted(&b[16..48], i, 1), 4)
}

/// The codes of columns `32 i..32 i + 32` of a `Q6_K` block, which has for each 128 columns 64 bytes with the lower 4 bits
/// (columns 0..64 in the low nibbles, 64..128 in the high ones) and 32 bytes with the upper 2 bits.
fn q6_k(b: &[u8], i: usize) -> Codes {
    let (half, quarter) = (i / 4, i % 4);
    let low = shifted(&b[64 * half + 32 * (quarter % 2)..], 4 * (quarter / 2), 15);
    joined(low, shifted(&b[128 + 32 * half..], 2 * quarter, 3), 4)
}

/// The values of columns `32 i..32 i + 32` of an `IQ3_S` block: odd numbers from -15 to 15 as codes 0 to 15.
fn iq3_s(b: &[u8], i: usize) -> Codes {
    let block = &cast::<BlockIq3S>(b)[0];
    from_fn(|l| {
        let at = 32 * i + l;
        let size = CodebookGrid::IQ3_S.value(block.code(at / 4), at % 4);
        let value = if block.signs[at / 8] >> (at % 8) & 1 == 1 { -size } else { size };
        i8::midpoint(value, 15) as u8
    })
}
