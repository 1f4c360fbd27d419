//! Serves a language model to many clients at once.
//!
//! [`scheduler`] runs all requests through one forward pass, batched step by step. It knows tokens and text, but no
//! HTTP, no JSON and no chat. [`http`] is the interface to it: OpenAI's, over HTTP.

pub mod http;
pub mod scheduler;
