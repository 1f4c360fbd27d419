//! What a generated text must look like, as a constraint on the tokens that may come next.

mod constraint;
mod fields;
mod form;
mod gbnf;
mod lark;
mod pattern;
mod schema;
#[cfg(test)]
mod test_vocabulary;

pub use constraint::{Grammar, GrammarError, Grammars};
pub use fields::FieldError;
pub use form::Form;
pub use gbnf::GbnfError;
