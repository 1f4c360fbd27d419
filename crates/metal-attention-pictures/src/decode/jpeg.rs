//! JPEG, through the crate `zune-jpeg`.

use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

use super::orientation::Orientation;
use super::{Format, to_rgb};
use crate::{Limits, Picture, Result};

pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Picture> {
    const MAX_SIDE: usize = u16::MAX as usize;
    if !is_complete(bytes) {
        return Err(Format::Jpeg.truncated(bytes));
    }
    let options = DecoderOptions::default().set_max_width(MAX_SIDE).set_max_height(MAX_SIDE).set_strict_mode(false);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(|error| Format::Jpeg.damaged(&error))?;
    let (width, height) = decoder.dimensions().unwrap_or_default();
    let n_pixels = Format::Jpeg.check_size(width, height, limits)?;
    let channels = if decoder.input_colorspace() == Some(ColorSpace::Luma) { 1 } else { 3 };
    let colours = if channels == 1 { ColorSpace::Luma } else { ColorSpace::RGB };
    decoder.set_options(options.jpeg_set_out_colorspace(colours));
    let mut samples = vec![0; n_pixels * channels];
    decoder.decode_into(&mut samples).map_err(|error| Format::Jpeg.damaged(&error))?;
    let orientation = Orientation::of_exif(decoder.exif().map(Vec::as_slice));
    Ok(orientation.upright(Picture::new(width, height, to_rgb(samples, channels))?))
}

/// Whether the file has its end marker. The decoder fills what is missing before it with grey.
fn is_complete(bytes: &[u8]) -> bool {
    const END: u8 = 0xd9;
    let mut at = 0;
    while let Some(found) = bytes.get(at..).and_then(|rest| rest.iter().position(|byte| *byte == 0xff)) {
        at += found + 1;
        match bytes.get(at) {
            Some(&END) => return true,
            // A byte 0xff of the data, a fill byte, a marker without a segment.
            None | Some(0 | 1 | 0xd0..=0xd8 | 0xff) => {}
            Some(_) => {
                let Some(&[high, low]) = bytes.get(at + 1..).and_then(|rest| rest.first_chunk()) else { return false };
                at += 1 + usize::from(u16::from_be_bytes([high, low]));
            }
        }
    }
    false
}
