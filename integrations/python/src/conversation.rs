//! Conversations rendered as prompts, and answers to them split into reasoning, text and tool calls.

use std::sync::Arc;

use metal_attention::scheduler::{Event, FinishReason};
use metal_attention::tokenizer::Tokenizer;
use metal_attention::{PICTURE_PLACE, PicturePrompt, PromptSpan};
use metal_attention_chat::{
    AnswerEvent, ChatTemplate, Message, RenderRequest, Tool, ToolCallParser, take_pictures, without_picture_markers,
};
use metal_attention_grammar::RenderedConversation;
use pyo3::prelude::*;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::errors::TemplateError;
use crate::picture::PySpans;

/// A conversation, rendered by a chat template.
#[pyclass(frozen, name = "Conversation", module = "metal_attention._engine")]
pub struct PyConversation {
    /// The prompt, and what its answer is read by.
    rendered: RenderedConversation,
    /// The token ids of the prompt; 0 in the place of a picture's rows.
    ids: Vec<u32>,
    /// The rows of its pictures.
    spans: Arc<[PromptSpan]>,
}

/// The settings for rendering a conversation.
#[derive(Clone, Copy)]
pub struct Rendering<'a> {
    /// The messages, a JSON list.
    pub messages: &'a str,
    /// The tools, a JSON list.
    pub tools: &'a str,
    /// Variables of the template, a JSON object.
    pub variables: &'a str,
    /// Whether the prompt ends with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// Whether the answer continues the last message.
    pub continue_final_message: bool,
    /// The pictures of the messages' parts of the type `image_url`, in their order.
    pub pictures: &'a [&'a PicturePrompt],
}

impl PyConversation {
    /// Renders a conversation. Takes time: call it with Python detached.
    pub fn render(template: ChatTemplate, tokenizer: &Arc<Tokenizer>, rendering: Rendering<'_>) -> PyResult<Self> {
        let mut messages: Vec<Message> = parse(rendering.messages, "messages")?;
        let n_parts = take_pictures(&mut messages).len();
        let n_pictures = rendering.pictures.len();
        if n_parts != n_pictures {
            let message =
                format!("the messages have {n_parts} parts for pictures, and there are {n_pictures} pictures");
            return Err(TemplateError::new_err(message));
        }
        let tools: Vec<Tool> = parse(rendering.tools, "tools")?;
        let variables: Map<String, Value> = parse(rendering.variables, "chat_template_kwargs")?;
        let request = RenderRequest {
            messages: &messages,
            tools: &tools,
            add_generation_prompt: rendering.add_generation_prompt,
            variables: Some(&variables),
            ..Default::default()
        };
        let conversation =
            RenderedConversation::render(template, tokenizer, &request, rendering.continue_final_message);
        let rendered = conversation.map_err(|error| TemplateError::new_err(error.to_string()))?;
        let (ids, spans) =
            if n_pictures == 0 { (rendered.ids(), Vec::new()) } else { rendered.with_pictures(rendering.pictures) };
        Ok(Self { rendered, ids, spans: spans.into() })
    }

    /// The rendered conversation.
    pub fn inner(&self) -> &RenderedConversation {
        &self.rendered
    }

    /// A reader for the answer. `has_form` tells whether a grammar gives the answer a form, so that it has no tool calls.
    pub fn answer(&self, has_form: bool) -> AnswerReader {
        AnswerReader { tokenizer: Arc::clone(self.rendered.tokenizer()), parser: self.rendered.parser(has_form) }
    }
}

#[pymethods]
impl PyConversation {
    #[getter]
    fn text(&self) -> String {
        without_picture_markers(self.rendered.text(), PICTURE_PLACE)
    }

    #[getter]
    fn token_ids(&self) -> Vec<u32> {
        self.ids.clone()
    }

    /// The rows of the pictures. `None`: there are none.
    #[getter]
    fn spans(&self) -> Option<PySpans> {
        (!self.spans.is_empty()).then(|| PySpans(Arc::clone(&self.spans)))
    }

    /// Strings that end an answer, for models that have no token for it.
    #[getter]
    fn stop(&self) -> Vec<&'static str> {
        self.rendered.stop_strings().to_vec()
    }

    /// Whether the prompt ends within reasoning, which the answer continues.
    #[getter]
    fn begins_in_reasoning(&self) -> bool {
        self.rendered.begins_reasoning()
    }
}

/// Splits an answer into reasoning, text and calls while it is generated.
pub struct AnswerReader {
    /// The model's tokenizer.
    tokenizer: Arc<Tokenizer>,
    /// Splits the text.
    parser: ToolCallParser,
}

impl AnswerReader {
    /// The parts that an event adds to the answer.
    pub fn take(&mut self, event: &Event) -> Vec<AnswerEvent> {
        match event {
            Event::Token { id, text, logprobs: _ } => self.parser.push_token(&self.tokenizer, *id, text),
            Event::Done { text, reason, .. } => {
                let mut events = self.parser.push(text);
                events.extend(match reason {
                    FinishReason::EndOfText | FinishReason::StopString => self.parser.finish(),
                    FinishReason::Length
                    | FinishReason::ContextFull
                    | FinishReason::Deadline
                    | FinishReason::Cancelled => self.parser.cut_off(),
                });
                events
            }
            Event::Prompt(_) | Event::Failed(_) => Vec::new(),
        }
    }
}

/// An answer as OpenAI's message in JSON.
pub fn message_json(events: Vec<AnswerEvent>) -> String {
    serde_json::to_string(&Message::from_events(events)).unwrap_or_default()
}

/// Parts of an answer as the `delta` of OpenAI's chunks in JSON.
pub fn delta_json(events: Vec<AnswerEvent>) -> String {
    let mut delta = Map::new();
    let mut calls: Vec<Value> = Vec::new();
    for event in events {
        match event {
            AnswerEvent::Reasoning(text) => append(&mut delta, "reasoning_content", &text),
            AnswerEvent::Content(text) => append(&mut delta, "content", &text),
            AnswerEvent::CallStart { index, id, name } => calls.push(json!({
                "index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""},
            })),
            AnswerEvent::CallArguments { index, delta } => {
                calls.push(json!({"index": index, "function": {"arguments": delta}}));
            }
            AnswerEvent::CallEnd { .. } => {}
        }
    }
    if !calls.is_empty() {
        delta.insert("tool_calls".into(), calls.into());
    }
    Value::Object(delta).to_string()
}

/// Appends `text` to the field `name`.
fn append(delta: &mut Map<String, Value>, name: &str, text: &str) {
    let so_far = delta.get(name).and_then(Value::as_str).unwrap_or_default();
    let whole = format!("{so_far}{text}");
    delta.insert(name.to_owned(), whole.into());
}

/// Parses JSON; errors call it `what`.
fn parse<T: DeserializeOwned>(json: &str, what: &str) -> PyResult<T> {
    serde_json::from_str(json).map_err(|error| TemplateError::new_err(format!("{what}: {error}")))
}
