//! A worker of NVIDIA Dynamo over metal-attention's scheduler: token ids in, token ids out.
//!
//! Dynamo's frontend turns a request into token ids and chooses a worker; the worker streams token ids back. Where it dies
//! the frontend sends the prompt and the tokens so far to another one, which goes on as the first would have.

mod answer;
mod cache;
pub mod card;
mod engine;
mod error;
mod load;
mod request;

pub use engine::{WorkerEngine, WorkerSetup};
