//! `/v1/rerank`: ranks documents by their relevance to a query, with the fields of Jina and Cohere. Each document is
//! one input of the model, together with the query.

use std::fmt;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use metal_attention::scheduler::{Client, VectorFuture};
use metal_attention::{Reranker, best_first};
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::embeddings::EmbeddingsUsage;
use super::unsupported::{self, Endpoint};
use crate::http::body::{FromJson, Json, Object};
use crate::http::limits::{MAX_DOCUMENTS, MAX_IDS};
use crate::http::models::LoadedModel;
use crate::http::notes::Notes;
use crate::http::request_line::RequestLine;
use crate::http::{ApiError, App, prepare, within_timeout};

/// A request to rank documents.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct RerankRequest {
    /// The model's name.
    model: Option<String>,
    /// The query.
    query: String,
    /// The documents: at least one and at most 256.
    #[schema(value_type = Vec<Document>, min_items = 1, max_items = 256)]
    documents: Documents,
    /// The number of results, the best ones; default: all.
    #[schema(minimum = 1)]
    top_n: Option<u32>,
    /// Whether results repeat their documents; default: no.
    return_documents: Option<bool>,
    /// Notes for response headers.
    #[serde(skip)]
    notes: Notes,
}

impl FromJson for RerankRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        Ok(Self { notes: unsupported::check(Endpoint::Rerank, object)?, ..object.parse()? })
    }
}

/// The documents, best first.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Ranking {
    /// The model that ranked them.
    model: String,
    /// `list`.
    object: &'static str,
    /// Tokens of all inputs.
    usage: EmbeddingsUsage,
    /// The best document first.
    results: Vec<RankedDocument>,
}

/// The rank of a document.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct RankedDocument {
    /// The document's index in the request, from 0.
    index: usize,
    /// The model's score, higher is better; most models' scores are no probabilities.
    relevance_score: f32,
    /// The document, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    document: Option<TextDocument>,
}

/// A document as an object.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct TextDocument {
    /// The text.
    text: String,
}

/// A document: a text, or an object with one.
#[derive(Serialize, ToSchema)]
#[expect(dead_code, reason = "it is the schema of what is read into texts at once")]
#[serde(untagged)]
enum Document {
    /// The text.
    Text(String),
    /// An object.
    Object(TextDocument),
}

/// Ranks documents by their relevance to a query. The model must be a reranker.
#[utoipa::path(post, path = "/v1/rerank", tag = "rerank", request_body = RerankRequest,
    responses((status = 200, description = "The documents, best first", body = Ranking)))]
pub async fn rerank(
    State(app): State<App>,
    client: Client,
    request: Json<RerankRequest>,
) -> Result<Response, ApiError> {
    let mut notes = request.notes.clone();
    let model = app.lease(request.model.as_deref()).await?;
    let name = model.answer_name(&mut notes);
    let lease = model.clone();
    let prepared = prepare(&app, request, move |_, request| request.submit(&lease, client));
    let computed = async {
        let mut pending = prepared.await?;
        let mut scores = Vec::with_capacity(pending.outputs.len());
        for outputs in std::mem::take(&mut pending.outputs) {
            scores.push(pending.reranker.score(&outputs.await?));
        }
        Ok((pending, scores))
    };
    let (pending, scores) = within_timeout(&app, computed).await?;
    let best = best_first(&scores).into_iter().take(pending.top_n);
    let document = |i: usize| pending.documents.as_ref().map(|inputs| TextDocument { text: inputs[i].clone() });
    let result = |index| RankedDocument { index, relevance_score: scores[index], document: document(index) };
    let usage = EmbeddingsUsage::new(pending.n_tokens);
    if let Some(line) = RequestLine::current() {
        line.prompt_tokens(pending.n_tokens);
    }
    let ranking = Ranking { model: name, object: "list", usage, results: best.map(result).collect() };
    Ok(notes.attach(axum::Json(ranking).into_response()))
}

/// The submitted inputs of a request.
struct Pending {
    /// By document: the model's output, once it is computed.
    outputs: Vec<VectorFuture>,
    /// Turns outputs into scores.
    reranker: Reranker,
    /// Tokens of all inputs.
    n_tokens: usize,
    /// The number of results to return.
    top_n: usize,
    /// The documents, if the response repeats them.
    documents: Option<Vec<String>>,
}

impl RerankRequest {
    /// Submits an input for each document. Tokenisation is CPU-bound: call it on a blocking thread. If one cannot be
    /// submitted, those before it are cancelled.
    fn submit(&self, model: &LoadedModel, client: Client) -> Result<Pending, ApiError> {
        let reranker = model.reranker()?;
        let Documents(documents) = &self.documents;
        if documents.is_empty() {
            return Err(ApiError::field("documents", "documents is empty: give at least one"));
        }
        if self.top_n == Some(0) {
            return Err(ApiError::field("top_n", "top_n must be at least 1"));
        }
        model.scheduler.check_n_sequences(documents.len())?;
        let inputs = self.encode(model, reranker)?;
        let n_tokens = inputs.iter().map(Vec::len).sum();
        let outputs = inputs.into_iter().map(|ids| model.scheduler.embed(client, ids));
        Ok(Pending {
            outputs: outputs.collect::<Result<_, _>>()?,
            reranker: reranker.clone(),
            n_tokens,
            top_n: self.top_n.map_or(usize::MAX, |n| n as usize),
            documents: self.return_documents.unwrap_or(false).then(|| documents.clone()),
        })
    }

    /// Returns the token ids of each document with the query. Stops at the first one that exceeds the context, as the
    /// query is repeated for each.
    fn encode(&self, model: &LoadedModel, reranker: &Reranker) -> Result<Vec<Vec<u32>>, ApiError> {
        model.check_length(&self.query, "query")?;
        let mut n_tokens = 0;
        let mut inputs = Vec::with_capacity(self.documents.0.len());
        for (i, document) in self.documents.0.iter().enumerate() {
            let field = format!("documents[{i}]");
            model.check_length(document, &field)?;
            let ids = reranker.encode(&self.query, document);
            let (n, n_ctx) = (ids.len(), model.n_ctx);
            if n > n_ctx {
                let message = format!(
                    "{field} has {n} tokens together with the query, but the context has room for {n_ctx}: shorten it, or start \
                     the server with a larger context (-c)"
                );
                return Err(ApiError::field(field, message).with_code("context_length_exceeded"));
            }
            n_tokens += n;
            if n_tokens > MAX_IDS {
                let message = format!(
                    "documents have more than {MAX_IDS} tokens, with the query for each, which is the most of one request"
                );
                return Err(ApiError::field("documents", message));
            }
            inputs.push(ids);
        }
        Ok(inputs)
    }
}

/// The texts of documents.
#[derive(Debug, Clone, PartialEq)]
struct Documents(Vec<String>);

/// Reads documents one by one, and stops after the maximum.
impl<'de> Deserialize<'de> for Documents {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(DocumentsVisitor)
    }
}

struct DocumentsVisitor;

impl<'de> Visitor<'de> for DocumentsVisitor {
    type Value = Documents;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of documents")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Documents, A::Error> {
        let mut documents = Vec::new();
        while let Some(DocumentText(text)) = list.next_element()? {
            if documents.len() == MAX_DOCUMENTS {
                let message = format!("more than {MAX_DOCUMENTS} documents, which is the most of one request");
                return Err(A::Error::custom(message));
            }
            documents.push(text);
        }
        Ok(Documents(documents))
    }
}

/// The text of a document.
struct DocumentText(String);

impl<'de> Deserialize<'de> for DocumentText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DocumentTextVisitor)
    }
}

struct DocumentTextVisitor;

impl<'de> Visitor<'de> for DocumentTextVisitor {
    type Value = DocumentText;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text or an object with the field text")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<DocumentText, E> {
        Ok(DocumentText(text.to_owned()))
    }

    fn visit_string<E: Error>(self, text: String) -> Result<DocumentText, E> {
        Ok(DocumentText(text))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<DocumentText, A::Error> {
        let mut text = None;
        while let Some(name) = map.next_key::<String>()? {
            if name != "text" {
                map.next_value::<IgnoredAny>()?;
            } else if text.replace(map.next_value()?).is_some() {
                return Err(A::Error::duplicate_field("text"));
            }
        }
        text.map(DocumentText).ok_or_else(|| A::Error::missing_field("text"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Vec<String>, String> {
        serde_json::from_str::<Documents>(json).map(|documents| documents.0).map_err(|e| e.to_string())
    }

    #[test]
    fn documents_are_texts_or_objects_with_one() {
        assert_eq!(read(r#"["a\n", {"text": "b", "id": [1, {"text": 2}]}, ""]"#).unwrap(), ["a\n", "b", ""]);
        assert!(read("[]").unwrap().is_empty());
        for wrong in [r#""a""#, "{}", "[1]", "[null]", "[[]]", "[{}]", r#"[{"text": 1}]"#, r#"[{"text":"","text":""}]"#]
        {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn too_many_documents_are_not_read_to_their_end() {
        let documents = |n: usize| format!("[{}", vec![r#"{"text":""}"#; n].join(","));
        assert_eq!(read(&(documents(MAX_DOCUMENTS) + "]")).unwrap().len(), MAX_DOCUMENTS);
        let error = read(&documents(MAX_DOCUMENTS + 2)).unwrap_err();
        assert!(error.contains("more than 256 documents"), "{error}");
    }
}
