//! Stored responses, for `previous_response_id` and for retrieval.
//!
//! A store is bounded: when it is full, the least recently used responses are removed. It is in memory, or in a folder
//! with one file for each response. With a folder, an index in memory is updated at once, and one thread applies the
//! changes to the files in order; a response stays in memory until its file is written.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::BuildHasher;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use metal_attention::scheduler::Client;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::response::ResponseObject;
use crate::http::ApiError;
use crate::http::options::ApiKeys;

/// The prefix of response ids.
const PREFIX: &str = "resp_";
/// Hexadecimal digits of an id.
const DIGITS: usize = 32;

/// The limits of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreLimits {
    /// Maximum number of responses.
    pub responses: usize,
    /// Maximum bytes of all responses.
    pub bytes: usize,
}

impl Default for StoreLimits {
    fn default() -> Self {
        Self { responses: 1000, bytes: 256 << 20 }
    }
}

/// The reason why a folder cannot store responses.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It cannot be created or read, or no thread can be started.
    #[error("cannot keep responses in {}: {error}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The system's error.
        error: io::Error,
    },
}

/// A store of responses. Clones refer to the same store.
#[derive(Debug, Clone)]
pub struct ResponseStore(Arc<StoreState>);

#[derive(Debug)]
/// The state that the clones of a store share.
struct StoreState {
    /// The limits.
    limits: StoreLimits,
    /// The stored responses.
    index: Arc<Mutex<Index>>,
    /// The folder; `None`: in memory.
    folder: Option<Folder>,
}

/// The stored responses.
#[derive(Debug, Default)]
struct Index {
    /// By id.
    entries: HashMap<String, IndexEntry>,
    /// The ids by the time of their last use, the least recent first.
    by_use: BTreeMap<u64, String>,
    /// Bytes of all responses.
    bytes: usize,
    /// The number of uses so far, which serves as the time.
    uses: u64,
}

#[derive(Debug)]
/// A stored response.
struct IndexEntry {
    /// Bytes of its JSON.
    bytes: usize,
    /// The time of its last use, as a number of uses.
    used: u64,
    /// Its JSON; `None`: it is in its file.
    body: Option<Arc<[u8]>>,
}

/// The folder of a store, with the queue of its writer thread.
#[derive(Debug)]
struct Folder {
    /// Its path.
    path: PathBuf,
    /// The queue of the writer thread.
    changes: Sender<Change>,
}

/// A change of the folder.
enum Change {
    /// Write the response with this id to its file.
    Write(String),
    /// Set the modification time of its file, which is the time of its last use after a restart.
    Use(String),
    /// Delete its file.
    Remove(String),
    /// Send a message when all changes before this one are made.
    Flushed(Sender<()>),
}

impl Default for ResponseStore {
    fn default() -> Self {
        Self::in_memory(StoreLimits::default())
    }
}

impl ResponseStore {
    /// A store in memory, which ends with the process.
    pub fn in_memory(limits: StoreLimits) -> Self {
        Self(Arc::new(StoreState { limits, index: Arc::default(), folder: None }))
    }

    /// A store in a folder, which is created if need be. Responses of an earlier process are available again.
    pub fn in_folder(path: &Path, limits: StoreLimits) -> Result<Self, StoreError> {
        let failed = |error| StoreError::Folder { folder: path.to_owned(), error };
        let mut builder = DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.recursive(true).create(path).map_err(failed)?;
        let index: Arc<Mutex<Index>> = Arc::default();
        let (changes, received) = mpsc::channel();
        let writer = FolderWriter { path: path.to_owned(), index: Arc::clone(&index) };
        let work = move || received.into_iter().for_each(|change| writer.make(change));
        std::thread::Builder::new().name("responses".into()).spawn(work).map_err(failed)?;
        let folder = Folder { path: path.to_owned(), changes };
        let store = Self(Arc::new(StoreState { limits, index, folder: Some(folder) }));
        for (_, id, bytes) in files(path).map_err(failed)? {
            store.insert(&id, bytes, None);
        }
        Ok(store)
    }

    /// Waits until all changes are written, at most five seconds.
    pub fn flush(&self) {
        let (sender, receiver) = mpsc::channel();
        self.change(Change::Flushed(sender));
        let _ = receiver.recv_timeout(Duration::from_secs(5));
    }

    /// Stores a response under an unused id.
    fn put(&self, id: String, body: Vec<u8>) {
        let body: Arc<[u8]> = body.into();
        if self.insert(&id, body.len(), Some(body)) {
            self.change(Change::Write(id));
        }
    }

    /// Adds an entry, and removes the least recently used ones beyond the limits. Returns whether the new entry
    /// remains.
    fn insert(&self, id: &str, bytes: usize, body: Option<Arc<[u8]>>) -> bool {
        let StoreLimits { responses, bytes: max_bytes } = self.0.limits;
        let mut index = self.index();
        let used = index.next_use();
        index.bytes += bytes;
        index.by_use.insert(used, id.to_owned());
        index.entries.insert(id.to_owned(), IndexEntry { bytes, used, body });
        while index.bytes > max_bytes || index.entries.len() > responses {
            let Some(oldest) = index.by_use.values().next().cloned() else { break };
            index.remove(&oldest);
            self.change(Change::Remove(oldest));
        }
        index.entries.contains_key(id)
    }

    /// Returns the JSON of a response and marks it as used; `None`: there is no such response. May read a file: call it
    /// on a blocking thread.
    fn get(&self, id: &str) -> Result<Option<Arc<[u8]>>, ApiError> {
        let body = {
            let mut index = self.index();
            let used = index.next_use();
            let Some(entry) = index.entries.get_mut(id) else { return Ok(None) };
            let last_use = std::mem::replace(&mut entry.used, used);
            let body = entry.body.clone();
            index.by_use.remove(&last_use);
            index.by_use.insert(used, id.to_owned());
            body
        };
        self.change(Change::Use(id.to_owned()));
        match (body, &self.0.folder) {
            (Some(body), _) => Ok(Some(body)),
            (None, None) => Ok(None),
            (None, Some(folder)) => match fs::read(file(&folder.path, id)) {
                Ok(body) => Ok(Some(body.into())),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(error) => {
                    tracing::warn!("cannot read the response {id} in {}: {error}", folder.path.display());
                    Err(ApiError::internal(format!("the response {id} cannot be read: {}", error.kind())))
                }
            },
        }
    }

    fn remove(&self, id: &str) {
        self.index().remove(id);
        self.change(Change::Remove(id.to_owned()));
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        locked(&self.0.index)
    }

    fn change(&self, change: Change) {
        if let Some(folder) = &self.0.folder {
            // The thread runs as long as the store exists, so this cannot fail.
            let _ = folder.changes.send(change);
        }
    }
}

fn locked(index: &Mutex<Index>) -> MutexGuard<'_, Index> {
    index.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Index {
    fn next_use(&mut self) -> u64 {
        self.uses += 1;
        self.uses
    }

    fn remove(&mut self, id: &str) {
        if let Some(entry) = self.entries.remove(id) {
            self.bytes -= entry.bytes;
            self.by_use.remove(&entry.used);
        }
    }
}

/// Applies changes to the files of a folder, on one thread.
struct FolderWriter {
    /// The folder.
    path: PathBuf,
    /// The stored responses, whose JSON is dropped once it is written.
    index: Arc<Mutex<Index>>,
}

impl FolderWriter {
    /// Applies a change.
    fn make(&self, change: Change) {
        match change {
            Change::Write(id) => {
                // The response may have been removed in the meantime.
                let body = locked(&self.index).entries.get(&id).and_then(|entry| entry.body.clone());
                let Some(body) = body else { return };
                match self.write(&id, &body) {
                    Ok(()) => {
                        if let Some(entry) = locked(&self.index).entries.get_mut(&id) {
                            entry.body = None;
                        }
                    }
                    Err(error) => {
                        let path = self.path.display();
                        tracing::warn!("cannot write the response {id} to {path}, it is in memory alone: {error}");
                    }
                }
            }
            Change::Use(id) => {
                // After a failure the response is only removed earlier than it should be.
                let _ = File::options()
                    .append(true)
                    .open(file(&self.path, &id))
                    .and_then(|file| file.set_modified(SystemTime::now()));
            }
            Change::Remove(id) => {
                if let Err(error) = fs::remove_file(file(&self.path, &id))
                    && error.kind() != io::ErrorKind::NotFound
                {
                    tracing::warn!("cannot remove the response {id} from {}: {error}", self.path.display());
                }
            }
            Change::Flushed(sender) => {
                let _ = sender.send(());
            }
        }
    }

    /// Writes a file atomically, readable by this user only.
    fn write(&self, id: &str, body: &[u8]) -> io::Result<()> {
        let whole = file(&self.path, id);
        let part = whole.with_extension("part");
        let mut options = OpenOptions::new();
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let written = options.write(true).create(true).truncate(true).open(&part).and_then(|mut file| {
            file.write_all(body)?;
            fs::rename(&part, &whole)
        });
        if written.is_err() {
            let _ = fs::remove_file(&part);
        }
        written
    }
}

/// The file of the response `id`, which must be a valid id ([`is_id`]).
fn file(folder: &Path, id: &str) -> PathBuf {
    folder.join(format!("{id}.json"))
}

/// The responses in a folder, as (last use, id, bytes), the least recently used first. Deletes files that were not
/// written to their end; ignores files that are no responses.
fn files(folder: &Path) -> io::Result<Vec<(SystemTime, String, usize)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if let Some(id) = name.strip_suffix(".part").filter(|id| is_id(id)) {
            tracing::debug!("removing the response {id}, which was not written to its end");
            let _ = fs::remove_file(entry.path());
        }
        let Some(id) = name.strip_suffix(".json").filter(|id| is_id(id)) else { continue };
        let about = entry.metadata()?;
        files.push((about.modified()?, id.to_owned(), usize::try_from(about.len()).unwrap_or(usize::MAX)));
    }
    files.sort();
    Ok(files)
}

/// Whether `id` is a valid response id. Other strings could name a file outside the folder.
fn is_id(id: &str) -> bool {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    id.strip_prefix(PREFIX).is_some_and(|digits| digits.len() == DIGITS && digits.bytes().all(is_digit))
}

/// Returns `prefix` and digits that cannot be guessed from others.
pub fn unguessable(prefix: &str) -> String {
    static SECRETS: LazyLock<[RandomState; 2]> = LazyLock::new(|| [RandomState::new(), RandomState::new()]);
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let [high, low] = SECRETS.each_ref().map(|secret| secret.hash_one(n));
    format!("{prefix}{high:016x}{low:016x}")
}

/// Returns a new response id.
pub fn response_id() -> String {
    unguessable(PREFIX)
}

/// The id of item `n` of a response. It contains the digits of the response's id.
pub fn item_id(prefix: &str, response: &str, n: usize) -> String {
    format!("{prefix}_{}{n:04x}", response.strip_prefix(PREFIX).unwrap_or(response))
}

/// The id of the response that contains the item `id`; `None` if it is no item id.
fn response_of_item(id: &str) -> Option<String> {
    let (_, digits) = id.split_once('_')?;
    let response = format!("{PREFIX}{}", digits.get(..DIGITS)?);
    is_id(&response).then_some(response)
}

/// A client's view of a store: the responses that were stored with the same API key.
#[derive(Debug, Clone)]
pub struct ClientResponses {
    /// The store.
    store: ResponseStore,
    /// A fingerprint of the API key; `None`: the server requires no key, and all clients share their responses.
    owner: Option<String>,
}

/// The JSON of a stored response. `R` is the type of the response in it.
#[derive(Debug, Serialize, Deserialize)]
pub struct StoredResponse<'a, R> {
    /// The owner, see [`ClientResponses`].
    owner: Option<String>,
    /// The response.
    pub response: R,
    /// The items of its input, those of earlier turns first.
    #[serde(borrow)]
    pub input: Vec<&'a RawValue>,
}

/// The output of a stored response.
#[derive(Debug, Deserialize)]
pub struct StoredOutput<'a> {
    /// The items.
    #[serde(borrow)]
    pub output: Vec<&'a RawValue>,
}

/// The JSON of a stored response, in memory.
pub struct StoredBody(Arc<[u8]>);

impl StoredBody {
    /// Parses it; `R` reads the response.
    pub fn read<'a, R: Deserialize<'a>>(&'a self) -> Result<StoredResponse<'a, R>, ApiError> {
        serde_json::from_slice(&self.0)
            .map_err(|error| ApiError::internal(format!("a response that was kept cannot be read: {error}")))
    }
}

impl ClientResponses {
    /// The responses of `client`.
    pub fn new(store: &ResponseStore, client: Client, keys: &ApiKeys) -> Self {
        let owner = match client {
            Client::Key(number) => keys.fingerprint(number),
            Client::Address(_) | Client::Unknown => None,
        };
        Self { store: store.clone(), owner }
    }

    /// Returns the response `id`; `None`: there is none, or it belongs to another key. Reads files: call it on a
    /// blocking thread.
    pub fn get(&self, id: &str) -> Result<Option<StoredBody>, ApiError> {
        if !is_id(id) {
            return Ok(None);
        }
        let Some(body) = self.store.get(id)?.map(StoredBody) else { return Ok(None) };
        let is_own = body.read::<serde::de::IgnoredAny>()?.owner == self.owner;
        Ok(is_own.then_some(body))
    }

    /// Returns the response with the item `id`. Reads files: call it on a blocking thread.
    pub fn get_by_item(&self, id: &str) -> Result<Option<StoredBody>, ApiError> {
        match response_of_item(id) {
            Some(id) => self.get(&id),
            None => Ok(None),
        }
    }

    /// Removes the response `id`. Returns whether there was one. Reads files: call it on a blocking thread.
    pub fn remove(&self, id: &str) -> Result<bool, ApiError> {
        let is_there = self.get(id)?.is_some();
        if is_there {
            self.store.remove(id);
        }
        Ok(is_there)
    }

    /// The place for a response to `input` that is yet to be generated.
    pub fn record(&self, input: Vec<Box<RawValue>>) -> ResponseRecord {
        ResponseRecord { stored: self.clone(), input }
    }
}

/// The place for a response that is yet to be generated.
pub struct ResponseRecord {
    /// The owner's responses.
    stored: ClientResponses,
    /// The items of its input, those of earlier turns first.
    input: Vec<Box<RawValue>>,
}

impl ResponseRecord {
    /// Stores the response.
    pub fn keep(self, response: &ResponseObject) {
        let Self { stored: ClientResponses { store, owner }, input } = self;
        let record = StoredResponse { owner, response, input: input.iter().map(|item| &**item).collect() };
        // Types of this crate always serialise.
        if let Ok(body) = serde_json::to_vec(&record) {
            store.put(response.id.clone(), body);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: StoreLimits = StoreLimits { responses: 3, bytes: 100 };

    fn keys(store: &ResponseStore, ids: &[String]) -> String {
        ids.iter().map(|id| if store.get(id).unwrap().is_some() { 'x' } else { '-' }).collect()
    }

    fn put(store: &ResponseStore, bytes: usize) -> String {
        let id = response_id();
        store.put(id.clone(), vec![b'x'; bytes]);
        id
    }

    #[test]
    fn the_least_recently_used_response_is_removed() {
        let store = ResponseStore::in_memory(SMALL);
        let mut ids: Vec<String> = (0..3).map(|_| put(&store, 10)).collect();
        assert_eq!(keys(&store, &ids[..1]), "x");
        ids.push(put(&store, 10));
        assert_eq!(keys(&store, &ids), "x-xx");
        ids.push(put(&store, 85));
        assert_eq!(keys(&store, &ids), "---xx");
        ids.push(put(&store, 101));
        assert_eq!(keys(&store, &ids), "------");
        let index = store.index();
        assert_eq!((index.bytes, index.entries.len(), index.by_use.len()), (0, 0, 0));
    }

    #[test]
    fn a_folder_keeps_responses_between_processes() {
        let folder = std::env::temp_dir().join(unguessable("responses-"));
        let open = || ResponseStore::in_folder(&folder, SMALL).unwrap();
        let (store, stranger) = (open(), folder.join("resp_x.json"));
        fs::write(&stranger, "mine").unwrap();
        let ids: Vec<String> = (0..4).map(|_| put(&store, 10)).collect();
        store.flush();
        assert!(store.index().entries.values().all(|entry| entry.body.is_none()));
        assert_eq!(keys(&store, &ids), "-xxx");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
            assert_eq!((mode(&folder), mode(&file(&folder, &ids[1]))), (0o700, 0o600));
        }
        store.remove(&ids[2]);
        store.flush();
        drop(store);
        fs::write(folder.join(format!("{}.part", ids[0])), "x").unwrap();
        let store = open();
        assert_eq!(keys(&store, &ids), "-x-x");
        let mut names: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.sort();
        let mut wanted = [file(&folder, &ids[1]), file(&folder, &ids[3]), stranger];
        wanted.sort();
        assert_eq!(names, wanted);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn only_ids_of_this_server_are_file_names() {
        let id = response_id();
        assert!(is_id(&id) && id != response_id());
        for wrong in ["", "resp_", "resp_../../x", &id[1..], &id.to_uppercase(), &format!("{id}0"), &format!("{id}/")] {
            assert!(!is_id(wrong), "{wrong}");
        }
        assert_eq!(response_of_item(&item_id("msg", &id, 7)), Some(id));
        for wrong in [
            "",
            "msg_1",
            "x",
            "msg_\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}",
        ] {
            assert_eq!(response_of_item(wrong), None, "{wrong}");
        }
    }
}
