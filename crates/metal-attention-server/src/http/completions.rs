//! `/v1/completions`: continues a prompt.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use metal_attention::scheduler::{Client, Event, Events};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::ToSchema;

use super::answer::{Chunks, Out, Texts, finish_reason, stream};
use super::body::{FromJson, Json, parse};
use super::fields::{GenerationFields, check};
use super::logprobs::{CompletionLogprobs, MAX_TOP_LOGPROBS};
use super::notes::Notes;
use super::prompt::Prompt;
use super::unsupported::{self, Endpoint};
use super::usage::Usage;
use super::{ApiError, App, ids, prepare};
use metal_attention::tokenizer::Tokenizer;

/// Tokens where a request does not say how many, as OpenAI has it.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// What a completion may ask for besides what it shares with chats.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct CompletionFields {
    /// The text to continue, or several.
    prompt: Prompt,
    /// Begin the answer with the prompt.
    echo: Option<bool>,
    /// Text after the completion: not supported, leave it out.
    #[schema(value_type = Option<String>, max_length = 0)]
    suffix: Option<String>,
    /// The log probability of each token, and of so many of the likeliest.
    #[schema(minimum = 0, maximum = 20)]
    logprobs: Option<u32>,
}

/// A request to continue a prompt.
pub struct CompletionRequest {
    own: CompletionFields,
    shared: GenerationFields,
}

impl FromJson for CompletionRequest {
    fn from_json(json: &[u8]) -> Result<Self, ApiError> {
        unsupported::check(Endpoint::Completions, json)?;
        Ok(Self { own: parse(json)?, shared: parse(json)? })
    }
}

super::openapi::all_of!(CompletionRequest, CompletionFields, GenerationFields);

/// The answer, or a part of it where it is streamed.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Completion {
    /// The answer's name.
    id: String,
    /// `text_completion`.
    object: &'static str,
    /// When the request came, in seconds since 1970.
    created: u64,
    /// The model that answered.
    model: String,
    /// The texts.
    choices: Vec<CompletionChoice>,
    /// Tokens it took; in a stream, in the last event where it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    usage: Option<Usage>,
}

/// One of the texts.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
struct CompletionChoice {
    /// Its number: `n` for each prompt, in order.
    index: usize,
    /// The text, or what is new of it.
    text: String,
    /// Log probabilities, where they were asked for.
    #[schema(required)]
    logprobs: Option<CompletionLogprobs>,
    /// Why the text ended: `stop` or `length`; null while it goes on.
    #[schema(required)]
    finish_reason: Option<&'static str>,
}

/// Continues a prompt.
#[utoipa::path(post, path = "/v1/completions", tag = "openai", request_body = CompletionRequest, responses(
    (status = 200, description = "The texts, whole or as server-sent events",
        content((Completion = "application/json"), (String = "text/event-stream")))))]
pub async fn completions(
    State(app): State<App>,
    client: Client,
    request: Json<CompletionRequest>,
) -> Result<Response, ApiError> {
    let stream_wanted = request.shared.stream();
    let include_usage = request.shared.include_usage();
    let (events, writer) = prepare(&app, request, move |app, request| request.submit(app, client)).await?;
    let mut texts = Texts::new(app, events);
    let notes = writer.notes.clone();
    if stream_wanted {
        let mut before = Out::default();
        for (index, text) in writer.echo.iter().cloned().enumerate().filter(|(_, text)| !text.is_empty()) {
            let choice = CompletionChoice { index, text, ..Default::default() };
            before.push(&Completion { choices: vec![choice], ..writer.head() });
        }
        return Ok(notes.attach(stream(texts, before, CompletionChunks { writer, include_usage })));
    }
    let mut writer = writer;
    let mut choices: Vec<CompletionChoice> = writer
        .echo
        .iter()
        .enumerate()
        .map(|(index, echo)| CompletionChoice { index, text: echo.clone(), ..Default::default() })
        .collect();
    while let Some((i, event)) = texts.next().await {
        if let Some(part) = writer.take(i, event)? {
            let choice = &mut choices[i];
            choice.text += &part.text;
            choice.finish_reason = part.finish_reason.or(choice.finish_reason);
            match (&mut choice.logprobs, part.logprobs) {
                (Some(all), Some(new)) => all.append(new),
                (all, new) => *all = all.take().or(new),
            }
        }
    }
    let answer = Completion { choices, usage: Some(writer.usage), ..writer.head() };
    Ok(notes.attach(axum::Json(answer).into_response()))
}

impl CompletionRequest {
    /// Submits the request's texts. Tokenising takes time: not to be called on a thread that serves others.
    fn submit(&self, app: &App, client: Client) -> Result<(Vec<Events>, CompletionWriter), ApiError> {
        let Self { own, shared } = self;
        let model = app.model_named(shared.model.as_deref())?;
        if own.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::field("suffix", "suffix is not supported: put what comes after into the prompt"));
        }
        let echo = own.echo.unwrap_or(false);
        if let Some(n) = own.logprobs {
            check("logprobs", n, 0..=MAX_TOP_LOGPROBS)?;
            if echo {
                let message = "logprobs of the prompt are not supported: leave out echo or logprobs";
                return Err(ApiError::field("logprobs", message));
            }
        }
        let n = shared.n()?;
        let prompts = own.prompt.encode(model, "prompt")?;
        model.scheduler.check_texts(prompts.len().saturating_mul(n as usize))?;
        let stop = shared.stop(&[]);
        let mut events = Vec::new();
        let mut echoes = Vec::new();
        for prompt in &prompts {
            for choice in 0..n {
                let mut request = shared.request(app, model.n_vocab(), prompt, &stop, choice)?;
                request.client = client;
                request.max_tokens = Some(shared.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS) as usize);
                request.logprobs = own.logprobs.map(|n| n as usize);
                events.push(model.scheduler.submit(request)?);
                echoes.push(if echo { model.tokenizer.decode(prompt, false) } else { String::new() });
            }
        }
        let mut notes = Notes::default();
        let writer = CompletionWriter {
            id: ids::unique("cmpl-"),
            created: super::now(),
            model: app.answer_name(shared.model.as_deref(), &mut notes),
            n: n as usize,
            offsets: vec![0; events.len()],
            echo: echoes,
            tokenizer: Arc::clone(&model.tokenizer),
            usage: Usage::default(),
            notes,
        };
        Ok((events, writer))
    }
}

/// Makes OpenAI's objects of events.
struct CompletionWriter {
    id: String,
    created: u64,
    model: String,
    /// Texts for each prompt.
    n: usize,
    /// What each text begins with.
    echo: Vec<String>,
    /// Characters of each text so far, by its tokens.
    offsets: Vec<usize>,
    tokenizer: Arc<Tokenizer>,
    usage: Usage,
    /// How the request was read.
    notes: Notes,
}

impl CompletionWriter {
    /// The answer without texts.
    fn head(&self) -> Completion {
        Completion {
            id: self.id.clone(),
            object: "text_completion",
            created: self.created,
            model: self.model.clone(),
            choices: Vec::new(),
            usage: None,
        }
    }

    /// What an event adds to its text; `None` where that is nothing.
    fn take(&mut self, i: usize, event: Event) -> Result<Option<CompletionChoice>, ApiError> {
        match event {
            Event::Token { id, text, logprobs } => {
                let logprobs = logprobs.map(|logprobs| {
                    let mut list = CompletionLogprobs::default();
                    self.offsets[i] = list.push(&self.tokenizer, id, &logprobs, self.offsets[i]);
                    list
                });
                let some = !text.is_empty() || logprobs.is_some();
                Ok(some.then_some(CompletionChoice { index: i, text, logprobs, finish_reason: None }))
            }
            Event::Done { reason, text, usage, .. } => {
                self.usage.add(usage, i.is_multiple_of(self.n));
                let finish_reason = Some(finish_reason(reason)?);
                Ok(Some(CompletionChoice { index: i, text, logprobs: None, finish_reason }))
            }
            Event::Failed(error) => Err(error.into()),
        }
    }
}

/// A completion as a stream.
struct CompletionChunks {
    writer: CompletionWriter,
    include_usage: bool,
}

impl Chunks for CompletionChunks {
    fn event(&mut self, i: usize, event: Event, out: &mut Out) -> Result<(), ApiError> {
        if let Some(part) = self.writer.take(i, event)? {
            out.push(&Completion { choices: vec![part], ..self.writer.head() });
        }
        Ok(())
    }

    fn end(&mut self, out: &mut Out) {
        if self.include_usage {
            out.push(&Completion { usage: Some(self.writer.usage), ..self.writer.head() });
        }
    }
}
