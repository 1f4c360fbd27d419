//! `/v1/embeddings`: texts as vectors.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use metal_attention::scheduler::Client;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::unsupported::{self, Endpoint};
use crate::http::body::{FromJson, Json, Object};
use crate::http::job::prompt::Prompt;
use crate::http::notes::Notes;
use crate::http::request_line::RequestLine;
use crate::http::{ApiError, App, in_time, prepare};

/// A request for embeddings.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct EmbeddingsRequest {
    /// The texts.
    input: Prompt,
    /// The model's name.
    model: Option<String>,
    /// How the vectors are written.
    encoding_format: Option<EncodingFormat>,
    /// Keep so many of a vector's numbers, the first ones, and make its length 1 again: for models that were trained for that
    /// (Matryoshka embeddings). At most the model's own number.
    #[schema(minimum = 1)]
    dimensions: Option<u32>,
    /// How the request was read.
    #[serde(skip)]
    notes: Notes,
}

/// How a vector is written.
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
    /// Tokens it took.
    usage: EmbeddingsUsage,
}

/// The embedding of one text.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct Embedding {
    /// `embedding`.
    object: &'static str,
    /// The text's number.
    index: usize,
    /// The vector.
    #[serde(rename = "embedding")]
    vector: Vector,
}

/// A vector of length 1.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(untagged)]
enum Vector {
    /// A list of numbers.
    Float(Vec<f32>),
    /// Little-endian 32-bit floats in base64.
    Base64(String),
}

/// How many tokens a request took.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(super) struct EmbeddingsUsage {
    /// Tokens of all texts.
    prompt_tokens: usize,
    /// The same.
    total_tokens: usize,
}

impl EmbeddingsUsage {
    /// Of texts of so many tokens together.
    pub(super) fn new(n_tokens: usize) -> Self {
        Self { prompt_tokens: n_tokens, total_tokens: n_tokens }
    }
}

/// Makes embeddings of length 1, as the model's file says: of the mean, the first or the last of a text's hidden states.
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
        let texts = request.input.encode(&model, "input")?;
        model.scheduler.check_n_sequences(texts.len())?;
        let n_tokens = texts.iter().map(|ids| ids.len()).sum();
        let pending = texts.iter().map(|ids| model.scheduler.embed(client, ids.to_vec()));
        Ok((pending.collect::<Result<Vec<_>, _>>()?, n_tokens, dimensions))
    });
    let all = async {
        let (pending, n_tokens, dimensions) = prepared.await?;
        let mut data = Vec::with_capacity(pending.len());
        for (index, vector) in pending.into_iter().enumerate() {
            let vector = cut(vector.await?, dimensions);
            let vector = match format {
                EncodingFormat::Float => Vector::Float(vector),
                EncodingFormat::Base64 => {
                    let bytes: Vec<u8> = vector.iter().flat_map(|v| v.to_le_bytes()).collect();
                    Vector::Base64(STANDARD.encode(bytes))
                }
            };
            data.push(Embedding { object: "embedding", index, vector });
        }
        Ok((data, n_tokens))
    };
    let (data, n_tokens) = in_time(&app, all).await?;
    let usage = EmbeddingsUsage::new(n_tokens);
    if let Some(line) = RequestLine::current() {
        line.prompt_tokens(n_tokens);
    }
    let answer = Embeddings { object: "list", data, model: name, usage };
    Ok(notes.attach(axum::Json(answer).into_response()))
}

/// The first `n` numbers of `vector`, of length 1 again.
pub fn cut(mut vector: Vec<f32>, n: usize) -> Vec<f32> {
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
    fn cut_vectors_have_length_one() {
        assert_eq!(cut(vec![0.6, 0.0, 0.8], 3), [0.6, 0.0, 0.8]);
        assert_eq!(cut(vec![0.3, 0.4, 0.8], 2), [0.6, 0.8]);
        assert_eq!(cut(vec![0.0, 1.0], 1), [0.0]);
    }
}
