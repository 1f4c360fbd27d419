//! The servers of a configuration, and their tools.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use serde_json::{Map, Value, json};

use crate::{
    Cancelled, Client, ConsentError, Consents, Identity, McpError, ServerOptions, ServerTool, ToolList, ToolResult,
};

/// The servers of a configuration. Each is started when it is first needed, again where it has ended, and ends with this value.
#[derive(Debug)]
pub struct Toolbox {
    servers: Vec<Server>,
    consents: Consents,
}

/// A server, started or not.
struct Server {
    options: ServerOptions,
    state: Mutex<State>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.options.fmt(f)
    }
}

#[derive(Default)]
struct State {
    client: Option<Client>,
    list: ToolList,
    /// It took too long to answer: before it is used again it has to answer a ping.
    is_doubtful: bool,
}

/// What came of the start of a server.
#[derive(Debug)]
pub struct ServerReport {
    /// Its name in the configuration.
    pub name: String,
    /// What is run or reached.
    pub target: String,
    /// What the server says of itself, and its tools.
    pub outcome: Result<(Identity, ToolList), McpError>,
}

/// A tool as it is offered to a model.
#[derive(Debug, Clone, PartialEq)]
pub struct OfferedTool {
    /// The name that the model calls: letters, digits, `_` and `-`, and no other tool has it.
    pub name: String,
    /// The server.
    pub server: String,
    /// The tool as the server has it.
    pub tool: ServerTool,
}

impl OfferedTool {
    /// The tool in the shape of the `OpenAI` API.
    pub fn function(&self) -> Value {
        let ServerTool { description, parameters, .. } = &self.tool;
        json!({"type": "function", "function": {"name": self.name, "description": description, "parameters": parameters}})
    }
}

impl Toolbox {
    /// These servers, none of which is started yet.
    pub fn new(servers: Vec<ServerOptions>, consents: Consents) -> Self {
        let server = |options| Server { options, state: Mutex::default() };
        Self { servers: servers.into_iter().map(server).collect(), consents }
    }

    /// The names of the servers.
    pub fn servers(&self) -> impl Iterator<Item = &str> {
        self.servers.iter().map(|server| server.options.name.as_str())
    }

    /// Starts the servers that are not running, all at once, and lists their tools.
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

    /// Calls a tool. Whether the user allows it is for the caller to know.
    pub fn call(
        &self,
        server: &str,
        tool: &str,
        arguments: &Map<String, Value>,
        cancelled: Cancelled,
    ) -> Result<ToolResult, McpError> {
        self.find(server)?.call(tool, arguments, cancelled)
    }

    /// Whether a tool is called without a question.
    pub fn allows(&self, server: &str, tool: &str) -> bool {
        self.find(server).is_ok_and(|server| self.consents.allows(&server.options, tool))
    }

    /// From now on a tool is called without a question, by later processes, too.
    pub fn allow_always(&self, server: &str, tool: &str) -> Result<(), ConsentError> {
        match self.find(server) {
            Ok(server) => self.consents.allow_always(&server.options, tool),
            // Nothing of it can be called.
            Err(_) => Ok(()),
        }
    }

    fn find(&self, name: &str) -> Result<&Server, McpError> {
        let found = self.servers.iter().find(|server| server.options.name == name);
        found.ok_or_else(|| McpError::NoServer { name: name.to_owned(), known: list_of(self.servers()) })
    }
}

impl Drop for Toolbox {
    /// Ends all servers at once: each may take its time.
    fn drop(&mut self) {
        thread::scope(|scope| {
            for server in &self.servers {
                // Without a thread the server ends with its value.
                let _ = thread::Builder::new().spawn_scoped(scope, || drop(server.state().client.take()));
            }
        });
    }
}

impl Server {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self, cancelled: Cancelled) -> ServerReport {
        let mut state = self.state();
        let outcome = self.ready(&mut state, cancelled).map(|client| client.identity().clone());
        ServerReport::new(&self.options, outcome.map(|identity| (identity, state.list.clone())))
    }

    fn call(&self, tool: &str, arguments: &Map<String, Value>, cancelled: Cancelled) -> Result<ToolResult, McpError> {
        let mut state = self.state();
        self.ready(&mut state, cancelled)?;
        let State { client: Some(client), list, is_doubtful } = &mut *state else {
            return Err(McpError::SessionEnded);
        };
        if !list.tools.iter().any(|known| known.name == tool) {
            let known = list_of(list.tools.iter().map(|tool| tool.name.as_str()));
            return Err(McpError::NoTool { name: tool.to_owned(), known });
        }
        let result = client.call(tool, arguments, cancelled);
        if let Err(error) = &result {
            *is_doubtful = matches!(error, McpError::Timeout { .. });
            if error.ends_connection() {
                state.client = None;
            }
        }
        result
    }

    /// The server, started, and with the list of its tools as it is now.
    fn ready<'a>(&self, state: &'a mut State, cancelled: Cancelled) -> Result<&'a mut Client, McpError> {
        let running = state.client.take().and_then(|mut client| {
            if state.is_doubtful {
                client.ping(cancelled).ok()?;
            }
            let changed = client.tools_changed().ok()?;
            Some((client, changed))
        });
        state.is_doubtful = false;
        let (mut client, is_listed) = match running {
            Some((client, changed)) => (client, !changed),
            None => (Client::start(&self.options, cancelled)?, false),
        };
        if !is_listed {
            state.list = client.tools(cancelled)?;
        }
        Ok(state.client.insert(client))
    }
}

impl ServerReport {
    fn new(options: &ServerOptions, outcome: Result<(Identity, ToolList), McpError>) -> Self {
        Self { name: options.name.clone(), target: options.target(), outcome }
    }

    /// The tools of the servers that could be started, under names that a model can call: where two servers have a tool of
    /// the same name, it is `server__tool`.
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

/// `name` with letters, digits, `_` and `-` only.
fn callable(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || matches!(c, '_' | '-') { c } else { '_' }).collect()
}

/// Names after each other.
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
            ServerReport { name: name.into(), target: String::new(), outcome: Ok((Identity::default(), list)) }
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
