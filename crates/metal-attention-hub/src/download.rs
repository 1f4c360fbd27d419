//! One file from the hub into the cache: resumed, checked, and put in place when it is whole.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use crate::cache::{RepoCache, try_lock};
use crate::checksum::{Checksum, Hasher};
use crate::choose::size;
use crate::client::{Answer, Client};
use crate::files::open_own;
use crate::{HubError, Observer};

const BUFFER: usize = 128 << 10;
/// So often is a broken connection made anew without a byte more than before.
const TRIES: u32 = 4;

/// A file of a commit that is to be in the cache.
pub(crate) struct Wanted<'a> {
    pub repo: &'a str,
    pub commit: &'a str,
    pub name: &'a str,
    pub bytes: u64,
    pub checksum: &'a Checksum,
}

/// Downloads a file, unless it is there, and returns its path in the snapshot. `pause` is the time before the second
/// try; it doubles with each further one.
pub(crate) fn download(
    client: &Client,
    cache: &RepoCache,
    wanted: &Wanted,
    pause: Duration,
    observer: &mut dyn Observer,
) -> Result<PathBuf, HubError> {
    let blob = cache.blob(wanted.checksum);
    let pointer = cache.pointer(wanted.commit, wanted.name);
    for file in [&blob, &pointer] {
        cache.check_inside(file.parent().expect("a file is in a folder"))?;
    }
    let is_whole = |path: &Path| fs::symlink_metadata(path).is_ok_and(|m| m.is_file() && m.len() == wanted.bytes);
    let _lock = wait_for_lock(&cache.lock(wanted.checksum), wanted, observer)?;
    if !is_whole(&blob) {
        if !cfg!(unix) && is_whole(&pointer) {
            return Ok(pointer);
        }
        let folder = blob.parent().expect("a blob is in a folder");
        fs::create_dir_all(folder).map_err(|e| HubError::io("make the folder", folder, e))?;
        let path = folder.join(format!("{}.incomplete", wanted.checksum.digits()));
        let mut partial = Partial::open(path, wanted, observer)?;
        partial.complete(client, pause, observer)?;
        partial.put_in_place(&blob)?;
    }
    cache.link(wanted.checksum, wanted.commit, wanted.name)
}

fn wait_for_lock(path: &Path, wanted: &Wanted, observer: &mut dyn Observer) -> Result<File, HubError> {
    let mut told = false;
    loop {
        if let Some(lock) = try_lock(path)? {
            return Ok(lock);
        }
        if !told {
            observer.note(&format!("another program is downloading {}; waiting for it", wanted.name));
            told = true;
        }
        if observer.stop() {
            return Err(wanted.interrupted(0));
        }
        sleep(Duration::from_millis(100));
    }
}

impl Wanted<'_> {
    fn interrupted(&self, done: u64) -> HubError {
        HubError::Interrupted { file: self.name.to_owned(), done, bytes: self.bytes }
    }
}

/// A file that is not whole yet.
struct Partial<'a> {
    wanted: &'a Wanted<'a>,
    path: PathBuf,
    file: File,
    /// Bytes that are there.
    done: u64,
    hasher: Hasher,
}

/// Why a response ended before the file.
enum Break {
    /// Worth another try.
    Passing(String),
    Final(HubError),
}

impl From<HubError> for Break {
    fn from(error: HubError) -> Self {
        Self::Final(error)
    }
}

impl<'a> Partial<'a> {
    /// Opens what an earlier download left, or a new file.
    fn open(path: PathBuf, wanted: &'a Wanted, observer: &mut dyn Observer) -> Result<Self, HubError> {
        let file = open_own(&path).map_err(|e| HubError::io("write to", &path, e))?;
        let mut partial = Self { wanted, path, file, done: 0, hasher: wanted.checksum.hasher(wanted.bytes) };
        let length = partial.file.metadata().map_err(|e| partial.io("read", e))?.len();
        if length > wanted.bytes {
            partial.start_over()?;
        }
        observer.file(wanted.name, length.min(wanted.bytes), wanted.bytes);
        let mut buffer = vec![0; BUFFER];
        loop {
            if observer.stop() {
                return Err(wanted.interrupted(length));
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

    /// Downloads what is missing, with as many connections as it takes.
    fn complete(&mut self, client: &Client, pause: Duration, observer: &mut dyn Observer) -> Result<(), HubError> {
        let mut furthest = self.done;
        let mut tries = 0;
        while self.done < self.wanted.bytes {
            let why = match self.receive(client, observer) {
                Ok(()) => continue,
                Err(Break::Final(error)) => return Err(error),
                Err(Break::Passing(why)) => why,
            };
            if self.done > furthest {
                furthest = self.done;
                tries = 0;
            }
            tries += 1;
            if tries == TRIES {
                let (file, done, bytes) = (self.wanted.name.to_owned(), self.done, self.wanted.bytes);
                return Err(HubError::BrokenOff { file, done, bytes, why });
            }
            observer.note(&format!("{why} after {}; trying again", size(self.done)));
            self.wait(pause * (1 << (tries - 1)), observer)?;
        }
        Ok(())
    }

    /// Downloads until the file is whole or the response ends.
    fn receive(&mut self, client: &Client, observer: &mut dyn Observer) -> Result<(), Break> {
        let wanted = self.wanted;
        let answer = match client.file(wanted.repo, wanted.commit, wanted.name, self.done) {
            Ok(answer) => answer,
            Err(error @ HubError::Connection { .. }) => return Err(Break::Passing(error.to_string())),
            Err(error) => return Err(error.into()),
        };
        self.accept(&answer, client)?;
        observer.advance(self.done);
        let mut body = answer.response.into_body().into_reader();
        let mut buffer = vec![0; BUFFER];
        while self.done < wanted.bytes {
            if observer.stop() {
                return Err(wanted.interrupted(self.done).into());
            }
            let n = match body.read(&mut buffer) {
                Ok(0) => return Err(Break::Passing("the connection ended".into())),
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(Break::Passing(format!("the connection broke ({e})"))),
            };
            // What comes after the file's end, the file's checksum knows nothing of.
            let n = n.min(usize::try_from(wanted.bytes - self.done).unwrap_or(usize::MAX));
            self.write(&buffer[..n])?;
            observer.advance(self.done);
        }
        Ok(())
    }

    /// Checks that an answer goes on where the file ends; it may also start from the beginning.
    fn accept(&mut self, answer: &Answer, client: &Client) -> Result<(), Break> {
        let wanted = self.wanted;
        let nonsense = |problem| HubError::Answer { host: answer.from.to_string(), problem };
        match answer.status() {
            // The whole file, though a part was asked for.
            200 => {
                if self.done > 0 {
                    self.start_over()?;
                }
                match answer.content_length() {
                    Some(n) if n != wanted.bytes => {
                        Err(nonsense(format!("{} has {} bytes, not {n}", wanted.name, wanted.bytes)).into())
                    }
                    _ => Ok(()),
                }
            }
            206 => {
                let range = answer.header("content-range").unwrap_or_default();
                let begins = range.strip_prefix("bytes ").and_then(|range| range.split('-').next()?.parse().ok());
                let total = range.rsplit('/').next().and_then(|total| total.parse().ok());
                if begins == Some(self.done) && total.is_none_or(|total: u64| total == wanted.bytes) {
                    Ok(())
                } else {
                    Err(nonsense(format!(
                        "bytes from {} of {} on were asked for, not {range:?}",
                        self.done, wanted.bytes
                    ))
                    .into())
                }
            }
            // Addresses of storage expire; 416: what is there is of no use to this server.
            status @ (401 | 403) if client.is_elsewhere(answer) => Err(passing(status)),
            416 => {
                self.start_over()?;
                Err(passing(416))
            }
            status @ (408 | 429 | 500..=599) => Err(passing(status)),
            _ => Err(client.refusal(answer, wanted.repo, Some(wanted.name)).into()),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        match self.file.write_all(bytes) {
            Ok(()) => {}
            Err(e) if matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
                return Err(HubError::DiskFull {
                    file: self.wanted.name.to_owned(),
                    missing: self.wanted.bytes - self.done,
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
        self.hasher = self.wanted.checksum.hasher(self.wanted.bytes);
        Ok(())
    }

    /// Compares the checksum, and makes the file a blob or removes it.
    fn put_in_place(self, blob: &Path) -> Result<(), HubError> {
        self.file.sync_all().map_err(|e| self.io("write to", e))?;
        let found = self.hasher.finish();
        if found != *self.wanted.checksum {
            fs::remove_file(&self.path).map_err(|e| HubError::io("remove", &self.path, e))?;
            return Err(HubError::Checksum {
                file: self.wanted.name.to_owned(),
                expected: self.wanted.checksum.digits().to_owned(),
                found: found.digits().to_owned(),
            });
        }
        fs::rename(&self.path, blob).map_err(|e| HubError::io("put in place", blob, e))
    }

    /// Sleeps, awake to the wish to stop.
    fn wait(&self, time: Duration, observer: &dyn Observer) -> Result<(), HubError> {
        let step = Duration::from_millis(100);
        let mut left = time;
        loop {
            if observer.stop() {
                return Err(self.wanted.interrupted(self.done));
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

fn passing(status: u16) -> Break {
    Break::Passing(format!("the server answered with status {status}"))
}
