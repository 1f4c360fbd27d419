//! Conversations as prompts, and how answers to them are read.

use std::sync::Arc;

use metal_attention::scheduler::Event;
use metal_attention::tokenizer::Tokenizer;
use metal_attention_chat::{AnswerEvent, ChatTemplate, Continuation, Message, RenderRequest, Tool, ToolCallParser};
use pyo3::prelude::*;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::errors::{self, TemplateError};

/// A conversation as a chat template has rendered it.
#[pyclass(frozen, module = "metal_attention._engine")]
pub struct Conversation {
    template: ChatTemplate,
    continuation: Continuation,
    tools: Vec<Tool>,
    ids: Vec<u32>,
}

/// How a conversation is rendered.
#[derive(Clone, Copy)]
pub struct Rendering<'a> {
    /// The messages in JSON.
    pub messages: &'a str,
    /// The tools in JSON.
    pub tools: &'a str,
    /// The template's variables in JSON.
    pub variables: &'a str,
    pub add_generation_prompt: bool,
    /// The answer goes on with the last message.
    pub continue_final_message: bool,
}

impl Conversation {
    /// Renders a conversation. Templates take time: not to be called by who holds Python.
    pub fn render(template: ChatTemplate, tokenizer: &Tokenizer, rendering: Rendering<'_>) -> PyResult<Self> {
        let messages: Vec<Message> = parse(rendering.messages, "messages")?;
        let tools: Vec<Tool> = parse(rendering.tools, "tools")?;
        let variables: Map<String, Value> = parse(rendering.variables, "chat_template_kwargs")?;
        template.tool_format().check_tools(&tools).map_err(|error| TemplateError::new_err(error.to_string()))?;
        let request = RenderRequest {
            messages: &messages,
            tools: &tools,
            add_generation_prompt: rendering.add_generation_prompt,
            variables: Some(&variables),
            ..Default::default()
        };
        let rendered = if rendering.continue_final_message {
            template.render_continued(&request)
        } else {
            template.render(&request).map(|prompt| Continuation { begin: prompt.text.len(), prompt })
        };
        let continuation = rendered.map_err(|error| errors::of_template(&error))?;
        let ids = continuation.prompt.encode(tokenizer);
        Ok(Self { template, continuation, tools, ids })
    }

    /// The template that rendered it.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// The functions that the answer may call.
    pub fn tools(&self) -> &[Tool] {
        &self.tools
    }

    /// Whether the answer goes on with the last message.
    pub fn continues_message(&self) -> bool {
        self.continuation.begin < self.continuation.prompt.text.len()
    }

    /// The prompt as a grammar has to know it: one that ends in thoughts which have begun before is as one that begins them.
    pub fn prompt_of_grammar(&self) -> &str {
        match self.template.reasoning() {
            Some(markers) if self.begins_thoughts() => markers.start,
            Some(_) | None => &self.continuation.prompt.text,
        }
    }

    /// Reads an answer. One in a form of its own has no calls.
    pub fn answer(&self, tokenizer: &Arc<Tokenizer>, has_form: bool) -> Answer {
        let tools = if has_form { &[] } else { self.tools.as_slice() };
        Answer { tokenizer: Arc::clone(tokenizer), parser: self.template.continued_parser(&self.continuation, tools) }
    }
}

#[pymethods]
impl Conversation {
    #[getter]
    fn text(&self) -> &str {
        &self.continuation.prompt.text
    }

    #[getter]
    fn token_ids(&self) -> Vec<u32> {
        self.ids.clone()
    }

    /// Strings that end an answer where the model has no token for it.
    #[getter]
    fn stop(&self) -> Vec<&'static str> {
        self.template.stop_strings().to_vec()
    }

    /// Whether the prompt ends in thoughts, which the answer goes on with.
    #[getter]
    pub fn begins_thoughts(&self) -> bool {
        self.template.continued_parser(&self.continuation, &[]).is_thinking()
    }
}

/// Parts an answer into thoughts, text and calls while it comes.
pub struct Answer {
    tokenizer: Arc<Tokenizer>,
    parser: ToolCallParser,
}

impl Answer {
    /// What an event adds to the answer.
    pub fn take(&mut self, event: &Event) -> Vec<AnswerEvent> {
        match event {
            Event::Token { id, text, logprobs: _ } => self.parser.push_token(&self.tokenizer, *id, text),
            Event::Done { text, .. } => {
                let mut events = self.parser.push(text);
                events.extend(self.parser.finish());
                events
            }
            Event::Prompt(_) | Event::Failed(_) => Vec::new(),
        }
    }
}

/// An answer as a message in OpenAI's JSON.
pub fn message_json(events: Vec<AnswerEvent>) -> String {
    serde_json::to_string(&Message::from_events(events)).unwrap_or_default()
}

/// What was added to an answer, as the delta of a chunk in OpenAI's JSON.
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

/// Adds `text` to the field `name`.
fn append(delta: &mut Map<String, Value>, name: &str, text: &str) {
    let so_far = delta.get(name).and_then(Value::as_str).unwrap_or_default();
    let whole = format!("{so_far}{text}");
    delta.insert(name.to_owned(), whole.into());
}

/// Reads JSON; `what` names it in errors.
fn parse<T: DeserializeOwned>(json: &str, what: &str) -> PyResult<T> {
    serde_json::from_str(json).map_err(|error| TemplateError::new_err(format!("{what}: {error}")))
}
