//! WebP, through the crate `image-webp`.

use std::io::Cursor;

use image_webp::WebPDecoder;

use super::orientation::Orientation;
use super::{Format, little_endian, to_rgb};
use crate::{Limits, Picture, Result};

pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Picture> {
    let damaged = |error| Format::WebP.damaged(&error);
    // The file states its size, without the first eight bytes.
    if little_endian::<4>(bytes, 4).is_none_or(|len| bytes.len() - 8 < len) {
        return Err(Format::WebP.truncated(bytes));
    }
    check_frames(bytes.get(12..).unwrap_or_default(), limits)?;
    let mut decoder = WebPDecoder::new(Cursor::new(bytes)).map_err(damaged)?;
    let (width, height) = decoder.dimensions();
    let (width, height) = (width as usize, height as usize);
    let n_pixels = Format::WebP.check_size(width, height, limits)?;
    decoder.set_memory_limit(limits.max_pixels.saturating_mul(4).saturating_add(limits.max_bytes));
    let channels = if decoder.has_alpha() { 4 } else { 3 };
    let mut samples = vec![0; n_pixels * channels];
    decoder.read_image(&mut samples).map_err(damaged)?;
    let exif = decoder.exif_metadata().ok().flatten();
    let orientation = Orientation::of_exif(exif.as_deref());
    Ok(orientation.upright(Picture::new(width, height, to_rgb(samples, channels))?))
}

/// Checks the sizes of all frames in `chunks`. The decoder allocates by a frame's own size before it compares it with the
/// picture's.
fn check_frames(mut chunks: &[u8], limits: &Limits) -> Result<()> {
    while let (Some(name), Some(len)) = (chunks.get(..4), little_endian::<4>(chunks, 4)) {
        let rest = &chunks[8..];
        let data = &rest[..len.min(rest.len())];
        let size = match name {
            // After a frame tag of three bytes and a start code of three: 14 bits each, and 2 of scale.
            b"VP8 " => {
                little_endian::<2>(data, 6).zip(little_endian::<2>(data, 8)).map(|(w, h)| (w & 0x3fff, h & 0x3fff))
            }
            // After a signature byte: 14 bits each, less one.
            b"VP8L" => little_endian::<4>(data, 1).map(|bits| ((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1)),
            b"ANMF" => {
                check_frames(data.get(16..).unwrap_or_default(), limits)?;
                None
            }
            _ => None,
        };
        if let Some((width, height)) = size {
            Format::WebP.check_size(width, height, limits)?;
        }
        chunks = rest.get(len.next_multiple_of(2)..).unwrap_or_default();
    }
    Ok(())
}
