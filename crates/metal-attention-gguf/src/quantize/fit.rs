//! What all searches share: weights of errors, scales by least squares, and scales that are stored as whole numbers
//! times a common factor.

use std::array::from_fn;

use crate::blocks::UnalignedF16;

/// How many scales are tried per group. They are the inner loop, so that the compiler can work on
/// several at once.
pub(super) const CANDIDATES: usize = 16;

/// Rounds of choosing the groups' scales and refitting the common factor.
const ROUNDS: usize = 2;

/// Times that a group's scale and minimum are fitted to the codes that come of them.
const REFITS: usize = 3;

/// `1 / d`, or 0 for a block of zeros.
pub(super) fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The value of the largest magnitude, with its sign; the first of several.
pub(super) fn extreme(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |extreme: f32, &x| if x.abs() > extreme.abs() { x } else { extreme })
}

/// Rounds to the nearest whole number, ties to even, for magnitudes below 2^22: adding and taking
/// away 1.5 * 2^23 leaves no bits for a fraction, and unlike `f32::round` is one instruction each.
pub(super) fn round(x: f32) -> f32 {
    const NO_FRACTION: f32 = 12_582_912.0;
    x + NO_FRACTION - NO_FRACTION
}

/// How much the square of each element's error counts: by the importance of its column, and more for large elements,
/// or by `own`, which gets the element and the block's root mean square. Both relative to the block, because squares of
/// small numbers would vanish.
pub(super) fn weights<const N: usize>(
    x: &[f32; N],
    importance: Option<&[f32; N]>,
    own: impl Fn(f32, f32) -> f32,
) -> [f32; N] {
    let unit = inverse(extreme(x).abs());
    let rms = (x.iter().map(|x| (x * unit).powi(2)).sum::<f32>() / N as f32).sqrt();
    match importance {
        None => x.map(|x| own((x * unit).abs(), rms)),
        Some(importance) => {
            let unit_importance = inverse(extreme(importance));
            // A column that nothing came through still wants its numbers kept where that costs nothing.
            let column = |i: usize| (importance[i] * unit_importance).max(1e-6);
            from_fn(|i| column(i) * (rms * rms + (x[i] * unit).powi(2)).sqrt())
        }
    }
}

/// The factors to codes that are tried: those that bring `range` to `largest`, or up to 0.8 codes
/// less or 0.7 more.
fn candidates(largest: f32, range: f32) -> [f32; CANDIDATES] {
    from_fn(|i| (largest + 0.1 * (i as f32 - 8.0)) / range)
}

// ---- points of a codebook -------------------------------------------------------------------

/// Weighted sums of products of elements and the points that stand for them.
#[derive(Clone, Copy, Default)]
pub(super) struct FitSums {
    pub(super) xx: f32,
    pub(super) xp: f32,
    pub(super) pp: f32,
}

impl FitSums {
    pub(super) fn add(&mut self, x: f32, w: f32, p: f32) {
        self.xx += w * x * x;
        self.xp += w * x * p;
        self.pp += w * p * p;
    }

    pub(super) fn plus(self, other: &Self) -> Self {
        Self { xx: self.xx + other.xx, xp: self.xp + other.xp, pp: self.pp + other.pp }
    }

    /// The best scale for these points.
    pub(super) fn scale(&self) -> f32 {
        if self.pp > 0.0 { self.xp / self.pp } else { 0.0 }
    }

    /// What that scale takes off the squared error.
    pub(super) fn gain(&self) -> f32 {
        self.xp * self.scale()
    }

    /// The squared error with a given scale.
    pub(super) fn error(&self, scale: f32) -> f32 {
        self.xx - scale * (2.0 * self.xp - scale * self.pp)
    }
}

// ---- symmetric groups: x = scale * code -----------------------------------------------------

/// The scale with which codes come closest to `x`. `nearest` rounds to the nearest code, and `largest` is the code that
/// the extreme element is meant for.
pub(super) fn best_scale(x: &[f32], w: &[f32], largest: f32, nearest: impl Fn(f32) -> f32) -> f32 {
    let extreme = extreme(x);
    if extreme == 0.0 {
        return 0.0;
    }
    let inverses = candidates(largest, extreme);
    // Per candidate the weighted sums of x * q and q * q.
    let mut sums = [(0.0, 0.0); CANDIDATES];
    for (&x, &w) in x.iter().zip(w) {
        for ((xq, qq), inverse) in sums.iter_mut().zip(inverses) {
            let q = nearest(x * inverse);
            *xq += w * x * q;
            *qq += w * q * q;
        }
    }
    // The least-squares scale is xq / qq, and it takes xq^2 / qq off the squared error.
    let gain = |&&(xq, qq): &&(f32, f32)| if qq > 0.0 { xq * xq / qq } else { 0.0 };
    match sums.iter().max_by(|a, b| gain(a).total_cmp(&gain(b))) {
        Some(&(xq, qq)) if qq > 0.0 => xq / qq,
        _ => 0.0,
    }
}

/// Groups of `LEN` elements with whole-number scales: `x = d * scale * code`.
pub(super) struct Symmetric<const GROUPS: usize> {
    pub(super) d: UnalignedF16,
    /// From `-largest` to `largest - 1`.
    pub(super) scales: [i32; GROUPS],
}

/// Quantises the scales of groups to `-largest..largest` times a common factor, and improves both by turns. `nearest`
/// is as in [`best_scale`].
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
    let starts = common_factors(&scales, -largest).map(|d| (d, whole(scales, d, -largest, largest - 1.0)));
    let start = least(starts.into_iter(), |(d, codes)| {
        (0..GROUPS).map(|g| error(&x[g * len..][..len], &w[g * len..][..len], d.to_f32() * codes[g])).sum()
    });
    let Some((mut d, mut codes)) = start else { unreachable!("there are several") };
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

/// Common factors of `values` with which the extreme one becomes `largest`, or up to three less: numbers that come from
/// such blocks are found again with one of these.
fn common_factors(values: &[f32], largest: f32) -> [UnalignedF16; 4] {
    let extreme = extreme(values);
    [0.0, 1.0, 2.0, 3.0].map(|less| UnalignedF16::from_f32(extreme / (largest - largest.signum() * less)))
}

/// `values` in whole numbers of `d`.
fn whole<const N: usize>(values: [f32; N], d: UnalignedF16, low: f32, high: f32) -> [f32; N] {
    let inverse = inverse(d.to_f32());
    values.map(|value| round((value * inverse).clamp(low, high)))
}

/// Of several the one with the smallest error.
fn least<T>(of: impl Iterator<Item = T>, error: impl Fn(&T) -> f32) -> Option<T> {
    of.map(|one| (error(&one), one)).min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, one)| one)
}

/// Of `code` and its neighbours from `low` to `high` the one of the smallest error.
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

/// The scale and the minimum with which codes from 0 to `largest` come closest to `x`. The scale is at least 0, and so
/// is the minimum where it `must` be.
pub(super) fn best_scale_min(x: &[f32], weights: &[f32], largest: f32, must: bool) -> (f32, f32) {
    let low = x.iter().fold(if must { 0.0f32 } else { f32::INFINITY }, |low, &x| low.min(x));
    let high = x.iter().fold(low, |high, &x| high.max(x));
    if high == low {
        return (0.0, -low);
    }
    let inverses = candidates(largest, high - low);
    // Weighted sums of 1, x and x * x, and per candidate of q, q * q and q * x.
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
        if determinant <= 0.0 || (must && min < 0.0) {
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
        // Also false where there is no solution, and a number is none.
        if !(sums.1 > 0.0 && again.0 < best.0) {
            break;
        }
        best = again;
    }
    (best.1, best.2)
}

/// Groups with whole-number scales and minimums: `x = d * scale * code - dmin * min`.
pub(super) struct Affine<const GROUPS: usize> {
    pub(super) d: UnalignedF16,
    pub(super) dmin: UnalignedF16,
    pub(super) scales: [f32; GROUPS],
    pub(super) mins: [f32; GROUPS],
}

impl<const GROUPS: usize> Affine<GROUPS> {
    /// Codes from 0 to `largest`, scales and minimums from 0 to `largest_scale`.
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
        let (factors, min_factors) = (common_factors(&scales, largest_scale), common_factors(&mins, largest_scale));
        let fit = least(factors.into_iter().map(|d| with(d, min_factors[0])), error);
        let fit = fit.and_then(|fit| least(min_factors.into_iter().map(|dmin| with(fit.d, dmin)), error));
        let Some(mut fit) = fit else { unreachable!("there are several") };
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

    /// Tries neighbours of a group's scale and minimum.
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

    /// The best `d` and `dmin` for the codes there are: least squares of `x = d a - dmin b`.
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
        // Nearly parallel: a solution would be noise.
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

    /// The code of element `i` of `x`.
    pub(super) fn codes<'a>(&self, x: &'a [f32], largest: f32) -> impl Fn(usize) -> f32 + use<'a, GROUPS> {
        let len = x.len() / GROUPS;
        let inverses = self.scales.map(|scale| inverse(self.d.to_f32() * scale));
        let offsets = self.mins.map(|min| self.dmin.to_f32() * min);
        move |i| round(((x[i] + offsets[i / len]) * inverses[i / len]).clamp(0.0, largest))
    }
}
