//! The models of `serve`: named on the command line or in the configuration file, or files of a folder.
//!
//! [`ServedModel`] is one of them; it implements the server's `ModelSource`, which reads its metadata, lists the placements
//! that its memory fits in (`memory.rs`), and loads it. `config.rs` and `folder.rs` find models.

pub mod config;
mod folder;
mod memory;

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use metal_attention::scheduler::{SchedulerOptions, StartError};
use metal_attention::speculation::{DraftFile, SpeculativePass};
use metal_attention::{EngineOptions, Model, PictureEncoder, Watch};
use metal_attention_server::http::{LoadError, LoadedModel, ModelCard, ModelSource, Placement, SourceError};

pub use folder::ModelFolders;

use crate::cache_args::CacheArgs;
use crate::cli_error::CliError;
use crate::interrupt;
use crate::map_gguf::map_gguf;
use crate::model_args::ModelArgs;
use crate::picture_args::MmprojArgs;
use crate::progress::ProgressLine;
use crate::replica_args::ReplicaArgs;
use crate::speculation_args::SpeculationArgs;
use crate::{template_file, units};

/// The context of a model that is loaded on demand, in tokens, unless it is set: several models have to fit in memory.
const DEFAULT_N_CTX: usize = 8192;

/// The settings that all models of a server run with.
#[derive(Clone)]
pub struct ServingSetup {
    /// Devices, replicas and context.
    pub engine: ReplicaArgs,
    /// Requests that run at once in each replica.
    pub n_parallel: usize,
    /// Requests that may wait in each replica.
    pub n_queue: usize,
    /// Drafts of sequences.
    pub speculation: SpeculationArgs,
    /// A file with a chat template that replaces the models'.
    pub chat_template: Option<PathBuf>,
    /// The encoder of pictures.
    pub pictures: ServedPictures,
    /// The prefix cache beyond the KV cache: main memory and disk.
    pub cache: CacheArgs,
    /// The number of models that may be loaded at a time; `cache` is divided among them.
    pub n_models: usize,
}

/// How models see pictures.
#[derive(Clone)]
pub struct ServedPictures {
    /// The `mmproj` file, and the limits of tokens.
    pub encoder: MmprojArgs,
    /// Whether models that have an `mmproj` file see pictures.
    pub enabled: bool,
    /// Bytes of the rows of the last pictures that are kept, for each model.
    pub cache_bytes: usize,
}

/// A model that `serve` loads, at the start or on demand.
pub struct ServedModel {
    /// The model's name and the flags for reading its file.
    args: ModelArgs,
    /// The settings that it runs with.
    setup: ServingSetup,
    /// Whether it is loaded at the start and stays loaded. Then its context may take all free memory, and its load is shown on
    /// stderr.
    is_resident: bool,
    /// The model, opened before it is loaded so that a wrong name is reported at the start. The file is mapped, not read.
    opened: Mutex<Option<Model>>,
    /// The model's description for clients, read once.
    card: OnceLock<Arc<ModelCard>>,
    /// The latest load.
    latest_load: Mutex<Option<Load>>,
}

/// The progress of a load.
struct Load {
    /// Counts the bytes of weights that are set up.
    watch: Watch,
    /// Its count at the start.
    start: u64,
    /// Bytes of the weights of all replicas.
    bytes: u64,
}

impl ServedModel {
    /// A model that is loaded when a request names it.
    pub fn on_demand(args: ModelArgs, setup: ServingSetup) -> Self {
        Self {
            args,
            setup,
            is_resident: false,
            opened: Mutex::default(),
            card: OnceLock::new(),
            latest_load: Mutex::default(),
        }
    }

    /// A model that is loaded at the start of the server. Opens its file; an error is one of the file or the flags.
    pub fn resident(args: ModelArgs, setup: ServingSetup) -> Result<Self, CliError> {
        let model = args.mapped().open()?;
        args.tokenizer(&model)?;
        setup.engine.options(&model)?;
        let opened = Mutex::new(Some(model));
        Ok(Self { args, setup, is_resident: true, opened, card: OnceLock::new(), latest_load: Mutex::default() })
    }

    /// Locks the opened model.
    fn opened(&self) -> MutexGuard<'_, Option<Model>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn latest_load(&self) -> MutexGuard<'_, Option<Load>> {
        self.latest_load.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The model to load. Reads its file again if it must not be mapped.
    fn open(&self) -> Result<Model, CliError> {
        let opened = self.opened().take().filter(|_| self.args.is_mapped());
        opened.map_or_else(|| self.args.open(), Ok)
    }

    /// The options of each replica, and of the scheduler over them.
    fn options(&self, model: &Model) -> Result<(Vec<EngineOptions>, SchedulerOptions), CliError> {
        let ServingSetup { engine, n_parallel, n_queue, .. } = &self.setup;
        let options = SchedulerOptions {
            n_parallel: *n_parallel,
            n_queue: *n_queue,
            draft_depth: self.setup.speculation.depth(),
            ..Default::default()
        };
        let mut engines = engine.options(model)?;
        for engine in &mut engines {
            if !self.is_resident && engine.n_ctx.is_none() {
                engine.n_ctx = Some(model.spec().n_ctx_train.min(DEFAULT_N_CTX));
            }
            *engine = options.engine(model, engine);
        }
        Ok((engines, options))
    }

    /// Loads the model into the memory of `placement`, and starts its scheduler. Prints the progress if it is resident.
    fn load_model(&self, placement: &Placement) -> Result<LoadedModel, CliError> {
        let name = self.args.name();
        let model = self.open()?;
        let tokenizer = self.args.tokenizer(&model)?;
        let path = self.setup.chat_template.as_deref();
        let template = path.map(|path| template_file::read(path, &tokenizer)).transpose()?;
        let (mut engines, mut options) = self.options(&model)?;
        let shown = self.is_resident.then(|| {
            if !std::io::stderr().is_terminal() {
                print_line(&format!("loading {name}"));
            }
            let shown = ProgressLine::spinner("loading the model");
            shown.weigh(model.gguf().tensor_bytes());
            shown
        });
        if !self.is_resident {
            // The shared watch counts the progress that is shown for resident models.
            let watch = Watch::default();
            for engine in &mut engines {
                engine.watch = watch.clone();
            }
        }
        *self.latest_load() = engines.first().map(|engine| Load {
            watch: engine.watch.clone(),
            start: engine.watch.done(),
            bytes: model.gguf().tensor_bytes() * engines.len() as u64,
        });
        // The context may take the memory that is left, so that the encoder comes first.
        let encoder = self.picture_encoder(&model, engines.first(), placement)?;
        let speculation = &self.setup.speculation;
        let draft = speculation.draft_file(&self.args)?;
        let passes = engines.iter().map(|engine| forward_pass(&model, engine, placement, speculation, draft.as_ref()));
        let passes = passes.collect::<Result<Vec<_>, _>>()?;
        drop(shown);
        self.setup.cache.set(&mut options, passes.len() * self.setup.n_models);
        let devices = device_names(&passes);
        let kv_cache_bytes = passes.first().map_or(0, |pass| pass.pass.kv_cache_bytes());
        let loaded = LoadedModel::start_replicas(model, passes, &options).map_err(|error| match error {
            LoadError::Model(error) | LoadError::Start(StartError::Model(error)) => error.into(),
            LoadError::FirstToken(_) | LoadError::NoNumbers => CliError::General(error.to_string()),
            LoadError::Start(error) => CliError::General(format!("cannot start the engine: {error}")),
        })?;
        let loaded = match template {
            Some(template) => loaded.with_chat_template(template),
            None => loaded,
        };
        let loaded = match encoder {
            Some(encoder) => loaded.with_pictures(encoder, self.setup.pictures.cache_bytes).map_err(|error| {
                CliError::General(format!("cannot start the thread of the picture encoder: {error}"))
            })?,
            None => loaded,
        };
        if self.is_resident {
            let context = context_line(&loaded, kv_cache_bytes, options.n_parallel, engines.len());
            // Ctrl-C ended the process so far. From now on the server handles it, so that running requests can finish.
            interrupt::ignore_ctrl_c();
            let each = if engines.len() > 1 { " on each" } else { "" };
            print_line(&format!("ready: {devices}, {} requests at once{each}, {context}", options.n_parallel));
        }
        Ok(loaded)
    }

    /// The `mmproj` file; `None`: the model has none. A file that was not named, but found, must not keep the model from being
    /// served: where several fit, there is a warning.
    fn mmproj(&self) -> Option<PathBuf> {
        let ServedPictures { encoder, enabled, .. } = &self.setup.pictures;
        let found = if *enabled { encoder.file(&self.args) } else { Ok(None) };
        found.unwrap_or_else(|error| {
            tracing::warn!("{} sees no pictures: {error}", self.args.name());
            None
        })
    }

    /// Sets up the picture encoder on the device of the first replica; `None`: the model has none, or one that was found beside it
    /// does not fit.
    fn picture_encoder(
        &self,
        model: &Model,
        engine: Option<&EngineOptions>,
        placement: &Placement,
    ) -> Result<Option<PictureEncoder>, CliError> {
        let (Some(path), Some(engine)) = (self.mmproj(), engine) else { return Ok(None) };
        let in_file = |error: metal_attention::Error| CliError::InFile { file: path.display().to_string(), error };
        let settings = &self.setup.pictures.encoder;
        let encoder = map_gguf(&path).map_err(|error| in_file(error.into())).and_then(|file| {
            let engine = memory::placed(engine, placement);
            PictureEncoder::new(&file, model.spec(), &engine, settings.token_limits()).map_err(in_file)
        });
        match encoder {
            Ok(encoder) => Ok(Some(encoder)),
            Err(error) if settings.mmproj.is_some() => Err(error),
            Err(error) => {
                tracing::warn!("{} sees no pictures: {error}", self.args.name());
                Ok(None)
            }
        }
    }

    /// Reads the model's description from its metadata.
    fn read_card(&self) -> Result<ModelCard, CliError> {
        let mut card = match &*self.opened() {
            Some(model) => ModelCard::of(model.gguf()),
            None => ModelCard::of(&self.args.mapped().open_gguf()?),
        };
        card.capabilities.vision = self.mmproj().is_some();
        Ok(card)
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
        let (mut engines, _) = self.options(&model)?;
        let speculation = &self.setup.speculation;
        let draft = speculation.draft_file(&self.args.mapped())?;
        for engine in &mut engines {
            engine.drafter = speculation.memory(&model, draft.as_ref(), engine).map_err(CliError::from)?;
        }
        let mmproj = self.mmproj().and_then(|path| map_gguf(&path).ok());
        let encoder = mmproj.map_or(0, |file| PictureEncoder::memory_bytes(&file));
        let draft = draft.as_ref().and_then(|draft| Some((draft.model()?, speculation.draft_device()?)));
        let placements = memory::placements(&engines, &model, encoder, draft);
        // Kept for the load that follows.
        *self.opened() = Some(model);
        Ok(placements)
    }

    fn load(&self, placement: &Placement) -> Result<LoadedModel, SourceError> {
        Ok(self.load_model(placement)?)
    }

    fn load_progress(&self) -> Option<f64> {
        let load = self.latest_load();
        let Load { watch, start, bytes } = load.as_ref().filter(|load| load.bytes > 0)?;
        Some(((watch.done() - start) as f64 / *bytes as f64).clamp(0.0, 1.0))
    }

    fn cancel_load(&self) {
        // The watch of a resident model is that of the whole program.
        if let Some(load) = self.latest_load().as_ref().filter(|_| !self.is_resident) {
            load.watch.cancel();
        }
    }
}

/// Builds the forward pass of a replica in the memory that `placement` reserves. If that fails, for example because another
/// program uses the GPU, `auto` chooses a device by itself.
fn forward_pass(
    model: &Model,
    engine: &EngineOptions,
    placement: &Placement,
    speculation: &SpeculationArgs,
    draft: Option<&DraftFile>,
) -> Result<SpeculativePass, metal_attention::Error> {
    let placed = memory::placed(engine, placement);
    speculation.open(model, draft, &placed).or_else(|error| {
        if placed.device == engine.device {
            return Err(error);
        }
        tracing::warn!("auto cannot take {}: {error}", placed.device);
        speculation.open(model, draft, engine)
    })
}

/// The description of the context and the KV cache of a replica for the message at the start. `kv_cache_bytes` is the size
/// of one replica's KV cache.
fn context_line(loaded: &LoadedModel, kv_cache_bytes: usize, n_parallel: usize, n_replicas: usize) -> String {
    let each = if n_replicas > 1 { " each" } else { "" };
    format!(
        "context {} tokens a request, KV cache {}{each} shared by {}; -c changes it",
        loaded.n_ctx,
        units::bytes(kv_cache_bytes as u64),
        units::count(n_parallel, "request")
    )
}

/// The names of the devices that the replicas run on, each once with its number of replicas.
fn device_names(passes: &[SpeculativePass]) -> String {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for SpeculativePass { pass, .. } in passes {
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

/// Prints a line on stderr. Errors are ignored, because stderr may be closed.
pub fn print_line(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
