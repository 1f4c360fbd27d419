//! `/v1/completions`: continues prompts, `n` times each.
//!
//! The sequences of a request are numbered by prompt first: sequence `i` continues prompt `i / n`.

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
use crate::http::body::{FromJson, Json, Object};
use crate::http::job::choice_parser::EndReason;
use crate::http::job::fill_in;
use crate::http::job::generation::{GenerationSettings, MAX_TOP_LOGPROBS, check};
use crate::http::job::prompt::PromptInput;
use crate::http::job::response_format::{self, RequestedFormat, ResponseFormatFields};
use crate::http::job::sampling::SamplingFields;
use crate::http::models::{LoadedModel, ModelLease};
use crate::http::notes::Notes;
use crate::http::streaming::{ChunkWriter, Frames, RunningSequences, stream};
use crate::http::{ApiError, App, ids, now, openapi, prepare};

/// Maximum generated tokens where a request sets none, as in OpenAI's interface.
const DEFAULT_MAX_TOKENS: usize = 16;

/// The fields that chats do not have.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct CompletionFields {
    /// The text or texts to continue.
    prompt: PromptInput,
    /// Start each answer with its prompt.
    echo: Option<bool>,
    /// The text after the completion, for models that can fill in the middle.
    suffix: Option<String>,
    /// Report the log probability of each token and of this many most likely ones.
    #[schema(minimum = 0, maximum = 20)]
    logprobs: Option<u32>,
}

/// A request to continue prompts.
pub struct CompletionRequest {
    /// The name of the model; `None`: the default one.
    model: Option<String>,
    /// The fields that chats do not have.
    fields: CompletionFields,
    /// The response format of the texts.
    response_format: Option<RequestedFormat>,
    /// The settings of generation.
    generation: GenerationSettings,
    /// Whether a stream ends with the number of tokens.
    include_usage: bool,
    /// Notes for response headers.
    notes: Notes,
}

impl FromJson for CompletionRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        let (shared, mut notes) = GenerationFields::read(Endpoint::Completions, object)?;
        let sampling = SamplingFields::read(object, &mut notes)?;
        let fields: CompletionFields = object.parse()?;
        let mut generation = shared.generation(sampling, Some(DEFAULT_MAX_TOKENS))?;
        if let Some(n) = fields.logprobs {
            check("logprobs", n, 0..=MAX_TOP_LOGPROBS)?;
            generation.logprobs = Some(n as usize);
        }
        let response_format = response_format::read(object)?;
        Ok(Self {
            include_usage: shared.include_usage(),
            model: shared.model,
            fields,
            response_format,
            generation,
            notes,
        })
    }
}

openapi::all_of!(CompletionRequest, CompletionFields, ResponseFormatFields, GenerationFields, SamplingFields);

/// The response, or a chunk of it.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Completion {
    /// The id of the response.
    id: String,
    /// `text_completion`.
    object: &'static str,
    /// When the request arrived, in seconds since 1970.
    created: u64,
    /// The model that answered.
    model: String,
    /// The completions.
    choices: Vec<CompletionChoice>,
    /// Tokens of the request; in a stream, in the last chunk if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    usage: Option<Usage>,
}

/// One of the completions.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
struct CompletionChoice {
    /// Its index: `n` for each prompt, in order.
    index: usize,
    /// The text, or the part that a chunk adds.
    text: String,
    /// Log probabilities, if requested.
    #[schema(required)]
    logprobs: Option<CompletionLogprobs>,
    /// Log probabilities of the prompt, if requested, by token ids; null for its first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Vec<Option<PromptLogprobs>>>,
    /// The reason why it ended: `stop` or `length`; null before its end.
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
    let mut sequences = RunningSequences::new(app, model, events);
    if stream_wanted {
        let mut first_frames = Frames::default();
        for (index, text) in writer.echo.iter().cloned().enumerate().filter(|(_, text)| !text.is_empty()) {
            let choice = CompletionChoice { index, text, ..Default::default() };
            first_frames.data(&Completion { choices: vec![choice], ..writer.head() });
        }
        return Ok(notes.attach(stream(sequences, first_frames, CompletionChunks { writer, include_usage })));
    }
    let mut choices: Vec<CompletionChoice> = writer
        .echo
        .iter()
        .enumerate()
        .map(|(index, echo)| CompletionChoice { index, text: echo.clone(), ..Default::default() })
        .collect();
    while let Some((i, event)) = sequences.next().await {
        if let Some(part) = writer.parse(i, event)? {
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
    /// Submits all sequences. Tokenisation is CPU-bound: call it on a blocking thread. If one cannot be submitted,
    /// those before it are cancelled.
    fn submit(
        &self,
        app: &App,
        model: &ModelLease,
        client: Client,
    ) -> Result<(Vec<Events>, CompletionWriter, Notes), ApiError> {
        let Self { fields, response_format, generation, .. } = self;
        let mut notes = self.notes.clone();
        let echo = fields.echo.unwrap_or(false);
        // The echoed prompt has log probabilities, too.
        let echoed_logprobs = generation.logprobs.filter(|_| echo);
        let prompts = fields.prompts(model)?;
        model.scheduler.check_n_sequences(prompts.len().saturating_mul(generation.n as usize))?;
        let grammar = response_format::raw_grammar(model, response_format.as_ref(), &mut notes)?;
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
    /// Returns the token ids of each prompt; with a suffix, as a fill-in-the-middle prompt.
    fn prompts(&self, model: &LoadedModel) -> Result<Vec<Arc<[u32]>>, ApiError> {
        let Some(suffix) = self.suffix.as_ref().filter(|suffix| !suffix.is_empty()) else {
            return self.prompt.encode(model, "prompt");
        };
        let tokens = fill_in::tokens(model)?;
        let after = fill_in::encode(model, suffix, "suffix")?;
        let options = EncodeOptions { add_special: false, parse_special: true };
        let prompts = self.prompt.encode_with(model, "prompt", options)?;
        Ok(prompts.iter().map(|prefix| fill_in::prompt(model, tokens, &[], prefix, &after).into()).collect())
    }
}

/// Writes OpenAI's objects from events.
struct CompletionWriter {
    /// The id of the response.
    id: String,
    /// When the request arrived, in seconds since 1970.
    created: u64,
    /// The name of the model in the response.
    model: String,
    /// Sequences of each prompt.
    n: usize,
    /// By sequence: the echoed prompt, or an empty string.
    echo: Vec<String>,
    /// By sequence: the number of characters so far, counted by tokens.
    offsets: Vec<usize>,
    /// The token ids of each prompt.
    prompts: Vec<Arc<[u32]>>,
    /// The number of most likely tokens to report at each position of the prompt by their ids; `None`: none.
    prompt_logprobs: Option<usize>,
    /// The number of most likely tokens to report at each position of the echoed prompt, in the form of those of the
    /// text; `None`: none.
    echoed_logprobs: Option<usize>,
    /// The model's tokenizer, for the texts of tokens.
    tokenizer: Arc<Tokenizer>,
    /// Tokens of the sequences that have ended.
    usage: Usage,
}

impl CompletionWriter {
    /// The response without choices.
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

    /// The log probabilities of token `id` of sequence `i`, at its offset.
    fn logprobs_of(&mut self, i: usize, id: u32, logprobs: &TokenLogprobs) -> CompletionLogprobs {
        let mut list = CompletionLogprobs::default();
        self.offsets[i] = list.push(&self.tokenizer, id, logprobs, self.offsets[i]);
        list
    }

    /// Returns what an event adds to its sequence; `None`: nothing.
    fn parse(&mut self, i: usize, event: Event) -> Result<Option<CompletionChoice>, ApiError> {
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
                let finish_reason = Some(finish_reason(&EndReason::of_sequence(reason, stop_string)?));
                // Clients that request the prompt's log probabilities expect an entry for every requested token, also
                // for the one that ended the text.
                let end = end_token.zip(end_logprobs).filter(|_| self.echoed_logprobs.is_some());
                let logprobs = end.map(|(id, logprobs)| self.logprobs_of(i, id, &logprobs));
                Ok(Some(CompletionChoice { index: i, text, logprobs, finish_reason, ..Default::default() }))
            }
            Event::Failed(error) => Err(error.into()),
        }
    }
}

/// Writes a completion as a stream.
struct CompletionChunks {
    /// Makes the chunks.
    writer: CompletionWriter,
    /// Whether the stream ends with the number of tokens.
    include_usage: bool,
}

impl ChunkWriter for CompletionChunks {
    fn event(&mut self, i: usize, event: Event, out: &mut Frames) -> Result<(), ApiError> {
        if let Some(part) = self.writer.parse(i, event)? {
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
