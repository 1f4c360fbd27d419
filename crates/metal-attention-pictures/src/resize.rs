//! Resizing as Pillow does it (`libImaging/Resample.c`), byte for byte.
//!
//! A horizontal pass is followed by a vertical one, and each rounds to bytes. Threads share the rows of large pictures. A weight is an integer of 22 fractional bits. When
//! a side shrinks, the filter is as much wider.

use std::num::NonZero;
use std::sync::{Mutex, PoisonError};

use crate::{Picture, PictureError, Result};

/// The longest side of a resized picture, as in llama.cpp.
pub const MAX_SIDE: usize = 65536;
/// The most pixels of a resized picture.
pub const MAX_TARGET_PIXELS: usize = 1 << 26;

/// Fractional bits of a weight: a sum of weights times bytes fits 32 bits, although single weights exceed 1.
const WEIGHT_BITS: u32 = 32 - 8 - 2;

/// How the sides and the offset of a fitted picture are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// Sides up and the offset down, as llama.cpp does it for most families.
    Outwards,
    /// To the nearest, halves up, as Pillow's `ImageOps.pad`.
    Nearest,
}

/// A filter: the weight of a pixel by its distance from the centre, in pixels of the coarser picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// A triangle of radius 1.
    Bilinear,
    /// Keys' cubic with a = -0.5, of radius 2.
    Bicubic,
    /// sinc(x) sinc(x / 3), of radius 3.
    Lanczos,
}

impl Filter {
    /// The distance from which on weights are zero.
    fn radius(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    /// The weight at distance `x`, before the weights of a window are divided by their sum.
    fn weight(self, x: f64) -> f64 {
        const A: f64 = -0.5;
        let distance = x.abs();
        if distance >= self.radius() {
            return 0.0;
        }
        match self {
            Self::Bilinear => 1.0 - distance,
            Self::Bicubic if distance < 1.0 => ((A + 2.0) * distance - (A + 3.0)) * distance * distance + 1.0,
            Self::Bicubic => (((distance - 5.0) * distance + 8.0) * distance - 4.0) * A,
            Self::Lanczos => sinc(x) * sinc(x / 3.0),
        }
    }
}

/// sin(pi x) / (pi x).
fn sinc(x: f64) -> f64 {
    if x == 0.0 {
        return 1.0;
    }
    let x = x * std::f64::consts::PI;
    x.sin() / x
}

/// The weights of the input positions that make one output position.
struct Window {
    /// The first input position.
    first: usize,
    /// In fixed point.
    weights: Vec<i32>,
}

/// The windows of all positions of a side that changes from `from` to `to` pixels.
fn windows(from: usize, to: usize, filter: Filter) -> Vec<Window> {
    let scale = from as f64 / to as f64;
    let stretch = scale.max(1.0);
    let radius = filter.radius() * stretch;
    let window = |position: usize| {
        let centre = (position as f64 + 0.5) * scale;
        // A conversion from a negative number gives 0.
        let first = (centre - radius + 0.5) as usize;
        let end = ((centre + radius + 0.5) as usize).min(from);
        let weight = |at: usize| filter.weight((at as f64 - centre + 0.5) * (1.0 / stretch));
        let weights: Vec<_> = (first..end).map(weight).collect();
        let sum: f64 = weights.iter().sum();
        let fixed = |weight: f64| {
            let weight = if sum == 0.0 { weight } else { weight / sum };
            (weight * f64::from(1 << WEIGHT_BITS) + 0.5_f64.copysign(weight)) as i32
        };
        Window { first, weights: weights.into_iter().map(fixed).collect() }
    };
    (0..to).map(window).collect()
}

/// What sums start from, so that cutting the fractional bits rounds.
const HALF: i32 = 1 << (WEIGHT_BITS - 1);

/// A sum of weighted bytes as a byte.
fn to_byte(sum: i32) -> u8 {
    (sum >> WEIGHT_BITS).clamp(0, 255) as u8
}

/// Resizes a row of pixels: `from` has shape [width, 3], `to` has shape [number of windows, 3].
fn resize_row(from: &[u8], windows: &[Window], to: &mut [u8]) {
    let (from, _) = from.as_chunks::<3>();
    let (to, _) = to.as_chunks_mut::<3>();
    for (to, window) in to.iter_mut().zip(windows) {
        let mut sums = [HALF; 3];
        for (pixel, weight) in from[window.first..].iter().zip(&window.weights) {
            for c in 0..3 {
                sums[c] += i32::from(pixel[c]) * weight;
            }
        }
        *to = sums.map(to_byte);
    }
}

/// Bytes of the rows that a thread resizes at a time, and the fewest rows, since windows at the edge of a band are computed in both.
const BYTES_OF_BAND: usize = 1 << 18;
const ROWS_OF_BAND: usize = 64;

/// Both passes over a picture.
struct Passes<'a> {
    picture: &'a Picture,
    /// The windows of the horizontal pass; `None` where the width stays.
    horizontal: Option<Vec<Window>>,
    /// The windows of the vertical pass; `None` where the height stays.
    vertical: Option<Vec<Window>>,
    /// Bytes of a resized row.
    row_len: usize,
}

impl Passes<'_> {
    /// Bytes of the rows of the horizontal pass that the vertical one needs at a time.
    fn kept_bytes(&self) -> usize {
        let n_kept = self.vertical.iter().flatten().map(|window| window.weights.len()).max().unwrap_or(1);
        if self.horizontal.is_some() { n_kept * self.row_len } else { 0 }
    }

    /// Computes the rows `to` of the resized picture, of which `start` is the first.
    fn resize(&self, start: usize, to: &mut [u8]) {
        let vertical = self.vertical.as_deref();
        let first = vertical.map_or(start, |windows| windows[start].first);
        let kept = vec![0; self.kept_bytes()];
        let mut rows = Rows { passes: self, n_kept: kept.len() / self.row_len, kept, n_done: first };
        let mut sums = vec![0; self.row_len];
        for (y, to) in (start..).zip(to.chunks_exact_mut(self.row_len)) {
            let Some(window) = vertical.map(|windows| &windows[y]) else {
                rows.advance(y + 1);
                to.copy_from_slice(rows.row(y));
                continue;
            };
            rows.advance(window.first + window.weights.len());
            sums.fill(HALF);
            for (i, weight) in window.weights.iter().enumerate() {
                for (sum, byte) in sums.iter_mut().zip(rows.row(window.first + i)) {
                    *sum += i32::from(*byte) * weight;
                }
            }
            for (to, sum) in to.iter_mut().zip(&sums) {
                *to = to_byte(*sum);
            }
        }
    }
}

/// The rows of a picture after the horizontal pass. It holds those of one vertical window: row y is in place y % `n_kept`.
struct Rows<'a> {
    passes: &'a Passes<'a>,
    n_kept: usize,
    kept: Vec<u8>,
    /// The row after the last one that was resized.
    n_done: usize,
}

impl Rows<'_> {
    /// Resizes rows up to `end`.
    fn advance(&mut self, end: usize) {
        let Passes { picture, horizontal, row_len, .. } = self.passes;
        let Some(windows) = horizontal else { return };
        for y in self.n_done..end {
            let place = y % self.n_kept * row_len;
            resize_row(picture.row(y), windows, &mut self.kept[place..place + row_len]);
        }
        self.n_done = self.n_done.max(end);
    }

    /// Row `y`, which [`advance`](Self::advance) has reached and not left behind.
    fn row(&self, y: usize) -> &[u8] {
        let Passes { picture, horizontal, row_len, .. } = self.passes;
        match horizontal {
            Some(_) => &self.kept[y % self.n_kept * row_len..][..*row_len],
            None => picture.row(y),
        }
    }
}

impl Picture {
    /// The picture stretched to `width` x `height` pixels. A side that has this length already is not filtered.
    pub fn resized(&self, width: usize, height: usize, filter: Filter) -> Result<Self> {
        self.check_target(width, height)?;
        let passes = Passes {
            picture: self,
            horizontal: (width != self.width()).then(|| windows(self.width(), width, filter)),
            vertical: (height != self.height()).then(|| windows(self.height(), height, filter)),
            row_len: width * 3,
        };
        let mut rgb = vec![0; height * width * 3];
        let n_rows = (BYTES_OF_BAND / passes.row_len).max(ROWS_OF_BAND);
        // All threads together keep no more bytes than the largest picture has.
        let most_threads = 3 * MAX_TARGET_PIXELS / passes.kept_bytes().max(1);
        let n_threads = std::thread::available_parallelism().map_or(1, NonZero::get);
        let n_threads = n_threads.min(height.div_ceil(n_rows)).min(most_threads);
        let bands = Mutex::new(rgb.chunks_mut(n_rows * width * 3).enumerate());
        let work = || {
            loop {
                let next = bands.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((i, band)) = next else { return };
                passes.resize(i * n_rows, band);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..n_threads {
                // The others do the work of a thread that the system refuses.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        Self::new(width, height, rgb)
    }

    /// The picture scaled into `width` x `height` pixels in its own ratio and centred; the rest has the colour `fill`.
    ///
    /// Its sides are rounded up and the offset down, as in llama.cpp. A picture that has the target size stays as it is.
    pub fn fitted(&self, width: usize, height: usize, filter: Filter, fill: [u8; 3]) -> Result<Self> {
        self.fitted_by(width, height, filter, fill, Rounding::Outwards)
    }

    /// The same with the sides and the offset rounded by `rounding`.
    pub(crate) fn fitted_by(
        &self,
        width: usize,
        height: usize,
        filter: Filter,
        fill: [u8; 3],
        rounding: Rounding,
    ) -> Result<Self> {
        self.check_target(width, height)?;
        if (width, height) == (self.width(), self.height()) {
            return Ok(self.clone());
        }
        let scale = (width as f32 / self.width() as f32).min(height as f32 / self.height() as f32);
        let scaled = |side: usize, most: usize| {
            let side = side as f32 * scale;
            let rounded = match rounding {
                Rounding::Outwards => side.ceil(),
                Rounding::Nearest => side.round(),
            };
            (rounded as usize).clamp(1, most)
        };
        let offset = |left: usize| match rounding {
            Rounding::Outwards => left / 2,
            Rounding::Nearest => left.div_ceil(2),
        };
        let inner = self.resized(scaled(self.width(), width), scaled(self.height(), height), filter)?;
        let mut picture = Self::filled(width, height, fill);
        picture.paste(&inner, offset(width - inner.width()), offset(height - inner.height()));
        Ok(picture)
    }

    /// An error where a target size is not possible.
    pub(crate) fn check_target(&self, width: usize, height: usize) -> Result<()> {
        let possible = 1..=MAX_SIDE;
        // A window of the vertical pass may have all rows of the picture, each of the target width.
        let rows_of_a_window = (self.height() * 6).div_ceil(height.max(1)).saturating_add(2).min(self.height());
        if possible.contains(&width)
            && possible.contains(&height)
            && width * height.max(rows_of_a_window) <= MAX_TARGET_PIXELS
        {
            return Ok(());
        }
        Err(PictureError::TargetSize { from_width: self.width(), from_height: self.height(), width, height })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bands_are_those_of_the_whole() {
        for (from, to) in
            [((90, 300), (70, 500)), ((50, 1000), (64, 200)), ((40, 400), (40, 700)), ((33, 260), (66, 260))]
        {
            let rgb = (0..from.0 * from.1 * 3).map(|i| (i * 7 % 251) as u8).collect();
            let picture = Picture::new(from.0, from.1, rgb).unwrap();
            let passes = Passes {
                picture: &picture,
                horizontal: (from.0 != to.0).then(|| windows(from.0, to.0, Filter::Lanczos)),
                vertical: (from.1 != to.1).then(|| windows(from.1, to.1, Filter::Lanczos)),
                row_len: 3 * to.0,
            };
            let resized = |n_rows: usize| {
                let mut rgb = vec![0; 3 * to.0 * to.1];
                let bands = rgb.chunks_mut(n_rows * passes.row_len).enumerate();
                bands.for_each(|(i, band)| passes.resize(i * n_rows, band));
                rgb
            };
            let whole = resized(to.1);
            assert!(resized(64) == whole && resized(7) == whole && resized(1) == whole, "{from:?} to {to:?}");
            assert_eq!(picture.resized(to.0, to.1, Filter::Lanczos).unwrap().rgb(), whole);
        }
    }
}
