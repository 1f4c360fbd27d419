//! Quantisers of the `IQ2` and `IQ3` types: the magnitudes of elements are points of a codebook, with signs beside them.
//!
//! For each group a few scales are tried; the nearest point is found for each 8 or 4 elements, and the scale is refitted to
//! the points. Then the scales are quantised; alternately each group's integer scale is replaced by a better neighbour, and
//! the common factor is refitted. The points are searched again each time.

use std::array::from_fn;
use std::sync::LazyLock;

use super::codebook::CodebookSearch;
use super::fit::{FitSums, extreme, inverse, nearby, round, weights};
use crate::blocks::{BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs, CodebookGrid, UnalignedF16};

/// The importance of a block's columns.
type Columns<'a> = Option<&'a [f32; 256]>;

static IQ2_XXS: LazyLock<CodebookSearch<8, 2>> = LazyLock::new(|| CodebookSearch::new(CodebookGrid::IQ2_XXS));
static IQ2_XS: LazyLock<CodebookSearch<8, 2>> = LazyLock::new(|| CodebookSearch::new(CodebookGrid::IQ2_XS));
static IQ2_S: LazyLock<CodebookSearch<8, 2>> = LazyLock::new(|| CodebookSearch::new(CodebookGrid::IQ2_S));
static IQ3_XXS: LazyLock<CodebookSearch<4, 7>> = LazyLock::new(|| CodebookSearch::new(CodebookGrid::IQ3_XXS));
static IQ3_S: LazyLock<CodebookSearch<4, 7>> = LazyLock::new(|| CodebookSearch::new(CodebookGrid::IQ3_S));

/// The multiples of the codebook's largest value to which the extreme element of a group is scaled by the scales that are
/// tried.
const FACTORS: [f32; 14] = [0.76, 0.81, 0.86, 0.91, 0.95, 0.985, 1.02, 1.055, 1.09, 1.13, 1.18, 1.24, 1.32, 1.42];

/// Rounds of choosing the groups' scales and refitting the common factor.
const ROUNDS: usize = 2;

/// The parameters of a type whose codebook has points of `W` elements with `B + 1` values.
struct CodebookType<const W: usize, const B: usize> {
    /// The codebook.
    book: &'static CodebookSearch<W, B>,
    /// Elements of a group.
    group: usize,
    /// Whether the number of negative elements of each 8 has to be even.
    even_signs: bool,
    /// An integer scale `s` stands for the factor `step * s + start`.
    step: f32,
    /// See `step`.
    start: f32,
}

/// The quantised form of 256 elements: `x = d * (step * scale + start) * point * sign`.
struct Fit {
    /// The common factor.
    d: UnalignedF16,
    /// The scale of each group, 0 to 15; of 8 groups the first half.
    scales: [u8; 16],
    /// The code of each `W` elements.
    codes: [u16; 64],
    /// Bit `k` of entry `i` is set where element `8 i + k` is negative.
    signs: [u8; 32],
}

impl<const W: usize, const B: usize> CodebookType<W, B> {
    /// Quantises 256 elements.
    fn fit(&self, x: &[f32; 256], columns: Columns) -> Fit {
        let w = weights(x, columns, |x, rms| 0.25 * rms * rms + x * x);
        let (magnitudes, signs) = self.split_signs(x, &w);
        let groups = |g: usize| (&magnitudes[g * self.group..][..self.group], &w[g * self.group..][..self.group]);
        let n_groups = 256 / self.group;
        let mut best_scales = [0.0; 16];
        for (g, scale) in best_scales[..n_groups].iter_mut().enumerate() {
            let (x, w) = groups(g);
            *scale = self.best_scale(x, w);
        }
        let factor = |code: f32| self.step * code + self.start;
        let mut d = extreme(&best_scales) / factor(15.0);
        let mut scales =
            best_scales.map(|scale| round(((scale * inverse(d) - self.start) / self.step).clamp(0.0, 15.0)));
        for _ in 0..ROUNDS {
            let (mut xp, mut pp) = (0.0, 0.0);
            for (g, code) in scales[..n_groups].iter_mut().enumerate() {
                let (x, w) = groups(g);
                *code = nearby(*code, 0.0, 15.0, |code| self.sums(x, w, d * factor(code)).error(d * factor(code)));
                let sums = self.sums(x, w, d * factor(*code));
                xp += factor(*code) * sums.xp;
                pp += factor(*code).powi(2) * sums.pp;
            }
            if pp > 0.0 {
                d = UnalignedF16::from_f32(xp / pp).to_f32();
            }
        }
        let d = UnalignedF16::from_f32(d);
        let mut codes = [0; 64];
        for (g, codes) in codes.chunks_exact_mut(self.group / W).take(n_groups).enumerate() {
            let (x, w) = groups(g);
            self.points(x, w, d.to_f32() * factor(scales[g]), |i, code| codes[i] = code);
        }
        Fit { d, scales: scales.map(|code| code as u8), codes, signs }
    }

    /// Magnitudes and signs of 256 elements. Where the number of negative elements has to be even and is not, the sign with the
    /// smallest cost is flipped, and the magnitude of its element is negative.
    fn split_signs(&self, x: &[f32; 256], w: &[f32; 256]) -> ([f32; 256], [u8; 32]) {
        let mut magnitudes = x.map(f32::abs);
        let mut signs = from_fn(|i| (0..8).fold(0, |bits, k| bits | u8::from(x[8 * i + k] < 0.0) << k));
        if self.even_signs {
            for (i, signs) in signs.iter_mut().enumerate() {
                if signs.count_ones() % 2 == 1 {
                    let cost = |&k: &usize| w[8 * i + k] * x[8 * i + k].powi(2);
                    let cheapest = (0..8).min_by(|a, b| cost(a).total_cmp(&cost(b))).unwrap_or(0);
                    *signs ^= 1 << cheapest;
                    magnitudes[8 * i + cheapest] = -magnitudes[8 * i + cheapest];
                }
            }
        }
        (magnitudes, signs)
    }

    /// The scale with the smallest error for a group; 0 for a group of zeros.
    fn best_scale(&self, x: &[f32], w: &[f32]) -> f32 {
        let largest = x.iter().fold(0.0f32, |largest, &x| largest.max(x));
        if largest == 0.0 {
            return 0.0;
        }
        let mut best = (0.0, 0.0);
        for factor in FACTORS {
            let sums = self.sums(x, w, largest / (factor * self.book.largest()));
            if sums.gain() > best.0 {
                best = (sums.gain(), sums.scale());
            }
        }
        // Points found with the refitted scale may be better ones.
        let again = self.sums(x, w, best.1);
        if again.gain() > best.0 { again.scale() } else { best.1 }
    }

    /// Calls `found` with the index and the code of each point nearest to `x / scale`.
    fn points(&self, x: &[f32], w: &[f32], scale: f32, mut found: impl FnMut(usize, u16)) {
        let inverse = inverse(scale);
        for (i, (x, w)) in x.as_chunks::<W>().0.iter().zip(w.as_chunks::<W>().0).enumerate() {
            found(i, self.book.nearest(&x.map(|x| x * inverse), w));
        }
    }

    /// The sums for the error of the nearest points with `scale`.
    fn sums(&self, x: &[f32], w: &[f32], scale: f32) -> FitSums {
        let mut sums = FitSums::default();
        self.points(x, w, scale, |i, code| {
            for (k, p) in self.book.point(code).iter().enumerate() {
                sums.add(x[i * W + k], w[i * W + k], *p);
            }
        });
        sums
    }
}

/// Packs codes of 4 bits two to a byte, the first one in the low nibble.
fn nibble_pairs<const N: usize>(codes: &[u8]) -> [u8; N] {
    from_fn(|i| codes[2 * i] | codes[2 * i + 1] << 4)
}

/// The word of group `g` of 32 elements: the signs of 4 times 8 elements, 7 bits each, and the scale in the top four bits.
fn signs_and_scale(fit: &Fit, g: usize) -> [u8; 4] {
    let signs = (0..4).fold(0, |word, l| word | u32::from(fit.signs[4 * g + l] & 127) << (7 * l));
    (signs | u32::from(fit.scales[g]) << 28).to_le_bytes()
}

/// The block of `IQ2_XXS`.
pub(super) fn iq2_xxs(x: &[f32; 256], columns: Columns) -> BlockIq2Xxs {
    let fit = CodebookType { book: &IQ2_XXS, group: 32, even_signs: true, step: 0.25, start: 0.125 }.fit(x, columns);
    let qs = from_fn(|i| match (i / 8, i % 8) {
        (g, l @ 0..4) => fit.codes[4 * g + l] as u8,
        (g, l) => signs_and_scale(&fit, g)[l - 4],
    });
    BlockIq2Xxs { d: fit.d, qs }
}

/// The block of `IQ2_XS`.
pub(super) fn iq2_xs(x: &[f32; 256], columns: Columns) -> BlockIq2Xs {
    let fit = CodebookType { book: &IQ2_XS, group: 16, even_signs: true, step: 0.25, start: 0.125 }.fit(x, columns);
    let qs = from_fn(|i| (fit.codes[i] | u16::from(fit.signs[i] & 127) << 9).to_le_bytes());
    BlockIq2Xs { d: fit.d, qs, scales: nibble_pairs(&fit.scales) }
}

/// The block of `IQ2_S`.
pub(super) fn iq2_s(x: &[f32; 256], columns: Columns) -> BlockIq2S {
    let fit = CodebookType { book: &IQ2_S, group: 16, even_signs: false, step: 0.25, start: 0.125 }.fit(x, columns);
    BlockIq2S {
        d: fit.d,
        qs: from_fn(|i| fit.codes[i] as u8),
        signs: fit.signs,
        qh: from_fn(|i| (0..4).fold(0, |byte, k| byte | ((fit.codes[4 * i + k] >> 8) as u8) << (2 * k))),
        scales: nibble_pairs(&fit.scales),
    }
}

/// The block of `IQ3_XXS`.
pub(super) fn iq3_xxs(x: &[f32; 256], columns: Columns) -> BlockIq3Xxs {
    let fit = CodebookType { book: &IQ3_XXS, group: 32, even_signs: true, step: 0.5, start: 0.25 }.fit(x, columns);
    let scales_and_signs = from_fn(|g| signs_and_scale(&fit, g));
    BlockIq3Xxs { d: fit.d, qs: fit.codes.map(|code| code as u8), scales_and_signs }
}

/// The block of `IQ3_S`.
pub(super) fn iq3_s(x: &[f32; 256], columns: Columns) -> BlockIq3S {
    let fit = CodebookType { book: &IQ3_S, group: 32, even_signs: false, step: 2.0, start: 1.0 }.fit(x, columns);
    BlockIq3S {
        d: fit.d,
        qs: fit.codes.map(|code| code as u8),
        qh: from_fn(|i| (0..8).fold(0, |byte, k| byte | ((fit.codes[8 * i + k] >> 8) as u8) << k)),
        signs: fit.signs,
        scales: nibble_pairs(&fit.scales),
    }
}
