//! Which path leads where, and what a request passes before.

use std::any::Any;

use axum::extract::{DefaultBodyLimit, Request};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE};
use axum::http::{HeaderName, Method, Response};
use axum::middleware::from_fn_with_state;
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Router, body::Body};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowOrigin, CorsLayer};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{ApiError, App, chat, completions, embeddings, guard, health, metrics, models, openapi, page, tokens};

/// All routes. `checks_host`: only names of this machine may lead here.
pub fn router(app: &App, checks_host: bool) -> Router {
    let closed = OpenApiRouter::with_openapi(openapi::base())
        .routes(routes!(chat::chat_completions))
        .routes(routes!(completions::completions))
        .routes(routes!(embeddings::embeddings))
        .routes(routes!(models::models))
        .routes(routes!(models::model))
        .routes(routes!(tokens::tokenize))
        .routes(routes!(tokens::detokenize))
        .routes(routes!(metrics::metrics))
        .route_layer(from_fn_with_state(app.clone(), guard::check_key));
    let open = OpenApiRouter::new().routes(routes!(health::health)).routes(routes!(health::ready));
    let (router, api) = closed.merge(open).split_for_parts();
    let api = openapi::complete(api, &app.options, checks_host);
    let mut router = router
        .route("/openapi.json", get(move || async move { axum::Json(api) }))
        .route("/", get(page::html))
        .route("/chat.css", get(page::css))
        .route("/chat.js", get(page::script))
        .route("/store.js", get(page::store))
        .route("/view.js", get(page::view))
        .route("/markdown.js", get(page::markdown))
        .route("/icon.svg", get(page::icon))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(DefaultBodyLimit::max(app.options.max_body))
        .layer(CatchPanicLayer::custom(panicked));
    if checks_host {
        router = router.layer(from_fn_with_state(app.clone(), guard::check_host));
    }
    if let Some(origin) = &app.options.cors_origin {
        let origin = if origin == "*" { AllowOrigin::any() } else { AllowOrigin::exact(origin.clone()) };
        let cors = CorsLayer::new()
            .allow_origin(origin)
            .allow_methods([Method::GET, Method::POST])
            .allow_headers([AUTHORIZATION, CONTENT_TYPE])
            .expose_headers([HeaderName::from_static("x-request-id")]);
        router = router.layer(cors);
    }
    router.layer(from_fn_with_state(app.clone(), guard::observe)).with_state(app.clone())
}

async fn not_found(request: Request) -> ApiError {
    let path = request.uri().path();
    ApiError::not_found("route_not_found", format!("nothing is at {} {path}; see /openapi.json", request.method()))
}

async fn method_not_allowed(request: Request) -> ApiError {
    let path = request.uri().path();
    ApiError::method_not_allowed(format!("{path} does not take {}; see /openapi.json", request.method()))
}

/// The answer where a request met a defect. The message may quote the request, so it is not told.
fn panicked(_: Box<dyn Any + Send>) -> Response<Body> {
    tracing::error!("a request panicked");
    ApiError::internal("an internal error ended this request").into_response()
}
