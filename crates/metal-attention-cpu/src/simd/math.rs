//! Elementary functions on vectors.

use super::Simd;

/// `e^x` within 2 ulp for -70 <= x <= 88; `2^-126` less below that, so 0 below
/// -87.34 (also for `-inf`).
///
/// Range reduction `x = n ln 2 + r`, `|r| <= ln 2 / 2`, with `ln 2` in two parts
/// (Cody and Waite), then the Taylor series of `e^r` to the seventh order.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        // Clamped so that 2^n stays a normal number; what lies below comes out
        // as 2^-126 and is flushed by the last subtraction.
        let lowest = S::f_splat(-87.34);
        let x = S::f_max(S::f_min(x, S::f_splat(88.376_26)), lowest);
        let n = S::f_round(S::f_mul(x, S::f_splat(std::f32::consts::LOG2_E)));
        let r = S::f_fma(n, S::f_splat(-0.693_359_4), x);
        let r = S::f_fma(n, S::f_splat(2.121_944_4e-4), r);
        let mut p = S::f_splat(1.0 / 5040.0);
        for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = S::f_fma(p, r, S::f_splat(c));
        }
        let e = S::f_scale_by_power(p, n);
        // e^-87.34 is below the smallest normal number: it becomes 0.
        S::f_max(S::f_sub(e, S::f_splat(f32::MIN_POSITIVE)), S::f_splat(0.0))
    }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) unsafe fn sigmoid<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let one = S::f_splat(1.0);
        S::f_div(one, S::f_add(one, exp::<S>(S::f_sub(S::f_splat(0.0), x))))
    }
}
