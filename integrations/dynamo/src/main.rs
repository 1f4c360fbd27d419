//! The program `metal-attention-dynamo`: serves a GGUF model to NVIDIA Dynamo's frontend.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use dynamo_backend_common::{CommonArgs, DisaggregationMode, WorkerConfig};
use metal_attention::scheduler::SchedulerOptions;
use metal_attention::speculation::{DraftFile, DrafterKind, Speculation};
use metal_attention::{Device, EngineOptions, Model, ModelOptions};
use metal_attention_dynamo::card::{self, ModelCardFolder};
use metal_attention_dynamo::{WorkerEngine, WorkerSetup};

/// The environment variable with the time in seconds that Dynamo gives a worker for its shutdown.
const SHUTDOWN_TIMEOUT: &str = "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT";

const AFTER_HELP: &str = "\
The frontend reads the model's tokenizer and chat template from a folder, which is made in ~/.cache, or by \
`metal-attention export-tokenizer`. Where the frontend runs on another machine, give the worker a port (DYN_SYSTEM_PORT) \
from which it can fetch them.

Example, on one machine:
  export DYN_DISCOVERY_BACKEND=file DYN_FILE_KV=/tmp/dynamo DYN_REQUEST_PLANE=tcp DYN_EVENT_PLANE=zmq
  metal-attention-dynamo -m model.gguf
  python -m dynamo.frontend --router-mode kv --kv-cache-block-size 64 --migration-limit 3";

/// Serves a GGUF model to NVIDIA Dynamo's frontend
#[derive(Parser)]
#[command(version, after_help = AFTER_HELP)]
struct Args {
    /// GGUF file; without it, the built-in model stories260K
    #[arg(short, long, value_name = "FILE", env = "METAL_ATTENTION_MODEL")]
    model: Option<PathBuf>,

    /// Folder with the model's tokenizer.json, config.json and chat template [default: one made of the model's file]
    #[arg(long, value_name = "FOLDER")]
    tokenizer: Option<PathBuf>,

    /// Name of the model in requests [default: the file's name]
    #[arg(long, value_name = "NAME")]
    alias: Option<String>,

    /// The device of the model: auto (a GPU in which it fits, preferably through CUDA, else the CPU), cpu,
    /// cuda, cuda:1, wgpu, wgpu:1 (by index), wgpu:NAME
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: Device,

    /// Length of the context in tokens; 0: as long as the model was trained with [default: the same, at most 4096]
    #[arg(short = 'c', long, value_name = "N")]
    ctx_size: Option<usize>,

    /// Threads that compute on the CPU [default: one for each physical core]
    #[arg(short = 't', long, value_name = "N")]
    threads: Option<usize>,

    /// Requests that run at once; each has its own context
    #[arg(long, value_name = "N", default_value_t = 8)]
    parallel: usize,

    /// Requests that may wait; further ones go to other workers
    #[arg(long, value_name = "N", default_value_t = 256)]
    queue: usize,

    /// Which drafter proposes tokens, so that a decode step may give a text several: off, ngram (tokens that followed the same
    /// ones earlier), mtp (the prediction heads in the model's file), draft or eagle3 (what the file of --model-draft has), or auto,
    /// that of --model-draft, or else the best that the model has. Texts do not depend on it
    #[arg(long, value_name = "DRAFTER", default_value = "auto")]
    spec: DrafterKind,

    /// GGUF file of a smaller model that proposes the tokens, or of a drafter made for the model (EAGLE-3)
    #[arg(long, value_name = "FILE")]
    model_draft: Option<PathBuf>,

    /// For tests: milliseconds that each token takes at least
    #[arg(long, value_name = "MS", default_value_t = 0, hide = true)]
    token_delay: u64,

    #[command(flatten)]
    dynamo: CommonArgs,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let setup = args.setup()?;
    let config = args.config(&setup)?;
    dynamo_backend_common::run(Arc::new(WorkerEngine::new(setup)), config)
}

impl Args {
    /// The settings of the worker. Opens the file, so that a wrong name is reported at the start.
    fn setup(&self) -> anyhow::Result<WorkerSetup> {
        let model = match &self.model {
            None => Model::built_in()?,
            Some(path) => Model::open(path).with_context(|| path.display().to_string())?,
        };
        let stem = self.model.as_deref().and_then(|path| path.file_stem());
        let stem = stem.map_or("stories260K".into(), |stem| stem.to_string_lossy().into_owned());
        let n_ctx = match self.ctx_size {
            Some(0) => Some(model.spec().n_ctx_train),
            n_ctx => n_ctx,
        };
        let engine =
            EngineOptions { device: self.device.clone(), n_ctx, n_threads: self.threads, ..EngineOptions::default() };
        let n_parallel = self.parallel;
        let speculation = Speculation { drafter: self.spec, ..Speculation::default() };
        let draft = match &self.model_draft {
            None => None,
            Some(path) => {
                let file = DraftFile::open(path, &ModelOptions::default());
                Some(file.with_context(|| path.display().to_string())?)
            }
        };
        let scheduler = SchedulerOptions {
            n_parallel,
            n_queue: self.queue,
            draft_depth: speculation.depth,
            ..SchedulerOptions::default()
        };
        Ok(WorkerSetup {
            engine: scheduler.engine(&model, &engine),
            scheduler,
            speculation,
            draft,
            model: Arc::new(model),
            name: self.alias.clone().unwrap_or(stem),
            grace: grace(),
            token_delay: Duration::from_millis(self.token_delay),
        })
    }

    /// The configuration for Dynamo's runtime.
    fn config(&self, setup: &WorkerSetup) -> anyhow::Result<WorkerConfig> {
        let dynamo = &self.dynamo;
        if dynamo.disaggregation_mode != DisaggregationMode::Aggregated {
            bail!("--disaggregation-mode: this worker evaluates prompts and continues them, both: agg");
        }
        if setup.model.spec().output.head.is_none() {
            bail!("the model writes no text, and this worker does nothing else");
        }
        let folder = match &self.tokenizer {
            Some(folder) => folder.clone(),
            None => card::export(&setup.model, &setup.name, &card::cache()?)?,
        };
        let card = ModelCardFolder::open(&folder)?;
        let mut endpoint_types = dynamo.endpoint_types.clone();
        if !card.has_chat_template() && dynamo.custom_jinja_template.is_none() {
            eprintln!("note: the model has no chat template: it continues texts, and does not chat");
            endpoint_types = "completions".into();
        }
        Ok(WorkerConfig {
            namespace: dynamo.namespace.clone(),
            component: dynamo.component.clone(),
            endpoint: dynamo.endpoint.clone(),
            // Dynamo reads the model card from this folder.
            model_name: folder.display().to_string(),
            served_model_name: Some(setup.name.clone()),
            endpoint_types,
            custom_jinja_template: dynamo.custom_jinja_template.clone(),
            tool_call_parser: dynamo.dyn_tool_call_parser.clone(),
            reasoning_parser: dynamo.dyn_reasoning_parser.clone(),
            exclude_tools_when_tool_choice_none: dynamo.exclude_tools_when_tool_choice_none,
            route_to_encoder: dynamo.route_to_encoder,
            enable_rl: dynamo.enable_rl,
            runtime: dynamo.runtime.clone(),
            ..WorkerConfig::default()
        })
    }
}

/// The time for running requests to finish: as long as Dynamo waits, less two seconds.
fn grace() -> Duration {
    let default = if cfg!(debug_assertions) {
        dynamo_runtime::worker::DEFAULT_GRACEFUL_SHUTDOWN_TIMEOUT_DEBUG
    } else {
        dynamo_runtime::worker::DEFAULT_GRACEFUL_SHUTDOWN_TIMEOUT_RELEASE
    };
    let given = std::env::var(SHUTDOWN_TIMEOUT).ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(given.unwrap_or(default).saturating_sub(2))
}
