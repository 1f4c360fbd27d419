//! `/infill`: the text between a prefix and a suffix, in llama.cpp's form, for editors.

use axum::extract::State;
use axum::response::Response;
use metal_attention::scheduler::Client;
use serde::Deserialize;
use utoipa::ToSchema;

use super::request::{CutPrompt, SharedRequest, TextFields};
use super::response::{CompletionAnswer, answer};
use crate::http::body::{FromJson, Json, Object};
use crate::http::job::fill_in;
use crate::http::job::generation::GenerationSettings;
use crate::http::job::response_format::ResponseFormatFields;
use crate::http::job::sampling::SamplingFields;
use crate::http::models::ModelLease;
use crate::http::openai::fields::GenerationFields;
use crate::http::{ApiError, App, openapi, prepare};

/// The fields of `/infill` that `/completion` does not have.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct InfillFields {
    /// The text before the gap.
    input_prefix: String,
    /// The text after the gap.
    input_suffix: String,
    /// The beginning of the text in the gap, which is not repeated in the answer.
    prompt: Option<String>,
    /// Other texts for context, the most important last.
    input_extra: Option<Vec<Extra>>,
}

/// A text for context.
#[derive(Debug, Clone, Deserialize, ToSchema)]
struct Extra {
    /// The name of its file.
    filename: Option<String>,
    /// The text.
    text: String,
}

/// A request for the text between two texts.
pub struct InfillRequest {
    /// The texts around the gap.
    fields: InfillFields,
    /// The part that it shares with `/completion`.
    shared: SharedRequest,
}

impl FromJson for InfillRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        let shared = SharedRequest::read(object)?;
        if shared.generation.n > 1 {
            return Err(ApiError::field("n", "n is more than 1, but /infill gives one text: use /completion"));
        }
        Ok(Self { fields: object.parse()?, shared })
    }
}

openapi::all_of!(InfillRequest, InfillFields, TextFields, ResponseFormatFields, GenerationFields, SamplingFields);

/// Generates the text between two texts.
#[utoipa::path(post, path = "/infill", tag = "llama.cpp", request_body = InfillRequest, responses(
    (status = 200, description = "The text, whole or as server-sent events",
        content((CompletionAnswer = "application/json"), (String = "text/event-stream")))))]
pub async fn infill(
    State(app): State<App>,
    client: Client,
    request: Json<InfillRequest>,
) -> Result<Response, ApiError> {
    let model = app.lease(request.shared.model.as_deref()).await?;
    let is_stream = request.shared.generation.stream;
    let lease = model.clone();
    let submit = move |app: &App, request: &InfillRequest| {
        let (ids, truncated) = request.fields.prompt(&lease, &request.shared.generation)?;
        request.shared.submit(app, &lease, client, vec![CutPrompt { ids: ids.into(), truncated }])
    };
    let submitted = prepare(&app, request, submit).await?;
    answer(app, model, submitted, is_stream).await
}

impl InfillFields {
    /// Returns the prompt's token ids, and whether texts were cut. They are cut so that the answer has room for
    /// `max_tokens`, or for half the context if that is less. The context texts are cut first, at their beginning.
    fn prompt(&self, model: &ModelLease, generation: &GenerationSettings) -> Result<(Vec<u32>, bool), ApiError> {
        /// BOS and the three special tokens.
        const MARKS: usize = 4;
        let tokens = fill_in::tokens(model)?;
        let mut prefix = fill_in::encode(model, &self.input_prefix, "input_prefix")?;
        prefix.extend(fill_in::encode(model, self.prompt.as_deref().unwrap_or_default(), "prompt")?);
        let mut suffix = fill_in::encode(model, &self.input_suffix, "input_suffix")?;
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
        let all = prefix.len() + suffix.len() + context.len();
        let room = generation.prompt_room(model).saturating_sub(MARKS);
        let left = fill_in::fit(&mut prefix, &mut suffix, room);
        context.drain(..context.len().saturating_sub(left));
        let truncated = prefix.len() + suffix.len() + context.len() < all;
        Ok((fill_in::prompt(model, tokens, &context, &prefix, &suffix), truncated))
    }
}
