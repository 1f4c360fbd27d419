//! `serve`: answers requests over HTTP.

use std::io::{IsTerminal, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use metal_attention::ForwardPass;
use metal_attention::scheduler::{SchedulerOptions, StartError};
use metal_attention_server::http::{HttpOptions, Keys, Listeners, LoadError, Loaded, ServeError, THREADS, serve};
use tokio::net::TcpListener;
#[cfg(unix)]
use tokio::signal::unix::{Signal, SignalKind, signal};
#[cfg(windows)]
use tokio::signal::windows::{CtrlC, ctrl_c};

use crate::cli_error::CliError;
use crate::interrupt;
use crate::model_args::NamedModelArgs;
use crate::progress::Progress;
use crate::replica_args::ReplicaArgs;
use crate::template_file;
use crate::units;

const AFTER_HELP: &str = "\
The interface is OpenAI's: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models; \
rerankers answer at /v1/rerank. A page to chat with the model is at /, the whole interface at /openapi.json, and /metrics is \
for Prometheus.

The server listens on this machine alone. Before --host lets others in, give it a key: whoever \
reaches it can use it. --metrics-port answers probes and scrapers, which have none. Ctrl-C or \
SIGTERM lets the running requests finish; twice, the server ends at once.

Examples:
  metal-attention serve llama3.2
  metal-attention serve model.gguf --gpu --parallel 8
  metal-attention serve -m model.gguf --device cuda:0,cuda:1
  METAL_ATTENTION_API_KEY=secret metal-attention serve -m model.gguf --host 0.0.0.0 --port 80
  curl http://127.0.0.1:8080/v1/chat/completions -H \"Content-Type: application/json\" \\
      -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}]}'";

/// Answer requests over HTTP, as OpenAI's interface has it
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    #[command(flatten)]
    model: NamedModelArgs,

    /// Address to listen on; 0.0.0.0 or ::: every address of this machine
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,

    /// Port to listen on; 0: any that is free
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,

    /// Port for /metrics, /health and /ready alone, without a key; 0: any that is free [default: none]
    #[arg(long, value_name = "PORT")]
    metrics_port: Option<u16>,

    /// Address to listen on for --metrics-port [default: that of --host]
    #[arg(long, value_name = "ADDRESS", requires = "metrics_port")]
    metrics_host: Option<String>,

    /// Name of the model in requests (repeatable) [default: the file's name]
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    alias: Vec<String>,

    /// Requests that run at once, of each replica; each has a context of its own
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = at_least_one)]
    parallel: usize,

    /// Requests that may wait for their turn, of each replica; those beyond are refused with status 429
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    queue: usize,

    /// Longest time in seconds that a request may take; 0: as long as it likes
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,

    /// Log no line for each request (RUST_LOG, where it is set, decides instead)
    #[arg(long)]
    quiet: bool,

    /// Time in seconds that requests are still taken for when the server ends, and /ready says so to routers
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    drain_delay: u64,

    /// Time in seconds that running requests have to finish after that
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    grace: u64,

    /// Use the chat template in this file instead of the model's
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,

    #[command(flatten)]
    access: AccessArgs,

    #[command(flatten)]
    engine: ReplicaArgs,
}

/// Who may ask, and how much.
#[derive(clap::Args)]
#[command(next_help_heading = "Access")]
struct AccessArgs {
    /// Key that clients must send, as in Authorization: Bearer KEY; on a command line others on this machine can read it
    #[arg(long, value_name = "KEY", env = "METAL_ATTENTION_API_KEY", hide_env_values = true)]
    api_key: Option<String>,

    /// File with keys, one a line
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,

    /// Let everybody read /metrics without a key
    #[arg(long)]
    open_metrics: bool,

    /// Origin whose pages may use the server from a browser: a scheme and a host; *: any
    #[arg(long, value_name = "ORIGIN")]
    cors: Option<String>,

    /// Name that the Host header of requests may have besides localhost, as behind a proxy (repeatable); of concern where the
    /// server listens on this machine alone and asks for no key
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    allowed_host: Vec<String>,

    /// Largest body of a request, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = HttpOptions::default().max_body, value_parser = at_least_one)]
    max_body: usize,

    /// Bytes of all bodies that are held at a time; one address may have half of it
    #[arg(long, value_name = "BYTES", default_value_t = HttpOptions::default().max_bodies, value_parser = at_least_one)]
    max_bodies: usize,

    /// Connections at a time; where more come, idle ones are closed
    #[arg(long, value_name = "N", default_value_t = HttpOptions::default().max_connections, value_parser = at_least_one)]
    max_connections: usize,

    /// Connections of one address at a time [default: three quarters of all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    max_connections_per_address: Option<usize>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let options = args.http_options()?;
    let runtime = runtime().map_err(|e| {
        CliError::General(format!(
            "cannot start the server's threads: {e}; the limit of processes (ulimit -u) or of memory is too low"
        ))
    })?;
    let result = runtime.block_on(listen_and_serve(args, options));
    // A model that is still loading is not waited for.
    runtime.shutdown_background();
    result
}

/// Threads that serve connections: requests need little, and the cores are for the engine.
const WORKERS: usize = 2;

/// The runtime, with all its threads started: later none may be left to have, and tokio panics where one is missing.
fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    // One for loading and one for the engine besides; they are gone before the others start.
    let enough = (0..WORKERS + THREADS + 2).map(|_| {
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let wait = move || {
            let _ = ended.recv();
        };
        std::thread::Builder::new().spawn(wait).map(|thread| (end, thread))
    });
    for (end, thread) in enough.collect::<std::io::Result<Vec<_>>>()? {
        drop(end);
        let _ = thread.join();
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(THREADS)
        .thread_keep_alive(Duration::from_secs(1 << 30))
        .enable_all()
        .build()?;
    let all_there = Arc::new(Barrier::new(THREADS + 1));
    for _ in 0..THREADS {
        let all_there = Arc::clone(&all_there);
        runtime.spawn_blocking(move || all_there.wait());
    }
    all_there.wait();
    Ok(runtime)
}

async fn listen_and_serve(args: &Args, options: HttpOptions) -> Result<(), CliError> {
    let asks_for_key = !options.keys.is_empty();
    let load = args.loader()?;
    let (requests, address) = listen(&args.host, args.port, "--host and --port").await?;
    let watchers = match args.metrics_port {
        None => None,
        Some(port) => {
            let host = args.metrics_host.as_ref().unwrap_or(&args.host);
            Some(listen(host, port, "--metrics-host and --metrics-port").await?)
        }
    };
    if !address.ip().is_loopback() && !asks_for_key {
        tracing::warn!(
            "everybody who reaches {address} can use this server: --api-key or --api-key-file keep others out"
        );
    }
    // Before anybody is told that the server runs, and can want to end it.
    let signals = Signals::new().map_err(|e| CliError::General(format!("cannot wait for signals: {e}")))?;
    if let Some((_, address)) = &watchers {
        say(&format!("metrics on {}/metrics", url(*address)));
    }
    say(&format!("listening on {}", url(address)));
    let listeners = Listeners { requests, watchers: watchers.map(|(listener, _)| listener) };
    serve(listeners, options, load, shutdown(signals)).await.map_err(|error| match error {
        ServeError::Load(error) => error,
        // Exit code 1: whoever watches over the process starts it again.
        ServeError::Thread(_) | ServeError::LoadPanicked | ServeError::Engine(_) => {
            CliError::General(error.to_string())
        }
    })
}

impl Args {
    /// Whether no request has a line in the log.
    pub fn quiet(&self) -> bool {
        self.quiet
    }

    fn http_options(&self) -> Result<HttpOptions, CliError> {
        let access = &self.access;
        let mut keys: Vec<String> = access.api_key.clone().into_iter().collect();
        if let Some(path) = &access.api_key_file {
            keys.extend(read_keys(path)?);
        }
        // Those of a file have been looked at.
        let keys = Keys::new(keys).map_err(|why| {
            CliError::Usage(format!("--api-key or METAL_ATTENTION_API_KEY: {why}; leave it out to let everybody in"))
        })?;
        let cors_origin = match &access.cors {
            None => None,
            Some(origin) => Some(origin.parse().map_err(|_| {
                CliError::Usage(format!("--cors {origin:?}: this is no origin, as https://example.org is"))
            })?),
        };
        let names = if self.alias.is_empty() { vec![self.model.stem()] } else { self.alias.clone() };
        Ok(HttpOptions {
            names,
            keys,
            open_metrics: access.open_metrics,
            cors_origin,
            hosts: [&self.host].into_iter().chain(&self.metrics_host).chain(&access.allowed_host).cloned().collect(),
            max_body: access.max_body,
            max_bodies: access.max_bodies,
            max_connections: access.max_connections,
            max_connections_per_address: access.max_connections_per_address,
            timeout: (self.timeout > 0).then(|| Duration::from_secs(self.timeout)),
            drain_delay: Duration::from_secs(self.drain_delay),
            grace: Duration::from_secs(self.grace),
            ..Default::default()
        })
    }

    /// What makes the model ready. The file is opened here, so that a wrong name is told at once.
    fn loader(&self) -> Result<impl FnOnce() -> Result<Loaded, CliError> + Send + 'static, CliError> {
        let model = self.model.open()?;
        let tokenizer = self.model.tokenizer(&model)?;
        let template = self.chat_template.as_deref().map(|path| template_file::read(path, &tokenizer)).transpose()?;
        let n_parallel = self.parallel;
        let mut engines = self.engine.options(&model)?;
        let options = SchedulerOptions { n_parallel, n_queue: self.queue, ..Default::default() };
        for engine in &mut engines {
            *engine = options.engine(&model, engine);
        }
        let name = self.model.name();
        Ok(move || {
            if !std::io::stderr().is_terminal() {
                say(&format!("loading {name}"));
            }
            let loading = Progress::spinner("loading the model");
            loading.weigh(model.gguf().tensor_bytes());
            let passes = engines.iter().map(|engine| model.forward_pass(engine)).collect::<Result<Vec<_>, _>>()?;
            drop(loading);
            let devices = device_names(&passes);
            let kv_cache_bytes = passes.first().map_or(0, |pass| pass.kv_cache_bytes());
            let loaded = Loaded::start_replicas(model, passes, &options).map_err(|error| match error {
                LoadError::Model(error) | LoadError::Start(StartError::Model(error)) => error.into(),
                LoadError::FirstToken(_) | LoadError::NoNumbers => CliError::General(error.to_string()),
                LoadError::Start(error) => CliError::General(format!("cannot start the engine: {error}")),
            })?;
            let loaded = match template {
                Some(template) => loaded.with_chat_template(template),
                None => loaded,
            };
            let context = context_line(&loaded, kv_cache_bytes, options.n_parallel, engines.len());
            // So far it ended the process; requests that run may finish.
            interrupt::leave();
            let each = if engines.len() > 1 { " on each" } else { "" };
            say(&format!("ready: {devices}, {n_parallel} requests at once{each}, {context}"));
            Ok(loaded)
        })
    }
}

/// What the start says of the context and the KV cache of a replica, which has so many bytes.
fn context_line(loaded: &Loaded, kv_cache_bytes: usize, n_parallel: usize, n_replicas: usize) -> String {
    let each = if n_replicas > 1 { " each" } else { "" };
    format!(
        "context {} tokens a request, KV cache {}{each} shared by {}; -c changes it",
        loaded.n_ctx,
        units::bytes(kv_cache_bytes as u64),
        units::count(n_parallel, "request")
    )
}

/// The devices of the replicas, each once with how many run on it.
fn device_names(passes: &[Box<dyn ForwardPass>]) -> String {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for pass in passes {
        let device = pass.device();
        let name = format!("{} {}", device.kind, device.name);
        match counts.iter_mut().find(|(known, _)| *known == name) {
            Some((_, n)) => *n += 1,
            None => counts.push((name, 1)),
        }
    }
    let one = |(name, n): (String, usize)| if n > 1 { format!("{n} replicas on {name}") } else { name };
    counts.into_iter().map(one).collect::<Vec<_>>().join(" and ")
}

/// A line on stderr; where that is closed there is nobody to tell.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// A listener and its address; `flags` choose another one.
async fn listen(host: &str, port: u16, flags: &str) -> Result<(TcpListener, SocketAddr), CliError> {
    let name = host.trim_start_matches('[').trim_end_matches(']');
    let listener = TcpListener::bind((name, port)).await.map_err(|e| {
        CliError::General(format!("cannot listen on {host}, port {port}: {e}; {flags} choose another address"))
    })?;
    let address = listener.local_addr().map_err(|e| CliError::General(format!("cannot tell the address: {e}")))?;
    Ok((listener, address))
}

/// The address as it can be opened: a browser on this machine reaches "every address" by its own name.
fn url(address: SocketAddr) -> String {
    let shown = if address.ip().is_unspecified() { IpAddr::from([127, 0, 0, 1]) } else { address.ip() };
    format!("http://{}", SocketAddr::new(shown, address.port()))
}

fn read_keys(path: &Path) -> Result<Vec<String>, CliError> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| CliError::General(format!("cannot read the keys in {}: {e}", path.display())))?;
    let keys: Vec<_> = text.lines().map(|line| line.trim().to_owned()).collect();
    if let Some(line) = keys.iter().position(String::is_empty) {
        let message = format!("line {} of {} is empty: one key a line is expected", line + 1, path.display());
        return Err(CliError::Usage(message));
    }
    if keys.is_empty() {
        return Err(CliError::Usage(format!("there are no keys in {}: one a line is expected", path.display())));
    }
    Ok(keys)
}

/// Ready at the first Ctrl-C or SIGTERM; the second ends the process.
async fn shutdown(mut signals: Signals) {
    let is_ctrl_c = signals.next().await;
    if interrupt::is_left() {
        say("shutting down; again to end at once");
    } else if is_ctrl_c {
        // While the model loads there is nothing to shut down, and Ctrl-C ends the process as it does elsewhere.
        interrupt::end();
    }
    tokio::spawn(async move {
        signals.next().await;
        std::process::exit(i32::from(CliError::Interrupted.exit_code()));
    });
}

/// Ctrl-C and SIGTERM. None is lost from the moment this is made.
#[cfg(unix)]
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Waits for one; whether it is Ctrl-C.
    async fn next(&mut self) -> bool {
        tokio::select! {
            _ = self.interrupt.recv() => true,
            _ = self.terminate.recv() => false,
        }
    }
}

/// Ctrl-C.
#[cfg(windows)]
struct Signals(CtrlC);

#[cfg(windows)]
impl Signals {
    fn new() -> std::io::Result<Self> {
        ctrl_c().map(Self)
    }

    /// Waits for one, which is Ctrl-C.
    async fn next(&mut self) -> bool {
        self.0.recv().await;
        true
    }
}

/// Reads a name as it is in a Host header, without a port.
fn host_name(text: &str) -> Result<String, String> {
    let name = text.trim();
    if name.is_empty() || name.contains(['/', ' ']) {
        return Err("expected a name without scheme and path, as in chat.example.org".into());
    }
    match name.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') && port.parse::<u16>().is_ok() => Ok(host.to_owned()),
        _ => Ok(name.to_owned()),
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(n) => Ok(n),
        Err(_) => Err("expected a whole number".into()),
    }
}
