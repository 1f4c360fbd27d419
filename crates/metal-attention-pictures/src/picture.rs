//! `Picture`: RGB pixels, and what needs no filter.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::{PictureError, Result};

/// RGB pixels of 8 bits, without alpha. There is at least one.
#[derive(Clone, PartialEq, Eq)]
pub struct Picture {
    width: usize,
    height: usize,
    /// Shape [height, width, 3].
    rgb: Vec<u8>,
}

impl Picture {
    /// A picture of the bytes `rgb`, of shape [height, width, 3].
    pub fn new(width: usize, height: usize, rgb: Vec<u8>) -> Result<Self> {
        let expected = width.checked_mul(height).and_then(|pixels| pixels.checked_mul(3));
        if rgb.is_empty() || expected != Some(rgb.len()) {
            return Err(PictureError::WrongLength { width, height, bytes: rgb.len() });
        }
        Ok(Self { width, height, rgb })
    }

    /// A picture of one colour. Neither side may be zero, and their product is one that the caller can allocate.
    pub(crate) fn filled(width: usize, height: usize, colour: [u8; 3]) -> Self {
        Self { width, height, rgb: colour.repeat(width * height) }
    }

    /// Pixels in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows.
    pub fn height(&self) -> usize {
        self.height
    }

    /// The bytes, of shape [height, width, 3].
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }

    /// The bytes, to be written.
    #[cfg(feature = "decode")]
    pub(crate) fn rgb_mut(&mut self) -> &mut [u8] {
        &mut self.rgb
    }

    /// The bytes of one row, of shape [width, 3].
    pub fn row(&self, y: usize) -> &[u8] {
        &self.rgb[y * self.width * 3..][..self.width * 3]
    }

    /// SHA-256 of the size (two little-endian 64-bit numbers: width, height) and the bytes.
    ///
    /// Pictures of the same digest have the same embeddings, so that caches may be keyed by it.
    pub fn digest(&self) -> [u8; 32] {
        let sizes = [self.width as u64, self.height as u64].map(u64::to_le_bytes);
        Sha256::new_with_prefix(sizes.as_flattened()).chain_update(&self.rgb).finalize().into()
    }

    /// The part of `width` x `height` pixels whose upper left corner is at `x`, `y`. It must lie inside the picture.
    pub(crate) fn crop(&self, x: usize, y: usize, width: usize, height: usize) -> Self {
        let mut rgb = Vec::with_capacity(width * height * 3);
        for y in y..y + height {
            rgb.extend_from_slice(&self.row(y)[x * 3..(x + width) * 3]);
        }
        Self { width, height, rgb }
    }

    /// Copies `other` into this picture, its upper left corner to `x`, `y`. It must fit.
    pub(crate) fn paste(&mut self, other: &Self, x: usize, y: usize) {
        for from in 0..other.height {
            let to = ((y + from) * self.width + x) * 3;
            self.rgb[to..to + other.width * 3].copy_from_slice(other.row(from));
        }
    }
}

impl fmt::Debug for Picture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Picture({} x {})", self.width, self.height)
    }
}
