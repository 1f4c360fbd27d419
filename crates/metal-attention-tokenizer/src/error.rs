//! The errors of building and exporting a tokenizer.

use metal_attention_gguf::GgufError;

/// The reason why a [`Tokenizer`](crate::Tokenizer) cannot be built from a file's metadata, or cannot be exported.
///
/// Encoding and decoding never fail.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A required metadata key is missing.
    #[error("the file has no `{key}`, so it holds no usable vocabulary")]
    MissingKey {
        /// The metadata key.
        key: &'static str,
    },
    /// A metadata key has a value of the wrong type.
    #[error("the vocabulary's metadata cannot be read")]
    Metadata(#[from] GgufError),
    /// `tokenizer.ggml.model` names an algorithm that is not implemented.
    #[error("the tokenizer model `{model}` is not supported; supported are {}", crate::tokenizer::MODELS.join(", "))]
    UnknownModel {
        /// The value of `tokenizer.ggml.model`.
        model: String,
    },
    /// `tokenizer.ggml.pre`, or the option that replaces it, names no known pre-tokenizer.
    #[error(
        "the pre-tokenizer `{pre}` is unknown: text would be split in the wrong places. \
         Name the right one with the option `pre`. Known are: {}",
        crate::pre::names().collect::<Vec<_>>().join(", ")
    )]
    UnknownPre {
        /// The name of the pre-tokenizer, from the file or the option.
        pre: String,
    },
    /// `tokenizer.ggml.tokens` is an empty list.
    #[error("`tokenizer.ggml.tokens` is empty")]
    EmptyVocabulary,
    /// A list with one entry per token is shorter than the list of tokens.
    #[error("`{key}` has {found} entries for {tokens} tokens")]
    ShortList {
        /// The metadata key.
        key: &'static str,
        /// The length of the list.
        found: usize,
        /// The number of tokens.
        tokens: usize,
    },
    /// A token is so long that finding it in a text would take too long.
    #[error("token {id} is {bytes} bytes long; at most {limit} are supported")]
    TokenTooLong {
        /// The id of the token.
        id: crate::TokenId,
        /// The token's length in bytes.
        bytes: usize,
        /// The maximum length in bytes.
        limit: usize,
    },
    /// The tokens or merges of the file are larger in total than 32-bit offsets, or the time to search for them,
    /// allow.
    #[error("the vocabulary's {what} take {bytes} bytes; at most {limit} are supported")]
    TooLarge {
        /// "tokens" or "merges".
        what: &'static str,
        /// The total size in bytes.
        bytes: usize,
        /// The maximum size in bytes.
        limit: usize,
    },
    /// The vocabulary cannot be written as a `tokenizer.json` that gives the same ids.
    #[error("the vocabulary, of the kind `{model}`, cannot be exported: {why}")]
    NotExportable {
        /// The value of `tokenizer.ggml.model`.
        model: String,
        /// The feature of the vocabulary that `tokenizer.json` cannot express.
        why: String,
    },
    /// `tokenizer.ggml.precompiled_charsmap` is damaged.
    #[error("`tokenizer.ggml.precompiled_charsmap` is damaged: {why}")]
    CharsMap {
        /// The defect.
        why: &'static str,
    },
}
