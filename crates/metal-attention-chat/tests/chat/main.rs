//! Tests of the chat crate: rendering conversations to prompts with chat templates, parsing answers into reasoning, text and
//! tool calls, and grammars that force calls.

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
