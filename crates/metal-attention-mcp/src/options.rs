//! The configuration of a server.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;
use sha2::{Digest, Sha256};

/// The configuration of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerOptions {
    /// Its name in the configuration.
    pub name: String,
    /// The transport.
    pub transport: Transport,
    /// The tools that are selected; `None`: all of them.
    pub tools: Option<Vec<String>>,
    /// The timeout of its start, of the list of its tools, and of a call.
    pub timeout: Duration,
    /// Tools that need no consent.
    pub allow: Vec<String>,
}

/// The transport of a server.
#[derive(Clone, PartialEq, Eq)]
pub enum Transport {
    /// A child process; messages go over its stdin and stdout.
    Stdio {
        /// The program.
        command: String,
        /// Its arguments.
        args: Vec<String>,
        /// Its environment, in addition to a few inherited variables such as `PATH`.
        env: BTreeMap<String, String>,
        /// Its working directory; `None`: this process's.
        cwd: Option<PathBuf>,
    },
    /// Streamable HTTP.
    Http {
        /// The URL.
        url: String,
        /// Headers of each request, such as a key.
        headers: BTreeMap<String, String>,
    },
}

impl std::fmt::Debug for Transport {
    /// Omits the values of variables and headers, which may be secrets.
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
    /// The command line or URL. Different commands have different ones.
    pub fn target(&self) -> String {
        match &self.transport {
            Transport::Stdio { command, args, .. } => {
                [command].into_iter().chain(args).map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
            }
            Transport::Http { url, .. } => url.clone(),
        }
    }

    /// The [`target`](Self::target), followed by a hash of the working directory and the environment if the
    /// configuration sets one: with others, a program may do something else. Only the hash is kept, since the values
    /// may be secrets.
    pub(crate) fn consent_target(&self) -> String {
        let target = self.target();
        match &self.transport {
            Transport::Stdio { env, cwd, .. } if cwd.is_some() || !env.is_empty() => {
                let cwd = cwd.as_ref().map(|cwd| cwd.to_string_lossy());
                let hash = Sha256::digest(json!([cwd, env]).to_string());
                let hash = hash.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"));
                // Outside of quotes, no target contains two spaces in a row.
                format!("{target}  cwd and env: sha256 {hash}")
            }
            Transport::Stdio { .. } | Transport::Http { .. } => target,
        }
    }

    /// Whether a tool of this name is selected.
    pub(crate) fn selects(&self, tool: &str) -> bool {
        self.tools.as_ref().is_none_or(|tools| tools.iter().any(|name| name == tool))
    }
}

/// Quotes a word of a command line that is empty or would be read as several words.
fn quoted(word: &str) -> Cow<'_, str> {
    let is_plain = |c: char| !c.is_whitespace() && !c.is_control() && !matches!(c, '"' | '\\');
    if !word.is_empty() && word.chars().all(is_plain) { word.into() } else { format!("{word:?}").into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_commands_have_different_targets() {
        let target = |args: &[&str]| {
            let args = args.iter().map(|&arg| arg.to_owned()).collect();
            let transport = Transport::Stdio { command: "run".into(), args, env: BTreeMap::new(), cwd: None };
            let (tools, timeout, allow) = (None, Duration::ZERO, Vec::new());
            ServerOptions { name: "a".into(), transport, tools, timeout, allow }.target()
        };
        assert_eq!(target(&["-y", "/a b", "", "\"", "é"]), r#"run -y "/a b" "" "\"" é"#);
        assert_ne!(target(&["a", "b"]), target(&["a b"]));
    }

    #[test]
    fn consent_is_for_a_program_with_its_environment() {
        let target = |cwd: Option<&str>, env: &[(&str, &str)]| {
            let env = env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
            let transport =
                Transport::Stdio { command: "run".into(), args: Vec::new(), env, cwd: cwd.map(PathBuf::from) };
            let (tools, timeout, allow) = (None, Duration::ZERO, Vec::new());
            ServerOptions { name: "a".into(), transport, tools, timeout, allow }.consent_target()
        };
        assert_eq!(target(None, &[]), "run");
        let hash = "a7d64301b02c93a631be3d3af7d3cc4263f0a91a75804f4116186e1d77bda9f3";
        assert_eq!(target(Some("/c"), &[("KEY", "secret")]), format!("run  cwd and env: sha256 {hash}"));
        let all = [
            target(None, &[]),
            target(Some("/c"), &[]),
            target(Some("/d"), &[]),
            target(None, &[("A", "1")]),
            target(None, &[("A", "2")]),
            target(None, &[("B", "1")]),
            target(Some("/c"), &[("A", "1")]),
        ];
        assert_eq!(all.iter().collect::<std::collections::BTreeSet<_>>().len(), all.len());
    }
}
