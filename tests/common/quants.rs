//! The models of `quants.json`: one small model in each quantised type.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

/// Each file by its name, as `Q4_K.gguf`. Three lie in the folder `quants` for tests that open files, the others in an
/// archive beside it.
pub fn quants() -> &'static BTreeMap<String, Vec<u8>> {
    static FILES: OnceLock<BTreeMap<String, Vec<u8>>> = OnceLock::new();
    FILES.get_or_init(|| {
        let mut folders =
            Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|root| root.join("tests/data/reference"));
        let reference = folders.find(|folder| folder.exists()).expect("the repository's tests/data/reference");
        let mut files: BTreeMap<_, _> = std::fs::read_dir(reference.join("quants"))
            .expect("a folder")
            .map(|entry| entry.expect("an entry"))
            .map(|entry| (entry.file_name().into_string().expect("a plain name"), std::fs::read(entry.path()).unwrap()))
            .collect();
        let archive = std::fs::read(reference.join("quants.tar.xz")).expect("the archive of the other types");
        let mut tar = Vec::new();
        lzma_rs::xz_decompress(&mut archive.as_slice(), &mut tar).expect("a sound archive");
        files.extend(members(&tar));
        assert_eq!(files.len(), 13, "{:?}", files.keys());
        files
    })
}

/// Names and contents of the files in a tar archive.
fn members(tar: &[u8]) -> Vec<(String, Vec<u8>)> {
    const BLOCK: usize = 512;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches(['\0', ' ']).to_owned();
    let mut found = Vec::new();
    let mut rest = tar;
    // An archive ends with blocks of zeros.
    while let Some((header, after)) = rest.split_first_chunk::<BLOCK>().filter(|(header, _)| header[0] != 0) {
        let size = usize::from_str_radix(&text(&header[124..136]), 8).expect("an octal size");
        found.push((text(&header[..100]), after[..size].to_vec()));
        rest = &after[size.next_multiple_of(BLOCK)..];
    }
    found
}
