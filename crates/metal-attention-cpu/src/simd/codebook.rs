//! Codebooks in the form that kernels look them up.

use metal_attention_gguf::blocks::CodebookGrid;

use super::{LANES, Simd};

/// The points of a codebook of `N` codes (a power of two, at least 256), whose elements are places in a list of values, and what
/// kernels read for those values.
pub(crate) struct CodebookTable<const N: usize> {
    /// A byte for each of 8 columns; of points with 4 columns the upper half is 0.
    points: [u64; N],
    /// What is read for a place, plus 8 where the sign is set.
    pub(crate) values: [u8; 16],
    /// For lookups in registers.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(crate) registers: RegisterTables<N>,
}

/// A [`CodebookTable`] in tables that registers hold.
pub(crate) struct RegisterTables<const N: usize> {
    /// Points in two bytes, even columns in the first and odd ones in the second. Of 8 columns, bits 0 and 1 are column 0 or 1,
    /// bits 2 and 3 column 4 or 5, bits 4 and 5 column 2 or 3, bits 6 and 7 column 6 or 7. Of 4, bits 0 to 2 are column 0 or 1,
    /// bits 4 to 6 column 2 or 3.
    pub(crate) planes: [[u8; N]; 2],
    /// Of points with 8 columns, for each step of four what is read for 4 bits that are joined of [`Signs`] and a place.
    pub(crate) joined: [[u8; 16]; 4],
    /// Of points with 4 columns, what is read for a place in bits 0 to 2 and a sign in bit 3, 4 or 5.
    pub(crate) long: [[u8; 64]; 3],
}

/// Signs of 32 columns of each row, of points with 8 columns: a bit in each byte for steps 0 to 3, and another byte for steps 4
/// to 7. The bits of even steps are 2 and 3, next to a place in bits 0 and 1, those of odd steps 0 and 1, next to a place in bits
/// 2 and 3. Upper bits are 0.
pub(crate) type Signs<B> = [B; 2];

/// Which bit of [`Signs`] each step of four has.
pub(crate) const SIGN_BITS: [usize; 4] = [2, 0, 3, 1];

impl<const N: usize> CodebookTable<N> {
    /// That of `grid`; for a place of its values, plus 8 where the sign is set, `values` are read.
    pub(crate) const fn new(grid: CodebookGrid, values: [u8; 16]) -> Self {
        assert!(N.is_power_of_two() && N >= 256 && grid.entries.len() == N);
        let registers = RegisterTables { planes: [[0; N]; 2], joined: [[0; 16]; 4], long: [[0; 64]; 3] };
        let mut book = Self { points: [0; N], values, registers };
        let mut code = 0;
        while code < N {
            let mut k = 0;
            while k < grid.width() {
                let place = grid.value_index(code, k);
                book.points[code] |= (place as u64) << (8 * k);
                book.registers.planes[k % 2][code] |= (place << (k / 2 % 2 * 4 + k / 4 * 2)) as u8;
                k += 1;
            }
            code += 1;
        }
        let mut i = 0;
        while i < 64 {
            let mut step = 0;
            while i < 16 && step < 4 {
                let (place, sign) = (i >> (step % 2 * 2) & 3, i >> SIGN_BITS[step] & 1);
                book.registers.joined[step][i] = values[place + 8 * sign];
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

    /// The point of `code`, of which bits beyond the codebook are ignored.
    #[inline(always)]
    pub(crate) fn point(&self, code: u16) -> u64 {
        self.points[usize::from(code) % N]
    }
}

/// One of the bits of codes beyond the lower eight: a bit in a byte of each row.
#[derive(Clone, Copy)]
pub(crate) struct UpperBit {
    /// 16 bytes, one of each row.
    pub(crate) rows: *const u8,
    /// The bit (as a mask) that each of four codes has there.
    pub(crate) bits: [u8; 4],
}

/// Where the lower eight bits of code `code` (of four) of a row are among the 64 bytes of four codes of 16 rows. In this order
/// registers of 16-byte parts come apart into codes without a move between parts.
pub(crate) const fn code_offset(row: usize, code: usize) -> usize {
    16 * (row / 4) + 4 * code + row % 4
}

/// [`Simd::points8`] by a load for each code.
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
            let mut index = [0_u16; LANES];
            for row in 0..LANES {
                index[row] = u16::from(*codes.add(code_offset(row, k)));
                for b in 0..U {
                    let set = *upper[b].rows.add(row) & upper[b].bits[k] != 0;
                    index[row] |= u16::from(set) << (8 + b);
                }
            }
            for row in 0..LANES {
                let point = book.point(index[row]);
                steps[2 * k][row] = point as u32;
                steps[2 * k + 1][row] = (point >> 32) as u32;
            }
        }
        let mut places = [signs[0]; 8];
        for step in 0..8 {
            places[step] = S::b_load(steps[step].as_ptr().cast());
        }
        valued8::<S>(&book.values, places, signs)
    }
}

/// What `values` has for `places` with `signs`.
#[inline(always)]
pub(crate) unsafe fn valued8<S: Simd>(values: &[u8; 16], places: [S::B; 8], signs: Signs<S::B>) -> [S::B; 8] {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let (mask, mut out) = (S::b_splat(8), places);
        for half in 0..2 {
            let bits =
                [S::b_shl::<1>(signs[half]), S::b_shl::<3>(signs[half]), signs[half], S::b_shl::<2>(signs[half])];
            for step in 0..4 {
                let index = S::b_or(places[4 * half + step], S::b_and(bits[step], mask));
                out[4 * half + step] = S::b_lookup(values, index);
            }
        }
        out
    }
}

/// [`Simd::points4`] by a load for each code.
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
        let mut places = [signs; 8];
        for step in 0..8 {
            places[step] = S::b_load(steps[step].as_ptr().cast());
        }
        valued4::<S>(&book.values, places, signs)
    }
}

/// What `values` has for `places` with a plane of `signs`.
#[inline(always)]
pub(crate) unsafe fn valued4<S: Simd>(values: &[u8; 16], places: [S::B; 8], signs: S::B) -> [S::B; 8] {
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
            out[step] = S::b_lookup(values, S::b_or(places[step], out[step]));
        }
        out
    }
}
