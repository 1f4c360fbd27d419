//! The texts of a terminal, as an automaton over bytes: how terminals of one lexer get into each other's way.

use std::collections::HashSet;

use regex_automata::dfa::{Automaton, StartKind, dense};
use regex_automata::nfa::thompson;
use regex_automata::util::start;
use regex_automata::{Anchored, MatchKind};
use regex_syntax::hir::Hir;

use super::{GbnfError, WorkBudget};

/// Most states of an automaton.
const MAX_STATES: usize = 2000;
/// Most bytes of what automata are made from.
const MAX_BYTES: usize = 8 << 20;

/// A set of bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ByteSet([u64; 4]);

impl ByteSet {
    fn insert(&mut self, byte: u8) {
        self.0[usize::from(byte) / 64] |= 1 << (byte % 64);
    }

    /// Adds those of `other`.
    pub fn add(&mut self, other: Self) {
        self.0.iter_mut().zip(other.0).for_each(|(word, other)| *word |= other);
    }

    /// Whether a byte is in both.
    pub fn meets(self, other: Self) -> bool {
        self.0.iter().zip(other.0).any(|(word, other)| word & other != 0)
    }
}

/// No text goes on from this state.
const DEAD: u16 = 0;
/// Where texts begin.
const START: u16 = 1;

/// The texts of one terminal.
pub struct TerminalAutomaton {
    /// The state after each byte, for each state.
    next: Vec<[u16; 256]>,
    /// Whether a text may end, for each state.
    ends: Vec<bool>,
}

impl TerminalAutomaton {
    /// That of `hir`; `None` where its automaton is too large.
    pub fn new(hir: &Hir) -> Option<Self> {
        let nfa = thompson::Config::new().nfa_size_limit(Some(MAX_BYTES)).shrink(false);
        let nfa = thompson::Compiler::new().configure(nfa).build_from_hir(hir).ok()?;
        let config = dense::Config::new()
            .start_kind(StartKind::Anchored)
            .match_kind(MatchKind::All)
            .accelerate(false)
            .dfa_size_limit(Some(MAX_BYTES))
            .determinize_size_limit(Some(MAX_BYTES));
        let dfa = dense::Builder::new().configure(config).build_from_nfa(&nfa).ok()?;
        let first = dfa.start_state(&start::Config::new().anchored(Anchored::Yes)).ok()?;
        let mut numbers = std::collections::HashMap::from([(first, START)]);
        let mut states = vec![first];
        let (mut next, mut ends) = (vec![[DEAD; 256]], vec![false]);
        let mut at = 0;
        while let Some(&state) = states.get(at) {
            let mut row = [DEAD; 256];
            for byte in 0..=255 {
                let to = dfa.next_state(state, byte);
                if dfa.is_dead_state(to) {
                    continue;
                }
                row[usize::from(byte)] = *numbers.entry(to).or_insert_with(|| {
                    states.push(to);
                    states.len() as u16
                });
            }
            if states.len() > MAX_STATES {
                return None;
            }
            next.push(row);
            ends.push(dfa.is_match_state(dfa.next_eoi_state(state)));
            at += 1;
        }
        // The automaton tells of the end of a text a byte late: the states for that lead to no text.
        let mut live = ends.clone();
        let mut changed = true;
        while changed {
            changed = false;
            for state in (0..next.len()).rev() {
                if !live[state] && next[state].iter().any(|&to| live[usize::from(to)]) {
                    live[state] = true;
                    changed = true;
                }
            }
        }
        for to in next.iter_mut().flatten() {
            if !live[usize::from(*to)] {
                *to = DEAD;
            }
        }
        Some(Self { next, ends })
    }

    /// The bytes that texts begin with.
    pub fn first(&self) -> ByteSet {
        self.after(START)
    }

    fn after(&self, state: u16) -> ByteSet {
        let mut bytes = ByteSet::default();
        (0..=255).filter(|&byte| self.step(state, byte) != DEAD).for_each(|byte| bytes.insert(byte));
        bytes
    }

    fn step(&self, state: u16, byte: u8) -> u16 {
        self.next[usize::from(state)][usize::from(byte)]
    }

    /// How the texts of both are related.
    pub fn compare(&self, other: &Self, work: &mut WorkBudget) -> Result<TerminalOverlap, GbnfError> {
        let mut comparison = TerminalOverlap::default();
        let (mut left, mut seen) = (vec![(START, START)], HashSet::new());
        while let Some((a, b)) = left.pop() {
            work.spend(256)?;
            for byte in 0..=255 {
                let (a, b) = (self.step(a, byte), other.step(b, byte));
                if a == DEAD || b == DEAD || !seen.insert((a, b)) {
                    continue;
                }
                left.push((a, b));
                if self.ends[usize::from(a)] {
                    comparison.go_on.add(other.after(b));
                    comparison.share |= other.ends[usize::from(b)];
                }
            }
        }
        Ok(comparison)
    }
}

/// How the texts of two terminals are related.
#[derive(Debug, Clone, Copy, Default)]
pub struct TerminalOverlap {
    /// The bytes with which texts of the other one go on after a whole text of the first one.
    pub go_on: ByteSet,
    /// Whether a text that is not empty is one of both.
    pub share: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gbnf::WorkBudget;

    #[test]
    fn languages_are_compared() {
        let language = |pattern: &str| TerminalAutomaton::new(&regex_syntax::parse(pattern).unwrap()).unwrap();
        let bytes = |text: &str| {
            let mut bytes = ByteSet::default();
            text.bytes().for_each(|byte| bytes.insert(byte));
            bytes
        };
        for (a, b, go_on, share) in [
            ("[a-c]", "[a-c]", "", true),
            ("a", "b", "", false),
            ("[a-c]+", "[a-c]+", "abc", true),
            ("a", "ab|ac", "bc", false),
            ("ab|ac", "a", "", false),
            ("a*", "ab?", "b", true),
        ] {
            let compared = language(a).compare(&language(b), &mut WorkBudget(WorkBudget::ALL)).unwrap();
            assert_eq!((compared.go_on, compared.share), (bytes(go_on), share), "{a} {b}");
        }
        assert_eq!(language("[xy]z*").first(), bytes("xy"));
    }
}
