//! BERT's WordPiece: the text is split into words and normalised; each word is covered greedily by the longest
//! matching tokens.

use crate::TokenId;
use crate::bpe::simple_lower;
use crate::classes::{CLASSES, CONTROL, MARK, PUNCTUATION, SPACE, SYMBOL};
use crate::error::TokenizerError;
use crate::trie::Trie;
use crate::vocabulary::{ESCAPED_BLANK, TokenKinds, Vocabulary};
use metal_attention_gguf::Metadata;
use unicode_normalization::char::decompose_canonical;

/// A WordPiece vocabulary. In GGUF files the spelling of a token that starts a word begins with "▁"; a token that
/// continues a word has no mark.
pub(crate) struct WordPiece {
    pub(crate) lowercase: bool,
    pub(crate) strip_accents: bool,
    /// The tokens that text may become, by spelling.
    tokens: Trie,
}

impl WordPiece {
    pub(crate) fn new(metadata: &Metadata, vocabulary: &Vocabulary) -> Result<Self, TokenizerError> {
        let lowercase = metadata.bool("tokenizer.ggml.normalizer.lowercase")?.unwrap_or(true);
        let strip = metadata.bool("tokenizer.ggml.normalizer.strip_accents")?;
        vocabulary.check_lengths(TokenKinds::MAX)?;
        let tokens = vocabulary.ids().map(|id| (vocabulary.bytes(id), id));
        let in_text = tokens.filter(|&(text, id)| vocabulary.find_in_text(text) == Some(id));
        let tokens = Trie::new(in_text.collect());
        Ok(Self { lowercase, strip_accents: strip.unwrap_or(lowercase), tokens })
    }

    /// Encodes `text` and appends its tokens to `out`.
    pub(crate) fn encode(&self, vocabulary: &Vocabulary, text: &str, out: &mut Vec<TokenId>) {
        let mut word = String::from(ESCAPED_BLANK);
        for c in text.chars() {
            let c = if self.strip_accents { base(c) } else { c };
            let classes = CLASSES.of(c);
            if classes & SPACE != 0 {
                self.finish_word(vocabulary, &mut word, out);
                continue;
            }
            if is_dropped(c) || self.strip_accents && classes & MARK != 0 {
                continue;
            }
            let alone = classes & PUNCTUATION != 0 || c.is_ascii() && classes & SYMBOL != 0 || is_cjk(c);
            if alone {
                self.finish_word(vocabulary, &mut word, out);
            }
            word.push(if self.lowercase { simple_lower(c) } else { c });
            if alone {
                self.finish_word(vocabulary, &mut word, out);
            }
        }
        self.finish_word(vocabulary, &mut word, out);
    }

    /// Appends the tokens of `word`, which begins with "▁", and resets it to "▁".
    fn finish_word(&self, vocabulary: &Vocabulary, word: &mut String, out: &mut Vec<TokenId>) {
        if word.len() == ESCAPED_BLANK.len() {
            return;
        }
        let first = out.len();
        let bytes = word.as_bytes();
        let mut start = 0;
        while start < bytes.len() {
            let Some((len, id)) = self.tokens.prefixes(&bytes[start..]).last() else {
                // If no token matches at some position, the whole word becomes the unknown token.
                out.truncate(first);
                out.extend(vocabulary.roles.unknown);
                break;
            };
            out.push(id);
            start += len;
        }
        word.truncate(ESCAPED_BLANK.len());
    }
}

/// The first character of the canonical decomposition: "é" becomes "e".
fn base(c: char) -> char {
    let mut first = None;
    decompose_canonical(c, |part| {
        first.get_or_insert(part);
    });
    first.unwrap_or(c)
}

/// Whether a character is left out: control, format and private-use characters, and U+FFFD.
fn is_dropped(c: char) -> bool {
    matches!(c, '\0' | '\u{FFFD}') || CLASSES.of(c) & CONTROL != 0
}

/// Whether a character is a CJK ideograph, each of which is a word of its own.
fn is_cjk(c: char) -> bool {
    matches!(
        c as u32,
        0x4E00..=0x9FFF
            | 0x3400..=0x4DBF
            | 0x20000..=0x2A6DF
            | 0x2A700..=0x2B81F
            // From 0x2B920, not 0x2B820: the tokenizers that the models were trained with have this range.
            | 0x2B920..=0x2CEAF
            | 0xF900..=0xFAFF
            | 0x2F800..=0x2FA1F
    )
}
