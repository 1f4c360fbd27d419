//! The errors of decoding and preprocessing pictures, whose messages name the problem and a remedy.

use crate::{MAX_SIDE, MAX_TARGET_PIXELS};

/// Shorthand for results of this crate.
pub type Result<T, E = PictureError> = std::result::Result<T, E>;

/// The class of a [`PictureError`], for exit codes and HTTP statuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The picture is damaged, too large or of another format.
    Picture,
    /// The settings of the preprocessing are invalid: the model's file is damaged, or the caller's limits contradict.
    Settings,
}

/// An error of decoding or preprocessing a picture. Sizes are width x height in pixels.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PictureError {
    // ---- the file ------------------------------------------------------------------------
    /// The file has no bytes.
    #[error("the picture file is empty: send the file's bytes")]
    Empty,
    /// The file has more bytes than the limit.
    #[error("the picture file has {bytes} bytes, at most {limit} are read: save it smaller or as JPEG")]
    TooManyBytes {
        /// Bytes of the file.
        bytes: usize,
        /// [`Limits::max_bytes`](crate::Limits::max_bytes).
        limit: usize,
    },
    /// The first bytes are those of no picture format.
    #[error(
        "not a picture: the file starts with \"{}\"; JPEG, PNG, WebP, BMP and GIF files are read",
        found.escape_ascii()
    )]
    UnknownFormat {
        /// Up to the first eight bytes.
        found: Vec<u8>,
    },
    /// A picture format, or a variant of one, that is not decoded.
    #[error("{format} files are not read: save the picture as JPEG or PNG")]
    UnsupportedFormat {
        /// The name of the format.
        format: &'static str,
    },
    /// Width or height is zero.
    #[error("the {format} file states {width} x {height} pixels: the file is damaged; save the picture again")]
    NoPixels {
        /// The name of the format.
        format: &'static str,
        /// The width that the header states.
        width: usize,
        /// The height that the header states.
        height: usize,
    },
    /// The header states more pixels than the limit.
    #[error("the {format} file has {width} x {height} pixels, at most {limit} in all are read: shrink the picture")]
    TooManyPixels {
        /// The name of the format.
        format: &'static str,
        /// The width that the header states.
        width: usize,
        /// The height that the header states.
        height: usize,
        /// [`Limits::max_pixels`](crate::Limits::max_pixels).
        limit: usize,
    },
    /// The file ends before the picture does.
    #[error("the {format} file is truncated after {bytes} bytes: the transfer was probably interrupted; send it again")]
    Truncated {
        /// The name of the format.
        format: &'static str,
        /// Bytes of the file.
        bytes: usize,
    },
    /// The decoder found an error.
    #[error("cannot decode the {format} file: {reason}; the file is damaged, save the picture again")]
    Damaged {
        /// The name of the format.
        format: &'static str,
        /// The decoder's reason.
        reason: String,
    },

    // ---- pixels --------------------------------------------------------------------------
    /// The number of bytes is not that of the size, or the size is zero.
    #[error("{width} x {height} RGB pixels need 3 bytes each, and at least one pixel; {bytes} bytes were given")]
    WrongLength {
        /// The width.
        width: usize,
        /// The height.
        height: usize,
        /// The bytes that were given.
        bytes: usize,
    },
    /// A picture would have to be resized beyond [`MAX_SIDE`] or [`MAX_TARGET_PIXELS`], or to a side of zero.
    #[error(
        "a picture of {from_width} x {from_height} pixels would become {width} x {height}; sides of 1 to {MAX_SIDE} and {MAX_TARGET_PIXELS} pixels in all are possible: crop the picture to a less extreme ratio"
    )]
    TargetSize {
        /// The width of the picture.
        from_width: usize,
        /// The height of the picture.
        from_height: usize,
        /// The target width.
        width: usize,
        /// The target height.
        height: usize,
    },
    /// A picture so long that the model's limit of pixels cannot be kept with one row of patches.
    #[error(
        "a picture of {width} x {height} pixels is too long for the model, which reads {max_pixels} pixels: crop it to a less extreme ratio"
    )]
    TooLong {
        /// The width of the picture.
        width: usize,
        /// The height of the picture.
        height: usize,
        /// The most pixels after resizing.
        max_pixels: usize,
    },

    // ---- settings ------------------------------------------------------------------------
    /// A setting that must be positive is zero.
    #[error("the {setting} of the picture preprocessing is 0: the model file is damaged; download it again")]
    ZeroSetting {
        /// The setting.
        setting: &'static str,
    },
    /// The least number of pixels exceeds the most.
    #[error("a picture needs at least {min} pixels and may have at most {max}: raise the maximum or lower the minimum")]
    EmptyRange {
        /// The least pixels.
        min: usize,
        /// The most pixels.
        max: usize,
    },
}

impl PictureError {
    /// The class of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::ZeroSetting { .. } | Self::EmptyRange { .. } => ErrorKind::Settings,
            Self::Empty
            | Self::TooManyBytes { .. }
            | Self::UnknownFormat { .. }
            | Self::UnsupportedFormat { .. }
            | Self::NoPixels { .. }
            | Self::TooManyPixels { .. }
            | Self::Truncated { .. }
            | Self::Damaged { .. }
            | Self::WrongLength { .. }
            | Self::TargetSize { .. }
            | Self::TooLong { .. } => ErrorKind::Picture,
        }
    }
}
