//! The names of models that may stand at the cursor.

use std::ffi::OsStr;

use clap_complete::engine::{ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter};
use metal_attention_hub::{CachedModel, is_mmproj, known_models};

use crate::find_model::{files_below, folders, is_gguf, without_part};
use crate::first_model::models_here;
use crate::units;

/// Names for `-m`: models on this machine, files, and well-known names.
pub fn usable() -> ArgValueCompleter {
    ArgValueCompleter::new(|start: &OsStr| {
        let Some(text) = start.to_str() else { return files(start) };
        let mut names = cached(text);
        names.extend(in_folders(text));
        names.extend(files(start));
        names.extend(known(text));
        names
    })
}

/// Names for `pull`: well-known ones, and the repositories of models in the cache.
pub fn downloadable() -> ArgValueCompleter {
    ArgValueCompleter::new(|start: &OsStr| {
        let text = start.to_str().unwrap_or_default();
        known(text).into_iter().chain(cached(text)).collect()
    })
}

/// Names for `rm`: models in the cache.
pub fn removable() -> ArgValueCompleter {
    ArgValueCompleter::new(|start: &OsStr| cached(start.to_str().unwrap_or_default()))
}

fn candidate(name: String, help: String) -> CompletionCandidate {
    CompletionCandidate::new(name).help(Some(help.into()))
}

/// The models in the cache of the hub whose names begin with `start`, which may have the prefix `hf:`.
fn cached(start: &str) -> Vec<CompletionCandidate> {
    let name = |model: &CachedModel| {
        let name = model.name.to_string();
        let plain = name.strip_prefix("hf:").filter(|plain| plain.starts_with(start)).map(str::to_owned);
        plain.or_else(|| (!start.is_empty() && name.starts_with(start)).then_some(name))
    };
    let help = |model: &CachedModel| format!("on this machine, {}", units::bytes(model.total_bytes()));
    models_here().iter().filter_map(|model| Some(candidate(name(model)?, help(model)))).collect()
}

/// The models in the folders of `METAL_ATTENTION_MODELS` whose names begin with `start`.
fn in_folders(start: &str) -> Vec<CompletionCandidate> {
    let names = folders().into_iter().flat_map(|folder| files_below(&folder));
    let names = names.filter_map(|file| {
        let stem = without_part(file.rsplit('/').next()?).to_owned();
        (stem.starts_with(start) && !is_mmproj(&stem)).then(|| candidate(stem, "on this machine".into()))
    });
    names.collect()
}

/// Files that end in `.gguf`, and folders.
fn files(start: &OsStr) -> Vec<CompletionCandidate> {
    PathCompleter::any().filter(|path| path.to_str().is_some_and(is_gguf)).complete(start)
}

/// The well-known names that begin with `start`. Those with a tag only where the name before the colon is typed: there are many.
fn known(start: &str) -> Vec<CompletionCandidate> {
    let mut names: Vec<(String, &str)> = Vec::new();
    for model in known_models() {
        for tag in &model.tags {
            let name = if tag == "default" { model.name.clone() } else { format!("{}:{tag}", model.name) };
            let is_typed = tag == "default" || start.starts_with(&model.name);
            if is_typed && name.starts_with(start) && !names.iter().any(|(known, _)| *known == name) {
                names.push((name, &model.repository));
            }
        }
    }
    names.sort_unstable();
    names.into_iter().map(|(name, repository)| candidate(name, repository.to_owned())).collect()
}
