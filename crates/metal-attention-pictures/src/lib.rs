#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

#[cfg(feature = "decode")]
mod decode;
mod error;
mod limits;
mod picture;
mod plan;
mod preprocessing;
mod resize;
mod tiling;

pub use error::{ErrorKind, PictureError, Result};
pub use limits::Limits;
pub use picture::Picture;
pub use preprocessing::{Division, Entry, Layout, PixelRange, Place, Preprocessing};
pub use resize::{Filter, MAX_SIDE, MAX_TARGET_PIXELS};
pub use tiling::{Candidates, LFM2_TILE};
