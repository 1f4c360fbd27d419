//! Encodes text to token ids and decodes ids to text, from GGUF metadata alone.
//!
//! A [`Tokenizer`] is built from a file's `tokenizer.ggml.*` keys. It encodes and decodes as llama.cpp does, by the
//! algorithm that `tokenizer.ggml.model` names:
//!
//! - `llama`: SentencePiece byte-pair encoding with scores and byte fallback,
//! - `gpt2` and `gemma4`: byte-pair encoding with ranked merges, after one of many pre-tokenizers,
//! - `whitespace`: the same with words separated by white space,
//! - `t5`: SentencePiece unigram,
//! - `bert`: WordPiece,
//! - `rwkv`: greedy, the longest matching token at each position.
//!
//! ```
//! use metal_attention_gguf::{Metadata, StringArray};
//! use metal_attention_tokenizer::{EncodeOptions, Tokenizer, TokenizerOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut metadata = Metadata::new();
//! metadata.set("tokenizer.ggml.model", "gpt2");
//! metadata.set("tokenizer.ggml.pre", "gpt-2");
//! metadata.set("tokenizer.ggml.tokens", ["l", "o", "w", "Ġ", "lo", "low"].into_iter().collect::<StringArray>());
//! metadata.set("tokenizer.ggml.merges", ["l o", "lo w"].into_iter().collect::<StringArray>());
//!
//! let tokenizer = Tokenizer::from_metadata(&metadata, &TokenizerOptions::default())?;
//! let ids = tokenizer.encode("low lo", EncodeOptions::default());
//! assert_eq!(ids, [5, 3, 4]);
//! assert_eq!(tokenizer.decode(&ids, false), "low lo");
//! # Ok(())
//! # }
//! ```
//!
//! The path of a text: `tokenizer.rs` splits special tokens off (`special.rs`) and passes the text between them to the
//! algorithm: `spm.rs`, `bpe.rs`, `unigram.rs`, `wordpiece.rs` or `rwkv.rs`. `bpe.rs` first splits its text into
//! pieces by a pre-tokenizer (`pre.rs`), a list of rules (`rules.rs`) over character classes (`classes.rs`).
//! `decode.rs` decodes. [`Tokenizer::export`] (`export.rs`) writes the vocabulary in the format of Hugging Face's
//! `tokenizers`.
//!
//! Terms of this crate: a token's spelling is its string in `tokenizer.ggml.tokens`; its piece is the bytes that it
//! decodes to. The blank is the character U+0020, which many vocabularies spell "▁" (U+2581). A control token is one
//! that steers the model (BOS, ends of turns) and decodes to nothing.

mod bpe;
mod cache;
mod charsmap;
mod classes;
mod decode;
mod error;
mod export;
mod merge;
mod pre;
mod rules;
mod rwkv;
mod special;
mod spm;
#[cfg(test)]
mod steps;
mod strings;
mod tokenizer;
mod trie;
mod unigram;
mod vocabulary;
mod wordpiece;

pub use decode::StreamDecoder;
pub use error::TokenizerError;
pub use export::ExportedFile;
pub use tokenizer::{EncodeOptions, Tokenizer, TokenizerOptions};
pub use vocabulary::FillInTheMiddle;

/// The index of a token in the vocabulary.
pub type TokenId = u32;

/// The names of all pre-tokenizers: the values that `tokenizer.ggml.pre` and [`TokenizerOptions::pre`] may have.
pub fn pre_tokenizers() -> impl Iterator<Item = &'static str> {
    pre::names()
}
