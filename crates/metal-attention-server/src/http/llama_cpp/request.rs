//! The fields that `/completion` and `/infill` share, and how their texts are submitted.

use std::sync::Arc;
use std::time::Duration;

use metal_attention::Constraint;
use metal_attention::scheduler::{Client, Events};
use serde::Deserialize;
use utoipa::ToSchema;

use super::response::{CompletionWriter, WrittenText};
use super::settings::settings;
use super::unsupported;
use crate::http::body::Object;
use crate::http::job::form::{self, AskedForm};
use crate::http::job::generation::Generation;
use crate::http::job::sampling::SamplingFields;
use crate::http::models::ModelLease;
use crate::http::notes::Notes;
use crate::http::openai::fields::GenerationFields;
use crate::http::{ApiError, App};

/// The fields of llama.cpp's texts that OpenAI's completions do not have.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[schema(as = LlamaCppTextFields)]
pub struct TextFields {
    /// Tell the ids of the tokens; streams always do.
    return_tokens: Option<bool>,
    /// Fields of the answer to keep; `a/b` is the field `b` of the field `a`. None, or an empty list: all.
    response_fields: Option<Vec<String>>,
    /// Probabilities after the samplers, which this server does not tell: not together with `n_probs`.
    post_sampling_probs: Option<bool>,
    /// More than 0: the text ends at the first line break after this many milliseconds since its first token.
    t_max_predict_ms: Option<i64>,
}

/// What `/completion` and `/infill` share.
#[derive(Debug, Clone)]
pub struct TextRequest {
    /// The model's name.
    pub model: Option<String>,
    /// How the texts are generated.
    pub generation: Generation,
    form: Option<AskedForm>,
    options: AnswerOptions,
    /// How the request was read.
    notes: Notes,
}

/// What an answer holds.
#[derive(Debug, Clone, Default)]
pub struct AnswerOptions {
    /// The ids of the tokens.
    pub return_tokens: bool,
    /// The fields that are kept; none: all.
    pub fields: Vec<String>,
}

/// A prompt, and whether something of it was cut off.
pub struct CutPrompt {
    pub ids: Arc<[u32]>,
    pub truncated: bool,
}

/// Texts that were submitted.
pub struct Submitted {
    pub events: Vec<Events>,
    pub writer: CompletionWriter,
    pub notes: Notes,
}

impl TextRequest {
    /// Reads what the paths share.
    pub fn read(object: &Object<'_>) -> Result<Self, ApiError> {
        let mut notes = unsupported::check(object)?;
        let shared: GenerationFields = object.parse()?;
        let sampling = SamplingFields::read(object, &mut notes)?;
        let own: TextFields = object.parse()?;
        let mut generation = shared.generation(sampling, None)?;
        if own.post_sampling_probs == Some(true) && generation.logprobs.is_some() {
            let message = "post_sampling_probs is not supported: leave it out for the model's own probabilities";
            return Err(ApiError::field("post_sampling_probs", message).with_code("unsupported_parameter"));
        }
        let time = own.t_max_predict_ms.and_then(|ms| u64::try_from(ms).ok()).filter(|&ms| ms > 0);
        generation.line_end_after = time.map(Duration::from_millis);
        let options = AnswerOptions {
            return_tokens: own.return_tokens.unwrap_or(false),
            fields: own.response_fields.unwrap_or_default(),
        };
        Ok(Self { model: shared.model, generation, form: form::read(object)?, options, notes })
    }

    /// Submits the texts after `prompts`. Grammars take time: not to be called on a thread that serves others.
    pub fn submit(
        &self,
        app: &App,
        model: &ModelLease,
        client: Client,
        prompts: Vec<CutPrompt>,
    ) -> Result<Submitted, ApiError> {
        let generation = &self.generation;
        model.scheduler.check_n_sequences(prompts.len().saturating_mul(generation.n as usize))?;
        let mut notes = self.notes.clone();
        let grammar = form::raw_grammar(model, self.form.as_ref(), &mut notes)?;
        let stop = generation.stop(model, &[]);
        let (mut events, mut texts) = (Vec::new(), Vec::new());
        for CutPrompt { ids, truncated } in prompts {
            for choice in 0..generation.n {
                let mut request = generation.request(app, model, client, &ids, &stop, choice)?;
                let settings = settings(&request);
                request.constraint = grammar.clone().map(|grammar| Box::new(grammar) as Box<dyn Constraint>);
                events.push(model.scheduler.submit(request)?);
                texts.push(WrittenText::new(Arc::clone(&ids), truncated, settings));
            }
        }
        let name = model.answer_name(&mut notes);
        let writer = CompletionWriter::new(name, Arc::clone(&model.tokenizer), texts, self.options.clone());
        Ok(Submitted { events, writer, notes })
    }
}
