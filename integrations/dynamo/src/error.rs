//! Errors as Dynamo sorts them: the frontend moves a request on where its worker, and not the request, is at fault.

use dynamo_backend_common::{BackendError, DynamoError, ErrorType};
use metal_attention::scheduler::{RequestError, SubmitError};

/// The request is wrong, or asks for what this worker cannot do. Its sender is told why.
pub fn invalid(why: impl Into<String>) -> DynamoError {
    let why = why.into();
    let invalid = ErrorType::Backend(BackendError::InvalidArgument);
    DynamoError::builder().error_type(invalid).message(why.clone()).public_message(why).build()
}

/// This worker is gone, or going: another one can take the request.
pub fn shut_down(why: impl Into<String>) -> DynamoError {
    of(ErrorType::Backend(BackendError::EngineShutdown), why)
}

/// Any other error of this worker.
pub fn unknown(why: impl Into<String>) -> DynamoError {
    of(ErrorType::Backend(BackendError::Unknown), why)
}

fn of(error_type: ErrorType, why: impl Into<String>) -> DynamoError {
    DynamoError::builder().error_type(error_type).message(why).build()
}

/// Why a request was refused.
pub fn refused(why: &SubmitError) -> DynamoError {
    match why {
        // Another worker may have room.
        SubmitError::QueueFull { .. } => of(ErrorType::WorkerOverloaded, why.to_string()),
        SubmitError::ShuttingDown | SubmitError::EngineFailed => shut_down(why.to_string()),
        SubmitError::NoText
        | SubmitError::NoLogits
        | SubmitError::TooManySequences { .. }
        | SubmitError::EmptyPrompt
        | SubmitError::PromptTooLong { .. }
        | SubmitError::TokenOutOfRange { .. }
        | SubmitError::Sampling(_) => invalid(why.to_string()),
    }
}

/// Why a request could not be finished.
pub fn failed(why: &RequestError) -> DynamoError {
    match why {
        RequestError::EngineFailed | RequestError::ShutDown | RequestError::Forward(_) => shut_down(why.to_string()),
        RequestError::Constraint(_)
        | RequestError::LogitsProcessor(_)
        | RequestError::NoNumbers
        | RequestError::Panicked(_) => unknown(why.to_string()),
    }
}
