//! The part of a request that `/completion` and `/infill` share, and its submission.

use std::sync::Arc;
use std::time::Duration;

use metal_attention::Constraint;
use metal_attention::scheduler::{Client, Events};
use serde::Deserialize;
use utoipa::ToSchema;

use super::response::{CompletionWriter, WrittenSequence};
use super::settings::settings;
use super::unsupported;
use crate::http::body::Object;
use crate::http::job::generation::GenerationSettings;
use crate::http::job::response_format::{self, RequestedFormat};
use crate::http::job::sampling::SamplingFields;
use crate::http::models::ModelLease;
use crate::http::notes::Notes;
use crate::http::openai::fields::GenerationFields;
use crate::http::{ApiError, App};

/// The fields of llama.cpp's completions that OpenAI's do not have.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[schema(as = LlamaCppTextFields)]
pub struct TextFields {
    /// Report the ids of the generated tokens; streams always do.
    return_tokens: Option<bool>,
    /// Fields of the response to keep; `a/b` is the field `b` of the field `a`. Missing or empty: all.
    response_fields: Option<Vec<String>>,
    /// Report probabilities after the samplers; not supported together with `n_probs`.
    post_sampling_probs: Option<bool>,
    /// More than 0: the text ends at the first line break after this many milliseconds since its first token.
    t_max_predict_ms: Option<i64>,
}

/// The part of a request that `/completion` and `/infill` share.
#[derive(Debug, Clone)]
pub struct SharedRequest {
    /// The model's name; `None`: the default one.
    pub model: Option<String>,
    /// The settings of generation.
    pub generation: GenerationSettings,
    /// The response format.
    response_format: Option<RequestedFormat>,
    /// The contents of the response.
    options: AnswerOptions,
    /// Notes for response headers.
    notes: Notes,
}

/// The contents of a response.
#[derive(Debug, Clone, Default)]
pub struct AnswerOptions {
    /// Whether token ids are reported.
    pub return_tokens: bool,
    /// The fields that are kept; empty: all.
    pub fields: Vec<String>,
}

/// A tokenised prompt.
pub struct CutPrompt {
    /// Its token ids.
    pub ids: Arc<[u32]>,
    /// Whether texts were cut to fit the context.
    pub truncated: bool,
}

/// The submitted sequences of a request. Dropping it cancels them.
pub struct SubmittedCompletion {
    /// By sequence: the receiver of the scheduler's events.
    pub events: Vec<Events>,
    /// Writes the response.
    pub writer: CompletionWriter,
    /// Notes for response headers.
    pub notes: Notes,
}

impl SharedRequest {
    /// Reads the shared fields.
    pub fn read(object: &Object<'_>) -> Result<Self, ApiError> {
        let mut notes = unsupported::check(object)?;
        let shared: GenerationFields = object.parse()?;
        let sampling = SamplingFields::read(object, &mut notes)?;
        let fields: TextFields = object.parse()?;
        let mut generation = shared.generation(sampling, None)?;
        if fields.post_sampling_probs == Some(true) && generation.logprobs.is_some() {
            let message = "post_sampling_probs is not supported: leave it out for the model's own probabilities";
            return Err(ApiError::field("post_sampling_probs", message).with_code("unsupported_parameter"));
        }
        let time = fields.t_max_predict_ms.and_then(|ms| u64::try_from(ms).ok()).filter(|&ms| ms > 0);
        generation.line_end_after = time.map(Duration::from_millis);
        let options = AnswerOptions {
            return_tokens: fields.return_tokens.unwrap_or(false),
            fields: fields.response_fields.unwrap_or_default(),
        };
        Ok(Self { model: shared.model, generation, response_format: response_format::read(object)?, options, notes })
    }

    /// Submits `n` sequences after each of `prompts`. Grammars are CPU-bound: call it on a blocking thread. If a
    /// sequence cannot be submitted, those before it are cancelled.
    pub fn submit(
        &self,
        app: &App,
        model: &ModelLease,
        client: Client,
        prompts: Vec<CutPrompt>,
    ) -> Result<SubmittedCompletion, ApiError> {
        let generation = &self.generation;
        model.scheduler.check_n_sequences(prompts.len().saturating_mul(generation.n as usize))?;
        let mut notes = self.notes.clone();
        let grammar = response_format::raw_grammar(model, self.response_format.as_ref(), &mut notes)?;
        let stop = generation.stop(model, &[]);
        let (mut events, mut sequences) = (Vec::new(), Vec::new());
        for CutPrompt { ids, truncated } in prompts {
            for choice in 0..generation.n {
                let mut request = generation.request(app, model, client, &ids, &stop, choice)?;
                let settings = settings(&request);
                request.constraint = grammar.clone().map(|grammar| Box::new(grammar) as Box<dyn Constraint>);
                events.push(model.scheduler.submit(request)?);
                sequences.push(WrittenSequence::new(Arc::clone(&ids), truncated, settings));
            }
        }
        let name = model.answer_name(&mut notes);
        let writer = CompletionWriter::new(name, Arc::clone(&model.tokenizer), sequences, self.options.clone());
        Ok(SubmittedCompletion { events, writer, notes })
    }
}
