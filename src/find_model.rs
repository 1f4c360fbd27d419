//! Which file a model's name means. Every command that takes a model finds it here.

use std::fs;
use std::path::{Path, PathBuf};

use metal_attention_hub::choose::{ModelFiles, Unchosen, choose, models};
use metal_attention_hub::{Environment, Hub, ModelName, Which, is_hub_address, known_model, similar_name};

use crate::cli_error::CliError;
use crate::download_progress::DownloadProgress;
use crate::metadata_text::safe;

/// Folders with models, separated as those of `PATH` are.
const FOLDERS: &str = "METAL_ATTENTION_MODELS";

/// LM Studio's folder of models in the user's home.
const LM_STUDIO: &str = ".lmstudio/models";

/// Folders in folders that are searched: LM Studio's are OWNER/REPO/FILE.gguf.
const MAX_DEPTH: usize = 3;

/// Files of a folder that are looked at.
const MAX_FILES: usize = 20_000;

/// Where a model is.
#[derive(Debug, PartialEq)]
enum Place {
    /// A file on this machine.
    File(PathBuf),
    /// The hub, or the cache of what came from it.
    Hub(ModelName),
}

/// The model's file, or the first one of a split model. What is on the hub only is downloaded.
pub fn find(given: &Path) -> Result<PathBuf, CliError> {
    match place(given)? {
        Some(Place::File(file)) => Ok(file),
        Some(Place::Hub(name)) => {
            download(&name).map_err(|error| CliError::of_model(&given.to_string_lossy(), &name, error))
        }
        // Opening it says what it is instead of a file, or what similar files there are.
        None if given.exists() || is_path(given) => Ok(given.to_owned()),
        None => Err(nowhere(given)),
    }
}

/// Whether `word` names a model, even one that has to be downloaded, or one that cannot be had.
pub fn names_model(word: &str) -> bool {
    is_path(Path::new(word)) || !matches!(place(Path::new(word)), Ok(None))
}

/// Whether this can only be a file's name: it has the ending of one, or it is in a folder that there is.
fn is_path(given: &Path) -> bool {
    let in_folder = given.parent().is_some_and(|parent| parent != Path::new("") && parent.is_dir());
    in_folder || given.to_str().is_some_and(|text| is_gguf(text) && !is_hub_address(text))
}

fn download(name: &ModelName) -> Result<PathBuf, metal_attention_hub::HubError> {
    let mut model = Hub::new(Environment::read()?).get(name, &mut DownloadProgress::new())?;
    Ok(model.files.swap_remove(0))
}

/// Where the model is; `None`: nowhere. A file comes first, then what can only be a name on the hub, then the folders
/// of models, well-known names, the cache, and names on the hub.
fn place(given: &Path) -> Result<Option<Place>, CliError> {
    if given.exists() && !given.is_dir() {
        return Ok(Some(Place::File(given.to_owned())));
    }
    let Some(text) = given.to_str() else { return Ok(None) };
    if is_hub_address(text) {
        return Ok(Some(Place::Hub(text.parse()?)));
    }
    for folder in folders() {
        if let Some(file) = in_folder(&folder, text)? {
            return Ok(Some(Place::File(file)));
        }
    }
    if let Some(known) = known_model(text) {
        return Ok(Some(Place::Hub(known?)));
    }
    if let Some(name) = in_cache(text)? {
        return Ok(Some(Place::Hub(name)));
    }
    match text.parse() {
        Ok(name) if !is_path(given) => Ok(Some(Place::Hub(name))),
        Ok(_) | Err(_) => Ok(None),
    }
}

/// The folders that the environment names, else LM Studio's.
fn folders() -> Vec<PathBuf> {
    match std::env::var_os(FOLDERS) {
        Some(variable) => std::env::split_paths(&variable).filter(|folder| !folder.as_os_str().is_empty()).collect(),
        None => std::env::home_dir().map(|home| home.join(LM_STUDIO)).into_iter().collect(),
    }
}

/// The model of this name in a folder of models.
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

/// The model of this name in the cache of the hub: that of a repository or a file.
fn in_cache(text: &str) -> Result<Option<ModelName>, CliError> {
    let (name, which) = name_and_type(text);
    // A variable that cannot be used is told where the hub is needed.
    let Ok(environment) = Environment::read() else { return Ok(None) };
    let mut found = Hub::new(environment).models()?;
    found.retain(|model| {
        let file = model.files[0].file_name().unwrap_or_default().to_string_lossy();
        let fits = match &which {
            Which::Quant(quant) => model.quant.as_ref().is_some_and(|own| own.eq_ignore_ascii_case(quant)),
            Which::Default | Which::File(_) | Which::Pattern(_) => true,
        };
        model.is_newest && model.complete && fits && is_called(&format!("{}/{file}", model.name.repo()), name)
    });
    match &found[..] {
        [] => Ok(None),
        [one] => Ok(Some(one.name.clone())),
        // One repository's models: the hub's rules choose.
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

/// A name, and the type after the colon.
fn name_and_type(text: &str) -> (&str, Which) {
    match text.rsplit_once(':') {
        Some((name, quant)) if !name.is_empty() && !quant.is_empty() => (name, Which::Quant(quant.to_owned())),
        _ => (text, Which::Default),
    }
}

/// Whether a file, with the folders it is in, has this name: its own, with or without its ending and its type, that of its
/// folder, or those of both folders, with or without `-GGUF`; in upper or lower case.
fn is_called(file: &str, name: &str) -> bool {
    let (folders, file_name) = file.rsplit_once('/').unwrap_or(("", file));
    let stem = without_part(file_name);
    let quant = models([(file_name, 0)]).pop().and_then(|model| model.quant).unwrap_or_default();
    // The character before the type is - or a dot.
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

/// GGUF files in a folder and those below it, `/` between folders.
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

fn is_gguf(text: &str) -> bool {
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

/// A file's name without `.gguf` and, of the first part of a split model, without the part's number.
pub fn without_part(name: &str) -> &str {
    let stem = without_ending(name);
    stem.split_once("-00001-of-").map_or(stem, |(stem, _)| stem)
}

/// The error of a folder where more than one model fits.
fn several(given: &str, folder: &Path, files: &[String]) -> CliError {
    let list: Vec<String> = models(files.iter().map(|file| (file.as_str(), 0)))
        .iter()
        .take(100)
        .map(|model: &ModelFiles| format!("\n  {}", safe(&folder.join(&model.files[0]).display().to_string())))
        .collect();
    CliError::Usage(format!("{} may be several models; name one of these files:{}", safe(given), list.concat()))
}

/// The error of a name that is nowhere, with what would get such a model.
pub fn nowhere(given: &Path) -> CliError {
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
    fn files_are_called_by_their_names_and_their_folders() {
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
    fn a_name_that_is_nowhere_has_the_commands_that_get_it() {
        let error = |name: &str| nowhere(Path::new(name)).to_string();
        let text = error("lama3.2");
        assert!(text.starts_with("no such file: lama3.2, and no model has this name"), "{text}");
        assert!(text.contains("did you mean llama3.2?") && text.contains("metal-attention pull llama3.2 "), "{text}");
        assert!(text.contains("pull OWNER/REPO ") && text.contains("models?search=lama3.2"), "{text}");
        assert_eq!(nowhere(Path::new("lama3.2")).exit_code(), 3);
    }
}
