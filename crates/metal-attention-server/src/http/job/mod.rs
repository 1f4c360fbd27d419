//! Requests without a dialect.
//!
//! A dialect reads its objects into a [`ChatJob`](chat::ChatJob), or into a prompt and a
//! [`Generation`](generation::Generation), and makes its objects of the events that come back
//! ([`ChatEvent`](reply::ChatEvent), or the scheduler's own). Nothing in here knows how a request was written.

pub mod answer;
pub mod chat;
pub mod fill_in;
pub mod form;
pub mod generation;
pub mod logit_bias;
pub mod prompt;
pub mod reply;
pub mod sampling;
pub mod stop;
pub mod thinking;
pub mod tool_choice;
