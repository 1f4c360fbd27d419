//! Prompts: text or token ids, one or several.

use metal_attention::tokenizer::EncodeOptions;
use serde::Deserialize;
use utoipa::ToSchema;

use super::ApiError;
use super::app::Loaded;

/// Most texts in one request.
const MAX_PROMPTS: usize = 256;

/// One text or several, each as a string or as token ids.
#[derive(Debug, Clone, PartialEq, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a string, a list of strings, a list of token ids or a list of such lists")]
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
    pub fn encode(&self, model: &Loaded, param: &str) -> Result<Vec<Vec<u32>>, ApiError> {
        let options = EncodeOptions { add_special: true, parse_special: true };
        let encode = |text: &String| model.tokenizer.encode(text, options);
        let lists = match self {
            Self::Text(text) => vec![encode(text)],
            Self::Ids(ids) => vec![ids.clone()],
            Self::Texts(texts) => texts.iter().map(encode).collect(),
            Self::IdLists(lists) => lists.clone(),
        };
        if lists.is_empty() || lists.len() > MAX_PROMPTS {
            let n = lists.len();
            return Err(ApiError::field(param, format!("{param} has {n} texts; 1 to {MAX_PROMPTS} are allowed")));
        }
        if lists.iter().any(Vec::is_empty) {
            return Err(ApiError::field(param, format!("{param} is empty: give at least one token")));
        }
        let n_vocab = model.n_vocab();
        if let Some(id) = lists.iter().flatten().find(|&&id| id as usize >= n_vocab) {
            let message = format!("{param}: the model has no token {id}, only 0 to {}", n_vocab - 1);
            return Err(ApiError::field(param, message));
        }
        Ok(lists)
    }
}
