//! `/v1/chat/completions`: the next message of a conversation.

mod guide;
mod request;
mod response;
mod schema;
mod thinking;
mod tool_choice;

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use metal_attention::scheduler::{Client, Constraint, Events};
use metal_attention::tokenizer::Tokenizer;
use metal_attention_chat::{Continuation, Message, RenderRequest};
use serde_json::Value;

use super::answer::{Out, Texts, stream};
use super::app::Loaded;
use super::body::Json;
use super::constraint::Grammar;
use super::notes::Notes;
use super::usage::Usage;
use super::{ApiError, App, ids, now, prepare};
use guide::{Guide, Wanted, tokens_within};
use request::{ChatFields, ChatRequest, PromptEnd, ResponseFormat};
use response::{ChatChunks, ChatCompletion, ChatWriter, Reply};
use thinking::ThinkingWish;
use tool_choice::Calls;

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
    let ChatRequest { own, shared, .. } = request;
    let model = app.model_named(shared.model.as_deref())?;
    let n = shared.n()?;
    model.scheduler.check_texts(n as usize)?;
    let logprobs = own.top_logprobs()?.or(shared.n_probs()?);
    let calls = own.calls()?;
    let is_text = matches!(own.response_format, None | Some(ResponseFormat::Text));
    if calls.required && !is_text {
        let message = "tool_choice demands a call, which response_format rules out";
        return Err(ApiError::field("tool_choice", message));
    }
    model.template.tool_format().check_tools(&calls.tools).map_err(|e| {
        let place = if e.is_argument { "parameters" } else { "name" };
        ApiError::field(format!("tools[{}].function.{place}", e.tool), e.to_string())
    })?;
    let mut notes = shared.notes.clone();
    let wish = request.thinking.wish(&model.template, own.chat_template_kwargs.as_ref(), &mut notes)?;
    let end = own.prompt_end(request.prefix)?;
    let continuation = continuation(model, own, &calls, &wish, end)?;
    let prompt = &continuation.prompt;
    model.check_length(&prompt.text, "messages")?;
    let ids: Arc<[u32]> = prompt.encode(&model.tokenizer).into();
    let stop = shared.stop(model.template.stop_strings());
    // An answer in a form of its own has no calls.
    let tools = if is_text { calls.tools.as_slice() } else { &[] };
    let parser = || model.template.continued_parser(&continuation, tools);
    let mut grammar = grammar(model, own, &calls, &continuation, parser().is_thinking(), &mut notes)?;
    if let (Some(grammar), PromptEnd::WithinMessage, false) = (&mut grammar, end, is_text || parser().is_thinking()) {
        follow(grammar, &model.tokenizer, own.messages.last().map_or("", Message::text))?;
    }
    let has_thought = model.template.reasoning().is_some_and(|markers| markers.ended_in(&prompt.text));
    let may_think = end == PromptEnd::Answer && !has_thought;
    let mut events = Vec::new();
    let mut replies = Vec::new();
    for choice in 0..n {
        let mut request = shared.request(app, model.n_vocab(), &ids, &stop, choice)?;
        request.client = client;
        request.logprobs = logprobs;
        let wanted = Wanted {
            template: &model.template,
            parser: parser(),
            grammar: grammar.clone(),
            budget: wish.budget,
            single_call: !calls.parallel && !tools.is_empty(),
            has_tools: !tools.is_empty(),
            may_think,
        };
        let guide = Guide::new(&model.tokenizer, wanted);
        request.constraint = guide.map(|guide| Box::new(guide) as Box<dyn Constraint>);
        events.push(model.scheduler.submit(request)?);
        replies.push(Reply::new(parser(), !calls.parallel));
    }
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

/// The prompt, and where the answer begins in it.
fn continuation(
    model: &Loaded,
    own: &ChatFields,
    calls: &Calls,
    wish: &ThinkingWish,
    end: PromptEnd,
) -> Result<Continuation, ApiError> {
    let request = RenderRequest {
        messages: &own.messages,
        tools: &calls.tools,
        add_generation_prompt: end != PromptEnd::Message,
        variables: Some(&wish.variables),
        now: None,
    };
    let rendered = match end {
        PromptEnd::WithinMessage => model.template.render_continued(&request),
        PromptEnd::Answer | PromptEnd::Message => {
            model.template.render(&request).map(|prompt| Continuation { begin: prompt.text.len(), prompt })
        }
    };
    rendered.map_err(|e| ApiError::field("messages", e.to_string()))
}

/// Has the grammar read the beginning of the answer that the prompt has already.
fn follow(grammar: &mut Grammar, tokenizer: &Tokenizer, text: &str) -> Result<(), ApiError> {
    let ids = tokens_within(tokenizer, text.trim_start(), false);
    ids.into_iter().try_for_each(|id| grammar.accept(id)).map_err(|_| {
        let message =
            "the last message, which the answer goes on with, is no beginning of what response_format demands";
        ApiError::field("messages", message)
    })
}

/// What the request says about the answer's form. `thinking`: the prompt ends in thoughts.
fn grammar(
    model: &Loaded,
    request: &ChatFields,
    calls: &Calls,
    continuation: &Continuation,
    thinking: bool,
    notes: &mut Notes,
) -> Result<Option<Grammar>, ApiError> {
    let mut left_out = Vec::new();
    // A prompt that ends in thoughts which have begun before is to the grammar as one that begins them.
    let prompt = match model.template.reasoning() {
        Some(markers) if thinking => markers.start,
        Some(_) | None => &continuation.prompt.text,
    };
    let (param, grammar) = match request.response_format.as_ref() {
        None | Some(ResponseFormat::Text) if calls.required => {
            ("tools", model.grammars.calls(&model.template, prompt, &calls.tools, calls.parallel, &mut left_out))
        }
        None | Some(ResponseFormat::Text) => return Ok(None),
        Some(ResponseFormat::JsonObject { schema: None }) => {
            ("response_format", model.grammars.json_object(&model.template, prompt))
        }
        Some(ResponseFormat::JsonObject { schema: Some(schema) }) => (
            "response_format.schema",
            model.grammars.json_schema(&model.template, prompt, &Value::Object(schema.clone()), None, &mut left_out),
        ),
        Some(ResponseFormat::JsonSchema { json_schema }) => (
            "response_format.json_schema.schema",
            match &json_schema.schema {
                Some(schema) => model.grammars.json_schema(
                    &model.template,
                    prompt,
                    &Value::Object(schema.clone()),
                    json_schema.strict,
                    &mut left_out,
                ),
                None => model.grammars.json_object(&model.template, prompt),
            },
        ),
    };
    for place in left_out {
        notes.schema_unsupported(place);
    }
    grammar.map(Some).map_err(|why| ApiError::field(param, format!("{param} cannot be followed: {why}")))
}
