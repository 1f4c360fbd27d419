//! Logits processors that are written in Python.

use std::sync::{Arc, Mutex, PoisonError};

use metal_attention::LogitsProcessor;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

/// The exception that a processor raised, shared between the engine's thread and the caller's.
#[derive(Debug, Clone, Default)]
pub struct RaisedException(Arc<Mutex<Option<PyErr>>>);

impl RaisedException {
    /// Takes the exception out. `None`: none was raised.
    pub fn take(&self) -> Option<PyErr> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Stores an exception.
    fn set(&self, error: PyErr) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }
}

/// A Python function that is called with the token ids of the sequence and the bytes of the logits, which it changes.
pub struct PythonProcessor {
    /// The function.
    pub function: Py<PyAny>,
    /// The exception that it raised.
    pub raised: RaisedException,
}

impl LogitsProcessor for PythonProcessor {
    fn process(&mut self, ids: &[u32], logits: &mut [f32]) -> Result<(), String> {
        let outcome: Option<PyResult<Vec<u8>>> = Python::try_attach(|py| {
            let bytes = PyByteArray::new(py, bytemuck::cast_slice(logits));
            self.function.call1(py, (ids, &bytes))?;
            Ok(bytes.to_vec())
        });
        match outcome {
            Some(Ok(bytes)) if bytes.len() == size_of_val(logits) => {
                bytemuck::cast_slice_mut(logits).copy_from_slice(&bytes);
                Ok(())
            }
            Some(Ok(_)) => Err("it changed the number of logits".into()),
            Some(Err(error)) => {
                let why = error.to_string();
                self.raised.set(error);
                Err(why)
            }
            None => Err("Python is shutting down".into()),
        }
    }
}
