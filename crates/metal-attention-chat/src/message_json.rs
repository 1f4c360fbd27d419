//! Lenient deserialisation of messages. Earlier turns of a conversation may come from any model and any client, so
//! missing, null and malformed fields get the nearest meaning. Only content that is neither text nor picture is refused.

use serde::{Deserialize, Deserializer, de::Error};
use serde_json::Value;

use crate::{FunctionCall, Message, MessagePicture, PictureSource, Role, TextWithPictures, ToolCall};

/// The JSON of a message.
#[derive(Deserialize)]
pub(crate) struct MessageJson {
    role: RoleJson,
    #[serde(default)]
    content: MessageContent,
    reasoning_content: Option<Value>,
    /// The name of `reasoning_content` in newer APIs.
    reasoning: Option<Value>,
    /// The text of a refusal, which some clients send instead of content.
    refusal: Option<Value>,
    tool_calls: Option<Vec<Option<ToolCall>>>,
    /// The single call of the legacy API.
    function_call: Option<FunctionCall>,
    tool_call_id: Option<Value>,
    name: Option<Value>,
    /// A mark of `DeepSeek`'s and Mistral's APIs: the answer continues this message.
    prefix: Option<Value>,
}

/// A message with the options that a client sent along with it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(from = "MessageJson")]
pub struct SentMessage {
    /// The message itself.
    pub message: Message,
    /// Whether the answer is to continue this message (`"prefix": true`).
    pub is_prefix: bool,
}

impl From<MessageJson> for SentMessage {
    fn from(json: MessageJson) -> Self {
        Self { is_prefix: json.prefix == Some(Value::Bool(true)), message: json.into() }
    }
}

/// A role. `function` is the legacy name of `tool`.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum RoleJson {
    System,
    Developer,
    User,
    Assistant,
    #[serde(alias = "function")]
    Tool,
}

impl From<MessageJson> for Message {
    fn from(json: MessageJson) -> Self {
        let role = match json.role {
            RoleJson::System => Role::System,
            RoleJson::Developer => Role::Developer,
            RoleJson::User => Role::User,
            RoleJson::Assistant => Role::Assistant,
            RoleJson::Tool => Role::Tool,
        };
        let mut tool_calls: Vec<ToolCall> = json.tool_calls.into_iter().flatten().flatten().collect();
        if tool_calls.is_empty() {
            let call = |function| ToolCall { id: String::new(), kind: "function".into(), function };
            tool_calls.extend(json.function_call.map(call));
        }
        let reasoning = json.reasoning_content.or(json.reasoning).and_then(nonempty_text);
        let MessageContent { text, reasoning: reasoning_parts } = json.content;
        let (text, pictures) = text.map(|TextWithPictures { text, pictures }| (text, pictures)).unzip();
        Self {
            role,
            content: text.or_else(|| json.refusal.and_then(nonempty_text)),
            pictures: pictures.unwrap_or_default(),
            reasoning_content: reasoning.or(reasoning_parts.filter(|text| !text.is_empty())),
            tool_calls,
            tool_call_id: json.tool_call_id.and_then(nonempty_text),
            name: json.name.and_then(nonempty_text),
        }
    }
}

/// The text of a string or number; `None` for other values and for an empty text.
fn nonempty_text(value: Value) -> Option<String> {
    let text = match value {
        Value::String(text) => text,
        Value::Number(number) => number.to_string(),
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => return None,
    };
    Some(text).filter(|text| !text.is_empty())
}

/// The content of a message.
#[derive(Default)]
struct MessageContent {
    /// The text and pictures.
    text: Option<TextWithPictures>,
    /// The text of the parts that are reasoning.
    reasoning: Option<String>,
}

impl<'de> Deserialize<'de> for MessageContent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let parts = match Value::deserialize(deserializer)? {
            Value::Null => return Ok(Self::default()),
            Value::String(text) => return Ok(Self { text: Some(text.into()), reasoning: None }),
            Value::Array(parts) => parts,
            part @ Value::Object(_) => vec![part],
            Value::Bool(_) | Value::Number(_) => {
                return Err(D::Error::custom("the content of a message must be a text, a list of parts, or null"));
            }
        };
        let mut content = Self { text: Some(TextWithPictures::default()), reasoning: None };
        parts.into_iter().try_for_each(|part| content.push(part)).map_err(D::Error::custom)?;
        Ok(content)
    }
}

impl MessageContent {
    /// Adds a part. Fails with the reason.
    fn push(&mut self, mut part: Value) -> Result<(), String> {
        let (kind, text) = match &part {
            Value::String(_) => ("text", &part),
            part => {
                let kind = part["type"].as_str().unwrap_or("text");
                (kind, &part[if matches!(kind, "refusal" | "thinking") { kind } else { "text" }])
            }
        };
        let is_text = match kind {
            "text" | "input_text" | "output_text" | "refusal" => true,
            "thinking" | "reasoning" => false,
            "image_url" | "input_image" => {
                self.text.get_or_insert_default().push_picture(picture_of_part(&mut part)?);
                return Ok(());
            }
            other => {
                return Err(format!(
                    "a part of type {other:?} cannot be read: the model reads texts and pictures only (parts of type \"text\" and \
                     \"image_url\"), so leave the part out or describe it in a text"
                ));
            }
        };
        match text {
            Value::String(text) if is_text => self.text.get_or_insert_default().push_str(text),
            Value::String(text) => self.reasoning.get_or_insert_default().push_str(text),
            Value::Null if part.is_object() => {}
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
                return Err(format!("a part of type {kind:?} has no text"));
            }
        }
        Ok(())
    }
}

/// The picture of a part `{"type": "image_url", "image_url": {"url": ..., "detail": ...}}`, or of one whose `image_url` is the
/// address itself, with `detail` beside it.
fn picture_of_part(part: &mut Value) -> Result<MessagePicture, String> {
    let mut image = part["image_url"].take();
    let (url, detail) = match &mut image {
        Value::Object(image) => (image.remove("url").unwrap_or_default(), image.remove("detail")),
        other => (other.take(), None),
    };
    let Value::String(url) = url else {
        return Err("a part of type \"image_url\" has no address: give {\"image_url\": {\"url\": \"data:image/png;base64,...\"}}".into());
    };
    let detail = detail.unwrap_or_else(|| part["detail"].take());
    Ok(MessagePicture { source: PictureSource::Url(url.into()), low_detail: detail.as_str() == Some("low") })
}

/// The JSON of a tool call.
#[derive(Deserialize)]
pub(crate) struct ToolCallJson {
    id: Option<Value>,
    #[serde(rename = "type")]
    kind: Option<Value>,
    function: Option<FunctionCall>,
    /// A call of a custom tool, which takes a text.
    custom: Option<CustomCall>,
}

/// The name and the input of a custom tool call.
#[derive(Deserialize)]
struct CustomCall {
    name: Option<String>,
    input: Option<Value>,
}

impl From<ToolCallJson> for ToolCall {
    fn from(json: ToolCallJson) -> Self {
        let custom = json.custom.map(|CustomCall { name, input }| FunctionCall {
            name: name.unwrap_or_default(),
            arguments: serde_json::json!({"input": input}).to_string(),
        });
        let empty = || FunctionCall { name: String::new(), arguments: "{}".into() };
        Self {
            id: json.id.and_then(nonempty_text).unwrap_or_default(),
            kind: json.kind.and_then(nonempty_text).filter(|kind| kind != "custom").unwrap_or("function".into()),
            function: json.function.or(custom).unwrap_or_else(empty),
        }
    }
}

/// The JSON of a function call.
#[derive(Deserialize)]
pub(crate) struct FunctionCallJson {
    name: Option<String>,
    #[serde(default)]
    arguments: Value,
}

impl From<FunctionCallJson> for FunctionCall {
    fn from(json: FunctionCallJson) -> Self {
        Self { name: json.name.unwrap_or_default(), arguments: arguments(json.arguments) }
    }
}

/// The arguments in text form. Missing and empty arguments become `{}`, and a string that contains an object becomes
/// that object. Other text is kept.
fn arguments(sent: Value) -> String {
    let text = match sent {
        Value::Null => return "{}".into(),
        Value::String(text) => text,
        value @ (Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_)) => return value.to_string(),
    };
    if text.trim().is_empty() {
        return "{}".into();
    }
    match serde_json::from_str(&text) {
        Ok(Value::Null) => "{}".into(),
        Ok(Value::String(inner)) if inner.trim_start().starts_with('{') => match serde_json::from_str(&inner) {
            Ok(Value::Object(_)) => inner,
            Ok(_) | Err(_) => text,
        },
        Ok(_) | Err(_) => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::picture_marker;

    fn message(json: Value) -> Message {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn text_parts_are_joined() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b", "cache_control": {}}, "c",
            {"type": "refusal", "refusal": "d"}, {"type": "output_text", "text": null}, {"text": "e"}]);
        assert_eq!(message(json!({"role": "user", "content": parts})), Message::user("abcde"));
        assert_eq!(message(json!({"role": "user", "content": {"type": "text", "text": "a"}})), Message::user("a"));
        assert_eq!(message(json!({"role": "user", "content": []})), Message::user(""));
        let reasoning = json!([{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "a"}]);
        let expected = Message { reasoning_content: Some("Hm.".into()), ..Message::assistant("a") };
        assert_eq!(message(json!({"role": "assistant", "content": reasoning})), expected);
    }

    #[test]
    fn fields_that_are_not_text_are_refused_by_name() {
        let refused = |content: Value| {
            let read = serde_json::from_value::<Message>(json!({"role": "user", "content": content}));
            read.unwrap_err().to_string()
        };
        for kind in ["image", "input_audio", "file", "video_url"] {
            let error = refused(json!([{"type": "text", "text": "x"}, {"type": kind}]));
            assert!(error.starts_with(&format!("a part of type \"{kind}\" cannot be read")), "{error}");
        }
        assert_eq!(refused(json!(0)), "the content of a message must be a text, a list of parts, or null");
        assert_eq!(refused(json!([{"type": "text", "text": 1}])), "a part of type \"text\" has no text");
        assert_eq!(refused(json!([7])), "a part of type \"text\" has no text");
        for no_address in [json!({"type": "image_url"}), json!({"type": "input_image", "file_id": "f"})] {
            assert!(refused(json!([no_address])).contains("has no address"));
        }
    }

    #[test]
    fn pictures_stand_where_their_parts_do() {
        let picture = |url: &str, low_detail| MessagePicture { source: PictureSource::Url(url.into()), low_detail };
        let parts = json!([{"type": "image_url", "image_url": {"url": "data:a", "detail": "low"}}, {"type": "text", "text": "x"},
            {"type": "image_url", "image_url": "data:b"}, {"type": "input_image", "image_url": "data:c", "detail": "high"}]);
        let read = message(json!({"role": "user", "content": parts}));
        let [a, b, c] = [0, 1, 2].map(picture_marker);
        assert_eq!(read.content, Some(format!("{a}x{b}{c}")));
        assert_eq!(read.pictures, [picture("data:a", true), picture("data:b", false), picture("data:c", false)]);
        assert!(!serde_json::to_string(&read).unwrap().contains("data:"));
    }

    #[test]
    fn arguments_become_an_object_if_possible() {
        let read = |arguments: Value| {
            let call: FunctionCall = serde_json::from_value(json!({"name": "f", "arguments": arguments})).unwrap();
            call.arguments
        };
        for empty in [json!(""), json!(null), json!("null"), json!(" \n"), json!("{}"), json!({}), json!("\"{}\"")] {
            assert_eq!(read(empty.clone()), "{}", "{empty}");
        }
        assert_eq!(read(json!({"z": 1, "a": []})), r#"{"z":1,"a":[]}"#);
        assert_eq!(read(json!(r#"{ "b":1, "a":2}"#)), r#"{ "b":1, "a":2}"#);
        assert_eq!(read(json!(r#""{\"a\":1}""#)), r#"{"a":1}"#);
        for text in ["[1]", "{\"a\": ", "x", "\"x\"", "1"] {
            assert_eq!(read(json!(text)), text);
        }
        assert_eq!(serde_json::from_str::<FunctionCall>(r#"{"name": "f"}"#).unwrap().arguments, "{}");
    }

    #[test]
    fn null_counts_as_missing() {
        let sent = json!({"role": "assistant", "content": null, "name": null, "tool_call_id": null, "refusal": null,
            "audio": null, "function_call": null, "annotations": [], "reasoning": "Hm.", "reasoning_content": null,
            "tool_calls": [null, {"id": null, "type": null, "index": 0, "function": {"name": "f", "arguments": null}}]});
        let expected = Message {
            content: None,
            reasoning_content: Some("Hm.".into()),
            tool_calls: vec![ToolCall::new("", "f", "{}")],
            ..Message::assistant("")
        };
        assert_eq!(message(sent), expected);
        assert_eq!(message(json!({"role": "assistant", "tool_calls": null})).tool_calls, []);
    }

    #[test]
    fn other_calls_are_calls_of_functions() {
        let custom = json!({"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}});
        let call: ToolCall = serde_json::from_value(custom).unwrap();
        assert_eq!(call, ToolCall::new("c", "f", r#"{"input":"x"}"#));
        let old = message(json!({"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": ""}}));
        assert_eq!(old.tool_calls, [ToolCall::new("", "f", "{}")]);
        let answer = message(json!({"role": "function", "name": "f", "content": "x"}));
        assert_eq!((answer.role, answer.name.as_deref()), (Role::Tool, Some("f")));
    }
}
