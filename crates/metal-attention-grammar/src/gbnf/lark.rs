//! Writes a GBNF grammar whose terminals are determined as a Lark grammar for llguidance.

use std::collections::HashMap;
use std::fmt::Write;

use super::nodes::{GbnfGrammar, NodeId, NodeKind};
use crate::lark::terminal;
use crate::pattern::written;

/// The Lark text of `grammar`. The rule `start` refers to its root.
pub fn write(grammar: &GbnfGrammar) -> String {
    let mut writer =
        LarkWriter { grammar, lines: String::new(), rules: HashMap::new(), terminals: HashMap::new(), n: 0 };
    let start = writer.rule(grammar.root);
    format!("start: {start}\n{}", writer.lines)
}

struct LarkWriter<'a> {
    grammar: &'a GbnfGrammar,
    lines: String,
    /// The Lark name of each rule that was written, by rule number.
    rules: HashMap<usize, String>,
    /// The Lark name of each terminal, by its regular expression.
    terminals: HashMap<String, String>,
    /// The number of names given so far.
    n: usize,
}

impl<'a> LarkWriter<'a> {
    /// A new name with this prefix.
    fn name(&mut self, prefix: &str) -> String {
        self.n += 1;
        format!("{prefix}{}", self.n)
    }

    /// Writes the definition of a rule or terminal.
    fn define(&mut self, name: &str, body: &str) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.lines, "{name}: {}", if body.is_empty() { "\"\"" } else { body });
    }

    /// The Lark name of a rule. The rule is written if it is new.
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

    /// A node as the alternatives of a rule.
    fn alternatives(&mut self, node: NodeId) -> String {
        let Some(NodeKind::Choice(parts)) = self.compound(node) else { return self.sequence(node) };
        let parts: Vec<String> = parts.iter().map(|&part| self.sequence(part)).collect();
        let written = |part: &'_ String| if part.is_empty() { "\"\"".to_owned() } else { part.clone() };
        parts.iter().map(written).collect::<Vec<_>>().join(" | ")
    }

    /// A node as a sequence.
    fn sequence(&mut self, node: NodeId) -> String {
        let Some(NodeKind::Sequence(parts)) = self.compound(node) else { return self.item(node) };
        let parts: Vec<String> = parts.iter().map(|&part| self.item(part)).collect();
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
    }

    /// A node as an item with a repetition sign.
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

    /// The kind of a node that is not a terminal; `None` for a terminal.
    fn compound(&self, node: NodeId) -> Option<&'a NodeKind> {
        (!self.grammar.is_terminal(node)).then(|| self.grammar.kind(node))
    }

    /// A node as a name or token. A group becomes a rule of its own, because llguidance allows little nesting of
    /// groups.
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

    /// The Lark name of a terminal. The terminal is written if it is new.
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
