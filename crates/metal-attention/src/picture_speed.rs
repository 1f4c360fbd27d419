//! [`PictureEncoderBench`]: how fast a device encodes a picture, and how fast it computes the matrix products of that alone.

use std::time::{Duration, Instant};

use metal_attention_gguf::GgufFile;
use metal_attention_model::DeviceInfo;
use metal_attention_model::vision::{EncoderWork, VisionModel};
use metal_attention_pictures::{Picture, Preprocessing};

use crate::pictures::{PictureEncoderPass, pixels_of};
use crate::{EngineOptions, Error};

/// The picture encoder of an `mmproj` file on a device, without a text model.
pub struct PictureEncoderBench {
    preprocessing: Preprocessing,
    pass: Box<dyn PictureEncoderPass>,
}

/// A picture as an encoder reads it: the whole, or its tiles.
pub struct PreparedPicture {
    parts: Vec<Picture>,
}

impl PreparedPicture {
    /// The sizes of the parts, `[width, height]` in pixels.
    pub fn sizes(&self) -> Vec<[usize; 2]> {
        self.parts.iter().map(|part| [part.width(), part.height()]).collect()
    }
}

impl PictureEncoderBench {
    /// Sets up the encoder on the device of `options`.
    ///
    /// # Errors
    ///
    /// The file has no encoder of a known family; memory or threads that the system refuses; a cancelled watch.
    pub fn new(file: &GgufFile, options: &EngineOptions) -> Result<Self, Error> {
        let VisionModel { preprocessing, .. } = VisionModel::from_gguf(file)?;
        Ok(Self { preprocessing, pass: options.open_encoder(file)? })
    }

    /// The device.
    pub fn device(&self) -> DeviceInfo {
        self.pass.device()
    }

    /// Resizes and divides a picture.
    ///
    /// # Errors
    ///
    /// The sides of the picture have too extreme a ratio.
    pub fn prepare(&self, picture: &Picture) -> Result<PreparedPicture, Error> {
        let division = self.preprocessing.apply(picture)?;
        Ok(PreparedPicture { parts: division.entries.into_iter().map(|entry| entry.picture).collect() })
    }

    /// The operations of encoding a picture.
    pub fn work(&self, picture: &PreparedPicture) -> EncoderWork {
        self.pass.work(&picture.sizes())
    }

    /// The time in which a picture is encoded.
    ///
    /// # Errors
    ///
    /// Those of the device, and a cancelled watch.
    pub fn time(&mut self, picture: &PreparedPicture) -> Result<Duration, Error> {
        let pixels: Vec<_> = picture.parts.iter().map(pixels_of).collect();
        let start = Instant::now();
        self.pass.encode(&pixels)?;
        Ok(start.elapsed())
    }

    /// The time of the matrix products of encoding a picture, alone.
    ///
    /// # Errors
    ///
    /// Those of the device, and a cancelled watch.
    pub fn time_products(&mut self, picture: &PreparedPicture) -> Result<Duration, Error> {
        self.pass.time_products(&picture.sizes())
    }
}
