//! Words already encoded in this text.

use crate::TokenId;
use crate::strings::HashMap;
use std::ops::Range;

/// Longer words are not worth remembering.
const MAX_BYTES: usize = 48;

/// Remembers where in the output a word's tokens are, so that a word that comes again is copied.
#[derive(Default)]
pub(crate) struct WordCache<'t> {
    words: HashMap<&'t str, Range<u32>>,
}

impl<'t> WordCache<'t> {
    /// Appends the tokens of `word` to `out`: copied, or made by `encode` when the word is new.
    pub(crate) fn get_or_encode(
        &mut self,
        word: &'t str,
        out: &mut Vec<TokenId>,
        encode: impl FnOnce(&mut Vec<TokenId>),
    ) {
        if word.len() > MAX_BYTES {
            return encode(out);
        }
        if let Some(range) = self.words.get(word) {
            out.extend_from_within(range.start as usize..range.end as usize);
            return;
        }
        let start = out.len();
        encode(out);
        // Offsets are 32-bit to keep the table small; beyond them words are just not remembered.
        if let (Ok(start), Ok(end)) = (u32::try_from(start), u32::try_from(out.len())) {
            self.words.insert(word, start..end);
        }
    }
}
