//! Text to token ids and back, from GGUF metadata alone.
//!
//! A [`Tokenizer`] is built from a file's `tokenizer.ggml.*` keys and encodes and decodes as llama.cpp does:
//!
//! - `llama`: SentencePiece byte-pair encoding with scores and byte fallback,
//! - `gpt2` and `gemma4`: byte-pair encoding with ranked merges after one of many pre-tokenizers,
//! - `t5`: SentencePiece unigram,
//! - `bert`: WordPiece,
//! - `rwkv`: the longest token, from place to place.
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
//! Where things are: [`Tokenizer`] in `tokenizer.rs` cuts special tokens out (`special.rs`) and hands the
//! text between them to `spm.rs`, `bpe.rs`, `unigram.rs`, `wordpiece.rs` or `rwkv.rs`. The pre-tokenizers are in `pre.rs`,
//! made of the rules in `rules.rs` over the character classes in `classes.rs`. [`Tokenizer::export`] writes a vocabulary
//! as other programs read it.

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

/// A token's number in the vocabulary.
pub type TokenId = u32;

/// The names of all pre-tokenizers, as `tokenizer.ggml.pre` and [`TokenizerOptions::pre`] take them.
pub fn pre_tokenizers() -> impl Iterator<Item = &'static str> {
    pre::names()
}
