//! SentencePiece's byte-pair encoding (`tokenizer.ggml.model` = "llama"). Any two adjacent symbols whose concatenation
//! is a token can be merged; the score of that token is the rank of the merge. Characters that no token covers become
//! byte-fallback tokens.

use crate::TokenId;
use crate::bpe::{joins_blank, words_before_blanks};
use crate::cache::WordCache;
use crate::error::TokenizerError;
use crate::merge::{Merge, Merger, NO_SYMBOL};
use crate::vocabulary::{BYTE, CONTROL, ESCAPED_BLANK, TokenKinds, UNKNOWN, Vocabulary};

/// A SentencePiece byte-pair vocabulary.
pub(crate) struct Spm {
    /// The token of each byte that is not part of another token.
    byte_tokens: Box<[Option<TokenId>; 256]>,
    longest: usize,
    /// Whether no token has a blank after another character. Then text can be split before blanks.
    cut_before_blanks: bool,
}

impl Spm {
    pub(crate) fn new(vocabulary: &Vocabulary) -> Result<Self, TokenizerError> {
        vocabulary.check_lengths(TokenKinds::MAX)?;
        let byte_token = |byte: usize| {
            let byte = byte as u8;
            let found = vocabulary.find_byte(byte).or_else(|| vocabulary.find(&[byte]));
            found.or(vocabulary.roles.unknown)
        };
        let mergeable = |id: &TokenId| !vocabulary.is(*id, CONTROL | UNKNOWN | BYTE);
        let joined = |id| joins_blank(vocabulary.bytes(id));
        Ok(Self {
            byte_tokens: Box::new(std::array::from_fn(byte_token)),
            longest: vocabulary.longest(),
            cut_before_blanks: !vocabulary.ids().filter(mergeable).any(joined),
        })
    }

    /// Encodes `text` and appends its tokens to `out`. If `prefix` is set, a blank is put before the text.
    pub(crate) fn encode(&self, vocabulary: &Vocabulary, text: &str, prefix: bool, out: &mut Vec<TokenId>) {
        let mut escaped = if prefix { ESCAPED_BLANK.to_owned() } else { String::new() };
        escaped.push_str(&text.replace(' ', ESCAPED_BLANK));
        let mut cache = WordCache::default();
        let mut merger = Merger::default();
        let mut encode = |word| {
            cache.get_or_encode(word, out, |out| self.encode_word(vocabulary, word, &mut merger, out));
        };
        if self.cut_before_blanks {
            words_before_blanks(&escaped).for_each(encode);
        } else {
            encode(&escaped);
        }
    }

    /// Appends the tokens of one word.
    fn encode_word(&self, vocabulary: &Vocabulary, word: &str, merger: &mut Merger, out: &mut Vec<TokenId>) {
        let word = word.as_bytes();
        merger.clear();
        let mut start = 0;
        while start < word.len() {
            let len = word[start + 1..].iter().take_while(|&&b| b & 0xC0 == 0x80).count() + 1;
            let id = vocabulary.find_in_text(&word[start..start + len]);
            merger.push(id.unwrap_or(NO_SYMBOL), len);
            start += len;
        }
        merger.merge(|left, right| {
            let len = (left.len + right.len) as usize;
            if len > self.longest {
                return None;
            }
            let id = vocabulary.find_in_text(&word[left.start as usize..][..len])?;
            Some(Merge { rank: descending(vocabulary.score(id)), id })
        });
        for symbol in merger.symbols() {
            if symbol.id == NO_SYMBOL {
                let bytes = &word[symbol.start as usize..][..symbol.len as usize];
                out.extend(bytes.iter().filter_map(|&byte| self.byte_tokens[byte as usize]));
            } else {
                out.push(symbol.id);
            }
        }
    }
}

/// A merge rank: a number that is smaller the greater `score` is.
pub(crate) fn descending(score: f32) -> u32 {
    // Adding 0 turns -0 into 0. The bits of floats of the same sign are ordered like their magnitudes.
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 0 { !(bits | 1 << 31) } else { bits }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_sort_from_high_to_low() {
        let scores = [f32::INFINITY, 3.5, 1.0, 0.0, -0.5, -1.0, -1e9, f32::NEG_INFINITY];
        assert!(scores.windows(2).all(|pair| descending(pair[0]) < descending(pair[1])));
        assert_eq!(descending(-0.0), descending(0.0));
    }
}
