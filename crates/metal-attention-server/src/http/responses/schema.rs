//! The OpenAPI schemas of items and tools. They only describe: `items.rs` and `tools.rs` read them. Items of other
//! types may have any contents.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// The input of a response.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
#[schema(as = Input)]
pub enum ResponseInput {
    /// A text of the user.
    Text(String),
    /// The conversation, or its new part.
    Items(Vec<InputItem>),
}

/// An item of a conversation: a message (`role`, `content`), `function_call` and `custom_tool_call` (`call_id`, `name`,
/// `arguments` or `input`), their outputs (`call_id`, `output`), `reasoning` (`content`, `encrypted_content`),
/// `item_reference` (`id`). Items of other types are ignored.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct InputItem {
    /// The type; default for an item with a role: `message`.
    #[serde(rename = "type")]
    kind: Option<String>,
    /// The author of a message: `user`, `assistant`, `system` or `developer`.
    role: Option<String>,
    /// Its text, or parts of it.
    content: Option<Value>,
    /// The id of the item.
    id: Option<String>,
}

/// A tool: a function (`name`, `description`, `parameters`, `strict`), a custom tool (`name`, `description`, `format`),
/// or a namespace (`name`, `tools`) of both. Tools of other types are ignored.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ToolObject {
    /// `function`, the default; `custom`, `namespace`.
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

/// The response format.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TextOptions {
    /// The format.
    format: Option<TextFormat>,
    /// The length of the text; ignored.
    verbosity: Option<Value>,
}

/// The format of a text.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TextFormat {
    /// `text`, `json_object` or `json_schema`.
    #[serde(rename = "type")]
    kind: String,
    /// The JSON schema of `json_schema`.
    schema: Option<Value>,
    /// Whether objects have exactly the declared properties unless they set `additionalProperties`.
    strict: Option<bool>,
}
