//! Grids of tiles: candidates, and the rules of `MiniCPM-V` and LFM2.
//!
//! Sizes are width, height; grids are columns, rows.

use crate::plan::{Fit, Size, Tiles};

/// The sizes from which [`Layout::Tiled`](crate::Layout::Tiled) chooses, as pairs of width and height, in pixels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidates(pub Vec<(usize, usize)>);

impl Candidates {
    /// The sizes listed in a file (`clip.vision.image_grid_pinpoints`), alternately width and height: llava-next,
    /// granite-vision.
    pub fn listed(pinpoints: &[usize]) -> Self {
        let (pairs, _) = pinpoints.as_chunks::<2>();
        Self(pairs.iter().map(|&[width, height]| (width, height)).collect())
    }

    /// Grids of at least `least` and at most `most` tiles: internvl, whose file says how many
    /// (`clip.vision.preproc_min_tiles`, `clip.vision.preproc_max_tiles`), otherwise 1 to 12.
    pub fn of_tiles(tile: usize, least: usize, most: usize) -> Self {
        let least = least.max(1);
        // Neither side has fewer tiles than the least of all, as in llama.cpp.
        let heights = |a: usize| (least.div_ceil(a).max(least)..=most / a).map(move |b| (a, b));
        Self::grids(tile, (least..=most).flat_map(heights))
    }

    /// Grids of up to `most` x `most` tiles but for the single one: llama4, with 3.
    pub fn up_to_square(tile: usize, most: usize) -> Self {
        let grids = (1..=most).flat_map(|columns| (1..=most).map(move |rows| (columns, rows)));
        Self::grids(tile, grids.filter(|grid| *grid != (1, 1)))
    }

    fn grids(tile: usize, grids: impl Iterator<Item = Size>) -> Self {
        let pixels = |n: usize| n.saturating_mul(tile);
        Self(grids.map(|(columns, rows)| (pixels(columns), pixels(rows))).collect())
    }

    /// The grid of the best size for a picture: the one that keeps most of its pixels, of those the one that wastes least,
    /// of those the first (`select_best_resolution` of LLaVA-NeXT). `None` without a size that holds a tile.
    pub(crate) fn best(&self, (width, height): Size, tile: usize) -> Option<Size> {
        let mut best: Option<(usize, usize, Size)> = None;
        for &candidate in &self.0 {
            let scale = (candidate.0 as f32 / width as f32).min(candidate.1 as f32 / height as f32);
            let scaled = ((width as f32 * scale) as usize).saturating_mul((height as f32 * scale) as usize);
            let used = scaled.min(width * height);
            let wasted = candidate.0.saturating_mul(candidate.1).saturating_sub(used);
            if best.is_none_or(|(most, least, _)| used > most || (used == most && wasted < least)) {
                best = Some((used, wasted, candidate));
            }
        }
        let (.., (width, height)) = best?;
        Some((width / tile, height / tile)).filter(|&(columns, rows)| columns > 0 && rows > 0)
    }
}

/// The most slices of `MiniCPM-V`.
const MINICPM_SLICES: usize = 9;

/// A side as a multiple of `multiple`, at least one.
fn minicpm_side(side: usize, multiple: usize) -> usize {
    ((side as f32 / multiple as f32).round() as usize * multiple).max(multiple)
}

/// A size in the ratio of `size` with about as many pixels as a square of side `tile` (LLaVA-UHD).
fn minicpm_scaled((width, height): Size, tile: usize) -> Size {
    let ratio = width as f32 / height as f32;
    let height = (tile as f32 / ratio.sqrt()) as usize;
    ((height as f32 * ratio) as usize, height)
}

/// The size of the whole picture.
pub fn minicpm_whole(size: Size, tile: usize, multiple: usize) -> Size {
    let is_large = size.0 * size.1 > tile.saturating_mul(tile);
    let (width, height) = if is_large { minicpm_scaled(size, tile) } else { size };
    (minicpm_side(width, multiple), minicpm_side(height, multiple))
}

/// The slices of a picture.
pub fn minicpm_tiles((width, height): Size, tile: usize, multiple: usize) -> Tiles {
    let (columns, rows) = minicpm_grid((width, height), tile);
    let slice = (minicpm_side(width, columns) / columns, minicpm_side(height, rows) / rows);
    let (width, height) = minicpm_scaled(slice, tile);
    let size = (minicpm_side(width, multiple), minicpm_side(height, multiple));
    Tiles { size, rows, columns, fit: Fit::Fitted, joined: false }
}

/// The grid of about as many slices as the picture has tiles' areas, whose ratio is nearest in logarithm.
fn minicpm_grid((width, height): Size, tile: usize) -> Size {
    let ratio = (f64::from(width as f32 / height as f32)).ln() as f32;
    let areas = width as f32 * height as f32 / (tile as f32 * tile as f32);
    let n_slices = areas.ceil().min(MINICPM_SLICES as f32) as usize;
    let (mut best, mut least) = ((1, 1), f32::INFINITY);
    for n in n_slices.saturating_sub(1)..=n_slices + 1 {
        if n == 1 || n > MINICPM_SLICES {
            continue;
        }
        for columns in (1..=n).filter(|columns| n % columns == 0) {
            let rows = n / columns;
            let error = (f64::from(ratio) - (columns as f64 / rows as f64).ln()).abs() as f32;
            if error < least {
                (best, least) = ((columns, rows), error);
            }
        }
    }
    best
}

/// The side of a tile of LFM2-VL.
pub const LFM2_TILE: usize = 512;
/// The least and the most tiles of LFM2-VL.
const LFM2_TILES: std::ops::RangeInclusive<usize> = 2..=10;
/// A picture of more pixels than this times the most has tiles.
const LFM2_TOLERANCE: f64 = 2.0;

/// The tiles of a picture, where it has any (the processor of LFM2-VL).
pub fn lfm2_tiles((width, height): Size, patch: usize, merge: usize, max_pixels: usize) -> Option<Tiles> {
    let multiple = patch.saturating_mul(merge);
    let rounded = |side: usize| ((side as f64 / multiple as f64).round_ties_even() as usize * multiple).max(patch);
    if rounded(width) as f64 * rounded(height) as f64 <= max_pixels as f64 * LFM2_TOLERANCE {
        return None;
    }
    let (columns, rows) = nearest_grid((width, height), LFM2_TILE, LFM2_TILES);
    Some(Tiles { size: (LFM2_TILE, LFM2_TILE), rows, columns, fit: Fit::Fitted, joined: false })
}

/// The tiles of a picture that is larger than one (the processor of DeepSeek-OCR).
pub fn deepseek_tiles(size: Size, tile: usize, [least, most]: [usize; 2]) -> Option<Tiles> {
    if size.0.max(size.1) <= tile {
        return None;
    }
    let (columns, rows) = nearest_grid(size, tile, least..=most);
    Some(Tiles { size: (tile, tile), rows, columns, fit: Fit::Stretched, joined: false })
}

/// The grid of a number of tiles whose ratio is nearest to the picture's. Of equal ones the picture fills the largest by more than half,
/// but for the first, which has the fewest tiles.
fn nearest_grid((width, height): Size, tile: usize, tiles: std::ops::RangeInclusive<usize>) -> Size {
    let ratio = width as f32 / height as f32;
    let area = (width * height) as f32;
    let (mut best, mut least) = ((1, 1), f32::MAX);
    for n in tiles {
        for columns in (1..=n).filter(|columns| n % columns == 0) {
            let rows = n / columns;
            let error = (ratio - columns as f32 / rows as f32).abs();
            let fills_half = area > 0.5 * (tile as f32 * tile as f32 * n as f32);
            if error < least || (error == least && fills_half) {
                (best, least) = ((columns, rows), error);
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_are_in_llama_cpps_order() {
        assert_eq!(Candidates::of_tiles(1, 1, 4).0, [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)]);
        assert_eq!(Candidates::up_to_square(10, 2).0, [(10, 20), (20, 10), (20, 20)]);
        assert_eq!(Candidates::listed(&[336, 672, 672, 336]).0, [(336, 672), (672, 336)]);
    }

    #[test]
    fn the_best_candidate_keeps_most_and_wastes_least() {
        // LLaVA 1.6's list.
        let candidates = Candidates::listed(&[336, 672, 672, 336, 672, 672, 1008, 336, 336, 1008]);
        assert_eq!(candidates.best((1000, 300), 336), Some((3, 1)));
        assert_eq!(candidates.best((640, 480), 336), Some((2, 2)));
        assert_eq!(candidates.best((300, 600), 336), Some((1, 2)));
        assert_eq!(Candidates(Vec::new()).best((300, 600), 336), None);
        assert_eq!(Candidates(vec![(100, 100)]).best((300, 600), 336), None);
    }

    #[test]
    fn slices_of_minicpm_follow_the_ratio() {
        // MiniCPM-V 2.6: tiles of 448, patches of 14.
        assert_eq!(minicpm_whole((1344, 896), 448, 14), (546, 364));
        assert_eq!(
            minicpm_tiles((1344, 896), 448, 14),
            Tiles { size: (448, 448), rows: 2, columns: 3, fit: Fit::Fitted, joined: false }
        );
        assert_eq!(minicpm_grid((3000, 2), 448), (2, 1));
    }

    #[test]
    fn deepseek_tiles_large_pictures() {
        let tiles = |size| deepseek_tiles(size, 640, [2, 9]).map(|tiles| (tiles.columns, tiles.rows));
        assert_eq!(tiles((640, 640)), None);
        assert_eq!(tiles((641, 300)), Some((2, 1)));
        assert_eq!(tiles((1000, 1000)), Some((2, 2)));
        assert_eq!(tiles((1600, 1600)), Some((3, 3)));
        assert_eq!(tiles((700, 1750)), Some((1, 3)));
    }

    #[test]
    fn lfm2_tiles_large_pictures() {
        let tiles = |size| lfm2_tiles(size, 16, 2, 256 * 1024).map(|tiles| (tiles.columns, tiles.rows));
        assert_eq!(tiles((1024, 512)), None);
        assert_eq!(tiles((1056, 512)), Some((2, 1)));
        assert_eq!(tiles((1000, 1000)), Some((2, 2)));
        assert_eq!(tiles((2000, 2000)), Some((3, 3)));
        assert_eq!(tiles((500, 5000)), Some((1, 10)));
    }
}
