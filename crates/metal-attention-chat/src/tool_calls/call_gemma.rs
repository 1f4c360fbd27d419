//! [`CallGemma`]: reads a call in Gemma's notation: `call:name{key:<|"|>text<|"|>,other:[1,true,{a:null}]}`.

use serde::de::IgnoredAny;
use serde_json::json;

use super::call::{CallPart, CallProgress, add_arguments, json_text};
use super::held_back::held_back;
use super::lenient_json::scalar;
use super::parser::MAX_HEADER;
use super::syntax::GEMMA_QUOTE;

const CALL: &str = "call:";

/// Reads a call and converts its arguments to JSON.
#[derive(Debug)]
pub(super) struct CallGemma {
    state: GemmaState,
    /// The text read in the current state.
    text: String,
    /// The open containers, the innermost last.
    open: Vec<Container>,
    /// Whether a comma must be written before the next item.
    comma: bool,
    parts: Vec<CallPart>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Container {
    Object,
    List,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GemmaState {
    Name,
    Key,
    /// Before or in a key or a scalar, bare or in quotes.
    Value,
    /// In a string between Gemma's quotes, which is passed on character by character.
    Text,
    /// After a value.
    Next,
    Done,
    NoCall,
}

/// Whether the text read so far is a quoted string.
enum Quoted {
    No,
    /// The closing quote has not been read yet.
    Unfinished,
    Text(String),
}

impl CallGemma {
    /// A new call, which begins with `call:`.
    pub fn new() -> Self {
        Self { state: GemmaState::Name, text: String::new(), open: Vec::new(), comma: false, parts: Vec::new() }
    }

    pub fn parts(&self) -> &[CallPart] {
        &self.parts
    }

    pub fn take_parts(&mut self) -> Vec<CallPart> {
        std::mem::take(&mut self.parts)
    }

    /// Reads the next character.
    pub fn push(&mut self, c: char) -> CallProgress {
        self.state = match self.state {
            GemmaState::Name => self.in_name(c),
            GemmaState::Key => self.in_key(c),
            GemmaState::Value => self.in_value(c),
            GemmaState::Text => self.in_text(c),
            GemmaState::Next => self.next(c),
            state @ (GemmaState::Done | GemmaState::NoCall) => state,
        };
        match self.state {
            GemmaState::Done => CallProgress::Done,
            GemmaState::NoCall => CallProgress::NoCall,
            GemmaState::Name | GemmaState::Key | GemmaState::Value | GemmaState::Text | GemmaState::Next => {
                CallProgress::Incomplete
            }
        }
    }

    fn in_name(&mut self, c: char) -> GemmaState {
        self.text.push(c);
        let text = self.text.trim_start();
        let begins = CALL.starts_with(text) || text.starts_with(CALL);
        if !begins || self.text.len() > MAX_HEADER {
            return GemmaState::NoCall;
        }
        let Some(name) = text.strip_prefix(CALL).and_then(|text| text.strip_suffix('{')) else {
            return GemmaState::Name;
        };
        let name = name.trim().to_owned();
        if name.is_empty() {
            return GemmaState::NoCall;
        }
        self.parts.push(CallPart::Name(name));
        self.enter(Container::Object)
    }

    fn enter(&mut self, open: Container) -> GemmaState {
        self.text.clear();
        self.open.push(open);
        self.item(match open {
            Container::Object => "{",
            Container::List => "[",
        });
        match open {
            Container::Object => GemmaState::Key,
            Container::List => GemmaState::Value,
        }
    }

    fn in_key(&mut self, c: char) -> GemmaState {
        if self.text.is_empty() && c.is_whitespace() {
            return GemmaState::Key;
        }
        self.text.push(c);
        match self.quoted() {
            Quoted::No => {}
            Quoted::Unfinished => return GemmaState::Key,
            // The key is complete; a colon follows.
            Quoted::Text(key) => {
                self.text = key;
                return GemmaState::Key;
            }
        }
        match c {
            ':' => {
                self.text.pop();
                let key = json!(self.text.trim()).to_string();
                self.item(&key);
                self.write(": ");
                self.text.clear();
                GemmaState::Value
            }
            '}' if self.text.len() == 1 => self.leave(Container::Object),
            _ => GemmaState::Key,
        }
    }

    fn in_value(&mut self, c: char) -> GemmaState {
        self.text.push(c);
        if self.text == GEMMA_QUOTE {
            self.text.clear();
            self.item("\"");
            return GemmaState::Text;
        }
        match self.quoted() {
            Quoted::No => {}
            Quoted::Unfinished => return GemmaState::Value,
            Quoted::Text(text) => {
                self.item(&json!(text).to_string());
                self.text.clear();
                return GemmaState::Next;
            }
        }
        let first = self.text.trim_start().len() == c.len_utf8();
        match c {
            '{' if first => self.enter(Container::Object),
            '[' if first => self.enter(Container::List),
            ',' | '}' | ']' => {
                self.text.pop();
                // An empty list, or a trailing comma.
                if !(first && c == ']') {
                    let scalar = as_json(self.text.trim());
                    self.item(&scalar);
                }
                self.text.clear();
                self.next(c)
            }
            c if c.is_whitespace() && self.text.trim_start().is_empty() => {
                self.text.clear();
                GemmaState::Value
            }
            _ => GemmaState::Value,
        }
    }

    fn in_text(&mut self, c: char) -> GemmaState {
        self.text.push(c);
        if self.text.ends_with(GEMMA_QUOTE) {
            // Only the quote was held back.
            self.text.clear();
            self.write("\"");
            return GemmaState::Next;
        }
        let safe = self.text.len() - held_back(&self.text, &[GEMMA_QUOTE]);
        let text: String = self.text.drain(..safe).collect();
        self.write(&json_text(&text));
        GemmaState::Text
    }

    /// Whether the text read so far is a quoted string, and its content.
    fn quoted(&self) -> Quoted {
        let text = &*self.text;
        if let Some(rest) = text.strip_prefix(GEMMA_QUOTE) {
            return rest.strip_suffix(GEMMA_QUOTE).map_or(Quoted::Unfinished, |text| Quoted::Text(text.to_owned()));
        }
        if GEMMA_QUOTE.starts_with(text) {
            return Quoted::Unfinished;
        }
        // JSON's quotes, which some answers use although the model was not trained on them.
        let Some(rest) = text.strip_prefix('"') else { return Quoted::No };
        match rest.strip_suffix('"').filter(|rest| (rest.len() - rest.trim_end_matches('\\').len()) % 2 == 0) {
            Some(inside) => Quoted::Text(serde_json::from_str(text).unwrap_or_else(|_| inside.to_owned())),
            None => Quoted::Unfinished,
        }
    }

    fn next(&mut self, c: char) -> GemmaState {
        match (c, self.open.last()) {
            (',', Some(open)) => {
                self.comma = true;
                match open {
                    Container::Object => GemmaState::Key,
                    Container::List => GemmaState::Value,
                }
            }
            ('}', _) => self.leave(Container::Object),
            (']', _) => self.leave(Container::List),
            (c, _) if c.is_whitespace() => GemmaState::Next,
            _ => GemmaState::NoCall,
        }
    }

    fn leave(&mut self, open: Container) -> GemmaState {
        if self.open.last() != Some(&open) {
            return GemmaState::NoCall;
        }
        self.open.pop();
        self.text.clear();
        self.comma = false;
        self.write(match open {
            Container::Object => "}",
            Container::List => "]",
        });
        if self.open.is_empty() { GemmaState::Done } else { GemmaState::Next }
    }

    /// The answer ends within the call: closes all containers. An incomplete key or word is left out.
    pub fn cut_short(&mut self) {
        match self.state {
            GemmaState::Text => {
                let quote = GEMMA_QUOTE.starts_with(&*self.text);
                let text = if quote { String::new() } else { json_text(&self.text) };
                self.write(&text);
                self.write("\"");
            }
            GemmaState::Value => {
                let text = std::mem::take(&mut self.text);
                let text = text.trim();
                match text.strip_prefix('"') {
                    Some(quoted) => self.item(&json!(quoted).to_string()),
                    None => match scalar(text) {
                        Some(json) => self.item(&json),
                        // A key without a value.
                        None if self.open.last() == Some(&Container::Object) => self.item("null"),
                        None => {}
                    },
                }
            }
            GemmaState::Name | GemmaState::Key | GemmaState::Next | GemmaState::Done | GemmaState::NoCall => {}
        }
        while let Some(open) = self.open.pop() {
            self.write(match open {
                Container::Object => "}",
                Container::List => "]",
            });
        }
    }

    /// Writes a key, a scalar or an opening bracket, after a comma if one is due.
    fn item(&mut self, json: &str) {
        if std::mem::take(&mut self.comma) {
            self.write(", ");
        }
        self.write(json);
    }

    fn write(&mut self, json: &str) {
        add_arguments(&mut self.parts, json);
    }
}

/// A scalar as JSON. Any other word becomes a string.
fn as_json(text: &str) -> String {
    match serde_json::from_str::<IgnoredAny>(text) {
        Ok(_) => text.to_owned(),
        Err(_) => scalar(text).unwrap_or_else(|| json!(text).to_string()),
    }
}
