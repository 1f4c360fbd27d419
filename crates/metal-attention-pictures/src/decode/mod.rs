//! `Picture::decode`: picture files to pixels. One module for each format reads the size first, then the pixels.

mod bmp;
mod gif;
mod jpeg;
mod orientation;
mod png;
mod webp;

use crate::{Limits, Picture, PictureError, Result};

/// The picture formats that are decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Bmp,
    Gif,
    Jpeg,
    Png,
    WebP,
}

impl Format {
    /// The format of a file, by its first bytes.
    fn of(bytes: &[u8]) -> Result<Self> {
        let is_riff = bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP");
        let known = [
            (bytes.starts_with(b"BM"), Self::Bmp),
            (bytes.starts_with(b"GIF87a") || bytes.starts_with(b"GIF89a"), Self::Gif),
            (bytes.starts_with(b"\xff\xd8\xff"), Self::Jpeg),
            (bytes.starts_with(b"\x89PNG\r\n\x1a\n"), Self::Png),
            (is_riff, Self::WebP),
        ];
        if let Some((_, format)) = known.into_iter().find(|(is_it, _)| *is_it) {
            return Ok(format);
        }
        let brand = bytes.get(4..12).unwrap_or_default();
        let unsupported = [
            (brand == b"ftypavif" || brand == b"ftypavis", "AVIF"),
            ([&b"ftypheic"[..], b"ftypheix", b"ftypmif1", b"ftypmsf1"].contains(&brand), "HEIC"),
            (bytes.starts_with(b"II*\0") || bytes.starts_with(b"MM\0*"), "TIFF"),
            (bytes.starts_with(b"\xff\x0a") || brand == b"JXL \r\n\x87\n", "JPEG XL"),
            (bytes.starts_with(b"<svg") || bytes.starts_with(b"<?xml"), "SVG"),
            (bytes.starts_with(b"%PDF"), "PDF"),
        ];
        Err(match unsupported.into_iter().find(|(is_it, _)| *is_it) {
            Some((_, format)) => PictureError::UnsupportedFormat { format },
            None => PictureError::UnknownFormat { found: bytes[..bytes.len().min(8)].to_vec() },
        })
    }

    fn name(self) -> &'static str {
        match self {
            Self::Bmp => "BMP",
            Self::Gif => "GIF",
            Self::Jpeg => "JPEG",
            Self::Png => "PNG",
            Self::WebP => "WebP",
        }
    }

    /// The error of a damaged file.
    fn damaged(self, reason: &impl ToString) -> PictureError {
        PictureError::Damaged { format: self.name(), reason: reason.to_string() }
    }

    /// The error of a file that ends too early.
    fn truncated(self, bytes: &[u8]) -> PictureError {
        PictureError::Truncated { format: self.name(), bytes: bytes.len() }
    }

    /// The number of pixels that a header states, an error where it is zero or exceeds the limit.
    fn check_size(self, width: usize, height: usize, limits: &Limits) -> Result<usize> {
        let format = self.name();
        match width.saturating_mul(height) {
            0 => Err(PictureError::NoPixels { format, width, height }),
            n if n > limits.max_pixels => {
                Err(PictureError::TooManyPixels { format, width, height, limit: limits.max_pixels })
            }
            n => Ok(n),
        }
    }
}

impl Picture {
    /// Decodes a JPEG, PNG, WebP or BMP file, or the first frame of a GIF or of an animation in one of the others.
    ///
    /// - Alpha is dropped, not blended: the colours of transparent pixels stay. Pixels that a GIF's first frame leaves out
    ///   are black.
    /// - Grey becomes three equal channels. 16-bit samples lose their lower 8 bits. CMYK becomes RGB; other colour profiles
    ///   are not applied.
    /// - The picture is turned upright by its EXIF orientation. llama.cpp does not do this: models then see photographs of phones
    ///   lie on their side.
    ///
    /// A truncated file is an error, in animations only where the first frame is.
    pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Self> {
        if bytes.is_empty() {
            return Err(PictureError::Empty);
        }
        if bytes.len() > limits.max_bytes {
            return Err(PictureError::TooManyBytes { bytes: bytes.len(), limit: limits.max_bytes });
        }
        match Format::of(bytes)? {
            Format::Bmp => bmp::decode(bytes, limits),
            Format::Gif => gif::decode(bytes, limits),
            Format::Jpeg => jpeg::decode(bytes, limits),
            Format::Png => png::decode(bytes, limits),
            Format::WebP => webp::decode(bytes, limits),
        }
    }
}

/// RGB bytes of samples in shape [pixels, channels], where the channels are grey, grey and alpha, RGB, or RGB and alpha.
fn to_rgb(mut samples: Vec<u8>, channels: usize) -> Vec<u8> {
    match channels {
        3 => samples,
        4 => {
            let n_pixels = samples.len() / 4;
            for i in 0..n_pixels {
                samples.copy_within(i * 4..i * 4 + 3, i * 3);
            }
            samples.truncate(n_pixels * 3);
            samples
        }
        grey => samples.chunks_exact(grey).flat_map(|pixel| [pixel[0]; 3]).collect(),
    }
}

/// The little-endian number of `N` bytes at `at`, `None` beyond the end.
fn little_endian<const N: usize>(bytes: &[u8], at: usize) -> Option<usize> {
    let field: &[u8; N] = bytes.get(at..)?.first_chunk()?;
    Some(field.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
}
