//! The OpenAPI schemas of messages. They only describe: `content.rs` reads messages.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// A message of a conversation.
#[derive(Serialize, Deserialize, ToSchema)]
pub struct MessageParam {
    /// Its author.
    role: MessageRole,
    /// Its content.
    content: Option<Content>,
}

/// The author of a message.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum MessageRole {
    User,
    Assistant,
    System,
}

/// The content of a message.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
#[schema(as = MessageContent)]
pub enum Content {
    /// A text.
    Text(String),
    /// A list of blocks.
    Blocks(Vec<Block>),
    /// One block.
    Block(BTreeMap<String, Value>),
}

/// A block of a message.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
#[schema(as = MessageBlock)]
pub(super) enum Block {
    /// A text.
    Text(String),
    /// An object with a `type`, such as `{"type": "text", "text": ...}`, `image`, `tool_use`, `tool_result` and `thinking`.
    Typed(BTreeMap<String, Value>),
}

/// An event of a streamed message.
#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = MessageStreamEvent)]
pub struct StreamEvent {
    /// The kind: `message_start`, `content_block_start`, `content_block_delta`, `content_block_stop`, `message_delta`,
    /// `message_stop`, `ping` or `error`.
    event: String,
    /// JSON, whose `type` is the event's name.
    data: String,
}

/// The effort of reasoning.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum EffortName {
    None,
    Minimal,
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}
