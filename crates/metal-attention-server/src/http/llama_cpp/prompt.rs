//! The field `prompt` of `/completion`: text and token ids mixed, one prompt or several.

use std::fmt;
use std::sync::Arc;

use metal_attention::tokenizer::EncodeOptions;
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::json;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{AnyOfBuilder, ArrayBuilder, ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use crate::http::ApiError;
use crate::http::limits::MAX_PROMPTS;
use crate::http::models::LoadedModel;

/// What llama.cpp's clients put in the place of a picture in a text.
pub const MEDIA_MARKER: &str = "<__media__>";

/// One prompt or several.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompts(Vec<MixedPrompt>);

/// A prompt of texts and token ids in sequence.
#[derive(Debug, Clone, Default, PartialEq)]
struct MixedPrompt(Vec<PromptPart>);

/// A part of a prompt.
#[derive(Debug, Clone, PartialEq)]
enum PromptPart {
    Text(String),
    Ids(Vec<u32>),
}

impl Prompts {
    /// Returns the token ids of each prompt. A prompt that starts with a text gets the model's special tokens for the
    /// start of a text. Fails for an empty prompt, unknown token ids, and texts that are too long to tokenise.
    pub fn encode(&self, model: &LoadedModel) -> Result<Vec<Arc<[u32]>>, ApiError> {
        self.0.iter().map(|prompt| prompt.encode(model)).collect()
    }
}

impl MixedPrompt {
    fn add(&mut self, item: TextOrId) {
        match (self.0.last_mut(), item) {
            (Some(PromptPart::Ids(ids)), TextOrId::Id(id)) => ids.push(id),
            (_, TextOrId::Id(id)) => self.0.push(PromptPart::Ids(vec![id])),
            (_, TextOrId::Text(text)) => self.0.push(PromptPart::Text(text)),
        }
    }

    /// Tokenises the prompt. Only its first part gets the special tokens for the start of a text.
    fn encode(&self, model: &LoadedModel) -> Result<Arc<[u32]>, ApiError> {
        let mut ids = Vec::new();
        for (i, piece) in self.0.iter().enumerate() {
            match piece {
                PromptPart::Text(text) => {
                    model.check_length(text, "prompt")?;
                    let options = EncodeOptions { add_special: i == 0, parse_special: true };
                    ids.extend(model.tokenizer.encode(text, options));
                }
                PromptPart::Ids(more) => ids.extend(more),
            }
        }
        if ids.is_empty() {
            return Err(ApiError::field("prompt", "prompt is empty: give at least one token"));
        }
        model.check_ids(&ids, "prompt")?;
        Ok(ids.into())
    }
}

/// A text or a token id of a prompt in the request.
enum TextOrId {
    Text(String),
    Id(u32),
}

/// An element of a list: a part of the only prompt, or one of several prompts.
enum ListElement {
    /// A text: a part, or a prompt.
    Text(String),
    /// A token id: a part.
    Id(u32),
    /// A list or an object: a prompt.
    Prompt(MixedPrompt),
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptsVisitor)
    }
}

struct PromptsVisitor;

impl<'de> Visitor<'de> for PromptsVisitor {
    type Value = Prompts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a list of token ids and strings, an object with prompt_string, or a list of these")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Prompts, E> {
        Ok(Prompts(vec![MixedPrompt(vec![PromptPart::Text(text.to_owned())])]))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Prompts, A::Error> {
        Ok(Prompts(vec![object(map)?]))
    }

    /// A list with a token id is one prompt; a list with a list or an object is several; a list of strings alone is
    /// several.
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompts, A::Error> {
        let (mut one, mut several, mut has_id) = (MixedPrompt::default(), Vec::new(), false);
        while let Some(element) = list.next_element()? {
            match element {
                ListElement::Id(id) => {
                    has_id = true;
                    one.add(TextOrId::Id(id));
                }
                ListElement::Text(text) if several.is_empty() => one.add(TextOrId::Text(text)),
                ListElement::Text(text) => several.push(MixedPrompt(vec![PromptPart::Text(text)])),
                ListElement::Prompt(prompt) => {
                    if !has_id {
                        several.extend(std::mem::take(&mut one.0).into_iter().map(|piece| MixedPrompt(vec![piece])));
                    }
                    several.push(prompt);
                }
            }
            if has_id && !several.is_empty() {
                return Err(A::Error::custom("a list has the parts of one prompt, or several prompts, and no mixture"));
            }
            if several.len() > MAX_PROMPTS || one.0.len() > MAX_PROMPTS {
                return Err(A::Error::custom(format!(
                    "more than {MAX_PROMPTS} texts, which is the most of one request"
                )));
            }
        }
        if has_id {
            return Ok(Prompts(vec![one]));
        }
        several.extend(one.0.into_iter().map(|piece| MixedPrompt(vec![piece])));
        if several.is_empty() {
            return Err(A::Error::custom("an empty list"));
        }
        Ok(Prompts(several))
    }
}

impl<'de> Deserialize<'de> for ListElement {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ListElementVisitor)
    }
}

struct ListElementVisitor;

impl<'de> Visitor<'de> for ListElementVisitor {
    type Value = ListElement;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token id, a string, a list of these, or an object with prompt_string")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<ListElement, E> {
        Ok(ListElement::Text(text.to_owned()))
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<ListElement, E> {
        Ok(ListElement::Id(token_id(id)?))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ListElement, A::Error> {
        Ok(ListElement::Prompt(object(map)?))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<ListElement, A::Error> {
        let mut prompt = MixedPrompt::default();
        while let Some(item) = list.next_element()? {
            prompt.add(item);
        }
        Ok(ListElement::Prompt(prompt))
    }
}

impl<'de> Deserialize<'de> for TextOrId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextOrIdVisitor)
    }
}

struct TextOrIdVisitor;

impl Visitor<'_> for TextOrIdVisitor {
    type Value = TextOrId;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token id or a string")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<TextOrId, E> {
        Ok(TextOrId::Text(text.to_owned()))
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<TextOrId, E> {
        Ok(TextOrId::Id(token_id(id)?))
    }
}

fn token_id<E: Error>(id: u64) -> Result<u32, E> {
    u32::try_from(id).map_err(|_| E::custom(format!("{id} is no token id")))
}

/// Reads the prompt in `{"prompt_string": ...}`. Fails if it has images.
fn object<'de, A: MapAccess<'de>>(mut map: A) -> Result<MixedPrompt, A::Error> {
    let mut prompt = None;
    while let Some(name) = map.next_key::<String>()? {
        match name.as_str() {
            "prompt_string" if prompt.is_some() => return Err(A::Error::duplicate_field("prompt_string")),
            "prompt_string" => prompt = Some(map.next_value::<String>()?),
            "multimodal_data" => {
                if map.next_value::<Option<Vec<IgnoredAny>>>()?.is_some_and(|data| !data.is_empty()) {
                    return Err(A::Error::custom(
                        "multimodal_data is not supported: send pictures to /v1/chat/completions",
                    ));
                }
            }
            _ => drop(map.next_value::<IgnoredAny>()?),
        }
    }
    let text = prompt.ok_or_else(|| A::Error::missing_field("prompt_string"))?;
    Ok(MixedPrompt(vec![PromptPart::Text(text)]))
}

impl PartialSchema for Prompts {
    fn schema() -> RefOr<Schema> {
        let string = || ObjectBuilder::new().schema_type(Type::String);
        let id = || ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(0)).maximum(Some(u32::MAX));
        let item = || AnyOfBuilder::new().item(string()).item(id());
        let object = ObjectBuilder::new().property("prompt_string", string()).required("prompt_string").build();
        let list = ArrayBuilder::new().items(item());
        let element = item().item(list).item(object.clone());
        let lists = ArrayBuilder::new().items(element).min_items(Some(1));
        let what = "What to continue: a text, a list of token ids and texts, an object with `prompt_string`, or a list of these.";
        let any = AnyOfBuilder::new().item(string()).item(object).item(lists).description(Some(what));
        any.examples([json!("Once upon a time")]).into()
    }
}

impl ToSchema for Prompts {}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Prompts, String> {
        serde_json::from_str(json).map_err(|e| e.to_string())
    }

    fn text(text: &str) -> PromptPart {
        PromptPart::Text(text.to_owned())
    }

    #[test]
    fn a_prompt_has_the_forms_of_llama_cpp() {
        let one = |pieces: Vec<PromptPart>| Ok(Prompts(vec![MixedPrompt(pieces)]));
        assert_eq!(read(r#""a\n""#), one(vec![text("a\n")]));
        assert_eq!(read("[1, 4294967295]"), one(vec![PromptPart::Ids(vec![1, u32::MAX])]));
        assert_eq!(
            read(r#"["a", 1, 2, "b", "c", 3]"#),
            one(vec![text("a"), PromptPart::Ids(vec![1, 2]), text("b"), text("c"), PromptPart::Ids(vec![3])])
        );
        let object = r#"{"prompt_string": "a", "multimodal_data": [], "x": [1]}"#;
        assert_eq!(read(object), one(vec![text("a")]));
        let several = |list: Vec<Vec<PromptPart>>| Ok(Prompts(list.into_iter().map(MixedPrompt).collect()));
        assert_eq!(read(r#"["a"]"#), several(vec![vec![text("a")]]));
        assert_eq!(read(r#"["a", ""]"#), several(vec![vec![text("a")], vec![text("")]]));
        assert_eq!(
            read(&format!(r#"["a", [1, "b"], {object}, "c"]"#)),
            several(vec![vec![text("a")], vec![PromptPart::Ids(vec![1]), text("b")], vec![text("a")], vec![text("c")]])
        );
        for wrong in ["1", "{}", "null", "[]", "[-1]", "[4294967296]", "[1.0]", "[null]", "[[[1]]]", "[{}]", "true"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        for mixture in ["[1, [1]]", "[[1], 1]", r#"[{"prompt_string": "a"}, "b", 1]"#] {
            assert!(read(mixture).unwrap_err().contains("no mixture"), "{mixture}");
        }
        let picture = r#"{"prompt_string": "a", "multimodal_data": ["eA=="]}"#;
        assert!(read(picture).unwrap_err().contains("/v1/chat/completions"));
    }

    #[test]
    fn too_many_prompts_are_not_read_to_their_end() {
        for item in ["[1]", r#""a""#] {
            let prompts = |n: usize| format!("[{}", vec![item; n].join(","));
            assert_eq!(read(&(prompts(MAX_PROMPTS) + "]")).unwrap().0.len(), MAX_PROMPTS);
            assert!(read(&prompts(MAX_PROMPTS + 2)).unwrap_err().contains("more than 256 texts"));
        }
    }
}
