//! ollama's interface: `/api/...`.

mod error;

pub use error::ErrorBody;
