//! The vector operations on AVX2 with FMA and F16C. A vector of 16 lanes is two registers.

#[allow(clippy::wildcard_imports)] // the intrinsics
use std::arch::x86_64::*;

use super::{CodebookTable, Signs, Simd, UpperBit, code_offset, codebook};

/// AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

type F = [__m256; 2];
type I = [__m256i; 2];

/// Evaluates an expression for register 0 and for register 1. A macro and not a function with a closure: a closure may not be
/// inlined, and is then compiled without the instruction set.
macro_rules! both {
    ($i:ident => $e:expr) => {
        [
            {
                let $i = 0;
                $e
            },
            {
                let $i = 1;
                $e
            },
        ]
    };
}

/// Reads four codes of each row that have upper bits: separates the lower bytes by code, and combines them with the upper bits.
/// Without upper bits it is faster to read the codes byte by byte.
///
/// # Safety
///
/// See [`Simd::points8`].
#[inline(always)]
unsafe fn indices<const U: usize>(codes: *const u8, upper: [UpperBit; U]) -> [[u16; 16]; 4] {
    let mut indices = [[0_u16; 16]; 4];
    // SAFETY: 64 bytes of codes and 16 of each upper bit, as the caller vouches.
    unsafe {
        let part = |i: usize| _mm_loadu_si128(codes.add(16 * i).cast());
        let (a, b, c, d) = (part(0), part(1), part(2), part(3));
        let (ab, cd) = (_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(c, d));
        let (ab_high, cd_high) = (_mm_unpackhi_epi32(a, b), _mm_unpackhi_epi32(c, d));
        let low = [
            _mm_unpacklo_epi64(ab, cd),
            _mm_unpackhi_epi64(ab, cd),
            _mm_unpacklo_epi64(ab_high, cd_high),
            _mm_unpackhi_epi64(ab_high, cd_high),
        ];
        for k in 0..4 {
            let mut high = _mm_setzero_si128();
            for b in 0..U {
                let bit = _mm_set1_epi8(upper[b].bits[k] as i8);
                let set = _mm_cmpeq_epi8(_mm_and_si128(_mm_loadu_si128(upper[b].rows.cast()), bit), bit);
                high = _mm_or_si128(high, _mm_and_si128(set, _mm_set1_epi8(1 << b)));
            }
            let out: *mut __m128i = indices[k].as_mut_ptr().cast();
            out.write_unaligned(_mm_unpacklo_epi8(low[k], high));
            out.add(1).write_unaligned(_mm_unpackhi_epi8(low[k], high));
        }
    }
    indices
}

/// An empty assembly statement that keeps the computation of `x` at this point. Without it the compiler computes all steps of
/// one token before those of the next, and spills the codes of all steps to the stack.
#[inline]
#[target_feature(enable = "avx2")]
fn in_place(x: &mut I) {
    // SAFETY: no instruction.
    unsafe {
        std::arch::asm!("/* {} {} */", inout(ymm_reg) x[0], inout(ymm_reg) x[1], options(nomem, nostack, preserves_flags));
    }
}

// SAFETY of every block below: the CPU has the instruction set and pointers are
// valid for one vector, as the trait requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx2 {
    type F = F;
    type I = I;
    type B = I;

    const DOT8_UNSIGNED: bool = false;
    const TILE: usize = 4;
    const STREAMS: bool = false;

    #[inline(always)]
    unsafe fn f_splat(x: f32) -> F {
        [unsafe { _mm256_set1_ps(x) }; 2]
    }
    #[inline(always)]
    unsafe fn f_load(p: *const f32) -> F {
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn f_load_f16(p: *const u16) -> F {
        unsafe { both!(i => _mm256_cvtph_ps(_mm_loadu_si128(p.add(8 * i).cast()))) }
    }
    #[inline(always)]
    unsafe fn f_load_bf16(p: *const u16) -> F {
        unsafe {
            both!(i => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(8 * i).cast())))))
        }
    }
    #[inline(always)]
    unsafe fn f_store(p: *mut f32, x: F) {
        unsafe {
            _mm256_storeu_ps(p, x[0]);
            _mm256_storeu_ps(p.add(8), x[1]);
        }
    }
    #[inline(always)]
    unsafe fn f_stream(p: *mut f32, x: F) {
        unsafe {
            _mm256_stream_ps(p, x[0]);
            _mm256_stream_ps(p.add(8), x[1]);
        }
    }
    #[inline(always)]
    unsafe fn fence() {
        unsafe { _mm_sfence() }
    }
    #[inline(always)]
    unsafe fn f_store_f16(p: *mut u16, x: F) {
        unsafe {
            let h = both!(i => _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[i]));
            _mm_storeu_si128(p.cast(), h[0]);
            _mm_storeu_si128(p.add(8).cast(), h[1]);
        }
    }
    #[inline(always)]
    unsafe fn f_store_i8(p: *mut i8, x: F) {
        unsafe {
            let n = both!(i => _mm256_cvtps_epi32(x[i]));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(n[0], n[1]));
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(p.cast(), bytes);
        }
    }
    #[inline(always)]
    unsafe fn f_add(a: F, b: F) -> F {
        unsafe { both!(i => _mm256_add_ps(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn f_sub(a: F, b: F) -> F {
        unsafe { both!(i => _mm256_sub_ps(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn f_mul(a: F, b: F) -> F {
        unsafe { both!(i => _mm256_mul_ps(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn f_div(a: F, b: F) -> F {
        unsafe { both!(i => _mm256_div_ps(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn f_fma(a: F, b: F, c: F) -> F {
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    unsafe fn f_max(a: F, b: F) -> F {
        unsafe { both!(i => _mm256_max_ps(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn f_min(a: F, b: F) -> F {
        unsafe { both!(i => _mm256_min_ps(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn f_abs(a: F) -> F {
        unsafe { both!(i => _mm256_andnot_ps(_mm256_set1_ps(-0.0), a[i])) }
    }
    #[inline(always)]
    unsafe fn f_round(a: F) -> F {
        unsafe { both!(i => _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a[i])) }
    }
    #[inline(always)]
    unsafe fn f_scale_by_power(a: F, n: F) -> F {
        unsafe {
            both!(i => {
                let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n[i]), _mm256_set1_epi32(127));
                _mm256_mul_ps(a[i], _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
            })
        }
    }
    #[inline(always)]
    unsafe fn f_sum(a: F) -> f32 {
        unsafe {
            let a = _mm256_add_ps(a[0], a[1]);
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
        }
    }
    #[inline(always)]
    unsafe fn f_largest(a: F) -> f32 {
        unsafe {
            let a = _mm256_max_ps(a[0], a[1]);
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
        }
    }

    #[inline(always)]
    unsafe fn i_splat(x: i32) -> I {
        [unsafe { _mm256_set1_epi32(x) }; 2]
    }
    #[inline(always)]
    unsafe fn i_load_u8(p: *const u8) -> I {
        unsafe { both!(i => _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8 * i).cast()))) }
    }
    #[inline(always)]
    unsafe fn i_load_i8(p: *const i8) -> I {
        unsafe { both!(i => _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(8 * i).cast()))) }
    }
    #[inline(always)]
    unsafe fn i_add(a: I, b: I) -> I {
        unsafe { both!(i => _mm256_add_epi32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn i_and(a: I, b: I) -> I {
        unsafe { both!(i => _mm256_and_si256(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn i_or(a: I, b: I) -> I {
        unsafe { both!(i => _mm256_or_si256(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn i_shl<const N: u32>(a: I) -> I {
        unsafe { both!(i => _mm256_sll_epi32(a[i], _mm_cvtsi32_si128(N as i32))) }
    }
    #[inline(always)]
    unsafe fn i_shr<const N: u32>(a: I) -> I {
        unsafe { both!(i => _mm256_sra_epi32(a[i], _mm_cvtsi32_si128(N as i32))) }
    }
    #[inline(always)]
    unsafe fn i_to_f(a: I) -> F {
        unsafe { both!(i => _mm256_cvtepi32_ps(a[i])) }
    }

    #[inline(always)]
    unsafe fn b_load(p: *const u8) -> I {
        unsafe { [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())] }
    }
    #[inline(always)]
    unsafe fn b_splat(x: u8) -> I {
        [unsafe { _mm256_set1_epi8(x as i8) }; 2]
    }
    #[inline(always)]
    unsafe fn b_and(a: I, b: I) -> I {
        unsafe { both!(i => _mm256_and_si256(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn b_or(a: I, b: I) -> I {
        unsafe { both!(i => _mm256_or_si256(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn b_shl<const N: u32>(a: I) -> I {
        unsafe { Self::i_shl::<N>(a) }
    }
    #[inline(always)]
    unsafe fn b_shr<const N: u32>(a: I) -> I {
        unsafe { both!(i => _mm256_srl_epi32(a[i], _mm_cvtsi32_si128(N as i32))) }
    }
    #[inline(always)]
    unsafe fn b_for_dot8(codes: I) -> I {
        unsafe { both!(i => _mm256_xor_si256(codes[i], _mm256_set1_epi8(-128))) }
    }
    #[inline(always)]
    unsafe fn b_lookup(table: &[u8; 16], index: I) -> I {
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            both!(i => _mm256_shuffle_epi8(table, index[i]))
        }
    }
    #[inline(always)]
    unsafe fn b_from_i(a: I) -> I {
        a
    }

    #[inline(always)]
    unsafe fn points8<const N: usize, const U: usize>(
        book: &CodebookTable<N>,
        codes: *const u8,
        upper: [UpperBit; U],
        signs: Signs<I>,
    ) -> [I; 8] {
        unsafe {
            let mut steps = [[_mm256_setzero_si256(); 2]; 8];
            let indices = if U > 0 { indices(codes, upper) } else { Default::default() };
            for k in 0..4 {
                let both_steps = both!(i => {
                    // The rows are in an order in which the halves of the points can be separated within 16-byte lanes.
                    let code = |row| if U > 0 { indices[k][row] } else { u16::from(*codes.add(code_offset(row, k))) };
                    let point = |row: usize| book.point(code(8 * i + row)) as i64;
                    let a = _mm256_castsi256_ps(_mm256_set_epi64x(point(5), point(4), point(1), point(0)));
                    let b = _mm256_castsi256_ps(_mm256_set_epi64x(point(7), point(6), point(3), point(2)));
                    [
                        _mm256_castps_si256(_mm256_shuffle_ps::<0b10_00_10_00>(a, b)),
                        _mm256_castps_si256(_mm256_shuffle_ps::<0b11_01_11_01>(a, b)),
                    ]
                });
                steps[2 * k] = [both_steps[0][0], both_steps[1][0]];
                steps[2 * k + 1] = [both_steps[0][1], both_steps[1][1]];
            }
            codebook::valued8::<Self>(&book.values, steps, signs)
        }
    }

    #[inline(always)]
    unsafe fn points4(book: &CodebookTable<256>, codes: *const u8, signs: I) -> [I; 8] {
        unsafe {
            let mut indices = [signs; 8];
            for k in 0..8 {
                let point =
                    |row: usize| book.point(u16::from(*codes.add(64 * (k / 4) + code_offset(row, k % 4)))) as i32;
                indices[k] = both!(i => _mm256_setr_epi32(
                    point(8 * i), point(8 * i + 1), point(8 * i + 2), point(8 * i + 3),
                    point(8 * i + 4), point(8 * i + 5), point(8 * i + 6), point(8 * i + 7),
                ));
            }
            codebook::valued4::<Self>(&book.values, indices, signs)
        }
    }

    #[inline(always)]
    unsafe fn dot7(acc: I, codes: I, a: *const i8) -> I {
        unsafe {
            let a = _mm256_set1_epi32(a.cast::<i32>().read_unaligned());
            // The sum of a pair is at most 2 * 127 * 127 = 32 258: no saturation.
            let pairs = both!(i => _mm256_maddubs_epi16(codes[i], a));
            Self::i_add(acc, both!(i => _mm256_madd_epi16(pairs[i], _mm256_set1_epi16(1))))
        }
    }
    #[inline(always)]
    unsafe fn dot8(acc: I, codes: I, a: *const i8) -> I {
        unsafe {
            let a = _mm256_set1_epi32(a.cast::<i32>().read_unaligned());
            // |w| times a with w's sign; the sum of a pair is at most 2 * 128 * 127 = 32 512.
            let pairs = both!(i => _mm256_maddubs_epi16(_mm256_abs_epi8(codes[i]), _mm256_sign_epi8(a, codes[i])));
            Self::i_add(acc, both!(i => _mm256_madd_epi16(pairs[i], _mm256_set1_epi16(1))))
        }
    }

    /// Adds up pairs in 16 bits for a run of steps, so that there is one `madd` per run and not one per step.
    #[inline(always)]
    unsafe fn dots7<const T: usize, const FROM: usize, const TO: usize, const RUN: usize>(
        mut acc: [I; T],
        codes: &[I; 8],
        a: &[*const i8; T],
    ) -> [I; T] {
        unsafe {
            let mut pairs = [[_mm256_setzero_si256(); 2]; T];
            let mut n = 0;
            // Steps whose codes are in the same vector of a 4-bit plane follow each other. A macro, because the compiler does
            // not unroll a loop here.
            macro_rules! steps {
                ($($s:literal)*) => {$(
                    if const { FROM <= $s && $s < TO } {
                        for t in 0..T {
                            let a = _mm256_set1_epi32(a[t].add(4 * $s).cast::<i32>().read_unaligned());
                            pairs[t] = both!(i => _mm256_add_epi16(pairs[t][i], _mm256_maddubs_epi16(codes[$s][i], a)));
                        }
                        for t in 0..T {
                            in_place(&mut pairs[t]);
                        }
                        n += 1;
                        if n % RUN == 0 || n == TO - FROM {
                            for t in 0..T {
                                acc[t] = Self::i_add(acc[t], both!(i => _mm256_madd_epi16(pairs[t][i], _mm256_set1_epi16(1))));
                                pairs[t] = [_mm256_setzero_si256(); 2];
                            }
                        }
                    }
                )*};
            }
            steps!(0 4 1 5 2 6 3 7);
            acc
        }
    }
}
