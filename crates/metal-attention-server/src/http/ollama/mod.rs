//! ollama's interface: `/api/...`.

pub mod chat;
pub mod embed;
mod error;
mod fields;
pub mod generate;
pub mod manage;
pub mod models;
mod options;
mod stream;
pub mod version;

pub use error::ErrorBody;
pub use version::RUNNING;
