//! `/mcp/`: the tools of MCP servers for this server's own page, and for nothing else. No other path leads to a tool.
//!
//! A call needs the user's consent, which the page asks for. So that no other page, and no program that merely reaches the
//! server, can give it in the user's place, requests must come from the page itself over the loopback; with
//! `--mcp-remote` they must show a key instead.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{HOST, ORIGIN};
use axum::http::{HeaderMap, HeaderName, Uri};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use metal_attention_mcp::{Cancelled, McpError, ServerReport, Toolbox};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::sync::{Semaphore, oneshot};

use super::body::{FromJson, Json, Object};
use super::{ApiError, App, guard, in_time};

/// In which a browser says where a request comes from.
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The tools that the page may call.
#[derive(Debug)]
pub struct PageTools {
    toolbox: Arc<Toolbox>,
    /// The page may be on another machine; it shows a key.
    is_remote: bool,
    /// One call of a server at a time: one that hangs holds up neither the others nor more than a thread.
    calls: BTreeMap<String, Arc<Semaphore>>,
    /// One list at a time.
    lists: Arc<Semaphore>,
}

impl PageTools {
    /// The tools of `toolbox`; `is_remote`: also for pages on other machines, which show a key.
    pub fn new(toolbox: Toolbox, is_remote: bool) -> Self {
        let one = || Arc::new(Semaphore::new(1));
        let calls = toolbox.servers().map(|name| (name.to_owned(), one())).collect();
        Self { toolbox: Arc::new(toolbox), is_remote, calls, lists: one() }
    }
}

/// The routes; none where no tools are configured, or others reach the server and that is not wanted.
pub fn router(app: &App, is_loopback: bool) -> Router<App> {
    match &app.options.tools {
        Some(tools) if is_loopback || (tools.is_remote && !app.options.keys.is_empty()) => Router::new()
            .route("/mcp/tools", get(tools_of_page))
            .route("/mcp/call", post(call))
            .route_layer(from_fn_with_state(app.clone(), check_page))
            .route_layer(from_fn_with_state(app.clone(), guard::check_key)),
        Some(_) | None => Router::new(),
    }
}

/// Refuses what does not come from the page.
async fn check_page(State(app): State<App>, request: Request, next: Next) -> Response {
    let is_remote = tools(&app).is_ok_and(|tools| tools.is_remote);
    match page_problem(request.headers(), is_remote, &app.options.hosts) {
        None => next.run(request).await,
        Some(problem) => {
            let message = format!("the tools are for this server's own page alone: {problem}");
            ApiError::forbidden(message).with_code("page_only").into_response()
        }
    }
}

/// Why a request is not of this server's own page; `None`: it is. `is_remote`: a key shows it, unless a browser says otherwise.
fn page_problem(headers: &HeaderMap, is_remote: bool, hosts: &[String]) -> Option<&'static str> {
    let header = |name: HeaderName| Some(headers.get(name)?.to_str().unwrap_or_default());
    let host = header(HOST).unwrap_or_default();
    let (site, origin) = (header(FETCH_SITE), header(ORIGIN));
    if !is_remote && !guard::is_local(host, hosts) {
        return Some("the Host header does not name this machine");
    }
    if site.is_some_and(|site| site != "same-origin") {
        return Some("the browser says that another site sends the request");
    }
    if origin.is_some_and(|origin| !is_origin_of(origin, host)) {
        return Some("the Origin header is not this server's");
    }
    if !is_remote && site.is_none() && origin.is_none() {
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

/// The tools of all servers.
#[derive(Serialize)]
struct ToolsOfPage {
    /// The tools.
    tools: Vec<PageTool>,
    /// The servers that could not be started, and what was left out of lists.
    problems: Vec<Problem>,
}

/// A tool.
#[derive(Serialize)]
struct PageTool {
    /// Its server.
    server: String,
    /// Its name there.
    tool: String,
    /// It is called without a question.
    allowed: bool,
    /// The tool as `/v1/chat/completions` takes it. Its name is unique among all.
    function: Value,
}

/// Something that a person may want to know of a server.
#[derive(Serialize)]
struct Problem {
    server: String,
    message: String,
}

async fn tools_of_page(State(app): State<App>) -> Result<impl IntoResponse, ApiError> {
    let tools = tools(&app)?;
    let toolbox = Arc::clone(&tools.toolbox);
    let reports = in_time(&app, on_thread(&tools.lists, move |cancelled| toolbox.connect(cancelled))).await?;
    let offered = ServerReport::offered(&reports);
    let mut problems = Vec::new();
    for ServerReport { name, outcome, .. } in reports {
        let problem = |message: String| Problem { server: name.clone(), message };
        match outcome {
            Ok((_, list)) => problems.extend(list.problems.into_iter().map(problem)),
            Err(error) => problems.push(problem(error.to_string())),
        }
    }
    let tool = |offered: metal_attention_mcp::OfferedTool| PageTool {
        allowed: tools.toolbox.allows(&offered.server, &offered.tool.name),
        function: offered.function(),
        server: offered.server,
        tool: offered.tool.name,
    };
    Ok(axum::Json(ToolsOfPage { tools: offered.into_iter().map(tool).collect(), problems }))
}

/// A call that the page wants.
#[derive(Debug, Deserialize)]
struct Call {
    /// The server.
    server: String,
    /// The tool's name there.
    tool: String,
    /// Its arguments.
    #[serde(default)]
    arguments: Map<String, Value>,
    /// What the user said to it; `None`: the user was not asked.
    consent: Option<Consent>,
}

/// What the user said to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Consent {
    /// This call and no other.
    Once,
    /// This call and all later ones of the tool.
    Always,
}

impl FromJson for Call {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        object.parse()
    }
}

/// What a call gave.
#[derive(Serialize)]
struct CallResult {
    /// What the model is told: plain text.
    text: String,
    /// The call, or the tool, failed.
    is_error: bool,
}

async fn call(State(app): State<App>, request: Json<Call>) -> Result<impl IntoResponse, ApiError> {
    let tools = tools(&app)?;
    let Call { server, tool, arguments, consent } = &*request;
    let Some(turn) = tools.calls.get(server) else {
        return Err(ApiError::not_found("server_not_found", format!("no MCP server {server:?} is configured")));
    };
    match consent {
        None if tools.toolbox.allows(server, tool) => {}
        None => {
            let message = format!("the user has to consent to a call of {server}.{tool}: send \"consent\"");
            return Err(ApiError::forbidden(message).with_code("consent_needed"));
        }
        Some(Consent::Once) => {}
        Some(Consent::Always) => {
            tools.toolbox.allow_always(server, tool).map_err(|error| ApiError::internal(error.to_string()))?;
        }
    }
    let toolbox = Arc::clone(&tools.toolbox);
    let (server, tool, arguments) = (server.clone(), tool.clone(), arguments.clone());
    let work = move |cancelled: Cancelled<'_>| toolbox.call(&server, &tool, &arguments, cancelled);
    let result = match in_time(&app, on_thread(turn, work)).await? {
        Ok(result) => CallResult { text: result.for_model(), is_error: result.is_error },
        Err(error @ (McpError::NoServer { .. } | McpError::NoTool { .. })) => {
            return Err(ApiError::not_found("tool_not_found", error.to_string()));
        }
        Err(error) => CallResult { text: format!("The call failed: {error}"), is_error: true },
    };
    Ok(axum::Json(result))
}

fn tools(app: &App) -> Result<&Arc<PageTools>, ApiError> {
    app.options.tools.as_ref().ok_or_else(|| ApiError::internal("there are no tools"))
}

/// Does what may block for long on a thread of its own, in its turn: the threads that others share stay free. Where nobody waits for
/// it any more it is cancelled.
async fn on_thread<T: Send + 'static>(
    turn: &Arc<Semaphore>,
    work: impl FnOnce(Cancelled<'_>) -> T + Send + 'static,
) -> Result<T, ApiError> {
    let turn = Arc::clone(turn).acquire_owned().await.map_err(|_| ApiError::shutting_down())?;
    let waiting = Waiting(Arc::default());
    let is_over = Arc::clone(&waiting.0);
    let (sender, receiver) = oneshot::channel();
    let run = move || {
        let done = work(&|| is_over.load(Ordering::Relaxed));
        drop(turn);
        // The client may have gone away.
        let _ = sender.send(done);
    };
    thread::Builder::new()
        .name("mcp-call".into())
        .spawn(run)
        .map_err(|error| ApiError::unavailable("no_thread", format!("cannot start a thread for the call: {error}")))?;
    receiver.await.map_err(|_| ApiError::internal("the call met a defect"))
}

/// Somebody waits for a call. The flag is set when nobody does any more.
struct Waiting(Arc<AtomicBool>);

impl Drop for Waiting {
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
        let problem = |headers: &[(HeaderName, &'static str)], is_remote| {
            let headers = headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value)));
            page_problem(&headers.collect(), is_remote, &[])
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
        // Elsewhere a key says who asks, and programs without an origin may.
        let elsewhere = [(HOST, "chat.example"), (ORIGIN, "https://chat.example")];
        for remote in [&[local][..], &elsewhere, &[]] {
            assert!(problem(remote, false).is_some() && problem(remote, true).is_none(), "{remote:?}");
        }
    }
}
