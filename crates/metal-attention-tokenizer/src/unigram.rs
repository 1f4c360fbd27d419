//! SentencePiece's unigram model (T5, XLM-RoBERTa). The text is normalised; of all ways to segment it into tokens, the
//! one with the greatest sum of scores is chosen, by dynamic programming over byte positions (Viterbi).

use crate::TokenId;
use crate::bpe::{joins_blank, words_before_blanks};
use crate::cache::WordCache;
use crate::charsmap::CharsMap;
use crate::error::TokenizerError;
use crate::trie::Trie;
use crate::vocabulary::{ESCAPED_BLANK, NORMAL, TokenKinds, UNUSED, USER_DEFINED, Vocabulary};
use metal_attention_gguf::Metadata;

/// The score of an unknown character is this much below the lowest score of a token.
const UNKNOWN_PENALTY: f32 = 10.0;

/// A unigram vocabulary with its normalisation.
pub(crate) struct Unigram {
    charsmap: CharsMap,
    /// The tokens that text may become, by spelling.
    tokens: Trie,
    unknown_score: f64,
    /// Whether no token, and no run of unknown characters, has a blank after another character. Then text can be split
    /// before blanks.
    cut_before_blanks: bool,
    pub(crate) add_space_prefix: bool,
    pub(crate) remove_extra_whitespaces: bool,
}

/// The best segmentation of the text up to some position.
#[derive(Clone, Copy)]
struct BestPath {
    /// The sum of the scores of its tokens.
    score: f64,
    /// The byte offset where its last token starts.
    start: u32,
    /// Its last token; `None` for an unknown character.
    token: Option<TokenId>,
}

impl Unigram {
    pub(crate) fn new(metadata: &Metadata, vocabulary: &Vocabulary) -> Result<Self, TokenizerError> {
        let flag = |key| metadata.bool(key).map(|flag| flag.unwrap_or(false));
        let normal = vocabulary.ids().filter(|&id| vocabulary.is(id, NORMAL));
        let lowest = normal.map(|id| vocabulary.score(id)).fold(f32::MAX, f32::min);
        vocabulary.check_lengths(TokenKinds::MAX)?;
        let in_text = vocabulary.ids().filter(|&id| vocabulary.is(id, NORMAL | USER_DEFINED | UNUSED));
        let tokens: Vec<_> = in_text.map(|id| (vocabulary.bytes(id), id)).collect();
        // If the blank is a token, a run of unknown characters ends there.
        let blank = tokens.iter().any(|&(text, _)| text == ESCAPED_BLANK.as_bytes());
        let joined = tokens.iter().any(|&(text, _)| joins_blank(text));
        Ok(Self {
            cut_before_blanks: blank && !joined,
            charsmap: CharsMap::read(metadata)?,
            tokens: Trie::new(tokens),
            unknown_score: f64::from(lowest - UNKNOWN_PENALTY),
            add_space_prefix: flag("tokenizer.ggml.add_space_prefix")?,
            remove_extra_whitespaces: flag("tokenizer.ggml.remove_extra_whitespaces")?,
        })
    }

    /// Encodes `text` and appends its tokens to `out`.
    pub(crate) fn encode(&self, vocabulary: &Vocabulary, text: &str, out: &mut Vec<TokenId>) {
        let text = self.normalize(text);
        let mut cache = WordCache::default();
        let mut encode = |word| {
            cache.get_or_encode(word, out, |out| self.encode_word(vocabulary, word, out));
        };
        if self.cut_before_blanks {
            words_before_blanks(&text).for_each(encode);
        } else {
            encode(&text);
        }
    }

    /// Appends the tokens of one word of normalised text.
    fn encode_word(&self, vocabulary: &Vocabulary, text: &str, out: &mut Vec<TokenId>) {
        let none = BestPath { score: f64::NEG_INFINITY, start: 0, token: None };
        let mut best = vec![none; text.len() + 1];
        best[0].score = 0.0;
        for (start, c) in text.char_indices() {
            let score = best[start].score;
            let mut improve = |end: usize, token, score| {
                if score > best[end].score {
                    best[end] = BestPath { score, start: start as u32, token };
                }
            };
            let mut whole_char = false;
            for (len, token) in self.tokens.prefixes(&text.as_bytes()[start..]) {
                whole_char |= len == c.len_utf8();
                let user_defined = vocabulary.is(token, USER_DEFINED);
                let own = if user_defined { 0.0 } else { f64::from(vocabulary.score(token)) };
                improve(start + len, Some(token), score + own);
            }
            if !whole_char {
                improve(start + c.len_utf8(), None, score + self.unknown_score);
            }
        }

        // Follow the best segmentation back from the end. A run of unknown characters becomes one token.
        let first = out.len();
        let mut end = text.len();
        let mut after_unknown = false;
        while end > 0 {
            let BestPath { start, token, .. } = best[end];
            let unknown = token.is_none() || token == vocabulary.roles.unknown;
            if !(unknown && after_unknown) {
                out.extend(token.or(vocabulary.roles.unknown));
            }
            after_unknown = unknown;
            end = start as usize;
        }
        out[first..].reverse();
    }

    /// Normalises a text: replaces characters by the characters map, writes blanks as "▁", and adds or removes blanks
    /// as the file says.
    fn normalize(&self, text: &str) -> String {
        let mut normalized = String::with_capacity(text.len() * 2);
        let mut in_word = false;
        let mut prefix = self.add_space_prefix;
        self.charsmap.for_each_replaced(text, |c| {
            if c == ' ' {
                in_word = false;
                if !self.remove_extra_whitespaces {
                    normalized.push_str(ESCAPED_BLANK);
                }
                return;
            }
            if !in_word {
                in_word = true;
                if prefix || self.remove_extra_whitespaces {
                    normalized.push_str(ESCAPED_BLANK);
                    prefix = false;
                }
            }
            normalized.push(c);
        });
        normalized
    }
}
