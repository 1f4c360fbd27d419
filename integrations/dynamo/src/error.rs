//! Converts errors to Dynamo's types. The type decides whether the frontend migrates a request: it does if the worker is at fault.

use dynamo_backend_common::{BackendError, DynamoError, ErrorType};
use metal_attention::scheduler::{RequestError, SubmitError};

/// An error of the request, which is wrong or not supported. Its sender gets the message.
pub fn invalid(why: impl Into<String>) -> DynamoError {
    let why = why.into();
    let invalid = ErrorType::Backend(BackendError::InvalidArgument);
    DynamoError::builder().error_type(invalid).message(why.clone()).public_message(why).build()
}

/// This worker is shutting down or has failed: another one can take the request.
pub fn shut_down(why: impl Into<String>) -> DynamoError {
    of(ErrorType::Backend(BackendError::EngineShutdown), why)
}

/// Any other error of this worker.
pub fn unknown(why: impl Into<String>) -> DynamoError {
    of(ErrorType::Backend(BackendError::Unknown), why)
}

/// An error of this type.
fn of(error_type: ErrorType, why: impl Into<String>) -> DynamoError {
    DynamoError::builder().error_type(error_type).message(why).build()
}

/// The error of a request that was not accepted.
pub fn refused(why: &SubmitError) -> DynamoError {
    match why {
        // Another worker may have free slots.
        SubmitError::QueueFull { .. } => of(ErrorType::WorkerOverloaded, why.to_string()),
        SubmitError::ShuttingDown | SubmitError::EngineFailed => shut_down(why.to_string()),
        SubmitError::NoText
        | SubmitError::NoLogits
        | SubmitError::TooManySequences { .. }
        | SubmitError::EmptyPrompt
        | SubmitError::PromptTooLong { .. }
        | SubmitError::TokenOutOfRange { .. }
        | SubmitError::Span(_)
        | SubmitError::Sampling(_) => invalid(why.to_string()),
    }
}

/// The error of a request that failed.
pub fn failed(why: &RequestError) -> DynamoError {
    match why {
        RequestError::EngineFailed | RequestError::ShutDown | RequestError::Forward(_) => shut_down(why.to_string()),
        RequestError::Constraint(_)
        | RequestError::LogitsProcessor(_)
        | RequestError::NoNumbers
        | RequestError::Panicked(_) => unknown(why.to_string()),
    }
}
