//! Export of byte-pair encoding with ranked merges. The merges of the GGUF file become the merges of `tokenizer.json`.

use super::{
    TokenizerStages, byte_pair_model, escape_blanks, has_bytes, not_exportable, sequence, unescape_blanks,
    vocabulary_map,
};
use crate::TokenId;
use crate::bpe::{Bpe, MERGES, merge_parts};
use crate::error::TokenizerError;
use crate::pre::{Spelling, WholePieces};
use crate::tokenizer::Tokenizer;
use crate::vocabulary::{BYTE, CONTROL, UNKNOWN, Vocabulary};
use foldhash::fast::RandomState;
use metal_attention_gguf::Metadata;
use serde_json::{Value, json};
use std::collections::HashSet;

pub(super) fn stages(tokenizer: &Tokenizer, bpe: &Bpe, metadata: &Metadata) -> Result<TokenizerStages, TokenizerError> {
    let vocabulary = &tokenizer.vocabulary;
    let (merges, used) = merges(tokenizer, metadata)?;
    let unknown = vocabulary.roles.unknown.map(|id| vocabulary.text(id));
    let bytes = bpe.pre.spelling != Spelling::ByteAlphabet && has_bytes(vocabulary);
    let options = [
        ("unk_token", unknown.filter(|_| bytes).into()),
        ("byte_fallback", bytes.into()),
        ("ignore_merges", ignores_merges(tokenizer, bpe)?.into()),
    ];
    let mut passes: Vec<Value> = bpe.pre.passes.iter().map(|pass| split(&pass.expression())).collect();
    let (normalizer, decoder) = match bpe.pre.spelling {
        Spelling::ByteAlphabet => {
            passes.push(
                json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}),
            );
            let decoder =
                json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
            (Value::Null, decoder)
        }
        Spelling::EscapedBlank => (escape_blanks(), unescape_blanks(tokenizer)),
        Spelling::Plain => {
            passes.push(json!({"type": "WhitespaceSplit"}));
            (if bpe.lowercase { lowercase() } else { Value::Null }, unescape_blanks(tokenizer))
        }
    };
    Ok(TokenizerStages {
        normalizer,
        pre_tokenizer: sequence("pretokenizers", passes),
        model: byte_pair_model(vocabulary_map(vocabulary, |id| used.contains(&id)), &merges, options),
        decoder,
    })
}

/// The merges that user text may take, and the ids of all tokens in them.
#[allow(clippy::type_complexity)] // two lists
fn merges<'m>(
    tokenizer: &Tokenizer,
    metadata: &'m Metadata,
) -> Result<(Vec<(&'m str, &'m str)>, HashSet<TokenId, RandomState>), TokenizerError> {
    let vocabulary = &tokenizer.vocabulary;
    let lines = metadata.strings(MERGES)?;
    let mut merges = Vec::new();
    let mut pairs: HashSet<(TokenId, TokenId), RandomState> = HashSet::default();
    let mut used = HashSet::default();
    for line in lines.iter().flat_map(|lines| lines.iter()) {
        let Some((left, right)) = merge_parts(line) else { continue };
        let joined = [left, right].concat();
        let find = |text: &str| {
            let why = || not_exportable(tokenizer, format!("{text:?}, of the merge {line:?}, is no token"));
            vocabulary.find(text.as_bytes()).ok_or_else(why)
        };
        let (left_id, right_id, id) = (find(left)?, find(right)?, find(&joined)?);
        // User text must not become a control token. Of equal pairs the first merge counts.
        if !vocabulary.is(id, CONTROL | UNKNOWN) && pairs.insert((left_id, right_id)) {
            merges.push((left, right));
            used.extend([left_id, right_id, id]);
        }
    }
    Ok((merges, used))
}

/// The value of `ignore_merges`: whether a piece that is a token as a whole becomes that token without merges.
fn ignores_merges(tokenizer: &Tokenizer, bpe: &Bpe) -> Result<bool, TokenizerError> {
    match bpe.pre.whole {
        WholePieces::None => Ok(false),
        WholePieces::All => Ok(true),
        // `tokenizer.json` has this option for all pieces or for none. False is equivalent if merges make runs of line
        // breaks, too. True is equivalent if merges make every other piece that is a token.
        WholePieces::LineBreaks => {
            let vocabulary = &tokenizer.vocabulary;
            let breaks = |id: &TokenId| vocabulary.bytes(*id).iter().all(|&byte| byte == b'\n');
            let made = |id: TokenId| bpe.merges_make(vocabulary, vocabulary.text(id));
            if in_text(vocabulary).filter(breaks).all(made) {
                return Ok(false);
            }
            let others = |id: &TokenId| !vocabulary.bytes(*id).contains(&b'\n');
            match in_text(vocabulary).filter(others).find(|&id| !made(id)) {
                None => Ok(true),
                Some(id) => {
                    let text = vocabulary.text(id);
                    let why = format!(
                        "no merges make {text:?}, nor some runs of line breaks, of which only the latter are taken whole"
                    );
                    Err(not_exportable(tokenizer, why))
                }
            }
        }
    }
}

/// The tokens that user text may become.
fn in_text(vocabulary: &Vocabulary) -> impl Iterator<Item = TokenId> {
    vocabulary.ids().filter(|&id| vocabulary.find_in_text(vocabulary.bytes(id)) == Some(id) && !vocabulary.is(id, BYTE))
}

/// The pre-tokenizer whose pieces are the matches of `expression` and the text between them.
fn split(expression: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false})
}

/// A normalizer to lower case, character by character. "İ" is the only character whose lower case has two.
fn lowercase() -> Value {
    let dotted = json!({"type": "Replace", "pattern": {"String": "\u{130}"}, "content": "i"});
    sequence("normalizers", vec![dotted, json!({"type": "Lowercase"})])
}
