//! `/mcp/`: the tools of MCP servers, for this server's own web page. No other path calls a tool.
//!
//! A call needs the user's consent, which the page obtains. So that neither another web page nor another machine can
//! give it in the user's place, requests must come from the page itself over the loopback; with `--mcp-remote` they
//! must send an API key instead.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{self, HOST, ORIGIN};
use axum::http::{HeaderMap, HeaderName, Uri};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use metal_attention_mcp::{Cancelled, Consent, McpError, OfferedTool, ServerReport, Toolbox};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::sync::{Semaphore, oneshot};

use super::body::{FromJson, Json, Object};
use super::{ApiError, App, guard, within_timeout};

/// The header in which a browser states whether a page of another site sends the request.
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Headers that proxies add.
const FORWARDED: [HeaderName; 4] =
    [header::FORWARDED, header::VIA, HeaderName::from_static("x-forwarded-for"), HeaderName::from_static("x-real-ip")];

/// The tools of MCP servers that the page may call.
#[derive(Debug)]
pub struct PageTools {
    /// The MCP servers.
    toolbox: Arc<Toolbox>,
    /// Whether pages on other machines may call the tools, with an API key.
    is_remote: bool,
    /// By server: one call at a time. A server that hangs occupies one thread and blocks no other server.
    calls: BTreeMap<String, Arc<Semaphore>>,
    /// One listing of tools at a time.
    lists: Arc<Semaphore>,
}

impl PageTools {
    /// The tools of `toolbox`. `is_remote`: pages on other machines may call them, too, with an API key.
    pub fn new(toolbox: Toolbox, is_remote: bool) -> Self {
        let one = || Arc::new(Semaphore::new(1));
        let calls = toolbox.servers().map(|name| (name.to_owned(), one())).collect();
        Self { toolbox: Arc::new(toolbox), is_remote, calls, lists: one() }
    }

    /// Ends the MCP servers, except those that are busy with a call.
    pub fn close(&self) {
        self.toolbox.close();
    }
}

/// The routes; none where no MCP server is configured, or where other machines reach this server without `--mcp-remote`
/// and a key.
pub fn router(app: &App, is_loopback: bool) -> Router<App> {
    match &app.options.tools {
        Some(tools) if is_loopback || (tools.is_remote && !app.options.keys.is_empty()) => Router::new()
            .route("/mcp/tools", get(list))
            .route("/mcp/call", post(call))
            .route_layer(from_fn_with_state(app.clone(), check_page))
            .route_layer(from_fn_with_state(app.clone(), guard::check_key)),
        Some(_) | None => Router::new(),
    }
}

/// Refuses requests that do not come from the page.
async fn check_page(State(app): State<App>, request: Request, next: Next) -> Response {
    let has_key = tools(&app).is_ok_and(|tools| tools.is_remote) && !app.options.keys.is_empty();
    match page_problem(request.headers(), has_key) {
        None => next.run(request).await,
        Some(problem) => {
            let message = format!("the tools are for this server's own page alone: {problem}");
            ApiError::forbidden(message).with_code("page_only").into_response()
        }
    }
}

/// Returns the reason why a request does not come from this server's own page; `None`: it does. `has_key`: the request
/// has sent a valid key, so pages on other machines and programs may call, too.
fn page_problem(headers: &HeaderMap, has_key: bool) -> Option<&'static str> {
    let header = |name: HeaderName| Some(headers.get(name)?.to_str().unwrap_or_default());
    let host = header(HOST).unwrap_or_default();
    let (site, origin) = (header(FETCH_SITE), header(ORIGIN));
    if site.is_some_and(|site| site != "same-origin") {
        return Some("the browser says that another site sends the request");
    }
    if origin.is_some_and(|origin| !is_origin_of(origin, host)) {
        return Some("the Origin header is not this server's");
    }
    if has_key {
        return None;
    }
    // The names of --allowed-host do not count: behind a proxy, other machines reach the server under them.
    if !guard::is_local(host, &[]) {
        return Some("the Host header does not name this machine; for others there is --mcp-remote, with a key");
    }
    if FORWARDED.iter().any(|name| headers.contains_key(name)) {
        return Some("a proxy forwards the request; for others there is --mcp-remote, with a key");
    }
    if site.is_none() && origin.is_none() {
        return Some("no header says that the page sends the request");
    }
    None
}

/// Whether an Origin header is that of pages at `host`.
fn is_origin_of(origin: &str, host: &str) -> bool {
    let Ok(origin) = origin.parse::<Uri>() else { return false };
    matches!(origin.scheme_str(), Some("http" | "https"))
        && origin.authority().is_some_and(|authority| authority.as_str().eq_ignore_ascii_case(host))
}

/// The tools of all servers (JSON).
#[derive(Serialize)]
struct PageToolList {
    /// The tools.
    tools: Vec<PageTool>,
    /// Servers that could not be started, and tools that are left out.
    problems: Vec<Problem>,
}

/// A tool (JSON).
#[derive(Serialize)]
struct PageTool {
    /// Its server.
    server: String,
    /// Its name there.
    tool: String,
    /// Whether it is called without the user's consent.
    allowed: bool,
    /// The tool in the form of `/v1/chat/completions`. Its name is unique among all tools.
    function: Value,
}

/// A message about a server, for the user.
#[derive(Serialize)]
struct Problem {
    /// The server.
    server: String,
    /// The message.
    message: String,
}

async fn list(State(app): State<App>) -> Result<impl IntoResponse, ApiError> {
    let tools = tools(&app)?;
    let toolbox = Arc::clone(&tools.toolbox);
    let work = move |cancelled: Cancelled<'_>| PageToolList::new(&toolbox, toolbox.connect(cancelled));
    within_timeout(&app, on_thread(&tools.lists, work)).await.map(axum::Json)
}

impl PageToolList {
    /// The tools in `reports`. Reads the file of consents to set `allowed`.
    fn new(toolbox: &Toolbox, reports: Vec<ServerReport>) -> Self {
        let tool = |offered: OfferedTool| PageTool {
            allowed: toolbox.allows(&offered.server, &offered.tool.name),
            function: offered.function(),
            server: offered.server,
            tool: offered.tool.name,
        };
        let tools = ServerReport::offered(&reports).into_iter().map(tool).collect();
        let mut problems = Vec::new();
        for ServerReport { name, outcome, .. } in reports {
            let problem = |message: String| Problem { server: name.clone(), message };
            match outcome {
                Ok((_, list)) => problems.extend(list.problems.into_iter().map(problem)),
                Err(error) => problems.push(problem(error.to_string())),
            }
        }
        Self { tools, problems }
    }
}

/// A call of a tool (JSON).
#[derive(Debug, Deserialize)]
struct ToolCallRequest {
    /// The server.
    server: String,
    /// The tool's name there.
    tool: String,
    /// Its arguments.
    #[serde(default)]
    arguments: Map<String, Value>,
    /// The user's consent; `None`: the tool must always be allowed.
    consent: Option<Consent>,
}

impl FromJson for ToolCallRequest {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        object.parse()
    }
}

/// The result of a call (JSON).
#[derive(Serialize)]
struct CallResult {
    /// Plain text for the model.
    text: String,
    /// Whether the call or the tool failed.
    is_error: bool,
}

/// Calls a tool with the user's consent. A failed call is a result, which the model reads; only unknown tools and a
/// missing consent are errors.
async fn call(State(app): State<App>, request: Json<ToolCallRequest>) -> Result<impl IntoResponse, ApiError> {
    let tools = tools(&app)?;
    let ToolCallRequest { server, tool, arguments, consent } = &*request;
    let Some(semaphore) = tools.calls.get(server) else {
        return Err(ApiError::not_found("server_not_found", format!("no MCP server {server:?} is configured")));
    };
    let toolbox = Arc::clone(&tools.toolbox);
    let (server, tool, arguments, consent) = (server.clone(), tool.clone(), arguments.clone(), *consent);
    let work = move |cancelled: Cancelled<'_>| toolbox.call(&server, &tool, &arguments, consent, cancelled);
    let result = match within_timeout(&app, on_thread(semaphore, work)).await? {
        Ok(result) => CallResult { text: result.for_model(), is_error: result.is_error },
        Err(error @ (McpError::NoServer { .. } | McpError::NoTool { .. })) => {
            return Err(ApiError::not_found("tool_not_found", error.to_string()));
        }
        Err(error @ McpError::NoConsent { .. }) => {
            return Err(ApiError::forbidden(error.to_string()).with_code("consent_needed"));
        }
        Err(error @ McpError::Consent(_)) => return Err(ApiError::internal(error.to_string())),
        Err(error) => CallResult { text: format!("The call failed: {error}"), is_error: true },
    };
    Ok(axum::Json(result))
}

fn tools(app: &App) -> Result<&Arc<PageTools>, ApiError> {
    app.options.tools.as_ref().ok_or_else(|| ApiError::internal("there are no tools"))
}

/// Runs `work`, which may block for long, on a new thread once the semaphore is free. The work is cancelled when this
/// future is dropped.
async fn on_thread<T: Send + 'static>(
    semaphore: &Arc<Semaphore>,
    work: impl FnOnce(Cancelled<'_>) -> T + Send + 'static,
) -> Result<T, ApiError> {
    let permit = Arc::clone(semaphore).acquire_owned().await.map_err(|_| ApiError::shutting_down())?;
    let cancel = CancelOnDrop(Arc::default());
    let is_cancelled = Arc::clone(&cancel.0);
    let (sender, receiver) = oneshot::channel();
    let run = move || {
        let done = work(&|| is_cancelled.load(Ordering::Relaxed));
        drop(permit);
        // Without a receiver the client has disconnected.
        let _ = sender.send(done);
    };
    thread::Builder::new()
        .name("mcp-call".into())
        .spawn(run)
        .map_err(|error| ApiError::unavailable("no_thread", format!("cannot start a thread for the call: {error}")))?;
    receiver.await.map_err(|_| ApiError::internal("the call met a defect"))
}

/// Sets the flag on drop.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn only_the_page_is_let_in() {
        let problem = |headers: &[(HeaderName, &'static str)], has_key| {
            let headers = headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value)));
            page_problem(&headers.collect(), has_key)
        };
        let local = (HOST, "localhost:8080");
        for good in [
            &[local.clone(), (FETCH_SITE, "same-origin")][..],
            &[local.clone(), (ORIGIN, "http://localhost:8080")],
            &[(HOST, "[::1]:80"), (ORIGIN, "http://[::1]:80"), (FETCH_SITE, "same-origin")],
        ] {
            assert_eq!((problem(good, false), problem(good, true)), (None, None), "{good:?}");
        }
        for bad in [
            &[local.clone(), (FETCH_SITE, "cross-site")][..],
            &[local.clone(), (FETCH_SITE, "none")],
            &[local.clone(), (FETCH_SITE, "same-site"), (ORIGIN, "http://localhost:8080")],
            &[local.clone(), (ORIGIN, "http://localhost:8081")],
            &[local.clone(), (ORIGIN, "null")],
            &[local.clone(), (ORIGIN, "http://evil.example"), (FETCH_SITE, "same-origin")],
            &[local.clone(), (ORIGIN, "file://localhost:8080")],
        ] {
            assert!(problem(bad, false).is_some() && problem(bad, true).is_some(), "{bad:?}");
        }
        // With a key other machines and programs may call, with or without a proxy.
        let page = (FETCH_SITE, "same-origin");
        for remote in [
            &[local.clone()][..],
            &[(HOST, "chat.example"), (ORIGIN, "https://chat.example"), page.clone()],
            &[local.clone(), page.clone(), (FORWARDED[0].clone(), "for=10.0.0.1")],
            &[local, page, (FORWARDED[2].clone(), "10.0.0.1")],
            &[],
        ] {
            assert!(problem(remote, false).is_some() && problem(remote, true).is_none(), "{remote:?}");
        }
    }
}
