//! `list`: lists the models in the cache of the Hugging Face hub.

use std::io::{self, Write};

use metal_attention_hub::{CachedModel, Environment, Hub, Unfinished};
use serde_json::json;

use crate::cli_error::CliError;
use crate::map_gguf::map_gguf;
use crate::metadata_text::{safe, safe_json};
use crate::model_summary::TensorCounts;
use crate::units;

const AFTER_HELP: &str = "\
The cache is shared with other programs; only GGUF files are listed. \"older\" marks files for which a later pull got a \
newer version, \"sees pictures\" models with an mmproj file, whose size is added to theirs. With --json stdout gets one object \
with the keys
  cache, models (list of name, repo, type, bytes, files, mmproj (its path, or null), commit, newest, complete), unfinished \
(list of repo, bytes)

Examples:
  metal-attention list
  metal-attention list --json";

/// List the models from the Hugging Face hub that are in the cache
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    /// Write one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let hub = Hub::new(Environment::read()?);
    let (models, unfinished) = (hub.models()?, hub.unfinished()?);
    let mut out = io::stdout().lock();
    let done = if args.json {
        write_json(&hub, &models, &unfinished, &mut out)
    } else {
        write_text(&hub, &models, &unfinished, &mut out)
    };
    done.and_then(|()| out.flush()).map_err(CliError::stdout)
}

/// Writes the JSON object of `--json`.
fn write_json(hub: &Hub, models: &[CachedModel], unfinished: &[Unfinished], out: &mut impl Write) -> io::Result<()> {
    let model = |model: &CachedModel| {
        json!({
            "name": model.name.to_string(),
            "repo": model.name.repo(),
            "type": type_of(model),
            "bytes": model.total_bytes(),
            "files": model.files,
            "mmproj": model.mmproj.as_ref().map(|mmproj| &mmproj.file),
            "commit": model.commit,
            "newest": model.is_newest,
            "complete": model.complete,
        })
    };
    let list = json!({
        "cache": hub.cache(),
        "models": models.iter().map(model).collect::<Vec<_>>(),
        "unfinished": unfinished.iter().map(|u| json!({"repo": u.repo, "bytes": u.bytes})).collect::<Vec<_>>(),
    });
    writeln!(out, "{}", safe_json(&list))
}

/// Writes the list as text.
fn write_text(hub: &Hub, models: &[CachedModel], unfinished: &[Unfinished], out: &mut impl Write) -> io::Result<()> {
    if models.is_empty() && unfinished.is_empty() {
        return writeln!(
            out,
            "no models in {}; metal-attention pull --help shows how to get some",
            safe(&hub.cache().display().to_string())
        );
    }
    let width = models.iter().map(|model| safe(&model.name.to_string()).len()).max().unwrap_or(0);
    for model in models {
        let (name, size) = (safe(&model.name.to_string()), units::bytes(model.total_bytes()));
        let file = safe(&model.files[0].display().to_string());
        let ty = type_of(model).map_or("-".into(), |ty| safe(&ty));
        let mut notes = Vec::new();
        notes.extend((model.files.len() > 1).then(|| format!("{} files", model.files.len())));
        notes.extend(model.mmproj.is_some().then(|| "sees pictures".into()));
        notes.extend((!model.complete).then(|| "parts are missing".into()));
        notes.extend((!model.is_newest).then(|| "older".into()));
        let notes = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join(", ")) };
        writeln!(out, "{name:<width$}  {ty:<7} {size:>10}{notes}\n  {file}")?;
    }
    for Unfinished { repo, bytes } in unfinished {
        writeln!(out, "hf:{repo}: {} of a download that has not come to its end", units::bytes(*bytes))?;
    }
    Ok(())
}

/// The type in the file's name, else the type of most of its tensors' bytes. `None`: not known.
fn type_of(model: &CachedModel) -> Option<String> {
    model.quant.clone().or_else(|| {
        // A file that cannot be opened is listed nevertheless, so that it can be removed.
        let file = map_gguf(&model.files[0]).ok()?;
        let types = TensorCounts::of(&file).types;
        types.into_iter().max_by_key(|ty| ty.bytes).map(|ty| ty.ty.to_owned())
    })
}
