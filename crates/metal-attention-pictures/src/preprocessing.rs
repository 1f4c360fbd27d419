//! `Preprocessing`: how a family of vision models turns a picture into the pictures that its encoder reads.

use crate::plan::{Fit, Plan, Tiles};
use crate::resize::Rounding;
use crate::{Candidates, Filter, Picture, PictureError, Result};

/// The least and the most pixels of a resized picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PixelRange {
    /// The least pixels, 0 without a limit.
    pub min: usize,
    /// The most pixels, `usize::MAX` without a limit.
    pub max: usize,
}

impl PixelRange {
    /// No limits.
    pub const ALL: Self = Self { min: 0, max: usize::MAX };

    /// The pixels of `min` to `max` tokens, each of a square of `multiple` pixels at its side.
    pub fn of_tokens(min: usize, max: usize, multiple: usize) -> Self {
        let pixels = |tokens: usize| tokens.saturating_mul(multiple).saturating_mul(multiple);
        Self { min: pixels(min), max: pixels(max) }
    }
}

/// The sizes of what an encoder reads. All sizes are in pixels.
///
/// `multiple` is the side of a token's square: the patch size times the patches that are merged at each side.
/// `tile` is `clip.vision.image_size`.
#[derive(Debug, Clone, PartialEq)]
pub enum Layout {
    /// One square, into which the picture is fitted: gemma3, gemma3n, llava, janus-pro.
    Square {
        /// Its side, `clip.vision.image_size`.
        side: usize,
    },
    /// One picture of about its own size, fitted into multiples: qwen, glm4v, pixtral, mistral3, kimi, gemma4, paddleocr,
    /// dots-ocr, phi4. The formula is `smart_resize` of Qwen2-VL's processor.
    Kept {
        /// Both sides are multiples of it.
        multiple: usize,
        /// Limits on its pixels.
        pixels: PixelRange,
    },
    /// As [`Self::Kept`], but stretched to the size: hunyuanvl.
    Stretched {
        /// Both sides are multiples of it.
        multiple: usize,
        /// Limits on its pixels.
        pixels: PixelRange,
    },
    /// One picture stretched to a size whose sides are its own, or the most hundredths of them at which it has not too many pixels, rounded
    /// up to multiples: youtuvl.
    RoundedUp {
        /// Both sides are multiples of it.
        multiple: usize,
        /// Limits on its pixels, of which the least is not kept.
        pixels: PixelRange,
    },
    /// One picture stretched to multiples whose ratio is nearest to its own: muse-glimmer.
    NearestRatio {
        /// Both sides are multiples of it.
        multiple: usize,
        /// Limits on its pixels, of which the least is not kept.
        pixels: PixelRange,
    },
    /// One picture in the upper left corner of a canvas of multiples, never enlarged but for the least pixels: glm5v.
    Canvas {
        /// Both sides are multiples of it.
        multiple: usize,
        /// Limits on the canvas's pixels.
        pixels: PixelRange,
    },
    /// One picture scaled, up or down, to a longest side, and fitted into multiples: lightonocr.
    LongestSide {
        /// The longest side, `clip.vision.preproc_image_size`.
        longest: usize,
        /// Both sides are multiples of it.
        multiple: usize,
        /// Limits on its pixels, applied afterwards.
        pixels: PixelRange,
    },
    /// Tiles of the picture scaled to a longest side and stretched to whole tiles, then the whole: idefics3.
    Idefics3 {
        /// The side of a tile.
        tile: usize,
        /// The longest side, `clip.vision.preproc_image_size`.
        longest: usize,
    },
    /// Tiles of the picture fitted into the best of several sizes, then the whole stretched to one tile: llava-next,
    /// granite-vision, internvl, llama4. A picture that is no larger than a tile has no tiles.
    Tiled {
        /// The side of a tile.
        tile: usize,
        /// The sizes.
        candidates: Candidates,
    },
    /// The whole in its own ratio, then slices in theirs (LLaVA-UHD): minicpmv. A picture that is no larger than a
    /// tile is stretched to one and has no slices.
    MiniCpm {
        /// The side of a square of as many pixels as a slice has, about.
        tile: usize,
        /// Both sides of all pictures are multiples of it: the patch size, for 4.6 four times that.
        multiple: usize,
    },
    /// Tiles of the picture stretched to a grid, then the whole fitted into a square: deepseekocr, deepseekocr2. A picture that is no
    /// larger than a tile has only the whole.
    DeepSeekOcr {
        /// The side of the whole.
        whole: usize,
        /// The side of a tile.
        tile: usize,
        /// The fewest and the most tiles.
        tiles: [usize; 2],
        /// Whether the tiles of a row are one picture, in which they stand below each other.
        joined: bool,
    },
    /// The picture stretched to multiples, a large one after its tiles of [`LFM2_TILE`](crate::LFM2_TILE): lfm2.
    Lfm2 {
        /// The patch size.
        patch: usize,
        /// Patches that are merged at each side.
        merge: usize,
        /// Limits on the pixels of the whole. A picture of more than twice the most has tiles.
        pixels: PixelRange,
    },
}

/// How a picture becomes the pictures that a vision tower reads. It does what llama.cpp
/// does (`tools/mtmd`), byte for byte.
///
/// The loader of a family fills it in from the metadata of the model's file.
#[derive(Debug, Clone, PartialEq)]
pub struct Preprocessing {
    /// The sizes.
    pub layout: Layout,
    /// The filter of all resizing.
    pub filter: Filter,
    /// The colour beside a fitted picture.
    pub fill: [u8; 3],
}

/// Where a picture of a [`Division`] lies in the original.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// It is the whole picture.
    Whole,
    /// It is a tile.
    Tile {
        /// Its row, from 0.
        row: usize,
        /// Its column, from 0.
        column: usize,
    },
}

/// A picture for the encoder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its place in the original.
    pub place: Place,
    /// Its pixels.
    pub picture: Picture,
}

/// What the encoder reads of one picture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Division {
    /// The pictures in the order in which their embeddings go into the prompt. Tiles are in rows.
    pub entries: Vec<Entry>,
    /// Rows of tiles, 0 without tiles.
    pub rows: usize,
    /// Columns of tiles, 0 without tiles.
    pub columns: usize,
}

impl Preprocessing {
    /// Sets the limits of a picture in tokens, as llama.cpp's `--image-min-tokens` and `--image-max-tokens` do.
    ///
    /// Layouts that do not keep the size, [`Layout::Square`] and those with tiles but [`Layout::Lfm2`], have no such limits
    /// and stay as they are.
    pub fn limit_tokens(&mut self, min: Option<usize>, max: Option<usize>) -> Result<()> {
        let (multiple, pixels) = match &mut self.layout {
            Layout::Kept { multiple, pixels }
            | Layout::Stretched { multiple, pixels }
            | Layout::RoundedUp { multiple, pixels }
            | Layout::NearestRatio { multiple, pixels }
            | Layout::Canvas { multiple, pixels }
            | Layout::LongestSide { multiple, pixels, .. } => (*multiple, pixels),
            Layout::Lfm2 { patch, merge, pixels } => (patch.saturating_mul(*merge), pixels),
            Layout::Square { .. }
            | Layout::Idefics3 { .. }
            | Layout::Tiled { .. }
            | Layout::MiniCpm { .. }
            | Layout::DeepSeekOcr { .. } => {
                return Ok(());
            }
        };
        let limits = PixelRange::of_tokens(min.unwrap_or(0), max.unwrap_or(0), multiple);
        let limited = PixelRange {
            min: if min.is_some() { limits.min } else { pixels.min },
            max: if max.is_some() { limits.max } else { pixels.max },
        };
        if limited.min > limited.max {
            return Err(PictureError::EmptyRange { min: limited.min, max: limited.max });
        }
        *pixels = limited;
        Ok(())
    }

    /// The pictures that the encoder reads of `picture`.
    pub fn apply(&self, picture: &Picture) -> Result<Division> {
        let plan = Plan::new(&self.layout, (picture.width(), picture.height()))?;
        let mut prepared = None;
        for (width, height) in plan.prepare {
            prepared = Some(prepared.as_ref().unwrap_or(picture).resized(width, height, self.filter)?);
        }
        let source = prepared.as_ref().unwrap_or(picture);
        let whole = Entry { place: Place::Whole, picture: self.fit(source, plan.whole, plan.fit)? };
        let Some(tiles) = plan.tiles else {
            return Ok(Division { entries: vec![whole], rows: 0, columns: 0 });
        };
        let mut entries = self.tiles(source, &tiles)?;
        entries.insert(if plan.whole_first { 0 } else { entries.len() }, whole);
        Ok(Division { entries, rows: tiles.rows, columns: if tiles.joined { 1 } else { tiles.columns } })
    }

    /// The picture resized to `size`.
    fn fit(&self, picture: &Picture, (width, height): (usize, usize), fit: Fit) -> Result<Picture> {
        match fit {
            Fit::Stretched => picture.resized(width, height, self.filter),
            Fit::Fitted => picture.fitted(width, height, self.filter, self.fill),
            Fit::Corner { width: inner_width, height: inner_height } => {
                let inner = picture.resized(inner_width, inner_height, self.filter)?;
                picture.check_target(width, height)?;
                let mut canvas = Picture::filled(width, height, self.fill);
                canvas.paste(&inner, 0, 0);
                Ok(canvas)
            }
            Fit::FittedNearest => picture.fitted_by(width, height, self.filter, self.fill, Rounding::Nearest),
        }
    }

    /// The tiles of the picture, row by row.
    fn tiles(&self, picture: &Picture, tiles: &Tiles) -> Result<Vec<Entry>> {
        let (width, height) = tiles.size;
        let all = (tiles.columns.saturating_mul(width), tiles.rows.saturating_mul(height));
        let all = self.fit(picture, all, tiles.fit)?;
        if tiles.joined {
            picture.check_target(width, tiles.columns.saturating_mul(height))?;
            let row = |row| {
                let mut picture = Picture::filled(width, tiles.columns * height, self.fill);
                for column in 0..tiles.columns {
                    picture.paste(&all.crop(column * width, row * height, width, height), 0, column * height);
                }
                Entry { place: Place::Tile { row, column: 0 }, picture }
            };
            return Ok((0..tiles.rows).map(row).collect());
        }
        let places = (0..tiles.rows).flat_map(|row| (0..tiles.columns).map(move |column| (row, column)));
        let entry = |(row, column)| Entry {
            place: Place::Tile { row, column },
            picture: all.crop(column * width, row * height, width, height),
        };
        Ok(places.map(entry).collect())
    }
}
