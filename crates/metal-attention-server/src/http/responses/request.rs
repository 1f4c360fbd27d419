//! The request for a response.

use std::collections::BTreeMap;

use metal_attention_chat::Message;
use metal_attention_grammar::AnswerForm;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::conversation::Conversation;
use super::items::{self, Item, SentItem};
use super::response::Asked;
use super::store::{self, Output, Shelf};
use super::tools::{OfferedTool, Tools};
use super::unsupported;
use super::writer::Wanted;
use crate::http::body::{FromJson, Object};
use crate::http::job::chat::{ChatJob, PromptEnd};
use crate::http::job::generation::{Generation, MAX_TOP_LOGPROBS, check};
use crate::http::job::sampling::SamplingFields;
use crate::http::limits::MAX_MESSAGES;
use crate::http::models::ModelLease;
use crate::http::openai::fields::GenerationFields;
use crate::http::openai::thinking::ThinkingFields;
use crate::http::openapi::all_of;
use crate::http::{ApiError, App};

/// The fields of a request for a response that completions do not have.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct ResponseFields {
    /// Instructions that come before the conversation.
    instructions: Option<String>,
    /// The response that this one goes on from: its input and its output come before `input`.
    previous_response_id: Option<String>,
    /// Keep the response; without a word about it, yes.
    store: Option<bool>,
    /// What the response has besides: `reasoning.encrypted_content`, `message.output_text.logprobs`.
    include: Option<Vec<String>>,
    /// The tools that the model may call: functions and custom tools.
    #[schema(value_type = Option<Vec<super::schema::ToolObject>>)]
    tools: Option<Vec<Value>>,
    /// Whether the model calls a tool, and which.
    #[schema(value_type = Option<super::schema::ToolChoice>)]
    tool_choice: Option<Value>,
    /// Whether one answer may have several calls; without a word about it, yes.
    parallel_tool_calls: Option<bool>,
    /// What the text must look like.
    #[schema(value_type = Option<super::schema::TextOptions>)]
    text: Option<Map<String, Value>>,
    /// How many of the likeliest tokens are reported with each token, where `include` asks for log probabilities.
    #[schema(minimum = 0, maximum = 20)]
    top_logprobs: Option<u32>,
    /// What becomes of a conversation that the context has no room for; without a word about it, as the server is set up.
    truncation: Option<Truncation>,
    /// More variables for the model's chat template, such as `enable_thinking`.
    #[schema(value_type = Option<BTreeMap<String, Value>>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// The client's own notes, which the response repeats.
    metadata: Option<BTreeMap<String, Value>>,
    /// Most calls of tools that a server runs itself; this one runs none.
    max_tool_calls: Option<i64>,
    /// A name that the response repeats.
    prompt_cache_key: Option<String>,
    /// A name that the response repeats.
    safety_identifier: Option<String>,
    /// A name that the response repeats.
    service_tier: Option<String>,
    /// A name that the response repeats.
    user: Option<String>,
}

/// What becomes of a conversation that the context has no room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Truncation {
    /// Its oldest turns are dropped.
    Auto,
    /// It is refused.
    Disabled,
}

/// The items of a request, for its description.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[expect(dead_code, reason = "it is read item by item")]
pub struct InputFields {
    /// The conversation, or what is new of it: a text, or items.
    input: Option<super::schema::Input>,
}

/// A request for a response.
pub struct ResponseRequest {
    /// The model's name.
    pub model: Option<String>,
    /// Whether the answer is sent as it comes.
    pub stream: bool,
    input: Vec<SentItem>,
    fields: ResponseFields,
    reasoning: Option<Value>,
    tools: Tools,
    input_of: Option<OfferedTool>,
    /// The job without its messages.
    job: ChatJob,
}

/// A request whose earlier turns were found.
pub struct Turn {
    /// What is to be generated.
    pub job: ChatJob,
    /// The items of the conversation, the earlier turns' first.
    pub items: Vec<Box<RawValue>>,
}

impl FromJson for ResponseRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        let mut notes = unsupported::check(object)?;
        let shared: GenerationFields = object.parse()?;
        let sampling = SamplingFields::read(object, &mut notes)?;
        let thinking: ThinkingFields = object.parse()?;
        let fields: ResponseFields = object.parse()?;
        let input = items::read(object.get("input"))?;
        for sent in &input {
            if let Item::PassedOver(kind) = &sent.item {
                notes.ignored(format!("input.{kind}"));
            }
        }
        let tools = Tools::read(fields.tools.as_deref().unwrap_or_default(), &mut notes)?;
        let choice = fields.tool_choice.clone().unwrap_or(Value::Null);
        let choice = tools.choose(&choice, fields.parallel_tool_calls.unwrap_or(true))?;
        let form = form(fields.text.as_ref())?;
        if fields.text.as_ref().and_then(|text| text.get("verbosity")).is_some_and(|value| !value.is_null()) {
            notes.ignored("text.verbosity");
        }
        if form.is_some() && (choice.calls.required || choice.input_of.is_some()) {
            // The answer is a call, which has no text.
            notes.ignored("text.format");
        }
        let (form, input_of) = match choice.input_of {
            Some((tool, grammar)) => (Some(("tools", grammar)), Some(tool)),
            None if choice.calls.required => (None, None),
            None => (form, None),
        };
        let generation = shared.generation(sampling, None)?;
        let generation = Generation { logprobs: fields.logprobs()?, ..generation };
        let job = ChatJob {
            messages: Vec::new(),
            calls: choice.calls,
            form,
            thinking: thinking.request(fields.chat_template_kwargs.clone().unwrap_or_default())?,
            end: PromptEnd::Answer,
            generation,
            context_shift: fields.truncation.map(|truncation| match truncation {
                Truncation::Auto => true,
                Truncation::Disabled => false,
            }),
            messages_field: "input",
            notes,
        };
        let reasoning = object.get("reasoning").and_then(|value| serde_json::from_str(value.get()).ok());
        Ok(Self { model: shared.model, stream: job.generation.stream, input, fields, reasoning, tools, input_of, job })
    }
}

all_of!(ResponseRequest, InputFields, ResponseFields, ThinkingFields, GenerationFields, SamplingFields);

/// The form of the text that the field `text` wants, and the field that says so; `None`: any text.
fn form(text: Option<&Map<String, Value>>) -> Result<Option<(&'static str, AnswerForm)>, ApiError> {
    let wrong = |field: &str, problem: &str| Err(ApiError::field(field, format!("{field} {problem}")));
    let format = match text.and_then(|text| text.get("format")) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Object(format)) => format,
        Some(_) => return wrong("text.format", "must be an object"),
    };
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(("text.format", AnswerForm::JsonObject))),
        Some("json_schema") => {
            let strict = match format.get("strict") {
                None | Some(Value::Null) => None,
                Some(Value::Bool(strict)) => Some(*strict),
                Some(_) => return wrong("text.format.strict", "must be true or false"),
            };
            match format.get("schema") {
                Some(schema @ Value::Object(_)) => {
                    Ok(Some(("text.format.schema", AnswerForm::JsonSchema { schema: schema.clone(), strict })))
                }
                Some(_) | None => wrong("text.format.schema", "must be a JSON schema, which is an object"),
            }
        }
        Some(_) | None => wrong("text.format.type", "must be text, json_object or json_schema"),
    }
}

impl ResponseFields {
    fn includes(&self, what: &str) -> bool {
        self.include.iter().flatten().any(|included| included == what)
    }

    /// How many of the likeliest tokens are wanted with the log probability of each token.
    fn logprobs(&self) -> Result<Option<usize>, ApiError> {
        let top = self.top_logprobs.unwrap_or(0);
        check("top_logprobs", top, 0..=MAX_TOP_LOGPROBS)?;
        Ok(self.includes("message.output_text.logprobs").then_some(top as usize))
    }
}

impl ResponseRequest {
    /// Whether the response is kept.
    pub fn is_kept(&self) -> bool {
        self.fields.store.unwrap_or(true)
    }

    /// Whether a summary of the thoughts is wanted, by either of the names that the field has had.
    fn has_summary(&self) -> bool {
        let names = ["summary", "generate_summary"];
        names.iter().any(|name| self.reasoning.as_ref().is_some_and(|reasoning| reasoning[name].is_string()))
    }

    /// How the response is written.
    pub fn wanted(&self) -> Wanted {
        Wanted {
            tools: self.tools.clone(),
            input_of: self.input_of.clone(),
            sums_up: self.has_summary(),
            seals_thoughts: self.fields.includes("reasoning.encrypted_content"),
            with_logprobs: self.job.generation.logprobs.is_some(),
        }
    }

    /// The request with the turns before it; `id`: the response's name, by which its items are called. Not to be called on a
    /// thread that serves others.
    pub fn turn(&self, shelf: &Shelf, id: &str) -> Result<Turn, ApiError> {
        let mut conversation = Conversation::new(self.fields.instructions.as_deref());
        let mut items: Vec<Box<RawValue>> = Vec::new();
        if let Some(previous) = &self.fields.previous_response_id {
            let body = shelf.get(previous)?.ok_or_else(|| {
                let message = format!(
                    "previous_response_id: there is no response {previous:?} here: it was not kept, or others have taken \
                     its place; send the conversation in input"
                );
                ApiError::field("previous_response_id", message).with_code("previous_response_not_found")
            })?;
            let kept = body.read::<Output<'_>>()?;
            for json in kept.input.into_iter().chain(kept.response.output) {
                let sent = SentItem::read(json, "previous_response_id")?;
                conversation.add(&sent.item);
                items.push(sent.json);
            }
        } else if self.input.is_empty() {
            return Err(ApiError::field("input", "input is missing: give a text or at least one item"));
        }
        for (i, sent) in self.input.iter().enumerate() {
            if let Item::Reference(of) = &sent.item {
                let json = referred(shelf, of)?.ok_or_else(|| {
                    let place = format!("input[{i}]");
                    let message = format!("{place}: there is no item {of:?} here: send the item itself");
                    ApiError::field(place, message).with_code("item_not_found")
                })?;
                conversation.add(&SentItem::read(&json, &format!("input[{i}]"))?.item);
                items.push(json);
            } else {
                conversation.add(&sent.item);
                items.push(sent.kept(&store::item_id("in", id, items.len())));
            }
        }
        let job = ChatJob { messages: messages(conversation)?, ..self.job.clone() };
        Ok(Turn { job, items })
    }

    /// What of the request the response repeats; `name`: the model's name.
    pub fn asked(&self, app: &App, model: &ModelLease, name: String) -> Result<Asked, ApiError> {
        let fields = &self.fields;
        let sampling = self.job.generation.sampling(model)?;
        let mut text = fields.text.clone().unwrap_or_default();
        if text.get("format").is_none_or(Value::is_null) {
            text.insert("format".into(), json!({"type": "text"}));
        }
        let given = |value: &Option<Value>, default: Value| value.clone().filter(|v| !v.is_null()).unwrap_or(default);
        Ok(Asked {
            model: name,
            background: false,
            instructions: fields.instructions.clone(),
            max_output_tokens: self.job.generation.max_tokens(model),
            max_tool_calls: fields.max_tool_calls,
            metadata: fields.metadata.clone().unwrap_or_default(),
            parallel_tool_calls: fields.parallel_tool_calls.unwrap_or(true),
            previous_response_id: fields.previous_response_id.clone(),
            prompt_cache_key: fields.prompt_cache_key.clone(),
            reasoning: given(&self.reasoning, json!({"effort": null, "summary": null})),
            safety_identifier: fields.safety_identifier.clone(),
            service_tier: fields.service_tier.clone().unwrap_or_else(|| "default".into()),
            store: self.is_kept(),
            temperature: sampling.temperature,
            text: Value::Object(text),
            tool_choice: given(&fields.tool_choice, "auto".into()),
            tools: fields.tools.clone().unwrap_or_default(),
            top_logprobs: fields.top_logprobs.unwrap_or(0),
            top_p: sampling.top_p,
            truncation: if self.job.drops_turns(app, model) { "auto" } else { "disabled" },
            user: fields.user.clone(),
        })
    }
}

/// The messages, if they are not too many.
fn messages(conversation: Conversation) -> Result<Vec<Message>, ApiError> {
    let messages = conversation.finish();
    match messages.len() {
        0 => Err(ApiError::field("input", "input holds nothing that the model reads: give a text or a message")),
        1..=MAX_MESSAGES => Ok(messages),
        n => {
            let message = format!("input and the turns before it are {n} messages; at most {MAX_MESSAGES} are allowed");
            Err(ApiError::field("input", message))
        }
    }
}

/// The item of this name in a response that is kept.
fn referred(shelf: &Shelf, id: &str) -> Result<Option<Box<RawValue>>, ApiError> {
    #[derive(Deserialize)]
    struct Named {
        id: Option<String>,
    }
    let Some(body) = shelf.get_by_item(id)? else { return Ok(None) };
    let kept = body.read::<Output<'_>>()?;
    let is_it =
        |json: &&RawValue| serde_json::from_str::<Named>(json.get()).is_ok_and(|named| named.id.as_deref() == Some(id));
    Ok(kept.response.output.into_iter().chain(kept.input).find(is_it).map(RawValue::to_owned))
}
