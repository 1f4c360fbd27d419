//! `serve`: runs the HTTP server, with models that are loaded at the start or on demand.
//!
//! This file has the life of the process: reading the configuration, opening sockets, and shutdown; `args.rs` has groups of
//! flags, `signals.rs` what ends the process. The server is `metal-attention-server`; `served/` loads the models for it.

mod args;
mod signals;

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use metal_attention_mcp::kill_servers;
use metal_attention_server::http::{
    ApiKeys, HttpOptions, Listeners, ModelConfig, ModelDefaults, ModelStore, ModelsOptions, PageTools, PictureOptions,
    ServeError, THREADS, serve,
};
use tokio::net::TcpListener;

use crate::cache_args::CacheArgs;
use crate::cli_error::CliError;
use crate::config::Config;
use crate::engine_args::at_least_one;
use crate::interrupt;
use crate::page_args::PageArgs;
use crate::replica_args::ReplicaArgs;
use crate::served::{ModelFolders, ServedModel, ServingSetup, print_line};
use crate::speculation_args::SpeculationArgs;
use args::{AccessArgs, ResponseArgs, ServedModelArgs, ServedPictureArgs};
use signals::{Signals, shutdown, stdin_end};

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
