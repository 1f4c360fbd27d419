#![doc = include_str!("../README.md")]

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
pub use conversation::{ConversationError, RenderedConversation, prompt_with_pictures};
pub use fields::FieldError;
pub use gbnf::GbnfError;
pub use guide::{Guide, GuideOptions, encode_continuation};
pub use response_format::ResponseFormat;
