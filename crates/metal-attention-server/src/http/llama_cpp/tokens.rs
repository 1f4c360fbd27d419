//! `/tokenize` and `/detokenize`: text to token ids and back.

use axum::extract::State;
use metal_attention::tokenizer::{EncodeOptions, Tokenizer};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::http::body::{FromJson, Json, Object};
use crate::http::limits::{MAX_TEXT_BYTES, MAX_UNCLEAR_BYTES};
use crate::http::{ApiError, App, prepare};

/// A request to tokenise a text.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct TokenizeRequest {
    /// The model's name.
    model: Option<String>,
    /// The text.
    content: String,
    /// Add the model's special tokens for the start and the end of a text.
    add_special: Option<bool>,
    /// Parse the spelling of special tokens as these tokens; default: yes.
    parse_special: Option<bool>,
    /// Report the text of each token, too.
    with_pieces: Option<bool>,
}

impl FromJson for TokenizeRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        object.parse()
    }
}

/// The tokens of a text.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = LlamaCppTokens)]
pub struct TokenList {
    /// Their ids, or ids with texts.
    tokens: Vec<TokenEntry>,
}

/// A token.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = LlamaCppToken)]
#[serde(untagged)]
enum TokenEntry {
    /// Its id.
    Id(u32),
    /// Its id and its text.
    Piece(TokenPiece),
}

/// A token and its text.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = LlamaCppTokenPiece)]
struct TokenPiece {
    /// The token's id.
    id: u32,
    /// Its text.
    piece: TokenText,
}

/// The text of a token.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = LlamaCppPiece)]
#[serde(untagged)]
enum TokenText {
    /// A text.
    Text(String),
    /// Bytes that are no text by themselves: a part of a character.
    Bytes(Vec<u8>),
}

impl TokenPiece {
    fn new(tokenizer: &Tokenizer, id: u32) -> Self {
        let piece = match String::from_utf8(tokenizer.token_bytes(id).to_vec()) {
            // A token that writes nothing is reported with its spelling in the vocabulary.
            Ok(text) if text.is_empty() => TokenText::Text(tokenizer.token_text(id).unwrap_or_default().to_owned()),
            Ok(text) => TokenText::Text(text),
            Err(error) => TokenText::Bytes(error.into_bytes()),
        };
        Self { id, piece }
    }
}

/// Tokenises a text.
#[utoipa::path(post, path = "/tokenize", tag = "llama.cpp", request_body = TokenizeRequest,
    responses((status = 200, description = "The token ids", body = TokenList)))]
pub async fn tokenize(
    State(app): State<App>,
    request: Json<TokenizeRequest>,
) -> Result<axum::Json<TokenList>, ApiError> {
    let options = EncodeOptions {
        add_special: request.add_special.unwrap_or(false),
        parse_special: request.parse_special.unwrap_or(true),
    };
    let model = app.lease(request.model.as_deref()).await?;
    let encode = move |_: &App, request: &TokenizeRequest| {
        let n = request.content.len();
        if n > MAX_UNCLEAR_BYTES {
            let message = format!("content has {n} bytes; at most {MAX_UNCLEAR_BYTES} are allowed");
            return Err(ApiError::field("content", message));
        }
        let ids = model.tokenizer.encode(&request.content, options);
        let with_pieces = request.with_pieces.unwrap_or(false);
        let token = |id| {
            if with_pieces { TokenEntry::Piece(TokenPiece::new(&model.tokenizer, id)) } else { TokenEntry::Id(id) }
        };
        Ok(ids.into_iter().map(token).collect())
    };
    let tokens = prepare(&app, request, encode).await?;
    Ok(axum::Json(TokenList { tokens }))
}

/// A request to turn token ids into text.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct DetokenizeRequest {
    /// The model's name.
    model: Option<String>,
    /// The ids.
    tokens: Vec<u32>,
    /// Write special tokens as well, with their spelling.
    special: Option<bool>,
}

impl FromJson for DetokenizeRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        object.parse()
    }
}

/// A decoded text.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = LlamaCppText)]
pub struct DetokenizedText {
    /// The text.
    content: String,
}

/// Decodes token ids to text.
#[utoipa::path(post, path = "/detokenize", tag = "llama.cpp", request_body = DetokenizeRequest,
    responses((status = 200, description = "The text", body = DetokenizedText)))]
pub async fn detokenize(
    State(app): State<App>,
    request: Json<DetokenizeRequest>,
) -> Result<axum::Json<DetokenizedText>, ApiError> {
    let model = app.lease(request.model.as_deref()).await?;
    let content = prepare(&app, request, move |_, request| {
        model.check_ids(&request.tokens, "tokens")?;
        let bytes = |&id: &u32| model.tokenizer.token_bytes(id).len();
        if request.tokens.iter().map(bytes).sum::<usize>() > MAX_TEXT_BYTES {
            let message = format!("tokens: their text has more than {MAX_TEXT_BYTES} bytes, which is the most allowed");
            return Err(ApiError::field("tokens", message));
        }
        Ok(model.tokenizer.decode(&request.tokens, request.special.unwrap_or(false)))
    })
    .await?;
    Ok(axum::Json(DetokenizedText { content }))
}
