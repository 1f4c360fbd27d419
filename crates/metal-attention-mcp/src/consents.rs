//! The user's consent to tool calls, and the file in which it is kept.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::ServerOptions;

/// Maximum bytes of the file.
const MAX_FILE: u64 = 1 << 20;

/// The user's consent to a tool call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Consent {
    /// To this call.
    Once,
    /// To this call and all later calls of the tool.
    Always,
}

/// The tools that need no consent: those of the configuration, and those with [`Consent::Always`], which are kept in a
/// file. The configuration is the user's own text and is never written.
#[derive(Debug, Default)]
pub struct Consents {
    /// The file; `None`: consents are lost with this value.
    path: Option<PathBuf>,
    /// The consents without a file. Also locked while the file is changed, so that no change is lost.
    kept: Mutex<ConsentFile>,
}

/// The content of the file: servers by name.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct ConsentFile {
    /// By the server's name in the configuration.
    servers: BTreeMap<String, ServerConsents>,
}

impl ConsentFile {
    fn allows(&self, server: &ServerOptions, tool: &str) -> bool {
        let of_server = self.servers.get(&server.name).filter(|kept| kept.target == server.consent_target());
        of_server.is_some_and(|kept| kept.tools.iter().any(|allowed| allowed == tool))
    }
}

/// The tools of a server that need no consent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct ServerConsents {
    /// The server's [`consent_target`](ServerOptions::consent_target) at the time of the consent: the consent is void
    /// for another one.
    target: String,
    /// The names of the tools.
    tools: Vec<String>,
}

/// The file of consents cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConsentError {
    /// It cannot be read.
    #[error("cannot read {}, which has the tools that are always allowed: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// It cannot be written.
    #[error("the tool was not called: cannot keep in {} that it is always allowed: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl Consents {
    /// The consents of the file at `path`, which may be missing. The file is read at each use, so that a user can
    /// remove consents.
    pub fn read(path: &Path) -> Result<Self, ConsentError> {
        read(path)?;
        Ok(Self { path: Some(path.to_owned()), kept: Mutex::default() })
    }

    /// Whether a tool of `server` needs no consent.
    pub fn allows(&self, server: &ServerOptions, tool: &str) -> Result<bool, ConsentError> {
        if server.allow.iter().any(|allowed| allowed == tool) {
            return Ok(true);
        }
        Ok(match &self.path {
            Some(path) => read(path)?.allows(server, tool),
            None => self.kept().allows(server, tool),
        })
    }

    /// Records that a tool of `server` needs no consent. After an error, the tool still needs it.
    pub fn keep(&self, server: &ServerOptions, tool: &str) -> Result<(), ConsentError> {
        if server.allow.iter().any(|allowed| allowed == tool) {
            return Ok(());
        }
        let mut kept = self.kept();
        let mut changed = match &self.path {
            Some(path) => read(path)?,
            None => kept.clone(),
        };
        if changed.allows(server, tool) {
            return Ok(());
        }
        let of_server = changed.servers.entry(server.name.clone()).or_default();
        let target = server.consent_target();
        if of_server.target != target {
            *of_server = ServerConsents { target, tools: Vec::new() };
        }
        of_server.tools.push(tool.to_owned());
        if let Some(path) = &self.path {
            return write(path, &changed).map_err(|source| ConsentError::Write { path: path.clone(), source });
        }
        *kept = changed;
        Ok(())
    }

    fn kept(&self) -> MutexGuard<'_, ConsentFile> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads the file; empty if it is missing.
fn read(path: &Path) -> Result<ConsentFile, ConsentError> {
    let read = || {
        let mut text = String::new();
        match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(ConsentFile::default()),
            file => file?.take(MAX_FILE).read_to_string(&mut text)?,
        };
        Ok(serde_json::from_str(&text)?)
    };
    read().map_err(|source| ConsentError::Read { path: path.to_owned(), source })
}

/// Replaces the file atomically; only this user can read and write it.
fn write(path: &Path, kept: &ConsentFile) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    let written = (|| {
        let mut options = File::options();
        options.write(true).create(true).truncate(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(&partial)?;
        file.write_all((serde_json::to_string_pretty(kept)? + "\n").as_bytes())?;
        fs::rename(&partial, path)
    })();
    if written.is_err() {
        // The first error is returned.
        let _ = fs::remove_file(&partial);
    }
    written
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Transport;

    fn server(command: &str) -> ServerOptions {
        ServerOptions {
            name: "files".into(),
            transport: Transport::Stdio {
                command: command.into(),
                args: vec!["/tmp".into()],
                env: BTreeMap::new(),
                cwd: None,
            },
            tools: None,
            timeout: Duration::from_secs(1),
            allow: vec!["read".into()],
        }
    }

    #[test]
    fn consents_are_for_a_tool_of_a_program() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/mcp-consents.json");
        let consents = Consents::read(&path).unwrap();
        let allowed = |consents: &Consents, server: &ServerOptions| {
            ["read", "write", "delete"].map(|tool| consents.allows(server, tool).unwrap())
        };
        assert_eq!(allowed(&consents, &server("a")), [true, false, false]);
        consents.keep(&server("a"), "read").unwrap();
        assert!(!path.exists());
        consents.keep(&server("a"), "write").unwrap();
        consents.keep(&server("a"), "write").unwrap();
        let again = Consents::read(&path).unwrap();
        for consents in [&consents, &again] {
            assert_eq!(allowed(consents, &server("a")), [true, true, false]);
            assert_eq!(allowed(consents, &server("b")), [true, false, false]);
        }
        // Consents of another process are kept, and those of another program are removed.
        again.keep(&server("a"), "delete").unwrap();
        consents.keep(&server("b"), "write").unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let kept: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(kept, serde_json::json!({"servers": {"files": {"target": "b /tmp", "tools": ["write"]}}}));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn consents_can_be_removed_from_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mcp-consents.json");
        let consents = Consents::read(&path).unwrap();
        consents.keep(&server("a"), "write").unwrap();
        assert!(consents.allows(&server("a"), "write").unwrap());
        fs::write(&path, r#"{"servers": {"files": {"target": "a /tmp", "tools": []}}}"#).unwrap();
        assert!(!consents.allows(&server("a"), "write").unwrap());
    }

    #[test]
    fn a_damaged_file_allows_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mcp-consents.json");
        let consents = Consents::read(&path).unwrap();
        fs::write(&path, "{").unwrap();
        for error in [
            Consents::read(&path).unwrap_err(),
            consents.allows(&server("a"), "write").unwrap_err(),
            consents.keep(&server("a"), "write").unwrap_err(),
        ] {
            assert!(error.to_string().contains("mcp-consents.json"), "{error}");
        }
        // The configuration's tools need no file.
        assert!(consents.allows(&server("a"), "read").unwrap());
    }

    #[test]
    fn consent_that_cannot_be_written_is_void() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/mcp-consents.json");
        let consents = Consents::read(&path).unwrap();
        fs::create_dir(folder.path().join("new")).unwrap();
        // A folder is in the place of the file.
        fs::create_dir(path.with_extension(format!("{}.partial", std::process::id()))).unwrap();
        assert!(matches!(consents.keep(&server("a"), "write"), Err(ConsentError::Write { .. })));
        assert!(!consents.allows(&server("a"), "write").unwrap());
    }
}
