//! `/infill`: what is between two texts, as llama.cpp has it, for editors.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use metal_attention::scheduler::{Client, Event, Events, RequestTimings};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::http::answer::{Chunks, Frames, Texts, stream};
use crate::http::body::{FromJson, Json, Object};
use crate::http::job::fill_in;
use crate::http::job::generation::Generation;
use crate::http::job::reply::EndReason;
use crate::http::job::sampling::SamplingFields;
use crate::http::models::{Loaded, ModelLease};
use crate::http::notes::Notes;
use crate::http::openai::fields::GenerationFields;
use crate::http::openai::unsupported::Endpoint;
use crate::http::{ApiError, App, openapi, prepare};

/// What `/infill` reads besides what it shares with completions.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct InfillFields {
    /// The text before the gap.
    input_prefix: String,
    /// The text after it.
    input_suffix: String,
    /// The beginning of what is in the gap, which is not part of the answer.
    prompt: Option<String>,
    /// Other texts that are of use, the most important last.
    input_extra: Option<Vec<Extra>>,
}

/// A text that is of use.
#[derive(Debug, Clone, Deserialize, ToSchema)]
struct Extra {
    /// The name of its file.
    filename: Option<String>,
    /// The text.
    text: String,
}

/// A request for what is between two texts.
pub struct InfillRequest {
    model: Option<String>,
    own: InfillFields,
    generation: Generation,
    /// How the request was read.
    notes: Notes,
}

impl FromJson for InfillRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        let (shared, mut notes) = GenerationFields::read(Endpoint::Infill, object)?;
        let sampling: SamplingFields = object.parse()?;
        sampling.note(&mut notes);
        let generation = shared.generation(sampling, None)?;
        if generation.n > 1 {
            return Err(ApiError::field("n", "n is more than 1, but /infill gives one text: use /v1/completions"));
        }
        Ok(Self { model: shared.model, own: object.parse()?, generation, notes })
    }
}

openapi::all_of!(InfillRequest, InfillFields, GenerationFields, SamplingFields);

/// The answer, or a part of it where it is streamed.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub struct Infill {
    /// 0.
    index: usize,
    /// The text, or what is new of it.
    content: String,
    /// Whether the text is finished.
    stop: bool,
    /// More, at the end.
    #[serde(flatten)]
    end: Option<InfillEnd>,
}

/// What is known at the end of a text.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct InfillEnd {
    /// The model that answered.
    model: String,
    /// Why the text ended: `eos`, `word` for a stop string, or `limit`.
    stop_type: &'static str,
    /// Whether the prompt was cut to what the context holds.
    truncated: bool,
    /// Tokens that were generated.
    tokens_predicted: usize,
    /// Tokens of the prompt.
    tokens_evaluated: usize,
    /// Those of them that were in the KV cache already.
    tokens_cached: usize,
    /// The time it took.
    timings: Timings,
}

/// The time that an answer took.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct Timings {
    /// Tokens of the prompt that were evaluated.
    prompt_n: usize,
    /// Milliseconds from the start of the prompt to the first token.
    prompt_ms: f64,
    /// Tokens that were generated.
    predicted_n: usize,
    /// Milliseconds from the first token to the end.
    predicted_ms: f64,
}

/// Fills the gap between two texts.
#[utoipa::path(post, path = "/infill", tag = "llama.cpp", request_body = InfillRequest, responses(
    (status = 200, description = "The text, whole or as server-sent events",
        content((Infill = "application/json"), (String = "text/event-stream")))))]
pub async fn infill(
    State(app): State<App>,
    client: Client,
    request: Json<InfillRequest>,
) -> Result<Response, ApiError> {
    let model = app.lease(request.model.as_deref()).await?;
    let stream_wanted = request.generation.stream;
    let mut notes = request.notes.clone();
    let name = model.answer_name(&mut notes);
    let lease = model.clone();
    let (events, truncated) = prepare(&app, request, move |app, request| request.submit(app, &lease, client)).await?;
    let writer = InfillWriter { model: name, truncated };
    let mut texts = Texts::new(app, model, vec![events]);
    if stream_wanted {
        return Ok(notes.attach(stream(texts, Frames::default(), writer)));
    }
    let mut answer = Infill::default();
    while let Some((_, event)) = texts.next().await {
        let part = writer.take(event)?;
        answer = Infill { content: answer.content + &part.content, ..part };
    }
    Ok(notes.attach(axum::Json(answer).into_response()))
}

impl InfillRequest {
    /// Submits the request's text. Returns whether the prompt was cut, too. Tokenising takes time: not to be called on a
    /// thread that serves others.
    fn submit(&self, app: &App, model: &ModelLease, client: Client) -> Result<(Events, bool), ApiError> {
        let generation = &self.generation;
        let (prompt, truncated) = self.own.prompt(model, generation.max_tokens)?;
        let request = generation.request(app, model, client, &prompt.into(), &generation.stop(model, &[]), 0)?;
        Ok((model.scheduler.submit(request)?, truncated))
    }
}

impl InfillFields {
    /// The prompt's token ids, and whether something was cut off so that the answer's `max_tokens` have room, or half of the
    /// context.
    fn prompt(&self, model: &Loaded, max_tokens: Option<usize>) -> Result<(Vec<u32>, bool), ApiError> {
        /// BOS and the three marks.
        const MARKS: usize = 4;
        let tokens = fill_in::tokens(model)?;
        let mut before = fill_in::encode(model, &self.input_prefix, "input_prefix")?;
        before.extend(fill_in::encode(model, self.prompt.as_deref().unwrap_or_default(), "prompt")?);
        let mut after = fill_in::encode(model, &self.input_suffix, "input_suffix")?;
        let mut context = Vec::new();
        for Extra { filename, text } in self.input_extra.iter().flatten() {
            match tokens.file {
                Some(file) => {
                    let name = format!("{}\n", filename.as_deref().unwrap_or("tmp"));
                    context.push(file);
                    context.extend(fill_in::encode(model, &name, "input_extra")?);
                }
                None => context.extend(fill_in::encode(model, "\n\n--- snippet ---\n\n", "input_extra")?),
            }
            context.extend(fill_in::encode(model, text, "input_extra")?);
        }
        if let Some(file) = tokens.file.filter(|_| !context.is_empty()) {
            context.push(file);
            context.extend(fill_in::encode(model, "filename\n", "input_extra")?);
        }
        let all = before.len() + after.len() + context.len();
        let answer = max_tokens.unwrap_or(usize::MAX).min(model.n_ctx / 2);
        let room = model.n_ctx.saturating_sub(answer + MARKS);
        let left = fill_in::fit(&mut before, &mut after, room);
        context.drain(..context.len().saturating_sub(left));
        let truncated = before.len() + after.len() + context.len() < all;
        Ok((fill_in::prompt(model, tokens, &context, &before, &after), truncated))
    }
}

/// Makes llama.cpp's objects of events.
struct InfillWriter {
    model: String,
    truncated: bool,
}

impl InfillWriter {
    /// What an event adds.
    fn take(&self, event: Event) -> Result<Infill, ApiError> {
        match event {
            Event::Prompt(_) => Ok(Infill::default()),
            Event::Token { text, .. } => Ok(Infill { content: text, ..Default::default() }),
            Event::Done { reason, text, stop_string, usage, timings, end_token: _, end_logprobs: _ } => {
                let end = InfillEnd {
                    model: self.model.clone(),
                    stop_type: stop_type(&EndReason::of_text(reason, stop_string)?),
                    truncated: self.truncated,
                    tokens_predicted: usage.generated_tokens,
                    tokens_evaluated: usage.prompt_tokens,
                    tokens_cached: usage.cached_tokens,
                    timings: self::timings(usage, timings),
                };
                Ok(Infill { index: 0, content: text, stop: true, end: Some(end) })
            }
            Event::Failed(error) => Err(error.into()),
        }
    }
}

impl Chunks for InfillWriter {
    fn event(&mut self, _: usize, event: Event, out: &mut Frames) -> Result<(), ApiError> {
        let part = self.take(event)?;
        if part.stop || !part.content.is_empty() {
            out.data(&part);
        }
        Ok(())
    }

    fn end(&mut self, _: &mut Frames) {}

    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        out.data(&error.body());
    }
}

fn timings(usage: metal_attention::scheduler::Usage, timings: RequestTimings) -> Timings {
    Timings {
        prompt_n: usage.prompt_tokens - usage.cached_tokens,
        prompt_ms: timings.prefill.as_secs_f64() * 1e3,
        predicted_n: usage.generated_tokens,
        predicted_ms: timings.decode.as_secs_f64() * 1e3,
    }
}

/// llama.cpp's name for why a text ended.
fn stop_type(reason: &EndReason) -> &'static str {
    match reason {
        EndReason::End | EndReason::Calls => "eos",
        EndReason::StopString(_) => "word",
        EndReason::Length => "limit",
    }
}
