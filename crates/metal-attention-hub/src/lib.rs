//! Models by name: GGUF files from the [Hugging Face hub](https://huggingface.co/models), in the cache that its other
//! programs share.
//!
//! ```no_run
//! use metal_attention_hub::{Environment, Hub, Quiet};
//!
//! let hub = Hub::new(Environment::read()?);
//! // From the cache without a request, else from the hub.
//! let model = hub.get(&"hf:bartowski/SmolLM2-135M-Instruct-GGUF:Q4_K_M".parse()?, &mut Quiet)?;
//! println!("{}", model.files[0].display());
//! # Ok::<(), metal_attention_hub::HubError>(())
//! ```
//!
//! Files are downloaded one after the other, go on where an earlier download broke off, and are in their place only
//! when their checksum is the hub's.

mod cache;
mod checksum;
pub mod choose;
mod client;
mod download;
mod environment;
mod error;
mod files;
mod known;
mod name;
mod origin;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use cache::CachedModel;
pub use environment::{Environment, HubToken};
pub use error::HubError;
pub use known::{KnownModel, known_model, known_models, similar_name};
pub use name::{ModelName, PREFIX, Which, is_hub_address};

use cache::RepoCache;
use choose::{ModelFiles, Unchosen, choose, models};
use client::HubClient;
use download::{RemoteFile, download};

/// Is told how a download goes, and may end it.
pub trait DownloadObserver {
    /// A file begins; `done` of its `bytes` are there already.
    fn file(&mut self, name: &str, done: u64, bytes: u64);
    /// So many bytes of the file are there.
    fn advance(&mut self, done: u64);
    /// Something that a user may want to know, such as a broken connection.
    fn note(&mut self, text: &str);
    /// Whether to stop; what has arrived is kept.
    fn stop(&self) -> bool;
}

/// An observer that says nothing and does not stop.
pub struct Quiet;

impl DownloadObserver for Quiet {
    fn file(&mut self, _name: &str, _done: u64, _bytes: u64) {}
    fn advance(&mut self, _done: u64) {}
    fn note(&mut self, _text: &str) {}
    fn stop(&self) -> bool {
        false
    }
}

/// The hub, and the cache of what came from it.
pub struct Hub {
    environment: Environment,
    pause: Duration,
}

/// A download that broke off and was not taken up again.
#[derive(Clone, Debug)]
pub struct Unfinished {
    /// `OWNER/REPO`.
    pub repo: String,
    /// Bytes that are there.
    pub bytes: u64,
}

impl Hub {
    /// Asks nothing yet.
    pub fn new(environment: Environment) -> Self {
        Self { environment, pause: Duration::from_secs(1) }
    }

    /// Sets the time between the first two attempts to go on with a broken download; later ones wait longer.
    #[must_use]
    pub fn with_pause(self, pause: Duration) -> Self {
        Self { pause, ..self }
    }

    /// The folder of the cache.
    pub fn cache(&self) -> &Path {
        &self.environment.cache
    }

    /// The model from the cache, without a request; where it is not there, from the hub.
    pub fn get(&self, name: &ModelName, observer: &mut dyn DownloadObserver) -> Result<CachedModel, HubError> {
        match self.find(name)? {
            Some(model) => Ok(model),
            None => self.pull(name, observer),
        }
    }

    /// The model in the cache, where one clearly fits: in the newest commit that was downloaded, else in older ones.
    pub fn find(&self, name: &ModelName) -> Result<Option<CachedModel>, HubError> {
        let repo = self.repo(name.repo());
        for mut snapshot in repo.snapshots()? {
            snapshot.models.retain(|model| model.complete);
            if let Ok(files) = choose(&snapshot.models, &name.which) {
                return Ok(Some(repo.model(&snapshot, files)));
            }
        }
        Ok(None)
    }

    /// The model as it is on the hub now. What the cache has of it is not downloaded again.
    pub fn pull(&self, name: &ModelName, observer: &mut dyn DownloadObserver) -> Result<CachedModel, HubError> {
        if self.environment.offline {
            if let Some(model) = self.find(name)? {
                return Ok(model);
            }
            let newest = self.repo(name.repo()).snapshots()?.into_iter().next();
            let models = newest.map_or_else(Vec::new, |snapshot| snapshot.models);
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
        for file in &chosen.files {
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
        // Only now: until here an older commit is the one that has all its files.
        repo.set_newest(&listing.commit)?;
        let model = self.find(&name.with(Which::File(chosen.files[0].clone())))?;
        model.ok_or_else(|| HubError::NotCached { name: name.to_string() })
    }

    /// All models in the cache, those of older commits too.
    pub fn models(&self) -> Result<Vec<CachedModel>, HubError> {
        let mut models = Vec::new();
        for name in cache::repos(self.cache())? {
            let repo = self.repo(&name);
            for snapshot in repo.snapshots()? {
                models.extend(snapshot.models.iter().map(|files| repo.model(&snapshot, files)));
            }
        }
        Ok(models)
    }

    /// The downloads that have not come to their end.
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

    /// What [`remove`](Self::remove) would remove: all models of the repository, or those of the type, or the one with
    /// the file, in every commit. It may be empty where a download has just begun.
    pub fn removable(&self, name: &ModelName) -> Result<Vec<CachedModel>, HubError> {
        let repo = self.repo(name.repo());
        let mut found = Vec::new();
        for snapshot in repo.snapshots()? {
            let fits = |model: &&ModelFiles| match &name.which {
                Which::Default => true,
                Which::Quant(quant) => model.has_quant(quant),
                Which::File(file) => model.files.contains(file),
                Which::Pattern(pattern) => model.fits(pattern),
            };
            found.extend(snapshot.models.iter().filter(fits).map(|files| repo.model(&snapshot, files)));
        }
        if found.is_empty() && !(name.which == Which::Default && repo.unfinished()? > 0) {
            return Err(HubError::NotCached { name: name.to_string() });
        }
        Ok(found)
    }

    /// Removes models that [`removable`](Self::removable) gave for this name: their files in the snapshots and the blobs
    /// that nothing else refers to; with a repository's last file also what was begun of it.
    pub fn remove(&self, name: &ModelName, models: &[CachedModel]) -> Result<(), HubError> {
        let files: Vec<PathBuf> = models.iter().flat_map(|model| model.files.clone()).collect();
        self.repo(name.repo()).remove(&files)
    }

    fn repo(&self, repo: &str) -> RepoCache {
        RepoCache::new(self.cache(), repo)
    }
}

/// The error of a choice that was not made.
fn unchosen(name: &ModelName, why: Unchosen, models: &[ModelFiles]) -> HubError {
    let (repo, models) = (name.repo().to_owned(), models.to_vec());
    match (why, &name.which) {
        _ if models.is_empty() => HubError::NoGguf { repo },
        (Unchosen::Several, _) => HubError::Unclear { repo, models },
        (Unchosen::Missing, Which::Default) => HubError::NoGguf { repo },
        (Unchosen::Missing, Which::Quant(wanted) | Which::File(wanted) | Which::Pattern(wanted)) => {
            HubError::NoSuchModel { repo, wanted: wanted.clone(), models }
        }
    }
}
