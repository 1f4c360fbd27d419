//! GBNF, the grammar format of llama.cpp, and the EBNF of `XGrammar` (vLLM's `guided_grammar`), which is nearly the same.
//!
//! [`to_lark`] is the whole way: `syntax.rs` reads the rules, `rules.rs` checks them, `nodes.rs` and `terminals.rs` find which
//! parts are terminals of a lexer, and `lark.rs` writes what comes of it as a grammar for llguidance.

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

/// Whether a grammar is GBNF or EBNF, whose rules are defined by `::=`, and not Lark.
pub fn is_gbnf(grammar: &str) -> bool {
    grammar.lines().any(|line| {
        let line = line.trim_start();
        let rest = line.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'));
        rest.len() < line.len() && rest.trim_start().starts_with("::=")
    })
}

/// Why there is no grammar.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GbnfError {
    /// A mistake in the text.
    #[error("line {line}: {problem}")]
    Line {
        /// The line that has it.
        line: usize,
        /// What is wrong.
        problem: String,
    },
    /// Nothing says what the whole text is.
    #[error("it has no rule \"root\", which describes the whole text")]
    NoRoot,
    /// It is larger than can be followed.
    #[error("{0}")]
    TooLarge(String),
}

impl GbnfError {
    fn at(line: usize, problem: impl Into<String>) -> Self {
        Self::Line { line, problem: problem.into() }
    }
}

/// What may still be computed for a grammar.
struct WorkBudget(u64);

impl Work {
    /// Steps for one grammar: about a second.
    const ALL: u64 = 300_000_000;

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

/// The GBNF grammar `text` in the Lark of llguidance, with terminals of at most `max_terminal` characters. Its tokens are
/// those of `tokenizer`.
pub fn to_lark(text: &str, tokenizer: &Tokenizer, max_terminal: usize) -> Result<String, GbnfError> {
    let (root, rules) = syntax::read(text, tokenizer)?;
    let nullable = rules::check(root, &rules)?;
    let mut grammar = GbnfGrammar::new(root, rules, &nullable, max_terminal)?;
    grammar.split_conflicting_terminals(&mut WorkBudget(WorkBudget::ALL))?;
    Ok(lark::write(&grammar))
}
