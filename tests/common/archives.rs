//! Models that lie in archives: small models in each quantised type and of each architecture.

// Each test file that takes this in uses a part of it.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Files by their names.
pub type Files = BTreeMap<String, Vec<u8>>;

/// The models of `quants.json` in three quantised types, as `Q4_K.gguf`.
pub fn quants() -> &'static Files {
    static FILES: OnceLock<Files> = OnceLock::new();
    FILES.get_or_init(|| archive("quants.tar"))
}

/// The models of `small-quants.json`, of other types, which are smaller: one layer, feed-forwards of 256 where blocks are of 32,
/// and embeddings that differ only for the tokens that the logits are of.
pub fn small_quants() -> &'static Files {
    static FILES: OnceLock<Files> = OnceLock::new();
    FILES.get_or_init(|| archive("small-quants.tar"))
}

/// The models of `architectures.json`, as `qwen3.gguf`: Llama and Qwen, and the ways to scale RoPE.
pub fn architectures() -> &'static Files {
    static FILES: OnceLock<Files> = OnceLock::new();
    FILES.get_or_init(|| archive("architectures.tar"))
}

/// The models of `more-architectures.json`, as `gemma3.gguf`.
pub fn more_architectures() -> &'static Files {
    static FILES: OnceLock<Files> = OnceLock::new();
    FILES.get_or_init(|| archive("more-architectures.tar"))
}

fn reference() -> PathBuf {
    let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|root| root.join("tests/data/reference"));
    folders.find(|folder| folder.exists()).expect("the repository's tests/data/reference")
}

fn archive(name: &str) -> Files {
    members(&reference_data(name))
}

/// A file of reference data, which lies packed as `NAME.xz`.
pub fn reference_data(name: &str) -> Vec<u8> {
    let data = std::fs::read(reference().join(format!("{name}.xz"))).expect("reference data");
    let mut unpacked = Vec::new();
    lzma_rs::xz_decompress(&mut data.as_slice(), &mut unpacked).expect("a sound archive");
    unpacked
}

/// Names, without folders, and contents of the files in a tar archive.
fn members(tar: &[u8]) -> Files {
    const BLOCK: usize = 512;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches(['\0', ' ']).to_owned();
    let mut found = Files::new();
    let mut rest = tar;
    // An archive ends with blocks of zeros.
    while let Some((header, after)) = rest.split_first_chunk::<BLOCK>().filter(|(header, _)| header[0] != 0) {
        let size = usize::from_str_radix(&text(&header[124..136]), 8).expect("an octal size");
        let name = text(&header[..100]);
        if let Some(name) = name.rsplit('/').next().filter(|name| !name.is_empty()) {
            found.insert(name.to_owned(), after[..size].to_vec());
        }
        rest = &after[size.next_multiple_of(BLOCK)..];
    }
    found
}
