//! Messages and tools, in the JSON shape of the `OpenAI` API.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

/// Who says a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions that hold for the whole conversation.
    System,
    /// The same, under the name that newer APIs give it. Templates that do not know it see a system message.
    Developer,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// What a tool that the model called has answered.
    Tool,
}

impl Role {
    /// The role as JSON and templates have it: `"user"`.
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who says it.
    pub role: Role,
    /// Its text. In JSON also a list of `{"type": "text", "text": ...}`, which are joined; `None`, JSON's `null`, where
    /// the message has tool calls and nothing else.
    #[serde(default, deserialize_with = "text_or_parts")]
    pub content: Option<String>,
    /// What the model thought before it answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The tools that the model calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The call that a tool's message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The name of the speaker or of the tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message with a text and nothing else.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: Some(content.into()),
            reasoning_content: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    /// Instructions for the whole conversation.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new(Role::System, content)
    }

    /// A message of the person.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new(Role::User, content)
    }

    /// A message of the model.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new(Role::Assistant, content)
    }

    /// The text, empty where there is none.
    pub fn text(&self) -> &str {
        self.content.as_deref().unwrap_or_default()
    }
}

/// A tool that the model calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// The call's own name, which the tool's answer gives back.
    #[serde(default)]
    pub id: String,
    /// The kind of tool: `"function"`.
    #[serde(rename = "type", default = "function")]
    pub kind: String,
    /// What is called, and with what.
    pub function: FunctionCall,
}

impl ToolCall {
    /// A call of the function `name` with `arguments`, a JSON object as text.
    pub fn new(id: impl Into<String>, name: impl Into<String>, arguments: impl Into<String>) -> Self {
        Self {
            id: id.into(),
            kind: function(),
            function: FunctionCall { name: name.into(), arguments: arguments.into() },
        }
    }
}

/// The function and the arguments of a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionCall {
    /// The function.
    pub name: String,
    /// The arguments: a JSON object as text, as the model wrote it.
    #[serde(default, deserialize_with = "text_or_object")]
    pub arguments: String,
}

/// A tool the model may call: a JSON object `{"type": "function", "function": {"name": ..., "description": ...,
/// "parameters": JSON schema}}`, which templates see as it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub struct Tool(Value);

impl Tool {
    /// The function's name.
    pub fn name(&self) -> &str {
        self.0["function"]["name"].as_str().unwrap_or_default()
    }

    /// The JSON schema of the arguments; `None` where the tool takes whatever it gets.
    pub fn parameters(&self) -> Option<&Value> {
        self.0["function"].get("parameters").filter(|schema| !schema.is_null())
    }

    /// The tool with an empty description and no parameters where it has none; `None` where there is nothing to add.
    pub(crate) fn completed(&self) -> Option<Self> {
        let mut tool = self.0.clone();
        let function = tool["function"].as_object_mut()?;
        let n_fields = function.len();
        function.entry("description").or_insert_with(|| "".into());
        function.entry("parameters").or_insert_with(|| json!({"type": "object", "properties": {}}));
        (function.len() > n_fields).then_some(Self(tool))
    }

    /// The whole object.
    pub fn as_value(&self) -> &Value {
        &self.0
    }
}

/// A tool is not described as it has to be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a tool must be {{\"type\": \"function\", \"function\": {{\"name\": ..., \"parameters\": ...}}}}: {problem}")]
pub struct ToolError {
    problem: &'static str,
}

impl TryFrom<Value> for Tool {
    type Error = ToolError;

    fn try_from(tool: Value) -> Result<Self, ToolError> {
        let problem = if tool["type"] != "function" {
            "its type is not \"function\""
        } else if tool["function"]["name"].as_str().is_none_or(str::is_empty) {
            "its function has no name"
        } else if tool["function"].get("parameters").is_some_and(|p| !p.is_object() && !p.is_null()) {
            "its parameters are no JSON schema"
        } else if tool["function"].get("strict").is_some_and(|s| !s.is_boolean() && !s.is_null()) {
            "its strict is neither true nor false"
        } else {
            return Ok(Self(tool));
        };
        Err(ToolError { problem })
    }
}

impl From<Tool> for Value {
    fn from(tool: Tool) -> Self {
        tool.0
    }
}

fn function() -> String {
    "function".into()
}

/// Text, a list of text parts, or `null`.
fn text_or_parts<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    struct Part {
        #[serde(rename = "type")]
        _kind: Kind,
        text: String,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Kind {
        Text,
    }
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "the content of a message must be a text, a list of text parts, or null")]
    enum Content {
        Text(String),
        Parts(Vec<Part>),
    }
    Ok(Option::deserialize(deserializer)?.map(|content| match content {
        Content::Text(text) => text,
        Content::Parts(parts) => parts.into_iter().map(|part| part.text).collect(),
    }))
}

fn null_is_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<ToolCall>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Arguments as text, or as the object itself, which other servers send.
fn text_or_object<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(match Value::deserialize(deserializer)? {
        Value::String(text) => text,
        value => value.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_those_of_the_api() {
        let text = r#"{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"b\":1,\"a\":2}"}}]}"#;
        let message: Message = serde_json::from_str(text).unwrap();
        assert_eq!(message.tool_calls, [ToolCall::new("c1", "f", r#"{"b":1,"a":2}"#)]);
        assert_eq!(serde_json::to_string(&message).unwrap(), text);
    }

    #[test]
    fn text_parts_are_joined_and_others_refused() {
        let message = |content: Value| serde_json::from_value::<Message>(json!({"role": "user", "content": content}));
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        assert_eq!(message(parts).unwrap(), Message::user("ab"));
        for other in [json!([{"type": "image_url", "image_url": {}}]), json!([{"type": 0, "text": "a"}]), json!(0)] {
            let error = message(other).unwrap_err();
            assert_eq!(error.to_string(), "the content of a message must be a text, a list of text parts, or null");
        }
    }

    #[test]
    fn arguments_may_be_an_object() {
        let call: FunctionCall = serde_json::from_value(json!({"name": "f", "arguments": {"z": 1, "a": []}})).unwrap();
        assert_eq!(call.arguments, r#"{"z":1,"a":[]}"#);
    }

    #[test]
    fn tools_are_checked() {
        let tool = |tool: Value| Tool::try_from(tool).map_err(|e| e.problem);
        let good = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
        let good = tool(good).unwrap();
        assert_eq!((good.name(), good.parameters()), ("f", Some(&json!({"type": "object"}))));
        assert_eq!(tool(json!({"function": {"name": "f"}})), Err("its type is not \"function\""));
        assert_eq!(tool(json!({"type": "function"})), Err("its function has no name"));
    }
}
