//! Converts the library's errors to Python exceptions with the same message.

use metal_attention::scheduler::{RequestError, StartError, SubmitError};
use metal_attention::{CpuError, Error};
use metal_attention_chat::TemplateError as LibraryTemplateError;
use metal_attention_hub::HubError as LibraryHubError;
use pyo3::{PyErr, import_exception};

import_exception!(metal_attention.errors, DeviceError);
import_exception!(metal_attention.errors, EngineError);
import_exception!(metal_attention.errors, HubError);
import_exception!(metal_attention.errors, ModelError);
import_exception!(metal_attention.errors, OptionError);
import_exception!(metal_attention.errors, PromptError);
import_exception!(metal_attention.errors, TemplateError);

/// An error of opening or loading a model.
pub fn of_model(error: &Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Gguf(_) | Error::Model(_) | Error::OtherPictureWidth { .. } | Error::Tokenizer(_) | Error::Rerank(_) => {
            ModelError::new_err(message)
        }
        // Of a picture, only the limits in tokens come here.
        Error::Sampling(_) | Error::Picture(_) | Error::Cpu(CpuError::Option { .. }) | Error::DraftFile(_) => {
            OptionError::new_err(message)
        }
        Error::Cpu(_) | Error::Gpu(_) | Error::DeviceUnavailable { .. } | Error::UnknownDevice { .. } => {
            DeviceError::new_err(message)
        }
        Error::EmptyPrompt | Error::PicturePlaces { .. } | Error::PromptTooLong { .. } => PromptError::new_err(message),
        // The library may add errors later.
        _ => EngineError::new_err(message),
    }
}

/// An error of starting the scheduler.
pub fn of_start(error: &StartError) -> PyErr {
    match error {
        StartError::Option { .. } => OptionError::new_err(error.to_string()),
        StartError::Model(error) => of_model(error),
        StartError::CacheDisk { .. } | StartError::Thread(_) => EngineError::new_err(error.to_string()),
    }
}

/// An error of submitting a request.
pub fn of_submit(error: &SubmitError) -> PyErr {
    let message = error.to_string();
    match error {
        SubmitError::QueueFull { .. } | SubmitError::ShuttingDown | SubmitError::EngineFailed => {
            EngineError::new_err(message)
        }
        SubmitError::NoText | SubmitError::NoLogits => ModelError::new_err(message),
        SubmitError::TooManySequences { .. }
        | SubmitError::EmptyPrompt
        | SubmitError::PromptTooLong { .. }
        | SubmitError::TokenOutOfRange { .. }
        | SubmitError::Span(_) => PromptError::new_err(message),
        SubmitError::Sampling(_) => OptionError::new_err(message),
    }
}

/// An error of a request that runs.
pub fn of_request(error: &RequestError) -> PyErr {
    EngineError::new_err(error.to_string())
}

/// An error of getting a model from the hub.
pub fn of_hub(error: &LibraryHubError) -> PyErr {
    HubError::new_err(error.to_string())
}

/// An error of rendering a conversation.
pub fn of_template(error: &LibraryTemplateError) -> PyErr {
    TemplateError::new_err(error.to_string())
}
