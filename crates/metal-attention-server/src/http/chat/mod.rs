//! `/v1/chat/completions`: the next message of a conversation.

mod request;
mod response;
mod schema;

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use metal_attention::scheduler::{Client, Constraint, Events};
use metal_attention_chat::RenderRequest;
use serde_json::Value;

use super::answer::{Out, Texts, stream};
use super::app::Loaded;
use super::body::Json;
use super::constraint::Grammar;
use super::usage::Usage;
use super::{ApiError, App, ids, now, prepare};
use request::{Calls, ChatFields, ChatRequest, ResponseFormat};
use response::{ChatChunks, ChatCompletion, ChatWriter};

/// Answers with the next message of a conversation.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "openai", request_body = ChatRequest, responses(
    (status = 200, description = "The messages, whole or as server-sent events",
        content((ChatCompletion = "application/json"), (String = "text/event-stream")))))]
pub async fn chat_completions(
    State(app): State<App>,
    client: Client,
    request: Json<ChatRequest>,
) -> Result<Response, ApiError> {
    let stream_wanted = request.shared.stream();
    let include_usage = request.shared.include_usage();
    let (events, mut writer) = prepare(&app, request, move |app, request| submit(app, client, request)).await?;
    let mut texts = Texts::new(app, events);
    let notes = writer.notes.clone();
    if stream_wanted {
        let mut before = Out::default();
        writer.begin(&mut before);
        return Ok(notes.attach(stream(texts, before, ChatChunks { writer, include_usage })));
    }
    let mut choices = writer.choices();
    while let Some((i, event)) = texts.next().await {
        for part in writer.take(i, event)? {
            choices[i].add(part);
        }
    }
    Ok(notes.attach(axum::Json(writer.answer(choices)).into_response()))
}

/// Submits the request's texts. Templates and tokens take time: not to be called on a thread that serves others.
fn submit(app: &App, client: Client, request: &ChatRequest) -> Result<(Vec<Events>, ChatWriter), ApiError> {
    let ChatRequest { own, shared } = request;
    let model = app.model_named(shared.model.as_deref())?;
    let n = shared.n()?;
    model.scheduler.check_texts(n as usize)?;
    let logprobs = own.top_logprobs()?.or(shared.n_probs()?);
    let calls = own.calls()?;
    if matches!(calls, Calls::OneOf { .. }) && !matches!(own.response_format, None | Some(ResponseFormat::Text)) {
        let message = "tool_choice demands a call, which response_format rules out";
        return Err(ApiError::field("tool_choice", message));
    }
    model.template.tool_format().check_tools(calls.tools()).map_err(|e| {
        let place = if e.is_argument { "parameters" } else { "name" };
        ApiError::field(format!("tools[{}].function.{place}", e.tool), e.to_string())
    })?;
    let rendered = model.template.render(&RenderRequest {
        messages: &own.messages,
        tools: calls.tools(),
        add_generation_prompt: true,
        variables: own.chat_template_kwargs.as_ref(),
        now: None,
    });
    let prompt = rendered.map_err(|e| ApiError::field("messages", e.to_string()))?;
    model.check_length(&prompt.text, "messages")?;
    let ids: Arc<[u32]> = prompt.encode(&model.tokenizer).into();
    let stop = shared.stop(model.template.stop_strings());
    let grammar = grammar(model, own, calls, &prompt.text)?;
    // An answer in a form of its own has no calls.
    let tools = if matches!(own.response_format, None | Some(ResponseFormat::Text)) { calls.tools() } else { &[] };
    let mut events = Vec::new();
    let mut replies = Vec::new();
    for choice in 0..n {
        let mut request = shared.request(app, model.n_vocab(), &ids, &stop, choice)?;
        request.client = client;
        request.logprobs = logprobs;
        request.constraint = grammar.clone().map(|grammar| Box::new(grammar) as Box<dyn Constraint>);
        events.push(model.scheduler.submit(request)?);
        replies.push(model.template.answer_parser(&prompt.text, tools));
    }
    let mut notes = shared.notes.clone();
    let writer = ChatWriter {
        id: ids::unique("chatcmpl-"),
        created: now(),
        model: app.answer_name(shared.model.as_deref(), &mut notes),
        tokenizer: Arc::clone(&model.tokenizer),
        replies,
        with_logprobs: logprobs.is_some(),
        usage: Usage::default(),
        prompt: Arc::clone(&ids),
        prompt_logprobs: shared.prompt_logprobs()?.map(|n_top| (n_top, None)),
        notes,
    };
    Ok((events, writer))
}

/// What the request says about the answer's form.
fn grammar(model: &Loaded, request: &ChatFields, calls: Calls<'_>, prompt: &str) -> Result<Option<Grammar>, ApiError> {
    let (param, grammar) = match (calls, request.response_format.as_ref()) {
        (Calls::OneOf { tools, parallel }, _) => {
            ("tools", model.grammars.calls(&model.template, prompt, tools, parallel))
        }
        (_, None | Some(ResponseFormat::Text)) => return Ok(None),
        (_, Some(ResponseFormat::JsonObject { schema: None })) => {
            ("response_format", model.grammars.json_object(&model.template, prompt))
        }
        (_, Some(ResponseFormat::JsonObject { schema: Some(schema) })) => (
            "response_format.schema",
            model.grammars.json_schema(&model.template, prompt, &Value::Object(schema.clone()), None),
        ),
        (_, Some(ResponseFormat::JsonSchema { json_schema })) => (
            "response_format.json_schema.schema",
            match &json_schema.schema {
                Some(schema) => model.grammars.json_schema(
                    &model.template,
                    prompt,
                    &Value::Object(schema.clone()),
                    json_schema.strict,
                ),
                None => model.grammars.json_object(&model.template, prompt),
            },
        ),
    };
    grammar.map(Some).map_err(|why| ApiError::field(param, format!("{param} cannot be followed: {why}")))
}
