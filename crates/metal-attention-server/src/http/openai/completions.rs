//! `/v1/completions`: continues a prompt.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use metal_attention::Constraint;
use metal_attention::scheduler::{Client, Event, Events, TokenLogprobs};
use metal_attention::tokenizer::{EncodeOptions, Tokenizer};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::ToSchema;

use super::chat::finish_reason;
use super::fields::GenerationFields;
use super::logprobs::{self, CompletionLogprobs, PromptLogprobs};
use super::unsupported::Endpoint;
use super::usage::Usage;
use crate::http::answer::{Chunks, Frames, Texts, stream};
use crate::http::body::{FromJson, Json, Object};
use crate::http::job::fill_in;
use crate::http::job::form::{self, AskedForm, FormFields};
use crate::http::job::generation::{Generation, MAX_TOP_LOGPROBS, check};
use crate::http::job::prompt::Prompt;
use crate::http::job::reply::EndReason;
use crate::http::job::sampling::SamplingFields;
use crate::http::models::{Loaded, ModelLease};
use crate::http::notes::Notes;
use crate::http::{ApiError, App, ids, now, openapi, prepare};

/// Tokens where a request does not say how many, as OpenAI has it.
const DEFAULT_MAX_TOKENS: usize = 16;

/// The fields of a completion that chats do not have.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct CompletionFields {
    /// The text to continue, or several.
    prompt: Prompt,
    /// Begin the answer with the prompt.
    echo: Option<bool>,
    /// Text after the completion, where the model can fill in the middle.
    suffix: Option<String>,
    /// The log probability of each token, and of so many of the likeliest.
    #[schema(minimum = 0, maximum = 20)]
    logprobs: Option<u32>,
}

/// A request to continue a prompt.
pub struct CompletionRequest {
    model: Option<String>,
    own: CompletionFields,
    form: Option<AskedForm>,
    generation: Generation,
    include_usage: bool,
    /// How the request was read.
    notes: Notes,
}

impl FromJson for CompletionRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        let (shared, mut notes) = GenerationFields::read(Endpoint::Completions, object)?;
        let sampling = SamplingFields::read(object, &mut notes)?;
        let own: CompletionFields = object.parse()?;
        let mut generation = shared.generation(sampling, Some(DEFAULT_MAX_TOKENS))?;
        if let Some(n) = own.logprobs {
            check("logprobs", n, 0..=MAX_TOP_LOGPROBS)?;
            generation.logprobs = Some(n as usize);
        }
        let form = form::read(object)?;
        Ok(Self { include_usage: shared.include_usage(), model: shared.model, own, form, generation, notes })
    }
}

openapi::all_of!(CompletionRequest, CompletionFields, FormFields, GenerationFields, SamplingFields);

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
    /// Log probabilities of the prompt, where they were asked for, by tokens' ids; null for its first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Vec<Option<PromptLogprobs>>>,
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
    let model = app.lease(request.model.as_deref()).await?;
    let (stream_wanted, include_usage) = (request.generation.stream, request.include_usage);
    let lease = model.clone();
    let (events, mut writer, mut notes) =
        prepare(&app, request, move |app, request| request.submit(app, &lease, client)).await?;
    writer.model = model.answer_name(&mut notes);
    let mut texts = Texts::new(app, model, events);
    if stream_wanted {
        let mut before = Frames::default();
        for (index, text) in writer.echo.iter().cloned().enumerate().filter(|(_, text)| !text.is_empty()) {
            let choice = CompletionChoice { index, text, ..Default::default() };
            before.data(&Completion { choices: vec![choice], ..writer.head() });
        }
        return Ok(notes.attach(stream(texts, before, CompletionChunks { writer, include_usage })));
    }
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
            choice.prompt_logprobs = part.prompt_logprobs.or(choice.prompt_logprobs.take());
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
    fn submit(
        &self,
        app: &App,
        model: &ModelLease,
        client: Client,
    ) -> Result<(Vec<Events>, CompletionWriter, Notes), ApiError> {
        let Self { own, form, generation, .. } = self;
        let mut notes = self.notes.clone();
        let echo = own.echo.unwrap_or(false);
        // What stands in the answer before the text has its log probabilities, too.
        let echoed_logprobs = generation.logprobs.filter(|_| echo);
        let prompts = own.prompts(model)?;
        model.scheduler.check_n_sequences(prompts.len().saturating_mul(generation.n as usize))?;
        let grammar = form::raw_grammar(model, form.as_ref(), &mut notes)?;
        let stop = generation.stop(model, &[]);
        let mut events = Vec::new();
        let mut echoes = Vec::new();
        for prompt in &prompts {
            for choice in 0..generation.n {
                let mut request = generation.request(app, model, client, prompt, &stop, choice)?;
                request.prompt_logprobs = generation.prompt_logprobs.max(echoed_logprobs);
                request.constraint = grammar.clone().map(|grammar| Box::new(grammar) as Box<dyn Constraint>);
                events.push(model.scheduler.submit(request)?);
                echoes.push(if echo { model.tokenizer.decode(prompt, false) } else { String::new() });
            }
        }
        let writer = CompletionWriter {
            id: ids::unique("cmpl-"),
            created: now(),
            model: String::new(),
            n: generation.n as usize,
            offsets: echoes.iter().map(|echo| echo.chars().count()).collect(),
            echo: echoes,
            prompts,
            prompt_logprobs: generation.prompt_logprobs,
            echoed_logprobs,
            tokenizer: Arc::clone(&model.tokenizer),
            usage: Usage::default(),
        };
        Ok((events, writer, notes))
    }
}

impl CompletionFields {
    /// The token ids of each prompt, that ask for what is before the suffix where there is one.
    fn prompts(&self, model: &Loaded) -> Result<Vec<Arc<[u32]>>, ApiError> {
        let Some(suffix) = self.suffix.as_ref().filter(|suffix| !suffix.is_empty()) else {
            return self.prompt.encode(model, "prompt");
        };
        let tokens = fill_in::tokens(model)?;
        let after = fill_in::encode(model, suffix, "suffix")?;
        let options = EncodeOptions { add_special: false, parse_special: true };
        let prompts = self.prompt.encode_with(model, "prompt", options)?;
        Ok(prompts.iter().map(|before| fill_in::prompt(model, tokens, &[], before, &after).into()).collect())
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
    /// The token ids of each prompt.
    prompts: Vec<Arc<[u32]>>,
    /// So many of the likeliest tokens at each place of the prompt are told by their ids.
    prompt_logprobs: Option<usize>,
    /// So many of the likeliest tokens at each place of the prompt are told as those of the text are.
    echoed_logprobs: Option<usize>,
    tokenizer: Arc<Tokenizer>,
    usage: Usage,
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

    /// The log probabilities of token `id` of text `i`.
    fn logprobs_of(&mut self, i: usize, id: u32, logprobs: &TokenLogprobs) -> CompletionLogprobs {
        let mut list = CompletionLogprobs::default();
        self.offsets[i] = list.push(&self.tokenizer, id, logprobs, self.offsets[i]);
        list
    }

    /// What an event adds to its text; `None` where that is nothing.
    fn take(&mut self, i: usize, event: Event) -> Result<Option<CompletionChoice>, ApiError> {
        match event {
            Event::Prompt(logprobs) => {
                let (tokenizer, prompt) = (&self.tokenizer, &self.prompts[i / self.n]);
                let echoed = |n| CompletionLogprobs::of_prompt(tokenizer, prompt, &logprobs, n);
                let by_id = |n| logprobs::of_prompt(tokenizer, prompt, &logprobs, n);
                Ok(Some(CompletionChoice {
                    index: i,
                    logprobs: self.echoed_logprobs.map(echoed),
                    prompt_logprobs: self.prompt_logprobs.map(by_id),
                    ..Default::default()
                }))
            }
            Event::Token { id, text, logprobs } => {
                let logprobs = logprobs.map(|logprobs| self.logprobs_of(i, id, &logprobs));
                let some = !text.is_empty() || logprobs.is_some();
                Ok(some.then_some(CompletionChoice { index: i, text, logprobs, ..Default::default() }))
            }
            Event::Done { reason, text, stop_string, usage, end_token, end_logprobs, timings: _ } => {
                self.usage.add(usage, i.is_multiple_of(self.n));
                let finish_reason = Some(finish_reason(&EndReason::of_text(reason, stop_string)?));
                // Who reads the prompt's log probabilities counts on those of each token that was asked for.
                let end = end_token.zip(end_logprobs).filter(|_| self.echoed_logprobs.is_some());
                let logprobs = end.map(|(id, logprobs)| self.logprobs_of(i, id, &logprobs));
                Ok(Some(CompletionChoice { index: i, text, logprobs, finish_reason, ..Default::default() }))
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
    fn event(&mut self, i: usize, event: Event, out: &mut Frames) -> Result<(), ApiError> {
        if let Some(part) = self.writer.take(i, event)? {
            out.data(&Completion { choices: vec![part], ..self.writer.head() });
        }
        Ok(())
    }

    fn end(&mut self, out: &mut Frames) {
        if self.include_usage {
            out.data(&Completion { usage: Some(self.writer.usage), ..self.writer.head() });
        }
        out.done();
    }

    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        out.data(&error.body());
        out.done();
    }
}
