//! OpenAI's Responses interface: `/v1/responses` and what is below it.
//!
//! `items.rs` reads the items of a request, `conversation.rs` makes messages of them, `tools.rs` functions of the tools,
//! `request.rs` a [`ChatJob`](super::job::chat::ChatJob) of it all. `writer.rs` makes the response's items and the
//! streamed events of what is generated, and `store.rs` keeps responses.

pub mod create;
mod custom_input;
mod items;
mod message_builder;
mod request;
mod response;
mod schema;
mod store;
pub mod stored;
mod thoughts;
mod tools;
mod unsupported;
mod writer;

pub use store::{ResponseStore, StoreError, StoreLimits};
