//! llama.cpp's own interface, as `llama-server` has it: completions, infill, tokenisation, slots, and the server's
//! properties.
//!
//! `request.rs` reads and submits what `/completion` and `/infill` share; `response.rs` writes their responses.

pub mod completion;
mod error;
pub mod infill;
pub mod metrics;
mod prompt;
pub mod props;
mod request;
mod response;
mod settings;
pub mod slot_actions;
pub mod slots;
pub mod template;
pub mod tokens;
mod unsupported;

pub use error::ErrorBody;

/// The paths whose errors have llama.cpp's form, with the paths below them.
pub const PATHS: [&str; 8] =
    ["/completion", "/completions", "/infill", "/tokenize", "/detokenize", "/apply-template", "/props", "/slots"];
