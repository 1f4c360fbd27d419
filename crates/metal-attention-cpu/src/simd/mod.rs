//! Vectors of 16 lanes on every instruction set, and the choice of an instruction set at run time.
//!
//! A kernel is written once, as a [`Kernel`] that is generic over [`Simd`]. It is compiled for each instruction set, and
//! [`Isa::run`] calls the version for the chosen one. [`Scalar`](scalar::Scalar) implements the operations on plain arrays: the
//! reference that the others are tested against.

mod codebook;
mod isa;
mod math;
pub(crate) mod scalar;

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
#[cfg(test)]
mod tests;

pub(crate) use codebook::{CodebookTable, SIGN_BITS, Signs, UpperBit, code_offset};
pub use isa::Isa;
pub(crate) use math::{exp, sigmoid, softplus};

/// Lanes of every vector, on every instruction set.
pub(crate) const LANES: usize = 16;

/// 16-lane vector operations of one instruction set.
///
/// # Safety
///
/// All functions may use the instruction set's instructions, so the CPU must have them; [`Isa::run`] guarantees that. Pointers
/// must be valid for the whole vector; no alignment is needed.
pub(crate) trait Simd: Copy + 'static {
    /// 16 floats.
    type F: Copy;
    /// 16 signed 32-bit integers.
    type I: Copy;
    /// 16 groups of 4 bytes.
    type B: Copy;

    /// Whether [`dot8`](Self::dot8) reads codes as unsigned bytes, 0 to 255; otherwise as signed bytes, 128 less.
    const DOT8_UNSIGNED: bool;
    /// The most tokens of a tile in a matrix product: as many as keep the accumulators in registers. Kernels compare it in `const`
    /// blocks, so that larger tiles are not compiled.
    const TILE: usize;
    /// Whether the weights of a single token, which lie in large pages, are read faster without software prefetching: those of
    /// float matrices, and of formats with [`PackedFormat::STREAMS`](crate::packed::formats::PackedFormat::STREAMS).
    const STREAMS: bool;

    unsafe fn f_splat(x: f32) -> Self::F;
    unsafe fn f_load(p: *const f32) -> Self::F;
    unsafe fn f_load_f16(p: *const u16) -> Self::F;
    unsafe fn f_load_bf16(p: *const u16) -> Self::F;
    unsafe fn f_store(p: *mut f32, x: Self::F);
    /// Stores past the caches, where the CPU can do that, to memory that is not read soon. `p` is aligned to 64 bytes. Call
    /// [`fence`](Self::fence) before other threads read it.
    #[inline(always)]
    unsafe fn f_stream(p: *mut f32, x: Self::F) {
        // SAFETY: as the caller vouches.
        unsafe { Self::f_store(p, x) }
    }
    /// Orders all stores by [`f_stream`](Self::f_stream) before all later stores.
    #[inline(always)]
    unsafe fn fence() {}
    /// Rounds to nearest even.
    unsafe fn f_store_f16(p: *mut u16, x: Self::F);
    /// Rounds to nearest even and stores the low 8 bits of each lane.
    unsafe fn f_store_i8(p: *mut i8, x: Self::F);
    unsafe fn f_add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn f_sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn f_mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn f_div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once where the CPU fuses.
    unsafe fn f_fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn f_max(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn f_min(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn f_abs(a: Self::F) -> Self::F;
    /// The nearest integer, ties to even.
    unsafe fn f_round(a: Self::F) -> Self::F;
    /// `a * 2^n` for whole `n` in -126..=127.
    unsafe fn f_scale_by_power(a: Self::F, n: Self::F) -> Self::F;
    /// The sum of the lanes, always in the same order.
    unsafe fn f_sum(a: Self::F) -> f32;
    /// The largest lane.
    unsafe fn f_largest(a: Self::F) -> f32;

    unsafe fn i_splat(x: i32) -> Self::I;
    /// Loads 16 unsigned bytes, widened to 32 bits.
    unsafe fn i_load_u8(p: *const u8) -> Self::I;
    /// Loads 16 signed bytes, widened to 32 bits.
    unsafe fn i_load_i8(p: *const i8) -> Self::I;
    unsafe fn i_add(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn i_and(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn i_or(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn i_shl<const N: u32>(a: Self::I) -> Self::I;
    unsafe fn i_shr<const N: u32>(a: Self::I) -> Self::I;
    unsafe fn i_to_f(a: Self::I) -> Self::F;

    /// Loads 64 bytes.
    unsafe fn b_load(p: *const u8) -> Self::B;
    unsafe fn b_splat(x: u8) -> Self::B;
    unsafe fn b_and(a: Self::B, b: Self::B) -> Self::B;
    unsafe fn b_or(a: Self::B, b: Self::B) -> Self::B;
    /// Shifts 32-bit groups left; bits cross byte borders, so mask afterwards.
    unsafe fn b_shl<const N: u32>(a: Self::B) -> Self::B;
    /// Shifts 32-bit groups right; bits cross byte borders, so mask afterwards.
    unsafe fn b_shr<const N: u32>(a: Self::B) -> Self::B;
    /// Converts codes from 0 to 255 to those that [`dot8`](Self::dot8) reads: see [`DOT8_UNSIGNED`](Self::DOT8_UNSIGNED).
    unsafe fn b_for_dot8(codes: Self::B) -> Self::B;
    /// `table[index]` for every byte of `index`, each below 16.
    unsafe fn b_lookup(table: &[u8; 16], index: Self::B) -> Self::B;
    /// The 64 bytes of the 16 lanes.
    unsafe fn b_from_i(a: Self::I) -> Self::B;

    /// Looks up four codes of each row in a codebook with points of 8 columns. Step `2 k` of the result is columns 0 to 3 of
    /// code `k`, step `2 k + 1` columns 4 to 7. The lower 8 bits of the codes lie as given by [`code_offset`]; `upper` are
    /// their bits beyond eight, the lowest first.
    #[inline(always)]
    unsafe fn points8<const N: usize, const U: usize>(
        book: &CodebookTable<N>,
        codes: *const u8,
        upper: [UpperBit; U],
        signs: Signs<Self::B>,
    ) -> [Self::B; 8] {
        // SAFETY: as the caller vouches.
        unsafe { codebook::points8::<Self, N, U>(book, codes, upper, signs) }
    }
    /// Looks up eight codes of each row in a codebook with points of 4 columns. Step `k` of the result is code `k`, whose signs
    /// are bit `k` of `signs`. The codes lie as given by [`code_offset`], first codes 0 to 3, then 4 to 7.
    #[inline(always)]
    unsafe fn points4(book: &CodebookTable<256>, codes: *const u8, signs: Self::B) -> [Self::B; 8] {
        // SAFETY: as the caller vouches.
        unsafe { codebook::points4::<Self>(book, codes, signs) }
    }

    /// `acc[lane] += sum over j of codes[4 lane + j] * a[j]` with unsigned
    /// codes below 128 and the 4 signed activations at `a`.
    unsafe fn dot7(acc: Self::I, codes: Self::B, a: *const i8) -> Self::I;
    /// [`dot7`](Self::dot7) with codes of 8 bits: see [`DOT8_UNSIGNED`](Self::DOT8_UNSIGNED).
    unsafe fn dot8(acc: Self::I, codes: Self::B, a: *const i8) -> Self::I;

    /// [`dot7`](Self::dot7) of steps `FROM..TO`, 4 activations each, for the activations of `T` tokens. Codes are so small that
    /// the products of `RUN` steps can be added up in 16 bits: `2 * RUN * codes[s] * 127` is below 32 768.
    #[inline(always)]
    unsafe fn dots7<const T: usize, const FROM: usize, const TO: usize, const RUN: usize>(
        mut acc: [Self::I; T],
        codes: &[Self::B; 8],
        a: &[*const i8; T],
    ) -> [Self::I; T] {
        for s in FROM..TO {
            for t in 0..T {
                // SAFETY: as the caller vouches.
                acc[t] = unsafe { Self::dot7(acc[t], codes[s], a[t].add(4 * s)) };
            }
        }
        acc
    }
    /// [`dot8`](Self::dot8) of steps `FROM..TO`, 4 activations each, for the activations of `T` tokens.
    #[inline(always)]
    unsafe fn dots8<const T: usize, const FROM: usize, const TO: usize>(
        mut acc: [Self::I; T],
        codes: &[Self::B; 8],
        a: &[*const i8; T],
    ) -> [Self::I; T] {
        for s in FROM..TO {
            for t in 0..T {
                // SAFETY: as the caller vouches.
                acc[t] = unsafe { Self::dot8(acc[t], codes[s], a[t].add(4 * s)) };
            }
        }
        acc
    }
}

/// A computation that can be compiled for any instruction set.
///
/// Other preconditions of a kernel, such as valid pointers, are guaranteed where it is constructed: its fields are private to
/// the module that upholds them, or its constructor is unsafe.
pub(crate) trait Kernel {
    /// Runs the kernel on `S`. Implementations are `#[inline(always)]`, so that they are compiled with the instruction set of
    /// the caller.
    ///
    /// # Safety
    ///
    /// The CPU must have the instruction set of `S`.
    unsafe fn run<S: Simd>(self);
}

/// Prefetches the cache line at `p`, where the CPU has an instruction for that. Any address is allowed.
#[inline(always)]
pub(crate) fn prefetch(p: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: part of every x86-64; an address that is not mapped is ignored.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = p;
}
