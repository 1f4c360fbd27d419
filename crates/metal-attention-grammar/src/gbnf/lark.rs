//! A grammar of rules over terminals, written as the Lark of llguidance.

use std::collections::HashMap;
use std::fmt::Write;

use super::nodes::{Grammar, Kind, NodeId};
use crate::lark::terminal;
use crate::pattern::written;

/// Writes `grammar`, whose first rule is `start`.
pub fn write(grammar: &Grammar) -> String {
    let mut writer = Writer { grammar, lines: String::new(), rules: HashMap::new(), terminals: HashMap::new(), n: 0 };
    let start = writer.rule(grammar.root);
    format!("start: {start}\n{}", writer.lines)
}

struct Writer<'a> {
    grammar: &'a Grammar,
    lines: String,
    /// The names of rules.
    rules: HashMap<usize, String>,
    /// The names of terminals, by their expressions.
    terminals: HashMap<String, String>,
    /// Names given so far.
    n: usize,
}

impl<'a> Writer<'a> {
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
        let Some(Kind::Choice(parts)) = self.apart(node) else { return self.sequence(node) };
        let parts: Vec<String> = parts.iter().map(|&part| self.sequence(part)).collect();
        let written = |part: &'_ String| if part.is_empty() { "\"\"".to_owned() } else { part.clone() };
        parts.iter().map(written).collect::<Vec<_>>().join(" | ")
    }

    fn sequence(&mut self, node: NodeId) -> String {
        let Some(Kind::Sequence(parts)) = self.apart(node) else { return self.item(node) };
        let parts: Vec<String> = parts.iter().map(|&part| self.item(part)).collect();
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
    }

    fn item(&mut self, node: NodeId) -> String {
        let Some(Kind::Repeat { of, min, max }) = self.apart(node) else { return self.atom(node) };
        let of = self.atom(*of);
        match (min, max) {
            _ if of.is_empty() => of,
            (0, None) => format!("{of}*"),
            (1, None) => format!("{of}+"),
            (0, Some(1)) => format!("{of}?"),
            (min, None) => format!("{of}{{{min},}}"),
            (min, Some(max)) => format!("{of}{{{min},{max}}}"),
        }
    }

    /// What a node is that is no terminal.
    fn apart(&self, node: NodeId) -> Option<&'a Kind> {
        (!self.grammar.is_terminal(node)).then(|| self.grammar.kind(node))
    }

    /// The name of what a node describes: groups are rules of their own, for llguidance allows few inside each other.
    fn atom(&mut self, node: NodeId) -> String {
        if self.grammar.is_terminal(node) {
            let pattern = written(&self.grammar.expression(node));
            return if pattern == "(?:)" { String::new() } else { self.terminal(pattern) };
        }
        match self.grammar.kind(node) {
            Kind::Token { ids, negated } => {
                let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
                format!("<[{}{}]>", if *negated { "^" } else { "" }, ids.join(","))
            }
            Kind::Rule(rule) => self.rule(*rule),
            Kind::Sequence(parts) if parts.is_empty() => String::new(),
            Kind::Sequence(_) | Kind::Choice(_) | Kind::Repeat { .. } | Kind::Plain(_) | Kind::Text(_) => {
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
