//! The HTTP server of metal-attention.
//!
//! [`http`] serves the interfaces of OpenAI, Anthropic, ollama and llama.cpp. The
//! [`scheduler`](metal_attention::scheduler) batches all requests into one forward pass.

pub mod http;
