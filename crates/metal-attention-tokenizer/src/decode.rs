//! Decoding of token ids to text, one by one as they are generated.

use crate::{TokenId, Tokenizer};

/// Decodes token ids that arrive one by one. It returns whole UTF-8 characters only and loses no byte.
///
/// A character may be spread over several tokens; its bytes are held back until it is complete. Bytes that cannot
/// become a character are written as U+FFFD, exactly where [`String::from_utf8_lossy`] over all the bytes would put
/// it.
#[derive(Debug, Clone)]
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    /// The bytes of an incomplete character.
    pending: Vec<u8>,
    /// Whether the leading blank of the next token that writes something is dropped.
    drop_blank: bool,
    special: bool,
}

impl<'a> StreamDecoder<'a> {
    pub(crate) fn new(tokenizer: &'a Tokenizer) -> Self {
        let drop_blank = tokenizer.starts_with_blank();
        Self { tokenizer, pending: Vec::new(), drop_blank, special: false }
    }

    /// Keeps the first token's leading blank, because the text continues a prompt.
    #[must_use]
    pub fn continuing(mut self) -> Self {
        self.drop_blank = false;
        self
    }

    /// Writes the spelling of control tokens, too.
    #[must_use]
    pub fn with_special(mut self) -> Self {
        self.special = true;
        self
    }

    /// Decodes one id. Returns the text that is complete now, which may be empty.
    ///
    /// The first token's leading blank is dropped if the vocabulary's encoder adds one (as SentencePiece does), unless
    /// [`continuing`](Self::continuing) was called.
    pub fn push(&mut self, id: TokenId) -> String {
        let mut text = String::new();
        self.push_to(id, &mut text);
        text
    }

    /// Like [`push`](Self::push), but appends to `text`.
    pub(crate) fn push_to(&mut self, id: TokenId, text: &mut String) {
        let mut bytes = if self.special { self.tokenizer.special_bytes(id) } else { self.tokenizer.token_bytes(id) };
        if bytes.is_empty() {
            return;
        }
        if std::mem::take(&mut self.drop_blank) {
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.pending.extend_from_slice(bytes);
        let mut done = 0;
        for chunk in self.pending.utf8_chunks() {
            let end = done + chunk.valid().len() + chunk.invalid().len();
            text.push_str(chunk.valid());
            done += chunk.valid().len();
            // Bytes at the end may still become a character.
            let incomplete = end == self.pending.len()
                && std::str::from_utf8(chunk.invalid()).is_err_and(|e| e.error_len().is_none());
            if !chunk.invalid().is_empty() && !incomplete {
                text.push(char::REPLACEMENT_CHARACTER);
                done = end;
            }
        }
        self.pending.drain(..done);
    }

    /// The text that was held back: an incomplete character becomes U+FFFD.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}
