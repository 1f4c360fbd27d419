//! The prompts of completions and embeddings: text or token ids, one or several.

use std::fmt;
use std::sync::Arc;

use metal_attention::tokenizer::EncodeOptions;
use serde::Serialize;
use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use utoipa::ToSchema;

use crate::http::ApiError;
use crate::http::limits::MAX_PROMPTS;
use crate::http::models::LoadedModel;

/// One text or several, each as a string or as token ids.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = Prompt)]
pub enum PromptInput {
    /// A text.
    Text(String),
    /// Token ids.
    Ids(Vec<u32>),
    /// Several texts.
    Texts(Vec<String>),
    /// Several lists of token ids.
    IdLists(Vec<Vec<u32>>),
}

impl PromptInput {
    /// Returns the token ids of each prompt. `param`: the field's name, for errors.
    pub fn encode(&self, model: &LoadedModel, param: &str) -> Result<Vec<Arc<[u32]>>, ApiError> {
        self.encode_with(model, param, EncodeOptions { add_special: true, parse_special: true })
    }

    /// Returns the token ids of each prompt, with `options` for texts. Fails for an empty prompt, unknown token ids,
    /// and texts that are too long to tokenise.
    pub fn encode_with(
        &self,
        model: &LoadedModel,
        param: &str,
        options: EncodeOptions,
    ) -> Result<Vec<Arc<[u32]>>, ApiError> {
        let encode = |text: &String| -> Result<Arc<[u32]>, ApiError> {
            model.check_length(text, param)?;
            Ok(model.tokenizer.encode(text, options).into())
        };
        let lists: Vec<Arc<[u32]>> = match self {
            Self::Text(text) => vec![encode(text)?],
            Self::Ids(ids) => vec![ids.as_slice().into()],
            Self::Texts(texts) => texts.iter().map(encode).collect::<Result<_, _>>()?,
            Self::IdLists(lists) => lists.iter().map(|ids| ids.as_slice().into()).collect(),
        };
        if lists.iter().any(|ids| ids.is_empty()) {
            return Err(ApiError::field(param, format!("{param} is empty: give at least one token")));
        }
        lists.iter().try_for_each(|ids| model.check_ids(ids, param))?;
        Ok(lists)
    }
}

/// Reads a prompt element by element, without an intermediate JSON value.
impl<'de> Deserialize<'de> for PromptInput {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptInputVisitor)
    }
}

struct PromptInputVisitor;

impl<'de> Visitor<'de> for PromptInputVisitor {
    type Value = PromptInput;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a list of strings, a list of token ids or a list of such lists")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<PromptInput, E> {
        Ok(PromptInput::Text(text.to_owned()))
    }

    fn visit_string<E: Error>(self, text: String) -> Result<PromptInput, E> {
        Ok(PromptInput::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<PromptInput, A::Error> {
        let mut prompt = match list.next_element()? {
            None => return Ok(PromptInput::Ids(Vec::new())),
            Some(PromptElement::Id(id)) => PromptInput::Ids(vec![id]),
            Some(PromptElement::Text(text)) => PromptInput::Texts(vec![text]),
            Some(PromptElement::Ids(ids)) => PromptInput::IdLists(vec![ids]),
        };
        while let Some(item) = list.next_element()? {
            let n_texts = match (&mut prompt, item) {
                (PromptInput::Ids(ids), PromptElement::Id(id)) => {
                    ids.push(id);
                    1
                }
                (PromptInput::Texts(texts), PromptElement::Text(text)) => {
                    texts.push(text);
                    texts.len()
                }
                (PromptInput::IdLists(lists), PromptElement::Ids(ids)) => {
                    lists.push(ids);
                    lists.len()
                }
                (PromptInput::Text(_) | PromptInput::Ids(_) | PromptInput::Texts(_) | PromptInput::IdLists(_), _) => {
                    return Err(Error::custom("a list has texts, token ids, or lists of these, and no mixture"));
                }
            };
            if n_texts > MAX_PROMPTS {
                return Err(Error::custom(format!("more than {MAX_PROMPTS} texts, which is the most of one request")));
            }
        }
        Ok(prompt)
    }
}

/// An element of a list of prompts, or of token ids.
enum PromptElement {
    Text(String),
    Id(u32),
    Ids(Vec<u32>),
}

impl<'de> Deserialize<'de> for PromptElement {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptElementVisitor)
    }
}

struct PromptElementVisitor;

impl<'de> Visitor<'de> for PromptElementVisitor {
    type Value = PromptElement;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a token id or a list of token ids")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<PromptElement, E> {
        Ok(PromptElement::Text(text.to_owned()))
    }

    fn visit_string<E: Error>(self, text: String) -> Result<PromptElement, E> {
        Ok(PromptElement::Text(text))
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<PromptElement, E> {
        let id = u32::try_from(id).map_err(|_| E::custom(format!("{id} is no token id")))?;
        Ok(PromptElement::Id(id))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<PromptElement, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = list.next_element()? {
            ids.push(id);
        }
        Ok(PromptElement::Ids(ids))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<PromptInput, String> {
        serde_json::from_str(json).map_err(|e| e.to_string())
    }

    #[test]
    fn prompts_have_four_forms() {
        assert_eq!(read(r#""a\n""#), Ok(PromptInput::Text("a\n".into())));
        assert_eq!(read("[1, 4294967295]"), Ok(PromptInput::Ids(vec![1, u32::MAX])));
        assert_eq!(read(r#"["a", ""]"#), Ok(PromptInput::Texts(vec!["a".into(), String::new()])));
        assert_eq!(read("[[1, 2], []]"), Ok(PromptInput::IdLists(vec![vec![1, 2], vec![]])));
        assert_eq!(read("[]"), Ok(PromptInput::Ids(vec![])));
        for wrong in ["1", "{}", "null", "[-1]", "[4294967296]", "[1.0]", "[null]", "[[[1]]]", r#"[["a"]]"#, "[[1.5]]"]
        {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        for mixture in [r#"[1, "a"]"#, "[[1], 1]", r#"["a", [1]]"#] {
            assert!(read(mixture).unwrap_err().contains("no mixture"), "{mixture}");
        }
    }

    #[test]
    fn too_many_texts_are_not_read_to_their_end() {
        for item in ["[1]", r#""a""#] {
            let texts = |n: usize| format!("[{}", vec![item; n].join(","));
            assert!(read(&(texts(MAX_PROMPTS) + "]")).is_ok());
            let error = read(&texts(MAX_PROMPTS + 2)).unwrap_err();
            assert!(error.contains("more than 256 texts"), "{error}");
        }
    }
}
