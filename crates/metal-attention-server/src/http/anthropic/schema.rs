//! Messages as the OpenAPI description has them; `content.rs` reads them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// A message of a conversation.
#[derive(Serialize, Deserialize, ToSchema)]
pub struct MessageParam {
    /// Who says it.
    role: MessageRole,
    /// What it consists of.
    content: Option<Content>,
}

/// Who says a message.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum MessageRole {
    User,
    Assistant,
    System,
}

/// What a message consists of.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
#[schema(as = MessageContent)]
pub enum Content {
    /// A text.
    Text(String),
    /// In blocks.
    Blocks(Vec<Block>),
    /// In one block.
    Block(BTreeMap<String, Value>),
}

/// A part of a message.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
#[schema(as = MessageBlock)]
pub(super) enum Block {
    /// A text.
    Text(String),
    /// An object with a `type`, such as `{"type": "text", "text": ...}`, `tool_use`, `tool_result` and `thinking`.
    Typed(BTreeMap<String, Value>),
}

/// An event of a streamed message.
#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = MessageStreamEvent)]
pub struct StreamEvent {
    /// What it is: `message_start`, `content_block_start`, `content_block_delta`, `content_block_stop`, `message_delta`,
    /// `message_stop`, `ping` or `error`.
    event: String,
    /// JSON with the same name as its `type`.
    data: String,
}

/// How hard a model thinks.
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
