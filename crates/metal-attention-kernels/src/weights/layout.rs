//! How a quantised row lies in GPU memory.
//!
//! A row is cut into *units* of 8 elements, what one lane of a kernel takes at a time. A part of a matrix is a few
//! *sections*, one after the other, each `[n_rows, words per row]`: consecutive lanes, which take consecutive units,
//! read consecutive words of every section. Codes lie in element order:
//! - 4-bit plane: one word a unit, element `k` at bit `4 k`;
//! - 2-bit plane: one word for two units, element `k` of unit `u` at bit `8 (k / 2) + 4 (u % 2) + 2 (k % 2)`;
//! - 1-bit plane: one word for four units, element `k` of unit `u` at bit `8 (k / 2) + 2 (u % 4) + k % 2`;
//! - bytes: two words a unit, its even elements and its odd ones, those of all units of the row before these;
//! - halves, floats: 4 or 8 words a unit, word `j` of all units of the row before word `j + 1`.
//!
//! So one shift and one mask make four codes bytes of a word, those of the even elements or of the odd ones.
//!
//! Scales follow as the file has them, except that 6-bit ones are widened to bytes; halves go two to a word. Signed
//! bytes are stored with their top bit flipped, so as unsigned numbers above 128. No bit is lost, and a part is at most 5 %
//! larger than its rows in the file (short rows more: each is filled up to whole units, and its halves to whole words).
//!
//! `shaders/types/` reads these layouts, one file a type.

use metal_attention_gguf::TensorType;
use metal_attention_gguf::blocks::{BlockIq4Xs, BlockQ3K, cast, scale_min_k4};
use metal_attention_gguf::codes::{Codes, four_bits, nibble_halves, shifted, two_bits};

/// Elements of a unit.
const UNIT: usize = 8;

/// The layout of rows of one type and length.
#[derive(Debug, Clone)]
pub(super) struct RowLayout {
    ty: TensorType,
    n_in: usize,
    /// Words of a row in each section.
    pub(super) sections: Vec<usize>,
}

impl RowLayout {
    pub(super) fn new(ty: TensorType, n_in: usize) -> Self {
        let units = n_in.div_ceil(UNIT);
        let blocks = n_in / ty.block_len();
        let half_pairs = blocks.div_ceil(2);
        let sections = match ty {
            TensorType::F32 => vec![8 * units],
            TensorType::F16 | TensorType::BF16 => vec![4 * units],
            TensorType::Q4_0 | TensorType::IQ4_NL => vec![units, half_pairs],
            TensorType::Q4_1 => vec![units, blocks],
            TensorType::Q5_0 => vec![units, units / 4, half_pairs],
            TensorType::Q5_1 => vec![units, units / 4, blocks],
            TensorType::Q8_0 => vec![2 * units, half_pairs],
            TensorType::Q2_K => vec![units / 2, 4 * blocks, blocks],
            TensorType::Q3_K => vec![units / 2, units / 4, 4 * blocks, half_pairs],
            TensorType::Q4_K => vec![units, 4 * blocks, blocks],
            TensorType::Q5_K => vec![units, units / 4, 4 * blocks, blocks],
            TensorType::Q6_K => vec![units, units / 2, 4 * blocks, half_pairs],
            TensorType::IQ4_XS => vec![units, 2 * blocks, half_pairs],
            TensorType::IQ3_S
            | TensorType::IQ3_XXS
            | TensorType::IQ2_S
            | TensorType::IQ2_XS
            | TensorType::IQ2_XXS
            | TensorType::IQ1_M
            | TensorType::IQ1_S
            | TensorType::MXFP4
            | TensorType::NVFP4
            | TensorType::TQ2_0
            | TensorType::TQ1_0
            | TensorType::Q2_0
            | TensorType::Q1_0 => vec![ty.row_bytes(n_in).div_ceil(4)],
        };
        Self { ty, n_in, sections }
    }

    /// Whether kernels read `ty`.
    pub(super) fn is_known(ty: TensorType) -> bool {
        ty.id() <= TensorType::Q6_K.id() || matches!(ty, TensorType::BF16 | TensorType::IQ4_NL | TensorType::IQ4_XS)
    }

    /// Bytes of a row over all sections.
    pub(super) fn row_bytes(&self) -> u64 {
        4 * self.sections.iter().sum::<usize>() as u64
    }

    /// Writes `row`, as the file has it, as row `to` of `sections`, which hold zeros there.
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
                            let word = u32::from_le_bytes(std::array::from_fn(|k| bytes[2 * k + odd]));
                            codes[odd * units + 4 * i + j] = word ^ 0x8080_8080;
                        }
                    }
                }
                self.halves(row, 0, next());
            }
            TensorType::Q2_K => {
                self.plane::<2>(row, |b, i| two_bits(&b[16..80], i), next());
                self.bytes(row, next(), |b| std::array::from_fn::<_, 16, _>(|g| b[g]));
                self.words(row, 80, next());
            }
            TensorType::Q3_K => {
                self.plane::<2>(row, |b, i| two_bits(&b[32..96], i), next());
                self.plane::<1>(row, |b, i| shifted(&b[..32], i, 1), next());
                self.bytes(row, next(), |b| {
                    let block = &cast::<BlockQ3K>(b)[0];
                    std::array::from_fn::<_, 16, _>(|g| (block.scale(g) + 32) as u8)
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
                // Per 128 elements: 64 bytes of low nibbles (elements 0..64 low, 64..128 high), 32 of upper bits.
                let low = |b: &[u8], i: usize| shifted(&b[64 * (i / 4) + 32 * (i % 2)..], 4 * (i % 4 / 2), 15);
                self.plane::<4>(row, low, next());
                self.plane::<2>(row, |b, i| two_bits(&b[128..192], i), next());
                self.bytes(row, next(), |b| std::array::from_fn::<_, 16, _>(|g| b[192 + g] ^ 0x80));
                self.halves(row, 208, next());
            }
            TensorType::IQ4_XS => {
                self.plane::<4>(row, |b, i| nibble_halves(&b[8 + 16 * i..]), next());
                self.bytes(row, next(), |b| {
                    let block = &cast::<BlockIq4Xs>(b)[0];
                    std::array::from_fn::<_, 8, _>(|g| (block.scale(g) + 32) as u8)
                });
                self.halves(row, 0, next());
            }
            ty @ (TensorType::IQ3_S
            | TensorType::IQ3_XXS
            | TensorType::IQ2_S
            | TensorType::IQ2_XS
            | TensorType::IQ2_XXS
            | TensorType::IQ1_M
            | TensorType::IQ1_S
            | TensorType::MXFP4
            | TensorType::NVFP4
            | TensorType::TQ2_0
            | TensorType::TQ1_0
            | TensorType::Q2_0
            | TensorType::Q1_0) => unreachable!("{ty} is refused before"),
        }
    }

    /// A plane of `BITS` bits an element: `codes(block, i)` finds the codes of elements `32 i..32 i + 32` of a block.
    fn plane<const BITS: usize>(&self, row: &[u8], codes: impl Fn(&[u8], usize) -> Codes, out: &mut [u32]) {
        let bit = |k: usize| match BITS {
            4 => 4 * k,
            _ => 8 * (k % UNIT / 2) + 2 * BITS * (k / UNIT) + BITS * (k % 2),
        };
        let n = self.ty.block_len() / 32;
        for (block, out) in row.chunks_exact(self.ty.block_bytes()).zip(out.chunks_exact_mut(BITS * n)) {
            for (i, words) in out.as_chunks_mut::<BITS>().0.iter_mut().enumerate() {
                let codes = codes(block, i);
                *words = std::array::from_fn(|word| {
                    let codes = codes[32 / BITS * word..].iter().take(32 / BITS).enumerate();
                    codes.fold(0, |w, (k, &code)| w | u32::from(code) << bit(k))
                });
            }
        }
    }

    /// The half at byte `at` of each block, two to a word.
    fn halves(&self, row: &[u8], at: usize, out: &mut [u32]) {
        for (i, block) in row.chunks_exact(self.ty.block_bytes()).enumerate() {
            out[i / 2] |= u32::from(u16::from_le_bytes([block[at], block[at + 1]])) << (16 * (i % 2));
        }
    }

    /// The four bytes from `at` of each block.
    fn words(&self, row: &[u8], at: usize, out: &mut [u32]) {
        for (block, word) in row.chunks_exact(self.ty.block_bytes()).zip(out) {
            *word = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
        }
    }

    /// `N` bytes that `bytes` makes of each block.
    fn bytes<const N: usize>(&self, row: &[u8], out: &mut [u32], bytes: impl Fn(&[u8]) -> [u8; N]) {
        for (block, words) in row.chunks_exact(self.ty.block_bytes()).zip(out.chunks_exact_mut(N / 4)) {
            for (word, bytes) in words.iter_mut().zip(bytes(block).as_chunks::<4>().0) {
                *word = u32::from_le_bytes(*bytes);
            }
        }
    }
}

/// Words of `row` (the last one filled up with zeros), `per_unit` of which make a unit of the `n_in` elements.
fn pack_words(row: &[u8], n_in: usize, per_unit: usize, out: &mut [u32]) {
    let units = n_in.div_ceil(UNIT);
    for (i, bytes) in row.chunks(4).enumerate() {
        let mut word = [0; 4];
        word[..bytes.len()].copy_from_slice(bytes);
        out[i % per_unit * units + i / per_unit] = u32::from_le_bytes(word);
    }
}

/// 32 bits, the lowest of each byte first.
fn one_bits(bytes: &[u8]) -> Codes {
    std::array::from_fn(|k| bytes[k / 8] >> (k % 8) & 1)
}

/// Scale and minimum of each of the 8 groups of a `Q4_K` or `Q5_K` block.
fn scales_and_mins(block: &[u8]) -> [u8; 16] {
    let packed = block[4..16].try_into().expect("12 bytes");
    let mut bytes = [0; 16];
    for (g, pair) in bytes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let (scale, min) = scale_min_k4(packed, g);
        *pair = [scale, min];
    }
    bytes
}
