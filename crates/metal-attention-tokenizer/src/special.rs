//! Finds special tokens in a text and splits the text at them, before the algorithm of the vocabulary encodes the text
//! between them.

use crate::TokenId;
use crate::trie::{ROOT, Trie};
use crate::vocabulary::{CONTROL, STRIP_LEFT, STRIP_RIGHT, TokenKinds, UNKNOWN, Vocabulary};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::ops::Range;

/// A fragment of a text that was split at its special tokens.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fragment<'t> {
    /// Text to be encoded.
    Text(&'t str),
    /// A special token.
    Token(TokenId),
}

/// A set of special tokens that is searched for in a text in one pass.
///
/// Longer tokens take precedence over shorter ones wherever they are in the text; among tokens of equal length the
/// leftmost does.
pub(crate) struct SpecialTokens {
    tokens: Vec<SpecialToken>,
    /// The tokens, spelled backwards, with their index in `tokens`. An Aho-Corasick automaton (1975) over it reads the
    /// text from its end and finds at every byte the tokens that start there, in time that does not depend on their
    /// lengths.
    trie: Trie,
    /// The failure link of each node: the node of the longest proper suffix of its string that is in the trie.
    fallback: Vec<u32>,
    /// For each node, the node of the longest token that starts at the current byte; the root if there is none.
    longest: Vec<u32>,
    /// The child of the root along each byte; the root if there is none.
    first: Box<[u32; 256]>,
}

struct SpecialToken {
    id: TokenId,
    kind: TokenKinds,
    len: usize,
}

/// An occurrence of a token in the text. The greatest in this order is split off first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct TokenMatch {
    len: usize,
    start: Reverse<usize>,
    /// The trie node of the token.
    node: u32,
}

impl SpecialTokens {
    /// The special tokens that are of one of `kinds` and of none of `but_not`.
    pub(crate) fn new(vocabulary: &Vocabulary, kinds: TokenKinds, but_not: TokenKinds) -> Self {
        let ids = vocabulary.ids().filter(|&id| vocabulary.is(id, kinds) && !vocabulary.is(id, but_not));
        Self::from_tokens(ids.map(|id| (vocabulary.bytes(id), id, vocabulary.kind(id))))
    }

    /// The special tokens of a list. If tokens have the same spelling, the last one is kept.
    fn from_tokens<'v>(tokens: impl Iterator<Item = (&'v [u8], TokenId, TokenKinds)>) -> Self {
        let tokens: Vec<_> = tokens.filter(|(text, ..)| !text.is_empty()).collect();
        let backwards: Vec<Vec<u8>> = tokens.iter().map(|(text, ..)| text.iter().rev().copied().collect()).collect();
        let trie = Trie::new(backwards.iter().enumerate().rev().map(|(i, text)| (&text[..], i as u32)).collect());
        let n_nodes = trie.n_nodes() as usize;
        let (mut fallback, mut longest) = (vec![ROOT; n_nodes], vec![ROOT; n_nodes]);
        // A failure link leads to a shorter string, whose node has a lower number.
        for node in 0..trie.n_nodes() {
            for (byte, child) in trie.children(node) {
                let mut from = node;
                while from != ROOT && fallback[child as usize] == ROOT {
                    from = fallback[from as usize];
                    fallback[child as usize] = trie.child(from, byte).unwrap_or(ROOT);
                }
                let is_token = trie.value(child).is_some();
                longest[child as usize] = if is_token { child } else { longest[fallback[child as usize] as usize] };
            }
        }
        let mut first = Box::new([ROOT; 256]);
        for (byte, child) in trie.children(ROOT) {
            first[byte as usize] = child;
        }
        let tokens = tokens.iter().map(|&(text, id, kind)| SpecialToken { id, kind, len: text.len() }).collect();
        Self { tokens, trie, fallback, longest, first }
    }

    /// The positions in `text` where a token starts, from the end of the text to its beginning, each with the node of
    /// the longest such token.
    fn found(&self, text: &[u8]) -> impl Iterator<Item = (usize, u32)> {
        let mut node = ROOT;
        text.iter().enumerate().rev().filter_map(move |(start, &byte)| {
            node = loop {
                if node == ROOT {
                    break self.first[byte as usize];
                }
                if let Some(child) = self.trie.child(node, byte) {
                    break child;
                }
                node = self.fallback[node as usize];
            };
            Some((start, self.longest[node as usize])).filter(|&(_, found)| found != ROOT)
        })
    }

    /// The token that ends at a node; the node must have one.
    fn token(&self, node: u32) -> &SpecialToken {
        &self.tokens[self.trie.value(node).expect("the node has a token") as usize]
    }

    /// The longest match at `start` that ends at `limit` or before and, for a control token, covers none of
    /// `literals`. Tried are the token at `node` and the shorter tokens that also start there.
    fn longest(&self, mut node: u32, start: usize, limit: usize, literals: &[usize]) -> Option<TokenMatch> {
        let next_literal = literals.get(literals.partition_point(|&at| at < start)).copied().unwrap_or(usize::MAX);
        while node != ROOT {
            #[cfg(test)]
            crate::steps::count();
            let &SpecialToken { kind, len, .. } = self.token(node);
            let end = start + len;
            if end <= limit && (end <= next_literal || kind & (CONTROL | UNKNOWN) == 0) {
                return Some(TokenMatch { len, start: Reverse(start), node });
            }
            node = self.longest[self.fallback[node as usize] as usize];
        }
        None
    }

    /// Splits `text` into fragments, in order. No control token covers a byte whose offset is in `literals`
    /// (ascending).
    pub(crate) fn cut<'t>(&self, text: &'t str, literals: &[usize]) -> Vec<Fragment<'t>> {
        let bytes = text.as_bytes();
        let mut candidates: BinaryHeap<TokenMatch> =
            self.found(bytes).filter_map(|(start, node)| self.longest(node, start, bytes.len(), literals)).collect();

        // The tokens split off so far: from the start of each, with the white space that it consumes, to its end and
        // id.
        let mut taken: BTreeMap<usize, (usize, TokenId)> = BTreeMap::new();
        while let Some(TokenMatch { len, start: Reverse(start), node }) = candidates.pop() {
            let gap = gap_around(&taken, start, bytes.len());
            if start < gap.start {
                continue;
            }
            if start + len > gap.end {
                candidates.extend(self.longest(node, start, gap.end, literals));
                continue;
            }
            let &SpecialToken { id, kind, .. } = self.token(node);
            let (mut from, mut to) = (start, start + len);
            if kind & STRIP_LEFT != 0 {
                let before = &bytes[gap.start..from];
                from = gap.start + before.iter().rposition(|b| !is_space(*b)).map_or(0, |i| i + 1);
            }
            if kind & STRIP_RIGHT != 0 {
                let after = &bytes[to..gap.end];
                to += after.iter().position(|b| !is_space(*b)).unwrap_or(after.len());
            }
            taken.insert(from, (to, id));
        }

        let mut fragments = Vec::with_capacity(taken.len() * 2 + 1);
        let mut at = 0;
        for (from, (to, id)) in taken {
            if at < from {
                fragments.push(Fragment::Text(&text[at..from]));
            }
            fragments.push(Fragment::Token(id));
            at = to;
        }
        if at < text.len() {
            fragments.push(Fragment::Text(&text[at..]));
        }
        fragments
    }
}

/// The control and unknown tokens, to find their spellings in text of users.
pub(crate) struct ControlTokens {
    tokens: SpecialTokens,
    /// The tokens by spelling.
    trie: Trie,
    /// The length in bytes of the longest token.
    longest: usize,
}

impl ControlTokens {
    pub(crate) fn new(vocabulary: &Vocabulary) -> Self {
        let ids = vocabulary.ids().filter(|&id| vocabulary.is(id, CONTROL | UNKNOWN));
        Self::from_tokens(ids.map(|id| (vocabulary.bytes(id), id, vocabulary.kind(id))).collect())
    }

    fn from_tokens(tokens: Vec<(&[u8], TokenId, TokenKinds)>) -> Self {
        Self {
            longest: tokens.iter().map(|(text, ..)| text.len()).max().unwrap_or(0),
            trie: Trie::new(tokens.iter().map(|&(text, id, _)| (text, id)).collect()),
            tokens: SpecialTokens::from_tokens(tokens.into_iter()),
        }
    }

    /// The offsets in `text`, ascending, where a token starts, or could start if more text followed.
    pub(crate) fn starts(&self, text: &str) -> Vec<usize> {
        let text = text.as_bytes();
        let mut starts: Vec<_> = self.tokens.found(text).map(|(start, _)| start).collect();
        let near_the_end = (text.len().saturating_sub(self.longest)..text.len()).rev();
        starts.extend(near_the_end.filter(|&start| self.trie.begins(&text[start..])));
        starts.sort_unstable();
        starts.dedup();
        starts
    }
}

/// The free range around `at`, between the tokens split off so far. It starts after `at` if a token covers `at`.
fn gap_around(taken: &BTreeMap<usize, (usize, TokenId)>, at: usize, end: usize) -> Range<usize> {
    let start = taken.range(..=at).next_back().map_or(0, |(_, &(to, _))| to);
    let end = taken.range(at + 1..).next().map_or(end, |(&from, _)| from);
    start..end
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b'\t'..=b'\r' | b' ')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocabulary::USER_DEFINED;

    fn tokens<'t>(tokens: &[(&'t str, TokenKinds)]) -> Vec<(&'t [u8], TokenId, TokenKinds)> {
        tokens.iter().zip(0..).map(|(&(text, kind), id)| (text.as_bytes(), id, kind)).collect()
    }

    fn special(texts: &[(&str, TokenKinds)]) -> SpecialTokens {
        let tokens = tokens(texts);
        SpecialTokens::from_tokens(tokens.into_iter().map(|(text, id, kind)| (text, id, kind | CONTROL)))
    }

    use Fragment::{Text, Token};

    #[test]
    fn cuts_tokens_out_of_text() {
        let special = special(&[("<s>", 0), ("</s>", 0)]);
        assert_eq!(special.cut("<s>a <s></s>b<s", &[]), [Token(0), Text("a "), Token(0), Token(1), Text("b<s")]);
        assert_eq!(special.cut("", &[]), []);
        assert_eq!(special.cut("é", &[]), [Text("é")]);
    }

    #[test]
    fn longer_tokens_come_first_wherever_they_are() {
        let special = special(&[("ab", 0), ("bcd", 0), ("a", 0)]);
        assert_eq!(special.cut("abcd", &[]), [Token(2), Token(1)]);
        assert_eq!(special.cut("abc", &[]), [Token(0), Text("c")]);
    }

    #[test]
    fn literals_are_no_part_of_control_tokens() {
        let tokens = tokens(&[("<end>", CONTROL), ("<e", CONTROL), ("<think>", USER_DEFINED)]);
        let special = SpecialTokens::from_tokens(tokens.into_iter());
        assert_eq!(special.cut("<end><end>", &[5]), [Token(0), Text("<end>")]);
        assert_eq!(special.cut("<end><end>", &[2]), [Token(1), Text("nd>"), Token(0)]);
        assert_eq!(special.cut("<think><end>", &[0, 7]), [Token(2), Text("<end>")]);
    }

    #[test]
    fn incomplete_control_tokens_are_found() {
        let special = ControlTokens::from_tokens(tokens(&[("<end>", 0), ("<|a|>", 0)]));
        assert_eq!(special.starts("a<end><|b|>e<|<en"), [1, 14]);
        assert_eq!(special.starts("<|a"), [0]);
        assert_eq!(special.starts(""), [0; 0]);
    }

    #[test]
    fn white_space_is_consumed_on_the_marked_sides() {
        let special = special(&[("<m>", STRIP_LEFT), ("<r>", STRIP_RIGHT)]);
        assert_eq!(special.cut("a \n<m> b <r>  c", &[]), [Text("a"), Token(0), Text(" b "), Token(1), Text("c")]);
        assert_eq!(special.cut("<r>  <m>", &[]), [Token(1), Token(0)]);
        assert_eq!(special.cut("  <m>", &[]), [Token(0)]);
    }

    #[test]
    fn long_runs_are_cut_in_linear_time() {
        let special = special(&[("  ", 0), ("    ", 0), ("        ", 0)]);
        let text = " ".repeat(1_000_007);
        let fragments = special.cut(&text, &[]);
        assert_eq!(fragments.len(), 125_000 + 3);
        assert_eq!(fragments.last(), Some(&Text(" ")));
    }
}
