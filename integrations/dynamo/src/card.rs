//! The folder from which Dynamo's frontend knows the model: its tokenizer, its chat template, its special tokens.

use std::path::Path;

/// Files without which the frontend cannot do.
const NEEDED: [&str; 2] = ["config.json", "tokenizer.json"];

/// A folder with a file for each thing to know, as models on the hub have them.
#[derive(Debug, Clone)]
pub struct Card<'a> {
    folder: &'a Path,
}

/// A file that is not there.
#[derive(Debug)]
pub struct MissingFile {
    folder: String,
    file: &'static str,
}

impl std::fmt::Display for MissingFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { folder, file } = self;
        write!(f, "{folder} has no {file}: `metal-attention export-tokenizer -m MODEL {folder}` makes such a folder")
    }
}

impl std::error::Error for MissingFile {}

impl<'a> Card<'a> {
    /// The card in `folder`, with all that is needed.
    pub fn open(folder: &'a Path) -> Result<Self, MissingFile> {
        match NEEDED.into_iter().find(|file| !folder.join(file).is_file()) {
            Some(file) => Err(MissingFile { folder: folder.display().to_string(), file }),
            None => Ok(Self { folder }),
        }
    }

    /// Whether there is a template for conversations.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_has_its_files_and_perhaps_a_template() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let missing = |file: &str| Card::open(folder).unwrap_err().to_string().contains(&format!("has no {file}"));
        assert!(missing("config.json"));
        std::fs::write(folder.join("config.json"), "{}").unwrap();
        assert!(missing("tokenizer.json"));
        std::fs::write(folder.join("tokenizer.json"), "{}").unwrap();
        let has_template = || Card::open(folder).unwrap().has_chat_template();
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
