//! The servers of a configuration, and their tools.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;

use serde_json::{Map, Value, json};

use crate::{
    Cancelled, Consent, Consents, McpClient, McpError, ServerInfo, ServerOptions, ServerTool, ToolList, ToolResult,
};

/// The servers of a configuration. A server is started on demand, and restarted after it has ended. Dropping this value
/// ends all servers.
#[derive(Debug)]
pub struct Toolbox {
    /// The servers, in the order of the configuration.
    servers: Vec<Server>,
    /// The consents to calls.
    consents: Consents,
}

/// A server, started or not.
struct Server {
    /// Its configuration.
    options: ServerOptions,
    /// Locked during a call: a server runs one at a time.
    session: Mutex<ServerSession>,
    /// Its last description and list of tools; `None`: it was never started.
    listing: Mutex<Option<(ServerInfo, ToolList)>>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.options.fmt(f)
    }
}

/// The session with a server.
#[derive(Default)]
struct ServerSession {
    /// The client; `None`: the server is not running.
    client: Option<McpClient>,
    /// Whether the last call timed out or was cancelled: the server may hang, and must answer a ping before the next
    /// call.
    is_unanswered: bool,
}

/// The outcome of a server's start.
#[derive(Debug)]
pub struct ServerReport {
    /// Its name in the configuration.
    pub name: String,
    /// Its command line or URL.
    pub target: String,
    /// Its description and tools, or the reason why it could not be started.
    pub outcome: Result<(ServerInfo, ToolList), McpError>,
}

/// A tool in the form in which it is offered to a model.
#[derive(Debug, Clone, PartialEq)]
pub struct OfferedTool {
    /// The function's name: letters, digits, `_` and `-`, unique among all tools.
    pub name: String,
    /// The server.
    pub server: String,
    /// The tool on the server.
    pub tool: ServerTool,
}

impl OfferedTool {
    /// The tool in the form of the `OpenAI` API.
    pub fn function(&self) -> Value {
        let ServerTool { description, parameters, .. } = &self.tool;
        json!({"type": "function", "function": {"name": self.name, "description": description, "parameters": parameters}})
    }
}

impl Toolbox {
    /// The servers of `options`. None is started yet.
    pub fn new(options: Vec<ServerOptions>, consents: Consents) -> Self {
        let server = |options| Server { options, session: Mutex::default(), listing: Mutex::default() };
        Self { servers: options.into_iter().map(server).collect(), consents }
    }

    /// The names of the servers.
    pub fn servers(&self) -> impl Iterator<Item = &str> {
        self.servers.iter().map(|server| server.options.name.as_str())
    }

    /// Starts the servers that are not running, concurrently, and lists their tools. Of a server that is busy with a
    /// call, the last list is returned.
    pub fn connect(&self, cancelled: Cancelled) -> Vec<ServerReport> {
        thread::scope(|scope| {
            let start = |server: &'_ Server| server.report(cancelled);
            let threads: Vec<_> = self
                .servers
                .iter()
                .map(|server| (server, thread::Builder::new().spawn_scoped(scope, move || start(server))))
                .collect();
            let report = |(server, thread): (&Server, std::io::Result<thread::ScopedJoinHandle<'_, _>>)| match thread {
                Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(error) => ServerReport::new(&server.options, Err(McpError::Thread(error))),
            };
            threads.into_iter().map(report).collect()
        })
    }

    /// Calls a tool. Needs consent unless the tool needs none.
    pub fn call(
        &self,
        server: &str,
        tool: &str,
        arguments: &Map<String, Value>,
        consent: Option<Consent>,
        cancelled: Cancelled,
    ) -> Result<ToolResult, McpError> {
        let server = self.find(server)?;
        if consent.is_none() && !self.consents.allows(&server.options, tool)? {
            return Err(McpError::NoConsent { tool: tool.to_owned() });
        }
        let mut session = server.session();
        let client = server.ready(&mut session, cancelled)?;
        server.check_tool(tool)?;
        // Consent is only kept for tools that exist.
        match consent {
            Some(Consent::Always) => self.consents.keep(&server.options, tool)?,
            Some(Consent::Once) | None => {}
        }
        let result = client.call(tool, arguments, cancelled);
        if let Err(error) = &result {
            session.is_unanswered = matches!(error, McpError::Timeout { .. } | McpError::Cancelled { .. });
            if error.ends_connection() {
                session.client = None;
            }
        }
        result
    }

    /// Whether a tool needs no consent. False if the consents cannot be read.
    pub fn allows(&self, server: &str, tool: &str) -> bool {
        self.find(server).is_ok_and(|server| self.consents.allows(&server.options, tool).unwrap_or(false))
    }

    /// Ends the servers, concurrently: each may take seconds. Servers that are busy with a call keep running.
    pub fn close(&self) {
        thread::scope(|scope| {
            for server in &self.servers {
                let close = || drop(server.session.try_lock().ok().and_then(|mut session| session.client.take()));
                // Without a thread, the server ends when it is dropped.
                let _ = thread::Builder::new().spawn_scoped(scope, close);
            }
        });
    }

    fn find(&self, name: &str) -> Result<&Server, McpError> {
        let found = self.servers.iter().find(|server| server.options.name == name);
        found.ok_or_else(|| McpError::NoServer { name: name.to_owned(), known: list_of(self.servers()) })
    }
}

impl Drop for Toolbox {
    fn drop(&mut self) {
        self.close();
    }
}

impl Server {
    fn session(&self) -> MutexGuard<'_, ServerSession> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listing(&self) -> MutexGuard<'_, Option<(ServerInfo, ToolList)>> {
        self.listing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the server if need be, and reports its tools; the last list if it is busy with a call.
    fn report(&self, cancelled: Cancelled) -> ServerReport {
        let mut session = match self.session.try_lock() {
            Ok(session) => session,
            Err(TryLockError::Poisoned(session)) => session.into_inner(),
            Err(TryLockError::WouldBlock) => match self.listing().clone() {
                Some(listing) => return ServerReport::new(&self.options, Ok(listing)),
                None => self.session(),
            },
        };
        let ready = self.ready(&mut session, cancelled).map(drop);
        ServerReport::new(&self.options, ready.map(|()| self.listing().clone().unwrap_or_default()))
    }

    /// Returns the client of the server with a current list of tools. Starts the server if it is not running.
    fn ready<'a>(&self, session: &'a mut ServerSession, cancelled: Cancelled) -> Result<&'a mut McpClient, McpError> {
        if session.is_unanswered
            && let Some(client) = &mut session.client
        {
            match client.ping(cancelled) {
                Ok(()) => {}
                // A cancelled ping does not mean that the server hangs.
                Err(error @ McpError::Cancelled { .. }) => return Err(error),
                Err(_) => session.client = None,
            }
        }
        session.is_unanswered = false;
        let running = session.client.take().and_then(|mut client| {
            let changed = client.tools_changed().ok()?;
            Some((client, changed))
        });
        let (mut client, is_listed) = match running {
            Some((client, changed)) => (client, !changed),
            None => (McpClient::start(&self.options, cancelled)?, false),
        };
        if !is_listed {
            let tools = client.tools(cancelled)?;
            *self.listing() = Some((client.info().clone(), tools));
        }
        Ok(session.client.insert(client))
    }

    fn check_tool(&self, name: &str) -> Result<(), McpError> {
        let listing = self.listing();
        let tools = listing.as_ref().map_or(&[][..], |(_, list)| &list.tools);
        if tools.iter().any(|tool| tool.name == name) {
            return Ok(());
        }
        let known = list_of(tools.iter().map(|tool| tool.name.as_str()));
        Err(McpError::NoTool { name: name.to_owned(), known })
    }
}

impl ServerReport {
    fn new(options: &ServerOptions, outcome: Result<(ServerInfo, ToolList), McpError>) -> Self {
        Self { name: options.name.clone(), target: options.target(), outcome }
    }

    /// The tools of the servers that could be started, under unique names. The name of a tool that several servers have
    /// is `server__tool`.
    pub fn offered(reports: &[Self]) -> Vec<OfferedTool> {
        let lists = reports.iter().filter_map(|report| Some((&report.name, &report.outcome.as_ref().ok()?.1.tools)));
        let all: Vec<_> = lists.flat_map(|(server, tools)| tools.iter().map(move |tool| (server, tool))).collect();
        let mut offered: Vec<OfferedTool> = Vec::new();
        for (server, tool) in &all {
            let plain = callable(&tool.name);
            let is_unique = all.iter().filter(|(_, other)| callable(&other.name) == plain).count() == 1;
            let name = if is_unique { plain } else { callable(&format!("{server}__{}", tool.name)) };
            let taken = |name: &str| offered.iter().any(|other| other.name == name);
            let numbered = (2..).map(|n| format!("{name}_{n}"));
            let name = [name.clone()].into_iter().chain(numbered).find(|name| !taken(name)).unwrap_or_default();
            offered.push(OfferedTool { name, server: (*server).clone(), tool: (*tool).clone() });
        }
        offered
    }
}

/// Replaces all characters except letters, digits, `_` and `-`.
fn callable(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || matches!(c, '_' | '-') { c } else { '_' }).collect()
}

/// Joins names for a message.
fn list_of<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<_> = names.collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_can_be_called() {
        let report = |name: &str, tools: &[&str]| {
            let tool = |name: &&str| ServerTool {
                name: (*name).to_owned(),
                description: String::new(),
                parameters: Map::new(),
            };
            let list = ToolList { tools: tools.iter().map(tool).collect(), problems: Vec::new() };
            ServerReport { name: name.into(), target: String::new(), outcome: Ok((ServerInfo::default(), list)) }
        };
        let mut reports =
            vec![report("a", &["read", "b__x", "s p.é"]), report("b", &["read", "x"]), report("c", &["x"])];
        let failed = Err(McpError::SessionEnded);
        reports.push(ServerReport { name: "d".into(), target: String::new(), outcome: failed });
        let offered = ServerReport::offered(&reports);
        let names: Vec<_> = offered.iter().map(|tool| (tool.name.as_str(), tool.server.as_str())).collect();
        let expected =
            [("a__read", "a"), ("b__x", "a"), ("s_p__", "a"), ("b__read", "b"), ("b__x_2", "b"), ("c__x", "c")];
        assert_eq!(names, expected);
        assert_eq!(offered[4].tool.name, "x");
        assert_eq!(offered[0].function()["function"]["name"], "a__read");
    }
}
