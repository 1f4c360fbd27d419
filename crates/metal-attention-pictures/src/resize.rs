//! Resizing as Pillow does it (`libImaging/Resample.c`), byte for byte.
//!
//! A horizontal pass is followed by a vertical one, and each rounds to bytes. A weight is an integer of 22 fractional bits. When
//! a side shrinks, the filter is as much wider.

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

/// The rows of a picture after the horizontal pass. It holds those of one vertical window: row y is in place y % `n_kept`.
struct Rows<'a> {
    picture: &'a Picture,
    /// Of the horizontal pass; `None` where the width stays.
    windows: Option<Vec<Window>>,
    row_len: usize,
    n_kept: usize,
    kept: Vec<u8>,
    /// Rows that were resized so far.
    n_done: usize,
}

impl Rows<'_> {
    /// Resizes rows up to `end`.
    fn advance(&mut self, end: usize) {
        let Some(windows) = &self.windows else { return };
        for y in self.n_done..end {
            let place = y % self.n_kept * self.row_len;
            resize_row(self.picture.row(y), windows, &mut self.kept[place..place + self.row_len]);
        }
        self.n_done = self.n_done.max(end);
    }

    /// Row `y`, which [`advance`](Self::advance) has reached and not left behind.
    fn row(&self, y: usize) -> &[u8] {
        match self.windows {
            Some(_) => &self.kept[y % self.n_kept * self.row_len..][..self.row_len],
            None => self.picture.row(y),
        }
    }
}

impl Picture {
    /// The picture stretched to `width` x `height` pixels. A side that has this length already is not filtered.
    pub fn resized(&self, width: usize, height: usize, filter: Filter) -> Result<Self> {
        self.check_target(width, height)?;
        let horizontal = (width != self.width()).then(|| windows(self.width(), width, filter));
        let vertical = (height != self.height()).then(|| windows(self.height(), height, filter));
        let n_kept = vertical.iter().flatten().map(|window| window.weights.len()).max().unwrap_or(1);
        let row_len = width * 3;
        let mut rgb = vec![0; height * row_len];
        let kept = if horizontal.is_some() { vec![0; n_kept * row_len] } else { Vec::new() };
        let mut rows = Rows { picture: self, windows: horizontal, row_len, n_kept, kept, n_done: 0 };
        let mut sums = vec![0; row_len];
        for (y, to) in rgb.chunks_exact_mut(row_len).enumerate() {
            let Some(window) = vertical.as_ref().map(|windows| &windows[y]) else {
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
