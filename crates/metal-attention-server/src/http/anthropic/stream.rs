//! The response as a stream of named events: each block of the message is started, extended and stopped.

use metal_attention::scheduler::Event;
use metal_attention_chat::AnswerEvent;
use serde::Serialize;
use serde_json::Map;

use super::error::ErrorBody;
use super::response::{ContentBlock, MessageObject, MessageWriter, Stop, Usage};
use super::signature;
use crate::http::ApiError;
use crate::http::job::choice_parser::{ChatEvent, ChoiceParsers};
use crate::http::streaming::{ChunkWriter, Frames};

/// An event of the stream.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum StreamEvent {
    MessageStart { message: MessageObject },
    ContentBlockStart { index: usize, content_block: ContentBlock },
    ContentBlockDelta { index: usize, delta: Delta },
    ContentBlockStop { index: usize },
    MessageDelta { delta: Stop, usage: Usage },
    MessageStop,
    Ping,
}

impl StreamEvent {
    fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
            Self::Ping => "ping",
        }
    }

    fn send(&self, out: &mut Frames) {
        out.event(self.name(), self);
    }
}

/// The part of a block that an event adds.
#[derive(Serialize)]
#[serde(tag = "type")]
enum Delta {
    #[serde(rename = "text_delta")]
    Text { text: String },
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: String },
    #[serde(rename = "signature_delta")]
    Signature { signature: String },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: String },
}

/// The block that is being written.
enum OpenBlock {
    Text,
    /// With the reasoning so far, for the signature.
    Thinking(String),
    ToolUse,
}

/// Writes a message as a stream.
pub struct MessageChunks {
    /// The parser of the only choice.
    parsers: ChoiceParsers,
    /// The conversion to blocks.
    writer: MessageWriter,
    /// The current block; `None` between two blocks.
    open: Option<OpenBlock>,
    /// The index of the current block, or of the next one.
    index: usize,
    /// White space that may start a text block. It is dropped where no text follows.
    blanks: String,
}

impl MessageChunks {
    /// Starts a stream of what `parsers` parse, in the form of `writer`.
    pub fn begin(parsers: ChoiceParsers, writer: MessageWriter, out: &mut Frames) -> Self {
        StreamEvent::MessageStart { message: writer.begun() }.send(out);
        Self { parsers, writer, open: None, index: 0, blanks: String::new() }
    }

    /// Stops the current block, and starts another one.
    fn start(&mut self, open: OpenBlock, content_block: ContentBlock, out: &mut Frames) {
        self.stop(out);
        StreamEvent::ContentBlockStart { index: self.index, content_block }.send(out);
        self.open = Some(open);
    }

    fn delta(&self, delta: Delta, out: &mut Frames) {
        StreamEvent::ContentBlockDelta { index: self.index, delta }.send(out);
    }

    /// Stops the current block.
    fn stop(&mut self, out: &mut Frames) {
        self.blanks.clear();
        match self.open.take() {
            None => return,
            Some(OpenBlock::Text | OpenBlock::ToolUse) => {}
            Some(OpenBlock::Thinking(reasoning)) => {
                let signature = signature::of(&reasoning, self.writer.omits_reasoning);
                self.delta(Delta::Signature { signature }, out);
            }
        }
        StreamEvent::ContentBlockStop { index: self.index }.send(out);
        self.index += 1;
    }

    /// Adds text. White space starts a block only when text follows: templates write blanks around calls.
    fn text(&mut self, text: String, out: &mut Frames) {
        if !matches!(self.open, Some(OpenBlock::Text)) {
            let blanks = std::mem::take(&mut self.blanks) + &text;
            if blanks.trim().is_empty() {
                self.stop(out);
                self.blanks = blanks;
                return;
            }
            self.start(OpenBlock::Text, ContentBlock::Text { text: String::new() }, out);
            return self.delta(Delta::Text { text: blanks }, out);
        }
        self.delta(Delta::Text { text }, out);
    }

    /// Adds reasoning. Where it is left out, it is collected for the signature.
    fn reasoning(&mut self, thinking: String, out: &mut Frames) {
        if !matches!(self.open, Some(OpenBlock::Thinking(_))) {
            let block = ContentBlock::Thinking { thinking: String::new(), signature: String::new() };
            self.start(OpenBlock::Thinking(String::new()), block, out);
        }
        if !self.writer.omits_reasoning {
            return self.delta(Delta::Thinking { thinking }, out);
        }
        if let Some(OpenBlock::Thinking(all)) = &mut self.open {
            *all += &thinking;
        }
    }

    /// Adds a part of the answer.
    fn answer(&mut self, event: AnswerEvent, out: &mut Frames) {
        match event {
            AnswerEvent::Content(text) => self.text(text, out),
            AnswerEvent::Reasoning(reasoning) => self.reasoning(reasoning, out),
            AnswerEvent::CallStart { id, name, index: _ } => {
                self.start(OpenBlock::ToolUse, ContentBlock::ToolUse { id, name, input: Map::new() }, out);
            }
            AnswerEvent::CallArguments { delta, index: _ } => {
                self.delta(Delta::InputJson { partial_json: delta }, out);
            }
            AnswerEvent::CallEnd { .. } => self.stop(out),
        }
    }
}

impl ChunkWriter for MessageChunks {
    fn event(&mut self, i: usize, event: Event, out: &mut Frames) -> Result<(), ApiError> {
        for part in self.parsers.parse(i, event)? {
            match part {
                // They are not requested.
                ChatEvent::Prompt(_) | ChatEvent::Logprobs(..) => {}
                ChatEvent::Answer(event) => self.answer(event, out),
                ChatEvent::CutCall => self.stop(out),
                ChatEvent::End(end) => {
                    self.stop(out);
                    let (delta, usage) = self.writer.ended(&end);
                    StreamEvent::MessageDelta { delta, usage }.send(out);
                }
            }
        }
        Ok(())
    }

    fn end(&mut self, out: &mut Frames) {
        StreamEvent::MessageStop.send(out);
    }

    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        out.event("error", &ErrorBody::of(error));
    }

    fn keep_alive(&mut self, out: &mut Frames) {
        StreamEvent::Ping.send(out);
    }
}
