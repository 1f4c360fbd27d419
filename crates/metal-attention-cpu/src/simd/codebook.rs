//! Codebooks in the form in which kernels look up points.
//!
//! A code of a codebook stands for a point of 8 or 4 columns. An element of a point is stored as the index in a list of at most
//! 8 values; 8 is added to the index where the sign bit is set. A *step* is 4 columns of 16 rows, one vector of 64 bytes (see
//! [`packed`](crate::packed)).

use metal_attention_gguf::blocks::CodebookGrid;

use super::{LANES, Simd};

/// A codebook of `N` points (a power of two, at least 256), and the table of values that kernels read for their elements.
pub(crate) struct CodebookTable<const N: usize> {
    /// The points by code: the value index of each of 8 columns in a byte; of points with 4 columns the upper half is 0.
    points: [u64; N],
    /// The result for a value index, plus 8 where the sign is set.
    pub(crate) values: [u8; 16],
    /// The points and values as tables for lookups in registers.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(crate) registers: RegisterTables<N>,
}

/// A [`CodebookTable`] in the form of tables for byte permutations of registers (AVX-512 VBMI).
pub(crate) struct RegisterTables<const N: usize> {
    /// The value indices of each point in two bytes, even columns in the first plane and odd ones in the second. Points of 8
    /// columns: bits 0 and 1 are column 0 or 1, bits 2 and 3 column 4 or 5, bits 4 and 5 column 2 or 3, bits 6 and 7 column 6
    /// or
    /// 7. Points of 4 columns: bits 0 to 2 are column 0 or 1, bits 4 to 6 column 2 or 3.
    pub(crate) planes: [[u8; N]; 2],
    /// For points of 8 columns: for each step modulo 4 the results for 4 bits that contain a value index (2 bits) and a sign
    /// (at the step's bit of [`Signs`]).
    pub(crate) joined: [[u8; 16]; 4],
    /// For points of 4 columns: the results for a value index in bits 0 to 2 and a sign in bit 3, 4 or 5.
    pub(crate) long: [[u8; 64]; 3],
}

/// The signs of 32 columns of each row, for points of 8 columns: a vector for steps 0 to 3 and one for steps 4 to 7, with a
/// byte for each column modulo 4 and in it a bit for each step. The bits of even steps are 2 and 3, beside a value index in
/// bits 0 and 1; those of odd steps are 0 and 1, beside a value index in bits 2 and 3. The upper bits are 0.
pub(crate) type Signs<B> = [B; 2];

/// The bit in [`Signs`] of each step modulo 4.
pub(crate) const SIGN_BITS: [usize; 4] = [2, 0, 3, 1];

impl<const N: usize> CodebookTable<N> {
    /// The table of `grid`. `values` are the results for its value indices, and, from entry 8 on, for those with the sign set.
    pub(crate) const fn new(grid: CodebookGrid, values: [u8; 16]) -> Self {
        assert!(N.is_power_of_two() && N >= 256 && grid.entries.len() == N);
        let registers = RegisterTables { planes: [[0; N]; 2], joined: [[0; 16]; 4], long: [[0; 64]; 3] };
        let mut book = Self { points: [0; N], values, registers };
        let mut code = 0;
        while code < N {
            let mut k = 0;
            while k < grid.width() {
                let index = grid.value_index(code, k);
                book.points[code] |= (index as u64) << (8 * k);
                book.registers.planes[k % 2][code] |= (index << (k / 2 % 2 * 4 + k / 4 * 2)) as u8;
                k += 1;
            }
            code += 1;
        }
        let mut i = 0;
        while i < 64 {
            let mut step = 0;
            while i < 16 && step < 4 {
                let (index, sign) = (i >> (step % 2 * 2) & 3, i >> SIGN_BITS[step] & 1);
                book.registers.joined[step][i] = values[index + 8 * sign];
                step += 1;
            }
            let mut bit = 0;
            while bit < 3 {
                book.registers.long[bit][i] = values[i % 8 + 8 * (i >> (3 + bit) & 1)];
                bit += 1;
            }
            i += 1;
        }
        book
    }

    /// The point of `code`; bits of the code beyond the codebook are ignored.
    #[inline(always)]
    pub(crate) fn point(&self, code: u16) -> u64 {
        self.points[usize::from(code) % N]
    }
}

/// Where one of the bits beyond the lower eight of four codes is: in a byte of each row.
#[derive(Clone, Copy)]
pub(crate) struct UpperBit {
    /// 16 bytes, one of each row.
    pub(crate) rows: *const u8,
    /// The mask of each code's bit in the row's byte.
    pub(crate) bits: [u8; 4],
}

/// The offset of code `code` (0 to 3) of row `row` in the 64 bytes with the lower 8 bits of four codes of 16 rows. In this
/// order the codes can be separated within the 16-byte lanes of a register.
pub(crate) const fn code_offset(row: usize, code: usize) -> usize {
    16 * (row / 4) + 4 * code + row % 4
}

/// [`Simd::points8`] with a load for each code.
#[inline(always)]
pub(crate) unsafe fn points8<S: Simd, const N: usize, const U: usize>(
    book: &CodebookTable<N>,
    codes: *const u8,
    upper: [UpperBit; U],
    signs: Signs<S::B>,
) -> [S::B; 8] {
    // SAFETY: 64 bytes of codes and 16 of each upper bit, as the caller vouches.
    unsafe {
        let mut steps = [[0_u32; LANES]; 8];
        for k in 0..4 {
            let mut code = [0_u16; LANES];
            for row in 0..LANES {
                code[row] = u16::from(*codes.add(code_offset(row, k)));
                for b in 0..U {
                    let set = *upper[b].rows.add(row) & upper[b].bits[k] != 0;
                    code[row] |= u16::from(set) << (8 + b);
                }
            }
            for row in 0..LANES {
                let point = book.point(code[row]);
                steps[2 * k][row] = point as u32;
                steps[2 * k + 1][row] = (point >> 32) as u32;
            }
        }
        let mut indices = [signs[0]; 8];
        for step in 0..8 {
            indices[step] = S::b_load(steps[step].as_ptr().cast());
        }
        valued8::<S>(&book.values, indices, signs)
    }
}

/// The entries of `values` for the value indices `indices` (a vector for each step) and `signs`.
#[inline(always)]
pub(crate) unsafe fn valued8<S: Simd>(values: &[u8; 16], indices: [S::B; 8], signs: Signs<S::B>) -> [S::B; 8] {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let (mask, mut out) = (S::b_splat(8), indices);
        for half in 0..2 {
            let bits =
                [S::b_shl::<1>(signs[half]), S::b_shl::<3>(signs[half]), signs[half], S::b_shl::<2>(signs[half])];
            for step in 0..4 {
                let index = S::b_or(indices[4 * half + step], S::b_and(bits[step], mask));
                out[4 * half + step] = S::b_lookup(values, index);
            }
        }
        out
    }
}

/// [`Simd::points4`] with a load for each code.
#[inline(always)]
pub(crate) unsafe fn points4<S: Simd>(book: &CodebookTable<256>, codes: *const u8, signs: S::B) -> [S::B; 8] {
    // SAFETY: 128 bytes of codes, as the caller vouches.
    unsafe {
        let mut steps = [[0_u32; LANES]; 8];
        for k in 0..8 {
            for row in 0..LANES {
                steps[k][row] = book.point(u16::from(*codes.add(64 * (k / 4) + code_offset(row, k % 4)))) as u32;
            }
        }
        let mut indices = [signs; 8];
        for step in 0..8 {
            indices[step] = S::b_load(steps[step].as_ptr().cast());
        }
        valued4::<S>(&book.values, indices, signs)
    }
}

/// The entries of `values` for the value indices `indices` (a vector for each step) and a sign plane, in which bit `k` of a
/// byte belongs to step `k`.
#[inline(always)]
pub(crate) unsafe fn valued4<S: Simd>(values: &[u8; 16], indices: [S::B; 8], signs: S::B) -> [S::B; 8] {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let mask = S::b_splat(8);
        let mut out = [
            S::b_and(S::b_shl::<3>(signs), mask),
            S::b_and(S::b_shl::<2>(signs), mask),
            S::b_and(S::b_shl::<1>(signs), mask),
            S::b_and(signs, mask),
            S::b_and(S::b_shr::<1>(signs), mask),
            S::b_and(S::b_shr::<2>(signs), mask),
            S::b_and(S::b_shr::<3>(signs), mask),
            S::b_and(S::b_shr::<4>(signs), mask),
        ];
        for step in 0..8 {
            out[step] = S::b_lookup(values, S::b_or(indices[step], out[step]));
        }
        out
    }
}
