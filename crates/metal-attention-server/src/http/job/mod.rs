//! Requests without a dialect.
//!
//! A dialect reads its objects into a [`ChatJob`](chat::ChatJob), or into a prompt and a
//! [`GenerationSettings`](generation::Generation), and makes its objects of the events that come back
//! ([`ChatEvent`](choice_parser::ChatEvent), or the scheduler's own). Nothing in here knows how a request was written.

pub mod answer;
pub mod chat;
pub mod choice_parser;
pub mod fill_in;
pub mod form;
pub mod generation;
pub mod logit_bias;
pub mod prompt;
pub mod sampling;
pub mod stop;
pub mod thinking;
pub mod tool_choice;
