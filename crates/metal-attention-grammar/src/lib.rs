//! What a generated text must look like, as a constraint on the tokens that may come next.

mod constraint;
mod schema;
#[cfg(test)]
mod test_vocabulary;

pub use constraint::{Grammar, GrammarError, Grammars};
