//! Limits on what is decoded.

/// Limits on picture files, checked before memory is allocated for pixels.
///
/// Decoding allocates at most about 16 bytes for each pixel, and a small multiple of the file's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The most bytes of a file.
    pub max_bytes: usize,
    /// The most pixels, width x height.
    pub max_pixels: usize,
}

impl Default for Limits {
    /// 64 MiB and 67,108,864 pixels, which holds the photographs of cameras of 64 megapixels.
    fn default() -> Self {
        Self { max_bytes: 64 << 20, max_pixels: 1 << 26 }
    }
}
