//! Checks and rewrites of whole rules: whether a rule can match a finite text or the empty text, left recursion, and
//! tail recursion that can be written as a repetition.

use super::GbnfError;
use super::syntax::{Expr, GbnfRule};

/// The maximum number of alternatives into which a tail-recursive rule is expanded.
const MAX_ALTERNATIVES: usize = 64;

/// Checks that `root` matches some text and that no rule is left-recursive. Returns for each rule whether it matches
/// the empty text.
pub fn check(root: usize, rules: &[GbnfRule]) -> Result<Vec<bool>, GbnfError> {
    let nullable = fixpoint(rules, &is_nullable);
    let mut colours = vec![Colour::New; rules.len()];
    for number in 0..rules.len() {
        if let Some(circular) = leads_back(number, rules, &nullable, &mut colours) {
            let GbnfRule { name, line, .. } = &rules[circular];
            return Err(GbnfError::at(*line, format!("the rule {name:?} begins with itself (left recursion)")));
        }
    }
    if !fixpoint(rules, &ends)[root] {
        let problem = "no text ends by the rule \"root\": what it describes always goes on";
        return Err(GbnfError::at(rules[root].line, problem));
    }
    Ok(nullable)
}

/// The least solution of a property of rules: `holds` decides for a body, given for which rules the property is known
/// to hold.
fn fixpoint(rules: &[GbnfRule], holds: &dyn Fn(&Expr, &[bool]) -> bool) -> Vec<bool> {
    let mut users = vec![Vec::new(); rules.len()];
    for (user, rule) in rules.iter().enumerate() {
        each_rule(&rule.body, &mut |used| users[used].push(user));
    }
    let mut solution = vec![false; rules.len()];
    let mut left: Vec<usize> = (0..rules.len()).collect();
    while let Some(number) = left.pop() {
        if !solution[number] && holds(&rules[number].body, &solution) {
            solution[number] = true;
            left.append(&mut users[number]);
        }
    }
    solution
}

/// Calls `see` with the number of each rule that `expr` refers to.
pub fn each_rule(expr: &Expr, see: &mut dyn FnMut(usize)) {
    match expr {
        Expr::Chars(_) | Expr::Text(_) | Expr::Token { .. } => {}
        Expr::Rule(number) => see(*number),
        Expr::Sequence(parts) | Expr::Choice(parts) => parts.iter().for_each(|part| each_rule(part, see)),
        Expr::Repeat { item, .. } => each_rule(item, see),
    }
}

/// Whether `expr` matches some finite text. `rules` tells this for rules.
fn ends(expr: &Expr, rules: &[bool]) -> bool {
    match expr {
        Expr::Chars(_) | Expr::Text(_) | Expr::Token { .. } => true,
        Expr::Rule(number) => rules[*number],
        Expr::Sequence(parts) => parts.iter().all(|part| ends(part, rules)),
        Expr::Choice(parts) => parts.iter().any(|part| ends(part, rules)),
        Expr::Repeat { item, min, .. } => *min == 0 || ends(item, rules),
    }
}

/// Whether `expr` matches the empty text. `rules` tells this for rules.
fn is_nullable(expr: &Expr, rules: &[bool]) -> bool {
    match expr {
        Expr::Chars(_) | Expr::Token { .. } => false,
        Expr::Text(text) => text.is_empty(),
        Expr::Rule(number) => rules[*number],
        Expr::Sequence(parts) => parts.iter().all(|part| is_nullable(part, rules)),
        Expr::Choice(parts) => parts.iter().any(|part| is_nullable(part, rules)),
        Expr::Repeat { item, min, .. } => *min == 0 || is_nullable(item, rules),
    }
}

#[derive(Clone, Copy, PartialEq)]
/// The state of a rule in the depth-first search for left recursion.
enum Colour {
    New,
    Open,
    Done,
}

/// A left-recursive rule among those that rule `number` may begin with; `None` if there is none.
fn leads_back(number: usize, rules: &[GbnfRule], nullable: &[bool], colours: &mut [Colour]) -> Option<usize> {
    match colours[number] {
        Colour::Open => return Some(number),
        Colour::Done => return None,
        Colour::New => colours[number] = Colour::Open,
    }
    let mut beginnings = Vec::new();
    begins_with(&rules[number].body, nullable, &mut beginnings);
    let found = beginnings.into_iter().find_map(|next| leads_back(next, rules, nullable, colours));
    colours[number] = Colour::Done;
    found
}

/// Adds the rules that `expr` may begin with.
fn begins_with(expr: &Expr, nullable: &[bool], beginnings: &mut Vec<usize>) {
    match expr {
        Expr::Chars(_) | Expr::Text(_) | Expr::Token { .. } => {}
        Expr::Rule(number) => beginnings.push(*number),
        Expr::Sequence(parts) => {
            for part in parts {
                begins_with(part, nullable, beginnings);
                if !is_nullable(part, nullable) {
                    return;
                }
            }
        }
        Expr::Choice(parts) => parts.iter().for_each(|part| begins_with(part, nullable, beginnings)),
        Expr::Repeat { item, .. } => begins_with(item, nullable, beginnings),
    }
}

/// The body of rule `number` with tail recursion replaced by a repetition, if all its recursion is tail recursion;
/// else the body itself. Regular rules can become terminals.
pub fn without_tail(number: usize, body: Expr) -> Expr {
    let mut alternatives = Vec::new();
    if !names(&body, number) || !write_out(&body, number, Vec::new(), &mut alternatives) {
        return body;
    }
    let (mut again, mut last) = (Vec::new(), Vec::new());
    for mut parts in alternatives {
        if parts.last() == Some(&Expr::Rule(number)) {
            parts.pop();
            again.push(parts);
        } else {
            last.push(parts);
        }
    }
    if again.iter().chain(&last).flatten().any(|part| names(part, number)) {
        return body;
    }
    let one_of = |alternatives: Vec<Vec<Expr>>| Expr::choice(alternatives.into_iter().map(Expr::sequence).collect());
    let again = Expr::Repeat { item: Box::new(one_of(again)), min: 0, max: None };
    Expr::Sequence(vec![again, one_of(last)])
}

/// Whether `expr` refers to rule `number`.
fn names(expr: &Expr, number: usize) -> bool {
    let mut found = false;
    each_rule(expr, &mut |other| found |= other == number);
    found
}

/// Expands `expr` into alternatives, each a list of parts after `before`, so that references to rule `number` stand at
/// their ends. Returns false if there are too many.
fn write_out(expr: &Expr, number: usize, before: Vec<Expr>, alternatives: &mut Vec<Vec<Expr>>) -> bool {
    match expr {
        Expr::Choice(parts) if names(expr, number) => {
            parts.iter().all(|part| write_out(part, number, before.clone(), alternatives))
        }
        Expr::Repeat { item, min: 0, max: Some(1) } if names(item, number) => {
            write_out(&Expr::empty(), number, before.clone(), alternatives)
                && write_out(item, number, before, alternatives)
        }
        Expr::Sequence(parts) if names(expr, number) => {
            let Some((last, first)) = parts.split_last() else { return true };
            let before = before.into_iter().chain(first.iter().cloned()).collect();
            write_out(last, number, before, alternatives)
        }
        Expr::Choice(_)
        | Expr::Repeat { .. }
        | Expr::Sequence(_)
        | Expr::Chars(_)
        | Expr::Text(_)
        | Expr::Rule(_)
        | Expr::Token { .. } => {
            let mut parts = before;
            parts.push(expr.clone());
            alternatives.push(parts);
            alternatives.len() <= MAX_ALTERNATIVES
        }
    }
}
