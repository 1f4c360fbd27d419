//! The request of `/v1/responses`, from JSON to a job.
//!
//! Two steps: [`ResponseRequest`] is read from the body alone; [`resolve`](ResponseRequest::resolve) then reads the
//! previous response and referenced items from the store.

use std::collections::BTreeMap;

use metal_attention_chat::Message;
use metal_attention_grammar::ResponseFormat;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::items::{self, Item, SentItem};
use super::message_builder::MessageBuilder;
use super::response::RequestEcho;
use super::store::{self, ClientResponses, StoredOutput};
use super::tools::{ResponseTool, ResponseTools};
use super::unsupported;
use super::writer::WriterOptions;
use crate::http::body::{FromJson, Object};
use crate::http::job::chat::{ChatJob, PromptEnd};
use crate::http::job::generation::{GenerationSettings, MAX_TOP_LOGPROBS, check};
use crate::http::job::sampling::SamplingFields;
use crate::http::limits::MAX_MESSAGES;
use crate::http::models::ModelLease;
use crate::http::openai::fields::GenerationFields;
use crate::http::openai::reasoning::ReasoningFields;
use crate::http::openapi::all_of;
use crate::http::pictures::Conversation;
use crate::http::{ApiError, App};

/// The fields that completions do not have.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct ResponseFields {
    /// Instructions before the conversation (system prompt).
    instructions: Option<String>,
    /// The response that this one continues: its input and its output precede `input`.
    previous_response_id: Option<String>,
    /// Store the response; default: yes.
    store: Option<bool>,
    /// Additional contents of the response: `reasoning.encrypted_content`, `message.output_text.logprobs`.
    include: Option<Vec<String>>,
    /// The tools that the model may call: functions and custom tools.
    #[schema(value_type = Option<Vec<super::schema::ToolObject>>)]
    tools: Option<Vec<Value>>,
    /// Whether the model calls a tool, and which.
    #[schema(value_type = Option<super::schema::ToolChoice>)]
    tool_choice: Option<Value>,
    /// Whether one answer may have several calls; default: yes.
    parallel_tool_calls: Option<bool>,
    /// The response format.
    #[schema(value_type = Option<super::schema::TextOptions>)]
    text: Option<Map<String, Value>>,
    /// The number of most likely tokens to report with each token, if `include` requests log probabilities.
    #[schema(minimum = 0, maximum = 20)]
    top_logprobs: Option<u32>,
    /// The treatment of a conversation that exceeds the context; default: as the server is configured.
    truncation: Option<Truncation>,
    /// Additional variables of the model's chat template, such as `enable_thinking`.
    #[schema(value_type = Option<BTreeMap<String, Value>>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// Notes of the client, which the response repeats.
    metadata: Option<BTreeMap<String, Value>>,
    /// Maximum calls of tools that a server runs itself; this one runs none.
    max_tool_calls: Option<i64>,
    /// A client's name, which the response repeats.
    prompt_cache_key: Option<String>,
    /// A client's name, which the response repeats.
    safety_identifier: Option<String>,
    /// A client's name, which the response repeats.
    service_tier: Option<String>,
    /// A client's name, which the response repeats.
    user: Option<String>,
}

/// The treatment of a conversation that exceeds the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Truncation {
    /// Its oldest turns are dropped.
    Auto,
    /// The conversation is refused.
    Disabled,
}

/// The field `input`, for the OpenAPI schema.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[expect(dead_code, reason = "it is read item by item")]
pub struct InputFields {
    /// The conversation, or its new part: a text, or items.
    input: Option<super::schema::ResponseInput>,
}

/// A request for a response.
pub struct ResponseRequest {
    /// The name of the model; `None`: the default one.
    pub model: Option<String>,
    /// Whether the response is streamed.
    pub stream: bool,
    /// The items of the field `input`.
    input: Vec<SentItem>,
    /// The other fields of its own.
    fields: ResponseFields,
    /// The field `reasoning`, which the response repeats.
    reasoning: Option<Value>,
    /// The tools.
    tools: ResponseTools,
    /// The custom tool whose input is the whole generated text; `None`: the answer is text or calls.
    input_tool: Option<ResponseTool>,
    /// The job, whose messages [`resolve`](Self::resolve) adds.
    job: ChatJob,
}

/// A request whose references to stored responses are resolved.
pub struct ResolvedRequest {
    /// The job with all messages.
    pub job: ChatJob,
    /// The items of the conversation, those of earlier turns first.
    pub items: Vec<Box<RawValue>>,
}

impl FromJson for ResponseRequest {
    const MAY_HAVE_PICTURES: bool = true;

    fn picture_bytes(&self) -> usize {
        self.input.iter().map(SentItem::picture_bytes).sum()
    }

    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        let mut notes = unsupported::check(object)?;
        let shared: GenerationFields = object.parse()?;
        let sampling = SamplingFields::read(object, &mut notes)?;
        let reasoning: ReasoningFields = object.parse()?;
        let fields: ResponseFields = object.parse()?;
        let input = items::read(object.get("input"))?;
        for sent in &input {
            if let Item::PassedOver(kind) = &sent.item {
                notes.ignored(format!("input.{kind}"));
            }
        }
        let tools = ResponseTools::read(fields.tools.as_deref().unwrap_or_default(), &mut notes)?;
        let choice = fields.tool_choice.clone().unwrap_or(Value::Null);
        let choice = tools.select(&choice, fields.parallel_tool_calls.unwrap_or(true))?;
        let response_format = response_format(fields.text.as_ref())?;
        if fields.text.as_ref().and_then(|text| text.get("verbosity")).is_some_and(|value| !value.is_null()) {
            notes.ignored("text.verbosity");
        }
        if response_format.is_some() && (choice.calls.required || choice.input_tool.is_some()) {
            // The answer is a call, which has no text.
            notes.ignored("text.format");
        }
        let (response_format, input_tool) = match choice.input_tool {
            Some((tool, grammar)) => (Some(("tools", grammar)), Some(tool)),
            None if choice.calls.required => (None, None),
            None => (response_format, None),
        };
        let generation = shared.generation(sampling, None)?;
        let generation = GenerationSettings { logprobs: fields.logprobs()?, ..generation };
        let job = ChatJob {
            conversation: Conversation::default(),
            allowed_calls: choice.calls,
            response_format,
            reasoning: reasoning.request(fields.chat_template_kwargs.clone().unwrap_or_default())?,
            prompt_end: PromptEnd::Answer,
            generation,
            drop_oldest: fields.truncation.map(|truncation| match truncation {
                Truncation::Auto => true,
                Truncation::Disabled => false,
            }),
            messages_field: "input",
            notes,
        };
        let reasoning = object.get("reasoning").and_then(|value| serde_json::from_str(value.get()).ok());
        Ok(Self {
            model: shared.model,
            stream: job.generation.stream,
            input,
            fields,
            reasoning,
            tools,
            input_tool,
            job,
        })
    }
}

all_of!(ResponseRequest, InputFields, ResponseFields, ReasoningFields, GenerationFields, SamplingFields);

/// The response format that the field `text` requires, with the path of the field; `None`: any text.
fn response_format(text: Option<&Map<String, Value>>) -> Result<Option<(&'static str, ResponseFormat)>, ApiError> {
    let wrong = |field: &str, problem: &str| Err(ApiError::field(field, format!("{field} {problem}")));
    let format = match text.and_then(|text| text.get("format")) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Object(format)) => format,
        Some(_) => return wrong("text.format", "must be an object"),
    };
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(("text.format", ResponseFormat::JsonObject))),
        Some("json_schema") => {
            let strict = match format.get("strict") {
                None | Some(Value::Null) => None,
                Some(Value::Bool(strict)) => Some(*strict),
                Some(_) => return wrong("text.format.strict", "must be true or false"),
            };
            match format.get("schema") {
                Some(schema @ Value::Object(_)) => {
                    Ok(Some(("text.format.schema", ResponseFormat::JsonSchema { schema: schema.clone(), strict })))
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

    /// The number of most likely tokens to report with each token; `None`: no log probabilities.
    fn logprobs(&self) -> Result<Option<usize>, ApiError> {
        let top = self.top_logprobs.unwrap_or(0);
        check("top_logprobs", top, 0..=MAX_TOP_LOGPROBS)?;
        Ok(self.includes("message.output_text.logprobs").then_some(top as usize))
    }
}

impl ResponseRequest {
    /// Whether the response is stored.
    pub fn is_kept(&self) -> bool {
        self.fields.store.unwrap_or(true)
    }

    /// Whether a summary of the reasoning is requested, under either name that the field has had.
    fn has_summary(&self) -> bool {
        let names = ["summary", "generate_summary"];
        names.iter().any(|name| self.reasoning.as_ref().is_some_and(|reasoning| reasoning[name].is_string()))
    }

    /// The options of the response's writer.
    pub fn writer_options(&self) -> WriterOptions {
        WriterOptions {
            tools: self.tools.clone(),
            input_tool: self.input_tool.clone(),
            adds_summary: self.has_summary(),
            encodes_reasoning: self.fields.includes("reasoning.encrypted_content"),
            with_logprobs: self.job.generation.logprobs.is_some(),
        }
    }

    /// Adds the previous turns and the referenced items from the store. `id`: the id of the response to come, from
    /// which the ids of new items are derived. Reads files: call it on a blocking thread. Fails for an unknown response
    /// or item.
    pub fn resolve(&self, stored: &ClientResponses, id: &str) -> Result<ResolvedRequest, ApiError> {
        let mut conversation = MessageBuilder::new(self.fields.instructions.as_deref());
        let mut items: Vec<Box<RawValue>> = Vec::new();
        if let Some(previous) = &self.fields.previous_response_id {
            let body = stored.get(previous)?.ok_or_else(|| {
                let message = format!(
                    "previous_response_id: there is no response {previous:?} here: it was not kept, or others have taken \
                     its place; send the conversation in input"
                );
                ApiError::field("previous_response_id", message).with_code("previous_response_not_found")
            })?;
            let parsed = body.read::<StoredOutput<'_>>()?;
            for json in parsed.input.into_iter().chain(parsed.response.output) {
                let sent = SentItem::read(json, "previous_response_id")?;
                conversation.add(&sent.item);
                items.push(sent.json);
            }
        } else if self.input.is_empty() {
            return Err(ApiError::field("input", "input is missing: give a text or at least one item"));
        }
        for (i, sent) in self.input.iter().enumerate() {
            if let Item::Reference(item_id) = &sent.item {
                let json = find_item(stored, item_id)?.ok_or_else(|| {
                    let place = format!("input[{i}]");
                    let message = format!("{place}: there is no item {item_id:?} here: send the item itself");
                    ApiError::field(place, message).with_code("item_not_found")
                })?;
                conversation.add(&SentItem::read(&json, &format!("input[{i}]"))?.item);
                items.push(json);
            } else {
                conversation.add(&sent.item);
                items.push(sent.stored_json(&store::item_id("in", id, items.len())));
            }
        }
        let job = ChatJob { conversation: Conversation::new(messages(conversation)?), ..self.job.clone() };
        Ok(ResolvedRequest { job, items })
    }

    /// The parameters of the request that the response repeats. `name`: the name of the model.
    pub fn echo(&self, app: &App, model: &ModelLease, name: String) -> Result<RequestEcho, ApiError> {
        let fields = &self.fields;
        let sampling = self.job.generation.sampling(model)?;
        let mut text = fields.text.clone().unwrap_or_default();
        if text.get("format").is_none_or(Value::is_null) {
            text.insert("format".into(), json!({"type": "text"}));
        }
        let given = |value: &Option<Value>, default: Value| value.clone().filter(|v| !v.is_null()).unwrap_or(default);
        Ok(RequestEcho {
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
            truncation: if self.job.drops_oldest(app, model) { "auto" } else { "disabled" },
            user: fields.user.clone(),
        })
    }
}

/// The messages; fails if there are none or too many.
fn messages(conversation: MessageBuilder) -> Result<Vec<Message>, ApiError> {
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

/// Returns the item `id` of a stored response; `None` if there is no such item.
fn find_item(stored: &ClientResponses, id: &str) -> Result<Option<Box<RawValue>>, ApiError> {
    #[derive(Deserialize)]
    struct OnlyId {
        /// The id of the item.
        id: Option<String>,
    }
    let Some(body) = stored.get_by_item(id)? else { return Ok(None) };
    let parsed = body.read::<StoredOutput<'_>>()?;
    let is_it = |json: &&RawValue| {
        serde_json::from_str::<OnlyId>(json.get()).is_ok_and(|named| named.id.as_deref() == Some(id))
    };
    Ok(parsed.response.output.into_iter().chain(parsed.input).find(is_it).map(RawValue::to_owned))
}
