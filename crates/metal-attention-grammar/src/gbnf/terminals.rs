//! Determines which parts of a grammar become terminals of the lexer.
//!
//! llguidance matches a text in two layers: a lexer that recognises terminals (regular expressions), and a parser of
//! rules over terminals. The larger the terminals, the cheaper is each token. But the lexer is greedy: it extends a
//! terminal as long as any terminal that may stand there can be extended. GBNF has no lexer. So a part may be a
//! terminal only if greediness makes no difference: no text of it, followed by the first byte of what may follow, is
//! the beginning of a longer text of a terminal that may stand at the same place.
//!
//! The search starts with the largest non-recursive parts as terminals. Terminals that conflict with others are split
//! into their parts, until there are no conflicts. In the worst case that leaves single characters, which never
//! conflict.

use std::collections::HashMap;

use regex_syntax::hir::Hir;

use super::automaton::{ByteSet, TerminalAutomaton, TerminalOverlap};
use super::index_set::IndexSet;
use super::nodes::{GbnfGrammar, GrammarNode, NodeId, NodeKind};
use super::{GbnfError, WorkBudget};
use crate::pattern::written;

/// The maximum number of positions at which terminals stand.
const MAX_POSITIONS: usize = 2000;
/// The maximum number of characters of all terminals together, repetitions counted.
const MAX_CHARACTERS: usize = 500_000;
/// The number of rounds after which a conflicting terminal is split into its characters at once.
const MAX_ROUNDS: usize = 40;

/// A position in the grammar at which a terminal or a token stands.
struct TerminalPosition {
    node: NodeId,
    /// The index of the terminal's automaton; `None` for a token.
    automaton: Option<usize>,
}

impl GbnfGrammar {
    /// Splits terminals until no terminal conflicts with another.
    pub fn split_conflicting_terminals(&mut self, work: &mut WorkBudget) -> Result<(), GbnfError> {
        for round in 0.. {
            if self.is_terminal(self.body(self.root)) {
                return Ok(());
            }
            let conflicting = self.conflicting(work)?;
            if conflicting.is_empty() {
                return Ok(());
            }
            for node in conflicting {
                self.split(node, round >= MAX_ROUNDS);
            }
        }
        Ok(())
    }

    /// Splits a terminal, so that its parts are terminals instead; with `wholly` its characters are.
    fn split(&mut self, node: NodeId, wholly: bool) {
        if self.nodes[node].is_split {
            return;
        }
        let parts = match self.nodes[node].kind.clone() {
            NodeKind::Plain(_) | NodeKind::Token { .. } => return,
            NodeKind::Text(text) => {
                let character = |c: char| GrammarNode {
                    kind: NodeKind::Plain(Hir::literal(c.to_string().into_bytes())),
                    size: Some((1, 1)),
                    nullable: false,
                    is_split: false,
                };
                let from = self.nodes.len();
                self.nodes.extend(text.chars().map(character));
                let parts: Vec<_> = (from..self.nodes.len()).collect();
                self.nodes[node].kind = NodeKind::Sequence(parts.clone());
                parts
            }
            NodeKind::Rule(rule) => vec![self.body(rule)],
            NodeKind::Sequence(parts) | NodeKind::Choice(parts) => parts,
            NodeKind::Repeat { item, .. } => vec![item],
        };
        self.nodes[node].is_split = true;
        if wholly {
            for part in parts {
                self.split(part, true);
            }
        }
    }

    /// The terminals that conflict with others, or whose automata are too large.
    fn conflicting(&self, work: &mut WorkBudget) -> Result<Vec<NodeId>, GbnfError> {
        let mut collected =
            PositionIndex { at: HashMap::new(), positions: Vec::new(), rules: IndexSet::new(self.bodies.len()) };
        collected.rules.insert(self.root);
        let mut left: Vec<usize> = vec![self.root];
        while let Some(rule) = left.pop() {
            self.collect(self.body(rule), &mut collected, &mut left);
        }
        let PositionIndex { at, mut positions, rules } = collected;
        let order: Vec<usize> = self.order.iter().copied().filter(|&rule| rules.has(rule)).collect();
        if positions.len() > MAX_POSITIONS {
            return Err(GbnfError::TooLarge(format!(
                "it has {} terminals at different places; at most {MAX_POSITIONS} are allowed",
                positions.len()
            )));
        }
        let (mut automata, mut too_large) = (Vec::new(), Vec::new());
        let mut numbers: HashMap<String, Option<usize>> = HashMap::new();
        let mut n_characters = 0;
        for position in &mut positions {
            let Some((characters, _)) = self.nodes[position.node].size else { continue };
            n_characters += characters;
            work.spend(characters as u64)?;
            if n_characters > MAX_CHARACTERS {
                return Err(GbnfError::TooLarge("its terminals are too large, repetitions counted".into()));
            }
            let hir = self.expression(position.node);
            let number = *numbers.entry(written(&hir)).or_insert_with(|| {
                let automaton = TerminalAutomaton::new(&hir)?;
                automata.push(automaton);
                Some(automata.len() - 1)
            });
            position.automaton = number;
            if number.is_none() {
                too_large.push(position.node);
            }
        }
        if !too_large.is_empty() {
            return Ok(too_large);
        }
        FollowAnalysis { grammar: self, order, at, positions, automata: &automata, compared: HashMap::new() }
            .conflicts(work)
    }

    /// Adds the positions below a node, and adds new rules that it refers to to `left`.
    fn collect(&self, node: NodeId, collected: &mut PositionIndex, left: &mut Vec<usize>) {
        let kind = &self.nodes[node].kind;
        if self.is_terminal(node) || matches!(kind, NodeKind::Token { .. }) {
            collected.at.insert(node, collected.positions.len());
            collected.positions.push(TerminalPosition { node, automaton: None });
            return;
        }
        match kind {
            NodeKind::Plain(_) | NodeKind::Text(_) | NodeKind::Token { .. } => {}
            NodeKind::Rule(rule) => {
                if !collected.rules.has(*rule) {
                    collected.rules.insert(*rule);
                    left.push(*rule);
                }
            }
            NodeKind::Sequence(parts) | NodeKind::Choice(parts) => {
                for &part in parts {
                    self.collect(part, collected, left);
                }
            }
            NodeKind::Repeat { item, .. } => self.collect(*item, collected, left),
        }
    }
}

/// The positions of terminals and tokens in a grammar.
struct PositionIndex {
    /// The position of each node that is a terminal or a token.
    at: HashMap<NodeId, usize>,
    positions: Vec<TerminalPosition>,
    /// The rules that are used outside of terminals.
    rules: IndexSet,
}

/// The analysis of which terminals may follow each other (the FIRST and FOLLOW sets of the grammar), and of the
/// conflicts.
struct FollowAnalysis<'a> {
    grammar: &'a GbnfGrammar,
    /// The rules that are used outside of terminals. Each comes after the rules that it refers to, except for
    /// recursion.
    order: Vec<usize>,
    /// The position of each node that is a terminal or a token.
    at: HashMap<NodeId, usize>,
    positions: Vec<TerminalPosition>,
    automata: &'a [TerminalAutomaton],
    compared: HashMap<(usize, usize), TerminalOverlap>,
}

impl FollowAnalysis<'_> {
    /// The terminals that the lexer would extend although another terminal has ended and something else may follow it.
    fn conflicts(mut self, work: &mut WorkBudget) -> Result<Vec<NodeId>, GbnfError> {
        let (first, follow) = self.follow(work)?;
        let together = self.together(&first, &follow, work)?;
        let first_bytes =
            |position: usize| self.positions[position].automaton.map(|number| self.automata[number].first());
        let next_bytes: Vec<ByteSet> = follow
            .iter()
            .map(|follow| {
                let mut bytes = ByteSet::default();
                follow.iter().filter_map(first_bytes).for_each(|other| bytes.add(other));
                bytes
            })
            .collect();
        let mut found = IndexSet::new(self.positions.len());
        for (a, with) in together.iter().enumerate() {
            for b in with.iter() {
                if !found.has(b) && self.compare(a, b, work)?.go_on.meets(next_bytes[a]) {
                    found.insert(b);
                }
            }
        }
        Ok(found.iter().map(|position| self.positions[position].node).collect())
    }

    /// The relation of the terminals at two positions. Results are cached.
    fn compare(&mut self, a: usize, b: usize, work: &mut WorkBudget) -> Result<TerminalOverlap, GbnfError> {
        let (Some(a), Some(b)) = (self.positions[a].automaton, self.positions[b].automaton) else {
            // Tokens share no text with terminals, but two positions may have the same token.
            let share = self.positions[a].automaton.is_none() && self.positions[b].automaton.is_none();
            return Ok(TerminalOverlap { share, ..TerminalOverlap::default() });
        };
        if let Some(&known) = self.compared.get(&(a, b)) {
            return Ok(known);
        }
        let comparison = self.automata[a].compare(&self.automata[b], work)?;
        self.compared.insert((a, b), comparison);
        Ok(comparison)
    }

    /// The positions at which a text may begin, and for each position those that may follow it.
    fn follow(&self, work: &mut WorkBudget) -> Result<(IndexSet, Vec<IndexSet>), GbnfError> {
        let n = self.positions.len();
        let GbnfGrammar { bodies, root, .. } = self.grammar;
        let mut first = vec![IndexSet::new(n); bodies.len()];
        loop {
            let mut changed = false;
            for &rule in &self.order {
                let set = self.first(self.grammar.body(rule), &first, work)?;
                changed |= first[rule].add(&set);
            }
            if !changed {
                break;
            }
        }
        let mut after = FollowSets {
            rules: vec![IndexSet::new(n); bodies.len()],
            positions: vec![IndexSet::new(n); n],
            changed: true,
        };
        while after.changed {
            after.changed = false;
            for &rule in self.order.iter().rev() {
                let set = after.rules[rule].clone();
                self.push_after(self.grammar.body(rule), set, &first, &mut after, work)?;
            }
        }
        Ok((first.swap_remove(*root), after.positions))
    }

    /// The positions at which a text of `node` may begin.
    fn first(&self, node: NodeId, rules: &[IndexSet], work: &mut WorkBudget) -> Result<IndexSet, GbnfError> {
        work.spend(1 + self.positions.len() as u64 / 64)?;
        let mut set = IndexSet::new(self.positions.len());
        if let Some(&position) = self.at.get(&node) {
            set.insert(position);
            return Ok(set);
        }
        match self.grammar.kind(node) {
            NodeKind::Plain(_) | NodeKind::Text(_) | NodeKind::Token { .. } => {}
            NodeKind::Rule(rule) => {
                set.add(&rules[*rule]);
            }
            NodeKind::Sequence(parts) => {
                for &part in parts {
                    set.add(&self.first(part, rules, work)?);
                    if !self.grammar.nodes[part].nullable {
                        break;
                    }
                }
            }
            NodeKind::Choice(parts) => {
                for &part in parts {
                    set.add(&self.first(part, rules, work)?);
                }
            }
            NodeKind::Repeat { item, .. } => return self.first(*item, rules, work),
        }
        Ok(set)
    }

    /// Adds `set` to what may follow `node`, and passes it on to the positions below `node`.
    fn push_after(
        &self,
        node: NodeId,
        mut set: IndexSet,
        first: &[IndexSet],
        after: &mut FollowSets,
        work: &mut WorkBudget,
    ) -> Result<(), GbnfError> {
        work.spend(1 + self.positions.len() as u64 / 64)?;
        if let Some(&position) = self.at.get(&node) {
            after.positions[position].add(&set);
            return Ok(());
        }
        match self.grammar.kind(node) {
            NodeKind::Plain(_) | NodeKind::Text(_) | NodeKind::Token { .. } => {}
            NodeKind::Rule(rule) => after.changed |= after.rules[*rule].add(&set),
            NodeKind::Sequence(parts) => {
                for &part in parts.iter().rev() {
                    self.push_after(part, set.clone(), first, after, work)?;
                    let before = self.first(part, first, work)?;
                    if self.grammar.nodes[part].nullable {
                        set.add(&before);
                    } else {
                        set = before;
                    }
                }
            }
            NodeKind::Choice(parts) => {
                for &part in parts {
                    self.push_after(part, set.clone(), first, after, work)?;
                }
            }
            NodeKind::Repeat { item, max, .. } => {
                if *max != Some(1) {
                    set.add(&self.first(*item, first, work)?);
                }
                self.push_after(*item, set, first, after, work)?;
            }
        }
        Ok(())
    }

    /// For each position, the positions that the lexer may have to distinguish from it: both may come after the same
    /// text.
    fn together(
        &mut self,
        first: &IndexSet,
        follow: &[IndexSet],
        work: &mut WorkBudget,
    ) -> Result<Vec<IndexSet>, GbnfError> {
        let n = self.positions.len();
        let words = 1 + n as u64 / 64;
        let mut together = vec![IndexSet::new(n); n];
        for set in follow.iter().chain([first]) {
            for position in set.iter() {
                work.spend(words)?;
                together[position].add(set);
            }
        }
        let mut seen = vec![IndexSet::new(n); n];
        loop {
            let mut changed = false;
            for a in 0..n {
                let new: Vec<usize> = together[a].iter().filter(|&b| b > a && !seen[a].has(b)).collect();
                for b in new {
                    seen[a].insert(b);
                    changed = true;
                    work.spend(1)?;
                    if !self.compare(a, b, work)?.share {
                        continue;
                    }
                    for (from, to) in [(a, b), (b, a)] {
                        for position in follow[from].iter() {
                            work.spend(words)?;
                            together[position].add(&follow[to]);
                        }
                    }
                }
            }
            if !changed {
                return Ok(together);
            }
        }
    }
}

/// The positions that may follow each rule and each position, during the fixpoint iteration.
struct FollowSets {
    rules: Vec<IndexSet>,
    positions: Vec<IndexSet>,
    changed: bool,
}
