//! [`CallTags`]: reads a call whose arguments are in tags.

use std::sync::Arc;

use serde_json::json;

use super::call::{CallPart, CallProgress, add_arguments, json_text};
use super::held_back::MAX_BLANK;
use super::parser::MAX_HEADER;
use super::signatures::{Signatures, ValueKinds};

/// The tags of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TagStyle {
    /// `name>`, then `<parameter=key>value</parameter>` for each argument, up to `</function>`. A line break at either
    /// end of a value is not part of it.
    Function,
    /// `name`, then `<arg_key>key</arg_key><arg_value>value</arg_value>` for each argument, up to `</tool_call>`.
    Keys,
}

/// Tags around calls. They also end a value whose own end tag is missing.
const OPENINGS: [&str; 3] = ["<tool_call>", "<seed:tool_call>", "<function="];
const CLOSINGS: [&str; 2] = ["</tool_call>", "</seed:tool_call>"];

impl TagStyle {
    /// The tag that begins a parameter.
    fn parameter(self) -> &'static str {
        match self {
            Self::Function => "<parameter=",
            Self::Keys => "<arg_key>",
        }
    }

    /// The tag that ends a call.
    fn end_of_call(self) -> &'static str {
        match self {
            Self::Function => "</function>",
            Self::Keys => "</tool_call>",
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

    /// Superfluous end tags, which are ignored between parameters.
    fn stray(self) -> &'static [&'static str] {
        match self {
            Self::Function => &["</parameter>"],
            Self::Keys => &["</arg_value>", "</arg_key>"],
        }
    }
}

/// Reads a call whose arguments are in tags. Strings are passed on character by character, other values when they are
/// complete. The arguments are converted to a JSON object.
#[derive(Debug)]
pub(super) struct CallTags {
    tags: TagStyle,
    state: TagsState,
    /// The text read in the current state; in a value, the part that may be the end tag.
    text: String,
    /// The text so far of a value that is not a string.
    value: String,
    name: String,
    /// Whether the name was added to the parts.
    begun: bool,
    key: String,
    /// The keys of the complete arguments.
    keys: Vec<String>,
    signatures: Arc<Signatures>,
    parts: Vec<CallPart>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TagsState {
    Name,
    /// Before a parameter or the end of the call.
    Gap,
    Key,
    /// Between a key and its value.
    BeforeValue,
    /// In a value. `first`: at its first character.
    Value {
        first: bool,
    },
    Done,
    NoCall,
}

/// The meaning of the text that may be the end of a value.
enum Tail {
    /// It is part of the value.
    No,
    /// More text is needed.
    Incomplete,
    /// It is the end tag of the value.
    EndOfValue,
    /// The call ends. The text that follows begins at this offset.
    EndOfCall(usize),
    /// The next parameter begins. Its key starts at this offset.
    NextParameter(usize),
}

impl CallTags {
    /// A new call, which begins with the function's name.
    pub fn new(tags: TagStyle, signatures: Arc<Signatures>) -> Self {
        Self {
            tags,
            state: TagsState::Name,
            text: String::new(),
            value: String::new(),
            name: String::new(),
            begun: false,
            key: String::new(),
            keys: Vec::new(),
            signatures,
            parts: Vec::new(),
        }
    }

    pub fn parts(&self) -> &[CallPart] {
        &self.parts
    }

    pub fn take_parts(&mut self) -> Vec<CallPart> {
        std::mem::take(&mut self.parts)
    }

    /// Reads the next character.
    pub fn push(&mut self, c: char) -> CallProgress {
        self.text.push(c);
        self.state = match self.state {
            TagsState::Name => self.in_name(),
            TagsState::Gap => self.in_gap(),
            TagsState::Key => self.in_key(),
            TagsState::BeforeValue => self.before_value(),
            TagsState::Value { first } => self.in_value(first),
            state @ (TagsState::Done | TagsState::NoCall) => state,
        };
        match self.state {
            TagsState::Done => CallProgress::Done,
            TagsState::NoCall => CallProgress::NoCall,
            TagsState::Name | TagsState::Gap | TagsState::Key | TagsState::BeforeValue | TagsState::Value { .. } => {
                CallProgress::Incomplete
            }
        }
    }

    fn in_name(&mut self) -> TagsState {
        let text = self.text.trim_start();
        let end = match self.tags {
            TagStyle::Function => text.strip_suffix('>').map(|name| (name, TagsState::Gap)),
            TagStyle::Keys => (text.strip_suffix("<arg_key>").map(|name| (name, TagsState::Key)))
                .or_else(|| text.strip_suffix("</tool_call>").map(|name| (name, TagsState::Done))),
        };
        if let Some((name, next)) = end {
            let name = name.trim();
            let is_name = !name.is_empty() && !name.contains(['<', '\n']);
            if !is_name || name.contains(char::is_whitespace) && !self.signatures.has(name) {
                return TagsState::NoCall;
            }
            name.clone_into(&mut self.name);
            self.text.clear();
            return match next {
                TagsState::Key => {
                    self.begin();
                    TagsState::Key
                }
                TagsState::Done => self.end(),
                TagsState::Name
                | TagsState::Gap
                | TagsState::BeforeValue
                | TagsState::Value { .. }
                | TagsState::NoCall => next,
            };
        }
        let fits = match self.tags {
            TagStyle::Function => !text.contains(['<', '\n']),
            // Only a tag may follow the name.
            TagStyle::Keys => {
                let known = self.signatures.longest_name_in(text);
                let end = text.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(text.len()).max(known);
                let rest = text[end..].trim_start();
                let begins_known = self.signatures.begins_name(text);
                "<arg_key>".starts_with(rest) || "</tool_call>".starts_with(rest) || begins_known
            }
        };
        if fits && self.text.len() <= MAX_HEADER { TagsState::Name } else { TagsState::NoCall }
    }

    fn in_gap(&mut self) -> TagsState {
        let (parameter, end) = (self.tags.parameter(), self.tags.end_of_call());
        let tag = self.text.trim_start();
        if tag.is_empty() {
            self.text.clear();
            TagsState::Gap
        } else if tag == parameter {
            self.text.clear();
            self.begin();
            TagsState::Key
        } else if tag == end {
            self.text.clear();
            self.end()
        } else if self.tags.stray().contains(&tag) {
            self.text.clear();
            TagsState::Gap
        } else if CLOSINGS.contains(&tag) {
            // The end tag of the function is missing.
            self.end()
        } else if [parameter, end].iter().chain(self.tags.stray()).chain(&CLOSINGS).any(|mark| mark.starts_with(tag)) {
            TagsState::Gap
        } else if self.begun || OPENINGS.contains(&tag) {
            self.end()
        } else if OPENINGS.iter().any(|opening| opening.starts_with(tag)) {
            TagsState::Gap
        } else {
            TagsState::NoCall
        }
    }

    fn in_key(&mut self) -> TagsState {
        let missing = ["<arg_value>", "\n"];
        let (key, next) = match (self.tags, self.text.strip_suffix(self.tags.end_of_key())) {
            (TagStyle::Function, Some(key)) => (key, TagsState::Value { first: true }),
            (TagStyle::Keys, Some(key)) => (key, TagsState::BeforeValue),
            // The end tag of the key is missing.
            (TagStyle::Keys, None) => match self.text.strip_suffix(missing[0]) {
                Some(key) => (key, TagsState::Value { first: true }),
                None => return TagsState::Key,
            },
            (TagStyle::Function, None) => match self.text.strip_suffix(missing[1]) {
                Some(key) => (key, TagsState::Value { first: false }),
                None => return TagsState::Key,
            },
        };
        self.key = key.trim().to_owned();
        self.text.clear();
        if matches!(next, TagsState::Value { .. }) {
            self.begin_value();
        }
        next
    }

    fn before_value(&mut self) -> TagsState {
        let tag = self.text.trim_start();
        let open = "<arg_value>";
        if tag.is_empty() {
            self.text.clear();
            return TagsState::BeforeValue;
        }
        if tag == open {
            self.text.clear();
            self.begin_value();
            return TagsState::Value { first: false };
        }
        if open.starts_with(tag) {
            return TagsState::BeforeValue;
        }
        // The start tag of the value is missing.
        self.text.drain(..self.text.len() - tag.len());
        self.begin_value();
        let rest = std::mem::take(&mut self.text);
        let mut state = TagsState::Value { first: false };
        for c in rest.chars() {
            self.text.push(c);
            state = self.in_value(false);
        }
        state
    }

    fn in_value(&mut self, first: bool) -> TagsState {
        if first && self.text.starts_with('\n') {
            self.text.clear();
            return TagsState::Value { first: false };
        }
        while !self.text.is_empty() {
            match self.tail() {
                Tail::Incomplete => return TagsState::Value { first: false },
                Tail::No => {
                    // The value goes up to the next character that may begin a tag.
                    let skip = self.text.chars().next().map_or(0, char::len_utf8);
                    let end = self.text[skip..].find(['<', '\n']).map_or(self.text.len(), |at| skip + at);
                    let value: String = self.text.drain(..end).collect();
                    self.write_value(&value);
                }
                Tail::EndOfValue => {
                    if self.tags == TagStyle::Keys && self.text.starts_with('\n') {
                        self.write_value("\n");
                    }
                    self.text.clear();
                    self.end_value();
                    return TagsState::Gap;
                }
                Tail::EndOfCall(at) => {
                    self.text.drain(..at);
                    self.end_value();
                    return self.end();
                }
                Tail::NextParameter(at) => {
                    self.text.drain(..at);
                    self.end_value();
                    // The key is complete, so the text is read on from there.
                    let key = std::mem::take(&mut self.text);
                    let mut state = TagsState::Key;
                    for c in key.chars() {
                        self.text.push(c);
                        state = match state {
                            TagsState::Key => self.in_key(),
                            TagsState::BeforeValue => self.before_value(),
                            TagsState::Value { first } => self.in_value(first),
                            TagsState::Name | TagsState::Gap | TagsState::Done | TagsState::NoCall => state,
                        };
                    }
                    return state;
                }
            }
        }
        TagsState::Value { first: false }
    }

    /// The meaning of `text`, which may be the end of the value.
    fn tail(&self) -> Tail {
        let text = &*self.text;
        let skip = usize::from(text.starts_with('\n'));
        let tag = &text[skip..];
        if tag.is_empty() {
            return Tail::Incomplete;
        }
        if !tag.starts_with('<') {
            return Tail::No;
        }
        let (value, call, parameter) = (self.tags.end_of_value(), self.tags.end_of_call(), self.tags.parameter());
        if tag == value {
            return Tail::EndOfValue;
        }
        if let Some(key) = tag.strip_prefix(parameter) {
            return self.next_parameter(key, skip + parameter.len());
        }
        for end in [call].iter().chain(&CLOSINGS) {
            let Some(after) = tag.strip_prefix(end) else { continue };
            let next = after.trim_start();
            if after.len() - next.len() > MAX_BLANK {
                return Tail::No;
            }
            // A value may contain such a tag. It ends the call only if another of these tags follows.
            let follows = OPENINGS.iter().chain(CLOSINGS.iter().filter(|_| *end == "</function>"));
            if follows.clone().any(|mark| *mark == next) {
                let at = if self.tags == TagStyle::Keys || *end == "</function>" { skip + end.len() } else { skip };
                return Tail::EndOfCall(at);
            }
            if follows.clone().any(|mark| mark.starts_with(next)) {
                return Tail::Incomplete;
            }
            return Tail::No;
        }
        let marks = [value, call, parameter].into_iter().chain(CLOSINGS);
        if marks.into_iter().any(|mark| mark.starts_with(tag)) { Tail::Incomplete } else { Tail::No }
    }

    /// Whether `key` begins the next parameter: it is a parameter of the function that was not given yet.
    fn next_parameter(&self, key: &str, at: usize) -> Tail {
        let end = self.tags.end_of_key();
        let is_next = |key: &str| {
            let is_given = key == self.key || self.keys.iter().any(|given| given == key);
            self.signatures.has_argument(&self.name, key) && !is_given
        };
        match key.strip_suffix(end) {
            Some(key) if is_next(key.trim()) => Tail::NextParameter(at),
            Some(_) => Tail::No,
            None if key.len() > MAX_HEADER || key.contains('\n') => Tail::No,
            None => Tail::Incomplete,
        }
    }

    fn kinds(&self) -> ValueKinds {
        self.signatures.kinds(&self.name, &self.key)
    }

    /// Adds the name to the parts, once it is certain that this is a call.
    fn begin(&mut self) {
        if !std::mem::replace(&mut self.begun, true) {
            self.parts.push(CallPart::Name(self.name.clone()));
        }
    }

    fn begin_value(&mut self) {
        if self.kinds().are_text() {
            self.write_key();
            self.write("\"");
        }
    }

    fn write_key(&mut self) {
        let before = if self.keys.is_empty() { "{" } else { ", " };
        let key = json!(self.key);
        self.write(&format!("{before}{key}: "));
    }

    fn write_value(&mut self, text: &str) {
        if self.kinds().are_text() {
            self.write(&json_text(text));
        } else {
            self.value += text;
        }
    }

    fn end_value(&mut self) {
        if self.kinds().are_text() {
            self.write("\"");
        } else {
            let value = self.kinds().as_json(&std::mem::take(&mut self.value));
            self.write_key();
            self.write(&value);
        }
        self.keys.push(std::mem::take(&mut self.key));
    }

    fn write(&mut self, json: &str) {
        add_arguments(&mut self.parts, json);
    }

    /// The text that was read although it follows the call, if another tag than its end tag ended it.
    pub fn unread(&self) -> &str {
        match self.state {
            TagsState::Done => &self.text,
            TagsState::Name
            | TagsState::Gap
            | TagsState::Key
            | TagsState::BeforeValue
            | TagsState::Value { .. }
            | TagsState::NoCall => "",
        }
    }

    /// The answer ends within the call: closes the value and the arguments.
    pub fn cut_short(&mut self) {
        match self.state {
            // A line break ends the name.
            TagsState::Name if self.tags == TagStyle::Keys && self.text.trim_start().ends_with('\n') => {
                self.text.trim().clone_into(&mut self.name);
                if self.signatures.has(&self.name) {
                    self.end();
                }
            }
            TagsState::Gap if self.signatures.has(&self.name) || self.begun => drop(self.end()),
            TagsState::Value { .. } => {
                let text = std::mem::take(&mut self.text);
                let tag = text.trim();
                let tags = [self.tags.end_of_value(), self.tags.end_of_call(), self.tags.parameter()];
                let is_tag = tag.is_empty()
                    || tags.iter().chain(&CLOSINGS).any(|mark| {
                        mark.starts_with(tag)
                            || tag
                                .strip_prefix(mark)
                                .is_some_and(|rest| rest.trim_start().is_empty() || rest.trim_start().starts_with("</"))
                    });
                if !is_tag {
                    self.write_value(&text);
                }
                self.end_value();
                self.end();
            }
            TagsState::Key | TagsState::BeforeValue if self.begun => drop(self.end()),
            TagsState::Name
            | TagsState::Gap
            | TagsState::Key
            | TagsState::BeforeValue
            | TagsState::Done
            | TagsState::NoCall => {}
        }
    }

    fn end(&mut self) -> TagsState {
        self.begin();
        self.write(if self.keys.is_empty() { "{}" } else { "}" });
        TagsState::Done
    }
}
