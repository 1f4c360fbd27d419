//! WebP, through the crate `image-webp`.
//!
//! A file is a list of chunks after a header of 12 bytes. The first frame of an animation is decoded as a file of its own: the
//! crate blends frames, and panics where the sizes in an animation contradict each other.

use std::io::Cursor;

use image_webp::WebPDecoder;

use super::orientation::Orientation;
use super::{Format, little_endian, to_rgb};
use crate::{Limits, Picture, Result};

pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Picture> {
    // The file states its size, without the first eight bytes.
    if little_endian::<4>(bytes, 4).is_none_or(|len| bytes.len() - 8 < len) {
        return Err(Format::WebP.truncated(bytes));
    }
    let find = |name: &[u8; 4]| Chunks(&bytes[12..]).find(|chunk| chunk.name == name).map(|chunk| chunk.data);
    let picture = match find(b"ANMF") {
        Some(frame) => first_frame(find(b"VP8X").unwrap_or_default(), frame, limits)?,
        None => still(bytes, limits)?,
    };
    Ok(Orientation::of_exif(find(b"EXIF")).upright(picture))
}

/// Decodes a file that is no animation.
fn still(bytes: &[u8], limits: &Limits) -> Result<Picture> {
    // The decoder allocates by the size of a bitstream before it compares it with the picture's.
    for chunk in Chunks(&bytes[12..]) {
        if let Some((width, height)) = chunk.bitstream_size() {
            Format::WebP.check_size(width, height, limits)?;
        }
    }
    let damaged = |error| Format::WebP.damaged(&error);
    let mut decoder = WebPDecoder::new(Cursor::new(bytes)).map_err(damaged)?;
    let (width, height) = decoder.dimensions();
    let (width, height) = (width as usize, height as usize);
    let n_pixels = Format::WebP.check_size(width, height, limits)?;
    let channels = if decoder.has_alpha() { 4 } else { 3 };
    let mut samples = vec![0; n_pixels * channels];
    decoder.read_image(&mut samples).map_err(damaged)?;
    Picture::new(width, height, to_rgb(samples, channels))
}

/// Decodes the first frame of an animation, on black. `canvas` and `frame` are the data of the chunks `VP8X` and `ANMF`.
fn first_frame(canvas: &[u8], frame: &[u8], limits: &Limits) -> Result<Picture> {
    let damaged = || Format::WebP.damaged(&"the animation has no complete frame");
    let number = |data, at| little_endian::<3>(data, at).ok_or_else(damaged);
    let (width, height) = (number(canvas, 4)? + 1, number(canvas, 7)? + 1);
    Format::WebP.check_size(width, height, limits)?;
    let (x, y) = (number(frame, 0)? * 2, number(frame, 3)? * 2);
    let chunks = frame.get(16..).ok_or_else(damaged)?;
    let has_alpha = Chunks(chunks).any(|chunk| [b"ALPH", b"VP8L"].contains(&chunk.name));
    let header = [&[if has_alpha { 0x10 } else { 0 }, 0, 0, 0], &frame[6..12]].concat();
    let len = chunks.len() as u32 + 22;
    let file = [b"RIFF", &len.to_le_bytes()[..], b"WEBPVP8X", &10_u32.to_le_bytes(), &header, chunks].concat();
    let frame = still(&file, limits)?;
    if x + frame.width() > width || y + frame.height() > height {
        return Err(Format::WebP.damaged(&"a frame lies outside the picture"));
    }
    let mut picture = Picture::filled(width, height, [0; 3]);
    picture.paste(&frame, x, y);
    Ok(picture)
}

/// The chunks in the rest of a file. The last may be cut.
struct Chunks<'a>(&'a [u8]);

struct Chunk<'a> {
    name: &'a [u8; 4],
    data: &'a [u8],
}

impl<'a> Iterator for Chunks<'a> {
    type Item = Chunk<'a>;

    fn next(&mut self) -> Option<Chunk<'a>> {
        let name = self.0.first_chunk()?;
        let len = little_endian::<4>(self.0, 4)?;
        let rest = &self.0[8..];
        self.0 = rest.get(len.next_multiple_of(2)..).unwrap_or_default();
        Some(Chunk { name, data: &rest[..len.min(rest.len())] })
    }
}

impl Chunk<'_> {
    /// Width and height that a bitstream states.
    fn bitstream_size(&self) -> Option<(usize, usize)> {
        match self.name {
            // After a frame tag of three bytes and a start code of three: 14 bits each, and 2 of scale.
            b"VP8 " => Some((little_endian::<2>(self.data, 6)? & 0x3fff, little_endian::<2>(self.data, 8)? & 0x3fff)),
            // After a signature byte: 14 bits each, less one.
            b"VP8L" => little_endian::<4>(self.data, 1).map(|bits| ((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1)),
            _ => None,
        }
    }
}
