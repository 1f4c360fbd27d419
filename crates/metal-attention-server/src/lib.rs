//! Serves a language model to many clients at once.
//!
//! [`http`] is OpenAI's interface, over HTTP, to the [`scheduler`](metal_attention::scheduler), which runs all requests
//! through one forward pass.

pub mod http;
