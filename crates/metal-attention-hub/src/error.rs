//! The errors of this crate: the failure, and a remedy for the user.

use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};

use crate::choose::{ModelFiles, size};

/// Maximum number of models that an error lists.
const MAX_LISTED: usize = 100;

/// The reason why a model could not be named, found, downloaded, listed or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// An invalid name.
    #[error("{name:?} is no model's name: {problem} (OWNER/REPO, OWNER/REPO:Q4_0 or OWNER/REPO:FILE.gguf)")]
    Name {
        /// The name.
        name: String,
        /// The problem.
        problem: &'static str,
    },
    /// A well-known name with an unknown tag.
    #[error("{name} is not known with the tag {tag}: there are {}", .names.join(", "))]
    Tag {
        /// The name before the colon.
        name: String,
        /// The tag.
        tag: String,
        /// The valid names with tags.
        names: Vec<String>,
    },
    /// An environment variable with an invalid value.
    #[error("the environment variable {name} cannot be used: {problem}")]
    Environment {
        /// The variable.
        name: &'static str,
        /// The problem of its value.
        problem: String,
    },
    /// A repository without a GGUF file.
    #[error("{repo} has no GGUF file; look for a repository with the same name and -GGUF at its end")]
    NoGguf {
        /// `OWNER/REPO`.
        repo: String,
    },
    /// The repository has no matching model.
    #[error("{repo} has no {wanted}; there {}{}", are(.models), list(.models))]
    NoSuchModel {
        /// `OWNER/REPO`.
        repo: String,
        /// The type or file.
        wanted: String,
        /// Its models.
        models: Vec<ModelFiles>,
    },
    /// More than one model matches.
    #[error("{repo} has several models: add :TYPE or :FILE to the name to choose one{}", list(.models))]
    Unclear {
        /// `OWNER/REPO`.
        repo: String,
        /// Its models.
        models: Vec<ModelFiles>,
    },
    /// Files of a split model are missing on the hub.
    #[error("{repo} lacks parts of the split model {file}")]
    MissingPart {
        /// `OWNER/REPO`.
        repo: String,
        /// The first file of the model.
        file: String,
    },
    /// Requests are disabled, and the model is not in the cache.
    #[error(
        "{name} is not in the cache, and HF_HUB_OFFLINE forbids to ask the hub for it{}{}",
        if .models.is_empty() { "" } else { "; the cache has" }, list(.models)
    )]
    Offline {
        /// The model.
        name: String,
        /// The models of the newest commit in the cache.
        models: Vec<ModelFiles>,
    },
    /// The repository does not exist on the hub.
    #[error("there is no {repo} on {host}: check how it is written")]
    NoSuchRepo {
        /// `OWNER/REPO`.
        repo: String,
        /// The hub.
        host: String,
    },
    /// The hub lists a file but does not have it.
    #[error("{host} no longer has {file} of {repo}: it was just renamed or removed; try again")]
    NoSuchFile {
        /// `OWNER/REPO`.
        repo: String,
        /// The hub.
        host: String,
        /// The file.
        file: String,
    },
    /// The hub requires a token (status 401 without one).
    #[error(
        "{host} does not show {repo} to everybody: it does not exist, is private or gated. If it exists, make a token \
         at https://huggingface.co/settings/tokens and set HF_TOKEN to it"
    )]
    TokenNeeded {
        /// `OWNER/REPO`.
        repo: String,
        /// The hub.
        host: String,
    },
    /// The hub rejects the token (status 401 with one).
    #[error(
        "{host} refuses the token for {repo}: it has expired, or the repository does not exist for its account. Set \
         HF_TOKEN to a valid one, from https://huggingface.co/settings/tokens"
    )]
    TokenRefused {
        /// `OWNER/REPO`.
        repo: String,
        /// The hub.
        host: String,
    },
    /// The user has to accept the repository's terms first, or the token does not cover it.
    #[error(
        "{repo} is gated: accept its terms at {page}, make a token that may read it at \
         https://huggingface.co/settings/tokens, and set HF_TOKEN to it{}",
        if *.with_token { " (the token in use may not read it)" } else { "" }
    )]
    Gated {
        /// `OWNER/REPO`.
        repo: String,
        /// The repository's page.
        page: String,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// An unexpected status.
    #[error("{host} answers with status {status}{}", if *.status == 429 { ": too many requests; wait, or set HF_TOKEN" } else { "" })]
    Status {
        /// The server.
        host: String,
        /// The status.
        status: u16,
    },
    /// The connection failed.
    #[error("cannot reach {host}: {source}; models that `metal-attention list` shows work without a connection")]
    Connection {
        /// The server.
        host: String,
        /// The failure.
        source: Box<ureq::Error>,
    },
    /// A response that violates the protocol.
    #[error("{host} gives an answer that makes no sense: {problem}")]
    Answer {
        /// The server.
        host: String,
        /// The violation.
        problem: String,
    },
    /// The connection was lost repeatedly.
    #[error("{file} broke off after {} of {} ({why}); the same command goes on from there", size(*.done), size(*.bytes))]
    BrokenOff {
        /// The file.
        file: String,
        /// Bytes that have arrived.
        done: u64,
        /// Bytes of the file.
        bytes: u64,
        /// The last failure.
        why: String,
    },
    /// The observer stopped the download.
    #[error("interrupted after {} of {} of {file}; the same command goes on from there", size(*.done), size(*.bytes))]
    Interrupted {
        /// The file.
        file: String,
        /// Bytes that have arrived.
        done: u64,
        /// Bytes of the file.
        bytes: u64,
    },
    /// The checksum of the downloaded file is wrong.
    #[error(
        "{file} arrived damaged, and was removed: its checksum is {found}, the hub says {expected}; the same command \
         downloads it anew"
    )]
    Checksum {
        /// The file.
        file: String,
        /// The hub's checksum.
        expected: String,
        /// The checksum of the downloaded bytes.
        found: String,
    },
    /// The disk is full.
    #[error(
        "the disk is full: {file} needs {} more in {}; make room (`metal-attention list` shows models to remove) or set \
         HF_HOME to a folder on another disk. What has arrived is kept",
        size(*.missing), .folder.display()
    )]
    DiskFull {
        /// The file.
        file: String,
        /// Bytes that are missing.
        missing: u64,
        /// The folder of the file.
        folder: PathBuf,
    },
    /// The file system failed.
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        /// The attempted action.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// There is nothing to remove.
    #[error("{name} is not in the cache; `metal-attention list` shows what is")]
    NotCached {
        /// The model.
        name: String,
    },
    /// A folder of the cache that is a link out of it.
    #[error("{} is a link that leads out of the cache: nothing is written or removed there; remove the link", .path.display())]
    OutsideCache {
        /// The folder.
        path: PathBuf,
    },
}

impl HubError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }
}

fn are(models: &[ModelFiles]) -> &'static str {
    if models.len() == 1 { "is" } else { "are" }
}

/// A line for each model, up to a maximum.
fn list(models: &[ModelFiles]) -> String {
    let mut list = String::new();
    for model in models.iter().take(MAX_LISTED) {
        // Writing to a string cannot fail.
        let _ = write!(list, "\n  {model}");
    }
    if let Some(more @ 1..) = models.len().checked_sub(MAX_LISTED) {
        let _ = write!(list, "\n  and {more} more");
    }
    list
}
