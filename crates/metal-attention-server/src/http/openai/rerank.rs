//! `/v1/rerank`: documents by how well they answer a query, with the fields that Jina and Cohere have.

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
use crate::http::models::Loaded;
use crate::http::notes::Notes;
use crate::http::request_line::RequestLine;
use crate::http::{ApiError, App, in_time, prepare};

/// A request to rank documents.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct RerankRequest {
    /// The model's name.
    model: Option<String>,
    /// What the documents are held against.
    query: String,
    /// The documents: at least one and at most 256.
    #[schema(value_type = Vec<Document>, min_items = 1, max_items = 256)]
    documents: Documents,
    /// How many results, the best; without it all.
    #[schema(minimum = 1)]
    top_n: Option<u32>,
    /// Whether results repeat their documents; without a word about it, no.
    return_documents: Option<bool>,
    /// How the request was read.
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
    /// Tokens it took.
    usage: EmbeddingsUsage,
    /// The best document first.
    results: Vec<RankedDocument>,
}

/// A document's place.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct RankedDocument {
    /// The document's number in the request, from 0.
    index: usize,
    /// What the model gives, higher is better: of most models no probability.
    relevance_score: f32,
    /// The document, where it was asked for.
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

/// A document: a text, or an object that has one.
#[derive(Serialize, ToSchema)]
#[expect(dead_code, reason = "it is the schema of what is read into texts at once")]
#[serde(untagged)]
enum Document {
    /// The text.
    Text(String),
    /// An object.
    Object(TextDocument),
}

/// Ranks documents by how well they answer a query. The model must be a reranker.
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
    let all = async {
        let mut pending = prepared.await?;
        let mut scores = Vec::with_capacity(pending.outputs.len());
        for outputs in std::mem::take(&mut pending.outputs) {
            scores.push(pending.reranker.score(&outputs.await?));
        }
        Ok((pending, scores))
    };
    let (pending, scores) = in_time(&app, all).await?;
    let best = best_first(&scores).into_iter().take(pending.top_n);
    let document = |i: usize| pending.documents.as_ref().map(|texts| TextDocument { text: texts[i].clone() });
    let result = |index| RankedDocument { index, relevance_score: scores[index], document: document(index) };
    let usage = EmbeddingsUsage::new(pending.n_tokens);
    if let Some(line) = RequestLine::current() {
        line.prompt_tokens(pending.n_tokens);
    }
    let ranking = Ranking { model: name, object: "list", usage, results: best.map(result).collect() };
    Ok(notes.attach(axum::Json(ranking).into_response()))
}

/// What is to come of a request.
struct Pending {
    outputs: Vec<VectorFuture>,
    reranker: Reranker,
    n_tokens: usize,
    top_n: usize,
    /// The documents, where they are to be repeated.
    documents: Option<Vec<String>>,
}

impl RerankRequest {
    /// Submits a text for each document. Tokenising takes time: not to be called on a thread that serves others.
    fn submit(&self, model: &Loaded, client: Client) -> Result<Pending, ApiError> {
        let reranker = model.reranker()?;
        let Documents(documents) = &self.documents;
        if documents.is_empty() {
            return Err(ApiError::field("documents", "documents is empty: give at least one"));
        }
        if self.top_n == Some(0) {
            return Err(ApiError::field("top_n", "top_n must be at least 1"));
        }
        model.scheduler.check_n_sequences(documents.len())?;
        let texts = self.encode(model, reranker)?;
        let n_tokens = texts.iter().map(Vec::len).sum();
        let outputs = texts.into_iter().map(|ids| model.scheduler.embed(client, ids));
        Ok(Pending {
            outputs: outputs.collect::<Result<_, _>>()?,
            reranker: reranker.clone(),
            n_tokens,
            top_n: self.top_n.map_or(usize::MAX, |n| n as usize),
            documents: self.return_documents.unwrap_or(false).then(|| documents.clone()),
        })
    }

    /// The query with each document. The query is repeated for all of them, so it ends at the first that has no room.
    fn encode(&self, model: &Loaded, reranker: &Reranker) -> Result<Vec<Vec<u32>>, ApiError> {
        model.check_length(&self.query, "query")?;
        let mut n_tokens = 0;
        let mut texts = Vec::with_capacity(self.documents.0.len());
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
            texts.push(ids);
        }
        Ok(texts)
    }
}

/// The texts of documents.
#[derive(Debug, Clone, PartialEq)]
struct Documents(Vec<String>);

/// Reads document by document, and ends at one too many.
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
        while let Some(Text(text)) = list.next_element()? {
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
struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextVisitor)
    }
}

struct TextVisitor;

impl<'de> Visitor<'de> for TextVisitor {
    type Value = Text;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text or an object with the field text")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Text, E> {
        Ok(Text(text.to_owned()))
    }

    fn visit_string<E: Error>(self, text: String) -> Result<Text, E> {
        Ok(Text(text))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Text, A::Error> {
        let mut text = None;
        while let Some(name) = map.next_key::<String>()? {
            if name != "text" {
                map.next_value::<IgnoredAny>()?;
            } else if text.replace(map.next_value()?).is_some() {
                return Err(A::Error::duplicate_field("text"));
            }
        }
        text.map(Text).ok_or_else(|| A::Error::missing_field("text"))
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
