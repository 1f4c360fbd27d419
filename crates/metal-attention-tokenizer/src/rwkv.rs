//! RWKV's tokenizer: at each position the longest token that matches. Tokens are byte strings, which the vocabulary
//! spells with escapes such as `\xe4`.

use crate::TokenId;
use crate::error::TokenizerError;
use crate::trie::Trie;
use crate::vocabulary::{CONTROL, TokenKinds, UNKNOWN, Vocabulary};

/// A vocabulary of byte strings.
pub(crate) struct Rwkv {
    /// The tokens that text may become, by their bytes.
    tokens: Trie,
}

impl Rwkv {
    pub(crate) fn new(vocabulary: &Vocabulary) -> Result<Self, TokenizerError> {
        vocabulary.check_lengths(TokenKinds::MAX)?;
        let in_text = vocabulary.ids().filter(|&id| !vocabulary.is(id, CONTROL | UNKNOWN));
        let tokens: Vec<_> = in_text.map(|id| (Self::piece(vocabulary, id), id)).collect();
        // If tokens have the same bytes, the last one is kept; tokens without bytes are left out.
        let tokens = tokens.iter().rev().filter(|(bytes, _)| !bytes.is_empty());
        Ok(Self { tokens: Trie::new(tokens.map(|(bytes, id)| (bytes.as_slice(), *id)).collect()) })
    }

    /// Encodes `text` and appends its tokens to `out`. A byte that no token starts with becomes the unknown token, if
    /// there is one.
    pub(crate) fn encode(&self, vocabulary: &Vocabulary, text: &str, out: &mut Vec<TokenId>) {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            let (len, token) = match self.tokens.prefixes(rest).last() {
                Some((len, token)) => (len, Some(token)),
                None => (1, vocabulary.roles.unknown),
            };
            out.extend(token);
            rest = &rest[len..];
        }
    }

    /// The bytes that a token decodes to.
    pub(crate) fn piece(vocabulary: &Vocabulary, id: TokenId) -> Vec<u8> {
        unescape(vocabulary.bytes(id))
    }
}

/// The bytes of a spelling such as `\xe4\xb8` or `it\'s
/// `. As in llama.cpp, any two characters after `\x` make a byte, each by its distance from "0" or "a", and an
/// incomplete escape at the end is dropped.
fn unescape(spelling: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(spelling.len());
    let mut rest = spelling.iter().copied();
    // llama.cpp compares signed chars: a byte above 0x7F is below 'a'.
    let digit = |c: u8| if c.is_ascii() && c >= b'a' { c - b'a' + 10 } else { c.wrapping_sub(b'0') };
    while let Some(byte) = rest.next() {
        if byte != b'\\' {
            bytes.push(byte);
            continue;
        }
        match rest.next() {
            Some(b't') => bytes.push(b'\t'),
            Some(b'n') => bytes.push(b'\n'),
            Some(b'r') => bytes.push(b'\r'),
            Some(b'x') => {
                if let (Some(high), Some(low)) = (rest.next(), rest.next()) {
                    bytes.push((digit(high) << 4).wrapping_add(digit(low)));
                }
            }
            Some(other) => bytes.push(other),
            None => {}
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_stand_for_bytes() {
        let cases: [(&str, &[u8]); 10] = [
            ("plain", b"plain"),
            (r"\t\n\r", b"\t\n\r"),
            (r"\x00\xff\x0a", b"\x00\xff\n"),
            (r"it\'s a \\", br"it's a \"),
            (r"\q", b"q"),
            (r"a\", b"a"),
            (r"a\x", b"a"),
            (r"a\xf", b"a"),
            // 'F' is 22 above '0'; é is two bytes.
            (r"\xFF", &[0x76]),
            ("é", "é".as_bytes()),
        ];
        for (spelling, bytes) in cases {
            assert_eq!(unescape(spelling.as_bytes()), bytes, "{spelling}");
        }
        assert_eq!(unescape("\\xé".as_bytes()), [(0xc3_u8.wrapping_sub(b'0') << 4).wrapping_add(0xa9 - b'0')]);
    }
}
