//! Opens a model, from a file or the hub, and starts its scheduler.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metal_attention::scheduler::{Scheduler, SchedulerOptions, SchedulerParts};
use metal_attention::speculation::{DraftFile, Speculation, SpeculativePass};
use metal_attention::tokenizer::Tokenizer;
use metal_attention::{EngineOptions, Error, Model, ModelOptions, Reranker, TokenLimits, Watch};
use metal_attention_chat::ChatTemplate;
use metal_attention_grammar::GrammarCompiler;
use metal_attention_hub::{DownloadObserver, Environment, Hub, HubError, ModelName, PREFIX};
use pyo3::prelude::*;

use crate::errors;
use crate::picture::Encoder;

/// The time between two reports of a download's progress.
const PROGRESS: Duration = Duration::from_millis(100);

/// The arguments of loading a model.
pub struct LoadOptions {
    /// A file or a name on the hub; `None`: the built-in model.
    pub model: Option<String>,
    /// The file that encodes pictures; `None`: the model reads text only.
    pub mmproj: Option<PathBuf>,
    /// The limits of a picture in tokens.
    pub picture_tokens: TokenLimits,
    /// Whether the file is read into memory instead of being mapped.
    pub in_memory: bool,
    /// The device and its options.
    pub engine: EngineOptions,
    /// The number of sequences that run at once.
    pub n_parallel: usize,
    /// Which drafter proposes tokens.
    pub speculation: Speculation,
    /// The file that has it; `None`: the model's own file.
    pub draft_model: Option<PathBuf>,
    /// A Python callback for downloads. It gets the file's name, the bytes so far, and all bytes.
    pub download: Option<Py<PyAny>>,
}

/// A loaded model, and what is made of it.
pub struct LoadedModel {
    /// The model.
    pub model: Model,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template.
    pub template: ChatTemplate,
    /// The compiler of grammars for its vocabulary.
    pub grammars: GrammarCompiler,
    /// Its use as a reranker. An error if it is none.
    pub reranker: Result<Reranker, Error>,
    /// Its picture encoder. `None`: no file for it was named.
    pub encoder: Option<Encoder>,
    /// The kind and the name of the device.
    pub device: String,
    /// The length of the context in tokens.
    pub n_ctx: usize,
}

impl LoadOptions {
    /// Opens the model and starts its scheduler. Takes long: call it with Python detached.
    pub fn load(self) -> PyResult<(LoadedModel, Scheduler)> {
        let Self { model, mmproj, picture_tokens, in_memory, engine, n_parallel, speculation, draft_model, download } =
            self;
        let watch = engine.watch.clone();
        let model = match model {
            None => Model::built_in(),
            Some(name) => {
                let path = match name.strip_prefix(PREFIX) {
                    Some(_) => fetch(&name, DownloadCallback { watch, callback: download, file: None })
                        .map_err(|e| errors::of_hub(&e))?,
                    None => name.into(),
                };
                Model::open_with(path, &ModelOptions { in_memory, ..Default::default() })
            }
        };
        let model = model.map_err(|e| errors::of_model(&e))?;
        let tokenizer = model.tokenizer().map_err(|e| errors::of_model(&e))?;
        let options = SchedulerOptions {
            n_parallel,
            // The queue is unlimited: requests wait for a slot and are never refused.
            n_queue: usize::MAX,
            draft_depth: speculation.depth,
            ..Default::default()
        };
        let encoder = mmproj.map(|path| Encoder::open(&path, &model, &engine, picture_tokens));
        let encoder = encoder.transpose().map_err(|e| errors::of_model(&e))?;
        let engine = options.engine(&model, &engine);
        let speculative = match draft_model {
            None => SpeculativePass::new(&model, &engine, speculation),
            Some(path) => DraftFile::open(path, &ModelOptions { in_memory, ..Default::default() })
                .and_then(|file| SpeculativePass::with_draft_file(&model, &file, &engine, speculation, None)),
        };
        let SpeculativePass { pass, drafter } = speculative.map_err(|e| errors::of_model(&e))?;
        let (device, n_ctx) = (pass.device(), pass.n_ctx());
        let parts = SchedulerParts { drafter, ..Default::default() };
        let scheduler = Scheduler::start_with(pass, Arc::new(model.clone()), options, parts);
        let scheduler = scheduler.map_err(|e| errors::of_start(&e))?;
        let loaded = LoadedModel {
            template: ChatTemplate::for_model(model.gguf().metadata(), Arc::clone(&tokenizer)),
            grammars: GrammarCompiler::new(&tokenizer),
            reranker: Reranker::new(&model),
            encoder,
            device: format!("{} {}", device.kind, device.name),
            n_ctx,
            tokenizer,
            model,
        };
        Ok((loaded, scheduler))
    }
}

/// Gets the model from the cache or the hub. Returns its first file.
fn fetch(name: &str, mut downloads: DownloadCallback) -> Result<PathBuf, HubError> {
    let name: ModelName = name.parse()?;
    let mut model = Hub::new(Environment::read()?).get(&name, &mut downloads)?;
    Ok(model.files.swap_remove(0))
}

/// Reports the progress of downloads to Python.
struct DownloadCallback {
    /// Cancelled by Ctrl-C.
    watch: Watch,
    /// The Python callback.
    callback: Option<Py<PyAny>>,
    /// The present file.
    file: Option<FileProgress>,
}

/// The progress of one file.
struct FileProgress {
    /// The file's name.
    name: String,
    /// The file's size in bytes.
    bytes: u64,
    /// The time of the last report.
    told: Instant,
}

impl DownloadCallback {
    /// Calls the callback. Its exceptions are ignored: the download continues.
    fn report(&self, done: u64) {
        if let (Some(callback), Some(file), false) = (&self.callback, &self.file, self.stop()) {
            Python::try_attach(|py| callback.call1(py, (&file.name, done, file.bytes)).map(drop));
        }
    }
}

impl DownloadObserver for DownloadCallback {
    fn file(&mut self, name: &str, done: u64, bytes: u64) {
        self.file = Some(FileProgress { name: name.to_owned(), bytes, told: Instant::now() });
        self.report(done);
    }

    fn advance(&mut self, done: u64) {
        let Some(file) = &mut self.file else { return };
        if file.told.elapsed() >= PROGRESS || done >= file.bytes {
            file.told = Instant::now();
            self.report(done);
        }
    }

    fn note(&mut self, _text: &str) {}

    fn stop(&self) -> bool {
        self.watch.is_cancelled()
    }
}
