//! Prompts, answers and tool calls of the templates of published models.

mod answers;
mod control_tokens;
mod derived_formats;
mod fit_context;
mod grammar;
mod histories;
mod jinja;
mod prompts;
mod published;
mod published_formats;
mod templates;
