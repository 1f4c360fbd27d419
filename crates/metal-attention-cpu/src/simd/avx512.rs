//! The vector operations on AVX-512 with VNNI: one register each.

#[allow(clippy::wildcard_imports)] // the intrinsics
use std::arch::x86_64::*;

use super::Simd;

/// AVX-512 F, BW, VL, DQ and VNNI.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

// SAFETY of every block below: the CPU has the instruction set and pointers are
// valid for one vector, as the trait asks.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    type B = __m512i;

    const DOT8_UNSIGNED: bool = true;
    const TILE: usize = 8;

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
    unsafe fn b_lookup(table: &[u8; 16], index: Self::B) -> Self::B {
        unsafe { _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), index) }
    }
    #[inline(always)]
    unsafe fn b_gather(table: *const u32, index: Self::I) -> Self::B {
        unsafe { _mm512_i32gather_epi32::<4>(index, table.cast()) }
    }
    #[inline(always)]
    unsafe fn b_from_i(a: Self::I) -> Self::B {
        a
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
