//! The vector operations on Arm NEON with dot products. A vector of 16 lanes is four registers.
//!
//! Dot products and half-precision conversions are single instructions in assembly: their intrinsics became stable after this
//! crate's `rust-version`.
//!
//! All tests of this crate have passed on an emulated Arm CPU (QEMU, Linux). It has not run on an Arm machine yet, so its speed
//! is unknown.

#[allow(clippy::wildcard_imports)] // the intrinsics
use std::arch::aarch64::*;
use std::arch::asm;

use super::Simd;

/// NEON and dot products.
#[derive(Clone, Copy)]
pub(crate) struct Neon;

type F = [float32x4_t; 4];
type I = [int32x4_t; 4];
type B = [uint8x16_t; 4];

/// Evaluates an expression for each of the registers 0 to 3. A macro and not a function with a closure: a closure may not be
/// inlined, and is then compiled without the instruction set.
macro_rules! each {
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
            {
                let $i = 2;
                $e
            },
            {
                let $i = 3;
                $e
            },
        ]
    };
}

/// `acc[i] + a[4i] b[4i] + ... + a[4i + 3] b[4i + 3]`
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(mut acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: one instruction on registers; the CPU has it, as the target feature requires.
    unsafe {
        asm!("sdot {acc:v}.4s, {a:v}.16b, {b:v}.16b", acc = inout(vreg) acc, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

/// Converts 8 half-precision numbers to floats.
#[inline]
#[target_feature(enable = "neon")]
fn widen_f16(h: uint16x8_t) -> [float32x4_t; 2] {
    let (low, high);
    // SAFETY: instructions on registers that every CPU with NEON has.
    unsafe {
        asm!("fcvtl {x:v}.4s, {h:v}.4h", x = out(vreg) low, h = in(vreg) h,
            options(pure, nomem, nostack, preserves_flags));
        asm!("fcvtl2 {x:v}.4s, {h:v}.8h", x = out(vreg) high, h = in(vreg) h,
            options(pure, nomem, nostack, preserves_flags));
    }
    [low, high]
}

/// Converts 8 floats to half precision, rounded to nearest even: the CPU's default mode.
#[inline]
#[target_feature(enable = "neon")]
fn narrow_f16(low: float32x4_t, high: float32x4_t) -> uint16x8_t {
    let h: uint16x8_t;
    // SAFETY: instructions on registers that every CPU with NEON has.
    unsafe {
        asm!("fcvtn {h:v}.4h, {low:v}.4s", "fcvtn2 {h:v}.8h, {high:v}.4s",
            h = out(vreg) h, low = in(vreg) low, high = in(vreg) high,
            options(pure, nomem, nostack, preserves_flags));
    }
    h
}

/// Copies the 4 activations at `p` to every group of 4 bytes.
///
/// # Safety
///
/// `p` points to 4 bytes.
#[inline(always)]
unsafe fn activations(p: *const i8) -> int8x16_t {
    // SAFETY: as the caller vouches.
    unsafe { vreinterpretq_s8_s32(vdupq_n_s32(p.cast::<i32>().read_unaligned())) }
}

// SAFETY of every block below: the CPU has the instruction set and pointers are
// valid for one vector, as the trait requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Neon {
    type F = F;
    type I = I;
    type B = B;

    const DOT8_UNSIGNED: bool = false;
    const TILE: usize = 4;
    const STREAMS: bool = false;

    #[inline(always)]
    unsafe fn f_splat(x: f32) -> F {
        [unsafe { vdupq_n_f32(x) }; 4]
    }
    #[inline(always)]
    unsafe fn f_load(p: *const f32) -> F {
        unsafe { each!(i => vld1q_f32(p.add(4 * i))) }
    }
    #[inline(always)]
    unsafe fn f_load_f16(p: *const u16) -> F {
        unsafe {
            let [a, b] = widen_f16(vld1q_u16(p));
            let [c, d] = widen_f16(vld1q_u16(p.add(8)));
            [a, b, c, d]
        }
    }
    #[inline(always)]
    unsafe fn f_load_bf16(p: *const u16) -> F {
        unsafe {
            let (low, high) = (vld1q_u16(p), vld1q_u16(p.add(8)));
            let bits = [
                vshll_n_u16::<16>(vget_low_u16(low)),
                vshll_high_n_u16::<16>(low),
                vshll_n_u16::<16>(vget_low_u16(high)),
                vshll_high_n_u16::<16>(high),
            ];
            each!(i => vreinterpretq_f32_u32(bits[i]))
        }
    }
    #[inline(always)]
    unsafe fn f_store(p: *mut f32, x: F) {
        for i in 0..4 {
            unsafe { vst1q_f32(p.add(4 * i), x[i]) }
        }
    }
    #[inline(always)]
    unsafe fn f_store_f16(p: *mut u16, x: F) {
        unsafe {
            vst1q_u16(p, narrow_f16(x[0], x[1]));
            vst1q_u16(p.add(8), narrow_f16(x[2], x[3]));
        }
    }
    #[inline(always)]
    unsafe fn f_store_i8(p: *mut i8, x: F) {
        unsafe {
            // The even elements of a pair of registers are the low halves of elements twice as wide.
            let [a, b, c, d] = each!(i => vreinterpretq_s16_s32(vcvtnq_s32_f32(x[i])));
            let (low, high) = (vuzp1q_s16(a, b), vuzp1q_s16(c, d));
            vst1q_s8(p, vuzp1q_s8(vreinterpretq_s8_s16(low), vreinterpretq_s8_s16(high)));
        }
    }
    #[inline(always)]
    unsafe fn f_add(a: F, b: F) -> F {
        unsafe { each!(i => vaddq_f32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn f_sub(a: F, b: F) -> F {
        unsafe { each!(i => vsubq_f32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn f_mul(a: F, b: F) -> F {
        unsafe { each!(i => vmulq_f32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn f_div(a: F, b: F) -> F {
        unsafe { each!(i => vdivq_f32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn f_fma(a: F, b: F, c: F) -> F {
        unsafe { each!(i => vfmaq_f32(c[i], a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn f_max(a: F, b: F) -> F {
        unsafe { each!(i => vmaxq_f32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn f_min(a: F, b: F) -> F {
        unsafe { each!(i => vminq_f32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn f_abs(a: F) -> F {
        unsafe { each!(i => vabsq_f32(a[i])) }
    }
    #[inline(always)]
    unsafe fn f_round(a: F) -> F {
        unsafe { each!(i => vrndnq_f32(a[i])) }
    }
    #[inline(always)]
    unsafe fn f_scale_by_power(a: F, n: F) -> F {
        unsafe {
            let exponent = each!(i => vaddq_s32(vcvtnq_s32_f32(n[i]), vdupq_n_s32(127)));
            each!(i => vmulq_f32(a[i], vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent[i]))))
        }
    }
    #[inline(always)]
    unsafe fn f_sum(a: F) -> f32 {
        unsafe {
            let a = vaddq_f32(vaddq_f32(a[0], a[2]), vaddq_f32(a[1], a[3]));
            vpadds_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a)))
        }
    }
    #[inline(always)]
    unsafe fn f_largest(a: F) -> f32 {
        unsafe { vmaxvq_f32(vmaxq_f32(vmaxq_f32(a[0], a[1]), vmaxq_f32(a[2], a[3]))) }
    }

    #[inline(always)]
    unsafe fn i_splat(x: i32) -> I {
        [unsafe { vdupq_n_s32(x) }; 4]
    }
    #[inline(always)]
    unsafe fn i_load_u8(p: *const u8) -> I {
        unsafe {
            let bytes = vld1q_u8(p);
            let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
            let words = [
                vmovl_u16(vget_low_u16(low)),
                vmovl_high_u16(low),
                vmovl_u16(vget_low_u16(high)),
                vmovl_high_u16(high),
            ];
            each!(i => vreinterpretq_s32_u32(words[i]))
        }
    }
    #[inline(always)]
    unsafe fn i_load_i8(p: *const i8) -> I {
        unsafe {
            let bytes = vld1q_s8(p);
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            [vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)]
        }
    }
    #[inline(always)]
    unsafe fn i_add(a: I, b: I) -> I {
        unsafe { each!(i => vaddq_s32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn i_and(a: I, b: I) -> I {
        unsafe { each!(i => vandq_s32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn i_or(a: I, b: I) -> I {
        unsafe { each!(i => vorrq_s32(a[i], b[i])) }
    }
    // Shifts by a constant vector, which the compiler turns into shifts by an immediate. The intrinsics of these have an `i32`
    // const parameter, which a `u32` one cannot be converted to.
    #[inline(always)]
    unsafe fn i_shl<const N: u32>(a: I) -> I {
        unsafe { each!(i => vshlq_s32(a[i], vdupq_n_s32(N as i32))) }
    }
    #[inline(always)]
    unsafe fn i_shr<const N: u32>(a: I) -> I {
        unsafe { each!(i => vshlq_s32(a[i], vdupq_n_s32(-(N as i32)))) }
    }
    #[inline(always)]
    unsafe fn i_to_f(a: I) -> F {
        unsafe { each!(i => vcvtq_f32_s32(a[i])) }
    }

    #[inline(always)]
    unsafe fn b_load(p: *const u8) -> B {
        unsafe { each!(i => vld1q_u8(p.add(16 * i))) }
    }
    #[inline(always)]
    unsafe fn b_splat(x: u8) -> B {
        [unsafe { vdupq_n_u8(x) }; 4]
    }
    #[inline(always)]
    unsafe fn b_and(a: B, b: B) -> B {
        unsafe { each!(i => vandq_u8(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn b_or(a: B, b: B) -> B {
        unsafe { each!(i => vorrq_u8(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn b_shl<const N: u32>(a: B) -> B {
        unsafe { each!(i => vreinterpretq_u8_u32(vshlq_u32(vreinterpretq_u32_u8(a[i]), vdupq_n_s32(N as i32)))) }
    }
    #[inline(always)]
    unsafe fn b_shr<const N: u32>(a: B) -> B {
        unsafe { each!(i => vreinterpretq_u8_u32(vshlq_u32(vreinterpretq_u32_u8(a[i]), vdupq_n_s32(-(N as i32))))) }
    }
    #[inline(always)]
    unsafe fn b_for_dot8(codes: B) -> B {
        unsafe { each!(i => veorq_u8(codes[i], vdupq_n_u8(128))) }
    }
    #[inline(always)]
    unsafe fn b_lookup(table: &[u8; 16], index: B) -> B {
        let table = unsafe { vld1q_u8(table.as_ptr()) };
        unsafe { each!(i => vqtbl1q_u8(table, index[i])) }
    }
    #[inline(always)]
    unsafe fn b_from_i(a: I) -> B {
        unsafe { each!(i => vreinterpretq_u8_s32(a[i])) }
    }

    #[inline(always)]
    unsafe fn dot7(acc: I, codes: B, a: *const i8) -> I {
        unsafe {
            let a = activations(a);
            each!(i => sdot(acc[i], vreinterpretq_s8_u8(codes[i]), a))
        }
    }
    #[inline(always)]
    unsafe fn dot8(acc: I, codes: B, a: *const i8) -> I {
        unsafe {
            let a = activations(a);
            each!(i => sdot(acc[i], vreinterpretq_s8_u8(codes[i]), a))
        }
    }
}
