//! The content of a message as Anthropic's clients send it: a text, or blocks.
//!
//! All text and all pictures in a block are read. Other blocks are refused by type, and results of tools that
//! Anthropic's own servers run are ignored: no model here has seen them.

use std::fmt;

use metal_attention_chat::{MessagePicture, PictureSource, TextWithPictures};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::signature;

/// The content of a message: a text counts as one text block.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Content(pub Vec<Block>);

/// A block of a message.
#[derive(Debug, Clone, PartialEq)]
pub enum Block {
    /// Text, including that of a document.
    Text(String),
    /// Reasoning of the model.
    Thinking(String),
    /// A tool call of the model.
    ToolUse {
        /// The call's id.
        id: String,
        /// The tool.
        name: String,
        /// The arguments: a JSON object as a string.
        input: String,
    },
    /// The result of a tool call.
    ToolResult {
        /// The call's id.
        id: String,
        /// The text, with pictures.
        text: TextWithPictures,
    },
    /// A picture.
    Image(MessagePicture),
    /// A block of this type, which is ignored.
    PassedOver(String),
}

impl Content {
    /// The text of content that has nothing but text and pictures; otherwise an error that names the type of another
    /// block.
    fn into_text(self) -> Result<TextWithPictures, String> {
        let mut all = TextWithPictures::default();
        for block in self.0 {
            match block {
                Block::Text(text) => all.push_str(&text),
                Block::Image(picture) => all.push_picture(picture),
                Block::PassedOver(_) => {}
                Block::Thinking(_) | Block::ToolUse { .. } | Block::ToolResult { .. } => {
                    return Err(format!("only text may stand here, not a block of type {:?}", block.kind()));
                }
            }
        }
        Ok(all)
    }
}

impl Block {
    /// The name of the block's type.
    pub fn kind(&self) -> &str {
        match self {
            Self::Text(_) => "text",
            Self::Thinking(_) => "thinking",
            Self::ToolUse { .. } => "tool_use",
            Self::ToolResult { .. } => "tool_result",
            Self::Image(_) => "image",
            Self::PassedOver(kind) => kind,
        }
    }

    /// Reads a block from its fields. The error explains why the type is refused.
    fn read(mut fields: Map<String, Value>) -> Result<Self, String> {
        let kind = match fields.remove("type") {
            Some(Value::String(kind)) => kind,
            None | Some(Value::Null) => "text".to_owned(),
            Some(Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_)) => {
                return Err("the type of a block must be a string".to_owned());
            }
        };
        Ok(match kind.as_str() {
            "text" => Self::Text(string(&mut fields, "text")?),
            "thinking" => {
                let reasoning = string(&mut fields, "thinking")?;
                let signed = fields.get("signature").and_then(Value::as_str).and_then(signature::reasoning);
                Self::Thinking(if reasoning.is_empty() { signed.unwrap_or_default() } else { reasoning })
            }
            "tool_use" => Self::ToolUse {
                id: string(&mut fields, "id")?,
                name: string(&mut fields, "name")?,
                input: match fields.remove("input") {
                    None | Some(Value::Null) => "{}".to_owned(),
                    Some(input) => input.to_string(),
                },
            },
            "tool_result" => {
                let text = inner_content(&mut fields, "content")?;
                Self::ToolResult { id: string(&mut fields, "tool_use_id")?, text }
            }
            "document" => Self::Text(document(&mut fields)?),
            "search_result" => {
                let heads = [string(&mut fields, "title")?, string(&mut fields, "source")?];
                Self::Text(lines([&heads[0], &heads[1], &inner_text(&mut fields, "content")?]))
            }
            "tool_reference" => Self::Text(string(&mut fields, "tool_name")?),
            "redacted_thinking" | "server_tool_use" | "mcp_tool_use" | "container_upload" => Self::PassedOver(kind),
            of_server if of_server.ends_with("_tool_result") => Self::PassedOver(kind),
            "image" => Self::Image(image(&mut fields)?),
            other => {
                return Err(format!(
                    "a block of type {other:?} cannot be read: the model reads texts and pictures only, so leave \
                     the block out or describe it in one of type \"text\""
                ));
            }
        })
    }
}

/// Removes and returns the string `name`; empty if it is missing.
fn string(fields: &mut Map<String, Value>, name: &str) -> Result<String, String> {
    match fields.remove(name) {
        Some(Value::String(text)) => Ok(text),
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_)) => {
            Err(format!("{name} must be a string"))
        }
    }
}

/// Removes and returns the text with pictures of the content in the field `name`.
fn inner_content(fields: &mut Map<String, Value>, name: &str) -> Result<TextWithPictures, String> {
    let content = fields.remove(name).unwrap_or_default();
    Content::deserialize(content).map_err(|error| error.to_string())?.into_text()
}

/// Removes and returns the text of the content in the field `name`, which may have no pictures.
fn inner_text(fields: &mut Map<String, Value>, name: &str) -> Result<String, String> {
    let TextWithPictures { text, pictures } = inner_content(fields, name)?;
    if pictures.is_empty() { Ok(text) } else { Err("a picture must be a block of its own here".to_owned()) }
}

/// The picture of a block `{"type": "image", "source": {"type": "base64", "media_type": ..., "data": ...}}`, or with a source
/// `{"type": "url", "url": ...}`.
fn image(fields: &mut Map<String, Value>) -> Result<MessagePicture, String> {
    let Some(Value::Object(mut source)) = fields.remove("source") else {
        return Err("a block of type \"image\" needs a source".to_owned());
    };
    let source = match string(&mut source, "type")?.as_str() {
        "base64" => PictureSource::Base64(string(&mut source, "data")?.into()),
        "url" => PictureSource::Url(string(&mut source, "url")?.into()),
        other => {
            return Err(format!(
                "a picture whose source has the type {other:?} cannot be read: send it as {{\"type\": \"base64\", \"media_type\": \
                 \"image/png\", \"data\": ...}}"
            ));
        }
    };
    Ok(MessagePicture { source, low_detail: false })
}

/// The text of a document, after its title and context.
fn document(fields: &mut Map<String, Value>) -> Result<String, String> {
    let Some(Value::Object(mut source)) = fields.remove("source") else {
        return Err("a document needs a source".to_owned());
    };
    let text = match string(&mut source, "type")?.as_str() {
        "text" => string(&mut source, "data")?,
        "content" => inner_text(&mut source, "content")?,
        other => {
            return Err(format!(
                "a document whose source has the type {other:?} cannot be read: give its text, as {{\"type\": \"text\", \
                 \"media_type\": \"text/plain\", \"data\": ...}}"
            ));
        }
    };
    Ok(lines([&string(fields, "title")?, &string(fields, "context")?, &text]))
}

/// Joins the non-empty `parts` with line breaks.
fn lines(parts: [&str; 3]) -> String {
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n")
}

impl<'de> Deserialize<'de> for Block {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::Object(fields) => Self::read(fields).map_err(D::Error::custom),
            Value::String(text) => Ok(Self::Text(text)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) => {
                Err(D::Error::custom("a block must be an object with a type"))
            }
        }
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentVisitor)
    }
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = Content;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of blocks")
    }

    fn visit_unit<E: Error>(self) -> Result<Content, E> {
        Ok(Content::default())
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Content, E> {
        Ok(Content(vec![Block::Text(text.to_owned())]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Content, A::Error> {
        let mut blocks = Vec::new();
        while let Some(block) = list.next_element()? {
            blocks.push(block);
        }
        Ok(Content(blocks))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Content, A::Error> {
        Ok(Content(vec![Block::deserialize(MapAccessDeserializer::new(map))?]))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(content: Value) -> Result<Vec<Block>, String> {
        serde_json::from_value::<Content>(content).map(|content| content.0).map_err(|e| e.to_string())
    }

    fn text(text: &str) -> Block {
        Block::Text(text.into())
    }

    fn result(content: &Value) -> Result<String, String> {
        let block = json!([{"type": "tool_result", "tool_use_id": "a", "is_error": true, "content": content}]);
        match read(block)?.as_slice() {
            [Block::ToolResult { id, text }] if id == "a" && text.pictures.is_empty() => Ok(text.text.clone()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn content_has_many_forms() {
        assert_eq!(read(json!("a")), Ok(vec![text("a")]));
        assert_eq!(read(json!(null)), Ok(vec![]));
        assert_eq!(read(json!([])), Ok(vec![]));
        let block = json!({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": null});
        assert_eq!(read(block.clone()), Ok(vec![text("a")]));
        assert_eq!(read(json!([block, "b", {"text": "c"}])), Ok(vec![text("a"), text("b"), text("c")]));
        let call = json!([{"type": "tool_use", "id": "a", "name": "f", "input": {"z": 1, "a": [2]}},
            {"type": "tool_use", "id": "b", "name": "g"}]);
        let of = |id: &str, name: &str, input: &str| Block::ToolUse {
            id: id.into(),
            name: name.into(),
            input: input.into(),
        };
        assert_eq!(read(call), Ok(vec![of("a", "f", r#"{"z":1,"a":[2]}"#), of("b", "g", "{}")]));
        let of_servers = ["redacted_thinking", "server_tool_use", "web_search_tool_result", "mcp_tool_result"];
        for kind in of_servers {
            let block = json!([{"type": kind, "content": [{"type": "web_search_result", "url": 1}]}]);
            assert_eq!(read(block), Ok(vec![Block::PassedOver(kind.into())]));
        }
    }

    #[test]
    fn tool_results_are_text() {
        for (content, expected) in [
            (json!("a"), "a"),
            (json!(null), ""),
            (json!([]), ""),
            (json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), "ab"),
            (json!([{"type": "tool_reference", "tool_name": "f"}]), "f"),
            (
                json!([{"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain",
                    "data": "d"}}]),
                "T\nd",
            ),
            (
                json!([{"type": "search_result", "title": "T", "source": "s", "content": [{"type": "text", "text": "c"}]}]),
                "T\ns\nc",
            ),
        ] {
            assert_eq!(result(&content).as_deref(), Ok(expected), "{content}");
        }
        let nested = result(&json!([{"type": "tool_result", "tool_use_id": "b"}])).unwrap_err();
        assert!(nested.starts_with("only text may stand here, not a block of type \"tool_result\""), "{nested}");
    }

    #[test]
    fn blocks_without_text_are_refused_by_type() {
        for (block, expected) in [
            (json!({"type": "teapot"}), "a block of type \"teapot\" cannot be read"),
            (json!({"type": 1}), "the type of a block must be a string"),
            (json!({"type": "text", "text": 1}), "text must be a string"),
            (json!({"type": "document"}), "a document needs a source"),
            (json!({"type": "image"}), "a block of type \"image\" needs a source"),
            (
                json!({"type": "image", "source": {"type": "file", "file_id": "f"}}),
                "a picture whose source has the type \"file\"",
            ),
            (
                json!({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}),
                "a document whose source has the type \"base64\" cannot be read",
            ),
            (json!(7), "a block must be an object with a type"),
        ] {
            let refused = read(json!([block])).unwrap_err();
            assert!(refused.starts_with(expected), "{refused}");
        }
        assert!(read(json!(7)).is_err() && read(json!(true)).is_err());
    }

    #[test]
    fn pictures_are_read_within_results_and_beside_texts() {
        let sent = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}});
        let picture = MessagePicture { source: PictureSource::Base64("AA==".into()), low_detail: false };
        assert_eq!(read(json!(["a", sent])), Ok(vec![text("a"), Block::Image(picture.clone())]));
        let mut content = TextWithPictures::from("a");
        content.push_picture(picture);
        let block =
            json!([{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}, sent]}]);
        assert_eq!(read(block), Ok(vec![Block::ToolResult { id: "t".into(), text: content }]));
        let at = json!([{"type": "image", "source": {"type": "url", "url": "https://a/b"}}]);
        let source = PictureSource::Url("https://a/b".into());
        assert_eq!(read(at), Ok(vec![Block::Image(MessagePicture { source, low_detail: false })]));
    }

    #[test]
    fn reasoning_is_read_with_any_signature() {
        let thinking = |reasoning: &str, signature: Value| {
            read(json!([{"type": "thinking", "thinking": reasoning, "signature": signature}]))
        };
        let hm = Ok(vec![Block::Thinking("Hm.".into())]);
        for signature in [json!(""), json!(null), json!("EqoB"), json!(signature::of("Well.", true))] {
            assert_eq!(thinking("Hm.", signature), hm);
        }
        assert_eq!(thinking("", json!(signature::of("Hm.", true))), hm);
        assert_eq!(thinking("", json!("EqoB")), Ok(vec![Block::Thinking(String::new())]));
    }
}
