//! Anthropic's interface: `/v1/messages`.

mod error;

pub use error::ErrorBody;
