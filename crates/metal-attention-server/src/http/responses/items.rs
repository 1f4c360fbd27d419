//! Reads the items of a request's input, and of stored responses.

use std::fmt;

use metal_attention_chat::{MessagePicture, PictureSource, Role, TextOrPicture, TextWithPictures};
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use super::encoded_reasoning;
use crate::http::ApiError;
use crate::http::limits::MAX_ITEMS;

/// An item of the input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// A message.
    Message {
        /// Its author.
        role: Role,
        /// Its text, with pictures.
        text: TextWithPictures,
    },
    /// Reasoning of the model; `None`: its text is unknown.
    Reasoning(Option<String>),
    /// A function call.
    Call {
        /// The call's id.
        id: String,
        /// The function's namespace.
        namespace: Option<String>,
        /// The function.
        name: String,
        /// The arguments: a JSON object as a string.
        arguments: String,
    },
    /// A call of a custom tool.
    CustomCall {
        /// The call's id.
        id: String,
        /// The tool's namespace.
        namespace: Option<String>,
        /// The tool.
        name: String,
        /// The input of the tool.
        input: String,
    },
    /// The result of a tool call.
    Output {
        /// The call's id.
        call_id: String,
        /// The result, with pictures.
        text: TextWithPictures,
    },
    /// A reference to an item of a stored response, by its id.
    Reference(String),
    /// An item of another type, which is ignored.
    PassedOver(String),
}

/// An item as it was sent, and as it was read.
#[derive(Debug, Clone)]
pub struct SentItem {
    /// Its JSON as it was sent.
    pub json: Box<RawValue>,
    /// Its id, if it was sent with one.
    pub id: Option<String>,
    /// The item.
    pub item: Item,
}

/// Reads the field `input`: a text, an item, or a list of items. Errors name the item.
pub fn read(input: Option<&RawValue>) -> Result<Vec<SentItem>, ApiError> {
    let Some(input) = input else { return Ok(Vec::new()) };
    let wrong = || ApiError::field("input", "input must be a text or a list of items");
    match input.get().as_bytes().first() {
        Some(b'n') => Ok(Vec::new()),
        Some(b'"') => {
            let text = String::deserialize(input).map_err(|_| wrong())?;
            let item = json!({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]});
            let json = to_raw_value(&item).map_err(|_| wrong())?;
            Ok(vec![SentItem { json, id: None, item: Item::Message { role: Role::User, text: text.into() } }])
        }
        Some(b'{') => Ok(vec![SentItem::read(input, "input")?]),
        Some(b'[') => {
            let list = Vec::<&RawValue>::deserialize(input).map_err(|_| wrong())?;
            if list.len() > MAX_ITEMS {
                let message = format!("input has {} items; at most {MAX_ITEMS} are allowed", list.len());
                return Err(ApiError::field("input", message));
            }
            list.into_iter().enumerate().map(|(i, item)| SentItem::read(item, &format!("input[{i}]"))).collect()
        }
        Some(_) | None => Err(wrong()),
    }
}

impl SentItem {
    /// Bytes of its pictures as they were sent.
    pub fn picture_bytes(&self) -> usize {
        match &self.item {
            Item::Message { text, .. } | Item::Output { text, .. } => text.picture_bytes(),
            Item::Reasoning(_)
            | Item::Call { .. }
            | Item::CustomCall { .. }
            | Item::Reference(_)
            | Item::PassedOver(_) => 0,
        }
    }

    /// Reads an item. `place`: its path in the request, for errors.
    pub fn read(json: &RawValue, place: &str) -> Result<Self, ApiError> {
        let failed = |error: serde_json::Error| {
            let message = error.to_string();
            let message = message.split(" at line ").next().unwrap_or_default();
            ApiError::field(place, format!("{place}: {message}"))
        };
        if !json.get().starts_with('{') {
            return Err(ApiError::field(place, format!("{place} must be an item, which is an object")));
        }
        let head = ItemHeader::deserialize(json).map_err(failed)?;
        let item = head.read(json).map_err(failed)?;
        Ok(Self { json: json.to_owned(), id: head.id, item })
    }

    /// Returns the item's JSON for the store: a message in its full form, and each item with an id, which is `id` if it
    /// was sent without one.
    pub fn stored_json(&self, id: &str) -> Box<RawValue> {
        let id = self.id.as_deref().unwrap_or(id);
        let (role, text) = match &self.item {
            Item::Message { role, text } => (*role, text),
            Item::Reasoning(_)
            | Item::Call { .. }
            | Item::CustomCall { .. }
            | Item::Output { .. }
            | Item::Reference(_)
            | Item::PassedOver(_) => {
                return match (&self.id, self.json.get().strip_prefix('{')) {
                    (None, Some(rest)) => {
                        let comma = if rest.trim_start().starts_with('}') { "" } else { "," };
                        RawValue::from_string(format!("{{\"id\":{}{comma}{rest}", json!(id)))
                            .unwrap_or_else(|_| self.json.clone())
                    }
                    (Some(_) | None, _) => self.json.clone(),
                };
            }
        };
        let part = |part| match part {
            TextOrPicture::Text(text) if role == Role::Assistant => {
                json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
            }
            TextOrPicture::Text(text) => json!({"type": "input_text", "text": text}),
            TextOrPicture::Picture(MessagePicture { source, low_detail }) => {
                let (PictureSource::Url(url) | PictureSource::Base64(url)) = source;
                json!({"type": "input_image", "image_url": &**url, "detail": if *low_detail { "low" } else { "auto" }})
            }
        };
        let mut content: Vec<_> = text.parts().map(part).collect();
        if content.is_empty() {
            content.push(part(TextOrPicture::Text("")));
        }
        let message =
            json!({"id": id, "type": "message", "role": role.name(), "status": "completed", "content": content});
        to_raw_value(&message).unwrap_or_else(|_| self.json.clone())
    }
}

/// The fields that determine how an item is read.
#[derive(Deserialize)]
struct ItemHeader {
    /// The type; it may be missing, see [`read`](Self::read).
    #[serde(rename = "type")]
    kind: Option<String>,
    /// The id of the item, or of the item that it refers to.
    id: Option<String>,
    /// The author of a message.
    role: Option<String>,
}

impl ItemHeader {
    /// Reads an item by its type. Without a type, an item with a role is a message, and one with an id a reference.
    fn read(&self, json: &RawValue) -> Result<Item, serde_json::Error> {
        let kind = match (&self.kind, &self.role, &self.id) {
            (Some(kind), _, _) => kind,
            (None, Some(_), _) => "message",
            (None, None, Some(_)) => "item_reference",
            (None, None, None) => return Err(Error::custom("an item needs a type, or a role and a content")),
        };
        match kind {
            "message" => {
                let role = match self.role.as_deref() {
                    Some("user") => Role::User,
                    Some("assistant") => Role::Assistant,
                    Some("system") => Role::System,
                    Some("developer") => Role::Developer,
                    other => {
                        let message = "the role of a message must be user, assistant, system or developer";
                        let given = other.map_or("missing".into(), |role| format!("{role:?}"));
                        return Err(Error::custom(format!("{message}; it is {given}")));
                    }
                };
                Ok(Item::Message { role, text: InputMessageFields::deserialize(json)?.content.0 })
            }
            "reasoning" => {
                let fields = ReasoningFields::deserialize(json)?;
                let reasoning = fields.content.map(|InputText(content)| content.text).filter(|text| !text.is_empty());
                let encoded = || fields.encrypted_content.as_deref().and_then(encoded_reasoning::decode);
                let summary = || fields.summary.as_ref().map(|InputText(content)| content.text.clone());
                Ok(Item::Reasoning(reasoning.or_else(encoded).or_else(summary).filter(|text| !text.is_empty())))
            }
            "function_call" => {
                let fields = CallFields::deserialize(json)?;
                let arguments = match &fields.arguments {
                    None => String::new(),
                    Some(json) => String::deserialize(&**json).unwrap_or_else(|_| json.get().to_owned()),
                };
                let arguments = if ["", "null"].contains(&arguments.trim()) { "{}".into() } else { arguments };
                Ok(Item::Call { id: fields.call_id, namespace: fields.namespace, name: fields.name, arguments })
            }
            "custom_tool_call" => {
                let CallFields { call_id: id, namespace, name, input, .. } = CallFields::deserialize(json)?;
                Ok(Item::CustomCall { id, namespace, name, input: input.unwrap_or_default() })
            }
            "function_call_output" | "custom_tool_call_output" => {
                let OutputFields { call_id, output: InputText(text) } = OutputFields::deserialize(json)?;
                Ok(Item::Output { call_id, text })
            }
            "item_reference" => match &self.id {
                Some(id) => Ok(Item::Reference(id.clone())),
                None => Err(Error::missing_field("id")),
            },
            "compaction_trigger" => Err(Error::custom(
                "a compaction_trigger is not supported, as this server compacts no conversations: send a shorter one",
            )),
            other => Ok(Item::PassedOver(other.to_owned())),
        }
    }
}

/// The further fields of a message.
#[derive(Deserialize)]
struct InputMessageFields {
    #[serde(default)]
    content: InputText,
}

/// The further fields of reasoning.
#[derive(Deserialize)]
struct ReasoningFields {
    content: Option<InputText>,
    summary: Option<InputText>,
    encrypted_content: Option<String>,
}

/// The further fields of a call of a function or a custom tool.
#[derive(Deserialize)]
struct CallFields {
    call_id: String,
    namespace: Option<String>,
    name: String,
    arguments: Option<Box<RawValue>>,
    input: Option<String>,
}

/// The further fields of a call's result.
#[derive(Deserialize)]
struct OutputFields {
    call_id: String,
    #[serde(default)]
    output: InputText,
}

/// A text with pictures: a string, or joined parts.
#[derive(Debug, Default)]
struct InputText(TextWithPictures);

impl<'de> Deserialize<'de> for InputText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(InputTextVisitor)
    }
}

struct InputTextVisitor;

impl<'de> Visitor<'de> for InputTextVisitor {
    type Value = InputText;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, or a list of parts")
    }

    fn visit_unit<E: Error>(self) -> Result<InputText, E> {
        Ok(InputText::default())
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<InputText, E> {
        Ok(InputText(text.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<InputText, A::Error> {
        let mut text = TextWithPictures::default();
        while let Some(InputText(part)) = parts.next_element()? {
            text.append(part);
        }
        Ok(InputText(text))
    }

    /// Reads a single part.
    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<InputText, A::Error> {
        let part = InputPart::deserialize(MapAccessDeserializer::new(map))?;
        let text = match part.kind.as_deref().unwrap_or("text") {
            "text" | "input_text" | "output_text" | "summary_text" | "reasoning_text" => part.text,
            "refusal" => part.refusal,
            // Encrypted by another server.
            "encrypted_content" => None,
            "input_image" | "image_url" => {
                let mut image = part.image_url.unwrap_or_default();
                let detail = image["detail"].as_str().map(str::to_owned);
                let Value::String(url) = (if image.is_object() { image["url"].take() } else { image }) else {
                    return Err(A::Error::custom(
                        "an input_image needs an image_url, such as data:image/png;base64,...; this server keeps no files",
                    ));
                };
                let detail = detail.or_else(|| Some(part.detail?.as_str()?.to_owned()));
                let low_detail = detail.as_deref() == Some("low");
                let mut text = TextWithPictures::default();
                text.push_picture(MessagePicture { source: PictureSource::Url(url.into()), low_detail });
                return Ok(InputText(text));
            }
            "input_file" | "file" => {
                return Err(A::Error::custom(
                    "input_file is not supported: put the file's text into a part of type input_text",
                ));
            }
            other => {
                return Err(A::Error::custom(format!(
                    "a part of type {other:?} cannot be read: the model reads texts and pictures only, in parts of type \
                     input_text and input_image"
                )));
            }
        };
        Ok(InputText(text.unwrap_or_default().into()))
    }
}

/// A part of a text.
#[derive(Deserialize)]
struct InputPart {
    #[serde(rename = "type")]
    kind: Option<String>,
    text: Option<String>,
    refusal: Option<String>,
    /// The address of a picture, or an object with it as in chat completions.
    image_url: Option<Value>,
    detail: Option<Value>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(input: &Value) -> Result<Vec<Item>, ApiError> {
        let raw = to_raw_value(input).unwrap();
        Ok(read(Some(&raw))?.into_iter().map(|sent| sent.item).collect())
    }

    fn refused(input: &Value) -> String {
        let error = items(input).unwrap_err();
        let body = serde_json::to_value(error.body()).unwrap();
        assert_eq!(error.status(), 400);
        assert!(body["error"]["param"].as_str().unwrap().starts_with("input"), "{body}");
        error.message().to_owned()
    }

    fn user(text: &str) -> Item {
        Item::Message { role: Role::User, text: text.into() }
    }

    #[test]
    fn pictures_keep_their_places_in_the_store() {
        let picture = |url: &str, detail: &str| json!({"type": "input_image", "image_url": url, "detail": detail});
        let text = json!({"type": "input_text", "text": "a"});
        let content = json!([picture("data:b", "low"), text, picture("data:c", "auto")]);
        let sent = |item: &Value| SentItem::read(&to_raw_value(item).unwrap(), "input[0]").unwrap();
        let read = sent(&json!({"role": "user", "content": content}));
        assert_eq!(read.picture_bytes(), 12);
        let stored: Value = serde_json::from_str(read.stored_json("i").get()).unwrap();
        assert_eq!((&stored["content"], &stored["id"]), (&content, &json!("i")));
        assert_eq!(sent(&stored).item, read.item);
        let output = sent(&json!({"type": "function_call_output", "call_id": "c", "output": content}));
        let Item::Output { text, .. } = &output.item else { panic!("{output:?}") };
        assert_eq!((text.pictures.len(), text.pictures[0].low_detail), (2, true));
    }

    #[test]
    fn items_have_many_forms() {
        let call = |arguments: &str| Item::Call {
            id: "c".into(),
            namespace: None,
            name: "f".into(),
            arguments: arguments.into(),
        };
        let output = |text: &str| Item::Output { call_id: "c".into(), text: text.into() };
        let reasoning = |text: Option<&str>| Item::Reasoning(text.map(str::to_owned));
        for (item, expected) in [
            (json!({"role": "user", "content": "a"}), user("a")),
            (json!({"type": null, "role": "user", "content": null}), user("")),
            (json!({"role": "user", "content": {"type": "input_text", "text": "a"}}), user("a")),
            (
                json!({"role": "user", "content": [{"type": "input_text", "text": "a"}, {"text": "b"}, "c"]}),
                user("abc"),
            ),
            (
                json!({"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}),
                Item::Message { role: Role::Assistant, text: "no".into() },
            ),
            (json!({"type": "reasoning", "summary": null, "content": null}), reasoning(None)),
            (json!({"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}), reasoning(None)),
            (json!({"type": "reasoning", "encrypted_content": encoded_reasoning::encode("hm")}), reasoning(Some("hm"))),
            (json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}), reasoning(Some("hm"))),
            (
                json!({"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}),
                reasoning(Some("hm")),
            ),
            (
                json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{\"a\":1}"}),
                call("{\"a\":1}"),
            ),
            (json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": {"a": 1}}), call("{\"a\":1}")),
            (json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}), call("{}")),
            (json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": null}), call("{}")),
            (json!({"type": "function_call", "call_id": "c", "name": "f"}), call("{}")),
            (
                json!({"type": "custom_tool_call", "call_id": "c", "namespace": "n", "name": "f", "input": "x"}),
                Item::CustomCall { id: "c".into(), namespace: Some("n".into()), name: "f".into(), input: "x".into() },
            ),
            (json!({"type": "function_call_output", "call_id": "c", "output": "x"}), output("x")),
            (
                json!({"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]}),
                output("x"),
            ),
            (json!({"type": "item_reference", "id": "msg_1"}), Item::Reference("msg_1".into())),
            (json!({"id": "msg_1"}), Item::Reference("msg_1".into())),
            (
                json!({"type": "web_search_call", "id": "ws_1", "output": {"x": 1}, "content": 1}),
                Item::PassedOver("web_search_call".into()),
            ),
        ] {
            assert_eq!(items(&json!([item])).unwrap(), [expected], "{item}");
        }
        assert_eq!(items(&json!("a")).unwrap(), [user("a")]);
        assert_eq!(items(&json!({"role": "user", "content": "a"})).unwrap(), [user("a")]);
        assert_eq!(items(&Value::Null).unwrap(), []);
    }

    #[test]
    fn wrong_items_are_refused_with_their_path() {
        let picture = json!({"type": "input_image", "image_url": "data:image/png;base64,AAAA"});
        let message = refused(&json!(["x", {"role": "user", "content": [picture]}]));
        assert_eq!(message, "input[0] must be an item, which is an object");
        let message = refused(&json!([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]));
        assert!(message.starts_with("input[0]: an input_image needs an image_url"), "{message}");
        for wrong in [
            json!(1),
            json!([1]),
            json!([{}]),
            json!([{"role": "tool", "content": "x"}]),
            json!([{"role": "user", "content": 1}]),
            json!([{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]),
            json!([{"role": "user", "content": [{"type": "input_audio"}]}]),
            json!([{"type": "function_call", "name": "f"}]),
            json!([{"type": "function_call_output", "output": "x"}]),
            json!([{"type": "item_reference"}]),
            json!([{"type": "compaction_trigger"}]),
            json!([{"type": 1}]),
        ] {
            refused(&wrong);
        }
        assert!(refused(&json!(vec![json!({"role": "user"}); MAX_ITEMS + 1])).contains("at most 8192"));
    }

    #[test]
    fn items_are_stored_with_ids() {
        let kept = |item: Value| {
            let sent = SentItem::read(&to_raw_value(&item).unwrap(), "input").unwrap();
            serde_json::from_str::<Value>(sent.stored_json("x_1").get()).unwrap()
        };
        let part = json!({"type": "input_text", "text": "ab"});
        let message = json!({"id": "x_1", "type": "message", "role": "user", "status": "completed", "content": [part]});
        assert_eq!(kept(json!({"role": "user", "content": ["a", "b"]})), message);
        assert_eq!(kept(json!({"type": "teapot"})), json!({"id": "x_1", "type": "teapot"}));
        let own = json!({"id": "fc_1", "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"});
        assert_eq!(kept(own.clone()), own);
    }
}
