//! A client of one MCP server: sends requests and waits for their responses.

use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use crate::connection::{Connection, ServerEvent};
use crate::limits::{MAX_INVALID, MAX_NAME, MAX_PAGES, MAX_TOOLS};
use crate::message::{self, Incoming, VERSIONS};
use crate::text::{beginning, plain};
use crate::{Cancelled, McpError, ServerOptions, ServerTool, ToolResult};

/// The interval at which cancellation is polled during a request.
const POLL: Duration = Duration::from_millis(50);
/// The time for a server to answer a ping, or to accept a notification.
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// A client of one server, whose session is initialized. Dropping it ends the session and the server's process.
pub struct McpClient {
    /// The transport.
    connection: Connection,
    /// Messages and failures from the transport.
    events: Receiver<ServerEvent>,
    /// The server's configuration.
    options: ServerOptions,
    /// The server's description of itself.
    info: ServerInfo,
    /// The id of the next request.
    next_id: u64,
    /// Whether the server has notified, since the last list, that its list of tools has changed.
    tools_changed: bool,
}

/// A server's description of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServerInfo {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The negotiated version of the protocol.
    pub protocol: &'static str,
}

/// The tools of a server.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ToolList {
    /// The tools.
    pub tools: Vec<ServerTool>,
    /// The reasons why tools are left out.
    pub problems: Vec<String>,
}

impl McpClient {
    /// Starts the server's process, or opens an HTTP session, and initializes the connection.
    pub fn start(options: &ServerOptions, cancelled: Cancelled) -> Result<Self, McpError> {
        let (connection, events) = Connection::open(options)?;
        let options = options.clone();
        let mut client =
            Self { connection, events, options, info: ServerInfo::default(), next_id: 1, tools_changed: false };
        let params = json!({
            "protocolVersion": VERSIONS[0],
            "capabilities": {},
            "clientInfo": {"name": "metal-attention", "version": env!("CARGO_PKG_VERSION")},
        });
        let result = client.request("initialize", &fields(params), client.options.timeout, cancelled)?;
        let version = result["protocolVersion"].as_str().unwrap_or_default();
        let Some(protocol) = VERSIONS.into_iter().find(|known| *known == version) else {
            return Err(McpError::Version { version: one_line(&result["protocolVersion"]) });
        };
        client.connection.set_version(protocol);
        let info = &result["serverInfo"];
        client.info = ServerInfo { name: one_line(&info["name"]), version: one_line(&info["version"]), protocol };
        let initialized = message::notification("notifications/initialized", &Map::new());
        client.connection.send_in_order(initialized, client.options.timeout.min(PING_TIMEOUT))?;
        Ok(client)
    }

    /// The server's description of itself.
    pub fn info(&self) -> &ServerInfo {
        &self.info
    }

    /// Lists the server's tools that the configuration selects. Invalid tools are left out, with a problem each.
    pub fn tools(&mut self, cancelled: Cancelled) -> Result<ToolList, McpError> {
        const METHOD: &str = "tools/list";
        self.tools_changed = false;
        let deadline = Instant::now() + self.options.timeout;
        let mut list = ToolList::default();
        let mut cursor: Option<String> = None;
        for _ in 0..MAX_PAGES {
            let params = cursor.take().map(|cursor| ("cursor".to_owned(), cursor.into())).into_iter().collect();
            let left = deadline.saturating_duration_since(Instant::now());
            let mut page = self.request(METHOD, &params, left, cancelled)?;
            let Some(Value::Array(tools)) = page.get_mut("tools").map(Value::take) else {
                return Err(McpError::Answer { method: METHOD, problem: "it has no list of tools".into() });
            };
            for tool in tools {
                if tool["name"].as_str().is_some_and(|name| !self.options.selects(name)) {
                    continue;
                }
                if list.tools.len() == MAX_TOOLS {
                    list.problems.push(format!("tools after the first {MAX_TOOLS} are left out"));
                    return Ok(list);
                }
                match ServerTool::read(tool) {
                    Ok(tool) if list.tools.iter().any(|known| known.name == tool.name) => {}
                    Ok(tool) => list.tools.push(tool),
                    Err(problem) if list.problems.len() < MAX_TOOLS => list.problems.push(problem),
                    Err(_) => {}
                }
            }
            match page["nextCursor"].as_str() {
                Some(next) => cursor = Some(next.to_owned()),
                None => return Ok(list),
            }
        }
        list.problems.push(format!("tools after the first {MAX_PAGES} pages of the list are left out"));
        Ok(list)
    }

    /// Calls a tool without consent; [`Toolbox::call`](crate::Toolbox::call) checks consent.
    pub fn call(
        &mut self,
        tool: &str,
        arguments: &Map<String, Value>,
        cancelled: Cancelled,
    ) -> Result<ToolResult, McpError> {
        const METHOD: &str = "tools/call";
        let params = fields(json!({"name": tool, "arguments": arguments}));
        let result = self.request(METHOD, &params, self.options.timeout, cancelled)?;
        ToolResult::read(&result)
            .ok_or_else(|| McpError::Answer { method: METHOD, problem: "it has no content".into() })
    }

    /// Checks that the server answers.
    pub fn ping(&mut self, cancelled: Cancelled) -> Result<(), McpError> {
        self.request("ping", &Map::new(), self.options.timeout.min(PING_TIMEOUT), cancelled).map(drop)
    }

    /// Whether the server has notified, since the last list, that its list of tools has changed.
    pub fn tools_changed(&mut self) -> Result<bool, McpError> {
        self.drain()?;
        Ok(self.tools_changed)
    }

    /// Sends a request, unless it is cancelled already, and waits at most `limit` for its response. After a timeout or
    /// a cancellation the connection remains open, and the server is notified.
    fn request(
        &mut self,
        method: &'static str,
        params: &Map<String, Value>,
        limit: Duration,
        cancelled: Cancelled,
    ) -> Result<Value, McpError> {
        self.drain()?;
        if cancelled() {
            return Err(McpError::Cancelled { method });
        }
        let id = self.next_id;
        self.next_id += 1;
        let sent = self.connection.send(message::request(id, method, params), Some(id), limit);
        sent.map_err(|error| self.connection.with_exit_status(error))?;
        let deadline = Instant::now() + limit;
        let mut n_invalid = 0;
        loop {
            if cancelled() {
                self.cancel(id, "cancelled by the user");
                return Err(McpError::Cancelled { method });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.cancel(id, "timed out");
                return Err(McpError::Timeout { method, limit: self.options.timeout });
            }
            let event = match self.events.recv_timeout(left.min(POLL)) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => {
                    self.connection.reap();
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return Err(self.ended()),
            };
            match event {
                ServerEvent::Message(Incoming::Response { id: own, outcome }) if own == id => {
                    return outcome.map_err(|error| McpError::Refused {
                        method,
                        code: error.code,
                        message: error.message,
                    });
                }
                ServerEvent::Message(message) => self.handle(message),
                ServerEvent::Invalid(text) => {
                    tracing::debug!("MCP server {}: no message: {text}", self.options.name);
                    n_invalid += 1;
                    if n_invalid > MAX_INVALID {
                        return Err(McpError::Invalid { text });
                    }
                }
                ServerEvent::Failed(own, error) if own.is_none_or(|own| own == id) => {
                    return Err(self.failure(error, method));
                }
                ServerEvent::Failed(..) => {}
            }
        }
    }

    /// `error` as the error of the request `method`.
    fn failure(&mut self, error: McpError, method: &'static str) -> McpError {
        match error {
            McpError::Connection { source, .. } if matches!(*source, ureq::Error::Timeout(_)) => {
                McpError::Timeout { method, limit: self.options.timeout }
            }
            error => self.connection.with_exit_status(error),
        }
    }

    /// Handles the events that have arrived since the last request.
    fn drain(&mut self) -> Result<(), McpError> {
        // The rest is left to the next request, which has a timeout.
        for _ in 0..MAX_INVALID {
            match self.events.try_recv() {
                Ok(ServerEvent::Message(message)) => self.handle(message),
                Ok(ServerEvent::Failed(None, error)) => return Err(self.connection.with_exit_status(error)),
                Ok(ServerEvent::Invalid(_) | ServerEvent::Failed(Some(_), _)) => {}
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Err(self.ended()),
            }
        }
        Ok(())
    }

    /// Handles a message that is not the response to the running request.
    fn handle(&mut self, message: Incoming) {
        match message {
            // The response to a request that was cancelled or timed out, or a second response.
            Incoming::Response { .. } => {}
            Incoming::Request { id, method } => {
                // If the server does not read its responses, this one is dropped.
                let _ = self.connection.send(message::response(&id, &method), None, PING_TIMEOUT);
            }
            Incoming::Notification { method } => self.tools_changed |= method == "notifications/tools/list_changed",
        }
    }

    /// Notifies the server that a request is cancelled.
    fn cancel(&mut self, id: u64, reason: &str) {
        // The protocol forbids to cancel `initialize`, which has the id 1.
        if id > 1 {
            let params = fields(json!({"requestId": id, "reason": reason}));
            let _ = self.notify("notifications/cancelled", &params);
        }
    }

    fn notify(&mut self, method: &'static str, params: &Map<String, Value>) -> Result<(), McpError> {
        self.connection.send(message::notification(method, params), None, PING_TIMEOUT)
    }

    fn ended(&mut self) -> McpError {
        self.connection.with_exit_status(McpError::Ended { status: None, last_line: String::new() })
    }
}

impl Drop for McpClient {
    fn drop(&mut self) {
        self.connection.close();
    }
}

/// The fields of a JSON object.
fn fields(object: Value) -> Map<String, Value> {
    match object {
        Value::Object(fields) => fields,
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => Map::new(),
    }
}

/// A name or version, bounded and on one line.
fn one_line(value: &Value) -> String {
    beginning(&plain(value.as_str().unwrap_or_default()).replace(['\n', '\t'], " "), MAX_NAME).to_owned()
}
