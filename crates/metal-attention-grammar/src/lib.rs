//! Constrained decoding: restricts the tokens that may come next, so that a generated text has a required format.
//!
//! A [`ResponseFormat`] is what interfaces call response format or structured output: JSON valid under a schema, a
//! grammar in GBNF or Lark, a regular expression, or a choice of strings. A [`GrammarCompiler`] compiles formats for
//! one vocabulary: for the answer of a chat ([`response_format`](GrammarCompiler::response_format)), for a text from
//! its first token on ([`raw`](GrammarCompiler::raw)), or for an answer that must call a tool
//! ([`calls`](GrammarCompiler::calls)). The result, a [`Grammar`], is a constraint for a generator or a scheduler. A
//! [`Guide`] extends it to the whole answer of a reasoning model: it allows reasoning before the text, and ends
//! reasoning and calls. A [`RenderedConversation`] is a prompt with the parser and the constraint of its answer.
//!
//! ```
//! use metal_attention::sampling::SamplerOptions;
//! use metal_attention::{EngineOptions, GenerateOptions, Generator, Model};
//! use metal_attention_grammar::{ResponseFormat, GrammarCompiler};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let model = Model::built_in()?;
//! let format = ResponseFormat::grammar("root ::= \" a \" pet\npet ::= \"cat\" | \"dog\"".into());
//! let constraint = GrammarCompiler::new(&model.tokenizer()?).raw(&format, &mut Vec::new())?;
//!
//! let mut generator = Generator::new(&model, &EngineOptions::default(), SamplerOptions::greedy())?;
//! generator.set_constraint(Some(Box::new(constraint)));
//! let text: String = generator.complete("Lily has", GenerateOptions::default())?.map(|token| token.unwrap().text).collect();
//! assert!([" a cat", " a dog"].contains(&&*text));
//! # Ok(())
//! # }
//! ```
//!
//! llguidance compiles and matches the grammars. Input of clients is first converted to what llguidance supports: JSON
//! schemas in `schema/`, GBNF in `gbnf/`. All input may be hostile: input that is too large, or takes too long, is
//! refused with an error.

mod constraint;
mod conversation;
mod fields;
mod gbnf;
mod guide;
mod lark;
mod pattern;
mod response_format;
mod schema;
#[cfg(test)]
mod test_vocabulary;

pub use constraint::{Grammar, GrammarCompiler, GrammarError};
pub use conversation::{ConversationError, RenderedConversation};
pub use fields::FieldError;
pub use gbnf::GbnfError;
pub use guide::{Guide, GuideOptions, encode_continuation};
pub use response_format::ResponseFormat;
