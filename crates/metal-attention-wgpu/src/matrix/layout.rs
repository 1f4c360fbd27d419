//! The weight layout: how the rows of each tensor type are stored in GPU memory.
//!
//! A row is divided into *units* of 8 elements, which one lane of a kernel reads at a time. A matrix part consists of
//! *sections*, one after the other, each `[n_rows, words per row]`. Consecutive lanes read consecutive units, and so
//! consecutive words of every section. Codes are stored in element order, in one of these forms:
//! - 4-bit plane: one word for each unit, element `k` at bit `4 k`;
//! - 2-bit plane: one word for two units, element `k` of unit `u` at bit `8 (k / 2) + 4 (u % 2) + 2 (k % 2)`;
//! - 1-bit plane: one word for four units, element `k` of unit `u` at bit `8 (k / 2) + 2 (u % 4) + k % 2`;
//! - bytes: two words for each unit, one of its even elements and one of its odd elements; the words of even elements
//!   of all units of the row come before those of odd elements;
//! - 16-bit and 32-bit floats: 4 or 8 words for each unit; word `j` of all units of the row comes before word `j + 1`.
//!
//! With this order one shift and one mask turn four codes, of the even or of the odd elements, into the bytes of a
//! word.
//!
//! Scales follow in sections of their own, as in the file, except that 6-bit scales are widened to bytes; two 16-bit
//! scales share a word. Signed bytes are stored with their top bit inverted, that is as unsigned numbers plus 128.
//! 4-bit floats are renumbered. The codebooks of `IQ` types lie behind the rows, except that `IQ3_S` is decoded when it
//! is loaded, as is `TQ1_0`. No information is lost. A part is at most 5 % larger than its rows in the file, 22 % for
//! these two and 7 % for `IQ1_M`; short rows grow more, as each is padded to whole units and words.
//!
//! `shaders/types/` has one file for each type that reads its layout.

use std::array::from_fn;

use metal_attention_gguf::TensorType;
use metal_attention_gguf::blocks::{
    BlockIq1M, BlockIq3S, BlockIq4Xs, BlockQ3K, BlockTq1_0, CodebookGrid, cast, scale_min_k4,
};
use metal_attention_gguf::codes::{Codes, four_bits, nibble_halves, shifted, two_bits};

/// Elements of a unit.
const UNIT: usize = 8;

/// The layout of rows of one tensor type and length.
#[derive(Debug, Clone)]
pub(super) struct RowLayout {
    /// The tensor type.
    ty: TensorType,
    /// Elements of a row.
    n_in: usize,
    /// Words of a row in each section.
    pub(super) sections: Vec<usize>,
    /// The codebook that all rows share, behind the last section; empty for most types.
    pub(super) table: Vec<u32>,
}

impl RowLayout {
    /// The layout of rows of `n_in` elements of `ty`, a whole number of blocks.
    pub(super) fn new(ty: TensorType, n_in: usize) -> Self {
        let units = n_in.div_ceil(UNIT);
        let blocks = n_in / ty.block_len();
        let half_pairs = blocks.div_ceil(2);
        let sections = match ty {
            TensorType::F32 => vec![8 * units],
            TensorType::F16 | TensorType::BF16 => vec![4 * units],
            TensorType::Q4_0 | TensorType::IQ4_NL => vec![units, half_pairs],
            TensorType::Q4_1 | TensorType::NVFP4 => vec![units, blocks],
            TensorType::Q5_0 => vec![units, units / 4, half_pairs],
            TensorType::Q5_1 => vec![units, units / 4, blocks],
            TensorType::Q8_0 => vec![2 * units, half_pairs],
            TensorType::Q2_K => vec![units / 2, 4 * blocks, blocks],
            TensorType::Q3_K => vec![units / 2, units / 4, 4 * blocks, half_pairs],
            TensorType::Q4_K => vec![units, 4 * blocks, blocks],
            TensorType::Q5_K => vec![units, units / 4, 4 * blocks, blocks],
            TensorType::Q6_K => vec![units, units / 2, 4 * blocks, half_pairs],
            TensorType::IQ4_XS => vec![units, 2 * blocks, half_pairs],
            TensorType::IQ3_S => vec![units, blocks, half_pairs],
            TensorType::IQ3_XXS => vec![units / 2, units / 4, half_pairs],
            TensorType::IQ2_S => vec![units / 4, units / 4, 2 * blocks, 2 * blocks, half_pairs],
            TensorType::IQ2_XS => vec![units / 2, 2 * blocks, half_pairs],
            TensorType::IQ2_XXS => vec![units / 4, units / 4, half_pairs],
            TensorType::IQ1_M => vec![units / 4, units / 8, 2 * blocks, half_pairs],
            TensorType::IQ1_S => vec![units / 4, units / 8, half_pairs],
            TensorType::MXFP4 => vec![units, blocks.div_ceil(4)],
            TensorType::TQ2_0 | TensorType::TQ1_0 | TensorType::Q2_0 => vec![units / 2, half_pairs],
            TensorType::Q1_0 => vec![units / 4, half_pairs],
            TensorType::I64 => unreachable!("weights are no whole numbers, which loading checks"),
        };
        Self { ty, n_in, sections, table: table(ty) }
    }

    /// The tensor type.
    pub(super) fn ty(&self) -> TensorType {
        self.ty
    }

    /// Words of each unit in a section that are stored apart, in planes over all units of the row, instead of side by
    /// side.
    pub(super) fn planes(&self, section: usize) -> usize {
        if self.ty == TensorType::F32 {
            8
        } else if matches!(self.ty, TensorType::F16 | TensorType::BF16) {
            4
        } else if self.ty == TensorType::Q8_0 && section == 0 {
            2
        } else {
            1
        }
    }

    /// Bytes of a row in all sections.
    pub(super) fn row_bytes(&self) -> u64 {
        4 * self.sections.iter().sum::<usize>() as u64
    }

    /// Bytes of the codebook.
    pub(super) fn table_bytes(&self) -> u64 {
        4 * self.table.len() as u64
    }

    /// Bytes of a part of `n_rows` rows, codebook included.
    pub(super) fn part_bytes(&self, n_rows: u64) -> u64 {
        self.row_bytes().saturating_mul(n_rows).saturating_add(self.table_bytes())
    }

    /// Repacks `row`, in the file's format, into row `to` of `sections`, which are zero there.
    pub(super) fn pack(&self, row: &[u8], to: usize, sections: &mut [Vec<u32>]) {
        let mut out = sections.iter_mut().zip(&self.sections).map(|(words, &n)| &mut words[to * n..][..n]);
        let mut next = || out.next().expect("as many sections as the layout has");
        match self.ty {
            TensorType::F32 => pack_words(row, self.n_in, 8, next()),
            TensorType::F16 | TensorType::BF16 => pack_words(row, self.n_in, 4, next()),
            TensorType::Q4_0 | TensorType::IQ4_NL => {
                self.plane::<4>(row, |b, _| nibble_halves(&b[2..]), next());
                self.halves(row, 0, next());
            }
            TensorType::Q4_1 => {
                self.plane::<4>(row, |b, _| nibble_halves(&b[4..]), next());
                self.words(row, 0, next());
            }
            TensorType::Q5_0 => {
                self.plane::<4>(row, |b, _| nibble_halves(&b[6..]), next());
                self.plane::<1>(row, |b, _| one_bits(&b[2..6]), next());
                self.halves(row, 0, next());
            }
            TensorType::Q5_1 => {
                self.plane::<4>(row, |b, _| nibble_halves(&b[8..]), next());
                self.plane::<1>(row, |b, _| one_bits(&b[4..8]), next());
                self.words(row, 0, next());
            }
            TensorType::Q8_0 => {
                let codes = next();
                let units = self.n_in / UNIT;
                for (i, block) in row.chunks_exact(34).enumerate() {
                    for (j, bytes) in block[2..].as_chunks::<UNIT>().0.iter().enumerate() {
                        for odd in [0, 1] {
                            let word = u32::from_le_bytes(from_fn(|k| bytes[2 * k + odd]));
                            codes[odd * units + 4 * i + j] = word ^ 0x8080_8080;
                        }
                    }
                }
                self.halves(row, 0, next());
            }
            TensorType::Q2_K => {
                self.plane::<2>(row, |b, i| two_bits(&b[16..80], i), next());
                self.bytes(row, next(), |b| from_fn::<_, 16, _>(|g| b[g]));
                self.words(row, 80, next());
            }
            TensorType::Q3_K => {
                self.plane::<2>(row, |b, i| two_bits(&b[32..96], i), next());
                self.plane::<1>(row, |b, i| shifted(&b[..32], i, 1), next());
                self.bytes(row, next(), |b| {
                    let block = &cast::<BlockQ3K>(b)[0];
                    from_fn::<_, 16, _>(|g| (block.scale(g) + 32) as u8)
                });
                self.halves(row, 108, next());
            }
            TensorType::Q4_K => {
                self.plane::<4>(row, |b, i| four_bits(&b[16..144], i), next());
                self.bytes(row, next(), scales_and_mins);
                self.words(row, 0, next());
            }
            TensorType::Q5_K => {
                self.plane::<4>(row, |b, i| four_bits(&b[48..176], i), next());
                self.plane::<1>(row, |b, i| shifted(&b[16..48], i, 1), next());
                self.bytes(row, next(), scales_and_mins);
                self.words(row, 0, next());
            }
            TensorType::Q6_K => {
                // For each 128 elements 64 bytes of low nibbles (elements 0..64 low, 64..128 high) and 32 bytes of
                // upper bits.
                let low = |b: &[u8], i: usize| shifted(&b[64 * (i / 4) + 32 * (i % 2)..], 4 * (i % 4 / 2), 15);
                self.plane::<4>(row, low, next());
                self.plane::<2>(row, |b, i| two_bits(&b[128..192], i), next());
                self.bytes(row, next(), |b| from_fn::<_, 16, _>(|g| b[192 + g] ^ 0x80));
                self.halves(row, 208, next());
            }
            TensorType::IQ4_XS => {
                self.plane::<4>(row, |b, i| nibble_halves(&b[8 + 16 * i..]), next());
                self.bytes(row, next(), |b| {
                    let block = &cast::<BlockIq4Xs>(b)[0];
                    from_fn::<_, 8, _>(|g| (block.scale(g) + 32) as u8)
                });
                self.halves(row, 0, next());
            }
            TensorType::IQ3_S => {
                self.plane::<4>(row, |b, i| iq3_s(&cast::<BlockIq3S>(b)[0], i), next());
                self.words(row, 106, next());
                self.halves(row, 0, next());
            }
            TensorType::IQ3_XXS => {
                self.bytes(row, next(), |b| from_fn::<_, 64, _>(|i| b[2 + i]));
                self.bytes(row, next(), |b| from_fn::<_, 32, _>(|i| b[66 + i]));
                self.halves(row, 0, next());
            }
            TensorType::IQ2_S => {
                self.bytes(row, next(), |b| from_fn::<_, 32, _>(|i| b[2 + i]));
                self.plane::<1>(row, |b, i| one_bits(&b[34 + 4 * i..]), next());
                self.bytes(row, next(), |b| from_fn::<_, 8, _>(|i| b[66 + i]));
                self.bytes(row, next(), |b| from_fn::<_, 8, _>(|i| b[74 + i]));
                self.halves(row, 0, next());
            }
            TensorType::IQ2_XS => {
                self.bytes(row, next(), |b| from_fn::<_, 64, _>(|i| b[2 + i]));
                self.bytes(row, next(), |b| from_fn::<_, 8, _>(|i| b[66 + i]));
                self.halves(row, 0, next());
            }
            TensorType::IQ2_XXS => {
                self.bytes(row, next(), |b| from_fn::<_, 32, _>(|i| b[2 + 8 * (i / 4) + i % 4]));
                self.bytes(row, next(), |b| from_fn::<_, 32, _>(|i| b[6 + 8 * (i / 4) + i % 4]));
                self.halves(row, 0, next());
            }
            TensorType::IQ1_M => {
                self.bytes(row, next(), |b| from_fn::<_, 32, _>(|i| b[i]));
                self.bytes(row, next(), |b| from_fn::<_, 16, _>(|i| b[32 + i]));
                self.bytes(row, next(), |b| from_fn::<_, 8, _>(|i| b[48 + i]));
                self.halves_of(row, |b| cast::<BlockIq1M>(b)[0].d().0, next());
            }
            TensorType::IQ1_S => {
                self.bytes(row, next(), |b| from_fn::<_, 32, _>(|i| b[2 + i]));
                self.bytes(row, next(), |b| from_fn::<_, 16, _>(|i| b[34 + i]));
                self.halves(row, 0, next());
            }
            TensorType::MXFP4 => {
                self.plane::<4>(row, |b, _| fp4(nibble_halves(&b[1..])), next());
                let scales = next();
                for (i, block) in row.chunks_exact(17).enumerate() {
                    scales[i / 4] |= u32::from(block[0]) << (8 * (i % 4));
                }
            }
            TensorType::NVFP4 => {
                self.plane::<4>(row, |b, i| nvfp4(&b[4 + 16 * i..]), next());
                self.words(row, 0, next());
            }
            TensorType::TQ2_0 => {
                self.plane::<2>(row, two_bits, next());
                self.halves(row, 64, next());
            }
            TensorType::TQ1_0 => {
                self.plane::<2>(row, |b, i| from_fn(|k| cast::<BlockTq1_0>(b)[0].code(32 * i + k)), next());
                self.halves(row, 52, next());
            }
            TensorType::Q2_0 => {
                let code = |b: &[u8], k: usize| b[2 + k / 4] >> (2 * (k % 4)) & 3;
                self.plane::<2>(row, |b, i| from_fn(|k| code(b, 32 * i + k)), next());
                self.halves(row, 0, next());
            }
            TensorType::Q1_0 => {
                self.plane::<1>(row, |b, i| one_bits(&b[2 + 4 * i..]), next());
                self.halves(row, 0, next());
            }
            // `new` makes no such layout.
            TensorType::I64 => {}
        }
    }

    /// Writes a plane of `BITS` bits for each element. `codes(block, i)` are the codes of elements `32 i..32 i + 32` of
    /// a block.
    fn plane<const BITS: usize>(&self, row: &[u8], codes: impl Fn(&[u8], usize) -> Codes, out: &mut [u32]) {
        let bit = |k: usize| match BITS {
            4 => 4 * k,
            _ => 8 * (k % UNIT / 2) + 2 * BITS * (k / UNIT) + BITS * (k % 2),
        };
        let n = self.ty.block_len() / 32;
        for (block, out) in row.chunks_exact(self.ty.block_bytes()).zip(out.chunks_exact_mut(BITS * n)) {
            for (i, words) in out.as_chunks_mut::<BITS>().0.iter_mut().enumerate() {
                let codes = codes(block, i);
                *words = from_fn(|word| {
                    let codes = codes[32 / BITS * word..].iter().take(32 / BITS).enumerate();
                    codes.fold(0, |w, (k, &code)| w | u32::from(code) << bit(k))
                });
            }
        }
    }

    /// Writes the 16-bit float at byte `at` of each block, two to a word.
    fn halves(&self, row: &[u8], at: usize, out: &mut [u32]) {
        self.halves_of(row, |block| [block[at], block[at + 1]], out);
    }

    /// Writes the 16-bit float `half(block)` of each block, two to a word.
    fn halves_of(&self, row: &[u8], half: impl Fn(&[u8]) -> [u8; 2], out: &mut [u32]) {
        for (i, block) in row.chunks_exact(self.ty.block_bytes()).enumerate() {
            out[i / 2] |= u32::from(u16::from_le_bytes(half(block))) << (16 * (i % 2));
        }
    }

    /// Writes the four bytes from `at` of each block.
    fn words(&self, row: &[u8], at: usize, out: &mut [u32]) {
        for (block, word) in row.chunks_exact(self.ty.block_bytes()).zip(out) {
            *word = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
        }
    }

    /// Writes the `N` bytes `bytes(block)` of each block.
    fn bytes<const N: usize>(&self, row: &[u8], out: &mut [u32], bytes: impl Fn(&[u8]) -> [u8; N]) {
        for (block, words) in row.chunks_exact(self.ty.block_bytes()).zip(out.chunks_exact_mut(N / 4)) {
            for (word, bytes) in words.iter_mut().zip(bytes(block).as_chunks::<4>().0) {
                *word = u32::from_le_bytes(*bytes);
            }
        }
    }
}

/// Writes the words of `row`, padded with zeros, as planes of `per_unit` words for each unit.
fn pack_words(row: &[u8], n_in: usize, per_unit: usize, out: &mut [u32]) {
    let units = n_in.div_ceil(UNIT);
    for (i, bytes) in row.chunks(4).enumerate() {
        let mut word = [0; 4];
        word[..bytes.len()].copy_from_slice(bytes);
        out[i % per_unit * units + i / per_unit] = u32::from_le_bytes(word);
    }
}

/// The 32 bits of four bytes as codes, the lowest bit of each byte first.
fn one_bits(bytes: &[u8]) -> Codes {
    from_fn(|k| bytes[k / 8] >> (k % 8) & 1)
}

/// Scale and minimum of each of the 8 groups of a `Q4_K` or `Q5_K` super-block.
fn scales_and_mins(block: &[u8]) -> [u8; 16] {
    let packed = block[4..16].try_into().expect("12 bytes");
    let mut bytes = [0; 16];
    for (g, pair) in bytes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let (scale, min) = scale_min_k4(packed, g);
        *pair = [scale, min];
    }
    bytes
}

/// The codebook of a type in the form that its file in `shaders/types/` reads; empty for types without.
fn table(ty: TensorType) -> Vec<u32> {
    match ty {
        TensorType::IQ3_XXS => entry_values(CodebookGrid::IQ3_XXS),
        TensorType::IQ2_S => entry_indices(CodebookGrid::IQ2_S),
        TensorType::IQ2_XS => entry_indices(CodebookGrid::IQ2_XS),
        TensorType::IQ2_XXS => entry_indices(CodebookGrid::IQ2_XXS),
        TensorType::IQ1_M | TensorType::IQ1_S => entry_indices(CodebookGrid::IQ1),
        // IQ3_S is decoded when it is loaded; the others have no codebook.
        TensorType::IQ3_S
        | TensorType::F32
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
        | TensorType::MXFP4
        | TensorType::NVFP4
        | TensorType::TQ2_0
        | TensorType::TQ1_0
        | TensorType::Q2_0
        | TensorType::Q1_0
        | TensorType::I64 => Vec::new(),
    }
}

/// A codebook of 8-element entries, as a 2-bit plane of indices into the codebook's values; an entry is a unit.
fn entry_indices(grid: CodebookGrid) -> Vec<u32> {
    let bit = |code: usize, k: usize| 8 * (k / 2) + 4 * (code % 2) + 2 * (k % 2);
    let mut words = vec![0; grid.entries.len() / 2];
    for code in 0..grid.entries.len() {
        words[code / 2] |= (0..8).fold(0, |word, k| word | (grid.value_index(code, k) as u32) << bit(code, k));
    }
    words
}

/// A codebook of 4-element entries: a byte for each value, even elements first.
fn entry_values(grid: CodebookGrid) -> Vec<u32> {
    let point = |code| u32::from_le_bytes([0, 2, 1, 3].map(|k| grid.value(code, k) as u8));
    (0..grid.entries.len()).map(point).collect()
}

/// The codes of elements `32 i..32 i + 32` of an `IQ3_S` block: `(v + 15) / 2` of the odd values `v`.
fn iq3_s(block: &BlockIq3S, i: usize) -> Codes {
    from_fn(|k| {
        let at = 32 * i + k;
        let value = CodebookGrid::IQ3_S.value(block.code(at / 4), at % 4);
        let value = if block.signs[at / 8] >> (at % 8) & 1 == 1 { -value } else { value };
        i8::midpoint(value, 15) as u8
    })
}

/// The codes of two groups of 16 elements, each in 8 bytes whose low nibbles are the first half.
fn nvfp4(qs: &[u8]) -> Codes {
    fp4(from_fn(|k| qs[k / 16 * 8 + k % 8] >> (4 * (k / 8 % 2)) & 15))
}

/// Renumbers 4-bit floats so that a few instructions turn eight of them into bytes (`shaders/types/fp4.wgsl`): twice
/// the value is the new code minus 14, plus 13 where two or three of these hold: bit 0 is set, bit 1 is not, bit 3 is
/// not.
fn fp4(codes: Codes) -> Codes {
    const NUMBERS: [u8; 16] = [1, 15, 3, 4, 5, 7, 9, 13, 14, 0, 12, 11, 10, 8, 6, 2];
    codes.map(|code| NUMBERS[usize::from(code)])
}
