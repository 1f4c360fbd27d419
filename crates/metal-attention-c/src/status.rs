//! The status of a call, and the message of an error.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use metal_attention::gguf::GgufError;
use metal_attention::sampling::SamplingError;
use metal_attention::scheduler::{RequestError, StartError, SubmitError};
use metal_attention::{CpuError, Error, ForwardError};

/// The version of this interface. It is raised by each change after which programs have to be compiled again.
pub const MA_ABI_VERSION: u32 = 4;

/// The version of the interface that the library was built with; MA_ABI_VERSION is that of the program's header.
#[unsafe(no_mangle)]
pub extern "C" fn ma_abi_version() -> u32 {
    MA_ABI_VERSION
}

/// The library's version, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn ma_version() -> *const c_char {
    const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(version) => version,
        Err(_) => c"",
    };
    VERSION.as_ptr()
}

/// The result of a call. After all but OK, ma_last_error has a message.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The call succeeded.
    Ok = 0,
    /// An argument is invalid: a null pointer, a string that is no UTF-8, a number outside its range, the wrong size of a
    /// struct.
    InvalidArgument = 1,
    /// A buffer is too small. The needed size was written to the argument for the length.
    BufferTooSmall = 2,
    /// The prompt does not fit into the context.
    ContextFull = 3,
    /// The context, or the batch, is in use by another call.
    Busy = 4,
    /// The call was cancelled: by ma_context_cancel or ma_batch_cancel.
    Cancelled = 5,
    /// The file is missing or damaged, or the model is not supported.
    Model = 6,
    /// The device is not available, or failed.
    Device = 7,
    /// There is not enough memory.
    OutOfMemory = 8,
    /// The model cannot do it: it generates no text, or makes no embeddings.
    Unsupported = 9,
    /// Anything else.
    Failed = 10,
    /// A bug of this library. The objects of the call should be freed.
    Defect = 11,
}

/// The error of a call.
#[derive(Debug)]
pub struct Failure {
    /// The status that the call returns.
    pub status: Status,
    /// The message of `ma_last_error`.
    pub message: String,
}

impl Failure {
    /// An error with a status and a message.
    pub fn new(status: Status, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    /// An error of an argument.
    pub fn argument(message: impl Into<String>) -> Self {
        Self::new(Status::InvalidArgument, message)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(status_of(&error), error.to_string())
    }
}

impl From<SamplingError> for Failure {
    fn from(error: SamplingError) -> Self {
        Error::from(error).into()
    }
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        match error {
            StartError::Model(error) => error.into(),
            error @ StartError::Option { .. } => Self::argument(error.to_string()),
            error @ (StartError::CacheDisk { .. } | StartError::Thread(_)) => {
                Self::new(Status::Failed, error.to_string())
            }
        }
    }
}

impl From<SubmitError> for Failure {
    fn from(error: SubmitError) -> Self {
        let status = match &error {
            SubmitError::QueueFull { .. } | SubmitError::TooManySequences { .. } => Status::Busy,
            SubmitError::ShuttingDown => Status::Cancelled,
            SubmitError::EngineFailed => Status::Defect,
            SubmitError::NoText | SubmitError::NoLogits => Status::Unsupported,
            SubmitError::PromptTooLong { .. } => Status::ContextFull,
            SubmitError::EmptyPrompt
            | SubmitError::TokenOutOfRange { .. }
            | SubmitError::Span(_)
            | SubmitError::Sampling(_) => Status::InvalidArgument,
        };
        Self::new(status, error.to_string())
    }
}

impl From<RequestError> for Failure {
    fn from(error: RequestError) -> Self {
        match error {
            RequestError::Forward(error) => Error::from(error).into(),
            error @ (RequestError::Constraint(_) | RequestError::LogitsProcessor(_) | RequestError::NoNumbers) => {
                Self::new(Status::Failed, error.to_string())
            }
            error @ (RequestError::Panicked(_) | RequestError::EngineFailed) => {
                Self::new(Status::Defect, error.to_string())
            }
            error @ RequestError::ShutDown => Self::new(Status::Cancelled, error.to_string()),
        }
    }
}

/// The status of an error of the library.
fn status_of(error: &Error) -> Status {
    match error {
        error if error.is_cancelled() => Status::Cancelled,
        Error::PromptTooLong { .. } | Error::Forward(ForwardError::ContextFull { .. }) => Status::ContextFull,
        Error::Sampling(_)
        | Error::UnknownDevice { .. }
        | Error::EmptyPrompt
        | Error::Picture(_)
        | Error::PicturePlaces { .. }
        | Error::Cpu(CpuError::Option { .. })
        | Error::Forward(ForwardError::TokenOutOfRange { .. }) => Status::InvalidArgument,
        Error::Gguf(GgufError::OutOfMemory { .. })
        | Error::Cpu(CpuError::OutOfMemory { .. })
        | Error::Forward(ForwardError::OutOfMemory { .. }) => Status::OutOfMemory,
        Error::Gguf(_)
        | Error::Model(_)
        | Error::OtherPictureWidth { .. }
        | Error::Tokenizer(_)
        | Error::Cpu(CpuError::Model(_)) => Status::Model,
        Error::Rerank(_) => Status::Unsupported,
        Error::Gpu(_) | Error::DeviceUnavailable { .. } | Error::Forward(ForwardError::Device { .. }) => Status::Device,
        _ => Status::Failed,
    }
}

thread_local! {
    /// The message of the last error in this thread.
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// The message of the last call of this thread that failed: one line of UTF-8, empty if none has failed. It is valid until
/// another call of this thread fails.
#[unsafe(no_mangle)]
pub extern "C" fn ma_last_error() -> *const c_char {
    // The variable is gone while a thread ends.
    LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Runs the body of a call. Converts errors and panics to a status and stores the message.
pub fn call(work: impl FnOnce() -> Result<(), Failure>) -> Status {
    // Objects that a panic leaves in a bad state are behind a lock, which is poisoned by the panic.
    let failure = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => return Status::Ok,
        Ok(Err(failure)) => failure,
        Err(panic) => {
            let message = format!("a defect of the library: {}", panic_message(&*panic));
            // The payload is leaked, because dropping it might panic again.
            std::mem::forget(panic);
            Failure::new(Status::Defect, message)
        }
    };
    let message = c_string(&failure.message);
    let _ = LAST_ERROR.try_with(|last| *last.borrow_mut() = message);
    failure.status
}

/// A message as a C string; NULs in it are replaced.
pub fn c_string(message: &str) -> CString {
    CString::new(message.replace('\0', "\u{fffd}")).unwrap_or_default()
}

/// The message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    message.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last_error() -> String {
        // SAFETY: the pointer leads to the text of this thread, which no call changes meanwhile.
        unsafe { CStr::from_ptr(ma_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_is_a_status() {
        assert_eq!(call(|| panic!("of {}", "glass")), Status::Defect);
        assert_eq!(last_error(), "a defect of the library: of glass");
        assert_eq!(call(|| Ok(())), Status::Ok);
        assert_eq!(last_error(), "a defect of the library: of glass", "what went well says nothing");
        assert_eq!(call(|| Err(Failure::argument("a\0b"))), Status::InvalidArgument);
        assert_eq!(last_error(), "a\u{fffd}b");
        std::thread::spawn(|| assert_eq!(last_error(), "")).join().unwrap();
    }
}
