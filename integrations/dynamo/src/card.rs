//! The folder from which Dynamo's frontend reads the model card: tokenizer, chat template and special tokens.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use dynamo_kv_router::protocols::compute_block_hash;
use metal_attention::Model;

/// The files that the frontend needs.
const NEEDED: [&str; 2] = ["config.json", "tokenizer.json"];

/// A folder with the files of a model card, as models on the hub have them.
#[derive(Debug, Clone)]
pub struct ModelCardFolder<'a> {
    /// The path of the folder.
    folder: &'a Path,
}

/// The error for a missing file.
#[derive(Debug)]
pub struct MissingFile {
    /// The path of the folder.
    folder: String,
    /// The name of the file.
    file: &'static str,
}

impl std::fmt::Display for MissingFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { folder, file } = self;
        write!(f, "{folder} has no {file}: `metal-attention export-tokenizer -m MODEL {folder}` makes such a folder")
    }
}

impl std::error::Error for MissingFile {}

impl<'a> ModelCardFolder<'a> {
    /// The card in `folder`. An error if a needed file is missing.
    pub fn open(folder: &'a Path) -> Result<Self, MissingFile> {
        match NEEDED.into_iter().find(|file| !folder.join(file).is_file()) {
            Some(file) => Err(MissingFile { folder: folder.display().to_string(), file }),
            None => Ok(Self { folder }),
        }
    }

    /// Whether it has a chat template.
    pub fn has_chat_template(&self) -> bool {
        let in_config = || {
            let config = std::fs::read(self.folder.join("tokenizer_config.json")).ok()?;
            let config: serde_json::Value = serde_json::from_slice(&config).ok()?;
            Some(!config.get("chat_template")?.is_null())
        };
        let files = ["chat_template.jinja", "chat_template.json"];
        files.iter().any(|file| self.folder.join(file).is_file()) || in_config().unwrap_or(false)
    }
}

/// Writes the card of `model`, called `name`, to a folder below `cache`, and returns the folder. Its path contains a hash of the
/// contents, because Dynamo's frontend compares paths and contents of workers that serve the same model.
pub fn export(model: &Model, name: &str, cache: &Path) -> anyhow::Result<PathBuf> {
    let files = model.tokenizer()?.export(model.gguf().metadata())?;
    let all: Vec<u8> =
        files.iter().flat_map(|file| [file.name, "\0", &file.text, "\0"].concat().into_bytes()).collect();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let name: String = name.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
    let folder = cache.join(format!("{name}-{:016x}", compute_block_hash(&all).0));
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    for file in files {
        // Another worker may write the same file at the same time, so it is renamed when complete.
        let path = folder.join(file.name);
        let partial = folder.join(format!(".{}.{}", file.name, std::process::id()));
        std::fs::write(&partial, &file.text)
            .and_then(|()| std::fs::rename(&partial, &path))
            .with_context(|| path.display().to_string())?;
    }
    Ok(folder)
}

/// The user's cache folder for cards.
pub fn cache() -> anyhow::Result<PathBuf> {
    let named = |variable: &str| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")));
    let cache = cache.ok_or_else(|| anyhow!("there is no home for the model's card: give a folder by --tokenizer"))?;
    Ok(cache.join("metal-attention").join("dynamo"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_of_one_model_share_the_folder_of_its_card() {
        let cache = tempfile::tempdir().unwrap();
        let model = Model::built_in().unwrap();
        let folder = export(&model, "a/b c", cache.path()).unwrap();
        assert!(folder.file_name().unwrap().to_str().unwrap().starts_with("a_b_c-"));
        ModelCardFolder::open(&folder).unwrap();
        let files = || std::fs::read_dir(&folder).unwrap().count();
        let n = files();
        assert_eq!(export(&model, "a/b c", cache.path()).unwrap(), folder);
        assert_eq!(files(), n);
    }

    #[test]
    fn a_card_has_its_files_and_perhaps_a_template() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let missing =
            |file: &str| ModelCardFolder::open(folder).unwrap_err().to_string().contains(&format!("has no {file}"));
        assert!(missing("config.json"));
        std::fs::write(folder.join("config.json"), "{}").unwrap();
        assert!(missing("tokenizer.json"));
        std::fs::write(folder.join("tokenizer.json"), "{}").unwrap();
        let has_template = || ModelCardFolder::open(folder).unwrap().has_chat_template();
        assert!(!has_template());
        let config = folder.join("tokenizer_config.json");
        for (text, expected) in [("{", false), ("{}", false), (r#"{"chat_template": null}"#, false)] {
            std::fs::write(&config, text).unwrap();
            assert_eq!(has_template(), expected);
        }
        std::fs::write(&config, r#"{"chat_template": "{{ messages }}"}"#).unwrap();
        assert!(has_template());
        std::fs::remove_file(&config).unwrap();
        std::fs::write(folder.join("chat_template.jinja"), "").unwrap();
        assert!(has_template());
    }
}
