//! Opening a model and setting it up, from the hub too.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metal_attention::scheduler::{Scheduler, SchedulerOptions};
use metal_attention::tokenizer::Tokenizer;
use metal_attention::{EngineOptions, Error, Model, ModelOptions, Reranker, Watch};
use metal_attention_chat::ChatTemplate;
use metal_attention_grammar::GrammarCompiler;
use metal_attention_hub::{Environment, Hub, HubError, ModelName, Observer, PREFIX};
use pyo3::prelude::*;

use crate::errors;

/// How often a download tells how far it is.
const PROGRESS: Duration = Duration::from_millis(100);

/// What is loaded, and how.
pub struct Wanted {
    /// A file or a name on the hub; `None`: the built-in model.
    pub model: Option<String>,
    pub in_memory: bool,
    pub engine: EngineOptions,
    pub n_parallel: usize,
    /// Is told of downloads: the file, the bytes that are there, all bytes.
    pub download: Option<Py<PyAny>>,
}

/// A model that runs.
pub struct Loaded {
    pub model: Model,
    pub tokenizer: Arc<Tokenizer>,
    pub template: ChatTemplate,
    pub grammars: GrammarCompiler,
    pub reranker: Result<Reranker, Error>,
    pub device: String,
    pub n_ctx: usize,
}

impl Wanted {
    /// Takes long: not to be called by who holds Python.
    pub fn load(self) -> PyResult<(Loaded, Scheduler)> {
        let Self { model, in_memory, engine, n_parallel, download } = self;
        let watch = engine.watch.clone();
        let model = match model {
            None => Model::built_in(),
            Some(name) => {
                let path = match name.strip_prefix(PREFIX) {
                    Some(_) => fetch(&name, Downloads { watch, callback: download, file: None })
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
            // Callers wait for places, and are not refused.
            n_queue: usize::MAX,
            ..Default::default()
        };
        let pass = model.forward_pass(&options.engine(&model, &engine)).map_err(|e| errors::of_model(&e))?;
        let (device, n_ctx) = (pass.device(), pass.n_ctx());
        let scheduler = Scheduler::start(pass, Arc::new(model.clone()), options).map_err(|e| errors::of_start(&e))?;
        let loaded = Loaded {
            template: ChatTemplate::for_model(model.gguf().metadata(), Arc::clone(&tokenizer)),
            grammars: GrammarCompiler::new(&tokenizer),
            reranker: Reranker::new(&model),
            device: format!("{} {}", device.kind, device.name),
            n_ctx,
            tokenizer,
            model,
        };
        Ok((loaded, scheduler))
    }
}

/// The model's first file.
fn fetch(name: &str, mut downloads: Downloads) -> Result<PathBuf, HubError> {
    let name: ModelName = name.parse()?;
    let mut model = Hub::new(Environment::read()?).get(&name, &mut downloads)?;
    Ok(model.files.swap_remove(0))
}

/// Tells Python how a download goes.
struct Downloads {
    watch: Watch,
    callback: Option<Py<PyAny>>,
    file: Option<File>,
}

struct File {
    name: String,
    bytes: u64,
    told: Instant,
}

impl Downloads {
    /// What the callback raises is nobody's concern: the download goes on.
    fn tell(&self, done: u64) {
        if let (Some(callback), Some(file), false) = (&self.callback, &self.file, self.stop()) {
            Python::try_attach(|py| callback.call1(py, (&file.name, done, file.bytes)).map(drop));
        }
    }
}

impl Observer for Downloads {
    fn file(&mut self, name: &str, done: u64, bytes: u64) {
        self.file = Some(File { name: name.to_owned(), bytes, told: Instant::now() });
        self.tell(done);
    }

    fn advance(&mut self, done: u64) {
        let Some(file) = &mut self.file else { return };
        if file.told.elapsed() >= PROGRESS || done >= file.bytes {
            file.told = Instant::now();
            self.tell(done);
        }
    }

    fn note(&mut self, _text: &str) {}

    fn stop(&self) -> bool {
        self.watch.is_cancelled()
    }
}
