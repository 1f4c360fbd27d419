//! One server: requests and their answers.

use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use crate::connection::{Connection, Event};
use crate::limits::{MAX_JUNK, MAX_NAME, MAX_PAGES, MAX_TOOLS};
use crate::message::{self, Incoming, VERSIONS};
use crate::text::{beginning, plain};
use crate::{Cancelled, McpError, ServerOptions, ServerTool, ToolResult};

/// How often it is looked at whether an answer is still wanted.
const LOOK: Duration = Duration::from_millis(50);
/// How long a server may take to answer a ping.
const PING: Duration = Duration::from_secs(5);

/// A server that has been started and greeted. It ends with this value.
pub struct Client {
    connection: Connection,
    events: Receiver<Event>,
    options: ServerOptions,
    identity: Identity,
    next_id: u64,
    /// The server says that its list of tools is another one by now.
    tools_changed: bool,
}

/// What a server says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The version of the protocol that was agreed on.
    pub protocol: &'static str,
}

/// The tools of a server.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ToolList {
    /// Those that are used.
    pub tools: Vec<ServerTool>,
    /// What was left out, and why.
    pub problems: Vec<String>,
}

impl Client {
    /// Starts a server, or begins a session with it.
    pub fn start(options: &ServerOptions, cancelled: Cancelled) -> Result<Self, McpError> {
        let (connection, events) = Connection::open(options)?;
        let options = options.clone();
        let mut client =
            Self { connection, events, options, identity: Identity::default(), next_id: 1, tools_changed: false };
        let hello = json!({
            "protocolVersion": VERSIONS[0],
            "capabilities": {},
            "clientInfo": {"name": "metal-attention", "version": env!("CARGO_PKG_VERSION")},
        });
        let answer = client.request("initialize", &fields(hello), client.options.timeout, cancelled)?;
        let version = answer["protocolVersion"].as_str().unwrap_or_default();
        let Some(protocol) = VERSIONS.into_iter().find(|known| *known == version) else {
            return Err(McpError::Version { version: name_of(&answer["protocolVersion"]) });
        };
        client.connection.set_version(protocol);
        let info = &answer["serverInfo"];
        client.identity = Identity { name: name_of(&info["name"]), version: name_of(&info["version"]), protocol };
        let begun = message::notification("notifications/initialized", &Map::new());
        client.connection.send_first(begun, client.options.timeout)?;
        Ok(client)
    }

    /// What the server says of itself.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The tools that the server has and the configuration does not leave out.
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
                if tool["name"].as_str().is_some_and(|name| !self.options.uses(name)) {
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

    /// Calls a tool.
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

    /// Makes sure that the server answers.
    pub fn ping(&mut self, cancelled: Cancelled) -> Result<(), McpError> {
        self.request("ping", &Map::new(), self.options.timeout.min(PING), cancelled).map(drop)
    }

    /// Whether the server has said that its list of tools is another one by now. Looks at what has come meanwhile.
    pub fn tools_changed(&mut self) -> Result<bool, McpError> {
        self.drain()?;
        Ok(self.tools_changed)
    }

    /// Sends a request and waits for the answer, at most `limit`.
    fn request(
        &mut self,
        method: &'static str,
        params: &Map<String, Value>,
        limit: Duration,
        cancelled: Cancelled,
    ) -> Result<Value, McpError> {
        self.drain()?;
        let id = self.next_id;
        self.next_id += 1;
        let sent = self.connection.send(message::request(id, method, params), Some(id), limit);
        sent.map_err(|error| self.connection.explained(error))?;
        let deadline = Instant::now() + limit;
        let mut junk = 0;
        loop {
            if cancelled() {
                self.withdraw(id, "the user wants no answer any more");
                return Err(McpError::Cancelled { method });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.withdraw(id, "it took too long");
                return Err(McpError::Timeout { method, limit: self.options.timeout });
            }
            let event = match self.events.recv_timeout(left.min(LOOK)) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return Err(self.ended()),
            };
            match event {
                Event::Message(Incoming::Response { id: own, outcome }) if own == id => {
                    return outcome.map_err(|error| McpError::Refused {
                        method,
                        code: error.code,
                        message: error.message,
                    });
                }
                Event::Message(message) => self.take(message),
                Event::Junk(text) => {
                    tracing::debug!("MCP server {}: no message: {text}", self.options.name);
                    junk += 1;
                    if junk > MAX_JUNK {
                        return Err(McpError::Junk { text });
                    }
                }
                Event::Failed(own, error) if own.is_none_or(|own| own == id) => {
                    return Err(self.failure(error, method));
                }
                Event::Failed(..) => {}
            }
        }
    }

    /// `error` as that of the request `method`.
    fn failure(&mut self, error: McpError, method: &'static str) -> McpError {
        match error {
            McpError::Connection { source, .. } if matches!(*source, ureq::Error::Timeout(_)) => {
                McpError::Timeout { method, limit: self.options.timeout }
            }
            error => self.connection.explained(error),
        }
    }

    /// Looks at what has come while no answer was awaited.
    fn drain(&mut self) -> Result<(), McpError> {
        // A server that sends faster than this looks is left until an answer is awaited, which has a limit of time.
        for _ in 0..MAX_JUNK {
            match self.events.try_recv() {
                Ok(Event::Message(message)) => self.take(message),
                Ok(Event::Failed(None, error)) => return Err(self.connection.explained(error)),
                Ok(Event::Junk(_) | Event::Failed(Some(_), _)) => {}
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Err(self.ended()),
            }
        }
        Ok(())
    }

    /// Takes a message that is not the awaited answer.
    fn take(&mut self, message: Incoming) {
        match message {
            // It comes too late.
            Incoming::Response { .. } => {}
            Incoming::Request { id, method } => {
                // One that does not read its answers has none.
                let _ = self.connection.send(message::answer(&id, &method), None, PING);
            }
            Incoming::Notification { method } => self.tools_changed |= method == "notifications/tools/list_changed",
        }
    }

    /// Tells the server that an answer is not wanted any more.
    fn withdraw(&mut self, id: u64, reason: &str) {
        // A client must not withdraw its greeting, after which the connection ends anyway.
        if id > 1 {
            let params = fields(json!({"requestId": id, "reason": reason}));
            let _ = self.notify("notifications/cancelled", &params);
        }
    }

    fn notify(&mut self, method: &'static str, params: &Map<String, Value>) -> Result<(), McpError> {
        self.connection.send(message::notification(method, params), None, PING)
    }

    fn ended(&mut self) -> McpError {
        self.connection.explained(McpError::Ended { status: None, last_words: String::new() })
    }
}

impl Drop for Client {
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

/// A name that a server tells, bounded and on one line.
fn name_of(value: &Value) -> String {
    beginning(&plain(value.as_str().unwrap_or_default()).replace(['\n', '\t'], " "), MAX_NAME).to_owned()
}
