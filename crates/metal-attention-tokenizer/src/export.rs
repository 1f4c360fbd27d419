//! Export of a vocabulary as the tokenizer files of a Hugging Face repository, which the libraries `tokenizers` and
//! `transformers` read.
//!
//! Each algorithm has a file under `export/` that derives the stages of `tokenizer.json` from the vocabulary.
//! `special_tokens.rs` and `config.rs` write what all algorithms have in common.

mod byte_pair;
mod config;
mod expression;
mod sentencepiece;
mod special_tokens;
mod unigram;
mod wordpiece;

use crate::TokenId;
use crate::error::TokenizerError;
use crate::tokenizer::{Algorithm, Tokenizer};
use crate::vocabulary::{ESCAPED_BLANK, UNUSED, Vocabulary};
use metal_attention_gguf::Metadata;
use serde_json::{Map, Value, json};

/// A file of an exported tokenizer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportedFile {
    /// The name of the file, such as `tokenizer.json`.
    pub name: &'static str,
    /// The content of the file.
    pub text: String,
}

/// The stages of `tokenizer.json` that encode and decode the text between special tokens, as JSON.
struct TokenizerStages {
    /// The stage that normalises the text.
    normalizer: Value,
    /// The stage that splits the text into pieces.
    pre_tokenizer: Value,
    /// The stage that turns pieces into tokens, with the vocabulary.
    model: Value,
    /// The stage that turns tokens back into text.
    decoder: Value,
}

impl Tokenizer {
    /// The files from which other programs build this tokenizer: `tokenizer.json`, `tokenizer_config.json`,
    /// `config.json`, `generation_config.json` and, if the GGUF file has a chat template, `chat_template.jinja`.
    ///
    /// `metadata` must be the metadata that the tokenizer was built from. The exported tokenizer gives the same ids;
    /// docs/tokenizers.md lists the exceptions. Vocabularies of the model `rwkv` cannot be exported: `tokenizer.json`
    /// has no such algorithm.
    pub fn export(&self, metadata: &Metadata) -> Result<Vec<ExportedFile>, TokenizerError> {
        let stages = match &self.algorithm {
            Algorithm::Spm(_) => sentencepiece::stages(self)?,
            Algorithm::Bpe(bpe) => byte_pair::stages(self, bpe, metadata)?,
            Algorithm::Unigram(unigram) => unigram::stages(self, unigram, metadata)?,
            Algorithm::WordPiece(wordpiece) => wordpiece::stages(self, wordpiece),
            Algorithm::Rwkv(_) => return Err(not_exportable(self, "it takes the longest token from place to place")),
        };
        let tokenizer = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": special_tokens::added_tokens(&self.vocabulary),
            "normalizer": stages.normalizer,
            "pre_tokenizer": stages.pre_tokenizer,
            "post_processor": special_tokens::post_processor(self),
            "decoder": stages.decoder,
            "model": stages.model,
        });
        let mut files = vec![ExportedFile { name: "tokenizer.json", text: tokenizer.to_string() }];
        files.extend(config::files(self, metadata)?);
        Ok(files)
    }
}

fn not_exportable(tokenizer: &Tokenizer, why: impl Into<String>) -> TokenizerError {
    TokenizerError::NotExportable { model: tokenizer.model().to_owned(), why: why.into() }
}

/// The vocabulary of a byte-pair model, from spelling to id. Of equal spellings only the token that a lookup finds is
/// included. Unused tokens for which `part` is false (not part of a merge) are left out, because they decode to
/// nothing.
fn vocabulary_map(vocabulary: &Vocabulary, part: impl Fn(TokenId) -> bool) -> Map<String, Value> {
    let used = |id: TokenId| {
        let alone = vocabulary.text(id).chars().count() == 1;
        alone || !vocabulary.is(id, UNUSED) || vocabulary.is_special(id) || part(id)
    };
    let found = |&id: &TokenId| vocabulary.find(vocabulary.bytes(id)) == Some(id);
    let ids = vocabulary.ids().filter(found).filter(|&id| used(id));
    ids.map(|id| (vocabulary.text(id).to_owned(), id.into())).collect()
}

/// The `model` stage of a byte-pair model with `merges`, in order of rank. `options` overrides the defaults.
fn byte_pair_model<const N: usize>(
    vocabulary: Map<String, Value>,
    merges: &[(&str, &str)],
    options: [(&str, Value); N],
) -> Value {
    let mut model = Map::new();
    model.insert("type".into(), "BPE".into());
    for key in ["dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"] {
        model.insert(key.into(), Value::Null);
    }
    for key in ["fuse_unk", "byte_fallback", "ignore_merges"] {
        model.insert(key.into(), false.into());
    }
    model.extend(options.map(|(key, value)| (key.to_owned(), value)));
    model.insert("vocab".into(), vocabulary.into());
    model.insert("merges".into(), json!(merges));
    model.into()
}

/// Whether the vocabulary has byte-fallback tokens, such as `<0x0A>`.
fn has_bytes(vocabulary: &Vocabulary) -> bool {
    (0..=255).any(|byte| vocabulary.find_byte(byte).is_some())
}

/// The normalizer that writes blanks as "▁".
fn escape_blanks() -> Value {
    json!({"type": "Replace", "pattern": {"String": " "}, "content": ESCAPED_BLANK})
}

/// The decoder that turns "▁" into blanks and `<0xXX>` into bytes, and removes the blank that the encoder adds.
fn unescape_blanks(tokenizer: &Tokenizer) -> Value {
    let mut steps = vec![
        json!({"type": "Replace", "pattern": {"String": ESCAPED_BLANK}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if tokenizer.starts_with_blank() {
        steps.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    json!({"type": "Sequence", "decoders": steps})
}

/// A JSON value that runs `steps` in order; `key` is the key of such a list ("normalizers" or "pretokenizers"). Null
/// for no steps.
fn sequence(key: &str, mut steps: Vec<Value>) -> Value {
    match steps.len() {
        0 => Value::Null,
        1 => steps.swap_remove(0),
        2.. => json!({"type": "Sequence", key: steps}),
    }
}
