//! [`PythonString`]: reads a Python string literal character by character.

use super::python_value::{AFTER_TEXT, escaped};

/// The maximum length in bytes of an escape: a surrogate pair in JSON's notation.
const LONGEST_ESCAPE: usize = 12;

/// The result of reading a character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StringStep {
    /// The string continues.
    More,
    /// The string ended before this character.
    Before,
}

/// Reads a string after its first quote. A quote ends the string only if a character follows that may follow a value;
/// models are shown strings with unescaped quotes.
#[derive(Debug)]
pub(super) struct PythonString {
    quote: char,
    /// Whether backslashes are literal.
    raw: bool,
    within: StringState,
    /// The text whose escapes are not resolved yet.
    text: String,
    /// Quotes, and white space after them, that may end the string.
    held: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StringState {
    /// After the first quote.
    Start,
    Text {
        escaped: bool,
    },
    /// After a quote that may end the string.
    MaybeAfter,
    /// In a triple-quoted string.
    Long {
        escaped: bool,
    },
    /// After a triple-quoted string.
    AfterLong,
}

impl PythonString {
    /// A string in `quote`s. `raw`: backslashes are literal.
    pub fn new(quote: char, raw: bool) -> Self {
        Self { quote, raw, within: StringState::Start, text: String::new(), held: String::new() }
    }

    /// Reads the next character.
    pub fn push(&mut self, c: char) -> StringStep {
        match self.within {
            StringState::Start if c == self.quote => {
                self.held.push(c);
                if self.held.len() == 2 {
                    self.held.clear();
                    self.within = StringState::Long { escaped: false };
                }
            }
            StringState::Start if self.held.is_empty() => {
                self.within = StringState::Text { escaped: false };
                return self.push(c);
            }
            StringState::Start => {
                self.within = StringState::MaybeAfter;
                return self.push(c);
            }
            StringState::Text { escaped: false } if c == self.quote => {
                self.held.push(c);
                self.within = StringState::MaybeAfter;
            }
            StringState::Text { escaped } => {
                self.within = StringState::Text { escaped: c == '\\' && !escaped };
                self.text.push(c);
            }
            StringState::MaybeAfter if AFTER_TEXT.contains(&c) => return StringStep::Before,
            StringState::MaybeAfter if c.is_whitespace() => self.held.push(c),
            StringState::MaybeAfter => {
                self.text.push_str(&self.held);
                self.held.clear();
                self.within = StringState::Text { escaped: false };
                return self.push(c);
            }
            StringState::Long { escaped: false } if c == self.quote => {
                self.held.push(c);
                if self.held.len() == 3 {
                    self.within = StringState::AfterLong;
                }
            }
            StringState::Long { escaped } => {
                self.text.push_str(&self.held);
                self.held.clear();
                self.within = StringState::Long { escaped: c == '\\' && !escaped };
                self.text.push(c);
            }
            StringState::AfterLong if c.is_whitespace() => {}
            StringState::AfterLong => return StringStep::Before,
        }
        StringStep::More
    }

    /// Removes and returns the text so far with escapes resolved. `all`: the string is complete; otherwise an
    /// incomplete escape is held back.
    pub fn take(&mut self, all: bool) -> String {
        let text = std::mem::take(&mut self.text);
        if self.raw {
            return text;
        }
        let mut out = String::new();
        let mut rest = &*text;
        while let Some(at) = rest.find('\\') {
            if !all && rest.len() - at < LONGEST_ESCAPE {
                out += &rest[..at];
                rest[at..].clone_into(&mut self.text);
                return out;
            }
            out += &rest[..at];
            let (c, length) = escaped(&rest[at + 1..]);
            out.extend(c);
            rest = &rest[at + 1 + length..];
        }
        out + rest
    }
}
