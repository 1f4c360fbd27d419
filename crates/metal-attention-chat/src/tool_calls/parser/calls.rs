//! Reads one call of an answer: from the opening that announces it, through its header and arguments, to the text after
//! it. `../parser.rs` finds the opening; a [`CallReader`] reads the arguments.

use std::sync::Arc;

use super::super::call::{CallPart, CallProgress, CallReader, call_id};
use super::super::call_derived::CallDerived;
use super::super::call_gemma::CallGemma;
use super::super::call_json::CallJson;
use super::super::call_python::CallPython;
use super::super::call_tags::{CallTags, TagStyle};
use super::super::held_back::{MAX_BLANK, leading_blank};
use super::super::names::{is_name, may_be_named, name_in};
use super::super::syntax::{FENCE, FUNCTION, PYTHON_TAG, Syntax};
use super::super::{AnswerEvent, DerivedFormat, ToolFormat};
use super::{MAX_HEADER, ParserState, ToolCallParser, content, is_content};

impl ToolCallParser {
    /// Whether `part` begins a call. Without an opening, the function must be known.
    pub(super) fn is_call(&self, part: &CallPart, announced: bool) -> bool {
        matches!(part, CallPart::Name(name) if announced || self.names.contains(name))
    }

    /// After an opening. `raw` is the opening with the white space before it.
    pub(super) fn open_call(&mut self, opening: &'static str, raw: String) {
        match opening {
            PYTHON_TAG => self.state = ParserState::Python { raw },
            // This mark alone does not announce a call, so the function must be known.
            FUNCTION if !matches!(self.format, ToolFormat::Derived(_)) => {
                self.enter_call(self.tags(TagStyle::Function), &raw, false);
            }
            _ => self.state = ParserState::Opened { raw },
        }
    }

    /// After the start of a code block: a call if an object follows, possibly in a list.
    pub(super) fn fence(&mut self, events: &mut Vec<AnswerEvent>, at_end: bool) -> bool {
        let ParserState::Fence { raw } = &mut self.state else { return false };
        let word = self.pending.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let word = word.unwrap_or(self.pending.len());
        let blank = leading_blank(&self.pending[word..]);
        let (at, body) = (word + blank, &self.pending[word + blank..]);
        let in_list = body.strip_prefix('[').map(str::trim_start);
        let object = in_list.unwrap_or(body);
        let fits = word <= 16 && at + body.len() - object.len() <= MAX_BLANK;
        if fits && object.is_empty() && !at_end {
            return false;
        }
        if !fits || !object.starts_with('{') {
            let raw = std::mem::take(raw);
            content(events, &raw);
            self.state = ParserState::Text;
            return true;
        }
        (self.in_list, self.in_fence) = (in_list.is_some(), true);
        let begin = self.pending.len() - object.len();
        let raw = std::mem::take(raw) + &self.pending[..begin];
        self.pending.drain(..begin);
        self.enter_call(CallReader::Json(CallJson::new()), &raw, false);
        true
    }

    /// A reader for a call in tags.
    fn tags(&self, tags: TagStyle) -> CallReader {
        CallReader::Tags(CallTags::new(tags, Arc::clone(&self.signatures)))
    }

    /// A reader for a call in Python's notation.
    fn python(&self) -> CallReader {
        CallReader::Python(CallPython::new(Arc::clone(&self.signatures)))
    }

    /// A reader for a call that begins with a brace.
    fn object(&self) -> CallReader {
        if let ToolFormat::Derived(DerivedFormat { marks, .. }) = self.format
            && marks.is_in_braces()
        {
            return CallReader::Derived(Box::new(CallDerived::new(marks, false, Arc::clone(&self.signatures))));
        }
        CallReader::Json(CallJson::new())
    }

    /// Enters the state of a call that `call` reads. `raw` is the text of the call that was already consumed.
    pub(super) fn enter_call(&mut self, call: CallReader, raw: &str, announced: bool) {
        self.state = ParserState::Call { call: Box::new(call), raw: raw.to_owned(), announced, started: false };
    }

    /// After an opening: a list, an object, a name, or another notation of the format.
    pub(super) fn opened(&mut self, events: &mut Vec<AnswerEvent>, at_end: bool) -> bool {
        let ParserState::Opened { raw } = &mut self.state else { return false };
        let blank = leading_blank(&self.pending);
        raw.extend(self.pending.drain(..blank));
        let Some(first) = self.pending.chars().next() else { return false };
        let openings = self.syntax.openings;
        if let Some(opening) = openings.iter().find(|opening| self.pending.starts_with(**opening)) {
            self.pending.drain(..opening.len());
            if *opening == FUNCTION && !matches!(self.format, ToolFormat::Derived(_)) {
                let raw = std::mem::take(raw) + FUNCTION;
                self.enter_call(self.tags(TagStyle::Function), &raw, true);
            } else {
                *raw += opening;
            }
            return true;
        }
        if !at_end && openings.iter().any(|opening| opening.starts_with(&self.pending)) {
            return false;
        }
        match first {
            '{' => {
                let raw = std::mem::take(raw);
                let call = self.object();
                self.enter_call(call, &raw, true);
                true
            }
            '[' => {
                raw.push('[');
                self.pending.drain(..1);
                self.in_list = true;
                true
            }
            _ => self.named(events),
        }
    }

    /// After an opening that JSON does not follow.
    fn named(&mut self, events: &mut Vec<AnswerEvent>) -> bool {
        let (tags, python) = (self.tags(TagStyle::Keys), self.python());
        let ParserState::Opened { raw } = &mut self.state else { return false };
        let signatures = Arc::clone(&self.signatures);
        let (call, raw) = match self.format {
            ToolFormat::Derived(DerivedFormat { marks, .. }) => {
                let begun = raw.trim_end().ends_with(marks.call.0.trim()) && marks.call_is_announced();
                if !begun {
                    return self.no_call(events);
                }
                let raw = std::mem::take(raw);
                let announced = marks.is_announced();
                self.enter_call(
                    CallReader::Derived(Box::new(CallDerived::new(marks, true, signatures))),
                    &raw,
                    announced,
                );
                return true;
            }
            ToolFormat::Glm => (tags, std::mem::take(raw)),
            ToolFormat::Pythonic => (python, std::mem::take(raw)),
            ToolFormat::Gemma => (CallReader::Gemma(CallGemma::new()), std::mem::take(raw)),
            ToolFormat::MistralList | ToolFormat::MistralArgs | ToolFormat::DeepSeek | ToolFormat::DeepSeekR1 => {
                let brace = self.pending.find('{');
                let is_mistral = matches!(self.format, ToolFormat::MistralList | ToolFormat::MistralArgs);
                let may_be = !is_mistral || may_be_named(&self.pending, &self.names);
                if brace.is_none() && may_be && self.pending.len() <= MAX_HEADER {
                    return false;
                }
                match brace.filter(|at| *at <= MAX_HEADER).map(|at| (at, name_in(&self.pending[..at]))) {
                    Some((at, name)) if is_name(name, &self.pending[..at], &self.names) => {
                        let call = CallReader::Json(CallJson::arguments_of(name.to_owned()));
                        let raw = std::mem::take(raw) + &self.pending[..at];
                        self.pending.drain(..at);
                        (call, raw)
                    }
                    _ => return self.no_call(events),
                }
            }
            ToolFormat::Hermes
            | ToolFormat::Llama3
            | ToolFormat::FunctionTags
            | ToolFormat::Seed
            | ToolFormat::TaggedList
            | ToolFormat::Nemotron
            | ToolFormat::Jamba
            | ToolFormat::CommandR
            | ToolFormat::Harmony
            | ToolFormat::Glm4
            | ToolFormat::Json => return self.no_call(events),
        };
        self.enter_call(call, &raw, true);
        true
    }

    /// The opening was not followed by a call, so it is text.
    fn no_call(&mut self, events: &mut Vec<AnswerEvent>) -> bool {
        if let ParserState::Opened { raw } = std::mem::replace(&mut self.state, ParserState::Text) {
            content(events, &raw);
        }
        (self.in_list, self.in_fence) = (false, false);
        true
    }

    /// In a call: feeds the reader.
    pub(super) fn call(&mut self, events: &mut Vec<AnswerEvent>) -> bool {
        let pending = std::mem::take(&mut self.pending);
        let ParserState::Call { call, raw, announced, started } = &mut self.state else { return false };
        let (announced, mut started) = (*announced, *started);
        let (mut ended, mut unknown) = (None, false);
        for (at, c) in pending.char_indices() {
            if !started {
                raw.push(c);
            }
            let mut progress = call.push(c);
            let is_unknown = |name: &str| !self.names.iter().any(|known| known == name);
            let found =
                call.parts().first().is_some_and(|part| matches!(part, CallPart::Name(name) if is_unknown(name)));
            if !announced && !started && (found || call.name().is_some_and(is_unknown)) {
                (progress, unknown) = (CallProgress::NoCall, true);
            }
            if progress != CallProgress::Incomplete {
                ended = Some((at + c.len_utf8(), progress));
                break;
            }
        }
        let failed = matches!(ended, Some((_, CallProgress::NoCall)));
        let last = ended.and_then(|(end, _)| pending[..end].chars().next_back());
        let mut unread = String::new();
        if failed && !started && (unknown || call.parts().is_empty()) {
            // The last character may begin something else.
            let mut raw = std::mem::take(raw);
            raw.pop();
            unread.extend(last);
            (self.in_list, self.in_fence) = (false, false);
            if self.format == ToolFormat::Harmony {
                self.state = ParserState::Message { reasoning: false, begun: false };
                self.message_text(events, &raw, false, false);
            } else {
                content(events, &raw);
                self.state = ParserState::Text;
            }
        } else {
            if failed {
                // An unexpected character ends the call and is text after it.
                call.cut_short();
                unread.extend(last);
            } else if ended.is_some() {
                call.unread().clone_into(&mut unread);
            }
            let parts = call.take_parts();
            started |= self.call_parts(events, parts);
            if ended.is_some() {
                events.push(AnswerEvent::CallEnd { index: self.n_calls - 1 });
                self.state = ParserState::AfterCall;
            } else if let ParserState::Call { started: flag, raw, .. } = &mut self.state {
                *flag = started;
                if started {
                    raw.clear();
                }
            }
        }
        let Some((end, _)) = ended else { return false };
        self.pending = unread + &pending[end..];
        true
    }

    /// Returns the parts of a call as events. The result is true if the name was among them.
    pub(super) fn call_parts(&mut self, events: &mut Vec<AnswerEvent>, parts: Vec<CallPart>) -> bool {
        let mut started = false;
        for part in parts {
            match part {
                CallPart::Name(name) => {
                    self.start_call(events, name);
                    started = true;
                }
                CallPart::Arguments(delta) => {
                    events.push(AnswerEvent::CallArguments { index: self.n_calls - 1, delta });
                }
            }
        }
        started
    }

    /// After a call: end marks, separators, and the next call.
    pub(super) fn after_call(&mut self, events: &[AnswerEvent], at_end: bool) -> bool {
        let Syntax { openings, closings, bare, .. } = *self.syntax;
        let (in_list, separated) = (self.in_list, self.in_list || bare);
        let skipped = |c: char| c.is_whitespace() || (separated && matches!(c, ',' | ';')) || (in_list && c == ']');
        let length = self.pending.len() - self.pending.trim_start_matches(skipped).len();
        let skipped: String = self.pending.drain(..length).collect();
        self.in_list &= !skipped.contains(']');
        let blank = skipped.trim_end().len();
        if blank > 0 {
            self.blank.clear();
        }
        self.blank += &skipped[blank..];
        if self.pending.is_empty() {
            return false;
        }
        let fence = [FENCE];
        let fence: &[&str] = if self.in_fence { &fence } else { &[] };
        let closings = closings.iter().chain(fence);
        if let Some(closing) = closings.clone().find(|closing| self.pending.starts_with(**closing)) {
            self.pending.drain(..closing.len());
            self.blank.clear();
            (self.in_list, self.in_fence) = (false, self.in_fence && *closing != FENCE);
        } else if let Some(opening) = openings.iter().find(|opening| self.pending.starts_with(**opening)) {
            self.pending.drain(..opening.len());
            self.in_list = false;
            let raw = self.kept_blank(events) + opening;
            self.open_call(opening, raw);
        } else if !at_end && closings.chain(openings).any(|marker| marker.starts_with(&self.pending)) {
            return false;
        } else if self.format == ToolFormat::Harmony {
            self.state = ParserState::Header;
        } else if (self.in_list || bare || self.format == ToolFormat::Jamba) && self.pending.starts_with('{') {
            let raw = self.kept_blank(events);
            let call = self.object();
            let announced = !bare && self.in_list;
            self.enter_call(call, &raw, announced);
        } else if self.in_list && self.format == ToolFormat::Pythonic {
            let raw = self.kept_blank(events);
            self.enter_call(self.python(), &raw, true);
        } else {
            (self.in_list, self.in_fence) = (false, false);
            let blank = self.kept_blank(events);
            self.pending.insert_str(0, &blank);
            self.state = ParserState::Text;
        }
        true
    }

    /// The white space after a call, if there was text before the call.
    fn kept_blank(&mut self, events: &[AnswerEvent]) -> String {
        let blank = std::mem::take(&mut self.blank);
        let wrote = self.seen.content || events.iter().any(is_content);
        if wrote { blank } else { String::new() }
    }

    /// Returns the start of a call of the function `name` as an event. The result is the index of the call.
    pub(super) fn start_call(&mut self, events: &mut Vec<AnswerEvent>, name: String) -> usize {
        let index = self.n_calls;
        self.n_calls += 1;
        events.push(AnswerEvent::CallStart { index, id: call_id(), name });
        index
    }
}
