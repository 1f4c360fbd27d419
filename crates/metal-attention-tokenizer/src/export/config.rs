//! The configuration files beside `tokenizer.json`. `transformers` and servers read them before they load weights.

use super::{ExportedFile, special_tokens};
use crate::TokenId;
use crate::error::TokenizerError;
use crate::tokenizer::Tokenizer;
use metal_attention_gguf::Metadata;
use serde_json::{Map, Value, json};

/// The metadata key of the chat template.
const TEMPLATE: &str = "tokenizer.chat_template";
/// The name of a template that is not for conversations: it renders a query and a document.
const NO_CHAT: &str = "rerank";

pub(super) fn files(tokenizer: &Tokenizer, metadata: &Metadata) -> Result<Vec<ExportedFile>, TokenizerError> {
    let mut files = vec![
        file("tokenizer_config.json", tokenizer_config(tokenizer, metadata)?),
        file("config.json", config(tokenizer, metadata)?),
        file("generation_config.json", generation_config(tokenizer, metadata)?),
    ];
    if let Some(template) = metadata.str(TEMPLATE)? {
        files.push(ExportedFile { name: "chat_template.jinja", text: template.to_owned() });
    }
    Ok(files)
}

/// A JSON file with the fields that are not null.
fn file(name: &'static str, fields: Vec<(&str, Value)>) -> ExportedFile {
    let given = fields.into_iter().filter(|(_, value)| !value.is_null());
    let object: Map<String, Value> = given.map(|(key, value)| (key.to_owned(), value)).collect();
    ExportedFile { name, text: format!("{:#}\n", Value::Object(object)) }
}

fn tokenizer_config<'k>(tokenizer: &Tokenizer, metadata: &Metadata) -> Result<Vec<(&'k str, Value)>, TokenizerError> {
    let tokens = ConfigTokens::read(tokenizer, metadata)?;
    let text = |id: Option<TokenId>| id.and_then(|id| tokenizer.token_text(id));
    let bert = tokenizer.model() == "bert";
    Ok(vec![
        ("tokenizer_class", "PreTrainedTokenizerFast".into()),
        ("added_tokens_decoder", special_tokens::added_tokens_decoder(&tokenizer.vocabulary).into()),
        ("add_bos_token", tokenizer.adds_bos().into()),
        ("add_eos_token", tokenizer.last().is_some().into()),
        ("bos_token", text(tokens.bos.filter(|_| !bert)).into()),
        ("cls_token", text(tokens.bos.filter(|_| bert)).into()),
        ("eos_token", text(tokens.eos).into()),
        ("unk_token", text(tokenizer.unknown()).into()),
        ("sep_token", text(tokenizer.separator()).into()),
        ("pad_token", text(tokens.padding).into()),
        ("mask_token", text(tokens.mask).into()),
        ("clean_up_tokenization_spaces", false.into()),
        ("model_max_length", size(metadata, "context_length")?),
        ("chat_template", chat_templates(metadata)?),
    ])
}

/// The chat template; a list of named templates if the file has several; null if it has none.
fn chat_templates(metadata: &Metadata) -> Result<Value, TokenizerError> {
    let default = metadata.str(TEMPLATE)?;
    let mut named = Vec::new();
    for (key, _) in metadata.iter() {
        let name = key.strip_prefix(TEMPLATE).and_then(|name| name.strip_prefix('.'));
        if let Some(name) = name.filter(|&name| name != NO_CHAT) {
            named.push(json!({"name": name, "template": metadata.str(key)?}));
        }
    }
    if named.is_empty() {
        return Ok(default.into());
    }
    let default = default.map(|template| json!({"name": "default", "template": template}));
    Ok(default.into_iter().chain(named).collect())
}

/// The fields of `config.json`. `model_type` is the architecture's name in GGUF, which is usually the same elsewhere;
/// no weights are loaded by it.
fn config<'k>(tokenizer: &Tokenizer, metadata: &Metadata) -> Result<Vec<(&'k str, Value)>, TokenizerError> {
    let tokens = ConfigTokens::read(tokenizer, metadata)?;
    let architecture = metadata.str("general.architecture")?;
    let capital = |word: &str| {
        let (first, rest) = word.split_at(word.chars().next().map_or(0, char::len_utf8));
        first.to_uppercase() + rest
    };
    let class = |name: &str| json!([name.split(['-', '_']).map(capital).collect::<String>() + "ForCausalLM"]);
    Ok(vec![
        ("architectures", architecture.map(class).into()),
        ("model_type", architecture.into()),
        ("vocab_size", tokenizer.n_vocab().into()),
        ("max_position_embeddings", size(metadata, "context_length")?),
        ("hidden_size", size(metadata, "embedding_length")?),
        ("intermediate_size", size(metadata, "feed_forward_length")?),
        ("num_hidden_layers", size(metadata, "block_count")?),
        ("num_attention_heads", size(metadata, "attention.head_count")?),
        ("num_key_value_heads", size(metadata, "attention.head_count_kv")?),
        ("bos_token_id", tokens.bos.into()),
        ("eos_token_id", tokens.eos.into()),
        ("pad_token_id", tokens.padding.into()),
    ])
}

fn generation_config<'k>(tokenizer: &Tokenizer, metadata: &Metadata) -> Result<Vec<(&'k str, Value)>, TokenizerError> {
    let tokens = ConfigTokens::read(tokenizer, metadata)?;
    let ends = tokenizer.end_of_generation().iter().copied();
    let ends: Vec<TokenId> = ends.filter(|&id| tokens.eos == Some(id) || tokenizer.eos() != Some(id)).collect();
    Ok(vec![
        ("bos_token_id", tokens.bos.into()),
        ("eos_token_id", if ends.is_empty() { Value::Null } else { ends.into() }),
        ("pad_token_id", tokens.padding.into()),
    ])
}

/// A hyperparameter of the model; null if the file lacks it or has one value per layer.
fn size(metadata: &Metadata, name: &str) -> Result<Value, TokenizerError> {
    let Some(architecture) = metadata.str("general.architecture")? else { return Ok(Value::Null) };
    Ok(metadata.usize(&format!("{architecture}.{name}")).ok().flatten().into())
}

/// The tokens with a role, as the configuration files name them.
struct ConfigTokens {
    bos: Option<TokenId>,
    eos: Option<TokenId>,
    padding: Option<TokenId>,
    mask: Option<TokenId>,
}

impl ConfigTokens {
    fn read(tokenizer: &Tokenizer, metadata: &Metadata) -> Result<Self, TokenizerError> {
        let vocabulary = &tokenizer.vocabulary;
        let role = |key| vocabulary.read_role(metadata, key);
        // A default id that the file does not confirm may be an ordinary token, so it is left out.
        let meant =
            |id: Option<TokenId>, key: &str| id.filter(|&id| vocabulary.is_special(id) || metadata.get(key).is_some());
        Ok(Self {
            bos: meant(tokenizer.bos(), "tokenizer.ggml.bos_token_id"),
            eos: meant(tokenizer.eos(), "tokenizer.ggml.eos_token_id"),
            padding: role("tokenizer.ggml.padding_token_id")?,
            mask: role("tokenizer.ggml.mask_token_id")?,
        })
    }
}
