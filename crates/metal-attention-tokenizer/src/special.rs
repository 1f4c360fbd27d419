//! Cutting special tokens out of a text.

use crate::TokenId;
use crate::vocabulary::{CONTROL, Kind, STRIP_LEFT, STRIP_RIGHT, UNKNOWN, Vocabulary};
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::ops::Range;

/// A part of a text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fragment<'t> {
    /// To be tokenized.
    Text(&'t str),
    /// A special token.
    Token(TokenId),
}

/// A set of special tokens, found in a text in one pass.
///
/// Longer tokens come before shorter ones wherever they are in the text, and of equally long ones
/// the leftmost comes first.
pub(crate) struct SpecialTokens {
    /// The bytes that a token may start with.
    first: [bool; 256],
    /// The children of trie nodes by byte; node 0 is the root.
    children: FxHashMap<(u32, u8), u32>,
    /// The token that ends at a node.
    tokens: Vec<Option<(TokenId, Kind)>>,
}

/// A token at a place in the text; the greatest is cut out first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    len: usize,
    start: Reverse<usize>,
    id: TokenId,
    kind: Kind,
}

impl SpecialTokens {
    /// The special tokens of one of the `kinds` and of none of `but_not`.
    pub(crate) fn new(vocabulary: &Vocabulary, kinds: Kind, but_not: Kind) -> Self {
        let mut special = Self { first: [false; 256], children: FxHashMap::default(), tokens: vec![None] };
        for id in vocabulary.ids() {
            if vocabulary.is(id, kinds) && !vocabulary.is(id, but_not) {
                special.insert(vocabulary.text(id).as_bytes(), id, vocabulary.kind(id));
            }
        }
        special
    }

    fn insert(&mut self, text: &[u8], id: TokenId, kind: Kind) {
        let Some(&first) = text.first() else { return };
        self.first[first as usize] = true;
        let mut node = 0;
        for &byte in text {
            let new = self.tokens.len() as u32;
            node = *self.children.entry((node, byte)).or_insert(new);
            if node == new {
                self.tokens.push(None);
            }
        }
        self.tokens[node as usize] = Some((id, kind));
    }

    /// The longest token that starts at `start` and ends at `limit` at the latest, and covers none of `literals` if it
    /// is a control token.
    fn longest(&self, text: &[u8], start: usize, limit: usize, literals: &[usize]) -> Option<Candidate> {
        let next_literal = literals.get(literals.partition_point(|&at| at < start)).copied().unwrap_or(usize::MAX);
        let mut node = 0;
        let mut found = None;
        for (i, &byte) in text[start..limit].iter().enumerate() {
            let Some(&child) = self.children.get(&(node, byte)) else { break };
            node = child;
            if let Some((id, kind)) = self.tokens[node as usize]
                && (start + i < next_literal || kind & (CONTROL | UNKNOWN) == 0)
            {
                found = Some(Candidate { len: i + 1, start: Reverse(start), id, kind });
            }
        }
        found
    }

    /// Where in `text` a token starts, or may start if the text went on, in ascending order.
    pub(crate) fn starts(&self, text: &str) -> Vec<usize> {
        let bytes = text.as_bytes();
        (0..bytes.len()).filter(|&start| self.first[bytes[start] as usize] && self.may_start(&bytes[start..])).collect()
    }

    /// Whether `text` begins with a token, or is the beginning of one.
    fn may_start(&self, text: &[u8]) -> bool {
        let mut node = 0;
        for &byte in text {
            let Some(&child) = self.children.get(&(node, byte)) else { return false };
            node = child;
            if self.tokens[node as usize].is_some() {
                return true;
            }
        }
        true
    }

    /// The parts of `text` in order. No control token covers a byte whose offset is one of `literals`, which ascend.
    pub(crate) fn cut<'t>(&self, text: &'t str, literals: &[usize]) -> Vec<Fragment<'t>> {
        let bytes = text.as_bytes();
        let mut candidates: BinaryHeap<Candidate> = bytes
            .iter()
            .enumerate()
            .filter(|&(_, &byte)| self.first[byte as usize])
            .filter_map(|(start, _)| self.longest(bytes, start, bytes.len(), literals))
            .collect();

        // The tokens cut out so far, by where they start, with the white space they swallow.
        let mut taken: BTreeMap<usize, (usize, TokenId)> = BTreeMap::new();
        while let Some(Candidate { len, start: Reverse(start), id, kind }) = candidates.pop() {
            let gap = gap_around(&taken, start, bytes.len());
            if start < gap.start {
                continue;
            }
            if start + len > gap.end {
                candidates.extend(self.longest(bytes, start, gap.end, literals));
                continue;
            }
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

/// The range around `at` that no token has been cut out of; it starts after `at` when one covers `at`.
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

    fn special(tokens: &[(&str, Kind)]) -> SpecialTokens {
        let mut special = SpecialTokens { first: [false; 256], children: FxHashMap::default(), tokens: vec![None] };
        for (id, (text, kind)) in tokens.iter().enumerate() {
            special.insert(text.as_bytes(), id as TokenId, kind | CONTROL);
        }
        special
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
        let mut special = special(&[("<end>", 0), ("<e", 0)]);
        special.insert(b"<think>", 2, USER_DEFINED);
        assert_eq!(special.cut("<end><end>", &[5]), [Token(0), Text("<end>")]);
        assert_eq!(special.cut("<end><end>", &[2]), [Token(1), Text("nd>"), Token(0)]);
        assert_eq!(special.cut("<think><end>", &[0, 7]), [Token(2), Text("<end>")]);
    }

    #[test]
    fn starts_are_found_though_the_end_is_missing() {
        let special = special(&[("<end>", 0), ("<|a|>", 0)]);
        assert_eq!(special.starts("a<end><|b|>e<|<en"), [1, 14]);
        assert_eq!(special.starts("<|a"), [0]);
        assert_eq!(special.starts(""), [0; 0]);
    }

    #[test]
    fn white_space_is_swallowed_on_the_sides_that_say_so() {
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
