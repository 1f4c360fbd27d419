//! Messages, tool calls and tools, with the JSON representation of the `OpenAI` API.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{MessagePicture, TextWithPictures};

/// The role of a message's author.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions for the whole conversation.
    System,
    /// Instructions, under the name of newer APIs. A template without this role sees a system message.
    Developer,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name of the role in JSON and in templates, such as "user".
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

/// A message of a conversation. Deserialisation is lenient (`message_json.rs`): content may be a list of parts,
/// `reasoning` is accepted for `reasoning_content`, calls may lack an id, and null means missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "crate::message_json::MessageJson")]
pub struct Message {
    /// The role of the author.
    pub role: Role,
    /// The text. In JSON also a list of `{"type": "text", "text": ...}`, which are joined. `None` (null) if the
    /// message consists of tool calls only.
    pub content: Option<String>,
    /// Its pictures, whose markers ([`picture_marker`](crate::picture_marker)) stand in the text. In JSON parts of the
    /// content of type `image_url` or `input_image`.
    #[serde(skip)]
    pub pictures: Vec<MessagePicture>,
    /// The reasoning that preceded the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The tool calls that the model made.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The id of the call that a tool message answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The name of the author or of the tool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message with a text and nothing else.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: Some(content.into()),
            pictures: Vec::new(),
            reasoning_content: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    /// A message with a text with pictures and nothing else.
    pub fn of(role: Role, content: TextWithPictures) -> Self {
        let TextWithPictures { text, pictures } = content;
        Self { pictures, ..Self::new(role, text) }
    }

    /// A system message.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new(Role::System, content)
    }

    /// A message of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new(Role::User, content)
    }

    /// A message of the model.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new(Role::Assistant, content)
    }

    /// The text; empty if there is none.
    pub fn text(&self) -> &str {
        self.content.as_deref().unwrap_or_default()
    }
}

/// A tool call that the model made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "crate::message_json::ToolCallJson")]
pub struct ToolCall {
    /// The id of the call, which the tool message with its result refers to.
    pub id: String,
    /// The type of the tool: "function".
    #[serde(rename = "type")]
    pub kind: String,
    /// The function and its arguments.
    pub function: FunctionCall,
}

impl ToolCall {
    /// A call of the function `name` with `arguments`, a JSON object in text form.
    pub fn new(id: impl Into<String>, name: impl Into<String>, arguments: impl Into<String>) -> Self {
        Self {
            id: id.into(),
            kind: "function".into(),
            function: FunctionCall { name: name.into(), arguments: arguments.into() },
        }
    }
}

/// The function and the arguments of a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "crate::message_json::FunctionCallJson")]
pub struct FunctionCall {
    /// The name of the function.
    pub name: String,
    /// The arguments: a JSON object in text form, or the text that a model wrote instead.
    pub arguments: String,
}

/// A tool that the model may call: a JSON object `{"type": "function", "function": {"name": ..., "description": ...,
/// "parameters": JSON schema}}`. Templates get it unchanged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub struct Tool(Value);

impl Tool {
    /// The name of the function.
    pub fn name(&self) -> &str {
        self.0["function"]["name"].as_str().unwrap_or_default()
    }

    /// The JSON schema of the arguments; `None` if the tool has no schema.
    pub fn parameters(&self) -> Option<&Value> {
        self.0["function"].get("parameters").filter(|schema| !schema.is_null())
    }

    /// The tool with an empty description, parameters and properties in place of missing ones; `None` if nothing is
    /// missing.
    pub(crate) fn completed(&self) -> Option<Self> {
        let mut tool = self.0.clone();
        let function = tool["function"].as_object_mut()?;
        for (name, value) in [("description", json!("")), ("parameters", json!({"type": "object"}))] {
            let field = function.entry(name).or_insert(Value::Null);
            if field.is_null() {
                *field = value;
            }
        }
        let parameters = function["parameters"].as_object_mut()?;
        parameters.entry("type").or_insert_with(|| "object".into());
        parameters.entry("properties").or_insert_with(|| json!({}));
        parameters.entry("required").or_insert_with(|| json!([]));
        (tool != self.0).then_some(Self(tool))
    }

    /// The whole JSON object.
    pub fn as_value(&self) -> &Value {
        &self.0
    }
}

/// The error for a tool with an invalid description.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a tool must be {{\"type\": \"function\", \"function\": {{\"name\": ..., \"parameters\": ...}}}}: {problem}")]
pub struct ToolError {
    problem: &'static str,
}

impl TryFrom<Value> for Tool {
    type Error = ToolError;

    /// Reads a tool in the format of the chat completions API, or of the responses API, where the function's fields
    /// are at the top level.
    fn try_from(mut tool: Value) -> Result<Self, ToolError> {
        if let Some(fields) = tool.as_object_mut() {
            if fields.get("type").is_none_or(Value::is_null) && fields.contains_key("function") {
                fields.insert("type".into(), "function".into());
            }
            if fields.get("function").is_none_or(Value::is_null) && fields.contains_key("name") {
                let kind = fields.remove("type").unwrap_or_default();
                let mut function = std::mem::take(fields);
                function.remove("function");
                tool = json!({"type": kind, "function": function});
            }
        }
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
    fn tools_are_checked() {
        let tool = |tool: Value| Tool::try_from(tool).map_err(|e| e.problem);
        let good = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
        let good = tool(good).unwrap();
        assert_eq!((good.name(), good.parameters()), ("f", Some(&json!({"type": "object"}))));
        assert_eq!(tool(json!({"type": "custom", "custom": {"name": "f"}})), Err("its type is not \"function\""));
        assert_eq!(tool(json!({"type": "function"})), Err("its function has no name"));
    }

    #[test]
    fn tools_of_other_shapes_are_read() {
        let full = json!({"type": "function", "function": {"name": "f", "strict": null}});
        for shape in [
            json!({"function": {"name": "f", "strict": null}}),
            json!({"type": null, "function": {"name": "f", "strict": null}}),
            json!({"type": "function", "name": "f", "strict": null}),
        ] {
            assert_eq!(Tool::try_from(shape).unwrap().as_value(), &full);
        }
    }

    #[test]
    fn tools_are_completed() {
        let function = |fields: Value| Tool::try_from(json!({"type": "function", "function": fields})).unwrap();
        let empty = json!({"type": "object", "properties": {}, "required": []});
        let full = function(json!({"name": "f", "description": "", "parameters": empty}));
        for fields in [
            json!({"name": "f"}),
            json!({"name": "f", "description": null, "parameters": null}),
            json!({"name": "f", "parameters": {"type": "object"}}),
            json!({"name": "f", "parameters": {}}),
        ] {
            assert_eq!(function(fields).completed().as_ref(), Some(&full));
        }
        assert_eq!(full.completed(), None);
    }
}
