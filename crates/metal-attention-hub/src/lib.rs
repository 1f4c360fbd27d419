#![doc = include_str!("../README.md")]

mod cache;
mod checksum;
pub mod choose;
mod client;
mod download;
mod environment;
mod error;
mod files;
mod known;
mod mmproj;
mod name;
mod origin;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use cache::{CachedMmproj, CachedModel};
pub use environment::{Environment, HubToken};
pub use error::HubError;
pub use known::{KnownModel, known_model, known_models, similar_name};
pub use mmproj::{choose_mmproj, is_mmproj};
pub use name::{ModelName, PREFIX, Which, is_hub_address};

use cache::{CachedCommit, RepoCache};
use choose::{ModelFiles, Unchosen, choose, mmproj_of, models};
use client::HubClient;
use download::{RemoteFile, download};

/// Observes the progress of downloads, and may stop them.
pub trait DownloadObserver {
    /// A file starts; `done` of its `bytes` bytes were downloaded before.
    fn file(&mut self, name: &str, done: u64, bytes: u64);
    /// `done` bytes of the file have been downloaded.
    fn advance(&mut self, done: u64);
    /// A message for the user, such as a lost connection.
    fn note(&mut self, text: &str);
    /// Whether to stop; the bytes that have arrived are kept.
    fn stop(&self) -> bool;
}

/// An observer that ignores the progress and does not stop.
pub struct Quiet;

impl DownloadObserver for Quiet {
    fn file(&mut self, _name: &str, _done: u64, _bytes: u64) {}
    fn advance(&mut self, _done: u64) {}
    fn note(&mut self, _text: &str) {}
    fn stop(&self) -> bool {
        false
    }
}

/// A client of the hub and of its cache.
pub struct Hub {
    /// The hub's address, the cache and the token.
    environment: Environment,
    /// The time before the second attempt of an interrupted download.
    pause: Duration,
    /// Whether a model's `mmproj` file is downloaded with it.
    with_mmproj: bool,
}

/// A download that was interrupted and not continued.
#[derive(Clone, Debug)]
pub struct Unfinished {
    /// `OWNER/REPO`.
    pub repo: String,
    /// Bytes that have arrived.
    pub bytes: u64,
}

impl Hub {
    /// A client. No request is sent yet.
    pub fn new(environment: Environment) -> Self {
        Self { environment, pause: Duration::from_secs(1), with_mmproj: true }
    }

    /// Sets the time before the second attempt of an interrupted download; it doubles with each further one.
    #[must_use]
    pub fn with_pause(self, pause: Duration) -> Self {
        Self { pause, ..self }
    }

    /// Downloads models without their `mmproj` files.
    #[must_use]
    pub fn without_mmproj(self) -> Self {
        Self { with_mmproj: false, ..self }
    }

    /// The folder of the cache.
    pub fn cache(&self) -> &Path {
        &self.environment.cache
    }

    /// Returns the model from the cache without a request; downloads it if it is missing.
    pub fn get(&self, name: &ModelName, observer: &mut dyn DownloadObserver) -> Result<CachedModel, HubError> {
        match self.find(name)? {
            Some(model) => Ok(model),
            None => self.pull(name, observer),
        }
    }

    /// Finds the model in the cache: in the newest downloaded commit, else in older ones. `None` if no commit has exactly one
    /// complete model that matches.
    pub fn find(&self, name: &ModelName) -> Result<Option<CachedModel>, HubError> {
        let repo = self.repo(name.repo());
        let mut snapshots = repo.snapshots()?;
        for snapshot in &mut snapshots {
            snapshot.models.retain(|model| model.complete);
        }
        let chosen = |snapshot: &CachedCommit| {
            let files = choose(&snapshot.models, &name.which).ok()?;
            Some(repo.model(&snapshots, snapshot, files))
        };
        Ok(snapshots.iter().find_map(chosen))
    }

    /// Downloads the model in its present version, and its `mmproj` file if the repository has one. Files that are in the cache
    /// are not downloaded again. Offline, returns the model of the cache, or an error.
    pub fn pull(&self, name: &ModelName, observer: &mut dyn DownloadObserver) -> Result<CachedModel, HubError> {
        if self.environment.offline {
            if let Some(model) = self.find(name)? {
                return Ok(model);
            }
            let newest = self.repo(name.repo()).snapshots()?.into_iter().next();
            let models = newest.map_or_else(Vec::new, |snapshot| without_mmproj(&snapshot.models));
            return Err(HubError::Offline { name: name.to_string(), models });
        }
        let client = HubClient::new(&self.environment)?;
        let listing = client.list(name.repo())?;
        let files = models(listing.files.iter().map(|file| (file.name.as_str(), file.bytes.unwrap_or(0))));
        let chosen = choose(&files, &name.which).map_err(|why| unchosen(name, why, &files))?;
        if !chosen.complete {
            return Err(HubError::MissingPart { repo: name.repo().to_owned(), file: chosen.files[0].clone() });
        }

        let repo = self.repo(name.repo());
        let by_name: HashMap<_, _> = listing.files.iter().map(|listed| (&listed.name, listed)).collect();
        // The mmproj file is the first, so that a model with pictures is complete when its own files are.
        let mmproj = mmproj_of(&files, chosen).filter(|_| self.with_mmproj);
        for file in mmproj.into_iter().chain([chosen]).flat_map(|model| &model.files) {
            let listed = by_name[file];
            let looked_up;
            let listed = if listed.bytes.is_some() && listed.checksum.is_some() {
                listed
            } else {
                looked_up = client.look_up(name.repo(), &listing.commit, file)?;
                &looked_up
            };
            let (Some(bytes), Some(checksum)) = (listed.bytes, &listed.checksum) else {
                let problem = format!("it tells no size and checksum of {file}");
                return Err(HubError::Answer { host: self.environment.endpoint.clone(), problem });
            };
            let remote = RemoteFile { repo: name.repo(), commit: &listing.commit, name: file, bytes, checksum };
            download(&client, &repo, &remote, self.pause, observer)?;
        }
        // Only now: until here, an older commit may be the only complete one.
        repo.set_newest(&listing.commit)?;
        let model = self.find(&name.with(Which::File(chosen.files[0].clone())))?;
        model.ok_or_else(|| HubError::NotCached { name: name.to_string() })
    }

    /// All models in the cache, including those of older commits. An `mmproj` file counts as a model only where the cache has
    /// nothing else of its repository.
    pub fn models(&self) -> Result<Vec<CachedModel>, HubError> {
        let mut models = Vec::new();
        for name in cache::repos(self.cache())? {
            models.extend(self.models_of(&name, |_, counts| counts)?);
        }
        Ok(models)
    }

    /// The models of a repository in the cache for which `fits` holds. Its second argument: whether the model counts as one,
    /// see [`models`](Self::models).
    fn models_of(&self, repo: &str, fits: impl Fn(&ModelFiles, bool) -> bool) -> Result<Vec<CachedModel>, HubError> {
        let repo = self.repo(repo);
        let snapshots = repo.snapshots()?;
        let has_models = snapshots.iter().flat_map(|snapshot| &snapshot.models).any(|model| !model.is_mmproj());
        let fits = |model: &&ModelFiles| fits(model, !has_models || !model.is_mmproj());
        let of_commit = |snapshot: &CachedCommit| -> Vec<CachedModel> {
            snapshot.models.iter().filter(fits).map(|files| repo.model(&snapshots, snapshot, files)).collect()
        };
        Ok(snapshots.iter().flat_map(of_commit).collect())
    }

    /// The unfinished downloads.
    pub fn unfinished(&self) -> Result<Vec<Unfinished>, HubError> {
        let mut unfinished = Vec::new();
        for repo in cache::repos(self.cache())? {
            let bytes = self.repo(&repo).unfinished()?;
            if bytes > 0 {
                unfinished.push(Unfinished { repo, bytes });
            }
        }
        Ok(unfinished)
    }

    /// The models that [`remove`](Self::remove) would remove, in all commits: all of the repository, those of the type,
    /// or the one with the file, which may be an `mmproj` file. Empty where only an unfinished download exists.
    pub fn removable(&self, name: &ModelName) -> Result<Vec<CachedModel>, HubError> {
        let found = self.models_of(name.repo(), |model, counts| match &name.which {
            Which::Default => counts,
            Which::Quant(quant) => counts && model.has_quant(quant),
            Which::File(file) => model.files.contains(file),
            Which::Pattern(pattern) => counts && model.fits(pattern),
        })?;
        if found.is_empty() && !(name.which == Which::Default && self.repo(name.repo()).unfinished()? > 0) {
            return Err(HubError::NotCached { name: name.to_string() });
        }
        Ok(found)
    }

    /// The `mmproj` files that [`remove`](Self::remove) removes together with models: all of the repository, if it has no
    /// other models in the cache.
    pub fn mmproj_removed_with(&self, name: &ModelName, models: &[CachedModel]) -> Result<Vec<CachedMmproj>, HubError> {
        let is_removed = |file: &Path| models.iter().any(|model| model.files.iter().any(|own| own == file));
        let mut removed = Vec::new();
        for snapshot in self.repo(name.repo()).snapshots()? {
            for model in &snapshot.models {
                let file = snapshot.folder.join(&model.files[0]);
                match (model.is_mmproj(), is_removed(&file)) {
                    (true, false) => removed.push(CachedMmproj { file, bytes: model.bytes }),
                    (false, false) => return Ok(Vec::new()),
                    (_, true) => {}
                }
            }
        }
        Ok(removed)
    }

    /// Removes models that [`removable`](Self::removable) returned for this name: their files and the blobs that no
    /// other file refers to; with the last model of a repository also its `mmproj` files, and with its last file its
    /// unfinished downloads.
    pub fn remove(&self, name: &ModelName, models: &[CachedModel]) -> Result<(), HubError> {
        let mmproj = self.mmproj_removed_with(name, models)?.into_iter().map(|mmproj| mmproj.file);
        let files: Vec<PathBuf> = models.iter().flat_map(|model| model.files.clone()).chain(mmproj).collect();
        self.repo(name.repo()).remove(&files)
    }

    fn repo(&self, repo: &str) -> RepoCache {
        RepoCache::new(self.cache(), repo)
    }
}

/// The error of a choice without a result.
fn unchosen(name: &ModelName, why: Unchosen, models: &[ModelFiles]) -> HubError {
    let (repo, models) = (name.repo().to_owned(), without_mmproj(models));
    match (why, &name.which) {
        _ if models.is_empty() => HubError::NoGguf { repo },
        (Unchosen::Several, _) => HubError::Unclear { repo, models },
        (Unchosen::Missing, Which::Default) => HubError::NoGguf { repo },
        (Unchosen::Missing, Which::Quant(wanted) | Which::File(wanted) | Which::Pattern(wanted)) => {
            HubError::NoSuchModel { repo, wanted: wanted.clone(), models }
        }
    }
}

/// The models of a list that are no `mmproj` files.
fn without_mmproj(models: &[ModelFiles]) -> Vec<ModelFiles> {
    models.iter().filter(|model| !model.is_mmproj()).cloned().collect()
}
