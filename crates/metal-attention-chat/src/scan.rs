//! Checks limits of a template's source before minijinja parses it.
//!
//! The parser recurses for each prefix operator, `else` and `elif`, and a chain of operators makes a syntax tree as
//! deep as the chain is long. So the length of tags and the nesting of blocks are limited first.

use minijinja::machinery::{Token, Tokenizer};

use crate::TemplateLimit;
use crate::program::{CompileError, syntax};

/// The maximum length of a line in bytes. Published templates have at most 1180.
pub(crate) const MAX_LINE: usize = 60_000;
/// The maximum number of tokens in a tag. Published templates have at most 52.
pub(crate) const MAX_TAG: usize = 2000;
/// The maximum length of a name in bytes. Published templates have at most 31.
pub(crate) const MAX_NAME: usize = 256;
/// The maximum nesting of blocks; each `elif` counts as a level. Published templates have at most 12.
pub(crate) const MAX_BLOCKS: usize = 150;

/// The tag that is being scanned.
#[derive(Default)]
struct OpenTag<'s> {
    line: usize,
    parts: usize,
    /// The first word of a `{% %}` tag.
    keyword: Option<&'s str>,
    is_block: bool,
    brackets: usize,
    assigns: bool,
}

/// The extremes of a template, in the units of the limits above.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct SourceExtent {
    pub line: usize,
    pub tag: usize,
    pub name: usize,
    pub blocks: usize,
}

/// Measures a source; an error if it exceeds a limit.
pub(crate) fn scan(source: &str) -> Result<SourceExtent, CompileError> {
    let mut extent = SourceExtent::default();
    for (i, line) in source.lines().enumerate() {
        extent.line = extent.line.max(line.len());
        if line.len() > MAX_LINE {
            return Err(TemplateLimit::Line { line: i + 1, limit: MAX_LINE }.into());
        }
    }
    let mut tokens = Tokenizer::new(source, "", false, syntax());
    let mut tag = OpenTag::default();
    // The number of branches of each open block.
    let mut blocks: Vec<usize> = Vec::new();
    // If the source cannot be tokenized, the parser reports the error with its line.
    while let Ok(Some((token, span))) = tokens.next_token() {
        let line = usize::from(span.start_line);
        tag.parts += 1;
        match token {
            Token::VariableStart => tag = OpenTag { line, ..OpenTag::default() },
            Token::BlockStart => tag = OpenTag { line, is_block: true, ..OpenTag::default() },
            Token::Ident(name) => {
                extent.name = extent.name.max(name.len());
                if name.len() > MAX_NAME {
                    return Err(TemplateLimit::Name { line, limit: MAX_NAME }.into());
                }
                if tag.is_block && tag.parts == 1 {
                    tag.keyword = Some(name);
                }
            }
            Token::ParenOpen | Token::BracketOpen | Token::BraceOpen => tag.brackets += 1,
            Token::ParenClose | Token::BracketClose | Token::BraceClose => {
                tag.brackets = tag.brackets.saturating_sub(1);
            }
            Token::Assign => tag.assigns |= tag.brackets == 0,
            Token::BlockEnd => {
                let keyword = tag.keyword.unwrap_or_default();
                match keyword {
                    "for" | "if" | "with" | "autoescape" | "filter" | "block" | "macro" | "call" => blocks.push(1),
                    "set" if !tag.assigns => blocks.push(1),
                    "elif" => {
                        if let Some(branches) = blocks.last_mut() {
                            *branches += 1;
                        }
                    }
                    _ if keyword.starts_with("end") => drop(blocks.pop()),
                    // Tags without an end tag.
                    _ => {}
                }
                extent.blocks = extent.blocks.max(blocks.iter().sum());
                if extent.blocks > MAX_BLOCKS {
                    return Err(TemplateLimit::Nesting { line, limit: MAX_BLOCKS }.into());
                }
            }
            // Other tokens only count towards the length of the tag.
            Token::TemplateData(_)
            | Token::VariableEnd
            | Token::Str(_)
            | Token::String(_)
            | Token::Int(_)
            | Token::Int128(_)
            | Token::Float(_)
            | Token::Plus
            | Token::Minus
            | Token::Mul
            | Token::Div
            | Token::FloorDiv
            | Token::Pow
            | Token::Mod
            | Token::Dot
            | Token::Comma
            | Token::Colon
            | Token::Tilde
            | Token::Pipe
            | Token::Eq
            | Token::Ne
            | Token::Gt
            | Token::Gte
            | Token::Lt
            | Token::Lte => {}
        }
        extent.tag = extent.tag.max(tag.parts);
        if tag.parts > MAX_TAG {
            return Err(TemplateLimit::Tag { line: tag.line, limit: MAX_TAG }.into());
        }
    }
    Ok(extent)
}
