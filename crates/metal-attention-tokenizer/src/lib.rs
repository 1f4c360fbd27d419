#![doc = include_str!("../README.md")]

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
