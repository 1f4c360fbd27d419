//! Downloads one file from the hub to the cache: continues an earlier download, verifies the checksum, and moves the
//! complete file to its place.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use crate::cache::{RepoCache, try_lock};
use crate::checksum::{Checksum, Hasher};
use crate::choose::size;
use crate::client::{HubClient, HubResponse};
use crate::files::open_own;
use crate::{DownloadObserver, HubError};

/// Bytes that are read at once.
const BUFFER: usize = 128 << 10;
/// Maximum number of successive attempts without a new byte.
const TRIES: u32 = 4;

/// A file of a commit on the hub.
pub(crate) struct RemoteFile<'a> {
    /// `OWNER/REPO`.
    pub repo: &'a str,
    /// The commit's hash.
    pub commit: &'a str,
    /// The file's name, `/` between folders.
    pub name: &'a str,
    /// Its size.
    pub bytes: u64,
    /// Its checksum.
    pub checksum: &'a Checksum,
}

/// Downloads a file, unless it is in the cache, and returns its pointer. `pause`: the time before the second attempt;
/// it doubles with each further one.
///
/// Errors leave the bytes that have arrived, so a later download continues; a wrong checksum removes them.
pub(crate) fn download(
    client: &HubClient,
    cache: &RepoCache,
    remote: &RemoteFile,
    pause: Duration,
    observer: &mut dyn DownloadObserver,
) -> Result<PathBuf, HubError> {
    let blob = cache.blob(remote.checksum);
    let pointer = cache.pointer(remote.commit, remote.name);
    for file in [&blob, &pointer] {
        cache.check_inside(file.parent().expect("a file is in a folder"))?;
    }
    let is_whole = |path: &Path| fs::symlink_metadata(path).is_ok_and(|m| m.is_file() && m.len() == remote.bytes);
    let _lock = wait_for_lock(&cache.lock(remote.checksum), remote, observer)?;
    if !is_whole(&blob) {
        if !cfg!(unix) && is_whole(&pointer) {
            return Ok(pointer);
        }
        let folder = blob.parent().expect("a blob is in a folder");
        fs::create_dir_all(folder).map_err(|e| HubError::io("make the folder", folder, e))?;
        let path = folder.join(format!("{}.incomplete", remote.checksum.digits()));
        let mut partial = Partial::open(path, remote, observer)?;
        partial.complete(client, pause, observer)?;
        partial.put_in_place(&blob)?;
    }
    cache.link(remote.checksum, remote.commit, remote.name)
}

/// Waits until no other program downloads the file. Fails if the observer stops the download.
fn wait_for_lock(path: &Path, remote: &RemoteFile, observer: &mut dyn DownloadObserver) -> Result<File, HubError> {
    let mut told = false;
    loop {
        if let Some(lock) = try_lock(path)? {
            return Ok(lock);
        }
        if !told {
            observer.note(&format!("another program is downloading {}; waiting for it", remote.name));
            told = true;
        }
        if observer.stop() {
            return Err(remote.interrupted(0));
        }
        sleep(Duration::from_millis(100));
    }
}

impl RemoteFile<'_> {
    fn interrupted(&self, done: u64) -> HubError {
        HubError::Interrupted { file: self.name.to_owned(), done, bytes: self.bytes }
    }
}

/// A file that is not complete yet.
struct Partial<'a> {
    /// The file on the hub.
    remote: &'a RemoteFile<'a>,
    /// The path of the incomplete file.
    path: PathBuf,
    /// The open file, positioned at its end.
    file: File,
    /// Bytes that have arrived.
    done: u64,
    /// The checksum of the bytes that have arrived.
    hasher: Hasher,
}

/// The reason why a response ended before the file.
enum DownloadFailure {
    /// Temporary: another attempt may succeed.
    Retryable(String),
    Final(HubError),
}

impl From<HubError> for DownloadFailure {
    fn from(error: HubError) -> Self {
        Self::Final(error)
    }
}

impl<'a> Partial<'a> {
    /// Opens the file that an earlier download left, or a new one, and computes the checksum of its bytes.
    fn open(path: PathBuf, remote: &'a RemoteFile, observer: &mut dyn DownloadObserver) -> Result<Self, HubError> {
        let file = open_own(&path).map_err(|e| HubError::io("write to", &path, e))?;
        let mut partial = Self { remote, path, file, done: 0, hasher: remote.checksum.hasher(remote.bytes) };
        let length = partial.file.metadata().map_err(|e| partial.io("read", e))?.len();
        if length > remote.bytes {
            partial.start_over()?;
        }
        observer.file(remote.name, length.min(remote.bytes), remote.bytes);
        let mut buffer = vec![0; BUFFER];
        loop {
            if observer.stop() {
                return Err(remote.interrupted(length));
            }
            match partial.file.read(&mut buffer).map_err(|e| partial.io("read", e))? {
                0 => return Ok(partial),
                n => {
                    partial.hasher.update(&buffer[..n]);
                    partial.done += n as u64;
                }
            }
        }
    }

    /// Downloads the missing bytes, in several attempts if need be.
    fn complete(
        &mut self,
        client: &HubClient,
        pause: Duration,
        observer: &mut dyn DownloadObserver,
    ) -> Result<(), HubError> {
        let mut furthest = self.done;
        let mut tries = 0;
        while self.done < self.remote.bytes {
            let why = match self.receive(client, observer) {
                Ok(()) => continue,
                Err(DownloadFailure::Final(error)) => return Err(error),
                Err(DownloadFailure::Retryable(why)) => why,
            };
            if self.done > furthest {
                furthest = self.done;
                tries = 0;
            }
            tries += 1;
            if tries == TRIES {
                let (file, done, bytes) = (self.remote.name.to_owned(), self.done, self.remote.bytes);
                return Err(HubError::BrokenOff { file, done, bytes, why });
            }
            observer.note(&format!("{why} after {}; trying again", size(self.done)));
            self.wait(pause * (1 << (tries - 1)), observer)?;
        }
        Ok(())
    }

    /// Downloads until the file is complete or the response ends.
    fn receive(&mut self, client: &HubClient, observer: &mut dyn DownloadObserver) -> Result<(), DownloadFailure> {
        let remote = self.remote;
        let answer = match client.file(remote.repo, remote.commit, remote.name, self.done) {
            Ok(answer) => answer,
            Err(error @ HubError::Connection { .. }) => return Err(DownloadFailure::Retryable(error.to_string())),
            Err(error) => return Err(error.into()),
        };
        self.accept(&answer, client)?;
        observer.advance(self.done);
        let mut body = answer.response.into_body().into_reader();
        let mut buffer = vec![0; BUFFER];
        while self.done < remote.bytes {
            if observer.stop() {
                return Err(remote.interrupted(self.done).into());
            }
            let n = match body.read(&mut buffer) {
                Ok(0) => return Err(DownloadFailure::Retryable("the connection ended".into())),
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(DownloadFailure::Retryable(format!("the connection broke ({e})"))),
            };
            // Bytes after the end of the file are ignored.
            let n = n.min(usize::try_from(remote.bytes - self.done).unwrap_or(usize::MAX));
            self.write(&buffer[..n])?;
            observer.advance(self.done);
        }
        Ok(())
    }

    /// Checks that a response continues at the end of the file, or starts from its beginning.
    fn accept(&mut self, answer: &HubResponse, client: &HubClient) -> Result<(), DownloadFailure> {
        let remote = self.remote;
        let nonsense = |problem| HubError::Answer { host: answer.from.to_string(), problem };
        match answer.status() {
            // The whole file, although a range was requested.
            200 => {
                if self.done > 0 {
                    self.start_over()?;
                }
                match answer.content_length() {
                    Some(n) if n != remote.bytes => {
                        Err(nonsense(format!("{} has {} bytes, not {n}", remote.name, remote.bytes)).into())
                    }
                    _ => Ok(()),
                }
            }
            206 => {
                let range = answer.header("content-range").unwrap_or_default();
                let begins = range.strip_prefix("bytes ").and_then(|range| range.split('-').next()?.parse().ok());
                let total = range.rsplit('/').next().and_then(|total| total.parse().ok());
                if begins == Some(self.done) && total.is_none_or(|total: u64| total == remote.bytes) {
                    Ok(())
                } else {
                    Err(nonsense(format!(
                        "bytes from {} of {} on were asked for, not {range:?}",
                        self.done, remote.bytes
                    ))
                    .into())
                }
            }
            // Addresses of storage expire. 416: the server cannot continue after the present bytes.
            status @ (401 | 403) if client.is_elsewhere(answer) => Err(retryable(status)),
            416 => {
                self.start_over()?;
                Err(retryable(416))
            }
            status @ (408 | 429 | 500..=599) => Err(retryable(status)),
            _ => Err(client.refusal(answer, remote.repo, Some(remote.name)).into()),
        }
    }

    /// Appends bytes to the file. A full disk is an error of its own.
    fn write(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        match self.file.write_all(bytes) {
            Ok(()) => {}
            Err(e) if matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
                return Err(HubError::DiskFull {
                    file: self.remote.name.to_owned(),
                    missing: self.remote.bytes - self.done,
                    folder: self.path.parent().expect("the file is in a folder").to_owned(),
                });
            }
            Err(e) => return Err(self.io("write to", e)),
        }
        self.hasher.update(bytes);
        self.done += bytes.len() as u64;
        Ok(())
    }

    fn start_over(&mut self) -> Result<(), HubError> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        emptied.map_err(|e| self.io("write to", e))?;
        self.done = 0;
        self.hasher = self.remote.checksum.hasher(self.remote.bytes);
        Ok(())
    }

    /// Verifies the checksum, and makes the file a blob or removes it.
    fn put_in_place(self, blob: &Path) -> Result<(), HubError> {
        self.file.sync_all().map_err(|e| self.io("write to", e))?;
        let found = self.hasher.finish();
        if found != *self.remote.checksum {
            fs::remove_file(&self.path).map_err(|e| HubError::io("remove", &self.path, e))?;
            return Err(HubError::Checksum {
                file: self.remote.name.to_owned(),
                expected: self.remote.checksum.digits().to_owned(),
                found: found.digits().to_owned(),
            });
        }
        fs::rename(&self.path, blob).map_err(|e| HubError::io("put in place", blob, e))
    }

    /// Sleeps for `time`, or until the observer stops the download.
    fn wait(&self, time: Duration, observer: &dyn DownloadObserver) -> Result<(), HubError> {
        let step = Duration::from_millis(100);
        let mut left = time;
        loop {
            if observer.stop() {
                return Err(self.remote.interrupted(self.done));
            }
            if left.is_zero() {
                return Ok(());
            }
            sleep(step.min(left));
            left = left.saturating_sub(step);
        }
    }

    fn io(&self, action: &'static str, source: io::Error) -> HubError {
        HubError::io(action, &self.path, source)
    }
}

fn retryable(status: u16) -> DownloadFailure {
    DownloadFailure::Retryable(format!("the server answered with status {status}"))
}
