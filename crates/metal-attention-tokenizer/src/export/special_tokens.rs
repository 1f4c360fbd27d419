//! Export of special tokens: those that are split off a text, and those that are put before and after it.

use crate::TokenId;
use crate::tokenizer::Tokenizer;
use crate::vocabulary::{CONTROL, STRIP_LEFT, STRIP_RIGHT, UNKNOWN, Vocabulary};
use serde_json::{Map, Value, json};

/// The `added_tokens` of `tokenizer.json`: the tokens that are split off a text first, in the order of their ids.
/// These are the control tokens, which it calls special, and the user-defined ones.
pub(super) fn added_tokens(vocabulary: &Vocabulary) -> Vec<Value> {
    let entry = |id| {
        let mut token = json!({"id": id});
        if let (Value::Object(token), Value::Object(flags)) = (&mut token, added_token(vocabulary, id)) {
            token.extend(flags);
        }
        token
    };
    special(vocabulary).map(entry).collect()
}

/// The special tokens by id: the `added_tokens_decoder` of `tokenizer_config.json`.
pub(super) fn added_tokens_decoder(vocabulary: &Vocabulary) -> Map<String, Value> {
    special(vocabulary).map(|id| (id.to_string(), added_token(vocabulary, id))).collect()
}

fn special(vocabulary: &Vocabulary) -> impl Iterator<Item = TokenId> {
    let found = |id: &TokenId| vocabulary.find(vocabulary.bytes(*id)) == Some(*id);
    vocabulary.ids().filter(|&id| vocabulary.is_special(id)).filter(found)
}

fn added_token(vocabulary: &Vocabulary, id: TokenId) -> Value {
    json!({
        "content": vocabulary.text(id),
        "single_word": false,
        "lstrip": vocabulary.is(id, STRIP_LEFT),
        "rstrip": vocabulary.is(id, STRIP_RIGHT),
        "normalized": false,
        "special": vocabulary.is(id, CONTROL | UNKNOWN),
    })
}

/// The `post_processor` of `tokenizer.json`: the tokens around a text, and around the two texts of a pair. Null if
/// there are none.
pub(super) fn post_processor(tokenizer: &Tokenizer) -> Value {
    let first = tokenizer.bos().filter(|_| tokenizer.adds_bos());
    let last = tokenizer.last();
    if first.is_none() && last.is_none() {
        return Value::Null;
    }
    let text = |id: TokenId| tokenizer.token_text(id).unwrap_or_default();
    let special =
        |id: Option<TokenId>, text_id: u32| id.map(|id| json!({"SpecialToken": {"id": text(id), "type_id": text_id}}));
    let sequence = |name: &str, text_id: u32| Some(json!({"Sequence": {"id": name, "type_id": text_id}}));
    // RoBERTa's vocabularies have one more separator between two texts.
    let bert = tokenizer.model() == "bert";
    let between = tokenizer.separator().filter(|_| last.is_some() && tokenizer.adds_separator() && !bert);
    // For BERT the second text of a pair has type id 1.
    let second = u32::from(bert);
    let single = [special(first, 0), sequence("A", 0), special(last, 0)];
    let pair = [
        special(first, 0),
        sequence("A", 0),
        special(last, 0),
        special(between, 0),
        sequence("B", second),
        special(last, second),
    ];
    let mut tokens = Map::new();
    for id in [first, last, between].into_iter().flatten() {
        tokens.insert(text(id).to_owned(), json!({"id": text(id), "ids": [id], "tokens": [text(id)]}));
    }
    json!({
        "type": "TemplateProcessing",
        "single": single.into_iter().flatten().collect::<Vec<_>>(),
        "pair": pair.into_iter().flatten().collect::<Vec<_>>(),
        "special_tokens": tokens,
    })
}
