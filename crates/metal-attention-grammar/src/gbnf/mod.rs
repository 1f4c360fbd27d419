//! Converts grammars in GBNF (llama.cpp) and EBNF (`XGrammar`; vLLM's `guided_grammar`), which is nearly the same, to
//! Lark for llguidance.
//!
//! [`to_lark`] runs all stages: `syntax.rs` parses the rules, `rules.rs` checks them, `nodes.rs` and `terminals.rs`
//! determine which parts become terminals of llguidance's lexer, with the help of `automaton.rs`, and `lark.rs` writes
//! the result.

mod automaton;
mod index_set;
mod lark;
mod nodes;
mod rules;
mod syntax;
mod terminals;
#[cfg(test)]
mod tests;

use metal_attention::tokenizer::Tokenizer;

use nodes::GbnfGrammar;

/// Whether a grammar is GBNF or EBNF, not Lark: a rule is defined by `::=`.
pub fn is_gbnf(grammar: &str) -> bool {
    grammar.lines().any(|line| {
        let line = line.trim_start();
        let rest = line.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'));
        rest.len() < line.len() && rest.trim_start().starts_with("::=")
    })
}

/// The reason why a GBNF grammar cannot be converted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GbnfError {
    /// An error in the grammar's text.
    #[error("line {line}: {problem}")]
    Line {
        /// The line of the error, from 1.
        line: usize,
        /// The description of the error.
        problem: String,
    },
    /// There is no rule "root".
    #[error("it has no rule \"root\", which describes the whole text")]
    NoRoot,
    /// The grammar exceeds a limit.
    #[error("{0}")]
    TooLarge(String),
}

impl GbnfError {
    fn at(line: usize, problem: impl Into<String>) -> Self {
        Self::Line { line, problem: problem.into() }
    }
}

/// The number of steps that may still be spent on a grammar.
struct WorkBudget(u64);

impl WorkBudget {
    /// The budget of one grammar, in steps: about a second.
    const ALL: u64 = 300_000_000;

    /// Takes `steps` off the budget; an error if it is exceeded.
    fn spend(&mut self, steps: u64) -> Result<(), GbnfError> {
        match self.0.checked_sub(steps) {
            Some(left) => {
                self.0 = left;
                Ok(())
            }
            None => Err(GbnfError::TooLarge("it takes too long to find its terminals: make it simpler".into())),
        }
    }
}

/// Converts the GBNF grammar `text` to Lark, with terminals of at most `max_terminal` characters. Tokens in it, such
/// as `<think>`, are looked up in `tokenizer`.
pub fn to_lark(text: &str, tokenizer: &Tokenizer, max_terminal: usize) -> Result<String, GbnfError> {
    let (root, rules) = syntax::read(text, tokenizer)?;
    let nullable = rules::check(root, &rules)?;
    let mut grammar = GbnfGrammar::new(root, rules, &nullable, max_terminal)?;
    grammar.split_conflicting_terminals(&mut WorkBudget(WorkBudget::ALL))?;
    Ok(lark::write(&grammar))
}
