//! Names of models on the hub: `OWNER/REPO`, `OWNER/REPO:QUANT`, `OWNER/REPO:FILE`.

use std::fmt;
use std::str::FromStr;

use crate::HubError;

/// What marks a name where a path could stand, too: `-m hf:OWNER/REPO`.
pub const PREFIX: &str = "hf:";

/// A model on the hub. Parses from `OWNER/REPO[:QUANT or FILE]`, with or without `hf:` before it, and is written with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelName {
    /// `OWNER/REPO`: two plain names.
    repo: String,
    /// Which model of the repository.
    pub which: Which,
}

/// Which of a repository's models is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    /// The usual one, see [`choose`](crate::choose::choose).
    Default,
    /// The one of this type, such as `Q4_0`, in upper or lower case.
    Quant(String),
    /// The one that this file, or this part of several, belongs to.
    File(String),
}

impl ModelName {
    /// `OWNER/REPO`.
    pub fn repo(&self) -> &str {
        &self.repo
    }

    /// Another model of the same repository.
    #[must_use]
    pub fn with(&self, which: Which) -> Self {
        Self { repo: self.repo.clone(), which }
    }

    /// The name of a repository's usual model; `None` where `repo` is not `OWNER/REPO`.
    pub(crate) fn of_repo(repo: &str) -> Option<Self> {
        let (owner, name) = repo.split_once('/')?;
        let fits = is_plain(owner) && is_plain(name);
        fits.then(|| Self { repo: repo.to_owned(), which: Which::Default })
    }
}

impl FromStr for ModelName {
    type Err = HubError;

    fn from_str(given: &str) -> Result<Self, HubError> {
        let error = |problem| HubError::Name { name: given.to_owned(), problem };
        let text = given.strip_prefix(PREFIX).unwrap_or(given);
        let (repo, which) = match text.split_once(':') {
            None => (text, Which::Default),
            Some((_, "")) => return Err(error("there is nothing after the colon")),
            Some((repo, file)) if is_gguf(file) => {
                if !is_inside(file) {
                    return Err(error("the file is not inside the repository"));
                }
                (repo, Which::File(file.to_owned()))
            }
            Some((_, quant)) if quant.contains('/') => return Err(error("the file does not end in .gguf")),
            Some((repo, quant)) => (repo, Which::Quant(quant.to_owned())),
        };
        let name = Self::of_repo(repo).ok_or_else(|| error("it is not OWNER/REPO"))?;
        Ok(name.with(which))
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.repo)?;
        match &self.which {
            Which::Default => Ok(()),
            Which::Quant(which) | Which::File(which) => write!(f, ":{which}"),
        }
    }
}

/// Whether a file is of the format that is looked for.
pub(crate) fn is_gguf(file: &str) -> bool {
    file.len() > 5 && file.as_bytes()[file.len() - 5..].eq_ignore_ascii_case(b".gguf")
}

/// Whether a file's name, `/` between folders, stays inside the folder that it is put in, on any system.
pub(crate) fn is_inside(file: &str) -> bool {
    let plain = |part: &str| !matches!(part, "" | "." | "..");
    file.split('/').all(plain) && !file.contains(|c: char| c.is_control() || matches!(c, '\\' | ':'))
}

/// Whether this can be an owner's or a repository's name. `--` stands for `/` in names of the cache's folders.
fn is_plain(name: &str) -> bool {
    let letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !name.is_empty()
        && name.len() <= 96
        && name.chars().all(letter)
        && !name.starts_with(['.', '-'])
        && !name.contains("--")
        && !name.contains("..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_three_forms() {
        for (text, which) in [
            ("hf:ggml-org/models", Which::Default),
            ("ggml-org/models", Which::Default),
            ("hf:ggml-org/models:q4_k_m", Which::Quant("q4_k_m".into())),
            ("ggml-org/models:tiny/a-00001-of-00002.GGUF", Which::File("tiny/a-00001-of-00002.GGUF".into())),
        ] {
            let name: ModelName = text.parse().unwrap();
            assert_eq!((name.repo(), &name.which), ("ggml-org/models", &which));
            assert_eq!(name.to_string(), format!("hf:{}", text.trim_start_matches("hf:")));
        }
    }

    #[test]
    fn other_names_are_refused() {
        for (text, part) in [
            ("gpt2", "OWNER/REPO"),
            ("hf:", "OWNER/REPO"),
            ("a/b/c", "OWNER/REPO"),
            ("../b", "OWNER/REPO"),
            ("a/..", "OWNER/REPO"),
            ("a/b--c", "OWNER/REPO"),
            ("a/b c", "OWNER/REPO"),
            ("a/b:", "after the colon"),
            ("a/b:../c.gguf", "not inside"),
            ("a/b:/c.gguf", "not inside"),
            ("a/b:C:\\c.gguf", "not inside"),
            ("a/b:c/d.bin", ".gguf"),
        ] {
            let error = text.parse::<ModelName>().unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(&format!("{text:?}")), "{error}");
        }
    }
}
