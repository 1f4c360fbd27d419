//! Messages and tools as the OpenAPI description has them; `metal-attention-chat` reads them. What an earlier turn holds may
//! be of any type where no type is demanded of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// A message of a conversation.
#[derive(Serialize, Deserialize, ToSchema)]
pub struct ChatMessage {
    /// Who says it.
    role: ChatRole,
    /// Its text; null where it only calls functions.
    content: Option<ChatContent>,
    /// What the model thought before it answered.
    reasoning_content: Option<Value>,
    /// The functions that the model calls: objects `{"id": ..., "type": "function", "function": {"name": ..., "arguments":
    /// ...}}`, whose arguments are a JSON text or the object itself.
    tool_calls: Option<Vec<Value>>,
    /// The call that this message answers.
    tool_call_id: Option<Value>,
    /// The name of the speaker or of the tool.
    name: Option<Value>,
    /// True: the answer goes on with this message, which is the last one and the assistant's.
    prefix: Option<Value>,
}

/// Who says a message.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum ChatRole {
    System,
    Developer,
    User,
    Assistant,
    Tool,
    /// The same as `tool`.
    Function,
}

/// The text of a message.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
enum ChatContent {
    /// All of it.
    Text(String),
    /// In parts.
    Parts(Vec<TextOrPart>),
    /// In one part.
    Part(Box<ContentPart>),
}

/// A part of a text.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
enum TextOrPart {
    /// The text.
    Text(String),
    /// An object that has it.
    Part(Box<ContentPart>),
}

/// A part of a text.
#[derive(Serialize, Deserialize, ToSchema)]
struct ContentPart {
    /// `text`, `input_text`, `output_text`, `refusal`, `thinking` or `reasoning`; without it, `text`.
    #[serde(rename = "type")]
    kind: Option<Value>,
    /// The text of most kinds.
    text: Option<Value>,
    /// The text of a refusal.
    refusal: Option<Value>,
    /// The text of thoughts.
    thinking: Option<Value>,
}

/// A function that the model may call.
#[derive(Serialize, Deserialize, ToSchema)]
pub struct ToolDefinition {
    /// `function`, also where it is missing.
    #[serde(rename = "type")]
    kind: Option<ToolKind>,
    /// The function.
    function: FunctionDefinition,
}

/// The kind of a tool.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum ToolKind {
    Function,
}

/// A function.
#[derive(Serialize, Deserialize, ToSchema)]
struct FunctionDefinition {
    /// Its name.
    #[schema(min_length = 1)]
    name: String,
    /// What it does.
    description: Option<Value>,
    /// The JSON schema of its arguments.
    parameters: Option<BTreeMap<String, Value>>,
    /// Whether objects in the arguments hold what they name and nothing else, as in a JSON schema for an answer.
    strict: Option<bool>,
}

/// Whether the model calls a function, and which.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum ToolChoice {
    /// A word.
    Mode(ToolMode),
    /// This function.
    Named(NamedTool),
    /// Only these functions.
    Allowed(AllowedTools),
}

/// Whether the model calls a function.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ToolMode {
    /// It does not.
    None,
    /// As it likes.
    Auto,
    /// It does.
    Required,
    /// It does.
    Any,
}

/// A function by its name.
#[derive(Serialize, Deserialize, ToSchema)]
pub struct NamedTool {
    /// The function.
    function: FunctionName,
}

/// The name of a function.
#[derive(Serialize, Deserialize, ToSchema)]
struct FunctionName {
    /// The name.
    name: String,
}

/// A choice of functions.
#[derive(Serialize, Deserialize, ToSchema)]
pub struct AllowedTools {
    /// `allowed_tools`.
    #[serde(rename = "type")]
    kind: AllowedToolsKind,
    /// The functions.
    allowed_tools: AllowedToolsChoice,
}

/// The kind of a choice.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum AllowedToolsKind {
    AllowedTools,
}

/// The functions, and whether one is called.
#[derive(Serialize, Deserialize, ToSchema)]
struct AllowedToolsChoice {
    /// `auto`: as the model likes, also where it is missing; `required`: one is called.
    mode: Option<ToolMode>,
    /// The functions.
    tools: Vec<NamedTool>,
}
