//! The routes of the server, and the middleware before them.

use std::panic::AssertUnwindSafe;

use axum::extract::{Request, State};
use axum::http::{Method, Response};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::IntoResponse;
use axum::routing::{any, get, post};
use axum::{Router, body::Body};
use futures_util::FutureExt;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};
use utoipa_axum::routes;

use super::llama_cpp::{completion, infill, props, slot_actions, slots, template, tokens};
use super::openai::{chat, completions, embeddings, models, rerank};
use super::responses::{create, stored};
use super::{ApiError, App, anthropic, dialect, guard, health, mcp, metrics, notes, ollama, openapi, page, resumable};

/// All routes. `is_loopback`: the server listens on the loopback only; `checks_host`: Host headers must name this
/// machine.
pub fn router(app: &App, is_loopback: bool, checks_host: bool) -> Router {
    let resumable_chats = OpenApiRouter::new()
        .routes(routes!(chat::chat_completions))
        .routes(at("/chat/completions", routes!(chat::chat_completions)))
        .route_layer(from_fn_with_state(app.clone(), resumable::keep));
    let mut closed = OpenApiRouter::with_openapi(openapi::base())
        .merge(resumable_chats)
        .routes(routes!(resumable::read, resumable::end))
        .routes(routes!(completions::completions))
        .routes(routes!(anthropic::messages))
        .routes(routes!(anthropic::count_tokens))
        .routes(routes!(embeddings::embeddings))
        .routes(at("/embeddings", routes!(embeddings::embeddings)))
        .routes(routes!(rerank::rerank))
        .routes(at("/v1/reranking", routes!(rerank::rerank)))
        .routes(at("/rerank", routes!(rerank::rerank)))
        .routes(at("/reranking", routes!(rerank::rerank)))
        .routes(routes!(create::create))
        .routes(routes!(create::input_tokens))
        .routes(routes!(create::compact))
        .routes(routes!(stored::retrieve, stored::delete))
        .routes(routes!(stored::cancel))
        .routes(routes!(stored::input_items))
        .route("/responses", post(create::create))
        .route("/responses/input_tokens", post(create::input_tokens))
        .route("/responses/compact", post(create::compact))
        .route("/responses/{id}", get(stored::retrieve).delete(stored::delete))
        .route("/responses/{id}/cancel", post(stored::cancel))
        .route("/responses/{id}/input_items", get(stored::input_items))
        .routes(routes!(models::models))
        .routes(at("/models", routes!(models::models)))
        .routes(routes!(models::model))
        .routes(routes!(completion::completion))
        .routes(at("/completions", routes!(completion::completion)))
        .routes(routes!(infill::infill))
        .routes(routes!(tokens::tokenize))
        .routes(routes!(tokens::detokenize))
        .routes(routes!(ollama::chat::chat))
        .routes(routes!(ollama::generate::generate))
        .routes(routes!(ollama::embed::embed))
        .routes(routes!(ollama::embed::embeddings))
        .routes(routes!(ollama::models::tags))
        .routes(routes!(ollama::models::ps))
        .routes(routes!(ollama::models::show))
        .routes(routes!(ollama::manage::create))
        .routes(routes!(ollama::manage::copy))
        .routes(routes!(ollama::manage::delete))
        .routes(routes!(ollama::manage::pull))
        .routes(routes!(ollama::version::version))
        .route("/api/push", any(ollama::manage::not_supported))
        .route("/api/blobs/{digest}", any(ollama::manage::not_supported))
        .routes(routes!(template::apply_template))
        .routes(routes!(props::props))
        .routes(routes!(slots::slots))
        .routes(routes!(slot_actions::slot_action));
    let mut open = OpenApiRouter::new()
        .routes(routes!(health::health))
        .routes(at("/v1/health", routes!(health::health)))
        .routes(routes!(health::ready));
    let metrics_of = if app.options.open_metrics { &mut open } else { &mut closed };
    *metrics_of = std::mem::take(metrics_of).routes(routes!(metrics::metrics));
    let closed = closed.route_layer(from_fn_with_state(app.clone(), guard::check_key));
    let (router, api) = closed.merge(open).split_for_parts();
    let api = openapi::complete(api, &app.options, checks_host);
    let mcp = mcp::router(app, is_loopback);
    let router = router
        .merge(mcp)
        .route("/openapi.json", get(move || async move { axum::Json(api) }))
        .fallback(page_or_not_found)
        .method_not_allowed_fallback(method_not_allowed);
    layers(router, app, checks_host).with_state(app.clone())
}

/// The route of `handler` at an additional path, as llama.cpp has them for OpenAI's.
fn at(path: &str, handler: UtoipaMethodRouter<App>) -> UtoipaMethodRouter<App> {
    let (schemas, mut paths, methods) = handler;
    paths.paths = std::mem::take(&mut paths.paths).into_values().map(|item| (path.to_owned(), item)).collect();
    for item in paths.paths.values_mut() {
        for operation in item.get.iter_mut().chain(&mut item.post) {
            operation.operation_id = operation.operation_id.take().map(|id| format!("{id}{}", path.replace('/', "_")));
        }
    }
    (schemas, paths, methods)
}

/// The monitoring routes alone (`--metrics-port`): without a key, and with connections of their own.
pub fn monitoring_router(app: &App, checks_host: bool) -> Router {
    let router = Router::new()
        .route("/health", get(health::health))
        .route("/v1/health", get(health::health))
        .route("/ready", get(health::ready))
        .route("/metrics", get(metrics::metrics))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed);
    layers(router, app, checks_host).with_state(app.clone())
}

/// The middleware before all routes. The last layer here is the outermost: it sees a request first.
fn layers(router: Router<App>, app: &App, checks_host: bool) -> Router<App> {
    let mut router = router.layer(from_fn(catch_panic)).layer(from_fn(guard::check_connection_limit));
    if checks_host {
        router = router.layer(from_fn_with_state(app.clone(), guard::check_host));
    }
    if let Some(origin) = &app.options.cors_origin {
        let origin = if origin == "*" { AllowOrigin::any() } else { AllowOrigin::exact(origin.clone()) };
        let cors = CorsLayer::new()
            .allow_origin(origin)
            .allow_methods([Method::GET, Method::HEAD, Method::POST, Method::DELETE])
            // Client libraries send headers of their own, such as x-stainless-os: all headers that the browser requests
            // are allowed.
            .allow_headers(AllowHeaders::mirror_request())
            .allow_private_network(true)
            .expose_headers([
                notes::IGNORED,
                notes::SCHEMA_UNSUPPORTED,
                notes::TRUNCATED,
                notes::DROPPED_TURNS,
                notes::MODEL,
                resumable::STREAM_ID,
                guard::MODEL_LOAD_SECONDS,
                guard::REQUEST_ID,
                guard::ANTHROPIC_REQUEST_ID,
            ]);
        router = router.layer(cors);
    }
    router.layer(from_fn(dialect::write_errors)).layer(from_fn_with_state(app.clone(), guard::observe))
}

/// A file of the page, or that there is nothing.
async fn page_or_not_found(State(app): State<App>, request: Request) -> Response<Body> {
    let (method, path, headers) =
        (request.method().clone(), request.uri().path().to_owned(), request.headers().clone());
    match page::file(&app, &method, &path, &headers).await {
        Some(response) => response,
        None => not_found(request).await.into_response(),
    }
}

async fn not_found(request: Request) -> ApiError {
    let path = request.uri().path();
    ApiError::not_found("route_not_found", format!("nothing is at {} {path}; see /openapi.json", request.method()))
}

async fn method_not_allowed(request: Request) -> ApiError {
    let path = request.uri().path();
    ApiError::method_not_allowed(format!("{path} does not take {}; see /openapi.json", request.method()))
}

/// Middleware: turns a handler's panic into a 500 response. The panic's message may quote the request, so it is not
/// shown.
async fn catch_panic(request: Request, next: Next) -> Response<Body> {
    AssertUnwindSafe(next.run(request)).catch_unwind().await.unwrap_or_else(|_| {
        tracing::error!("a request panicked");
        ApiError::internal("an internal error ended this request").into_response()
    })
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;
    use axum::http::StatusCode;
    use hyper::service::Service;
    use hyper_util::service::TowerToHyperService;
    use serde_json::Value;

    use super::*;
    use crate::http::peer::Peer;
    use crate::http::work::WorkSize;
    use crate::http::{HttpOptions, ModelsOptions, metrics};

    /// A panic of a handler, in its task or on a blocking thread, becomes a 500 that shows nothing of the request.
    #[test]
    fn a_panic_of_a_handler_is_an_error_of_its_request() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let app = runtime.block_on(async { App::new(HttpOptions::default(), ModelsOptions::default(), true) });
        let panics = async || -> ApiError { panic!("the secret prompt") };
        let work = app.clone();
        let blocks = async move || {
            let panics = || -> Result<(), ApiError> { panic!("the secret prompt") };
            work.work.run(Peer::at([127, 0, 0, 1].into()), WorkSize::Small, panics).await
        };
        let router = Router::new().route("/panics", get(panics)).route("/blocks", get(blocks));
        let router = router.route("/metrics", get(metrics::metrics));
        let service = TowerToHyperService::new(layers(router, &app, false).with_state(app.clone()));
        let ask = |path: &str| {
            let request = Request::builder().uri(path).body(Body::empty()).unwrap();
            runtime.block_on(async {
                let answer = service.call(request).await.unwrap();
                let (parts, body) = answer.into_parts();
                (parts, String::from_utf8(to_bytes(body, 1 << 20).await.unwrap().to_vec()).unwrap())
            })
        };
        for path in ["/panics", "/blocks", "/panics"] {
            let (head, body) = ask(path);
            assert_eq!(head.status, StatusCode::INTERNAL_SERVER_ERROR, "{path}");
            assert!(head.headers.contains_key("x-request-id") && !body.contains("secret"), "{body}");
            let error = &serde_json::from_str::<Value>(&body).unwrap()["error"];
            assert_eq!((&error["code"], &error["type"]), (&"internal_error".into(), &"server_error".into()));
        }
        // The request is counted like any other, and the server continues.
        let counted = "http_responses_total{route=\"/panics\",status=\"500\"} 2";
        let (head, body) = ask("/metrics");
        assert!(head.status == StatusCode::OK && body.contains(counted), "{body}");
    }
}
