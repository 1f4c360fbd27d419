//! Quantisers of the `IQ1` types: 8 elements are a point with elements -1, 0 and 1, shifted up or down by 1/8. The search is
//! that of the `IQ2` types, with the direction of the shift in place of signs.

use std::array::from_fn;
use std::sync::LazyLock;

use super::codebook::CodebookSearch;
use super::fit::{FitSums, extreme, inverse, nearby, round, weights};
use crate::blocks::{BlockIq1M, BlockIq1S, CodebookGrid, IQ1_DELTA, UnalignedF16};

/// The importance of a block's columns.
type Columns<'a> = Option<&'a [f32; 256]>;

static IQ1: LazyLock<CodebookSearch<8, 2>> = LazyLock::new(|| CodebookSearch::new(CodebookGrid::IQ1));

/// The values to which the extreme element of a group is scaled by the scales that are tried.
const FACTORS: [f32; 14] = [0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.95, 2.1, 2.3, 2.6];

/// The factor by which the stored scale exceeds the least-squares scale. With so few bits the points are far from the
/// elements, and the nearest ones have smaller norms, all by about the same factor. Products that are too small harm a
/// model's predictions more than noise does. Measured: of 1, 1.06, 1.09, 1.1, 1.125 and 1.16 this factor gives the smallest
/// divergence from the original model.
const SCALE_CORRECTION: f32 = 1.1;

/// Rounds of choosing the groups' scales and refitting the common factor.
const ROUNDS: usize = 2;

/// The quantised form of 256 elements: `x = d * (2 scale + 1) * (point ± 1/8)`.
struct Fit {
    d: UnalignedF16,
    /// The scale of each group, 0 to 7; of 8 groups the first half.
    scales: [u8; 16],
    /// The code of each 8 elements, and whether their point is shifted down.
    points: [(u16, bool); 32],
}

/// Quantises 256 elements in groups of `group` elements (32 or 16). `together`: all points of a group are shifted in the same
/// direction; otherwise each point has its own.
fn fit(x: &[f32; 256], columns: Columns, group: usize, together: bool) -> Fit {
    let w = weights(x, columns, |x, rms| 0.25 * rms * rms + x * x);
    let groups = |g: usize| (&x[g * group..][..group], &w[g * group..][..group]);
    let n_groups = 256 / group;
    let mut best_scales = [0.0; 16];
    for (g, scale) in best_scales[..n_groups].iter_mut().enumerate() {
        let (x, w) = groups(g);
        *scale = best_scale(x, w, together);
    }
    let factor = |code: f32| 2.0 * code + 1.0;
    let mut d = extreme(&best_scales) / factor(7.0);
    let mut scales = best_scales.map(|scale| round(((scale * inverse(d) - 1.0) / 2.0).clamp(0.0, 7.0)));
    for _ in 0..ROUNDS {
        let (mut xp, mut pp) = (0.0, 0.0);
        for (g, code) in scales[..n_groups].iter_mut().enumerate() {
            let (x, w) = groups(g);
            *code = nearby(*code, 0.0, 7.0, |code| sums(x, w, d * factor(code), together).error(d * factor(code)));
            let sums = sums(x, w, d * factor(*code), together);
            xp += factor(*code) * sums.xp;
            pp += factor(*code).powi(2) * sums.pp;
        }
        if pp > 0.0 {
            d = UnalignedF16::from_f32(xp / pp).to_f32();
        }
    }
    let d = UnalignedF16::from_f32(d);
    let mut points = [(0, false); 32];
    for (g, points) in points.chunks_exact_mut(group / 8).take(n_groups).enumerate() {
        let (x, w) = groups(g);
        let (found, _) = nearest(x, w, d.to_f32() * factor(scales[g]), together);
        points.copy_from_slice(&found[..group / 8]);
    }
    Fit { d: UnalignedF16::from_f32(SCALE_CORRECTION * d.to_f32()), scales: scales.map(|code| code as u8), points }
}

/// The scale with the smallest error for a group; 0 for a group of zeros.
fn best_scale(x: &[f32], w: &[f32], together: bool) -> f32 {
    let largest = extreme(x).abs();
    if largest == 0.0 {
        return 0.0;
    }
    let mut best = (0.0, 0.0);
    for factor in FACTORS {
        let sums = sums(x, w, largest / factor, together);
        if sums.gain() > best.0 {
            best = (sums.gain(), sums.scale());
        }
    }
    let again = sums(x, w, best.1, together);
    if again.gain() > best.0 { again.scale() } else { best.1 }
}

/// The points (up to four) nearest to `x / scale`, each as a code and whether it is shifted down, and the sums for their error.
fn nearest(x: &[f32], w: &[f32], scale: f32, together: bool) -> ([(u16, bool); 4], FitSums) {
    let inverse = inverse(scale);
    let mut both = [false, true].map(|down| {
        let delta = if down { -IQ1_DELTA } else { IQ1_DELTA };
        let mut points = [(0, down); 4];
        let mut sums = [FitSums::default(); 4];
        for (i, (x, w)) in x.as_chunks::<8>().0.iter().zip(w.as_chunks::<8>().0).enumerate() {
            let code = IQ1.nearest(&x.map(|x| x * inverse - delta), w);
            points[i].0 = code;
            for ((x, w), p) in x.iter().zip(w).zip(IQ1.point(code)) {
                sums[i].add(*x, *w, p + delta);
            }
        }
        (points, sums)
    });
    let total = |sums: &[FitSums; 4]| sums.iter().fold(FitSums::default(), FitSums::plus);
    if together {
        let [up, down] = both.map(|(points, sums)| (points, total(&sums)));
        return if down.1.error(scale) < up.1.error(scale) { down } else { up };
    }
    let [up, down] = &mut both;
    for i in 0..4 {
        if down.1[i].error(scale) < up.1[i].error(scale) {
            (up.0[i], up.1[i]) = (down.0[i], down.1[i]);
        }
    }
    (up.0, total(&up.1))
}

/// The sums for the error of the nearest points with `scale`.
fn sums(x: &[f32], w: &[f32], scale: f32, together: bool) -> FitSums {
    nearest(x, w, scale, together).1
}

/// The block of `IQ1_S`.
pub(super) fn iq1_s(x: &[f32; 256], columns: Columns) -> BlockIq1S {
    let fit = fit(x, columns, 32, true);
    let high = |g: usize| {
        let codes = (0..4).fold(0, |bits, l| bits | (fit.points[4 * g + l].0 >> 8) << (3 * l));
        codes | u16::from(fit.scales[g]) << 12 | u16::from(fit.points[4 * g].1) << 15
    };
    BlockIq1S { d: fit.d, qs: fit.points.map(|(code, _)| code as u8), qh: from_fn(|g| high(g).to_le_bytes()) }
}

/// The block of `IQ1_M`.
pub(super) fn iq1_m(x: &[f32; 256], columns: Columns) -> BlockIq1M {
    let fit = fit(x, columns, 16, false);
    let nibble = |i: usize| (fit.points[i].0 >> 8) as u8 | u8::from(fit.points[i].1) << 3;
    let d = u16::from_le_bytes(fit.d.0);
    let scales = |i: usize| {
        let groups = (0..4).fold(0, |bits, k| bits | u16::from(fit.scales[4 * i + k]) << (3 * k));
        groups | (d >> (4 * i) & 15) << 12
    };
    BlockIq1M {
        qs: fit.points.map(|(code, _)| code as u8),
        qh: from_fn(|i| nibble(2 * i) | nibble(2 * i + 1) << 4),
        scales: from_fn(|i| scales(i).to_le_bytes()),
    }
}
