//! The error of a GPU's backend, the same for all backends that a build has.

use std::error::Error as StdError;
use std::fmt;

/// Why a GPU's backend could not set up or run a model.
#[derive(Debug)]
pub struct GpuError {
    kind: GpuErrorKind,
    error: Box<dyn StdError + Send + Sync>,
}

/// The kind of a [`GpuError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuErrorKind {
    /// The caller cancelled the work.
    Cancelled,
    /// An option is out of range.
    Option,
    /// The model needs more memory than there is.
    OutOfMemory,
    /// The GPU, its driver, or a part of the model without kernels.
    Device,
}

impl GpuError {
    /// Wraps the error of a backend.
    pub fn new(kind: GpuErrorKind, error: impl StdError + Send + Sync + 'static) -> Self {
        Self { kind, error: Box::new(error) }
    }

    /// Its kind.
    pub fn kind(&self) -> GpuErrorKind {
        self.kind
    }

    /// The backend's own error, if that is an `E`: `CudaError` or `WgpuError`.
    pub fn downcast_ref<E: StdError + 'static>(&self) -> Option<&E> {
        self.error.downcast_ref()
    }
}

impl fmt::Display for GpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl StdError for GpuError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.error.source()
    }
}
