//! Export of SentencePiece's byte-pair encoding. The GGUF file has scores, `tokenizer.json` needs ranked merges. Every
//! way to make a token of two others becomes a merge, in the order of the resulting token's score.

use super::{TokenizerStages, byte_pair_model, escape_blanks, has_bytes, sequence, unescape_blanks, vocabulary_map};
use crate::TokenId;
use crate::error::TokenizerError;
use crate::spm::descending;
use crate::tokenizer::Tokenizer;
use crate::vocabulary::{ESCAPED_BLANK, Vocabulary, check_size};
use foldhash::fast::RandomState;
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::HashSet;

/// The maximum size in bytes of all merges. Real vocabularies have a few MiB.
const MAX_MERGES: usize = 256 << 20;

pub(super) fn stages(tokenizer: &Tokenizer) -> Result<TokenizerStages, TokenizerError> {
    let vocabulary = &tokenizer.vocabulary;
    let merges = merges(vocabulary)?;
    let used: HashSet<TokenId, RandomState> =
        merges.iter().flat_map(|merge| [merge.left, merge.right, merge.joined]).collect();
    let pairs: Vec<_> =
        merges.iter().map(|merge| (vocabulary.text(merge.left), vocabulary.text(merge.right))).collect();
    let bytes = has_bytes(vocabulary);
    let unknown = vocabulary.roles.unknown.map(|id| vocabulary.text(id));
    let options = [("unk_token", unknown.into()), ("fuse_unk", bytes.into()), ("byte_fallback", bytes.into())];
    let mut normalizers: Vec<Value> = Vec::new();
    if tokenizer.add_space_prefix {
        normalizers.push(json!({"type": "Prepend", "prepend": ESCAPED_BLANK}));
    }
    normalizers.push(escape_blanks());
    Ok(TokenizerStages {
        normalizer: sequence("normalizers", normalizers),
        pre_tokenizer: Value::Null,
        model: byte_pair_model(vocabulary_map(vocabulary, |id| used.contains(&id)), &pairs, options),
        decoder: unescape_blanks(tokenizer),
    })
}

/// Two tokens, `left` and `right`, that merge into the token `joined`.
struct Merge {
    left: TokenId,
    right: TokenId,
    joined: TokenId,
}

/// All merges, in order of rank: by the score of the resulting token, highest first. Among equal scores SentencePiece
/// merges the leftmost pair in the text, which ranks cannot express. Here the merge with the longer left part comes
/// first, as in other converters.
fn merges(vocabulary: &Vocabulary) -> Result<Vec<Merge>, TokenizerError> {
    let mut merges = Vec::new();
    let mut bytes = 0;
    for joined in vocabulary.ids().filter(|&id| vocabulary.find_in_text(vocabulary.bytes(id)) == Some(id)) {
        let text = vocabulary.text(joined);
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.as_bytes().split_at(at);
            if let (Some(left), Some(right)) = (vocabulary.find_in_text(left), vocabulary.find_in_text(right)) {
                bytes += text.len();
                merges.push(Merge { left, right, joined });
            }
        }
        check_size("merges", bytes, MAX_MERGES)?;
    }
    merges.sort_by_cached_key(|merge| {
        let len = |id| Reverse(vocabulary.bytes(id).len());
        (descending(vocabulary.score(merge.joined)), len(merge.left), len(merge.right), merge.joined)
    });
    Ok(merges)
}
