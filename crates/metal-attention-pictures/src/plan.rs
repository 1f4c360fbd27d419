//! `Plan`: the sizes of all pictures that a layout makes of one.
//!
//! Sizes are width, height. Formulas are in F32 where llama.cpp's are: results near a boundary would differ otherwise.

use crate::tiling::{deepseek_tiles, lfm2_tiles, minicpm_tiles, minicpm_whole};
use crate::{Layout, PictureError, PixelRange, Result};

/// Width and height in pixels.
pub type Size = (usize, usize);

/// What happens to the ratio of a resized picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    /// It becomes the target's.
    Stretched,
    /// It stays, the rest is filled.
    Fitted,
    /// The same with sides and offsets rounded to the nearest.
    FittedNearest,
    /// It gets this size, no larger than the target, and stands in the upper left corner; the rest is filled.
    Corner {
        /// Pixels of a row.
        width: usize,
        /// Rows.
        height: usize,
    },
}

/// A grid of tiles of one size.
#[derive(Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Of one tile.
    pub size: Size,
    pub rows: usize,
    pub columns: usize,
    /// How the picture gets the size of the grid.
    pub fit: Fit,
    /// Whether the tiles of a row become one picture, below each other.
    pub joined: bool,
}

/// What to make of a picture.
#[derive(Debug, PartialEq, Eq)]
pub struct Plan {
    /// Sizes to which the picture is stretched one after the other; the rest starts from the last.
    pub prepare: Vec<Size>,
    /// Of the whole picture.
    pub whole: Size,
    /// How the whole picture gets its size.
    pub fit: Fit,
    pub tiles: Option<Tiles>,
    /// Whether the whole comes before its tiles.
    pub whole_first: bool,
}

impl Plan {
    /// The plan for a picture of `size`.
    pub fn new(layout: &Layout, size: Size) -> Result<Self> {
        let only = |whole, fit| Self { prepare: Vec::new(), whole, fit, tiles: None, whole_first: false };
        Ok(match *layout {
            Layout::Square { side } => {
                positive(side, "image size")?;
                only((side, side), Fit::Fitted)
            }
            Layout::Kept { multiple, pixels } => only(kept_size(size, multiple, pixels)?, Fit::Fitted),
            Layout::Stretched { multiple, pixels } => only(kept_size(size, multiple, pixels)?, Fit::Stretched),
            Layout::RoundedUp { multiple, pixels } => {
                only(rounded_up_size(size, multiple, pixels.max)?, Fit::Stretched)
            }
            Layout::NearestRatio { multiple, pixels } => {
                only(nearest_ratio_size(size, multiple, pixels.max)?, Fit::Stretched)
            }
            Layout::Canvas { multiple, pixels } => {
                let (canvas, (width, height)) = canvas_size(size, multiple, pixels)?;
                only(canvas, Fit::Corner { width, height })
            }
            Layout::LongestSide { longest, multiple, pixels } => {
                only(longest_side_size(size, longest, multiple, pixels)?, Fit::Fitted)
            }
            Layout::Idefics3 { tile, longest } => {
                positive(tile, "tile size")?;
                let scaled = idefics3_size(size, longest);
                let (columns, rows) = (scaled.0.div_ceil(tile), scaled.1.div_ceil(tile));
                let grid = (columns.saturating_mul(tile), rows.saturating_mul(tile));
                let tiles = Tiles { size: (tile, tile), rows, columns, fit: Fit::Stretched, joined: false };
                Self { prepare: vec![scaled, grid], tiles: Some(tiles), ..only((tile, tile), Fit::Stretched) }
            }
            Layout::Tiled { tile, ref candidates } => {
                positive(tile, "tile size")?;
                let is_large = size.0.max(size.1) > tile;
                let grid = candidates.best(size, tile).filter(|_| is_large);
                let tiles =
                    |(columns, rows)| Tiles { size: (tile, tile), rows, columns, fit: Fit::Fitted, joined: false };
                let tiles = grid.map(tiles);
                Self { tiles, ..only((tile, tile), Fit::Stretched) }
            }
            Layout::MiniCpm { tile, multiple } => {
                positive(tile, "tile size")?;
                positive(multiple, "patch size")?;
                if size.0.max(size.1) <= tile {
                    return Ok(only((tile, tile), Fit::Stretched));
                }
                let tiles = Some(minicpm_tiles(size, tile, multiple));
                Self { tiles, whole_first: true, ..only(minicpm_whole(size, tile, multiple), Fit::Stretched) }
            }
            Layout::DeepSeekOcr { whole, tile, tiles, joined } => {
                positive(whole, "image size")?;
                positive(tile, "tile size")?;
                let tiles = deepseek_tiles(size, tile, tiles).map(|tiles| Tiles { joined, ..tiles });
                Self { tiles, ..only((whole, whole), Fit::FittedNearest) }
            }
            Layout::Lfm2 { patch, merge, pixels } => {
                let whole = kept_size(size, patch.saturating_mul(merge), pixels)?;
                Self { tiles: lfm2_tiles(size, patch, merge, pixels.max), ..only(whole, Fit::Stretched) }
            }
        })
    }
}

/// An error where a setting is zero.
fn positive(value: usize, setting: &'static str) -> Result<()> {
    if value == 0 { Err(PictureError::ZeroSetting { setting }) } else { Ok(()) }
}

/// The multiple of `multiple` that is `length` rounded by `round`.
fn to_multiple(length: f32, multiple: usize, round: fn(f32) -> f32) -> usize {
    (round(length / multiple as f32) as usize).saturating_mul(multiple)
}

/// The size of a picture that keeps its own: `smart_resize` of Qwen2-VL's processor.
fn kept_size((width, height): Size, multiple: usize, pixels: PixelRange) -> Result<Size> {
    positive(multiple, "patch size")?;
    let nearest = |side: usize| to_multiple(side as f32, multiple, f32::round).max(multiple);
    limited_size((width, height), (nearest(width), nearest(height)), multiple, pixels)
}

/// The size of a picture in steps of two hundredths of its own, rounded up: the processor of Youtu-VL.
fn rounded_up_size((width, height): Size, multiple: usize, max_pixels: usize) -> Result<Size> {
    positive(multiple, "patch size")?;
    let mut scale = 1.0_f32;
    loop {
        let scaled = |side: usize| to_multiple(side as f32 * scale, multiple, f32::ceil).max(multiple);
        let size = (scaled(width), scaled(height));
        if size.0.saturating_mul(size.1) <= max_pixels {
            return Ok(size);
        }
        scale -= 0.02;
        if scale <= 0.0 {
            return Err(PictureError::TooLong { width, height, max_pixels });
        }
    }
}

/// The multiples below and above a picture's sides, after it was shrunk to the most pixels, whose ratio is nearest to its own; of equal
/// ones the largest: `get_aspect_ratio_preserving_size` of Muse Glimmer's processor.
fn nearest_ratio_size((width, height): Size, multiple: usize, max_pixels: usize) -> Result<Size> {
    positive(multiple, "patch size")?;
    let most = max_pixels / multiple.saturating_mul(multiple);
    let (mut rows, mut columns) = (height as f64 / multiple as f64, width as f64 / multiple as f64);
    let ratio = columns / rows;
    if rows * columns > most as f64 {
        rows = (most as f64 / ratio).sqrt();
        columns = rows * ratio;
    }
    let ends = |side: f64| [side.floor() as usize, side.ceil() as usize];
    let mut best: Option<(f64, Size)> = None;
    for (y, x) in ends(rows).into_iter().flat_map(|y| ends(columns).map(|x| (y, x))) {
        if y == 0 || x == 0 || y.saturating_mul(x) > most {
            continue;
        }
        let error = (y as f64 / x as f64 - height as f64 / width as f64).abs();
        if best.is_none_or(|(least, (best_x, best_y))| error < least || (error == least && x * y > best_x * best_y)) {
            best = Some((error, (x, y)));
        }
    }
    let rounded = |side: f64| (side.round() as usize).max(1);
    let (columns, rows) = best.map_or((rounded(columns), rounded(rows)), |(_, size)| size);
    Ok((columns.saturating_mul(multiple), rows.saturating_mul(multiple)))
}

/// The sizes of a canvas and of the picture in its corner: the processor of GLM-5V.
fn canvas_size((width, height): Size, multiple: usize, pixels: PixelRange) -> Result<(Size, Size)> {
    positive(multiple, "patch size")?;
    let aligned = |side: usize| side.max(1).next_multiple_of(multiple);
    let area = width.saturating_mul(height);
    let mut canvas = (aligned(width), aligned(height));
    if canvas.0.saturating_mul(canvas.1) < pixels.min {
        let scale = (pixels.min as f64 / area as f64).sqrt();
        canvas = (aligned((width as f64 * scale).ceil() as usize), aligned((height as f64 * scale).ceil() as usize));
    }
    if canvas.0.saturating_mul(canvas.1) > pixels.max {
        canvas = (multiple, multiple);
        let (mut low, mut high) = (1, height);
        while low <= high {
            let middle = usize::midpoint(low, high);
            let size = (aligned(width.saturating_mul(middle) / height), aligned(middle));
            if size.0.saturating_mul(size.1) <= pixels.max {
                canvas = size;
                low = middle + 1;
            } else {
                high = middle - 1;
            }
        }
    }
    let mut scale = (canvas.1 as f64 / height as f64).min(canvas.0 as f64 / width as f64);
    if area >= pixels.min {
        scale = scale.min(1.0);
    }
    let inner = |side: usize, most: usize| ((side as f64 * scale).floor() as usize).clamp(1, most);
    Ok((canvas, (inner(width, canvas.0), inner(height, canvas.1))))
}

/// The size of a picture scaled to a longest side.
fn longest_side_size((width, height): Size, longest: usize, multiple: usize, pixels: PixelRange) -> Result<Size> {
    positive(multiple, "patch size")?;
    positive(longest, "longest side")?;
    let scale = (longest as f32 / width as f32).min(longest as f32 / height as f32);
    let scaled = |side: usize| to_multiple(side as f32 * scale, multiple, f32::ceil);
    limited_size((width, height), (scaled(width), scaled(height)), multiple, pixels)
}

/// The size `aligned` of a picture, or another one where it has too many or too few pixels.
fn limited_size((width, height): Size, aligned: Size, multiple: usize, pixels: PixelRange) -> Result<Size> {
    let n_pixels = aligned.0.saturating_mul(aligned.1);
    let area = height as f32 * width as f32;
    if n_pixels > pixels.max {
        let shrink = (area / pixels.max as f32).sqrt();
        let shrunk = |side: usize| to_multiple(side as f32 / shrink, multiple, f32::floor).max(multiple);
        let size = (shrunk(width), shrunk(height));
        if size.0.saturating_mul(size.1) > pixels.max.max(multiple.saturating_mul(multiple)) {
            return Err(PictureError::TooLong { width, height, max_pixels: pixels.max });
        }
        return Ok(size);
    }
    if n_pixels < pixels.min {
        let grow = (pixels.min as f32 / area).sqrt();
        let grown = |side: usize| to_multiple(side as f32 * grow, multiple, f32::ceil);
        return Ok((grown(width), grown(height)));
    }
    Ok(aligned)
}

/// The size of a picture scaled to a longest side, the other side even: the processor of Idefics3.
fn idefics3_size((width, height): Size, longest: usize) -> Size {
    let ratio = width as f64 / height as f64;
    let even = |side: f64| (side as usize).next_multiple_of(2).max(1);
    if width >= height { (longest, even(longest as f64 / ratio)) } else { (even(longest as f64 * ratio), longest) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(layout: &Layout, size: Size) -> Result<Size> {
        Plan::new(layout, size).map(|plan| plan.whole)
    }

    #[test]
    fn halves_are_rounded_away_from_zero() {
        let layout = Layout::Kept { multiple: 16, pixels: PixelRange::ALL };
        assert_eq!(whole(&layout, (24, 40)), Ok((32, 48)));
        assert_eq!(whole(&layout, (1, 1)), Ok((16, 16)));
    }

    #[test]
    fn limits_on_pixels_start_from_the_original_size() {
        // Qwen2.5-VL: 28 pixels, 8 to 4096 tokens.
        let layout = Layout::Kept { multiple: 28, pixels: PixelRange::of_tokens(8, 4096, 28) };
        assert_eq!(whole(&layout, (4000, 3000)), Ok((2044, 1540)));
        assert_eq!(whole(&layout, (10, 30)), Ok((56, 140)));
    }

    #[test]
    fn sizes_that_are_rounded_up_or_nearest_in_ratio() {
        let layout = Layout::RoundedUp { multiple: 32, pixels: PixelRange { min: 0, max: 64 * 1024 } };
        assert_eq!(whole(&layout, (33, 32)), Ok((64, 32)));
        // 0.64 of the sides.
        assert_eq!(whole(&layout, (400, 400)), Ok((256, 256)));
        let layout = Layout::NearestRatio { multiple: 8, pixels: PixelRange { min: 0, max: 100 * 64 } };
        assert_eq!(whole(&layout, (41, 20)), Ok((48, 24)));
        // No candidate has few enough pixels.
        assert_eq!(whole(&layout, (3, 1000)), Ok((8, 1000)));
        assert_eq!(whole(&layout, (1, 1)), Ok((8, 8)));
        let layout = Layout::Canvas { multiple: 8, pixels: PixelRange { min: 256, max: 1024 } };
        assert_eq!(
            Plan::new(&layout, (20, 15)).map(|plan| (plan.whole, plan.fit)),
            Ok(((24, 16), Fit::Corner { width: 20, height: 15 }))
        );
        assert_eq!(
            Plan::new(&layout, (4, 4)).map(|plan| (plan.whole, plan.fit)),
            Ok(((16, 16), Fit::Corner { width: 16, height: 16 }))
        );
        assert_eq!(
            Plan::new(&layout, (100, 50)).map(|plan| (plan.whole, plan.fit)),
            Ok(((40, 24), Fit::Corner { width: 40, height: 20 }))
        );
    }

    #[test]
    fn a_strip_that_cannot_keep_the_limit_is_an_error() {
        let layout = Layout::Kept { multiple: 28, pixels: PixelRange::of_tokens(4, 64, 28) };
        let expected = PictureError::TooLong { width: 1, height: 30000, max_pixels: 50176 };
        assert_eq!(whole(&layout, (1, 30000)), Err(expected));
    }

    #[test]
    fn idefics3_has_no_side_of_zero() {
        assert_eq!(idefics3_size((30000, 1), 1536), (1536, 1));
        assert_eq!(idefics3_size((640, 480), 1001), (1001, 750));
        assert_eq!(idefics3_size((64, 640), 192), (20, 192));
    }
}
