//! Takes an answer apart as it comes.

use std::sync::Arc;

use metal_attention_tokenizer::Tokenizer;

use super::call::{CallPart, CallProgress, CallReader, call_id};
use super::call_derived::CallDerived;
use super::call_gemma::CallGemma;
use super::call_in_thoughts::CallInThoughts;
use super::call_json::CallJson;
use super::call_python::CallPython;
use super::call_tags::{CallTags, TagStyle};
use super::harmony::{self, Channel, HeaderMatch};
use super::held_back::{MAX_BLANK, blank_end, first_of, held_back, leading_blank};
use super::names::{NamedCall, is_name, may_be_named, name_in, named_call};
use super::python_call::python_call;
use super::signatures::Signatures;
use super::syntax::{FENCE, FUNCTION, PYTHON_TAG, Syntax};
use super::{AnswerEvent, DerivedFormat, ToolFormat};
use crate::{ReasoningMarkers, Tool};

/// Bytes of what announces a call or a message, such as its name: what is longer is text.
pub(super) const MAX_HEADER: usize = 1024;

/// Parts an answer into thoughts, text and tool calls while the model writes it.
///
/// Text is handed out as soon as it is certain what it is. What looks like a call and turns out to be none is text.
///
/// ```
/// use metal_attention_chat::{AnswerEvent, Message, Tool, ToolCallParser, ToolFormat};
///
/// let tool = serde_json::json!({"type": "function", "function": {"name": "add"}});
/// let mut parser = ToolCallParser::new(ToolFormat::Hermes, &[Tool::try_from(tool)?]);
/// let mut events = parser.push("Let me see.\n<tool_");
/// assert_eq!(events, [AnswerEvent::Content("Let me see.".into())]);
/// events.extend(parser.push("call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>"));
/// events.extend(parser.finish());
/// let message = Message::from_events(events);
/// assert_eq!(message.tool_calls[0].function.name, "add");
/// assert_eq!(message.tool_calls[0].function.arguments, "{\"a\": 1}");
/// # Ok::<(), metal_attention_chat::ToolError>(())
/// ```
#[derive(Debug)]
pub struct ToolCallParser {
    format: ToolFormat,
    syntax: &'static Syntax,
    /// The functions there are; none: nothing is a call.
    pub(super) names: Vec<String>,
    signatures: Arc<Signatures>,
    /// The model may think before it answers.
    reasoning: Option<ReasoningMarkers>,
    state: ParserState,
    /// Text that is not handed out yet.
    pub(super) pending: String,
    /// What begins the answer was there, and what ends it is still to come.
    in_answer: bool,
    /// The calls stand in a JSON list.
    in_list: bool,
    /// The calls stand in a block of code.
    in_fence: bool,
    /// White space after a call, which stays between texts.
    blank: String,
    /// What there was before.
    seen: SeenParts,
    n_calls: usize,
}

#[derive(Debug, Default)]
struct SeenParts {
    thoughts: bool,
    text: bool,
    /// Text for the user, in this message or one before it.
    content: bool,
}

#[derive(Debug)]
enum ParserState {
    /// Between the marks of thoughts; whether there was text yet.
    Thinking { begun: bool },
    /// In thoughts, after what announces a call.
    CallInThoughts(CallInThoughts),
    /// Before the first character of text that is not blank; blanks may be dropped.
    Start { drop_space: bool },
    /// In the text for the user.
    Text,
    /// After what announces a call. `raw` is that.
    Opened { raw: String },
    /// After the beginning of a block of code, which may be a call. `raw` is the text so far.
    Fence { raw: String },
    /// After `<|python_tag|>`. `raw` is that.
    Python { raw: String },
    /// In a call. `raw` is its text so far, with what announced it; where nothing did, the function must be known.
    Call { call: Box<CallReader>, raw: String, announced: bool, started: bool },
    /// After a call.
    AfterCall,
    /// Before the header of a message.
    Header,
    /// In a message that is thoughts or text; whether there was text yet.
    Message { thoughts: bool, begun: bool },
}

impl ToolCallParser {
    /// A parser for answers of a model that writes calls of `tools` in `format`.
    pub fn new(format: ToolFormat, tools: &[Tool]) -> Self {
        let in_messages = format == ToolFormat::Harmony;
        let state = if in_messages { ParserState::Header } else { ParserState::Start { drop_space: false } };
        Self {
            format,
            syntax: format.syntax(),
            names: tools.iter().map(|tool| tool.name().to_owned()).collect(),
            signatures: Arc::new(Signatures::of(tools)),
            reasoning: None,
            state,
            pending: String::new(),
            in_answer: false,
            in_list: false,
            in_fence: false,
            blank: String::new(),
            seen: SeenParts::default(),
            n_calls: 0,
        }
    }

    /// Looks for thoughts between `markers` at the beginning of the answer. `begun`: the prompt ended with what begins
    /// them, so that the answer goes on with thoughts.
    #[must_use]
    pub fn thinking(mut self, markers: ReasoningMarkers, begun: bool) -> Self {
        self.reasoning = Some(markers);
        if begun {
            self.state = ParserState::Thinking { begun: false };
        }
        self
    }

    /// Whether the answer is within thoughts.
    pub fn is_thinking(&self) -> bool {
        matches!(
            self.state,
            ParserState::Thinking { .. } | ParserState::CallInThoughts(_) | ParserState::Message { thoughts: true, .. }
        )
    }

    /// The number of calls so far.
    pub fn n_calls(&self) -> usize {
        self.n_calls
    }

    /// Takes the next token with the text that it adds. Control tokens that belong to calls and thoughts add none, but
    /// count here.
    pub fn push_token(&mut self, tokenizer: &Tokenizer, id: u32, text: &str) -> Vec<AnswerEvent> {
        let marker = tokenizer.token_text(id).filter(|text| tokenizer.is_control(id) && self.is_marker(text));
        let Some(marker) = marker else { return self.push(text) };
        let mut events = self.push(text);
        let closes_nothing = match self.state {
            ParserState::Start { .. } | ParserState::Text => !self.in_answer && self.syntax.closings.contains(&marker),
            ParserState::Thinking { .. }
            | ParserState::CallInThoughts(_)
            | ParserState::Opened { .. }
            | ParserState::Fence { .. }
            | ParserState::Python { .. }
            | ParserState::Call { .. }
            | ParserState::AfterCall
            | ParserState::Header
            | ParserState::Message { .. } => false,
        };
        if !closes_nothing {
            events.extend(self.push(marker));
        }
        events
    }

    /// Whether `token` is one of the marks, or a part of one.
    fn is_marker(&self, token: &str) -> bool {
        let reasoning = self.reasoning.iter().flat_map(ReasoningMarkers::texts);
        self.syntax.markers().chain(reasoning).any(|marker| marker.contains(token))
    }

    /// Takes the next piece of the answer.
    pub fn push(&mut self, text: &str) -> Vec<AnswerEvent> {
        self.pending += text;
        let mut events = Vec::new();
        while self.step(&mut events, false) {}
        self.seen.content |= events.iter().any(is_content);
        events
    }

    /// The answer is complete: hands out what was held back. A call that the model left open ends here.
    pub fn finish(&mut self) -> Vec<AnswerEvent> {
        self.end(false)
    }

    /// The answer was cut off: hands out what was held back. A call that is still open gets no end, so that
    /// [`Message::from_events`](crate::Message::from_events) leaves it out.
    pub fn cut_off(&mut self) -> Vec<AnswerEvent> {
        self.end(true)
    }

    fn end(&mut self, is_cut: bool) -> Vec<AnswerEvent> {
        let mut events = Vec::new();
        while self.step(&mut events, true) {}
        let rest = std::mem::take(&mut self.pending);
        match std::mem::replace(&mut self.state, ParserState::Text) {
            ParserState::Thinking { .. } => thoughts(&mut events, rest.trim_end()),
            // What would have followed is not known.
            ParserState::CallInThoughts(call) if is_cut => thoughts(&mut events, (call.raw + &rest).trim_end()),
            ParserState::CallInThoughts(call) => match call.finish() {
                Ok(calls) => {
                    self.n_calls += calls.iter().filter(|event| matches!(event, AnswerEvent::CallEnd { .. })).count();
                    events.extend(calls);
                }
                Err(text) => thoughts(&mut events, (text + &rest).trim_end()),
            },
            // Where something is left of a header, the message has not begun.
            ParserState::Start { drop_space: true } | ParserState::AfterCall | ParserState::Header => {}
            ParserState::Start { drop_space: false } | ParserState::Text => content(&mut events, &rest),
            ParserState::Opened { raw } | ParserState::Fence { raw } => content(&mut events, &(raw + &rest)),
            ParserState::Python { .. } if is_cut => {}
            ParserState::Python { .. } => {
                let (name, arguments) = python_call(&rest);
                let index = self.start_call(&mut events, name);
                events.push(AnswerEvent::CallArguments { index, delta: arguments });
                events.push(AnswerEvent::CallEnd { index });
            }
            ParserState::Call { mut call, raw, announced, started } => {
                call.cut_short();
                let parts = call.take_parts();
                let is_call = started || parts.first().is_some_and(|part| self.is_call(part, announced));
                if !is_call {
                    content(&mut events, &raw);
                } else if !is_cut {
                    self.call_parts(&mut events, parts);
                    events.push(AnswerEvent::CallEnd { index: self.n_calls - 1 });
                }
            }
            ParserState::Message { thoughts, begun } => self.message_text(&mut events, &rest, thoughts, begun),
        }
        events
    }

    /// Whether `part` begins a call: where nothing announced it, the function must be known.
    fn is_call(&self, part: &CallPart, announced: bool) -> bool {
        matches!(part, CallPart::Name(name) if announced || self.names.contains(name))
    }

    /// Works on the pending text. False: it takes more of it to go on.
    fn step(&mut self, events: &mut Vec<AnswerEvent>, at_end: bool) -> bool {
        match &mut self.state {
            ParserState::Thinking { begun } => {
                let begun = *begun;
                self.thinking_on(events, begun)
            }
            ParserState::Start { drop_space } => {
                let drop_space = *drop_space;
                self.begin(drop_space, at_end)
            }
            ParserState::Text => self.text(events, at_end),
            ParserState::Opened { .. } => self.opened(events, at_end),
            ParserState::CallInThoughts(_) => self.call_in_thoughts(events),
            ParserState::Fence { .. } => self.fence(events, at_end),
            ParserState::Python { raw } => {
                let blank = leading_blank(&self.pending);
                raw.extend(self.pending.drain(..blank));
                if self.pending.starts_with('{') {
                    let raw = std::mem::take(raw);
                    self.enter_call(CallReader::Json(CallJson::new()), &raw, true);
                    return true;
                }
                false
            }
            ParserState::Call { .. } => self.call(events),
            ParserState::AfterCall => self.after_call(events, at_end),
            ParserState::Header => self.header(events),
            ParserState::Message { thoughts, begun } => {
                let (thoughts, begun) = (*thoughts, *begun);
                self.message(events, thoughts, begun)
            }
        }
    }

    /// Thoughts, up to what ends them.
    fn thinking_on(&mut self, events: &mut Vec<AnswerEvent>, mut begun: bool) -> bool {
        let end = self.reasoning.unwrap_or(ReasoningMarkers::THINK).end;
        if !begun {
            self.pending.drain(..leading_blank(&self.pending));
            begun = !self.pending.is_empty();
            self.state = ParserState::Thinking { begun };
        }
        let openings = self.openings();
        let calls = openings.iter().filter(|opening| **opening != PYTHON_TAG);
        let stops: Vec<&'static str> = [end].into_iter().chain(calls.copied()).collect();
        if let Some((at, stop)) = first_of(&self.pending, &stops) {
            let blank = blank_end(&self.pending[..at]);
            thoughts(events, &self.pending[..blank]);
            if stop == end {
                self.pending.drain(..at + end.len());
                self.state = ParserState::Start { drop_space: true };
            } else {
                let before = self.pending[blank..at].to_owned();
                self.pending.drain(..at);
                self.state = ParserState::CallInThoughts(CallInThoughts::new(self.nested(), before));
            }
            return true;
        }
        let safe = self.pending.len() - held_back(&self.pending, &stops);
        thoughts(events, &take_text(&mut self.pending, safe));
        false
    }

    /// A parser for calls within thoughts.
    fn nested(&self) -> Self {
        Self {
            names: self.names.clone(),
            signatures: Arc::clone(&self.signatures),
            state: ParserState::Text,
            ..Self::new(self.format, &[])
        }
    }

    /// What announces a call within text.
    fn openings(&self) -> &'static [&'static str] {
        if self.names.is_empty() { &[] } else { self.syntax.openings }
    }

    /// Reads on after what announces a call in thoughts: they may end, or go on.
    fn call_in_thoughts(&mut self, events: &mut Vec<AnswerEvent>) -> bool {
        let end = self.reasoning.unwrap_or(ReasoningMarkers::THINK).end;
        let ParserState::CallInThoughts(call) = &mut self.state else { return false };
        let found = self.pending.find(end);
        let safe = found.unwrap_or_else(|| self.pending.len() - held_back(&self.pending, &[end]));
        let text: String = self.pending.drain(..safe).collect();
        if let Some(rest) = call.push(&text) {
            // It was none.
            thoughts(events, &std::mem::take(&mut call.raw));
            self.pending.insert_str(0, &rest);
        } else if found.is_some() {
            let raw = std::mem::take(&mut call.raw);
            thoughts(events, &raw[..blank_end(&raw)]);
        } else {
            return false;
        }
        self.state = ParserState::Thinking { begun: true };
        true
    }

    /// What the answer, or what follows thoughts and calls, begins with.
    fn begin(&mut self, drop_space: bool, at_end: bool) -> bool {
        if drop_space {
            self.pending.drain(..leading_blank(&self.pending));
        }
        let blank = leading_blank(&self.pending);
        if self.pending[..blank].chars().count() > MAX_BLANK {
            // So much white space is text.
            self.state = ParserState::Text;
            return true;
        }
        let rest = &self.pending[blank..];
        if rest.is_empty() {
            return false;
        }
        if let Some(markers) = self.reasoning.filter(|_| self.n_calls == 0 && !self.in_answer) {
            let thoughts = Some(markers.start).filter(|_| !drop_space);
            let answer = markers.answer.map(|(start, _)| start);
            if let Some(start) = [thoughts, answer].into_iter().flatten().find(|start| rest.starts_with(start)) {
                self.pending.drain(..blank + start.len());
                self.in_answer = thoughts != Some(start);
                self.state = if self.in_answer {
                    ParserState::Start { drop_space: true }
                } else {
                    ParserState::Thinking { begun: false }
                };
                return true;
            }
            if !at_end && [thoughts, answer].into_iter().flatten().any(|start| start.starts_with(rest)) {
                return false;
            }
        }
        if !self.names.is_empty() && self.syntax.bare && rest.starts_with('{') {
            let raw: String = self.pending.drain(..blank).collect();
            self.enter_call(CallReader::Json(CallJson::new()), &raw, false);
            return true;
        }
        if self.format == ToolFormat::Glm4 {
            match named_call(rest, &self.names) {
                NamedCall::Incomplete if !at_end => return false,
                NamedCall::Incomplete | NamedCall::No => {}
                NamedCall::Call(name, at) => {
                    let raw: String = self.pending.drain(..blank + at).collect();
                    self.enter_call(CallReader::Json(CallJson::arguments_of(name)), &raw, true);
                    return true;
                }
            }
        }
        self.state = ParserState::Text;
        true
    }

    /// Text for the user, up to a call or to what ends it.
    fn text(&mut self, events: &mut Vec<AnswerEvent>, at_end: bool) -> bool {
        let end = self.reasoning.and_then(|markers| markers.answer).filter(|_| self.in_answer).map(|(_, end)| end);
        // Where a call may be all of the answer, it may be a block of code as well.
        let fence = Some(FENCE).filter(|_| self.syntax.bare && !self.names.is_empty());
        let stops: Vec<&'static str> = self.openings().iter().copied().chain(fence).chain(end).collect();
        if stops.is_empty() {
            content(events, &std::mem::take(&mut self.pending));
            return false;
        }
        if let Some((at, stop)) = first_of(&self.pending, &stops) {
            let blank = blank_end(&self.pending[..at]);
            content(events, &self.pending[..blank]);
            let raw = self.pending[blank..at + stop.len()].to_owned();
            self.pending.drain(..at + stop.len());
            if Some(stop) == end {
                self.in_answer = false;
                self.state = ParserState::Start { drop_space: true };
            } else if Some(stop) == fence {
                self.state = ParserState::Fence { raw };
            } else {
                self.open_call(stop, raw);
            }
            return true;
        }
        if !at_end {
            let safe = self.pending.len() - held_back(&self.pending, &stops);
            content(events, &take_text(&mut self.pending, safe));
        }
        false
    }

    /// After `opening`. `raw`: that, and the white space before it.
    fn open_call(&mut self, opening: &'static str, raw: String) {
        match opening {
            PYTHON_TAG => self.state = ParserState::Python { raw },
            // Nothing else announces the call, so its function must be known.
            FUNCTION if !matches!(self.format, ToolFormat::Derived(_)) => {
                self.enter_call(self.tags(TagStyle::Function), &raw, false);
            }
            _ => self.state = ParserState::Opened { raw },
        }
    }

    /// After the beginning of a block of code: a call where an object follows, perhaps in a list, that is one.
    fn fence(&mut self, events: &mut Vec<AnswerEvent>, at_end: bool) -> bool {
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

    fn tags(&self, tags: TagStyle) -> CallReader {
        CallReader::Tags(CallTags::new(tags, Arc::clone(&self.signatures)))
    }

    fn python(&self) -> CallReader {
        CallReader::Python(CallPython::new(Arc::clone(&self.signatures)))
    }

    /// A call that begins with a brace.
    fn object(&self) -> CallReader {
        if let ToolFormat::Derived(DerivedFormat { marks, .. }) = self.format
            && marks.is_in_braces()
        {
            return CallReader::Derived(Box::new(CallDerived::new(marks, false, Arc::clone(&self.signatures))));
        }
        CallReader::Json(CallJson::new())
    }

    fn enter_call(&mut self, call: CallReader, raw: &str, announced: bool) {
        self.state = ParserState::Call { call: Box::new(call), raw: raw.to_owned(), announced, started: false };
    }

    /// After what announces a call: a list, an object, a name with arguments, or what else the format has.
    fn opened(&mut self, events: &mut Vec<AnswerEvent>, at_end: bool) -> bool {
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

    /// After what announces a call that does not begin with JSON.
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

    /// What announced a call did not: it is text.
    fn no_call(&mut self, events: &mut Vec<AnswerEvent>) -> bool {
        if let ParserState::Opened { raw } = std::mem::replace(&mut self.state, ParserState::Text) {
            content(events, &raw);
        }
        (self.in_list, self.in_fence) = (false, false);
        true
    }

    /// Reads on in a call.
    fn call(&mut self, events: &mut Vec<AnswerEvent>) -> bool {
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
            // Its last character may begin something else.
            let mut raw = std::mem::take(raw);
            raw.pop();
            unread.extend(last);
            (self.in_list, self.in_fence) = (false, false);
            if self.format == ToolFormat::Harmony {
                self.state = ParserState::Message { thoughts: false, begun: false };
                self.message_text(events, &raw, false, false);
            } else {
                content(events, &raw);
                self.state = ParserState::Text;
            }
        } else {
            if failed {
                // What does not belong there is text after the call.
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

    /// Hands out what was found in a call. True: its name was among it.
    fn call_parts(&mut self, events: &mut Vec<AnswerEvent>, parts: Vec<CallPart>) -> bool {
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

    /// What ends a call, and the next one.
    fn after_call(&mut self, events: &[AnswerEvent], at_end: bool) -> bool {
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

    /// The white space after a call, where text came before that.
    fn kept_blank(&mut self, events: &[AnswerEvent]) -> String {
        let blank = std::mem::take(&mut self.blank);
        let wrote = self.seen.content || events.iter().any(is_content);
        if wrote { blank } else { String::new() }
    }

    /// The header of a message, which says what it is.
    fn header(&mut self, events: &mut Vec<AnswerEvent>) -> bool {
        let message = |thoughts| ParserState::Message { thoughts, begun: false };
        match harmony::header(&self.pending, MAX_HEADER) {
            HeaderMatch::Incomplete => return false,
            HeaderMatch::None => {
                // What looks like a header's beginning is text then.
                let beginning = harmony::BEGINNINGS.iter().find(|beginning| self.pending.starts_with(**beginning));
                let text: String = self.pending.drain(..beginning.map_or(0, |text| text.len())).collect();
                self.state = message(false);
                self.message_text(events, &text, false, false);
            }
            HeaderMatch::Of(channel, length) => {
                let raw: String = self.pending.drain(..length).collect();
                match channel {
                    Channel::Call(name) if !self.names.is_empty() => {
                        self.enter_call(CallReader::Json(CallJson::arguments_of(name)), &raw, true);
                    }
                    Channel::Analysis => self.state = message(true),
                    Channel::Final | Channel::Call(_) => self.state = message(false),
                }
            }
        }
        true
    }

    /// A message, up to its end.
    fn message(&mut self, events: &mut Vec<AnswerEvent>, thoughts: bool, begun: bool) -> bool {
        let stops = harmony::ENDS.iter().chain(&harmony::BEGINNINGS).copied().collect::<Vec<_>>();
        if let Some((at, stop)) = first_of(&self.pending, &stops) {
            let text: String = self.pending.drain(..at).collect();
            self.message_text(events, &text, thoughts, begun);
            if harmony::ENDS.contains(&stop) {
                self.pending.drain(..stop.len());
            }
            self.state = ParserState::Header;
            return true;
        }
        let safe = self.pending.len() - held_back(&self.pending, &stops);
        let text: String = self.pending.drain(..safe).collect();
        self.message_text(events, &text, thoughts, begun);
        false
    }

    /// Hands out text of a message; a line break parts it from the message before.
    fn message_text(&mut self, events: &mut Vec<AnswerEvent>, text: &str, in_thoughts: bool, begun: bool) {
        if text.is_empty() {
            return;
        }
        if let ParserState::Message { begun, .. } = &mut self.state {
            *begun = true;
        }
        let seen = if in_thoughts { &mut self.seen.thoughts } else { &mut self.seen.text };
        let parted = std::mem::replace(seen, true) && !begun;
        let text = if parted { format!("\n{text}") } else { text.to_owned() };
        if in_thoughts { thoughts(events, &text) } else { content(events, &text) }
    }

    fn start_call(&mut self, events: &mut Vec<AnswerEvent>, name: String) -> usize {
        let index = self.n_calls;
        self.n_calls += 1;
        events.push(AnswerEvent::CallStart { index, id: call_id(), name });
        index
    }
}

/// The first `n` bytes of `pending`, less white space at their end, which may turn out to stand before a call.
fn take_text(pending: &mut String, n: usize) -> String {
    let n = blank_end(&pending[..n]);
    pending.drain(..n).collect()
}

fn is_content(event: &AnswerEvent) -> bool {
    match event {
        AnswerEvent::Content(_) => true,
        AnswerEvent::Reasoning(_)
        | AnswerEvent::CallStart { .. }
        | AnswerEvent::CallArguments { .. }
        | AnswerEvent::CallEnd { .. } => false,
    }
}

fn content(events: &mut Vec<AnswerEvent>, text: &str) {
    if !text.is_empty() {
        events.push(AnswerEvent::Content(text.to_owned()));
    }
}

fn thoughts(events: &mut Vec<AnswerEvent>, text: &str) {
    if !text.is_empty() {
        events.push(AnswerEvent::Reasoning(text.to_owned()));
    }
}
