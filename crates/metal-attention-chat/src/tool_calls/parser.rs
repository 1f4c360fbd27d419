//! [`ToolCallParser`]: splits an answer into reasoning, text and tool calls while it is generated.
//!
//! This file finds calls in the answer: a state machine over the pending text searches for the marks of reasoning,
//! calls and messages. `parser/calls.rs` continues where a mark has announced a call.

mod calls;

use std::sync::Arc;

use metal_attention_tokenizer::Tokenizer;

use super::call::CallReader;
use super::call_in_reasoning::CallInReasoning;
use super::call_json::CallJson;
use super::harmony::{self, Channel, HeaderMatch};
use super::held_back::{MAX_BLANK, blank_end, first_of, held_back, leading_blank};
use super::names::{NamedCall, named_call};
use super::python_call::python_call;
use super::signatures::Signatures;
use super::syntax::{FENCE, PYTHON_TAG, Syntax};
use super::{AnswerEvent, ToolFormat};
use crate::{ReasoningMarkers, Tool};

/// The maximum length in bytes of the text between a call's opening and its arguments, and of a message's header.
/// Longer text is not a call.
pub(super) const MAX_HEADER: usize = 1024;

/// Parses an answer into reasoning, text and tool calls while the model generates it.
///
/// Text is returned as soon as it is certain what it is. Text that looks like a call but is not one is returned as
/// text.
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
    /// The names of the functions. If there are none, nothing is parsed as a call.
    pub(super) names: Vec<String>,
    signatures: Arc<Signatures>,
    /// The markers of reasoning, for a model that may reason.
    reasoning: Option<ReasoningMarkers>,
    state: ParserState,
    /// Text that was not returned yet.
    pub(super) pending: String,
    /// Whether the answer's start marker was read and its end marker is expected.
    in_answer: bool,
    /// Whether the current calls are in a JSON list.
    in_list: bool,
    /// Whether the current calls are in a code block.
    in_fence: bool,
    /// White space after a call. It is kept if text follows.
    blank: String,
    /// The parts of the answer that were returned before.
    seen: SeenParts,
    n_calls: usize,
}

#[derive(Debug, Default)]
struct SeenParts {
    reasoning: bool,
    text: bool,
    /// Text for the user, in this message or in an earlier one.
    content: bool,
}

#[derive(Debug)]
enum ParserState {
    /// Within reasoning. `begun`: some of its text was read.
    Reasoning { begun: bool },
    /// Within reasoning, after an opening.
    CallInReasoning(CallInReasoning),
    /// Before the first non-blank character of the text. `drop_space`: leading white space is dropped.
    Start { drop_space: bool },
    /// In the text for the user.
    Text,
    /// After an opening. `raw` is the text since then.
    Opened { raw: String },
    /// After the start of a code block, which may be a call. `raw` is the text since then.
    Fence { raw: String },
    /// After `<|python_tag|>`. `raw` is the text since then.
    Python { raw: String },
    /// In a call. `raw` is its text so far, with the opening. `announced`: an opening announced the call; otherwise
    /// the function must be known. `started`: the start of the call was returned.
    Call { call: Box<CallReader>, raw: String, announced: bool, started: bool },
    /// After a call.
    AfterCall,
    /// Before the header of a message (gpt-oss).
    Header,
    /// In a message (gpt-oss). `reasoning`: it is reasoning. `begun`: some of its text was read.
    Message { reasoning: bool, begun: bool },
}

impl ToolCallParser {
    /// A parser for the answers of a model that writes calls of `tools` in `format`.
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

    /// Enables the parsing of reasoning between `markers` at the start of the answer. `begun`: the prompt ended with
    /// the start marker, so that the answer begins within reasoning.
    #[must_use]
    pub fn with_reasoning(mut self, markers: ReasoningMarkers, begun: bool) -> Self {
        self.reasoning = Some(markers);
        if begun {
            self.state = ParserState::Reasoning { begun: false };
        }
        self
    }

    /// Whether the answer is within reasoning.
    pub fn is_reasoning(&self) -> bool {
        matches!(
            self.state,
            ParserState::Reasoning { .. }
                | ParserState::CallInReasoning(_)
                | ParserState::Message { reasoning: true, .. }
        )
    }

    /// The number of calls so far.
    pub fn n_calls(&self) -> usize {
        self.n_calls
    }

    /// Parses the next token, with the text that it decodes to. Control tokens decode to nothing, but if they are
    /// marks they are parsed by their spelling.
    pub fn push_token(&mut self, tokenizer: &Tokenizer, id: u32, text: &str) -> Vec<AnswerEvent> {
        let marker = tokenizer.token_text(id).filter(|text| tokenizer.is_control(id) && self.is_marker(text));
        let Some(marker) = marker else { return self.push(text) };
        let mut events = self.push(text);
        let closes_nothing = match self.state {
            ParserState::Start { .. } | ParserState::Text => !self.in_answer && self.syntax.closings.contains(&marker),
            ParserState::Reasoning { .. }
            | ParserState::CallInReasoning(_)
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

    /// Whether `token` is a mark or a part of one.
    fn is_marker(&self, token: &str) -> bool {
        let reasoning = self.reasoning.iter().flat_map(ReasoningMarkers::texts);
        self.syntax.markers().chain(reasoning).any(|marker| marker.contains(token))
    }

    /// Parses the next piece of the answer. Returns the events that are certain now.
    pub fn push(&mut self, text: &str) -> Vec<AnswerEvent> {
        self.pending += text;
        let mut events = Vec::new();
        while self.step(&mut events, false) {}
        self.seen.content |= events.iter().any(is_content);
        events
    }

    /// Ends a complete answer. Returns the events that were held back. An open call is closed.
    pub fn finish(&mut self) -> Vec<AnswerEvent> {
        self.end(false)
    }

    /// Ends an answer that was cut off. Returns the events that were held back. An open call gets no
    /// [`AnswerEvent::CallEnd`], so that [`Message::from_events`](crate::Message::from_events) leaves it out.
    pub fn cut_off(&mut self) -> Vec<AnswerEvent> {
        self.end(true)
    }

    fn end(&mut self, is_cut: bool) -> Vec<AnswerEvent> {
        let mut events = Vec::new();
        while self.step(&mut events, true) {}
        let rest = std::mem::take(&mut self.pending);
        match std::mem::replace(&mut self.state, ParserState::Text) {
            ParserState::Reasoning { .. } => reasoning(&mut events, rest.trim_end()),
            // It is not known whether the answer would have ended with the calls.
            ParserState::CallInReasoning(call) if is_cut => reasoning(&mut events, (call.raw + &rest).trim_end()),
            ParserState::CallInReasoning(call) => match call.finish() {
                Ok(calls) => {
                    self.n_calls += calls.iter().filter(|event| matches!(event, AnswerEvent::CallEnd { .. })).count();
                    events.extend(calls);
                }
                Err(text) => reasoning(&mut events, (text + &rest).trim_end()),
            },
            // Text that remains here is white space, or an incomplete header.
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
            ParserState::Message { reasoning, begun } => self.message_text(&mut events, &rest, reasoning, begun),
        }
        events
    }

    /// Processes the pending text by one step. Returns false if more text is needed. `at_end`: no more text follows.
    fn step(&mut self, events: &mut Vec<AnswerEvent>, at_end: bool) -> bool {
        match &mut self.state {
            ParserState::Reasoning { begun } => {
                let begun = *begun;
                self.continue_reasoning(events, begun)
            }
            ParserState::Start { drop_space } => {
                let drop_space = *drop_space;
                self.begin(drop_space, at_end)
            }
            ParserState::Text => self.text(events, at_end),
            ParserState::Opened { .. } => self.opened(events, at_end),
            ParserState::CallInReasoning(_) => self.call_in_reasoning(events),
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
            ParserState::Message { reasoning, begun } => {
                let (reasoning, begun) = (*reasoning, *begun);
                self.message(events, reasoning, begun)
            }
        }
    }

    /// In reasoning: up to its end marker, or to an opening.
    fn continue_reasoning(&mut self, events: &mut Vec<AnswerEvent>, mut begun: bool) -> bool {
        let end = self.reasoning.unwrap_or(ReasoningMarkers::THINK).end;
        if !begun {
            self.pending.drain(..leading_blank(&self.pending));
            begun = !self.pending.is_empty();
            self.state = ParserState::Reasoning { begun };
        }
        let openings = self.openings();
        let calls = openings.iter().filter(|opening| **opening != PYTHON_TAG);
        let stops: Vec<&'static str> = [end].into_iter().chain(calls.copied()).collect();
        if let Some((at, stop)) = first_of(&self.pending, &stops) {
            let blank = blank_end(&self.pending[..at]);
            reasoning(events, &self.pending[..blank]);
            if stop == end {
                self.pending.drain(..at + end.len());
                self.state = ParserState::Start { drop_space: true };
            } else {
                let before = self.pending[blank..at].to_owned();
                self.pending.drain(..at);
                self.state = ParserState::CallInReasoning(CallInReasoning::new(self.nested(), before));
            }
            return true;
        }
        let safe = self.pending.len() - held_back(&self.pending, &stops);
        reasoning(events, &take_text(&mut self.pending, safe));
        false
    }

    /// A parser for calls within reasoning.
    fn nested(&self) -> Self {
        Self {
            names: self.names.clone(),
            signatures: Arc::clone(&self.signatures),
            state: ParserState::Text,
            ..Self::new(self.format, &[])
        }
    }

    /// The openings to search for; none if there are no functions.
    fn openings(&self) -> &'static [&'static str] {
        if self.names.is_empty() { &[] } else { self.syntax.openings }
    }

    /// In reasoning after an opening: up to the end marker, or until it is certain that this is not a call.
    fn call_in_reasoning(&mut self, events: &mut Vec<AnswerEvent>) -> bool {
        let end = self.reasoning.unwrap_or(ReasoningMarkers::THINK).end;
        let ParserState::CallInReasoning(call) = &mut self.state else { return false };
        let found = self.pending.find(end);
        let safe = found.unwrap_or_else(|| self.pending.len() - held_back(&self.pending, &[end]));
        let text: String = self.pending.drain(..safe).collect();
        if let Some(rest) = call.push(&text) {
            // It is not a call.
            reasoning(events, &std::mem::take(&mut call.raw));
            self.pending.insert_str(0, &rest);
        } else if found.is_some() {
            let raw = std::mem::take(&mut call.raw);
            reasoning(events, &raw[..blank_end(&raw)]);
        } else {
            return false;
        }
        self.state = ParserState::Reasoning { begun: true };
        true
    }

    /// At the start of the answer, and after reasoning or calls.
    fn begin(&mut self, drop_space: bool, at_end: bool) -> bool {
        if drop_space {
            self.pending.drain(..leading_blank(&self.pending));
        }
        let blank = leading_blank(&self.pending);
        if self.pending[..blank].chars().count() > MAX_BLANK {
            // Long white space is text.
            self.state = ParserState::Text;
            return true;
        }
        let rest = &self.pending[blank..];
        if rest.is_empty() {
            return false;
        }
        if let Some(markers) = self.reasoning.filter(|_| self.n_calls == 0 && !self.in_answer) {
            let reasoning = Some(markers.start).filter(|_| !drop_space);
            let answer = markers.answer.map(|(start, _)| start);
            if let Some(start) = [reasoning, answer].into_iter().flatten().find(|start| rest.starts_with(start)) {
                self.pending.drain(..blank + start.len());
                self.in_answer = reasoning != Some(start);
                self.state = if self.in_answer {
                    ParserState::Start { drop_space: true }
                } else {
                    ParserState::Reasoning { begun: false }
                };
                return true;
            }
            if !at_end && [reasoning, answer].into_iter().flatten().any(|start| start.starts_with(rest)) {
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

    /// In the text for the user: up to an opening, or to the answer's end marker.
    fn text(&mut self, events: &mut Vec<AnswerEvent>, at_end: bool) -> bool {
        let end = self.reasoning.and_then(|markers| markers.answer).filter(|_| self.in_answer).map(|(_, end)| end);
        // If a call may be the whole answer, it may also be in a code block.
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

    /// At the header of a message, which gives its kind.
    fn header(&mut self, events: &mut Vec<AnswerEvent>) -> bool {
        let message = |reasoning| ParserState::Message { reasoning, begun: false };
        match harmony::header(&self.pending, MAX_HEADER) {
            HeaderMatch::Incomplete => return false,
            HeaderMatch::None => {
                // Text that looks like the beginning of a header is text.
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

    /// In a message: up to its end.
    fn message(&mut self, events: &mut Vec<AnswerEvent>, reasoning: bool, begun: bool) -> bool {
        let stops = harmony::ENDS.iter().chain(&harmony::BEGINNINGS).copied().collect::<Vec<_>>();
        if let Some((at, stop)) = first_of(&self.pending, &stops) {
            let text: String = self.pending.drain(..at).collect();
            self.message_text(events, &text, reasoning, begun);
            if harmony::ENDS.contains(&stop) {
                self.pending.drain(..stop.len());
            }
            self.state = ParserState::Header;
            return true;
        }
        let safe = self.pending.len() - held_back(&self.pending, &stops);
        let text: String = self.pending.drain(..safe).collect();
        self.message_text(events, &text, reasoning, begun);
        false
    }

    /// Returns text of a message. A line break separates it from an earlier message of the same kind.
    fn message_text(&mut self, events: &mut Vec<AnswerEvent>, text: &str, in_reasoning: bool, begun: bool) {
        if text.is_empty() {
            return;
        }
        if let ParserState::Message { begun, .. } = &mut self.state {
            *begun = true;
        }
        let seen = if in_reasoning { &mut self.seen.reasoning } else { &mut self.seen.text };
        let parted = std::mem::replace(seen, true) && !begun;
        let text = if parted { format!("\n{text}") } else { text.to_owned() };
        if in_reasoning { reasoning(events, &text) } else { content(events, &text) }
    }
}

/// Removes the first `n` bytes of `pending`, without white space at their end, which may precede a call.
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

fn reasoning(events: &mut Vec<AnswerEvent>, text: &str) {
    if !text.is_empty() {
        events.push(AnswerEvent::Reasoning(text.to_owned()));
    }
}
