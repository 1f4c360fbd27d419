//! The command `update`, against a local server in place of a release's. `tests/data/release/make` makes the releases.
#![cfg(unix)]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::common::{stderr, stdout};
use metal_attention_testing::http_server::HttpServer;

const RELEASES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/release");

/// The key of these releases.
fn key() -> String {
    let file = fs::read_to_string(Path::new(RELEASES).join("key.pub")).unwrap();
    file.lines().last().unwrap().to_owned()
}

/// A server with the newest release `version`; `change` changes what it sends of a file.
fn server(version: &'static str, change: impl Fn(&str, &mut Vec<u8>) + Send + Sync + 'static) -> (HttpServer, String) {
    let server = HttpServer::start(move |request, stream| {
        let name = request.path.strip_prefix("/owner/metal-attention/releases/latest/download/").unwrap_or_default();
        let file = if name.ends_with(".tar.gz") { "archive.tar.gz" } else { name };
        let found = fs::read(Path::new(RELEASES).join(version).join(file));
        let (status, mut bytes) = found.map_or(("404 Not Found", Vec::new()), |bytes| ("200 OK", bytes));
        change(name, &mut bytes);
        let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", bytes.len());
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&bytes));
    });
    let address = server.url().replace("/mcp", "/owner/metal-attention");
    (server, address)
}

/// The program in a folder of its own, as an archive installs it.
struct Installed {
    folder: PathBuf,
    /// Deletes the folder.
    _temporary: Option<tempfile::TempDir>,
}

impl Installed {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let installed = Self::at(folder.path());
        Self { _temporary: Some(folder), ..installed }
    }

    /// In `folder`, which has no mark of a build.
    fn at(folder: &Path) -> Self {
        let built = Path::new(env!("CARGO_BIN_EXE_metal-attention"));
        let program = folder.join("metal-attention");
        if fs::hard_link(built, &program).is_err() {
            fs::copy(built, &program).unwrap();
        }
        Self { folder: folder.to_owned(), _temporary: None }
    }

    fn program(&self) -> PathBuf {
        self.folder.join("metal-attention")
    }

    fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(self.program());
        for name in ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "CARGO_HOME"] {
            command.env_remove(name);
        }
        command.arg("update").args(args).output().unwrap()
    }

    /// The names of the files in the folder.
    fn files(&self) -> Vec<String> {
        let files = fs::read_dir(&self.folder).unwrap();
        let mut names: Vec<_> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    }
}

#[test]
fn a_newer_release_replaces_the_program_and_the_old_one_stays() {
    let (_server, address) = server("9.9.9", |_, _| {});
    let (installed, key) = (Installed::new(), key());
    let from = ["--from", &address, "--key", &key];
    let check = stdout(installed.run(&[&["--check"], &from[..]].concat()));
    assert!(check.starts_with("metal-attention 9.9.9 is released, this is "), "{check}");
    assert!(check.ends_with("metal-attention update installs it\n"), "{check}");
    assert_eq!(installed.files(), ["metal-attention"]);
    let done = stdout(installed.run(&from));
    assert!(done.starts_with("metal-attention 9.9.9 is at "), "{done}");
    assert_eq!(installed.files(), ["metal-attention", "metal-attention.old"]);
    let version =
        |program: &str| stdout(Command::new(installed.folder.join(program)).arg("--version").output().unwrap());
    assert_eq!(version("metal-attention"), "metal-attention 9.9.9 (a test)\n");
    assert!(version("metal-attention.old").starts_with(concat!("metal-attention ", env!("CARGO_PKG_VERSION"))));
}

#[test]
fn manual_pages_and_completions_that_are_installed_are_replaced() {
    let (_server, address) = server("9.9.9", |_, _| {});
    let folder = tempfile::tempdir().unwrap();
    let (bin, share) = (folder.path().join("bin"), folder.path().join("share"));
    for folder in [&bin, &share.join("man/man1"), &share.join("zsh/site-functions"), &share.join("fish")] {
        fs::create_dir_all(folder).unwrap();
    }
    let old = ["man/man1/metal-attention.1", "man/man1/other.1", "zsh/site-functions/_metal-attention"];
    for file in old {
        fs::write(share.join(file), "old").unwrap();
    }
    let installed = Installed::at(&bin);
    let output = installed.run(&["--from", &address, "--key", &key()]);
    assert!(output.status.success() && !stderr(&output).contains("warning"), "{}", stderr(&output));
    let text = |file: &str| fs::read_to_string(share.join(file)).unwrap();
    for file in [old[0], "man/man1/metal-attention-run.1", old[2]] {
        assert_eq!(text(file), "of 9.9.9\n", "{file}");
    }
    assert_eq!(text("man/man1/other.1"), "old");
    assert!(!share.join("fish/vendor_completions.d").exists(), "completions that were not installed");
}

#[test]
fn releases_that_are_not_newer_signed_and_whole_replace_nothing() {
    let (installed, own_key) = (Installed::new(), key());
    let refused = |server: &(HttpServer, String), key: &str, part: &str| {
        let output = installed.run(&["--from", &server.1, "--key", key]);
        let errors = stderr(&output);
        assert!(!output.status.success() && errors.contains(part), "{part}: {errors}");
        assert_eq!(installed.files(), ["metal-attention"], "{part}");
    };
    let whole = server("9.9.9", |_, _| {});
    let other_key = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3";
    refused(&whole, other_key, "the signature of the release does not fit its key");
    refused(&whole, "no key", "is no minisign public key");
    let changed_list = server("9.9.9", |name, bytes| {
        if name == "SHA256SUMS" {
            bytes[0] ^= 1;
        }
    });
    refused(&changed_list, &own_key, "the signature of the release does not fit its key");
    let damaged = server("9.9.9", |name, bytes| {
        if name.ends_with(".tar.gz") {
            bytes.push(0);
        }
    });
    refused(&damaged, &own_key, "has another SHA-256 than its release says");
    let unsigned = server("9.9.9", |name, bytes| {
        if name.ends_with(".minisig") {
            bytes.clear();
        }
    });
    refused(&unsigned, &own_key, "the signature of the release does not fit its key");
    refused(&server("1.1.1", |_, _| {}), &own_key, "SHA256SUMS: http status: 404");
    let (_server, older) = server("0.0.1", |_, _| {});
    let output = stdout(installed.run(&["--from", &older, "--key", &own_key]));
    assert!(output.ends_with(" is the newest release\n"), "{output}");
    assert_eq!(installed.files(), ["metal-attention"]);
}

#[test]
fn a_program_of_cargo_or_without_an_address_is_not_replaced() {
    let output = Installed::new().run(&[]);
    let errors = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("was built without the address of releases"), "{errors}");
    // The program of the tests is in the folder of a build.
    let (server, address) = server("9.9.9", |_, _| {});
    let output = Command::new(env!("CARGO_BIN_EXE_metal-attention"))
        .args(["update", "--from", &address, "--key", &key()])
        .output()
        .unwrap();
    assert!(stderr(&output).contains("was installed by a build in a checkout: update the sources"), "{output:?}");
    assert!(server.requests().is_empty());
}
