//! A grammar as a graph of nodes. A node that is regular and small enough may become a terminal, that is, one regular
//! expression of the lexer. `terminals.rs` decides which of these do.

use regex_syntax::hir::{Class, Hir, Repetition};

use super::GbnfError;
use super::rules::without_tail;
use super::syntax::{Expr, GbnfRule};

/// The maximum nesting of a terminal, with the rules that it refers to expanded.
const MAX_TERMINAL_DEPTH: usize = 60;
/// The maximum nesting of the whole grammar.
const MAX_DEPTH: usize = 2000;
/// The index of a node in [`GbnfGrammar::nodes`].
pub type NodeId = usize;

/// A part of a grammar.
pub struct GrammarNode {
    /// The kind of the node, with its parts.
    pub kind: NodeKind,
    /// Characters and nesting levels of the terminal that the node may become; `None` if it cannot be one.
    pub size: Option<(usize, usize)>,
    /// Whether the node matches the empty text.
    pub nullable: bool,
    /// Whether the node could be a terminal, but conflicts with others, so that its parts are terminals instead.
    pub is_split: bool,
}

/// The kind of a node.
#[derive(Clone)]
pub enum NodeKind {
    /// A single character, a class of characters, or the empty text.
    Plain(Hir),
    /// A text of several characters.
    Text(String),
    /// The rule with this number.
    Rule(usize),
    /// One of these tokens of the vocabulary; if `negated`, any other token.
    Token { ids: Vec<u32>, negated: bool },
    /// The parts in order.
    Sequence(Vec<NodeId>),
    /// One of the parts.
    Choice(Vec<NodeId>),
    /// `min` to `max` repetitions of `item`; without `max`: any number from `min`.
    Repeat { item: NodeId, min: u32, max: Option<u32> },
}

/// A grammar: rules over nodes.
pub struct GbnfGrammar {
    /// All nodes.
    pub nodes: Vec<GrammarNode>,
    /// The node of each rule's body; `None` if the rule is not reachable from `root`.
    pub bodies: Vec<Option<NodeId>>,
    /// The reachable rules. Each comes after the rules that it refers to, except for recursion.
    pub order: Vec<usize>,
    /// The number of the rule that describes the whole text.
    pub root: usize,
}

impl GbnfGrammar {
    /// Builds the grammar of `rules`. `nullable` tells for each rule whether it matches the empty text. Terminals have
    /// at most `max_terminal` characters.
    pub fn new(root: usize, rules: Vec<GbnfRule>, nullable: &[bool], max_terminal: usize) -> Result<Self, GbnfError> {
        let mut builder = NodeBuilder {
            rules: rules.into_iter().map(|rule| Some(rule.body)).collect(),
            nullable,
            max_terminal,
            grammar: Self { nodes: Vec::new(), bodies: vec![None; nullable.len()], order: Vec::new(), root },
        };
        builder.rule(root, 0)?;
        Ok(builder.grammar)
    }

    /// The kind of a node.
    pub fn kind(&self, node: NodeId) -> &NodeKind {
        &self.nodes[node].kind
    }

    /// The body of a rule, which must be reachable from `root`.
    pub fn body(&self, rule: usize) -> NodeId {
        self.bodies[rule].expect("root leads to it")
    }

    /// Whether a node is a terminal: it may be one and is not split.
    pub fn is_terminal(&self, node: NodeId) -> bool {
        let node = &self.nodes[node];
        node.size.is_some() && !node.is_split
    }

    /// The regular expression of a node that may be a terminal.
    pub fn expression(&self, node: NodeId) -> Hir {
        match &self.nodes[node].kind {
            NodeKind::Plain(hir) => hir.clone(),
            NodeKind::Text(text) => Hir::literal(text.as_bytes()),
            NodeKind::Rule(rule) => self.expression(self.body(*rule)),
            // A token is never part of a terminal.
            NodeKind::Token { .. } => Hir::fail(),
            NodeKind::Sequence(parts) => Hir::concat(parts.iter().map(|&part| self.expression(part)).collect()),
            NodeKind::Choice(parts) => Hir::alternation(parts.iter().map(|&part| self.expression(part)).collect()),
            NodeKind::Repeat { item, min, max } => {
                let sub = Box::new(self.expression(*item));
                Hir::repetition(Repetition { min: *min, max: *max, greedy: true, sub })
            }
        }
    }
}

/// Builds the nodes of the rules.
struct NodeBuilder<'a> {
    /// The bodies of the rules that are not built yet.
    rules: Vec<Option<Expr>>,
    nullable: &'a [bool],
    max_terminal: usize,
    grammar: GbnfGrammar,
}

impl NodeBuilder<'_> {
    /// Builds the body of a rule, unless it is built.
    fn rule(&mut self, number: usize, depth: usize) -> Result<(), GbnfError> {
        let Some(body) = self.rules[number].take() else { return Ok(()) };
        let body = self.node(without_tail(number, body), depth + 1)?;
        self.grammar.bodies[number] = Some(body);
        self.grammar.order.push(number);
        Ok(())
    }

    /// Adds a node. A node that is too large for a terminal loses its size.
    fn add(&mut self, kind: NodeKind, size: Option<(usize, usize)>, nullable: bool) -> NodeId {
        let small = |&(characters, levels): &(usize, usize)| {
            let is_text = matches!(kind, NodeKind::Plain(_) | NodeKind::Text(_));
            is_text || (characters <= self.max_terminal && levels <= MAX_TERMINAL_DEPTH)
        };
        let size = size.filter(small);
        self.grammar.nodes.push(GrammarNode { kind, size, nullable, is_split: false });
        self.grammar.nodes.len() - 1
    }

    /// Builds the node of an expression.
    fn node(&mut self, expr: Expr, depth: usize) -> Result<NodeId, GbnfError> {
        if depth > MAX_DEPTH {
            return Err(GbnfError::TooLarge(format!("its rules are more than {MAX_DEPTH} deep in each other")));
        }
        Ok(match expr {
            Expr::Chars(class) => self.add(NodeKind::Plain(Hir::class(Class::Unicode(class))), Some((1, 1)), false),
            Expr::Text(text) => {
                let n = text.chars().count();
                let kind = if n > 1 { NodeKind::Text(text) } else { NodeKind::Plain(Hir::literal(text.into_bytes())) };
                self.add(kind, Some((n, 1)), n == 0)
            }
            Expr::Token { ids, negated } => self.add(NodeKind::Token { ids, negated }, None, false),
            Expr::Rule(number) => {
                self.rule(number, depth)?;
                let size = self.grammar.bodies[number].and_then(|body| self.grammar.nodes[body].size);
                self.add(NodeKind::Rule(number), size.map(|(n, levels)| (n, levels + 1)), self.nullable[number])
            }
            Expr::Sequence(parts) => {
                let parts = self.nodes(parts, depth)?;
                // Adjacent parts that may be one terminal are grouped.
                let mut groups: Vec<Vec<NodeId>> = Vec::new();
                for part in parts {
                    let plain = self.grammar.nodes[part].size.is_some();
                    match groups.last_mut() {
                        Some(group) if plain && self.grammar.nodes[group[0]].size.is_some() => group.push(part),
                        _ => groups.push(vec![part]),
                    }
                }
                self.group(groups, NodeKind::Sequence)
            }
            Expr::Choice(parts) => {
                let parts = self.nodes(parts, depth)?;
                let (plain, others): (Vec<_>, Vec<_>) =
                    parts.into_iter().partition(|&part| self.grammar.nodes[part].size.is_some());
                let groups = others.into_iter().map(|part| vec![part]);
                let plain = Some(plain).filter(|plain| !plain.is_empty());
                self.group(plain.into_iter().chain(groups).collect(), NodeKind::Choice)
            }
            Expr::Repeat { max: Some(0), .. } => self.add(NodeKind::Sequence(Vec::new()), Some((0, 1)), true),
            Expr::Repeat { item, min, max } => {
                let item = self.node(*item, depth + 1)?;
                let GrammarNode { size, nullable, .. } = &self.grammar.nodes[item];
                let times = max.unwrap_or(min).max(1) as usize;
                let size = size.map(|(characters, levels)| (characters.saturating_mul(times), levels + 1));
                let nullable = *nullable || min == 0;
                self.add(NodeKind::Repeat { item, min, max }, size, nullable)
            }
        })
    }

    fn nodes(&mut self, parts: Vec<Expr>, depth: usize) -> Result<Vec<NodeId>, GbnfError> {
        parts.into_iter().map(|part| self.node(part, depth + 1)).collect()
    }

    /// Builds a node of groups. A group of several parts becomes a node of its own, which may be a terminal.
    fn group(&mut self, groups: Vec<Vec<NodeId>>, kind: fn(Vec<NodeId>) -> NodeKind) -> NodeId {
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

    /// Adds a node of these parts, with the size and emptiness that follow from them.
    fn whole(&mut self, parts: Vec<NodeId>, kind: fn(Vec<NodeId>) -> NodeKind) -> NodeId {
        let nodes = &self.grammar.nodes;
        let size = parts.iter().try_fold((0, 0), |(sum, deepest): (usize, usize), &part| {
            nodes[part].size.map(|(characters, levels)| (sum.saturating_add(characters), deepest.max(levels)))
        });
        let size = size.map(|(characters, levels)| (characters, levels + 1));
        let kind = kind(parts);
        let nullable = match &kind {
            NodeKind::Choice(parts) => parts.iter().any(|&part| nodes[part].nullable),
            NodeKind::Sequence(parts) => parts.iter().all(|&part| nodes[part].nullable),
            NodeKind::Plain(_)
            | NodeKind::Text(_)
            | NodeKind::Rule(_)
            | NodeKind::Token { .. }
            | NodeKind::Repeat { .. } => false,
        };
        self.add(kind, size, nullable)
    }
}
