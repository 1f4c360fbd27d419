//! The MCP servers of the configuration file.
//!
//! ```toml
//! [mcp.servers.files]
//! command = "npx"
//! args = ["-y", "@modelcontextprotocol/server-filesystem", "/home/me/notes"]
//! tools = ["read_file", "list_directory"]
//! allow = ["list_directory"]
//!
//! [mcp.servers.tracker]
//! url = "https://tracker.example/mcp"
//! headers = { Authorization = "Bearer ${TRACKER_TOKEN}" }
//! timeout = "2m"
//! ```

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use metal_attention_mcp::{Consents, ServerOptions, Toolbox, Transport};
use metal_attention_server::http::KeepAlive;
use serde::Deserialize;

use crate::cli_error::CliError;
use crate::config::Config;

/// The file beside the configuration with the tools that the user always allows.
const CONSENTS: &str = "mcp-consents.json";

/// The default time limit of a start, a list or a call.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The largest time limit that the configuration may set.
const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// The section `[mcp]` of the configuration.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct McpSection {
    /// The servers, by their names.
    servers: BTreeMap<String, ServerSection>,
}

/// One server: a program (`command`), or an address (`url`).
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ServerSection {
    /// The program that is the server.
    command: Option<String>,
    /// Its arguments.
    args: Option<Vec<String>>,
    /// Environment variables of the program; `${NAME}` in a value is replaced by this program's variable.
    env: Option<BTreeMap<String, String>>,
    /// The folder that the program runs in.
    cwd: Option<PathBuf>,
    /// The address of the server.
    url: Option<String>,
    /// Headers of each request; `${NAME}` in a value is replaced by this program's variable.
    headers: Option<BTreeMap<String, String>>,
    /// The names of the tools to use. `None`: all of them.
    tools: Option<Vec<String>>,
    /// The time limit of a start, a list or a call, as `30s` or `2m`.
    timeout: Option<String>,
    /// The names of tools that are called without asking the user.
    #[serde(default)]
    allow: Vec<String>,
}

impl Config {
    /// Takes all MCP servers out of the configuration. `None`: it has none.
    pub fn take_toolbox(&mut self) -> Result<Option<Toolbox>, CliError> {
        let mcp = std::mem::take(&mut self.mcp);
        if mcp.servers.is_empty() {
            return Ok(None);
        }
        Self { mcp, path: self.path.clone(), ..Self::default() }.toolbox(&[]).map(Some)
    }

    /// The MCP servers with these names; all of them if `names` is empty. An error if the configuration has none, or not one of
    /// the names.
    pub fn toolbox(self, names: &[String]) -> Result<Toolbox, CliError> {
        let known = self.mcp.servers.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        if let Some(name) = names.iter().find(|name| !self.mcp.servers.contains_key(*name)) {
            let known = if known.is_empty() { "none" } else { &known };
            return Err(CliError::Usage(format!("no MCP server {name:?} is in the configuration; there are: {known}")));
        }
        let Some(path) = self.path.as_ref().filter(|_| !self.mcp.servers.is_empty()) else {
            let message = "no MCP server is in the configuration: [mcp.servers.NAME] in metal-attention/config.toml in \
                           ~/.config names one, see docs/mcp.md";
            return Err(CliError::Usage(message.into()));
        };
        let consents = Consents::read(&path.with_file_name(CONSENTS)).map_err(|e| CliError::General(e.to_string()))?;
        let is_named = |name: &String| names.is_empty() || names.contains(name);
        let sections = self.mcp.servers.into_iter().filter(|(name, _)| is_named(name));
        let servers = sections.map(|(name, section)| {
            let options = section.options(&name, |variable| std::env::var(variable).ok());
            options.map_err(|why| CliError::Usage(format!("the MCP server {name:?} of the configuration: {why}")))
        });
        Ok(Toolbox::new(servers.collect::<Result<_, _>>()?, consents))
    }
}

impl ServerSection {
    /// The options of the server called `name`. `variable` reads environment variables.
    fn options(self, name: &str, variable: impl Fn(&str) -> Option<String>) -> Result<ServerOptions, String> {
        if name.is_empty() || name.chars().any(|c| !(c.is_ascii_alphanumeric() || "_-.".contains(c))) {
            return Err("its name may have letters, digits, _, - and . only".into());
        }
        let values = |values: Option<BTreeMap<String, String>>| -> Result<BTreeMap<String, String>, String> {
            let filled = |(name, value): (String, String)| Ok((name, fill_in(&value, &variable)?));
            values.unwrap_or_default().into_iter().map(filled).collect()
        };
        let transport = match (self.command, self.url) {
            (Some(command), None) if self.headers.is_none() => {
                Transport::Stdio { command, args: self.args.unwrap_or_default(), env: values(self.env)?, cwd: self.cwd }
            }
            (None, Some(url)) if self.args.is_none() && self.env.is_none() && self.cwd.is_none() => {
                Transport::Http { url, headers: values(self.headers)? }
            }
            (Some(_), None) => return Err("a server with a command has no headers".into()),
            (None, Some(_)) => return Err("a server with a url has no args, env and cwd".into()),
            (Some(_), Some(_)) | (None, None) => return Err("it needs either a command or a url".into()),
        };
        let timeout = match &self.timeout {
            None => TIMEOUT,
            Some(text) => match text.parse() {
                Ok(KeepAlive::For(time)) if !time.is_zero() && time <= MAX_TIMEOUT => time,
                Ok(KeepAlive::For(_) | KeepAlive::Forever) | Err(_) => {
                    return Err(format!("the timeout {text:?} is no time of at most 24h, such as 30s or 2m"));
                }
            },
        };
        Ok(ServerOptions { name: name.to_owned(), transport, tools: self.tools, timeout, allow: self.allow })
    }
}

/// `text` with each `${NAME}` replaced by the value of the variable.
fn fill_in(text: &str, variable: impl Fn(&str) -> Option<String>) -> Result<String, String> {
    let (mut filled, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("${") {
        // The value may contain a secret, so the error does not quote it.
        let (name, after) = after.split_once('}').ok_or("a value has ${ without }")?;
        filled += before;
        filled += &variable(name).ok_or_else(|| format!("the environment has no variable {name}"))?;
        rest = after;
    }
    Ok(filled + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: &str) -> Result<ServerOptions, String> {
        let config: Config = toml::from_str(text).map_err(|error| error.to_string())?;
        let (name, section) = config.mcp.servers.into_iter().next().unwrap();
        section.options(&name, |name| (name == "TOKEN").then(|| "secret".to_owned()))
    }

    #[test]
    fn servers_are_programs_or_addresses() {
        let stdio = options(
            "[mcp.servers.a]\ncommand = \"run\"\nargs = [\"-x\"]\nenv = { T = \"${TOKEN}!\", U = \"$5\" }\ncwd = \"/c\"\n\
             tools = [\"f\"]\ntimeout = \"1m30s\"\nallow = [\"f\"]\n",
        );
        let env = [("T", "secret!"), ("U", "$5")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        let transport = Transport::Stdio {
            command: "run".into(),
            args: vec!["-x".into()],
            env: BTreeMap::from(env),
            cwd: Some("/c".into()),
        };
        let (tools, allow) = (Some(vec!["f".into()]), vec!["f".into()]);
        let expected = ServerOptions { name: "a".into(), transport, tools, timeout: Duration::from_secs(90), allow };
        assert_eq!(stdio, Ok(expected));
        let http =
            options("[mcp.servers.b]\nurl = \"http://x\"\nheaders = { Key = \"a${TOKEN}b${TOKEN}\" }\n").unwrap();
        let headers = BTreeMap::from([("Key".into(), "asecretbsecret".into())]);
        assert_eq!(http.transport, Transport::Http { url: "http://x".into(), headers });
        assert_eq!((http.tools, http.timeout, http.allow.len()), (None, Duration::from_secs(30), 0));
    }

    #[test]
    fn an_error_names_what_is_wrong_with_a_server() {
        for (text, why) in [
            ("[mcp.servers.a]\n", "it needs either a command or a url"),
            ("[mcp.servers.a]\ncommand = \"x\"\nurl = \"y\"\n", "it needs either a command or a url"),
            ("[mcp.servers.a]\ncommand = \"x\"\nheaders = {}\n", "has no headers"),
            ("[mcp.servers.a]\nurl = \"x\"\nargs = []\n", "has no args"),
            ("[mcp.servers.a]\nurl = \"x\"\ntimeout = \"0s\"\n", "the timeout \"0s\" is no time"),
            ("[mcp.servers.a]\nurl = \"x\"\ntimeout = \"25h\"\n", "the timeout \"25h\" is no time"),
            ("[mcp.servers.a]\nurl = \"x\"\ntimeout = \"-1\"\n", "the timeout \"-1\" is no time"),
            ("[mcp.servers.a]\nurl = \"x\"\nheaders = { A = \"${NONE}\" }\n", "no variable NONE"),
            ("[mcp.servers.a]\nurl = \"x\"\nheaders = { A = \"${TOKEN\" }\n", "a value has ${ without }"),
            ("[mcp.servers.\"a b\"]\nurl = \"x\"\n", "its name may have"),
            ("[mcp.servers.a]\nurl = \"x\"\nallowed = []\n", "unknown field `allowed`"),
            ("[mcp.server.a]\nurl = \"x\"\n", "unknown field `server`"),
        ] {
            let error = options(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
