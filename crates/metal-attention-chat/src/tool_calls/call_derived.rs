//! [`CallDerived`]: reads a call in a notation that was derived from a chat template (`derived.rs`, `probe.rs`).

use std::sync::Arc;

use serde_json::json;

use super::call::{CallPart, CallProgress, add_arguments, json_text};
use super::call_json::CallJson;
use super::derived::{CallId, DerivedArguments, DerivedMarks, DerivedTags, NUMBER};
use super::held_back::held_back;
use super::parser::MAX_HEADER;
use super::signatures::{Signatures, ValueKinds};

/// The marks around a text that is taken literally.
const CDATA: (&str, &str) = ("<![CDATA[", "]]>");

/// Reads a call whose marks are data. Strings in tags, and JSON arguments, are passed on character by character; other
/// values when they are complete. The arguments are converted to a JSON object.
#[derive(Debug)]
pub(super) struct CallDerived {
    marks: &'static DerivedMarks,
    state: DerivedState,
    /// The text read in the current state.
    text: String,
    name: String,
    key: String,
    /// Whether the flag before the value says that it is a string; `None` if the notation has no flags.
    is_text: Option<bool>,
    /// Whether the value is at its first character.
    first: bool,
    /// Whether the value is inside [`CDATA`].
    in_cdata: bool,
    /// The length in bytes of the value so far.
    n_written: usize,
    /// The text so far of a value that is not a string.
    value: String,
    n_values: usize,
    json: CallJson,
    begun: bool,
    signatures: Arc<Signatures>,
    parts: Vec<CallPart>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DerivedState {
    /// Before the mark that begins the call.
    Start,
    /// In the name, with the call's id if the notation has one.
    Header,
    /// In the JSON object of the arguments.
    Json,
    /// Before a parameter or the end of the call.
    Gap,
    Key,
    Flag,
    Value,
    /// After the JSON object of the arguments.
    End,
    Done,
    NoCall,
}

/// The result of comparing a text with a mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Match {
    No,
    Partial,
    Whole,
}

impl CallDerived {
    /// A new call. `begun`: the mark that begins it has been read.
    pub fn new(marks: &'static DerivedMarks, begun: bool, signatures: Arc<Signatures>) -> Self {
        Self {
            marks,
            state: if begun { DerivedState::Header } else { DerivedState::Start },
            text: String::new(),
            name: String::new(),
            key: String::new(),
            is_text: None,
            first: false,
            in_cdata: false,
            n_written: 0,
            value: String::new(),
            n_values: 0,
            json: CallJson::new(),
            begun: false,
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

    /// The text that was read although it follows the call, if the call ended without its end mark.
    pub fn unread(&self) -> &str {
        match self.state {
            DerivedState::Done => &self.text,
            DerivedState::Start
            | DerivedState::Header
            | DerivedState::Json
            | DerivedState::Gap
            | DerivedState::Key
            | DerivedState::Flag
            | DerivedState::Value
            | DerivedState::End
            | DerivedState::NoCall => "",
        }
    }

    /// Reads the next character.
    pub fn push(&mut self, c: char) -> CallProgress {
        self.state = self.next(c);
        match self.state {
            DerivedState::Done => CallProgress::Done,
            DerivedState::NoCall => CallProgress::NoCall,
            DerivedState::Start
            | DerivedState::Header
            | DerivedState::Json
            | DerivedState::Gap
            | DerivedState::Key
            | DerivedState::Flag
            | DerivedState::Value
            | DerivedState::End => CallProgress::Incomplete,
        }
    }

    fn next(&mut self, c: char) -> DerivedState {
        if self.state == DerivedState::Json {
            return self.in_json(c);
        }
        self.text.push(c);
        match self.state {
            DerivedState::Start => match matches(&self.marks.call.0, &self.text) {
                Match::No => DerivedState::NoCall,
                Match::Partial => DerivedState::Start,
                Match::Whole => self.enter(DerivedState::Header),
            },
            DerivedState::Header => self.in_header(c),
            DerivedState::Gap => self.in_gap(),
            DerivedState::Key => self.in_key(),
            DerivedState::Flag => self.in_flag(),
            DerivedState::Value => self.in_value(),
            DerivedState::End => self.at_end(),
            state @ (DerivedState::Json | DerivedState::Done | DerivedState::NoCall) => state,
        }
    }

    /// Enters a state with an empty text.
    fn enter(&mut self, state: DerivedState) -> DerivedState {
        self.text.clear();
        state
    }

    fn tags(&self) -> Option<&'static DerivedTags> {
        match &self.marks.arguments {
            DerivedArguments::Tags(tags) => Some(tags),
            DerivedArguments::Json | DerivedArguments::Object(_) => None,
        }
    }

    fn in_header(&mut self, c: char) -> DerivedState {
        let between = self.marks.between.trim();
        let header = match between {
            "" => self.text.strip_suffix('{').filter(|_| self.tags().is_none()),
            _ => without_mark(&self.text, between),
        };
        let Some(header) = header else {
            let long = self.text.len() > MAX_HEADER || self.text.trim().contains("\n\n");
            return if long { DerivedState::NoCall } else { DerivedState::Header };
        };
        let name = self.name_in(header.trim()).to_owned();
        let is_name = !name.is_empty() && !name.contains(['<', '\n', '{', '"']);
        if !self.signatures.has(&name) && (!is_name || name.contains(char::is_whitespace)) {
            return DerivedState::NoCall;
        }
        self.name.clone_from(&name);
        self.text.clear();
        if self.tags().is_some() {
            return DerivedState::Gap;
        }
        self.json = CallJson::arguments_of(name);
        if between.is_empty() { self.in_json(c) } else { DerivedState::Json }
    }

    /// The function's name in a header, which may also have an id.
    fn name_in<'h>(&self, header: &'h str) -> &'h str {
        match &self.marks.id {
            CallId::None => header,
            CallId::Before(mark) => header.rsplit_once(mark.trim()).map_or(header, |(_, name)| name.trim()),
            CallId::After(mark) => header.split_once(mark.trim()).map_or(header, |(name, _)| name.trim()),
            CallId::Named if self.signatures.has(header) => header,
            CallId::Named => {
                let name = match header.rsplit_once(':') {
                    Some((name, index)) if index.chars().all(|c| c.is_ascii_digit()) => name,
                    Some(_) | None => header,
                };
                let short = name.strip_prefix("functions.").unwrap_or(name);
                if self.signatures.has(name) { name } else { short }
            }
        }
    }

    fn in_json(&mut self, c: char) -> DerivedState {
        let progress = self.json.push(c);
        self.parts.append(&mut self.json.take_parts());
        self.begun |= !self.parts.is_empty();
        match progress {
            CallProgress::Incomplete => DerivedState::Json,
            CallProgress::NoCall => DerivedState::NoCall,
            CallProgress::Done => {
                self.text.clear();
                let unread = self.json.unread().to_owned();
                if self.marks.call.1.trim().is_empty() {
                    self.text = unread;
                    return DerivedState::Done;
                }
                unread.chars().fold(DerivedState::End, |state, c| {
                    self.text.push(c);
                    if state == DerivedState::End { self.at_end() } else { state }
                })
            }
        }
    }

    fn at_end(&mut self) -> DerivedState {
        match matches(&self.marks.call.1, &self.text) {
            Match::No => DerivedState::Done,
            Match::Partial => DerivedState::End,
            Match::Whole => self.enter(DerivedState::Done),
        }
    }

    fn in_gap(&mut self) -> DerivedState {
        let Some(tags) = self.tags() else { return DerivedState::NoCall };
        let key = matches(&tags.before_key, &self.text);
        let end = match self.marks.call.1.trim() {
            "" => Match::No,
            end => matches(end, &self.text),
        };
        if key == Match::Whole {
            self.begin();
            self.enter(DerivedState::Key)
        } else if end == Match::Whole {
            self.text.clear();
            self.end()
        } else if key == Match::Partial || end == Match::Partial {
            DerivedState::Gap
        } else if self.begun {
            // The call's end mark is missing.
            self.end()
        } else {
            DerivedState::NoCall
        }
    }

    fn in_key(&mut self) -> DerivedState {
        let Some(tags) = self.tags() else { return DerivedState::NoCall };
        let Some(key) = without_mark(&self.text, &tags.after_key) else {
            return if self.text.len() > MAX_HEADER { self.end() } else { DerivedState::Key };
        };
        self.key = key.trim().to_owned();
        self.text.clear();
        self.is_text = None;
        if tags.flag.is_some() { DerivedState::Flag } else { self.begin_value() }
    }

    fn in_flag(&mut self) -> DerivedState {
        let Some(flag) = self.tags().and_then(|tags| tags.flag.as_ref()) else { return DerivedState::NoCall };
        let Some(word) = without_mark(&self.text, &flag.after) else {
            return if self.text.len() > MAX_HEADER { self.end() } else { DerivedState::Flag };
        };
        self.is_text = Some(word.trim() == flag.text);
        self.text.clear();
        self.begin_value()
    }

    fn kinds(&self) -> ValueKinds {
        self.signatures.kinds(&self.name, &self.key)
    }

    fn value_is_text(&self) -> bool {
        self.is_text.unwrap_or_else(|| self.kinds().are_text())
    }

    fn begin_value(&mut self) -> DerivedState {
        self.first = true;
        (self.in_cdata, self.n_written) = (false, 0);
        self.value.clear();
        if self.value_is_text() {
            self.write_key();
            self.write("\"");
        }
        DerivedState::Value
    }

    /// Whether a line break at either end of a value belongs to the tags.
    fn on_lines(&self) -> bool {
        self.tags().is_some_and(|tags| tags.after_value.starts_with('\n'))
    }

    fn in_value(&mut self) -> DerivedState {
        let Some(tags) = self.tags() else { return DerivedState::NoCall };
        let on_lines = self.on_lines();
        if std::mem::take(&mut self.first) && on_lines && self.text.starts_with('\n') {
            self.text.clear();
            return DerivedState::Value;
        }
        if tags.cdata && self.n_written == 0 && !self.in_cdata {
            if self.text == CDATA.0 {
                self.in_cdata = true;
                self.text.clear();
                return DerivedState::Value;
            }
            if CDATA.0.starts_with(&*self.text) {
                return DerivedState::Value;
            }
        }
        let end = tags.after_value.trim();
        let end = if self.in_cdata { format!("{}{end}", CDATA.1) } else { end.to_owned() };
        let end = &*end;
        if let Some(value) = self.text.strip_suffix(end) {
            let value = if on_lines { value.strip_suffix('\n').unwrap_or(value) } else { value }.to_owned();
            self.text.clear();
            self.write_value(&value);
            self.end_value();
            return DerivedState::Gap;
        }
        let line = format!("\n{end}");
        let ends = [end, &line];
        let held = held_back(&self.text, if on_lines { &ends } else { &ends[..1] });
        let value: String = self.text.drain(..self.text.len() - held).collect();
        self.write_value(&value);
        DerivedState::Value
    }

    fn write_value(&mut self, text: &str) {
        self.n_written += text.len();
        if self.value_is_text() {
            self.write(&json_text(text));
        } else {
            self.value += text;
        }
    }

    fn end_value(&mut self) {
        if self.value_is_text() {
            self.write("\"");
        } else {
            let kinds = if self.is_text.is_some() { ValueKinds::ANY } else { self.kinds() };
            let value = kinds.as_json(&std::mem::take(&mut self.value));
            self.write_key();
            self.write(&value);
        }
        self.n_values += 1;
    }

    fn write_key(&mut self) {
        let before = if self.n_values == 0 { "{" } else { ", " };
        let key = json!(self.key);
        self.write(&format!("{before}{key}: "));
    }

    fn write(&mut self, json: &str) {
        add_arguments(&mut self.parts, json);
    }

    /// Adds the name to the parts, once it is certain that this is a call.
    fn begin(&mut self) {
        if !std::mem::replace(&mut self.begun, true) {
            self.parts.push(CallPart::Name(self.name.clone()));
        }
    }

    fn end(&mut self) -> DerivedState {
        self.begin();
        self.write(if self.n_values == 0 { "{}" } else { "}" });
        DerivedState::Done
    }

    /// The answer ends within the call: closes the value and the arguments.
    pub fn cut_short(&mut self) {
        match self.state {
            DerivedState::Json => {
                self.json.cut_short();
                self.parts.append(&mut self.json.take_parts());
            }
            DerivedState::Value => {
                let text = std::mem::take(&mut self.text);
                let end = self.tags().map_or("", |tags| tags.after_value.trim());
                let is_mark = end.starts_with(text.trim_start())
                    || self.in_cdata && format!("{}{end}", CDATA.1).starts_with(text.trim_start())
                    || self.tags().is_some_and(|tags| tags.cdata) && self.n_written == 0 && CDATA.0.starts_with(&*text);
                if !is_mark {
                    self.write_value(&text);
                }
                self.end_value();
                self.end();
            }
            DerivedState::Gap if self.begun || self.signatures.has(&self.name) => drop(self.end()),
            DerivedState::Key | DerivedState::Flag if self.begun => drop(self.end()),
            DerivedState::Start
            | DerivedState::Header
            | DerivedState::Gap
            | DerivedState::Key
            | DerivedState::Flag
            | DerivedState::End
            | DerivedState::Done
            | DerivedState::NoCall => {}
        }
    }
}

/// Compares `text` with `mark`, ignoring white space.
fn matches(mark: &str, text: &str) -> Match {
    let mut mark = mark.chars().filter(|c| !c.is_whitespace());
    for c in text.chars().filter(|c| !c.is_whitespace()) {
        if mark.next() != Some(c) {
            return Match::No;
        }
    }
    if mark.next().is_none() { Match::Whole } else { Match::Partial }
}

/// The text before `mark`, if `text` ends with `mark`, ignoring white space.
fn without_mark<'t>(text: &'t str, mark: &str) -> Option<&'t str> {
    if text.ends_with(char::is_whitespace) {
        return None;
    }
    let mut rest = text;
    for c in mark.chars().rev().filter(|c| !c.is_whitespace()) {
        rest = rest.trim_end();
        rest = match c {
            NUMBER => {
                let word = rest.trim_end_matches(|c: char| c.is_ascii_digit());
                Some(word).filter(|word| word.len() < rest.len())?
            }
            c => rest.strip_suffix(c)?,
        };
    }
    Some(rest)
}

/// Whether a mark consists only of characters that occur in any JSON, so that it does not identify a call.
pub(super) fn is_blank_mark(mark: &str) -> bool {
    mark.chars().all(|c| c.is_whitespace() || c.is_ascii_alphanumeric() || "{}[]\":,_".contains(c))
}
