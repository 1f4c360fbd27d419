//! Prompts: text or token ids, one or several.

use std::fmt;
use std::sync::Arc;

use metal_attention::tokenizer::EncodeOptions;
use serde::Serialize;
use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use utoipa::ToSchema;

use crate::http::ApiError;
use crate::http::limits::MAX_PROMPTS;
use crate::http::models::Loaded;

/// One text or several, each as a string or as token ids.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Prompt {
    /// A text.
    Text(String),
    /// Token ids.
    Ids(Vec<u32>),
    /// Several texts.
    Texts(Vec<String>),
    /// Several lists of token ids.
    IdLists(Vec<Vec<u32>>),
}

impl Prompt {
    /// The token ids of each text. `param` is the field's name, for errors.
    pub fn encode(&self, model: &Loaded, param: &str) -> Result<Vec<Arc<[u32]>>, ApiError> {
        self.encode_with(model, param, EncodeOptions { add_special: true, parse_special: true })
    }

    /// [`encode`](Self::encode) with `options` for texts.
    pub fn encode_with(
        &self,
        model: &Loaded,
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

/// Reads a prompt piece by piece: nothing is kept but what it becomes.
impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptVisitor)
    }
}

struct PromptVisitor;

impl<'de> Visitor<'de> for PromptVisitor {
    type Value = Prompt;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a list of strings, a list of token ids or a list of such lists")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Prompt, E> {
        Ok(Prompt::Text(text.to_owned()))
    }

    fn visit_string<E: Error>(self, text: String) -> Result<Prompt, E> {
        Ok(Prompt::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompt, A::Error> {
        let mut prompt = match list.next_element()? {
            None => return Ok(Prompt::Ids(Vec::new())),
            Some(Item::Id(id)) => Prompt::Ids(vec![id]),
            Some(Item::Text(text)) => Prompt::Texts(vec![text]),
            Some(Item::Ids(ids)) => Prompt::IdLists(vec![ids]),
        };
        while let Some(item) = list.next_element()? {
            let n_texts = match (&mut prompt, item) {
                (Prompt::Ids(ids), Item::Id(id)) => {
                    ids.push(id);
                    1
                }
                (Prompt::Texts(texts), Item::Text(text)) => {
                    texts.push(text);
                    texts.len()
                }
                (Prompt::IdLists(lists), Item::Ids(ids)) => {
                    lists.push(ids);
                    lists.len()
                }
                (Prompt::Text(_) | Prompt::Ids(_) | Prompt::Texts(_) | Prompt::IdLists(_), _) => {
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

/// An item of a list of prompts or of token ids.
enum Item {
    Text(String),
    Id(u32),
    Ids(Vec<u32>),
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ItemVisitor)
    }
}

struct ItemVisitor;

impl<'de> Visitor<'de> for ItemVisitor {
    type Value = Item;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a token id or a list of token ids")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Item, E> {
        Ok(Item::Text(text.to_owned()))
    }

    fn visit_string<E: Error>(self, text: String) -> Result<Item, E> {
        Ok(Item::Text(text))
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<Item, E> {
        let id = u32::try_from(id).map_err(|_| E::custom(format!("{id} is no token id")))?;
        Ok(Item::Id(id))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Item, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = list.next_element()? {
            ids.push(id);
        }
        Ok(Item::Ids(ids))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Prompt, String> {
        serde_json::from_str(json).map_err(|e| e.to_string())
    }

    #[test]
    fn prompts_have_four_forms() {
        assert_eq!(read(r#""a\n""#), Ok(Prompt::Text("a\n".into())));
        assert_eq!(read("[1, 4294967295]"), Ok(Prompt::Ids(vec![1, u32::MAX])));
        assert_eq!(read(r#"["a", ""]"#), Ok(Prompt::Texts(vec!["a".into(), String::new()])));
        assert_eq!(read("[[1, 2], []]"), Ok(Prompt::IdLists(vec![vec![1, 2], vec![]])));
        assert_eq!(read("[]"), Ok(Prompt::Ids(vec![])));
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
