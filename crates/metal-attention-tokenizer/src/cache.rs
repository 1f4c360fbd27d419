//! A cache of the words of one text that are already encoded, so that a word that occurs again is not encoded again.

use crate::TokenId;
use crate::strings::HashMap;
use std::ops::Range;

/// The maximum length in bytes of a cached word. Longer words rarely occur twice.
const MAX_BYTES: usize = 48;

/// The words of a text encoded so far: for each the range of its tokens in the output.
#[derive(Default)]
pub(crate) struct WordCache<'t> {
    words: HashMap<&'t str, Range<u32>>,
}

impl<'t> WordCache<'t> {
    /// Appends the tokens of `word` to `out`. They are copied from an earlier occurrence, or made by `encode`.
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
        // Offsets are 32-bit to keep the table small. A word beyond them is not cached.
        if let (Ok(start), Ok(end)) = (u32::try_from(start), u32::try_from(out.len())) {
            self.words.insert(word, start..end);
        }
    }
}
