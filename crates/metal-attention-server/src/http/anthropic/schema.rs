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
    /// Blocks: objects with a `type`, such as `{"type": "text", "text": ...}`, `tool_use`, `tool_result` and `thinking`.
    Blocks(Vec<BTreeMap<String, Value>>),
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
