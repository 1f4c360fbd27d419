//! Vocabularies of published models, cut down to a few thousand tokens, as GGUF files without tensors:
//! `tests/data/tokenizers`.

/// A file of that folder by its name without `.xz`, such as `gpt-2-cut.gguf`, uncompressed.
pub fn bytes(name: &str) -> Vec<u8> {
    crate::unpacked(&format!("tests/data/tokenizers/{name}"))
}
