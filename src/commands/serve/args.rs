//! Groups of flags of `serve`.

use std::path::PathBuf;

use metal_attention_server::http::{HostName, HttpOptions, KeepAlive, PictureOptions, ResponseStore, StoreLimits};

use crate::cli_error::CliError;
use crate::completion;
use crate::engine_args::at_least_one;
use crate::model_args::ModelArgs;
use crate::picture_args::MmprojArgs;
use crate::served::ServedPictures;

/// The models that are served.
#[derive(clap::Args)]
#[command(next_help_heading = "Models")]
pub(super) struct ServedModelArgs {
    /// The same as -m
    #[arg(value_name = "MODEL", conflicts_with = "model", add = completion::models::usable())]
    pub(super) named: Vec<PathBuf>,

    /// Model to serve (repeatable): a GGUF file (any part of a split one), a well-known name such as llama3.2, or a name on the
    /// Hugging Face hub, OWNER/REPO[:TYPE|:FILE]. It stays loaded. Default, without --models-dir and a configuration: the model
    /// that METAL_ATTENTION_MODEL names, else the built-in stories260K
    #[arg(short, long, value_name = "MODEL", add = completion::models::usable())]
    pub(super) model: Vec<PathBuf>,

    /// Folder whose models are loaded when a request names them, by their files' names without .gguf (repeatable)
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub(super) models_dir: Vec<PathBuf>,

    /// File that names models and says how they are set up [default: metal-attention/config.toml in ~/.config]
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(super) config: Option<PathBuf>,

    /// How long a model that was loaded for a request stays loaded: seconds, or as in 10m; -1: until memory is needed
    #[arg(long, value_name = "TIME", default_value = "5m", allow_hyphen_values = true)]
    pub(super) keep_alive: KeepAlive,

    /// MiB of one device that all models together may take; if another model needs memory, the least recently used ones are
    /// unloaded [default: what the device has]
    #[arg(long, value_name = "MIB", value_parser = at_least_one)]
    pub(super) models_memory: Option<usize>,

    /// Read the models' files into memory instead of mapping them: takes more memory, but the files may change meanwhile
    #[arg(long)]
    pub(super) no_mmap: bool,

    /// Pre-tokenizer to use instead of the one that a file names
    #[arg(long, value_name = "NAME")]
    pub(super) pre: Option<String>,
}

impl ServedModelArgs {
    /// The models that the command line names.
    pub(super) fn named(&self) -> impl Iterator<Item = ModelArgs> {
        let flags = self.flags();
        self.model.iter().chain(&self.named).map(move |file| flags.of_file(file.clone()))
    }

    /// The flags for reading a model's file, without a model.
    pub(super) fn flags(&self) -> ModelArgs {
        ModelArgs::unnamed(self.no_mmap, self.pre.clone())
    }
}

/// Pictures in requests.
#[derive(clap::Args)]
#[command(next_help_heading = "Pictures")]
pub(super) struct ServedPictureArgs {
    #[command(flatten)]
    pub(super) encoder: MmprojArgs,

    /// Serve models without their mmproj files: they see no pictures
    #[arg(long, conflicts_with = "mmproj")]
    pub(super) no_mmproj: bool,

    /// Host whose pictures are fetched when a request has their https: addresses (repeatable); *.NAME: all hosts below a name, *: all
    /// hosts. Private addresses are never reached [default: pictures are in the request only]
    #[arg(long, value_name = "HOST")]
    pub(super) allow_image_urls: Vec<HostName>,

    /// Pictures of a request
    #[arg(long, value_name = "N", default_value_t = PictureOptions::default().max_count, value_parser = at_least_one)]
    pub(super) max_images: usize,

    /// Bytes of all pictures in a request's body, in addition to --max-body
    #[arg(long, value_name = "BYTES", default_value_t = PictureOptions::default().max_bytes)]
    pub(super) max_image_bytes: usize,

    /// Main memory in MiB for the rows of the last pictures, for each model: a picture of an earlier turn is not encoded again
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    pub(super) image_cache: usize,
}

impl ServedPictureArgs {
    /// How models see pictures.
    pub(super) fn served(&self) -> ServedPictures {
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
pub(super) struct AccessArgs {
    /// Key that clients must send, as in Authorization: Bearer KEY; other users of this machine can read it on a command line
    #[arg(long, value_name = "KEY", env = "METAL_ATTENTION_API_KEY", hide_env_values = true)]
    pub(super) api_key: Option<String>,

    /// File with keys, one a line
    #[arg(long, value_name = "FILE")]
    pub(super) api_key_file: Option<PathBuf>,

    /// Let the page call the tools of the configuration's MCP servers from other machines, too; needs a key, and every client
    /// with the key can call the tools
    #[arg(long)]
    pub(super) mcp_remote: bool,

    /// Let clients without a key read /metrics
    #[arg(long)]
    pub(super) open_metrics: bool,

    /// Let clients with a key pull, make, delete and unload models, and save and restore slots; a server that listens on the
    /// loopback alone allows it to every client
    #[arg(long)]
    pub(super) allow_manage: bool,

    /// Origin whose pages may use the server from a browser: a scheme and a host; *: any
    #[arg(long, value_name = "ORIGIN")]
    pub(super) cors: Option<String>,

    /// Name that the Host header of requests may have in addition to localhost, as behind a proxy (repeatable); used only if
    /// the server listens on this machine alone and needs no key
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    pub(super) allowed_host: Vec<String>,

    /// Largest body of a request, in bytes, without its pictures
    #[arg(long, value_name = "BYTES", default_value_t = HttpOptions::default().max_body, value_parser = at_least_one)]
    pub(super) max_body: usize,

    /// Bytes of all bodies in memory at a time; one address may have half of them
    #[arg(long, value_name = "BYTES", default_value_t = HttpOptions::default().max_bodies, value_parser = at_least_one)]
    pub(super) max_bodies: usize,

    /// Connections at a time; if more come, idle ones are closed
    #[arg(long, value_name = "N", default_value_t = HttpOptions::default().max_connections, value_parser = at_least_one)]
    pub(super) max_connections: usize,

    /// Connections of one address at a time [default: three quarters of --max-connections]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(super) max_connections_per_address: Option<usize>,
}

/// The store of /v1/responses. The least recently used responses are removed first.
#[derive(clap::Args)]
#[command(next_help_heading = "Responses")]
#[expect(clippy::struct_field_names, reason = "the flags' names")]
pub(super) struct ResponseArgs {
    /// Folder to keep responses in, which outlive the server there [default: in memory]
    #[arg(long, value_name = "DIR")]
    pub(super) response_store: Option<PathBuf>,

    /// Bytes of all responses that are kept; 0: none are kept
    #[arg(long, value_name = "BYTES", default_value_t = StoreLimits::default().bytes)]
    pub(super) response_store_bytes: usize,

    /// Responses that are kept; 0: none are kept
    #[arg(long, value_name = "N", default_value_t = StoreLimits::default().responses)]
    pub(super) response_store_count: usize,
}

impl ResponseArgs {
    /// Opens the store.
    pub(super) fn store(&self) -> Result<ResponseStore, CliError> {
        let limits = StoreLimits { responses: self.response_store_count, bytes: self.response_store_bytes };
        match &self.response_store {
            None => Ok(ResponseStore::in_memory(limits)),
            Some(folder) => ResponseStore::in_folder(folder, limits)
                .map_err(|e| CliError::General(format!("--response-store: {e}"))),
        }
    }
}

/// Reads the name of a Host header, without its port.
pub(super) fn host_name(text: &str) -> Result<String, String> {
    let name = text.trim();
    if name.is_empty() || name.contains(['/', ' ']) {
        return Err("expected a name without scheme and path, as in chat.example.org".into());
    }
    match name.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') && port.parse::<u16>().is_ok() => Ok(host.to_owned()),
        _ => Ok(name.to_owned()),
    }
}
