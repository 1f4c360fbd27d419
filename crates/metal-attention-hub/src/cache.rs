//! The shared cache of the Hugging Face hub, in the layout of Python's `huggingface_hub`.
//!
//! A repository has a folder `models--OWNER--REPO` with `blobs/` (contents by checksum), `snapshots/COMMIT/` (one link
//! to a blob for each file of a commit, a "pointer"), and `refs/main` (the newest commit that was downloaded). Other
//! programs use the cache at the same time, so nothing in it is trusted: links that lead out of it are refused.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io;
use std::iter;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::HubError;
use crate::checksum::Checksum;
use crate::choose::{ModelFiles, mmproj_of, models};
use crate::client::is_commit;
use crate::files::{open_own, replace};
use crate::name::{ModelName, Which};

/// Maximum bytes of a file in `refs`; longer ones are not read.
const MAX_REF: u64 = 256;

/// The cache folder of one repository.
pub(crate) struct RepoCache {
    /// The folder of the whole cache.
    cache: PathBuf,
    /// `OWNER/REPO`.
    repo: String,
}

/// A model in the cache.
#[derive(Clone, Debug)]
pub struct CachedModel {
    /// Its name for `-m`: `hf:OWNER/REPO:TYPE`, or with the file where several models have the type.
    pub name: ModelName,
    /// The tensor type in the file's name, such as `Q4_K_M`; `None`: the name has none.
    pub quant: Option<String>,
    /// Its files; those of a split model in order.
    pub files: Vec<PathBuf>,
    /// Bytes of these files.
    pub bytes: u64,
    /// The file that encodes pictures for it, if the cache has one. The models of a repository share it.
    pub mmproj: Option<CachedMmproj>,
    /// The commit that the files belong to.
    pub commit: String,
    /// Whether this is the newest commit that was downloaded.
    pub is_newest: bool,
    /// Whether no file of a split model is missing.
    pub complete: bool,
}

/// An `mmproj` file in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedMmproj {
    /// Its path.
    pub file: PathBuf,
    /// Its size.
    pub bytes: u64,
}

impl CachedModel {
    /// Bytes of all files, with that of the `mmproj` file.
    pub fn total_bytes(&self) -> u64 {
        self.bytes.saturating_add(self.mmproj.as_ref().map_or(0, |mmproj| mmproj.bytes))
    }
}

/// The models of one commit in the cache.
pub(crate) struct CachedCommit {
    /// The commit's hash.
    pub commit: String,
    /// The folder of its pointers.
    pub folder: PathBuf,
    /// Whether this is the newest commit that was downloaded.
    pub is_newest: bool,
    /// The models of its files; `mmproj` files are among them.
    pub models: Vec<ModelFiles>,
    /// The number of models by tensor type.
    quants: HashMap<String, usize>,
}

impl RepoCache {
    pub fn new(cache: &Path, repo: &str) -> Self {
        Self { cache: cache.to_owned(), repo: repo.to_owned() }
    }

    /// The repository's folder.
    pub fn folder(&self) -> PathBuf {
        self.cache.join(self.folder_name())
    }

    pub fn folder_name(&self) -> String {
        format!("models--{}", self.repo.replace('/', "--"))
    }

    /// The path of the blob with a checksum.
    pub fn blob(&self, checksum: &Checksum) -> PathBuf {
        self.folder().join("blobs").join(checksum.digits())
    }

    /// The path of a file of a commit: a pointer to its blob.
    pub fn pointer(&self, commit: &str, file: &str) -> PathBuf {
        self.folder().join("snapshots").join(commit).join(file)
    }

    /// The file that is locked while a blob is downloaded, by all programs that use the cache.
    pub fn lock(&self, checksum: &Checksum) -> PathBuf {
        let folder = self.cache.join(".locks").join(self.folder_name());
        folder.join(format!("{}.lock", checksum.digits()))
    }

    /// Links a file of a commit to a blob. Returns the pointer.
    pub fn link(&self, checksum: &Checksum, commit: &str, file: &str) -> Result<PathBuf, HubError> {
        let (blob, pointer) = (self.blob(checksum), self.pointer(commit, file));
        if fs::canonicalize(&pointer).is_ok_and(|file| fs::canonicalize(&blob).is_ok_and(|blob| file == blob)) {
            return Ok(pointer);
        }
        let folder = pointer.parent().expect("a pointer is in a snapshot");
        self.check_inside(folder)?;
        fs::create_dir_all(folder).map_err(|e| HubError::io("make the folder", folder, e))?;
        if let Err(e) = fs::remove_file(&pointer)
            && e.kind() != io::ErrorKind::NotFound
        {
            return Err(HubError::io("replace", &pointer, e));
        }
        // Up to the repository's folder, and down to the blob.
        let up = "../".repeat(2 + file.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{}", checksum.digits()));
        symlink_or_move(&target, &blob, &pointer).map_err(|e| HubError::io("make the link", &pointer, e))?;
        Ok(pointer)
    }

    /// Records `commit` as the newest one.
    pub fn set_newest(&self, commit: &str) -> Result<(), HubError> {
        let refs = self.folder().join("refs");
        self.check_inside(&refs)?;
        let written = fs::create_dir_all(&refs).and_then(|()| replace(&refs.join("main"), commit));
        written.map_err(|e| HubError::io("write to", &refs, e))
    }

    /// The commits in the cache, the newest first and the others by age.
    pub fn snapshots(&self) -> Result<Vec<CachedCommit>, HubError> {
        let newest = read_ref(&self.folder().join("refs/main"));
        let blobs = fs::canonicalize(self.folder().join("blobs")).ok();
        let mut snapshots = Vec::new();
        for entry in entries(&self.folder().join("snapshots"))? {
            let commit = entry.file_name().to_string_lossy().into_owned();
            // A link to a folder is not followed: it may lead out of the cache.
            if !is_commit(&commit) || !entry.file_type().is_ok_and(|t| t.is_dir()) {
                continue;
            }
            let files = files_in(&entry.path(), blobs.as_deref())?;
            let models = models(files.iter().map(|(name, bytes)| (name.as_str(), *bytes)));
            let mut quants = HashMap::new();
            for quant in models.iter().filter_map(|model| model.quant.clone()) {
                *quants.entry(quant).or_default() += 1;
            }
            let changed = entry.metadata().and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
            let is_newest = commit == newest.trim();
            snapshots
                .push(((is_newest, changed), CachedCommit { commit, folder: entry.path(), is_newest, models, quants }));
        }
        snapshots.sort_by(|(a, _), (b, _)| b.cmp(a));
        Ok(snapshots.into_iter().map(|(_, snapshot)| snapshot).collect())
    }

    /// Bytes of unfinished downloads.
    pub fn unfinished(&self) -> Result<u64, HubError> {
        let unfinished = entries(&self.folder().join("blobs"))?
            .into_iter()
            .filter(|entry| entry.path().extension().is_some_and(|e| e == "incomplete"));
        Ok(unfinished.filter_map(|entry| entry.metadata().ok()).map(|metadata| metadata.len()).sum())
    }

    /// Removes pointers, the blobs that no other pointer refers to, and with the last pointer the repository's folder.
    pub fn remove(&self, pointers: &[PathBuf]) -> Result<(), HubError> {
        let folder = self.folder();
        self.check_link(&folder)?;
        self.check_inside(&folder.join("blobs"))?;
        let mut blobs = BTreeSet::new();
        for pointer in pointers {
            self.check_inside(pointer.parent().expect("a pointer is in a snapshot"))?;
            blobs.extend(self.blob_of(pointer));
            fs::remove_file(pointer).map_err(|e| HubError::io("remove", pointer, e))?;
            // Empty folders are removed with the file; removing others fails.
            for parent in pointer.ancestors().skip(1).take_while(|parent| **parent != folder.join("snapshots")) {
                if fs::remove_dir(parent).is_err() {
                    break;
                }
            }
        }
        let mut left = Vec::new();
        for entry in entries(&folder.join("snapshots"))? {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                left.extend(pointers_in(&entry.path())?);
            } else {
                left.push(entry.path());
            }
        }
        if left.is_empty() {
            fs::remove_dir_all(&folder).map_err(|e| HubError::io("remove", &folder, e))?;
            let locks = self.cache.join(".locks").join(self.folder_name());
            return match fs::remove_dir_all(&locks) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => Err(HubError::io("remove", &locks, e)),
                _ => Ok(()),
            };
        }
        for pointer in left {
            if let Some(blob) = self.blob_of(&pointer) {
                blobs.remove(&blob);
            }
        }
        blobs.iter().try_for_each(|blob| fs::remove_file(blob).map_err(|e| HubError::io("remove", blob, e)))
    }

    /// The blob that a pointer refers to; `None` if it is no blob of this repository.
    fn blob_of(&self, pointer: &Path) -> Option<PathBuf> {
        let is_link = pointer.symlink_metadata().is_ok_and(|m| m.file_type().is_symlink());
        let target = is_link.then(|| fs::canonicalize(pointer).ok()).flatten()?;
        let blobs = fs::canonicalize(self.folder().join("blobs")).ok()?;
        (target.parent() == Some(&blobs)).then_some(target)
    }

    /// Refuses a folder inside the repository's folder that is a link out of the cache, or is inside one. The
    /// repository's folder itself may be a link: users move large ones elsewhere.
    pub fn check_inside(&self, folder: &Path) -> Result<(), HubError> {
        let root = self.folder();
        folder.ancestors().take_while(|part| **part != root).try_for_each(|part| self.check_link(part))
    }

    /// Refuses a link that leads out of the cache.
    fn check_link(&self, folder: &Path) -> Result<(), HubError> {
        let is_link = folder.symlink_metadata().is_ok_and(|m| m.file_type().is_symlink());
        let inside = || {
            let (folder, cache) = (fs::canonicalize(folder).ok()?, fs::canonicalize(&self.cache).ok()?);
            Some(folder.starts_with(cache))
        };
        if is_link && inside() != Some(true) {
            return Err(HubError::OutsideCache { path: folder.to_owned() });
        }
        Ok(())
    }

    /// A model of a commit, with its name for `-m`. Its `mmproj` file is that of its commit, otherwise of the first of `all`
    /// commits that has one.
    pub fn model(&self, all: &[CachedCommit], snapshot: &CachedCommit, files: &ModelFiles) -> CachedModel {
        let which = match &files.quant {
            Some(quant) if snapshot.quants.get(quant) == Some(&1) => Which::Quant(quant.clone()),
            _ => Which::File(files.files[0].clone()),
        };
        let repo = ModelName::of_repo(&self.repo).expect("the repository has a name");
        CachedModel {
            name: repo.with(which),
            quant: files.quant.clone(),
            files: files.files.iter().map(|file| snapshot.folder.join(file)).collect(),
            bytes: files.bytes,
            mmproj: iter::once(snapshot).chain(all).find_map(|snapshot| snapshot.mmproj(files)),
            commit: snapshot.commit.clone(),
            is_newest: snapshot.is_newest,
            complete: files.complete,
        }
    }
}

impl CachedCommit {
    /// The `mmproj` file for a model; `None` for an `mmproj` file itself.
    fn mmproj(&self, model: &ModelFiles) -> Option<CachedMmproj> {
        let found = mmproj_of(&self.models, model)?;
        Some(CachedMmproj { file: self.folder.join(&found.files[0]), bytes: found.bytes })
    }
}

/// The names of the repositories with a folder in the cache.
pub(crate) fn repos(cache: &Path) -> Result<Vec<String>, HubError> {
    let mut repos = Vec::new();
    for entry in entries(cache)? {
        let folder = entry.file_name().to_string_lossy().into_owned();
        let repo = folder.strip_prefix("models--").map(|repo| repo.replacen("--", "/", 1));
        repos.extend(repo.filter(|repo| ModelName::of_repo(repo).is_some()));
    }
    repos.sort_unstable();
    Ok(repos)
}

/// The entries of a folder; none if it does not exist.
fn entries(folder: &Path) -> Result<Vec<fs::DirEntry>, HubError> {
    match fs::read_dir(folder).and_then(Iterator::collect) {
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(Vec::new()),
        entries => entries.map_err(|e| HubError::io("read", folder, e)),
    }
}

/// The commit in a reference; empty if the file is missing or too long.
fn read_ref(path: &Path) -> String {
    let readable = fs::symlink_metadata(path).is_ok_and(|found| found.is_file() && found.len() <= MAX_REF);
    if readable { fs::read_to_string(path).unwrap_or_default() } else { String::new() }
}

/// The files of a commit with their sizes, `/` between folders. Links to anything but a blob of the repository are
/// ignored.
fn files_in(snapshot: &Path, blobs: Option<&Path>) -> Result<Vec<(String, u64)>, HubError> {
    let mut files = Vec::new();
    for path in pointers_in(snapshot)? {
        let target = fs::canonicalize(&path).ok();
        let is_link = path.symlink_metadata().map_or(true, |m| m.file_type().is_symlink());
        if is_link && (target.is_none() || target.as_deref().and_then(Path::parent) != blobs) {
            continue;
        }
        let parts = path.strip_prefix(snapshot).unwrap_or(&path).iter().map(|part| part.to_string_lossy());
        let name = parts.collect::<Vec<_>>().join("/");
        let metadata = fs::metadata(&path).ok().filter(fs::Metadata::is_file);
        files.extend(metadata.map(|metadata| (name, metadata.len())));
    }
    Ok(files)
}

/// All files and links under the folder of a commit.
fn pointers_in(snapshot: &Path) -> Result<Vec<PathBuf>, HubError> {
    let mut pointers = Vec::new();
    let mut folders = vec![snapshot.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in entries(&folder)? {
            match entry.file_type() {
                Ok(t) if t.is_dir() => folders.push(entry.path()),
                _ => pointers.push(entry.path()),
            }
        }
    }
    Ok(pointers)
}

/// Locks a file for this process; `None`: another process has it locked.
pub(crate) fn try_lock(path: &Path) -> Result<Option<File>, HubError> {
    let folder = path.parent().expect("a lock is in a folder");
    let file = fs::create_dir_all(folder).and_then(|()| open_own(path));
    let file = file.map_err(|e| HubError::io("write to", path, e))?;
    match file.try_lock() {
        Err(fs::TryLockError::WouldBlock) => Ok(None),
        // Some network file systems have no locks. Two concurrent downloads would fail the checksum.
        Ok(()) | Err(fs::TryLockError::Error(_)) => Ok(Some(file)),
    }
}

#[cfg(unix)]
fn symlink_or_move(target: &Path, _blob: &Path, pointer: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, pointer)
}

/// Windows allows links only with a privilege; without it, the blob is moved to the pointer's path, as other programs
/// do. So it is where a link was reported, but none is there (Wine 8).
#[cfg(windows)]
fn symlink_or_move(target: &Path, blob: &Path, pointer: &Path) -> io::Result<()> {
    let target = target.to_string_lossy().replace('/', "\\");
    match std::os::windows::fs::symlink_file(target, pointer) {
        Ok(()) if pointer.is_file() => Ok(()),
        Ok(()) | Err(_) => fs::rename(blob, pointer),
    }
}
