//! The server that a tool uses: one that runs, or one that is started and ends with the tool.

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

/// Where a server listens that was started without flags.
const USUAL: &str = "http://127.0.0.1:8080";

/// The longest that a server may take to say that it is there.
const SHORT: Duration = Duration::from_secs(5);

/// The longest that a model may take to load.
const LOADING: Duration = Duration::from_secs(900);

/// The longest that a server may take to end.
const ENDING: Duration = Duration::from_secs(20);

/// How often is looked whether a server is ready or has ended.
const TICK: Duration = Duration::from_millis(50);

/// What the user wants.
pub struct ServerRequirements<'a> {
    /// The server.
    pub server: Option<&'a str>,
    /// The model.
    pub model: &'a ModelArgs,
    /// The server's key.
    pub key: Option<&'a str>,
    /// Tokens of the context of a server that is started.
    pub n_ctx: usize,
}

/// How a server is started.
pub struct ServerCommand {
    /// The arguments of the program.
    pub arguments: Vec<OsString>,
    /// The model's name in requests.
    pub model: String,
    /// The model is one of the command line or the environment, not one of the configuration file.
    is_own: bool,
}

impl ServerRequirements<'_> {
    /// What a tool gets that uses `model` of the server at `url`.
    pub fn target(&self, url: String, model: String, n_ctx: usize) -> ToolTarget {
        ToolTarget { url, model, n_ctx, key: self.key.map(str::to_owned) }
    }

    /// How a server with the model is started.
    pub fn start(&self, port: u16) -> Result<ServerCommand, CliError> {
        let config = Config::read(None)?;
        let configured = config.names();
        let named = self.model.named().map(Path::to_string_lossy);
        let (model, is_own) = match (&named, &configured[..]) {
            (Some(name), _) if configured.contains(&&**name) => (name.to_string(), false),
            (Some(_), _) => (self.model.stem(), true),
            (None, [only]) => ((*only).to_owned(), false),
            (None, []) => {
                let why = format!("no server runs at {USUAL}, and no model is named for one to start");
                return Err(CliError::Usage(format!("{why}: metal-attention launch TOOL MODEL")));
            }
            (None, several) => {
                let why = format!("the configuration has the models {}", several.join(", "));
                return Err(CliError::Usage(format!("{why}: -m names one of them")));
            }
        };
        let (port, n_ctx) = (port.to_string(), self.n_ctx.to_string());
        let mut arguments: Vec<OsString> = ["serve", "--port", &port, "-c", &n_ctx].map(OsString::from).into();
        if is_own {
            arguments.extend(self.model.flags());
        }
        Ok(ServerCommand { arguments, model, is_own })
    }
}

/// Where there is a server.
pub enum FoundServer {
    /// It runs, and has this.
    Running(ToolTarget),
    /// There is none: it has to be started.
    None,
}

/// Why a server cannot be used.
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

/// Finds the server that runs. One that the user names must be fit; the usual one is passed over with a note.
pub fn find(wanted: &ServerRequirements<'_>) -> Result<FoundServer, CliError> {
    let url = wanted.server.unwrap_or(USUAL).trim_end_matches('/');
    match (examine(url, wanted), wanted.server) {
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

/// What a server that runs has for a tool.
fn examine(url: &str, wanted: &ServerRequirements<'_>) -> Result<ToolTarget, UnfitServer> {
    let client = ServerClient { url, key: wanted.key };
    let list: ServedModels = client.get("/v1/models", None, SHORT)?;
    if list.data.is_empty() || list.data.iter().any(|model| model.owned_by != "metal-attention") {
        return Err(UnfitServer::OtherProgram);
    }
    let names: Vec<_> = list.data.into_iter().map(|model| model.id).collect();
    let model = pick(&names, wanted.model)?;
    examine_model(&client, model, wanted)
}

/// What a server that runs has for a tool, which uses this model of it.
fn examine_model(
    client: &ServerClient<'_>,
    model: String,
    wanted: &ServerRequirements<'_>,
) -> Result<ToolTarget, UnfitServer> {
    // It may have to be loaded first.
    let props: ServerProps = client.get("/props", Some(("model", &model)), LOADING)?;
    if props.engine != "metal-attention" {
        return Err(UnfitServer::OtherProgram);
    }
    let n_ctx = props.default_generation_settings.n_ctx;
    if n_ctx < MIN_N_CTX {
        return Err(UnfitServer::Short { model: safe(&model), n_ctx });
    }
    Ok(wanted.target(client.url.to_owned(), model, n_ctx))
}

/// The name of the model among those that the server has.
fn pick(names: &[String], wanted: &ModelArgs) -> Result<String, UnfitServer> {
    let have = || names.iter().map(|name| format!("{:?}", safe(name))).collect::<Vec<_>>().join(", ");
    if let Some(named) = wanted.named() {
        let (given, stem) = (named.to_string_lossy(), wanted.stem());
        let found = names.iter().find(|name| **name == given).or(names.iter().find(|name| **name == stem));
        if let Some(name) = found {
            return Ok(name.clone());
        }
        if wanted.is_given() {
            return Err(UnfitServer::NoModel { wanted: safe(&given), have: have() });
        }
    }
    match names {
        [only] => Ok(only.clone()),
        _ => Err(UnfitServer::Several(have())),
    }
}

/// Starts a server, and waits until its model is loaded.
pub fn start(wanted: &ServerRequirements<'_>) -> Result<(ToolTarget, StartedServer), CliError> {
    let start = wanted.start(0)?;
    // What is not here yet is downloaded first, where its progress is seen.
    if start.is_own {
        wanted.model.fetch()?;
    }
    let mut server = StartedServer::new(&start, wanted.key)?;
    let progress = ProgressLine::spinner("starting the server");
    let url = server.wait_for_address()?;
    progress.describe("loading the model".into());
    server.wait_until_ready(&url)?;
    let client = ServerClient { url: &url, key: wanted.key };
    let target = examine_model(&client, start.model, wanted)
        .map_err(|error| server.failed(&format!("the server that was started cannot be used: {error}")))?;
    drop(progress);
    Ok((target, server))
}

/// A server that was started here. It ends when this is dropped, and when this process ends in whatever way: its stdin is then
/// closed.
pub struct StartedServer {
    child: Child,
    /// What it says.
    log: NamedTempFile,
}

impl StartedServer {
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

    /// Where the server listens.
    fn wait_for_address(&mut self) -> Result<String, CliError> {
        self.wait_for(SHORT * 12, "say where it listens", |server| {
            let said = std::fs::read_to_string(server.log.path()).unwrap_or_default();
            let address = said.lines().find_map(|line| line.strip_prefix("listening on "));
            // The line may be incomplete.
            address.filter(|_| said.ends_with('\n')).map(str::to_owned)
        })
    }

    fn wait_until_ready(&mut self, url: &str) -> Result<(), CliError> {
        let client = ServerClient { url, key: None };
        self.wait_for(LOADING, "load its model", |_| client.is_ready().then_some(()))
    }

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
            std::thread::sleep(TICK);
        }
    }

    /// The error of a server, with the end of its log, which is kept.
    fn failed(&mut self, why: &str) -> CliError {
        const LINES: usize = 5;
        let said = std::fs::read_to_string(self.log.path()).unwrap_or_default();
        let lines: Vec<_> = said.lines().collect();
        let end = safe_end(&lines[lines.len().saturating_sub(LINES)..]);
        self.log.disable_cleanup(true);
        CliError::General(format!("{why}; its log, {}, ends with\n{end}", self.log.path().display()))
    }
}

fn safe_end(lines: &[&str]) -> String {
    lines.iter().map(|line| format!("  {}", safe(line))).collect::<Vec<_>>().join("\n")
}

impl Drop for StartedServer {
    fn drop(&mut self) {
        // It ends when nothing can come any more.
        drop(self.child.stdin.take());
        let begun = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if begun.elapsed() > ENDING {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(TICK);
        }
    }
}

/// A port that nothing listens on at the moment.
pub fn free_port() -> Result<u16, CliError> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0));
    let address = listener.and_then(|listener| listener.local_addr());
    address.map(|address| address.port()).map_err(|error| CliError::General(format!("there is no free port: {error}")))
}

/// What is read of `/v1/models`.
#[derive(Deserialize)]
struct ServedModels {
    data: Vec<ListedModel>,
}

#[derive(Deserialize)]
struct ListedModel {
    id: String,
    #[serde(default)]
    owned_by: String,
}

/// What is read of `/props`.
#[derive(Deserialize)]
struct ServerProps {
    #[serde(default)]
    engine: String,
    default_generation_settings: GenerationSettings,
}

#[derive(Deserialize)]
struct GenerationSettings {
    n_ctx: usize,
}

/// An error's message, in the form of OpenAI's interface and llama.cpp's.
#[derive(Deserialize)]
struct ErrorBody {
    error: ErrorDetail,
}

#[derive(Deserialize)]
struct ErrorDetail {
    message: String,
}

/// A client of a server.
struct ServerClient<'a> {
    url: &'a str,
    key: Option<&'a str>,
}

impl ServerClient<'_> {
    /// The answer of `path`, within `limit`.
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
        agent(SHORT).get(format!("{}/ready", self.url)).call().is_ok_and(|answer| answer.status() == 200)
    }
}

fn agent(limit: Duration) -> Agent {
    // A proxy does not reach this machine.
    let config = Agent::config_builder().proxy(None).http_status_as_error(false).timeout_connect(Some(SHORT));
    config.timeout_global(Some(limit)).build().into()
}
