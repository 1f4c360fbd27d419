//! Quantisation to the types whose scales have to be searched: the K types and the IQ4 types.
//!
//! Each group of 16 or 32 elements tries a few scales around the obvious one, refits the best to
//! the codes by weighted least squares, and then the scales themselves are quantised and the codes
//! chosen anew. Unlike the simple types this is not ggml's search, so files differ from ggml's in
//! bits, not in quality: the root mean square errors are within a few percent of each other or smaller.

use std::array::from_fn;

use crate::blocks::{BlockIq4Nl, BlockIq4Xs, BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K, Half, IQ4_VALUES};
use crate::quantize::{extreme, inverse, nibbles};

/// How many scales are tried per group. They are the inner loop, so that the compiler can work on
/// several at once.
const CANDIDATES: usize = 16;

/// The factors to codes that are tried: those that bring `range` to `largest`, or up to 0.8 codes
/// less or 0.7 more.
fn candidates(largest: f32, range: f32) -> [f32; CANDIDATES] {
    from_fn(|i| (largest + 0.1 * (i as f32 - 8.0)) / range)
}

/// Rounds to the nearest whole number, ties to even, for magnitudes below 2^22: adding and taking
/// away 1.5 * 2^23 leaves no bits for a fraction, and unlike `f32::round` is one instruction each.
fn round(x: f32) -> f32 {
    const NO_FRACTION: f32 = 12_582_912.0;
    x + NO_FRACTION - NO_FRACTION
}

// ---- symmetric groups: x = scale * code -----------------------------------------------------

/// The scale with which the codes come closest to `x`, large elements weighing more. `nearest`
/// rounds to the nearest code, and `largest` is the code that the extreme element is meant for.
fn best_scale(x: &[f32], largest: f32, nearest: impl Fn(f32) -> f32) -> f32 {
    let extreme = extreme(x);
    if extreme == 0.0 {
        return 0.0;
    }
    let inverses = candidates(largest, extreme);
    // Per candidate the weighted sums of x * q and q * q.
    let mut sums = [(0.0, 0.0); CANDIDATES];
    for &x in x {
        // Relative, because squares of small weights would vanish.
        let weight = (x / extreme).powi(2);
        for ((xq, qq), inverse) in sums.iter_mut().zip(inverses) {
            let q = nearest(x * inverse);
            *xq += weight * x * q;
            *qq += weight * q * q;
        }
    }
    // The least-squares scale is xq / qq, and it takes xq^2 / qq off the squared error.
    let gain = |&&(xq, qq): &&(f32, f32)| xq * xq / qq;
    let (xq, qq) = sums.iter().max_by(|a, b| gain(a).total_cmp(&gain(b))).unwrap_or(&(0.0, 1.0));
    xq / qq
}

/// Quantises the scales of symmetric groups to `-largest..largest` times a common factor. Returns
/// the factor and the scales' codes.
fn scale_codes<const N: usize>(scales: &[f32; N], largest: f32) -> (Half, [i32; N]) {
    let d = Half::from_f32(extreme(scales) / -largest);
    let inverse = inverse(d.to_f32());
    (d, scales.map(|scale| round((scale * inverse).clamp(-largest, largest - 1.0)) as i32))
}

/// Rounds to a whole number from `-largest` to `largest - 1`.
fn linear(largest: f32) -> impl Fn(f32) -> f32 {
    move |x| round(x.clamp(-largest, largest - 1.0))
}

/// Codes of 256 elements from 0 to `2 largest - 1`, and the scales of their groups of 16.
fn symmetric(x: &[f32; 256], largest: f32, largest_scale: f32) -> ([u8; 256], Half, [i32; 16]) {
    let groups = x.as_chunks::<16>().0;
    let scales = from_fn(|g| best_scale(&groups[g], -largest, linear(largest)));
    let (d, scales) = scale_codes::<16>(&scales, largest_scale);
    let inverses = scales.map(|scale| inverse(d.to_f32() * scale as f32));
    let q = from_fn(|i| (linear(largest)(x[i] * inverses[i / 16]) + largest) as u8);
    (q, d, scales)
}

pub(crate) fn q3_k(x: &[f32; 256]) -> BlockQ3K {
    let (q, d, scales) = symmetric(x, 4.0, 32.0);
    let scales = scales.map(|scale| (scale + 32) as u8);
    BlockQ3K {
        hmask: bit_plane(&q, 2),
        qs: two_bit_planes(&q, 0),
        scales: from_fn(|i| match i {
            0..8 => scales[i] & 15 | scales[i + 8] << 4,
            _ => (0..4).fold(0, |byte, k| byte | scales[i - 8 + 4 * k] >> 4 << (2 * k)),
        }),
        d,
    }
}

pub(crate) fn q6_k(x: &[f32; 256]) -> BlockQ6K {
    let (q, d, scales) = symmetric(x, 32.0, 128.0);
    BlockQ6K { ql: nibble_planes(&q, 64), qh: two_bit_planes(&q, 4), scales: scales.map(|scale| scale as i8), d }
}

/// The nearest code to each half step: entry `i` is for `x` from `(i - 256) / 2` to the next. This
/// is exact, because half way between two neighbouring [`IQ4_VALUES`] is a multiple of one half.
const IQ4_CODES: [u8; 512] = {
    let mut codes = [0; 512];
    let mut i = 0;
    while i < 512 {
        let mut code = 0;
        while code < 15 && IQ4_VALUES[code] as i32 + IQ4_VALUES[code + 1] as i32 <= i as i32 - 256 {
            code += 1;
        }
        codes[i] = code as u8;
        i += 1;
    }
    codes
};

/// The index in [`IQ4_VALUES`] of the value nearest to `x`.
fn iq4_code(x: f32) -> u8 {
    IQ4_CODES[(2.0 * x + 256.0).clamp(0.0, 511.0) as usize]
}

fn iq4_scale(x: &[f32; 32]) -> f32 {
    best_scale(x, IQ4_VALUES[0].into(), |x| IQ4_VALUES[usize::from(iq4_code(x))].into())
}

pub(crate) fn iq4_nl(x: &[f32; 32]) -> BlockIq4Nl {
    let d = Half::from_f32(iq4_scale(x));
    let inverse = inverse(d.to_f32());
    BlockIq4Nl { d, qs: nibbles(&x.map(|x| iq4_code(x * inverse))) }
}

pub(crate) fn iq4_xs(x: &[f32; 256]) -> BlockIq4Xs {
    let groups = x.as_chunks::<32>().0;
    let (d, scales) = scale_codes::<8>(&from_fn(|g| iq4_scale(&groups[g])), 32.0);
    let inverses = scales.map(|scale| inverse(d.to_f32() * scale as f32));
    let q = from_fn(|i| iq4_code(x[i] * inverses[i / 32]));
    let scales = scales.map(|scale| (scale + 32) as u8);
    let high = (0..8).fold(0u16, |bits, g| bits | u16::from(scales[g] >> 4) << (2 * g));
    BlockIq4Xs {
        d,
        scales_h: high.to_le_bytes(),
        scales_l: from_fn(|i| scales[2 * i] & 15 | scales[2 * i + 1] << 4),
        qs: nibble_planes(&q, 16),
    }
}

// ---- groups with a minimum: x = scale * code - min ------------------------------------------

/// The scale and the minimum, both at least 0, with which codes from 0 to `largest` come closest
/// to `x`.
fn best_scale_min(x: &[f32], largest: f32) -> (f32, f32) {
    let low = x.iter().fold(0.0f32, |low, &x| low.min(x));
    let high = x.iter().fold(low, |high, &x| high.max(x));
    if high == low {
        return (0.0, -low);
    }
    let rms = (x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32).sqrt();
    let inverses = candidates(largest, high - low);
    // Weighted sums of 1, x and x * x, and per candidate of q, q * q and q * x.
    let (mut w, mut wx, mut wxx) = (0.0, 0.0, 0.0);
    let mut sums = [(0.0, 0.0, 0.0); CANDIDATES];
    for &x in x {
        let weight = rms + x.abs();
        w += weight;
        wx += weight * x;
        wxx += weight * x * x;
        for ((wq, wqq, wqx), inverse) in sums.iter_mut().zip(inverses) {
            let q = round(((x - low) * inverse).min(largest));
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
        if determinant <= 0.0 || min < 0.0 {
            (scale, min) = (wqx / wqq, 0.0);
        }
        let square = scale * (scale * wqq - 2.0 * (min * wq + wqx)) + min * (min * w + 2.0 * wx);
        (square + wxx, scale.max(0.0), min)
    };
    let fits = sums.into_iter().map(fit);
    let best = fits.min_by(|a, b| a.0.total_cmp(&b.0));
    best.map_or((0.0, 0.0), |(_, scale, min)| (scale, min))
}

/// 256 elements quantised with a scale and a minimum per group.
struct Affine<const GROUPS: usize> {
    q: [u8; 256],
    d: Half,
    dmin: Half,
    scales: [u8; GROUPS],
    mins: [u8; GROUPS],
}

/// Codes from 0 to `largest`, scales and minimums from 0 to `largest_scale`.
fn affine<const GROUPS: usize>(x: &[f32; 256], largest: f32, largest_scale: f32) -> Affine<GROUPS> {
    let len = 256 / GROUPS;
    let fits: [_; GROUPS] = from_fn(|g| best_scale_min(&x[g * len..][..len], largest));
    let quantize = |values: [f32; GROUPS]| {
        let d = Half::from_f32(extreme(&values) / largest_scale);
        let inverse = inverse(d.to_f32());
        (d, values.map(|value| round((value * inverse).min(largest_scale)) as u8))
    };
    let (d, scales) = quantize(fits.map(|(scale, _)| scale));
    let (dmin, mins) = quantize(fits.map(|(_, min)| min));
    let inverses = scales.map(|scale| inverse(d.to_f32() * f32::from(scale)));
    let offsets = mins.map(|min| dmin.to_f32() * f32::from(min));
    let q = from_fn(|i| round(((x[i] + offsets[i / len]) * inverses[i / len]).clamp(0.0, largest)) as u8);
    Affine { q, d, dmin, scales, mins }
}

/// The inverse of [`scale_min_k4`](crate::blocks::scale_min_k4).
fn pack_scale_min_k4(scales: [u8; 8], mins: [u8; 8]) -> [u8; 12] {
    from_fn(|i| match i {
        0..4 => scales[i] | scales[i + 4] >> 4 << 6,
        4..8 => mins[i - 4] | mins[i] >> 4 << 6,
        _ => scales[i - 4] & 15 | mins[i - 4] << 4,
    })
}

pub(crate) fn q2_k(x: &[f32; 256]) -> BlockQ2K {
    let Affine { q, d, dmin, scales, mins } = affine::<16>(x, 3.0, 15.0);
    BlockQ2K { scales: from_fn(|g| scales[g] | mins[g] << 4), qs: two_bit_planes(&q, 0), d, dmin }
}

pub(crate) fn q4_k(x: &[f32; 256]) -> BlockQ4K {
    let Affine { q, d, dmin, scales, mins } = affine::<8>(x, 15.0, 63.0);
    BlockQ4K { d, dmin, scales: pack_scale_min_k4(scales, mins), qs: nibble_planes(&q, 32) }
}

pub(crate) fn q5_k(x: &[f32; 256]) -> BlockQ5K {
    let Affine { q, d, dmin, scales, mins } = affine::<8>(x, 31.0, 63.0);
    BlockQ5K { d, dmin, scales: pack_scale_min_k4(scales, mins), qh: bit_plane(&q, 4), qs: nibble_planes(&q, 32) }
}

// ---- packing --------------------------------------------------------------------------------

/// The low four bits of 256 codes in nibble planes of `plane` bytes: byte `j` of plane `p` holds
/// elements `2 plane p + j` and `2 plane p + plane + j`.
fn nibble_planes(q: &[u8; 256], plane: usize) -> [u8; 128] {
    from_fn(|i| {
        let low = i / plane * 2 * plane + i % plane;
        q[low] & 15 | q[low + plane] << 4
    })
}

/// Bits `shift` and `shift + 1` of 256 codes, laid out as in [`BlockQ2K::qs`].
fn two_bit_planes(q: &[u8; 256], shift: u32) -> [u8; 64] {
    from_fn(|i| {
        let first = i / 32 * 128 + i % 32;
        (0..4).fold(0, |byte, k| byte | (q[first + 32 * k] >> shift & 3) << (2 * k))
    })
}

/// Bit `shift` of 256 codes: bit `k` of byte `j` belongs to element `32 k + j`.
fn bit_plane(q: &[u8; 256], shift: u32) -> [u8; 32] {
    from_fn(|j| (0..8).fold(0, |byte, k| byte | (q[32 * k + j] >> shift & 1) << k))
}
