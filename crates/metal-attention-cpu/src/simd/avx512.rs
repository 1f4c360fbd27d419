//! The vector operations on AVX-512 with VNNI. A vector of 16 lanes is one register. Codebooks are looked up with AVX-512 VBMI
//! where the CPU has it.

#[allow(clippy::wildcard_imports)] // the intrinsics
use std::arch::x86_64::*;

use super::{CodebookTable, Signs, Simd, UpperBit, codebook};

/// AVX-512 F, BW, VL, DQ and VNNI.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

/// `table[index % 128]` for every byte of `index`, where the table is the 128 bytes of `low` and `high`.
///
/// # Safety
///
/// The CPU must have AVX-512 VBMI, which [`Isa`](super::Isa) does not guarantee.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn lookup128(low: __m512i, high: __m512i, index: __m512i) -> __m512i {
    let mut found = index;
    // SAFETY: one instruction, on registers; the caller vouches that the CPU has it.
    unsafe {
        std::arch::asm!(
            "vpermi2b {}, {}, {}", inout(zmm_reg) found, in(zmm_reg) low, in(zmm_reg) high,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    found
}

/// `table[index % 64]` for every byte of `index`.
///
/// # Safety
///
/// See [`lookup128`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn lookup64(table: __m512i, index: __m512i) -> __m512i {
    let found: __m512i;
    // SAFETY: one instruction, on registers; the caller vouches that the CPU has it.
    unsafe {
        std::arch::asm!(
            "vpermb {}, {}, {}", out(zmm_reg) found, in(zmm_reg) index, in(zmm_reg) table,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    found
}

/// Looks up four codes of 16 rows: for each code a vector with 4 bytes per row, whose lower 4 bits are the value indices of
/// columns 0 to 3 and, of points of 8 columns, of columns 4 to 7 beside them.
///
/// # Safety
///
/// See [`lookup128`] and [`Simd::points8`].
#[inline(always)]
unsafe fn look_up<const N: usize, const U: usize>(
    book: &CodebookTable<N>,
    codes: *const u8,
    upper: [UpperBit; U],
) -> [__m512i; 4] {
    // SAFETY: as the caller vouches; all loads of the table lie inside it.
    unsafe {
        let index = _mm512_loadu_si512(codes.cast());
        // Bit 7 and the upper bits of the codes, as masks: each selects between tables of 128 entries, or between the results
        // of such selections.
        let mut bits = [_mm512_movepi8_mask(index); 4];
        for b in 0..U {
            let rows = _mm512_castsi128_si512(_mm_loadu_si128(upper[b].rows.cast()));
            let rows =
                _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), rows);
            let [p, q, r, s] = upper[b].bits.map(|bit| i32::from_ne_bytes([bit; 4]));
            bits[b + 1] = _mm512_test_epi8_mask(rows, _mm512_broadcast_i32x4(_mm_setr_epi32(p, q, r, s)));
        }
        let mut planes = [index; 2];
        for p in 0..2 {
            let table: *const __m512i = book.registers.planes[p].as_ptr().cast();
            let mut found = [index; 16];
            let mut n = N / 128;
            for j in 0..n {
                let (low, high) = (_mm512_loadu_si512(table.add(2 * j)), _mm512_loadu_si512(table.add(2 * j + 1)));
                found[j] = lookup128(low, high, index);
            }
            let mut bit = 0;
            while n > 1 {
                n /= 2;
                for j in 0..n {
                    found[j] = _mm512_mask_blend_epi8(bits[bit], found[2 * j], found[2 * j + 1]);
                }
                bit += 1;
            }
            planes[p] = found[0];
        }
        let low = _mm512_unpacklo_epi8(planes[0], planes[1]);
        let high = _mm512_unpackhi_epi8(planes[0], planes[1]);
        let (low_more, high_more) = (_mm512_srli_epi16::<4>(low), _mm512_srli_epi16::<4>(high));
        [
            _mm512_unpacklo_epi16(low, low_more),
            _mm512_unpackhi_epi16(low, low_more),
            _mm512_unpacklo_epi16(high, high_more),
            _mm512_unpackhi_epi16(high, high_more),
        ]
    }
}

/// The bits of `a` that are set in `MASK` (in every byte), and the others of `b`.
#[inline(always)]
unsafe fn select<const MASK: i8>(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi8(MASK), a, b) }
}

// SAFETY of every block below: the CPU has the instruction set and pointers are
// valid for one vector, as the trait requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    type B = __m512i;

    const DOT8_UNSIGNED: bool = true;
    const TILE: usize = 8;
    const STREAMS: bool = true;

    #[inline(always)]
    unsafe fn f_splat(x: f32) -> Self::F {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn f_load(p: *const f32) -> Self::F {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn f_load_f16(p: *const u16) -> Self::F {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn f_load_bf16(p: *const u16) -> Self::F {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn f_store(p: *mut f32, x: Self::F) {
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn f_stream(p: *mut f32, x: Self::F) {
        unsafe { _mm512_stream_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn fence() {
        unsafe { _mm_sfence() }
    }
    #[inline(always)]
    unsafe fn f_store_f16(p: *mut u16, x: Self::F) {
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }
    #[inline(always)]
    unsafe fn f_store_i8(p: *mut i8, x: Self::F) {
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))) }
    }
    #[inline(always)]
    unsafe fn f_add(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn f_sub(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn f_mul(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn f_div(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn f_fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn f_max(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn f_min(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn f_abs(a: Self::F) -> Self::F {
        unsafe { _mm512_abs_ps(a) }
    }
    #[inline(always)]
    unsafe fn f_round(a: Self::F) -> Self::F {
        unsafe { _mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(a) }
    }
    #[inline(always)]
    unsafe fn f_scale_by_power(a: Self::F, n: Self::F) -> Self::F {
        unsafe { _mm512_scalef_ps(a, n) }
    }
    #[inline(always)]
    unsafe fn f_sum(a: Self::F) -> f32 {
        unsafe {
            let a = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
        }
    }
    #[inline(always)]
    unsafe fn f_largest(a: Self::F) -> f32 {
        unsafe { _mm512_reduce_max_ps(a) }
    }

    #[inline(always)]
    unsafe fn i_splat(x: i32) -> Self::I {
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn i_load_u8(p: *const u8) -> Self::I {
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn i_load_i8(p: *const i8) -> Self::I {
        unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn i_add(a: Self::I, b: Self::I) -> Self::I {
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn i_and(a: Self::I, b: Self::I) -> Self::I {
        unsafe { _mm512_and_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn i_or(a: Self::I, b: Self::I) -> Self::I {
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn i_shl<const N: u32>(a: Self::I) -> Self::I {
        unsafe { _mm512_slli_epi32::<N>(a) }
    }
    #[inline(always)]
    unsafe fn i_shr<const N: u32>(a: Self::I) -> Self::I {
        unsafe { _mm512_srai_epi32::<N>(a) }
    }
    #[inline(always)]
    unsafe fn i_to_f(a: Self::I) -> Self::F {
        unsafe { _mm512_cvtepi32_ps(a) }
    }

    #[inline(always)]
    unsafe fn b_load(p: *const u8) -> Self::B {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn b_splat(x: u8) -> Self::B {
        unsafe { _mm512_set1_epi8(x as i8) }
    }
    #[inline(always)]
    unsafe fn b_and(a: Self::B, b: Self::B) -> Self::B {
        unsafe { _mm512_and_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn b_or(a: Self::B, b: Self::B) -> Self::B {
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn b_shl<const N: u32>(a: Self::B) -> Self::B {
        unsafe { _mm512_slli_epi32::<N>(a) }
    }
    #[inline(always)]
    unsafe fn b_shr<const N: u32>(a: Self::B) -> Self::B {
        unsafe { _mm512_srli_epi32::<N>(a) }
    }
    #[inline(always)]
    unsafe fn b_for_dot8(codes: Self::B) -> Self::B {
        codes
    }
    #[inline(always)]
    unsafe fn b_lookup(table: &[u8; 16], index: Self::B) -> Self::B {
        unsafe { _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), index) }
    }
    #[inline(always)]
    unsafe fn b_from_i(a: Self::I) -> Self::B {
        a
    }
    #[inline(always)]
    unsafe fn points8<const N: usize, const U: usize>(
        book: &CodebookTable<N>,
        codes: *const u8,
        upper: [UpperBit; U],
        signs: Signs<Self::B>,
    ) -> [Self::B; 8] {
        if !is_x86_feature_detected!("avx512vbmi") {
            return unsafe { codebook::points8::<Self, N, U>(book, codes, upper, signs) };
        }
        unsafe {
            let points = look_up(book, codes, upper);
            let mut out = [points[0]; 8];
            for k in 0..4 {
                // Value indices in bits 0 and 1, then those in bits 2 and 3, each with the signs of their step in the other
                // bits.
                let index = [select::<3>(points[k], signs[k / 2]), select::<12>(points[k], signs[k / 2])];
                for half in 0..2 {
                    out[2 * k + half] = Self::b_lookup(&book.registers.joined[2 * (k % 2) + half], index[half]);
                }
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn points4(book: &CodebookTable<256>, codes: *const u8, signs: Self::B) -> [Self::B; 8] {
        if !is_x86_feature_detected!("avx512vbmi") {
            return unsafe { codebook::points4::<Self>(book, codes, signs) };
        }
        unsafe {
            let [a, b, c, d] = look_up(book, codes, []);
            let [e, f, g, h] = look_up(book, codes.add(64), []);
            // The value index is in bits 0 to 2; bits 3 to 5 are the signs of three steps, of which the table reads one.
            let (first, last) = (_mm512_slli_epi32::<3>(signs), _mm512_srli_epi32::<3>(signs));
            let mut out = [a, b, c, d, e, f, g, h];
            for step in 0..8 {
                let signs = [first, signs, last][step / 3];
                let table = _mm512_loadu_si512(book.registers.long[step % 3].as_ptr().cast());
                out[step] = lookup64(table, select::<7>(out[step], signs));
            }
            out
        }
    }

    #[inline(always)]
    unsafe fn dot7(acc: Self::I, codes: Self::B, a: *const i8) -> Self::I {
        unsafe { _mm512_dpbusd_epi32(acc, codes, _mm512_set1_epi32(a.cast::<i32>().read_unaligned())) }
    }
    #[inline(always)]
    unsafe fn dot8(acc: Self::I, codes: Self::B, a: *const i8) -> Self::I {
        unsafe { Self::dot7(acc, codes, a) }
    }
}
