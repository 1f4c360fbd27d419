//! A call in a format that was derived from a chat template, read as it comes.

use std::sync::Arc;

use serde_json::json;

use super::call::{CallPart, Progress, add_arguments, json_text};
use super::call_json::CallJson;
use super::derived::{CallId, DerivedArguments, DerivedMarks, DerivedTags, NUMBER};
use super::held_back::held_back;
use super::parser::MAX_HEADER;
use super::signatures::{Kinds, Signatures};

/// Around a text that is taken as it is.
const CDATA: (&str, &str) = ("<![CDATA[", "]]>");

/// Reads a call whose marks are data. Texts in tags and JSON arguments are handed out as they come.
#[derive(Debug)]
pub(super) struct CallDerived {
    marks: &'static DerivedMarks,
    state: State,
    /// What was read of the part that the state tells.
    text: String,
    name: String,
    key: String,
    /// What the flag of the value says: it is a text, or not.
    is_text: Option<bool>,
    /// The value is at its beginning.
    first: bool,
    /// The value stands in [`CDATA`].
    in_cdata: bool,
    /// Bytes of the value so far.
    n_written: usize,
    /// A value that is no text, so far.
    value: String,
    n_values: usize,
    json: CallJson,
    begun: bool,
    signatures: Arc<Signatures>,
    parts: Vec<CallPart>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before what begins a call.
    Start,
    /// In the name, with an id where there is one.
    Header,
    /// In a JSON object.
    Json,
    /// Before a parameter or the end.
    Gap,
    Key,
    Flag,
    Value,
    /// After a JSON object.
    End,
    Done,
    NoCall,
}

/// How far a text is a mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Match {
    No,
    Open,
    Whole,
}

impl CallDerived {
    /// A call; `begun`: what begins it was read.
    pub fn new(marks: &'static DerivedMarks, begun: bool, signatures: Arc<Signatures>) -> Self {
        Self {
            marks,
            state: if begun { State::Header } else { State::Start },
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

    /// What was read after the end of the call, where something other than its mark ended it.
    pub fn unread(&self) -> &str {
        match self.state {
            State::Done => &self.text,
            State::Start
            | State::Header
            | State::Json
            | State::Gap
            | State::Key
            | State::Flag
            | State::Value
            | State::End
            | State::NoCall => "",
        }
    }

    /// Takes the next character.
    pub fn push(&mut self, c: char) -> Progress {
        self.state = self.next(c);
        match self.state {
            State::Done => Progress::Done,
            State::NoCall => Progress::NoCall,
            State::Start
            | State::Header
            | State::Json
            | State::Gap
            | State::Key
            | State::Flag
            | State::Value
            | State::End => Progress::Open,
        }
    }

    fn next(&mut self, c: char) -> State {
        if self.state == State::Json {
            return self.in_json(c);
        }
        self.text.push(c);
        match self.state {
            State::Start => match matches(&self.marks.call.0, &self.text) {
                Match::No => State::NoCall,
                Match::Open => State::Start,
                Match::Whole => self.enter(State::Header),
            },
            State::Header => self.in_header(c),
            State::Gap => self.in_gap(),
            State::Key => self.in_key(),
            State::Flag => self.in_flag(),
            State::Value => self.in_value(),
            State::End => self.at_end(),
            state @ (State::Json | State::Done | State::NoCall) => state,
        }
    }

    fn enter(&mut self, state: State) -> State {
        self.text.clear();
        state
    }

    fn tags(&self) -> Option<&'static DerivedTags> {
        match &self.marks.arguments {
            DerivedArguments::Tags(tags) => Some(tags),
            DerivedArguments::Json | DerivedArguments::Object(_) => None,
        }
    }

    fn in_header(&mut self, c: char) -> State {
        let between = self.marks.between.trim();
        let header = match between {
            "" => self.text.strip_suffix('{').filter(|_| self.tags().is_none()),
            _ => without_mark(&self.text, between),
        };
        let Some(header) = header else {
            let long = self.text.len() > MAX_HEADER || self.text.trim().contains("\n\n");
            return if long { State::NoCall } else { State::Header };
        };
        let name = self.name_in(header.trim()).to_owned();
        let is_name = !name.is_empty() && !name.contains(['<', '\n', '{', '"']);
        if !self.signatures.has(&name) && (!is_name || name.contains(char::is_whitespace)) {
            return State::NoCall;
        }
        self.name.clone_from(&name);
        self.text.clear();
        if self.tags().is_some() {
            return State::Gap;
        }
        self.json = CallJson::arguments_of(name);
        if between.is_empty() { self.in_json(c) } else { State::Json }
    }

    /// The function in what stands in its place.
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

    fn in_json(&mut self, c: char) -> State {
        let progress = self.json.push(c);
        self.parts.append(&mut self.json.take_parts());
        self.begun |= !self.parts.is_empty();
        match progress {
            Progress::Open => State::Json,
            Progress::NoCall => State::NoCall,
            Progress::Done => {
                self.text.clear();
                let unread = self.json.unread().to_owned();
                if self.marks.call.1.trim().is_empty() {
                    self.text = unread;
                    return State::Done;
                }
                unread.chars().fold(State::End, |state, c| {
                    self.text.push(c);
                    if state == State::End { self.at_end() } else { state }
                })
            }
        }
    }

    fn at_end(&mut self) -> State {
        match matches(&self.marks.call.1, &self.text) {
            Match::No => State::Done,
            Match::Open => State::End,
            Match::Whole => self.enter(State::Done),
        }
    }

    fn in_gap(&mut self) -> State {
        let Some(tags) = self.tags() else { return State::NoCall };
        let key = matches(&tags.before_key, &self.text);
        let end = match self.marks.call.1.trim() {
            "" => Match::No,
            end => matches(end, &self.text),
        };
        if key == Match::Whole {
            self.begin();
            self.enter(State::Key)
        } else if end == Match::Whole {
            self.text.clear();
            self.end()
        } else if key == Match::Open || end == Match::Open {
            State::Gap
        } else if self.begun {
            // Its own end is missing.
            self.end()
        } else {
            State::NoCall
        }
    }

    fn in_key(&mut self) -> State {
        let Some(tags) = self.tags() else { return State::NoCall };
        let Some(key) = without_mark(&self.text, &tags.after_key) else {
            return if self.text.len() > MAX_HEADER { self.end() } else { State::Key };
        };
        self.key = key.trim().to_owned();
        self.text.clear();
        self.is_text = None;
        if tags.flag.is_some() { State::Flag } else { self.begin_value() }
    }

    fn in_flag(&mut self) -> State {
        let Some(flag) = self.tags().and_then(|tags| tags.flag.as_ref()) else { return State::NoCall };
        let Some(word) = without_mark(&self.text, &flag.after) else {
            return if self.text.len() > MAX_HEADER { self.end() } else { State::Flag };
        };
        self.is_text = Some(word.trim() == flag.text);
        self.text.clear();
        self.begin_value()
    }

    fn kinds(&self) -> Kinds {
        self.signatures.kinds(&self.name, &self.key)
    }

    fn value_is_text(&self) -> bool {
        self.is_text.unwrap_or_else(|| self.kinds().are_text())
    }

    fn begin_value(&mut self) -> State {
        self.first = true;
        (self.in_cdata, self.n_written) = (false, 0);
        self.value.clear();
        if self.value_is_text() {
            self.write_key();
            self.write("\"");
        }
        State::Value
    }

    /// Whether a line break at either end of a value is a part of the tags.
    fn on_lines(&self) -> bool {
        self.tags().is_some_and(|tags| tags.after_value.starts_with('\n'))
    }

    fn in_value(&mut self) -> State {
        let Some(tags) = self.tags() else { return State::NoCall };
        let on_lines = self.on_lines();
        if std::mem::take(&mut self.first) && on_lines && self.text.starts_with('\n') {
            self.text.clear();
            return State::Value;
        }
        if tags.cdata && self.n_written == 0 && !self.in_cdata {
            if self.text == CDATA.0 {
                self.in_cdata = true;
                self.text.clear();
                return State::Value;
            }
            if CDATA.0.starts_with(&*self.text) {
                return State::Value;
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
            return State::Gap;
        }
        let line = format!("\n{end}");
        let ends = [end, &line];
        let held = held_back(&self.text, if on_lines { &ends } else { &ends[..1] });
        let value: String = self.text.drain(..self.text.len() - held).collect();
        self.write_value(&value);
        State::Value
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
            let kinds = if self.is_text.is_some() { Kinds::ANY } else { self.kinds() };
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

    /// Tells the name, once it is certain that this is a call.
    fn begin(&mut self) {
        if !std::mem::replace(&mut self.begun, true) {
            self.parts.push(CallPart::Name(self.name.clone()));
        }
    }

    fn end(&mut self) -> State {
        self.begin();
        self.write(if self.n_values == 0 { "{}" } else { "}" });
        State::Done
    }

    /// The answer ends within the call: closes the value and the arguments.
    pub fn cut_short(&mut self) {
        match self.state {
            State::Json => {
                self.json.cut_short();
                self.parts.append(&mut self.json.take_parts());
            }
            State::Value => {
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
            State::Gap if self.begun || self.signatures.has(&self.name) => drop(self.end()),
            State::Key | State::Flag if self.begun => drop(self.end()),
            State::Start
            | State::Header
            | State::Gap
            | State::Key
            | State::Flag
            | State::End
            | State::Done
            | State::NoCall => {}
        }
    }
}

/// Whether `text` is `mark`, or its beginning, where white space does not count.
fn matches(mark: &str, text: &str) -> Match {
    let mut mark = mark.chars().filter(|c| !c.is_whitespace());
    for c in text.chars().filter(|c| !c.is_whitespace()) {
        if mark.next() != Some(c) {
            return Match::No;
        }
    }
    if mark.next().is_none() { Match::Whole } else { Match::Open }
}

/// What stands before `mark` at the end of `text`, where white space does not count.
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

/// Whether a mark is no more than what JSON has.
pub(super) fn is_blank_mark(mark: &str) -> bool {
    mark.chars().all(|c| c.is_whitespace() || c.is_ascii_alphanumeric() || "{}[]\":,_".contains(c))
}
