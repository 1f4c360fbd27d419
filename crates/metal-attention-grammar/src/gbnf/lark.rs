//! A grammar of rules over terminals, written as the Lark of llguidance.

use std::collections::HashMap;
use std::fmt::Write;

use super::nodes::{GbnfGrammar, NodeId, NodeKind};
use crate::lark::terminal;
use crate::pattern::written;

/// Writes `grammar`, whose first rule is `start`.
pub fn write(grammar: &GbnfGrammar) -> String {
    let mut writer =
        LarkWriter { grammar, lines: String::new(), rules: HashMap::new(), terminals: HashMap::new(), n: 0 };
    let start = writer.rule(grammar.root);
    format!("start: {start}\n{}", writer.lines)
}

struct LarkWriter<'a> {
    grammar: &'a GbnfGrammar,
    lines: String,
    /// The names of rules.
    rules: HashMap<usize, String>,
    /// The names of terminals, by their expressions.
    terminals: HashMap<String, String>,
    /// Names given so far.
    n: usize,
}

impl<'a> LarkWriter<'a> {
    fn name(&mut self, prefix: &str) -> String {
        self.n += 1;
        format!("{prefix}{}", self.n)
    }

    fn define(&mut self, name: &str, body: &str) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.lines, "{name}: {}", if body.is_empty() { "\"\"" } else { body });
    }

    /// The name of a rule, which is written where it is new.
    fn rule(&mut self, rule: usize) -> String {
        if let Some(name) = self.rules.get(&rule) {
            return name.clone();
        }
        let name = self.name("r");
        self.rules.insert(rule, name.clone());
        let body = self.alternatives(self.grammar.body(rule));
        self.define(&name, &body);
        name
    }

    /// What a rule describes.
    fn alternatives(&mut self, node: NodeId) -> String {
        let Some(NodeKind::Choice(parts)) = self.compound(node) else { return self.sequence(node) };
        let parts: Vec<String> = parts.iter().map(|&part| self.sequence(part)).collect();
        let written = |part: &'_ String| if part.is_empty() { "\"\"".to_owned() } else { part.clone() };
        parts.iter().map(written).collect::<Vec<_>>().join(" | ")
    }

    fn sequence(&mut self, node: NodeId) -> String {
        let Some(NodeKind::Sequence(parts)) = self.compound(node) else { return self.item(node) };
        let parts: Vec<String> = parts.iter().map(|&part| self.item(part)).collect();
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
    }

    fn item(&mut self, node: NodeId) -> String {
        let Some(NodeKind::Repeat { item, min, max }) = self.compound(node) else { return self.atom(node) };
        let item = self.atom(*item);
        match (min, max) {
            _ if item.is_empty() => item,
            (0, None) => format!("{item}*"),
            (1, None) => format!("{item}+"),
            (0, Some(1)) => format!("{item}?"),
            (min, None) => format!("{item}{{{min},}}"),
            (min, Some(max)) => format!("{item}{{{min},{max}}}"),
        }
    }

    /// What a node is that is no terminal.
    fn compound(&self, node: NodeId) -> Option<&'a NodeKind> {
        (!self.grammar.is_terminal(node)).then(|| self.grammar.kind(node))
    }

    /// The name of what a node describes: groups are rules of their own, for llguidance allows few inside each other.
    fn atom(&mut self, node: NodeId) -> String {
        if self.grammar.is_terminal(node) {
            let pattern = written(&self.grammar.expression(node));
            return if pattern == "(?:)" { String::new() } else { self.terminal(pattern) };
        }
        match self.grammar.kind(node) {
            NodeKind::Token { ids, negated } => {
                let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
                format!("<[{}{}]>", if *negated { "^" } else { "" }, ids.join(","))
            }
            NodeKind::Rule(rule) => self.rule(*rule),
            NodeKind::Sequence(parts) if parts.is_empty() => String::new(),
            NodeKind::Sequence(_)
            | NodeKind::Choice(_)
            | NodeKind::Repeat { .. }
            | NodeKind::Plain(_)
            | NodeKind::Text(_) => {
                let name = self.name("r");
                let body = self.alternatives(node);
                self.define(&name, &body);
                name
            }
        }
    }

    fn terminal(&mut self, pattern: String) -> String {
        if let Some(name) = self.terminals.get(&pattern) {
            return name.clone();
        }
        let name = self.name("T");
        self.define(&name, &terminal(&pattern));
        self.terminals.insert(pattern, name.clone());
        name
    }
}
