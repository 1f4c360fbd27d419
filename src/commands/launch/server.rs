//! The server that a coding tool uses: a running one is found and checked, or one is started.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use tempfile::NamedTempFile;
use ureq::Agent;

use super::MIN_N_CTX;
use super::tools::ToolTarget;
use crate::cli_error::CliError;
use crate::config::Config;
use crate::metadata_text::safe;
use crate::model_args::ModelArgs;
use crate::progress::ProgressLine;
use crate::served::print_line;

/// The address of a server that was started without flags.
const DEFAULT_URL: &str = "http://127.0.0.1:8080";

/// The time limit for a server's response if it need not load a model.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// The time limit for loading a model.
const LOAD_TIMEOUT: Duration = Duration::from_secs(900);

/// The time limit for a server's shutdown, after which it is killed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(20);

/// The time between two checks whether a server is ready or has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The requirements of the user.
pub struct ServerRequirements<'a> {
    /// The address of the server. `None`: the usual one, or one that is started.
    pub server: Option<&'a str>,
    /// The model.
    pub model: &'a ModelArgs,
    /// The server's key.
    pub key: Option<&'a str>,
    /// The context of a server that is started, in tokens.
    pub n_ctx: usize,
}

/// The command that starts a server.
pub struct ServerCommand {
    /// The arguments of this program.
    pub arguments: Vec<OsString>,
    /// The model's name in requests.
    pub model: String,
    /// Whether the model is named on the command line or in the environment, and is not one of the configuration file.
    is_named: bool,
}

impl ServerRequirements<'_> {
    /// The settings of a tool that uses `model` of the server at `url`.
    pub fn target(&self, url: String, model: String, n_ctx: usize) -> ToolTarget {
        ToolTarget { url, model, n_ctx, key: self.key.map(str::to_owned) }
    }

    /// The command that starts a server with the model at `port`. An error if no model or several models fit.
    pub fn start(&self, port: u16) -> Result<ServerCommand, CliError> {
        let config = Config::read(None)?;
        let configured = config.names();
        let named = self.model.named().map(Path::to_string_lossy);
        let (model, is_named) = match (&named, &configured[..]) {
            (Some(name), _) if configured.contains(&&**name) => (name.to_string(), false),
            (Some(_), _) => (self.model.stem(), true),
            (None, [only]) => ((*only).to_owned(), false),
            (None, []) => {
                let why = format!("no server runs at {DEFAULT_URL}, and no model is named for one to start");
                return Err(CliError::Usage(format!("{why}: metal-attention launch TOOL MODEL")));
            }
            (None, several) => {
                let why = format!("the configuration has the models {}", several.join(", "));
                return Err(CliError::Usage(format!("{why}: -m names one of them")));
            }
        };
        let (port, n_ctx) = (port.to_string(), self.n_ctx.to_string());
        let mut arguments: Vec<OsString> = ["serve", "--port", &port, "-c", &n_ctx].map(OsString::from).into();
        if is_named {
            arguments.extend(self.model.flags());
        }
        Ok(ServerCommand { arguments, model, is_named })
    }
}

/// The result of [`find`].
pub enum FoundServer {
    /// A running server with the model.
    Running(ToolTarget),
    /// No server: one has to be started.
    None,
}

/// The reason why a server cannot be used.
#[derive(Debug, thiserror::Error)]
enum UnfitServer {
    #[error("this is no address, as http://127.0.0.1:8080 is")]
    Address,
    #[error("nothing answers there")]
    NotRunning,
    #[error("what answers there is no server of metal-attention")]
    OtherProgram,
    #[error("it wants another key: --api-key or METAL_ATTENTION_API_KEY")]
    Key,
    #[error("it has no model {wanted:?}, but {have}")]
    NoModel { wanted: String, have: String },
    #[error("it has the models {0}: -m names one of them")]
    Several(String),
    #[error(
        "{model} has a context of {n_ctx} tokens there, and a coding tool needs {MIN_N_CTX} at least: start it with \
         `metal-attention serve -c {MIN_N_CTX}`"
    )]
    Short { model: String, n_ctx: usize },
    #[error("it refused {path}: {message}")]
    Refused { path: String, message: String },
}

/// Finds a running server. An unfit server is an error if the user has named it; otherwise it is skipped with a note, except
/// if it has several models.
pub fn find(requirements: &ServerRequirements<'_>) -> Result<FoundServer, CliError> {
    let url = requirements.server.unwrap_or(DEFAULT_URL).trim_end_matches('/');
    match (examine(url, requirements), requirements.server) {
        (Ok(target), _) => Ok(FoundServer::Running(target)),
        (Err(UnfitServer::NotRunning), None) => Ok(FoundServer::None),
        (Err(error @ UnfitServer::Several(_)), None) | (Err(error), Some(_)) => {
            Err(CliError::General(format!("the server {}: {error}", safe(url))))
        }
        (Err(error), None) => {
            print_line(&format!("note: the server {url} is not used: {error}"));
            Ok(FoundServer::None)
        }
    }
}

/// Checks a running server, and chooses its model.
fn examine(url: &str, requirements: &ServerRequirements<'_>) -> Result<ToolTarget, UnfitServer> {
    let client = ServerClient { url, key: requirements.key };
    let list: ServedModels = client.get("/v1/models", None, RESPONSE_TIMEOUT)?;
    if list.data.is_empty() || list.data.iter().any(|model| model.owned_by != "metal-attention") {
        return Err(UnfitServer::OtherProgram);
    }
    let names: Vec<_> = list.data.into_iter().map(|model| model.id).collect();
    let model = choose_model(&names, requirements.model)?;
    examine_model(&client, model, requirements)
}

/// Checks the context of a model of a running server. Loads the model if necessary.
fn examine_model(
    client: &ServerClient<'_>,
    model: String,
    requirements: &ServerRequirements<'_>,
) -> Result<ToolTarget, UnfitServer> {
    // The request waits until the model is loaded.
    let props: ServerProps = client.get("/props", Some(("model", &model)), LOAD_TIMEOUT)?;
    if props.engine != "metal-attention" {
        return Err(UnfitServer::OtherProgram);
    }
    let n_ctx = props.default_generation_settings.n_ctx;
    if n_ctx < MIN_N_CTX {
        return Err(UnfitServer::Short { model: safe(&model), n_ctx });
    }
    Ok(requirements.target(client.url.to_owned(), model, n_ctx))
}

/// The name of the model among those of the server.
fn choose_model(names: &[String], model: &ModelArgs) -> Result<String, UnfitServer> {
    let have = || names.iter().map(|name| format!("{:?}", safe(name))).collect::<Vec<_>>().join(", ");
    if let Some(named) = model.named() {
        let (given, stem) = (named.to_string_lossy(), model.stem());
        let found = names.iter().find(|name| **name == given).or(names.iter().find(|name| **name == stem));
        if let Some(name) = found {
            return Ok(name.clone());
        }
        if model.is_given() {
            return Err(UnfitServer::NoModel { wanted: safe(&given), have: have() });
        }
    }
    match names {
        [only] => Ok(only.clone()),
        _ => Err(UnfitServer::Several(have())),
    }
}

/// Starts a server and waits until its model is loaded.
pub fn start(requirements: &ServerRequirements<'_>) -> Result<(ToolTarget, StartedServer), CliError> {
    let start = requirements.start(0)?;
    // A model that is not in the cache is downloaded here, where the progress is visible.
    if start.is_named {
        requirements.model.fetch()?;
    }
    let mut server = StartedServer::new(&start, requirements.key)?;
    let progress = ProgressLine::spinner("starting the server");
    let url = server.wait_for_address()?;
    progress.describe("loading the model".into());
    server.wait_until_ready(&url)?;
    let client = ServerClient { url: &url, key: requirements.key };
    let target = examine_model(&client, start.model, requirements)
        .map_err(|error| server.failed(&format!("the server that was started cannot be used: {error}")))?;
    drop(progress);
    Ok((target, server))
}

/// A server that this process started. It ends when this value is dropped, and also when this process ends in any other way,
/// because its stdin is closed then.
pub struct StartedServer {
    /// The process.
    child: Child,
    /// Its stderr.
    log: NamedTempFile,
}

impl StartedServer {
    /// Starts the process.
    fn new(start: &ServerCommand, key: Option<&str>) -> Result<Self, CliError> {
        let wrong = |error: std::io::Error| CliError::General(format!("cannot start a server: {error}"));
        let log = tempfile::Builder::new().prefix("metal-attention-serve-").suffix(".log").tempfile().map_err(wrong)?;
        let mut command = Command::new(std::env::current_exe().map_err(wrong)?);
        command.args(&start.arguments).arg("--until-stdin-closes");
        if let Some(key) = key {
            command.env("METAL_ATTENTION_API_KEY", key);
        }
        // Ctrl-C at the terminal is for the tool.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        #[cfg(windows)]
        {
            const CREATE_NEW_PROCESS_GROUP: u32 = 0x200;
            std::os::windows::process::CommandExt::creation_flags(&mut command, CREATE_NEW_PROCESS_GROUP);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(log.reopen().map_err(wrong)?);
        Ok(Self { child: command.spawn().map_err(wrong)?, log })
    }

    /// Waits for the address in the log.
    fn wait_for_address(&mut self) -> Result<String, CliError> {
        self.wait_for(RESPONSE_TIMEOUT * 12, "say where it listens", |server| {
            let log = std::fs::read_to_string(server.log.path()).unwrap_or_default();
            let address = log.lines().find_map(|line| line.strip_prefix("listening on "));
            // The last line may be incomplete.
            address.filter(|_| log.ends_with('\n')).map(str::to_owned)
        })
    }

    /// Waits until the models are loaded that the server starts with.
    fn wait_until_ready(&mut self, url: &str) -> Result<(), CliError> {
        let client = ServerClient { url, key: None };
        self.wait_for(LOAD_TIMEOUT, "load its model", |_| client.is_ready().then_some(()))
    }

    /// Calls `look` until it returns a value. An error, which says what the server did not do (`what`), if it ends or if the time
    /// limit is over.
    fn wait_for<T>(
        &mut self,
        limit: Duration,
        what: &str,
        mut look: impl FnMut(&Self) -> Option<T>,
    ) -> Result<T, CliError> {
        let begun = Instant::now();
        loop {
            if let Some(found) = look(self) {
                return Ok(found);
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(self.failed(&format!("the server ended ({status}) before it could {what}")));
            }
            if begun.elapsed() > limit {
                return Err(self.failed(&format!("the server did not {what} in {} s", limit.as_secs())));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// The error of a server, with the last lines of its log. The log file is kept.
    fn failed(&mut self, why: &str) -> CliError {
        const LINES: usize = 5;
        let log = std::fs::read_to_string(self.log.path()).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        let end = safe_end(&lines[lines.len().saturating_sub(LINES)..]);
        self.log.disable_cleanup(true);
        CliError::General(format!("{why}; its log, {}, ends with\n{end}", self.log.path().display()))
    }
}

/// Lines of a log, escaped and indented.
fn safe_end(lines: &[&str]) -> String {
    lines.iter().map(|line| format!("  {}", safe(line))).collect::<Vec<_>>().join("\n")
}

impl Drop for StartedServer {
    fn drop(&mut self) {
        // Closing its stdin makes the server shut down.
        drop(self.child.stdin.take());
        let begun = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if begun.elapsed() > EXIT_TIMEOUT {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// A port that is free at the moment.
pub fn free_port() -> Result<u16, CliError> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0));
    let address = listener.and_then(|listener| listener.local_addr());
    address.map(|address| address.port()).map_err(|error| CliError::General(format!("there is no free port: {error}")))
}

/// The response of `/v1/models`; other fields are ignored.
#[derive(Deserialize)]
struct ServedModels {
    /// The models.
    data: Vec<ListedModel>,
}

/// A model of `/v1/models`.
#[derive(Deserialize)]
struct ListedModel {
    /// The name in requests.
    id: String,
    /// `metal-attention` for a server of this program.
    #[serde(default)]
    owned_by: String,
}

/// The response of `/props`; other fields are ignored.
#[derive(Deserialize)]
struct ServerProps {
    /// `metal-attention` for a server of this program.
    #[serde(default)]
    engine: String,
    /// The settings of a slot.
    default_generation_settings: ServerGenerationSettings,
}

/// The settings of a slot.
#[derive(Deserialize)]
struct ServerGenerationSettings {
    /// The length of the context in tokens.
    n_ctx: usize,
}

/// An error response, in the form of OpenAI's and llama.cpp's interfaces.
#[derive(Deserialize)]
struct ErrorBody {
    /// The error.
    error: ErrorDetail,
}

/// The error of a response.
#[derive(Deserialize)]
struct ErrorDetail {
    /// The message.
    message: String,
}

/// An HTTP client for one server.
struct ServerClient<'a> {
    /// The address, without a slash at the end.
    url: &'a str,
    /// The key for the header `Authorization`.
    key: Option<&'a str>,
}

impl ServerClient<'_> {
    /// Requests `path` and parses the JSON response. `limit` is the time limit for all of it.
    fn get<T: DeserializeOwned>(
        &self,
        path: &str,
        query: Option<(&str, &str)>,
        limit: Duration,
    ) -> Result<T, UnfitServer> {
        let address = format!("{}{path}", self.url);
        let uri = address.parse::<ureq::http::Uri>();
        if !uri.is_ok_and(|uri| uri.host().is_some() && matches!(uri.scheme_str(), Some("http" | "https"))) {
            return Err(UnfitServer::Address);
        }
        let mut request = agent(limit).get(address);
        if let Some((name, value)) = query {
            request = request.query(name, value);
        }
        if let Some(key) = self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        let mut answer = request.call().map_err(|error| match error {
            ureq::Error::BadUri(_) => UnfitServer::Address,
            ureq::Error::HostNotFound | ureq::Error::ConnectionFailed | ureq::Error::Timeout(_) => {
                UnfitServer::NotRunning
            }
            ureq::Error::Io(error) if error.kind() == ErrorKind::ConnectionRefused => UnfitServer::NotRunning,
            _ => UnfitServer::OtherProgram,
        })?;
        let status = answer.status().as_u16();
        let body = answer.body_mut().read_to_string().map_err(|_| UnfitServer::OtherProgram)?;
        match status {
            200 => serde_json::from_str(&body).map_err(|_| UnfitServer::OtherProgram),
            401 | 403 => Err(UnfitServer::Key),
            _ => match serde_json::from_str::<ErrorBody>(&body) {
                Ok(refusal) if status != 404 => {
                    Err(UnfitServer::Refused { path: safe(path), message: safe(&refusal.error.message) })
                }
                _ => Err(UnfitServer::OtherProgram),
            },
        }
    }

    /// Whether the models are loaded that the server starts with.
    fn is_ready(&self) -> bool {
        agent(RESPONSE_TIMEOUT).get(format!("{}/ready", self.url)).call().is_ok_and(|answer| answer.status() == 200)
    }
}

/// The settings of a request.
fn agent(limit: Duration) -> Agent {
    // A proxy of the environment is not used: it cannot reach this machine.
    let config =
        Agent::config_builder().proxy(None).http_status_as_error(false).timeout_connect(Some(RESPONSE_TIMEOUT));
    config.timeout_global(Some(limit)).build().into()
}
