//! ollama's interface: `/api/...`. A request names its model, with or without the tag `latest`; the model is loaded
//! when a request needs it.

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
