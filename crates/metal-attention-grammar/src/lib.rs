//! What a generated text must look like, as a constraint on the tokens that may come next.
//!
//! A [`AnswerForm`] says what is wanted: JSON that follows a schema, a grammar in GBNF or Lark, a regular expression, a choice of
//! strings. [`GrammarCompiler`] makes constraints of forms for one vocabulary, for an answer to a chat ([`form`](GrammarCompiler::form)) or for
//! a text from its beginning ([`raw`](GrammarCompiler::raw)), and of the tools of which an answer must call one
//! ([`calls`](GrammarCompiler::calls)). A generator and a scheduler take what it makes. A [`Guide`] puts room for thoughts before an answer's
//! text, and ends thoughts and calls; a [`RenderedConversation`] is a prompt that knows what reads and restricts its answer.
//!
//! ```
//! use metal_attention::sampling::SamplerOptions;
//! use metal_attention::{EngineOptions, GenerateOptions, Generator, Model};
//! use metal_attention_grammar::{AnswerForm, GrammarCompiler};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let model = Model::built_in()?;
//! let form = AnswerForm::grammar("root ::= \" a \" pet\npet ::= \"cat\" | \"dog\"".into());
//! let constraint = GrammarCompiler::new(&model.tokenizer()?).raw(&form, &mut Vec::new())?;
//!
//! let mut generator = Generator::new(&model, &EngineOptions::default(), SamplerOptions::greedy())?;
//! generator.set_constraint(Some(Box::new(constraint)));
//! let text: String = generator.complete("Lily has", GenerateOptions::default())?.map(|token| token.unwrap().text).collect();
//! assert!([" a cat", " a dog"].contains(&&*text));
//! # Ok(())
//! # }
//! ```
//!
//! llguidance follows the grammars. What comes from others is brought into a shape that it can follow: schemas in `schema/`, GBNF in
//! `gbnf/`. All of it may be hostile: what is too large, or takes too long, is an error that says so.

mod constraint;
mod conversation;
mod fields;
mod form;
mod gbnf;
mod guide;
mod lark;
mod pattern;
mod schema;
#[cfg(test)]
mod test_vocabulary;

pub use constraint::{Grammar, GrammarCompiler, GrammarError};
pub use conversation::{ConversationError, RenderedConversation};
pub use fields::FieldError;
pub use form::AnswerForm;
pub use gbnf::GbnfError;
pub use guide::{Guide, GuideOptions, tokens_within};
