//! Finds the `mmproj` file of a model, which encodes pictures: among the files beside the model, or in the cache of the hub among
//! those of its repository.

use std::fs;
use std::path::{Path, PathBuf};

use metal_attention::gguf::Metadata;
use metal_attention_hub::{choose_mmproj, is_mmproj};

use crate::cli_error::CliError;
use crate::find_model::{files_below, is_gguf};
use crate::map_gguf::map_gguf;

/// The folder of a repository's commits in the hub's cache.
const SNAPSHOTS: &str = "snapshots";
/// The start of the name of a repository's folder in the hub's cache, `models--OWNER--REPO`.
const REPOSITORY: &str = "models--";

/// The `mmproj` file of the model whose (first) file is `model`; `None` if there is none. Files whose rows have another width than
/// the model's are left out; of the others the name decides, see [`choose_mmproj`].
///
/// # Errors
///
/// Several files fit equally; the error lists them.
pub fn find_mmproj(model: &Path) -> Result<Option<PathBuf>, CliError> {
    for (folder, name, files) in places(model) {
        let mut found: Vec<(String, u64)> = Vec::new();
        for file in files.into_iter().filter(|file| is_mmproj(file) && *file != name) {
            let bytes = fs::metadata(folder.join(&file)).map_or(0, |metadata| metadata.len());
            found.push((file, bytes));
        }
        let width = if found.is_empty() { None } else { metadata(model).as_ref().and_then(text_width) };
        found.retain(|(file, _)| {
            let own = metadata(&folder.join(file)).as_ref().and_then(picture_width);
            width.is_none() || own.is_none() || own == width
        });
        let files: Vec<_> = found.iter().map(|(file, bytes)| (file.as_str(), *bytes)).collect();
        match choose_mmproj(&name, &files) {
            Ok(None) => {}
            Ok(Some(file)) => return Ok(Some(folder.join(file))),
            Err(equals) => {
                let list: Vec<String> = equals.iter().map(|file| folder.join(file).display().to_string()).collect();
                return Err(CliError::Usage(format!(
                    "several mmproj files fit the model's name; name one with --mmproj:\n  {}",
                    list.join("\n  ")
                )));
            }
        }
    }
    Ok(None)
}

/// The error for a model without an `mmproj` file. `given`: the model's name as the user gave it; `model`: its file, `None` for the
/// built-in model.
pub fn no_mmproj(given: &Path, model: Option<&Path>) -> CliError {
    let repository = model.and_then(snapshot).and_then(|folder| folder.ancestors().nth(2)?.file_name()?.to_str());
    let Some(repository) = repository else {
        return CliError::Usage(
            "this model sees no pictures: there is no mmproj file beside it; name the file with --mmproj (it is in the model's \
             repository)"
                .into(),
        );
    };
    let name = if given.exists() {
        repository.replacen(REPOSITORY, "", 1).replacen("--", "/", 1)
    } else {
        given.display().to_string()
    };
    CliError::Usage(format!(
        "this model sees no pictures: it has no mmproj file; `metal-attention pull {name}` brings it if its repository has one, \
         otherwise the model reads text only (--mmproj names a file from elsewhere)"
    ))
}

/// The places to look for the model's `mmproj` file, the first one first: a folder, the model's name in it, and the GGUF files
/// in it. In the hub's cache the folder of the model's commit, then those of the repository's other commits; otherwise the model's
/// folder without those in it.
fn places(model: &Path) -> Vec<(PathBuf, String, Vec<String>)> {
    let text = |path: &Path| path.iter().map(|part| part.to_string_lossy()).collect::<Vec<_>>().join("/");
    if let Some(own) = snapshot(model) {
        let name = text(model.strip_prefix(own).unwrap_or(model));
        let mut others = folders_in(own.parent().unwrap_or(own));
        others.retain(|folder| folder != own);
        let all = [own.to_owned()].into_iter().chain(others);
        return all.map(|folder| (folder.clone(), name.clone(), files_below(&folder))).collect();
    }
    let folder = model.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    let Some(name) = model.file_name() else { return Vec::new() };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    files.retain(|file| is_gguf(file));
    vec![(folder.to_owned(), name.to_string_lossy().into_owned(), files)]
}

/// The folders in a folder, sorted.
fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut folders: Vec<_> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

/// The folder of the commit that the model belongs to, if it is in the hub's cache.
fn snapshot(model: &Path) -> Option<&Path> {
    let name =
        |folder: Option<&Path>| folder.and_then(Path::file_name).and_then(|name| name.to_str().map(str::to_owned));
    model.ancestors().skip(1).find(|folder| {
        name(folder.parent()).as_deref() == Some(SNAPSHOTS)
            && name(folder.ancestors().nth(2)).is_some_and(|name| name.starts_with(REPOSITORY))
    })
}

/// The metadata of a GGUF file; `None` if it cannot be read.
fn metadata(file: &Path) -> Option<Metadata> {
    map_gguf(file).ok().map(|file| file.metadata().clone())
}

/// The width of the rows that a text model reads.
fn text_width(metadata: &Metadata) -> Option<u32> {
    let architecture = metadata.str("general.architecture").ok()??;
    metadata.u32(&format!("{architecture}.embedding_length")).ok()?
}

/// The width of the rows that an `mmproj` file makes.
fn picture_width(metadata: &Metadata) -> Option<u32> {
    metadata.u32("clip.vision.projection_dim").ok()?
}

#[cfg(test)]
mod tests {
    use metal_attention::gguf::GgufWriter;

    use super::*;

    /// Writes a file without tensors, of a text model or an `mmproj` file of this width.
    fn write(file: &Path, width: u32) {
        let mut metadata = Metadata::new();
        let is_mmproj = is_mmproj(&file.file_name().unwrap().to_string_lossy());
        metadata.set("general.architecture", if is_mmproj { "clip" } else { "llama" });
        let key = if is_mmproj { "clip.vision.projection_dim" } else { "llama.embedding_length" };
        metadata.set(key, width);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, GgufWriter::new(Vec::new(), 3, &metadata, &[]).unwrap().finish().unwrap()).unwrap();
    }

    /// What is found for the first of `files`, a model.
    fn found(files: &[(&str, u32)]) -> Result<Option<String>, String> {
        let folder = tempfile::tempdir().unwrap();
        for (file, width) in files {
            write(&folder.path().join(file), *width);
        }
        let found = find_mmproj(&folder.path().join(files[0].0)).map_err(|error| error.to_string())?;
        Ok(found.map(|path| path.strip_prefix(folder.path()).unwrap().to_str().unwrap().to_owned()))
    }

    #[test]
    fn the_file_beside_the_model_is_found_by_its_name_and_its_width() {
        let one = |files: &[(&str, u32)]| found(files).unwrap();
        let gemma = ("gemma-3-4b-it-Q4_K_M.gguf", 2560);
        assert_eq!(one(&[gemma, ("mmproj-model-f16.gguf", 2560)]).as_deref(), Some("mmproj-model-f16.gguf"));
        assert_eq!(one(&[gemma, ("mmproj-model-f16.gguf", 960)]), None);
        assert_eq!(one(&[gemma, ("other-Q8_0.gguf", 2560)]), None);
        // The name is nearer to the model's, and the width another.
        let files = [gemma, ("mmproj-gemma-3-4b-it-f16.gguf", 960), ("mmproj-model-f16.gguf", 2560)];
        assert_eq!(one(&files).as_deref(), Some("mmproj-model-f16.gguf"));
        let files = [gemma, ("mmproj-F32.gguf", 2560), ("mmproj-BF16.gguf", 2560), ("mmproj-F16.gguf", 2560)];
        assert_eq!(one(&files).as_deref(), Some("mmproj-F16.gguf"));
        let smol = ("SmolVLM-500M-Instruct-Q8_0.gguf", 960);
        let files = [
            smol,
            ("mmproj-SmolVLM-500M-Instruct-Q8_0.gguf", 960),
            ("mmproj-SmolVLM-500M-Instruct-f16.gguf", 960),
            ("mmproj-SmolVLM2-500M-Video-Instruct-f16.gguf", 960),
        ];
        assert_eq!(one(&files).as_deref(), Some("mmproj-SmolVLM-500M-Instruct-f16.gguf"));
        // In a folder of its own it belongs to the models there.
        assert_eq!(one(&[gemma, ("mmproj/gemma-3-4b-it-f16.gguf", 2560)]), None);
        let error = found(&[gemma, ("mmproj-b-f16.gguf", 2560), ("mmproj-a-f16.gguf", 2560)]).unwrap_err();
        assert!(
            error.contains("--mmproj:\n  ") && error.contains("mmproj-a-f16") && error.contains("mmproj-b"),
            "{error}"
        );
    }

    #[test]
    fn in_the_cache_of_the_hub_the_whole_commit_is_searched_and_then_the_others() {
        let model = "hub/models--o--r/snapshots/1234/q4/m-Q4_0.gguf";
        let here = "hub/models--o--r/snapshots/1234/mmproj/m-f16.gguf";
        let elsewhere = "hub/models--o--r/snapshots/5678/mmproj-F16.gguf";
        assert_eq!(found(&[(model, 64), (here, 64), (elsewhere, 64)]).unwrap().as_deref(), Some(here));
        assert_eq!(found(&[(model, 64), (elsewhere, 64)]).unwrap().as_deref(), Some(elsewhere));
        assert_eq!(found(&[(model, 64)]).unwrap(), None);
        let error = |given: &str, model| no_mmproj(Path::new(given), model).to_string();
        assert!(error("o/r:Q4_0", Some(Path::new(model))).contains("`metal-attention pull o/r:Q4_0` brings it"));
        assert!(error(".", Some(Path::new(model))).contains("`metal-attention pull o/r` brings it"));
        assert!(error("m.gguf", Some(Path::new("m.gguf"))).contains("there is no mmproj file beside it"));
    }
}
