//! Which parts of a grammar are terminals of the lexer.
//!
//! llguidance reads a text in two layers: a lexer that finds terminals (regular expressions) and a parser of rules over
//! them. The larger the terminals, the cheaper each token. But the lexer is greedy: it goes on with a terminal as long as any
//! that may stand there goes on. GBNF has no lexer, so a part may be a terminal only where that makes no difference: where no
//! text of it, followed by what may follow it, is also the beginning of a longer text of a terminal that may stand there.
//!
//! So: the largest parts without recursion become terminals, and those that are in the way of others are taken apart,
//! until none is. In the end that leaves single characters, which are never in the way.

use std::collections::HashMap;

use regex_syntax::hir::Hir;

use super::language::{Bytes, Comparison, Language};
use super::nodes::{Grammar, Kind, Node, NodeId};
use super::set::Set;
use super::{GbnfError, Work};
use crate::pattern::written;

/// Most places at which terminals stand.
const MAX_PLACES: usize = 2000;
/// Most characters of all terminals together, repetitions counted.
const MAX_CHARACTERS: usize = 500_000;
/// Rounds after which every terminal that is in the way is split into its characters.
const MAX_ROUNDS: usize = 40;

/// A place at which a terminal, or a token, stands.
struct Place {
    node: NodeId,
    /// The number of the terminal's language; none for a token.
    language: Option<usize>,
}

impl Grammar {
    /// Takes terminals apart until none is in the way of another.
    pub fn take_apart(&mut self, work: &mut Work) -> Result<(), GbnfError> {
        for round in 0.. {
            if self.is_terminal(self.body(self.root)) {
                return Ok(());
            }
            let in_the_way = self.in_the_way(work)?;
            if in_the_way.is_empty() {
                return Ok(());
            }
            for node in in_the_way {
                self.split(node, round >= MAX_ROUNDS);
            }
        }
        Ok(())
    }

    /// Has the parts of a terminal be terminals in its place; with `wholly` its characters.
    fn split(&mut self, node: NodeId, wholly: bool) {
        if self.nodes[node].apart {
            return;
        }
        let parts = match self.nodes[node].kind.clone() {
            Kind::Plain(_) | Kind::Token { .. } => return,
            Kind::Text(text) => {
                let character = |c: char| Node {
                    kind: Kind::Plain(Hir::literal(c.to_string().into_bytes())),
                    size: Some((1, 1)),
                    nullable: false,
                    apart: false,
                };
                let from = self.nodes.len();
                self.nodes.extend(text.chars().map(character));
                let parts: Vec<_> = (from..self.nodes.len()).collect();
                self.nodes[node].kind = Kind::Sequence(parts.clone());
                parts
            }
            Kind::Rule(rule) => vec![self.body(rule)],
            Kind::Sequence(parts) | Kind::Choice(parts) => parts,
            Kind::Repeat { of, .. } => vec![of],
        };
        self.nodes[node].apart = true;
        if wholly {
            for part in parts {
                self.split(part, true);
            }
        }
    }

    /// The terminals that are in the way of others.
    fn in_the_way(&self, work: &mut Work) -> Result<Vec<NodeId>, GbnfError> {
        let mut collected = Collected { at: HashMap::new(), places: Vec::new(), rules: Set::new(self.bodies.len()) };
        collected.rules.insert(self.root);
        let mut left: Vec<usize> = vec![self.root];
        while let Some(rule) = left.pop() {
            self.collect(self.body(rule), &mut collected, &mut left);
        }
        let Collected { at, mut places, rules } = collected;
        let order: Vec<usize> = self.order.iter().copied().filter(|&rule| rules.has(rule)).collect();
        if places.len() > MAX_PLACES {
            return Err(GbnfError::TooLarge(format!(
                "it has {} terminals at different places; at most {MAX_PLACES} are allowed",
                places.len()
            )));
        }
        let (mut languages, mut too_large) = (Vec::new(), Vec::new());
        let mut numbers: HashMap<String, Option<usize>> = HashMap::new();
        let mut n_characters = 0;
        for place in &mut places {
            let Some((characters, _)) = self.nodes[place.node].size else { continue };
            n_characters += characters;
            work.spend(characters as u64)?;
            if n_characters > MAX_CHARACTERS {
                return Err(GbnfError::TooLarge("its terminals are too large, repetitions counted".into()));
            }
            let hir = self.expression(place.node);
            let number = *numbers.entry(written(&hir)).or_insert_with(|| {
                let language = Language::new(&hir)?;
                languages.push(language);
                Some(languages.len() - 1)
            });
            place.language = number;
            if number.is_none() {
                too_large.push(place.node);
            }
        }
        if !too_large.is_empty() {
            return Ok(too_large);
        }
        Neighbours { grammar: self, order, at, places, languages: &languages, compared: HashMap::new() }.conflicts(work)
    }

    /// Adds the places below a node, and to `left` the rules that it names and that are new.
    fn collect(&self, node: NodeId, collected: &mut Collected, left: &mut Vec<usize>) {
        let kind = &self.nodes[node].kind;
        if self.is_terminal(node) || matches!(kind, Kind::Token { .. }) {
            collected.at.insert(node, collected.places.len());
            collected.places.push(Place { node, language: None });
            return;
        }
        match kind {
            Kind::Plain(_) | Kind::Text(_) | Kind::Token { .. } => {}
            Kind::Rule(rule) => {
                if !collected.rules.has(*rule) {
                    collected.rules.insert(*rule);
                    left.push(*rule);
                }
            }
            Kind::Sequence(parts) | Kind::Choice(parts) => {
                for &part in parts {
                    self.collect(part, collected, left);
                }
            }
            Kind::Repeat { of, .. } => self.collect(*of, collected, left),
        }
    }
}

/// The places of a grammar.
struct Collected {
    /// The place at which a node stands.
    at: HashMap<NodeId, usize>,
    places: Vec<Place>,
    /// The rules that stand outside of terminals.
    rules: Set,
}

/// What stands next to what.
struct Neighbours<'a> {
    grammar: &'a Grammar,
    /// The rules that stand outside of terminals, each after those that it names, but for recursion.
    order: Vec<usize>,
    /// The place at which a node stands.
    at: HashMap<NodeId, usize>,
    places: Vec<Place>,
    languages: &'a [Language],
    compared: HashMap<(usize, usize), Comparison>,
}

impl Neighbours<'_> {
    /// The nodes of terminals that go on where another one has ended and something else may follow.
    fn conflicts(mut self, work: &mut Work) -> Result<Vec<NodeId>, GbnfError> {
        let (first, follow) = self.follow(work)?;
        let together = self.together(&first, &follow, work)?;
        let first_bytes = |place: usize| self.places[place].language.map(|number| self.languages[number].first());
        let next_bytes: Vec<Bytes> = follow
            .iter()
            .map(|follow| {
                let mut bytes = Bytes::default();
                follow.iter().filter_map(first_bytes).for_each(|other| bytes.add(other));
                bytes
            })
            .collect();
        let mut found = Set::new(self.places.len());
        for (a, with) in together.iter().enumerate() {
            for b in with.iter() {
                if !found.has(b) && self.compare(a, b, work)?.go_on.meets(next_bytes[a]) {
                    found.insert(b);
                }
            }
        }
        Ok(found.iter().map(|place| self.places[place].node).collect())
    }

    /// How the terminals of two places are related.
    fn compare(&mut self, a: usize, b: usize, work: &mut Work) -> Result<Comparison, GbnfError> {
        let (Some(a), Some(b)) = (self.places[a].language, self.places[b].language) else {
            // Tokens have no texts that others share, but may be the same one.
            let share = self.places[a].language.is_none() && self.places[b].language.is_none();
            return Ok(Comparison { share, ..Comparison::default() });
        };
        if let Some(&known) = self.compared.get(&(a, b)) {
            return Ok(known);
        }
        let comparison = self.languages[a].compare(&self.languages[b], work)?;
        self.compared.insert((a, b), comparison);
        Ok(comparison)
    }

    /// The places at which a text may begin, and those that may follow each place.
    fn follow(&self, work: &mut Work) -> Result<(Set, Vec<Set>), GbnfError> {
        let n = self.places.len();
        let Grammar { bodies, root, .. } = self.grammar;
        let mut first = vec![Set::new(n); bodies.len()];
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
        let mut after = After { rules: vec![Set::new(n); bodies.len()], places: vec![Set::new(n); n], changed: true };
        while after.changed {
            after.changed = false;
            for &rule in self.order.iter().rev() {
                let set = after.rules[rule].clone();
                self.push_after(self.grammar.body(rule), set, &first, &mut after, work)?;
            }
        }
        Ok((first.swap_remove(*root), after.places))
    }

    /// The places at which what `node` describes may begin.
    fn first(&self, node: NodeId, rules: &[Set], work: &mut Work) -> Result<Set, GbnfError> {
        work.spend(1 + self.places.len() as u64 / 64)?;
        let mut set = Set::new(self.places.len());
        if let Some(&place) = self.at.get(&node) {
            set.insert(place);
            return Ok(set);
        }
        match self.grammar.kind(node) {
            Kind::Plain(_) | Kind::Text(_) | Kind::Token { .. } => {}
            Kind::Rule(rule) => {
                set.add(&rules[*rule]);
            }
            Kind::Sequence(parts) => {
                for &part in parts {
                    set.add(&self.first(part, rules, work)?);
                    if !self.grammar.nodes[part].nullable {
                        break;
                    }
                }
            }
            Kind::Choice(parts) => {
                for &part in parts {
                    set.add(&self.first(part, rules, work)?);
                }
            }
            Kind::Repeat { of, .. } => return self.first(*of, rules, work),
        }
        Ok(set)
    }

    /// Has what is below `node` know that `set` follows it.
    fn push_after(
        &self,
        node: NodeId,
        mut set: Set,
        first: &[Set],
        after: &mut After,
        work: &mut Work,
    ) -> Result<(), GbnfError> {
        work.spend(1 + self.places.len() as u64 / 64)?;
        if let Some(&place) = self.at.get(&node) {
            after.places[place].add(&set);
            return Ok(());
        }
        match self.grammar.kind(node) {
            Kind::Plain(_) | Kind::Text(_) | Kind::Token { .. } => {}
            Kind::Rule(rule) => after.changed |= after.rules[*rule].add(&set),
            Kind::Sequence(parts) => {
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
            Kind::Choice(parts) => {
                for &part in parts {
                    self.push_after(part, set.clone(), first, after, work)?;
                }
            }
            Kind::Repeat { of, max, .. } => {
                if *max != Some(1) {
                    set.add(&self.first(*of, first, work)?);
                }
                self.push_after(*of, set, first, after, work)?;
            }
        }
        Ok(())
    }

    /// For each place those that the lexer may have to tell from it: both may come after the same text.
    fn together(&mut self, first: &Set, follow: &[Set], work: &mut Work) -> Result<Vec<Set>, GbnfError> {
        let n = self.places.len();
        let words = 1 + n as u64 / 64;
        let mut together = vec![Set::new(n); n];
        for set in follow.iter().chain([first]) {
            for place in set.iter() {
                work.spend(words)?;
                together[place].add(set);
            }
        }
        let mut seen = vec![Set::new(n); n];
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
                        for place in follow[from].iter() {
                            work.spend(words)?;
                            together[place].add(&follow[to]);
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

/// What may follow rules and places.
struct After {
    rules: Vec<Set>,
    places: Vec<Set>,
    changed: bool,
}
