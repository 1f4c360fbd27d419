//! A worker of NVIDIA Dynamo, with metal-attention's scheduler: token ids in, token ids out.
//!
//! Dynamo's frontend turns a request into token ids and chooses a worker, which streams token ids back. If the worker dies, the
//! frontend migrates the request: it sends the prompt with the tokens so far to another worker, which continues the same text.

mod answer;
mod cache;
pub mod card;
mod engine;
mod error;
mod load;
mod request;

pub use engine::{WorkerEngine, WorkerSetup};
