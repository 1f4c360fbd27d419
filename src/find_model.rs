//! Finds the file of a model's name. All commands that take a model use it.
//!
//! A name is searched in this order: a file; an address on the hub; the folders of models; the well-known names; the cache
//! of the hub; the repositories of the hub.

use std::fs;
use std::path::{Path, PathBuf};

use metal_attention_hub::choose::{ModelFiles, Unchosen, choose, models};
use metal_attention_hub::{
    CachedModel, Environment, Hub, ModelName, Which, is_hub_address, is_mmproj, known_model, similar_name,
};

use crate::cli_error::CliError;
use crate::download_progress::DownloadProgress;
use crate::metadata_text::safe;

/// The environment variable with folders of models, separated as in `PATH`.
const FOLDERS: &str = "METAL_ATTENTION_MODELS";

/// LM Studio's folder of models in the user's home.
const LM_STUDIO: &str = ".lmstudio/models";

/// The depth of folders that are searched: LM Studio's have OWNER/REPO/FILE.gguf.
const MAX_DEPTH: usize = 3;

/// The largest number of files that are listed of a folder.
const MAX_FILES: usize = 20_000;

/// The location of a model.
#[derive(Debug, PartialEq)]
enum ModelLocation {
    /// A file on this machine.
    File(PathBuf),
    /// A repository of the hub; its files may be in the cache already.
    Hub(ModelName),
}

/// The path of the model's file, or of the first file of a split model. Downloads a model that is only on the hub. A path
/// that does not exist is returned as it is if it looks like one, so that opening it reports the error.
pub fn find(given: &Path) -> Result<PathBuf, CliError> {
    match locate(given)? {
        Some(ModelLocation::File(file)) => Ok(file),
        Some(ModelLocation::Hub(name)) => {
            download(&name).map_err(|error| CliError::of_model(&given.to_string_lossy(), &name, error))
        }
        // The error of opening it describes what the path is, or lists similar files.
        None if given.exists() || is_path(given) => Ok(given.to_owned()),
        None => Err(not_found(given)),
    }
}

/// Whether `word` names a model, including one that has to be downloaded or that turns out not to exist.
pub fn names_model(word: &str) -> bool {
    is_path(Path::new(word)) || !matches!(locate(Path::new(word)), Ok(None))
}

/// Whether `given` can only be a path: it ends in `.gguf`, or its folder exists.
fn is_path(given: &Path) -> bool {
    let in_folder = given.parent().is_some_and(|parent| parent != Path::new("") && parent.is_dir());
    in_folder || given.to_str().is_some_and(|text| is_gguf(text) && !is_hub_address(text))
}

/// Gets the model from the cache or the hub. Returns its first file.
fn download(name: &ModelName) -> Result<PathBuf, metal_attention_hub::HubError> {
    let mut model = Hub::new(Environment::read()?).get(name, &mut DownloadProgress::new())?;
    Ok(model.files.swap_remove(0))
}

/// The location of the model. `None`: not found. The order is that at the head of this file.
fn locate(given: &Path) -> Result<Option<ModelLocation>, CliError> {
    if given.exists() && !given.is_dir() {
        return Ok(Some(ModelLocation::File(given.to_owned())));
    }
    let Some(text) = given.to_str() else { return Ok(None) };
    if is_hub_address(text) {
        return Ok(Some(ModelLocation::Hub(text.parse()?)));
    }
    for folder in folders() {
        if let Some(file) = in_folder(&folder, text)? {
            return Ok(Some(ModelLocation::File(file)));
        }
    }
    if let Some(known) = known_model(text) {
        return Ok(Some(ModelLocation::Hub(known?)));
    }
    if let Some(name) = in_cache(text)? {
        return Ok(Some(ModelLocation::Hub(name)));
    }
    match text.parse() {
        Ok(name) if !is_path(given) => Ok(Some(ModelLocation::Hub(name))),
        Ok(_) | Err(_) => Ok(None),
    }
}

/// The folders of models that the environment names, else LM Studio's.
pub fn folders() -> Vec<PathBuf> {
    match std::env::var_os(FOLDERS) {
        Some(variable) => std::env::split_paths(&variable).filter(|folder| !folder.as_os_str().is_empty()).collect(),
        None => std::env::home_dir().map(|home| home.join(LM_STUDIO)).into_iter().collect(),
    }
}

/// The model called `text` in `folder`: its first file. An error if several models fit.
fn in_folder(folder: &Path, text: &str) -> Result<Option<PathBuf>, CliError> {
    let file = folder.join(text);
    if file.is_file() {
        return Ok(Some(file));
    }
    let (name, which) = name_and_type(text);
    let mut files = files_below(folder);
    files.retain(|file| is_called(file, name));
    match choose(&models(files.iter().map(|file| (file.as_str(), 0))), &which) {
        Ok(model) => Ok(Some(folder.join(&model.files[0]))),
        Err(Unchosen::Several) => Err(several(text, folder, &files)),
        Err(Unchosen::Missing) => Ok(None),
    }
}

/// The model called `text` in the cache of the hub, by the name of its repository or of its file. An error if models of
/// several repositories fit.
fn in_cache(text: &str) -> Result<Option<ModelName>, CliError> {
    let (name, which) = name_and_type(text);
    // An invalid environment variable is reported when the hub is needed.
    let Ok(environment) = Environment::read() else { return Ok(None) };
    let mut found = Hub::new(environment).models()?;
    found.retain(|model| {
        let file = model.files[0].file_name().unwrap_or_default().to_string_lossy();
        let fits = match &which {
            Which::Quant(quant) => model.quant.as_ref().is_some_and(|own| own.eq_ignore_ascii_case(quant)),
            Which::Default | Which::File(_) | Which::Pattern(_) => true,
        };
        is_usable(model) && fits && is_called(&format!("{}/{file}", model.name.repo()), name)
    });
    match &found[..] {
        [] => Ok(None),
        [one] => Ok(Some(one.name.clone())),
        // All are of one repository: the hub's rules choose among them.
        [first, ..] if found.iter().all(|model| model.name.repo() == first.name.repo()) => {
            Ok(Some(first.name.with(which)))
        }
        _ => {
            let list: Vec<_> = found.iter().map(|model| format!("\n  {}", safe(&model.name.to_string()))).collect();
            Err(CliError::Usage(format!(
                "several models in the cache are called {}; name one of them:{}",
                safe(text),
                list.concat()
            )))
        }
    }
}

/// Whether a model of the cache can be named: it is whole, of the newest commit, and no picture encoder.
pub fn is_usable(model: &CachedModel) -> bool {
    let file = model.files[0].file_name().unwrap_or_default().to_string_lossy();
    model.is_newest && model.complete && !is_mmproj(&file)
}

/// Splits `NAME:TYPE` into the name and the type.
fn name_and_type(text: &str) -> (&str, Which) {
    match text.rsplit_once(':') {
        Some((name, quant)) if !name.is_empty() && !quant.is_empty() => (name, Which::Quant(quant.to_owned())),
        _ => (text, Which::Default),
    }
}

/// Whether `name` is a name of `file`, a path with `/`. Its names, in upper or lower case, are: the path; the file's name,
/// also without the ending and without the type; the name of its folder; and OWNER/REPO of its two folders. `-GGUF` at the
/// end of each may be left out.
fn is_called(file: &str, name: &str) -> bool {
    let (folders, file_name) = file.rsplit_once('/').unwrap_or(("", file));
    let stem = without_part(file_name);
    let quant = models([(file_name, 0)]).pop().and_then(|model| model.quant).unwrap_or_default();
    // One character, - or a dot, separates the type.
    let at = stem.len().checked_sub(quant.len() + 1).filter(|_| !quant.is_empty());
    let plain = at.and_then(|at| stem.get(..at)).unwrap_or(stem);
    let folder = folders.rsplit('/').next().unwrap_or_default();
    let mut owner_and_repo = folders.rsplitn(3, '/');
    let (repo, owner) = (owner_and_repo.next().unwrap_or_default(), owner_and_repo.next());
    let both = owner.map(|owner| format!("{owner}/{repo}")).unwrap_or_default();
    [file, file_name, stem, plain, folder, &both].into_iter().filter(|own| !own.is_empty()).any(|own| {
        own.eq_ignore_ascii_case(name)
            || own.len().checked_sub(5).is_some_and(|at| {
                own.is_char_boundary(at)
                    && own[at..].eq_ignore_ascii_case("-gguf")
                    && own[..at].eq_ignore_ascii_case(name)
            })
    })
}

/// The GGUF files in `folder` and below it, at most [`MAX_DEPTH`] folders deep and [`MAX_FILES`], sorted; with `/` between
/// folders. A folder that cannot be read has no files.
pub fn files_below(folder: &Path) -> Vec<String> {
    fn add(folder: &Path, name: &str, depth: usize, files: &mut Vec<String>) {
        let Ok(entries) = fs::read_dir(folder) else { return };
        for entry in entries.flatten() {
            let Ok(own) = entry.file_name().into_string() else { continue };
            let name = if name.is_empty() { own } else { format!("{name}/{own}") };
            if files.len() >= MAX_FILES {
                return;
            }
            let path = entry.path();
            if path.is_dir() {
                if depth > 1 {
                    add(&path, &name, depth - 1, files);
                }
            } else if is_gguf(&name) {
                files.push(name);
            }
        }
    }
    let mut files = Vec::new();
    add(folder, "", MAX_DEPTH, &mut files);
    files.sort_unstable();
    files
}

/// Whether a name ends in `.gguf`.
pub fn is_gguf(text: &str) -> bool {
    without_ending(text).len() < text.len()
}

/// A file's name without `.gguf`.
pub fn without_ending(name: &str) -> &str {
    let at = name.len().saturating_sub(".gguf".len());
    match name.get(at..) {
        Some(ending) if ending.eq_ignore_ascii_case(".gguf") => &name[..at],
        _ => name,
    }
}

/// A file's name without `.gguf`; the first part of a split model also without the part's number.
pub fn without_part(name: &str) -> &str {
    let stem = without_ending(name);
    stem.split_once("-00001-of-").map_or(stem, |(stem, _)| stem)
}

/// The error for a folder in which more than one model has the name.
fn several(given: &str, folder: &Path, files: &[String]) -> CliError {
    let list: Vec<String> = models(files.iter().map(|file| (file.as_str(), 0)))
        .iter()
        .take(100)
        .map(|model: &ModelFiles| format!("\n  {}", safe(&folder.join(&model.files[0]).display().to_string())))
        .collect();
    CliError::Usage(format!("{} may be several models; name one of these files:{}", safe(given), list.concat()))
}

/// The error for a name that was not found. It lists commands that download such a model.
pub fn not_found(given: &Path) -> CliError {
    let text = given.to_string_lossy();
    let shown = safe(&text);
    let stem = without_ending(text.rsplit(['/', '\\']).next().unwrap_or(&text));
    let is_name = !stem.is_empty() && stem.chars().all(|c| c.is_ascii_alphanumeric() || "-_.:".contains(c));
    let known = similar_name(stem);
    let maybe = known.map_or(String::new(), |name| format!(" (did you mean {name}?)"));
    let search = if is_name { format!("?search={}", stem.split(':').next().unwrap_or(stem)) } else { String::new() };
    CliError::NoModel(format!(
        "no such file: {shown}, and no model has this name, neither in the cache or {FOLDERS} nor among the well-known \
         ones{maybe}. What gets one:\n  metal-attention pull {:<12}  a well-known model\n  metal-attention pull OWNER/REPO    one of \
         https://huggingface.co/models{search}",
        known.unwrap_or("llama3.2")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_by_their_names_and_their_folders() {
        let file = "unsloth/Qwen3-4B-GGUF/Qwen3-4B-UD-Q4_K_XL.gguf";
        for name in [
            "Qwen3-4B-UD-Q4_K_XL.gguf",
            "qwen3-4b-ud-q4_k_xl",
            "Qwen3-4B",
            "qwen3-4b-gguf",
            "unsloth/qwen3-4b",
            "unsloth/Qwen3-4B-GGUF",
            file,
        ] {
            assert!(is_called(file, name), "{name}");
        }
        for name in ["Qwen3", "Q4_K_XL", "unsloth", "", "Qwen3-4B-UD"] {
            assert!(!is_called(file, name), "{name}");
        }
        assert!(
            is_called("m-Q8_0-00001-of-00002.gguf", "m") && is_called("m.gguf", "M") && is_called("m.Q8_0.gguf", "m")
        );
    }

    #[test]
    fn a_folder_of_models_has_them_by_name_and_type() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            path
        };
        let (q4, q8) = (write("a/Tiny-GGUF/tiny-Q4_K_M.gguf"), write("a/Tiny-GGUF/tiny-Q8_0.gguf"));
        let (plain, _) = (write("plain.gguf"), write("b/c/d/too-deep.gguf"));
        let (one, two) = (write("x/same-Q2_K.gguf"), write("y/same-Q3_K.gguf"));
        let find = |text: &str| in_folder(folder.path(), text);
        assert_eq!(find("tiny").unwrap(), Some(q4.clone()));
        assert_eq!(find("a/tiny:q8_0").unwrap(), Some(q8));
        assert_eq!(find("Tiny-GGUF").unwrap(), Some(q4));
        assert_eq!(find("plain").unwrap(), Some(plain));
        for nowhere in ["too-deep", "tiny:Q2_K", "tin"] {
            assert_eq!(find(nowhere).unwrap(), None, "{nowhere}");
        }
        let error = find("same").unwrap_err().to_string();
        let listed = [one, two].map(|path| format!("\n  {}", path.display())).concat();
        assert_eq!(error, format!("same may be several models; name one of these files:{listed}"));
    }

    #[test]
    fn the_error_for_an_unknown_name_lists_commands_that_download_it() {
        let error = |name: &str| not_found(Path::new(name)).to_string();
        let text = error("lama3.2");
        assert!(text.starts_with("no such file: lama3.2, and no model has this name"), "{text}");
        assert!(text.contains("did you mean llama3.2?") && text.contains("metal-attention pull llama3.2 "), "{text}");
        assert!(text.contains("pull OWNER/REPO ") && text.contains("models?search=lama3.2"), "{text}");
        assert_eq!(not_found(Path::new("lama3.2")).exit_code(), 3);
    }
}
