//! Takes an answer apart as it comes.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use metal_attention_tokenizer::Tokenizer;

use super::call_json::{CallJson, CallPart, Progress};
use super::held_back::held_back;
use super::python_call::python_call;
use super::{AnswerEvent, MARKERS, PYTHON_TAG, ToolFormat};
use crate::Tool;

const THINK: &str = "<think>";
const END_OF_THINKING: &str = "</think>";
const END_OF_CALL: &str = "</tool_call>";
const ARGS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";

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
    /// The functions there are; none: nothing is a call.
    names: Vec<String>,
    /// The model may think before it answers.
    thinks: bool,
    state: State,
    /// Text that is not handed out yet.
    pending: String,
    n_calls: usize,
}

#[derive(Debug)]
enum State {
    /// Between `<think>` and `</think>`; whether there was text yet.
    Thinking { begun: bool },
    /// Before the first character of text that is not blank; blanks may be dropped.
    Start { drop_space: bool },
    /// In the text for the user.
    Text,
    /// After `[TOOL_CALLS]`.
    Mistral,
    /// After `<|python_tag|>`.
    Python,
    /// In a call. `raw` is its text so far, with what announced it; where nothing did, the function must be known.
    Call { call: CallJson, raw: String, announced: bool, started: bool },
    /// After a call.
    AfterCall,
}

impl ToolCallParser {
    /// A parser for answers of a model that writes calls of `tools` in `format`.
    pub fn new(format: ToolFormat, tools: &[Tool]) -> Self {
        let names = tools.iter().map(|tool| tool.name().to_owned()).collect();
        let state = State::Start { drop_space: false };
        Self { format, names, thinks: false, state, pending: String::new(), n_calls: 0 }
    }

    /// Looks for thoughts between `<think>` and `</think>` at the beginning of the answer. `begun`: the prompt ended
    /// with `<think>`, so that the answer begins with thoughts.
    #[must_use]
    pub fn thinking(mut self, begun: bool) -> Self {
        self.thinks = true;
        if begun {
            self.state = State::Thinking { begun: false };
        }
        self
    }

    /// The number of calls so far.
    pub fn n_calls(&self) -> usize {
        self.n_calls
    }

    /// Takes the next token with the text that it adds. Control tokens that belong to calls add none, but count here.
    pub fn push_token(&mut self, tokenizer: &Tokenizer, id: u32, text: &str) -> Vec<AnswerEvent> {
        let marker = tokenizer.token_text(id).filter(|text| tokenizer.is_control(id) && MARKERS.contains(text));
        match marker {
            Some(marker) => self.push(&format!("{text}{marker}")),
            None => self.push(text),
        }
    }

    /// Takes the next piece of the answer.
    pub fn push(&mut self, text: &str) -> Vec<AnswerEvent> {
        self.pending += text;
        let mut events = Vec::new();
        while self.step(&mut events, false) {}
        events
    }

    /// The answer is complete: hands out what was held back. A call that was cut short ends here.
    pub fn finish(&mut self) -> Vec<AnswerEvent> {
        let mut events = Vec::new();
        while self.step(&mut events, true) {}
        let rest = std::mem::take(&mut self.pending);
        match std::mem::replace(&mut self.state, State::Text) {
            State::Thinking { .. } => thoughts(&mut events, rest.trim_end()),
            State::Start { drop_space: true } | State::AfterCall => {}
            State::Start { drop_space: false } | State::Text => content(&mut events, &rest),
            State::Mistral => content(&mut events, &format!("[TOOL_CALLS]{rest}")),
            State::Python => {
                let (name, arguments) = python_call(&rest);
                let index = self.start_call(&mut events, name);
                events.push(AnswerEvent::CallArguments { index, delta: arguments });
                events.push(AnswerEvent::CallEnd { index });
            }
            State::Call { started: true, .. } => events.push(AnswerEvent::CallEnd { index: self.n_calls - 1 }),
            State::Call { raw, .. } => content(&mut events, &raw),
        }
        events
    }

    /// Works on the pending text. False: it takes more of it to go on.
    fn step(&mut self, events: &mut Vec<AnswerEvent>, at_end: bool) -> bool {
        match &mut self.state {
            State::Thinking { begun } => {
                if !*begun {
                    let blank = self.pending.len() - self.pending.trim_start().len();
                    self.pending.drain(..blank);
                    *begun = !self.pending.is_empty();
                }
                if let Some(at) = self.pending.find(END_OF_THINKING) {
                    thoughts(events, self.pending[..at].trim_end());
                    self.pending.drain(..at + END_OF_THINKING.len());
                    self.state = State::Start { drop_space: true };
                    return true;
                }
                let safe = self.pending.len() - held_back(&self.pending, &[END_OF_THINKING]);
                thoughts(events, &take_text(&mut self.pending, safe));
                false
            }
            State::Start { drop_space } => {
                let drop_space = *drop_space;
                self.begin(drop_space, at_end)
            }
            State::Text => self.text(events, at_end),
            State::Mistral => self.mistral(),
            State::Python => {
                if self.pending.trim_start().starts_with('{') {
                    self.enter_call(CallJson::new(), PYTHON_TAG, true);
                    return true;
                }
                false
            }
            State::Call { .. } => self.call(events),
            State::AfterCall => self.after_call(at_end),
        }
    }

    /// What the answer, or what follows thoughts and calls, begins with.
    fn begin(&mut self, drop_space: bool, at_end: bool) -> bool {
        let blank = self.pending.len() - self.pending.trim_start().len();
        let rest = &self.pending[blank..];
        if rest.is_empty() {
            return false;
        }
        let may_think = self.thinks && self.n_calls == 0 && !drop_space;
        if may_think && rest.starts_with(THINK) {
            self.pending.drain(..blank + THINK.len());
            self.state = State::Thinking { begun: false };
            return true;
        }
        if may_think && THINK.starts_with(rest) && !at_end {
            return false;
        }
        if !self.names.is_empty() && self.calls_are_all() && rest.starts_with('{') {
            self.pending.drain(..blank);
            self.enter_call(CallJson::new(), "", false);
            return true;
        }
        if drop_space {
            self.pending.drain(..blank);
        }
        self.state = State::Text;
        true
    }

    /// Text for the user, up to a call.
    fn text(&mut self, events: &mut Vec<AnswerEvent>, at_end: bool) -> bool {
        let Some(opening) = self.format.opening().filter(|_| !self.names.is_empty()) else {
            content(events, &std::mem::take(&mut self.pending));
            return false;
        };
        if let Some(at) = self.pending.find(opening) {
            content(events, self.pending[..at].trim_end());
            self.pending.drain(..at + opening.len());
            self.open_call(opening);
            return true;
        }
        if !at_end {
            let safe = self.pending.len() - held_back(&self.pending, &[opening]);
            content(events, &take_text(&mut self.pending, safe));
        }
        false
    }

    fn open_call(&mut self, opening: &'static str) {
        match self.format {
            ToolFormat::MistralList | ToolFormat::MistralArgs => self.state = State::Mistral,
            ToolFormat::Llama3 => self.state = State::Python,
            ToolFormat::Hermes | ToolFormat::Json => self.enter_call(CallJson::new(), opening, true),
        }
    }

    fn enter_call(&mut self, call: CallJson, opening: &str, announced: bool) {
        self.state = State::Call { call, raw: opening.to_owned(), announced, started: false };
    }

    /// After `[TOOL_CALLS]`: a list, an object, or a name with arguments.
    fn mistral(&mut self) -> bool {
        let text = self.pending.trim_start();
        let opening = "[TOOL_CALLS]";
        if text.starts_with('{') {
            self.enter_call(CallJson::new(), opening, true);
            return true;
        }
        if text.starts_with('[') {
            let at = self.pending.len() - text.len();
            self.pending.drain(..=at);
            self.enter_call(CallJson::new(), &format!("{opening}["), true);
            return true;
        }
        let Some(brace) = self.pending.find('{') else { return false };
        let header = self.pending[..brace].trim();
        let header = header.strip_suffix(ARGS).unwrap_or(header);
        let name = header.split(CALL_ID).next().unwrap_or_default().trim().to_owned();
        let raw = format!("{opening}{}", &self.pending[..brace]);
        self.pending.drain(..brace);
        self.enter_call(CallJson::arguments_of(name), &raw, true);
        true
    }

    /// Reads on in a call.
    fn call(&mut self, events: &mut Vec<AnswerEvent>) -> bool {
        let pending = std::mem::take(&mut self.pending);
        let State::Call { call, raw, announced, started } = &mut self.state else { return false };
        let (announced, mut started) = (*announced, *started);
        let mut ended = None;
        for (at, c) in pending.char_indices() {
            raw.push(c);
            let had_name = call.has_name();
            let progress = call.push(c);
            let unknown = |part: &CallPart| matches!(part, CallPart::Name(name) if !self.names.contains(name));
            if !announced && !had_name && call.has_name() && call.parts().iter().any(unknown) {
                ended = Some((at + c.len_utf8(), Progress::NoCall));
                break;
            }
            if progress != Progress::Open {
                ended = Some((at + c.len_utf8(), progress));
                break;
            }
        }
        let failed = matches!(ended, Some((_, Progress::NoCall)));
        let (parts, raw) = (call.take_parts(), if failed { std::mem::take(raw) } else { String::new() });
        if failed && !started {
            content(events, &raw);
            self.state = State::Text;
        } else {
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
            match ended {
                Some(_) => {
                    events.push(AnswerEvent::CallEnd { index: self.n_calls - 1 });
                    self.state = State::AfterCall;
                }
                None => {
                    if let State::Call { started: flag, .. } = &mut self.state {
                        *flag = started;
                    }
                }
            }
        }
        let Some((end, _)) = ended else { return false };
        pending[end..].clone_into(&mut self.pending);
        true
    }

    /// What ends a call, and the next one.
    fn after_call(&mut self, at_end: bool) -> bool {
        let skipped =
            |c: char| c.is_whitespace() || (self.format != ToolFormat::Hermes && matches!(c, ',' | ';' | ']'));
        let blank = self.pending.len() - self.pending.trim_start_matches(skipped).len();
        self.pending.drain(..blank);
        if self.pending.is_empty() {
            return false;
        }
        let markers: &[&'static str] = match self.format {
            ToolFormat::Hermes => &[END_OF_CALL],
            ToolFormat::MistralList | ToolFormat::MistralArgs => &["[TOOL_CALLS]"],
            ToolFormat::Llama3 => &[PYTHON_TAG],
            ToolFormat::Json => &[],
        };
        if let Some(&marker) = markers.iter().find(|&&marker| self.pending.starts_with(marker)) {
            self.pending.drain(..marker.len());
            match self.format {
                ToolFormat::Hermes => self.state = State::Start { drop_space: true },
                _ => self.open_call(marker),
            }
            return true;
        }
        if !at_end && markers.iter().any(|marker| marker.starts_with(&self.pending)) {
            return false;
        }
        if self.format != ToolFormat::Hermes && self.pending.starts_with('{') {
            self.enter_call(CallJson::new(), "", !self.calls_are_all());
        } else {
            self.state = State::Text;
        }
        true
    }

    /// Whether calls come without anything that announces them.
    fn calls_are_all(&self) -> bool {
        matches!(self.format, ToolFormat::Llama3 | ToolFormat::Json)
    }

    fn start_call(&mut self, events: &mut Vec<AnswerEvent>, name: String) -> usize {
        let index = self.n_calls;
        self.n_calls += 1;
        events.push(AnswerEvent::CallStart { index, id: call_id(), name });
        index
    }
}

/// Nine letters and digits, which is what Mistral's templates want to see.
fn call_id() -> String {
    const CHARACTERS: &[u8; 62] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    // Hashers are seeded at random, and no two the same.
    let mut random = RandomState::new().build_hasher().finish();
    let digit = |_| {
        let digit = CHARACTERS[(random % 62) as usize];
        random /= 62;
        char::from(digit)
    };
    (0..9).map(digit).collect()
}

/// The first `n` bytes of `pending`, less white space at their end, which may turn out to stand before a call.
fn take_text(pending: &mut String, n: usize) -> String {
    let n = pending[..n].trim_end().len();
    pending.drain(..n).collect()
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
