//! The models in folders (`--models-dir`), and models that clients pull while the server runs.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use metal_attention_hub::choose::{ModelFiles, models};
use metal_attention_hub::{CachedModel, DownloadObserver, Environment, Hub, ModelName};
use metal_attention_server::http::{ModelStore, PullProgress, SourceError, StoredModel};

use super::{ServedModel, ServingSetup};
use crate::find_model::{files_below, without_part};
use crate::model_args::ModelArgs;

/// The models in some folders, named by their files' names without `.gguf`.
pub struct ModelFolders {
    /// The folders.
    folders: Vec<PathBuf>,
    /// The flags for reading a model's file.
    args: ModelArgs,
    /// The settings that the models run with.
    setup: Arc<ServingSetup>,
    /// Models that clients pulled, by the names in their requests.
    pulled: Mutex<BTreeMap<String, CachedModel>>,
}

impl ModelFolders {
    /// The models of `folders`. `args` say how files are read.
    pub fn new(folders: Vec<PathBuf>, args: ModelArgs, setup: ServingSetup) -> Self {
        Self { folders, args, setup: Arc::new(setup), pulled: Mutex::default() }
    }

    /// Locks the list of pulled models.
    fn pulled(&self) -> MutexGuard<'_, BTreeMap<String, CachedModel>> {
        self.pulled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The files of each complete model in the folders, by its name. If two folders have a name, the first one has it.
    fn in_folders(&self) -> BTreeMap<String, Vec<PathBuf>> {
        let mut found = BTreeMap::new();
        for folder in &self.folders {
            let files = files_below(folder);
            let mut models = models(files.iter().map(|file| (file.as_str(), 0)));
            models.retain(|model| model.complete && !model.is_mmproj());
            for ModelFiles { files, .. } in models {
                if let Some(name) = files.first().and_then(|first| name_of(Path::new(first))) {
                    found.entry(name).or_insert_with(|| files.iter().map(|file| folder.join(file)).collect());
                }
            }
        }
        found
    }

    /// The model in `files`, the first part first. `None` if `files` is empty.
    fn stored(&self, name: String, files: &[PathBuf]) -> Option<StoredModel> {
        let (args, setup) = (self.args.of_file(files.first()?.clone()), Arc::clone(&self.setup));
        let open = Box::new(move || Box::new(ServedModel::on_demand(args, ServingSetup::clone(&setup))) as _);
        Some(StoredModel { name, version: version(files), open })
    }
}

impl ModelStore for ModelFolders {
    fn models(&self) -> Vec<StoredModel> {
        let mut all: Vec<_> =
            self.in_folders().into_iter().filter_map(|(name, files)| self.stored(name, &files)).collect();
        let pulled = self.pulled().clone();
        let is_there = |model: &CachedModel| model.files.iter().all(|file| file.exists());
        for (given, model) in pulled.into_iter().filter(|(_, model)| is_there(model)) {
            all.extend(self.stored(given, &model.files));
        }
        all
    }

    fn pull(&self, name: &str, report: &mut dyn FnMut(PullProgress) -> bool) -> Result<(), SourceError> {
        let given: ModelName = name.parse()?;
        let hub = Hub::new(Environment::read()?);
        let model =
            hub.pull(&given, &mut DownloadReporter { report, current: PullProgress::default(), stops: false })?;
        self.pulled().insert(name.to_owned(), model);
        Ok(())
    }

    /// In a folder the files themselves are deleted; of a symbolic link the link, not its target. In the hub's cache a model
    /// is removed as `rm` removes it: snapshot links together with their blobs.
    fn delete(&self, name: &str) -> Result<(), SourceError> {
        if let Some(files) = self.in_folders().remove(name) {
            for path in files {
                std::fs::remove_file(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            }
            return Ok(());
        }
        let model = self.pulled().get(name).cloned().ok_or("its files are gone already")?;
        Hub::new(Environment::read()?).remove(&model.name, std::slice::from_ref(&model))?;
        self.pulled().remove(name);
        Ok(())
    }
}

/// A hash that changes when one of the files changes (path, size, or time of the last change).
fn version(files: &[PathBuf]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for path in files {
        path.hash(&mut hasher);
        if let Ok(metadata) = path.metadata() {
            (metadata.len(), metadata.modified().ok()).hash(&mut hasher);
        }
    }
    hasher.finish()
}

/// The name of the model in a file: without folders, ending and number of the part.
fn name_of(file: &Path) -> Option<String> {
    Some(without_part(file.file_name()?.to_str()?).to_owned())
}

/// Reports a download's progress to a callback.
struct DownloadReporter<'r> {
    /// The callback. It returns false to stop the download.
    report: &'r mut dyn FnMut(PullProgress) -> bool,
    /// The progress of the present file.
    current: PullProgress,
    /// Whether the callback has stopped the download.
    stops: bool,
}

impl DownloadObserver for DownloadReporter<'_> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_depends_on_each_part() {
        let folder = tempfile::tempdir().unwrap();
        let files = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"].map(|name| folder.path().join(name));
        for file in &files {
            std::fs::write(file, "a").unwrap();
        }
        let before = version(&files);
        assert_eq!(version(&files), before);
        std::fs::write(&files[1], "ab").unwrap();
        assert_ne!(version(&files), before);
    }
}
