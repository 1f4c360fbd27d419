//! OpenAI's Responses interface: `/v1/responses` and the paths below.
//!
//! Data flow of a request: `items.rs` reads the items of its input, `message_builder.rs` converts them to messages,
//! `tools.rs` converts its tools to functions, and `request.rs` makes a [`ChatJob`](super::job::chat::ChatJob) of
//! everything, after the items of the previous response, which `store.rs` has stored. `create.rs` submits the job;
//! `writer.rs` writes the response's items and the events of its stream.

pub mod create;
mod custom_input;
mod encoded_reasoning;
mod items;
mod message_builder;
mod request;
mod response;
mod schema;
mod store;
pub mod stored;
mod tools;
mod unsupported;
mod writer;

pub use store::{ResponseStore, StoreError, StoreLimits};
