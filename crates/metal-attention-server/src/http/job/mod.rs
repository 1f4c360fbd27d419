//! Jobs: requests in a form that no HTTP interface determines.
//!
//! Each interface reads its objects into a [`ChatJob`](chat::ChatJob), or into a prompt and
//! [`GenerationSettings`](generation::GenerationSettings). It submits the job to the scheduler and makes its own
//! objects of the events ([`ChatEvent`](choice_parser::ChatEvent), or the scheduler's own).
//!
//! A job has one or several choices (OpenAI's `n`): each is one sequence of the scheduler.

pub mod answer;
pub mod chat;
pub mod choice_parser;
pub mod fill_in;
pub mod generation;
pub mod logit_bias;
pub mod prompt;
pub mod reasoning;
pub mod response_format;
pub mod sampling;
pub mod stop;
pub mod tool_choice;
