//! Well-known short names of models (`llama3.2`, `qwen3.5:4b`), as other programs' libraries use them, and the
//! repositories with these models as GGUF.
//!
//! `data/names.json` is the table: a row for each model, with the names of its files (`*` stands for any text) and its
//! source.

use std::sync::OnceLock;

use serde::Deserialize;

use crate::HubError;
use crate::name::{ModelName, Which};

/// The tag of a name without one, and a synonym.
const DEFAULT_TAG: &str = "default";
const LATEST_TAG: &str = "latest";

/// Prefixes of names in the addresses of a library.
const LIBRARIES: [&str; 3] = ["ollama.com/library/", "registry.ollama.ai/library/", "library/"];

/// Words that a tag may have between its size and its type, such as `3b-instruct-q8_0`.
const VARIANTS: [&str; 4] = ["-instruct", "-it", "-chat", "-text"];

/// A row of the table.
#[derive(Clone, Debug, Deserialize)]
pub struct KnownModel {
    /// The name before the colon.
    pub name: String,
    /// The tags after the colon; `default` also applies to a name without a colon.
    pub tags: Vec<String>,
    /// `OWNER/REPO`.
    pub repository: String,
    /// The file, or a pattern of it.
    pub file: String,
    /// `chat`, `embedding` or `rerank`.
    pub kind: String,
    /// Whether a file with that name exists; otherwise `file` is the usual pattern of such repositories.
    pub file_seen: bool,
    /// The source of the row, and its date.
    pub seen: String,
    /// Doubts, or differences from other libraries.
    #[serde(default)]
    pub note: String,
}

/// All rows.
pub fn known_models() -> &'static [KnownModel] {
    static MODELS: OnceLock<Vec<KnownModel>> = OnceLock::new();
    MODELS.get_or_init(|| {
        serde_json::from_str(include_str!("../data/names.json")).expect("the table of names is valid JSON")
    })
}

/// Finds the model of a well-known name, in upper or lower case; `None` if the part before the colon is not in the
/// table. An unknown tag is an error.
pub fn known_model(given: &str) -> Option<Result<ModelName, HubError>> {
    let lower = given.to_ascii_lowercase();
    let text = lower.strip_prefix("https://").unwrap_or(&lower);
    let text = LIBRARIES.iter().find_map(|library| text.strip_prefix(library)).unwrap_or(text);
    let (name, tag) = text.split_once(':').unwrap_or((text, DEFAULT_TAG));
    let tag = if tag == LATEST_TAG { DEFAULT_TAG } else { tag };
    let rows: Vec<_> = known_models().iter().filter(|row| row.name == name).collect();
    if rows.is_empty() {
        return None;
    }
    let row_of = |tag: &str| rows.iter().find(|row| row.tags.iter().any(|own| own == tag));
    let model = |row: &KnownModel, which| ModelName::of_repo(&row.repository).map(|name| name.with(which));
    let of_tag = || {
        let row = row_of(tag)?;
        model(row, Which::Pattern(row.file.clone()))
    };
    // 3b-instruct-q8_0: a size, a variant, and a type.
    let of_quant = || {
        let (size, quant) = tag.rsplit_once('-').unwrap_or((DEFAULT_TAG, tag));
        let plain = VARIANTS.iter().find_map(|variant| size.strip_suffix(variant)).unwrap_or(size);
        let quant = match quant.to_ascii_uppercase() {
            quant if quant == "FP16" => "F16".to_owned(),
            quant => quant,
        };
        let row = row_of(size).or_else(|| row_of(plain)).filter(|_| crate::choose::is_quant(&quant))?;
        model(row, Which::Quant(quant))
    };
    Some(of_tag().or_else(of_quant).ok_or_else(|| HubError::Tag {
        name: name.to_owned(),
        tag: if tag == DEFAULT_TAG { LATEST_TAG.to_owned() } else { tag.to_owned() },
        names: names(&rows),
    }))
}

/// Finds the well-known name that is most similar to `given`; `None` if none is similar enough.
pub fn similar_name(given: &str) -> Option<&'static str> {
    let text = given.to_ascii_lowercase();
    let text = text.split(':').next().unwrap_or_default();
    let nearness = |row: &'static KnownModel| (strsim::jaro_winkler(text, &row.name), row.name.as_str());
    let near = known_models().iter().map(nearness).filter(|(nearness, _)| *nearness > 0.85);
    near.max_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, name)| name)
}

/// The names with tags of these rows.
fn names(rows: &[&KnownModel]) -> Vec<String> {
    let one = |name: &str, tag: &str| if tag == DEFAULT_TAG { name.to_owned() } else { format!("{name}:{tag}") };
    rows.iter().flat_map(|row| row.tags.iter().map(|tag| one(&row.name, tag))).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_row_names_a_repository_and_a_file() {
        let mut seen = HashSet::new();
        for row in known_models() {
            assert!(ModelName::of_repo(&row.repository).is_some(), "{row:?}");
            assert!(row.file.contains(".gguf") && !row.seen.is_empty() && !row.tags.is_empty(), "{row:?}");
            assert!(["chat", "embedding", "rerank"].contains(&row.kind.as_str()), "{row:?}");
            assert!(row.name == row.name.to_ascii_lowercase(), "{row:?}");
            for name in names(&[row]) {
                let found = known_model(&name).unwrap().unwrap();
                assert_eq!(
                    (found.repo(), &found.which),
                    (&*row.repository, &Which::Pattern(row.file.clone())),
                    "{name}"
                );
                assert!(seen.insert(name), "{row:?}");
            }
        }
        assert!(seen.len() > 100);
    }

    #[test]
    fn names_have_tags_and_types() {
        let name = |given: &str| known_model(given).map(|found| found.map(|name| name.to_string()));
        for (given, expected) in [
            ("llama3.2", "hf:unsloth/Llama-3.2-3B-Instruct-GGUF:*Q4_K_M*.gguf"),
            ("Llama3.2:Latest", "hf:unsloth/Llama-3.2-3B-Instruct-GGUF:*Q4_K_M*.gguf"),
            ("library/llama3.2:3b", "hf:unsloth/Llama-3.2-3B-Instruct-GGUF:*Q4_K_M*.gguf"),
            (
                "https://ollama.com/library/llama3.2:1b",
                "hf:unsloth/Llama-3.2-1B-Instruct-GGUF:Llama-3.2-1B-Instruct-Q4_K_M.gguf",
            ),
            ("llama3.2:3b-instruct-q8_0", "hf:unsloth/Llama-3.2-3B-Instruct-GGUF:Q8_0"),
            ("llama3.2:1b-instruct-fp16", "hf:unsloth/Llama-3.2-1B-Instruct-GGUF:F16"),
            ("gemma4", "hf:ggml-org/gemma-4-E4B-it-GGUF:gemma-4-E4B-it-Q4_K_M.gguf"),
            ("qwen3.5:4b", "hf:unsloth/Qwen3.5-4B-GGUF:Qwen3.5-4B-Q4_K_M.gguf"),
            ("qwen3:4b-instruct-q4_k_m", "hf:unsloth/Qwen3-4B-Instruct-2507-GGUF:Q4_K_M"),
        ] {
            assert_eq!(name(given).unwrap().unwrap(), expected, "{given}");
        }
        assert!(name("llama9").is_none() && name("").is_none() && name("a/llama3.2").is_none());
        let error = name("llama3.2:70b").unwrap().unwrap_err().to_string();
        assert_eq!(error, "llama3.2 is not known with the tag 70b: there are llama3.2, llama3.2:3b, llama3.2:1b");
        assert!(name("granite4.1").unwrap().unwrap_err().to_string().contains("granite4.1:8b"));
    }

    #[test]
    fn near_names_are_found() {
        for (given, expected) in
            [("lama3.2", Some("llama3.2")), ("qwen3,5:4b", Some("qwen3.5")), ("Gemma-4", Some("gemma4")), ("xyz", None)]
        {
            assert_eq!(similar_name(given), expected, "{given}");
        }
    }
}
