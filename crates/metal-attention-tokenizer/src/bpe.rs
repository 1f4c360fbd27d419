//! Byte-pair encoding with ranked merges, over bytes (GPT-2 and its successors) or over characters (Gemma 4).
//!
//! A pre-tokenizer splits the text into pieces. In each piece the adjacent pair of symbols with the lowest merge rank
//! is merged, until no pair has a merge (`merge.rs`).

use crate::TokenId;
use crate::cache::WordCache;
use crate::error::TokenizerError;
use crate::merge::{Merge, Merger, NO_SYMBOL};
use crate::pre::{PreTokenizer, Spelling, WholePieces};
use crate::rules;
use crate::strings::{HashMap, StringTable};
use crate::vocabulary::{
    BYTE, CONTROL, ESCAPED_BLANK, MAX_BYTES, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary, check_size,
};
use foldhash::fast::RandomState;
use metal_attention_gguf::{Metadata, StringArray};
use std::borrow::Cow;
use std::sync::LazyLock;

/// GPT-2's byte alphabet: the character of each byte. Printable Latin-1 characters stand for themselves, other bytes
/// are the characters from U+0100 on.
static BYTE_ALPHABET: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut next = 0x100;
    std::array::from_fn(|byte| {
        let printable = matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
        let code = if printable { byte as u32 } else { next };
        next += u32::from(!printable);
        char::from_u32(code).unwrap_or_default()
    })
});

/// The byte of each character of the byte alphabet.
static ALPHABET_BYTE: LazyLock<HashMap<char, u8>> =
    LazyLock::new(|| (0..=255u8).map(|byte| (BYTE_ALPHABET[byte as usize], byte)).collect());

/// The metadata key of the merges, in order of rank.
pub(crate) const MERGES: &str = "tokenizer.ggml.merges";

/// The two parts of a merge. They are separated by the first blank of the line that is not its first character.
pub(crate) fn merge_parts(line: &str) -> Option<(&str, &str)> {
    let blank = line.bytes().skip(1).position(|byte| byte == b' ')? + 1;
    Some((&line[..blank], &line[blank + 1..]))
}

/// A byte-pair vocabulary with its merges.
pub(crate) struct Bpe {
    pub(crate) pre: &'static PreTokenizer,
    /// The merge of each pair of symbols. Symbol numbers below the vocabulary's size are token ids; higher ones are
    /// parts and results of merges that are not tokens.
    merges: HashMap<(u32, u32), Merge>,
    /// The symbol of each byte, if pieces are spelled in the byte alphabet.
    byte_symbols: Box<[u32; 256]>,
    /// The token of a byte, used if its symbol is not part of a token.
    byte_tokens: Box<[Option<TokenId>; 256]>,
    /// Whether no merge joins a blank to text before it. Then a piece can be split before blanks.
    cut_before_blanks: bool,
    /// Whether text is converted to lower case before it is encoded.
    pub(crate) lowercase: bool,
}

impl Bpe {
    pub(crate) fn new(
        metadata: &Metadata,
        vocabulary: &Vocabulary,
        pre: &'static PreTokenizer,
    ) -> Result<Self, TokenizerError> {
        let lines = metadata.strings(MERGES)?;
        // Kimi K2's file has no merges. Its pieces are whole tokens, or bytes.
        if lines.is_none() && !pre.names.contains(&"kimi-k2") {
            return Err(TokenizerError::MissingKey { key: MERGES });
        }
        let count = lines.map_or(0, StringArray::len);
        check_size("merges", lines.map_or(0, |lines| lines.iter().map(str::len).sum()), MAX_BYTES)?;

        let mut extra = StringTable::with_capacity(0, 0);
        let mut symbol = |text: &[u8]| {
            let id = vocabulary.find(text).or_else(|| Some(extra.get(text)? + vocabulary.len() as u32));
            id.unwrap_or_else(|| extra.push(text) + vocabulary.len() as u32)
        };
        let mut merges = HashMap::with_capacity_and_hasher(count, RandomState::default());
        let mut joined = Vec::new();
        let mut cut_before_blanks = true;
        for (rank, line) in lines.iter().flat_map(|lines| lines.iter()).enumerate() {
            let Some((left, right)) = merge_parts(line) else { continue };
            let (left, right) = (left.as_bytes(), right.as_bytes());
            joined.clear();
            joined.extend_from_slice(left);
            joined.extend_from_slice(right);
            let id = symbol(&joined);
            // User text must not become a control token.
            if vocabulary.is(id, CONTROL | UNKNOWN) && (id as usize) < vocabulary.len() {
                continue;
            }
            cut_before_blanks &= !joins_blank(&joined);
            let merge = Merge { rank: rank as u32, id };
            merges.entry((symbol(left), symbol(right))).or_insert(merge);
        }

        let alphabet = pre.spelling == Spelling::ByteAlphabet;
        let mut bytes = Box::new([NO_SYMBOL; 256]);
        let mut tokens = Box::new([None; 256]);
        for byte in 0..=255u8 {
            let text = BYTE_ALPHABET[byte as usize].to_string();
            let found = if alphabet { vocabulary.find(text.as_bytes()) } else { vocabulary.find_byte(byte) };
            tokens[byte as usize] = found;
            if alphabet {
                bytes[byte as usize] = symbol(text.as_bytes());
            }
        }
        let lowercase =
            pre.spelling == Spelling::Plain && metadata.bool("tokenizer.ggml.normalizer.lowercase")?.unwrap_or(false);
        Ok(Self { pre, merges, byte_symbols: bytes, byte_tokens: tokens, cut_before_blanks, lowercase })
    }

    /// Encodes `text` and appends its tokens to `out`.
    pub(crate) fn encode(&self, vocabulary: &Vocabulary, text: &str, out: &mut Vec<TokenId>) {
        let text = match self.pre.spelling {
            Spelling::EscapedBlank => Cow::Owned(text.replace(' ', ESCAPED_BLANK)),
            Spelling::Plain if self.lowercase => Cow::Owned(text.chars().map(simple_lower).collect()),
            Spelling::ByteAlphabet | Spelling::Plain => Cow::Borrowed(text),
        };
        let mut cache = WordCache::default();
        let mut merger = Merger::default();
        let mut encode = |word| {
            cache.get_or_encode(word, out, |out| self.encode_word(vocabulary, word, &mut merger, out));
        };
        rules::split(self.pre.passes, &text, &mut |piece| match self.pre.spelling {
            Spelling::EscapedBlank if self.cut_before_blanks => {
                words_before_blanks(piece).for_each(&mut encode);
            }
            // White space only separates words and is not encoded.
            Spelling::Plain if piece.starts_with(char::is_whitespace) => {}
            _ => encode(piece),
        });
    }

    /// Appends the tokens of one piece.
    fn encode_word(&self, vocabulary: &Vocabulary, word: &str, merger: &mut Merger, out: &mut Vec<TokenId>) {
        let alphabet = self.pre.spelling == Spelling::ByteAlphabet;
        let whole = match self.pre.whole {
            WholePieces::None => false,
            WholePieces::LineBreaks => word.bytes().all(|byte| byte == b'\n'),
            WholePieces::All => true,
        };
        if whole {
            let spelled = if alphabet { Cow::Owned(to_alphabet(word)) } else { Cow::Borrowed(word) };
            if let Some(id) = vocabulary.find_in_text(spelled.as_bytes()) {
                out.push(id);
                return;
            }
        }
        self.merge_word(vocabulary, word, merger, out);
    }

    /// Appends the tokens of a piece by merges alone, without looking the whole piece up.
    fn merge_word(&self, vocabulary: &Vocabulary, word: &str, merger: &mut Merger, out: &mut Vec<TokenId>) {
        merger.clear();
        if self.pre.spelling == Spelling::ByteAlphabet {
            for byte in word.bytes() {
                merger.push(self.byte_symbols[byte as usize], 1);
            }
        } else {
            for c in word.chars() {
                let id = vocabulary.find_in_text(c.encode_utf8(&mut [0; 4]).as_bytes());
                merger.push(id.unwrap_or(NO_SYMBOL), c.len_utf8());
            }
        }
        merger.merge(|left, right| self.merges.get(&(left.id, right.id)).copied());
        for symbol in merger.symbols() {
            if (symbol.id as usize) < vocabulary.len() {
                out.push(symbol.id);
            } else {
                let bytes = &word.as_bytes()[symbol.start as usize..][..symbol.len as usize];
                out.extend(bytes.iter().filter_map(|&byte| self.byte_tokens[byte as usize]));
            }
        }
    }

    /// Whether merges alone turn `word` into the one token with that spelling.
    pub(crate) fn merges_make(&self, vocabulary: &Vocabulary, word: &str) -> bool {
        let mut tokens = Vec::new();
        self.merge_word(vocabulary, word, &mut Merger::default(), &mut tokens);
        tokens.len() == 1 && vocabulary.find(word.as_bytes()) == tokens.first().copied()
    }

    /// The bytes that a token decodes to; the spelling of a control token.
    pub(crate) fn piece<'v>(&self, vocabulary: &'v Vocabulary, id: TokenId) -> Cow<'v, [u8]> {
        let kind = vocabulary.kind(id);
        let plain = kind & (CONTROL | UNKNOWN | USER_DEFINED | BYTE) != 0 || kind & NORMAL == 0;
        if plain || self.pre.spelling != Spelling::ByteAlphabet {
            vocabulary.unescaped(id)
        } else {
            Cow::Owned(from_alphabet(vocabulary.text(id)))
        }
    }
}

/// The lower-case form of a character; of several characters only the first ("İ" becomes "i").
pub(crate) fn simple_lower(c: char) -> char {
    c.to_lowercase().next().unwrap_or(c)
}

/// Spells a text in the byte alphabet: " the" becomes "Ġthe".
fn to_alphabet(text: &str) -> String {
    text.bytes().map(|byte| BYTE_ALPHABET[byte as usize]).collect()
}

/// The bytes that a text in the byte alphabet stands for. Characters outside the alphabet stand for their UTF-8 bytes.
fn from_alphabet(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    for c in text.chars() {
        match ALPHABET_BYTE.get(&c) {
            Some(&byte) => bytes.push(byte),
            None => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}

/// Whether a "▁" follows another character in `text`.
pub(crate) fn joins_blank(text: &[u8]) -> bool {
    let blank = ESCAPED_BLANK.as_bytes();
    text.windows(blank.len()).enumerate().any(|(i, part)| i > 0 && part == blank && !text[..i].ends_with(blank))
}

/// Splits `text` before every "▁" that follows another character.
pub(crate) fn words_before_blanks(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let blanks = rest.len() - rest.trim_start_matches(ESCAPED_BLANK).len();
        let end = rest[blanks..].find(ESCAPED_BLANK).map_or(rest.len(), |i| blanks + i);
        let (word, after) = rest.split_at(end);
        rest = after;
        Some(word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_gpt2s() {
        assert_eq!(to_alphabet(" a\n\u{ad}é"), "ĠaĊÂŃÃ©");
        assert_eq!(from_alphabet("ĠaĊÂŃÃ©"), " a\n\u{ad}é".as_bytes());
        assert_eq!(ALPHABET_BYTE.len(), 256);
        assert_eq!(from_alphabet("中"), "中".as_bytes());
    }

    #[test]
    fn text_is_cut_before_blanks() {
        let words: Vec<_> = words_before_blanks("a▁▁b▁c").collect();
        assert_eq!(words, ["a", "▁▁b", "▁c"]);
        assert_eq!(words_before_blanks("▁▁").count(), 1);
        assert_eq!(words_before_blanks("").count(), 0);
        assert!(joins_blank("a▁".as_bytes()));
        assert!(joins_blank("▁a▁".as_bytes()));
        assert!(!joins_blank("▁▁a".as_bytes()));
    }
}
