//! The parts of a grammar, and which of them may be terminals because they are regular and small.

use regex_syntax::hir::{Class, Hir, Repetition};

use super::GbnfError;
use super::rules::without_tail;
use super::syntax::{Expr, Rule};

/// Deepest levels of a terminal, rules written out.
const MAX_TERMINAL_DEPTH: usize = 60;
/// Deepest levels of the whole grammar.
const MAX_DEPTH: usize = 2000;
/// The number of a node.
pub type NodeId = usize;

/// A part of a grammar.
pub struct Node {
    /// What it is.
    pub kind: Kind,
    /// Characters and levels of the terminal that it may be; none where it cannot be one.
    pub size: Option<(usize, usize)>,
    /// The empty text is one that it describes.
    pub nullable: bool,
    /// It may be a terminal, but is in the way of others.
    pub apart: bool,
}

/// What a part of a grammar is.
#[derive(Clone)]
pub enum Kind {
    /// Text, or a class of characters.
    Plain(Hir),
    /// A text of several characters.
    Text(String),
    /// The rule of this number.
    Rule(usize),
    /// One of these tokens of the vocabulary, or with `negated` any other one.
    Token { ids: Vec<u32>, negated: bool },
    /// One after the other.
    Sequence(Vec<NodeId>),
    /// One of these.
    Choice(Vec<NodeId>),
    /// `min` to `max` times.
    Repeat { of: NodeId, min: u32, max: Option<u32> },
}

/// A grammar of rules over terminals.
pub struct Grammar {
    /// Its parts.
    pub nodes: Vec<Node>,
    /// What each rule describes; none where `root` does not lead to it.
    pub bodies: Vec<Option<NodeId>>,
    /// The rules that `root` leads to, each after those that it names, but for recursion.
    pub order: Vec<usize>,
    /// The rule that describes the whole text.
    pub root: usize,
}

impl Grammar {
    /// The grammar of `rules`, of which `nullable` may be empty, with terminals of at most `max_terminal` characters.
    pub fn new(root: usize, rules: Vec<Rule>, nullable: &[bool], max_terminal: usize) -> Result<Self, GbnfError> {
        let mut building = Building {
            rules: rules.into_iter().map(|rule| Some(rule.body)).collect(),
            nullable,
            max_terminal,
            grammar: Self { nodes: Vec::new(), bodies: vec![None; nullable.len()], order: Vec::new(), root },
        };
        building.rule(root, 0)?;
        Ok(building.grammar)
    }

    /// What a node is.
    pub fn kind(&self, node: NodeId) -> &Kind {
        &self.nodes[node].kind
    }

    /// What a rule describes, which `root` leads to.
    pub fn body(&self, rule: usize) -> NodeId {
        self.bodies[rule].expect("root leads to it")
    }

    /// Whether a node is a terminal.
    pub fn is_terminal(&self, node: NodeId) -> bool {
        let node = &self.nodes[node];
        node.size.is_some() && !node.apart
    }

    /// The regular expression of a node that may be a terminal.
    pub fn expression(&self, node: NodeId) -> Hir {
        match &self.nodes[node].kind {
            Kind::Plain(hir) => hir.clone(),
            Kind::Text(text) => Hir::literal(text.as_bytes()),
            Kind::Rule(rule) => self.expression(self.body(*rule)),
            // No part of a terminal is a token.
            Kind::Token { .. } => Hir::fail(),
            Kind::Sequence(parts) => Hir::concat(parts.iter().map(|&part| self.expression(part)).collect()),
            Kind::Choice(parts) => Hir::alternation(parts.iter().map(|&part| self.expression(part)).collect()),
            Kind::Repeat { of, min, max } => {
                let sub = Box::new(self.expression(*of));
                Hir::repetition(Repetition { min: *min, max: *max, greedy: true, sub })
            }
        }
    }
}

/// Makes nodes of rules.
struct Building<'a> {
    /// The rules that have not been made nodes yet.
    rules: Vec<Option<Expr>>,
    nullable: &'a [bool],
    max_terminal: usize,
    grammar: Grammar,
}

impl Building<'_> {
    fn rule(&mut self, number: usize, depth: usize) -> Result<(), GbnfError> {
        let Some(body) = self.rules[number].take() else { return Ok(()) };
        let body = self.node(without_tail(number, body), depth + 1)?;
        self.grammar.bodies[number] = Some(body);
        self.grammar.order.push(number);
        Ok(())
    }

    fn add(&mut self, kind: Kind, size: Option<(usize, usize)>, nullable: bool) -> NodeId {
        let small = |&(characters, levels): &(usize, usize)| {
            let is_text = matches!(kind, Kind::Plain(_) | Kind::Text(_));
            is_text || (characters <= self.max_terminal && levels <= MAX_TERMINAL_DEPTH)
        };
        let size = size.filter(small);
        self.grammar.nodes.push(Node { kind, size, nullable, apart: false });
        self.grammar.nodes.len() - 1
    }

    fn node(&mut self, expr: Expr, depth: usize) -> Result<NodeId, GbnfError> {
        if depth > MAX_DEPTH {
            return Err(GbnfError::TooLarge(format!("its rules are more than {MAX_DEPTH} deep in each other")));
        }
        Ok(match expr {
            Expr::Chars(class) => self.add(Kind::Plain(Hir::class(Class::Unicode(class))), Some((1, 1)), false),
            Expr::Text(text) => {
                let n = text.chars().count();
                let kind = if n > 1 { Kind::Text(text) } else { Kind::Plain(Hir::literal(text.into_bytes())) };
                self.add(kind, Some((n, 1)), n == 0)
            }
            Expr::Token { ids, negated } => self.add(Kind::Token { ids, negated }, None, false),
            Expr::Rule(number) => {
                self.rule(number, depth)?;
                let size = self.grammar.bodies[number].and_then(|body| self.grammar.nodes[body].size);
                self.add(Kind::Rule(number), size.map(|(n, levels)| (n, levels + 1)), self.nullable[number])
            }
            Expr::Sequence(parts) => {
                let parts = self.nodes(parts, depth)?;
                // What may be one terminal is one.
                let mut groups: Vec<Vec<NodeId>> = Vec::new();
                for part in parts {
                    let plain = self.grammar.nodes[part].size.is_some();
                    match groups.last_mut() {
                        Some(group) if plain && self.grammar.nodes[group[0]].size.is_some() => group.push(part),
                        _ => groups.push(vec![part]),
                    }
                }
                self.group(groups, Kind::Sequence)
            }
            Expr::Choice(parts) => {
                let parts = self.nodes(parts, depth)?;
                let (plain, others): (Vec<_>, Vec<_>) =
                    parts.into_iter().partition(|&part| self.grammar.nodes[part].size.is_some());
                let groups = others.into_iter().map(|part| vec![part]);
                let plain = Some(plain).filter(|plain| !plain.is_empty());
                self.group(plain.into_iter().chain(groups).collect(), Kind::Choice)
            }
            Expr::Repeat { max: Some(0), .. } => self.add(Kind::Sequence(Vec::new()), Some((0, 1)), true),
            Expr::Repeat { of, min, max } => {
                let of = self.node(*of, depth + 1)?;
                let Node { size, nullable, .. } = &self.grammar.nodes[of];
                let times = max.unwrap_or(min).max(1) as usize;
                let size = size.map(|(characters, levels)| (characters.saturating_mul(times), levels + 1));
                let nullable = *nullable || min == 0;
                self.add(Kind::Repeat { of, min, max }, size, nullable)
            }
        })
    }

    fn nodes(&mut self, parts: Vec<Expr>, depth: usize) -> Result<Vec<NodeId>, GbnfError> {
        parts.into_iter().map(|part| self.node(part, depth + 1)).collect()
    }

    /// A node of groups of nodes, of which those with several parts may be terminals.
    fn group(&mut self, groups: Vec<Vec<NodeId>>, kind: fn(Vec<NodeId>) -> Kind) -> NodeId {
        let mut parts: Vec<NodeId> = Vec::new();
        let n_groups = groups.len();
        for group in groups {
            match group.as_slice() {
                &[single] => parts.push(single),
                _ if n_groups == 1 => parts = group,
                _ => {
                    let node = self.whole(group, kind);
                    parts.push(node);
                }
            }
        }
        self.whole(parts, kind)
    }

    fn whole(&mut self, parts: Vec<NodeId>, kind: fn(Vec<NodeId>) -> Kind) -> NodeId {
        let nodes = &self.grammar.nodes;
        let size = parts.iter().try_fold((0, 0), |(sum, deepest): (usize, usize), &part| {
            nodes[part].size.map(|(characters, levels)| (sum.saturating_add(characters), deepest.max(levels)))
        });
        let size = size.map(|(characters, levels)| (characters, levels + 1));
        let kind = kind(parts);
        let nullable = match &kind {
            Kind::Choice(parts) => parts.iter().any(|&part| nodes[part].nullable),
            Kind::Sequence(parts) => parts.iter().all(|&part| nodes[part].nullable),
            Kind::Plain(_) | Kind::Text(_) | Kind::Rule(_) | Kind::Token { .. } | Kind::Repeat { .. } => false,
        };
        self.add(kind, size, nullable)
    }
}
