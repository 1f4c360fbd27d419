//! llama.cpp's own interface: completions, infilling, tokens and what the server is like, as `llama-server` has them.

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

/// The paths whose errors have llama.cpp's form, with those below them.
pub const PATHS: [&str; 8] =
    ["/completion", "/completions", "/infill", "/tokenize", "/detokenize", "/apply-template", "/props", "/slots"];
