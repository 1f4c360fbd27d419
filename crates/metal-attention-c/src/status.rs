//! How a call ended, and why.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use metal_attention::gguf::GgufError;
use metal_attention::sampling::SamplingError;
use metal_attention::scheduler::{RequestError, StartError, SubmitError};
use metal_attention::{CpuError, Error, ForwardError};

/// The version of this interface. It grows with each change after which programs have to be compiled again.
pub const MA_ABI_VERSION: u32 = 2;

/// The version of the interface that the library has; MA_ABI_VERSION is the one that a program was compiled with.
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

/// How a call ended. After all but OK ma_last_error says why.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// It did what it should.
    Ok = 0,
    /// An argument cannot be: a null pointer, a text that is no UTF-8, a number outside its range, the wrong size of a
    /// struct.
    InvalidArgument = 1,
    /// A buffer is too small. How much there is was written to where the length goes.
    BufferTooSmall = 2,
    /// The context has no room for the prompt.
    ContextFull = 3,
    /// The context, or the batch, is in use by another call.
    Busy = 4,
    /// The call was ended by ma_context_cancel.
    Cancelled = 5,
    /// The file is missing or damaged, or no model that is supported.
    Model = 6,
    /// The device is not available, or failed.
    Device = 7,
    /// There is no memory left.
    OutOfMemory = 8,
    /// The model cannot do it: it writes no text, or makes no embeddings.
    Unsupported = 9,
    /// Anything else.
    Failed = 10,
    /// A defect of this library. What the call worked on should be freed.
    Defect = 11,
}

/// Why a call failed.
#[derive(Debug)]
pub struct Failure {
    /// What it returns.
    pub status: Status,
    /// What `ma_last_error` says.
    pub message: String,
}

impl Failure {
    pub fn new(status: Status, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

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
            SubmitError::EmptyPrompt | SubmitError::TokenOutOfRange { .. } | SubmitError::Sampling(_) => {
                Status::InvalidArgument
            }
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

fn status_of(error: &Error) -> Status {
    match error {
        error if error.is_cancelled() => Status::Cancelled,
        Error::PromptTooLong { .. } | Error::Forward(ForwardError::ContextFull { .. }) => Status::ContextFull,
        Error::Sampling(_)
        | Error::UnknownDevice { .. }
        | Error::EmptyPrompt
        | Error::Cpu(CpuError::Option { .. })
        | Error::Forward(ForwardError::TokenOutOfRange { .. }) => Status::InvalidArgument,
        Error::Gguf(GgufError::OutOfMemory { .. })
        | Error::Cpu(CpuError::OutOfMemory { .. })
        | Error::Forward(ForwardError::OutOfMemory { .. }) => Status::OutOfMemory,
        Error::Gguf(_) | Error::Model(_) | Error::Tokenizer(_) | Error::Cpu(CpuError::Model(_)) => Status::Model,
        Error::Rerank(_) => Status::Unsupported,
        #[cfg(feature = "wgpu")]
        Error::Wgpu(_) => Status::Device,
        Error::DeviceUnavailable { .. } | Error::Forward(ForwardError::Device { .. }) => Status::Device,
        _ => Status::Failed,
    }
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Why the last call of this thread that failed did so: one line of UTF-8, empty where none failed yet. It stays as it is
/// until another call of this thread fails.
#[unsafe(no_mangle)]
pub extern "C" fn ma_last_error() -> *const c_char {
    // A thread that ends has no error any more.
    LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Runs what a call does. No panic leaves it.
pub fn call(work: impl FnOnce() -> Result<(), Failure>) -> Status {
    // What a panic leaves half done is behind a lock, which refuses to be used again.
    let failure = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => return Status::Ok,
        Ok(Err(failure)) => failure,
        Err(panic) => {
            let message = format!("a defect of the library: {}", panic_message(&*panic));
            // Whatever the panic holds is not to panic again on its way out.
            std::mem::forget(panic);
            Failure::new(Status::Defect, message)
        }
    };
    let message = c_string(&failure.message);
    let _ = LAST_ERROR.try_with(|last| *last.borrow_mut() = message);
    failure.status
}

/// A message as C has it; a NUL in it is replaced.
pub fn c_string(message: &str) -> CString {
    CString::new(message.replace('\0', "\u{fffd}")).unwrap_or_default()
}

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
