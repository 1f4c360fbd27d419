//! Export of WordPiece. In `tokenizer.json` a token that continues a word begins with "##" and one that starts a word
//! has no mark. In GGUF files the former has no mark and the latter begins with "▁".

use super::{TokenizerStages, sequence};
use crate::TokenId;
use crate::tokenizer::Tokenizer;
use crate::vocabulary::{ESCAPED_BLANK, Vocabulary};
use crate::wordpiece::WordPiece;
use serde_json::{Map, Value, json};

const CONTINUES: &str = "##";
/// The maximum length of a word, in characters. A longer one becomes the unknown token, as in the original models: the
/// greedy search is quadratic in the word's length.
const MAX_WORD_CHARS: usize = 100;

pub(super) fn stages(tokenizer: &Tokenizer, wordpiece: &WordPiece) -> TokenizerStages {
    let vocabulary = &tokenizer.vocabulary;
    let found = |&id: &TokenId| vocabulary.find(vocabulary.bytes(id)) == Some(id);
    let ids = vocabulary.ids().filter(found);
    let tokens: Map<String, Value> = ids.map(|id| (spelling(vocabulary, id), id.into())).collect();
    let mut normalizers = if wordpiece.strip_accents { first_of_decomposed() } else { Vec::new() };
    normalizers.push(json!({
        "type": "BertNormalizer",
        "clean_text": true,
        "handle_chinese_chars": true,
        "strip_accents": wordpiece.strip_accents,
        "lowercase": wordpiece.lowercase,
    }));
    TokenizerStages {
        normalizer: sequence("normalizers", normalizers),
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

/// Normalizers that keep only the first character of each canonical decomposition. BERT's own normalizer keeps the
/// vowel signs of Indic scripts, and the vowels and final consonants of Hangul syllables.
fn first_of_decomposed() -> Vec<Value> {
    let drop = |expression: &str| json!({"type": "Replace", "pattern": {"Regex": expression}, "content": ""});
    vec![
        json!({"type": "NFD"}),
        drop(r"\p{M}+"),
        drop(r"(?<=[\x{1100}-\x{1112}])[\x{1161}-\x{1175}][\x{11A8}-\x{11C2}]?"),
    ]
}

/// The token as `tokenizer.json` spells it. Names in brackets, such as `[unused1]`, are not parts of words.
fn spelling(vocabulary: &Vocabulary, id: TokenId) -> String {
    let text = vocabulary.text(id);
    if vocabulary.is_special(id) || text.starts_with('[') && text.ends_with(']') && text.len() > 2 {
        return text.to_owned();
    }
    text.strip_prefix(ESCAPED_BLANK).map_or_else(|| [CONTINUES, text].concat(), str::to_owned)
}
