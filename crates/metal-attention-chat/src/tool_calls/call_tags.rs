//! A call whose arguments are in tags, read as it comes.

use std::sync::Arc;

use serde_json::json;

use super::call::{CallPart, Progress, add_arguments, open_text};
use super::parser::MAX_HEADER;
use super::signatures::{Kinds, Signatures};

/// How the tags are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tags {
    /// `name>`, then `<parameter=key>value</parameter>` and so on up to `</function>`; a line break at either end of a
    /// value is no part of it.
    Function,
    /// `name`, then `<arg_key>key</arg_key><arg_value>value</arg_value>` and so on up to `</tool_call>`.
    Keys,
}

impl Tags {
    /// The tag that begins a parameter, and those that end a call.
    fn in_gap(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Function => ("<parameter=", &["</function>"]),
            Self::Keys => ("<arg_key>", &["</tool_call>"]),
        }
    }

    fn end_of_key(self) -> &'static str {
        match self {
            Self::Function => ">",
            Self::Keys => "</arg_key>",
        }
    }

    fn end_of_value(self) -> &'static str {
        match self {
            Self::Function => "</parameter>",
            Self::Keys => "</arg_value>",
        }
    }
}

/// Reads a call whose arguments are in tags.
#[derive(Debug)]
pub(super) struct CallTags {
    tags: Tags,
    state: State,
    /// What was read of the part that the state tells.
    text: String,
    name: String,
    key: String,
    n_arguments: usize,
    signatures: Arc<Signatures>,
    parts: Vec<CallPart>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Name,
    /// Before a parameter or the end.
    Gap,
    Key,
    /// Between a key and its value.
    BeforeValue,
    Value,
    Done,
    NoCall,
}

impl CallTags {
    /// A call that goes on with the function's name.
    pub fn new(tags: Tags, signatures: Arc<Signatures>) -> Self {
        let (text, name, key) = (String::new(), String::new(), String::new());
        Self { tags, state: State::Name, text, name, key, n_arguments: 0, signatures, parts: Vec::new() }
    }

    pub fn parts(&self) -> &[CallPart] {
        &self.parts
    }

    pub fn take_parts(&mut self) -> Vec<CallPart> {
        std::mem::take(&mut self.parts)
    }

    /// Takes the next character.
    pub fn push(&mut self, c: char) -> Progress {
        self.text.push(c);
        self.state = match self.state {
            State::Name => self.in_name(),
            State::Gap => self.in_gap(),
            State::Key => self.in_key(),
            State::BeforeValue => self.before_value(),
            State::Value => self.in_value(),
            state @ (State::Done | State::NoCall) => state,
        };
        match self.state {
            State::Done => Progress::Done,
            State::NoCall => Progress::NoCall,
            State::Name | State::Gap | State::Key | State::BeforeValue | State::Value => Progress::Open,
        }
    }

    fn in_name(&mut self) -> State {
        let text = self.text.trim_start();
        let (name, next) = match self.tags {
            Tags::Function => match text.strip_suffix('>') {
                Some(name) => (name, State::Gap),
                None if text.contains(['<', '\n']) => return State::NoCall,
                None => ("", State::Name),
            },
            Tags::Keys => match (text.strip_suffix("<arg_key>"), text.strip_suffix("</tool_call>")) {
                (Some(name), _) => (name, State::Key),
                (None, Some(name)) => (name, State::Done),
                // Nothing but a tag comes after the name.
                (None, None) => {
                    let end = text.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(text.len());
                    let rest = text[end..].trim_start();
                    if !"<arg_key>".starts_with(rest) && !"</tool_call>".starts_with(rest) {
                        return State::NoCall;
                    }
                    ("", State::Name)
                }
            },
        };
        if next == State::Name {
            return if self.text.len() > MAX_HEADER { State::NoCall } else { State::Name };
        }
        let name = name.trim();
        if name.is_empty() || name.contains(char::is_whitespace) {
            return State::NoCall;
        }
        name.clone_into(&mut self.name);
        self.parts.push(CallPart::Name(self.name.clone()));
        self.text.clear();
        if next == State::Done { self.end() } else { next }
    }

    fn in_gap(&mut self) -> State {
        let (parameter, ends) = self.tags.in_gap();
        let tag = self.text.trim_start();
        if tag.is_empty() {
            self.text.clear();
            State::Gap
        } else if tag == parameter {
            self.text.clear();
            State::Key
        } else if ends.contains(&tag) {
            self.text.clear();
            self.end()
        } else if parameter.starts_with(tag) || ends.iter().any(|end| end.starts_with(tag)) {
            State::Gap
        } else {
            self.end()
        }
    }

    fn in_key(&mut self) -> State {
        let Some(key) = self.text.strip_suffix(self.tags.end_of_key()) else { return State::Key };
        self.key = key.trim().to_owned();
        self.text.clear();
        match self.tags {
            Tags::Function => State::Value,
            Tags::Keys => State::BeforeValue,
        }
    }

    fn before_value(&mut self) -> State {
        let tag = self.text.trim_start();
        let open = "<arg_value>";
        if tag.is_empty() || tag == open {
            let next = if tag.is_empty() { State::BeforeValue } else { State::Value };
            self.text.clear();
            next
        } else if open.starts_with(tag) {
            State::BeforeValue
        } else {
            self.text.insert_str(0, &self.key);
            self.end()
        }
    }

    fn in_value(&mut self) -> State {
        let Some(value) = self.text.strip_suffix(self.tags.end_of_value()) else { return State::Value };
        let value = match self.tags {
            Tags::Function => {
                let value = value.strip_prefix('\n').unwrap_or(value);
                value.strip_suffix('\n').unwrap_or(value)
            }
            Tags::Keys => value,
        };
        let value = self.kinds().as_json(value);
        self.write(&format!("{}: {value}", json!(self.key)));
        self.text.clear();
        State::Gap
    }

    fn kinds(&self) -> Kinds {
        self.signatures.kinds(&self.name, &self.key)
    }

    fn write(&mut self, argument: &str) {
        let before = if self.n_arguments == 0 { "{" } else { ", " };
        add_arguments(&mut self.parts, &format!("{before}{argument}"));
        self.n_arguments += 1;
    }

    /// What was read after the end of the call, where something other than its tag ended it.
    pub fn unread(&self) -> &str {
        match self.state {
            State::Done => &self.text,
            State::Name | State::Gap | State::Key | State::BeforeValue | State::Value | State::NoCall => "",
        }
    }

    /// The call ends in the middle: writes what there is of an argument.
    pub fn cut_short(&mut self) {
        let argument = match self.state {
            State::Key => open_text(&self.text),
            State::BeforeValue => format!("{}: ", json!(self.key)),
            State::Value => {
                let text = self.text.trim_start();
                let value = if self.kinds().are_text() { open_text(text) } else { text.to_owned() };
                format!("{}: {value}", json!(self.key))
            }
            State::Name | State::Gap | State::Done | State::NoCall => return,
        };
        self.write(&argument);
    }

    fn end(&mut self) -> State {
        add_arguments(&mut self.parts, if self.n_arguments == 0 { "{}" } else { "}" });
        State::Done
    }
}
