//! Tests of the scheduler: requests of several clients that run at the same time.

mod cache_events;
mod fairness;
mod hybrid;
mod logits;
mod predictions;
mod prefix_store;
mod prompt_logprobs;
mod reference;
mod requests;
mod slot_commands;
mod spans;
pub mod support;
mod wake;
