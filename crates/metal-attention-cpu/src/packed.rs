//! Matrices repacked for the kernels.
//!
//! A *panel* is 16 rows of the matrix. Of floats it holds column after column, `[n_in, 16]`. Of
//! quantised types its blocks follow each other along the
//! rows; a block holds, for 32 or 256 columns, first the codes and then the
//! scales of all 16 rows, so that one vector load fetches the same 4 columns of
//! every row. The bytes are those of the file in another order: a repacked
//! matrix is as large as the original, or (`IQ3_S` and `TQ1_0`, which are unpacked,
//! and some with a codebook) up to 22 % larger.
//!
//! Codes lie in bit planes per 32 columns. A vector of 64 bytes is 16 rows x 4
//! columns; *step* `s` of 8 stands for columns `4s..4s + 4`:
//! - 4-bit plane, 4 vectors: low nibbles of vector `v` are step `v`, high ones step `v + 4`;
//! - 2-bit plane, 2 vectors: bits `2i` and `2i + 1` of vector `v` are step `4v + i`;
//! - 1-bit plane, 1 vector: bit `s` is step `s`;
//! - 8-bit codes, 8 vectors: step `s` is vector `s`.
//!
//! Every format reads as `w = scale * (code - OFFSET) + min`.

use std::array::from_fn;
use std::mem::MaybeUninit;
use std::ops::Range;

use memmap2::MmapMut;
use metal_attention_gguf::blocks::{BlockIq3S, BlockTq1_0, Grid, IQ4_VALUES, cast};
use metal_attention_gguf::codes::{Codes, four_bits, nibble_halves, shifted, two_bits};
use metal_attention_gguf::{Tensor, TensorType};

use crate::codebooks;
use crate::fp4;
use crate::pool::ThreadPool;
use crate::shared::SharedMut;
use crate::simd::{LANES, Simd};

/// Rows of a panel: one per lane.
pub(crate) const PANEL: usize = LANES;

/// A matrix in panels.
#[derive(Debug)]
pub(crate) struct PackedMatrix {
    pub(crate) ty: TensorType,
    /// Rows: length of the product.
    pub(crate) n_out: usize,
    /// Columns.
    pub(crate) n_in: usize,
    /// Anonymous memory, which the system zeroes page by page in the thread that packs it.
    data: MmapMut,
    /// Bytes of one panel.
    panel_bytes: usize,
}

impl PackedMatrix {
    /// Repacks `tensor`. `None` when there is no memory for it. Incomplete where the work of `pool` is cancelled.
    pub(crate) fn pack(pool: &ThreadPool, tensor: &Tensor) -> Option<Self> {
        let (ty, n_in, n_out) = (tensor.ty(), tensor.row_len(), tensor.n_rows());
        let layout = layout(ty);
        let n_panels = n_out.div_ceil(PANEL);
        let block_bytes = layout.as_ref().map_or(ty.block_bytes(), |layout| layout.packed_bytes);
        let panel_bytes = n_in / ty.block_len() * block_bytes * PANEL;
        let mut data = MmapMut::map_anon(n_panels.checked_mul(panel_bytes)?).ok()?;
        // Pages of 2 MiB, of which the core knows more by heart. Where there are none the matrix is merely slower.
        #[cfg(target_os = "linux")]
        let _ = data.advise(memmap2::Advice::HugePage);
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
                    match (&layout, ty.block_bytes()) {
                        (Some(layout), _) => pack_row(layout, row, lane, out),
                        (None, 4) => pack_floats::<4>(row, lane, out),
                        (None, _) => pack_floats::<2>(row, lane, out),
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

    pub(crate) fn bytes(&self) -> usize {
        self.data.len()
    }
}

/// How the blocks of a quantised type become blocks of a panel.
struct Layout {
    /// Columns of a block.
    block_len: usize,
    /// Bytes of one row's block in the file.
    row_bytes: usize,
    /// Bytes of one row's block in the panel.
    packed_bytes: usize,
    /// Bits of a code.
    bits: usize,
    /// Codes of columns `32 i..32 i + 32` of one row's block.
    codes: fn(&[u8], usize) -> Codes,
    /// What follows the codes: fields of the row's block as (offset, width, count), interleaved by lane.
    tail: &'static [(usize, usize, usize)],
    /// What packs a block in the place of all this, where codes are more than bit planes.
    other: Option<PackBlock>,
}

/// Packs one row's block, as the file has it, into its lane of a panel's block.
pub(crate) type PackBlock = fn(&[u8], usize, &mut [u8]);

impl Layout {
    /// Of blocks that `pack` makes `packed_bytes` bytes of.
    fn other(ty: TensorType, packed_bytes: usize, pack: PackBlock) -> Self {
        let (block_len, row_bytes) = (ty.block_len(), ty.block_bytes());
        Self { block_len, row_bytes, packed_bytes, bits: 0, codes: |_, _| [0; 32], tail: &[], other: Some(pack) }
    }
}

fn layout(ty: TensorType) -> Option<Layout> {
    type Row = (usize, fn(&[u8], usize) -> Codes, &'static [(usize, usize, usize)]);
    let (bits, codes, tail): Row = match ty {
        TensorType::Q4_0 | TensorType::IQ4_NL => (4, |b, _| nibble_halves(&b[2..]), &[(0, 2, 1)]),
        TensorType::Q4_1 => (4, |b, _| nibble_halves(&b[4..]), &[(0, 2, 1), (2, 2, 1)]),
        TensorType::Q5_0 => (5, |b, _| q5(&b[2..]), &[(0, 2, 1)]),
        TensorType::Q5_1 => (5, |b, _| q5(&b[4..]), &[(0, 2, 1), (2, 2, 1)]),
        // Signed to offset 128.
        TensorType::Q8_0 => (8, |b, _| from_fn(|l| b[2 + l] ^ 0x80), &[(0, 2, 1)]),
        TensorType::Q2_K => (2, |b, i| two_bits(&b[16..80], i), &[(0, 1, 16), (80, 2, 1), (82, 2, 1)]),
        TensorType::Q3_K => (3, q3_k, &[(96, 1, 12), (108, 2, 1)]),
        TensorType::Q4_K => (4, |b, i| four_bits(&b[16..144], i), &[(4, 1, 12), (0, 2, 1), (2, 2, 1)]),
        TensorType::Q5_K => (5, q5_k, &[(4, 1, 12), (0, 2, 1), (2, 2, 1)]),
        TensorType::Q6_K => (6, q6_k, &[(192, 1, 16), (208, 2, 1)]),
        TensorType::IQ4_XS => (4, |b, i| nibble_halves(&b[8 + 16 * i..]), &[(2, 1, 6), (0, 2, 1)]),
        TensorType::F32 | TensorType::F16 | TensorType::BF16 => return None,
        TensorType::TQ2_0 => (2, two_bits, &[(64, 2, 1)]),
        TensorType::TQ1_0 => (2, |b, i| from_fn(|l| cast::<BlockTq1_0>(b)[0].code(32 * i + l)), &[(52, 2, 1)]),
        TensorType::Q2_0 => (2, |b, i| from_fn(|l| b[2 + 8 * i + l / 4] >> (2 * (l % 4)) & 3), &[(0, 2, 1)]),
        TensorType::Q1_0 => (1, |b, i| from_fn(|l| b[2 + 4 * i + l / 8] >> (l % 8) & 1), &[(0, 2, 1)]),
        TensorType::IQ3_S => (4, iq3_s, &[(106, 1, 4), (0, 2, 1)]),
        TensorType::MXFP4 => return Some(Layout::other(ty, 18, fp4::mxfp4)),
        TensorType::NVFP4 => return Some(Layout::other(ty, 40, fp4::nvfp4)),
        TensorType::IQ3_XXS => return Some(Layout::other(ty, 102, codebooks::iq3_xxs)),
        TensorType::IQ2_S => return Some(Layout::other(ty, 82, codebooks::iq2_s)),
        TensorType::IQ2_XS => return Some(Layout::other(ty, 78, codebooks::iq2_xs)),
        TensorType::IQ2_XXS => return Some(Layout::other(ty, 70, codebooks::iq2_xxs)),
        TensorType::IQ1_M => return Some(Layout::other(ty, 58, codebooks::iq1_m)),
        TensorType::IQ1_S => return Some(Layout::other(ty, 50, codebooks::iq1_s)),
    };
    let fields: usize = tail.iter().map(|(_, width, count)| width * count).sum();
    let packed_bytes = ty.block_len() / 8 * bits + fields;
    Some(Layout {
        block_len: ty.block_len(),
        row_bytes: ty.block_bytes(),
        packed_bytes,
        bits,
        codes,
        tail,
        other: None,
    })
}

/// Packs one row of a panel of floats, `N` bytes each.
fn pack_floats<const N: usize>(row: &[u8], lane: usize, panel: &mut [u8]) {
    let (row, panel) = (row.as_chunks::<N>().0, panel.as_chunks_mut::<N>().0);
    for (column, x) in panel.chunks_exact_mut(PANEL).zip(row) {
        column[lane] = *x;
    }
}

/// Packs one row of a panel of codes.
fn pack_row(layout: &Layout, row: &[u8], lane: usize, panel: &mut [u8]) {
    let code_bytes = 4 * layout.bits * PANEL;
    for (src, dst) in row.chunks_exact(layout.row_bytes).zip(panel.chunks_exact_mut(layout.packed_bytes * PANEL)) {
        if let Some(pack) = layout.other {
            pack(src, lane, dst);
            continue;
        }
        let n_groups = layout.block_len / 32;
        let (code_part, tail_part) = dst.split_at_mut(n_groups * code_bytes);
        for (i, out) in code_part.chunks_exact_mut(code_bytes).enumerate() {
            pack_codes(layout.bits, &(layout.codes)(src, i), lane, out);
        }
        let mut at = 0;
        for &(offset, width, count) in layout.tail {
            for field in src[offset..offset + width * count].chunks_exact(width) {
                tail_part[at + lane * width..][..width].copy_from_slice(field);
                at += width * PANEL;
            }
        }
    }
}

/// Writes the codes of 32 columns into their lane of the bit planes.
pub(crate) fn pack_codes(bits: usize, codes: &Codes, lane: usize, out: &mut [u8]) {
    // Step s: 4 columns in a word.
    let mut steps = [0u32; 8];
    for (step, group) in steps.iter_mut().zip(codes.as_chunks::<4>().0) {
        *step = u32::from_le_bytes(*group);
    }
    let part = |mask: u32, shift: u32| steps.map(|step| step >> shift & (mask * 0x0101_0101));
    let (vectors, high) = out.split_at_mut(match bits {
        8 => 512,
        4..=6 => 256,
        1 => 64,
        _ => 128,
    });
    match bits {
        8 => write_lane(vectors, lane, steps),
        4 => write_lane(vectors, lane, plane4(part(15, 0))),
        5 => {
            write_lane(vectors, lane, plane4(part(15, 0)));
            write_lane(high, lane, plane1(part(1, 4)));
        }
        6 => {
            write_lane(vectors, lane, plane4(part(15, 0)));
            write_lane(high, lane, plane2(part(3, 4)));
        }
        1 => write_lane(vectors, lane, plane1(part(1, 0))),
        2 => write_lane(vectors, lane, plane2(part(3, 0))),
        3 => {
            write_lane(vectors, lane, plane2(part(3, 0)));
            write_lane(high, lane, plane1(part(1, 2)));
        }
        _ => unreachable!("no type has codes of {bits} bits"),
    }
}

fn write_lane<const N: usize>(out: &mut [u8], lane: usize, words: [u32; N]) {
    for (vector, word) in out.chunks_exact_mut(64).zip(words) {
        vector[4 * lane..][..4].copy_from_slice(&word.to_le_bytes());
    }
}

fn plane4(s: [u32; 8]) -> [u32; 4] {
    from_fn(|v| s[v] | s[v + 4] << 4)
}

fn plane2(s: [u32; 8]) -> [u32; 2] {
    from_fn(|v| s[4 * v] | s[4 * v + 1] << 2 | s[4 * v + 2] << 4 | s[4 * v + 3] << 6)
}

fn plane1(s: [u32; 8]) -> [u32; 1] {
    [(0..8).fold(0, |word, i| word | s[i] << i)]
}

/// 4 bytes with the fifth bit of each column, then nibbles.
fn q5(b: &[u8]) -> Codes {
    let high = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    let mut codes = nibble_halves(&b[4..]);
    for (column, code) in codes.iter_mut().enumerate() {
        *code |= ((high >> column & 1) as u8) << 4;
    }
    codes
}

/// Joins low and high bits: `low | high << shift`.
fn joined(mut low: Codes, high: Codes, shift: usize) -> Codes {
    for (low, high) in low.iter_mut().zip(high) {
        *low |= high << shift;
    }
    low
}

fn q3_k(b: &[u8], i: usize) -> Codes {
    joined(two_bits(&b[32..96], i), shifted(&b[..32], i, 1), 2)
}

fn q5_k(b: &[u8], i: usize) -> Codes {
    joined(four_bits(&b[48..176], i), shifted(&b[16..48], i, 1), 4)
}

/// Per 128 columns: 64 bytes of low nibbles (columns 0..64 low, 64..128 high), 32 bytes of upper bits.
fn q6_k(b: &[u8], i: usize) -> Codes {
    let (half, quarter) = (i / 4, i % 4);
    let low = shifted(&b[64 * half + 32 * (quarter % 2)..], 4 * (quarter / 2), 15);
    joined(low, shifted(&b[128 + 32 * half..], 2 * quarter, 3), 4)
}

/// The values of an `IQ3_S` block, odd numbers from -15 to 15, as codes from 0.
fn iq3_s(b: &[u8], i: usize) -> Codes {
    let block = &cast::<BlockIq3S>(b)[0];
    from_fn(|l| {
        let at = 32 * i + l;
        let size = Grid::IQ3_S.value(block.code(at / 4), at % 4);
        let value = if block.signs[at / 8] >> (at % 8) & 1 == 1 { -size } else { size };
        i8::midpoint(value, 15) as u8
    })
}

/// A packed format as the kernels read it.
pub(crate) trait Format {
    /// Columns of a block.
    const BLOCK: usize;
    /// Columns that share a scale: 32, or 16.
    const SUB: usize;
    /// `OFFSET = 2^n`; `None` where it is 0.
    const OFFSET_LOG2: Option<u32>;
    /// Bits of a code as [`codes`](Self::codes) gives it: up to 8; with 7, codes are below 128.
    const BITS: u32;
    /// Whether `min` is not always 0.
    const HAS_MIN: bool;
    /// Bytes of a panel's block.
    const BYTES: usize;

    /// Codes of columns `32 i..32 i + 32`, one vector a step.
    ///
    /// # Safety
    ///
    /// `block` points to a whole block; the CPU has the instruction set.
    unsafe fn codes<S: Simd>(block: *const u8, i: usize) -> [S::B; 8];

    /// Scale and min of the whole block, per row, which those of the sub-blocks
    /// are multiples of.
    ///
    /// # Safety
    ///
    /// As for [`codes`](Self::codes).
    unsafe fn block_scale_and_min<S: Simd>(block: *const u8) -> (S::F, S::F);

    /// Brings the scales and mins of all sub-blocks into the form that
    /// [`scale_and_min`](Self::scale_and_min) reads, where that pays.
    ///
    /// # Safety
    ///
    /// As for [`codes`](Self::codes).
    #[inline(always)]
    unsafe fn unpack<S: Simd>(_block: *const u8) -> Unpacked {
        [[[0; PANEL]; 8]; 2]
    }

    /// Scale and min of sub-block `j`, per row: multiples of the block's. Blocks
    /// of 32 columns have none.
    ///
    /// # Safety
    ///
    /// As for [`codes`](Self::codes); `unpacked` is what [`unpack`](Self::unpack) returned.
    #[inline(always)]
    unsafe fn scale_and_min<S: Simd>(_block: *const u8, _unpacked: &Unpacked, _j: usize) -> (S::F, S::F) {
        unreachable!("blocks of 32 columns are not divided")
    }
}

/// Scales and mins of 8 sub-blocks, a byte each: `[scales or mins][sub-block][row]`.
pub(crate) type Unpacked = [[[u8; PANEL]; 8]; 2];

// The functions below name every vector instead of mapping over arrays: closures
// are not sure to be inlined with the instruction set on. Masking the array in a
// shared loop was measured 2 % slower in decode.

/// Codes of a 4-bit plane.
#[inline(always)]
pub(crate) unsafe fn nibbles<S: Simd>(p: *const u8) -> [S::B; 8] {
    // SAFETY: a plane is 4 vectors; the caller vouches for it.
    unsafe {
        let mask = S::b_splat(15);
        let (a, b, c, d) = (S::b_load(p), S::b_load(p.add(64)), S::b_load(p.add(128)), S::b_load(p.add(192)));
        [
            S::b_and(a, mask),
            S::b_and(b, mask),
            S::b_and(c, mask),
            S::b_and(d, mask),
            S::b_and(S::b_shr::<4>(a), mask),
            S::b_and(S::b_shr::<4>(b), mask),
            S::b_and(S::b_shr::<4>(c), mask),
            S::b_and(S::b_shr::<4>(d), mask),
        ]
    }
}

/// Codes of a 2-bit plane, in bits 0 and 1 or, where `HIGH`, in bits 4 and 5.
#[inline(always)]
unsafe fn pairs<S: Simd, const HIGH: bool>(p: *const u8) -> [S::B; 8] {
    // SAFETY: a plane is 2 vectors; the caller vouches for it.
    unsafe {
        let (a, b) = (S::b_load(p), S::b_load(p.add(64)));
        if HIGH {
            let mask = S::b_splat(0x30);
            [
                S::b_and(S::b_shl::<4>(a), mask),
                S::b_and(S::b_shl::<2>(a), mask),
                S::b_and(a, mask),
                S::b_and(S::b_shr::<2>(a), mask),
                S::b_and(S::b_shl::<4>(b), mask),
                S::b_and(S::b_shl::<2>(b), mask),
                S::b_and(b, mask),
                S::b_and(S::b_shr::<2>(b), mask),
            ]
        } else {
            let mask = S::b_splat(3);
            [
                S::b_and(a, mask),
                S::b_and(S::b_shr::<2>(a), mask),
                S::b_and(S::b_shr::<4>(a), mask),
                S::b_and(S::b_shr::<6>(a), mask),
                S::b_and(b, mask),
                S::b_and(S::b_shr::<2>(b), mask),
                S::b_and(S::b_shr::<4>(b), mask),
                S::b_and(S::b_shr::<6>(b), mask),
            ]
        }
    }
}

/// Codes of a 1-bit plane, each bit moved to bit 4 or, where not `FIFTH`, to bit 2.
#[inline(always)]
unsafe fn bits<S: Simd, const FIFTH: bool>(p: *const u8) -> [S::B; 8] {
    // SAFETY: a plane is 1 vector; the caller vouches for it.
    unsafe {
        let v = S::b_load(p);
        if FIFTH {
            let mask = S::b_splat(16);
            [
                S::b_and(S::b_shl::<4>(v), mask),
                S::b_and(S::b_shl::<3>(v), mask),
                S::b_and(S::b_shl::<2>(v), mask),
                S::b_and(S::b_shl::<1>(v), mask),
                S::b_and(v, mask),
                S::b_and(S::b_shr::<1>(v), mask),
                S::b_and(S::b_shr::<2>(v), mask),
                S::b_and(S::b_shr::<3>(v), mask),
            ]
        } else {
            let mask = S::b_splat(4);
            [
                S::b_and(S::b_shl::<2>(v), mask),
                S::b_and(S::b_shl::<1>(v), mask),
                S::b_and(v, mask),
                S::b_and(S::b_shr::<1>(v), mask),
                S::b_and(S::b_shr::<2>(v), mask),
                S::b_and(S::b_shr::<3>(v), mask),
                S::b_and(S::b_shr::<4>(v), mask),
                S::b_and(S::b_shr::<5>(v), mask),
            ]
        }
    }
}

/// Codes of an 8-bit matrix.
#[inline(always)]
unsafe fn whole_bytes<S: Simd>(p: *const u8) -> [S::B; 8] {
    // SAFETY: 8 vectors; the caller vouches for them.
    unsafe {
        let mut out = [S::b_for_dot8(S::b_load(p)); 8];
        for i in 1..8 {
            out[i] = S::b_for_dot8(S::b_load(p.add(64 * i)));
        }
        out
    }
}

/// Codes of 8 bits that stand for `IQ4_VALUES`.
#[inline(always)]
unsafe fn iq4_codes<S: Simd>(p: *const u8) -> [S::B; 8] {
    // SAFETY: passed on to the caller.
    unsafe { looked_up::<S>(if S::DOT8_UNSIGNED { &IQ4_CODES } else { &IQ4_SIGNED }, nibbles::<S>(p)) }
}

#[inline(always)]
pub(crate) unsafe fn or<S: Simd>(mut a: [S::B; 8], b: [S::B; 8]) -> [S::B; 8] {
    for i in 0..8 {
        // SAFETY: the caller vouches for the instruction set.
        a[i] = unsafe { S::b_or(a[i], b[i]) };
    }
    a
}

/// Codes below 16 to what `table` has for them.
#[inline(always)]
pub(crate) unsafe fn looked_up<S: Simd>(table: &[u8; 16], mut codes: [S::B; 8]) -> [S::B; 8] {
    for i in 0..8 {
        // SAFETY: the caller vouches for the instruction set.
        codes[i] = unsafe { S::b_lookup(table, codes[i]) };
    }
    codes
}

/// `[f16; 16]` at byte `at`.
#[inline(always)]
pub(crate) unsafe fn halves<S: Simd>(block: *const u8, at: usize) -> S::F {
    // SAFETY: inside the block; the caller vouches for it.
    unsafe { S::f_load_f16(block.add(at).cast()) }
}

/// Byte `j` of every row of a tail field at `at`.
#[inline(always)]
pub(crate) unsafe fn bytes<S: Simd>(block: *const u8, at: usize, j: usize) -> S::I {
    // SAFETY: inside the block; the caller vouches for it.
    unsafe { S::i_load_u8(block.add(at + PANEL * j)) }
}

/// The 12 bytes at `at` that `Q4_K` and `Q5_K` pack eight 6-bit scales and mins
/// into. A vector is 4 of these bytes, of all rows.
#[inline(always)]
unsafe fn six_bit_pairs<S: Simd>(block: *const u8, at: usize) -> Unpacked {
    let mut out = MaybeUninit::<Unpacked>::uninit();
    // SAFETY: inside the block, the caller vouches for it; four vectors of 64 bytes fill `out`.
    unsafe {
        let (a, b, c) = (S::b_load(block.add(at)), S::b_load(block.add(at + 64)), S::b_load(block.add(at + 128)));
        let (low4, low6, high2) = (S::b_splat(15), S::b_splat(63), S::b_splat(0x30));
        let out: *mut S::B = out.as_mut_ptr().cast();
        out.write_unaligned(S::b_and(a, low6));
        out.add(1).write_unaligned(S::b_or(S::b_and(c, low4), S::b_and(S::b_shr::<2>(a), high2)));
        out.add(2).write_unaligned(S::b_and(b, low6));
        let low = S::b_and(S::b_shr::<4>(c), low4);
        out.add(3).write_unaligned(S::b_or(low, S::b_and(S::b_shr::<2>(b), high2)));
    }
    // SAFETY: written above.
    unsafe { out.assume_init() }
}

/// The 12 bytes at `at` that `Q3_K` packs sixteen 6-bit scales into: low nibbles in bytes 0 to 7, upper pairs of bits in bytes 8
/// to 11.
#[inline(always)]
unsafe fn q3_k_scales<S: Simd>(block: *const u8, at: usize) -> Unpacked {
    let mut out = MaybeUninit::<Unpacked>::uninit();
    // SAFETY: inside the block, the caller vouches for it; four vectors of 64 bytes fill `out`.
    unsafe {
        let (a, b, c) = (S::b_load(block.add(at)), S::b_load(block.add(at + 64)), S::b_load(block.add(at + 128)));
        let (low4, high2) = (S::b_splat(15), S::b_splat(0x30));
        let out: *mut S::B = out.as_mut_ptr().cast();
        out.write_unaligned(S::b_or(S::b_and(a, low4), S::b_and(S::b_shl::<4>(c), high2)));
        out.add(1).write_unaligned(S::b_or(S::b_and(b, low4), S::b_and(S::b_shl::<2>(c), high2)));
        out.add(2).write_unaligned(S::b_or(S::b_and(S::b_shr::<4>(a), low4), S::b_and(c, high2)));
        out.add(3).write_unaligned(S::b_or(S::b_and(S::b_shr::<4>(b), low4), S::b_and(S::b_shr::<2>(c), high2)));
    }
    // SAFETY: written above.
    unsafe { out.assume_init() }
}

/// `2 s + 1` for the scales `s` of 4 bits in `VECTORS` times 4 bytes at `at`: even ones first, see [`odd_scale`].
#[inline(always)]
pub(crate) unsafe fn odd_scales<S: Simd, const VECTORS: usize>(block: *const u8, at: usize) -> Unpacked {
    let mut out = [[[0; PANEL]; 8]; 2];
    // SAFETY: inside the block, the caller vouches for it; a half of `out` is two vectors.
    unsafe {
        let (mask, one) = (S::b_splat(30), S::b_splat(1));
        for v in 0..VECTORS {
            let both = S::b_load(block.add(at + 64 * v));
            let even: *mut S::B = out[0].as_mut_ptr().cast();
            even.add(v).write_unaligned(S::b_or(S::b_and(S::b_shl::<1>(both), mask), one));
            let odd: *mut S::B = out[1].as_mut_ptr().cast();
            odd.add(v).write_unaligned(S::b_or(S::b_and(S::b_shr::<3>(both), mask), one));
        }
    }
    out
}

/// Scale `j` of [`odd_scales`].
#[inline(always)]
pub(crate) unsafe fn odd_scale<S: Simd>(unpacked: &Unpacked, j: usize) -> S::F {
    // SAFETY: 16 bytes; the caller vouches for the instruction set.
    unsafe { S::i_to_f(S::i_load_u8(unpacked[j % 2][j / 2].as_ptr())) }
}

/// Scale and min `j` of [`six_bit_pairs`].
#[inline(always)]
unsafe fn unpacked_pair<S: Simd>(unpacked: &Unpacked, j: usize) -> (S::F, S::F) {
    // SAFETY: 16 bytes each; the caller vouches for the instruction set.
    unsafe {
        let [scale, min] = [unpacked[0][j].as_ptr(), unpacked[1][j].as_ptr()];
        (S::i_to_f(S::i_load_u8(scale)), S::i_to_f(S::i_load_u8(min)))
    }
}

#[inline(always)]
unsafe fn negated<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { S::f_sub(S::f_splat(0.0), x) }
}

macro_rules! format {
    ($name:ident: block $block:literal, sub $sub:literal, bytes $bytes:literal, offset $offset:expr, bits $bits:literal, has_min $min:literal;
     $s:ident; codes |$cb:ident, $ci:ident| $codes:expr; block_scale_and_min |$bb:ident| $block_scale:expr
     $(; unpack |$ub:ident| $unpack:expr)? $(; scale_and_min |$sb:ident, $su:ident, $sj:ident| $scale:expr)?) => {
        pub(crate) struct $name;
        // SAFETY of the blocks below: `block` is a whole block of this format, as the trait asks.
        #[allow(clippy::undocumented_unsafe_blocks)]
        impl Format for $name {
            const BLOCK: usize = $block;
            const SUB: usize = $sub;
            const OFFSET_LOG2: Option<u32> = $offset;
            const BITS: u32 = $bits;
            const HAS_MIN: bool = $min;
            const BYTES: usize = $bytes * PANEL;
            #[inline(always)]
            unsafe fn codes<$s: Simd>($cb: *const u8, $ci: usize) -> [$s::B; 8] {
                unsafe { $codes }
            }
            #[inline(always)]
            unsafe fn block_scale_and_min<$s: Simd>($bb: *const u8) -> ($s::F, $s::F) {
                unsafe { $block_scale }
            }
            $(#[inline(always)]
            unsafe fn unpack<$s: Simd>($ub: *const u8) -> Unpacked {
                unsafe { $unpack }
            })?
            $(#[inline(always)]
            unsafe fn scale_and_min<$s: Simd>($sb: *const u8, $su: &Unpacked, $sj: usize) -> ($s::F, $s::F) {
                unsafe { $scale }
            })?
        }
    };
}

pub(crate) use format;

/// Values of the 16 codes of `IQ4_NL` and `IQ4_XS`, plus 128.
const IQ4_CODES: [u8; 16] = {
    let mut codes = [0; 16];
    let mut i = 0;
    while i < 16 {
        codes[i] = IQ4_VALUES[i] as u8 ^ 0x80;
        i += 1;
    }
    codes
};

format!(Q4_0: block 32, sub 32, bytes 18, offset Some(3), bits 4, has_min false; S;
    codes |b, _i| nibbles::<S>(b);
    block_scale_and_min |b| (halves::<S>(b, 256), S::f_splat(0.0)));
format!(Q4_1: block 32, sub 32, bytes 20, offset None, bits 4, has_min true; S;
    codes |b, _i| nibbles::<S>(b);
    block_scale_and_min |b| (halves::<S>(b, 256), halves::<S>(b, 288)));
format!(Q5_0: block 32, sub 32, bytes 22, offset Some(4), bits 5, has_min false; S;
    codes |b, _i| or::<S>(nibbles::<S>(b), bits::<S, true>(b.add(256)));
    block_scale_and_min |b| (halves::<S>(b, 320), S::f_splat(0.0)));
format!(Q5_1: block 32, sub 32, bytes 24, offset None, bits 5, has_min true; S;
    codes |b, _i| or::<S>(nibbles::<S>(b), bits::<S, true>(b.add(256)));
    block_scale_and_min |b| (halves::<S>(b, 320), halves::<S>(b, 352)));
format!(Q8_0: block 32, sub 32, bytes 34, offset Some(7), bits 8, has_min false; S;
    codes |b, _i| whole_bytes::<S>(b);
    block_scale_and_min |b| (halves::<S>(b, 512), S::f_splat(0.0)));
format!(Iq4Nl: block 32, sub 32, bytes 18, offset Some(7), bits 8, has_min false; S;
    codes |b, _i| iq4_codes::<S>(b);
    block_scale_and_min |b| (halves::<S>(b, 256), S::f_splat(0.0)));
format!(Q2K: block 256, sub 16, bytes 84, offset None, bits 2, has_min true; S;
codes |b, i| pairs::<S, false>(b.add(128 * i));
block_scale_and_min |b| (halves::<S>(b, 1280), negated::<S>(halves::<S>(b, 1312)));
scale_and_min |b, _u, j| {
    let both = bytes::<S>(b, 1024, j);
    (S::i_to_f(S::i_and(both, S::i_splat(15))), S::i_to_f(S::i_shr::<4>(both)))
});
format!(Q3K: block 256, sub 16, bytes 110, offset Some(2), bits 3, has_min false; S;
codes |b, i| or::<S>(pairs::<S, false>(b.add(192 * i)), bits::<S, false>(b.add(192 * i + 128)));
block_scale_and_min |b| (halves::<S>(b, 1728), S::f_splat(0.0));
unpack |b| q3_k_scales::<S>(b, 1536);
scale_and_min |_b, u, j| (S::i_to_f(S::i_add(S::i_load_u8(u[j / 8][j % 8].as_ptr()), S::i_splat(-32))), S::f_splat(0.0)));
format!(Q4K: block 256, sub 32, bytes 144, offset None, bits 4, has_min true; S;
codes |b, i| nibbles::<S>(b.add(256 * i));
block_scale_and_min |b| (halves::<S>(b, 2240), negated::<S>(halves::<S>(b, 2272)));
unpack |b| six_bit_pairs::<S>(b, 2048);
scale_and_min |_b, u, j| unpacked_pair::<S>(u, j));
format!(Q5K: block 256, sub 32, bytes 176, offset None, bits 5, has_min true; S;
codes |b, i| or::<S>(nibbles::<S>(b.add(320 * i)), bits::<S, true>(b.add(320 * i + 256)));
block_scale_and_min |b| (halves::<S>(b, 2752), negated::<S>(halves::<S>(b, 2784)));
unpack |b| six_bit_pairs::<S>(b, 2560);
scale_and_min |_b, u, j| unpacked_pair::<S>(u, j));
format!(Q6K: block 256, sub 16, bytes 210, offset Some(5), bits 6, has_min false; S;
codes |b, i| or::<S>(nibbles::<S>(b.add(384 * i)), pairs::<S, true>(b.add(384 * i + 256)));
block_scale_and_min |b| (halves::<S>(b, 3328), S::f_splat(0.0));
scale_and_min |b, _u, j| (S::i_to_f(S::i_load_i8(b.add(3072 + PANEL * j).cast())), S::f_splat(0.0)));
format!(Iq4Xs: block 256, sub 32, bytes 136, offset Some(7), bits 8, has_min false; S;
codes |b, i| iq4_codes::<S>(b.add(256 * i));
block_scale_and_min |b| (halves::<S>(b, 2144), S::f_splat(0.0));
scale_and_min |b, _u, j| {
    // Tail: 2 bytes with the upper 2 bits of each of 8 scales, 4 bytes with their low nibbles.
    let low = bytes::<S>(b, 2048, 2 + j / 2);
    let low = S::i_and(if j.is_multiple_of(2) { low } else { S::i_shr::<4>(low) }, S::i_splat(15));
    let upper = bytes::<S>(b, 2048, j / 4);
    let upper = match j % 4 {
        0 => upper,
        1 => S::i_shr::<2>(upper),
        2 => S::i_shr::<4>(upper),
        _ => S::i_shr::<6>(upper),
    };
    let code = S::i_or(low, S::i_shl::<4>(S::i_and(upper, S::i_splat(3))));
    (S::i_to_f(S::i_add(code, S::i_splat(-32))), S::f_splat(0.0))
});

/// The same without the 128.
const IQ4_SIGNED: [u8; 16] = {
    let mut codes = IQ4_CODES;
    let mut i = 0;
    while i < 16 {
        codes[i] ^= 0x80;
        i += 1;
    }
    codes
};

/// Odd numbers from -15 to 15, plus 16.
const IQ3_S_CODES: [u8; 16] = [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31];

format!(Iq3S: block 256, sub 32, bytes 134, offset Some(4), bits 5, has_min false; S;
codes |b, i| looked_up::<S>(&IQ3_S_CODES, nibbles::<S>(b.add(256 * i)));
block_scale_and_min |b| (halves::<S>(b, 2112), S::f_splat(0.0));
unpack |b| odd_scales::<S, 1>(b, 2048);
scale_and_min |_b, u, j| (odd_scale::<S>(u, j), S::f_splat(0.0)));
format!(Tq: block 256, sub 32, bytes 66, offset Some(0), bits 2, has_min false; S;
codes |b, i| pairs::<S, false>(b.add(128 * i));
block_scale_and_min |b| (halves::<S>(b, 1024), S::f_splat(0.0));
scale_and_min |_b, _u, _j| (S::f_splat(1.0), S::f_splat(0.0)));
format!(Q2_0: block 64, sub 32, bytes 18, offset Some(0), bits 2, has_min false; S;
codes |b, i| pairs::<S, false>(b.add(128 * i));
block_scale_and_min |b| (halves::<S>(b, 256), S::f_splat(0.0));
scale_and_min |_b, _u, _j| (S::f_splat(1.0), S::f_splat(0.0)));
// Codes are four times the bit: 4 q - 2 is twice the value.
format!(Q1_0: block 128, sub 32, bytes 18, offset Some(1), bits 3, has_min false; S;
codes |b, i| bits::<S, false>(b.add(64 * i));
block_scale_and_min |b| (S::f_mul(halves::<S>(b, 256), S::f_splat(0.5)), S::f_splat(0.0));
scale_and_min |_b, _u, _j| (S::f_splat(1.0), S::f_splat(0.0)));
