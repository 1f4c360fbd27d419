//! WordPiece: in `tokenizer.json` a token that continues a word begins with "##", and one that starts a word stands as it
//! is; in GGUF files the one stands as it is, and the other begins with "▁".

use super::Parts;
use crate::TokenId;
use crate::tokenizer::Tokenizer;
use crate::vocabulary::{ESCAPED_BLANK, Vocabulary};
use crate::wordpiece::WordPiece;
use serde_json::{Map, Value, json};

const CONTINUES: &str = "##";
/// Longer words are the unknown token, in the models themselves: greedy search takes time quadratic in a word's length.
const MAX_WORD_CHARS: usize = 100;

pub(super) fn parts(tokenizer: &Tokenizer, wordpiece: &WordPiece) -> Parts {
    let vocabulary = &tokenizer.vocabulary;
    let found = |&id: &TokenId| vocabulary.find(vocabulary.bytes(id)) == Some(id);
    let ids = vocabulary.ids().filter(found);
    let tokens: Map<String, Value> = ids.map(|id| (spelling(vocabulary, id), id.into())).collect();
    Parts {
        normalizer: json!({
            "type": "BertNormalizer",
            "clean_text": true,
            "handle_chinese_chars": true,
            "strip_accents": wordpiece.strip_accents,
            "lowercase": wordpiece.lowercase,
        }),
        pre_tokenizer: json!({"type": "BertPreTokenizer"}),
        model: json!({
            "type": "WordPiece",
            "unk_token": vocabulary.roles.unknown.map_or("[UNK]", |id| vocabulary.text(id)),
            "continuing_subword_prefix": CONTINUES,
            "max_input_chars_per_word": MAX_WORD_CHARS,
            "vocab": tokens,
        }),
        decoder: json!({"type": "WordPiece", "prefix": CONTINUES, "cleanup": false}),
    }
}

/// The token as `tokenizer.json` spells it. Names in brackets, such as `[unused1]`, are no part of words.
fn spelling(vocabulary: &Vocabulary, id: TokenId) -> String {
    let text = vocabulary.text(id);
    let name = vocabulary.is_special(id) || text.starts_with('[') && text.ends_with(']') && text.len() > 2;
    match text.strip_prefix(ESCAPED_BLANK) {
        _ if name => text.to_owned(),
        Some(word) => word.to_owned(),
        None => [CONTINUES, text].concat(),
    }
}
