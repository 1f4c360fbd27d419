//! Deterministic automata of terminals, over bytes, and their comparison. `terminals.rs` uses it to find terminals
//! that a greedy lexer would confuse.

use std::collections::HashSet;

use regex_automata::dfa::{Automaton, StartKind, dense};
use regex_automata::nfa::thompson;
use regex_automata::util::start;
use regex_automata::{Anchored, MatchKind};
use regex_syntax::hir::Hir;

use super::{GbnfError, WorkBudget};

/// The maximum number of states of an automaton.
const MAX_STATES: usize = 2000;
/// The maximum size in bytes of the NFA and of the DFA that an automaton is made from.
const MAX_BYTES: usize = 8 << 20;

/// A set of bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ByteSet([u64; 4]);

impl ByteSet {
    fn insert(&mut self, byte: u8) {
        self.0[usize::from(byte) / 64] |= 1 << (byte % 64);
    }

    /// Adds the bytes of `other`.
    pub fn add(&mut self, other: Self) {
        self.0.iter_mut().zip(other.0).for_each(|(word, other)| *word |= other);
    }

    /// Whether the sets have a byte in common.
    pub fn meets(self, other: Self) -> bool {
        self.0.iter().zip(other.0).any(|(word, other)| word & other != 0)
    }
}

/// The state from which no text can be completed.
const DEAD: u16 = 0;
/// The initial state.
const START: u16 = 1;

/// The automaton that accepts the texts of one terminal.
pub struct TerminalAutomaton {
    /// For each state, the state after each byte.
    next: Vec<[u16; 256]>,
    /// For each state, whether a text may end there.
    ends: Vec<bool>,
}

impl TerminalAutomaton {
    /// The automaton of `hir`; `None` if it would be too large.
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
        // The DFA reports a match one byte late. The states that only serve this lead to no text and become dead.
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

    /// The bytes that a text may begin with.
    pub fn first(&self) -> ByteSet {
        self.after(START)
    }

    /// The bytes that may follow in `state`.
    fn after(&self, state: u16) -> ByteSet {
        let mut bytes = ByteSet::default();
        (0..=255).filter(|&byte| self.step(state, byte) != DEAD).for_each(|byte| bytes.insert(byte));
        bytes
    }

    /// The state after `byte` in `state`.
    fn step(&self, state: u16, byte: u8) -> u16 {
        self.next[usize::from(state)][usize::from(byte)]
    }

    /// Compares the texts of `self` and `other`, by a walk through the product automaton.
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

/// The relation between the texts of two terminals, A (`self`) and B (`other`).
#[derive(Debug, Clone, Copy, Default)]
pub struct TerminalOverlap {
    /// The bytes with which a text of B continues after a complete text of A.
    pub go_on: ByteSet,
    /// Whether a non-empty text belongs to both.
    pub share: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gbnf::WorkBudget;

    #[test]
    fn automata_are_compared() {
        let automaton = |pattern: &str| TerminalAutomaton::new(&regex_syntax::parse(pattern).unwrap()).unwrap();
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
            let compared = automaton(a).compare(&automaton(b), &mut WorkBudget(WorkBudget::ALL)).unwrap();
            assert_eq!((compared.go_on, compared.share), (bytes(go_on), share), "{a} {b}");
        }
        assert_eq!(automaton("[xy]z*").first(), bytes("xy"));
    }
}
