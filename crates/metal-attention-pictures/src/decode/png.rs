//! PNG, through the crate `png`.

use std::io::Cursor;

use png::{Decoder, DecodingError, Limits as PngLimits, Transformations};

use super::orientation::Orientation;
use super::{Format, to_rgb};
use crate::{Limits, Picture, PictureError, Result};

pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Picture> {
    let error = |error| to_error(&error, bytes);
    // The limit is on what the decoder allocates beside the pixels: a row of them, and chunks.
    let own = PngLimits { bytes: limits.max_pixels.saturating_mul(8).saturating_add(limits.max_bytes) };
    let mut decoder = Decoder::new_with_limits(Cursor::new(bytes), own);
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    decoder.set_transformations(Transformations::EXPAND | Transformations::STRIP_16);
    let header = decoder.read_header_info().map_err(error)?;
    let (width, height) = (header.width as usize, header.height as usize);
    let n_pixels = Format::Png.check_size(width, height, limits)?;
    let mut reader = decoder.read_info().map_err(error)?;
    let channels = reader.output_color_type().0.samples();
    let mut samples = vec![0; n_pixels * channels];
    if reader.output_buffer_size() != Some(samples.len()) {
        return Err(Format::Png.damaged(&"the sizes in it contradict each other"));
    }
    reader.next_frame(&mut samples).map_err(error)?;
    if reader.info().animation_control.is_none() {
        reader.finish().map_err(error)?;
    }
    let orientation = Orientation::of_exif(reader.info().exif_metadata.as_deref());
    Ok(orientation.upright(Picture::new(width, height, to_rgb(samples, channels))?))
}

fn to_error(error: &DecodingError, bytes: &[u8]) -> PictureError {
    match error {
        DecodingError::IoError(_) => Format::Png.truncated(bytes),
        DecodingError::Format(_) | DecodingError::Parameter(_) | DecodingError::LimitsExceeded => {
            Format::Png.damaged(error)
        }
    }
}
