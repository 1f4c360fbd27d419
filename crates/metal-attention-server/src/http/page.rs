//! The web page at `/`: a chat in the browser. Its files lie in `page/`.

use std::borrow::Cow;

use axum::http::HeaderMap;
use axum::http::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_FRAME_OPTIONS,
};
use axum::response::{IntoResponse, Response};

use super::ollama;

/// Content security policy: only files of this server and pictures that the page has read itself (`blob:`), no inline script or
/// style.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page. A client that does not accept HTML gets the text of ollama's `/`, by which ollama's clients detect a
/// running server. `has_tools`: the page may call the tools of MCP servers.
pub fn html(headers: &HeaderMap, has_tools: bool) -> Response {
    let accepts = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    if !accepts.contains("text/html") {
        return ollama::RUNNING.into_response();
    }
    let page = include_str!("page/index.html");
    let page = if has_tools { page.replacen("<body>", "<body data-tools>", 1).into() } else { Cow::Borrowed(page) };
    file("text/html; charset=utf-8", page)
}

/// The styles.
pub async fn css() -> Response {
    file("text/css; charset=utf-8", include_str!("page/chat.css"))
}

/// The script of the chat.
pub async fn script() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/chat.js"))
}

/// The script that stores settings and conversations in the browser.
pub async fn store() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/store.js"))
}

/// The script that reads pictures and stores them in the browser.
pub async fn pictures() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/pictures.js"))
}

/// The script that takes pictures for the next message.
pub async fn attachments() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/attachments.js"))
}

/// The script that renders messages.
pub async fn view() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/view.js"))
}

/// The script that calls the tools of MCP servers.
pub async fn tools() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/tools.js"))
}

/// The script that turns Markdown into elements.
pub async fn markdown() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/markdown.js"))
}

/// The script that copies to the clipboard.
pub async fn clipboard() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/clipboard.js"))
}

/// The icon.
pub async fn icon() -> Response {
    file("image/svg+xml", include_str!("page/icon.svg"))
}

fn file(kind: &'static str, text: impl Into<Cow<'static, str>>) -> Response {
    let headers = [
        (CONTENT_TYPE, kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, text.into()).into_response()
}
