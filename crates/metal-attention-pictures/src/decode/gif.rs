//! The first frame of a GIF, through the crate `gif`.

use std::num::NonZeroU64;

use gif::{ColorOutput, DecodeOptions, DecodingError, MemoryLimit};

use super::{Format, to_rgb};
use crate::{Limits, Picture, PictureError, Result};

pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Picture> {
    let error = |error| to_error(&error, bytes);
    let mut options = DecodeOptions::new();
    options.set_color_output(ColorOutput::RGBA);
    options.check_frame_consistency(true);
    if let Some(limit) = NonZeroU64::new(limits.max_pixels as u64 * 4) {
        options.set_memory_limit(MemoryLimit::Bytes(limit));
    }
    let mut decoder = options.read_info(bytes).map_err(error)?;
    let (width, height) = (usize::from(decoder.width()), usize::from(decoder.height()));
    Format::Gif.check_size(width, height, limits)?;
    let frame = decoder.next_frame_info().map_err(error)?.ok_or_else(|| Format::Gif.damaged(&"it has no frame"))?;
    let (x, y) = (usize::from(frame.left), usize::from(frame.top));
    let (frame_width, frame_height) = (usize::from(frame.width), usize::from(frame.height));
    let n_pixels = Format::Gif.check_size(frame_width, frame_height, limits)?;
    let mut samples = vec![0; n_pixels * 4];
    decoder.read_into_buffer(&mut samples).map_err(error)?;
    let frame = Picture::new(frame_width, frame_height, to_rgb(samples, 4))?;
    if (frame_width, frame_height) == (width, height) {
        return Ok(frame);
    }
    let mut picture = Picture::filled(width, height, [0; 3]);
    picture.paste(&frame, x, y);
    Ok(picture)
}

fn to_error(error: &DecodingError, bytes: &[u8]) -> PictureError {
    let is_end = matches!(error, DecodingError::Io(error) if error.kind() == std::io::ErrorKind::UnexpectedEof);
    if is_end { Format::Gif.truncated(bytes) } else { Format::Gif.damaged(error) }
}
