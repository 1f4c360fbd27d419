//! Logits processors written in Python.

use std::sync::{Arc, Mutex, PoisonError};

use metal_attention::LogitsProcessor;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

/// The exception that a processor raised.
#[derive(Debug, Clone, Default)]
pub struct RaisedException(Arc<Mutex<Option<PyErr>>>);

impl RaisedException {
    /// Takes it out, where there is one.
    pub fn take(&self) -> Option<PyErr> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn set(&self, error: PyErr) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }
}

/// A Python function of the text's token ids and of the logits' bytes, which it changes.
pub struct PythonProcessor {
    pub function: Py<PyAny>,
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
