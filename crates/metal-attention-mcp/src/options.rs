//! How a server is reached and used.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// A server of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerOptions {
    /// Its name in the configuration.
    pub name: String,
    /// How it is reached.
    pub transport: Transport,
    /// The tools that are used; `None`: all of them.
    pub tools: Option<Vec<String>>,
    /// Longest time for its start, for the list of its tools, and for a call.
    pub timeout: Duration,
    /// Tools that are called without a question.
    pub allow: Vec<String>,
}

/// How a server is reached.
#[derive(Clone, PartialEq, Eq)]
pub enum Transport {
    /// It is a program, run with its standard streams as the connection.
    Stdio {
        /// The program.
        command: String,
        /// Its arguments.
        args: Vec<String>,
        /// Its environment, besides a few variables that every program needs.
        env: BTreeMap<String, String>,
        /// The folder that it runs in; `None`: this process's.
        cwd: Option<PathBuf>,
    },
    /// It answers HTTP requests.
    Http {
        /// Its address.
        url: String,
        /// Headers of each request, such as a key.
        headers: BTreeMap<String, String>,
    },
}

impl std::fmt::Debug for Transport {
    /// Without the values of variables and headers, which may be secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stdio { command, args, env, cwd } => {
                let env: Vec<_> = env.keys().collect();
                write!(f, "Stdio {{ command: {command:?}, args: {args:?}, env: {env:?}, cwd: {cwd:?} }}")
            }
            Self::Http { url, headers } => {
                let headers: Vec<_> = headers.keys().collect();
                write!(f, "Http {{ url: {url:?}, headers: {headers:?} }}")
            }
        }
    }
}

impl ServerOptions {
    /// What is run or reached, on one line.
    pub fn target(&self) -> String {
        match &self.transport {
            Transport::Stdio { command, args, .. } => {
                [command].into_iter().chain(args).map(String::as_str).collect::<Vec<_>>().join(" ")
            }
            Transport::Http { url, .. } => url.clone(),
        }
    }

    /// Whether a tool of this name is used.
    pub(crate) fn uses(&self, tool: &str) -> bool {
        self.tools.as_ref().is_none_or(|tools| tools.iter().any(|name| name == tool))
    }
}
