//! `serve`: runs the HTTP server, with models that are loaded at the start or on demand.
//!
//! This file has the flags and the life of the process: reading the configuration, opening sockets, signals, and shutdown.
//! The server is `metal-attention-server`; `served/` loads the models for it.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use metal_attention_mcp::kill_servers;
use metal_attention_server::http::{
    ApiKeys, HostName, HttpOptions, KeepAlive, Listeners, ModelConfig, ModelDefaults, ModelStore, ModelsOptions,
    PageTools, PictureOptions, ResponseStore, ServeError, StoreLimits, THREADS, serve,
};
use tokio::net::TcpListener;
#[cfg(unix)]
use tokio::signal::unix::{Signal, SignalKind, signal};
#[cfg(windows)]
use tokio::signal::windows::{CtrlC, ctrl_c};
use tokio::sync::oneshot;

use crate::cache_args::CacheArgs;
use crate::cli_error::CliError;
use crate::completion;
use crate::config::Config;
use crate::interrupt;
use crate::model_args::ModelArgs;
use crate::page_args::PageArgs;
use crate::picture_args::MmprojArgs;
use crate::replica_args::ReplicaArgs;
use crate::served::{ModelFolders, ServedModel, ServedPictures, ServingSetup, print_line};
use crate::speculation_args::SpeculationArgs;
#[cfg(unix)]
use crate::termination::Termination;

const AFTER_HELP: &str = "\
The interfaces are those of OpenAI (/v1/chat/completions, /v1/responses, ...), Anthropic (/v1/messages), ollama (/api/...) \
and llama.cpp (/completion, ...); rerankers answer at /v1/rerank. A page to chat with the model is at /, the whole interface \
at /openapi.json, and /metrics is for Prometheus.

Models that -m names stay loaded. Those of --models-dir and of the configuration are loaded when a request names them, and go \
after --keep-alive, or sooner where another model needs their memory.

The server listens on this machine alone. Before you open it to others with --host, set a key: without one, every client \
that reaches it can use it. --metrics-port answers probes and scrapers without a key. Ctrl-C, \
SIGTERM or SIGHUP lets the running requests finish; twice, the server ends at once.

Examples:
  metal-attention serve llama3.2
  metal-attention serve model.gguf --wgpu --parallel 8
  metal-attention serve -m model.gguf --device cuda:0,cuda:1
  metal-attention serve --models-dir ~/models --keep-alive 30m
  METAL_ATTENTION_API_KEY=secret metal-attention serve -m model.gguf --host 0.0.0.0 --port 80
  curl http://127.0.0.1:8080/v1/chat/completions -H \"Content-Type: application/json\" \\
      -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}]}'";

/// Answer requests over HTTP, with the interfaces of OpenAI, Anthropic, ollama and llama.cpp
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    #[command(flatten)]
    models: ServedModelArgs,

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

    /// Another port to listen on, that of ollama if none is named
    #[arg(long, value_name = "PORT", num_args = 0..=1, default_missing_value = "11434")]
    ollama_port: Option<u16>,

    /// Name of the model in requests (repeatable); needs a single model [default: the file's name without .gguf]
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    alias: Vec<String>,

    /// Requests that run at once in each replica; each has its own context
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = at_least_one)]
    parallel: usize,

    /// Requests that may wait in each replica; further ones are refused with status 429
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    queue: usize,

    /// Longest time in seconds that a request may take; 0: no limit
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,

    /// Drop the oldest turns of a chat that does not fit into the context, instead of refusing it; the header x-dropped-turns has
    /// their number
    #[arg(long)]
    context_shift: bool,

    /// Do not log each request (RUST_LOG, if it is set, decides instead)
    #[arg(long)]
    quiet: bool,

    /// Time in seconds for which the server still accepts requests at shutdown, while /ready tells routers that it ends
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    drain_delay: u64,

    /// Time in seconds that running requests have to finish after that
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    grace: u64,

    /// Use the chat template in this file instead of the models'
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,

    /// Folder for the KV caches of slots, which POST /slots/ID?action=save writes and action=restore reads
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    slot_save_path: Option<PathBuf>,

    /// Shut down as with Ctrl-C when stdin is closed, so that the server ends together with the process that started it
    #[arg(long)]
    until_stdin_closes: bool,

    #[command(flatten)]
    cache: CacheArgs,

    #[command(flatten)]
    pictures: ServedPictureArgs,

    #[command(flatten)]
    page: PageArgs,

    #[command(flatten)]
    access: AccessArgs,

    #[command(flatten)]
    responses: ResponseArgs,

    #[command(flatten)]
    engine: ReplicaArgs,

    #[command(flatten)]
    speculation: SpeculationArgs,
}

/// The models that are served.
#[derive(clap::Args)]
#[command(next_help_heading = "Models")]
struct ServedModelArgs {
    /// The same as -m
    #[arg(value_name = "MODEL", conflicts_with = "model", add = completion::models::usable())]
    named: Vec<PathBuf>,

    /// Model to serve (repeatable): a GGUF file (any part of a split one), a well-known name such as llama3.2, or a name on the
    /// Hugging Face hub, OWNER/REPO[:TYPE|:FILE]. It stays loaded. Default, without --models-dir and a configuration: the model
    /// that METAL_ATTENTION_MODEL names, else the built-in stories260K
    #[arg(short, long, value_name = "MODEL", add = completion::models::usable())]
    model: Vec<PathBuf>,

    /// Folder whose models are loaded when a request names them, by their files' names without .gguf (repeatable)
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    models_dir: Vec<PathBuf>,

    /// File that names models and says how they are set up [default: metal-attention/config.toml in ~/.config]
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    config: Option<PathBuf>,

    /// How long a model that was loaded for a request stays loaded: seconds, or as in 10m; -1: until memory is needed
    #[arg(long, value_name = "TIME", default_value = "5m", allow_hyphen_values = true)]
    keep_alive: KeepAlive,

    /// MiB of one device that all models together may take; if another model needs memory, the least recently used ones are
    /// unloaded [default: what the device has]
    #[arg(long, value_name = "MIB", value_parser = at_least_one)]
    models_memory: Option<usize>,

    /// Read the models' files into memory instead of mapping them: takes more memory, but the files may change meanwhile
    #[arg(long)]
    no_mmap: bool,

    /// Pre-tokenizer to use instead of the one that a file names
    #[arg(long, value_name = "NAME")]
    pre: Option<String>,
}

impl ServedModelArgs {
    /// The models that the command line names.
    fn named(&self) -> impl Iterator<Item = ModelArgs> {
        let flags = self.flags();
        self.model.iter().chain(&self.named).map(move |file| flags.of_file(file.clone()))
    }

    /// The flags for reading a model's file, without a model.
    fn flags(&self) -> ModelArgs {
        ModelArgs::unnamed(self.no_mmap, self.pre.clone())
    }
}

/// Pictures in requests.
#[derive(clap::Args)]
#[command(next_help_heading = "Pictures")]
struct ServedPictureArgs {
    #[command(flatten)]
    encoder: MmprojArgs,

    /// Serve models without their mmproj files: they see no pictures
    #[arg(long, conflicts_with = "mmproj")]
    no_mmproj: bool,

    /// Host whose pictures are fetched when a request has their https: addresses (repeatable); *.NAME: all hosts below a name, *: all
    /// hosts. Private addresses are never reached [default: pictures are in the request only]
    #[arg(long, value_name = "HOST")]
    allow_image_urls: Vec<HostName>,

    /// Pictures of a request
    #[arg(long, value_name = "N", default_value_t = PictureOptions::default().max_count, value_parser = at_least_one)]
    max_images: usize,

    /// Bytes of all pictures in a request's body, in addition to --max-body
    #[arg(long, value_name = "BYTES", default_value_t = PictureOptions::default().max_bytes)]
    max_image_bytes: usize,

    /// Main memory in MiB for the rows of the last pictures, for each model: a picture of an earlier turn is not encoded again
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    image_cache: usize,
}

impl ServedPictureArgs {
    /// How models see pictures.
    fn served(&self) -> ServedPictures {
        ServedPictures {
            encoder: self.encoder.clone(),
            enabled: !self.no_mmproj,
            cache_bytes: self.image_cache.saturating_mul(1 << 20),
        }
    }
}

/// Access control and limits of connections.
#[derive(clap::Args)]
#[command(next_help_heading = "Access")]
struct AccessArgs {
    /// Key that clients must send, as in Authorization: Bearer KEY; other users of this machine can read it on a command line
    #[arg(long, value_name = "KEY", env = "METAL_ATTENTION_API_KEY", hide_env_values = true)]
    api_key: Option<String>,

    /// File with keys, one a line
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,

    /// Let the page call the tools of the configuration's MCP servers from other machines, too; needs a key, and every client
    /// with the key can call the tools
    #[arg(long)]
    mcp_remote: bool,

    /// Let clients without a key read /metrics
    #[arg(long)]
    open_metrics: bool,

    /// Let clients with a key pull, make, delete and unload models, and save and restore slots; a server that listens on the
    /// loopback alone allows it to every client
    #[arg(long)]
    allow_manage: bool,

    /// Origin whose pages may use the server from a browser: a scheme and a host; *: any
    #[arg(long, value_name = "ORIGIN")]
    cors: Option<String>,

    /// Name that the Host header of requests may have in addition to localhost, as behind a proxy (repeatable); used only if
    /// the server listens on this machine alone and needs no key
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    allowed_host: Vec<String>,

    /// Largest body of a request, in bytes, without its pictures
    #[arg(long, value_name = "BYTES", default_value_t = HttpOptions::default().max_body, value_parser = at_least_one)]
    max_body: usize,

    /// Bytes of all bodies in memory at a time; one address may have half of them
    #[arg(long, value_name = "BYTES", default_value_t = HttpOptions::default().max_bodies, value_parser = at_least_one)]
    max_bodies: usize,

    /// Connections at a time; if more come, idle ones are closed
    #[arg(long, value_name = "N", default_value_t = HttpOptions::default().max_connections, value_parser = at_least_one)]
    max_connections: usize,

    /// Connections of one address at a time [default: three quarters of --max-connections]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    max_connections_per_address: Option<usize>,
}

/// The store of /v1/responses. The least recently used responses are removed first.
#[derive(clap::Args)]
#[command(next_help_heading = "Responses")]
#[expect(clippy::struct_field_names, reason = "the flags' names")]
struct ResponseArgs {
    /// Folder to keep responses in, which outlive the server there [default: in memory]
    #[arg(long, value_name = "DIR")]
    response_store: Option<PathBuf>,

    /// Bytes of all responses that are kept; 0: none are kept
    #[arg(long, value_name = "BYTES", default_value_t = StoreLimits::default().bytes)]
    response_store_bytes: usize,

    /// Responses that are kept; 0: none are kept
    #[arg(long, value_name = "N", default_value_t = StoreLimits::default().responses)]
    response_store_count: usize,
}

impl ResponseArgs {
    /// Opens the store.
    fn store(&self) -> Result<ResponseStore, CliError> {
        let limits = StoreLimits { responses: self.response_store_count, bytes: self.response_store_bytes };
        match &self.response_store {
            None => Ok(ResponseStore::in_memory(limits)),
            Some(folder) => ResponseStore::in_folder(folder, limits)
                .map_err(|e| CliError::General(format!("--response-store: {e}"))),
        }
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let mut config = Config::read(args.models.config.as_deref())?;
    let mut options = args.http_options()?;
    let tools = args.page_tools(&mut config, !options.keys.is_empty())?;
    options.tools.clone_from(&tools);
    let runtime = runtime().map_err(|e| {
        CliError::General(format!(
            "cannot start the server's threads: {e}; the limit of processes (ulimit -u) or of memory is too low"
        ))
    })?;
    let responses = options.responses.clone();
    let result = runtime.block_on(listen_and_serve(args, config, options));
    responses.flush();
    if let Some(tools) = tools {
        tools.close();
        // Kills the MCP servers that are still busy with a call.
        kill_servers();
    }
    // Does not wait for a model that is still loading.
    runtime.shutdown_background();
    result
}

/// Threads that serve connections. Requests need little time, and the cores are for the engine.
const WORKERS: usize = 2;

/// The runtime, with all its threads started. Tokio panics when it cannot start a thread later, so that the limit of
/// processes is met here, where it can be reported.
fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    // Two more: one for loading and one for the engine. These threads end before the runtime starts its own.
    let probes = (0..WORKERS + THREADS + 2).map(|_| {
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let wait = move || {
            let _ = ended.recv();
        };
        std::thread::Builder::new().spawn(wait).map(|thread| (end, thread))
    });
    for (end, thread) in probes.collect::<std::io::Result<Vec<_>>>()? {
        drop(end);
        let _ = thread.join();
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(THREADS)
        .thread_keep_alive(Duration::from_secs(1 << 30))
        .enable_all()
        .build()?;
    let all_started = Arc::new(Barrier::new(THREADS + 1));
    for _ in 0..THREADS {
        let all_started = Arc::clone(&all_started);
        runtime.spawn_blocking(move || all_started.wait());
    }
    all_started.wait();
    Ok(runtime)
}

/// Opens the models and the sockets, prints the addresses, and serves until a signal.
async fn listen_and_serve(args: &Args, config: Config, options: HttpOptions) -> Result<(), CliError> {
    let asks_for_key = !options.keys.is_empty();
    let models = args.models(config)?;
    if !models.models.iter().any(|model| model.resident) {
        // No model is loaded at the start, so that Ctrl-C need not end the process during a load.
        interrupt::ignore_ctrl_c();
    }
    let (requests, address) = listen(&args.host, args.port, "--host and --port").await?;
    let ollama = match args.ollama_port {
        None => None,
        Some(port) => Some(listen(&args.host, port, "--host and --ollama-port").await?),
    };
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
    if options.tools.is_some() && !address.ip().is_loopback() && !args.access.mcp_remote {
        tracing::warn!(
            "the page has no MCP tools, because others reach {address}: --mcp-remote and a key let it call them"
        );
    }
    // Signals are caught before the address is printed, because a script may send one as soon as it reads the address.
    let signals = Signals::new().map_err(|e| CliError::General(format!("cannot wait for signals: {e}")))?;
    let stdin = if args.until_stdin_closes { Some(stdin_end()?) } else { None };
    if let Some((_, address)) = &watchers {
        print_line(&format!("metrics on {}/metrics", url(*address)));
    }
    if let Some((_, address)) = &ollama {
        print_line(&format!("listening on {}", url(*address)));
    }
    print_line(&format!("listening on {}", url(address)));
    let requests = [requests].into_iter().chain(ollama.map(|(listener, _)| listener)).collect();
    let listeners = Listeners { requests, monitoring: watchers.map(|(listener, _)| listener) };
    serve(listeners, options, models, shutdown(signals, stdin)).await.map_err(|error| match error {
        ServeError::Load(error) => match error.downcast::<CliError>() {
            Ok(error) => *error,
            Err(error) => CliError::General(error.to_string()),
        },
        // Exit code 1, so that a service manager restarts the process.
        ServeError::Thread(_) | ServeError::LoadPanicked | ServeError::Engine(_) => {
            CliError::General(error.to_string())
        }
    })
}

impl Args {
    /// Whether requests are not logged.
    pub fn quiet(&self) -> bool {
        self.quiet
    }

    /// The options of the server, except for the page's tools.
    fn http_options(&self) -> Result<HttpOptions, CliError> {
        let access = &self.access;
        let mut keys: Vec<String> = access.api_key.clone().into_iter().collect();
        if let Some(path) = &access.api_key_file {
            keys.extend(read_keys(path)?);
        }
        // `read_keys` has checked the keys of the file.
        let keys = ApiKeys::new(keys).map_err(|why| {
            CliError::Usage(format!("--api-key or METAL_ATTENTION_API_KEY: {why}; leave it out to let everybody in"))
        })?;
        if access.allow_manage && keys.is_empty() {
            let message = "--allow-manage lets clients with a key change models, and there is none: add --api-key or --api-key-file";
            return Err(CliError::Usage(message.into()));
        }
        let cors_origin = match &access.cors {
            None => None,
            Some(origin) => Some(origin.parse().map_err(|_| {
                CliError::Usage(format!("--cors {origin:?}: this is no origin, as https://example.org is"))
            })?),
        };
        if let Some(folder) = self.slot_save_path.as_ref().filter(|folder| !folder.is_dir()) {
            return Err(CliError::Usage(format!("--slot-save-path {}: this is no folder", folder.display())));
        }
        Ok(HttpOptions {
            keys,
            open_metrics: access.open_metrics,
            allow_manage: access.allow_manage,
            cors_origin,
            hosts: [&self.host].into_iter().chain(&self.metrics_host).chain(&access.allowed_host).cloned().collect(),
            context_shift: self.context_shift,
            slot_save_path: self.slot_save_path.clone(),
            pictures: PictureOptions {
                max_count: self.pictures.max_images,
                max_bytes: self.pictures.max_image_bytes,
                hosts: self.pictures.allow_image_urls.clone(),
            },
            max_body: access.max_body,
            max_bodies: access.max_bodies,
            responses: self.responses.store()?,
            page: self.page.page()?,
            max_connections: access.max_connections,
            max_connections_per_address: access.max_connections_per_address,
            timeout: (self.timeout > 0).then(|| Duration::from_secs(self.timeout)),
            drain_delay: Duration::from_secs(self.drain_delay),
            grace: Duration::from_secs(self.grace),
            ..Default::default()
        })
    }

    /// The MCP tools that the page may call. `None`: no MCP server is configured.
    fn page_tools(&self, config: &mut Config, asks_for_key: bool) -> Result<Option<Arc<PageTools>>, CliError> {
        let is_remote = self.access.mcp_remote;
        if is_remote && !asks_for_key {
            let message =
                "--mcp-remote lets others call tools on this machine: it needs a key, --api-key or --api-key-file";
            return Err(CliError::Usage(message.into()));
        }
        match config.take_toolbox()? {
            None if is_remote => Err(CliError::Usage("--mcp-remote: no MCP server is in the configuration".into())),
            toolbox => Ok(toolbox.map(|toolbox| Arc::new(PageTools::new(toolbox, is_remote)))),
        }
    }

    /// The models. Those that stay loaded are opened here, so that a wrong name is reported at the start.
    fn models(&self, config: Config) -> Result<ModelsOptions, CliError> {
        let args = &self.models;
        let mut named: Vec<_> = args.named().collect();
        // More than one model of a folder may be loaded at a time; two are assumed when memory is divided.
        let n_stored = if args.models_dir.is_empty() { 0 } else { 2 };
        let setup = ServingSetup {
            engine: self.engine.clone(),
            n_parallel: self.parallel,
            n_queue: self.queue,
            speculation: self.speculation.clone(),
            chat_template: self.chat_template.clone(),
            pictures: self.pictures.served(),
            cache: self.cache.clone(),
            n_models: (named.len() + config.n_models() + n_stored).max(1),
        };
        let configured = config.models(&args.flags(), &setup)?;
        if named.is_empty() && configured.is_empty() && args.models_dir.is_empty() {
            named.push(args.flags());
        }
        if self.pictures.encoder.mmproj.is_some() && named.len() != 1 {
            let message =
                "--mmproj is of one model, which -m has to name: the configuration file gives others theirs (mmproj)";
            return Err(CliError::Usage(message.into()));
        }
        if !self.alias.is_empty() && named.len() != 1 {
            let message =
                "--alias names one model, which -m has to name: the configuration file gives names to several";
            return Err(CliError::Usage(message.into()));
        }
        let mut models = Vec::new();
        for model in named {
            let names = if self.alias.is_empty() { vec![model.stem()] } else { self.alias.clone() };
            let source = Box::new(ServedModel::resident(model, setup.clone())?);
            let defaults = ModelDefaults::default();
            models.push(ModelConfig { names, source, resident: true, keep_alive: None, defaults });
        }
        models.extend(configured);
        let mut names: Vec<_> = models.iter().flat_map(|model| &model.names).collect();
        names.sort_unstable();
        let mut after = names.iter().skip(1);
        if let Some(twice) = names.iter().find(|name| after.next() == Some(*name)) {
            return Err(CliError::Usage(format!("two models have the name {twice:?}")));
        }
        if let Some(missing) = args.models_dir.iter().find(|folder| !folder.is_dir()) {
            return Err(CliError::Usage(format!("--models-dir {}: this is no folder", missing.display())));
        }
        let has_store = !args.models_dir.is_empty() || models.iter().any(|model| !model.resident);
        let mut setup = setup;
        setup.pictures.encoder.mmproj = None;
        let store = || Box::new(ModelFolders::new(args.models_dir.clone(), args.flags(), setup)) as Box<dyn ModelStore>;
        Ok(ModelsOptions {
            models,
            store: has_store.then(store),
            keep_alive: Some(args.keep_alive),
            memory: args.models_memory.map(|mib| (mib as u64).saturating_mul(1 << 20)),
        })
    }
}

/// Opens a socket at `host` and `port`; returns it with its address. `flags` are named in the error.
async fn listen(host: &str, port: u16, flags: &str) -> Result<(TcpListener, SocketAddr), CliError> {
    let name = host.trim_start_matches('[').trim_end_matches(']');
    let listener = TcpListener::bind((name, port)).await.map_err(|e| {
        let usual = match (e.kind(), port) {
            (std::io::ErrorKind::AddrInUse, 11434) => " (it is usually ollama that has it)",
            (std::io::ErrorKind::AddrInUse, 8080) => " (another metal-attention or llama.cpp's server usually has it)",
            _ => "",
        };
        CliError::General(format!("cannot listen on {host}, port {port}: {e}{usual}; {flags} choose another address"))
    })?;
    let address = listener.local_addr().map_err(|e| CliError::General(format!("cannot tell the address: {e}")))?;
    Ok((listener, address))
}

/// The address as a URL that a browser on this machine can open: an unspecified address becomes 127.0.0.1.
fn url(address: SocketAddr) -> String {
    let shown = if address.ip().is_unspecified() { IpAddr::from([127, 0, 0, 1]) } else { address.ip() };
    format!("http://{}", SocketAddr::new(shown, address.port()))
}

/// Reads the keys from a file, one a line.
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

/// Waits for the first Ctrl-C, SIGTERM or SIGHUP, or the end of `stdin`. The next signal ends the process.
async fn shutdown(mut signals: Signals, stdin: Option<oneshot::Receiver<()>>) {
    let stdin_closes = async {
        match stdin {
            Some(end) => drop(end.await),
            None => std::future::pending().await,
        }
    };
    let is_ctrl_c = tokio::select! {
        is_ctrl_c = signals.next() => is_ctrl_c,
        () = stdin_closes => true,
    };
    if interrupt::ignores_ctrl_c() {
        print_line("shutting down; again to end at once");
    } else if is_ctrl_c {
        // During the load of a resident model nothing has to be shut down: Ctrl-C ends the process at once.
        interrupt::exit();
    }
    tokio::spawn(async move {
        signals.next().await;
        interrupt::exit();
    });
}

/// Returns a channel that gets a message at the end of stdin. A thread reads stdin; it ends with the process.
fn stdin_end() -> Result<oneshot::Receiver<()>, CliError> {
    let (sender, receiver) = oneshot::channel();
    let read = move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        let _ = sender.send(());
    };
    let thread = std::thread::Builder::new().name("stdin".into()).spawn(read);
    thread.map_err(|e| CliError::General(format!("cannot start a thread that reads stdin: {e}")))?;
    Ok(receiver)
}

/// Ctrl-C, SIGTERM and SIGHUP. Signals are caught from the creation of this value on.
#[cfg(unix)]
struct Signals {
    /// Ctrl-C.
    interrupt: Signal,
    /// SIGTERM and SIGHUP.
    termination: Termination,
}

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, termination: Termination::new()? })
    }

    /// Waits for a signal. Returns whether it is Ctrl-C.
    async fn next(&mut self) -> bool {
        tokio::select! {
            _ = self.interrupt.recv() => true,
            _ = self.termination.next() => false,
        }
    }
}

/// Ctrl-C. Signals are caught from the creation of this value on.
#[cfg(windows)]
struct Signals(CtrlC);

#[cfg(windows)]
impl Signals {
    fn new() -> std::io::Result<Self> {
        ctrl_c().map(Self)
    }

    /// Waits for Ctrl-C. Returns true.
    async fn next(&mut self) -> bool {
        self.0.recv().await;
        true
    }
}

/// Reads the name of a Host header, without its port.
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

/// Parses a number greater than 0.
fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(n) => Ok(n),
        Err(_) => Err("expected a whole number".into()),
    }
}
