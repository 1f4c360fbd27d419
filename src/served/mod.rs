//! The models of `serve`: named on the command line, in the configuration file, or files of a folder.

pub mod config;
mod folder;
mod memory;

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use metal_attention::scheduler::{SchedulerOptions, StartError};
use metal_attention::{EngineOptions, ForwardPass, Model, Watch};
use metal_attention_server::http::{LoadError, LoadedModel, ModelCard, ModelSource, Placement, SourceError};

pub use folder::ModelFolders;

use crate::cache_args::CacheArgs;
use crate::cli_error::CliError;
use crate::interrupt;
use crate::model_args::ModelArgs;
use crate::progress::Progress;
use crate::replica_args::ReplicaArgs;
use crate::{template_file, units};

/// The context of a model that is loaded on demand, where nothing says otherwise: several have to fit beside each other.
const DEFAULT_N_CTX: usize = 8192;

/// How the models of a server are set up.
#[derive(Clone)]
pub struct Setup {
    /// Where and how they run.
    pub engine: ReplicaArgs,
    /// Requests that run at once, of each replica.
    pub n_parallel: usize,
    /// Requests that may wait, of each replica.
    pub n_queue: usize,
    /// The chat template in this file instead of the model's.
    pub chat_template: Option<PathBuf>,
    /// Where finished texts go that the KV caches have no room for.
    pub cache: CacheArgs,
    /// Models that may be loaded at a time: they share that memory out.
    pub n_models: usize,
}

/// A model that `serve` loads.
pub struct ServedModel {
    args: ModelArgs,
    setup: Setup,
    /// It stays loaded: its context may take what memory there is, and its load is shown on stderr.
    is_resident: bool,
    /// The model where it was opened before it is loaded, so that a wrong name is told at once. Its file is mapped: it is read
    /// when there is room for it.
    opened: Mutex<Option<Model>>,
    card: OnceLock<Arc<ModelCard>>,
}

impl ServedModel {
    /// A model that is loaded when a request wants it.
    pub fn on_demand(args: ModelArgs, setup: Setup) -> Self {
        Self { args, setup, is_resident: false, opened: Mutex::default(), card: OnceLock::new() }
    }

    /// A model that is loaded when the server starts. Its file is opened here.
    pub fn resident(args: ModelArgs, setup: Setup) -> Result<Self, CliError> {
        let model = args.mapped().open()?;
        args.tokenizer(&model)?;
        setup.engine.options(&model)?;
        let opened = Mutex::new(Some(model));
        Ok(Self { args, setup, is_resident: true, opened, card: OnceLock::new() })
    }

    fn opened(&self) -> MutexGuard<'_, Option<Model>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The model to load, its file read where it is not to be mapped.
    fn open(&self) -> Result<Model, CliError> {
        let opened = self.opened().take().filter(|_| self.args.is_mapped());
        opened.map_or_else(|| self.args.open(), Ok)
    }

    /// How each replica is set up, and the scheduler over them.
    fn options(&self, model: &Model) -> Result<(Vec<EngineOptions>, SchedulerOptions), CliError> {
        let Setup { engine, n_parallel, n_queue, .. } = &self.setup;
        let options = SchedulerOptions { n_parallel: *n_parallel, n_queue: *n_queue, ..Default::default() };
        let mut engines = engine.options(model)?;
        for engine in &mut engines {
            if !self.is_resident && engine.n_ctx.is_none() {
                engine.n_ctx = Some(model.spec().n_ctx_train.min(DEFAULT_N_CTX));
            }
            *engine = options.engine(model, engine);
        }
        Ok((engines, options))
    }

    fn load_model(&self, placement: &Placement) -> Result<LoadedModel, CliError> {
        let name = self.args.name();
        let model = self.open()?;
        let tokenizer = self.args.tokenizer(&model)?;
        let path = self.setup.chat_template.as_deref();
        let template = path.map(|path| template_file::read(path, &tokenizer)).transpose()?;
        let (mut engines, mut options) = self.options(&model)?;
        let shown = self.is_resident.then(|| {
            if !std::io::stderr().is_terminal() {
                say(&format!("loading {name}"));
            }
            let shown = Progress::spinner("loading the model");
            shown.weigh(model.gguf().tensor_bytes());
            shown
        });
        if !self.is_resident {
            // The common one counts for what is shown of resident models.
            let watch = Watch::default();
            for engine in &mut engines {
                engine.watch = watch.clone();
            }
        }
        let passes = engines.iter().map(|engine| forward_pass(&model, engine, placement));
        let passes = passes.collect::<Result<Vec<_>, _>>()?;
        drop(shown);
        self.setup.cache.set(&mut options, passes.len() * self.setup.n_models);
        let devices = device_names(&passes);
        let kv_cache_bytes = passes.first().map_or(0, |pass| pass.kv_cache_bytes());
        let loaded = LoadedModel::start_replicas(model, passes, &options).map_err(|error| match error {
            LoadError::Model(error) | LoadError::Start(StartError::Model(error)) => error.into(),
            LoadError::FirstToken(_) | LoadError::NoNumbers => CliError::General(error.to_string()),
            LoadError::Start(error) => CliError::General(format!("cannot start the engine: {error}")),
        })?;
        let loaded = match template {
            Some(template) => loaded.with_chat_template(template),
            None => loaded,
        };
        if self.is_resident {
            let context = context_line(&loaded, kv_cache_bytes, options.n_parallel, engines.len());
            // So far it ended the process; requests that run may finish.
            interrupt::leave();
            let each = if engines.len() > 1 { " on each" } else { "" };
            say(&format!("ready: {devices}, {} requests at once{each}, {context}", options.n_parallel));
        }
        Ok(loaded)
    }

    fn read_card(&self) -> Result<ModelCard, CliError> {
        match &*self.opened() {
            Some(model) => Ok(ModelCard::of(model.gguf())),
            None => Ok(ModelCard::of(&self.args.mapped().open_gguf()?)),
        }
    }
}

impl ModelSource for ServedModel {
    fn card(&self) -> Result<Arc<ModelCard>, SourceError> {
        if let Some(card) = self.card.get() {
            return Ok(Arc::clone(card));
        }
        let card = Arc::new(self.read_card()?);
        Ok(Arc::clone(self.card.get_or_init(|| card)))
    }

    fn placements(&self) -> Result<Vec<Placement>, SourceError> {
        let opened = self.opened().take();
        let model = opened.map_or_else(|| self.args.mapped().open(), Ok)?;
        let (engines, _) = self.options(&model)?;
        let placements = memory::placements(&engines, &model);
        // It is loaded next.
        *self.opened() = Some(model);
        Ok(placements)
    }

    fn load(&self, placement: &Placement) -> Result<LoadedModel, SourceError> {
        Ok(self.load_model(placement)?)
    }
}

/// Sets a replica up where memory is set aside for it. Where that fails, as other programs may use a card, `auto` looks for another
/// device.
fn forward_pass(
    model: &Model,
    engine: &EngineOptions,
    placement: &Placement,
) -> Result<Box<dyn ForwardPass>, metal_attention::Error> {
    let placed = memory::placed(engine, placement);
    model.forward_pass(&placed).or_else(|error| {
        if placed.device == engine.device {
            return Err(error);
        }
        tracing::warn!("auto cannot take {}: {error}", placed.device);
        model.forward_pass(engine)
    })
}

/// What the start says of the context and the KV cache of a replica, which has so many bytes.
fn context_line(loaded: &LoadedModel, kv_cache_bytes: usize, n_parallel: usize, n_replicas: usize) -> String {
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

/// A line on stderr; where that is closed nothing is shown.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
