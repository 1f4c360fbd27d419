//! The OpenAPI schemas of messages and tools. They only describe: `metal-attention-chat` parses messages and tools.
//! Fields of earlier turns may be of any type unless a type is required.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// A message of a conversation.
#[derive(Serialize, Deserialize, ToSchema)]
pub struct ChatMessage {
    /// The role of its author.
    role: ChatRole,
    /// Its text; null if it only calls functions.
    content: Option<ChatContent>,
    /// The model's reasoning before the answer.
    reasoning_content: Option<Value>,
    /// The functions that the model calls: objects `{"id": ..., "type": "function", "function": {"name": ..., "arguments":
    /// ...}}`, whose arguments are a JSON text or the object itself.
    tool_calls: Option<Vec<Value>>,
    /// The id of the call that this message answers.
    tool_call_id: Option<Value>,
    /// The name of the speaker or of the tool.
    name: Option<Value>,
    /// True: the answer continues this message, which must be the last one and the assistant's.
    prefix: Option<Value>,
}

/// The author of a message.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum ChatRole {
    System,
    Developer,
    User,
    Assistant,
    Tool,
    /// An alias of `tool`.
    Function,
}

/// The text of a message.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
enum ChatContent {
    /// A string.
    Text(String),
    /// A list of parts.
    Parts(Vec<TextOrPart>),
    /// One part.
    Part(Box<ContentPart>),
}

/// A part of a text.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
enum TextOrPart {
    /// A string.
    Text(String),
    /// An object with the text.
    Part(Box<ContentPart>),
}

/// A part of a text, or a picture.
#[derive(Serialize, Deserialize, ToSchema)]
struct ContentPart {
    /// `text`, `image_url`, `input_text`, `output_text`, `refusal`, `thinking` or `reasoning`; without it, `text`.
    #[serde(rename = "type")]
    kind: Option<Value>,
    /// The text, of most kinds.
    text: Option<Value>,
    /// The address of a picture, such as `data:image/png;base64,...`: a string, or an object with `url` and `detail`.
    image_url: Option<Value>,
    /// The text of a refusal.
    refusal: Option<Value>,
    /// The text of reasoning.
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
    /// Its description.
    description: Option<Value>,
    /// The JSON schema of its arguments.
    parameters: Option<BTreeMap<String, Value>>,
    /// Whether objects in the arguments have exactly the declared properties, as in a JSON schema for an answer.
    strict: Option<bool>,
}

/// Whether the model calls a function, and which.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum ToolChoice {
    /// A mode.
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
    /// No call.
    None,
    /// The model decides.
    Auto,
    /// At least one call.
    Required,
    /// At least one call.
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

/// A restriction to some functions.
#[derive(Serialize, Deserialize, ToSchema)]
pub struct AllowedTools {
    /// `allowed_tools`.
    #[serde(rename = "type")]
    kind: AllowedToolsKind,
    /// The functions, and whether one must be called.
    allowed_tools: AllowedToolsChoice,
}

/// The kind of a restriction.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum AllowedToolsKind {
    AllowedTools,
}

/// The functions, and whether one must be called.
#[derive(Serialize, Deserialize, ToSchema)]
struct AllowedToolsChoice {
    /// `auto`, the default: the model decides; `required`: at least one call.
    mode: Option<ToolMode>,
    /// The functions.
    tools: Vec<NamedTool>,
}
