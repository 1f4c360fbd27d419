//! Writes a response: from chat events to the items of the output, and the events of the stream.
//!
//! The output has one item for reasoning, text or call. One item is open at a time: it is added when its first part
//! arrives, extended with deltas, and closed when another kind of part arrives or the sequence ends. A whole response
//! is written by the same code, with discarded events.

use std::sync::Arc;

use metal_attention::scheduler::Event;
use metal_attention::tokenizer::Tokenizer;
use metal_attention_chat::AnswerEvent;
use serde::Serialize;
use serde_json::json;

use super::custom_input::CustomInput;
use super::encoded_reasoning;
use super::response::{
    ContentPart, IncompleteDetails, OutputItem, RequestEcho, ResponseError, ResponseObject, ResponseStatus,
    ResponseUsage,
};
use super::store::{self, ResponseRecord};
use super::tools::{ResponseTool, ResponseTools, ToolKind};
use crate::http::job::choice_parser::{ChatEnd, ChatEvent, ChoiceParsers, EndReason};
use crate::http::openai::logprobs::ChatTokenLogprob;
use crate::http::streaming::{ChunkWriter, Frames};
use crate::http::{ApiError, now};

/// The options of a response's contents.
pub struct WriterOptions {
    /// The tools of the request, for the names of calls.
    pub tools: ResponseTools,
    /// The custom tool whose input is the whole generated text.
    pub input_tool: Option<ResponseTool>,
    /// Whether reasoning items repeat the reasoning as a summary.
    pub adds_summary: bool,
    /// Whether reasoning items have the reasoning encoded for the next request.
    pub encodes_reasoning: bool,
    /// Whether texts have log probabilities of their tokens.
    pub with_logprobs: bool,
}

/// Writes a response from chat events.
pub struct ResponseWriter {
    /// The response so far.
    response: ResponseObject,
    /// Its options.
    options: WriterOptions,
    /// The model's tokenizer, for the texts of tokens.
    tokenizer: Arc<Tokenizer>,
    /// Stores the response at its end; `None`: it is not stored.
    record: Option<ResponseRecord>,
    /// The sequence number of the next event.
    number: u64,
    /// The contents of the last item while it is open.
    open: Option<OpenItem>,
    /// White space that is not part of an item yet: it is dropped where a call follows.
    blank: String,
    /// Log probabilities of tokens whose text has not arrived yet.
    logprobs: Vec<ChatTokenLogprob>,
}

/// The contents of an open item.
enum OpenItem {
    Reasoning(String),
    Message {
        text: String,
        logprobs: Vec<ChatTokenLogprob>,
    },
    Function(String),
    /// The arguments of the function that stands for a custom tool.
    Custom(CustomInput),
    /// The generated text, which is the input of a custom tool.
    Input(String),
}

/// The body of an event with the whole response.
#[derive(Serialize)]
struct WithResponse<'a> {
    response: &'a ResponseObject,
}

/// The body of an event with an item.
#[derive(Serialize)]
struct WithItem<'a> {
    output_index: usize,
    item: &'a OutputItem,
}

/// The body of an event about an item, with further fields.
#[derive(Serialize)]
struct OfItem<'a, B> {
    /// The id of the item.
    item_id: &'a str,
    /// The index of the item in the output.
    output_index: usize,
    /// Further fields.
    #[serde(flatten)]
    fields: B,
}

/// The body of an event with a content part.
#[derive(Serialize)]
struct WithPart<'a> {
    content_index: usize,
    part: &'a ContentPart,
}

/// The body of an event that extends a text.
#[derive(Serialize)]
struct TextPiece<'a> {
    content_index: usize,
    delta: &'a str,
    logprobs: &'a [ChatTokenLogprob],
}

/// The body of an event with a complete text.
#[derive(Serialize)]
struct WholeText<'a> {
    content_index: usize,
    text: &'a str,
    logprobs: &'a [ChatTokenLogprob],
}

/// An event of the stream.
#[derive(Serialize)]
struct StreamEvent<B> {
    /// Its type.
    #[serde(rename = "type")]
    kind: &'static str,
    /// Its number in the stream, from 0.
    sequence_number: u64,
    /// Its other fields.
    #[serde(flatten)]
    body: B,
}

impl ResponseWriter {
    /// A writer of a response that has just begun. `record`: where it is stored at its end.
    pub fn new(
        id: String,
        echo: RequestEcho,
        options: WriterOptions,
        tokenizer: &Arc<Tokenizer>,
        record: Option<ResponseRecord>,
    ) -> Self {
        let response = ResponseObject {
            id,
            object: "response",
            created_at: now(),
            completed_at: None,
            status: ResponseStatus::InProgress,
            error: None,
            incomplete_details: None,
            output: Vec::new(),
            usage: None,
            echo,
        };
        Self {
            response,
            options,
            tokenizer: Arc::clone(tokenizer),
            record,
            number: 0,
            open: None,
            blank: String::new(),
            logprobs: Vec::new(),
        }
    }

    /// The response in its present state.
    pub fn into_response(self) -> ResponseObject {
        self.response
    }

    /// Writes the first events of the stream.
    pub fn begin(&mut self, out: &mut Frames) {
        self.send_response("response.created", out);
        self.send_response("response.in_progress", out);
    }

    /// Adds the parts of one scheduler event.
    pub fn add(&mut self, parts: Vec<ChatEvent>, out: &mut Frames) {
        if self.options.with_logprobs {
            let logprobs = parts.iter().filter_map(|part| match part {
                ChatEvent::Logprobs(id, logprobs) => Some(ChatTokenLogprob::new(&self.tokenizer, *id, logprobs)),
                ChatEvent::Prompt(_) | ChatEvent::Answer(_) | ChatEvent::CutCall | ChatEvent::End(_) => None,
            });
            self.logprobs.extend(logprobs);
        }
        for part in parts {
            match part {
                ChatEvent::Prompt(_) | ChatEvent::Logprobs(..) => {}
                ChatEvent::Answer(AnswerEvent::Content(text)) => self.text(text, out),
                ChatEvent::Answer(AnswerEvent::Reasoning(text)) => self.reasoning(&text, out),
                ChatEvent::Answer(AnswerEvent::CallStart { id, name, .. }) => self.call(&id, &name, out),
                ChatEvent::Answer(AnswerEvent::CallArguments { delta, .. }) => self.arguments(&delta, out),
                ChatEvent::Answer(AnswerEvent::CallEnd { .. }) => self.close(false, out),
                ChatEvent::CutCall => self.close(true, out),
                ChatEvent::End(end) => self.end(&end, out),
            }
        }
        if !matches!(self.open, Some(OpenItem::Message { .. }) | None) {
            self.logprobs.clear();
        }
    }

    /// Adds reasoning to the reasoning item, and opens one if need be. White space alone opens none.
    fn reasoning(&mut self, text: &str, out: &mut Frames) {
        if !matches!(self.open, Some(OpenItem::Reasoning(_))) {
            if text.trim().is_empty() {
                return;
            }
            self.blank.clear();
            let content = Vec::new();
            let id = self.next_id("rs");
            let status = ResponseStatus::InProgress;
            let item = OutputItem::Reasoning { id, summary: Vec::new(), content, encrypted_content: None, status };
            self.open(item, OpenItem::Reasoning(String::new()), out);
            self.send_part("response.content_part.added", &ContentPart::ReasoningText { text: String::new() }, out);
            if self.options.adds_summary {
                let part = ContentPart::SummaryText { text: String::new() };
                let added = json!({"summary_index": 0, "part": part});
                self.send_about_item("response.reasoning_summary_part.added", added, out);
            }
        }
        if let Some(OpenItem::Reasoning(all)) = &mut self.open {
            all.push_str(text);
            self.send_about_item("response.reasoning_text.delta", json!({"content_index": 0, "delta": text}), out);
            if self.options.adds_summary {
                let delta = json!({"summary_index": 0, "delta": text});
                self.send_about_item("response.reasoning_summary_text.delta", delta, out);
            }
        }
    }

    /// Adds text to the message or custom call, and opens one if need be. White space is held back until text follows.
    fn text(&mut self, mut text: String, out: &mut Frames) {
        match &self.open {
            Some(OpenItem::Message { .. } | OpenItem::Input(_)) => {}
            Some(OpenItem::Reasoning(_) | OpenItem::Function(_) | OpenItem::Custom(_)) | None => {
                if let Some(tool) = self.options.input_tool.clone() {
                    self.begin_input(&tool, out);
                } else {
                    self.blank += &text;
                    if self.blank.trim().is_empty() {
                        return;
                    }
                    text = std::mem::take(&mut self.blank);
                    self.message(out);
                }
            }
        }
        match &mut self.open {
            Some(OpenItem::Message { text: all, logprobs }) => {
                all.push_str(&text);
                let of_text = std::mem::take(&mut self.logprobs);
                logprobs.extend_from_slice(&of_text);
                let piece = TextPiece { content_index: 0, delta: &text, logprobs: &of_text };
                self.send_about_item("response.output_text.delta", piece, out);
            }
            Some(OpenItem::Input(all)) => {
                all.push_str(&text);
                self.send_about_item("response.custom_tool_call_input.delta", json!({"delta": text}), out);
            }
            Some(OpenItem::Reasoning(_) | OpenItem::Function(_) | OpenItem::Custom(_)) | None => {}
        }
    }

    /// Opens a message.
    fn message(&mut self, out: &mut Frames) {
        let id = self.next_id("msg");
        let item =
            OutputItem::Message { id, role: "assistant", content: Vec::new(), status: ResponseStatus::InProgress };
        self.open(item, OpenItem::Message { text: String::new(), logprobs: Vec::new() }, out);
        let part = ContentPart::OutputText { text: String::new(), annotations: Vec::new(), logprobs: Vec::new() };
        self.send_part("response.content_part.added", &part, out);
    }

    /// Opens the call of the custom tool whose input is the whole generated text.
    fn begin_input(&mut self, tool: &ResponseTool, out: &mut Frames) {
        let call_id = store::unguessable("call_");
        self.custom_call(call_id, tool, OpenItem::Input(String::new()), out);
    }

    fn custom_call(&mut self, call_id: String, tool: &ResponseTool, open: OpenItem, out: &mut Frames) {
        let ResponseTool { name, namespace, .. } = tool.clone();
        let (id, status) = (self.next_id("ctc"), ResponseStatus::InProgress);
        let item = OutputItem::CustomToolCall { id, call_id, name, namespace, input: String::new(), status };
        self.open(item, open, out);
    }

    /// Opens a call of the function `name`.
    fn call(&mut self, id: &str, name: &str, out: &mut Frames) {
        let call_id = format!("call_{id}");
        let tool = self.options.tools.find(name).cloned();
        let (name, namespace) = match tool {
            Some(tool @ ResponseTool { kind: ToolKind::Custom(_), .. }) => {
                self.custom_call(call_id, &tool, OpenItem::Custom(CustomInput::default()), out);
                return;
            }
            Some(ResponseTool { name, namespace, kind: ToolKind::Function, .. }) => (name, namespace),
            None => (name.to_owned(), None),
        };
        let (id, status) = (self.next_id("fc"), ResponseStatus::InProgress);
        let item = OutputItem::FunctionCall { id, call_id, name, namespace, arguments: String::new(), status };
        self.open(item, OpenItem::Function(String::new()), out);
    }

    /// Adds a piece of a call's arguments.
    fn arguments(&mut self, piece: &str, out: &mut Frames) {
        match &mut self.open {
            Some(OpenItem::Function(all)) => {
                all.push_str(piece);
                self.send_about_item("response.function_call_arguments.delta", json!({"delta": piece}), out);
            }
            Some(OpenItem::Custom(input)) => {
                let more = input.push(piece);
                if !more.is_empty() {
                    self.send_about_item("response.custom_tool_call_input.delta", json!({"delta": more}), out);
                }
            }
            Some(OpenItem::Reasoning(_) | OpenItem::Message { .. } | OpenItem::Input(_)) | None => {}
        }
    }

    /// Ends the response: closes the open item, sets the status, stores the response and writes the last event.
    fn end(&mut self, end: &ChatEnd, out: &mut Frames) {
        let is_cut = end.reason.is_cut();
        self.close(is_cut, out);
        // A response without text or calls has an empty message.
        let says_nothing = self.response.output.iter().all(OutputItem::is_reasoning);
        if self.response.output.is_empty() || says_nothing && !is_cut {
            match self.options.input_tool.clone() {
                Some(tool) => self.begin_input(&tool, out),
                None => self.message(out),
            }
            self.close(is_cut, out);
        }
        self.response.usage = Some(ResponseUsage::new(end.usage, end.reasoning_tokens));
        let kind = match &end.reason {
            EndReason::End | EndReason::Calls | EndReason::StopString(_) => {
                self.response.status = ResponseStatus::Completed;
                self.response.completed_at = Some(now());
                "response.completed"
            }
            EndReason::Length | EndReason::ContextFull => {
                self.response.status = ResponseStatus::Incomplete;
                self.response.incomplete_details = Some(IncompleteDetails { reason: "max_output_tokens" });
                "response.incomplete"
            }
        };
        if let Some(record) = self.record.take() {
            record.keep(&self.response);
        }
        self.send_response(kind, out);
    }

    /// The id of the next item, which contains the digits of the response's id.
    fn next_id(&self, prefix: &str) -> String {
        store::item_id(prefix, &self.response.id, self.response.output.len())
    }

    /// Closes the open item, and opens another one.
    fn open(&mut self, item: OutputItem, open: OpenItem, out: &mut Frames) {
        self.close(false, out);
        self.blank.clear();
        self.response.output.push(item);
        self.open = Some(open);
        self.send_item("response.output_item.added", out);
    }

    /// Closes the open item. `is_cut`: the sequence was cut off within it.
    fn close(&mut self, is_cut: bool, out: &mut Frames) {
        let Some(open) = self.open.take() else { return };
        let status = if is_cut { ResponseStatus::Incomplete } else { ResponseStatus::Completed };
        match open {
            OpenItem::Reasoning(text) => {
                self.send_about_item("response.reasoning_text.done", json!({"content_index": 0, "text": text}), out);
                let part = ContentPart::ReasoningText { text: text.clone() };
                self.send_part("response.content_part.done", &part, out);
                let mut summed_up = Vec::new();
                if self.options.adds_summary {
                    let part = ContentPart::SummaryText { text: text.clone() };
                    let whole = json!({"summary_index": 0, "text": text});
                    self.send_about_item("response.reasoning_summary_text.done", whole, out);
                    let done = json!({"summary_index": 0, "part": part});
                    self.send_about_item("response.reasoning_summary_part.done", done, out);
                    summed_up.push(part);
                }
                if let Some(OutputItem::Reasoning { summary, content, encrypted_content, status: of_item, .. }) =
                    self.response.output.last_mut()
                {
                    *summary = summed_up;
                    *encrypted_content = self.options.encodes_reasoning.then(|| encoded_reasoning::encode(&text));
                    (*content, *of_item) = (vec![part], status);
                }
            }
            OpenItem::Message { text, logprobs } => {
                let whole = WholeText { content_index: 0, text: &text, logprobs: &logprobs };
                self.send_about_item("response.output_text.done", whole, out);
                let part = ContentPart::OutputText { text, annotations: Vec::new(), logprobs };
                self.send_part("response.content_part.done", &part, out);
                if let Some(OutputItem::Message { content, status: of_item, .. }) = self.response.output.last_mut() {
                    (*content, *of_item) = (vec![part], status);
                }
            }
            OpenItem::Function(text) => {
                if let Some(OutputItem::FunctionCall { name, arguments, status: of_item, .. }) =
                    self.response.output.last_mut()
                {
                    let done = json!({"name": name, "arguments": text});
                    (*arguments, *of_item) = (text, status);
                    self.send_about_item("response.function_call_arguments.done", done, out);
                }
            }
            OpenItem::Custom(input) => {
                let (text, rest) = input.finish();
                if !rest.is_empty() {
                    self.send_about_item("response.custom_tool_call_input.delta", json!({"delta": rest}), out);
                }
                self.close_input(text, status, out);
            }
            OpenItem::Input(text) => self.close_input(text, status, out),
        }
        self.send_item("response.output_item.done", out);
    }

    fn close_input(&mut self, text: String, status: ResponseStatus, out: &mut Frames) {
        self.send_about_item("response.custom_tool_call_input.done", json!({"input": text}), out);
        if let Some(OutputItem::CustomToolCall { input, status: of_item, .. }) = self.response.output.last_mut() {
            (*input, *of_item) = (text, status);
        }
    }

    fn send_response(&mut self, kind: &'static str, out: &mut Frames) {
        send(&mut self.number, kind, WithResponse { response: &self.response }, out);
    }

    /// Writes an event with the last item.
    fn send_item(&mut self, kind: &'static str, out: &mut Frames) {
        if let Some((output_index, item)) = last(&self.response.output) {
            send(&mut self.number, kind, WithItem { output_index, item }, out);
        }
    }

    /// Writes an event about the last item.
    fn send_about_item(&mut self, kind: &'static str, fields: impl Serialize, out: &mut Frames) {
        if let Some((output_index, item)) = last(&self.response.output) {
            send(&mut self.number, kind, OfItem { item_id: item.id(), output_index, fields }, out);
        }
    }

    /// Writes an event with a content part of the last item.
    fn send_part(&mut self, kind: &'static str, part: &ContentPart, out: &mut Frames) {
        self.send_about_item(kind, WithPart { content_index: 0, part }, out);
    }

    /// Ends the response with an error.
    fn failed(&mut self, error: &ApiError, out: &mut Frames) {
        let ResponseError { code, message } = ResponseError::of(error);
        send(&mut self.number, "error", json!({"code": code, "message": message, "param": null}), out);
        self.response.status = ResponseStatus::Failed;
        self.response.error = Some(ResponseError { code, message });
        self.send_response("response.failed", out);
    }
}

/// The last item and its index.
fn last(output: &[OutputItem]) -> Option<(usize, &OutputItem)> {
    output.iter().enumerate().next_back()
}

/// Writes an event with the next sequence number.
fn send(number: &mut u64, kind: &'static str, body: impl Serialize, out: &mut Frames) {
    out.event(kind, &StreamEvent { kind, sequence_number: *number, body });
    *number += 1;
}

/// Writes a response as a stream.
pub struct ResponseChunks {
    /// The parser of the only choice.
    parsers: ChoiceParsers,
    /// Makes the events.
    writer: ResponseWriter,
}

impl ResponseChunks {
    /// A stream of what `parsers` parse and `writer` writes.
    pub fn new(parsers: ChoiceParsers, writer: ResponseWriter) -> Self {
        Self { parsers, writer }
    }
}

impl ChunkWriter for ResponseChunks {
    fn event(&mut self, index: usize, event: Event, out: &mut Frames) -> Result<(), ApiError> {
        let parts = self.parsers.parse(index, event)?;
        self.writer.add(parts, out);
        Ok(())
    }

    /// The last event was written at the end of the sequence.
    fn end(&mut self, _: &mut Frames) {}

    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        self.writer.failed(error, out);
    }
}
