//! Items and tools as the OpenAPI description has them; `items.rs` and `tools.rs` read them. Items of other types than these
//! may be whatever they are.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// What a response answers.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
#[schema(as = Input)]
pub enum ResponseInput {
    /// A text of the user.
    Text(String),
    /// The conversation, or what is new of it.
    Items(Vec<InputItem>),
}

/// An item of a conversation: a message (`role`, `content`), `function_call` and `custom_tool_call` (`call_id`, `name`,
/// `arguments` or `input`), their outputs (`call_id`, `output`), `reasoning` (`content`, `encrypted_content`),
/// `item_reference` (`id`). Items of other types are passed over.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct InputItem {
    /// `message`, also where it is missing beside a role.
    #[serde(rename = "type")]
    kind: Option<String>,
    /// Who says a message: `user`, `assistant`, `system` or `developer`.
    role: Option<String>,
    /// Its text, or parts of it.
    content: Option<Value>,
    /// The item's name.
    id: Option<String>,
}

/// A tool: a function (`name`, `description`, `parameters`, `strict`), a custom tool (`name`, `description`, `format`), or a
/// namespace (`name`, `tools`) of both. Tools of other types are left out.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ToolObject {
    /// `function`, also where it is missing; `custom`, `namespace`.
    #[serde(rename = "type")]
    kind: Option<String>,
    /// Its name.
    name: Option<Value>,
}

/// Whether the model calls a tool, and which.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum ToolChoice {
    /// `none`, `auto` or `required`.
    Mode(String),
    /// This tool, or only these.
    Tool(ToolByName),
}

/// `{"type": "function", "name": ...}`, `{"type": "custom", "name": ...}`, or `{"type": "allowed_tools", "mode": ..., "tools":
/// [...]}`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ToolByName {
    /// `function`, `custom` or `allowed_tools`.
    #[serde(rename = "type")]
    kind: String,
    /// The tool's name.
    name: Option<String>,
}

/// What the text looks like.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TextOptions {
    /// Its form.
    format: Option<TextFormat>,
    /// How much is said; it has no effect.
    verbosity: Option<Value>,
}

/// The form of a text.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TextFormat {
    /// `text`, `json_object` or `json_schema`.
    #[serde(rename = "type")]
    kind: String,
    /// The JSON schema of `json_schema`.
    schema: Option<Value>,
    /// Whether objects hold what they name and nothing else where they do not say `additionalProperties`.
    strict: Option<bool>,
}
