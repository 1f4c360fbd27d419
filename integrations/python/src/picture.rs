//! Encoded pictures, and the rows of those in a prompt.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use metal_attention::picture_files::{Limits, Picture};
use metal_attention::tokenizer::Tokenizer;
use metal_attention::{EngineOptions, Error, Model, PictureEncoder, PicturePrompt, PromptSpan, TokenLimits};
use pyo3::prelude::*;

use crate::errors::{self, PromptError};

/// An encoded picture.
#[pyclass(frozen, name = "Picture", module = "metal_attention._engine")]
pub struct PyPicture(pub Arc<PicturePrompt>);

#[pymethods]
impl PyPicture {
    /// The number of its rows, each of which takes the place of a token.
    #[getter]
    fn n_rows(&self) -> usize {
        self.0.n_rows()
    }

    /// The bytes that it takes in memory.
    #[getter]
    fn n_bytes(&self) -> usize {
        self.0.n_bytes()
    }
}

/// The rows of the pictures in a prompt.
#[pyclass(frozen, name = "Spans", module = "metal_attention._engine")]
pub struct PySpans(pub Arc<[PromptSpan]>);

/// The picture encoder of a model.
pub struct Encoder(Mutex<PictureEncoder>);

impl Encoder {
    /// Opens the `mmproj` file at `path`.
    pub fn open(path: &Path, model: &Model, engine: &EngineOptions, limits: TokenLimits) -> Result<Self, Error> {
        PictureEncoder::open(path, model.spec(), engine, limits).map(|encoder| Self(Mutex::new(encoder)))
    }

    /// Encodes the picture of a file. Takes time: call it with Python detached.
    pub fn encode(&self, file: &[u8], tokenizer: &Tokenizer) -> PyResult<PyPicture> {
        let wrong = |error: &dyn std::fmt::Display| PromptError::new_err(format!("a picture: {error}"));
        let pixels = Picture::decode(file, &Limits::default()).map_err(|error| wrong(&error))?;
        // The encoder has no state between pictures.
        let mut encoder = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let divided = encoder.divider().divide(&pixels).map_err(|error| wrong(&error))?;
        let mut pictures =
            encoder.encode(&[divided], tokenizer, |_, _| {}).map_err(|error| errors::of_model(&error))?;
        Ok(PyPicture(Arc::new(pictures.remove(0))))
    }
}
