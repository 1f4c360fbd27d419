//! A release: the signed list of its files with their checksums, and the archive with the program for this system.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use flate2::read::GzDecoder;
use metal_attention_hub::DownloadObserver;
use minisign_verify::{PublicKey, Signature};
use sha2::{Digest, Sha256};
use ureq::{Agent, Body};

use crate::cli_error::CliError;
use crate::download_progress::DownloadProgress;
use crate::metadata_text::safe;

/// The system that this program was built for.
const TARGET: &str = env!("METAL_ATTENTION_TARGET");

/// The list of a release's files: lines of a SHA-256 in hexadecimal digits, two spaces, and a name.
const LIST: &str = "SHA256SUMS";

/// Maximum bytes of the list and of its signature.
const MAX_LIST: u64 = 1 << 20;

/// Maximum bytes of an archive.
const MAX_ARCHIVE: u64 = 1 << 30;

/// A connection that is silent for this long is given up.
const SILENCE: Duration = Duration::from_secs(30);

/// A version: three numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version([u64; 3]);

impl Version {
    /// That of this program.
    pub fn own() -> Self {
        Self::parse(env!("CARGO_PKG_VERSION")).expect("the version of the workspace is three numbers")
    }

    /// Reads `1.2.3`; `None`: it is something else, or a version before its release, such as `1.2.3-rc1`.
    fn parse(text: &str) -> Option<Self> {
        let numbers: Option<Vec<u64>> = text.split('.').map(|number| number.parse().ok()).collect();
        numbers?.try_into().ok().map(Self)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let [major, minor, patch] = self.0;
        write!(f, "{major}.{minor}.{patch}")
    }
}

/// A release with an archive for this system.
pub struct Release {
    /// Its version.
    pub version: Version,
    /// The address of its files.
    files: String,
    /// The name of the archive for this system.
    archive: String,
    /// The SHA-256 of the archive.
    sha256: [u8; 32],
    agent: Agent,
}

impl Release {
    /// Reads the newest release at `address`, whose list must be signed with `key`.
    pub fn newest(address: &str, key: &str) -> Result<Self, CliError> {
        let files = format!("{address}/releases/latest/download");
        let config = Agent::config_builder()
            .user_agent(concat!("metal-attention/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .build();
        let agent: Agent = config.into();
        let key = PublicKey::from_base64(key.lines().last().unwrap_or_default());
        let key = key
            .map_err(|error| CliError::Usage(format!("the key of the releases is no minisign public key: {error}")))?;
        let list = get(&agent, &format!("{files}/{LIST}"))?;
        let signature = get(&agent, &format!("{files}/{LIST}.minisig"))?;
        check_signature(&key, &list, &signature)?;
        let (version, archive, sha256) = of_this_system(&list, TARGET)?;
        Ok(Self { version, files, archive, sha256, agent })
    }

    /// Downloads the archive, checks it, and unpacks the program, `man` and `completions` into `folder`. Returns the program's file.
    pub fn unpack(&self, folder: &Path) -> Result<PathBuf, CliError> {
        let archive = self.download(folder)?;
        unpack(&archive, folder)
            .map_err(|error| CliError::General(format!("cannot unpack {}: {error}", self.archive)))?;
        Ok(folder.join("metal-attention"))
    }

    /// Downloads the archive into `folder`, and checks it. Returns its file.
    fn download(&self, folder: &Path) -> Result<PathBuf, CliError> {
        let address = format!("{}/{}", self.files, self.archive);
        let mut answer = request(&self.agent, &address)?;
        let size = answer.content_length().unwrap_or(0);
        let mut body = answer.as_reader().take(MAX_ARCHIVE);
        let path = folder.join("archive");
        let failed = |error: io::Error| CliError::General(format!("the download of {address} failed: {error}"));
        let mut file = File::create_new(&path).map_err(failed)?;
        let (mut hash, mut buffer, mut done) = (Sha256::new(), vec![0; 1 << 16], 0);
        let mut progress = DownloadProgress::new();
        progress.file(&self.archive, 0, size);
        loop {
            let n = body.read(&mut buffer).map_err(failed)?;
            if n == 0 {
                break;
            }
            hash.update(&buffer[..n]);
            file.write_all(&buffer[..n]).map_err(failed)?;
            done += n as u64;
            progress.advance(done);
        }
        if hash.finalize()[..] != self.sha256 {
            return Err(CliError::General(format!(
                "{} has another SHA-256 than its release says: the download is damaged or was changed; nothing was replaced",
                self.archive
            )));
        }
        Ok(path)
    }
}

/// What is at `address`, a short text.
fn get(agent: &Agent, address: &str) -> Result<String, CliError> {
    let text = request(agent, address)?.with_config().limit(MAX_LIST).read_to_string();
    text.map_err(|error| CliError::General(format!("cannot read {address}: {error}")))
}

fn request(agent: &Agent, address: &str) -> Result<Body, CliError> {
    let answer = agent.get(address).call();
    answer
        .map(ureq::http::Response::into_body)
        .map_err(|error| CliError::General(format!("cannot get {address}: {error}")))
}

fn check_signature(key: &PublicKey, list: &str, signature: &str) -> Result<(), CliError> {
    let checked = Signature::decode(signature).and_then(|signature| key.verify(list.as_bytes(), &signature, false));
    checked.map_err(|error| {
        CliError::General(format!("the signature of the release does not fit its key ({error}): nothing was replaced"))
    })
}

/// The version of the release, and the name and the SHA-256 of the archive for `target`.
fn of_this_system(list: &str, target: &str) -> Result<(Version, String, [u8; 32]), CliError> {
    let of_line = |line: &str| {
        let (sha256, name) = line.split_once("  ")?;
        let version = name.strip_prefix("metal-attention-")?.strip_suffix(&format!("-{target}.tar.gz"))?;
        let mut bytes = [0; 32];
        if sha256.len() != 64 || !sha256.is_ascii() {
            return None;
        }
        for (byte, at) in bytes.iter_mut().zip((0..64).step_by(2)) {
            *byte = u8::from_str_radix(&sha256[at..at + 2], 16).ok()?;
        }
        Some((Version::parse(version)?, name.to_owned(), bytes))
    };
    let found = list.lines().find_map(of_line);
    found.ok_or_else(|| CliError::General(format!("the newest release has no program for {}", safe(target))))
}

/// Unpacks the program of an archive, and its folders of manual pages and completions, to `folder`. All is below one folder there.
fn unpack(archive: &Path, folder: &Path) -> io::Result<()> {
    let mut archive = tar::Archive::new(GzDecoder::new(File::open(archive)?));
    let mut has_program = false;
    for entry in archive.entries()? {
        let mut entry = entry?;
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let path = entry.path()?.into_owned();
        let names: Option<Vec<_>> = path.components().map(normal_name).collect();
        let (to, is_program) = match names.as_deref() {
            Some([_, "metal-attention"]) => (folder.join("metal-attention"), true),
            Some([_, kind @ ("man" | "completions"), name]) => {
                fs::create_dir_all(folder.join(kind))?;
                (folder.join(kind).join(name), false)
            }
            _ => continue,
        };
        let mut file = File::create_new(to)?;
        io::copy(&mut entry, &mut file)?;
        if is_program {
            make_executable(&file)?;
            has_program = true;
        }
    }
    if has_program { Ok(()) } else { Err(io::Error::new(io::ErrorKind::NotFound, "it has no program")) }
}

/// The name of a file or a folder; `None` for `..` and the like.
fn normal_name(component: Component<'_>) -> Option<&str> {
    match component {
        Component::Normal(name) => name.to_str(),
        Component::Prefix(_) | Component::RootDir | Component::CurDir | Component::ParentDir => None,
    }
}

#[cfg(unix)]
fn make_executable(file: &File) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(fs::Permissions::from_mode(0o755))
}

#[cfg(not(unix))]
fn make_executable(_: &File) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        let version = |text| Version::parse(text).unwrap();
        assert!(version("0.10.0") > version("0.9.9") && version("1.0.0") > version("0.99.99"));
        for text in ["", "1.2", "1.2.3.4", "1.2.3-rc1", "1.a.3", "1..3"] {
            assert_eq!(Version::parse(text), None, "{text}");
        }
        assert_eq!(Version::own().to_string(), env!("CARGO_PKG_VERSION"));
    }

    #[test]
    fn the_archive_of_a_system_is_found_in_the_list() {
        let sum = "0a".repeat(32);
        let list =
            format!("{sum}  install.sh\n{sum}  metal-attention-1.2.3-a-b.tar.gz\n00  metal-attention-1.2.4-c.tar.gz\n");
        let (version, name, sha256) = of_this_system(&list, "a-b").unwrap();
        assert_eq!(
            (version.to_string(), &name[..], sha256),
            ("1.2.3".into(), "metal-attention-1.2.3-a-b.tar.gz", [10; 32])
        );
        for target in ["b", "c", "a-b-c"] {
            assert!(of_this_system(&list, target).is_err(), "{target}");
        }
    }
}
