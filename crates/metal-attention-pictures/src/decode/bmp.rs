//! BMP: bitmaps of Windows and OS/2, without run-length encoding.
//!
//! A file header of 14 bytes, a bitmap header whose first field is its length, masks or a palette, rows of pixels padded to 4
//! bytes, from the bottom up (Windows: `BITMAPINFOHEADER`, OS/2: `BITMAPCOREHEADER`).

use super::{Format, little_endian};
use crate::{Limits, Picture, PictureError, Result};

/// How the bits of a pixel become a colour.
enum Colours {
    /// Indices of 1, 2, 4 or 8 bits into colours.
    Palette(Vec<[u8; 3]>),
    /// The bits of red, green and blue in a number of 16 or 32 bits.
    Masks([u32; 3]),
    /// Blue, green and red bytes.
    Bytes,
}

pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Picture> {
    const UNCOMPRESSED: usize = 0;
    const BITFIELDS: usize = 3;
    const ALPHA_BITFIELDS: usize = 6;
    let truncated = || Format::Bmp.truncated(bytes);
    let number = |at: usize| little_endian::<4>(bytes, at).ok_or_else(truncated);
    let short = |at: usize| little_endian::<2>(bytes, at).ok_or_else(truncated);
    let (data, header) = (number(10)?, number(14)?);
    let is_core = header == 12;
    let (width, height, bits) = if is_core {
        (short(18)? as i32, short(20)? as i32, short(24)?)
    } else {
        (number(18)? as i32, number(22)? as i32, short(28)?)
    };
    let from_top = height < 0;
    let (width, height) = (usize::try_from(width).unwrap_or(0), height.unsigned_abs() as usize);
    Format::Bmp.check_size(width, height, limits)?;

    let compression = if is_core { UNCOMPRESSED } else { number(30)? };
    let colours = match (bits, compression) {
        (_, 1 | 2) => return Err(PictureError::UnsupportedFormat { format: "run-length encoded BMP" }),
        (1 | 2 | 4 | 8, UNCOMPRESSED) => {
            let stated = if is_core { 0 } else { number(46)? };
            let n = if stated == 0 { 1 << bits } else { stated.min(1 << bits) };
            let entry = if is_core { 3 } else { 4 };
            let colour = |i: usize| bytes.get(14 + header + i * entry..)?.first_chunk().map(|&[b, g, r]| [r, g, b]);
            Colours::Palette((0..n).map(colour).collect::<Option<_>>().ok_or_else(truncated)?)
        }
        (16, UNCOMPRESSED) => Colours::Masks([0x7c00, 0x3e0, 0x1f]),
        (24, UNCOMPRESSED) => Colours::Bytes,
        (32, UNCOMPRESSED) => Colours::Masks([0xff_0000, 0xff00, 0xff]),
        // Part of the bitmap header, or right after a short one.
        (16 | 32, BITFIELDS | ALPHA_BITFIELDS) => {
            Colours::Masks([number(54)? as u32, number(58)? as u32, number(62)? as u32])
        }
        _ => return Err(Format::Bmp.damaged(&format!("{bits} bits a pixel with compression {compression}"))),
    };

    let row_len = (width * bits).div_ceil(32) * 4;
    let rows = bytes.get(data..).and_then(|rows| rows.get(..row_len.checked_mul(height)?)).ok_or_else(truncated)?;
    let mut rgb = Vec::with_capacity(width * height * 3);
    for y in 0..height {
        let y = if from_top { y } else { height - 1 - y };
        let row = &rows[y * row_len..][..row_len];
        rgb.extend((0..width).flat_map(|x| colours.of(row, x, bits)));
    }
    Picture::new(width, height, rgb)
}

impl Colours {
    /// The colour of pixel `x` in a row of pixels of `bits` bits.
    fn of(&self, row: &[u8], x: usize, bits: usize) -> [u8; 3] {
        let at = x * bits / 8;
        match self {
            Self::Palette(colours) => {
                let index = row[at] >> (8 - bits - x * bits % 8) & (0xff >> (8 - bits));
                // A palette may be shorter than the indices allow.
                colours.get(usize::from(index)).copied().unwrap_or_default()
            }
            Self::Masks(masks) => {
                let pixel = row[at..at + bits / 8].iter().rev().fold(0, |pixel, byte| pixel << 8 | u32::from(*byte));
                masks.map(|mask| masked(pixel, mask))
            }
            Self::Bytes => [row[at + 2], row[at + 1], row[at]],
        }
    }
}

/// The bits of `pixel` under `mask`, scaled to 0 to 255; 0 where the mask is empty.
fn masked(pixel: u32, mask: u32) -> u8 {
    let shift = mask.trailing_zeros().min(31);
    let most = u64::from(mask >> shift);
    let value = u64::from((pixel & mask) >> shift);
    (value * 255 + most / 2).checked_div(most).unwrap_or(0) as u8
}
