//! `/v1/embeddings`: texts to vectors.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use metal_attention::scheduler::Client;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::unsupported::{self, Endpoint};
use crate::http::body::{FromJson, Json, Object};
use crate::http::job::prompt::PromptInput;
use crate::http::notes::Notes;
use crate::http::request_line::RequestLine;
use crate::http::{ApiError, App, prepare, within_timeout};

/// A request for embeddings.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct EmbeddingsRequest {
    /// The texts.
    input: PromptInput,
    /// The model's name.
    model: Option<String>,
    /// The encoding of the vectors.
    encoding_format: Option<EncodingFormat>,
    /// Keep this many leading values of each vector and normalise it again, for models that were trained for it
    /// (Matryoshka embeddings). At most the model's own number.
    #[schema(minimum = 1)]
    dimensions: Option<u32>,
    /// Notes for response headers.
    #[serde(skip)]
    notes: Notes,
}

/// The encoding of a vector.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum EncodingFormat {
    /// A list of numbers.
    #[default]
    Float,
    /// Little-endian 32-bit floats in base64.
    Base64,
}

impl FromJson for EmbeddingsRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        Ok(Self { notes: unsupported::check(Endpoint::Embeddings, object)?, ..object.parse()? })
    }
}

/// The embeddings of all texts.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Embeddings {
    /// `list`.
    object: &'static str,
    /// One for each text.
    data: Vec<Embedding>,
    /// The model that made them.
    model: String,
    /// Tokens of all texts.
    usage: EmbeddingsUsage,
}

/// The embedding of one text.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct Embedding {
    /// `embedding`.
    object: &'static str,
    /// The text's index.
    index: usize,
    /// The vector.
    #[serde(rename = "embedding")]
    vector: EmbeddingVector,
}

/// A vector of length 1.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = Vector)]
enum EmbeddingVector {
    /// A list of numbers.
    Float(Vec<f32>),
    /// Little-endian 32-bit floats in base64.
    Base64(String),
}

/// The number of tokens of a request.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(super) struct EmbeddingsUsage {
    /// Tokens of all texts.
    prompt_tokens: usize,
    /// The same.
    total_tokens: usize,
}

impl EmbeddingsUsage {
    /// The usage of texts with `n_tokens` tokens together.
    pub(super) fn new(n_tokens: usize) -> Self {
        Self { prompt_tokens: n_tokens, total_tokens: n_tokens }
    }
}

/// Computes embeddings, normalised to length 1, with the pooling of the model's file: the mean, the first or the last
/// of a text's hidden states.
#[utoipa::path(post, path = "/v1/embeddings", tag = "openai", request_body = EmbeddingsRequest,
    responses((status = 200, description = "The embeddings", body = Embeddings)))]
pub async fn embeddings(
    State(app): State<App>,
    client: Client,
    request: Json<EmbeddingsRequest>,
) -> Result<Response, ApiError> {
    let format = request.encoding_format.unwrap_or_default();
    let mut notes = request.notes.clone();
    let model = app.lease(request.model.as_deref()).await?;
    let name = model.answer_name(&mut notes);
    let lease = model.clone();
    let prepared = prepare(&app, request, move |_, request| {
        let model = lease;
        model.check_embeds()?;
        let n_embd = model.n_embd();
        let dimensions = request.dimensions.map_or(n_embd, |n| n as usize);
        if !(1..=n_embd).contains(&dimensions) {
            let message = format!("dimensions is {dimensions}, but this model's embeddings have from 1 to {n_embd}");
            return Err(ApiError::field("dimensions", message));
        }
        let inputs = request.input.encode(&model, "input")?;
        model.scheduler.check_n_sequences(inputs.len())?;
        let n_tokens = inputs.iter().map(|ids| ids.len()).sum();
        let pending = inputs.iter().map(|ids| model.scheduler.embed(client, ids.to_vec()));
        Ok((pending.collect::<Result<Vec<_>, _>>()?, n_tokens, dimensions))
    });
    let computed = async {
        let (pending, n_tokens, dimensions) = prepared.await?;
        let mut data = Vec::with_capacity(pending.len());
        for (index, vector) in pending.into_iter().enumerate() {
            let vector = truncate_vector(vector.await?, dimensions);
            let vector = match format {
                EncodingFormat::Float => EmbeddingVector::Float(vector),
                EncodingFormat::Base64 => {
                    let bytes: Vec<u8> = vector.iter().flat_map(|v| v.to_le_bytes()).collect();
                    EmbeddingVector::Base64(STANDARD.encode(bytes))
                }
            };
            data.push(Embedding { object: "embedding", index, vector });
        }
        Ok((data, n_tokens))
    };
    let (data, n_tokens) = within_timeout(&app, computed).await?;
    let usage = EmbeddingsUsage::new(n_tokens);
    if let Some(line) = RequestLine::current() {
        line.prompt_tokens(n_tokens);
    }
    let answer = Embeddings { object: "list", data, model: name, usage };
    Ok(notes.attach(axum::Json(answer).into_response()))
}

/// The first `n` values of `vector`, normalised to length 1 again.
pub fn truncate_vector(mut vector: Vec<f32>, n: usize) -> Vec<f32> {
    if n < vector.len() {
        vector.truncate(n);
        let length = vector.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        if length > 0.0 {
            for x in &mut *vector {
                *x = (f64::from(*x) / length) as f32;
            }
        }
    }
    vector
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_vectors_have_length_one() {
        assert_eq!(truncate_vector(vec![0.6, 0.0, 0.8], 3), [0.6, 0.0, 0.8]);
        assert_eq!(truncate_vector(vec![0.3, 0.4, 0.8], 2), [0.6, 0.8]);
        assert_eq!(truncate_vector(vec![0.0, 1.0], 1), [0.0]);
    }
}
