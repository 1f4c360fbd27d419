#![doc = include_str!("../README.md")]

pub mod encoder;
pub mod http_server;
pub mod hub_server;
pub mod mmproj;
pub mod models;
pub mod reference;
pub mod vocabulary;

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// The root folder of the repository.
pub fn root() -> PathBuf {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder of the crates");
    crates.parent().expect("the root folder").to_owned()
}

/// The built-in model of 260,000 parameters, which generates children's stories: `models/stories260K.gguf`.
pub fn stories() -> PathBuf {
    root().join("models/stories260K.gguf")
}

/// A model of 4 million parameters in `Q4_0`, trained on public-domain tales: `models/tales-4m-q4_0.gguf`.
pub fn tales() -> PathBuf {
    root().join("models/tales-4m-q4_0.gguf")
}

/// The uncompressed contents of a file that is stored as `PATH.xz`. `path` is relative to the root folder.
pub fn unpacked(path: &str) -> Vec<u8> {
    let path = root().join(format!("{path}.xz"));
    let packed = std::fs::File::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut data = Vec::new();
    let mut reader = lzma_rust2::XzReader::new(std::io::BufReader::new(packed), true);
    reader.read_to_end(&mut data).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    data
}

/// Records that the running test is skipped, and why: on stderr, and as a line of the file that the environment variable
/// `METAL_ATTENTION_SKIPPED` names.
pub fn skip(why: &str) {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    eprintln!("skipped: {test}: {why}");
    if let Some(path) = std::env::var_os("METAL_ATTENTION_SKIPPED") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        let written = file.and_then(|mut file| writeln!(file, "{test}: {why}"));
        written.expect("a file to record skipped tests in");
    }
}

/// Whether a test runs a part of its cases: on a GPU in software, which compiles each kernel for seconds. The environment variable
/// `METAL_ATTENTION_ALL_CASES` makes it run all of them there, too.
pub fn takes_fewer_cases(software: bool) -> bool {
    software && std::env::var_os("METAL_ATTENTION_ALL_CASES").is_none()
}

/// The parts of which the models of a test so far consist. A software GPU compiles the kernels of a model for seconds: there a
/// test of many models takes those with a part that no earlier one has.
#[derive(Debug, Default)]
pub struct SeenParts(BTreeSet<String>);

impl SeenParts {
    /// Whether a model's specification has a field with a variant (such as `activation: Gelu` or `bias: Some`) that no earlier
    /// one has. All numbers count as one value, and so do all strings.
    ///
    /// ```
    /// let mut parts = metal_attention_testing::SeenParts::default();
    /// assert!(parts.adds(&[Some(1), Some(2)]));
    /// assert!(!parts.adds(&[Some(3)]));
    /// assert!(parts.adds(&[Some(3), None]));
    /// ```
    pub fn adds(&mut self, spec: &impl Debug) -> bool {
        let (text, n_before) = (format!("{spec:?}"), self.0.len());
        let (mut path, mut start) = (Vec::new(), 0);
        for (at, delimiter) in text.match_indices(['{', '(', '[', ',', ']', ')', '}']) {
            let name = text[start..at].trim();
            start = at + 1;
            let value = name.rsplit(": ").next().unwrap_or(name);
            if !value.is_empty() && !value.starts_with('"') && value.parse::<f64>().is_err() {
                self.0.insert(format!("{}/{name}", path.join("/")));
            }
            match delimiter {
                "{" | "(" | "[" => path.push(name),
                "," => {}
                _ => drop(path.pop()),
            }
        }
        self.0.len() > n_before
    }
}
