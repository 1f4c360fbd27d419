//! The models of folders, and those that are pulled while the server runs.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use metal_attention_hub::choose::{ModelFiles, models};
use metal_attention_hub::{Environment, Hub, ModelName, Observer};
use metal_attention_server::http::{ModelStore, PullProgress, SourceError, StoredModel};

use super::{ServedModel, Setup};
use crate::find_model::{files_below, without_part};
use crate::model_args::ModelArgs;

/// Folders with models, each model by its file's name without the ending.
pub struct ModelFolders {
    folders: Vec<PathBuf>,
    /// How to read the files.
    args: ModelArgs,
    setup: Arc<Setup>,
    /// Models that were pulled, by the names that they were pulled by.
    pulled: Mutex<BTreeMap<String, PathBuf>>,
}

impl ModelFolders {
    /// The models of `folders`, read as `args` say and set up as `setup` says.
    pub fn new(folders: Vec<PathBuf>, args: ModelArgs, setup: Setup) -> Self {
        Self { folders, args, setup: Arc::new(setup), pulled: Mutex::default() }
    }

    fn stored(&self, name: String, path: PathBuf) -> StoredModel {
        let mut hasher = DefaultHasher::new();
        path.hash(&mut hasher);
        if let Ok(metadata) = path.metadata() {
            (metadata.len(), metadata.modified().ok()).hash(&mut hasher);
        }
        let (args, setup) = (self.args.of_file(path), Arc::clone(&self.setup));
        let open = Box::new(move || Box::new(ServedModel::on_demand(args, Setup::clone(&setup))) as _);
        StoredModel { name, version: hasher.finish(), open }
    }
}

impl ModelStore for ModelFolders {
    fn models(&self) -> Vec<StoredModel> {
        let mut found = BTreeMap::<String, PathBuf>::new();
        for folder in &self.folders {
            let files = files_below(folder);
            for ModelFiles { files, complete, .. } in models(files.iter().map(|file| (file.as_str(), 0))) {
                let Some(first) = files.first().filter(|_| complete) else { continue };
                if let Some(name) = name_of(Path::new(first)) {
                    found.entry(name).or_insert_with(|| folder.join(first));
                }
            }
        }
        let mut all: Vec<_> = found.into_iter().map(|(name, path)| self.stored(name, path)).collect();
        let pulled = self.pulled.lock().unwrap_or_else(PoisonError::into_inner);
        for (given, path) in pulled.iter().filter(|(_, path)| path.exists()) {
            all.push(self.stored(given.clone(), path.clone()));
        }
        all
    }

    fn pull(&self, name: &str, report: &mut dyn FnMut(PullProgress) -> bool) -> Result<(), SourceError> {
        let given: ModelName = name.parse()?;
        let hub = Hub::new(Environment::read()?);
        let model = hub.pull(&given, &mut Reporter { report, current: PullProgress::default(), stops: false })?;
        let path = model.files.into_iter().next().ok_or("the model has no file")?;
        self.pulled.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), path);
        Ok(())
    }
}

/// The name of a model in a file: without folders, ending and number of the part. `None`: it is a part of another model,
/// such as the eyes of one.
fn name_of(file: &Path) -> Option<String> {
    let name = without_part(file.file_name()?.to_str()?).to_owned();
    (!name.to_ascii_lowercase().starts_with("mmproj")).then_some(name)
}

/// Passes a download's progress on.
struct Reporter<'r> {
    report: &'r mut dyn FnMut(PullProgress) -> bool,
    current: PullProgress,
    stops: bool,
}

impl Observer for Reporter<'_> {
    fn file(&mut self, name: &str, done: u64, bytes: u64) {
        self.current = PullProgress { status: format!("pulling {name}"), total: bytes, completed: done };
        self.stops |= !(self.report)(self.current.clone());
    }

    fn advance(&mut self, done: u64) {
        self.current.completed = done;
        self.stops |= !(self.report)(self.current.clone());
    }

    fn note(&mut self, text: &str) {
        tracing::info!("{text}");
    }

    fn stop(&self) -> bool {
        self.stops
    }
}
