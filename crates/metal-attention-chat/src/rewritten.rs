//! Rewrites the source of a template for minijinja's parser.
//!
//! The parser lacks some syntax of Jinja2: CR line ends, a plus sign before a number, some escapes in string
//! constants, `{% generation %}`. Each is replaced by something equivalent.

use std::ops::Range;

use minijinja::machinery::{Token, Tokenizer};

use crate::program::syntax;

/// `source` in the syntax that minijinja accepts.
pub(crate) fn rewritten(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = without_generation_tags(&source);
    let mut out = String::with_capacity(source.len());
    let mut done = 0;
    for (range, replacement) in edits(&source) {
        out += &source[done..range.start];
        out += &replacement;
        done = range.end;
    }
    out + &source[done..]
}

/// The replacements within tags, in order of position.
fn edits(source: &str) -> Vec<(Range<usize>, String)> {
    let mut edits = Vec::new();
    let mut tokens = Tokenizer::new(source, "", false, syntax());
    let mut before_operand = false;
    // If the source cannot be tokenized, the parser reports the error with its line.
    while let Ok(Some((token, span))) = tokens.next_token() {
        let range = span.start_offset as usize..span.end_offset as usize;
        match &token {
            Token::Plus if before_operand => edits.push((range, " ".into())),
            Token::Str(text) => edits.extend(constant(source, range, text)),
            Token::String(text) => edits.extend(constant(source, range, text)),
            _ => {}
        }
        before_operand = match token {
            Token::Ident(word) => matches!(word, "and" | "or" | "not" | "in" | "is" | "if" | "elif" | "else"),
            Token::TemplateData(_)
            | Token::VariableEnd
            | Token::BlockEnd
            | Token::Str(_)
            | Token::String(_)
            | Token::Int(_)
            | Token::Int128(_)
            | Token::Float(_)
            | Token::Dot
            | Token::Pipe
            | Token::BracketClose
            | Token::ParenClose
            | Token::BraceClose => false,
            Token::VariableStart
            | Token::BlockStart
            | Token::Plus
            | Token::Minus
            | Token::Mul
            | Token::Div
            | Token::FloorDiv
            | Token::Pow
            | Token::Mod
            | Token::Comma
            | Token::Colon
            | Token::Tilde
            | Token::Assign
            | Token::Eq
            | Token::Ne
            | Token::Gt
            | Token::Gte
            | Token::Lt
            | Token::Lte
            | Token::BracketOpen
            | Token::ParenOpen
            | Token::BraceOpen => true,
        };
    }
    edits
}

/// The replacement of a string constant whose escapes minijinja reads differently from Python; `text` is minijinja's
/// reading.
fn constant(source: &str, range: Range<usize>, text: &str) -> Option<(Range<usize>, String)> {
    let literal = source.get(range.clone()).filter(|literal| literal.contains('\\'))?;
    let body = literal.get(1..literal.len().checked_sub(1)?)?;
    let meant = unescaped(body).filter(|meant| meant != text)?;
    let escaped = meant.replace('\\', "\\\\").replace('"', "\\\"");
    Some((range, format!("\"{escaped}\"")))
}

/// The string that Python reads from the inside of a constant; `None` if Python refuses it.
fn unescaped(body: &str) -> Option<String> {
    let mut out = String::with_capacity(body.len());
    let mut rest = body;
    while let Some(at) = rest.find('\\') {
        out += &rest[..at];
        let escape = &rest[at + 1..];
        let letter = escape.chars().next()?;
        let after = &escape[letter.len_utf8()..];
        let code = |digits: usize| {
            let hex = after.get(..digits).filter(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
            Some((char::from_u32(u32::from_str_radix(hex, 16).ok()?)?, &after[digits..]))
        };
        let (c, after) = match letter {
            '\n' => {
                rest = after;
                continue;
            }
            '\\' | '\'' | '"' => (letter, after),
            'a' => ('\x07', after),
            'b' => ('\x08', after),
            'f' => ('\x0c', after),
            'n' => ('\n', after),
            'r' => ('\r', after),
            't' => ('\t', after),
            'v' => ('\x0b', after),
            'x' => code(2)?,
            'u' => code(4)?,
            'U' => code(8)?,
            'N' => return None,
            '0'..='7' => {
                let n = escape.bytes().take(3).take_while(|byte| matches!(byte, b'0'..=b'7')).count();
                (char::from_u32(u32::from_str_radix(&escape[..n], 8).ok()?)?, &escape[n..])
            }
            other => {
                out.push('\\');
                (other, after)
            }
        };
        out.push(c);
        rest = after;
    }
    Some(out + rest)
}

/// `source` without `{% generation %}` and `{% endgeneration %}`, which mark the model's text for training. They
/// become a condition that is always true, which handles white space alike.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out += before;
        let control = if tag.starts_with(['-', '+']) { &tag[..1] } else { "" };
        let body = tag[control.len()..].trim_start();
        let word = body.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or_default();
        let replacement = match word {
            "generation" => " if true",
            "endgeneration" => " endif",
            // Jinja2 keeps the line end after this tag, minijinja drops it.
            "raw" if body[word.len()..].trim_start().starts_with("%}\n") => {
                let end = tag.find('\n').unwrap_or(tag.len());
                out += &tag[..end];
                out.push('\n');
                rest = &tag[end..];
                continue;
            }
            _ => {
                rest = tag;
                continue;
            }
        };
        out += control;
        out += replacement;
        rest = &body[word.len()..];
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_are_conditions() {
        let source =
            "a\n{%- generation %}b{%generation-%} c {%- endgeneration -%}\n{% endgeneration %}\n{% if 1 %}d{% endif %}";
        assert_eq!(
            without_generation_tags(source),
            "a\n{%- if true %}b{% if true-%} c {%- endif -%}\n{% endif %}\n{% if 1 %}d{% endif %}"
        );
        assert_eq!(without_generation_tags("{% set generation = 1 %}{%"), "{% set generation = 1 %}{%");
    }

    #[test]
    fn signs_and_escapes_are_rewritten() {
        for (source, expected) in [
            ("+{{ +1 }}{{ 1 + +x }}{{ [+1, x+1] }}", "+{{  1 }}{{ 1 +  x }}{{ [ 1, x+1] }}"),
            (r"{{ 'a\n\/b' }}\/", "{{ \"a\n\\\\/b\" }}\\/"),
            (r"{{ 'a\/\v\'' }}", "{{ \"a\\\\/\u{b}'\" }}"),
            (r"{{ '\U0001F600' }}{{ '\N{BULLET}' }}", "{{ \"😀\" }}{{ '\\N{BULLET}' }}"),
            ("a\r\nb\rc", "a\nb\nc"),
            ("{% raw %}\n{{ +1 }}{% endraw %}", "{% raw %}\n\n{{ +1 }}{% endraw %}"),
        ] {
            assert_eq!(rewritten(source), expected);
        }
    }
}
