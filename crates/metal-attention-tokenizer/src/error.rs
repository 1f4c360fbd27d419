//! Why a tokenizer cannot be built.

use metal_attention_gguf::GgufError;

/// Why a [`Tokenizer`](crate::Tokenizer) cannot be built from a file's metadata.
///
/// Encoding and decoding themselves never fail.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A key that the vocabulary cannot do without is absent.
    #[error("the file has no `{key}`, so it holds no usable vocabulary")]
    MissingKey {
        /// The metadata key.
        key: &'static str,
    },
    /// A key is there but of another type.
    #[error("the vocabulary's metadata cannot be read")]
    Metadata(#[from] GgufError),
    /// `tokenizer.ggml.model` names an algorithm that is not implemented.
    #[error("the tokenizer model `{model}` is not supported; supported are {}", crate::tokenizer::MODELS.join(", "))]
    UnknownModel {
        /// What the file says.
        model: String,
    },
    /// `tokenizer.ggml.pre`, or the option that replaces it, names no known pre-tokenizer.
    #[error(
        "the pre-tokenizer `{pre}` is unknown: text would be split in the wrong places. \
         Name the right one with the option `pre`. Known are: {}",
        crate::pre::names().collect::<Vec<_>>().join(", ")
    )]
    UnknownPre {
        /// What the file or the option says.
        pre: String,
    },
    /// `tokenizer.ggml.tokens` is an empty list.
    #[error("`tokenizer.ggml.tokens` is empty")]
    EmptyVocabulary,
    /// A per-token list is shorter than the list of tokens.
    #[error("`{key}` has {found} entries for {tokens} tokens")]
    ShortList {
        /// The metadata key.
        key: &'static str,
        /// Its length.
        found: usize,
        /// The number of tokens.
        tokens: usize,
    },
    /// A token so long that text could not be searched for it in reasonable time.
    #[error("token {id} is {bytes} bytes long; at most {limit} are supported")]
    TokenTooLong {
        /// The token.
        id: crate::TokenId,
        /// Its length in bytes.
        bytes: usize,
        /// The most that is supported.
        limit: usize,
    },
    /// More tokens or merges than 32-bit offsets address, or than text is searched for.
    #[error("the vocabulary's {what} take {bytes} bytes; at most {limit} are supported")]
    TooLarge {
        /// "tokens" or "merges".
        what: &'static str,
        /// Their size in bytes.
        bytes: usize,
        /// The most that is supported.
        limit: usize,
    },
    /// The vocabulary cannot be written as a `tokenizer.json` that gives the same ids.
    #[error("the vocabulary, of the kind `{model}`, cannot be exported: {why}")]
    NotExportable {
        /// What the file says in `tokenizer.ggml.model`.
        model: String,
        /// What `tokenizer.json` has no word for.
        why: String,
    },
    /// `tokenizer.ggml.precompiled_charsmap` is damaged.
    #[error("`tokenizer.ggml.precompiled_charsmap` is damaged: {why}")]
    CharsMap {
        /// What was wrong with it.
        why: &'static str,
    },
}
