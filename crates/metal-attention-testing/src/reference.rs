//! Expected values of models, and the text on which perplexity is measured: the files of `tests/data/reference`.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// A file of reference data by its name without `.xz`, such as `tales-heldout.txt`, uncompressed.
pub fn bytes(name: &str) -> Vec<u8> {
    crate::unpacked(&format!("tests/data/reference/{name}"))
}

/// Parses `NAME.json`.
pub fn read<T: DeserializeOwned>(name: &str) -> T {
    serde_json::from_slice(&bytes(&format!("{name}.json"))).unwrap_or_else(|e| panic!("{name}.json: {e}"))
}

/// Parses a list of token ids.
pub fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("a list of ids");
    ids.iter().map(|id| u32::try_from(id.as_u64().expect("an id")).expect("an id of 32 bits")).collect()
}
