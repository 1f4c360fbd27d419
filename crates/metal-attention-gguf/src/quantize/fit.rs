//! The search for scales, which the quantisers share: weights of errors, least-squares scales of groups, and scales that are
//! stored as integers times a common factor.
//!
//! In all functions `x` are elements and `w` the weights of their squared errors. A *group* is the elements that share a scale;
//! `nearest` rounds an element divided by its scale to the value of the nearest code.

use std::array::from_fn;

use crate::blocks::UnalignedF16;

/// The number of scales that are tried for a group. They are the inner loop, so that the compiler can vectorise it.
pub(super) const CANDIDATES: usize = 16;

/// Rounds of choosing the integer scales of groups and refitting the common factor.
const ROUNDS: usize = 2;

/// The most times that a group's scale and minimum are refitted to the codes that they give.
const REFITS: usize = 3;

/// `1 / d`, or 0 for a block of zeros.
pub(super) fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The element of the largest magnitude, with its sign; the first one of several.
pub(super) fn extreme(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |extreme: f32, &x| if x.abs() > extreme.abs() { x } else { extreme })
}

/// Rounds to the nearest integer, ties to even, for magnitudes below 2^22: after adding 1.5 * 2^23 a float has no bits for a
/// fraction. Unlike `f32::round`, this is two instructions.
pub(super) fn round(x: f32) -> f32 {
    const NO_FRACTION: f32 = 12_582_912.0;
    x + NO_FRACTION - NO_FRACTION
}

/// The weight of each element's squared error. With importance: the importance of its column times
/// `sqrt(mean square of the block + square of the element)`. Without: `default` of the element's magnitude and of the root mean
/// square of the block. Magnitudes and importance are relative to their maximum in the block, because squares of small numbers
/// would underflow.
pub(super) fn weights<const N: usize>(
    x: &[f32; N],
    importance: Option<&[f32; N]>,
    default: impl Fn(f32, f32) -> f32,
) -> [f32; N] {
    let unit = inverse(extreme(x).abs());
    let rms = (x.iter().map(|x| (x * unit).powi(2)).sum::<f32>() / N as f32).sqrt();
    match importance {
        None => x.map(|x| default((x * unit).abs(), rms)),
        Some(importance) => {
            let unit_importance = inverse(extreme(importance));
            // Columns without input get a small weight, so that they are still fitted where that costs the others nothing.
            let column = |i: usize| (importance[i] * unit_importance).max(1e-6);
            from_fn(|i| column(i) * (rms * rms + (x[i] * unit).powi(2)).sqrt())
        }
    }
}

/// The inverse scales that are tried: those that map `range` to `largest`, or to up to 0.8 codes less or 0.7 codes more.
fn candidates(largest: f32, range: f32) -> [f32; CANDIDATES] {
    from_fn(|i| (largest + 0.1 * (i as f32 - 8.0)) / range)
}

// ---- points of a codebook -------------------------------------------------------------------

/// Weighted sums of products of elements `x` and the values `p` of the points that were chosen for them, from which scale and
/// error follow.
#[derive(Clone, Copy, Default)]
pub(super) struct FitSums {
    /// The sum of `w x x`.
    pub(super) xx: f32,
    /// The sum of `w x p`.
    pub(super) xp: f32,
    /// The sum of `w p p`.
    pub(super) pp: f32,
}

impl FitSums {
    /// Adds one element.
    pub(super) fn add(&mut self, x: f32, w: f32, p: f32) {
        self.xx += w * x * x;
        self.xp += w * x * p;
        self.pp += w * p * p;
    }

    /// The sums of both sets of elements.
    pub(super) fn plus(self, other: &Self) -> Self {
        Self { xx: self.xx + other.xx, xp: self.xp + other.xp, pp: self.pp + other.pp }
    }

    /// The least-squares scale for these points.
    pub(super) fn scale(&self) -> f32 {
        if self.pp > 0.0 { self.xp / self.pp } else { 0.0 }
    }

    /// The reduction of the squared error by that scale, compared with a scale of 0.
    pub(super) fn gain(&self) -> f32 {
        self.xp * self.scale()
    }

    /// The squared error with a given scale.
    pub(super) fn error(&self, scale: f32) -> f32 {
        self.xx - scale * (2.0 * self.xp - scale * self.pp)
    }
}

// ---- symmetric groups: x = scale * code -----------------------------------------------------

/// The scale with the smallest error for one group. `largest` is the code to which the extreme element is mapped in the middle
/// of the candidates. 0 for a group of zeros.
pub(super) fn best_scale(x: &[f32], w: &[f32], largest: f32, nearest: impl Fn(f32) -> f32) -> f32 {
    let extreme = extreme(x);
    if extreme == 0.0 {
        return 0.0;
    }
    let inverses = candidates(largest, extreme);
    // For each candidate the weighted sums of x * q and q * q.
    let mut sums = [(0.0, 0.0); CANDIDATES];
    for (&x, &w) in x.iter().zip(w) {
        for ((xq, qq), inverse) in sums.iter_mut().zip(inverses) {
            let q = nearest(x * inverse);
            *xq += w * x * q;
            *qq += w * q * q;
        }
    }
    // The least-squares scale is xq / qq; it reduces the squared error by xq^2 / qq.
    let gain = |&&(xq, qq): &&(f32, f32)| if qq > 0.0 { xq * xq / qq } else { 0.0 };
    match sums.iter().max_by(|a, b| gain(a).total_cmp(&gain(b))) {
        Some(&(xq, qq)) if qq > 0.0 => xq / qq,
        _ => 0.0,
    }
}

/// The scales of a block with symmetric groups: `x = d * scale * code`.
pub(super) struct Symmetric<const GROUPS: usize> {
    /// The common factor.
    pub(super) d: UnalignedF16,
    /// The integer scale of each group, from `-largest` to `largest - 1`.
    pub(super) scales: [i32; GROUPS],
}

/// Quantises the scales of a block's groups to integers in `-largest..largest` times a common factor, and improves integers and
/// factor alternately.
pub(super) fn whole_scales<const GROUPS: usize>(
    x: &[f32],
    w: &[f32],
    scales: [f32; GROUPS],
    largest: f32,
    nearest: impl Fn(f32) -> f32,
) -> Symmetric<GROUPS> {
    let len = x.len() / GROUPS;
    let error = |x: &[f32], w: &[f32], scale: f32| -> f32 {
        let inverse = inverse(scale);
        x.iter().zip(w).map(|(&x, w)| w * (x - scale * nearest(x * inverse)).powi(2)).sum()
    };
    let [first, rest @ ..] = common_factors(&scales, -largest).map(|d| (d, whole(scales, d, -largest, largest - 1.0)));
    let (mut d, mut codes) = least(first, rest, |(d, codes)| {
        (0..GROUPS).map(|g| error(&x[g * len..][..len], &w[g * len..][..len], d.to_f32() * codes[g])).sum()
    });
    for _ in 0..ROUNDS {
        let (mut xq, mut qq) = (0.0, 0.0);
        for (g, code) in codes.iter_mut().enumerate() {
            let (x, w) = (&x[g * len..][..len], &w[g * len..][..len]);
            *code = nearby(*code, -largest, largest - 1.0, |code| error(x, w, d.to_f32() * code));
            let inverse = inverse(d.to_f32() * *code);
            for (&x, &w) in x.iter().zip(w) {
                let q = *code * nearest(x * inverse);
                xq += w * x * q;
                qq += w * q * q;
            }
        }
        if qq > 0.0 {
            d = UnalignedF16::from_f32(xq / qq);
        }
    }
    Symmetric { d, scales: codes.map(|code| code as i32) }
}

/// The common factors of `values` that are tried: those with which the extreme value becomes `largest`, or one, two or three
/// less. With one of these, numbers that were dequantised from such a block are reproduced.
fn common_factors(values: &[f32], largest: f32) -> [UnalignedF16; 4] {
    let extreme = extreme(values);
    [0.0, 1.0, 2.0, 3.0].map(|less| UnalignedF16::from_f32(extreme / (largest - largest.signum() * less)))
}

/// `values` as integer multiples of `d`, from `low` to `high`.
fn whole<const N: usize>(values: [f32; N], d: UnalignedF16, low: f32, high: f32) -> [f32; N] {
    let inverse = inverse(d.to_f32());
    values.map(|value| round((value * inverse).clamp(low, high)))
}

/// The candidate with the smallest error: `first` or one of `rest`, the first of several.
fn least<T>(first: T, rest: impl IntoIterator<Item = T>, error: impl Fn(&T) -> f32) -> T {
    let smaller = |best: (f32, T), one: T| {
        let error = error(&one);
        if error.total_cmp(&best.0).is_lt() { (error, one) } else { best }
    };
    rest.into_iter().fold((error(&first), first), smaller).1
}

/// `code`, or the neighbour `code - 1` or `code + 1` in `low..=high`, whichever has the smallest error.
pub(super) fn nearby(code: f32, low: f32, high: f32, error: impl Fn(f32) -> f32) -> f32 {
    let mut best = (error(code), code);
    for other in [code - 1.0, code + 1.0] {
        if (low..=high).contains(&other) {
            let error = error(other);
            if error < best.0 {
                best = (error, other);
            }
        }
    }
    best.1
}

// ---- groups with a minimum: x = scale * code - min ------------------------------------------

/// The scale and the minimum with the smallest error for one group with codes from 0 to `largest`. The scale is at least 0;
/// so is the minimum where `non_negative` is set.
pub(super) fn best_scale_min(x: &[f32], weights: &[f32], largest: f32, non_negative: bool) -> (f32, f32) {
    let low = x.iter().fold(if non_negative { 0.0f32 } else { f32::INFINITY }, |low, &x| low.min(x));
    let high = x.iter().fold(low, |high, &x| high.max(x));
    if high == low {
        return (0.0, -low);
    }
    let inverses = candidates(largest, high - low);
    // The weighted sums of 1, x and x * x, and for each candidate those of q, q * q and q * x.
    let (mut w, mut wx, mut wxx) = (0.0, 0.0, 0.0);
    let mut sums = [(0.0, 0.0, 0.0); CANDIDATES];
    for (&x, &weight) in x.iter().zip(weights) {
        w += weight;
        wx += weight * x;
        wxx += weight * x * x;
        for ((wq, wqq, wqx), inverse) in sums.iter_mut().zip(inverses) {
            let q = round(((x - low) * inverse).clamp(0.0, largest));
            *wq += weight * q;
            *wqq += weight * q * q;
            *wqx += weight * q * x;
        }
    }
    let fit = |(wq, wqq, wqx): (f32, f32, f32)| {
        // Least squares for both, or for the scale alone where the minimum would be negative.
        let determinant = w * wqq - wq * wq;
        let mut scale = (w * wqx - wq * wx) / determinant;
        let mut min = (wq * wqx - wqq * wx) / determinant;
        if determinant <= 0.0 || (non_negative && min < 0.0) {
            (scale, min) = (wqx / wqq, 0.0);
        }
        let square = scale * (scale * wqq - 2.0 * (min * wq + wqx)) + min * (min * w + 2.0 * wx);
        (square + wxx, scale.max(0.0), min)
    };
    let fits = sums.into_iter().filter(|(_, wqq, _)| *wqq > 0.0).map(fit);
    let Some(mut best) = fits.min_by(|a, b| a.0.total_cmp(&b.0)) else { return (0.0, -low) };
    // The codes of the refitted scale and minimum may be better ones.
    for _ in 0..REFITS {
        let (inverse, min) = (inverse(best.1), best.2);
        let mut sums = (0.0, 0.0, 0.0);
        for (&x, &weight) in x.iter().zip(weights) {
            let q = round(((x + min) * inverse).clamp(0.0, largest));
            sums.0 += weight * q;
            sums.1 += weight * q * q;
            sums.2 += weight * q * x;
        }
        let again = fit(sums);
        // Written so that it also stops where there is no solution and the error is NaN.
        if !(sums.1 > 0.0 && again.0 < best.0) {
            break;
        }
        best = again;
    }
    (best.1, best.2)
}

/// The scales and minimums of a block: `x = d * scale * code - dmin * min`.
pub(super) struct Affine<const GROUPS: usize> {
    /// The common factor of the scales.
    pub(super) d: UnalignedF16,
    /// The common factor of the minimums.
    pub(super) dmin: UnalignedF16,
    /// The integer scale of each group.
    pub(super) scales: [f32; GROUPS],
    /// The integer minimum of each group.
    pub(super) mins: [f32; GROUPS],
}

impl<const GROUPS: usize> Affine<GROUPS> {
    /// Searches scales and minimums, integers from 0 to `largest_scale`, for codes from 0 to `largest`.
    pub(super) fn new(x: &[f32], w: &[f32], largest: f32, largest_scale: f32) -> Self {
        let len = x.len() / GROUPS;
        let fits: [_; GROUPS] = from_fn(|g| best_scale_min(&x[g * len..][..len], &w[g * len..][..len], largest, true));
        let (scales, mins) = (fits.map(|(scale, _)| scale), fits.map(|(_, min)| min));
        let with = |d: UnalignedF16, dmin: UnalignedF16| Self {
            d,
            dmin,
            scales: whole(scales, d, 0.0, largest_scale),
            mins: whole(mins, dmin, 0.0, largest_scale),
        };
        let error = |fit: &Self| (0..GROUPS).map(|g| fit.error(g, x, w, largest, fit.scales[g], fit.mins[g])).sum();
        let [d, more_d @ ..] = common_factors(&scales, largest_scale);
        let [dmin, more_dmin @ ..] = common_factors(&mins, largest_scale);
        let fit = least(with(d, dmin), more_d.map(|d| with(d, dmin)), error);
        let mut fit = least(with(fit.d, dmin), more_dmin.map(|dmin| with(fit.d, dmin)), error);
        for _ in 0..ROUNDS {
            (0..GROUPS).for_each(|g| fit.improve_group(g, x, w, largest, largest_scale));
            fit.refit(x, w, largest);
        }
        fit
    }

    /// The squared error of group `g` with this scale and minimum.
    fn error(&self, g: usize, x: &[f32], w: &[f32], largest: f32, scale: f32, min: f32) -> f32 {
        let len = x.len() / GROUPS;
        let (x, w) = (&x[g * len..][..len], &w[g * len..][..len]);
        let (scale, min) = (self.d.to_f32() * scale, self.dmin.to_f32() * min);
        let inverse = inverse(scale);
        let code = |x: f32| round(((x + min) * inverse).clamp(0.0, largest));
        x.iter().zip(w).map(|(&x, w)| w * (scale * code(x) - min - x).powi(2)).sum()
    }

    /// Replaces the scale and the minimum of group `g` by neighbours that have a smaller error.
    fn improve_group(&mut self, g: usize, x: &[f32], w: &[f32], largest: f32, largest_scale: f32) {
        const NEIGHBOURS: [(f32, f32); 8] =
            [(-1.0, 0.0), (1.0, 0.0), (0.0, -1.0), (0.0, 1.0), (-1.0, -1.0), (1.0, 1.0), (-1.0, 1.0), (1.0, -1.0)];
        let error = |scale, min| self.error(g, x, w, largest, scale, min);
        let (scale, min) = (self.scales[g], self.mins[g]);
        let mut best = (error(scale, min), scale, min);
        for (ds, dm) in NEIGHBOURS {
            let (scale, min) = (scale + ds, min + dm);
            if (0.0..=largest_scale).contains(&scale) && (0.0..=largest_scale).contains(&min) {
                let error = error(scale, min);
                if error < best.0 {
                    best = (error, scale, min);
                }
            }
        }
        (self.scales[g], self.mins[g]) = (best.1, best.2);
    }

    /// Refits `d` and `dmin` to the current codes: least squares of `x = d a - dmin b`.
    fn refit(&mut self, x: &[f32], w: &[f32], largest: f32) {
        let codes = self.codes(x, largest);
        let len = x.len() / GROUPS;
        let (mut aa, mut ab, mut bb, mut ax, mut bx) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for i in 0..x.len() {
            let (a, b) = (self.scales[i / len] * codes(i), self.mins[i / len]);
            let (wa, wb) = (w[i] * a, w[i] * b);
            aa += wa * a;
            ab += wa * b;
            bb += wb * b;
            ax += wa * x[i];
            bx += wb * x[i];
        }
        let determinant = aa * bb - ab * ab;
        // Where a and b are nearly parallel, a solution for both would be noise: only d is refitted.
        let (d, dmin) = if determinant > 1e-3 * aa * bb {
            ((ax * bb - bx * ab) / determinant, (ax * ab - bx * aa) / determinant)
        } else if aa > 0.0 {
            ((ax + self.dmin.to_f32() * ab) / aa, self.dmin.to_f32())
        } else {
            return;
        };
        if d > 0.0 && dmin >= 0.0 {
            (self.d, self.dmin) = (UnalignedF16::from_f32(d), UnalignedF16::from_f32(dmin));
        }
    }

    /// A function that returns the code of element `i` of `x`.
    pub(super) fn codes<'a>(&self, x: &'a [f32], largest: f32) -> impl Fn(usize) -> f32 + use<'a, GROUPS> {
        let len = x.len() / GROUPS;
        let inverses = self.scales.map(|scale| inverse(self.d.to_f32() * scale));
        let offsets = self.mins.map(|min| self.dmin.to_f32() * min);
        move |i| round(((x[i] + offsets[i / len]) * inverses[i / len]).clamp(0.0, largest))
    }
}
