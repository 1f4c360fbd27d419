//! Elementary functions on vectors.

use super::Simd;

/// `e^x`, within 2 units in the last place for -70 <= x <= 88. Below -70 the result is `2^-126` too small; below -87.34, also
/// for `-inf`, it is 0. Above 88.376 it is that of 88.376.
///
/// Range reduction `x = n ln 2 + r` with `|r| <= ln 2 / 2` and `ln 2` in two parts (Cody and Waite), then the Taylor series of
/// `e^r` to the seventh order.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        // Clamped so that 2^n is a normal number. Smaller x give 2^-126, which the last subtraction turns into 0.
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

/// `ln(1 + e^x)` with a small relative error, also where the result is close to 0: `max(x, 0) + ln(1 + y)` with `y = e^-|x|`,
/// and `ln(1 + y) = 2 artanh(s)` with `s = y / (2 + y)`, at most 1/3, as a power series.
#[inline(always)]
pub(crate) unsafe fn softplus<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let y = exp::<S>(S::f_sub(S::f_splat(0.0), S::f_abs(x)));
        let s = S::f_div(y, S::f_add(y, S::f_splat(2.0)));
        let squared = S::f_mul(s, s);
        let mut p = S::f_splat(2.0 / 15.0);
        for c in [2.0 / 13.0, 2.0 / 11.0, 2.0 / 9.0, 2.0 / 7.0, 2.0 / 5.0, 2.0 / 3.0, 2.0] {
            p = S::f_fma(p, squared, S::f_splat(c));
        }
        S::f_fma(p, s, S::f_max(x, S::f_splat(0.0)))
    }
}
