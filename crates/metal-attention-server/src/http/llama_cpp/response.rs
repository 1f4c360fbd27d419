//! The response of `/completion` and `/infill`, whole or as a stream.

use std::sync::Arc;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use metal_attention::scheduler::{Event, RequestTimings, TokenLogprobs, Usage};
use metal_attention::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::openapi::schema::{AnyOfBuilder, ArrayBuilder, Object, Schema};
use utoipa::openapi::{Ref, RefOr};
use utoipa::{PartialSchema, ToSchema};

use super::error::ErrorBody;
use super::request::{AnswerOptions, SubmittedCompletion};
use crate::http::job::choice_parser::EndReason;
use crate::http::models::ModelLease;
use crate::http::openai::logprobs::{finite, spelling};
use crate::http::streaming::{ChunkWriter, Frames, RunningSequences, stream};
use crate::http::{ApiError, App};

/// A completion, or the part of it that an event adds.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
#[schema(as = LlamaCppCompletion)]
pub struct CompletionObject {
    /// Its index: `n` for each prompt, in order.
    index: usize,
    /// The text, or the new part of it.
    content: String,
    /// The ids of its tokens, if requested, and in streams.
    tokens: Vec<u32>,
    /// -1: a sequence has no fixed slot.
    id_slot: i32,
    /// Whether the text has ended.
    stop: bool,
    /// Tokens that were generated so far.
    tokens_predicted: usize,
    /// Tokens of the prompt.
    tokens_evaluated: usize,
    /// The probability of each token, if `n_probs` requests them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    completion_probabilities: Option<Vec<TokenProbability>>,
    /// More fields, at the end.
    #[serde(flatten)]
    end: Option<CompletionEnd>,
}

/// The fields that a text has at its end.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = LlamaCppCompletionEnd)]
struct CompletionEnd {
    /// The model that answered.
    model: String,
    /// The settings of generation.
    generation_settings: Map<String, Value>,
    /// The text of the prompt, special tokens included.
    prompt: String,
    /// Whether the text has a line break.
    has_new_line: bool,
    /// Whether the prompt was cut to fit the context, or the text ended because the context was full.
    truncated: bool,
    /// The reason why the text ended: `eos`, `word` for a stop string, or `limit`.
    stop_type: &'static str,
    /// The stop string that ended it; otherwise empty.
    stopping_word: String,
    /// Tokens of the prompt that were found in the prefix cache.
    tokens_cached: usize,
    /// The times of the sequence.
    timings: Timings,
}

/// The times of a sequence.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = LlamaCppTimings)]
struct Timings {
    /// Tokens of the prompt that were found in the prefix cache.
    cache_n: usize,
    /// Tokens of the prompt that were evaluated.
    prompt_n: usize,
    /// Milliseconds from the start of the prompt to the first token.
    prompt_ms: f64,
    /// Milliseconds of each evaluated token.
    prompt_per_token_ms: f64,
    /// Evaluated tokens in a second.
    prompt_per_second: f64,
    /// Generated tokens.
    predicted_n: usize,
    /// Milliseconds from the first token to the end.
    predicted_ms: f64,
    /// Milliseconds of each generated token.
    predicted_per_token_ms: f64,
    /// Generated tokens in a second.
    predicted_per_second: f64,
    /// Drafts that were evaluated, if there were some.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    draft_n: Option<usize>,
    /// Those of them that are part of the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    draft_n_accepted: Option<usize>,
}

/// The probability of a token, and of the most likely ones at its position.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = LlamaCppTokenProbability)]
struct TokenProbability {
    /// The token.
    #[serde(flatten)]
    token: Probability,
    /// The most likely tokens at this position.
    top_logprobs: Vec<Probability>,
}

/// The probability of a token.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = LlamaCppProbability)]
struct Probability {
    /// The token's id.
    id: u32,
    /// The token's text.
    token: String,
    /// The token's bytes, which may be a part of a character.
    bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    logprob: f32,
}

impl TokenProbability {
    fn new(tokenizer: &Tokenizer, id: u32, logprobs: &TokenLogprobs) -> Self {
        let one = |id: u32, logprob: f32| Probability {
            id,
            token: spelling(tokenizer, id),
            bytes: tokenizer.token_bytes(id).to_vec(),
            logprob: finite(logprob),
        };
        let top_logprobs = logprobs.top.iter().map(|&(id, logprob)| one(id, logprob)).collect();
        Self { token: one(id, logprobs.logprob), top_logprobs }
    }
}

impl Timings {
    /// Converts the counts and times of a sequence.
    fn new(usage: Usage, timings: RequestTimings) -> Self {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        let (prompt_n, predicted_n) = (usage.prompt_tokens - usage.cached_tokens, usage.generated_tokens);
        let (prompt_ms, predicted_ms) = (ms(timings.prefill), ms(timings.decode));
        Self {
            cache_n: usage.cached_tokens,
            prompt_n,
            prompt_ms,
            prompt_per_token_ms: ratio(prompt_ms, prompt_n as f64),
            prompt_per_second: ratio(prompt_n as f64 * 1e3, prompt_ms),
            predicted_n,
            predicted_ms,
            predicted_per_token_ms: ratio(predicted_ms, predicted_n as f64),
            predicted_per_second: ratio(predicted_n as f64 * 1e3, predicted_ms),
            draft_n: (usage.drafted_tokens > 0).then_some(usage.drafted_tokens),
            draft_n_accepted: (usage.drafted_tokens > 0).then_some(usage.accepted_tokens),
        }
    }
}

impl CompletionObject {
    /// Appends the next part of the text.
    fn add(&mut self, part: Self) {
        let Self { index, content, tokens, id_slot, stop, tokens_predicted, tokens_evaluated, .. } = part;
        self.content += &content;
        self.tokens.extend(tokens);
        (self.index, self.id_slot, self.stop) = (index, id_slot, stop);
        (self.tokens_predicted, self.tokens_evaluated) = (tokens_predicted, tokens_evaluated);
        if let Some(more) = part.completion_probabilities {
            self.completion_probabilities.get_or_insert_default().extend(more);
        }
        self.end = part.end;
    }
}

/// The schema of the response: an object for one text, a list for several, or the requested fields of these.
pub struct CompletionAnswer;

impl PartialSchema for CompletionAnswer {
    fn schema() -> RefOr<Schema> {
        let whole = Ref::from_schema_name(CompletionObject::name());
        let chosen = || Object::with_type(utoipa::openapi::Type::Object);
        AnyOfBuilder::new().item(whole).item(chosen()).item(ArrayBuilder::new().items(chosen())).into()
    }
}

impl ToSchema for CompletionAnswer {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        schemas.push((CompletionObject::name().into_owned(), CompletionObject::schema()));
        CompletionObject::schemas(schemas);
    }
}

/// The state of a sequence that is being written.
pub struct WrittenSequence {
    /// The token ids of its prompt.
    prompt: Arc<[u32]>,
    /// Whether its prompt was cut.
    truncated: bool,
    /// The settings of generation; moved out at the end.
    settings: Map<String, Value>,
    /// Whether the text has a line break so far.
    has_new_line: bool,
    /// Generated tokens so far.
    n_tokens: usize,
    /// Tokens whose text has not arrived yet.
    tokens: Vec<u32>,
    /// The probabilities of these tokens, if requested.
    probabilities: Vec<TokenProbability>,
}

impl WrittenSequence {
    /// The sequence after `prompt`, which was cut if `truncated`; `settings` are reported at its end.
    pub fn new(prompt: Arc<[u32]>, truncated: bool, settings: Map<String, Value>) -> Self {
        let (tokens, probabilities) = (Vec::new(), Vec::new());
        Self { prompt, truncated, settings, has_new_line: false, n_tokens: 0, tokens, probabilities }
    }

    /// A part of the text of sequence `index`, with the tokens of [`tokens`](Self::tokens).
    fn part(&mut self, index: usize, content: String) -> CompletionObject {
        self.has_new_line |= content.contains('\n');
        let probabilities = std::mem::take(&mut self.probabilities);
        CompletionObject {
            index,
            content,
            tokens: std::mem::take(&mut self.tokens),
            id_slot: -1,
            stop: false,
            tokens_predicted: self.n_tokens,
            tokens_evaluated: self.prompt.len(),
            completion_probabilities: (!probabilities.is_empty()).then_some(probabilities),
            end: None,
        }
    }
}

/// Writes llama.cpp's objects from events.
pub struct CompletionWriter {
    /// The model's name in the response.
    model: String,
    /// The model's tokenizer, for the texts of tokens.
    tokenizer: Arc<Tokenizer>,
    /// The sequences of the request, by index.
    sequences: Vec<WrittenSequence>,
    /// The contents of the response.
    options: AnswerOptions,
}

impl CompletionWriter {
    /// A writer for `sequences` of `model`.
    pub fn new(
        model: String,
        tokenizer: Arc<Tokenizer>,
        sequences: Vec<WrittenSequence>,
        options: AnswerOptions,
    ) -> Self {
        Self { model, tokenizer, sequences, options }
    }

    /// Returns what an event adds to sequence `i`; `None`: nothing yet.
    fn parse(&mut self, i: usize, event: Event) -> Result<Option<CompletionObject>, ApiError> {
        let text = &mut self.sequences[i];
        match event {
            Event::Prompt(_) => Ok(None),
            Event::Token { id, text: content, logprobs } => {
                text.n_tokens += 1;
                text.tokens.push(id);
                text.probabilities.extend(logprobs.map(|l| TokenProbability::new(&self.tokenizer, id, &l)));
                Ok((!content.is_empty()).then(|| text.part(i, content)))
            }
            Event::Done { reason, text: content, stop_string, usage, timings, end_token: _, end_logprobs: _ } => {
                let part = text.part(i, content);
                let reason = EndReason::of_sequence(reason, stop_string)?;
                let end = CompletionEnd {
                    model: self.model.clone(),
                    generation_settings: std::mem::take(&mut text.settings),
                    prompt: self.tokenizer.decode(&text.prompt, true),
                    has_new_line: text.has_new_line,
                    truncated: text.truncated || reason == EndReason::ContextFull,
                    stop_type: stop_type(&reason),
                    stopping_word: match reason {
                        EndReason::StopString(word) => word,
                        EndReason::End | EndReason::Calls | EndReason::Length | EndReason::ContextFull => String::new(),
                    },
                    tokens_cached: usage.cached_tokens,
                    timings: Timings::new(usage, timings),
                };
                Ok(Some(CompletionObject { stop: true, end: Some(end), ..part }))
            }
            Event::Failed(error) => Err(error.into()),
        }
    }

    /// The requested fields of a complete text.
    fn chosen(&self, completion: &CompletionObject) -> Value {
        let whole = serde_json::to_value(completion).unwrap_or_default();
        if self.options.fields.is_empty() {
            return whole;
        }
        let field = |path: &String| {
            let value = path.split('/').try_fold(&whole, |value, name| value.as_object()?.get(name))?;
            Some((path.clone(), value.clone()))
        };
        Value::Object(self.options.fields.iter().filter_map(field).collect())
    }
}

/// Responds with the submitted sequences of `model`: as a stream, as an object, or as a list of several.
pub async fn answer(
    app: App,
    model: ModelLease,
    submitted: SubmittedCompletion,
    is_stream: bool,
) -> Result<Response, ApiError> {
    let SubmittedCompletion { events, mut writer, notes } = submitted;
    let n_sequences = events.len();
    let mut sequences = RunningSequences::new(app, model, events);
    if is_stream {
        return Ok(notes.attach(stream(sequences, Frames::default(), writer)));
    }
    let mut completions = vec![CompletionObject::default(); n_sequences];
    while let Some((i, event)) = sequences.next().await {
        if let Some(part) = writer.parse(i, event)? {
            completions[i].add(part);
        }
    }
    if !writer.options.return_tokens {
        for completion in &mut completions {
            completion.tokens.clear();
        }
    }
    let mut answers: Vec<Value> = completions.iter().map(|completion| writer.chosen(completion)).collect();
    let answer = match answers.pop() {
        Some(answer) if answers.is_empty() => answer,
        last => Value::Array(answers.into_iter().chain(last).collect()),
    };
    Ok(notes.attach(axum::Json(answer).into_response()))
}

impl ChunkWriter for CompletionWriter {
    fn event(&mut self, i: usize, event: Event, out: &mut Frames) -> Result<(), ApiError> {
        match self.parse(i, event)? {
            Some(part) if part.stop => out.data(&self.chosen(&part)),
            Some(part) => out.data(&part),
            None => {}
        }
        Ok(())
    }

    fn end(&mut self, _: &mut Frames) {}

    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        out.data(&ErrorBody::of(error));
    }
}

/// llama.cpp's word for the reason why a text ended.
fn stop_type(reason: &EndReason) -> &'static str {
    match reason {
        EndReason::End | EndReason::Calls => "eos",
        EndReason::StopString(_) => "word",
        EndReason::Length | EndReason::ContextFull => "limit",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_finite_whatever_they_are_of() {
        let usage =
            Usage { prompt_tokens: 12, cached_tokens: 2, generated_tokens: 4, drafted_tokens: 5, accepted_tokens: 3 };
        let timings = RequestTimings {
            queued: Duration::from_secs(1),
            prefill: Duration::from_millis(20),
            decode: Duration::from_millis(40),
        };
        let expected = Timings {
            cache_n: 2,
            prompt_n: 10,
            prompt_ms: 20.0,
            prompt_per_token_ms: 2.0,
            prompt_per_second: 500.0,
            predicted_n: 4,
            predicted_ms: 40.0,
            predicted_per_token_ms: 10.0,
            predicted_per_second: 100.0,
            draft_n: Some(5),
            draft_n_accepted: Some(3),
        };
        assert_eq!(Timings::new(usage, timings), expected);
        let none = Timings::new(Usage::default(), RequestTimings::default());
        assert_eq!((none.prompt_per_token_ms, none.predicted_per_second, none.draft_n), (0.0, 0.0, None));
    }
}
