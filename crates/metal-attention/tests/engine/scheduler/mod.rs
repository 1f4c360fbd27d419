//! Texts of many clients side by side.

mod cache_events;
mod hybrid;
mod logits;
mod prefix_store;
mod prompt_logprobs;
mod requests;
mod slot_commands;
mod support;
mod texts;
mod turns;
mod waking;
