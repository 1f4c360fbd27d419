//! Endpoints for stored responses: `/v1/responses/{id}` and the paths below.

use axum::Extension;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use metal_attention::scheduler::Client;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::response::ResponseObject;
use super::store::{ClientResponses, StoredBody};
use crate::http::address::{Path, Query};
use crate::http::error::ErrorBody;
use crate::http::job::generation::check;
use crate::http::peer::Peer;
use crate::http::work::WorkSize;
use crate::http::{ApiError, App};

/// Maximum items of a page.
const MAX_LIMIT: usize = 100;
/// Items of a page where a request sets no limit.
const DEFAULT_LIMIT: usize = 20;

/// Runs `work` with the stored responses of `client`, on a blocking thread.
async fn with_stored<T: Send + 'static>(
    app: &App,
    client: Client,
    peer: Peer,
    work: impl FnOnce(&ClientResponses) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let stored = ClientResponses::new(&app.options.responses, client, &app.options.keys);
    app.work.run(peer, WorkSize::Small, move || work(&stored)).await
}

/// The response `id`; an error if there is none.
fn find(stored: &ClientResponses, id: &str) -> Result<StoredBody, ApiError> {
    stored.get(id)?.ok_or_else(|| not_found(id))
}

fn not_found(id: &str) -> ApiError {
    let message = format!("there is no response {id:?} here: it was not kept, or others have taken its place");
    ApiError::not_found("response_not_found", message).with_param("id")
}

/// The query of a retrieval.
#[derive(Debug, Deserialize)]
pub struct Retrieval {
    /// True: as a stream, which is refused.
    stream: Option<bool>,
}

/// Returns a stored response.
#[utoipa::path(get, path = "/v1/responses/{id}", tag = "openai",
    params(("id" = String, Path, description = "The response's name", min_length = 1),
        ("stream" = Option<bool>, Query, description = "True: as a stream, which is refused")),
    responses(
        (status = 200, description = "The response", body = ResponseObject),
        (status = 404, description = "There is no such response", body = ErrorBody)))]
pub async fn retrieve(
    State(app): State<App>,
    client: Client,
    Extension(peer): Extension<Peer>,
    Path(id): Path<String>,
    Query(retrieval): Query<Retrieval>,
) -> Result<Response, ApiError> {
    if retrieval.stream == Some(true) {
        let message = "stream is not supported for a response that is kept: leave it out";
        return Err(ApiError::field("stream", message).with_code("unsupported_parameter"));
    }
    let read = move |stored: &ClientResponses| Ok(find(stored, &id)?.read::<&RawValue>()?.response.get().to_owned());
    let json = with_stored(&app, client, peer, read).await?;
    Ok(([(CONTENT_TYPE, "application/json")], json).into_response())
}

/// The report that a response was removed.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct DeletedResponse {
    /// The id of the response.
    id: String,
    /// `response`.
    object: &'static str,
    /// True.
    deleted: bool,
}

/// Removes a stored response.
#[utoipa::path(delete, path = "/v1/responses/{id}", tag = "openai",
    params(("id" = String, Path, description = "The response's name", min_length = 1)),
    responses(
        (status = 200, description = "The response is forgotten", body = DeletedResponse),
        (status = 404, description = "There is no such response", body = ErrorBody)))]
pub async fn delete(
    State(app): State<App>,
    client: Client,
    Extension(peer): Extension<Peer>,
    Path(id): Path<String>,
) -> Result<axum::Json<DeletedResponse>, ApiError> {
    let remove = move |stored: &ClientResponses| {
        let was_there = stored.remove(&id)?;
        was_there.then_some(DeletedResponse { id: id.clone(), object: "response", deleted: true }).ok_or(not_found(&id))
    };
    with_stored(&app, client, peer, remove).await.map(axum::Json)
}

/// Refuses to cancel a response: stored ones are complete.
#[utoipa::path(post, path = "/v1/responses/{id}/cancel", tag = "openai",
    params(("id" = String, Path, description = "The response's name", min_length = 1)),
    responses(
        (status = 400, description = "No response is generated in the background", body = ErrorBody),
        (status = 404, description = "There is no such response", body = ErrorBody)))]
pub async fn cancel(
    State(app): State<App>,
    client: Client,
    Extension(peer): Extension<Peer>,
    Path(id): Path<String>,
) -> Result<(), ApiError> {
    let refuse = move |stored: &ClientResponses| {
        find(stored, &id)?;
        let message = "cancel is not supported: only responses in the background are cancelled, and this server has none; to \
                       end a response close its connection";
        Err(ApiError::invalid(message).with_code("unsupported_endpoint"))
    };
    with_stored(&app, client, peer, refuse).await
}

/// The query for a page of items.
#[derive(Debug, Deserialize)]
pub struct ItemsQuery {
    /// The id of the item before the first one.
    after: Option<String>,
    /// Maximum number of items.
    limit: Option<usize>,
    /// The order: `asc`, the oldest first; `desc`, the newest first (default).
    order: Option<Order>,
}

/// The order of items.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum Order {
    /// The oldest.
    Asc,
    /// The newest.
    Desc,
}

/// A page of the items of a response's input.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ItemList {
    /// `list`.
    object: &'static str,
    /// The items.
    data: Vec<Value>,
    /// The id of the first item.
    #[schema(required)]
    first_id: Option<String>,
    /// The id of the last item.
    #[schema(required)]
    last_id: Option<String>,
    /// Whether more items follow.
    has_more: bool,
}

/// Lists the items of a response's input, including those of earlier turns.
#[utoipa::path(get, path = "/v1/responses/{id}/input_items", tag = "openai",
    params(("id" = String, Path, description = "The response's name", min_length = 1),
        ("after" = Option<String>, Query, description = "The name of the item before the first one"),
        ("limit" = Option<usize>, Query, description = "Most items", minimum = 1, maximum = 100),
        ("order" = inline(Option<Order>), Query, description = "Which come first; without it, the newest")),
    responses(
        (status = 200, description = "The items", body = ItemList),
        (status = 404, description = "There is no such response", body = ErrorBody)))]
pub async fn input_items(
    State(app): State<App>,
    client: Client,
    Extension(peer): Extension<Peer>,
    Path(id): Path<String>,
    Query(ItemsQuery { after, limit, order }): Query<ItemsQuery>,
) -> Result<axum::Json<ItemList>, ApiError> {
    let limit = limit.unwrap_or(DEFAULT_LIMIT);
    check("limit", limit, 1..=MAX_LIMIT)?;
    let list = move |stored: &ClientResponses| {
        let body = find(stored, &id)?;
        let mut items = body.read::<serde::de::IgnoredAny>()?.input;
        if order != Some(Order::Asc) {
            items.reverse();
        }
        let named = |item: &&RawValue| serde_json::from_str::<Value>(item.get()).unwrap_or_default();
        let name = |item: &Value| item["id"].as_str().map(str::to_owned);
        let mut rest = items.iter();
        if let Some(after) = &after
            && !rest.any(|item| name(&named(item)).as_ref() == Some(after))
        {
            return Err(ApiError::field("after", format!("after: the response has no item {after:?}")));
        }
        let data: Vec<Value> = rest.by_ref().take(limit).map(named).collect();
        let (first_id, last_id) = (data.first().and_then(name), data.last().and_then(name));
        Ok(ItemList { object: "list", data, first_id, last_id, has_more: rest.next().is_some() })
    };
    with_stored(&app, client, peer, list).await.map(axum::Json)
}
