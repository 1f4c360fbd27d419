//! Names of models on the hub: `OWNER/REPO`, `OWNER/REPO:QUANT`, `OWNER/REPO:FILE`, and addresses of pages and files.

use std::fmt;
use std::str::FromStr;

use percent_encoding::percent_decode_str;

use crate::HubError;
use crate::known::known_model;

/// The prefix of a hub name where a path is also possible: `-m hf:OWNER/REPO`.
pub const PREFIX: &str = "hf:";

/// Other prefixes of `OWNER/REPO`, the longer ones first.
const ADDRESSES: [&str; 9] = [
    "https://huggingface.co/",
    "https://www.huggingface.co/",
    "https://hf.co/",
    "http://huggingface.co/",
    "http://hf.co/",
    "huggingface.co/",
    "www.huggingface.co/",
    "hf.co/",
    "hf://",
];

/// The only revision of a repository that a name can have.
const REVISION: &str = "main";

/// A model on the hub. Parses from `OWNER/REPO[:QUANT or FILE]` with or without `hf:` or `hf.co/`, from the address of
/// a repository or a file (`https://huggingface.co/OWNER/REPO/blob/main/FILE.gguf`), and from a [well-known
/// name](crate::known_models). Displayed with `hf:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelName {
    /// `OWNER/REPO`.
    repo: String,
    /// The model of the repository.
    pub which: Which,
}

/// Selects one of a repository's models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    /// The usual one, see [`choose`](crate::choose::choose).
    Default,
    /// The one of this tensor type, such as `Q4_0`, in upper or lower case.
    Quant(String),
    /// The one with this file.
    File(String),
    /// The one with a file whose name matches, in upper or lower case; `*` stands for any text. A plain type is
    /// preferred to a dynamic one (`UD-`), and auxiliary files are ignored.
    Pattern(String),
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
        if let Some(known) = known_model(given) {
            return known;
        }
        let text = given.strip_prefix(PREFIX).filter(|text| !text.starts_with("//")).unwrap_or(given);
        if let Some(rest) = after_address(text) {
            return of_address(rest).map_err(error);
        }
        let (repo, which) = match text.split_once(':') {
            None => (text, Which::Default),
            Some((_, "")) => return Err(error("there is nothing after the colon")),
            Some((repo, file)) if is_gguf(file) => {
                if !is_inside(file) {
                    return Err(error("the file is not inside the repository"));
                }
                (repo, which_file(file))
            }
            Some((_, quant)) if quant.contains('/') => return Err(error("the file does not end in .gguf")),
            Some((repo, quant)) => (repo, Which::Quant(quant.to_owned())),
        };
        let name = Self::of_repo(repo).ok_or_else(|| error("it is not OWNER/REPO"))?;
        Ok(name.with(which))
    }
}

/// Whether `text` can only be a name of the hub, not of a file: it starts with `hf:`, `hf.co/` or the address.
pub fn is_hub_address(text: &str) -> bool {
    text.starts_with(PREFIX) || after_address(text).is_some()
}

/// The part after the hub's address, without the parameters of a link; `None` if there is no address.
fn after_address(text: &str) -> Option<&str> {
    let rest = ADDRESSES.iter().find_map(|address| text.strip_prefix(address))?;
    Some(rest.split(['?', '#']).next().unwrap_or(rest).trim_end_matches('/'))
}

/// Parses `OWNER/REPO[:QUANT or FILE]`, or the path of a page or a file.
fn of_address(rest: &str) -> Result<ModelName, &'static str> {
    let mut parts = rest.splitn(3, '/');
    let (Some(owner), Some(repo)) = (parts.next(), parts.next()) else { return Err("it is not OWNER/REPO") };
    let Some(path) = parts.next() else {
        let (repo, which) = match repo.split_once(':') {
            None => (repo, Which::Default),
            Some((_, "")) => return Err("there is nothing after the colon"),
            Some((repo, file)) if is_gguf(file) => (repo, which_file(file)),
            Some((repo, quant)) => (repo, Which::Quant(quant.to_owned())),
        };
        let name = ModelName::of_repo(&format!("{owner}/{repo}")).ok_or("it is not OWNER/REPO")?;
        return Ok(name.with(which));
    };
    // After a colon, a file may be in a folder, too.
    if let Some((repo, folder)) = repo.split_once(':') {
        let file = format!("{folder}/{path}");
        let name = ModelName::of_repo(&format!("{owner}/{repo}")).ok_or("it is not OWNER/REPO")?;
        return if is_gguf(&file) && is_inside(&file) {
            Ok(name.with(which_file(&file)))
        } else {
            Err("the file does not end in .gguf")
        };
    }
    let name = ModelName::of_repo(&format!("{owner}/{repo}")).ok_or("it is not OWNER/REPO")?;
    let mut parts = path.splitn(3, '/');
    let (view, revision, file) = (parts.next().unwrap_or_default(), parts.next(), parts.next());
    if revision.is_some_and(|revision| revision != REVISION) {
        return Err("only the newest version of a repository, main, can be named");
    }
    match (view, file) {
        ("tree", None) => Ok(name),
        ("blob" | "resolve" | "raw", Some(file)) => {
            let file = percent_decode_str(file).decode_utf8().map_err(|_| "the file's name is not UTF-8")?;
            if !is_gguf(&file) {
                Err("the file does not end in .gguf")
            } else if !is_inside(&file) {
                Err("the file is not inside the repository")
            } else {
                Ok(name.with(Which::File(file.into_owned())))
            }
        }
        _ => Err("it is the address of neither a repository nor a file of one"),
    }
}

/// A file, or a pattern of file names.
fn which_file(file: &str) -> Which {
    if file.contains('*') { Which::Pattern(file.to_owned()) } else { Which::File(file.to_owned()) }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.repo)?;
        match &self.which {
            Which::Default => Ok(()),
            Which::Quant(which) | Which::File(which) | Which::Pattern(which) => write!(f, ":{which}"),
        }
    }
}

/// Whether a file is GGUF, by its extension.
pub(crate) fn is_gguf(file: &str) -> bool {
    file.len() > 5 && file.as_bytes()[file.len() - 5..].eq_ignore_ascii_case(b".gguf")
}

/// Whether a file's name, `/` between folders, stays inside its folder on any system.
pub(crate) fn is_inside(file: &str) -> bool {
    let plain = |part: &str| !matches!(part, "" | "." | "..");
    file.split('/').all(plain) && !file.contains(|c: char| c.is_control() || matches!(c, '\\' | ':'))
}

/// Whether `name` can be that of an owner or a repository. `--` stands for `/` in the cache's folder names.
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
    fn addresses_name_repositories_and_files() {
        for (text, expected) in [
            ("hf.co/a/b", "hf:a/b"),
            ("hf.co/a/b:Q4_0", "hf:a/b:Q4_0"),
            ("hf.co/a/b:c/d.gguf", "hf:a/b:c/d.gguf"),
            ("hf:hf.co/a/b", "hf:a/b"),
            ("hf://a/b", "hf:a/b"),
            ("huggingface.co/a/b/", "hf:a/b"),
            ("https://huggingface.co/a/b", "hf:a/b"),
            ("https://huggingface.co/a/b/tree/main", "hf:a/b"),
            ("https://huggingface.co/a/b?library=gguf#x", "hf:a/b"),
            ("https://huggingface.co/a/b/blob/main/c.gguf", "hf:a/b:c.gguf"),
            ("https://huggingface.co/a/b/resolve/main/c/d%20e.gguf?download=true", "hf:a/b:c/d e.gguf"),
            ("a/b:*q4*.gguf", "hf:a/b:*q4*.gguf"),
        ] {
            let name: ModelName = text.parse().unwrap();
            assert_eq!(name.to_string(), expected, "{text}");
            assert_eq!(expected.parse::<ModelName>().unwrap(), name);
        }
        assert_eq!("a/b:*q4*.gguf".parse::<ModelName>().unwrap().which, Which::Pattern("*q4*.gguf".into()));
        assert!(is_hub_address("hf:a/b") && is_hub_address("hf.co/a/b") && !is_hub_address("a/b"));
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
            ("hf.co/a", "OWNER/REPO"),
            ("hf.co/a/b:", "after the colon"),
            ("https://huggingface.co/a/b/blob/v2/c.gguf", "main"),
            ("https://huggingface.co/a/b/blob/main/c.safetensors", ".gguf"),
            ("https://huggingface.co/a/b/resolve/main/..%2Fc.gguf", "not inside"),
            ("https://huggingface.co/a/b/discussions", "neither a repository nor a file"),
            ("https://huggingface.co/a/b/blob/main", "neither a repository nor a file"),
        ] {
            let error = text.parse::<ModelName>().unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(&format!("{text:?}")), "{error}");
        }
    }
}
