//! Export of SentencePiece's unigram model. Scores are copied from the GGUF file; normalizers add and remove blanks.

use super::{TokenizerStages, sequence, unescape_blanks};
use crate::charsmap::CharsMap;
use crate::error::TokenizerError;
use crate::tokenizer::Tokenizer;
use crate::unigram::Unigram;
use crate::vocabulary::{ESCAPED_BLANK, NORMAL, UNUSED, USER_DEFINED, Vocabulary};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use metal_attention_gguf::Metadata;
use serde_json::{Value, json};

pub(super) fn stages(
    tokenizer: &Tokenizer,
    unigram: &Unigram,
    metadata: &Metadata,
) -> Result<TokenizerStages, TokenizerError> {
    let vocabulary = &tokenizer.vocabulary;
    let mut normalizers = Vec::new();
    if let Some(map) = CharsMap::bytes(metadata)? {
        normalizers.push(json!({"type": "Precompiled", "precompiled_charsmap": STANDARD.encode(map)}));
    }
    let replace =
        |expression: &str, by: &str| json!({"type": "Replace", "pattern": {"Regex": expression}, "content": by});
    if unigram.remove_extra_whitespaces {
        normalizers.push(replace(r"\A +| +\z", ""));
        normalizers.push(json!({"type": "Prepend", "prepend": ESCAPED_BLANK}));
        normalizers.push(replace(" +", ESCAPED_BLANK));
    } else {
        if unigram.add_space_prefix {
            normalizers.push(json!({"type": "Prepend", "prepend": ESCAPED_BLANK}));
            // A text of blanks alone gets no further blank.
            normalizers.push(replace(&format!(r"\A{ESCAPED_BLANK}(?= +\z)"), ""));
        }
        normalizers.push(replace(" ", ESCAPED_BLANK));
    }
    // If no token crosses a blank, the text is split into words first, which is faster.
    let by_words = unigram.remove_extra_whitespaces && begins_words_only(vocabulary);
    let split = json!({"type": "Metaspace", "replacement": ESCAPED_BLANK, "prepend_scheme": "never", "split": true});
    Ok(TokenizerStages {
        normalizer: sequence("normalizers", normalizers),
        pre_tokenizer: if by_words { split } else { Value::Null },
        model: json!({
            "type": "Unigram",
            "unk_id": vocabulary.roles.unknown,
            "vocab": scores(vocabulary),
            "byte_fallback": false,
        }),
        decoder: unescape_blanks(tokenizer),
    })
}

/// Whether "▁" is a token and otherwise occurs only as the first character of tokens.
fn begins_words_only(vocabulary: &Vocabulary) -> bool {
    let later = |text: &str| text.chars().skip(1).any(|c| ESCAPED_BLANK.starts_with(c));
    vocabulary.find(ESCAPED_BLANK.as_bytes()).is_some() && !vocabulary.ids().any(|id| later(vocabulary.text(id)))
}

/// Each token with its score. `tokenizers` derives the score of an unknown character from the lowest score, so tokens
/// that text cannot become get the lowest score of the others.
fn scores(vocabulary: &Vocabulary) -> Vec<(&str, f32)> {
    let worst = vocabulary.ids().filter(|&id| vocabulary.is(id, NORMAL)).map(|id| vocabulary.score(id));
    let worst = worst.fold(f32::MAX, f32::min);
    let score = |id| {
        if vocabulary.is(id, USER_DEFINED) {
            0.0
        } else if vocabulary.is(id, NORMAL | UNUSED) {
            vocabulary.score(id).max(worst)
        } else {
            worst
        }
    };
    vocabulary.ids().map(|id| (vocabulary.text(id), score(id))).collect()
}
