//! A vocabulary as other programs read it: the files of a Hugging Face repository, for the libraries `tokenizers` and
//! `transformers` and all that is built on them.
//!
//! Each algorithm has its file under `export/`, which says how the parts of `tokenizer.json` follow from the vocabulary;
//! `special_tokens.rs` and `config.rs` have what is common to all.

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

/// A file of a tokenizer's folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportedFile {
    /// Its name, such as `tokenizer.json`.
    pub name: &'static str,
    /// What it holds.
    pub text: String,
}

/// What `tokenizer.json` says about the text between special tokens.
struct TokenizerStages {
    /// What is done to the text first.
    normalizer: Value,
    /// How it is split into pieces.
    pre_tokenizer: Value,
    /// How pieces become tokens, with the vocabulary.
    model: Value,
    /// How tokens become text again.
    decoder: Value,
}

impl Tokenizer {
    /// The files from which other programs build this tokenizer: `tokenizer.json`, `tokenizer_config.json`, `config.json`,
    /// `generation_config.json` and, where the file has a chat template, `chat_template.jinja`.
    ///
    /// `metadata` is that which the tokenizer was built from. The ids are the same; docs/tokenizers.md says where they
    /// cannot be. Vocabularies of the kind `rwkv`, for whose algorithm `tokenizer.json` has no word, are an error.
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

/// The vocabulary of a byte-pair model, from spelling to id. Of equal spellings the one that is found counts, and tokens
/// without use that are no `part` of a merge are left out: they write nothing, as ids that are not there.
fn vocabulary_map(vocabulary: &Vocabulary, part: impl Fn(TokenId) -> bool) -> Map<String, Value> {
    let used = |id: TokenId| {
        let alone = vocabulary.text(id).chars().count() == 1;
        alone || !vocabulary.is(id, UNUSED) || vocabulary.is_special(id) || part(id)
    };
    let found = |&id: &TokenId| vocabulary.find(vocabulary.bytes(id)) == Some(id);
    let ids = vocabulary.ids().filter(found).filter(|&id| used(id));
    ids.map(|id| (vocabulary.text(id).to_owned(), id.into())).collect()
}

/// A byte-pair model that makes `merges`, best first. `options` are those that are not the usual ones.
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

/// Whether some token stands for a byte that no other token covers, as `<0x0A>`.
fn has_bytes(vocabulary: &Vocabulary) -> bool {
    (0..=255).any(|byte| vocabulary.find_byte(byte).is_some())
}

/// The normalizer that writes blanks as "▁".
fn escape_blanks() -> Value {
    json!({"type": "Replace", "pattern": {"String": " "}, "content": ESCAPED_BLANK})
}

/// The decoder that turns "▁" into blanks and `<0xXX>` into bytes, and drops the blank that the encoder adds.
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

/// Normalizers or pre-tokenizers one after the other, under the name that such a list has.
fn sequence(of: &str, mut steps: Vec<Value>) -> Value {
    match steps.len() {
        0 => Value::Null,
        1 => steps.swap_remove(0),
        2.. => json!({"type": "Sequence", of: steps}),
    }
}
