//! Responses that are kept, for `previous_response_id` and for those who ask for them again.
//!
//! A store is bounded: where it is full, those that nobody asked for the longest go. It is in memory, or in a folder with a
//! file for each response, which one thread writes.

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

/// What begins the name of a response.
const PREFIX: &str = "resp_";
/// Hexadecimal digits of a name.
const DIGITS: usize = 32;

/// How much a store keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreLimits {
    /// Most responses.
    pub responses: usize,
    /// Most bytes of all together.
    pub bytes: usize,
}

impl Default for StoreLimits {
    fn default() -> Self {
        Self { responses: 1000, bytes: 64 << 20 }
    }
}

/// Why a folder can keep no responses.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It is not there, or closed to this process.
    #[error("cannot keep responses in {}: {error}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// What the system says.
        error: io::Error,
    },
}

/// Responses that are kept; clones are the same store.
#[derive(Debug, Clone)]
pub struct ResponseStore(Arc<StoreState>);

#[derive(Debug)]
struct StoreState {
    limits: StoreLimits,
    index: Arc<Mutex<Index>>,
    folder: Option<Folder>,
}

/// What is kept.
#[derive(Debug, Default)]
struct Index {
    entries: HashMap<String, IndexEntry>,
    /// The names by when they were last asked for.
    by_use: BTreeMap<u64, String>,
    bytes: usize,
    uses: u64,
}

#[derive(Debug)]
struct IndexEntry {
    bytes: usize,
    /// When it was last asked for.
    used: u64,
    /// The response; `None`: it is in its file.
    body: Option<Arc<[u8]>>,
}

/// A folder of responses, and the thread that writes there.
#[derive(Debug)]
struct Folder {
    path: PathBuf,
    changes: Sender<Change>,
}

/// A change of a folder.
enum Change {
    /// The response of this name is to be written.
    Write(String),
    /// Its file is to say that it was used.
    Use(String),
    /// Its file is to go.
    Remove(String),
    /// Those who wait here are to be told that all before is done.
    Flushed(Sender<()>),
}

impl Default for ResponseStore {
    fn default() -> Self {
        Self::in_memory(StoreLimits::default())
    }
}

impl ResponseStore {
    /// A store that ends with the process.
    pub fn in_memory(limits: StoreLimits) -> Self {
        Self(Arc::new(StoreState { limits, index: Arc::default(), folder: None }))
    }

    /// A store in a folder, which is made where there is none. What it keeps from before is there again.
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

    /// Waits until all is written, as long as that takes no more than some seconds.
    pub fn flush(&self) {
        let (sender, receiver) = mpsc::channel();
        self.change(Change::Flushed(sender));
        let _ = receiver.recv_timeout(Duration::from_secs(5));
    }

    /// Keeps a response under a name that is not taken.
    fn put(&self, id: String, body: Vec<u8>) {
        let body: Arc<[u8]> = body.into();
        if self.insert(&id, body.len(), Some(body)) {
            self.change(Change::Write(id));
        }
    }

    /// Adds an entry, and lets others go where there are too many. Whether it was kept itself.
    fn insert(&self, id: &str, bytes: usize, body: Option<Arc<[u8]>>) -> bool {
        let StoreLimits { responses, bytes: most } = self.0.limits;
        let mut index = self.index();
        let used = index.next_use();
        index.bytes += bytes;
        index.by_use.insert(used, id.to_owned());
        index.entries.insert(id.to_owned(), IndexEntry { bytes, used, body });
        while index.bytes > most || index.entries.len() > responses {
            let Some(oldest) = index.by_use.values().next().cloned() else { break };
            index.remove(&oldest);
            self.change(Change::Remove(oldest));
        }
        index.entries.contains_key(id)
    }

    /// The response of this name. Not to be called on a thread that serves others: it may be in a file.
    fn get(&self, id: &str) -> Result<Option<Arc<[u8]>>, ApiError> {
        let body = {
            let mut index = self.index();
            let used = index.next_use();
            let Some(entry) = index.entries.get_mut(id) else { return Ok(None) };
            let before = std::mem::replace(&mut entry.used, used);
            let body = entry.body.clone();
            index.by_use.remove(&before);
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
            // The thread ends with the store.
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

/// Makes the changes of a folder.
struct FolderWriter {
    path: PathBuf,
    index: Arc<Mutex<Index>>,
}

impl FolderWriter {
    fn make(&self, change: Change) {
        match change {
            Change::Write(id) => {
                // It may have gone meanwhile.
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
                // Where this fails the response goes earlier than it would.
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

    /// Writes a file that is there as a whole or not at all, for this user alone.
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

/// The file of a response, whose name was checked.
fn file(folder: &Path, id: &str) -> PathBuf {
    folder.join(format!("{id}.json"))
}

/// The responses in a folder, those first that were not used the longest. Files that are no responses are left alone.
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

/// Whether a response may be called so: no other name leads to a file.
fn is_id(id: &str) -> bool {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    id.strip_prefix(PREFIX).is_some_and(|digits| digits.len() == DIGITS && digits.bytes().all(is_digit))
}

/// `prefix` and digits that nobody can guess, however many others they know.
pub fn unguessable(prefix: &str) -> String {
    static SECRETS: LazyLock<[RandomState; 2]> = LazyLock::new(|| [RandomState::new(), RandomState::new()]);
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let [high, low] = SECRETS.each_ref().map(|secret| secret.hash_one(n));
    format!("{prefix}{high:016x}{low:016x}")
}

/// A name for a response.
pub fn response_id() -> String {
    unguessable(PREFIX)
}

/// The name of item `n` of a response: it has the response's digits.
pub fn item_id(prefix: &str, response: &str, n: usize) -> String {
    format!("{prefix}_{}{n:04x}", response.strip_prefix(PREFIX).unwrap_or(response))
}

/// The response that an item of this name belongs to.
fn response_of_item(id: &str) -> Option<String> {
    let (_, digits) = id.split_once('_')?;
    let response = format!("{PREFIX}{}", digits.get(..DIGITS)?);
    is_id(&response).then_some(response)
}

/// The responses of one key.
#[derive(Debug, Clone)]
pub struct ClientResponses {
    store: ResponseStore,
    /// What the key is called in a store; `None`: that of everybody, where no key is asked for.
    owner: Option<String>,
}

/// A response as it is kept, with the items that it answers.
#[derive(Debug, Serialize, Deserialize)]
pub struct StoredResponse<'a, R> {
    owner: Option<String>,
    /// The response.
    pub response: R,
    /// The items, those of earlier turns first.
    #[serde(borrow)]
    pub input: Vec<&'a RawValue>,
}

/// The output of a response that is kept.
#[derive(Debug, Deserialize)]
pub struct StoredOutput<'a> {
    /// The items.
    #[serde(borrow)]
    pub output: Vec<&'a RawValue>,
}

/// A response's JSON as it is kept.
pub struct StoredBody(Arc<[u8]>);

impl StoredBody {
    /// What is in it; `R` reads the response.
    pub fn read<'a, R: Deserialize<'a>>(&'a self) -> Result<StoredResponse<'a, R>, ApiError> {
        serde_json::from_slice(&self.0)
            .map_err(|error| ApiError::internal(format!("a response that was kept cannot be read: {error}")))
    }
}

impl ClientResponses {
    /// The responses that `client` may see.
    pub fn new(store: &ResponseStore, client: Client, keys: &ApiKeys) -> Self {
        let owner = match client {
            Client::Key(number) => keys.fingerprint(number),
            Client::Address(_) | Client::Unknown => None,
        };
        Self { store: store.clone(), owner }
    }

    /// The response of this name. Not to be called on a thread that serves others.
    pub fn get(&self, id: &str) -> Result<Option<StoredBody>, ApiError> {
        if !is_id(id) {
            return Ok(None);
        }
        let Some(body) = self.store.get(id)?.map(StoredBody) else { return Ok(None) };
        let is_own = body.read::<serde::de::IgnoredAny>()?.owner == self.owner;
        Ok(is_own.then_some(body))
    }

    /// The response that has an item of this name. Not to be called on a thread that serves others.
    pub fn get_by_item(&self, id: &str) -> Result<Option<StoredBody>, ApiError> {
        match response_of_item(id) {
            Some(id) => self.get(&id),
            None => Ok(None),
        }
    }

    /// Forgets the response of this name; whether there was one. Not to be called on a thread that serves others.
    pub fn remove(&self, id: &str) -> Result<bool, ApiError> {
        let is_there = self.get(id)?.is_some();
        if is_there {
            self.store.remove(id);
        }
        Ok(is_there)
    }

    /// Where a response to `input` will be kept.
    pub fn record(&self, input: Vec<Box<RawValue>>) -> ResponseRecord {
        ResponseRecord { stored: self.clone(), input }
    }
}

/// Where a response will be kept, with the items that it answers.
pub struct ResponseRecord {
    stored: ClientResponses,
    input: Vec<Box<RawValue>>,
}

impl ResponseRecord {
    /// Keeps the response.
    pub fn keep(self, response: &ResponseObject) {
        let Self { stored: ClientResponses { store, owner }, input } = self;
        let kept = StoredResponse { owner, response, input: input.iter().map(|item| &**item).collect() };
        // Types of this crate always serialise.
        if let Ok(body) = serde_json::to_vec(&kept) {
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
    fn what_was_not_used_the_longest_goes() {
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
    fn a_folder_keeps_what_was_there() {
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
    fn only_names_of_this_server_lead_to_files() {
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
