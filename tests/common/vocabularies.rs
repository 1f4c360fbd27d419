//! Cut-down vocabularies, which lie packed in `tests/data/tokenizers`.

use std::path::Path;

/// A file of that folder, such as `gpt-2-cut.gguf`.
pub fn tokenizer_data(name: &str) -> Vec<u8> {
    let mut roots = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let packed = roots.find_map(|root| std::fs::read(root.join(format!("tests/data/tokenizers/{name}.xz"))).ok());
    let mut data = Vec::new();
    lzma_rs::xz_decompress(&mut packed.expect("part of the repository").as_slice(), &mut data).expect("a sound file");
    data
}
